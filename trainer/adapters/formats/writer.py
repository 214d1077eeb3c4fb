"""Writer of adapter files with the names and tensors that other programs read, always at scale 1.

alpha / rank is folded into the tensors, because the readers look for it in different places: ComfyUI ignores the
metadata that diffusers reads, diffusers refuses the dotted alpha keys that ComfyUI reads, and each of the two would
load an update of half the size without a word. Where a format needs an alpha key it equals the rank.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.adapters.base import Tensors, shapes_of
from trainer.adapters.engine import LoraConfig, PeftConfig
from trainer.adapters.kinds import KINDS
from trainer.adapters.layer import LayerAdapter
from trainer.config.sections import PORTABLE
from trainer.system.errors import InputError
from trainer.weights.files import ORIGINAL_PREFIX, Fused

Base = Callable[[str], Tensor]
"""Name of a layer -> its weight without the adapter."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Number types of adapter files, by their names in `export.dtype`."""
DORA_CONVENTION = "dora_scale_convention"
"""Our own metadata key. `comfyui`: `dora_scale` is corrected for ComfyUI, see `dora.DoraKind.corrected`."""

TensorsOf = Callable[[str, Tensors], Mapping[str, Tensor]]
"""(layer, its tensors at scale 1) -> {end of the name in the file: tensor}"""
NameOf = Callable[[str], str]
"""Layer -> its name in the file."""

MAX_EXACT_RANK = 256
"""Largest rank of a lora that is written instead of a loha or lokr. At this rank the linear layers of FLUX.1's blocks
take 2.1 GB in bf16; a lokr of rank 16 with nearly square factors, itself of 0.01 GB, would take 6.3 GB."""


@dataclass(frozen=True)
class Naming:
    """The part of a family that writing and reading adapter files needs; the fields are those of the family.

    Attributes:
        layouts: {component: its original layout, empty where it has none}.
        modules: Returns the names of all modules of a component, as the model has them that peft loads.
    """

    kohya_prefixes: Mapping[str, str]
    kohya_by_path: bool
    layouts: Mapping[str, tuple[Fused, ...]]
    diffusers_adapters: frozenset[str]
    peft_fields: Mapping[str, str | bool] | None = None
    modules: Callable[[str], Collection[str]] = lambda component: ()


@dataclass(frozen=True)
class AdapterFile:
    """One file to be written.

    Attributes:
        suffix: Follows the run's name; empty for the main file.
        tensors: {name in the file: tensor}.
        metadata: Pairs that readers need.
        readers: Programs that load the file: diffusers, comfyui, kohya, lycoris, peft.
        peft_config: For a folder of peft, which holds the file and this config.
        component: The component whose layers the file holds; empty for a file that holds all components.
    """

    suffix: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    readers: tuple[str, ...]
    peft_config: PeftConfig | None = None
    component: str = ""

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of the file, or of peft's folder, in `folder`. name: the run's name."""
        return folder / f"{name}{self.suffix}{'' if self.peft_config else '.safetensors'}"

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the file, or peft's folder. metadata: pairs in addition to those that readers need."""
        file = path
        if self.peft_config:
            path.mkdir()
            self.peft_config.save_pretrained(str(path))
            file = path / "adapter_model.safetensors"
        save_file(dict(self.tensors), file, {"format": "pt", **metadata, **self.metadata})


@dataclass(frozen=True)
class SavedModule:
    """A module that was trained whole in addition to the adapter.

    Attributes:
        tensors: {name in the module: tensor}.
        is_tied: Whether the module has its tensors in common with one before it.
    """

    tensors: Mapping[str, Tensor]
    is_tied: bool = False


def adapter_files(
    layers: Mapping[str, LayerAdapter],
    format: str,
    naming: Naming,
    base: Base,
    dtype: torch.dtype,
    saved: Mapping[str, SavedModule] | None = None,
) -> list[AdapterFile]:
    """Convert the adapter to a format of `export.format`.

    Args:
        layers: {layer, component first: its adapter}, all of one kind.
        format: A value of `export.format`.
        naming: The family's names in files.
        base: Returns the weight of a layer; called only where tensors depend on the weight.
        dtype: Number type of the file.
        saved: {name, component first: module that was trained whole}.

    Returns:
        The files, the main one first.

    Raises:
        InputError: The format cannot carry the adapter; the message names formats that can.
    """
    writer = _Writer(layers, naming, base, dtype, saved or {})
    write: Mapping[str, Callable[[], list[AdapterFile]]] = {
        "auto": writer.auto,
        "diffusers": writer.diffusers,
        "comfyui": writer.comfyui,
        "kohya": writer.kohya,
        "lycoris": writer.lycoris,
        "peft": writer.peft,
    }
    if naming.peft_fields is not None and format not in ("auto", "peft"):
        raise InputError(
            f"export.format: {format} is for programs that do not support this model; use auto or peft, which does"
        )
    if saved and format != "peft" and naming.peft_fields is None:
        raise InputError(
            f"export.format: {format} has no place for whole modules, which adapter.modules_to_save trains; "
            "use peft, or export.what: merged"
        )
    return write[format]()


