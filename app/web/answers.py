"""Functions that the page's scripts call by `POST /calls/NAME`, and how their answers and refusals travel.

A script sends one object; its members become the keyword arguments of a function, checked against the function's types.
The answer is `{"value": ...}`, or `{"error": sentence}` for what was refused. `security.Guard` lets no stranger call,
and no large body in. See DECISIONS 151.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from pydantic import ValidationError, validate_call
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from app.runs.monitor import explained
from trainer.config.sections import half_character
from trainer.system.errors import InputError

Calls = Mapping[str, Callable[..., Any]]
"""{name: function}; a function returns what JSON can hold."""
LONG_NUMBER = re.compile(r"\d{19}")
"""Digits that may be more than the 64 bits of an integer that can be sent."""
MOST_DEPTH = 30
"""Levels of nesting of what a script sends: a config has up to 20."""


def add(app: FastAPI, calls: Iterable[Calls]) -> None:
    """Add the address of the functions to the app."""
    functions = answering(calls)

    @app.post("/calls/{name}")
    async def call(name: str, request: Request) -> Response:
        if name not in functions:
            return PlainTextResponse(f"{name!r} is not a function of this page\n", 404)
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError):
            return PlainTextResponse("the body is not JSON\n", 400)
        except ClientDisconnect:
            return Response(status_code=400)  # the browser is gone
        answer = await run_in_threadpool(functions[name], values)
        # orjson sends NaN as null; the standard library would send what no browser reads.
        return Response(orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


def answering(calls: Iterable[Calls]) -> dict[str, Callable[[Any], dict[str, Any]]]:
    """Return the functions as {name: values -> answer}."""
    return {name: _answering(name, function) for group in calls for name, function in group.items()}


def _answering(name: str, function: Callable[..., Any]) -> Callable[[Any], dict[str, Any]]:
    checked = validate_call(function)

    def answer(values: Any) -> dict[str, Any]:
        try:
            _require_plain(values)
            if not isinstance(values, dict):
                raise InputError(f"{name}: the arguments are not an object; reload the page")
            return {"value": _sendable(checked(**values))}
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            return {"error": f"{name}: {place}: {first['msg']}; reload the page"}
        except (InputError, OSError) as error:
            return {"error": _sendable(explained(error))}
        except Exception as error:  # noqa: BLE001 - a fault of this program: shown on the page and in the terminal
            traceback.print_exc()
            return {"error": f"{name}: {type(error).__name__}, a fault of ShardStudio; its terminal says where"}

    return answer


def _require_plain(value: Any, depth: int = 0) -> None:
    """Raise InputError for what no form sends and no file can hold: deep nesting, and half of a character."""
    if depth > MOST_DEPTH:
        raise InputError(f"nested deeper than {MOST_DEPTH} levels; reload the page")
    if isinstance(value, str) and (wrong := half_character(value)):
        raise InputError(f"the text {wrong}")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for inner in value:
            _require_plain(inner, depth + 1)


def _sendable(value: Any) -> Any:
    """Return an answer as a browser's JSON can hold it: bytes of a file's name that are not UTF-8 become U+FFFD, and
    numbers of more than 64 bits text.

    Without this, one such name or number in a folder would leave the whole screen without an answer.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return _replaced(value)
    return _replaced(value) if LONG_NUMBER.search(text) else value


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return "".join("\ufffd" if half_character(letter) else letter for letter in value)
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value)
    if isinstance(value, dict):
        return {_replaced(key): _replaced(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner) for inner in value]
    return value
