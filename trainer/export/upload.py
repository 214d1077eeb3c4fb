"""Uploads an exported run to the Hugging Face hub: `python -m trainer.export.upload RUN --repo OWNER/NAME --yes`.

A process of its own, as an upload takes long. Exported files, the model card, the film and the newest samples go into
one commit. A token or a path of this machine in a text ends the upload before anything is sent.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.sections import HUB_ID
from trainer.export.card import PROJECT, base_of, model_card, published
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.amounts import file_size
from trainer.system.errors import InputError
from trainer.system.terminal import say

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

BASE_KEYS = ("base_model_name_or_path", "_name_or_path")
"""Fields with the base model in configs of peft and transformers."""
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
"""A token of the Hugging Face hub."""
TEXTS = (".json", ".txt", ".md", ".jinja")
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
            raise InputError(f"{prepare(run, wanted).question}\nadd --yes to upload this")
        say(upload(run, wanted))
    except InputError as error:
        say(error)
        return 2
    return 0


@dataclass(frozen=True)
class Prepared:
    """What an upload consists of.

    Attributes:
        files: {path in the repository: a file of the run, or the content}.
        card: The model card, which is README.md.
        question: What is uploaded and who will see it, in words.
    """

    files: Mapping[str, Path | bytes]
    card: str
    question: str


def prepare(run: RunDir, wanted: Upload) -> Prepared:
    """Collect what is uploaded: the newest exports, the model card, the film and the newest samples.

    Raises:
        InputError: As `published`; or a text holds a token or a path of this machine.
    """
    found = {name: without_local_path(file, run) for name, file in published(run).files(run).items()}
    card = model_card(run, wanted.repo, wanted.licence)
    _refuse_private("README.md", card, run)
    sizes = {"README.md": len(card.encode())}
    for name, content in found.items():
        sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
        if name.endswith(TEXTS) and sizes[name] <= files.MOST_BYTES:
            text = content if isinstance(content, bytes) else files.read(content)
            _refuse_private(name, text.decode("utf-8", "replace"), run)
    who = "only you can see" if wanted.is_private else "everyone can see"
    lines = [f"{len(sizes)} files ({sum(sizes.values()) / 1e6:,.1f} MB) to {wanted.repo}, which {who}:"]
    lines += [f"  {name}  {file_size(size)}" for name, size in sizes.items()]
    return Prepared(found, card, "\n".join(lines))


def _refuse_private(name: str, text: str, run: RunDir) -> None:
    """Raise InputError for a text with a token of the hub, or with the path of the run or of the user's home."""
    from huggingface_hub import get_token

    token = get_token()
    if TOKEN.search(text) or (token and token in text):
        raise InputError(f"{name}: holds a token of the hub; take it out of the prompt or file that it came from")
    homes = [str(path) for path in (run.path.parent, Path.home()) if len(path.parts) > 1]
    if home := next((home for home in homes if f"{home}/" in text), None):
        raise InputError(f"{name}: holds a path of this machine ({home}); take it out, and nothing was uploaded")


def upload(run: RunDir, wanted: Upload) -> str:
    """Upload what `prepare` collects in one commit. Returns the address.

    Raises:
        InputError: As `prepare`, there is no login or no permission, the hub cannot be reached, or the repository
            exists and has files.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    prepared = prepare(run, wanted)
    operations = [CommitOperationAdd(name, content) for name, content in prepared.files.items()]
    operations.append(CommitOperationAdd("README.md", prepared.card.encode()))
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
