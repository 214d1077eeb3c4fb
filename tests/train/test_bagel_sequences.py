"""Runs on edits, conversations and packs: the same on any number of ranks, balanced, continued, sampled."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.bench import Bench
from tests.distributed import run_ranks
from tests.distributed.gradients import whole_gradients
from tests.runs import alone, difference, make_pictures, run_config, steps_of, train
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes
from trainer.data.mixed.mixed_batches import DrawnItem, MixedItem, Pack, PackedBatchSampler, QuestionItem
from trainer.data.mixed.mixed_source import MixedSource
from trainer.distributed.world import World
from trainer.models import families
from trainer.models.base import MultimodalFamily
from trainer.run.events import AnyEvent, SampleEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.train.loop import Trainer

BUDGET = 400


def make_rows(pictures: Path, count: int = 12) -> Path:
    """Edits, conversations with two images, and answers of very different lengths."""
    names = sorted(file.name for file in pictures.glob("*.png"))
    rows: list[Any] = []
    for number in range(count):
        one, other = (names[(number + step) % len(names)] for step in (0, 1))
        edit = [{"image": one, "as": "both"}, {"text": f"edit {number}"}, {"image": other, "as": "drawn"}]
        turns = [
            {"from": "human", "value": "<image><image> which?"},
            {"from": "gpt", "value": "this " * number},
            {"from": "human", "value": "and now?"},
            {"from": "gpt", "value": "that"},
        ]
        conversation = {"image": [one, other], "conversations": turns}
        text = {"sequence": [{"text": "hello"}, {"text": "good day " * (number + 1), "learned": True}]}
        rows.append([{"sequence": edit}, conversation, text][number % 3])
    file = pictures / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def sequences_config(pictures: Path, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"family": "bagel"},
        "data__questions": str(pictures / "rows.jsonl"),
        "data__seen_resolution": 64,
        "data__caption_dropout": 0.1,
        "train__steps": 3,
        "train__batch_size": 4,
    }
    return run_config(pictures, **base | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("sequences")
    pictures = make_pictures(root / "pictures")
    make_rows(pictures)
    kinds = {"single": {}, "packed": {"data__pack_tokens": BUDGET}}
    return Bench(root, pictures, sequences_config, kinds)


@pytest.mark.slow
def test_a_conditioning_image_that_cannot_be_decoded_gives_its_turn_to_the_next_row(
    bench: Bench, tmp_path: Path
) -> None:
    whole = (bench.data / "00.png").read_bytes()
    (tmp_path / "whole.png").write_bytes(whole)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    losses = []
    for second in ("whole", "cut"):
        rows = [{"image": f"{name}.png", "question": "q", "answer": "a"} for name in ("whole", second)]
        file = tmp_path / f"{second}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        changes = {"data__path": None, "data__questions": str(file), "train__batch_size": 1, "train__steps": 2}
        losses.append(bench.trained_here(f"seen-{second}", **changes, data__bad_image="warn").losses)
    assert losses[0] == losses[1]
    with pytest.raises(InputError, match=r"cut\.png: cannot be read .*, or set data\.bad_image: warn"):
        bench.trained_here("seen-stopped", **changes)


def step_gradients(world: World, cfg: RunConfig, run: RunDir) -> dict[str, torch.Tensor]:
    """The whole gradients of the first step, as the optimizer gets them."""
    trainer, gradients = Trainer(cfg, run, world, run.path.parent / "cache", lambda event: None), {}
    trainer.optimizer.register_step_pre_hook(lambda *_: gradients.update(whole_gradients(trainer.model)))
    try:
        trainer.train_step()
        return gradients
    finally:
        trainer.close()


@pytest.mark.slow
def test_the_gradients_of_a_packed_step_are_the_same_on_one_two_and_four_ranks(bench: Bench) -> None:
    found = []
    for ranks in (1, 2, 4):
        strategy = "none" if ranks == 1 else "full"
        changes = {"adapter__type": "none", "optim__clip_norm": None, "data__pack_tokens": BUDGET}
        cfg, run = bench.run(f"gradients-{ranks}", **changes, parallel__strategy=strategy, parallel__devices=ranks)
        found.append(run_ranks(ranks, step_gradients, cfg, run)[0])
    largest = max(float(gradient.abs().max()) for gradient in found[0].values())
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert difference(other, found[0]) <= 1e-6 * max(1.0, largest)


def test_sequences_that_are_longer_than_a_pack_are_said_once_with_their_number(bench: Bench) -> None:
    events: list[AnyEvent] = []
    cfg, run = bench.run("longer", data__pack_tokens=40, train__batch_size=30)
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", events.append)
    trainer.close()
    sampler = trainer.data.batch_sampler(BatchSizes(30), None)
    packs = [pack for step in range(4) for pack in sampler.batch(step)]
    assert any(len(pack.items) > 1 for pack in packs if isinstance(pack, Pack))
    said = [event.message for event in events if isinstance(event, WarningEvent) and "pack_tokens" in event.message]
    assert re.fullmatch(
        r".+: a sequence of \d+ tokens is longer than data.pack_tokens 40; it is trained by itself and takes more "
        "memory than planned: raise data.pack_tokens, or cut it",
        said[0],
    )
    assert said[1:] == ["10 sequences so far are longer than data.pack_tokens 40"]


def source_of(bench: Bench, **changes: Any) -> MixedSource:
    cfg, run = bench.run(f"source-{len(list(bench.root.iterdir()))}", **changes)
    trainer = Trainer(cfg, run, alone(), bench.root / "cache", lambda event: None)
    trainer.close()
    assert isinstance(trainer.data, MixedSource)
    return trainer.data


@pytest.mark.slow
def test_packs_of_a_mixed_set_give_all_ranks_equal_work(bench: Bench) -> None:
    source, ranks = source_of(bench, data__pack_tokens=BUDGET, train__batch_size=8), 4
    sampler = source.batch_sampler(BatchSizes(8), None)
    tokens, drawn = [0] * ranks, []
    for step in range(50):
        for position, pack in enumerate(sampler.batch(step)):
            assert isinstance(pack, Pack)
            count = sum(map(source.count_tokens, pack.items))
            assert count <= BUDGET
            tokens[position * ranks // 8] += count
            drawn += [item.index for item in pack.items]
    assert max(tokens) <= 1.05 * min(tokens)
    # Nothing is left out: the samples that are still to come are those that wait.
    assert len(drawn) == len({*drawn}) > max(drawn) - 100


def test_the_tokens_of_a_sample_are_counted_without_reading_its_images(bench: Bench) -> None:
    source = source_of(bench, data__references=None)
    sampler = source.batch_sampler(BatchSizes(1), None)
    family = source._family
    from trainer.models.parts.bagel.bagel_packing import pack
    from trainer.models.parts.bagel.bagel_sequences import clean_pieces, sequences_of_example

    for step in range(16):
        (item,) = sampler.batch(step)
        assert not isinstance(item, Pack)
        pieces = [clean_pieces(one) for one in sequences_of_example(source.example(item))]
        packed = pack(pieces, family.marks, family.sizes)  # type: ignore[attr-defined]
        assert len(packed.arguments["back"]) == source.count_tokens(item)


def test_packs_take_whole_samples_in_turn_and_do_not_depend_on_the_batch_size() -> None:
    tokens = [60, 50, 30, 20, 120, 10, 40] * 40

    def sampler(sizes: BatchSizes) -> PackedBatchSampler:
        return PackedBatchSampler(lambda n: QuestionItem(n, n), lambda item: tokens[item.index], 100, sizes)

    ones = [sampler_pack(sampler(BatchSizes(1)), step) for step in range(8)]
    assert ones[0] == [0, 2, 5]
    assert [4] in ones
    assert [n for pack in ones[:3] for n in pack][:2] == [0, 2]
    threes = sampler(BatchSizes(3, ((1, 2),)))
    assert [sampler_indices(pack) for pack in threes.batch(2)] == ones[2:5]
    assert [sampler_indices(pack) for pack in threes.batch(0)] == ones[:1]


def sampler_pack(sampler: PackedBatchSampler, step: int) -> list[int]:
    return sampler_indices(sampler.batch(step)[0])


def sampler_indices(pack: Pack) -> list[int]:
    return [item.index for item in pack.items]


def kinds_of(source: MixedSource, item: MixedItem) -> list[str]:
    return [key.partition(".")[2] for key in source.example(item) if key != "mask"]


def test_conditions_of_edits_are_left_out_by_sample_with_the_published_shares(bench: Bench) -> None:
    source = source_of(bench)
    edits = [kinds_of(source, QuestionItem(0, index)) for index in range(400)]
    assert all(kinds[-1] == "drawn" for kinds in edits)
    shares = [
        sum("text" not in kinds for kinds in edits) / 400,
        sum(kinds[0] == "gap" for kinds in edits) / 400,
        sum(kinds[1] == "gap" for kinds in edits) / 400,
    ]
    # Two standard deviations of 400 draws are 0.03 and 0.046.
    assert shares == pytest.approx([0.1, 0.3, 0.3], abs=0.05)
    assert edits == [kinds_of(source, QuestionItem(0, index)) for index in range(400)]
    conversations = {tuple(kinds_of(source, QuestionItem(1, index))) for index in range(40)}
    assert conversations == {("conditioning", "conditioning", "text", "target", "text", "target")}
    none = source_of(bench, data__latents_dropout=0, data__vision_dropout=0, data__caption_dropout=0)
    assert {tuple(kinds_of(none, QuestionItem(0, n))) for n in range(40)} == {
        ("clean", "conditioning", "text", "drawn")
    }


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images after the edit with instructions, and before it, with the same names."""
    root = tmp_path_factory.mktemp("edits")
    return make_pictures(root / "after", 5), make_pictures(root / "before", 5)


