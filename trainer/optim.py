"""Optimizers, learning rates and the moving average, all on sharded parameters."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.config.errors import InputError
from trainer.config.sections import OptimConfig

# Not installed with the project: diffusers and peft import torchao wherever they find it, which takes a second.
EXTRAS = {"adamw8bit": ("torchao", "eightbit")}


def make_optimizer(parameters: Sequence[nn.Parameter], cfg: OptimConfig) -> Optimizer:
    """The optimizer over this rank's shards. Raises InputError when its package is not installed."""
    if cfg.type in EXTRAS:
        package, extra = EXTRAS[cfg.type]
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"optim.type: {cfg.type} needs the package {package}; pip install 'shardstudio[{extra}]', or use adamw"
            )
    return _MAKERS[cfg.type](parameters, cfg)


def learning_rate(step: int, cfg: OptimConfig, steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`.

    Linear warm-up over `optim.warmup` steps; then constant, or falling (line or half cosine) to zero at `steps`.
    """
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    progress = min(1.0, (step - cfg.warmup) / max(1, steps - cfg.warmup))
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return cfg.lr * factor[cfg.schedule]


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """The same learning rate for every group."""
    for group in optimizer.param_groups:
        # 8-bit AdamW keeps it as a tensor, so that a compiled step is not compiled again for each value.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer remembers per weight; its counters of steps are left out."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.numel() > 1]


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients down to a global norm of `max_norm`; None leaves them. Collective.

    Returns the norm before.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm is not None and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


class Ema:
    """Exponential moving average of this rank's shards, in fp32.

    The decay of early steps is lowered to (1 + n) / (10 + n), so that a short run is not held at its start.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step` (0-based)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        current = [p.detach() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's weights are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            current = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(current)


@contextmanager
def evaluation_weights(optimizer: Optimizer, parameters: Sequence[nn.Parameter], ema: Ema | None) -> Iterator[None]:
    """Inside, the weights are those to sample, validate and export with: the average, where there is one.

    Afterwards they are bit for bit what they were.
    """
    if ema is not None:
        with ema.applied():
            yield
    elif isinstance(optimizer, HasEvaluationWeights):
        with _schedule_free_average(optimizer, parameters):
            yield
    else:
        yield


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """A schedule-free optimizer: trains one point and evaluates another (arXiv 2405.15682)."""

    state: dict[Tensor, Any]

    def eval(self) -> None: ...

    def train(self) -> None: ...


@contextmanager
def _schedule_free_average(optimizer: HasEvaluationWeights, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    if not optimizer.state:
        # Before the first step both are the same; asking would leave empty states (see _schedule_free).
        yield
        return
    # There and back by its own methods is off by rounding: a run that saves would differ from one that does not.
    trained = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)


def _adamw(parameters: Sequence[nn.Parameter], cfg: OptimConfig) -> Optimizer:
    return torch.optim.AdamW(
        parameters, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )


def _adamw8bit(parameters: Sequence[nn.Parameter], cfg: OptimConfig) -> Optimizer:
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(parameters, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay)
    return optimizer


def _schedule_free(parameters: Sequence[nn.Parameter], cfg: OptimConfig) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer: Any = AdamWScheduleFree(
        parameters, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay, foreach=True
    )
    optimizer.train()
    # Switching leaves an empty state per parameter, which a resume would take for an initialised one.
    optimizer.state.clear()
    return cast(Optimizer, optimizer)


_MAKERS = {"adamw": _adamw, "adamw8bit": _adamw8bit, "schedulefree": _schedule_free}
