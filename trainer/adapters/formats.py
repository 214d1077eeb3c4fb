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
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.adapters.engine import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, factorization
from trainer.adapters.kinds import KINDS, ROTATIONS
from trainer.adapters.layer import SHORTEST, LayerAdapter
from trainer.system.errors import InputError
from trainer.weights.files import ORIGINAL_PREFIX, Fused

Base = Callable[[str], Tensor]
"""Name of a layer -> its weight without the adapter."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Number types of adapter files, by their names in `export.dtype`."""
COMFYUI_EPS = torch.finfo(torch.float32).eps
"""Added by ComfyUI to the length of a row before it divides by that length."""
DORA_CONVENTION = "dora_scale_convention"
"""Our own metadata key. `comfyui`: `dora_scale` is corrected for ComfyUI, see `_comfyui_dora_scale`."""

TensorsOf = Callable[[str, LayerAdapter], Mapping[str, Tensor]]
"""(layer, its adapter at scale 1) -> {end of the name in the file: tensor}"""
NameOf = Callable[[str], str]
"""Layer -> its name in the file."""

KEPT_EXACT = ("alpha", "dora_scale", "lora_magnitude_vector", "lokr_w1")
"""Small tensors that are written in fp32. bf16 rounds the length of a row by up to 0.2 %, which may be more than was
learned; each number of lokr's first factor scales a block of the update; an alpha above 256 is a rank."""
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
        (self._kind,) = {layer.kind for layer in layers.values()}

    def auto(self) -> list[AdapterFile]:
        """Make files for diffusers and ComfyUI: one that both load, or one for each."""
        if self._naming.peft_fields is not None:
            return self.peft()
        same_names = not self._naming.kohya_by_path and not self._outside
        if self._kind == "dora" and same_names:
            return [self._dora_for_both()]
        if self._kind == "lokr" and self._native_in_diffusers() and same_names:
            return self.diffusers()
        if (self._kind == "lora" and not self._outside) or not self._fits_diffusers():
            return self.comfyui()
        return self.comfyui() + [replace(file, suffix="-diffusers") for file in self.diffusers()]

    def diffusers(self) -> list[AdapterFile]:
        """Write peft's tensors under diffusers' paths, without alpha; an equal lora for kinds that diffusers lacks."""
        if not self._fits_diffusers():
            why = ""
            if self._kind in ("loha", "lokr"):
                rank = max(map(_exact_rank, self._layers.values()))
                ratio = self._exact_size() / self._weight_size()
                why = f" but as a lora, which here has rank {rank} and {ratio:.2f} times the numbers of the layers"
            raise self._refusal("diffusers", why, f"{self._others()}, or export.what: merged")
        tensors_of = self._peft_tensors if self._native_in_diffusers() else self._exact_tensors
        alone = self._naming.kohya_by_path or self._kind == "dora" or self._outside
        readers = ("diffusers",) if alone else ("diffusers", "comfyui")
        tensors = self._each(self._layers, tensors_of, _dotted)
        return [AdapterFile("", _beginning_with_a_down(tensors), {}, readers)]

    def comfyui(self) -> list[AdapterFile]:
        """Make a file that ComfyUI loads."""
        if self._kind == "lora" and self._naming.kohya_by_path:
            return self.kohya()
        if self._kind == "lora" and not self._outside:
            return self.diffusers()
        plain = self._each(self._layers, self._lycoris_tensors, self._comfyui_name)
        if self._kind != "dora":
            return [AdapterFile("", plain, {}, ("comfyui",) if self._outside else self._readers_by_name())]
        corrected = self._each(self._layers, self._comfyui_dora_tensors, self._comfyui_name)
        return [AdapterFile("", plain | corrected, {DORA_CONVENTION: "comfyui"}, ("comfyui",))]

    def kohya(self) -> list[AdapterFile]:
        """Write kohya's tensors, with alpha, under its own names, which join layers where the original model does."""
        if self._naming.kohya_by_path:
            readers = ("diffusers", "comfyui", "kohya") if self._kind == "lora" else ("kohya",)
            tensors_of = self._equal_alpha_tensors if self._kind == "lora" else self._lycoris_tensors
            return [AdapterFile("", self._each(self._layers, tensors_of, self._kohya_name), {}, readers)]
        if self._kind != "lora":
            raise self._refusal("kohya", " of this kind of model, only lora and locon", self._others())
        return [AdapterFile("", self._joined_tensors(), {}, ("comfyui", "kohya"))]

    def lycoris(self) -> list[AdapterFile]:
        """Write LyCORIS' tensors under its own names."""
        readers = self._readers_by_name()
        if "lycoris" not in readers:
            why = " with larger blocks than it has blocks: LyCORIS takes the smaller of the two for the block size"
            raise self._refusal("lycoris", why, "auto, comfyui, or a smaller adapter.block_size")
        alone = self._kind == "dora" or self._outside
        tensors = self._each(self._layers, self._lycoris_tensors, self._lycoris_name)
        return [AdapterFile("", tensors, {}, ("lycoris",) if alone else readers)]

    def peft(self) -> list[AdapterFile]:
        """Make folders for `PeftModel.from_pretrained`, one per component."""
        fields = self._naming.peft_fields
        if self._kind in ROTATIONS:
            raise self._refusal("peft", "", self._others() if fields is None else "export.what: merged")
        files: list[AdapterFile] = []
        for component in dict.fromkeys(map(_component, self._layers)):
            layers = {name: layer for name, layer in self._layers.items() if _component(name) == component}
            tensors = self._each(layers, self._peft_tensors, lambda name: f"base_model.model.{self._peft_path(name)}")
            config = _peft_config(layers, self._base, self._peft_path)
            names = [self._peft_path(name) for name in layers]
            config.target_modules = suffixes(names, self._naming.modules(component)) or config.target_modules
            tensors |= self._save_modules(component, config)
            for field, value in (fields or {}).items():
                setattr(config, field, value)
            files.append(AdapterFile(f"-{component}" if files else "", tensors, {}, ("peft",), config, component))
        return files

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

    def _dora_for_both(self) -> AdapterFile:
        """Make one file: diffusers reads the magnitude and drops `dora_scale` with a warning; ComfyUI the reverse."""
        magnitudes = self._each(self._layers, self._peft_tensors, _dotted)
        scales = self._each(self._layers, self._comfyui_dora_tensors, _dotted)
        tensors = _beginning_with_a_down(magnitudes | scales)
        return AdapterFile("", tensors, {DORA_CONVENTION: "comfyui"}, ("diffusers", "comfyui"))

    def _each(self, layers: Mapping[str, LayerAdapter], tensors_of: TensorsOf, name_of: NameOf) -> dict[str, Tensor]:
        """Return {name in the file: tensor} of all layers, in the file's type."""
        return {
            f"{name_of(name)}.{suffix}": self._cast(suffix, tensor)
            for name, layer in layers.items()
            for suffix, tensor in tensors_of(name, _at_scale_one(layer)).items()
        }

    def _cast(self, suffix: str, tensor: Tensor) -> Tensor:
        dtype = torch.float32 if suffix.startswith(KEPT_EXACT) else self._dtype
        # safetensors refuses tensors that share memory.
        return tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)

    def _peft_tensors(self, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
        tensors = _renamed(layer, KINDS[layer.kind].peft)
        if layer.kind == "dora":
            convolves = layer.tensors["down"].dim() > 2
            magnitude = layer.tensors["magnitude"]
            tensors["lora_magnitude_vector.weight"] = magnitude.view(1, -1, 1, 1) if convolves else magnitude
        return tensors

    def _exact_tensors(self, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
        return _renamed(_exact_lora(layer, self._base(name).shape), KINDS["lora"].peft)

    def _lycoris_tensors(self, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
        layer = _as_lycoris_builds_it(layer)
        tensors = _renamed(layer, KINDS[layer.kind].lycoris) | {"alpha": torch.tensor(float(_alpha(layer)))}
        if layer.kind == "dora":
            tensors["dora_scale"] = _as_column(layer.tensors["magnitude"], layer.tensors["down"])
        return tensors

    def _equal_alpha_tensors(self, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
        """Use the most common rank as alpha of all layers: diffusers 0.42 gives attention layers of kohya's files the
        most common alpha, ignoring their own."""
        scaled = _at_scale_one(replace(layer, scale=_alpha(layer) / self._common_alpha))
        return _renamed(scaled, KINDS[layer.kind].lycoris) | {"alpha": torch.tensor(float(self._common_alpha))}

    @cached_property
    def _common_alpha(self) -> int:
        return _most_common(map(_alpha, self._layers.values()))

    def _comfyui_dora_tensors(self, name: str, layer: LayerAdapter) -> dict[str, Tensor]:
        return {"dora_scale": _comfyui_dora_scale(layer, self._base(name))}

    def _readers_by_name(self) -> tuple[str, ...]:
        """Return the programs that load LyCORIS' names.

        LyCORIS itself takes the smaller of number and size of a rotation's blocks for the block size.
        """
        blocks = [layer.tensors["blocks"].shape for layer in self._layers.values() if layer.kind == "diag-oft"]
        return ("comfyui",) if any(size > count for count, size, _ in blocks) else ("comfyui", "lycoris")

    def _native_in_diffusers(self) -> bool:
        return self._kind in self._naming.diffusers_adapters

    def _fits_diffusers(self) -> bool:
        """Whether diffusers can load this adapter, from a file that is not larger than the weights themselves."""
        if self._native_in_diffusers() or self._kind not in ("loha", "lokr"):
            return self._native_in_diffusers()
        rank = max(map(_exact_rank, self._layers.values()))
        return rank <= MAX_EXACT_RANK and self._exact_size() <= self._weight_size()

    def _exact_size(self) -> int:
        return sum(_exact_rank(layer) * sum(_size(layer)) for layer in self._layers.values())

    def _weight_size(self) -> int:
        return sum(math.prod(_size(layer)) for layer in self._layers.values())

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
            taken = {part: _at_scale_one(waiting.pop(part)) for part in parts if part in waiting}
            if taken:
                joined = self._joined(parts, taken, fused.halves_swapped)
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

    def _joined(self, parts: list[str], layers: Mapping[str, LayerAdapter], swapped: bool) -> dict[str, Tensor]:
        """Make one lora for stacked layers: downs stacked, ups along the diagonal, zeros for layers without one."""
        ups = [
            layers[part].tensors["up"].flatten(1) if part in layers else torch.zeros(self._base(part).shape[0], 0)
            for part in parts
        ]
        up: Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        if swapped:
            up = torch.cat(up.chunk(2)[::-1])
        down = torch.cat([layer.tensors["down"] for layer in layers.values()])
        joined = LayerAdapter("lora", {"down": down, "up": _as_kernel(up, down.dim())})
        return _renamed(joined, KINDS["lora"].lycoris) | {"alpha": torch.tensor(float(_alpha(joined)))}

    def _others(self) -> str:
        """Name the formats that carry the adapter for every family."""
        return "auto, comfyui, lycoris" if self._kind in ROTATIONS else "auto, comfyui, lycoris, peft"

    def _refusal(self, format: str, why: str, others: str) -> InputError:
        return InputError(f"export.format: {format} cannot carry a {self._kind} adapter{why}; use {others}")


def _beginning_with_a_down(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a `lora_A` the first tensor of the file: in others diffusers renames layers (`to_out` to `to_out.0`).

    safetensors puts wider types first, then sorts by name: the first `lora_A` must be as wide as dora's magnitudes.
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


def _renamed(layer: LayerAdapter, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names[name]: tensor for name, tensor in layer.tensors.items() if name != "magnitude"}


def _at_scale_one(layer: LayerAdapter) -> LayerAdapter:
    if layer.scale == 1:
        return layer
    (factor,) = (name for name in KINDS[layer.kind].scaled if name in layer.tensors)
    scaled = layer.tensors[factor].float() * layer.scale
    return LayerAdapter(layer.kind, {**layer.tensors, factor: scaled})


def _alpha(layer: LayerAdapter) -> int:
    """Return the alpha that means scale 1: the rank; for a rotation 0, no constraint, as its key is required."""
    match layer.kind:
        case "lora" | "dora":
            return layer.tensors["down"].shape[0]
        case "loha":
            return layer.tensors["w1_b"].shape[0]
        case "lokr":
            return _lokr_rank(layer) or 1
    return 0


def _lokr_rank(layer: LayerAdapter) -> int | None:
    """Return the rank; None when both factors are whole."""
    return next((layer.tensors[name].shape[0] for name in ("w2_b", "w1_b") if name in layer.tensors), None)


def _size(layer: LayerAdapter) -> tuple[int, int]:
    """Return rows and columns of the layer's weight, the kernel of a convolution flattened. layer: loha or lokr."""
    tensors = layer.tensors
    if layer.kind == "loha":
        return tensors["w1_a"].shape[0], tensors["w1_b"].shape[1]
    (a, b), (c, d) = _factor_shapes(layer)
    return a * c, b * d


def _factor_shapes(layer: LayerAdapter) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of lokr's two factors, the kernel flattened into the second."""

    def shape(name: str) -> tuple[int, int]:
        if name in layer.tensors:
            whole = layer.tensors[name]
            return whole.shape[0], whole[0].numel()
        return layer.tensors[f"{name}_a"].shape[0], layer.tensors[f"{name}_b"].shape[1]

    return shape("w1"), shape("w2")


def _exact_rank(layer: LayerAdapter) -> int:
    """Return the rank of the lora that equals a loha or lokr."""
    if layer.kind == "loha":
        return layer.tensors["w1_b"].shape[0] * layer.tensors["w2_b"].shape[0]
    return math.prod(
        layer.tensors[f"{name}_b"].shape[0] if f"{name}_b" in layer.tensors else min(shape)
        for name, shape in zip(("w1", "w2"), _factor_shapes(layer), strict=True)
    )


def _exact_lora(layer: LayerAdapter, shape: torch.Size) -> LayerAdapter:
    """Return the lora with the same update. shape: of the layer's weight."""
    factors = {name: tensor.float() for name, tensor in layer.tensors.items()}
    if layer.kind == "loha":
        # (w1_a w1_b) * (w2_a w2_b) is a sum over pairs of ranks, each an outer product.
        up = torch.einsum("oi,oj->oij", factors["w1_a"], factors["w2_a"]).flatten(1)
        down = torch.einsum("in,jn->ijn", factors["w1_b"], factors["w2_b"]).flatten(0, 1)
    else:
        # kron(A B, C D) = kron(A, C) kron(B, D)
        left, right = zip(*(_as_product(factors, name) for name in ("w1", "w2")), strict=True)
        up, down = torch.kron(*left), torch.kron(*right)
    return LayerAdapter("lora", {"down": down.view(-1, *shape[1:]), "up": _as_kernel(up, len(shape))})


def _as_product(factors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Write a factor of lokr as a product of two matrices with the smallest possible inner dimension."""
    if f"{name}_a" in factors:
        return factors[f"{name}_a"], factors[f"{name}_b"]
    whole = factors[name].flatten(1)
    rows, columns = whole.shape
    return (torch.eye(rows), whole) if rows <= columns else (whole, torch.eye(columns))


def _as_lycoris_builds_it(layer: LayerAdapter) -> LayerAdapter:
    """Return the same adapter in the shapes that LyCORIS builds from a file before it copies the tensors."""
    tensors = dict(layer.tensors)
    if layer.kind == "lokr" and "w2" in tensors and "w1_a" in tensors:
        # It does not support a low-rank first factor with a whole second one.
        tensors["w1"] = tensors.pop("w1_a").float() @ tensors.pop("w1_b").float()
    if layer.kind == "boft":
        tensors["blocks"] = _all_stages(tensors["blocks"])
    return LayerAdapter(layer.kind, tensors)


def _all_stages(blocks: Tensor) -> Tensor:
    """Append zeros, which do not rotate, for the stages that were not trained: LyCORIS computes the number of stages,
    log2(n) + 1 for n blocks, and ignores the file's."""
    stages, n, b, _ = blocks.shape
    missing = n.bit_length() - stages
    return torch.cat([blocks, blocks.new_zeros(missing, n, b, b)])


def _as_kernel(up: Tensor, dim: int) -> Tensor:
    """Give (out, r) as many dimensions as the layer's weight: (out, r[, 1, 1])."""
    return up.view(*up.shape, *[1] * (dim - 2))


def _as_column(magnitude: Tensor, down: Tensor) -> Tensor:
    """Reshape (out,) to (out, 1[, 1, 1]): ComfyUI would broadcast a vector over the columns."""
    return magnitude.view(-1, *[1] * (down.dim() - 1))


def _comfyui_dora_scale(layer: LayerAdapter, weight: Tensor) -> Tensor:
    """Return m (||W|| + eps) / ||W + dW|| by rows, shape (out, 1[, 1, 1]).

    ComfyUI divides by ||W|| + eps where the definition, peft and LyCORIS divide by ||W + dW||. The correction is right
    for a row of zeros in W too. No other code depends on this. Comfy-Org/ComfyUI pull request 15458 fixes ComfyUI: then
    this file's `dora_scale` is wrong, and DORA_CONVENTION in its metadata says which files are affected.
    """
    rows = weight.float().flatten(1)
    turned = rows + layer.update().flatten(1)
    factor = (rows.norm(dim=1) + COMFYUI_EPS) / turned.norm(dim=1).clamp_min(SHORTEST)
    magnitude = layer.tensors["magnitude"].float() * factor
    return _as_column(magnitude, layer.tensors["down"])


def _peft_config(layers: Mapping[str, LayerAdapter], base: Base, path: NameOf) -> PeftConfig:
    """Return the config with which peft builds the layers in the shapes of their tensors, at scale 1.

    path: returns a layer's name in peft's model.
    """
    kind = next(iter(layers.values())).kind
    ranks = {path(name): _peft_rank(layer) for name, layer in layers.items()}
    rank = _most_common(ranks.values())
    others = {f"^{re.escape(path)}$": other for path, other in ranks.items() if other != rank}
    shared: dict[str, Any] = {
        "r": rank,
        "target_modules": f"({'|'.join(map(re.escape, ranks))})",
        "rank_pattern": others,
        "alpha_pattern": others,
        "inference_mode": True,
    }
    match kind:
        case "loha":
            return LoHaConfig(alpha=rank, **shared)
        case "lokr":
            both = any("w1_a" in layer.tensors for layer in layers.values())
            return LoKrConfig(alpha=rank, decompose_both=both, decompose_factor=_peft_factor(layers, base), **shared)
    return LoraConfig(lora_alpha=rank, use_dora=kind == "dora", **shared)


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


def _peft_rank(layer: LayerAdapter) -> int:
    """Return the rank for peft, which keeps a factor of lokr whole when the rank is at least half its size."""
    if layer.kind == "lokr":
        return _lokr_rank(layer) or max(_factor_shapes(layer)[1])
    return _alpha(layer)


def _peft_factor(layers: Mapping[str, LayerAdapter], base: Base) -> int:
    """Return the single factor from which peft computes the split of all layers.

    It is the first factor's size in the layers whose sizes it divides. Raises InputError when there is none.
    """
    splits: set[tuple[int, int]] = set()
    for name, layer in layers.items():
        first, _ = _factor_shapes(layer)
        splits.update(zip(base(name).shape[:2], first, strict=True))
    factor: int
    for factor in (-1, *sorted({first for _, first in splits})):
        if all(factorization(size, factor)[0] == first for size, first in splits):
            return factor
    raise InputError(
        "export.format: peft cannot carry a lokr adapter whose layers are split by different factors; "
        "use auto, comfyui, lycoris"
    )
