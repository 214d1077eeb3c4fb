"""The trainer: family, adapter, parallel and data meet here, and the loop reads top to bottom."""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer import adapters
from trainer.checkpoint import config_changes
from trainer.checkpoint.restore import newest_intact, restore
from trainer.checkpoint.save import Checkpointer, TrainState
from trainer.config.schema import RunConfig
from trainer.data.loader import BatchSizes, Loader, MicroBatch
from trainer.data.open import open_data
from trainer.distributed.context import RankContext
from trainer.distributed.straggler import Stragglers
from trainer.distributed.world import World
from trainer.export import check_export
from trainer.metrics.memory import local_bytes
from trainer.metrics.out_of_memory import OomContext, explain_out_of_memory
from trainer.metrics.step_time import BACKWARD, DATA, FORWARD, OPTIMIZER, StepTimer
from trainer.models import families
from trainer.models.build import (
    build_model,
    continue_adapter,
    encoder_loader,
    load_model,
    reshard,
    sync_gradients,
)
from trainer.models.objectives import Batch, Loss, perplexity_of
from trainer.optim import (
    Ema,
    HasEvaluationWeights,
    clip_gradients,
    evaluation_weights,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from trainer.parallel.replicas import check_reduced, diverged
from trainer.rng import SampleRng, derived_seed
from trainer.run.events import (
    Emit,
    State,
    StatusEvent,
    StepEvent,
    ValidationEvent,
)
from trainer.run.folder import Request, RunDir
from trainer.run.manifest import RECIPE, Progress
from trainer.run.preemption import Preemption
from trainer.train.log import RunLog
from trainer.train.sampling import Sampler

log = logging.getLogger(__name__)
SKIPS_IN_A_ROW = 20
"""A model that gives no finite number so often is broken, and no further step mends it."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the one small reduction of a step. loss: NaN where a rank's was not finite.

    losses: as `StepEvent` has them.
    """

    loss: float
    weight: float
    non_finite: int
    stop: bool
    told: bool
    save: bool
    sample: bool
    saved: bool
    losses: dict[str, float]


class Trainer:
    """One run on one rank. Every public method is collective.

    cache: folder shared by runs, for encoded data and tiny models.  say: takes events; only rank 0's is heard.
    told: whether this process was told to leave.  before: optimizer steps of the stages before, for what is shown.
    """

    def __init__(
        self,
        cfg: RunConfig,
        run: RunDir,
        world: World,
        cache: Path,
        emit: Emit,
        told: Preemption | None = None,
        before: int = 0,
    ) -> None:
        self.cfg, self.run_dir, self.world = cfg, run, world
        self.told = Preemption() if told is None else told
        # A rank whose torchrun was killed is adopted by another process. It would train on unseen.
        self._parent = os.getppid()
        self.step = self.samples_seen = self.skipped = self._skipped_in_a_row = 0
        self.log = RunLog(run, world, emit, before)
        self.family = families.make(cfg, cache)
        for warning in self.family.warnings(cfg):
            self.log.warn(warning)
        # First what can be refused without weights: captions of a large set take hours to encode.
        built = build_model(cfg, self.family)
        exported = check_export(cfg, self.family, built.trainables)
        load = encoder_loader(cfg, world, cache, self.log.listener("encoding"))
        context = RankContext(cfg, world, cache, emit, self._asked_to_stop)
        self.data, self.drawer = open_data(self.family, load, context)
        self.sampler = Sampler(self.drawer, cfg.sample.seed, run, world, self.log, before)
        emit(StatusEvent(state="loading"))
        started = time.perf_counter()
        self.loaded = load_model(built, cfg, self.family, world, cache, self.log.listener("loading"))
        self.model = self.loaded.module
        self.trainables = self.loaded.trainables
        self._shards_gradients = cfg.shards_gradients(self.loaded.strategy)
        newest = self._newest_checkpoint()
        started_from = continue_adapter(self.loaded, cfg, self.family) if newest is None else ()
        for note in (*self.loaded.adapter.notes, *started_from, *exported):
            self.log.note("loading", note)
        self._dropouts = adapters.dropouts(self.model)
        self.parameters = list(self.trainables.values())
        self.optimizer = make_optimizer(self.parameters, cfg.optim)
        optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
        check_reduced(self.trainables, optimized, world)
        self.ema = Ema(self.trainables, cfg.optim.ema) if cfg.optim.ema else None
        self.checkpointer = Checkpointer(run.checkpoints, world, cfg.checkpoint.keep, cfg.checkpoint.keep_best)
        self.clock = StepTimer(world, self.loaded.mesh)
        self.clock.watch(self.model, self.family.shard.blocks, cfg.train.compile)
        self._own_s = 0.0  # of the last step, what this rank did by itself
        self.stragglers = Stragglers(world.gather(socket.gethostname()))
        self.oom_context = OomContext(self.model, self.family.shard.blocks, cfg.train.compile, world.heartbeat)
        self._validated = (-1, math.nan)  # at which step, the loss
        saved = None if newest is None else self._resume(newest)
        self._recipe = RECIPE if saved is None else saved.recipe
        self._batch_sizes = BatchSizes.after(saved, cfg.train.batch_size)
        self.loader = self._make_loader(saved)
        self.log.model_loaded(self.loaded, self.parameters, time.perf_counter() - started, self.step)
        self.log.show_plan(cfg, cache, self.step)

    def train(self) -> State:
        """Run to the last step, or until asked to stop. Returns `finished` or `stopped`, with a checkpoint on disk.

        Raises OutOfMemoryError with the block, and FloatingPointError for a loss or gradient that is not finite, at
        once or when too many were passed over.
        """
        with explain_out_of_memory(self.oom_context, self.log.meter, self.held):
            return self._train()

    def held(self) -> dict[str, int]:
        """Bytes of this rank's device of what stays from step to step."""
        average = self.ema.average.values() if self.ema else ()
        kept: dict[str, Iterable[Tensor]] = {
            "weights": self.model.parameters(),
            "gradients": [p.grad for p in self.parameters if p.grad is not None],
            "optimizer state": [*state_tensors(self.optimizer), *average],
        }
        device = self.world.device.type
        return {
            name: local_bytes(one for one in tensors if one.device.type == device) for name, tensors in kept.items()
        }

    def _train(self) -> State:
        cfg = self.cfg
        if (
            cfg.sample.every
            and self._due(cfg.sample.every)
            and self.step < cfg.train.steps
            and self.sampler.are_missing(self.step)
        ):
            self.draw_samples()
        self.log.enter("training", self.step)
        while self.step < cfg.train.steps:
            agreed = self.train_step()
            if agreed.told:  # by what will not wait long
                self._save_last()
                self.log.note("saving", "stopped by a signal; checkpoint saved, continue with --resume", self.step)
                return "stopped"
            if agreed.saved:
                self._finish_checkpoint()
            if self._due(cfg.train.check_replicas):
                self._check_replicas()
            if self.data.num_held_out and self._validation_due():
                self.validate()
            # Saved before drawn: pictures take memory of their own, and running out of it must cost no steps.
            if agreed.stop:
                self._save_last()
            elif agreed.save or (self._due(cfg.checkpoint.every) and self.step < cfg.train.steps):
                self.save()
            if agreed.sample or (self._due(cfg.sample.every) and self.step < cfg.train.steps):
                self.draw_samples()
            if agreed.stop:
                return "stopped"
        self._save_last()
        if cfg.sample.every:
            self.draw_samples()
        return "finished"

    def train_step(self) -> Agreed:
        """One optimizer step over `train.batch_size` examples of all ranks."""
        self.clock.start()
        self.world.heartbeat.step = self.step
        # Storage may be slow, and the first step of a resumed run counts through the epochs before.
        self.world.heartbeat.enter("data", moves=False)
        began = time.perf_counter()
        micro_batches = self.loader.micro_batches(self.step)
        self.clock.mark(DATA)
        total = torch.zeros((), device=self.world.device)
        weight = torch.zeros((), device=self.world.device)
        parts = torch.zeros(len(self.family.losses), 2, device=self.world.device)
        for i, micro_batch in enumerate(micro_batches):
            if len(micro_batches) > 1:  # it visits every module, and a single pass always reduces
                sync_gradients(self.model, i == len(micro_batches) - 1, self._shards_gradients)
            self.oom_context.enter(FORWARD)
            loss = self._forward(micro_batch)
            self.clock.mark(FORWARD)
            self.oom_context.enter(BACKWARD)
            # FSDP averages over ranks; the loss of the step is a sum over them.
            (loss.total * (self.world.size / self.cfg.train.batch_size)).backward()  # type: ignore[no-untyped-call]
            self.clock.mark(BACKWARD)
            total += loss.total.detach()
            weight += loss.weight
            parts += 0 if loss.parts is None else loss.parts
        agreed = self._agree(float(total), float(weight), parts.flatten().tolist())
        self.oom_context.enter(OPTIMIZER)
        grad_norm, lr = self._update(agreed)
        self.clock.mark(OPTIMIZER)
        self.step += 1
        self.samples_seen += self.cfg.train.batch_size
        self._log_step(agreed, lr, grad_norm, began)
        self.oom_context.enter("the end of a step")
        return agreed

    def validate(self) -> float:
        """Mean loss on the held-out examples, with noise and timesteps that are the same every time."""
        count, size = self.data.num_held_out, self.world.size
        total = weight = 0.0
        parts = torch.zeros(len(self.family.losses), 2)
        with self._evaluating():
            for first in range(0, count, size):
                index = first + self.world.rank
                example = self.data.held_out(index % count)
                mine = 1.0 if index < count else 0.0
                rng = SampleRng(derived_seed(self.cfg.train.seed, "validation"), (index % count,), self.world.device)
                loss = self.family.loss(self.model, self._on_device(self._batch((example,), (mine,))), rng)
                total += float(loss.total)
                weight += float(loss.weight)
                parts += 0 if loss.parts is None else loss.parts.cpu()
        total, weight, *shares = self.world.sum([total, weight, *parts.flatten().tolist()])
        mean = total / weight
        self._validated = (self.step, mean)
        perplexity = perplexity_of(mean) if self.data.unit == "tokens" else math.nan
        self.log.emit(ValidationEvent(step=self.step, loss=mean, perplexity=perplexity, losses=self._losses(shares)))
        return mean

    def draw_samples(self) -> list[Path]:
        """One picture or text per prompt, from the same noise at every step. Returns their paths on rank 0."""
        if not self.drawer.prompts:
            self.log.warn("no samples are drawn: sample.prompts is empty", self.step)
            return []
        self.log.enter("sampling", self.step)
        with self._evaluating():
            drawn = self.sampler.draw(self.model)
        paths = self.sampler.write(drawn, self.step)
        self.log.enter("training", self.step)
        return paths

    def save(self) -> None:
        """Begin a checkpoint; it is written while training goes on."""
        self.world.heartbeat.enter("waiting for the checkpoint before", moves=False)
        self._finish_checkpoint()
        self.checkpointer.save(self._progress(), self._state())
        self.world.heartbeat.beat()

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained weights as they are exported, whole, on the CPU of rank 0; empty on other ranks."""
        weights = {}
        with self._evaluating():
            for name, parameter in self.trainables.items():
                whole = parameter.detach()
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if self.world.rank == 0:
                    weights[name] = whole.to("cpu", copy=True)
        return weights

    def close(self) -> None:
        """Stop reading ahead and close this rank's files."""
        self.loader.close()
        self.log.close()

    def _make_loader(self, saved: Progress | None) -> Loader[Any]:
        rank, size, data = self.world.rank, self.world.size, self.data
        batch_sampler = data.batch_sampler(self._batch_sizes, saved)
        return Loader(batch_sampler, data.example, rank, size, self.cfg.train.micro_batch, data.loss_weight)

    def _forward(self, micro_batch: MicroBatch) -> Loss:
        rng = SampleRng(self.cfg.train.seed, micro_batch.indices, self.world.device)
        batch = self._batch(micro_batch.examples, micro_batch.weights)
        if self._dropouts:
            rows = self.family.sample_rows(batch)
            adapters.set_samples(self._dropouts, rng.seed, rng.indices, rows, self.world.device)
        return self.family.loss(self.model, self._on_device(batch), rng)

    def _batch(self, examples: tuple[dict[str, Tensor], ...], weights: tuple[float, ...]) -> Batch:
        return {**self.family.collate(examples), "weight": torch.tensor(weights)}

    def _on_device(self, batch: Batch) -> Batch:
        return {key: tensor.to(self.world.device, non_blocking=True) for key, tensor in batch.items()}

    def _agree(self, total: float, weight: float, parts: Sequence[float]) -> Agreed:
        """The one reduction of a step: loss, weight, and flags that all ranks must act on together.

        parts: of `Loss`, one after the other.
        """
        rank0 = self.world.rank == 0
        finite = math.isfinite(total)
        mine = [
            total if finite else 0.0,
            weight,
            float(not finite),
            float(self._asked_to_stop()),
            float(bool(self.told)),
            *(float(rank0 and self.run_dir.requested(what)) for what in ("save", "sample")),
            float(self.checkpointer.writing and self.checkpointer.done),
            *(self._own_s if rank == self.world.rank else 0.0 for rank in range(self.world.size)),
            *parts,
        ]
        with self.clock.communication():
            total, weight, non_finite, stop, told, save, sample, saved, *others = self.world.sum(mine)
        own_s, shares = others[: self.world.size], others[self.world.size :]
        if rank0:
            self._clear_requests(stop=stop, save=save, sample=sample)
            self._name_stragglers(own_s)
        return Agreed(
            loss=math.nan if non_finite else total / weight,
            weight=weight,
            non_finite=int(non_finite),
            stop=bool(stop),
            told=bool(told),
            save=bool(save),
            sample=bool(sample),
            saved=saved == self.world.size,
            losses=self._losses(shares),
        )

    def _losses(self, parts: Sequence[float]) -> dict[str, float]:
        """The means of those that there were items for. parts: of `Loss`, summed over the ranks."""
        named = zip(self.family.losses, parts[::2], parts[1::2], strict=True)
        return {name: total / count for name, total, count in named if count and math.isfinite(total)}

    def _name_stragglers(self, own_s: Sequence[float]) -> None:
        if self._own_s:
            sentence = self.stragglers.add(own_s)
            if sentence:
                self.log.warn(sentence, self.step)

    def _asked_to_stop(self) -> bool:
        """By a request, by a signal, or by the death of torchrun. Of requests only rank 0 knows."""
        requested = self.world.rank == 0 and self.run_dir.requested("stop")
        return requested or bool(self.told) or os.getppid() != self._parent

    def _clear_requests(self, **asked: float) -> None:
        """Forget the requests that are answered now; one that came since stays."""
        for what in get_args(Request):
            if asked[what]:
                self.run_dir.clear(what)

    def _update(self, agreed: Agreed) -> tuple[float, float]:
        """Clip and move the weights, if all is finite. Returns the gradient norm before clipping and the learning rate.

        Raises FloatingPointError where it is not, and may not be passed over.
        """
        cfg = self.cfg.optim
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if agreed.weight != self.cfg.train.batch_size:
            torch._foreach_mul_(gradients, self.cfg.train.batch_size / agreed.weight)
        grad_norm = clip_gradients(self.parameters, cfg.clip_norm)
        lr = learning_rate(self.step, cfg, self.cfg.train.steps)
        if agreed.non_finite or not math.isfinite(grad_norm):
            self._pass_over(agreed, grad_norm)
            return grad_norm, lr
        self._skipped_in_a_row = 0
        self.checkpointer.wait_for_copy()
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.step)
        return grad_norm, lr

    def _pass_over(self, agreed: Agreed, grad_norm: float) -> None:
        """Leave the weights as they are, or end the run: all ranks see the same loss and norm."""
        what = (
            f"step {self.step + 1}: the loss is not finite on {agreed.non_finite} of {self.world.size} ranks"
            if agreed.non_finite
            else f"step {self.step + 1}: the gradient norm is {grad_norm}, the loss {agreed.loss}"
        )
        if self.cfg.train.non_finite == "stop":
            raise FloatingPointError(what)
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == SKIPS_IN_A_ROW:
            raise FloatingPointError(f"{what}, as in the {SKIPS_IN_A_ROW - 1} steps before")
        self.log.warn(f"{what}; passed over, {self.skipped} in this run so far", self.step + 1)
        self.optimizer.zero_grad()

    def _check_replicas(self) -> None:
        name = diverged(self.trainables, self.world)
        if name:
            raise RuntimeError(f"step {self.step}: {name} differs between ranks that must hold equal copies")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside: no dropout, no gradients, the weights to evaluate with, and nothing gathered from before."""
        reshard(self.model)
        self.oom_context.enter("evaluation")
        self.checkpointer.wait_for_copy()
        for dropout in self._dropouts:
            dropout.eval()
        with torch.no_grad(), evaluation_weights(self.optimizer, self.parameters, self.ema):
            yield
            reshard(self.model)
        for dropout in self._dropouts:
            dropout.train()

    def _state(self) -> TrainState:
        return TrainState(self.model, self.trainables, self.optimizer, self._evaluation_tensors())

    def _evaluation_tensors(self) -> dict[str, Tensor]:
        """Weights to evaluate with, where they are not the trained ones."""
        if self.ema:
            return self.ema.average
        if not isinstance(self.optimizer, HasEvaluationWeights):
            return {}
        with evaluation_weights(self.optimizer, self.parameters, None):
            return {name: parameter.detach().clone() for name, parameter in self.trainables.items()}

    def _newest_checkpoint(self) -> Path | None:
        newest, problems = newest_intact(self.run_dir.checkpoints, self.world)
        for problem in problems:
            self.log.warn(problem)
        return newest

    def _resume(self, newest: Path) -> Progress:
        saved = restore(newest, self._state())
        self.world.barrier()
        if self.world.rank in self.world.guest_leaders:
            shutil.rmtree(newest)  # a copy of rank 0's
        adapters.follow_recipe(self.model, self.cfg.adapter, saved.recipe)
        self.data.follow_recipe(saved.recipe)
        self.drawer.follow_recipe(saved.recipe)
        self.step, self.samples_seen, self.skipped = saved.step, saved.samples_seen, saved.skipped
        self.log.note("loading", f"resumed from {newest.name}", self.step)
        changed = config_changes.changes(saved.config, self._config()) if saved.config else []
        if changed:
            told = "; ".join(map(str, changed))
            self.log.note("loading", f"changed since it was saved: {told}", self.step)
        if saved.data and saved.data != self.data.digest:
            self.log.warn(self.data.changed_message, self.step)
        return saved

    def _config(self) -> dict[str, Any]:
        return self.cfg.model_dump(mode="json")

    def _progress(self) -> Progress:
        step, loss = self._validated
        return Progress(
            step=self.step,
            samples_seen=self.samples_seen,
            skipped=self.skipped,
            validation_loss=loss if step == self.step else math.nan,
            config=self._config(),
            data=self.data.digest,
            place=self.data.position(self.step),
            recipe=self._recipe,
            batch_sizes=self._batch_sizes.until(self.step),
        )

    def _save_last(self) -> None:
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
        """Also where a checkpoint is due: of each the loss is known, and the best can be kept."""
        saves = self._due(self.cfg.checkpoint.every) or self.step == self.cfg.train.steps
        return self._due(self.cfg.data.validation_every) or (saves and self.cfg.checkpoint.keep_best > 0)

    def _log_step(self, agreed: Agreed, lr: float, grad_norm: float, began: float) -> None:
        split = self.clock.read()
        self._own_s = split["own"]
        log.debug("step %d: loss %.6g, gradient norm %.6g, seconds %s", self.step, agreed.loss, grad_norm, dict(split))
        # After reading the clock, which waits for the accelerator: its optimizer step belongs to this one.
        seconds = time.perf_counter() - began
        self.log.stepped(
            StepEvent(
                step=self.step,
                loss=agreed.loss,
                lr=lr,
                grad_norm=grad_norm,
                seconds=seconds,
                seconds_data=split[DATA],
                seconds_forward=split[FORWARD],
                seconds_backward=split[BACKWARD],
                seconds_optimizer=split[OPTIMIZER],
                seconds_communication=split["communication"],
                images_per_second=self.cfg.train.batch_size / seconds if self.data.unit == "images" else math.nan,
                tokens_per_second=agreed.weight / seconds if self.data.unit == "tokens" else math.nan,
                losses=agreed.losses,
            )
        )