class _Writer:
    """One method per format."""

    def __init__(
        self,
        layers: Mapping[str, LayerAdapter],
        naming: Naming,
        base: Base,
        dtype: torch.dtype,
        saved: Mapping[str, SavedModule],
    ) -> None:
        self._layers = layers
        self._saved = saved
        self._naming = naming
        self._base = base
        self._dtype = dtype
        (name,) = {layer.kind for layer in layers.values()}
        self._kind = KINDS[name]
        self._is_portable = self._kind.sections[0].is_portable

    def auto(self) -> list[AdapterFile]:
        """Make files for diffusers and ComfyUI: one that both load, or one for each."""
        if self._naming.peft_fields is not None:
            return self.peft()
        same_names = not self._naming.kohya_by_path and not self._outside
        if same_names and self._native_in_diffusers():
            return [self._corrected_for_both()] if self._kind.is_corrected else self.diffusers()
        if (self._is_portable and not self._outside) or not self._fits_diffusers():
            return self.comfyui()
        return self.comfyui() + [replace(file, suffix="-diffusers") for file in self.diffusers()]

    def diffusers(self) -> list[AdapterFile]:
        """Write peft's tensors under diffusers' paths, without alpha; an equal lora for kinds that diffusers lacks."""
        if not self._fits_diffusers():
            why = ""
            if rank := self._exact_rank:
                ratio = self._exact_size() / self._weight_size()
                why = f" but as a lora, which here has rank {rank} and {ratio:.2f} times the numbers of the layers"
            raise self._refusal("diffusers", why, f"{self._others()}, or export.what: merged")
        tensors_of = self._peft_tensors if self._native_in_diffusers() else self._exact_tensors
        alone = self._naming.kohya_by_path or self._kind.is_corrected or self._outside
        readers = ("diffusers",) if alone else ("diffusers", "comfyui")
        tensors = self._each(self._layers, tensors_of, _dotted)
        return [AdapterFile("", _beginning_with_a_down(tensors), {}, readers)]

    def comfyui(self) -> list[AdapterFile]:
        """Make a file that ComfyUI loads."""
        if self._is_portable and self._naming.kohya_by_path:
            return self.kohya()
        if self._is_portable and not self._outside:
            return self.diffusers()
        plain = self._each(self._layers, self._lycoris_tensors, self._comfyui_name)
        if not self._kind.is_corrected:
            return [AdapterFile("", plain, {}, ("comfyui",) if self._outside else self._readers_by_name())]
        corrected = self._each(self._layers, self._corrected_tensors, self._comfyui_name)
        return [AdapterFile("", plain | corrected, {DORA_CONVENTION: "comfyui"}, ("comfyui",))]

    def kohya(self) -> list[AdapterFile]:
        """Write kohya's tensors, with alpha, under its own names, which join layers where the original model does."""
        if self._naming.kohya_by_path:
            readers = ("diffusers", "comfyui", "kohya") if self._is_portable else ("kohya",)
            tensors_of = self._equal_alpha_tensors if self._is_portable else self._lycoris_tensors
            return [AdapterFile("", self._each(self._layers, tensors_of, self._kohya_name), {}, readers)]
        if not self._is_portable:
            only = f" of this kind of model, only {' and '.join(PORTABLE)}"
            raise self._refusal("kohya", only, self._others())
        return [AdapterFile("", self._joined_tensors(), {}, ("comfyui", "kohya"))]

    def lycoris(self) -> list[AdapterFile]:
        """Write LyCORIS' tensors under its own names."""
        for layer in self._layers.values():
            if refusal := self._kind.lycoris_refusal(layer.tensors):
                why, others = refusal
                raise self._refusal("lycoris", f" {why}", others)
        alone = self._kind.is_corrected or self._outside
        tensors = self._each(self._layers, self._lycoris_tensors, self._lycoris_name)
        return [AdapterFile("", tensors, {}, ("lycoris",) if alone else ("comfyui", "lycoris"))]

    def peft(self) -> list[AdapterFile]:
        """Make folders for `PeftModel.from_pretrained`, one per component."""
        fields = self._naming.peft_fields
        if not self._kind.peft:
            raise self._refusal("peft", "", self._others() if fields is None else "export.what: merged")
        files: list[AdapterFile] = []
        for component in dict.fromkeys(map(_component, self._layers)):
            layers = {name: layer for name, layer in self._layers.items() if _component(name) == component}
            tensors = self._each(layers, self._peft_tensors, lambda name: f"base_model.model.{self._peft_path(name)}")
            config = self._peft_config(layers)
            names = [self._peft_path(name) for name in layers]
            config.target_modules = suffixes(names, self._naming.modules(component)) or config.target_modules
            tensors |= self._save_modules(component, config)
            for field, value in (fields or {}).items():
                setattr(config, field, value)
            files.append(AdapterFile(f"-{component}" if files else "", tensors, {}, ("peft",), config, component))
        return files

    def _peft_config(self, layers: Mapping[str, LayerAdapter]) -> PeftConfig:
        """Return the config with which peft builds the layers in the shapes of their tensors, at scale 1."""
        ranks = {self._peft_path(name): self._kind.peft_rank(layer.tensors) for name, layer in layers.items()}
        rank = _most_common(ranks.values())
        others = {f"^{re.escape(path)}$": other for path, other in ranks.items() if other != rank}
        return self._kind.peft_config(
            [layer.tensors for layer in layers.values()],
            lambda: [self._base(name).shape for name in layers],
            {
                "r": rank,
                "target_modules": f"({'|'.join(map(re.escape, ranks))})",
                "rank_pattern": others,
                "alpha_pattern": others,
                "inference_mode": True,
            },
        )

    def _save_modules(self, component: str, config: PeftConfig) -> dict[str, Tensor]:
        """Return the tensors of whole modules under peft's names, and name the modules in its config."""
        saved = {name: module for name, module in self._saved.items() if _component(name) == component}
        if not saved:
            return {}
        unknown = [name for name in saved if self._published and name not in self._published]
        if unknown:
            raise InputError(
                f"adapter.modules_to_save: the published model has no module for '{unknown[0]}'; leave it out, or set "
                "export.what: merged"
            )
        # peft's lora ties the copies of an embedding and its head, and then wants to read only the first by name.
        ties = isinstance(config, LoraConfig) and any(module.is_tied for module in saved.values())
        named = [self._peft_path(name) for name, module in saved.items() if not (ties and module.is_tied)]
        config.modules_to_save = suffixes(named, self._naming.modules(component), dotted=False) or named
        if ties:
            config.ensure_weight_tying = True
        return {
            f"base_model.model.{self._peft_path(name)}.{inside}": self._cast(inside, tensor)
            for name, module in saved.items()
            for inside, tensor in module.tensors.items()
        }

    def _peft_path(self, name: str) -> str:
        """Return a layer's path in the model that peft loads: the published one, where only peft reads adapters."""
        return self._published.get(name, _path(name))

    @cached_property
    def _published(self) -> dict[str, str]:
        if self._naming.peft_fields is None:
            return {}
        return {parts[0]: original for original, parts, _ in self._originals()}

    def _corrected_for_both(self) -> AdapterFile:
        """Make one file: diffusers reads the magnitude and drops `dora_scale` with a warning; ComfyUI the reverse."""
        magnitudes = self._each(self._layers, self._peft_tensors, _dotted)
        scales = self._each(self._layers, self._corrected_tensors, _dotted)
        tensors = _beginning_with_a_down(magnitudes | scales)
        return AdapterFile("", tensors, {DORA_CONVENTION: "comfyui"}, ("diffusers", "comfyui"))

    def _each(self, layers: Mapping[str, LayerAdapter], tensors_of: TensorsOf, name_of: NameOf) -> dict[str, Tensor]:
        """Return {name in the file: tensor} of all layers, in the file's type."""
        return {
            f"{name_of(name)}.{suffix}": self._cast(suffix, tensor)
            for name, layer in layers.items()
            for suffix, tensor in tensors_of(name, self._at_scale_one(layer)).items()
        }

    def _cast(self, suffix: str, tensor: Tensor) -> Tensor:
        # An alpha above 256 is a rank that bf16 would round.
        dtype = torch.float32 if suffix.startswith(("alpha", *self._kind.kept_exact)) else self._dtype
        # safetensors refuses tensors that share memory.
        return tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)

    def _at_scale_one(self, layer: LayerAdapter) -> Tensors:
        if layer.scale == 1:
            return layer.tensors
        (factor,) = (name for name in self._kind.scaled if name in layer.tensors)
        return {**layer.tensors, factor: layer.tensors[factor].float() * layer.scale}

    def _peft_tensors(self, name: str, tensors: Tensors) -> dict[str, Tensor]:
        return self._kind.peft_tensors(tensors)

    def _exact_tensors(self, name: str, tensors: Tensors) -> dict[str, Tensor]:
        shape = self._base(name).shape
        down, up = self._kind.exact_lora(tensors, shape)
        kernel = [1] * (len(shape) - 2)
        return {"lora_A.weight": down.view(-1, *shape[1:]), "lora_B.weight": up.view(*up.shape, *kernel)}

    def _lycoris_tensors(self, name: str, tensors: Tensors) -> dict[str, Tensor]:
        return self._kind.lycoris_tensors(tensors) | {"alpha": torch.tensor(float(self._kind.alpha(tensors)))}

    def _equal_alpha_tensors(self, name: str, tensors: Tensors) -> dict[str, Tensor]:
        """Use the most common rank as alpha of all layers: diffusers 0.42 gives attention layers of kohya's files the
        most common alpha, ignoring their own. See DECISIONS 60."""
        factor = self._kind.alpha(tensors) / self._common_alpha
        scaled = self._at_scale_one(LayerAdapter(self._kind.name, tensors, factor))
        return self._kind.lycoris_tensors(scaled) | {"alpha": torch.tensor(float(self._common_alpha))}

    @cached_property
    def _common_alpha(self) -> int:
        return _most_common(self._kind.alpha(layer.tensors) for layer in self._layers.values())

    def _corrected_tensors(self, name: str, tensors: Tensors) -> dict[str, Tensor]:
        return self._kind.corrected(tensors, self._base(name))

    def _readers_by_name(self) -> tuple[str, ...]:
        """Return the programs that load LyCORIS' names."""
        refused = any(self._kind.lycoris_refusal(layer.tensors) for layer in self._layers.values())
        return ("comfyui",) if refused else ("comfyui", "lycoris")

    def _native_in_diffusers(self) -> bool:
        return self._kind.name in self._naming.diffusers_adapters

    def _fits_diffusers(self) -> bool:
        """Whether diffusers can load this adapter, from a file that is not larger than the weights themselves."""
        if self._native_in_diffusers() or self._exact_rank is None:
            return self._native_in_diffusers()
        return self._exact_rank <= MAX_EXACT_RANK and self._exact_size() <= self._weight_size()

    @cached_property
    def _exact_rank(self) -> int | None:
        """Largest rank of the loras that equal the layers; None for a kind that has none."""
        ranks = [rank for layer in self._layers.values() if (rank := self._kind.exact_rank(layer.tensors))]
        return max(ranks, default=None)

    def _exact_size(self) -> int:
        ranks = (self._kind.exact_rank(layer.tensors) or 0 for layer in self._layers.values())
        return sum(rank * sum(size) for rank, size in zip(ranks, self._sizes(), strict=True))

    def _weight_size(self) -> int:
        return sum(map(math.prod, self._sizes()))

    def _sizes(self) -> list[tuple[int, ...]]:
        return [self._kind.weight_size(shapes_of(layer.tensors)) for layer in self._layers.values()]

    @cached_property
    def _outside(self) -> dict[str, str]:
        """{layer outside of the blocks: its original name}. ComfyUI knows diffusers' names of all layers in blocks, but
        skips some layers outside, such as FLUX.2's modulations."""
        if self._naming.kohya_by_path:
            return {}
        return {
            parts[0]: original
            for original, parts, fused in self._originals()
            if parts[0] in self._layers and len(parts) == 1 and not fused.halves_swapped and not _is_in_block(parts[0])
        }

    def _comfyui_name(self, name: str) -> str:
        return f"diffusion_model.{self._outside[name]}" if name in self._outside else self._lycoris_name(name)

    def _lycoris_name(self, name: str) -> str:
        return self._kohya_name(name) if _is_text_encoder(name) else f"lycoris_{_underscored(_path(name))}"

    def _kohya_name(self, name: str) -> str:
        component = _component(name)
        if component not in self._naming.kohya_prefixes:
            raise InputError(
                f"export.format: other programs have no names for {component} of this kind of model; "
                "use diffusers or peft, or leave it out of model.train"
            )
        return f"{self._naming.kohya_prefixes[component]}_{_underscored(_path(name))}"

    def _joined_tensors(self) -> dict[str, Tensor]:
        """Join the denoiser's layers as the original model joins them; name text encoders' layers by their paths."""
        encoders = {name: layer for name, layer in self._layers.items() if _is_text_encoder(name)}
        tensors = self._each(encoders, self._lycoris_tensors, self._kohya_name)
        waiting = {name: layer for name, layer in self._layers.items() if name not in encoders}
        for original, parts, fused in self._originals():
            taken = {part: self._at_scale_one(waiting.pop(part)) for part in parts if part in waiting}
            if taken:
                stacked = [(self._base(part).shape[0], taken.get(part)) for part in parts]
                joined = self._lycoris_tensors(original, self._kind.joined(stacked, fused.halves_swapped))
                name = f"{self._naming.kohya_prefixes[_component(parts[0])]}_{_underscored(original)}"
                tensors |= {f"{name}.{suffix}": self._cast(suffix, tensor) for suffix, tensor in joined.items()}
        if waiting:
            raise InputError(
                f"export.format: kohya has no name for '{next(iter(waiting))}', which the model's original single file "
                f"does not have; use {self._others()}, or leave it out of adapter.targets"
            )
        return tensors

    def _originals(self) -> Iterator[tuple[str, list[str], Fused]]:
        """Yield (original name, our layers, entry) of the original weights that are not transposed."""
        for component, layout in self._naming.layouts.items():
            for fused in layout if not _is_text_encoder(component) else ():
                if fused.name.endswith(".weight") and not fused.transposed:
                    stem = fused.name.removesuffix(".weight").removeprefix(ORIGINAL_PREFIX)
                    parts = [f"{component}.{part.removesuffix('.weight')}" for part in fused.parts]
                    yield stem, parts, fused

    def _others(self) -> str:
        """Name the formats that carry the adapter for every family."""
        return "auto, comfyui, lycoris, peft" if self._kind.peft else "auto, comfyui, lycoris"

    def _refusal(self, format: str, why: str, others: str) -> InputError:
        return InputError(f"export.format: {format} cannot carry a {self._kind.name} adapter{why}; use {others}")


