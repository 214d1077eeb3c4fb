"""Models that were distilled to sample in few steps without guidance: recognition, sample settings and warnings.

Imports no torch. The families list these models (`ModelFamily.distilled`, repeated in config/families.json).

See DECISIONS 38.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import families
from trainer.config.families import Distilled, FamilyFacts
from trainer.config.schema import RunConfig
from trainer.config.sections import CompleteSample, ModelConfig, SampleConfig
from trainer.models.recognition import folder_of, has_marks, json_of
from trainer.system.errors import Problem

STEPS, GUIDANCE = 28, 4.0
"""Sample settings of a base model where the config has none."""
NO_GUIDANCE = 1.0
INDEX = "model_index.json"


def matches(model: ModelConfig, folder: Path | None = None) -> tuple[Distilled, ...]:
    """Find the distilled models that this model may be, or may be made from; none if it is not distilled.

    Args:
        model: The section `model` of the config.
        folder: Its diffusers folder. None looks for the one that the config names, which need not be on this machine.
    """
    known = families.of(model.family)
    kinds = known.distilled if known else ()
    if model.options.distilled is False:
        return ()
    folder = folder_of(model) if folder is None else folder
    architecture = model.options.architecture
    if architecture in _architectures(kinds):
        likely = tuple(kind for kind in kinds if kind.architecture == architecture)
    else:
        # The folder's own statement counts more than its name.
        names = set() if json_of(folder, INDEX).get("is_distilled") is False else _names(model, folder)
        likely = tuple(
            kind for kind in kinds if has_marks(kind.marks, folder) or names & {n.lower() for n in kind.names}
        )
    return likely or (kinds if model.options.distilled else ())


def complete_sample(model: ModelConfig, sample: SampleConfig, folder: Path | None = None) -> CompleteSample:
    """Complete the section `sample`: the model's own steps and guidance where they are empty, no guidance if it is
    distilled. folder: as for `matches`."""
    kinds, known = matches(model, folder), families.of(model.family)
    usual = known.sample_guidance if known else GUIDANCE
    guidance = usual if sample.guidance is None else sample.guidance
    own = {
        "steps": sample.steps or (kinds[0].steps if kinds else STEPS),
        "guidance": NO_GUIDANCE if kinds else guidance,
    }
    return CompleteSample.model_validate(sample.model_dump() | own)


def warnings(cfg: RunConfig, folder: Path | None = None) -> tuple[str, ...]:
    """Sentences to show before a distilled model is trained; none for other models. folder: as for `matches`."""
    kinds, sample = matches(cfg.model, folder), cfg.sample
    if not kinds:
        return ()
    base = " or ".join(dict.fromkeys(kind.base for kind in kinds))
    override = "" if cfg.model.options.distilled else "; if it is not distilled, set model.options.distilled: false"
    sentences = [
        f"model.path {cfg.model.path}: the model was distilled to generate in {kinds[0].steps} steps without guidance, "
        f"and training undoes that: images in few steps become blurred. Train {base} instead, and use the adapter with "
        f"this model{override}"
    ]
    if sample.prompts and sample.guidance is not None and sample.guidance > NO_GUIDANCE:
        sentences.append(
            f"sample.guidance: {sample.guidance} is not used: a distilled model is sampled without guidance"
        )
    if sample.prompts and sample.negative:
        sentences.append("sample.negative is not used: a distilled model is sampled without guidance")
    return tuple(sentences)


def refused(model: ModelConfig, folder: Path | None = None) -> Iterator[Problem]:
    """Problems where `model.options.distilled` contradicts the known facts of the model. folder: as for `matches`."""
    field, says = "model.options.distilled", model.options.distilled
    known = families.of(model.family)
    if says is None or known is None or not known.distilled:
        return
    word, architecture = str(says).lower(), model.options.architecture
    folder = folder_of(model) if folder is None else folder
    # A single file may hold another model than its base folder.
    index = {} if model.base else json_of(folder, INDEX)
    if index.get("is_distilled", says) != says:
        yield Problem(field, f"{word}, but {folder}/{INDEX} says the opposite; leave it empty, or correct that file")
    if says and architecture and architecture not in (names := _architectures(known.distilled)) and names:
        yield Problem(field, f"true, but {architecture} is not distilled; leave it empty, or name {', '.join(names)}")
    elif says and _reads_guidance(known, model, folder):
        yield Problem(
            field,
            "true, but this model has a guidance embedding: it is sampled with one call per step at sample.guidance; "
            "leave it empty, and set sample.steps",
        )


def _reads_guidance(known: FamilyFacts, model: ModelConfig, folder: Path | None) -> bool:
    """Whether the model has a guidance embedding."""
    if folder is None and model.path == "tiny":
        return "objective.guidance" in known.architectures.get(
            model.options.architecture or known.default_architecture, ()
        )
    return bool(json_of(folder, f"{known.components[0]}/config.json").get("guidance_embeds"))


def _architectures(kinds: tuple[Distilled, ...]) -> tuple[str, ...]:
    return tuple(kind.architecture for kind in kinds if kind.architecture)


def _names(model: ModelConfig, folder: Path | None) -> set[str]:
    """Names of the model in lower case: in the config, on disk, in the hub's cache and in its own index."""
    names = [Path(model.path).stem if model.base else Path(model.path).name, Path(model.base or "").name]
    if folder is not None:
        cached = folder.parent.parent.name  # models--org--name/snapshots/revision
        names += [folder.name, cached.rpartition("--")[2], Path(str(json_of(folder, INDEX).get("_name_or_path"))).name]
    return {name.lower() for name in names}
