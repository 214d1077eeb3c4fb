"""The templates of the page's server."""

from __future__ import annotations

from pathlib import Path

from trainer.view.render import Templates

TEMPLATES = Templates(Path(__file__).with_name("templates"))
