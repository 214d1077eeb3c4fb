"""The certificate of a run: what was measured of its base before the first step, and what is wrong with it.

A fault of the wiring, as a shift of another model or references that do not reach the transformer, looks like a poor
adapter after a night. Imports no torch. `trainer.train.certificate` measures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError

FILE = "certificate.json"
RECORDED = Path(__file__).parents[1] / "assets" / "certificates.json"
"""Certificates of the demo model and the tiny ones, made by `python -m tests.certificates`."""
PICTURE = RECORDED.with_name("certificate.png")
"""A picture of our own, which `--certify` takes for a reference."""
PROMPTS = (
    "a red apple on a wooden table",
    "a portrait of an old man with a grey beard",
    "a small house by a lake, mountains behind it",
    "a blue car in a street at night",
    "a cat asleep on a chair",
    "a bowl of soup seen from above",
    "a child with a yellow umbrella in the rain",
    "a sign that says OPEN",
)
"""Prompts of `--certify`, so that certificates of one base can be compared."""
EXACT = 0.03
"""Relative difference of numbers that hold no noise; types of numbers and machines change them by less."""
MOST_BYTES, MOST_EARLIER, MOST_LETTERS = 2**18, 200, 80
"""Size of a certificate's file, number of those of earlier runs that are read, and letters of a name in it."""
LEAST = 1e-4
"""Difference that is none, for numbers around 0."""
MOST_REORDERED = 0.15
"""Difference of the projections of numbers in one order, relative to what it is in other orders."""
BAND, QUANTIZED_BAND = 0.15, 0.25
"""Relative difference of a loss, without and with a quantized base. The noise of 50 seeds moves it by less."""
STAGES = {
    "schedule": "the timestep shift or the sampler's noise levels",
    "text": "the embeddings of the prompts: the text encoder, its template, or the images that it sees",
    "autoencoder": "the latents of a picture: the autoencoder, or the scale of its latents",
    "inputs": "what the transformer is called with",
    "targets": "the layers that the adapter reaches",
    "losses": "what the base predicts: its weights, or how they are quantized",
    "drawn": "what the base predicts of its own pictures: the sampler, the weights, or how they are quantized",
}
"""{stage: what to look at where its numbers differ}, each before those that follow from it."""
WIRING = ("drawn", "captions", "references", "cache")
"""Kinds of findings that only a base which is called wrongly has, or one whose weights are broken."""
ALL = tuple(STAGES)
OF_THE_BASE = tuple(stage for stage in STAGES if stage not in ("schedule", "targets"))
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """A fault, or what is probably one. kind: a word or two for it. sentence: what it is, and what to do."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class Certificate:
    """What was measured of a base before the first step.

    Attributes:
        base: The model, as `model.path` and its family name it.
        conditions: All else that decides the numbers: prompts, size, steps, seed. Certificates with equal base and
            conditions can be compared.
        settings: Settings of a run that change the numbers and are no fault: a run is only compared with those that
            have the same.
        stored: `quantize.format` of the base.
        stages: {one of STAGES: {name: number}}.
        effects: {what was changed: relative change of the loss}: captions exchanged, references replaced by noise.
        findings: What is wrong.
        seconds: How long it took.
        versions: {package: version}.
    """

    base: str
    conditions: Mapping[str, str]
    stored: str
    stages: Mapping[str, Numbers]
    effects: Numbers = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""

    @property
    def is_green(self) -> bool:
        return not self.findings

    @property
    def miswired(self) -> tuple[Finding, ...]:
        """The findings that no setting of a run can be the cause of."""
        return tuple(found for found in self.findings if found.kind in WIRING)

    def lines(self) -> tuple[str, ...]:
        """One green line, or a sentence for each fault."""
        if self.findings:
            return tuple(f"certificate, {one.kind}: {one.sentence}" for one in self.findings)
        losses = ", ".join(f"{value:.3g} at {name}" for name, value in self.stages.get("drawn", {}).items())
        measured = f"; loss of its own pictures {losses}" if losses else ""
        changes = "".join(f"; {what} change it by {change:.1%}" for what, change in self.effects.items())
        return (f"certificate: no fault found in {self.base}{measured}{changes} ({self.seconds:.0f} s)",)


_CERTIFICATE = TypeAdapter(Certificate)
_CERTIFICATES = TypeAdapter(tuple[Certificate, ...])


def write(run: RunDir, certificate: Certificate) -> None:
    """Write `certificate.json` into the run folder."""
    files.replace(run.path / FILE, json.dumps(asdict(certificate), ensure_ascii=False, indent=1))


def read(path: Path) -> Certificate:
    """Read a certificate. Raises OSError if the file is missing, InputError if it holds something else."""
    return files.read_json(path, _CERTIFICATE, at_most=MOST_BYTES)


def recorded() -> tuple[Certificate, ...]:
    """The certificates that come with the program."""
    return files.read_json(RECORDED, _CERTIFICATES)


def earlier(runs: Path) -> Iterator[Certificate]:
    """Yield the certificates without a fault in a folder of runs; those of strangers' folders and damaged ones are left
    out."""
    for file in sorted(runs.glob(f"*/{FILE}"))[-MOST_EARLIER:]:
        run = RunDir(file.parent)
        if run.path.is_symlink():
            continue
        try:
            with run.boundary():
                found = read(run.own_file(FILE))
            if found.is_green:
                yield found
        except (InputError, OSError):
            continue


def compared(mine: Certificate, recorded: Sequence[Certificate], earlier: Sequence[Certificate] = ()) -> Certificate:
    """Return a certificate with the finding of a comparison with the first one of equal base and conditions.

    Only the first stage that differs is named: the later ones follow from it.

    Args:
        recorded: Of models whose settings are known. earlier: Of other runs; shift and targets are theirs to choose.
    """
    own = [other for other in earlier if other.settings == mine.settings]
    for other, stages in (*((one, ALL) for one in recorded), *((one, OF_THE_BASE) for one in own)):
        if other.base == mine.base and other.conditions == mine.conditions:
            found = _difference(mine, other, stages)
            if found is not None:
                # A base that does not know its own pictures follows from what differs.
                findings = [finding for finding in mine.findings if finding.kind != "drawn"]
                return replace(mine, findings=(*findings, found))
            return mine
    return mine


def _difference(mine: Certificate, other: Certificate, stages: Sequence[str]) -> Finding | None:
    quantized = "none" not in {mine.stored, other.stored} or mine.stored != other.stored
    for stage in stages:
        meaning = STAGES[stage]
        have, expected = mine.stages.get(stage, {}), other.stages.get(stage, {})
        if not have or not expected:
            continue
        is_loss = stage in ("losses", "drawn")
        share = (QUANTIZED_BAND if quantized else BAND) if is_loss else EXACT
        names = [name for name in sorted({*have, *expected}) if not _close(name, have, expected, share)]
        if names:
            name = names[0][:MOST_LETTERS]  # of a stranger's file
            # Of an argument, its name alone: "img_ids" of "img_ids rms".
            kind = name.partition(" ")[0] if stage == "inputs" else stage
            numbers = f"{_shown(have.get(name))} where a certificate of this base has {_shown(expected.get(name))}"
            return Finding(kind, f"{name} is {numbers}; look at {meaning}")
    return None


def _close(name: str, have: Numbers, expected: Numbers, share: float) -> bool:
    """Whether a number is the expected one. A mean of many numbers is compared with their size, as it may be near 0."""
    one, other = have.get(name), expected.get(name)
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    of, _, kind = name.rpartition(" ")
    size, count = expected.get(f"{of} size", 0.0), expected.get(f"{of} count", 1.0)
    # A mean may be near 0, and is compared with the size of what it is of. In other orders of the same numbers their
    # projections differ by about sqrt(size^2 / count).
    own = {"mean": share / 3 * size, "order": MOST_REORDERED * size / math.sqrt(max(count, 1.0))}.get(kind)
    return abs(one - other) <= max(LEAST, share * max(abs(one), abs(other)) if own is None else own)


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.5g}"