def test_a_folder_of_edits_is_trained_and_its_samples_are_edits(bench: Bench, edits: tuple[Path, Path]) -> None:
    after, before = edits
    changes: dict[str, Any] = {
        "data__path": str(after),
        "data__references": str(before),
        "data__questions": None,
        "data__validation": 1,
        "train__steps": 1,
        "sample__every": 1,
        "sample__prompts": ["make it blue"],
        "sample__references": [str(before / "01.png")],
        "sample__steps": 2,
        "data__latents_dropout": 0,
        "data__vision_dropout": 0,
        "data__caption_dropout": 0,
    }
    cfg, run = bench.run("edits", **changes)
    source = source_of(bench, **changes)
    (item,) = source.batch_sampler(BatchSizes(1), None).batch(0)
    assert isinstance(item, DrawnItem)
    example = source.example(item)
    assert kinds_of(source, item) == ["clean", "conditioning", "text", "drawn"]
    number = item.image.index
    family = families.make(cfg, bench.root / "cache")
    assert isinstance(family, MultimodalFamily)
    assert example["3.drawn"].shape[-2:] == (8, 8) if number % 3 == 0 else (4, 8)
    assert [key for key in source.held_out(0)] == ["0.clean", "1.conditioning", "2.text", "3.drawn"]
    found = train(alone(), cfg, run)
    assert list(steps_of(found.events)[0].losses) == ["images"]
    samples = [event for event in found.events if isinstance(event, SampleEvent)]
    # An edit has the size of its source, 96 x 48 pixels scaled to 64.
    with Image.open(run.path / samples[-1].path) as image:
        assert image.size == (64, 32)


