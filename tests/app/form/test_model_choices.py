"""The base models that the first card offers: their presets, which of them fit, read and planned once."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path

import pytest

from app.form import model_answers
from app.form.model_choices import VERDICTS, ModelChoice, PresetChoice
from app.studio import Studio
from tests.runs import write_preset
from trainer.system.gpus import Gpu

DEMO = "demo"


def gpus(count: int, gib: int) -> list[Gpu]:
    values = {field.name: 0 for field in dataclasses.fields(Gpu)}
    name = {24: "NVIDIA GeForce RTX 4090", 80: "NVIDIA H100 80GB HBM3"}[gib]
    return [Gpu(**values | {"name": name, "memory": gib * 1024, "index": index}) for index in range(count)]


def choices(studio: Studio, cards: list[Gpu] | None = None) -> dict[str, ModelChoice]:
    found = studio.models.all(studio.presets(), studio.own_presets, cards or [])
    return {preset.name: model for model in found for preset in model.presets}


def preset(studio: Studio, name: str, cards: list[Gpu] | None = None) -> PresetChoice:
    [found] = [preset for preset in choices(studio, cards)[name].presets if preset.name == name]
    return found


def test_every_preset_of_a_published_model_is_offered_once_below_it(studio: Studio):
    found = choices(studio)
    # What trains random weights, or makes the demo model, is for tests: it is chosen by its name.
    assert set(studio.presets()) - set(found) == {
        "demo-base-cpu",
        "large_scale_8x8",
        "multi_node_4x8",
        "single_node_8gpu",
    }
    assert (found["quickstart"].path, found["quickstart"].is_built_in, found["quickstart"].fits) == (DEMO, True, True)
    assert all(preset.verdict in VERDICTS for model in found.values() for preset in model.presets)


def test_presets_that_fit_come_first_and_say_what_they_need(studio: Studio):
    alone = preset(studio, "flux2-dev-lora-4gpu")
    assert (alone.title, alone.verdict, alone.needs) == ("LoRA", "no GPU", "4 cards from 32 GB")
    assert preset(studio, "flux2-dev-lora-4gpu", gpus(1, 80)).verdict == "too few GPUs"
    assert preset(studio, "flux2-dev-lora-4gpu", gpus(4, 80)).verdict == "fits"
    assert preset(studio, "flux2-dev-lora-4gpu", gpus(4, 24)).verdict == "too large"
    dev = choices(studio, gpus(4, 24))["flux2-dev-lora-4gpu"]
    places = [VERDICTS.index(preset.verdict) for preset in dev.presets]
    assert places == sorted(places)


def test_of_several_that_fit_the_fastest_comes_first(studio: Studio):
    """The first one is chosen with its model. Times are per image, since presets differ in their batch."""
    here = choices(studio, gpus(8, 24))["flux2-dev-lora-4gpu"].presets
    fitting = [preset for preset in here if preset.verdict == "fits"]
    assert len(fitting) == 4 and fitting[0].name == "flux2-dev-lora-8gpu"
    assert fitting == sorted(fitting, key=lambda preset: preset.per_sample)
    alone = choices(studio, gpus(1, 24))["flux2-dev-lora-4gpu"].presets
    assert [preset.name for preset in alone if preset.verdict == "fits"] == ["flux2-dev-lora-nf4-1x24gb"]


@pytest.mark.parametrize(
    ("name", "cards", "expected"),
    [
        ("quickstart", (), ""),
        ("qwen3-8b-qlora-1x24gb", (), r"about \S+ s a text on 12 GB \(RTX 4070\), \S+ s a text on 80 GB \(H100\)"),
        (
            "flux2-dev-lora-nf4-1x24gb",
            (),
            r"about \S+ s an image on 16 GB \(RTX 4080\), \S+ s an image on 80 GB \(H100\); slow, as frozen weights "
            "wait in host memory",
        ),
        ("flux2-dev-lora-nf4-1x24gb", (1, 80), r"about \S+ s an image on this machine"),
        ("flux2-dev-lora-8gpu", (4, 24), r"about \S+ s an image on 24 GB \(RTX 4090\)"),  # too few GPUs
        ("bagel-7b-mot-full-8x80gb", (), r"about \S+ s an image on 80 GB \(H100\)"),
    ],
)
def test_a_preset_says_what_an_image_costs(
    studio: Studio, name: str, cards: tuple[int, int] | tuple[()], expected: str
):
    assert re.fullmatch(expected, preset(studio, name, gpus(*cards) if cards else []).cost)


def test_presets_of_one_model_never_look_alike(studio: Studio):
    for model in studio.models.all(studio.presets(), studio.own_presets, []):
        assert len({(preset.title, preset.needs) for preset in model.presets}) == len(model.presets), model.path
    assert preset(studio, "flux2-dev-lora-nf4-1x24gb").title == "LoRA, nf4 base"


def test_own_presets_are_offered_by_their_names_and_a_damaged_one_is_left_out(studio: Studio, tmp_path: Path):
    write_preset(studio.own_presets / "mine.yaml", tmp_path)
    (studio.own_presets / "harmed.yaml").write_bytes(b"\xff{{[")
    (studio.own_presets / "wrong.yaml").write_text("train: 5\n")
    os.mkfifo(studio.own_presets / "pipe.yaml")
    found = choices(studio)
    assert {"harmed", "wrong", "pipe"} <= set(studio.presets()) - set(found)
    assert "quickstart" in found
    mine = preset(studio, "mine")
    assert (mine.title, mine.is_own) == ("mine", True)


def test_presets_are_read_and_planned_once_and_again_when_they_change(studio: Studio, tmp_path: Path):
    file = write_preset(studio.own_presets / "mine.yaml", tmp_path)
    first = preset(studio, "mine")
    quick = choices(studio)["quickstart"].presets[0]
    began = time.process_time()
    again = choices(studio)
    assert time.process_time() - began < 0.1
    assert preset(studio, "mine") is first
    assert again["quickstart"].presets[0] is quick
    file.write_text(file.read_text() + "adapter: {type: lokr}\nparallel: {devices: 2, device: cpu}\n")
    os.utime(file, ns=(1, 1))
    assert (preset(studio, "mine").needs, preset(studio, "quickstart")) == ("2 CPU ranks", quick)


def test_a_model_as_the_page_gets_it_has_its_licence_size_and_place(studio: Studio):
    found = choices(studio)
    demo = model_answers.model(found["quickstart"], 1e9, "/image")
    assert (demo["is_here"], demo["image"], demo["size"]) == (True, "/image", "11 M parameters")
    assert (demo["place"], demo["badge"]) == ("comes with ShardStudio", ("ok", "ready"))
    dev = model_answers.model(found["flux2-dev-lora-4gpu"], 1e9)
    assert (dev["is_known"], dev["is_gated"], dev["image"]) == (True, True, "")
    assert (dev["size"], dev["place"]) == ("32.2 B parameters · 113 GB", "113 GB to download")
    assert dev["badge"] == ("warn", "needs 1 card from 16 GB")
    assert dev["licence"] and "FLUX.2-dev" in dev["download"]
    [preset] = [preset for preset in dev["presets"] if preset["name"] == "flux2-dev-lora-4gpu"]
    assert preset["line"].startswith("4 cards from 32 GB: about ") and preset["badge"] == ("", "no GPU here")
    assert sum(size for _, size in preset["kinds"]) == pytest.approx(preset["need"])
    assert preset["need"] <= preset["limit"]


def test_the_drawing_of_a_model_has_its_blocks_in_their_order(studio: Studio):
    found = choices(studio)

    def drawn(name: str) -> list[tuple[str, int]]:
        return [(kind, count) for kind, count, size in model_answers.blocks(found[name]) if size]

    double, single = ("transformer.transformer_blocks", 8), ("transformer.single_transformer_blocks", 48)
    assert drawn("flux2-dev-lora-4gpu") == [double, single]
    assert drawn("qwen3-8b-qlora-1x24gb") == [("language_model.model.layers", 36)]
    blocks = model_answers.blocks(found["flux2-dev-lora-4gpu"])
    drawing = model_answers.model(found["flux2-dev-lora-4gpu"], max(size for _, _, size in blocks))["art"]
    assert [(hue, path.count("M")) for hue, path in drawing] == [("weights", 8), ("activations", 48)]
    assert drawing[0][1].startswith("M0.3 70v-59.5h2.17V70z"), "the largest block fills 85 % of the height"
    assert sum(count * size for _, count, size in blocks) == pytest.approx(32.2e9, rel=0.05)
    assert sum(count for _, count in drawn("sdxl-lora-1gpu")) > 70 and drawn("quickstart") == []
