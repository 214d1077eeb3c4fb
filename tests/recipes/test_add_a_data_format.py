"""Recipe "Add a data format": a toy made of the files that it names is found, shown, trained, resumed and exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.copies import TOYS, Copy, listed

PRESET = """\
name: toy
model: {family: causal_lm, path: tiny}
data: {path: texts, length: 48, shuffle_window: 4}
train: {steps: 4, batch_size: 2, precision: fp32}
sample: {every: 4, prompts: [Double], tokens: 4}
parallel: {device: cpu, devices: 2, strategy: full}
"""
SCANNED = """
import time
from pathlib import Path
from app.data.scans import Scans
from app.form.form_answers import FIELDS
from trainer.config.load import load_config

scans, config = Scans(), load_config(Path("toy.yaml")).config
while not (found := scans.of(config)).is_complete:
    time.sleep(0.05)
print([file.name for file in found.texts], found.num_documents, found.problems, ".tsv" in FIELDS["data.path"]["help"])
"""
REFUSED = """
from pathlib import Path
from trainer.data.text.text_files import find_files

try:
    find_files(Path("toy.yaml"))
except ValueError as error:
    print(error)
"""
LOSSES = """
import sys
from trainer.run.events import EventReader, StepEvent

for run in sys.argv[1:]:
    steps = [event for event in EventReader(f"{run}/events.jsonl").read() if isinstance(event, StepEvent)]
    print({step.step: step.loss for step in steps})
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The code with the toy, added as the recipe says, and a file that it reads."""
    copy = Copy(tmp_path)
    rows = "trainer/data/row_files.py"
    toy = (TOYS / "data_format.py").read_text(encoding="utf-8").partition("# In row_files.py:\n")[2]
    copy.edit(rows, "\n\nREADERS: Mapping", f"{toy}\n\nREADERS: Mapping")
    copy.edit(rows, '    ".parquet": _parquet,\n}', '    ".parquet": _parquet,\n    ".tsv": _tabs,\n}')
    copy.edit("trainer/config/sections.py", ".csv or .parquet file (text,", ".csv, .tsv or .parquet file (text,")
    copy.python("-m", "trainer.config.load")
    (tmp_path / "texts").mkdir()
    lines = ["prompt\tcompletion\n", *(f"Double {number}: \t{2 * number}.\n" for number in range(12))]
    copy.add("texts/a.tsv", "".join(lines))
    copy.add("toy.yaml", PRESET)
    return copy


def test_a_new_data_format_changes_the_files_of_its_recipe_and_no_others_and_the_page_finds_its_files(
    copy: Copy,
) -> None:
    assert copy.changed() == listed("Add a data format")
    assert copy.python("-c", SCANNED) == "['a.tsv'] 12 () True\n"
    kinds = "a .txt, .jsonl, .json, .csv, .parquet, .tsv or .npy file"
    assert f"not a supported kind of text; give {kinds}" in copy.python("-c", REFUSED)


@pytest.mark.slow
def test_a_new_data_format_is_trained_resumed_as_if_it_had_not_stopped_and_exported(copy: Copy) -> None:
    for run, steps in (("whole", 4), ("parts", 2)):
        copy.python("launch.py", "--headless", "toy.yaml", "--run-dir", run, f"train.steps={steps}")
    copy.python("launch.py", "--resume", "parts", "train.steps=4")
    whole, parts = copy.python("-c", LOSSES, "whole", "parts").splitlines()
    assert whole == parts and whole.count(":") == 4
    assert (copy.path / "whole" / "export" / "toy" / "adapter_model.safetensors").is_file()
    (copy.path / "texts" / "a.tsv").write_bytes(b"prompt\tcompletion\n\xff\n")
    assert "a.tsv: not UTF-8 (byte 0xff)" in copy.python("-c", SCANNED)
