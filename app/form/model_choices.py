"""The base models of the presets, with the presets of each: what the first card of a new run offers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.config.families import trains_on
from trainer.config.load import load_config
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import MODEL_WORDS
from trainer.config.titles import method_title
from trainer.plan.hardware import CARDS, Card, of_machine
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.fixes import planned
from trainer.plan.store import known_model
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

VERDICTS = ("fits", "tight", "", "too large", "too few GPUs", "no GPU")
"""Best first."""
FAST = "80gb"
"""Card of CARDS whose speed is shown next to that of the smallest one, where this machine has no GPU."""
Model = tuple[str, str, str | None]
"""`model.path`, `model.family` and `model.base` of a preset."""


@dataclass(frozen=True)
class PresetChoice:
    """One preset of a model.

    Attributes:
        title: Method and base: "LoRA, nf4 base". The name where another preset of the model would look the same.
        needs: The least that it trains on: "4 cards from 24 GB", "the CPU".
        cost: A sentence on its speed, on this machine or else on those cards; "" where it is not known.
        verdict: "fits", "tight", "too large", "no GPU" or "too few GPUs" on this machine; "" where it is not known.
        plan: Its memory plan on this machine's cards, or else on those it needs; None for a model that is not recorded.
        blocks: Those of the model, as `PassTable.blocks` has them; empty for a model that is not recorded.
        per_sample: Estimated seconds for each sample on this machine; 0 where it is not known.
    """

    name: str
    title: str
    needs: str
    cost: str
    verdict: str
    is_own: bool
    plan: MemoryPlan | None = field(repr=False, default=None)
    blocks: tuple[tuple[str, int, int], ...] = field(repr=False, default=())
    per_sample: float = 0.0


@dataclass(frozen=True)
class ModelChoice:
    """One base model.

    Attributes:
        path: `model.path` of its presets; also `base`, which a single file has.
        presets: Those that this machine can train come first.
    """

    path: str
    family: str
    base: str | None
    presets: tuple[PresetChoice, ...]

    @property
    def is_built_in(self) -> bool:
        """Whether the model comes with the program."""
        return self.path in MODEL_WORDS

    @property
    def fits(self) -> bool:
        """Whether one of its presets can be trained on this machine."""
        return any(preset.verdict in ("fits", "tight") for preset in self.presets)


class ModelChoices:
    """The models of a folder's presets, in the order of models.yaml.

    Presets are planned once, and again when they or the GPUs change.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._known: dict[tuple[Path, int, tuple[str, ...]], tuple[Model, PresetChoice]] = {}

    def all(self, presets: dict[str, Path], own: Path, gpus: Sequence[Gpu]) -> list[ModelChoice]:
        """Return the models of the presets that were saved here, and of those shipped for published models.

        Presets that cannot be read are left out, and so are shipped ones for random weights or a folder of ours, which
        are made for tests and for pretraining: they are chosen by their name.

        Args:
            presets: {name: file}
            own: Folder of the presets that were saved here.
            gpus: This machine's GPUs.
        """
        known = list(published_models())
        with self._lock:
            found: dict[Model, list[PresetChoice]] = {}
            for name, file in presets.items():
                try:
                    key = file, file.stat().st_mtime_ns, tuple(f"{gpu.name} {gpu.memory}" for gpu in gpus)
                    if key not in self._known:
                        self._known[key] = self._read(name, file, file.parent == own, gpus)
                    model, choice = self._known[key]
                except (InputError, OSError):  # the form says what is wrong when it is chosen by its name
                    continue
                if choice.is_own or model[0] in known:
                    found.setdefault(model, []).append(choice)
        models = [
            ModelChoice(*model, tuple(sorted(_distinct(choices), key=_place))) for model, choices in found.items()
        ]
        return sorted(models, key=lambda model: known.index(model.path) if model.path in known else len(known))

    def _read(self, name: str, file: Path, is_own: bool, gpus: Sequence[Gpu]) -> tuple[Model, PresetChoice]:
        cfg = load_config(file).config
        title = name if is_own else method_title(cfg)
        model = cfg.model.path, cfg.model.family, cfg.model.base
        return model, replace(self._judged(cfg, gpus), name=name, title=title, is_own=is_own)

    def _judged(self, cfg: RunConfig, gpus: Sequence[Gpu]) -> PresetChoice:
        """Return a choice without name and title: what the config needs, whether it fits here, how fast it is."""
        choice = PresetChoice("", "", "", "", "", False)
        ranks = cfg.parallel.world_size
        if cfg.parallel.device == "cpu":
            return replace(choice, needs=f"{ranks} CPU ranks" if ranks > 1 else "the CPU", verdict="fits")
        count = f"{ranks} card" + ("s" if ranks > 1 else "")
        least = self._least(cfg)
        if least is None:
            return replace(choice, needs=count, verdict="" if gpus else "no GPU")
        assert least.card is not None
        known = known_model(cfg, shared_cache(cfg, self._runs))
        choice = replace(choice, blocks=tuple(known.table.blocks) if known else ())
        choice = replace(choice, needs=f"{count} from {least.card.name.partition(' (')[0]}", plan=least)
        hardware = of_machine(gpus)
        if hardware is None:
            fast = self._planned(cfg, CARDS[FAST])
            return replace(choice, cost=_cost(cfg, [least, *([fast] if fast else [])]), verdict="no GPU")
        if len(gpus) < ranks:  # also of several machines
            return replace(choice, cost=_cost(cfg, [least]), verdict="too few GPUs")
        here = self._planned(cfg, hardware.card)
        assert here is not None and here.verdict is not None and here.time is not None  # as `least` is
        if here.verdict == "does not fit":
            return replace(choice, cost=_cost(cfg, [least]), verdict="too large")
        choice = replace(choice, plan=here, cost=_cost(cfg, [here], "this machine"), verdict=here.verdict)
        return replace(choice, per_sample=here.time.high / cfg.train.batch_size)

    def _least(self, cfg: RunConfig) -> MemoryPlan | None:
        """Return the plan on the smallest of CARDS that it fits, else on the largest; None for an unrecorded model."""
        try:
            bare = self._planned(cfg, None)
        except InputError:
            return None
        if bare is None:
            return None
        # Without a card the plan is the thriftiest: what is smaller than its need is not asked about again.
        able = [card for card in CARDS.values() if bare.need <= card.memory] or [list(CARDS.values())[-1]]
        plans = (self._planned(cfg, card) for card in able)
        return next((plan for plan in plans if plan and plan.verdict == "fits"), None) or self._planned(cfg, able[-1])

    def _planned(self, cfg: RunConfig, card: Card | None) -> MemoryPlan | None:
        return planned(cfg, card, shared_cache(cfg, self._runs))


