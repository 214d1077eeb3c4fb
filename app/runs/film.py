"""The film of a run: a loop and a sheet for each prompt, made of its samples. `python -m app.runs.film RUN`.

A process of its own where the page starts it, so that large samples are decoded there. See DECISIONS 217.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from PIL import Image

from app.data.thumbnails import preview
from trainer.config.schema import RunConfig
from trainer.config.titles import method_title, model_title
from trainer.launcher.jobs import side_process
from trainer.launcher.remedy import with_remedy
from trainer.run.events import ENDS, AnyEvent, EventReader, SampleEvent, by_prompt, last_state, latest_steps
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.run.pace import Clock
from trainer.run.samples import FILM_RECORD, IMAGE, Film, FilmedPrompt, film_of
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.terminal import say
from trainer.view import film as drawn
from trainer.view.film import Credits, Picture
from trainer.view.numbers import format_duration
from trainer.view.report import write_report
from trainer.view.steps import spread

MODULE = "app.runs.film"
MOST_FRAMES = 60
"""Samples in a loop. They are held in memory, 1.8 MB each at most; frames are drawn one at a time."""
SHEET_COLUMNS = 5
FRAMES_PER_SECOND = 20
FIRST_MS, LAST_MS, MIDDLE_MS = 1500, 2500, 7000
"""How long the first sample, the last, and all others together are shown."""
NO_ENCODER = (
    "There is no MP4: this machine has no ffmpeg. Install it, or imageio-ffmpeg by pip, and make the film again."
)


def make(run: RunDir, number: int | None = None, price: float | None = None) -> Film:
    """Make the film of a run, or of one of its prompts, in place of the former one. The run's report then shows it.

    Args:
        run: The run, in any state.
        number: Number of the prompt, from 1; None for all.
        price: Price of a GPU-hour in dollars.

    Raises:
        InputError: There are no samples to make it of, or its folder holds a file that is not ours.
    """
    run.guard()
    cfg, events = run.config(), EventReader(run.events_file).read()
    rows = _rows(run, events, number)
    draft = run.film / ".draft"
    if (run.film.exists() and not run.film.is_dir()) or (draft.exists() and not draft.is_dir()):
        raise InputError(f"{run.film}: holds a file where a film needs a folder; move it away, and make the film again")
    run.film.mkdir(exist_ok=True)
    with files.locked_by_one(run.film / ".lock", f"{run.path.name}: another film is being made; wait until it is done"):
        if draft.exists():  # of a process that was stopped
            shutil.rmtree(draft)
        draft.mkdir()
        try:
            made, notes = _make_all(run, cfg, events, rows, draft, price)
            film = _put_in_place(run, draft, made, notes)
        finally:
            shutil.rmtree(draft)
    write_report(run, with_remedy)
    return film


def main() -> int:
    """Exit code 0: made, the output is its folder; 2: the user's mistake, which is the output."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--price", type=float, help="price of a GPU-hour in dollars")
    options = parser.parse_args()
    try:
        run = RunDir.open(options.run_dir)
        make(run, price=options.price)
        say(run.film)
    except InputError as error:
        say(error)
        return 2
    return 0


def begin(run: RunDir, price: float | None = None) -> subprocess.Popen[bytes]:
    """Start to make the film of a run in a separate process. Its exit code is 2 for the user's mistake.

    Raises:
        InputError: A folder of the run is missing and cannot be made.
    """
    run.guard()
    run.complete_folders(run.config())
    priced = [] if price is None else ["--price", str(price)]
    return side_process.begin(run, "film", [sys.executable, "-m", MODULE, str(run.path), *priced])


def output(run: RunDir, code: int) -> str:
    """Return the folder of the last film of a run, or why it failed. code: exit code of its process."""
    return side_process.answer(run, "film", code, "film")


def _rows(run: RunDir, events: Sequence[AnyEvent], number: int | None) -> list[tuple[str, list[SampleEvent]]]:
    """Return (name of its files, samples in step order) of each prompt that has images."""
    samples = [event for event in events if isinstance(event, SampleEvent)]
    kinds = sorted({sample.kind.name for sample in samples})
    if not samples:
        raise InputError(
            f"{run.path.name}: has no samples; set sample.prompts and sample.every in a new run, or ask for a sample "
            "while it runs"
        )
    rows = by_prompt(sample for sample in samples if sample.kind is IMAGE)
    if not rows:
        raise InputError(f"{run.path.name}: its samples are of the kind {' and '.join(kinds)}; a film needs images")
    numbers = sorted({index + 1 for index, _ in rows})
    if number is not None and number not in numbers:
        raise InputError(f"prompt {number}: has no images; choose of {', '.join(map(str, numbers))}")
    found, names = [], set[str]()
    for (index, prompt), row in rows.items():
        name = f"prompt-{index + 1}"
        if name in names:  # another prompt had that position
            name += f"-{hashlib.sha256(prompt.encode()).hexdigest()[:6]}"
        names.add(name)
        if number in (None, index + 1):
            found.append((name, [row[step] for step in sorted(row)]))
    return found


