"""`--fit`: the fastest config that fits the user's GPUs, printed and written as a preset. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainer.config.families import trains_on
from trainer.config.load import ConfigFile, dump_config, load_config_text, stage_configs
from trainer.config.presets import find_presets
from trainer.config.rewrite import EDITOR_LINE, rewritten
from trainer.config.schema import RunConfig
from trainer.models import distilled
from trainer.plan.hardware import Hardware, detected, named
from trainer.plan.search.choices import KEPT, kept_fields
from trainer.plan.search.decide import TIGHT
from trainer.plan.search.fit import Fit, Proposal, Target, fit
from trainer.plan.search.fixes import written
from trainer.plan.store import find_model, unread_weights
from trainer.run.folder import shared_cache
from trainer.system import files
from trainer.system.amounts import GIB, memory_size
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say
from trainer.view.numbers import format_duration

TYPICAL_STEPS = 1000
"""Steps whose time and price are printed where `train.epochs` decides how many there are."""
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Found:
    """The configs that fit, for a run or for each of its stages.

    Attributes:
        loaded: The config as it was given.
        hardware: The GPUs.
        parts: The config of each stage, or of the run.
        fits: What was found for each.
        host: Bytes of host memory of the machine, if it is this one.
    """

    loaded: ConfigFile
    hardware: Hardware
    parts: tuple[RunConfig, ...]
    fits: tuple[Fit, ...]
    host: float | None

    @property
    def gpus(self) -> str:
        """The GPUs of a machine in short: `4x24gb`."""
        return f"{self.count}x{round(self.hardware.card.memory / GIB)}gb"

    @property
    def count(self) -> int:
        """GPUs of each machine."""
        return self.hardware.count or self.loaded.config.parallel.devices

    def config(self, part: int, proposal: Proposal) -> RunConfig:
        """Return the run with a proposal for one of its parts."""
        cfg = self.loaded.config
        if not cfg.stages:
            return proposal.config
        changed = {field: now for field, (_, now) in proposal.changes.items()}
        stage = cfg.stages[part]
        stages = list(cfg.stages)
        stages[part] = stage.model_copy(update={"set": {**stage.set, **changed}})
        return RunConfig.model_validate(cfg.model_copy(update={"stages": tuple(stages)}).model_dump(mode="json"))

    @property
    def is_complete(self) -> bool:
        """Whether each part has a config that fits."""
        return all(one.proposals for one in self.fits)

    @property
    def best(self) -> RunConfig:
        """The run with the fastest proposal of each part. All parts must have one."""
        found = self
        for part, one in enumerate(self.fits):
            config = found.config(part, one.proposals[0])
            found = replace(found, loaded=replace(self.loaded, config=config))
        return found.loaded.config


def search(loaded: ConfigFile, runs: Path, gpus: str | None, keep: Sequence[str] | None) -> Found:
    """Find the fastest configs of a run that fit. What was given on the command line stays.

    Args:
        loaded: Its config.
        runs: Folder of the runs, for their shared cache.
        gpus: For example `4x24gb`. None: the GPUs of this machine.
        keep: Names of fields that stay, in short or in full. None: `choices.KEPT`.

    Raises:
        InputError: The config, `gpus` or `keep` is wrong, or there are no GPUs.
    """
    kept = kept_fields(KEPT if keep is None else keep)
    hardware = named(gpus) if gpus else detected()
    if hardware is None:
        raise InputError("--fit: this machine has no usable GPU; name the GPUs to fit, for example --gpus 4x24gb")
    count = hardware.count or loaded.config.parallel.devices
    given = {field for field, origin in loaded.origins.items() if origin == COMMAND_LINE}
    if loaded.config.stages and "parallel.devices" not in given:  # the stages, which are searched one by one, share it
        all_gpus = load_config_text(dump_config(loaded.config), [f"parallel.devices={count}"], loaded.source).config
        loaded, given = replace(loaded, config=all_gpus), given | {"parallel.devices"}
    _check(loaded, count, given)
    cache = shared_cache(loaded.config, runs)
    parts = tuple(stage_configs(loaded.config))
    for part in parts:
        find_model(part, cache, complain)
    host = None if gpus else float(psutil.virtual_memory().total)
    target = Target(hardware.card, count, kept, frozenset(given), host)
    return Found(loaded, hardware, parts, tuple(fit(part, target, cache) for part in parts), host)


def _check(loaded: ConfigFile, count: int, given: set[str]) -> None:
    models = [part.model for part in stage_configs(loaded.config)]
    loaded.refuse([problem for model in models for problem in distilled.refused(model)])
    loaded.refuse([problem for model in models for problem in unread_weights(model)])
    wanted = loaded.config.parallel.devices
    if "parallel.devices" in given and wanted > count:
        raise InputError(
            f"{COMMAND_LINE}: parallel.devices: {wanted} are asked for, each machine has {count}; leave it out, or set "
            f"{count} or fewer"
        )


def check_price(price: float | None, name: str) -> None:
    """Raise InputError for what is not the price of a GPU-hour. name: what the user calls it."""
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"{name}: {price:g} is not the price of a GPU-hour; give a number of 0 or more")


def show(found: Found, price: float | None) -> None:
    """Print what was found. price: price of a GPU-hour."""
    for note in found.loaded.notes:
        complain(f"note: {note}")
    for number, (part, one) in enumerate(zip(found.parts, found.fits, strict=True), 1):
        if stages := found.loaded.config.stages:
            say(f"stage {number} of {len(found.parts)}, {stages[number - 1].name}:")
        say("\n".join(lines(found, part, one, price)))


def write(found: Found, preset: Path, runs: Path, to: Path | None) -> Path:
    """Write the fastest config as a preset and return its file.

    Args:
        found: What was found; each part has a config that fits.
        preset: The file of the preset that was searched.
        runs: Folder of the runs, in which the user's own presets are.
        to: The file to write; None for one of the user's own presets. An existing file is not replaced: a free name is
            taken.

    """
    own = runs / "presets"
    wanted = to or files.make_private(own) / f"{preset.stem}-fit-{found.gpus}.yaml"
    taken = set() if to else set(find_presets(own))
    text = "\n".join([*_header(found, preset), EDITOR_LINE.sub("", files.read(preset).decode(), count=1)])
    for number in itertools.count(1):
        file = wanted if number == 1 else wanted.with_stem(f"{wanted.stem}-{number}")
        if file.stem in taken or file.exists():
            continue
        try:
            files.create(file, rewritten(text, found.best, file))
        # Another command took the name since.
        except FileExistsError:
            continue
        return file
    raise AssertionError("some name is free")


def lines(found: Found, cfg: RunConfig, one: Fit, price: float | None) -> list[str]:
    """Return what was found for a part of a run as lines of text.

    Args:
        found: All that was found.
        cfg: The part's config.
        one: What was found for it.
        price: Price of a GPU-hour.
    """
    card, machines = found.hardware.card, cfg.parallel.nodes
    where = f"{found.count} x {card.name}" + (f" on each of {machines} machines" if machines > 1 else "")
    notes = [f"note: {note}" for note in one.notes]
    if not one.proposals:
        return [f"{cfg.name} does not fit {where}: {one.remedy}", *notes]
    text = [
        f"{cfg.name} on {where}, {cfg.train.batch_size} samples per step: the fastest configs that fit, by their plans",
        f"(the middle of a step's time with full overlap and without; at most {TIGHT:.0%} of the memory)",
        "",
    ]
    for number, proposal in enumerate(one.proposals, 1):
        text += _proposal_lines(number, proposal, found, price)
    if one.faster:
        text.append(f"faster: {one.faster}")
    return [*text, *notes, *(f"warning: {sentence}" for sentence in distilled.warnings(cfg))]


def _proposal_lines(number: int, proposal: Proposal, found: Found, price: float | None) -> list[str]:
    plan, cfg = proposal.plan, proposal.config
    assert plan.card is not None and plan.time is not None
    what = "images" if trains_on(cfg) == "images" else "texts"
    steps = cfg.stage_steps[0]  # None where epochs decide
    length = f"{steps or TYPICAL_STEPS:,} steps in {format_duration(proposal.hours(steps or TYPICAL_STEPS) * 3600)}"
    length = length if steps else f"each {length}"
    if price is not None:
        length += f" for {proposal.price(steps or TYPICAL_STEPS, price):.2f}"
    on = f"each of {plan.ranks} GPUs" if plan.ranks > 1 else "one GPU"
    memory = f"{plan.need / GIB:.1f} of {plan.card.memory / GIB:.1f} GiB on {on}"
    text = [
        f"{number}  {proposal.seconds:.3g} s per step, {proposal.per_second:.3g} {what}/s, {memory}, {length}",
        f"   {proposal}",
        f"   {plan.time.bound_by} decides, {plan.time.origin}",
    ]
    if any(item.name == "offloaded" for item in plan.host):
        here = f" of {memory_size(found.host)}" if found.host else ""
        text.append(f"   {memory_size(proposal.host)}{here} of host memory on each machine")
    return [*text, ""]


def _header(found: Found, preset: Path) -> list[str]:
    names = [f"{stage.name}: " for stage in found.loaded.config.stages] or [""]
    text = [f"# {preset.name} for {found.count} x {found.hardware.card.name}, as --fit chose it by its plans."]
    for name, one in zip(names, found.fits, strict=True):
        best = one.proposals[0]
        changes = ", ".join(f"{field} {written(old)} -> {written(now)}" for field, (old, now) in best.changes.items())
        text += [
            f"# {name}{best.seconds:.3g} s per step, {best.plan.need / GIB:.1f} GiB on each GPU",
            f"# {name}changed: {changes or 'nothing'}",
        ]
    return text