def _cost(cfg: RunConfig, plans: Sequence[MemoryPlan], place: str = "") -> str:
    """Say how long a sample takes on the card of each plan, and what makes the first one slow.

    Args:
        plans: Of the config. Their times per step are divided by its batch, so that presets can be compared.
        place: Stands for the card of the first plan; empty: its name does.
    """
    unit = "a text" if trains_on(cfg) == "text" else "an image"
    times = [
        f"{plan.time.high / cfg.train.batch_size:.2g} s {unit} on {place or plan.card.name}"
        for at, plan in enumerate(plans)
        if plan.card and plan.time and (at == 0 or plan.card != plans[0].card)
    ]
    waits = any(item.name == "offloaded" for item in plans[0].host)
    slow = "; slow, as frozen weights wait in host memory" if waits else ""
    return f"about {', '.join(times)}{slow}"


def _distinct(choices: Sequence[PresetChoice]) -> Iterator[PresetChoice]:
    """Yield the presets of a model, by their names where they would look the same otherwise."""
    counts = Counter((choice.title, choice.needs) for choice in choices)
    for choice in choices:
        yield replace(choice, title=choice.name) if counts[choice.title, choice.needs] > 1 else choice


def _place(choice: PresetChoice) -> tuple[int, float, float]:
    """Sort key: presets that fit first, the fastest of them first; then those that need the least memory in all."""
    need = choice.plan.need * choice.plan.ranks if choice.plan else 0.0
    return VERDICTS.index(choice.verdict), choice.per_sample, need
