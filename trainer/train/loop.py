"""The trainer: model family, adapter, sharding and data meet here, and the loop reads top to bottom."""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer import adapters
from trainer.checkpoint import config_changes
from trainer.checkpoint.restore import newest_intact, restore
from trainer.checkpoint.save import Checkpointer, TrainState
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes, Loader, MicroBatch, Prepared
from trainer.data.open import open_data
from trainer.distributed.context import RankContext
from trainer.distributed.straggler import Stragglers
from trainer.distributed.world import World
from trainer.export.check import check_export
from trainer.metrics.memory import local_bytes
from trainer.metrics.out_of_memory import OomContext, explain_out_of_memory
from trainer.metrics.step_time import BACKWARD, DATA, FORWARD, OPTIMIZER, StepMarks, StepTimer
from trainer.models import families
from trainer.models.build import (
    build_model,
    encoder_loader,
    load_model,
    reshard,
    sync_gradients,
)
from trainer.models.objectives import kinds as objectives
from trainer.models.objectives.base import Example, Loss, perplexity_of
from trainer.models.parts.language.neftune import noises
from trainer.models.pissa import initial_file
from trainer.models.start import continue_adapter
from trainer.optim import (
    AdamW,
    Ema,
    HasEvaluationWeights,
    evaluation_weights,
    learning_rate,
    make_optimizer,
    scale_gradients,
    set_learning_rate,
    state_tensors,
)
from trainer.parallel import attention
from trainer.parallel.compile import compiler_problem, compiles, describe_compiled
from trainer.parallel.parallelize import COMPUTE_DTYPE
from trainer.parallel.replicas import check_reduced, diverged
from trainer.rng import Draw, SampleRng, derived_seed
from trainer.run.events import (
    AnyEvent,
    Emit,
    EventReader,
    LengthEvent,
    PromptsEvent,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
)
from trainer.run.folder import Request, RunDir
from trainer.run.manifest import Progress, complete, progress_of
from trainer.run.preemption import Preemption
from trainer.run.prompts import check_prompts, clear_prompts, prompts_in_force, requested_prompts
from trainer.system.errors import InputError
from trainer.system.pinned import pin, send
from trainer.train.log import RunLog
from trainer.train.numbers import NON_FINITE, WEIGHT, LateRead, Sums
from trainer.train.sampling import SampleSchedule

log = logging.getLogger(__name__)
RISE = 1.1
"""A learning rate that is so many times as high after a resume is worth a warning."""
LEAST_RATE = 0.01
"""Part of `optim.lr` below which weights hardly change."""
SKIPS_IN_A_ROW = 20
"""A model without one finite number in so many steps is broken; further steps do not repair it."""


