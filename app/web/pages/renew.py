"""Periodic updates of a page. Each browser is sent only what it does not show yet, even when a response was lost."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.web.pages.parts import QUIET

SKIP = gr.skip()


@dataclass(frozen=True)
class Lazy:
    """Content of an output that is computed only for a browser that does not show it yet.

    Attributes:
        key: Changes whenever the content changes.
        make: Computes the content.
    """

    key: Any
    make: Callable[[], Any]


@dataclass(frozen=True)
class Tick:
    """A periodic update of some outputs.

    Attributes:
        handle: Computes the contents of the outputs from the values of the inputs; a content may be `Lazy`, and SKIP
            leaves an output unchanged.
        events: Events that trigger the update in addition to the timer.
    """

    handle: Callable[..., Sequence[Any]]
    inputs: list[Any]
    outputs: list[Any]
    events: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Sent:
    """The state of one browser.

    Attributes:
        token: Token of the last response.
        keys: One per output: the key of the content that was sent last.
    """

    token: str = ""
    keys: tuple[int, ...] = ()


def keep_renewing(seconds: float, ticks: Sequence[Tick], events: Sequence[Any]) -> None:
    """Update pages periodically and on events, inside a `gr.Blocks`. One request updates all, because each is costly.

    A request names the response that the browser shows. When that is not the last one, because responses overtook each
    other or the page was rebuilt, everything is sent again.
    """
    sent, shown = gr.State(Sent()), gr.Textbox(visible=False)
    inputs = [component for tick in ticks for component in tick.inputs]
    outputs = [component for tick in ticks for component in tick.outputs]

    def handle(before: Sent, token: str, *values: Any) -> list[Any]:
        now, response = renewed(before, token, _contents(ticks, values))
        return [now, now.token, *response] if now != before else [SKIP] * (2 + len(response))

    triggers = [gr.Timer(seconds).tick, *events, *(event for tick in ticks for event in tick.events)]
    gr.on(triggers, handle, [sent, shown, *inputs], [sent, shown, *outputs], trigger_mode="always_last", **QUIET)


def renewed(before: Sent, token: str, results: Sequence[Any]) -> tuple[Sent, list[Any]]:
    """Return what a browser is sent that shows the response with this token: contents it already shows are skipped."""
    nothing: Sequence[int | None] = [None] * len(results)
    known = before.keys if token == before.token and before.keys else nothing
    keys = [old if result == SKIP else _key(result) for old, result in zip(known, results, strict=True)]
    if list(known) == keys:
        return before, [SKIP] * len(results)
    response = [SKIP if new == old else _value(result) for new, old, result in zip(keys, known, results, strict=True)]
    return Sent(secrets.token_hex(8), tuple(key or 0 for key in keys)), response


def choices(names: Iterable[str], chosen: Any, default: Any) -> dict[str, Any]:
    """Return the update of a dropdown's names. A choice that no longer exists is replaced by the default."""
    existing = list(names)
    exists = set(chosen) <= set(existing) if isinstance(chosen, list) else chosen in existing
    update: dict[str, Any] = gr.update(choices=existing) if exists else gr.update(choices=existing, value=default)
    return update


def _contents(ticks: Sequence[Tick], values: Sequence[Any]) -> list[Any]:
    results: list[Any] = []
    for tick in ticks:
        own, values = values[: len(tick.inputs)], values[len(tick.inputs) :]
        results += tick.handle(*own)
    return results


def _key(result: Any) -> int:
    return hash(repr(result.key if isinstance(result, Lazy) else result))


def _value(result: Any) -> Any:
    return result.make() if isinstance(result, Lazy) else result
