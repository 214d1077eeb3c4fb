"""Prompts for the samples to come, requested while a run trains. Imports no torch.

A request is a file in the run's `requests/`, which rank 0 reads when it next generates samples. It becomes a
PromptsEvent; the run's config stays as it is. See DECISIONS 147.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pydantic import TypeAdapter

from trainer.config.schema import RunConfig
from trainer.config.sections import half_character
from trainer.run import stages
from trainer.run.events import AnyEvent, PromptsEvent
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

MOST_PROMPTS = 100
MOST_CHARACTERS = 10_000
"""Longest prompt. The longest text that an encoder reads has 4096 tokens."""
REQUEST = "prompts.json"
_PROMPTS: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


def request_prompts(run: RunDir, prompts: Sequence[str]) -> None:
    """Have the running trainer generate its next samples from other prompts. A later request replaces an earlier one.

    Args:
        run: The run.
        prompts: The prompts; [trigger] is replaced as in `sample.prompts`.

    Raises:
        InputError: The list is empty, a prompt is empty, or the run cannot sample from them; nothing is requested.
        OSError: The request cannot be written.
    """
    check_prompts(stages.current(run, run.config()).config, prompts)
    with files.locked(run.requests / f".{REQUEST}.lock"):
        files.replace(run.requests / REQUEST, json.dumps(list(prompts), ensure_ascii=False))


def requested_prompts(run: RunDir) -> tuple[str, ...] | None:
    """Read the requested prompts; None if none were requested since the last ones were taken.

    Raises:
        InputError: The request is damaged.
    """
    file = run.requests / REQUEST
    try:
        return files.read_json(file, _PROMPTS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise files.unreadable(file, error) from error


def clear_prompts(run: RunDir, prompts: Sequence[str] | None) -> None:
    """Remove a request that was handled, unless it was replaced since. prompts: the request; None for a damaged one."""
    with files.locked(run.requests / f".{REQUEST}.lock"):
        try:
            now = requested_prompts(run)
        except InputError:
            now = None
        if now == prompts:
            (run.requests / REQUEST).unlink(missing_ok=True)


def check_prompts(cfg: RunConfig, prompts: Sequence[str]) -> RunConfig:
    """Return the config with these prompts. Raises InputError if this run cannot sample from them."""
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise InputError(f"prompts: {len(prompts)}; give 1 to {MOST_PROMPTS}")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, f"prompt {number}")
    return cfg.with_prompts(prompts)


def check_prompt(prompt: str, name: str) -> None:
    """Raise InputError for a text from which nothing can be sampled. name: what the message calls it."""
    if not prompt.strip():
        raise InputError(f"{name}: empty; write what the sample should show")
    if len(prompt) > MOST_CHARACTERS:
        raise InputError(f"{name}: {len(prompt):,} characters; shorten it to {MOST_CHARACTERS:,}")
    if problem := half_character(prompt):
        raise InputError(f"{name}: {problem}")


def prompts_in_force(events: Iterable[AnyEvent], cfg: RunConfig) -> tuple[str, ...]:
    """Return the prompts that samples are generated from: those requested last, else the config's own.

    Args:
        events: The events of the run, oldest first.
        cfg: The run's config. If its prompts were changed since the request, they are the later wish.
    """
    changes = [event for event in events if isinstance(event, PromptsEvent)]
    if changes and changes[-1].instead_of == cfg.sample.prompts:
        return changes[-1].prompts
    return cfg.sample.prompts
