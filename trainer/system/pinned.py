"""Pinned (page-locked) host memory, which a GPU reads by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def pin(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy of a CPU tensor in pinned memory; the tensor itself where `device` is the CPU."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy of a CPU tensor on the device, behind the work that it was given so far.

    The host does not wait: from other memory it would, until the device has come so far.
    """
    return pin(tensor, device).to(device, non_blocking=True)
