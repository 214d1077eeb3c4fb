"""The kinds of adapters: the tensors of each, the one that is scaled, and their names in the model and in files.

The reader of files (`files.py`) has its own table of names on purpose: it checks what was written by this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ADAPTER = "default"
"""peft's name of the only adapter: part of parameter names inside the model, not of names in files."""

Kind = Literal["lora", "dora", "loha", "lokr", "diag-oft", "boft"]


@dataclass(frozen=True)
class KindTable:
    """One kind of adapter.

    Attributes:
        tensors: Names of the tensors; several sets where factors may be whole or written as a product.
        scaled: Tensors that take a factor of the update: the one of them that the adapter has. Empty for rotations.
        parameters: {tensor: the parameter's name below its layer}.
        lycoris: {tensor: its name in LyCORIS' and kohya's files}. The magnitude of a dora depends on the format.
        peft: {tensor: its name in peft's and diffusers' files}; empty where they cannot carry the kind.
    """

    tensors: tuple[tuple[str, ...], ...]
    scaled: tuple[str, ...]
    parameters: Mapping[str, str]
    lycoris: Mapping[str, str]
    peft: Mapping[str, str]

    @classmethod
    def of_product(cls, prefix: str, scaled: tuple[str, ...], *tensors: tuple[str, ...]) -> KindTable:
        """Make a kind whose names are `prefix` and the tensor's name everywhere."""
        names = {name: f"{prefix}_{name}" for names in tensors for name in names}
        return cls(tensors, scaled, {key: f"{name}.{ADAPTER}" for key, name in names.items()}, names, names)


_LORA_PARAMETERS = {"down": f"lora_A.{ADAPTER}.weight", "up": f"lora_B.{ADAPTER}.weight"}
_LORA_LYCORIS = {"down": "lora_down.weight", "up": "lora_up.weight"}
_LORA_PEFT = {"down": "lora_A.weight", "up": "lora_B.weight"}
_ROTATION = KindTable((("blocks",),), (), {"blocks": f"oft_blocks.{ADAPTER}"}, {"blocks": "oft_blocks"}, {})

KINDS: Mapping[Kind, KindTable] = {
    "lora": KindTable((("down", "up"),), ("up",), _LORA_PARAMETERS, _LORA_LYCORIS, _LORA_PEFT),
    "dora": KindTable(
        (("down", "up", "magnitude"),),
        ("up",),
        _LORA_PARAMETERS | {"magnitude": f"lora_magnitude_vector.{ADAPTER}.weight"},
        _LORA_LYCORIS,
        _LORA_PEFT,
    ),
    "loha": KindTable.of_product("hada", ("w1_a",), ("w1_a", "w1_b", "w2_a", "w2_b")),
    "lokr": KindTable.of_product(
        "lokr",
        ("w1", "w1_a"),
        ("w1", "w2"),
        ("w1", "w2_a", "w2_b"),
        ("w1_a", "w1_b", "w2"),
        ("w1_a", "w1_b", "w2_a", "w2_b"),
    ),
    "diag-oft": _ROTATION,
    "boft": _ROTATION,
}
ROTATIONS: tuple[Kind, ...] = ("diag-oft", "boft")
