"""Reader of adapter files of this and other programs, by the names of their tensors.

It shares no code and no table of names with the writer, because it also verifies what the writer wrote.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from torch import Tensor

from trainer.adapters.formats import DORA_CONVENTION, Naming
from trainer.adapters.kinds import KINDS, Kind
from trainer.adapters.layer import LayerAdapter
from trainer.adapters.patterns import find_pattern
from trainer.system.errors import InputError
from trainer.system.files import first_problem, read_json
from trainer.weights.files import ORIGINAL_PREFIX, WeightFiles
from trainer.weights.headers import PEFT_FILE

PEFT_PREFIX = "base_model.model."
PEFT_CONFIG = "adapter_config.json"
DIFFUSERS_METADATA = "lora_adapter_metadata"
SETTINGS = TypeAdapter(dict[str, Any])
LONGEST_NAME = 512
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

ENCODER_PREFIXES = ("lora_te", "text_encoder")

TENSOR_NAMES: Mapping[str, tuple[Kind, str]] = {
    "lora_A.weight": ("lora", "down"),
    "lora_B.weight": ("lora", "up"),
    "lora_down.weight": ("lora", "down"),
    "lora_up.weight": ("lora", "up"),
    "lora_magnitude_vector": ("lora", "magnitude"),
    "lora_magnitude_vector.weight": ("lora", "magnitude"),
    "dora_scale": ("lora", "dora_scale"),
    **{f"hada_{name}": ("loha", name) for name in ("w1_a", "w1_b", "w2_a", "w2_b")},
    **{f"lokr_{name}": ("lokr", name) for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")},
    "oft_blocks": ("diag-oft", "blocks"),
}
"""{end of a key: (kind, tensor)}. A lora with a magnitude is a dora; a rotation in stages is a boft."""
KEY = re.compile(rf"(?P<layer>.+)\.(?P<end>alpha|{'|'.join(map(re.escape, TENSOR_NAMES))})")
LIVE_KEY = re.compile(
    r"(?P<tensor>.+\.(?:lora_[AB]|lora_magnitude_vector|hada_w\w+|lokr_w\w+))\.(?P<adapter>\w+)(?P<end>\.weight)?"
)
"""A key as peft's modules have it, with the name of the adapter, which peft leaves out of its files."""
PRODUCTS = (("up", "down"), ("w1_a", "w1_b"), ("w2_a", "w2_b"))
"""Pairs of tensors that are multiplied: the first has as many columns as the second has rows."""
KERNELS = ("down", "up", "w2")
"""Tensors that may have more than two dims, for a convolution."""
BY_ROWS: Mapping[Kind, tuple[str, ...]] = {"lora": ("up",), "dora": ("up", "magnitude"), "loha": ("w1_a", "w2_a")}
"""Tensors with a row per output of the layer, for the kinds that can be split by rows."""


def read_adapter(
    file: Path, shapes: Mapping[str, tuple[int, ...]], naming: Naming, base: Callable[[str], Tensor]
) -> dict[str, LayerAdapter]:
    """Read an adapter file of this program, diffusers, peft, ComfyUI, kohya or LyCORIS.

    Args:
        file: The file, or a folder of peft.
        shapes: {layer, component first: shape of its weight} of all linear layers and convolutions of the model.
        naming: The family's names in files.
        base: Returns the weight of a layer; called only where what is stored depends on the weight.

    Returns:
        {layer: its adapter}.

    Raises:
        InputError: The file is incomplete, holds tensors that are not understood, or belongs to another model.
    """
    stored = _Stored.open(file / PEFT_FILE if file.is_dir() else file)
    known = _model_layers(shapes, naming)
    groups = {name: tensors for name, tensors in stored.groups().items() if not _is_left_out(name, shapes)}
    if not groups and not stored.whole:
        raise InputError(
            f"{stored.file}: holds layers of text encoders only, which this kind of model is not trained with; name a "
            "file with layers of the model"
        )
    prefix = _common_prefix(groups, known)
    layers: dict[str, LayerAdapter] = {}
    for name, tensors in groups.items():
        group = _Group(stored, name, tensors)
        whole = group.adapter()
        target = known.get(name) or (known.get(name.removeprefix(prefix)) if prefix else None)
        if target is None:
            raise InputError(_unknown_layer(group, whole, known, shapes))
        for layer, part in _parts(group, whole, target, shapes):
            fitted = _fitted(group, layer, part, shapes[layer])
            if layer in layers:
                raise group.error(f"'{name}' is '{layer}', which the file changes under another name too; keep one")
            layers[layer] = _uncorrected(fitted, base(layer)) if group.is_corrected else fitted
    _check_one_kind(stored.file, layers)
    return layers


