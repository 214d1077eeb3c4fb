"""Forms in which programs store weights in fewer bits: those that are read, and the names of the others.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from trainer.system.errors import InputError
from trainer.system.files import first_problem
from trainer.weights.headers import PREFIXES, Header, StoredTensor, read_bytes

READ = (
    "name the original model, or weights in bf16, fp16 or fp32, in fp8 or int8 with a scale per layer or row (as "
    "ComfyUI's fp8_scaled and int8_tensorwise), or in bitsandbytes' nf4 or fp4"
)
SCALES = (".weight_scale", ".scale_weight")
NOT_READ = (".input_scale", ".scale_input", ".comfy_quant")
"""Stored with 8-bit weights: scales of the activations, which are not quantized here, and ComfyUI's description."""
FP8 = ("F8_E4M3", "F8_E5M2")
PACKED = ("I8", "U8", "I16", "U16", "I32", "U32", "F4", "F8_E8M0", *FP8)
"""Types of codes, which are numbers of the model only together with scales; fp8 may be without."""
ROTATIONS = (4, 16, 64, 256, 1024)
"""Numbers that are rotated together: powers of four, of which ComfyUI takes 256."""
METHODS = ("bitsandbytes", "compressed-tensors")
"""Values of `quant_method` in a config.json, some of whose integers are read."""
COMFY = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")

NAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"\.(?:SCB|weight_format)", "bitsandbytes' int8", ()),
    (r"\.(?:weight_scale_2|weight_global_scale)", "nvfp4", ()),
    (r"\.weight_scale_inv", "fp8 with a scale per block", ()),
    (r"\.weight_(?:packed|zero_point|g_idx)", "compressed-tensors' integers", ()),
    (r"\.(?:wscales|wzeros|smooth_factor)", "SVDQuant (nunchaku)", ()),
    (r"\.g_idx", "GPTQ", ()),
    (r"\.qzeros", "AWQ", ()),
    (r"\.qweight", "GPTQ or AWQ", ("I32",)),
    (r"\.(?:q_weight|trellis)", "EXL2 or EXL3", ()),
    (r"\.W_q", "HQQ", ()),
    (r"\.weight\._(?:data|scale)(?:\._data)?", "quanto", ()),
    (r"[._:]qdata|_weight_qdata", "torchao", ()),
    (r"_blocks", "mxfp4", ("U8",)),
    (r"\.biases", "MLX", ()),
    (r"\.codebooks", "AQLM", ()),
)
"""(end of a tensor's name, the form that has it, the types that it has there or none for any). The first counts."""
_ENDS = re.compile(f"(?:{'|'.join(f'({end})' for end, _, _ in NAMES)})$")


class LayerForm(BaseModel):
    """ComfyUI's description of a quantized layer.

    Attributes:
        format: Its name of the form.
        convrot: Whether each `convrot_groupsize` numbers of a row were rotated together before they became codes.
    """

    format: str
    convrot: bool = False
    convrot_groupsize: PositiveInt = 256

    @property
    def rotated(self) -> int:
        """Numbers that were rotated together; 1 for none."""
        return self.convrot_groupsize if self.convrot else 1


def read_forms(file: Path, header: Header) -> dict[str, LayerForm]:
    """Read ComfyUI's descriptions of a file's layers, by the layers' names.

    They are JSON: in a tensor `comfy_quant` of each layer, or of all layers in the header, there with or without the
    denoiser's prefix.

    Raises:
        InputError: A description is damaged.
    """
    where = "_quantization_metadata"
    forms: dict[str, LayerForm] = {}
    try:
        for layer, described in json.loads(header.metadata.get(where, "{}")).get("layers", {}).items():
            names = (f"{prefix}{layer}" for prefix in ("", *PREFIXES))
            name = next((name for name in names if f"{name}.weight" in header.tensors), layer)
            forms[name] = _form({"format": described} if isinstance(described, str) else described)
        for where in header.tensors:
            if where.endswith(".comfy_quant"):
                forms[where.removesuffix(".comfy_quant")] = _form(json.loads(read_bytes(file, header, where)))
    except ValidationError as error:
        raise InputError(f"{file}: '{where}' is damaged ({first_problem(error)}); download it again") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: '{where}' is not JSON of ComfyUI; download it again") from error
    return forms


def _form(described: Mapping[str, Any]) -> LayerForm:
    """A description; some programs write its fields in a group of their own."""
    return LayerForm.model_validate({**(described.get("params") or {}), **described})


def refusal(file: object, key: str, form: str) -> str:
    """Say that a form is not read, and which are."""
    return f"{file}: '{key}' is stored as {form}, which is not read; {READ}"


def has_integers(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether matrices are stored as small integers, as codes are."""
    return any(len(shape) > 1 and dtype in PACKED and dtype not in FP8 for shape, dtype in tensors.values())


def unread(tensors: Mapping[str, StoredTensor], forms: Mapping[str, LayerForm]) -> Iterator[tuple[str, str]]:
    """Yield (a tensor, the name of its form) for tensors that are not read; the first says most.

    Args:
        tensors: Those of a component, which may lie in several files.
        forms: ComfyUI's descriptions of its layers.
    """
    for layer, form in forms.items():
        if form.format not in COMFY:
            yield f"{layer}.weight", f"ComfyUI's {form.format}"
    marks: dict[int, str] = {}
    for key, (_, dtype) in tensors.items():
        mark = _ENDS.search(key)
        if mark and mark.lastindex and dtype in (NAMES[mark.lastindex - 1][2] or (dtype,)):
            marks.setdefault(mark.lastindex - 1, key)
    for first in sorted(marks):
        yield marks[first], NAMES[first][1]
    scaled = set()
    for key, stored in tensors.items():
        layer, _, name = key.rpartition(".")
        weight = tensors.get(f"{layer}.weight")
        if key.endswith(SCALES):
            scaled.add(f"{layer}.weight")
            if weight is None or not _is_read(weight, stored, forms.get(layer)):
                codes = f"{weight[1]} {list(weight[0])}" if weight else "no codes"
                rotated = f", rotated by {forms[layer].rotated}" if layer in forms and forms[layer].convrot else ""
                yield key, f"{codes} with scales {stored[1]} {list(stored[0])}{rotated}"
        elif "scale" in name and not key.endswith(NOT_READ) and weight is not None and weight[1] in PACKED:
            yield key, f"{weight[1]} {list(weight[0])} with '{name}' {list(stored[0])}"
    four_bits = {key.partition(".quant_state.")[0] for key in tensors if ".quant_state.bitsandbytes__" in key}
    for key, (shape, dtype) in tensors.items():
        # An adapter is not stored in fewer bits: its reader says what else it needs.
        is_codes = key.endswith(".weight") and ".lora_" not in key and has_integers({key: (shape, dtype)})
        if is_codes and key not in scaled and key not in four_bits:
            yield key, f"{dtype} {list(shape)} without scales"


def _is_read(weight: StoredTensor, scales: StoredTensor, form: LayerForm | None) -> bool:
    """Whether codes are 8-bit floats or integers, and their scales one number or one for each row."""
    shape, dtype = weight
    rows = (shape[:1], (*shape[:1], 1)) if len(shape) == 2 else ()
    if dtype not in ("I8", *FP8) or scales[1] not in ("F32", "BF16", "F16"):
        return False
    if math.prod(scales[0]) != 1 and scales[0] not in rows:
        return False
    group = form.rotated if form else 1
    return group == 1 or (group in ROTATIONS and len(shape) == 2 and shape[1] % group == 0)
