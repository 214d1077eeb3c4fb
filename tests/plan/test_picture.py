"""The memory over a step: its moments are those of the simulation, and the picture shows all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tests.plan.common import NOWHERE, every_table, run
from trainer.plan import picture
from trainer.plan.hardware import CARDS
from trainer.plan.memory import MemoryPlan, history_of, plan_of
from trainer.plan.picture import LARGE, SMALL, Bar, Frame, Limit, draw, outline, sentence
from trainer.plan.simulate.phases import by_kind
from trainer.plan.simulate.steps import Mark, ModelPass, Parameter, PassInput, Unit
from trainer.plan.simulate.timeline import Point, Sharding, history, simulate
from trainer.plan.store import known_model
from trainer.system.amounts import GIB

EVERY = every_table()
SHARDINGS = (
    Sharding(),
    Sharding(is_sharded=False),
    Sharding(ranks=4),
    Sharding(ranks=4, replicas=2, passes=3),
    Sharding(ranks=4, passes=9),
    Sharding(ranks=8, reshard=False, prefetch=(1, 2)),
    Sharding(ranks=4, reshard=2, passes=2, is_reduced_each_pass=True),
    Sharding(ranks=2, offload=True),
    Sharding(ranks=4, offload_blocks=3),
    Sharding(ranks=1, is_sharded=False, offload_blocks=0.5, passes=6),
)
ONE_LAYER = ModelPass(
    units=(Unit("", (), is_root=True), Unit("layer", (Parameter(1024, 1024, 4, 4, is_trained=True),))),
    marks=(
        Mark("forward", 0, 0, 0),
        Mark("forward", 1, 0, 0),
        Mark("forward_end", 1, 1e6, 3e6, flops=10.0),
        Mark("forward_end", 0, 0, 0),
        Mark("backward", 0, 0, 0),
        Mark("backward", 1, 0, 0),
        Mark("backward_end", 1, -1e6, 5e6, flops=30.0),
        Mark("reduced", 1, 0, 0),
        Mark("backward_end", 0, 0, 0),
        Mark("end", -1, 0, 0),
    ),
    buffers=0,
)


def planned(model: str, card: str | None, *fields: str) -> tuple[MemoryPlan, tuple[Point, ...]]:
    """The plan of a run and its moments."""
    cfg = run(model, *fields)
    tables = known_model(cfg, NOWHERE)
    assert tables is not None
    plan = plan_of(cfg, tables, CARDS[card] if card else None)
    return plan, history_of(cfg, tables, plan)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("table", EVERY)
def test_the_fullest_moment_is_the_peak_of_the_simulation(table, checkpointing):
    model_pass = table.training(PassInput(512 * 512, 1), 16, checkpointing)
    for sharding in SHARDINGS:
        memory, points = simulate(model_pass, sharding), history(model_pass, sharding)
        fullest = max(points, key=lambda point: point.peak)
        assert fullest.peak == memory.peak
        assert dict(fullest.highest) == memory.items
        assert (fullest.moment, fullest.unit) == memory.when
        assert points[-1].flops == memory.flops


@pytest.mark.parametrize("card", ["24gb", "48gb"])
def test_the_moments_are_those_of_what_the_plan_decided(card: str):
    left_open = ("train.checkpointing=auto", "parallel.offload_blocks=auto", "quantize.format=nf4")
    plan, points = planned("flux2 dev", card, *left_open, "parallel.devices=1", "parallel.strategy=auto")
    assert max(point.peak for point in points) == plan.training.peak


def test_the_moments_of_a_layer_are_those_that_were_computed_by_hand():
    weights = 1024 * 1024 * 4
    resident = {"weights": weights, "optimizer": 2.0 * weights}
    points = history(ONE_LAYER, Sharding(is_sharded=False))
    assert [point.moment for point in points] == ["", *(mark.moment for mark in ONE_LAYER.marks), "optimizer"]
    before, forward, optimizer = points[0], points[3], points[-1]
    assert {name: size for name, size in before.after.items() if size} == resident
    assert (forward.words, forward.flops, forward.peak) == ("forward of layer", 10.0, 3 * weights + 3e6)
    assert forward.after["activations"] == 1e6
    fullest = max(points, key=lambda point: point.peak)
    assert (fullest.words, fullest.flops) == ("backward of layer", 40.0)
    assert fullest.peak == 3 * weights + 1e6 + 5e6
    held = {name: size for name, size in optimizer.highest.items() if size}
    assert held == resident | {"gradients": weights}


def test_of_many_passes_those_in_between_are_one_point_each():
    sharding = Sharding(is_sharded=False, passes=20)
    points = history(ONE_LAYER, sharding)
    numbers = [point.number for point in points]
    assert [numbers.count(number) for number in range(20)] == [11, 10, 10, *[1] * 16, 11]
    assert [point.flops for point in points if point.number == 7] == [40.0 * 8]
    assert max(point.peak for point in points) == simulate(ONE_LAYER, sharding).peak


@pytest.mark.parametrize("num_bars", [3, 40, 320])
def test_the_bars_cover_the_step_and_none_is_lower_than_a_moment_in_it(num_bars: int):
    _, points = planned("flux2 klein-4b", None, "train.checkpointing=full")
    *bars, optimizer = outline(points, num_bars).bars
    assert (bars[0].start, bars[-1].end) == (0.0, 1.0)
    assert all(left.end == right.start for left, right in pairwise(bars))
    assert len(bars) <= num_bars
    shares = [0.0, *(point.flops / points[-1].flops for point in points[:-1])]
    for point, (left, right) in zip(points, pairwise(shares), strict=False):
        middle = (left + right) / 2  # a moment without computing is in the bar that it touches
        assert point.peak <= max(bar.peak for bar in bars if bar.start <= middle <= bar.end)
    for bar in bars:
        (most,) = {tuple(by_kind(point.highest).values()) for point in points if _is(point, bar)}
        assert bar.kinds == most
    assert max(bar.peak for bar in bars) == max(point.peak for point in points)
    assert optimizer.words == "optimizer"


def _is(point: Point, bar: Bar) -> bool:
    return (point.peak, point.words) == (bar.peak, bar.words)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ((), ["forward", "backward"]),
        (("train.batch_size=8",), ["forward", "backward"] * 2),
        (("train.batch_size=64",), ["16 passes, each forward and backward"]),
    ],
)
def test_forward_and_backward_are_named_while_there_is_room(fields, names):
    _, points = planned("flux2 klein-4b", None, *fields, "train.checkpointing=full")
    spans = outline(points).spans
    assert [span.name for span in spans] == names
    assert (spans[0].start, spans[-1].end) == (0.0, 1.0)


@pytest.mark.parametrize("card", ["24gb", "80gb", None])
@pytest.mark.parametrize("batch", [4, 8, 256])
@pytest.mark.parametrize("frame", [LARGE, SMALL], ids=["large", "small"])
def test_the_picture_names_the_peak_and_nothing_leaves_its_box(card: str | None, batch: int, frame: Frame):
    plan, points = planned("flux2 dev", card, f"train.batch_size={batch}", "train.checkpointing=full")
    text = draw(outline(points), Limit.of(plan), frame)
    assert len(text) <= 150_000
    root = ElementTree.fromstring(text)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    peak = f"{plan.training.peak / GIB:.2f} GiB"
    assert (peak if frame.is_small else f"{peak}: {plan.training.when}") in shown
    assert root.get("aria-label") == (None if frame.is_small else sentence(outline(points), Limit.of(plan)))
    for element in root.iter():
        for across, down in _corners(element):
            assert 0 <= across <= width, element.attrib
            assert 0 <= down <= height, element.attrib


def _corners(element: ElementTree.Element) -> list[tuple[float, float]]:
    """The points that an element draws."""
    given = element.attrib
    if element.tag.endswith("path"):
        x = y = 0.0
        found = []
        for command, numbers in re.findall(r"([MHVZhv])([-\d. ]*)", given["d"]):
            values = [float(number) for number in numbers.split()]
            match command:
                case "M":
                    x, y = values
                case "H":
                    (x,) = values
                case "h":
                    x += values[0]
                case "V":
                    (y,) = values
            found.append((x, y))
        return found
    if element.tag.endswith("rect"):
        x, y, width, height = (float(given[name]) for name in ("x", "y", "width", "height"))
        assert min(width, height) >= 0
        return [(x, y), (x + width, y + height)]
    return [(float(given["x"]), float(given["y"]))] if element.tag.endswith("text") else []


@pytest.mark.parametrize("frame", [LARGE, SMALL], ids=["large", "small"])
def test_the_areas_end_at_the_bytes_of_their_kinds(frame: Frame):
    plan, points = planned("flux2 klein-4b", "24gb", "train.checkpointing=full")
    root = ElementTree.fromstring(draw(outline(points), Limit.of(plan), frame))
    base = frame.height - frame.bottom
    (weights,) = (
        path.attrib["d"] for path in root.iter() if path.attrib.get("class") == "weights" and "d" in path.attrib
    )
    (activations,) = (
        path.attrib["d"] for path in root.iter() if path.attrib.get("class") == "activations" and "d" in path.attrib
    )
    tops = [base - min(map(float, re.findall(r"V([\d.]+)", d))) for d in (weights, activations)]
    held = next(item.size for item in plan.training.items if item.name == "weights")
    assert tops[0] / tops[1] == pytest.approx(held / plan.training.peak, abs=0.002)


def test_the_legend_has_the_kinds_that_can_be_seen():
    plan, points = planned("flux2 dev", "24gb", "train.checkpointing=full")
    root = ElementTree.fromstring(draw(outline(points), Limit.of(plan)))
    shown = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert shown >= {*picture.KIND_WORDS.values(), "24 GB (RTX 4090), 23.99 GiB"}
    alone = history(ONE_LAYER, Sharding(is_sharded=False))
    text = draw(outline(alone), Limit())
    assert ">weights<" in text
    assert ">gathered blocks<" not in text
    assert ">reserve<" not in text


def test_a_card_or_a_reserve_that_is_far_larger_is_left_out():
    assert Limit(1.0, 20.0, "card").seen(10.0) == Limit(1.0, 20.0, "card")
    assert Limit(1.0, 80.0, "card").seen(10.0) == Limit(1.0, None, "card")
    assert Limit(90.0, 20.0, "card").seen(10.0) == Limit(0.0, 20.0, "card")


def test_a_name_with_signs_of_xml_is_shown_as_it_is():
    units = (ONE_LAYER.units[0], replace(ONE_LAYER.units[1], name="<layer> & 'more'"))
    points = history(replace(ONE_LAYER, units=units), Sharding(is_sharded=False))
    root = ElementTree.fromstring(draw(outline(points), Limit(memory=1e9, card='"card"')))
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "0.02 GiB: backward of <layer> & 'more'" in shown
    assert 'of 0.93 GiB, "card"' in shown


def test_a_sentence_says_what_the_picture_shows():
    plan, points = planned("flux2 dev", "24gb", "train.checkpointing=full")
    peak, need = (f"{size / GIB:.2f} GiB" for size in (plan.training.peak, plan.training.need))
    assert sentence(outline(points), Limit.of(plan)) == (
        f"Memory over one training step: at most {peak} of tensors, in {plan.training.when}, {need} with the reserve, "
        "of the 23.99 GiB of 24 GB (RTX 4090)."
    )
    assert sentence(outline(points), Limit()).endswith(f"of tensors, in {plan.training.when}.")
