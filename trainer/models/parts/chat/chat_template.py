"""Chat templates: those of ours and those in files, and whether they can be used.

Imports neither torch nor transformers: templates are checked before these are loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from trainer.config.sections import TEMPLATE_SUFFIX
from trainer.models.parts.chat.chat_sandbox import OverBudgetError, Sandbox
from trainer.system import files
from trainer.system.errors import InputError, not_one_of

TEMPLATES = Path(__file__).parents[2] / "chat_templates"
"""Templates of our own, which `data.chat_template` names."""
MARKER = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
END_MARKER = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
"""The marks in a template around what the assistant writes."""
LINK = (
    "a link to a file elsewhere or of another kind, which would be copied into what is exported; put the template in "
    "its place"
)
MOST_TEMPLATE, MOST_TOKENIZER = files.MIB, 128 * files.MIB
"""Limits in bytes. The longest published ones have 20 kB and 33 MB."""
OWN_MARK = re.compile(r"<\|?\w+\|?>")
"""A token in the source of a template of our own."""


def template_names() -> tuple[str, ...]:
    """The names of our own templates, as `chatml`."""
    return tuple(sorted(file.stem for file in TEMPLATES.glob(f"*{TEMPLATE_SUFFIX}")))


def read_template(named: str) -> str:
    """Read a chat template. named: one of `template_names`, or a .jinja file.

    Raises:
        InputError: The template is not one of ours; or the file is missing, too long or a link elsewhere.
    """
    file = Path(named).expanduser() if named.endswith(TEMPLATE_SUFFIX) else TEMPLATES / f"{named}{TEMPLATE_SUFFIX}"
    is_ours = named in template_names()
    if not is_ours and not named.endswith(TEMPLATE_SUFFIX):
        raise InputError(f"data.chat_template: {not_one_of(named, (*template_names(), f'a {TEMPLATE_SUFFIX} file'))}")
    # Some installers link our own files.
    if not is_ours and (files.leads_out(file, file.parent) or not _is_template(file.resolve())):
        raise InputError(f"data.chat_template: {file}: {LINK}")
    try:
        return files.read(file, MOST_TEMPLATE).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except InputError as error:
        raise InputError(f"data.chat_template: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.chat_template: {file} cannot be read ({error}); name another {TEMPLATE_SUFFIX} file"
        ) from error


def _is_template(target: Path) -> bool:
    """Whether a link may lead to this file. The folder may be the user's home, if a preset was unpacked there."""
    return target.name.endswith(TEMPLATE_SUFFIX) or target.parent.name == "blobs"  # as the Hugging Face cache links


def without_marks(template: str) -> str:
    """The same template without the marks of the assistant's turns, for programs that do not know them."""
    # Comments remove the same blanks around them.
    return END_MARKER.sub(r"{#\1 \2#}", MARKER.sub(r"{#\1 \2#}", template))


def check_template(named: str) -> None:
    """Check that a chat template can be read and is jinja. named: as for `read_template`.

    Raises:
        InputError: It cannot be used.
    """
    check_jinja(named, read_template(named))


def check_jinja(named: str, template: str) -> None:
    """Check that the source of a template is jinja. named: its name in errors. Raises InputError if it is not."""
    try:
        Sandbox(template)
    except (TemplateSyntaxError, OverBudgetError) as error:
        wrong = f"line {error.lineno}: {error.message}" if isinstance(error, TemplateSyntaxError) else error
        raise InputError(
            f"data.chat_template: {named} is not a jinja template ({wrong}); correct it, or name one of "
            f"{', '.join(template_names())}"
        ) from error


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None, **variables: Any
) -> str:
    """Render messages as the tokenizer's `apply_chat_template` does, but within a budget.

    Args:
        tokenizer: One of transformers.
        messages: As in transformers.
        template: None for the tokenizer's own.
        variables: Those of the template, as `add_generation_prompt`.

    Raises:
        InputError: There is no template, or it refuses the messages or takes too long.
    """
    given = {**tokenizer.special_tokens_map, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        sandbox = _compiled(template or tokenizer.get_chat_template())
        return sandbox.render({**given, **variables, "messages": list(messages)}, len(str(messages)))[0]
    except Exception as error:  # a template is a program, which may raise anything
        raise InputError(
            f"{tokenizer.name_or_path}: its chat template cannot be used ({error}); download the model again"
        ) from error


@lru_cache(maxsize=4)
def _compiled(template: str) -> Sandbox:
    return Sandbox(template)


def check_marks(named: str, tokens: Container[str]) -> None:
    """Check that the marks of a template of our own are tokens of a model: else no program sees where an answer ends.

    Args:
        named: As for `read_template`; others than ours are not checked.
        tokens: The tokens of the model, with those that are added to it.

    Raises:
        InputError: Some are not.
    """
    if not (missing := _missing(named, tokens)):
        return
    fitting = " or ".join(name for name in template_names() if not _missing(name, tokens))
    raise InputError(
        f"data.chat_template: {named} writes {', '.join(missing)}, which this model has not as tokens, so that other "
        f"programs would not see where an answer ends; name {fitting}, or set model.options.new_tokens: "
        f"{json.dumps(missing)}, whose rows are trained with adapter.type: none or with adapter.modules_to_save"
    )


def _missing(named: str, tokens: Container[str]) -> list[str]:
    """The marks of a template of our own that are not tokens, in the order of their names."""
    marks = set(OWN_MARK.findall(read_template(named))) if named in template_names() else ()
    return sorted(mark for mark in marks if mark not in tokens)


def stored_tokens(folder: Path) -> frozenset[str] | None:
    """The tokens in the tokenizer.json of a model's folder; None where there is none that can be read.

    Raises:
        InputError: It is not a regular file, too long or nested too deep.
    """
    file = folder / "tokenizer.json"
    try:
        stored = json.loads(files.read(file, MOST_TOKENIZER))
        vocabulary, added = stored["model"]["vocab"], [token["content"] for token in stored["added_tokens"]]
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"{file}: nested too deep for a tokenizer; download the model again") from error
    except (OSError, ValueError, LookupError, TypeError):  # the ranks say so
        return None
    return frozenset([*(vocabulary if isinstance(vocabulary, dict) else (one[0] for one in vocabulary)), *added])
