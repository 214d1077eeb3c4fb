"""Caption a job's images: each rank its own, with the whole model, or all ranks together with a sharded one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from trainer.captioning.styles import cleaned, instruction
from trainer.data.images.image_files import MAX_CAPTION
from trainer.data.images.image_io import load_resized, read_header
from trainer.distributed.world import World
from trainer.models.build import Listener
from trainer.models.vision_language import Answer, Decoding, VisionLanguage, VisionLanguageFolder
from trainer.run.captioning import CaptionJob, CaptionRequest, Written
from trainer.run.events import EventWriter, State, StatusEvent, WarningEvent
from trainer.system.errors import InputError

COUNTER = "captioned images"
"""Key of the counter by which ranks with whole models take images."""
LARGE = 10**8
"""Parameters from which on several threads compute faster than one."""
LIMITS_OF_DEMO = (
    "demo: names the pictogram that fills an image, and follows no instruction; all other images get wrong names"
)
BLANK = Image.new("RGB", (64, 64))
"""Looked at by a rank of a sharded model that has no image of its own left."""


def caption_job(job: CaptionJob, world: World, cache: Path) -> None:
    """Caption the images of a job that have no caption yet, until all are done or a stop is requested. Collective.

    Raises:
        InputError: The model cannot be loaded or asked.
    """
    request, log = job.request, _Log(job, world)
    log.status("loading")
    source = VisionLanguageFolder(request.model_path)
    prompt = _prompt(source, request, log)
    listener = Listener(warn=log.warn)
    model = VisionLanguage.load(source, request.config(), world, cache, request.shard, listener)
    if model.num_parameters > LARGE:
        # The launcher gives each rank one thread. More of them help large products, and slow down small ones.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    done = {written.name for written in job.captions().read()}
    images = [image.name for image in job.images()]
    todo = [name for name in images if name not in done]
    world.barrier()  # a rank writes only when all have read
    log.status("sampling", len(images) - len(todo), len(images))
    worker = _Worker(job, request, model, prompt, world.rank)
    is_stopped = (_together if model.is_sharded else _each)(worker, todo, world)
    world.barrier()
    left = is_stopped and len({written.name for written in job.captions().read()}) < len(images)
    log.status("stopped" if left else "finished")


def _prompt(source: VisionLanguageFolder, request: CaptionRequest, log: _Log) -> str:
    """Return what the model is asked with, after it was tried on a blank image."""
    prompt = source.prompt(request.style, instruction(request), request.prompt)
    if request.is_demo:
        log.warn(LIMITS_OF_DEMO)
    if request.omit and not source.is_instructed and request.style != "tags":
        log.warn(f"{request.model}: does not follow instructions, so captions may name what --omit lists")
    try:
        source.inputs(BLANK, prompt)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"--prompt: {request.model} cannot be asked so ({error}); change it or leave it out"
        ) from error
    return prompt


def _each(worker: _Worker, todo: Sequence[str], world: World) -> bool:
    """Caption images by whole models: each rank takes the next one, so all end at nearly the same time.

    Returns whether a stop was requested.
    """
    while (number := world.store.add(COUNTER, 1) - 1) < len(todo):
        if worker.job.run.requested("stop"):
            return True
        worker.caption(todo[number])
    return False


def _together(worker: _Worker, todo: Sequence[str], world: World) -> bool:
    """Caption images by a sharded model, a round of one image per rank at a time. Returns whether a stop was requested.

    Every rank makes the same number of calls: the ranks generate until the last of them is done, and one that has no
    image looks at a blank one.
    """
    for begin in range(0, len(todo), world.size):
        if world.sum([float(worker.job.run.requested("stop"))])[0]:
            return True
        own = todo[begin + world.rank :][:1] if begin + world.rank < min(len(todo), begin + world.size) else []
        worker.caption(own[0] if own else None)
    return False


@dataclass(frozen=True)
class _Worker:
    """A rank with its model."""

    job: CaptionJob
    request: CaptionRequest
    model: VisionLanguage
    prompt: str
    rank: int

    def caption(self, name: str | None) -> None:
        """Caption one image and append the result to the job; None takes part in a sharded model's calls only."""
        began, problem, inputs = time.perf_counter(), "", None
        try:
            image = BLANK if name is None else self._image(name)
            inputs = self.model.source.inputs(image, self.prompt)
        except InputError as error:
            problem = str(error)
        except ValueError as error:  # of a processor, as for an image of 1 x 2000 pixels
            problem = f"{self._folder / (name or '')}: the model cannot look at it ({error}); crop or remove it"
        if inputs is None and self.model.is_sharded:
            inputs = self.model.source.inputs(BLANK, self.prompt)
        decoding = Decoding(self.request.tokens, self.request.temperature, self.request.seed)
        answer = Answer("", True) if inputs is None else self.model.answer(inputs, decoding, name or "")
        if name is None:
            return
        caption = "" if problem else cleaned(answer.text, self.request, answer.is_complete, MAX_CAPTION)
        if not caption and not problem:
            problem = f"{self._folder / name}: the model wrote nothing that can be used; caption it by hand"
        self.job.add(Written(name, caption, problem, self.rank, round(time.perf_counter() - began, 3)))

    @property
    def _folder(self) -> Path:
        return Path(self.request.folder)

    def _image(self, name: str) -> Image.Image:
        """Load an image upright, in sRGB, on white, scaled down to `pixels` of the request."""
        file = read_header(self._folder / name)
        scale = min(1.0, (self.request.pixels / (file.width * file.height)) ** 0.5)
        return load_resized(file, (max(1, round(file.width * scale)), max(1, round(file.height * scale))))


class _Log:
    """Events of a job, by rank 0."""

    def __init__(self, job: CaptionJob, world: World) -> None:
        self._job, self._writes = job, world.rank == 0

    def status(self, state: State, done: int = 0, total: int = 0) -> None:
        self._write(StatusEvent(state=state, done=done, total=total))

    def warn(self, sentence: str) -> None:
        self._write(WarningEvent(message=sentence))

    def _write(self, event: StatusEvent | WarningEvent) -> None:
        if self._writes:
            with EventWriter(self._job.run.events_file) as writer:
                writer.write(event)


def out_of_memory(job: CaptionJob, error: torch.OutOfMemoryError) -> InputError:
    """Return what to do about a model or an image that a GPU's memory does not hold."""
    first = str(error).partition(". ")[0]
    request = job.request
    ways = [] if request.quantize == "nf4" else ["--quantize nf4"]
    ways += [] if request.shard else ["--ranks N --shard, which shares one copy of the model"]
    ways += [f"--pixels {request.pixels // 2}, which looks at smaller images"]
    return InputError(f"{request.model}: does not fit the GPU's memory ({first}); add {', or '.join(ways)}")