def encoder_layers(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the text encoders' layers in a file that `read_adapter` leaves out, as the model's are not trained."""
    stored = WeightFiles.read([file / PEFT_FILE if file.is_dir() else file]).entries
    names = dict.fromkeys(found[0] for key in stored if (found := _layer_and_end(key)))
    return tuple(name for name in names if _is_left_out(name, shapes))


def _is_left_out(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return name.startswith(ENCODER_PREFIXES) and not any(layer.startswith("text_encoder") for layer in shapes)


def read_modules(file: Path, naming: Naming, components: Sequence[str]) -> dict[str, Tensor]:
    """Read the modules that a folder of peft holds whole, in addition to its adapter.

    Args:
        file: The folder, or another adapter file, which has none.
        naming: The family's names in files.
        components: Components of the model, likelier ones first: the folder does not name them.

    Returns:
        {name of the tensor in the model, component first: tensor}.
    """
    stored = _Stored.open(file / PEFT_FILE if file.is_dir() else file)
    published = {
        fused.name.removeprefix(ORIGINAL_PREFIX): f"{component}.{fused.parts[0]}"
        for component, layout in naming.layouts.items()
        for fused in layout
        if len(fused.parts) == 1
    }
    found: dict[str, Tensor] = {}
    for key in stored.whole:
        path = key.removeprefix(PEFT_PREFIX)
        owners = (component for component in components if path.rpartition(".")[0] in naming.modules(component))
        found[published.get(path) or f"{next(owners, components[0])}.{path}"] = stored.tensors[key]
    return found


@dataclass(frozen=True)
class _Stored:
    """The content of a file. settings: {prefix of layers' names: peft's config for these layers}."""

    file: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    settings: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, file: Path) -> _Stored:
        WeightFiles.read([file])  # refuses a file that is missing, truncated or not safetensors
        with safe_open(file, "pt") as stream:
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118  it is not a mapping
            metadata = stream.metadata() or {}
        if not tensors:
            raise InputError(f"{file}: holds no tensors; name an adapter file")
        return cls(file, tensors, metadata, _settings(file, metadata))

    @cached_property
    def whole(self) -> frozenset[str]:
        """Keys of modules that peft's `modules_to_save` names, which are no part of an adapter."""
        named = self.settings.get(PEFT_PREFIX, {}).get("modules_to_save")
        keys = (key for key in self.tensors if key.startswith(PEFT_PREFIX) and not KEY.fullmatch(key)) if named else ()
        return frozenset(key for key in keys if key.isprintable() and len(key) <= LONGEST_NAME)

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """Return {layer's name in the file: {end of a key: tensor}}."""
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            if key in self.whole:
                continue
            found = _layer_and_end(key)
            if found is None:
                raise InputError(
                    f"{self.file}: {key!r:.80} is not understood; supported are lora, locon, dora, loha and lokr "
                    "without tucker factors, and diag-oft and boft without rescaling"
                )
            layer, end = found
            if end in groups.setdefault(layer, {}):
                raise InputError(f"{self.file}: has '{layer}.{end}' for several adapters; save one of them")
            groups[layer][end] = tensor
        return groups


def _layer_and_end(key: str) -> tuple[str, str] | None:
    """Split a key into the layer's name and the end that names the tensor; None for one that is not understood."""
    if not key.isprintable() or len(key) > LONGEST_NAME:
        return None
    live = LIVE_KEY.fullmatch(key)
    found = KEY.fullmatch(key) or (KEY.fullmatch(f"{live['tensor']}{live['end'] or ''}") if live else None)
    return (found["layer"], found["end"]) if found else None


def _settings(file: Path, metadata: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Read peft's configs from the file next to peft's weights, or from the metadata that diffusers writes."""
    config = file.with_name(PEFT_CONFIG)
    settings: dict[str, Mapping[str, Any]] = {}
    if file.name == PEFT_FILE and config.exists():
        own: dict[str, Any] = read_json(config, SETTINGS, "save the adapter again")
        settings[PEFT_PREFIX] = own
    try:
        pairs = SETTINGS.validate_json(metadata.get(DIFFUSERS_METADATA, "{}"))
    except ValidationError as error:
        raise InputError(
            f"{file}: its rank and alpha cannot be read ({first_problem(error)}); save it again"
        ) from error
    for name, value in pairs.items():
        component, _, field = name.partition(".")
        prefix = f"{component}."
        settings[prefix] = {**settings.get(prefix, {}), field: value}
    return settings


@dataclass(frozen=True)
class _Group:
    """The tensors of one layer in a file, by the ends of their keys. name: the layer's name in the file."""

    stored: _Stored
    name: str
    tensors: Mapping[str, Tensor]

    @property
    def is_corrected(self) -> bool:
        """Whether the lengths of the rows are stored in ComfyUI's convention (`formats.DORA_CONVENTION`)."""
        only_scale = "dora_scale" in self.tensors and not any("magnitude" in end for end in self.tensors)
        return only_scale and self.stored.metadata.get(DORA_CONVENTION) == "comfyui"

    def adapter(self) -> LayerAdapter:
        """Return the adapter of the file's layer, which may stand for several layers of the model."""
        kind, tensors = self._named()
        self._check_complete(kind, tensors)
        self._check_dimensions(tensors)
        if "blocks" in tensors:
            return LayerAdapter(kind, {"blocks": self._constrained(tensors["blocks"])})
        return LayerAdapter(kind, tensors, self._scale(kind, tensors))

    def error(self, what: str) -> InputError:
        return InputError(f"{self.stored.file}: {what}")

    def _named(self) -> tuple[Kind, dict[str, Tensor]]:
        """Return the kind, and the tensors by our names."""
        ends = [end for end in self.tensors if end != "alpha"]
        kinds = {TENSOR_NAMES[end][0] for end in ends}
        if len(kinds) != 1:
            found = f"tensors of {' and '.join(sorted(kinds))}" if kinds else "an alpha and nothing else"
            raise self.error(f"'{self.name}' has {found}; a layer takes one adapter")
        (kind,) = kinds
        tensors = {TENSOR_NAMES[end][1]: self.tensors[end] for end in ends}
        scale = tensors.pop("dora_scale", None)
        if scale is not None:
            tensors.setdefault("magnitude", self._length_of_rows(scale))
        if "magnitude" in tensors:
            return "dora", tensors | {"magnitude": tensors["magnitude"].flatten()}
        if "blocks" in tensors and tensors["blocks"].dim() == 4:
            return "boft", tensors
        return kind, tensors

    def _length_of_rows(self, scale: Tensor) -> Tensor:
        if scale.dim() > 1 and scale.shape[0] == 1 and scale.numel() > 1:
            raise self.error(
                f"'{self.name}.dora_scale' ({_sizes(scale)}) scales the inputs of its layer; "
                "only a dora that scales the outputs can be read"
            )
        return scale

    def _check_complete(self, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
        names = min(KINDS[kind].tensors, key=lambda names: len(set(names) ^ tensors.keys()))
        missing = set(names) - tensors.keys()
        if missing:
            ends = [end for end in self.tensors if end != "alpha"]
            others = ("lora_A", "lora_B") if ends[0].startswith(("lora_down", "lora_up")) else ("lora_down", "lora_up")
            wanted = next(
                end
                for end, (of, name) in TENSOR_NAMES.items()
                if of == TENSOR_NAMES[ends[0]][0] and name in missing and not end.startswith(others)
            )
            raise self.error(f"'{self.name}' has {ends[0]} but no {wanted}; the file is incomplete")

    def _check_dimensions(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in FLOATS or not tensor.numel():
                what = f"{str(tensor.dtype).removeprefix('torch.')} ({_sizes(tensor)})"
                remedy = "save it in bf16" if tensor.numel() else "the file is damaged"
                raise self.error(f"'{self.name}': {name} is {what}, not floats of 16 to 64 bits; {remedy}")
            if not tensor.isfinite().all():
                raise self.error(f"'{self.name}': {name} holds numbers that are not finite; the file is damaged")
            fits = _is_rotation(tensor.shape) if name == "blocks" else tensor.dim() == 2 or name in KERNELS
            fits = fits and tensor.dim() > 1
            if not fits and name != "magnitude":
                raise self.error(f"'{self.name}': {name} ({_sizes(tensor)}) has another form; the file is damaged")

    def _scale(self, kind: Kind, tensors: Mapping[str, Tensor]) -> float:
        """Return alpha / rank, from where this file stores it."""
        rank = next((tensors[name].shape[0] for name in ("down", "w2_b", "w1_b") if name in tensors), None)
        if "alpha" in self.tensors:
            # LyCORIS does not scale a lokr of two whole factors.
            return 1.0 if rank is None else self._alpha() / rank
        for prefix, settings in self.stored.settings.items():
            before, found, path = self.name.partition(prefix)
            if found and (not before or before.endswith(".")):
                return self._scale_in(settings, path)
        if self.name.startswith(PEFT_PREFIX):
            raise self.error(f"was saved by peft, but {PEFT_CONFIG}, which holds its alpha, is missing next to it")
        return 1.0

    def _alpha(self) -> float:
        alpha = self.tensors.get("alpha", torch.zeros(()))
        if alpha.numel() != 1 or alpha.is_complex() or not math.isfinite(float(alpha)):
            raise self.error(f"'{self.name}': alpha ({_sizes(alpha) or 'one'}) is not one finite number; save it again")
        return float(alpha)

    def _scale_in(self, settings: Mapping[str, Any], path: str) -> float:
        """Return a layer's scale from peft's config."""
        ranks, alphas = (settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        try:
            rank = ranks.get(find_pattern(ranks, path), settings["r"])
            alpha = alphas.get(find_pattern(alphas, path), settings.get("lora_alpha", settings.get("alpha", rank)))
            scale = float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
            if not math.isfinite(scale):
                raise ValueError(f"alpha {alpha!r:.20}, rank {rank!r:.20}")
        except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise self.error(
                f"'{self.name}': its rank and alpha cannot be read from peft's config ({error}); save it again"
            ) from error
        return scale

    def _constrained(self, blocks: Tensor) -> Tensor:
        """Bound the norm of the skew matrices by alpha times the number of outputs, as LyCORIS does."""
        skew = (blocks - blocks.mT).float()
        limit = self._alpha() * blocks.shape[-3] * blocks.shape[-1]
        norm = float(skew.norm())
        return skew * (limit / norm / 2) if 0 < limit < norm else blocks


def _is_rotation(shape: torch.Size) -> bool:
    """Whether blocks are square and, for a butterfly, the stages can exchange rows between so many blocks."""
    is_square = len(shape) in (3, 4) and shape[-1] == shape[-2]
    if not is_square or len(shape) == 3:
        return is_square
    stages, n, b, _ = shape
    return n & (n - 1) == 0 and b % 2 == 0 and stages <= n.bit_length()


@dataclass(frozen=True)
class _ModelLayers:
    """The layers of the model that one layer of a file stands for: one layer, or several whose rows are stacked."""

    layers: tuple[str, ...]
    halves_swapped: bool = False


def _model_layers(shapes: Mapping[str, tuple[int, ...]], naming: Naming) -> dict[str, _ModelLayers]:
    """Return {name in a file: target} for all names that any program gives a layer of the model."""
    known: dict[str, _ModelLayers] = {}
    # A text encoder's own paths before the older ones, which may be another encoder's own.
    for names_of in (_names, _older_names):
        for layer in shapes:
            for name in names_of(layer, naming):
                known.setdefault(name, _ModelLayers((layer,)))
    for component, layout in naming.layouts.items():
        for fused in layout:
            layers = tuple(f"{component}.{part.removesuffix('.weight')}" for part in fused.parts)
            if shapes.keys() >= set(layers) and not fused.transposed:
                original = fused.name.removesuffix(".weight").removeprefix(ORIGINAL_PREFIX)
                for name in (
                    f"{PEFT_PREFIX}{original}",
                    f"diffusion_model.{original}",
                    *_kohya_names(component, original, naming),
                ):
                    known.setdefault(name, _ModelLayers(layers, fused.halves_swapped))
    return known


def _common_prefix(names: Iterable[str], known: Mapping[str, _ModelLayers]) -> str:
    """Return what stands before the names of layers that are not known, where it is the same for all of them.

    Programs put the names of what they wrap a model in before its layers' names: `diffusion_model.`, `module.`,
    `lora_transformer_`. A number in it would be that of another model's block. Empty where there is none.
    """
    found: set[str] = set()
    for name in names:
        if name not in known:
            separator = "." if "." in name else "_"
            ends = (at for at, letter in enumerate(name, 1) if letter == separator and name[at:] in known)
            found.add(name[: next(ends, 0)])
    prefix = found.pop() if len(found) == 1 else ""
    return "" if any(character.isdigit() for character in prefix) else prefix


def _names(layer: str, naming: Naming) -> Iterator[str]:
    """Yield the names that programs give a layer which they do not join with others."""
    component, _, path = layer.partition(".")
    yield from (layer, f"{PEFT_PREFIX}{path}", path, *_kohya_names(component, path, naming))
    if not component.startswith("text_encoder"):
        yield from (f"lycoris_{path}".replace(".", "_"), path.replace(".", "_"))


def _older_names(layer: str, naming: Naming) -> Iterator[str]:
    """Yield a text encoder layer's names from before transformers 5 removed `text_model` from its path."""
    component, _, path = layer.partition(".")
    if component.startswith("text_encoder"):
        yield from (f"{prefix}text_model.{path}" for prefix in (f"{component}.", PEFT_PREFIX, ""))


def _kohya_names(component: str, path: str, naming: Naming) -> Iterator[str]:
    if component in naming.kohya_prefixes:
        yield f"{naming.kohya_prefixes[component]}_{path}".replace(".", "_")


def _parts(
    group: _Group, whole: LayerAdapter, ours: _ModelLayers, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, LayerAdapter]]:
    """Yield the model's layers of a file's layer, each with its part of the adapter.

    All parts of a lora share `down`. Ranks that serve other parts only are left out, and so is a part without ranks.
    """
    layers = ours.layers
    if len(layers) == 1 and not ours.halves_swapped:
        yield layers[0], whole
        return
    if whole.kind not in BY_ROWS:
        raise group.error(f"'{group.name}' is {' and '.join(layers)} of this model, and a {whole.kind} cannot be split")
    rows, shape = [shapes[layer][0] for layer in layers], shapes[layers[0]]
    expected = (sum(rows), math.prod(shape[1:]))
    if _size(whole) != expected:
        raise group.error(_mismatch(group.name, _size(whole), expected))
    stacked = {name: whole.tensors[name] for name in BY_ROWS[whole.kind]}
    if ours.halves_swapped:
        stacked = {name: torch.cat(tensor.chunk(2)[::-1]) for name, tensor in stacked.items()}
    by_rows = {name: torch.split(tensor, rows) for name, tensor in stacked.items()}
    for number, layer in enumerate(layers):
        part = replace(whole, tensors={**whole.tensors, **{name: split[number] for name, split in by_rows.items()}})
        if whole.kind != "lora" or len(rows) == 1:
            yield layer, part
        elif part.tensors["up"].any():
            yield layer, _without_idle_rank(part)


def _without_idle_rank(part: LayerAdapter) -> LayerAdapter:
    used = part.tensors["up"].flatten(1).any(dim=0)
    return replace(part, tensors={"down": part.tensors["down"][used], "up": part.tensors["up"][:, used]})


def _fitted(group: _Group, layer: str, adapter: LayerAdapter, shape: tuple[int, ...]) -> LayerAdapter:
    """Give the adapter as many dimensions as the layer's weight: some files have 1 x 1 kernels for linear layers."""
    tensors = dict(adapter.tensors)
    for left, right in PRODUCTS:
        if left in tensors and tensors[left][0].numel() != tensors[right].shape[0]:
            ends = " and ".join(f"{name} ({_sizes(tensors[name])})" for name in (left, right))
            raise group.error(f"'{group.name}': {ends} cannot be multiplied; the file is damaged")
    for first, second, dim in (("w1_a", "w2_a", 0), ("w1_b", "w2_b", 1)):
        if adapter.kind == "loha" and tensors[first].shape[dim] != tensors[second].shape[dim]:
            ends = " and ".join(f"{name} ({_sizes(tensors[name])})" for name in (first, second))
            raise group.error(f"'{group.name}': {ends} are of different layers; the file is damaged")
    expected = (shape[0], math.prod(shape[1:]))
    if "magnitude" in tensors and len(tensors["magnitude"]) != shape[0]:
        raise group.error(f"'{group.name}': {len(tensors['magnitude'])} magnitudes for {shape[0]} outputs")
    if _size(adapter) not in (expected, (shape[0], None)):
        raise group.error(_mismatch(layer, _size(adapter), expected))
    if "down" in tensors:
        tensors["down"] = tensors["down"].reshape(-1, *shape[1:])
        tensors["up"] = tensors["up"].reshape(shape[0], -1, *[1] * (len(shape) - 2))
    return replace(adapter, tensors=tensors)


def _size(adapter: LayerAdapter) -> tuple[int, int | None]:
    """Return rows and columns of the weight that the adapter fits; a rotation fits any number of columns (None)."""
    tensors = adapter.tensors
    match adapter.kind:
        case "lora" | "dora":
            return tensors["up"].shape[0], tensors["down"][0].numel()
        case "loha":
            return tensors["w1_a"].shape[0], tensors["w1_b"].shape[1]
        case "lokr":
            (a, b), (c, d) = (
                (tensors[name].shape[0], tensors[name][0].numel())
                if name in tensors
                else (tensors[f"{name}_a"].shape[0], tensors[f"{name}_b"].shape[1])
                for name in ("w1", "w2")
            )
            return a * c, b * d
    return tensors["blocks"].shape[-3] * tensors["blocks"].shape[-1], None


def _uncorrected(adapter: LayerAdapter, weight: Tensor) -> LayerAdapter:
    """Return the dora whose magnitude m was stored as m (||W|| + eps) / ||W + dW||."""
    rows = weight.float().flatten(1)
    turned = rows + adapter.update().flatten(1)
    length = rows.norm(dim=1) + torch.finfo(torch.float32).eps
    magnitude = adapter.tensors["magnitude"].float() * turned.norm(dim=1) / length
    return replace(adapter, tensors={**adapter.tensors, "magnitude": magnitude})


def _unknown_layer(
    group: _Group, adapter: LayerAdapter, known: Mapping[str, _ModelLayers], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    (near,) = difflib.get_close_matches(group.name, known, 1, cutoff=0.0)
    layer = known[near].layers[0]
    theirs, ours = _text(_size(adapter)), _text((shapes[layer][0], math.prod(shapes[layer][1:])))
    path = layer.partition(".")[2]
    if theirs == ours and group.name.replace(".", "_").endswith(f"_{path}".replace(".", "_")):
        return (
            f"{group.stored.file}: '{group.name}' ({theirs}) ends as the model's '{layer}' and has its size, but how "
            "it begins is not known, or not the same in the whole file; rename the tensors to begin with "
            f"'{layer.removesuffix(path)}'"
        )
    return (
        f"{group.stored.file}: '{group.name}' ({theirs}) is not a layer of this model, nearest: '{layer}' ({ours}); "
        "the file was made for another model"
    )


def _mismatch(layer: str, theirs: tuple[int, int | None], ours: tuple[int, int]) -> str:
    return f"the adapter of '{layer}' is for {_text(theirs)}, but its weight is {_text(ours)}; use the file's own model"


def _text(size: tuple[int, int | None]) -> str:
    return f"{size[0]} outputs" if size[1] is None else f"{size[0]} x {size[1]}"


def _sizes(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _check_one_kind(file: Path, layers: Mapping[str, LayerAdapter]) -> None:
    examples = {adapter.kind: layer for layer, adapter in layers.items()}
    if len(examples) > 1:
        found = ", ".join(f"{kind} of '{layer}'" for kind, layer in examples.items())
        raise InputError(f"{file}: mixes kinds of adapters ({found}); only one kind can be continued")
