"""The parts of peft that adapters are made of. Other modules import them from here, because this is the quick way."""

from __future__ import annotations

from trainer.system.imports import light_imports

with light_imports():
    from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig
    from peft.tuners.loha.layer import LoHaLayer
    from peft.tuners.lokr.layer import LoKrLayer, factorization
    from peft.tuners.lora import Conv2d, Linear, LoraLayer
    from peft.tuners.lora.layer import LoraVariant
    from peft.tuners.lycoris_utils import LycorisLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

__all__ = [
    "ADAPTER",
    "BaseTunerLayer",
    "Conv2d",
    "Linear",
    "LoHaConfig",
    "LoHaLayer",
    "LoKrConfig",
    "LoKrLayer",
    "LoraConfig",
    "LoraLayer",
    "LoraVariant",
    "LycorisLayer",
    "PeftConfig",
    "factorization",
]

ADAPTER = "default"
"""peft's name of the only adapter: part of parameter names inside the model, not of names in files."""
