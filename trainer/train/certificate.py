"""Measures a base before the first step, and finds what is wired wrongly: see `trainer.view.certificate`.

The base's own pictures are encoded back, and its loss is taken at several noise levels. A model that is connected as
it was trained predicts what it drew itself.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from trainer import adapters
from trainer.config.schema import RunConfig
from trainer.config.sections import MODEL_WORDS
from trainer.data.images import looks
from trainer.data.images.image_io import WHOLE, load_resized, load_rgb, read_header
from trainer.data.images.image_source import EncodedData, ImageSampler
from trainer.data.loader import ImageItem
from trainer.data.source import Sampler
from trainer.distributed.world import World
from trainer.models import distilled
from trainer.models.base import FLOW_FIELDS, ImageFamily, ModelFamily, references_of
from trainer.models.flow_transformer import FlowTransformer
from trainer.models.objectives.base import Example
from trainer.models.objectives.flow_matching import shift_factor
from trainer.models.recognition import json_of
from trainer.rng import Draw, SampleRng, generator
from trainer.run.folder import RunDir
from trainer.system.errors import InputError
from trainer.view.certificate import PICTURE, Certificate, Finding, Numbers, compared, earlier, recorded, write

SIGMAS = (0.2, 0.4, 0.6, 0.8)
EFFECT_AT = 0.6
"""One of SIGMAS, at which captions are exchanged and references replaced."""
MOST_PICTURES = 8
MOST_SHARE = 0.02
"""Largest part of a run, in forward passes, that its certificate may take."""
PASSES_OF_A_STEP = 3
"""Forward passes that a forward and a backward take as long as."""
LEAST_EFFECT = 1e-6
"""Relative change of the loss that is none."""
UNPREDICTED = 0.9
"""Loss, relative to that of a model that predicts 0, from which on a base does not know its own pictures."""
MOST_SHIFT = 1.5
"""Factor between the shift of `objective` and the base's own that is worth a sentence."""
LEAST_REACHED = 0.5
"""Part of the linear weights of the recipe below which an adapter misses most of the model."""
MOST_TRIGGER_TOKENS = 4
GOLDEN = 2.399963
"""The golden angle: cosines of its multiples do not repeat, so that a sum weighted by them changes with the order."""
MOST_COMPARED = 4
"""Training images that are encoded again."""
LOOK_S = 20.0
"""Seconds in which images are compared with those held out. What was measured is remembered for the next time."""
SAME, OTHER, SAME_SIZE = 0.995, 0.9, 1.05
"""Cosine from which on latents are of one picture, and below which of another one, however it was cropped; factor
between the sizes of latents of one scale."""
SHIFT_FIELDS = ("shift", "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
"""Fields of a scheduler's config that decide the shift."""


def certify(
    cfg: RunConfig,
    run: RunDir,
    family: ModelFamily,
    sampler: Sampler,
    model: nn.ModuleDict,
    world: World,
    drawn: Sequence[Path],
    steps: int,
    is_requested: bool,
) -> Certificate | None:
    """Examine the base of a run before its first step, and write its certificate. Collective.

    A model that is none is examined only on request, and no run spends more than `MOST_SHARE` on it, but for a model
    whose wiring was concluded.

    Args:
        model: The live components in evaluation, whose adapter changes nothing yet.
        drawn: The samples of the base, on rank 0.
        steps: Optimizer steps of the run.
        is_requested: Whether the run is there for its certificate alone.

    Returns:
        The certificate; None where the model is not examined.
    """
    if not isinstance(family, ImageFamily) or type(sampler) is not ImageSampler:
        return None
    passes = math.ceil(cfg.train.batch_size / (cfg.train.micro_batch * world.data_size))
    count = pictures_within(steps, passes, cfg.data.has_references)
    if is_requested or (family.is_concluded and cfg.model.path not in MODEL_WORDS):
        count = MOST_PICTURES
    elif cfg.model.path in MODEL_WORDS or not count:
        return None
    count = min(count, world.gather(len(drawn))[0])  # fewer on a full disk
    if not count:
        return None
    headers = [read_header(path) for path in drawn[:count]]
    images = [load_rgb(header, header.size.frame) for header in headers]
    examiner = Examiner(cfg, family, model, sampler.load_autoencoder(), world)
    found = examiner.certificate(sampler.data, images, count)
    if world.rank == 0:
        # Those recorded train the denoiser alone; a trained text encoder is called with tokens.
        found = compared(found, () if cfg.model.train else recorded(), list(earlier(run.path.parent)))
        with suppress(OSError):  # a full disk is said elsewhere
            write(run, found)
    everyone: list[Certificate] = world.gather(found)
    return everyone[0]


def pictures_within(steps: int, passes: int, has_references: bool) -> int:
    """The number of pictures that a run can be certified with in `MOST_SHARE` of its time; 0 for a short run.

    Args:
        steps: Optimizer steps.
        passes: Passes of a step on a rank.
    """
    each = len(SIGMAS) + 2 + has_references  # another caption, and its encoding, which takes about as long
    allowed = int(MOST_SHARE * PASSES_OF_A_STEP * steps * passes) - len(SIGMAS) - 1
    return max(0, min(MOST_PICTURES, allowed // each))


class Examiner:
    """Measures a loaded base on all ranks. Every public method is collective.

    Args:
        model: The live components, whose adapter changes nothing yet.
        encoder: The result of `ImageFamily.image_encoder`.
        seed: Of the noise. Certificates are compared at one seed.
    """

    def __init__(
        self, cfg: RunConfig, family: ImageFamily, model: nn.ModuleDict, encoder: Any, world: World, seed: int = 0
    ) -> None:
        self._cfg, self._family, self._model, self._encoder, self._world = cfg, family, model, encoder, world
        self._seed = seed
        self._sample = family.complete_sample(cfg.sample)

    def certificate(self, data: EncodedData, drawn: Sequence[Image.Image], count: int) -> Certificate:
        """Examine the base.

        Args:
            data: What is trained on, and the prompts.
            drawn: What the base drew of these, on rank 0.
            count: Number of prompts to examine it with.
        """
        began = time.perf_counter()
        texts, is_first = [data.prompt(number) for number in range(count)], self._world.rank == 0
        picture = self._encoded(load_resized(read_header(PICTURE), self._sample.full_size.frame))
        own = [text | self._encoded(drawn[number] if is_first else None) for number, text in enumerate(texts)]
        standard, reached = texts[0] | picture, reached_by(self._cfg, self._family, self._model)
        of_own = self._losses(own)
        stages = {
            "schedule": self._schedule(picture["latents"]),
            "text": self._texts(texts),
            "autoencoder": summary("latents", picture["latents"]),
            "inputs": self._inputs(standard),
            "targets": {"share": reached.share} if reached.recipe else {},
            "losses": _means(self._losses([standard])),
            "drawn": _means(of_own),
        }
        effects = self._effects(own, of_own[EFFECT_AT])
        findings = [
            *static_findings(self._cfg, self._family),
            *_of_targets(reached),
            *((*self._of_data(data), *_of_held_out(data, self._family.cache)) if is_first else ()),
            *_of_effects(effects),
            *self._of_drawn(own, stages["drawn"]),
        ]
        model, size = self._cfg.model, self._sample.full_size
        conditions = {
            "prompts": "; ".join(prompt.text for prompt in data.prompts[:count]),
            "size": "x".join(map(str, size.values)),
            "steps": str(self._sample.steps),
            "guidance": f"{self._sample.guidance:g}",
            "seed": f"{self._cfg.sample.seed} {self._seed}",
            "references": str(len(references_of(texts[0]))),
        }
        named = model.options.architecture or (self._family.default_architecture if model.path == "tiny" else "")
        return Certificate(
            base=" ".join(filter(None, (model.family, named, str(model.path)))),
            conditions=conditions,
            stored=self._cfg.quantize.format,
            settings=f"{self._settings} {[prompt.references for prompt in data.prompts[:count]]}",
            stages={stage: _rounded(numbers) for stage, numbers in stages.items()},
            effects=_rounded(effects),
            findings=tuple(findings),
            seconds=round(time.perf_counter() - began, 1),
            versions={name: version(name) for name in ("torch", "diffusers", "transformers")},
        )

    @property
    def _settings(self) -> str:
        """The settings that change the numbers without being a fault."""
        cfg, adapter = self._cfg, self._cfg.adapter.model_dump(mode="json")
        others = (cfg.model.options.model_dump(mode="json"), cfg.model.train, cfg.objective.model_dump(mode="json"))
        parts = (*others, cfg.quantize.encoders, cfg.train.precision, adapter.get("start"), adapter.get("init"))
        return json.dumps(parts, sort_keys=True)

    def _encoded(self, image: Image.Image | None) -> Example:
        """Rank 0's encoding of its image, on every rank: machines and their GPUs round differently."""
        mine = self._family.encode_image(self._encoder, image) if image and self._world.rank == 0 else None
        found: Example = self._world.gather(mine)[0]
        return found

    def _loss(self, example: Example, sigma: float, number: int, seed: int) -> float:
        """The loss of one example at a noise level. number: of its noise."""
        family, device = self._family, self._world.device
        batch = {**family.collate([example]), "weight": torch.ones(1)}
        timestep = {Draw("timestep"): torch.tensor([sigma])}
        rng = SampleRng(seed, (number,), device, drawn=timestep)
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        return float(family.loss(self._model, on_device, rng).total)

    def _share(self, work: Sequence[tuple[Example, float, int]], seed: int | None = None) -> list[float]:
        """The loss of each (example, sigma, number of its noise); the ranks share the work."""
        world, mine = self._world, []
        seed = self._seed if seed is None else seed
        # The drawn number is the noise level itself.
        evenly = self._cfg.objective.model_copy(update={"density": "uniform", "shift": "none", "min_snr_gamma": None})
        before, self._family.objective = self._family.objective, evenly
        try:
            for first in range(0, len(work), world.data_size):
                # A rank without work repeats some: every rank calls a sharded model equally often.
                index = (first + world.data_rank) % len(work)
                mine.append(self._loss(*work[index], seed))
        finally:
            self._family.objective = before
        everyone = world.gather((world.data_rank, mine))
        by_rank = dict(everyone)
        return [by_rank[index % world.data_size][index // world.data_size] for index in range(len(work))]

    def _losses(self, examples: Sequence[Example], sigmas: Sequence[float] = SIGMAS) -> dict[float, list[float]]:
        """{noise level: loss of each example}."""
        work = [(example, sigma, number) for sigma in sigmas for number, example in enumerate(examples)]
        found, count = self._share(work), len(examples)
        return {sigma: found[at * count : (at + 1) * count] for at, sigma in enumerate(sigmas)}

    def _effects(self, own: Sequence[Example], base: Sequence[float]) -> dict[str, float]:
        """Relative changes of the loss by other captions, and by noise in place of references.

        base: loss of each of `own` at EFFECT_AT.
        """
        changed: dict[str, list[Example]] = {}
        texts = [{name: value for name, value in one.items() if not _is_picture(name)} for one in own]
        first = texts[0]
        # Prompts that are all one, as with other references each, cannot be exchanged.
        if any(text.keys() != first.keys() or any(not torch.equal(text[k], first[k]) for k in text) for text in texts):
            pictures = [{name: value for name, value in one.items() if _is_picture(name)} for one in own]
            changed["other captions"] = [a | b for a, b in zip(pictures, texts[1:] + texts[:1], strict=True)]
        if references_of(own[0]):
            changed["noise as references"] = [_with_noise(one, self._seed) for one in own]
        effects = {}
        for what, examples in changed.items():
            found = self._losses(examples, [EFFECT_AT])[EFFECT_AT]
            differences = [abs(a - b) for a, b in zip(found, base, strict=True)]
            effects[what] = sum(differences) / max(sum(base), 1e-12)
        return effects

    def _inputs(self, example: Example) -> dict[str, float]:
        """Numbers of all that the transformer is called with for one example."""
        seen: dict[str, float] = {}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, value in {**{f"argument_{n}": v for n, v in enumerate(args)}, **kwargs}.items():
                seen.update(summary(name, value))

        hook = self._model[self._family.components[0]].register_forward_pre_hook(look, with_kwargs=True)
        try:
            self._share([(example, EFFECT_AT, 0)] * self._world.data_size, seed=0)
        finally:
            hook.remove()
        return seen

    def _texts(self, texts: Sequence[Example]) -> dict[str, float]:
        found: dict[str, float] = {}
        for number, text in enumerate(texts):
            for name, value in text.items():
                if not name.startswith("reference_"):
                    found |= summary(f"{name} of prompt {number + 1}", value)
        return found

    def _schedule(self, latents: Tensor) -> dict[str, float]:
        """The shift in training, and the noise levels of four steps."""
        family = self._family
        if not isinstance(family, FlowTransformer):
            return {}
        sigmas = family.sampler(latents.cpu(), 4).sigmas.tolist()
        factor = shift_factor(self._cfg.objective, family.shift, family.num_tokens(latents))
        return {"shift": factor, **{f"sampler's level {at + 1}": sigma for at, sigma in enumerate(sigmas)}}

    def _of_data(self, data: EncodedData) -> Iterator[Finding]:
        """Encode the first images and their references again: each must be nearest to what the cache has of it."""
        fresh: dict[tuple[int, str], Tensor] = {}
        cached: dict[tuple[int, str], Tensor] = {}
        for number, one in enumerate(data.train[:MOST_COMPARED]):
            example = data.example(ImageItem(number, dropped=False))
            sizes = (one.size, *one.reference_sizes)
            names = ["latents", *(f"reference_{place}" for place in range(len(references_of(example))))]
            for name, file, size in zip(names, (one.image, *one.image.references), sizes, strict=False):
                try:
                    pixels = load_rgb(file, size.frame, WHOLE)
                except (InputError, OSError):  # it was changed or moved since it was encoded
                    return
                fresh[number, name] = self._family.encode_image(self._encoder, pixels)["latents"]
                cached[number, name] = example[name]
        for place, mine in fresh.items():
            others = {other: values for other, values in cached.items() if values.shape == mine.shape}
            near = {
                other: float(cosine_similarity(mine.flatten(), values.flatten(), dim=0))
                for other, values in others.items()
            }
            best = max(near, key=lambda other: near[other], default=place)
            if near.get(place, 0.0) < OTHER and near.get(best, 0.0) >= SAME:
                image = data.train[place[0]].image.path
                yield Finding(
                    "references" if place[1] != "latents" else "cache",
                    f"{place[1]} of {image.name} is what {data.train[best[0]].image.path.name} has as {best[1]}; "
                    "remove the cache, and if it stays so, report it as a fault",
                )
                return
            factor = _rms(cached[place]) / max(_rms(mine), 1e-12)
            if near.get(place, 0.0) >= SAME and not 1 / SAME_SIZE < factor < SAME_SIZE:
                yield Finding(
                    "cache",
                    f"the cached {place[1]} are {factor:.3g} times as large as the autoencoder gives; remove the cache",
                )
                return

    def _of_drawn(self, own: Sequence[Example], losses: Numbers) -> Iterator[Finding]:
        """What only a trained base shows."""
        model, flow = self._cfg.model, self._family.objective_fields >= FLOW_FIELDS
        if not all(map(math.isfinite, losses.values())):
            yield Finding(
                "drawn",
                f"the loss of the base's own pictures is not a number: the weights of model.path ({model.path}) are "
                "damaged, or overflow; load the model again, or set train.precision: fp32",
            )
            return
        if model.path in ("tiny", "random"):
            return
        size = _rms(torch.cat([example["latents"].flatten() for example in own]))
        share = sum(losses.values()) / len(losses) / (1 + size**2 if flow else 1.0)
        if share > UNPREDICTED:
            yield Finding(
                "drawn",
                f"the base predicts {max(0.0, 1 - share):.0%} of the pictures that it drew itself, and a trained one "
                f"most of them: the weights of model.path ({model.path}), quantize.format "
                f"({self._cfg.quantize.format}) and autoencoder do not belong together; load the model again, or try "
                "quantize.format: none",
            )


@dataclass(frozen=True)
class Reached:
    """Shares of the linear weights that adapters change, and that those of the family's recipe would, in the blocks of
    the components that adapters train; and the largest layer of the recipe that is left out, "" for none."""

    share: float
    recipe: float
    missed: str


def reached_by(cfg: RunConfig, family: ImageFamily, model: nn.ModuleDict) -> Reached:
    """What the adapters of a model reach."""
    blocks = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("FSDP") in family.blocks and family.mode(cfg, name) == "adapter"
    ]
    changed = adapters.adapted_layers(model)
    sizes: dict[str, int] = {}
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            layer = name.removesuffix(".base_layer")
            is_own = any(layer.startswith(f"{other}.") for other in changed)  # of the adapter
            if isinstance(module, nn.Linear) and not is_own:
                sizes[layer] = module.out_features * module.in_features
    whole = sum(sizes.values()) or 1
    recipe = [name for name in sizes if family.is_target(name)]
    missed = sorted((name for name in recipe if name not in changed), key=lambda name: -sizes[name])
    reached = sum(size for name, size in sizes.items() if name in changed)
    return Reached(reached / whole, sum(sizes[name] for name in recipe) / whole, missed[0] if missed else "")


def _of_targets(found: Reached) -> Iterator[Finding]:
    if found.missed and found.share < LEAST_REACHED * found.recipe:
        yield Finding(
            "targets",
            f"adapter.targets reach {found.share:.0%} of the linear weights in the blocks, and the model's recipe "
            f"{found.recipe:.0%}; the largest that is left out is {found.missed}; leave adapter.targets empty for all",
        )


def _of_held_out(data: EncodedData, cache: Path) -> Iterator[Finding]:
    """Held-out images that are near copies of training images, as the screen Data finds them."""
    held_out = dict.fromkeys(one.image.path for one in data.validation)
    if not held_out:
        return
    known, measured, until = looks.known_looks(cache), {}, time.monotonic() + LOOK_S
    for path in dict.fromkeys((*held_out, *(one.image.path for one in data.train))):
        if time.monotonic() > until:
            break
        with suppress(InputError, OSError):  # it was moved since it was encoded
            measured[path] = known.read(path).value
    known.save()
    paths = list(measured)
    places = {place for place, path in enumerate(paths) if path in held_out}
    leaks = [group for group in looks.copies(list(measured.values())) if group.leak(places)]
    if leaks:
        count = sum(place in places for group in leaks for place in group.members)
        members = leaks[0].members  # those held out come first
        yield Finding(
            "held-out",
            f"{count} of {len(held_out)} images held out (data.validation) have near copies among the training images, "
            f"first {paths[members[0]]} in {paths[members[-1]]}: the validation loss then measures what was memorized; "
            "remove one of each, or hold out others",
        )


def _of_effects(effects: Mapping[str, float]) -> Iterator[Finding]:
    for what, change in effects.items():
        if change < LEAST_EFFECT:
            kind = "captions" if "captions" in what else "references"
            yield Finding(
                kind, f"{what} change the loss by nothing: {kind} do not reach the transformer; report it as a fault"
            )


def static_findings(cfg: RunConfig, family: ImageFamily) -> Iterator[Finding]:
    """What the config and the folder's files tell."""
    for sentence in distilled.warnings(cfg, family.folder)[:1]:
        yield Finding("distilled", sentence)
    if isinstance(family, FlowTransformer) and cfg.model.path != "demo":  # which was trained in its own way
        yield from _of_scheduler(family)
        yield from _of_shift(cfg, family)
    trigger = cfg.data.trigger
    if trigger:
        lengths = [family.text_lengths([text])[0] for text in (f"{trigger}, a", ", a")]
        count = min((a.needed - b.needed for a, b in zip(*lengths, strict=True)), default=1)
        if count > MOST_TRIGGER_TOKENS:
            yield Finding(
                "trigger",
                f"data.trigger '{trigger}' is {count} tokens for this text encoder, which learns it less well; a short "
                "word of letters alone is fewer",
            )


def _of_scheduler(family: FlowTransformer) -> Iterator[Finding]:
    """Compare the folder's scheduler with the published one: that of a distilled twin samples at other levels."""
    file = "scheduler/scheduler_config.json"
    own, named = json_of(family.folder, file), family.config.options.architecture
    published = [family.tiny(name).get("scheduler") for name in ([named] if named else _alike(family))]
    if not own or family.is_distilled:
        return
    defaults = FlowMatchEulerDiscreteScheduler().config
    wrong = []
    for one in published:
        if one is None:
            return
        have, expected = ({name: each.get(name, defaults[name]) for name in SHIFT_FIELDS} for each in (own, one))
        if expected["use_dynamic_shifting"] and have["use_dynamic_shifting"]:
            have["shift"] = expected["shift"]  # a line in its place
        wrong.append([(name, have[name], expected[name]) for name in SHIFT_FIELDS if have[name] != expected[name]])
    if wrong and all(wrong):
        name, found, right = wrong[0][0]
        yield Finding(
            "scheduler",
            f"{family.folder / file}: {name} is {found}, and {right} in the base that this family trains, as where a "
            "distilled model's scheduler was copied; take the file of the base",
        )


def _alike(family: FlowTransformer) -> Iterator[str]:
    """The published models that the folder may be by its transformer's sizes, or by those of the tiny models."""
    own = json_of(family.folder, "transformer/config.json")
    for name in family.architectures:
        tiny = family.tiny(name)["transformer"]
        for sizes in (tiny | family.published(name)["transformer"], tiny):
            if all(own.get(field, value) == value for field, value in json.loads(json.dumps(sizes)).items()):
                yield name
                break


def _of_shift(cfg: RunConfig, family: FlowTransformer) -> Iterator[Finding]:
    size = family.complete_sample(cfg.sample).full_size
    tokens = family.tokens_of(size)
    auto = cfg.objective.model_copy(update={"shift": "auto"})
    mine, own = (shift_factor(one, family.shift, tokens) for one in (cfg.objective, auto))
    if max(mine / own, own / mine) > MOST_SHIFT:
        yield Finding(
            "shift",
            f"objective.shift: {cfg.objective.shift} is a factor of {mine:.3g} at {size.width} x {size.height}, and "
            f"the base was trained at {own:.3g}; set objective.shift: auto",
        )


def _means(losses: Mapping[float, Sequence[float]]) -> dict[str, float]:
    """{name of a noise level: mean loss}. losses: {noise level: loss of each example}."""
    return {f"sigma {sigma:g}": sum(each) / len(each) for sigma, each in losses.items()}


def _rounded(numbers: Numbers) -> dict[str, float]:
    """Six digits of each number. JSON has none for those that are not finite, which are left out."""
    return {name: float(f"{value:.6g}") for name, value in numbers.items() if math.isfinite(value)}


def _is_picture(name: str) -> bool:
    return name in ("latents", "mask", "original_size") or name.startswith("reference_")


def _with_noise(example: Example, seed: int) -> Example:
    """An example with standard normal numbers for the latents of its references."""
    source = generator(seed, "references")
    return {
        name: torch.randn(value.shape, generator=source) if name.startswith("reference_") else value
        for name, value in example.items()
    }


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.float().square().mean())) if values.numel() else 0.0


def summary(name: str, value: Any) -> dict[str, float]:
    """Numbers that tell a value from others: length, mean, size and how it is ordered."""
    if isinstance(value, Tensor):
        flat = value.detach().float().cpu().flatten()
        if not flat.numel():
            return {f"{name} count": 0.0}
        order = torch.cos(GOLDEN * torch.arange(flat.numel(), dtype=torch.float64)).float()
        return {
            f"{name} count": float(flat.numel()),
            f"{name} mean": float(flat.mean()),
            f"{name} size": _rms(flat),
            f"{name} order": float((flat * order).mean()),
        }
    if isinstance(value, (list, tuple)):
        return {key: number for at, one in enumerate(value) for key, number in summary(f"{name} {at}", one).items()}
    return {name: float(value)} if isinstance(value, (int, float)) else {}
