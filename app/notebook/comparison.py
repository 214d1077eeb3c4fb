"""Tables and bar charts that compare trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from app.notebook.lessons import Bars, Table
from trainer.launcher.jobs.variants import Trial
from trainer.plan.simulate.zero import ModelBytes, RankBytes, expected

MB, GB = 1e6, 1e9
ZERO = {"ddp": "nothing", "grad_op": "gradients, optimizer state", "full": "weights too"}
"""{strategy: parts of the model state that it shards}, as in ZeRO."""


def zero_table(parameters: int, ranks: Sequence[int]) -> Table:
    """Return GB per rank of weights, gradients and optimizer state by ZeRO's formula, for a number of parameters."""
    model = ModelBytes.of_parameters(parameters)
    rows = []
    for strategy, divided in ZERO.items():
        allocated = [expected(model, strategy, count, count) for count in ranks]
        # In ZeRO stage 2 every rank has all weights; here they are whole during a step only.
        more = [model.weights - rank.weights if strategy == "grad_op" else 0 for rank in allocated]
        sizes = [rank.allocated + weights for rank, weights in zip(allocated, more, strict=True)]
        rows.append([strategy, divided, *(f"{size / GB:.1f}" for size in sizes)])
    return Table(["strategy", "divided", *(f"GB per rank of {count}" for count in ranks)], rows)


def summary(trials: Sequence[Trial]) -> Table:
    """Return memory, time and loss of each trial. "saved" is relative to the device memory of ddp on as many ranks."""
    head = ["strategy", "ranks", "MB per rank", "in host memory", "saved", "s per step", "loss before", "loss after"]
    return Table(head, [_summary_row(trial, _ddp(trials, trial)) for trial in trials])


def saving(trials: Sequence[Trial], label: str) -> float:
    """Return the share of ddp's device memory that the last trial with this label saves."""
    trial = next(trial for trial in reversed(trials) if trial.label == label)
    return _saved(trial, _ddp(trials, trial))


def _summary_row(trial: Trial, ddp: Trial) -> list[str]:
    allocated = max(rank.allocated for rank in trial.cost.ranks)
    on_host = f"{allocated / MB:.2f}" if trial.cost.is_offloaded else ""
    figures = [f"{_on_device(trial) / MB:.2f}", on_host, f"{_saved(trial, ddp):.0%}", f"{trial.seconds:.3f}"]
    return [trial.label, str(len(trial.cost.ranks)), *figures, *_losses(trial)]


def _ddp(trials: Sequence[Trial], trial: Trial) -> Trial:
    """The ddp trial on as many ranks."""
    size = len(trial.cost.ranks)
    return next(other for other in trials if other.cost.strategy == "ddp" and len(other.cost.ranks) == size)


def _saved(trial: Trial, ddp: Trial) -> float:
    return 1 - _on_device(trial) / _on_device(ddp)


def _on_device(trial: Trial) -> float:
    return 0.0 if trial.cost.is_offloaded else max(rank.allocated for rank in trial.cost.ranks)


def against_formula(trials: Sequence[Trial]) -> Table:
    """Return the counted MB of rank 0, those by the formula, and the largest relative deviation of any rank."""
    parts = {"weights": "weights", "gradients": "gradients", "optimizer_state": "optimizer state"}
    parts |= {"gathered": "gathered", "sent": "sent per step"}
    rows = [
        [
            trial.label,
            str(len(trial.cost.ranks)),
            *(
                f"{getattr(trial.cost.ranks[0], name) / MB:.2f}, {getattr(trial.cost.formula, name) / MB:.2f}"
                for name in parts
            ),
            f"{deviation(trial):.3%}",
        ]
        for trial in trials
    ]
    return Table(["strategy", "ranks", *(f"{part}: counted, formula" for part in parts.values()), "deviation"], rows)


def deviation(trial: Trial) -> float:
    """Return the largest relative difference to the formula, over all ranks and kinds of bytes."""
    return max(
        _difference(getattr(rank, field.name), getattr(trial.cost.formula, field.name))
        for rank in trial.cost.ranks
        for field in fields(RankBytes)
    )


def activations(trials: Sequence[Trial]) -> Table:
    """Return MB of activations kept for backward, per rank and per image."""
    rows = []
    for trial in trials:
        cost, kept = trial.cost, max(trial.cost.activations)
        rows.append([trial.label, len(cost.ranks), cost.images, f"{kept / MB:.2f}", f"{kept / cost.images / MB:.2f}"])
    return Table(["trial", "ranks", "images per rank", "MB per rank", "MB per image"], rows)


def levers(trials: Sequence[Trial]) -> Table:
    """Return MB of a rank that exist only within a step, with seconds per step and losses."""
    rows = []
    for trial in trials:
        rank = trial.cost.ranks[0]
        sizes = [trial.cost.activations[0], rank.gathered, rank.sent]
        rows.append([trial.label, *(f"{size / MB:.2f}" for size in sizes), f"{trial.seconds:.3f}", *_losses(trial)])
    head = ["trial", "activations", "gathered at once", "sent per step", "s per step", "loss before", "loss after"]
    return Table(head, rows)


def memory(trials: Sequence[Trial]) -> Bars:
    """Return a bar per trial: memory of its first rank at the end of forward and backward, by kind."""
    bars = {}
    for trial in trials:
        rank = trial.cost.ranks[0]
        where = " (host)" if trial.cost.is_offloaded else ""
        bars[f"{trial.label}{where}, {len(trial.cost.ranks)} ranks"] = {
            "weights": rank.weights,
            "gradients": rank.gradients,
            "optimizer state": rank.optimizer_state,
            "gathered": rank.gathered,
            "activations": trial.cost.activations[0],
        }
    return Bars(bars, MB, "MB")


def _losses(trial: Trial) -> list[str]:
    """Loss on the held-out images, before and after."""
    return [f"{trial.validation[at]:.3f}" if trial.validation else "" for at in (0, -1)]


def _difference(counted: float, formula: float) -> float:
    """Relative to the formula; bytes where it has none count as a whole."""
    return abs(counted - formula) / formula if formula else float(counted > 0)
