"""What presets and presets/NEEDS.md say that presets need: `python -m tests.plan.needs` writes it.

GiB of tensors on each GPU in the parts of a run, without the reserve.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.plan.common import NOWHERE
from trainer.config.load import load_config
from trainer.plan.hardware import CARDS
from trainer.plan.search.fixes import planned
from trainer.plan.simulate.phases import CAPTIONS, SAMPLING, TRAINING
from trainer.system.amounts import GIB

PRESETS = Path(__file__).parents[2] / "presets"
TABLES = PRESETS / "NEEDS.md"
CARD = re.compile(r"-1x(\d+gb)$")
LINE = re.compile(r"^# (?P<where>per GPU|on the GPU), GiB +training .+$", re.MULTILINE)


def needs(name: str, *fields: str) -> dict[str, str]:
    """{part of a preset's run: GiB}; - for a part that there is not.

    Recompute that is left to the plan is full; offload that is left to it is decided for the preset's GPU.
    """
    cfg = load_config(PRESETS / f"{name}.yaml", fields).config
    gpu = CARD.search(name)
    if offloads(name):
        assert gpu is not None
    elif cfg.train.checkpointing == "auto":
        cfg = load_config(PRESETS / f"{name}.yaml", (*fields, "train.checkpointing=full")).config
    found = planned(cfg, CARDS[gpu[1]] if gpu and offloads(name) else None, NOWHERE)
    assert found is not None
    peaks = {phase.name: f"{phase.peak / GIB:.1f}" for phase in found.phases}
    return {part: peaks.get(part, "-") for part in (TRAINING, CAPTIONS, SAMPLING)}


def offloads(name: str) -> bool:
    """Whether a preset leaves it to the plan which blocks are offloaded."""
    return load_config(PRESETS / f"{name}.yaml").config.parallel.offload_blocks == "auto"


def said_by_preset(name: str, where: str) -> str:
    """The line in a preset's head. where: `per GPU`, or `on the GPU` where there is one."""
    off = ("parallel.offload_blocks=0",) if offloads(name) else ()
    found, kept = needs(name), needs(name, "train.checkpointing=none", *off)[TRAINING]
    without = "checkpointing and offload" if off else "checkpointing"
    others = "".join(f"    {part} {found[part]}" for part in (CAPTIONS, SAMPLING) if found[part] != "-")
    return f"# {f'{where}, GiB':17}training {found[TRAINING]} (without {without} {kept}){others}"


def said_by_table(row: str) -> str:
    """A row of a table of presets: its last three columns are what they need."""
    name = re.match(r"\| \[([\w.-]+)\]", row)
    assert name is not None
    columns = row.strip().strip("|").split(" | ")
    return f"|{' | '.join([*columns[:-3], *needs(name[1]).values()])} |"


def rows() -> list[str]:
    """Those of the tables of presets."""
    return [line for line in TABLES.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]


def main() -> None:
    """Write it."""
    for file in sorted(PRESETS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        written = LINE.sub(lambda found, name=file.stem: said_by_preset(name, found["where"]), text)
        file.write_text(written, encoding="utf-8")
    text = TABLES.read_text(encoding="utf-8")
    for row in rows():
        text = text.replace(row, said_by_table(row))
    TABLES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
