"""What a page renews by the clock: a browser is sent what it lacks and nothing else, whatever becomes of an answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.web.pages.parts import QUIET

SKIP = gr.skip()


@dataclass(frozen=True)
class Made:
    """What an output shows, made only for who lacks it. of: what it is made of, and differs when that does."""

    of: Any
    make: Callable[[], Any]


@dataclass(frozen=True)
class Tick:
    """What a page renews. handle: from the values of the inputs to what the outputs show, each as it is or `Made`.

    What a handler skips stays as it was. events: ask for it besides the clock.
    """

    handle: Callable[..., Sequence[Any]]
    inputs: list[Any]
    outputs: list[Any]
    events: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Sent:
    """What one browser was sent. token: of the last answer.  keys: one per output, of what it was told to show."""

    token: str = ""
    keys: tuple[int, ...] = ()


def keep_renewing(seconds: float, ticks: Sequence[Tick], events: Sequence[Any]) -> None:
    """Renew pages every so many seconds and at events, inside a `gr.Blocks`. One request for all: each costs.

    A browser names the answer it shows. Where that is not the last one, because answers overtook each other or the page
    was built anew, everything is sent again.
    """
    sent, shown = gr.State(Sent()), gr.Textbox(visible=False)
    inputs = [component for tick in ticks for component in tick.inputs]
    outputs = [component for tick in ticks for component in tick.outputs]

    def handle(before: Sent, token: str, *values: Any) -> list[Any]:
        now, answer = renewed(before, token, _asked(ticks, values))
        return [now, now.token, *answer] if now != before else [SKIP] * (2 + len(answer))

    triggers = [gr.Timer(seconds).tick, *events, *(event for tick in ticks for event in tick.events)]
    gr.on(triggers, handle, [sent, shown, *inputs], [sent, shown, *outputs], trigger_mode="always_last", **QUIET)


def renewed(before: Sent, token: str, results: Sequence[Any]) -> tuple[Sent, list[Any]]:
    """What a browser that shows the answer with this token is sent now, with those skipped that it has already."""
    nothing: Sequence[int | None] = [None] * len(results)
    known = before.keys if token == before.token and before.keys else nothing
    keys = [old if result == SKIP else _key(result) for old, result in zip(known, results, strict=True)]
    if list(known) == keys:
        return before, [SKIP] * len(results)
    answer = [SKIP if new == old else _value(result) for new, old, result in zip(keys, known, results, strict=True)]
    return Sent(secrets.token_hex(8), tuple(key or 0 for key in keys)), answer


def choices(names: Iterable[str], chosen: Any, default: Any) -> dict[str, Any]:
    """A dropdown's names. What is chosen stays; the default takes the place of what is no longer there."""
    there = list(names)
    is_there = set(chosen) <= set(there) if isinstance(chosen, list) else chosen in there
    update: dict[str, Any] = gr.update(choices=there) if is_there else gr.update(choices=there, value=default)
    return update


def _asked(ticks: Sequence[Tick], values: Sequence[Any]) -> list[Any]:
    results: list[Any] = []
    for tick in ticks:
        own, values = values[: len(tick.inputs)], values[len(tick.inputs) :]
        results += tick.handle(*own)
    return results


def _key(result: Any) -> int:
    return hash(repr(result.of if isinstance(result, Made) else result))


def _value(result: Any) -> Any:
    return result.make() if isinstance(result, Made) else result
