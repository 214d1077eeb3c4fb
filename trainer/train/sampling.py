"""Samples while a run trains: prompts are spread over the ranks, idle ranks take part, rank 0 writes the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.source import Generate, Sampler
from trainer.distributed.world import World
from trainer.rng import SampleRng
from trainer.run.events import AnyEvent, PromptsEvent, SampleEvent
from trainer.run.folder import RunDir
from trainer.run.prompts import check_prompts, clear_prompts, prompts_in_force, requested_prompts
from trainer.run.samples import Sample, reference_name
from trainer.system import files
from trainer.system.errors import InputError
from trainer.train.log import RunLog


class SampleSchedule:
    """Generates the samples of a run, each from the same noise at every step.

    Args:
        seed: `sample.seed`.
        before: Optimizer steps of the stages before, which are added to the step in a file's name.
        events: Those of the run so far, on rank 0: samples of other prompts are never overwritten.
    """

    def __init__(
        self,
        sampler: Sampler,
        seed: int,
        run: RunDir,
        world: World,
        log: RunLog,
        before: int,
        events: Iterable[AnyEvent] = (),
    ) -> None:
        self._sampler, self._seed, self._run, self._world, self._log = sampler, seed, run, world, log
        self._before = before
        self._prompts = {event.path: event.prompt for event in events if isinstance(event, SampleEvent)}
        self._copies = self._copy_references() if world.rank == 0 else {}

    def _copy_references(self) -> dict[Path, str]:
        """Copy the reference images of the samples into the run folder, by which they are shown next to the samples.

        Returns:
            {file: path of its copy in the run folder}; without those that cannot be copied, which is a warning.
        """
        copies: dict[Path, str] = {}
        for file in dict.fromkeys(
            chain.from_iterable(map(self._sampler.references, range(len(self._sampler.prompts))))
        ):
            try:
                content = file.read_bytes()
                # The digest tells it from another image that had this name in an earlier start.
                copy = self._run.samples / reference_name(file, hashlib.blake2b(content, digest_size=4).hexdigest())
                if not copy.exists():
                    files.replace(copy, content)
            except OSError as error:
                self._log.warn(f"sample.references: {file}: cannot be copied ({error}); samples are shown without it")
            else:
                copies[file] = str(copy.relative_to(self._run.path))
        return copies

    def are_missing(self, step: int) -> bool:
        """Whether samples of this step are missing: before the first step, or where a run was killed after saving."""
        paths = [self._file(index, step) for index in range(len(self._sampler.prompts))]
        exist: bool = self._world.gather(bool(paths) and all(path.exists() for path in paths))[0]
        return not exist

    def generate(self, model: nn.ModuleDict, generate_one: Generate, step: int) -> list[Path]:
        """Generate all samples. Each is written, and its event emitted, as soon as it is there. Collective.

        A full disk is a warning.

        Args:
            model: The live components, with the weights to evaluate.
            generate_one: The result of `Sampler.prepare`.
            step: The optimizer step they belong to.

        Returns:
            Their paths on rank 0, none on other ranks.
        """

        def generate(index: int) -> Sample:
            return generate_one(model, index, SampleRng(self._seed, (index,), self._world.device))

        rounds = (some for group in self._sampler.groups for some in generate_all(group, generate, self._world))
        return [path for samples in rounds for path in self._write(samples, step)]

    def _write(self, samples: Mapping[int, Sample], step: int) -> list[Path]:
        paths: list[Path] = []
        try:
            for index, sample in samples.items():
                path = self._file(index, step)
                sample.write(path)
                paths.append(path)
                name = str(path.relative_to(self._run.path))
                prompt = self._prompts[name] = self._sampler.prompts[index]
                shown = tuple(self._copies[file] for file in self._sampler.references(index) if file in self._copies)
                self._log.emit(
                    SampleEvent(step=step, prompt=prompt, index=index, path=name, text=sample.text, references=shown)
                )
        except OSError as error:
            self._log.warn(f"samples could not be written ({error}); free disk space", step)
        return paths

    def change_prompts(self, cfg: RunConfig, step: int) -> None:
        """Take the prompts that were requested since the last samples. If they cannot be used, the former ones stay.
        Collective."""
        prompts, problem = self._world.gather(self._requested(cfg))[0]
        if prompts and not problem:
            try:
                self._sampler.change_prompts(prompts)
                self._log.emit(PromptsEvent(step=step, prompts=prompts, instead_of=cfg.sample.prompts))
            except InputError as error:
                problem = str(error)
        if problem:
            self._log.warn(f"the samples keep their prompts: {problem}", step)
        if self._world.rank == 0 and (prompts or problem):
            try:
                clear_prompts(self._run, prompts)
            except OSError as error:  # it is taken again before the next samples, which changes nothing
                self._log.warn(f"the request for other prompts could not be removed ({error})", step)

    def _requested(self, cfg: RunConfig) -> tuple[tuple[str, ...] | None, str]:
        """(the requested prompts, if any; why they cannot be used), on rank 0, the only one that sees requests."""
        prompts = None
        try:
            prompts = requested_prompts(self._run) if self._world.rank == 0 else None
            if prompts is not None:
                check_prompts(cfg, prompts)
        except InputError as error:
            return prompts, str(error)
        return prompts, ""

    def _file(self, index: int, step: int) -> Path:
        """The file of a sample. Where another prompt has taken its name, this prompt's digest is added to it."""
        prompt, suffix = self._sampler.prompts[index], self._sampler.kind(index).suffix
        file = self._run.samples / f"step-{self._before + step:06d}-{index}{suffix}"
        if self._prompts.get(str(file.relative_to(self._run.path)), prompt) == prompt:
            return file
        digest = hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()
        return file.with_name(f"{file.stem}-{digest}{suffix}")


def with_requested_prompts(cfg: RunConfig, events: Sequence[AnyEvent], world: World, log: RunLog) -> RunConfig:
    """The config with the prompts that were requested before a run was resumed. Collective. events: on rank 0."""
    prompts = world.gather(prompts_in_force(events, cfg))[0]
    try:
        return cfg.with_prompts(prompts)
    except InputError as error:  # other fields of the config were changed since
        log.warn(f"samples are generated from sample.prompts, not from those requested before: {error}")
        return cfg


def generate_all(
    numbers: Sequence[int], generate: Callable[[int], Sample], world: World
) -> Iterator[dict[int, Sample]]:
    """Spread samples over the ranks. Collective: every rank takes all that is yielded.

    An error ends this rank at once, and torchrun the others: were it agreed first, ranks inside the model would wait
    for this one in vain.

    Args:
        generate: (number) -> sample. It may call a sharded model, so every rank calls it equally
            often: a rank without a sample of its own repeats one and drops it.

    Yields:
        {number: sample} of one sample per rank, on rank 0; {} on other ranks.
    """
    for first in range(0, len(numbers), world.data_size):
        position = first + world.data_rank
        number = numbers[position % len(numbers)]
        sample = generate(number)
        mine = {number: sample} if position < len(numbers) else {}
        gathered = world.gather(mine)
        yield {index: drawn for some in gathered for index, drawn in some.items()} if world.rank == 0 else {}
