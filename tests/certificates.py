"""Certificates of the demo model and the tiny ones: `python -m tests.certificates` writes those that are shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.audit.run import Model, started, write_picture
from trainer.system.terminal import say
from trainer.train.loop import Trainer
from trainer.view.certificate import FILE, PICTURE, PROMPTS, RECORDED, Certificate, read


@dataclass(frozen=True)
class Base:
    """A model to examine. path: `model.path`. edits: whether its prompts have a reference."""

    family: str
    architecture: str | None = None
    path: str = "tiny"
    edits: bool = False
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.family, self.architecture, self.path, self.edits and "edits")))


DEMO = {"objective": {"shift": "none"}}
BASES = (
    Base("flux2", path="demo", sections=DEMO),
    Base("chroma"),
    Base("auto"),
    Base("ernie_image"),
    Base("flux1", "dev"),
    Base("flux1", "kontext", edits=True),
    Base("flux2", "klein-4b"),
    Base("flux2", "klein-4b", edits=True),
    Base("flux3"),
    Base("ideogram4"),
    Base("krea2"),
    Base("qwen_image"),
    Base("qwen_image", "qwen-image-edit-2511", edits=True),
    Base("qwen_image_21"),
    Base("qwen_image_21", edits=True),
    Base("sd3", "sd35-medium"),
    Base("sdxl"),
    Base("z_image", "z-image"),
)
SIZE = (64, 64)
STEPS = 6


@contextmanager
def examined(base: Base, root: Path, **sections: Mapping[str, Any]) -> Iterator[tuple[Trainer, Certificate]]:
    """A trainer that has examined its base and trained nothing, and the certificate."""
    with ready(base, root, **sections) as trainer:
        trainer._is_certified_only = True
        trainer.train()
        yield trainer, read(trainer.run.path / FILE)


@contextmanager
def ready(base: Base, root: Path, **sections: Mapping[str, Any]) -> Iterator[Trainer]:
    """A trainer before its first step. sections: of the config, besides; `path.is` is another `model.path`."""
    for number, colour in enumerate(("blue", "green")):
        write_picture(root / "data" / f"{number}.png", SIZE, f"a {colour} square", seed=number)
        write_picture(root / "before" / f"{number}.png", SIZE, "", seed=10 + number)
    edits = {"references": str(root / "before")} if base.edits else {}
    shown = {"references": [str(PICTURE)] * len(PROMPTS)} if base.edits else {}
    given = {
        "data": {"path": str(root / "data"), "resolution": SIZE[0], **edits},
        "sample": {"prompts": PROMPTS, "size": SIZE, "seed": 0, "steps": STEPS, "every": 1, **shown},
        "parallel": {"device": "cpu", "strategy": "none"},
        **base.sections,
    }
    for name, changes in sections.items():
        given[name] = {**given.get(name, {}), **changes}
    model = Model(base.name, base.family, base.architecture, given.get("objective", {}))
    path = given.pop("path", {}).get("is", base.path)
    options = {"architecture": base.architecture if path == base.path else None}
    given["model"] = {"family": base.family, "path": path, "options": options, **given.get("model", {})}
    with started(model, Path(path), root, given) as trainer:
        yield trainer


def main() -> None:
    """Write the certificates of BASES, without what differs from machine to machine."""
    found = []
    for base in BASES:
        with TemporaryDirectory() as folder, examined(base, Path(folder)) as (_, certificate):
            found.append(asdict(replace(certificate, findings=(), seconds=0.0, versions={})))
        say(base.name)
    RECORDED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
