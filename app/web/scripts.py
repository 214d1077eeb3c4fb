"""Scripts of the page, which browsers load as modules, one file each, and its style sheet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from app.web.panels import PANELS
from trainer.view.render import Templates

FOLDER = Path(__file__).with_name("assets")
TEMPLATES = Templates(Path(__file__).with_name("templates"))
NAMES = tuple(name for names in PANELS.values() for name in names)
STYLES = ("page", *(name for name in NAMES if (FOLDER / f"{name}.css").is_file()))
TOO_OLD = "ShardStudio needs a browser that runs module scripts, such as a current Firefox, Chrome, Edge or Safari."
CACHED = {"cache-control": "private, max-age=31536000, immutable"}


def add(app: FastAPI) -> None:
    """Add the address of the scripts. It has their digest, so that browsers keep them and never mix versions."""

    @app.get(f"{folder()}/{{name}}")
    async def script(name: str) -> Response:
        content = contents().get(name)
        if content is None:
            return PlainTextResponse(f"{name!r} is not a script of this page\n", 404)
        return Response(content, media_type="text/javascript", headers=CACHED)


def page_end(facts: Mapping[str, Any]) -> str:
    """Return the markup at the end of the page: the scripts, in the order of the rail, and what they are told once."""
    own = [f"{name}.js" for name in NAMES]
    # Those that only others import are listed too: the browser asks for all at once and not import by import.
    addresses = [f"{folder()}/{name}" for name in (*own, *sorted(contents().keys() - own))]
    return TEMPLATES.page("scripts.html", addresses=addresses, facts=json.dumps(facts), too_old=TOO_OLD)


def style() -> str:
    """Return all style sheets as one."""
    return "\n".join((FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)


@cache
def contents() -> dict[str, bytes]:
    """Read the scripts: {file name: content}."""
    return {file.name: file.read_bytes() for file in sorted(FOLDER.glob("*.js"))}


@cache
def folder() -> str:
    """Return the address below which the scripts are, another one for other scripts."""
    return f"/scripts/{hashlib.sha256(repr(contents()).encode()).hexdigest()[:16]}"
