"""The film of a run: what is in its frames and on its sheets, what is refused, and whose files it replaces."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from app.runs import film
from tests.app.browser import recorded
from tests.runs import make_pictures, run_config, write
from trainer.run.events import EventReader, SampleEvent, StatusEvent
from trainer.run.folder import RunDir
from trainer.run.process import worker_environment
from trainer.run.samples import FILM_RECORD, film_of
from trainer.system.errors import InputError
from trainer.view.film import SHEET_SIDE, shown_size, title_of

BROKEN = "samples/step-000020-0.png"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A machine without ffmpeg, and a run that finished with two prompts at steps 20 and 40."""
    monkeypatch.setattr(film, "_encoder", lambda: None)
    return recorded(tmp_path / "runs", "drawn")


def drawn_run(folder: Path, colors: Sequence[str], side: int = 64, ends: bool = True) -> RunDir:
    """A run with one prompt and a sample of one colour every 10 steps, the first before training."""
    config = run_config(make_pictures(folder / "pictures", count=3), name="fox", train__steps=10 * (len(colors) - 1))
    run = RunDir.create(folder, config, at=folder / "fox")
    write(run, StatusEvent(state="training", time=1e9))
    for at, color in enumerate(colors):
        path = f"samples/step-{10 * at:06d}-0.png"
        Image.new("RGB", (side, side), color).save(run.path / path)
        write(run, SampleEvent(step=10 * at, prompt="a TOK fox", index=0, path=path, time=1e9 + 60 * at))
    if ends:
        write(run, StatusEvent(state="finished", step=10 * (len(colors) - 1), time=1e9 + 60 * len(colors)))
    return run


def brightness(pixel: tuple[int, ...]) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = (channel / 255 for channel in pixel[:3])
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(area: Image.Image) -> float:
    """The highest contrast of two pixels: of letters and their ground, where an area has words."""
    bright = sorted(brightness(pixel) for pixel in area.convert("RGB").get_flattened_data())
    return (bright[-1] + 0.05) / (bright[0] + 0.05)