def _make_all(
    run: RunDir,
    cfg: RunConfig,
    events: Sequence[AnyEvent],
    rows: Iterable[tuple[str, list[SampleEvent]]],
    draft: Path,
    price: float | None,
) -> tuple[list[FilmedPrompt], list[str]]:
    """Write the files of all prompts into a folder. Returns them, and what was left out."""
    made, notes, refused = [], [], []
    encoder = _encoder()
    for name, samples in rows:
        pictures, problems = _pictures(run, samples)
        first = samples[0]
        what = f"prompt {first.index + 1}"
        if len(pictures) < 2:
            more = f"; {problems[0]}" if problems else ""
            refused.append(f"{what} has {len(pictures) or 'no'} sample that can be shown, a film needs two{more}")
            continue
        if problems:
            notes.append(f"{what}: samples left out: {len(problems)}, first {problems[0]}")
        sizes = {picture.size for _, picture in pictures}
        if len(sizes) > 1:
            notes.append(f"{what}: its samples have {len(sizes)} sizes; they are shown in that of the last one.")
        credits = _credits(cfg, events, first, price)
        with (draft / f"{name}.webp").open("wb") as loop:
            _write_loop(loop, pictures, credits)
        drawn.sheet(spread(pictures, SHEET_COLUMNS), credits).save(
            draft / f"{name}.jpg", quality=92, subsampling=0, optimize=True
        )
        video = f"{name}.mp4" if encoder else ""
        if encoder and (problem := _write_video(encoder, draft / video, pictures, credits)):
            notes.append(f"{what}: there is no MP4, {problem}")
            video = ""
        steps = tuple(step for step, _ in pictures)
        made.append(FilmedPrompt(first.index, first.prompt, steps, f"{name}.webp", f"{name}.jpg", video))
    if not made:
        raise InputError(f"{run.path.name}: {'; '.join(refused)}")
    return made, [*notes, *refused, *([] if encoder else [NO_ENCODER])]


def _pictures(run: RunDir, samples: Sequence[SampleEvent]) -> tuple[list[Picture], list[str]]:
    """Return at most MOST_FRAMES samples, evenly chosen from those that can be shown, and why others cannot be."""
    left, problems, loaded = list(samples), list[str](), dict[int, Image.Image]()
    while True:
        chosen = spread(left, MOST_FRAMES)
        loaded = {sample.step: loaded[sample.step] for sample in chosen if sample.step in loaded}
        for sample in chosen:
            if sample.step in loaded:
                continue
            try:
                loaded[sample.step] = preview(run.own_file(sample.path), drawn.FRAME_SIDE)
            except (InputError, OSError, ValueError) as error:
                problems.append(_reason(run, sample, error))
                left.remove(sample)
        if all(sample.step in loaded for sample in chosen):  # else others are chosen in their place
            return sorted(loaded.items()), problems


def _reason(run: RunDir, sample: SampleEvent, error: Exception) -> str:
    """Why a sample is not shown, without the folders that lead to it."""
    reason = str(error).replace(f"{run.path.resolve()}/", "").replace(f"{run.path}/", "")
    return reason if sample.path in reason else f"{sample.path}: {reason}"


def _credits(cfg: RunConfig, events: Sequence[AnyEvent], sample: SampleEvent, price: float | None) -> Credits:
    steps, clock = latest_steps(events), Clock()
    for event in events:
        clock.add(event)
    done = steps[-1].step if steps else max(sample.step, 1)
    facts = [method_title(cfg, is_sized=True), f"{done:,} step{'s' * (done != 1)}", format_duration(clock.seconds)]
    if price is not None:
        facts.append(f"${price * cfg.parallel.world_size * clock.seconds / 3600:,.2f}")
    is_over = last_state(events) in ENDS
    return Credits(
        model=model_title(cfg.model.path, cfg.model.family),
        facts=", ".join(facts),
        title=drawn.title_of(sample.prompt, sample.index + 1),
        num_steps=done if is_over else RunLength.of(cfg, events).typical,
        is_over=is_over,
    )


