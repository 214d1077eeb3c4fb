"""What is known of a model family without importing it, and torch with it.

`make schema` writes families/facts.json from the families' own classes; a test compares the two.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

FACTS = Path(__file__).parent / "families" / "facts.json"


@dataclass(frozen=True)
class FamilyFacts:
    """The class attributes of the same names of a `ModelFamily`."""

    components: tuple[str, ...]
    optional_encoders: tuple[str, ...]
    objective_fields: tuple[str, ...]
    options_read: tuple[str, ...]
    reads_references: bool
    size_multiple: int

    def reads(self, field: str) -> bool:
        """Whether a field of the config, as `objective.shift`, means something to models of this family."""
        section, _, name = field.rpartition(".")
        if section == "objective":
            return name in self.objective_fields
        if field == "model.options.without":
            return bool(self.optional_encoders)
        if section == "model.options":
            return name in self.options_read
        return self.reads_references or field not in ("data.references", "sample.references")


@functools.cache
def of(family: str) -> FamilyFacts | None:
    """The facts of a family, None for a name that is none."""
    values = json.loads(FACTS.read_text(encoding="utf-8")).get(family)
    if values is None:
        return None
    return TypeAdapter(FamilyFacts).validate_python(values)