def test_the_loop_shows_the_samples_in_step_order_and_holds_the_first_and_the_last(run: RunDir, tmp_path: Path):
    colors = ["#404040", "#802020", "#208020", "#2020c0"]
    made = film.make(drawn_run(tmp_path / "one", colors))
    loop = Image.open(tmp_path / "one/fox/film" / made.prompts[0].loop)
    assert (made.prompts[0].steps, loop.n_frames, loop.info["loop"]) == ((0, 10, 20, 30), 4, 0)
    shown, held, words = [], [], []
    for at in range(loop.n_frames):
        loop.seek(at)
        frame = loop.convert("RGB")  # decodes the frame, and with it its duration
        held.append(loop.info["duration"])
        shown.append(frame.getpixel((loop.width // 2, 256)))
        words.append(frame.crop((0, 530, loop.width, loop.height)))
    for pixel, color in zip(shown, colors, strict=True):
        wanted = tuple(bytes.fromhex(color[1:]))
        assert max(abs(a - b) for a, b in zip(pixel, wanted, strict=True)) < 12
    assert held == [1500, 600, 600, 2500]
    assert all(contrast(area) >= 4.5 for area in words)
    assert len({area.tobytes() for area in words}) == 4  # labels and bars differ


@pytest.mark.parametrize("side", [64, 1024])
def test_the_words_on_a_sheet_are_legible_at_any_size_of_the_samples(run: RunDir, tmp_path: Path, side: int):
    made = film.make(drawn_run(tmp_path / "one", ["#404040", "#208020", "#2020c0"], side), price=2.0)
    sheet = Image.open(tmp_path / "one/fox/film" / made.prompts[0].sheet)
    height = shown_size((side, side), SHEET_SIDE)[1]
    assert height == {64: 256, 1024: 384}[side]
    column, below = sheet.width // 3, 24 + height
    for at in range(3):
        label = sheet.crop((at * column + 8, below + 24, (at + 1) * column - 8, below + 54))
        assert contrast(label) >= 4.5
    for left, right in ((0, sheet.width // 2), (sheet.width // 2, sheet.width)):  # the prompt; model, steps, price
        assert contrast(sheet.crop((left, below + 90, right, sheet.height))) >= 4.5
    assert contrast(sheet.crop((0, sheet.height - 16, sheet.width, sheet.height))) < 1.1


def test_the_corner_says_model_method_steps_time_and_price(tmp_path: Path):
    run = drawn_run(tmp_path / "one", ["#404040", "#208020", "#2020c0"])
    events = EventReader(run.events_file).read()
    credits = film._credits(run.config(), events, next(one for one in events if isinstance(one, SampleEvent)), 2.0)
    assert (credits.model, credits.facts) == ("Tiny model (flux2)", "LoRA rank 4, 1 step, 3 min, $0.10")


@pytest.mark.parametrize(
    ("prompt", "title"),
    [
        ("a  TOK\nfox", "a TOK fox"),
        ("Crème brûlée für zwei", "Creme brulee fur zwei"),
        ("a happy fox 🦊", "a happy fox "),
        ("雪の中の狐", "prompt 3"),
        ("", "prompt 3"),
    ],
)
def test_a_prompt_is_written_as_far_as_the_font_reaches(prompt: str, title: str):
    assert title_of(prompt, 3) == title


def texts(run: RunDir) -> None:
    run.events_file.unlink()
    write(run, SampleEvent(step=20, prompt="a", index=0, path="samples/step-000020-0.txt", text="a"))


def of_one_step(run: RunDir) -> None:
    lines = run.events_file.read_text().splitlines(keepends=True)
    run.events_file.write_text("".join(line for line in lines if "step-000040" not in line))


def broken(run: RunDir) -> None:
    for file in run.samples.iterdir():
        file.write_bytes(file.read_bytes()[:60])


def outside(run: RunDir) -> None:
    run.events_file.unlink()
    for step in (20, 40):
        write(run, SampleEvent(step=step, prompt="a", index=0, path="../../other.png"))


@pytest.mark.parametrize(
    ("spoil", "number", "sentence"),
    [
        (lambda run: run.events_file.write_text(""), None, "drawn: has no samples; set sample.prompts"),
        (texts, None, "drawn: its samples are of the kind text; a film needs images"),
        (lambda run: shutil.rmtree(run.samples), None, "prompt 1 has no sample that can be shown, a film needs two"),
        (of_one_step, None, "prompt 1 has 1 sample that can be shown, a film needs two; prompt 2 has 1 sample"),
        (broken, None, "prompt 1 has no sample that can be shown, a film needs two; samples/step-000020-0.png"),
        (outside, None, "../../other.png: not a file of drawn"),
        (lambda run: None, 3, "prompt 3: has no images; choose of 1, 2"),
    ],
)
def test_what_cannot_be_filmed_is_refused_in_a_sentence(
    run: RunDir, spoil: Callable[[RunDir], object], number: int | None, sentence: str
):
    spoil(run)
    with pytest.raises(InputError) as refused:
        film.make(run, number)
    assert sentence in str(refused.value)
    assert str(run.path) not in str(refused.value)
    assert not list(run.film.glob("prompt-*"))


def test_broken_samples_are_left_out_and_said_and_others_take_their_place(run: RunDir):
    with Image.open(run.samples / "step-000040-0.png") as image:
        image.save(run.samples / "step-000060-0.png")
        image.resize((64, 128)).save(run.samples / "step-000080-0.png")
    for step in (60, 80):
        write(run, SampleEvent(step=step, prompt="a cat", index=0, path=f"samples/step-0000{step}-0.png"))
    (run.path / BROKEN).write_bytes(b"no picture")
    made = film.make(run)
    assert made.prompts[0].steps == (40, 60, 80)
    problem, sizes, no_video = made.notes
    assert problem.startswith(f"prompt 1: samples left out: 1, first {BROKEN}: ")
    assert sizes == "prompt 1: its samples have 2 sizes; they are shown in that of the last one."
    assert no_video == film.NO_ENCODER
    with Image.open(run.film / "prompt-1.webp") as loop:
        assert loop.height > loop.width  # as the last sample is


def test_of_500_samples_60_are_shown_with_the_first_and_the_last(run: RunDir):
    source = run.samples / "step-000020-0.png"
    names = [f"samples/many-{step}.png" for step in range(500)]
    for name in names:
        (run.path / name).hardlink_to(source)
    (run.path / names[-1]).unlink()
    write(run, *(SampleEvent(step=step, prompt="many", index=5, path=name) for step, name in enumerate(names)))
    made = film.make(run, number=6)
    steps = made.prompts[0].steps
    assert (len(steps), steps[0], steps[-1]) == (60, 0, 498)
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    assert gaps <= {8, 9}


def test_a_film_that_is_made_again_replaces_its_own_files_only(run: RunDir):
    (run.film).mkdir()
    (run.film / "notes.txt").write_text("mine")
    film.make(run)
    before = (run.film / "prompt-1.webp").read_bytes()
    with Image.open(run.samples / "step-000020-0.png") as image:
        image.rotate(90).save(run.samples / "step-000060-0.png")
    write(run, SampleEvent(step=60, prompt="a cat", index=0, path="samples/step-000060-0.png"))
    again = film.make(run, number=1)
    assert [one.steps for one in again.prompts] == [(20, 40, 60), (20, 40)]
    assert (run.film / "prompt-1.webp").read_bytes() != before
    assert (run.film / "notes.txt").read_text() == "mine"
    (run.film / "prompt-2.jpg").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"prompt-2.jpg: somebody's own, or changed; move it away"):
        film.make(run)
    assert (run.film / "prompt-2.jpg").read_bytes() == b"mine"
    assert film_of(run) == again
    assert [file.name for file in run.film.iterdir() if file.name.startswith(".")] == [".lock"]


def test_a_record_of_a_stranger_leads_to_no_other_file(run: RunDir):
    film.make(run)
    record = json.loads((run.film / FILM_RECORD).read_text())
    name = "../config.yaml"
    record["prompts"][0]["loop"] = name
    record["digests"][name] = record["digests"]["prompt-1.webp"]
    (run.film / FILM_RECORD).write_text(json.dumps(record))
    with pytest.raises(InputError, match="not a file of the film"):
        film_of(run).file(run, name)
    (run.film / FILM_RECORD).write_text("{}}")
    assert film_of(run).prompts == ()
    with pytest.raises(InputError, match="not a record of ours; move it away"):
        film.make(run)


def test_a_run_that_goes_on_is_filmed_so_far_and_its_report_shows_the_sheet(run: RunDir, tmp_path: Path):
    going = drawn_run(tmp_path / "one", ["#404040", "#208020"], ends=False)
    film.make(going)
    report = going.report.read_text()
    assert report.count('class="sheet"') == 1
    assert "Before, during and after training: a TOK fox" in report


def test_the_command_makes_the_film_of_one_prompt(run: RunDir, capsys: pytest.CaptureFixture[str]):
    from app.command_line import main

    assert main(["--film", str(run.path), "--prompt", "2", "--price", "0.5"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(run.film / name) for name in ("prompt-2.webp", "prompt-2.jpg")]
    assert said.err.splitlines() == [f"note: {film.NO_ENCODER}"]
    assert main(["--film", str(run.path), "--prompt", "zero"]) == 2
    assert main(["--film", str(run.path.parent / "no")]) == 2


@pytest.mark.slow
def test_500_samples_of_1024_pixels_take_less_than_400_mb(run: RunDir):
    Image.effect_noise((1024, 1024), 80).convert("RGB").save(run.samples / "large.png")
    names = [f"samples/many-{step}.png" for step in range(500)]
    for name in names:
        (run.path / name).hardlink_to(run.samples / "large.png")
    write(run, *(SampleEvent(step=step, prompt="many", index=0, path=name) for step, name in enumerate(names)))
    peak = "import sys; from app.runs import film; code = film.main(); "  # ru_maxrss would be that of this process
    peak += "print(code, open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    argv = [sys.executable, "-c", peak, str(run.path)]
    done = subprocess.run(argv, env=worker_environment(), capture_output=True, text=True, check=True)
    code, kilobytes = done.stdout.splitlines()[-1].split()
    assert (code, int(kilobytes) < 400_000) == ("0", True), kilobytes


def test_a_video_is_written_where_there_is_an_encoder_and_one_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = drawn_run(tmp_path, ["#404040", "#208020"])
    made = film.make(run)
    assert made.notes == ()
    assert (run.film / made.prompts[0].video).read_bytes()[4:8] == b"ftyp"
    monkeypatch.setattr(film, "_encoder", lambda: sys.executable)
    again = film.make(run)
    assert again.notes[0].startswith(f"prompt 1: there is no MP4, {Path(sys.executable).name} failed (")
    assert again.prompts[0].video == ""
    assert not (run.film / made.prompts[0].video).exists()


def test_a_long_prompt_and_a_sample_of_one_line_are_filmed_in_time(run: RunDir):
    words = "fox " * 5000
    for step, size in ((50, (2000, 1)), (60, (1, 2000))):
        Image.new("RGB", size, "red").save(run.samples / f"thin-{step}.png")
        write(run, SampleEvent(step=step, prompt=words, index=7, path=f"samples/thin-{step}.png"))
    began = time.process_time()
    made = film.make(run, 8)
    assert (made.prompts[-1].steps, time.process_time() - began < 5) == ((50, 60), True)


def test_a_file_in_the_place_of_the_films_folder_is_named(run: RunDir):
    run.film.write_text("mine")
    with pytest.raises(InputError, match="holds a file where a film needs a folder"):
        film.make(run)
    assert run.film.read_text() == "mine"