def _beginning_with_a_down(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a `lora_A` the first tensor of the file: in others diffusers renames layers (`to_out` to `to_out.0`).

    safetensors puts wider types first, then sorts by name: the first `lora_A` must be as wide as dora's magnitudes.

    See DECISIONS 61.
    """
    first = min((name for name in tensors if name.endswith("lora_A.weight")), default=None)
    if first is None or not any("magnitude" in name for name in tensors):
        return tensors
    return tensors | {first: tensors[first].float()}


def _component(name: str) -> str:
    return name.partition(".")[0]


def _path(name: str) -> str:
    return name.partition(".")[2]


def _is_text_encoder(name: str) -> bool:
    return name.startswith("text_encoder")


def _is_in_block(name: str) -> bool:
    """Whether a layer is in a block; blocks are numbered."""
    return re.search(r"\.\d+\.", name) is not None


def _underscored(path: str) -> str:
    return path.replace(".", "_")


def _dotted(name: str) -> str:
    """Return diffusers' name. transformers 5 removed `text_model` from CLIP paths; older programs need it, newer ones
    accept it."""
    path = _path(name)
    shortened = _is_text_encoder(name) and path.startswith("encoder.layers.")
    return f"{_component(name)}.{'text_model.' if shortened else ''}{path}"


def suffixes(names: Collection[str], modules: Collection[str], dotted: bool = True) -> list[str] | None:
    """Return the shortest ends of names by which peft selects these modules and no others, sorted.

    peft reads a list as ends of names and a text as a regular expression. Other programs, such as some versions of
    SGLang, read only lists.

    Args:
        names: The modules to select.
        modules: All modules of the model.
        dotted: Whether an end begins with a whole part of the name; peft's modules_to_save may also end in part of one.

    Returns:
        None where no list selects exactly these modules, or `modules` does not hold them.
    """
    wanted = set(names)
    if not wanted <= set(modules):
        return None
    others = {name for name in modules if name not in wanted}
    taken = {end for name in others for end in _ends(name)}

    def is_free(end: str) -> bool:
        return end not in taken and (dotted or not any(name.endswith(end) for name in others))

    shortest = {next(filter(is_free, _ends(name)), None) for name in wanted}
    return sorted(end for end in shortest if end) if None not in shortest else None


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a dotted name, the shortest first."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[-count:])


def _most_common(numbers: Iterable[int]) -> int:
    [(number, _)] = Counter(numbers).most_common(1)
    return number
