"""Writes config/families.json: facts of the families, read without importing them (`python -m trainer.models`).

With `--write-family`, also the file of a family that was concluded, for `launch.py --certify`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from trainer.config.families import FACTS, FamilyFacts
from trainer.config.schema import RunConfig
from trainer.models import families
from trainer.models.base import ModelFamily
from trainer.models.objectives.kinds import fields_of
from trainer.system.errors import InputError
from trainer.system.terminal import say


def write_facts(path: Path) -> None:
    """Write the facts of every family as JSON."""
    text = json.dumps({family: dataclasses.asdict(facts(family)) for family in families.names()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def facts(family: str) -> FamilyFacts:
    """The facts that the family's class declares."""
    kind = families.get(family)
    return FamilyFacts(
        trains_on=kind.trains_on,
        components=kind.trained_names(),
        optional_encoders=kind.optional_encoders,
        architectures={name: _read_by(kind, name) for name in kind.architectures},
        default_architecture=kind.default_architecture,
        conditional_fields=kind.conditional_fields,
        objective_fields=tuple(sorted(fields_of(kind))),
        options_read=tuple(sorted(kind.options_read)),
        data_fields=tuple(sorted(kind.data_fields)),
        sample_fields=tuple(sorted(kind.sample_fields)),
        sample_guidance=kind.sample_guidance,
        reads_references=kind.reads_references,
        size_multiple=kind.size_multiple,
        in_buckets=kind.in_buckets,
        longest_side=kind.longest_side,
        is_concluded=kind.is_concluded,
        frames=kind.frames,
        distilled=kind.distilled,
        edits=kind.edits,
        model_files=kind.model_files,
        only_peft=kind.peft_fields is not ModelFamily.peft_fields,
        kohya_by_path=kind.kohya_by_path,
    )


def _read_by(kind: type[ModelFamily], architecture: str) -> tuple[str, ...]:
    """Those of `conditional_fields` that a tiny model of this architecture reads."""
    if not kind.conditional_fields:
        return ()
    configs = kind.tiny(architecture)
    marks = {
        field: configs[Path(file).parent.name].get(*key) for field, (file, *key) in kind.conditional_fields.items()
    }
    return tuple(field for field, is_read in marks.items() if is_read)


def main() -> None:
    """Write the facts; with `--write-family NAME`, first the file of a family of the run's config on stdin."""
    parser = argparse.ArgumentParser(prog="python -m trainer.models")
    parser.add_argument("--write-family", metavar="NAME")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    if options.write_family:
        from trainer.models.observed_transformer import ObservedTransformer
        from trainer.models.parts.image.family_file import write_family

        family = families.make(RunConfig.model_validate_json(sys.stdin.read()), options.cache)
        assert isinstance(family, ObservedTransformer)
        file = write_family(options.write_family, family.conclusions, family.folder.name)
        say(f"{file}: written; set model.family: {options.write_family}")
    write_facts(FACTS)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(str(error)) from error