@dataclass(frozen=True)
class Agreed:
    """The actions that all ranks agree on after a step.

    Attributes:
        stop, save, sample: Whether the user requested this.
        preempted: Whether some rank received a signal to leave soon.
        saved: Whether every rank has written the checkpoint that was begun.

    See DECISIONS 28.
    """

    stop: bool
    preempted: bool
    save: bool
    sample: bool
    saved: bool


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, equal on all ranks.

    Attributes:
        step: Optimizer steps until then, with this one.
        loss: Mean over the examples; NaN where it was not finite on some rank.
        weight: Examples of all ranks, without padding.
        tokens: Tokens in the loss of all ranks, for a language model.
        non_finite: Ranks whose loss was not finite.
        grad_norm: Norm of the gradients before clipping.
        losses, metrics: By name, as in `StepEvent`.
    """

    step: int
    loss: float
    weight: float
    tokens: float
    non_finite: int
    grad_norm: float
    losses: dict[str, float]
    metrics: dict[str, float]

    @property
    def is_skipped(self) -> bool:
        """Whether the weights were left as they are."""
        return bool(self.non_finite) or not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class _Launched:
    """A step that the device was given, whose numbers the host has not read.

    Attributes:
        step: As in `StepNumbers`.
        numbers: `Sums.row` of all ranks, then the gradient norm.
    """

    step: int
    lr: float
    numbers: LateRead
    marks: StepMarks


class Trainer:
    """One run on one rank. Every public method is collective.

    The order of construction matters:

    1. The family refuses a config that its models cannot do.
    2. The model is built on the meta device, its frozen layers are quantized, the adapter is injected. What does not
       fit together is refused here, before a large set of captions is encoded for hours.
    3. The data. Encoders are loaded, sharded, used for what the cache lacks, and freed before the model takes their
       memory. Drawing samples loads the autoencoder again.
    4. Strategy and mesh: `parallel.strategy: auto` needs the bytes of the built model.
    5. Recompute, then compile, then `fully_shard` of each block and last the root. A recompute inside the sharded block
       gathers nothing again.
    6. `to_empty`, then every rank reads its own rows of the files: no rank ever holds the whole model.
    7. The adapter's first values, drawn from (seed, name) and therefore equal on any number of ranks; in a new run they
       are replaced by those of `adapter.start`.
    8. The optimizer over the shards. Made earlier, it would hold parameters that sharding has replaced.
    9. Hooks of the step timer and the out-of-memory context, ordered before or after those of FSDP.
    10. Resume: the newest intact checkpoint is read into the objects of 7 and 8.
    11. The loader, which begins at the position that was resumed.

    Args:
        cache: Folder shared by runs, for encoded data and tiny models.
        emit: Takes events; only rank 0's reach a reader.
        preemption: Whether this process received a signal to leave.
        before: Optimizer steps of the stages before, added to the steps that the user sees.

    Attributes:
        numbers: Of the last step whose numbers were read.
    """

    numbers: StepNumbers | None = None
    _launched: _Launched | None = None
    _own_s = 0.0  # of the last step: the seconds that this rank worked by itself

    def __init__(
        self,
        cfg: RunConfig,
        run: RunDir,
        world: World,
        cache: Path,
        emit: Emit,
        preemption: Preemption | None = None,
        before: int = 0,
    ) -> None:
        self.cfg, self.run, self.world = cfg, run, world
        self.preemption = Preemption() if preemption is None else preemption
        # A rank whose torchrun was killed is adopted by another process and would train on unnoticed.
        self._parent = os.getppid()
        self.step = self.samples_seen = self.skipped = self._skipped_in_a_row = 0
        self._asked: defaultdict[Hashable, set[Draw]] = defaultdict(set)  # by a pass with a batch of these shapes
        self.log = RunLog(run, world, emit, before)
        self.family = families.make(cfg, cache)
        self.objective = objectives.make(cfg, self.family)
        for warning in (*self.family.warnings(cfg), *self.objective.warnings(cfg)):
            self.log.warn(warning)
        built = build_model(cfg, self.family)
        self.objective.check(built)
        export_notes = check_export(cfg, self.family, built.trainables)
        load = encoder_loader(cfg, world, cache, self.log.listener("encoding"))
        events = EventReader(run.events_file).read() if world.rank == 0 else []
        context = RankContext(self._drawing(events), world, cache, emit, self._is_stopping)
        self.data, self.sampler = open_data(self.family, load, context)
        self.sample_schedule = SampleSchedule(self.sampler, cfg.sample.seed, run, world, self.log, before, events)
        emit(StatusEvent(state="loading"))
        started = time.perf_counter()
        self.cfg = cfg = self._with_compiling_decided(self.log.decide(cfg, cache))
        self.loaded = load_model(built, cfg, self.family, world, cache, self.log.listener("loading"), initial_file(run))
        self.model, self.trainables = self.loaded.module, self.loaded.trainables
        self._shards_gradients = cfg.shards_gradients(self.loaded.strategy)
        newest = self._newest_checkpoint()
        start_notes = continue_adapter(self.loaded, cfg, self.family, self.log.warn) if newest is None else ()
        for note in (*built.notes, *self.loaded.adapter.notes, *start_notes, *export_notes):
            self.log.note("loading", note)
        self._dropouts = adapters.dropouts(self.model)
        self._noises = noises(self.model)
        self.parameters = list(self.trainables.values())
        self.optimizer = make_optimizer(self.trainables, cfg.optim)
        check_reduced(self.trainables, (p for group in self.optimizer.param_groups for p in group["params"]), world)
        self.ema = Ema(self.trainables, cfg.optim.ema) if cfg.optim.ema else None
        self.checkpointer = Checkpointer(run.checkpoints, world, cfg.checkpoint.keep, cfg.checkpoint.keep_best)
        self.clock = StepTimer(world, self.loaded.mesh)
        self.clock.watch(self.model, self.family.shard.blocks, cfg.train.compile is True)
        self.stragglers = Stragglers(world.gather(socket.gethostname()))
        self.oom_context = OomContext(self.model, self.family.shard.blocks, cfg.train.compile is True, world.heartbeat)
        self._validated = (-1, math.nan)  # the step, its validation loss
        saved = None if newest is None else self._resume(newest)
        self._batch_sizes, self.num_steps = self._find_length(saved, context)
        self._warn_of_a_rise(saved)
        self.loader = self._make_loader(saved)
        self.log.model_loaded(self.loaded, self.parameters, time.perf_counter() - started, self.step)
        self._inside = self._with_attention()
        self.log.show_plan(cfg, cache, self.step)

    def train(self) -> State:
        """Run to the last step, or until a stop is requested.

        Returns:
            `finished` or `stopped`, with a checkpoint on disk.

        Raises:
            OutOfMemoryError: Memory ran out; names the block.
            FloatingPointError: A loss or gradient is not finite, at once or after too many skipped steps.
        """
        with explain_out_of_memory(self.oom_context, self.log.meter, self.allocated):
            try:
                return self._train()
            except (MemoryError, torch.OutOfMemoryError):
                self.flush_metrics()  # the step before was done
                raise

    def _train(self) -> State:
        cfg = self.cfg
        if self._due(cfg.sample.every) and self.step < self.num_steps and self.sample_schedule.are_missing(self.step):
            self.generate_samples()
        self.log.enter("training", self.step)
        while self.step < self.num_steps:
            agreed = self.train_step()
            if agreed.preempted:  # whoever sent the signal will not wait long: save and nothing else
                self._save_last()
                self.log.note("saving", "stopped by a signal; checkpoint saved, continue with --resume", self.step)
                return "stopped"
            if agreed.saved:
                self._finish_checkpoint()
            if self._due(cfg.train.check_replicas) and (name := diverged(self.trainables, self.world)):
                raise RuntimeError(f"step {self.step}: {name} differs between ranks that must hold equal copies")
            if self.data.num_held_out and self._validation_due():
                self.validate()
            # Saved before sampling, which takes memory of its own: running out of it must cost no steps.
            if agreed.stop:
                self._save_last()
            elif agreed.save or (self._due(cfg.checkpoint.every) and self.step < self.num_steps):
                self.save()
            if agreed.sample or (self._due(cfg.sample.every) and self.step < self.num_steps):
                self.generate_samples()
            if agreed.stop:
                return "stopped"
        self._save_last()
        if cfg.sample.every:
            self.generate_samples()
        return "finished"

    def train_step(self) -> Agreed:
        """Do one optimizer step over `train.batch_size` examples of all ranks, or over the last ones of `train.epochs`.

        Its numbers are read as soon as that stops nothing: at once on a CPU, and during the next step where the device
        is still at work. `flush_metrics` waits for them.
        """
        world, batch_size = self.world, self._batch_sizes.of(self.step)
        self.clock.start()
        world.heartbeat.step = self.step
        # Storage may be slow, and the first step of a resumed run counts through the epochs before.
        world.heartbeat.enter("data", moves=False)
        micro_batches = self.loader.micro_batches(self.step)
        self.clock.mark(DATA)
        sums = Sums.zero(self._num_parts, torch.empty(0, device=world.device))
        shares = self._shares(micro_batches)
        flags = None
        for i, micro_batch in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            if len(micro_batches) > 1:  # it visits every module, and a single pass always reduces
                sync_gradients(self.model, is_last, self._shards_gradients)
            self.oom_context.enter(FORWARD)
            assert micro_batch.prepared is not None
            loss = self._loss(micro_batch.prepared)
            self.clock.mark(FORWARD)
            self.oom_context.enter(BACKWARD)
            if is_last:
                flags = world.begin_sum(self._flags())  # backward hides it
            # FSDP averages over ranks; the loss of the step is a sum over their samples.
            mine = loss.total / batch_size if shares is None else loss.parts_with(shares)
            (mine * world.data_size).backward()  # type: ignore[no-untyped-call]
            self.clock.mark(BACKWARD)
            sums.add(loss)
        assert flags is not None, "a step has at least one pass"
        self.oom_context.enter(OPTIMIZER)
        self._update(sums)
        self.step += 1
        self.samples_seen += batch_size
        with self.clock.communication():
            agreed = self._agree(flags.wait())
        if self._launched is not None and self._launched.numbers.is_ready:
            self.flush_metrics()
        self.oom_context.enter("the end of a step")
        return agreed

    def flush_metrics(self) -> None:
        """Wait for the last step's metrics. They decide whether EMA is updated and whether training continues.

        Raises:
            FloatingPointError: A number is not finite and the step may not be skipped.
        """
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self.numbers = self._read(launched)

    def _shares(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Weight of each sum of `Loss.parts` in the loss of the step, for a family with `loss_weights`.

        Each mean is over the whole step, so its denominator must be known before the first backward. It follows from
        the examples, which a rank has read only for itself: one more small reduction, for such families alone.
        """
        weights = self.family.loss_weights
        if not weights:
            return None
        counts = torch.zeros(len(weights), dtype=torch.float64)
        for micro_batch in micro_batches:
            for example, weight in zip(micro_batch.examples, micro_batch.weights, strict=True):
                if weight:
                    counts += torch.tensor(self.family.loss_counts(example), dtype=torch.float64)
        with self.clock.communication():
            self.world.sum_over_data(counts)
        shares = [weight / total if total else 0.0 for weight, total in zip(weights, counts.tolist(), strict=True)]
        return send(torch.tensor(shares), self.world.device)

    def _prepare(
        self, seed: int, examples: Sequence[Example], weights: Sequence[float], indices: Sequence[int]
    ) -> Prepared:
        """The pass over examples that share a batch key; the weight of padding is 0."""
        device = self.world.device
        examples, weights, rng = self.objective.items(examples, weights, SampleRng(seed, indices, device))
        batch = {**self.family.collate(examples), "weight": torch.tensor(weights)}
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        rng = rng.ahead(self._asked[shapes])
        return Prepared({name: pin(tensor, device) for name, tensor in batch.items()}, rng)

    def _loss(self, prepared: Prepared) -> Loss:
        batch, rng = prepared.batch, prepared.rng
        if self._dropouts:
            rows = self.family.sample_rows(batch)
            adapters.set_samples(self._dropouts, rng.seed, rng.indices, rows, self.world.device)
        for noise in self._noises:
            noise.set_samples(rng.seed, rng.indices, batch["documents"], self.world.device)
        on_device = {key: tensor.to(self.world.device, non_blocking=True) for key, tensor in batch.items()}
        return self.objective.loss(self.family, self.model, on_device, rng)

    def _flags(self) -> list[float]:
        """Flags of this rank since the last step, to be summed over the ranks."""
        world, is_rank0 = self.world, self.world.rank == 0
        return [
            float(self._is_stopping()),
            float(bool(self.preemption)),
            *(float(is_rank0 and self.run.requested(what)) for what in ("save", "sample")),
            float(self.checkpointer.writing and self.checkpointer.done),
            *(self._own_s if rank == world.rank else 0.0 for rank in range(world.size)),
        ]

    def _agree(self, flags: list[float]) -> Agreed:
        """Act on the sum of all ranks' `_flags`."""
        stop, preempted, save, sample, saved, *own_s = flags
        if self.world.rank == 0:
            # Cleared only where this step answers it: a request that came since waits for the next step.
            answered: dict[Request, float] = {"stop": stop, "save": save, "sample": sample}
            for request, is_answered in answered.items():
                if is_answered:
                    self.run.clear(request)
            if self._own_s and (sentence := self.stragglers.add(own_s)):
                self.log.warn(sentence, self.step)
        return Agreed(
            stop=bool(stop),
            preempted=bool(preempted),
            save=bool(save),
            sample=bool(sample),
            saved=saved == self.world.size,
        )

    def _update(self, sums: Sums) -> None:
        """Clip the gradients and update the weights, if all numbers are finite: the device decides, where it can."""
        cfg = self.cfg.optim
        with self.clock.communication():
            row = sums.row()
            self.world.sum_over_data(row)
        factor = self._gradient_factor(row, self._batch_sizes.of(self.step))
        norm = scale_gradients(self.parameters, factor, cfg.clip_norm)
        is_bad = (~norm.isfinite() | (row[NON_FINITE] > 0).to(norm.device)).float()
        self.flush_metrics()  # the step before, which the device has done long ago
        self.checkpointer.wait_for_copy()
        lr = learning_rate(self.step, cfg, self.num_steps)
        set_learning_rate(self.optimizer, lr)
        if isinstance(self.optimizer, AdamW):
            self.optimizer.found_inf = is_bad
            self.optimizer.step()
        elif not is_bad:
            self.optimizer.step()
        self.optimizer.zero_grad()
        numbers = LateRead(torch.cat([row, norm[None].to(row)]))
        self.clock.mark(OPTIMIZER)
        self._launched = _Launched(self.step + 1, lr, numbers, self.clock.marks())

    def _gradient_factor(self, row: Tensor, batch_size: int) -> Tensor | None:
        """Factor that corrects the gradients when a step has fewer tokens or pairs than the batch size.

        None where that is known before the step: images are all counted, and several losses have shares.

        Args:
            row: `Sums.row` of all ranks.
            batch_size: Number of samples of the step.
        """
        if self.family.loss_weights or (self.data.unit == "images" and not self.objective.metrics):
            return None
        weight = row[WEIGHT]
        # A row with only prompt tokens has no loss, so its gradients are 0.
        factor = torch.where(weight == 0, 1.0, batch_size / weight)
        return factor.float().to(self.parameters[0].device)

    def _read(self, launched: _Launched) -> StepNumbers:
        """The numbers of a step, once the device has computed them. Logs them."""
        with self.world.heartbeat.waiting("all_reduce") if self.world.size > 1 else nullcontext():
            *row, grad_norm = launched.numbers.read()
        total, weight, tokens, non_finite, *parts = row
        losses, metrics = self._means(parts)
        numbers = StepNumbers(
            step=launched.step,
            loss=math.nan if non_finite else self._step_loss(total, weight, parts),
            weight=weight,
            tokens=tokens,
            non_finite=int(non_finite),
            grad_norm=grad_norm,
            losses=losses,
            metrics=metrics,
        )
        if numbers.is_skipped:
            self._note_skipped(numbers)
        else:
            self._skipped_in_a_row = 0
            if self.ema:  # the next step has not changed the weights yet
                self.ema.update(numbers.step - 1)
        self._log_step(numbers, launched)
        if self.cfg.train.compile and self.numbers is None:
            compiled, left = describe_compiled()
            self.log.note("training", f"{compiled}; the first step took {launched.marks.seconds:.0f} s", numbers.step)
            if left:
                self.log.warn(left, numbers.step)
        return numbers

    def _check_weights(self) -> None:
        """Raise InputError for weights that are not finite: they were loaded so. Collective."""
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        weights = ((name, p.detach()) for name, p in self.model.named_parameters() if p.dtype in kinds)
        local = ((name, one.to_local() if isinstance(one, DTensor) else one) for name, one in weights)
        own = next((name for name, one in local if not one.isfinite().all()), None)
        if broken := next(filter(None, self.world.gather(own)), None):
            raise InputError(
                f"model.path: {broken} holds numbers that are not finite, so that no loss is; the file is damaged, "
                "or the model was trained to that: download it again, or name another one"
            )

    def _note_skipped(self, numbers: StepNumbers) -> None:
        """Count a step that left the weights unchanged, or end the run: all ranks see the same loss and norm."""
        reason = (
            f"step {numbers.step}: the loss is not finite on {numbers.non_finite} of {self.world.data_size} ranks"
            if numbers.non_finite
            else f"step {numbers.step}: the gradient norm is {numbers.grad_norm}, the loss {numbers.loss}"
        )
        if not self._skipped_in_a_row:
            self._check_weights()
        if self.cfg.train.non_finite == "stop":
            raise FloatingPointError(reason)
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == SKIPS_IN_A_ROW:
            raise FloatingPointError(f"{reason}, as in the {SKIPS_IN_A_ROW - 1} steps before")
        self.log.warn(f"{reason}; step skipped, {self.skipped} in this run so far", numbers.step)

    def _log_step(self, numbers: StepNumbers, launched: _Launched) -> None:
        split = launched.marks.read()
        self._own_s = split["own"]
        figures = numbers.step, numbers.loss, numbers.grad_norm, dict(split)
        log.debug("step %d: loss %.6g, gradient norm %.6g, seconds %s", *figures)
        seconds = launched.marks.seconds
        images = self._batch_sizes.of(numbers.step - 1) * self.objective.images_per_example
        self.log.stepped(
            StepEvent(
                step=numbers.step,
                loss=numbers.loss,
                lr=launched.lr,
                grad_norm=numbers.grad_norm,
                seconds=seconds,
                seconds_data=split[DATA],
                seconds_forward=split[FORWARD],
                seconds_backward=split[BACKWARD],
                seconds_optimizer=split[OPTIMIZER],
                seconds_communication=split["communication"],
                images_per_second=images / seconds if self.data.unit == "images" else math.nan,
                tokens_per_second=numbers.tokens / seconds if self.data.unit == "tokens" else math.nan,
                losses=numbers.losses,
                metrics=numbers.metrics,
            )
        )

    @property
    def _num_parts(self) -> int:
        return len(self.family.losses) + len(self.objective.metrics)

    def _means(self, parts: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
        """The mean of each named loss that had items, and of each metric. parts: `Sums.parts`, flattened and summed
        over the ranks."""
        sums, losses = list(zip(parts[::2], parts[1::2], strict=True)), self.family.losses
        named = (zip(losses, sums, strict=False), zip(self.objective.metrics, sums[len(losses) :], strict=True))
        of_losses, of_metrics = (
            {name: total / count for name, (total, count) in one if count and math.isfinite(total)} for one in named
        )
        return of_losses, of_metrics

    def _step_loss(self, total: float, weight: float, parts: Sequence[float]) -> float:
        """The loss of all ranks' total, weight and parts of `Sums`, each summed."""
        weights = self.family.loss_weights
        if not weights:
            return total / weight if weight else 0.0
        counted = zip(weights, parts[::2], parts[1::2], strict=False)  # metrics follow
        return sum(weight * part / count for weight, part, count in counted if count)

    def _is_stopping(self) -> bool:
        """Whether a request, a signal or the death of torchrun stops the run. Only rank 0 sees requests."""
        requested = self.world.rank == 0 and self.run.requested("stop")
        return requested or bool(self.preemption) or os.getppid() != self._parent

    def validate(self) -> float:
        """Mean loss on the held-out examples, with noise and timesteps that are the same every time."""
        count, size = self.data.num_held_out, self.world.data_size
        self.flush_metrics()
        sums = Sums.zero(self._num_parts, torch.empty(0, dtype=torch.float64, device=self.world.device))
        seed = derived_seed(self.cfg.train.seed, "validation")
        with self._evaluating():
            for first in range(0, count, size):
                index = first + self.world.data_rank
                example = self.data.held_out(index % count)
                mine = 1.0 if index < count else 0.0
                sums.add(self._loss(self._prepare(seed, (example,), (mine,), (index % count,))))
        row = sums.row()
        self.world.sum_over_data(row)
        total, weight, _, non_finite, *parts = row.tolist()
        mean = math.nan if non_finite else self._step_loss(total, weight, parts)
        losses, metrics = self._means(parts)
        self._validated = (self.step, mean)
        is_entropy = self.data.unit == "tokens" and not self.objective.metrics
        perplexity = perplexity_of(mean) if is_entropy else math.nan
        event = ValidationEvent(step=self.step, loss=mean, perplexity=perplexity, losses=losses, metrics=metrics)
        self.log.emit(event)
        return mean

    def generate_samples(self) -> list[Path]:
        """Generate one image or text per prompt, from the same noise at every step. Returns their paths on rank 0."""
        self.flush_metrics()
        self._change_prompts()
        if not self.sampler.prompts:
            self.log.warn("no samples are generated: sample.prompts is empty", self.step)
            return []
        self.log.enter("sampling", self.step)
        generate = self.sampler.prepare()
        with self._evaluating():
            samples = self.sample_schedule.generate(self.model, generate)
        paths = self.sample_schedule.write(samples, self.step)
        self.log.enter("training", self.step)
        return paths

    def _drawing(self, events: Sequence[AnyEvent]) -> RunConfig:
        """The config with the prompts that were requested before a run was resumed. events: on rank 0."""
        prompts = self.world.gather(prompts_in_force(events, self.cfg))[0]
        try:
            return self.cfg.with_prompts(prompts)
        except InputError as error:  # other fields of the config were changed since
            self.log.warn(f"samples are generated from sample.prompts, not from those requested before: {error}")
            return self.cfg

    def _change_prompts(self) -> None:
        """Take the prompts that were requested since the last samples. If they cannot be used, the former ones stay."""
        prompts, problem = self.world.gather(self._requested_prompts())[0]
        if prompts and not problem:
            try:
                self.sampler.change_prompts(prompts)
                self.log.emit(PromptsEvent(step=self.step, prompts=prompts, instead_of=self.cfg.sample.prompts))
            except InputError as error:
                problem = str(error)
        if problem:
            self.log.warn(f"the samples keep their prompts: {problem}", self.step)
        if self.world.rank == 0 and (prompts or problem):
            try:
                clear_prompts(self.run, prompts)
            except OSError as error:  # it is taken again before the next samples, which changes nothing
                self.log.warn(f"the request for other prompts could not be removed ({error})", self.step)

    def _requested_prompts(self) -> tuple[tuple[str, ...] | None, str]:
        """(the requested prompts, if any; why they cannot be used), on rank 0, the only one that sees requests."""
        prompts = None
        try:
            prompts = requested_prompts(self.run) if self.world.rank == 0 else None
            if prompts is not None:
                check_prompts(self.cfg, prompts)
        except InputError as error:
            return prompts, str(error)
        return prompts, ""

    def save(self) -> None:
        """Begin a checkpoint; it is written while training goes on."""
        self.flush_metrics()
        self.world.heartbeat.enter("waiting for the previous checkpoint", moves=False)
        self._finish_checkpoint()
        self.checkpointer.save(self._progress(), self._state())
        self.world.heartbeat.beat()

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained weights in the form that is exported, whole, on the CPU of rank 0; empty on other ranks."""
        self.flush_metrics()
        weights = {}
        with self._evaluating():
            for name, parameter in self.trainables.items():
                whole = parameter.detach()
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if self.world.rank == 0:
                    weights[name] = whole.to("cpu", copy=True)
        return weights

    def allocated(self) -> dict[str, int]:
        """Bytes on this rank's device that stay from step to step, by kind."""
        average = self.ema.average.values() if self.ema else ()
        kept: dict[str, Iterable[Tensor]] = {
            "weights": self.model.parameters(),
            "gradients": [p.grad for p in self.parameters if p.grad is not None],
            "optimizer state": [*state_tensors(self.optimizer), *average],
        }
        device = self.world.device.type
        return {
            name: local_bytes(tensor for tensor in tensors if tensor.device.type == device)
            for name, tensors in kept.items()
        }

    def close(self) -> None:
        """Stop reading ahead and close this rank's files."""
        self._inside.close()
        self.loader.close()
        self.log.close()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside: no dropout or noise, no gradients, the weights to evaluate with, and nothing gathered from before."""
        reshard(self.model)
        self.oom_context.enter("evaluation")
        self.checkpointer.wait_for_copy()
        for module in (*self._dropouts, *self._noises):
            module.eval()
        with torch.no_grad(), evaluation_weights(self.optimizer, self.parameters, self.ema):
            yield
            reshard(self.model)
        for module in (*self._dropouts, *self._noises):
            module.train()

    def _with_attention(self) -> ExitStack:
        """Contexts that stay open until the run ends: `train.attention`."""
        inside, train = ExitStack(), self.cfg.train
        dtype, note = COMPUTE_DTYPE[train.precision], partial(self.log.note, "loading")
        inside.enter_context(attention.preferred(train.attention, self.world.device, dtype, note, self.log.warn))
        return inside

    def _with_compiling_decided(self, cfg: RunConfig) -> RunConfig:
        """The config with `train.compile` decided, equally on all ranks. Collective."""
        device = self.world.device
        saved = complete(self.run.checkpoints) if self.world.rank == 0 else []
        mine = progress_of(saved[-1]).config.get("train", {}).get("compile") if saved else None
        before = self.world.gather(mine)[0]
        wanted = compiles(cfg.train, device, before if isinstance(before, bool) else None)
        self.world.heartbeat.enter("loading", moves=False)
        problem = compiler_problem(device, cfg.train.compile_backend) if wanted else ""
        problems = [found for found in self.world.gather(problem) if found]
        if problems:
            self.log.warn(problems[0])
        train = cfg.train.model_copy(update={"compile": wanted and not problems})
        return cfg.model_copy(update={"train": train})

    def _newest_checkpoint(self) -> Path | None:
        newest, problems = newest_intact(self.run.checkpoints, self.world)
        for problem in problems:
            self.log.warn(problem)
        return newest

    def _resume(self, newest: Path) -> Progress:
        saved = restore(newest, self._state())
        self.world.barrier()
        if self.world.rank in self.world.remote_leaders:
            shutil.rmtree(newest)  # a copy of rank 0's
        self.step, self.samples_seen, self.skipped = saved.step, saved.samples_seen, saved.skipped
        self.log.note("loading", f"resumed from {newest.name}", self.step)
        changed = config_changes.changes(saved.config, self.cfg.model_dump(mode="json")) if saved.config else []
        if changed:
            self.log.note("loading", f"changed since it was saved: {'; '.join(map(str, changed))}", self.step)
        if saved.data and saved.data != self.data.digest:
            self.log.warn(self.data.changed_message, self.step)
        return saved

    def _warn_of_a_rise(self, saved: Progress | None) -> None:
        """Warn if the learning rate rises where the run continues: a schedule that had fallen ends later now."""
        if saved is None:
            return
        optim, before = self.cfg.optim, saved.lr
        after = learning_rate(self.step, optim, self.num_steps)
        is_wanted = self.step < optim.warmup or (saved.config and saved.config["optim"]["lr"] != optim.lr)
        if self.step < self.num_steps and after > RISE * before and not is_wanted:
            why = (
                "is constant now" if optim.schedule == "constant" else f"{optim.schedule} now ends at {self.num_steps}"
            )
            former = f"to go on at the former rate, stop and resume with optim.schedule=constant optim.lr={before:.3g}"
            if before < LEAST_RATE * optim.lr:  # as at the end of a schedule
                former = "where that is too much, stop and resume with a lower optim.lr"
            self.log.warn(
                f"the learning rate rises from {before:.3g} to {after:.3g}, because optim.schedule {why}; {former}",
                self.step,
            )

    def _make_loader(self, saved: Progress | None) -> Loader[Any]:
        """The loader of this rank, which begins at the position that was resumed."""
        world, data = self.world, self.data
        return Loader(
            data.batch_sampler(self._batch_sizes, saved),
            data.example,
            world.data_rank,
            world.data_size,
            self.cfg.train.micro_batch,
            data.loss_weight,
            world.device,
            partial(self._prepare, self.cfg.train.seed),
            data.micro_batch,
            data.batch_key,
        )

    def _find_length(self, saved: Progress | None, context: RankContext) -> tuple[BatchSizes, int]:
        """The batch size of each step and the number of steps, which is announced. Collective.

        Neither depends on the number of ranks.

        Raises:
            InputError: `optim.warmup` is not shorter.
            StopRequested: As `DataSource.num_samples`.
        """
        cfg, num_steps = self.cfg, self.cfg.train.steps
        sizes = BatchSizes.after(saved, cfg.train.batch_size)
        if cfg.train.epochs is not None:
            sizes = replace(sizes, end=self.data.num_samples(cfg.train.epochs, context))
            num_steps = sizes.num_steps
            if cfg.optim.schedule != "constant" and cfg.optim.warmup >= num_steps:
                epochs = f"{num_steps} steps of train.epochs {cfg.train.epochs:g}"
                raise InputError(f"optim.warmup: must be less than the {epochs}, not {cfg.optim.warmup}; lower it")
        samples = self.data.samples_of_an_epoch
        epoch, epoch_steps = sizes.before(self.step) / samples, samples / cfg.train.batch_size
        self.log.emit(LengthEvent(step=self.step, steps=num_steps, epoch=epoch, epoch_steps=epoch_steps))
        return sizes, num_steps

    def _state(self) -> TrainState:
        """The state for a checkpoint; weights to evaluate with are added only where they are not the trained ones."""
        evaluation: dict[str, Tensor] = {}
        if self.ema:
            evaluation = self.ema.average
        elif isinstance(self.optimizer, HasEvaluationWeights):
            with evaluation_weights(self.optimizer, self.parameters, None):
                evaluation = {name: parameter.detach().clone() for name, parameter in self.trainables.items()}
        return TrainState(self.model, self.trainables, self.optimizer, evaluation)

    def _progress(self) -> Progress:
        step, loss = self._validated
        return Progress(
            step=self.step,
            samples_seen=self.samples_seen,
            skipped=self.skipped,
            validation_loss=loss if step == self.step else math.nan,
            config=self.cfg.model_dump(mode="json"),
            data=self.data.digest,
            place=self.data.position(self.step),
            batch_sizes=self._batch_sizes.until(self.step),
            lr=learning_rate(self.step - 1, self.cfg.optim, self.num_steps) if self.step else math.nan,
        )

    def _save_last(self) -> None:
        self.flush_metrics()
        self.log.enter("saving", self.step)
        self._finish_checkpoint()
        self.checkpointer.save(self._progress(), self._state())
        self.log.checkpoint_saved(self.checkpointer.wait())

    def _finish_checkpoint(self) -> None:
        """Name the checkpoint that is being written. One that failed is a warning: the ones before it remain."""
        try:
            self.log.checkpoint_saved(self.checkpointer.wait())
        except OSError as error:
            self.log.warn(str(error), self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _validation_due(self) -> bool:
        """Also where a checkpoint is due: the loss of each is then known, and the best can be kept."""
        saves = self._due(self.cfg.checkpoint.every) or self.step == self.num_steps
        return self._due(self.cfg.data.validation_every) or (saves and self.cfg.checkpoint.keep_best > 0)
