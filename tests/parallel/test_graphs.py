"""Graphs of compiled blocks: images of any aspect ratio with any number of references run in those of two shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runs import run_config
from trainer.config.size import Size
from trainer.models import families
from trainer.models.base import ImageFamily
from trainer.models.build import build_model
from trainer.parallel import compile as compiling
from trainer.parallel.compile import compile_blocks, describe_compiled
from trainer.parallel.parallelize import blocks_of
from trainer.rng import SampleRng

RATIOS = ((64, 64), (96, 64), (64, 96), (128, 64), (64, 128), (96, 96))
COUNTS = (1, 2, 3)
MOST_TIERS = 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with mock.patch.dict(compiling._classes, clear=True):
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what torch looks at while it traces
@pytest.mark.parametrize(
    "name", ["flux2 klein-4b", pytest.param("qwen_image qwen-image-edit-2511", marks=pytest.mark.slow)]
)
def test_six_ratios_and_three_numbers_of_references_take_two_graphs_of_each_block(name: str, tmp_path: Path) -> None:
    family_name, architecture = name.split()
    model = {"family": family_name, "path": "tiny", "options": {"architecture": architecture}}
    cfg = run_config(tmp_path, model=model)
    family = families.make(cfg, tmp_path / "cache")
    assert isinstance(family, ImageFamily)
    built = build_model(cfg, family).module.to_empty(device="cpu")
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer_name, buffer in family.computed_buffers("transformer").items():
        built["transformer"].get_buffer(buffer_name).copy_(buffer)
    compile_blocks(list(blocks_of(built, family.shard.blocks)), "eager")
    found: list[dict[str, int]] = []
    for width, height in RATIOS:
        for count in COUNTS:
            example = family.blank_example(Size(width, height), 24, torch.float32)
            for number in range(count):
                side = Size(64 + 32 * number, 64)  # each of a shape of its own
                example[f"reference_{number}"] = family.blank_example(side, 24, torch.float32)["latents"]
            batch = {**family.collate([example]), "weight": torch.ones(1)}
            family.loss(built, batch, SampleRng(0, (0,))).total.backward()
            found.append({kind: one.graphs for (kind, _), one in compiling._classes.items()})
    # The first shape has one graph for each kind of block: those of a class may differ in what is trained.
    for kind, first in found[0].items():
        assert found[-1][kind] <= MOST_TIERS * first, found
    assert found[1:] == [found[1]] * (len(found) - 1), "a shape after the second was compiled again"
    assert describe_compiled()[1] == ""
