"""The training loop: a step, what is due after it, and how a run ends."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.save import Checkpointer
from trainer.config.schema import RunConfig
from trainer.distributed.straggler import Stragglers
from trainer.distributed.world import World
from trainer.metrics.memory import local_bytes
from trainer.metrics.out_of_memory import explain_out_of_memory
from trainer.metrics.step_time import BACKWARD, DATA, FORWARD, OPTIMIZER
from trainer.models.build import reshard, sync_gradients
from trainer.models.objectives.base import perplexity_of
from trainer.optim import AdamW, evaluation_weights, learning_rate, scale_gradients, set_learning_rate, state_tensors
from trainer.parallel import attention
from trainer.parallel.parallelize import COMPUTE_DTYPE, gathered_for_samples
from trainer.parallel.replicas import diverged
from trainer.rng import derived_seed
from trainer.run.events import Emit, State, ValidationEvent
from trainer.run.folder import Request, RunDir
from trainer.run.manifest import Progress, validation_losses
from trainer.run.preemption import Preemption
from trainer.system.errors import InputError
from trainer.train.numbers import NON_FINITE, WEIGHT, LateRead
from trainer.train.setup import length_event, set_up, stop_requested, train_state
from trainer.train.step_log import LaunchedStep, StepLog, StepNumbers

FORETOLD_AT = 4
"""Steps after which the end by `train.time_limit` is foretold; then after twice as many, and so on."""


@dataclass(frozen=True)
class Agreed:
    """The actions that all ranks agree on after a step.

    Attributes:
        stop, save, sample: Whether the user requested this.
        preempted: Whether some rank received a signal to leave soon.
        saved: Whether every rank has written the checkpoint that was begun.
        is_late: Whether `train.time_limit` has passed.

    See DECISIONS 28.
    """

    stop: bool
    preempted: bool
    save: bool
    sample: bool
    saved: bool
    is_late: bool


class Trainer:
    """One run on one rank. Every public method is collective.

    Args:
        cache: Folder shared by runs, for encoded data and tiny models.
        emit: Takes events; only rank 0's reach a reader.
        preemption: Whether this process received a signal to leave.
        before: Optimizer steps of the stages before, added to the steps that the user sees.

    Attributes:
        numbers: Of the last step whose numbers were read.
    """

    numbers: StepNumbers | None = None
    _launched: LaunchedStep | None = None
    _began, _began_at = math.inf, 0

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
        self.run, self.world = run, world
        self.preemption = Preemption() if preemption is None else preemption
        self._is_stopping = partial(stop_requested, run, world, self.preemption, os.getppid())
        ready = set_up(cfg, run, world, cache, emit, self._is_stopping, before)
        self.cfg, self.log, self.family, self.objective = ready.cfg, ready.log, ready.family, ready.objective
        self.data, self.sampler, self.sample_schedule = ready.data, ready.sampler, ready.sample_schedule
        self.loaded, self.model, self.trainables = ready.loaded, ready.loaded.module, ready.loaded.trainables
        self.parameters = list(self.trainables.values())
        self.optimizer, self.ema = ready.optimizer, ready.ema
        self.clock, self.oom_context = ready.clock, ready.oom_context
        self.passes, self.loader = ready.passes, ready.loader
        self.num_steps, self._batch_sizes = ready.num_steps, ready.batch_sizes
        self._shards_gradients = self.cfg.shards_gradients(self.loaded.strategy)
        saved = ready.saved
        self.step, self.samples_seen = (saved.step, saved.samples_seen) if saved else (0, 0)
        self.step_log = StepLog(ready, world, saved.skipped if saved else 0)
        checkpoint = self.cfg.checkpoint
        self.checkpointer = Checkpointer(run.checkpoints, world, checkpoint.keep, checkpoint.keep_best)
        self._is_first_stage = before == 0
        self._is_certified_only = world.gather(run.certify_file.exists())[0]  # other machines may have other folders
        self.stragglers = Stragglers(world.gather(socket.gethostname()))
        self._inside = ExitStack()  # until the run ends
        dtype, note = COMPUTE_DTYPE[self.cfg.train.precision], partial(self.log.note, "loading")
        self._inside.enter_context(
            attention.preferred(self.cfg.train.attention, world.device, dtype, note, self.log.warn)
        )
        self._validated = (-1, math.nan)  # the step, its validation loss
        losses = world.gather(list(validation_losses(run.checkpoints).values()))[0]
        self._lowest = min(filter(math.isfinite, losses), default=math.inf)  # of the checkpoints so far

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
            drawn = self.generate_samples()
            if self.step == 0 and self._is_first_stage:
                self._certify(drawn)
        if self._is_certified_only:
            return "finished"
        self.log.enter("training", self.step)
        self._began, self._began_at = time.monotonic(), self.step
        while self.step < self.num_steps:
            agreed = self.train_step()
            if agreed.is_late:
                self.num_steps = self.step
            if cfg.train.time_limit is not None:
                self._announce_end(cfg.train.time_limit)
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
            elif agreed.save or ((self._due(cfg.checkpoint.every) or self._is_best()) and self.step < self.num_steps):
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
        cfg, world, clock = self.cfg.optim, self.world, self.clock
        batch_size = self._batch_sizes.of(self.step)
        clock.start()
        world.heartbeat.step = self.step

        # Storage may be slow, and the first step of a resumed run counts through the epochs before.
        world.heartbeat.enter("data", moves=False)
        micro_batches = self.loader.micro_batches(self.step)
        clock.mark(DATA)

        # Gradients accumulate over the micro-batches, and the last backward reduces them over the ranks. FSDP averages
        # over ranks; the loss of the step is a sum over their samples.
        sums, shares, flags = self.passes.sums(), self.passes.shares(micro_batches), None
        for i, micro_batch in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            if len(micro_batches) > 1:  # it visits every module, and a single pass always reduces
                sync_gradients(self.model, is_last, self._shards_gradients)
            self.oom_context.enter(FORWARD)
            assert micro_batch.prepared is not None
            loss = self.passes.loss(micro_batch.prepared)
            clock.mark(FORWARD)
            self.oom_context.enter(BACKWARD)
            if is_last:
                flags = world.begin_sum(self._flags())  # backward hides it
            mine = loss.total / batch_size if shares is None else loss.parts_with(shares)
            (mine * world.data_size).backward()  # type: ignore[no-untyped-call]
            clock.mark(BACKWARD)
            sums.add(loss)
        assert flags is not None, "a step has at least one pass"

        # Clip. The device decides whether loss and norm are finite on all ranks: the host would wait for it to ask.
        self.oom_context.enter(OPTIMIZER)
        with clock.communication():
            row = sums.row()
            world.sum_over_data(row)
        norm = scale_gradients(self.parameters, self._gradient_factor(row, batch_size), cfg.clip_norm)
        is_bad = (~norm.isfinite() | (row[NON_FINITE] > 0).to(norm.device)).float()

        # The step before, which the device has done long ago: its weights go into the moving average before they move.
        self.flush_metrics()
        self.checkpointer.wait_for_copy()
        lr = learning_rate(self.step, cfg, self.num_steps)
        set_learning_rate(self.optimizer, lr)
        if isinstance(self.optimizer, AdamW):
            self.optimizer.found_inf = is_bad
            self.optimizer.step()
        elif not is_bad:  # other optimizers cannot skip on the device
            self.optimizer.step()
        self.optimizer.zero_grad()
        numbers = LateRead(torch.cat([row, norm[None].to(row)]))
        clock.mark(OPTIMIZER)
        self.step += 1
        self.samples_seen += batch_size
        self._launched = LaunchedStep(self.step, lr, numbers, clock.marks())

        # Checkpoints, samples and the end are collective: all ranks act on the same flags, those of before backward.
        with clock.communication():
            agreed = self._agree(flags.wait())
        if self._launched.numbers.is_ready:
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
            self.numbers = self.step_log.read(launched)
            if self.ema and not self.numbers.is_skipped:  # the next step has not changed the weights yet
                self.ema.update(launched.step - 1)

    def _announce_end(self, limit: int) -> None:
        """Say at which step the time will be over by the pace until now, ever more rarely, and that it is over."""
        num_done, seconds = self.step - self._began_at, time.monotonic() - self._began
        is_due = num_done >= FORETOLD_AT and num_done.bit_count() == 1
        if is_due or self.step == self.num_steps:
            likely = self._began_at + max(num_done, round(num_done * limit / seconds))
            num_steps = min(self.num_steps, likely)
            self.log.emit(length_event(num_steps, self.step, self._batch_sizes, self.data))

    def _flags(self) -> list[float]:
        """Flags of this rank since the last step, to be summed over the ranks."""
        world, is_rank0 = self.world, self.world.rank == 0
        return [
            float(self._is_stopping()),
            float(bool(self.preemption)),
            *(float(is_rank0 and self.run.requested(what)) for what in ("save", "sample")),
            float(self.checkpointer.writing and self.checkpointer.done),
            float(is_rank0 and time.monotonic() - self._began > (self.cfg.train.time_limit or math.inf)),
            *(self.step_log.own_s if rank == world.rank else 0.0 for rank in range(world.size)),
        ]

    def _agree(self, flags: list[float]) -> Agreed:
        """Act on the sum of all ranks' `_flags`."""
        stop, preempted, save, sample, saved, is_late, *own_s = flags
        if self.world.rank == 0:
            # Cleared only where this step answers it: a request that came since waits for the next step.
            answered: dict[Request, float] = {"stop": stop, "save": save, "sample": sample}
            for request, is_answered in answered.items():
                if is_answered:
                    self.run.clear(request)
            if self.step_log.own_s and (sentence := self.stragglers.add(own_s)):
                self.log.warn(sentence, self.step)
        return Agreed(
            stop=bool(stop),
            preempted=bool(preempted),
            save=bool(save),
            sample=bool(sample),
            saved=saved == self.world.size,
            is_late=bool(is_late),
        )

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

    def validate(self) -> float:
        """Mean loss on the held-out examples, with noise and timesteps that are the same every time."""
        count, size = self.data.num_held_out, self.world.data_size
        self.flush_metrics()
        sums = self.passes.sums(torch.float64)
        seed = derived_seed(self.cfg.train.seed, "validation")
        with self._evaluating():
            # Every rank makes the same number of sharded calls: one without an example repeats one, with weight 0.
            for first in range(0, count, size):
                index = first + self.world.data_rank
                example = self.data.held_out(index % count)
                mine = 1.0 if index < count else 0.0
                sums.add(self.passes.loss(self.passes.prepare(seed, (example,), (mine,), (index % count,))))
        row = sums.row()
        self.world.sum_over_data(row)
        mean, losses, metrics = self.step_log.means(row.tolist())
        self._validated = (self.step, mean)
        is_entropy = self.data.unit == "tokens" and not self.objective.metrics
        perplexity = perplexity_of(mean) if is_entropy else math.nan
        event = ValidationEvent(step=self.step, loss=mean, perplexity=perplexity, losses=losses, metrics=metrics)
        self.log.emit(event)
        return mean

    def generate_samples(self) -> list[Path]:
        """Generate one image or text per prompt, from the same noise at every step. Returns their paths on rank 0."""
        self.flush_metrics()
        self.sample_schedule.change_prompts(self.cfg, self.step)
        if not self.sampler.prompts:
            self.log.warn("no samples are generated: sample.prompts is empty", self.step)
            return []
        self.log.enter("sampling", self.step)
        generate = self.sampler.prepare()
        gathered = gathered_for_samples(self.model, self.cfg.parallel, self.loaded.strategy, self.world.size)
        with self._evaluating(), gathered:
            paths = self.sample_schedule.generate(self.model, generate, self.step)
        self.log.enter("training", self.step)
        return paths

    def _certify(self, drawn: Sequence[Path]) -> None:
        """Examine the base with the samples that it drew, on rank 0: see `trainer.view.certificate`."""
        from trainer.train.certificate import certify  # imports diffusers, which the family imports lightly before

        with self._evaluating():
            where = (self.cfg, self.run, self.family, self.sampler, self.model, self.world)
            found = certify(*where, drawn, self.num_steps, self._is_certified_only)
        if found is not None:
            for line in found.lines():
                if found.is_green:
                    self.log.note("sampling", line)
                else:
                    self.log.warn(line)
            if self.family.is_concluded and found.miswired and not self._is_certified_only:
                raise InputError(
                    f"model.family: {self.cfg.model.family} does not train {self.cfg.model.path}: how it is called was "
                    f"concluded of its folder, and its certificate has a fault ({found.miswired[0].kind}, above). If "
                    "you know better, set sample.every: 0, which draws no samples and certifies nothing"
                )

    def save(self) -> None:
        """Begin a checkpoint; it is written while training goes on."""
        self.flush_metrics()
        self.world.heartbeat.enter("waiting for the previous checkpoint", moves=False)
        self._begin_checkpoint()
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
        for module in self.passes.regularizers:
            module.eval()
        with torch.no_grad(), evaluation_weights(self.optimizer, self.parameters, self.ema):
            yield
            reshard(self.model)
        for module in self.passes.regularizers:
            module.train()

    def _begin_checkpoint(self) -> None:
        """Begin a checkpoint, once the one before is complete."""
        self._finish_checkpoint()
        step, loss = self._validated
        progress = Progress(
            step=self.step,
            samples_seen=self.samples_seen,
            skipped=self.step_log.skipped,
            validation_loss=loss if step == self.step else math.nan,
            config=self.cfg.model_dump(mode="json"),
            data=self.data.digest,
            place=self.data.position(self.step),
            batch_sizes=self._batch_sizes.until(self.step),
            lr=learning_rate(self.step - 1, self.cfg.optim, self.num_steps) if self.step else math.nan,
        )
        if math.isfinite(progress.validation_loss):
            self._lowest = min(self._lowest, progress.validation_loss)
        self.checkpointer.save(progress, train_state(self.loaded, self.optimizer, self.ema))

    def _save_last(self) -> None:
        self.flush_metrics()
        self.log.enter("saving", self.step)
        self._begin_checkpoint()
        self.log.checkpoint_saved(self.checkpointer.wait())

    def _finish_checkpoint(self) -> None:
        """Name the checkpoint that is being written. One that failed is a warning: the ones before it remain."""
        try:
            self.log.checkpoint_saved(self.checkpointer.wait())
        except OSError as error:
            self.log.warn(str(error), self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _is_best(self) -> bool:
        """Whether this step has a lower validation loss than all checkpoints, so that a run may later go back to it."""
        step, loss = self._validated
        return self.cfg.checkpoint.keep_best > 0 and step == self.step and loss < self._lowest

    def _validation_due(self) -> bool:
        """Also where a checkpoint is due: the loss of each is then known, and the best can be kept."""
        saves = self._due(self.cfg.checkpoint.every) or self.step == self.num_steps
        return self._due(self.cfg.data.validation_every) or (saves and self.cfg.checkpoint.keep_best > 0)
