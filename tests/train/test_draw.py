"""Drawings: with the trained weights they are the run's last sample, without them the sample of step 0."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runs import alone, make_pictures, make_run, make_text, run_config, text_config, train
from trainer.config.load import dump_config
from trainer.config.schema import RunConfig
from trainer.export.export import export
from trainer.launcher import commands
from trainer.launcher.console import sentence
from trainer.run.drawings import Drawing, DrawingRequest, Picture, check_request, drawings, new_folder, progress
from trainer.run.events import EventReader, EventWriter, ExportEvent, SampleEvent
from trainer.run.folder import RunDir
from trainer.run.samples import TEXT
from trainer.system.errors import InputError
from trainer.train.draw import _parser, asked, draw, on_one_device

SAMPLES: dict[str, Any] = {
    "sample__every": 100,
    "sample__prompts": ("first", "a [trigger]"),
    "sample__size": (64, 32),
    "sample__steps": 2,
    "sample__seed": 5,
    "data__trigger": "fox",
    "train__steps": 3,
    "optim__lr": 2e-2,
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"adapter__type": "none", "optim__lr": 1e-3, "optim__ema": 0.5},
    "dora": {"adapter": {"type": "dora", "rank": 4}, "quantize__format": "nf4"},
    "boft": {"adapter": {"type": "boft"}, "optim__type": "schedulefree"},
    "lokr": {"adapter": {"type": "lokr", "rank": 4, "dropout": 0.5}},
    "sdxl": {"model": {"family": "sdxl"}},
    "bagel": {"model": {"family": "bagel"}},
}
SLOW = ("boft", "lokr", "sdxl", "bagel", "dora", "full")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("draw") / "pictures", count=4)


def trained_run(root: Path, cfg: RunConfig) -> RunDir:
    """A run that drew samples before its first and after its last step."""
    run = make_run(root, cfg, "run")
    outcome = train(alone(), cfg, run)
    with EventWriter(run.events_file) as events:
        for event in outcome.events:
            events.write(event)
    return run


def drawn(run: RunDir, *prompts: str, **settings: Any) -> Drawing:
    """Draw, and return the drawing of the last prompt."""
    request = DrawingRequest(prompts, **settings)
    cfg = on_one_device(run, check_request(run, request))
    folders = draw(run, cfg, alone(), request)
    found = {(run.path / one.pictures[0].path).parent: one for one in drawings(run)}
    assert len(folders) == len(prompts)
    return found[folders[-1]]


def with_it(run: RunDir, drawing: Drawing) -> Path:
    """The picture that was drawn last."""
    return run.path / drawing.pictures[-1].path


def without(run: RunDir, drawing: Drawing) -> Path:
    return run.path / drawing.pictures[0].path


def distance(one: Path, other: Path) -> int:
    """Largest difference of two images, in levels of 256."""
    levels = [np.asarray(Image.open(io.BytesIO(file.read_bytes()))).astype(int) for file in (one, other)]
    return int(abs(levels[0] - levels[1]).max())


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def test_a_drawing_is_the_last_sample_and_without_training_the_first(pictures: Path, tmp_path: Path, kind: str) -> None:
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | KINDS[kind]))
    drawing = drawn(run, "a [trigger]")
    first, last = run.samples / "step-000000-1.png", run.samples / "step-000003-1.png"
    assert distance(with_it(run, drawing), last) <= 1
    assert distance(without(run, drawing), first) <= 1
    assert distance(first, last) > 3
    assert (drawing.prompt, drawing.seed, drawing.number) == ("a fox", 5, 1)
    assert (drawing.size, drawing.steps, drawing.guidance) == ((64, 32), 2, 4.0)
    assert [(one.source, one.strength) for one in drawing.pictures] == [("", 0.0), ("checkpoints/step-000003", 1.0)]


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_each_prompt_is_drawn_with_each_checkpoint_at_each_strength(
    pictures: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.draw.PROGRESS_EVERY_S", 0.0)
    often = {"sample__every": 1, "checkpoint__every": 1, "optim__ema": 0.0}
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | KINDS[kind] | often))
    drawing = drawn(run, "first", "a [trigger]", checkpoints=(1, 3), strengths=(1e-4, 0.5, 1.0))
    assert [(picture.source, picture.strength) for picture in drawing.pictures] == [
        ("", 0.0),
        *((f"checkpoints/step-00000{step}", strength) for step in (1, 3) for strength in (1e-4, 0.5, 1.0)),
    ]
    files = [run.path / picture.path for picture in drawing.pictures]
    sample = {step: run.samples / f"step-00000{step}-1.png" for step in (0, 1, 3)}
    for at, step in ((0, 0), (1, 0), (3, 1), (4, 0), (6, 3)):
        assert distance(files[at], sample[step]) <= 1
    assert min(distance(files[5], files[at]) for at in (0, 6)) > 1
    first = next(one for one in drawings(run) if one.prompt == "first")
    assert distance(with_it(run, first), run.samples / "step-000003-0.png") <= 1
    assert progress(run) == 13.5 / 14  # before the second of two steps of the last picture


def test_a_drawing_of_version_0_1_0_is_read(tmp_path: Path, pictures: Path) -> None:
    run = make_run(tmp_path, run_config(pictures), "run")
    folder = new_folder(run)
    record = {
        "prompt": "a", "seed": 1, "number": 0, "source": "checkpoints/step-000003", "trained": "drawings/x/trained.png",
        "base": "drawings/x/base.png", "seconds": 1.5, "size": [64, 64], "steps": 2, "guidance": 4.0, "time": 5.0,
    }  # fmt: skip
    (folder / "drawing.json").write_text(json.dumps(record), encoding="utf-8")
    (drawing,) = drawings(run)
    assert drawing.pictures == (
        Picture("drawings/x/base.png"),
        Picture("drawings/x/trained.png", "checkpoints/step-000003", 1.0),
    )


@pytest.mark.slow
def test_other_settings_draw_another_image_and_no_drawing_replaces_another(pictures: Path, tmp_path: Path) -> None:
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES))
    one = drawn(run, "something else", size=(32, 32), steps=1, guidance=1.5, seed=6)
    other = drawn(run, "something else", size=(32, 32), steps=1, guidance=1.5, seed=7)
    assert (one.number, one.seed, one.size, one.steps, one.guidance) == (0, 6, (32, 32), 1, 1.5)
    assert distance(without(run, one), without(run, other)) > 0
    with Image.open(with_it(run, one)) as image:
        assert image.size == (32, 32)
    assert list(drawings(run)) == [other, one]
    with_it(run, other).with_name("drawing.json").write_text("[]", encoding="utf-8")
    assert list(drawings(run)) == [one]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [0, 1.0])
@pytest.mark.parametrize("offload", [False, True])
def test_weights_in_host_memory_draw_the_same(pictures: Path, tmp_path: Path, offload: bool, blocks: float) -> None:
    run = trained_run(tmp_path, run_config(pictures, parallel__offload_blocks=blocks, **SAMPLES))
    request = DrawingRequest(("first",))
    cfg = on_one_device(run, check_request(run, request), offload=offload)
    assert distance(draw(run, cfg, alone(), request)[0] / "1.png", run.samples / "step-000003-0.png") <= 1


@pytest.mark.slow
def test_without_a_checkpoint_the_exported_adapter_is_drawn_with(pictures: Path, tmp_path: Path) -> None:
    cfg = run_config(pictures, export__dtype="fp32", **SAMPLES)
    run = trained_run(tmp_path, cfg)
    (exported,) = export(cfg, run, tmp_path / "cache")
    with EventWriter(run.events_file) as events:
        path = str(exported.path.relative_to(run.path))
        events.write(ExportEvent(path=path, what="adapter", format="auto"))
    shutil.rmtree(run.checkpoints / "step-000003")
    drawing = drawn(run, "first")
    assert drawing.pictures[-1].source == path
    assert distance(with_it(run, drawing), run.samples / "step-000003-0.png") <= 1
    assert distance(without(run, drawing), run.samples / "step-000000-0.png") <= 1


def test_a_language_model_writes_two_texts(tmp_path: Path) -> None:
    changes = {"sample__every": 100, "sample__prompts": ("Sentence 1", "Double"), "sample__tokens": 8}
    cfg = text_config(make_text(tmp_path / "text"), **changes, optim__lr=3e-2, train__steps=8)
    run = trained_run(tmp_path, cfg)
    drawing = drawn(run, "Double")
    texts = [file.read_text(encoding="utf-8") for file in (without(run, drawing), with_it(run, drawing))]
    assert texts == [(run.samples / f"step-00000{step}-1.txt").read_text(encoding="utf-8") for step in (0, 8)]
    assert texts[0] != texts[1]
    assert drawing.pictures[-1].kind is TEXT
    assert (drawing.size, drawing.steps) == (None, None)
    with pytest.raises(InputError, match="guidance: has no effect for causal_lm; leave it out"):
        check_request(run, DrawingRequest(("a",), guidance=2.0))


REFUSED: dict[str, tuple[Callable[[RunDir], object], DrawingRequest, str]] = {
    "empty": (lambda run: None, DrawingRequest((" ",)), "prompt: empty; write what the sample should show"),
    "steps": (lambda run: None, DrawingRequest(("a",), steps=0), "steps: Input should be greater than or equal to 1"),
    "size": (lambda run: None, DrawingRequest(("a",), size=(40, 32)), "size: 40 x 32 is not in multiples of 16 pixels"),
    "no prompt": (lambda run: None, DrawingRequest(()), "prompt: none; write what the sample should show"),
    "second prompt": (
        lambda run: None,
        DrawingRequest(("a", "")),
        "prompt 2: empty; write what the sample should show",
    ),
    "strength": (
        lambda run: None,
        DrawingRequest(("a",), strengths=(0.0,)),
        "strength: 0 is not above 0 and at most 2",
    ),
    "no number": (
        lambda run: None,
        DrawingRequest(("a",), strengths=(math.nan,)),
        "strength: nan is not above 0 and at most 2",
    ),
    "many": (
        lambda run: None,
        DrawingRequest(("a",) * 10, strengths=(0.5,) * 10),
        "110 pictures, as each prompt is drawn with each checkpoint at each strength and once without; leave some out, "
        "100 are drawn at once",
    ),
    "step": (
        lambda run: None,
        DrawingRequest(("a",), checkpoints=(3, 9)),
        "{run}: has no checkpoint of step 9; name step 3",
    ),
    "nothing": (
        lambda run: shutil.rmtree(run.checkpoints),
        DrawingRequest(("a",)),
        "{run}: has no complete checkpoint and no exported adapter yet; save a checkpoint first",
    ),
}


def test_what_cannot_be_drawn_is_refused_before_a_process_is_started(pictures: Path, tmp_path: Path) -> None:
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | {"sample__every": 0}))
    for change, request, message in REFUSED.values():
        change(run)
        with pytest.raises(InputError) as error:
            commands.begin_drawing(run, request)
        assert str(error.value) == message.format(run=run.path)
    assert not (run.path / "drawings").exists()


@pytest.mark.slow
def test_the_page_starts_a_drawing_and_reads_how_it_ended(pictures: Path, tmp_path: Path) -> None:
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | {"sample__every": 0}))
    code = commands.begin_drawing(run, DrawingRequest(("--a 'fox'",), size=(32, 32), seed=1)).wait()
    output = commands.drawing_output(run, code)
    assert code == 0, output
    (drawing,) = drawings(run)
    assert str(with_it(run, drawing).parent) == output
    assert drawing.prompt == "--a 'fox'"
    assert json.loads((Path(output) / "drawing.json").read_text(encoding="utf-8"))["seed"] == 1
    assert sorted(os.listdir(output)) == ["0.png", "1.png", "drawing.json"]


EDIT: dict[str, dict[str, Any]] = {
    "flux2": {},
    # Its text encoder sees the references.
    "qwen_image": {"model": {"family": "qwen_image", "options": {"architecture": "qwen-image-edit-2509"}}},
    "bagel": {"model": {"family": "bagel"}},
}


@pytest.fixture(scope="module")
def before(pictures: Path) -> Path:
    """Images before the edit, one of each of `pictures`."""
    folder = pictures.parent / "before"
    folder.mkdir()
    for number, file in enumerate(sorted(pictures.glob("*.png"))):
        with Image.open(file) as image:
            Image.new("RGB", image.size, (60 * number, 90, 255 - 60 * number)).save(folder / file.name)
    return folder


def edit_run(root: Path, pictures: Path, before: Path, **changes: Any) -> RunDir:
    files = tuple(str(file) for file in sorted(before.glob("*.png"))[:2])
    references = {"data__references": str(before), "sample__references": files}
    return trained_run(root, run_config(pictures, **SAMPLES | references | changes))


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k != "flux2" else ()) for k in EDIT])
def test_an_edit_is_drawn_from_the_references_of_the_sample_from_others_and_from_none(
    pictures: Path, before: Path, tmp_path: Path, kind: str
) -> None:
    run = edit_run(tmp_path, pictures, before, **EDIT[kind])
    first, last = run.samples / "step-000000-1.png", run.samples / "step-000003-1.png"
    (own, other), none = sorted(before.glob("*.png"))[1:3], ()
    drawn_of = {
        given: drawn(run, "a [trigger]", references=given) for given in (None, (str(own),), (str(other),), none)
    }
    for given in (None, (str(own),)):
        assert distance(with_it(run, drawn_of[given]), last) <= 1
        assert distance(without(run, drawn_of[given]), first) <= 1
        (copy,) = drawn_of[given].references
        assert (run.path / copy).read_bytes() == own.read_bytes()
        assert (run.path / copy).parent == with_it(run, drawn_of[given]).parent
    for given in ((str(other),), none):
        assert with_it(run, drawn_of[given]).read_bytes() != last.read_bytes()
    assert drawn_of[none].references == ()


def test_a_drawing_shows_several_references_with_each_prompt(pictures: Path, before: Path, tmp_path: Path) -> None:
    run = edit_run(tmp_path, pictures, before, **EDIT["qwen_image"])
    files = tuple(str(file) for file in sorted(before.glob("*.png"))[:2])
    both, reverse = drawn(run, "a", "b", references=files), drawn(run, "b", references=files[::-1])
    assert [Path(path).name for path in both.references] == ["reference-00-1.png", "reference-01-2.png"]
    assert next(one for one in drawings(run) if one.prompt == "a").references != both.references
    assert with_it(run, both).read_bytes() != with_it(run, reverse).read_bytes()


def test_samples_name_the_copies_of_their_references_in_the_run_folder(
    pictures: Path, before: Path, tmp_path: Path
) -> None:
    theirs = Path(shutil.copytree(before, tmp_path / "before"))
    odd = theirs / "01.png"
    odd = odd.rename(theirs / f"a fox\t{'x' * 60}.PNG")
    files = (str(theirs / "00.png"), str(odd))
    cfg = run_config(pictures, **SAMPLES | {"sample__references": files, "train__steps": 1})
    run = trained_run(tmp_path, cfg)
    content = [Path(file).read_bytes() for file in files]
    shutil.rmtree(theirs)
    events = [event for event in EventReader(run.events_file).read() if isinstance(event, SampleEvent)]
    assert len(events) == 4
    for event in events:
        (copy,) = event.references
        assert (run.path / copy).read_bytes() == content[event.index]
    digests = [hashlib.blake2b(one, digest_size=4).hexdigest() for one in content]
    named = f"reference-a_fox_{'x' * 34}"
    assert sorted(file.name for file in run.samples.glob("reference-*")) == [
        f"reference-00-{digests[0]}.png", f"{named}-{digests[1]}.png"
    ]  # fmt: skip
    said = sentence(SampleEvent(step=1, prompt="a", index=0, path="samples/1.png", references=("samples/r.png",)))
    assert said == "step 1: sample samples/1.png, of samples/r.png"
    # Its files are gone, and it still draws as the samples.
    drawing = drawn(run, "a [trigger]")
    assert distance(with_it(run, drawing), run.samples / "step-000001-1.png") <= 1


REFUSED_REFERENCES = {
    "none read": (
        {"model": {"family": "sd3"}},
        1,
        "reference: {0}: models of family sd3 read no reference images; leave it out",
    ),
    "other model": (
        {"model": {"family": "flux1"}},
        1,
        "reference: {0}: tiny reads no reference images, as black-forest-labs/FLUX.1-Kontext-dev does; leave it out",
    ),
    "too many": (
        {"model": {"family": "flux1", "options": {"architecture": "kontext"}}},
        2,
        "reference: 2 files, but black-forest-labs/FLUX.1-Kontext-dev reads 1 image; give fewer",
    ),
    "far too many": ({}, 11, "reference: 11 files, but a drawing reads 10 images; give fewer"),
}


def test_references_that_cannot_be_shown_are_refused_before_a_process_is_started(
    pictures: Path, before: Path, tmp_path: Path
) -> None:
    (file, *_) = files = tuple(map(str, sorted(before.glob("*.png"))[:1] * 11))
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | {"sample__every": 0}))
    for changes, count, message in REFUSED_REFERENCES.values():
        run.config_file.write_text(dump_config(run_config(pictures, **SAMPLES | changes)))
        with pytest.raises(InputError) as error:
            commands.begin_drawing(run, DrawingRequest(("a",), references=files[:count]))
        assert str(error.value) == message.format(file)
    text = tmp_path / "text.png"
    text.write_text("a fox")
    for path, reason in (
        (f"{file[:-1]}", f"no file '{file[:-1]}'; did you mean '{file}'?"),
        (str(before), f"'{before}' is a folder; name an image"),
        (str(text), f"{text}: cannot be read (not an image of a known format); replace or remove it"),
    ):
        with pytest.raises(InputError) as error:
            commands.begin_drawing(run, DrawingRequest(("a",), references=(path,)))
        assert str(error.value) == f"reference: {reason}"
    assert not (run.path / "drawings").exists()


def test_a_run_of_a_stranger_has_a_drawing_read_no_file_outside_of_it(
    pictures: Path, before: Path, tmp_path: Path
) -> None:
    run = trained_run(tmp_path, run_config(pictures, **SAMPLES | {"sample__references": [str(before / "00.png")] * 2}))
    with EventWriter(run.events_file) as events:
        path = "samples/step-000000-0.png"
        events.write(SampleEvent(prompt="a", index=0, path=path, references=(str(before / "00.png"),)))
    with pytest.raises(InputError, match=f"{before}/00.png: not a file of run"):
        commands.begin_drawing(run, DrawingRequest(("first",)))
    # What the user names is read, whatever the run says.
    assert drawn(run, "first", references=(str(before / "01.png"),)).references


def test_a_drawing_asked_for_on_the_command_line_takes_references() -> None:
    parsed: dict[tuple[str, ...] | None, list[str]] = {
        None: [],
        (): ["--without-references"],
        ("a.png", "-b.png"): ["--reference=a.png", "--reference=-b.png"],
    }
    for references, options in parsed.items():
        request = DrawingRequest(("a",), references=references)
        assert request.arguments() == ["--prompt=a", "--strength=1.0", *options]
        assert asked(_parser().parse_args(["run", *request.arguments()])) == request
