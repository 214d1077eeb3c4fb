"""Optimizers, learning rates and the moving average, all on sharded parameters.

A new optimizer is an entry of `_MAKERS` here; `trainer/RECIPES.md` has the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.config.sections import OptimConfig
from trainer.system.errors import InputError
from trainer.system.installation import missing_package


def make_optimizer(trainables: Mapping[str, nn.Parameter], cfg: OptimConfig) -> Optimizer:
    """Make the optimizer over this rank's shards, by name. Raises InputError when its package is not installed."""
    if missing := missing_package(cfg.type):
        raise InputError(f"optim.type: {missing}")
    shrinking = [one for name, one in trainables.items() if cfg.decay_norms or decays(name, one)]
    others = [one for name, one in trainables.items() if not (cfg.decay_norms or decays(name, one))]
    groups: list[dict[str, Any]] = [{"params": shrinking}, {"params": others, "weight_decay": 0.0}]
    return _MAKERS[cfg.type]([group for group in groups if group["params"]], cfg)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay shrinks a parameter: a matrix or an embedding, but not a norm, a bias or another vector.

    Decay pulls towards zero, and a norm's neutral value is one. A shard knows the dimensions of the whole tensor. The
    biases of all experts are one matrix, as are the norms of all heads.
    """
    *_, module, kind = ("", *name.split("."))
    return parameter.ndim > 1 and not kind.endswith("bias") and "norm" not in module


def learning_rate(step: int, cfg: OptimConfig, steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`.

    Linear warm-up over `optim.warmup` steps; then constant, or falling linearly or by half a cosine to 0 at `steps`.
    """
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    progress = min(1.0, (step - cfg.warmup) / max(1, steps - cfg.warmup))
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return cfg.lr * factor[cfg.schedule]


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        # 8-bit AdamW keeps it as a tensor, so that a compiled step is not compiled again for each value.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's state tensors per weight, without its step counters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.numel() > 1]


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards. An operation on them takes the host a fifth of the time that it takes on DTensors."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor | None, max_norm: float | None) -> Tensor:
    """Multiply all gradients by `factor`, then scale them down to a global norm of `max_norm`. Collective.

    The host does not wait for the device.

    Args:
        parameters: All of them sharded in one way, or none.
        factor: A scalar on the device of the gradients; None is 1.
        max_norm: None leaves the norm as it is.

    Returns:
        The norm before it was scaled down. Where it is not finite, the gradients are of no use.
    """
    gradients = local(p.grad for p in parameters if p.grad is not None)
    if factor is not None and gradients:
        torch._foreach_mul_(gradients, factor)
    norm = _norm(gradients, parameters[0])
    if max_norm is not None and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils does
    return norm


def _norm(shards: list[Tensor], like: nn.Parameter) -> Tensor:
    """The norm over all ranks of gradients, of which this rank has the shards. like: a parameter, sharded as all are.

    The norm of each gradient is summed over the ranks before the norm of all is taken. DTensor does so too, and the
    last bit depends on it.
    """
    norms = torch.stack(torch._foreach_norm(shards)) if shards else like.new_zeros(0, dtype=torch.float32)
    if isinstance(like, DTensor):
        for dim, placement in enumerate(like.placements):
            if placement.is_shard():
                norms = norms**2
                dist.all_reduce(norms, group=like.device_mesh.get_group(dim))
                norms = norms**0.5
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW on this rank's shards, with a step that the device itself may skip.

    Attributes:
        found_inf: A scalar fp32 tensor; where it is 1, `step` changes nothing. Its name and meaning are torch's.
    """

    found_inf: Tensor | None = None

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        has_complex = bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = local(tensors)
        return has_complex


class Ema:
    """Exponential moving average of this rank's shards, in fp32.

    At step n the decay is at most (1 + n) / (10 + n), so that the average of a short run does not stay at the start.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step` (0-based)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(local(self.average.values()), local(self._parameters.values()), 1 - decay)

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

    Afterwards they are restored bit for bit.
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
    """A schedule-free optimizer: it trains one set of weights and evaluates another (arXiv 2405.15682)."""

    state: dict[Tensor, Any]

    def eval(self) -> None: ...

    def train(self) -> None: ...


@contextmanager
def _schedule_free_average(optimizer: HasEvaluationWeights, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    if not optimizer.state:
        # Before the first step both are the same, and switching would leave empty states (see _schedule_free).
        yield
        return
    # Its own methods restore the weights only up to rounding: a run that saves would differ from one that does not.
    trained = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)


def _adamw(groups: Sequence[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    return AdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay, fused=True)


def _adamw8bit(groups: Sequence[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    # Small shards keep fp32 states: see DECISIONS 26.
    from torchao import optim
    from torchao.optim.adam import single_param_adam

    update: Any = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
        """torchao's AdamW on this rank's shards, under its name, which checkpoints hold.

        torch keeps the compiled code of DTensors by their global shape: a rank with fewer rows, or none, would take the
        code of another rank from the cache, which reads and writes beyond its shard.
        """

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            # Each shape of a shard is compiled by itself; beyond torch's limit of variants the rest would run eagerly.
            with torch._dynamo.utils.disable_cache_limit():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._update(parameter, parameter.grad, group)

        def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            state["step"] += 1
            shards = local((parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"]))
            # A rank may hold no row of a small parameter.
            if shards[0].numel():
                weight, gradient, mean, square = shards
                rates = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
                update(weight, gradient, state["step"], mean, square, None, *rates, True, False)

    optimizer: Optimizer = AdamW8bit(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay)
    return optimizer


def _schedule_free(groups: Sequence[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    from schedulefree import AdamWScheduleFree  # and not Prodigy: see DECISIONS 25

    optimizer: Any = AdamWScheduleFree(
        groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=cfg.weight_decay, foreach=True
    )
    optimizer.train()
    # Switching leaves an empty state per parameter, which a resume would mistake for an initialised one.
    optimizer.state.clear()
    return cast(Optimizer, optimizer)


_MAKERS = {"adamw": _adamw, "adamw8bit": _adamw8bit, "schedulefree": _schedule_free}
