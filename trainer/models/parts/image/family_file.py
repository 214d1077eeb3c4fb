"""Writes the file of a family from what was concluded of a folder."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.config.families import check_new_name
from trainer.system import files
from trainer.system.errors import InputError

FOLDER = Path(__file__).parents[2] / "families"
SOURCE = '''\
"""{network} as {pipeline} of diffusers {version} calls it, concluded of {origin}.

What is stated here is compared with each folder that is opened, and with the diffusers that is installed. Change what
you know better; `trainer/RECIPES.md` says what else a family may have: a tiny model, captions of any length in a batch,
the names of its original file.
"""

from __future__ import annotations

from typing import ClassVar

from trainer.models.objectives.flow_matching import Shift, ShiftLine
from trainer.models.observed_transformer import Conclusions, ObservedTransformer


class {name}(ObservedTransformer):
    stated = Conclusions(
{conclusions}
    )
    model_files: ClassVar = {{"transformer/config.json": ("_class_name", "{network}")}}


FAMILY = {name}
'''


def write_family(name: str, conclusions: Any, origin: str) -> Path:
    """Write the file of a family.

    Args:
        name: The family's name, which is that of its module.
        conclusions: A dataclass with `network` and `pipeline`, whose values print as their source.
        origin: The model that it was concluded of.

    Raises:
        InputError: The name cannot be that of a module, is taken, or the file cannot be written.
    """
    check_new_name(name)
    fields = dataclasses.fields(conclusions)
    lines = (f"        {field.name}={getattr(conclusions, field.name)!r}," for field in fields)
    source = SOURCE.format(
        name="".join(part.capitalize() for part in name.split("_")) + "Family",
        network=conclusions.network,
        pipeline=conclusions.pipeline,
        version=version("diffusers"),
        origin=re.sub(r"[^\w.-]", "_", origin, flags=re.ASCII),  # a stranger's text, which becomes code
        conclusions="\n".join(lines),
    )
    file = FOLDER / f"{name}.py"
    try:
        files.replace(file, source)
    except OSError as error:
        raise InputError(f"--write-family {name}: {file} cannot be written ({error.strerror})") from error
    return file
