"""The base models of the presets, with the presets of each: what the first card of a new run offers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.config.load import load_config
from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import MODEL_WORDS
from trainer.config.titles import method_title
from trainer.plan.hardware import CARDS, of_machine
from trainer.plan.memory import MemoryPlan
from trainer.plan.search.fixes import planned
from trainer.run.folder import shared_cache
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu

VERDICTS = ("fits", "tight", "", "too large", "too few GPUs", "no GPU")
"""Best first."""
Model = tuple[str, str, str | None]
"""`model.path`, `model.family` and `model.base` of a preset."""


@dataclass(frozen=True)
class PresetChoice:
    """One preset of a model.

    Attributes:
        title: Method and base: "LoRA, nf4 base". The name where another preset of the model would look the same.
        needs: The GPUs it was made for: "4 x 48 GB"; "2 CPU ranks".
        verdict: "fits", "tight", "too large", "no GPU" or "too few GPUs" on this machine; "" where it is not known.
        plan: Its memory plan on the card it needs; None for a model that is not recorded.
    """

    name: str
    title: str
    needs: str
    verdict: str
    is_own: bool
    plan: MemoryPlan | None = field(repr=False, default=None)


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
        """Return the models. Presets that cannot be read are left out.

        Args:
            presets: {name: file}
            own: Folder of the presets that were saved here.
            gpus: This machine's GPUs.
        """
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
                found.setdefault(model, []).append(choice)
        known = list(published_models())
        models = [
            ModelChoice(*model, tuple(sorted(_distinct(choices), key=_place))) for model, choices in found.items()
        ]
        return sorted(models, key=lambda model: known.index(model.path) if model.path in known else len(known))

    def _read(self, name: str, file: Path, is_own: bool, gpus: Sequence[Gpu]) -> tuple[Model, PresetChoice]:
        cfg = load_config(file).config
        plan, needs, verdict = self._judged(cfg, gpus)
        title = name if is_own else method_title(cfg)
        model = cfg.model.path, cfg.model.family, cfg.model.base
        return model, PresetChoice(name, title, needs, verdict, is_own, plan)

    def _judged(self, cfg: RunConfig, gpus: Sequence[Gpu]) -> tuple[MemoryPlan | None, str, str]:
        """Return (plan on the card it needs, GPUs it needs, verdict on this machine)."""
        ranks = cfg.parallel.world_size
        if cfg.parallel.device == "cpu":
            return None, f"{ranks} CPU ranks" if ranks > 1 else "the CPU", "fits"
        try:
            plan = planned(cfg, None, shared_cache(cfg, self._runs))
        except InputError:
            plan = None
        if plan is None:
            return None, f"{ranks} GPU" + ("s" if ranks > 1 else ""), "" if gpus else "no GPU"
        card = next((card for card in CARDS.values() if plan.need <= card.memory), list(CARDS.values())[-1])
        needs = f"{ranks} × {card.name.partition(' (')[0]}"
        hardware = of_machine(gpus)
        if hardware is None:
            return plan, needs, "no GPU"
        if len(gpus) < cfg.parallel.devices:
            return plan, needs, "too few GPUs"
        return plan, needs, "fits" if plan.need <= hardware.card.memory else "too large"


def _distinct(choices: Sequence[PresetChoice]) -> Iterator[PresetChoice]:
    """Yield the presets of a model, by their names where they would look the same otherwise."""
    counts = Counter((choice.title, choice.needs) for choice in choices)
    for choice in choices:
        yield replace(choice, title=choice.name) if counts[choice.title, choice.needs] > 1 else choice


def _place(choice: PresetChoice) -> tuple[int, float]:
    """Sort key: presets that fit first, then those that need the least memory in all."""
    return VERDICTS.index(choice.verdict), choice.plan.need * choice.plan.ranks if choice.plan else 0.0
