"""What each notebook is run with by the tests, and what it must show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.notebooks.execution import Answers, execute
from trainer.config.families import FACTS

MOST_BYTES = 500_000
"""Of a notebook that is saved with its outputs."""


@dataclass(frozen=True)
class Lesson:
    """parameters: of the run of the tests, smaller than a person's.  answers: to its exercises, in their order.

    shows: regular expressions of what its cells print.
    """

    answers: tuple[Answers, ...]
    shows: tuple[str, ...]
    parameters: Mapping[str, object] = field(default_factory=dict)


FINISHED = "The run has finished"
IMAGE_FAMILIES = [
    rf"\s{name}\s+{re.escape(', '.join(known['architectures']))}\s"
    for name, known in json.loads(FACTS.read_text()).items()
    if known["trains_on"] == "images"
]

LESSONS = {
    "01_quickstart": Lesson(
        parameters={"STEPS": 12, "SUBJECTS": ["fox face", "bicycle"]},
        answers=(Answers("12 * 16 / 28", "12"), Answers("16 * (256 + 1024)", "256 * 1024")),
        shows=(
            r"adapter\.rnk: unknown field; did you mean 'adapter\.rank'\?",
            FINISHED,
            r"step 0 .* step 12 ",
            r"12 steps of 16 images\n32 images, 4 of them held out",
            r"quickstart\.safetensors +1,123 +64",
            r"without .* with the LoRA",
            r"Finished after 12 steps; exported export/quickstart\.safetensors",
        ),
    ),
    "02_sharding_lab": Lesson(
        parameters={"STEPS": 4, "MODEL": "tiny"},
        answers=(
            Answers("64", "512"),
            Answers("(2 * model.weights + model.optimizer_state) / 16e6", "model.weights / 16e6"),
            Answers("'full'", "'ddp'"),
        ),
        shows=(
            *(rf" {strategy} +\d" for strategy in ("ddp", "grad_op", "full", "hybrid", "offload")),
            r"full on 4 ranks saves 7\d% of what ddp holds\.",
            r"largest deviation of any rank: [01]\.\d+%",
        ),
    ),
    "03_mixed_precision_and_checkpointing": Lesson(
        parameters={"STEPS": 4, "MODEL": "tiny"},
        answers=(Answers("2**-7", "2**-8"), Answers("activations / 2", "activations"), Answers("'bf16'", "'micro'")),
        shows=(
            r"float32 +2\.0000 +32",
            r"bfloat16 +1\.0000 +16",
            r"fp32, every block again +0\.0e\+00",
            r"fp32, four images in a pass: \d+\.\d+ MB",
        ),
    ),
    "04_adapters": Lesson(
        parameters={"STEPS": 6},
        answers=(
            Answers("2 * 16 * 6144", "6144 * 6144"),
            Answers("'lokr'", "'lora'"),
            Answers("'lengths of rows'", "'rank 2'"),
        ),
        shows=(
            *(rf"{adapter} +[\d,]+ +\d+\.\d% " for adapter in ("lora", "dora", "loha", "lokr", "diag-oft", "boft")),
            r"lokr +\d\.\d\d +\d\.\d\d +\d\.\d\d +0\.00",
        ),
    ),
    "05_checkpoints": Lesson(
        parameters={"STEPS": 8, "STOP_AT": 2},
        answers=(Answers("12 * P", "4 * P"), Answers("'Step'", "'seed'")),
        shows=(
            "The run has stopped",
            r"step-00000\d holds \d steps",
            r"manifest\.json",
            r"__1_0\.distcp",
            r"P = 557,056",
            r"full\.pt: [\d,]+ kB with trainables, optimizer",
            FINISHED,
            r"stopped after \d of 8 steps, then continued on one rank",
            "\nwithin 1e-6",
            r"adapter: export/quickstart\.safetensors, read back, differs by \d",
            r"merged: export/quickstart-merged, read back, differs by \d",
            r"base \+ adapter's file and merged folder differ by at most \d\.\de-0[4-9]",
        ),
    ),
    "06_many_nodes": Lesson(
        parameters={"STEPS": 4},
        answers=(Answers("weights / 1e6", "2 * weights / 1e6"), Answers("0.125", "1 / 128")),
        shows=(
            r"-m trainer\.launcher\.agent --nnodes 2 --nproc-per-node 2 --rdzv-backend static .*--node-rank 1",
            r"start +[01] +0 +[01] +4[^j]*join +[23] +1 +[01] +4",
            r"rank3\.jsonl",
            FINISHED,
            r"largest difference of a loss: .*; within 1e-6",
            r"2 nodes, hybrid +128 to 255",
            r"1 node, full +192 to 255",
        ),
    ),
    "07_your_own_images": Lesson(
        parameters={"STEPS": 12},
        answers=(Answers("7.5", "24 / 16"), Answers("0.1 * 12 * 16", "12 * 16")),
        shows=(
            r"-square\.png: cannot be read \(.*\); replace or remove it, or set data\.bad_image: warn",
            r"have no caption: first .*-wide\.png; write it into .*-wide\.txt, .*or set data\.missing_caption: empty",
            r"-square\.txt: byte 12 \(0xfc\) is not UTF-8; save the file as UTF-8",
            r"left out: 0000-rat-square",
            r"4 images to train",
            r"rat risograph",
            r"all buckets: 48 x 80, 64 x 64, 80 x 48",
            FINISHED,
            r"step 0 .* step 12 ",
            *IMAGE_FAMILIES,
        ),
    ),
    "08_language_models": Lesson(
        parameters={"STEPS": 40, "TUNE_STEPS": 30},
        answers=(
            Answers("256 + 1", "256 / 2"),
            Answers("8 * (0.5 + 2 / 64)", "8 * 2"),
            Answers("math.log(1 + math.exp(-2))", "-2"),
        ),
        shows=(
            r"5 documents in one row, 150 of 256 tokens are in the loss",
            r"packed \d+\.\d+, each alone \d+\.\d+, as one document \d+\.\d+",
            FINISHED,
            r"step 40: validation loss \d\.\d+, perplexity \d+\.\d",
            r"bf16\s+32,768\s+296\s+int8\s+32,768\s+153\s+nf4\s+32,768\s+80",
            r"loss of the first step \d\.\d+, of the last \d\.\d+",
            r"step 0: Draw a fox\..*step 30: Draw a fox\.",
            r"in the loss: In two inks, on yellow paper\.<\|im_end\|>",
            r"Draw a fox\.\n\nIn two inks, on yellow paper\.",
            r"logits differ by at most \d\.\de-\d+, the largest is",
            r"step 1: loss 0\.693, margins 0\.00, accuracies 0\.00",
            r"step 12: loss 0\.\d+, margins \d+\.\d+, accuracies 1\.00",
            r"2[0-3]\.\d+ GiB on each GPU\. Fits",
        ),
    ),
    "09_drawing_and_answering": Lesson(
        parameters={"STEPS": 30},
        answers=(
            Answers("(64 // patch) ** 2 + 2", "64 // patch"),
            Answers("sum(last.losses.values())", "sum(last.losses.values()) / 2"),
        ),
        shows=(
            r"a question, 15 tokens, an image to draw, 11 tokens",
            r"understanding\s+123,520\s+generation\s+74,368\s+vision\s+31,520\s+connectors\s+29,008",
            FINISHED,
            r"images: \d\.\d+ in the first five steps, \d\.\d+ in the last five",
            r"text: \d\.\d+ in the first five steps, \d\.\d+ in the last five",
            r"image\s+question\s+step 0\s+step 30\s+0000-rat\s+What is it\?",
            r"111 tensors; \d+ were trained, \d+ are the same bit for bit",
            r"random\s+\d\.\d+\s+after drawing, answering and editing\s+0\.\d+\s+"
            r"after 7 more steps of drawing alone\s+0\.",
            r"2[0-3]\.\d+ GiB on each GPU\. Fits",
        ),
    ),
}


def check(name: str, folder: Path, record: Callable[[str, object], None]) -> None:
    """Execute it with the parameters and the answers of the tests, and look at all it shows.

    record: takes the seconds it took and the bytes of the file.
    """
    lesson = LESSONS[name]
    executed = execute(name, folder, lesson.parameters, lesson.answers)
    num_bytes = executed.save(folder / f"{name}.ipynb")
    record("seconds", round(executed.seconds, 1))
    record("bytes", num_bytes)
    assert [pattern for pattern in lesson.shows if not re.search(pattern, executed.text, re.DOTALL)] == []
    said = re.findall(r"^(Right\.|Not yet: )", executed.text, re.MULTILINE)
    assert said == ["Not yet: ", "Right."] * len(lesson.answers)
    assert num_bytes <= MOST_BYTES