def test_two_sizes_of_packs_are_refused_together_with_a_weight_of_single_images(bench: Bench) -> None:
    with pytest.raises(ValueError, match=r"data.regularization_weight is 0\.5; set that to 1"):
        bench.config(data__pack_tokens=64, data__regularization=str(bench.data / "x"), data__regularization_weight=0.5)


def test_other_models_refuse_the_fields_of_sequences(bench: Bench) -> None:
    for field, value in (("pack_tokens", 64), ("latents_dropout", 0.5), ("seen_resolution", 64)):
        cfg = run_config(bench.data, **{f"data__{field}": value})
        with pytest.raises(InputError, match=rf"data\.{field}: has no effect for flux2"):
            families.make(cfg, bench.root / "cache")


def test_a_mask_and_several_references_go_with_an_edit(bench: Bench, edits: tuple[Path, Path], tmp_path: Path) -> None:
    after, before = edits
    references, masks = tmp_path / "references", tmp_path / "masks"
    references.mkdir()
    masks.mkdir()
    for file in after.glob("*.png"):
        for number in range(2):
            shutil.copy(before / file.name, references / f"{file.stem}_{number}.png")
        with Image.open(file) as image:
            Image.new("L", image.size, 255).save(masks / file.name)
    changes: dict[str, Any] = {
        "data__path": str(after),
        "data__references": str(references),
        "data__masks": str(masks),
        "data__questions": None,
        "data__latents_dropout": 0,
        "data__vision_dropout": 1,
        "data__caption_dropout": 1,
    }
    source = source_of(bench, **changes)
    (item,) = source.batch_sampler(BatchSizes(1), None).batch(0)
    assert kinds_of(source, item) == ["clean", "gap", "clean", "gap", "drawn"]
    assert source.example(item)["mask"].eq(1).all()