def _durations(count: int) -> list[int]:
    """Milliseconds of each frame."""
    middle = max(80, min(600, MIDDLE_MS // max(1, count - 2)))
    return [FIRST_MS, *[middle] * (count - 2), LAST_MS]


class _Reel:
    """All frames but the first, for Pillow's writer of animations: it draws the one that is asked for.

    That writer takes a list of images and asks each for its frames; as images, they would all be held at once.
    """

    mode = "RGB"

    def __init__(self, pictures: Sequence[Picture], credits: Credits) -> None:
        self._pictures, self._credits = pictures, credits
        self.n_frames = len(pictures) - 1

    def seek(self, index: int) -> None:
        self._frame = _frame(self._pictures, index + 1, self._credits)

    def getim(self) -> object:
        return self._frame.getim()


def _frame(pictures: Sequence[Picture], at: int, credits: Credits) -> Image.Image:
    size = drawn.shown_size(pictures[-1][1].size, drawn.FRAME_SIDE)
    return drawn.frame(pictures[at], size, credits, at == len(pictures) - 1)


def _write_loop(file: IO[bytes], pictures: Sequence[Picture], credits: Credits) -> None:
    # Frames differ in most pixels: as key frames all, they are encoded once and not also as a difference.
    how = {"quality": 82, "method": 2, "kmin": 0, "kmax": 1, "loop": 0, "duration": _durations(len(pictures))}
    _frame(pictures, 0, credits).save(file, "WEBP", save_all=True, append_images=[_Reel(pictures, credits)], **how)


def _encoder() -> str | None:
    """The program that writes MP4: the machine's ffmpeg, or the one that imageio-ffmpeg brings."""
    if found := shutil.which("ffmpeg"):
        return found
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return None
    return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())


def _write_video(encoder: str, file: Path, pictures: Sequence[Picture], credits: Credits) -> str:
    """Write an MP4 that browsers and chats play. Returns why it could not be written; "" when it was."""
    width, height = _frame(pictures, 0, credits).size
    argv = [encoder, "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    argv += ["-r", str(FRAMES_PER_SECOND), "-i", "pipe:0", "-an", "-c:v", "libx264", "-crf", "18", "-threads", "2"]
    argv += ["-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4", str(file)]
    with tempfile.TemporaryFile() as errors:
        # One that ends early breaks the pipe, and says why.
        with suppress(BrokenPipeError), subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=errors) as process:
            assert process.stdin is not None
            for at, duration in enumerate(_durations(len(pictures))):
                pixels = _frame(pictures, at, credits).tobytes()
                for _ in range(max(1, round(duration * FRAMES_PER_SECOND / 1000))):
                    process.stdin.write(pixels)
        if process.returncode == 0:
            return ""
        errors.seek(0)
        lines = errors.read(4096).decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    file.unlink(missing_ok=True)
    return f"{Path(encoder).name} failed ({lines[-1][:200]})"


def _put_in_place(run: RunDir, draft: Path, made: Sequence[FilmedPrompt], notes: Sequence[str]) -> Film:
    """Give the files of a draft their names, in place of our own former ones. Prompts not made now keep theirs."""
    former = film_of(run)
    if not former.prompts and (run.film / FILM_RECORD).exists():
        raise InputError(f"{run.film / FILM_RECORD}: not a record of ours; move it away, and make the film again")
    names = [name for one in made for name in one.files]
    for file in (run.film / name for name in names):
        try:
            if file.exists():
                former.file(run, file.name)
        except InputError as error:
            raise InputError(f"{file}: somebody's own, or changed; move it away, and make the film again") from error
    keys = {(one.index, one.prompt): one for one in former.prompts} | {(one.index, one.prompt): one for one in made}
    kept = sorted(keys.values(), key=lambda one: (one.index, one.steps[:1]))
    wanted = {name for one in kept for name in one.files}
    digests = {name: digest for name, digest in former.digests.items() if name in wanted}
    digests |= {name: hashlib.sha256((draft / name).read_bytes()).hexdigest() for name in names}
    for name in {*names, *(set(former.digests) - wanted)}:  # a former MP4, where there is no encoder any more
        with suppress(InputError):
            former.file(run, name).unlink()
    # The record comes first: after an interruption it names files that are missing, never files that seem another's.
    film = Film(tuple(kept), digests, tuple(notes))
    film.write(run)
    for name in names:
        files.rename(draft / name, run.film / name)
    return film


if __name__ == "__main__":
    sys.exit(main())
