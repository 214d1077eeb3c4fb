"""dora: a low-rank change of the direction of each row of a weight, and trained lengths of the rows.

See DECISIONS 52, 54.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.adapters.base import SHORTEST, Shape, Tensors, Weight
from trainer.adapters.engine import ADAPTER, Linear, LoraConfig, LoraLayer, LoraVariant, PeftConfig
from trainer.adapters.lora import LoraKind, LoraReader, configured
from trainer.adapters.replace import Layer
from trainer.config.sections import AdapterSection, DoraAdapter, LowRankAdapter
from trainer.system.errors import InputError

COMFYUI_EPS = torch.finfo(torch.float32).eps
"""Added by ComfyUI to the length of a row before it divides by that length."""


def dora_layer(layer: Layer, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
    """Make peft's layer with the magnitudes of `RowLengths`. layer: a linear layer."""
    return configured(_DoraLinear(layer, ADAPTER, LoraConfig(use_dora=True), r=rank), scale, dropout)


class RowLengths(nn.Module):
    """The trained row lengths of dora, as differences from the row lengths of the base's weight.

    Under bf16 compute parameters are rounded to bf16: whole lengths would be off by up to 0.4 %, and the adapter would
    not start as a no-op.

    Attributes:
        weight: (out,).
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def forward(self, base: Layer, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return g - 1, where g scales each row of V = W + scale * up @ down to its trained length.

        The length of V is a constant in backward (DoRA, arXiv 2402.09353, sec. 4.3). V itself is never built:
        |V|^2 = |W|^2 + 2 scale <up, W down^T> + scale^2 <up, up G> row by row, with G = down down^T.

        Args:
            base: The layer with W, (out, in), which is decoded here where it is stored in fewer bits.
            down: (r, in).
            up: (out, r).
            scale: Factor of the update.

        Returns:
            (out,), fp32.
        """
        with torch.no_grad():
            weight = base.weight
            length = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
            rows, gram = scale * up.float(), down.float() @ down.float().T
            grown = (rows * (2 * (weight @ down.to(weight.dtype).T).float() + rows @ gram)).sum(dim=1)
            new = (length.square() + grown).clamp_min(SHORTEST**2).sqrt()
            # |W| - |V| without the cancellation.
            shorter = -grown / (length + new)
        excess: Tensor = (shorter + self.weight.float()) / new
        return excess


class _Dora(LoraVariant):  # type: ignore[misc]
    @staticmethod
    def init(module: Linear, adapter_name: str, **_: Any) -> None:
        module.lora_magnitude_vector[adapter_name] = RowLengths(module.out_features)

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale = module.scaling[active_adapter]
        base = module.get_base_layer()
        excess = module.lora_magnitude_vector[active_adapter](base, down.weight, up.weight, scale)
        update: Tensor = up(scale * down(module.lora_dropout[active_adapter](x)))
        result = result + update.to(result.dtype)
        unbiased = result if base.bias is None else result - base.bias
        # g * y as y + (g - 1) * y: bf16 keeps 8 significant bits, and those of g - 1 are finer than those of g near 1.
        return torch.addcmul(result, excess.to(result.dtype), unbiased)


