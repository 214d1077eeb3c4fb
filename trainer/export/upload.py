"""Uploads an exported run to the Hugging Face hub: `python -m trainer.export.upload RUN --repo OWNER/NAME --yes`.

A process of its own, as an upload takes long. Exported files, the model card and the newest samples go into one commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.sections import HUB_ID
from trainer.export.card import PROJECT, base_of, model_card, published
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.system.terminal import say

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

BASE_KEYS = ("base_model_name_or_path", "_name_or_path")
"""Fields with the base model in configs of peft and transformers."""
LOGIN = "log in with `hf auth login`, with a token that may write, or set HF_TOKEN"


@dataclass(frozen=True)
class Upload:
    """Where a run goes on the hub.

    Attributes:
        repo: OWNER/NAME.
        is_private: Whether only its owner sees the repository.
        overwrites: Whether files of an existing repository may be replaced. Others stay.
        licence: As `model_card` has it.
    """

    repo: str
    is_private: bool = False
    overwrites: bool = False
    licence: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        if not HUB_ID.fullmatch(self.repo):
            raise InputError(f"repo: '{self.repo}' is not a name on the hub; write OWNER/NAME")
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise InputError(f"repo: '{self.repo}' is not a name on the hub. {_line(error)}") from error

    def arguments(self) -> list[str]:
        """It as options of `python -m trainer.export.upload`."""
        flags = [("--private", self.is_private), ("--overwrite", self.overwrites)]
        licence = [f"--licence={self.licence}"] if self.licence else []
        return [f"--repo={self.repo}", *(name for name, is_set in flags if is_set), *licence]


def main() -> int:
    """Exit code 0: uploaded, the last line of the output is the address; 2: the user's mistake, which is the output."""
    arguments = _parser().parse_args()
    try:
        run = RunDir.open(arguments.run_dir)
        wanted = Upload(arguments.repo, arguments.private, arguments.overwrite, arguments.licence)
        if not arguments.yes:
            raise InputError(f"{describe(run, wanted)}\nadd --yes to upload this")
        say(upload(run, wanted))
    except InputError as error:
        say(error)
        return 2
    return 0


def describe(run: RunDir, wanted: Upload) -> str:
    """Return what would be uploaded and who will see it, for the question before it.

    Raises:
        InputError: As `published`.
    """
    found = published(run).files(run)
    size = sum(file.stat().st_size for file in found.values())
    who = "only you can see" if wanted.is_private else "everyone can see"
    names = "\n".join(f"  {name}" for name in ("README.md", *found))
    return f"{len(found) + 1} files ({size / 1e6:,.1f} MB) to {wanted.repo}, which {who}:\n{names}"


def upload(run: RunDir, wanted: Upload) -> str:
    """Upload the newest exports, the model card and the newest samples in one commit. Returns the address.

    Raises:
        InputError: Nothing was exported, there is no login or no permission, the hub cannot be reached, or the
            repository exists and has files.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    card, found = model_card(run, wanted.repo, wanted.licence), published(run).files(run)
    operations = [CommitOperationAdd(name, without_local_path(file, run)) for name, file in found.items()]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi()
    with _explained(wanted.repo, api.endpoint):
        _require_login(api)
        _make_repository(api, wanted)
        api.create_commit(wanted.repo, operations, commit_message=f"Upload from {PROJECT}")
    return f"{api.endpoint}/{wanted.repo}"


def without_local_path(file: Path, run: RunDir) -> Path | bytes:
    """Return a file to upload; of a config that names the base model by a local path, its content with the hub id."""
    if file.suffix != ".json":
        return file
    content = json.loads(file.read_bytes())
    local = [key for key in BASE_KEYS if isinstance(content, dict) and str(content.get(key, "")).startswith("/")]
    if not local:
        return file
    base = base_of(run, published(run)) or ""
    return json.dumps(content | dict.fromkeys(local, base), indent=2, ensure_ascii=False).encode()


def _require_login(api: HfApi) -> None:
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise InputError(f"the hub does not know who you are: {LOGIN}")
    try:
        api.whoami()
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise InputError(f"the hub refuses your token: {LOGIN}") from error
        raise


def _make_repository(api: HfApi, wanted: Upload) -> None:
    """Make the repository, or check that an existing one may be used."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(wanted.repo)
    except RepositoryNotFoundError:
        api.create_repo(wanted.repo, private=wanted.is_private)
        return
    if wanted.is_private and not info.private:
        raise InputError(f"{wanted.repo}: exists and is public; make it private on the hub, or choose another name")
    held = [one.rfilename for one in info.siblings or () if one.rfilename != ".gitattributes"]
    if held and not wanted.overwrites:
        raise InputError(
            f"{wanted.repo}: exists and has {len(held)} files, first {held[0]}; choose another name, or allow to "
            "overwrite (--overwrite)"
        )


@contextmanager
def _explained(repo: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the hub and the network into sentences."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise InputError("the hub is not used, because HF_HUB_OFFLINE is set; remove it to upload") from error
    except HfHubHTTPError as error:
        raise InputError(_refusal(repo, error)) from error
    except (HTTPError, OSError) as error:
        raise InputError(f"{endpoint} cannot be reached ({_line(error)}); try again") from error
    except InputError:
        raise
    except ValueError as error:  # huggingface_hub's, for what the hub does not accept in the card
        raise InputError(f"{repo}: the hub refuses the model card ({_line(error)})") from error
    except RuntimeError as error:  # huggingface_hub's, around the error of one large file
        raise InputError(f"{repo}: {_line(error)} ({_line(error.__cause__ or error)}); try again") from error


def _refusal(repo: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403, 404):
        words = f" ({_line(error.server_message)})" if status == 403 and error.server_message else ""
        return f"{repo}: you may not write there{words}; choose your own name as OWNER, or {LOGIN}"
    return f"{repo}: the hub answered {status} ({error.server_message or _line(error)}); try again"


def _line(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.export.upload", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--repo", required=True, help="OWNER/NAME on the hub")
    parser.add_argument("--private", action="store_true", help="make a repository that only its owner sees")
    parser.add_argument("--overwrite", action="store_true", help="replace files of a repository that is not empty")
    parser.add_argument("--licence", help="licence as the hub names it, for example apache-2.0; else the base model's")
    parser.add_argument("--yes", action="store_true", help="upload; without it, only say what would be uploaded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