class _DoraLinear(Linear):  # type: ignore[misc]
    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LoraVariant]]:
        return {("use_dora",): _Dora}


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row, (out,), fp32."""
    lengths: Tensor = weight.detach().float().norm(dim=1)
    return lengths


class DoraKind(LoraKind):
    """The rows of W + scale * up @ down, each scaled to the length in magnitude (out,). See DECISIONS 62."""

    name = "dora"
    sections = (DoraAdapter,)
    parameters: ClassVar = {**LoraKind.parameters, "magnitude": f"lora_magnitude_vector.{ADAPTER}.weight"}
    zero = frozenset({"up", "magnitude"})
    adds = False
    whole_rows = True
    # bf16 rounds the length of a row by up to 0.2 %, which may be more than the update.
    kept_exact = ("dora_scale", "lora_magnitude_vector")
    is_corrected = True

    def layer(self, layer: Layer, cfg: LowRankAdapter, rank: int, scale: float, dropout: nn.Module) -> LoraLayer:
        return dora_layer(layer, rank, scale, dropout)

    def reason_against(self, layer: Layer, cfg: AdapterSection) -> str:
        return "dora changes linear layers only"

    def saves_no_activations(self, module: nn.Module) -> bool:
        return isinstance(module, RowLengths)

    def from_parameters(self, parameters: Tensors, weight: Weight) -> dict[str, Tensor]:
        return {**parameters, "magnitude": row_lengths(weight()) + parameters["magnitude"]}

    def to_parameters(self, tensors: Tensors, weight: Weight) -> dict[str, Tensor]:
        return {**tensors, "magnitude": tensors["magnitude"] - row_lengths(weight())}

    def merge(self, weight: Tensor, tensors: Tensors, scale: float) -> None:
        super().merge(weight, tensors, scale)
        magnitude = tensors["magnitude"].detach().float()
        weight *= (magnitude / weight.norm(dim=1).clamp_min(SHORTEST)).view(-1, 1)

    def lycoris_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        scale = _as_column(tensors["magnitude"], tensors["down"])
        return super().lycoris_tensors(tensors) | {"dora_scale": scale}

    def peft_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        convolves, magnitude = tensors["down"].dim() > 2, tensors["magnitude"]
        name = "lora_magnitude_vector.weight"
        return super().peft_tensors(tensors) | {name: magnitude.view(1, -1, 1, 1) if convolves else magnitude}

    def peft_config(
        self, layers: Sequence[Tensors], sizes: Callable[[], Sequence[Shape]], shared: dict[str, Any]
    ) -> PeftConfig:
        return LoraConfig(lora_alpha=shared["r"], use_dora=True, **shared)

    def corrected(self, tensors: Tensors, weight: Tensor) -> dict[str, Tensor]:
        """Return m (||W|| + eps) / ||W + dW|| by rows, shape (out, 1[, 1, 1]). See DECISIONS 63.

        ComfyUI divides by ||W|| + eps where the definition, peft and LyCORIS divide by ||W + dW||. The correction is
        right for a row of zeros in W too. No other code depends on this. Comfy-Org/ComfyUI pull request 15458 fixes
        ComfyUI: then this file's `dora_scale` is wrong, and `writer.DORA_CONVENTION` in its metadata says which files
        are affected.
        """
        rows = weight.float().flatten(1)
        turned = rows + self.update(tensors, 1.0).flatten(1)
        factor = (rows.norm(dim=1) + COMFYUI_EPS) / turned.norm(dim=1).clamp_min(SHORTEST)
        return {"dora_scale": _as_column(tensors["magnitude"].float() * factor, tensors["down"])}


def _as_column(magnitude: Tensor, down: Tensor) -> Tensor:
    """Reshape (out,) to (out, 1[, 1, 1]): ComfyUI would broadcast a vector over the columns."""
    return magnitude.view(-1, *[1] * (down.dim() - 1))


class DoraReader(LoraReader):
    kind = "dora"
    styles = (
        {
            "lora_A.weight": "down",
            "lora_B.weight": "up",
            "lora_magnitude_vector": "magnitude",
            "lora_magnitude_vector.weight": "magnitude",
        },
        {"lora_down.weight": "down", "lora_up.weight": "up", "dora_scale": "dora_scale"},
    )
    complete = (("down", "up", "magnitude"),)
    vectors = ("magnitude",)
    by_rows = ("up", "magnitude")

    def named(self, layer: str, tensors: Tensors) -> dict[str, Tensor]:
        scale = tensors.get("dora_scale")
        if scale is not None and scale.dim() > 1 and scale.shape[0] == 1 and scale.numel() > 1:
            raise InputError(
                f"'{layer}.dora_scale' ({' x '.join(map(str, scale.shape))}) scales the inputs of its layer; "
                "only a dora that scales the outputs can be read"
            )
        magnitude = tensors.get("magnitude", scale)
        assert magnitude is not None
        return {name: tensors[name] for name in ("down", "up") if name in tensors} | {"magnitude": magnitude.flatten()}

    def part(self, tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors)

    def may_be_corrected(self, ends: Collection[str]) -> bool:
        return "dora_scale" in ends and not any("magnitude" in end for end in ends)

    def uncorrected(self, tensors: Tensors, weight: Tensor, turned: Tensor) -> dict[str, Tensor]:
        """The magnitude m was stored as m (||W|| + eps) / ||W + dW||."""
        length = weight.norm(dim=1) + torch.finfo(torch.float32).eps
        return {**tensors, "magnitude": tensors["magnitude"].float() * turned.norm(dim=1) / length}


KIND, READER = DoraKind(), DoraReader()
