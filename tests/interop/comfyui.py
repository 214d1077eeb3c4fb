"""ComfyUI's own code for adapter files, run in a process of its own: `python comfyui.py TREE JOBS.json`.

Only what names, reads and applies adapters is loaded from the source tree; the modules below it that manage devices
and models are replaced by empty ones. A job is {"model", "kind", "config", "adapter", "to"}: a safetensors file with
the model's weights under its original names (the denoiser's after `diffusion_model.`, the text encoders' after
`clip_l.` and `clip_g.`), the name of ComfyUI's class for it, that class's config, the adapter file, and where to write
the weights that it changed. The metadata of that file tell what went wrong. Magnitudes for peft may go unused.
"""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

UNUSED = "lora key not loaded: "


class Empty(types.ModuleType):
    """A module in which every name is a class without content."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return self.__dict__[name]


class NoOptions:
    """Command-line options that are all off."""

    def __getattr__(self, name: str) -> bool:
        return False


class Model:
    """What ComfyUI asks of a model to name its weights."""

    def __init__(self, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        self._weights = weights
        self.model_config = types.SimpleNamespace(unet_config=config)

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights


class Log(logging.Handler):
    """Collects what ComfyUI says of keys it does not use, and raises what it logs as an error."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            raise RuntimeError(message)
        if message.startswith(UNUSED):
            self.keys.append(message.removeprefix(UNUSED))


def load_tree(tree: Path) -> Any:
    """ComfyUI's package with the modules it is not asked for left empty."""
    sys.path.insert(0, str(tree))
    import comfy  # type: ignore[import-not-found]

    for name in ("model_management", "model_base", "cli_args", "memory_management", "patcher_extension"):
        module = Empty(f"comfy.{name}")
        sys.modules[module.__name__] = module
        setattr(comfy, name, module)
    comfy.cli_args.args = NoOptions()
    comfy.model_management.cast_to_device = lambda tensor, device, dtype, copy=False: tensor.to(device, dtype)
    import comfy.lora
    import comfy.lora_convert

    return comfy


def apply(comfy: Any, job: dict[str, Any], log: Log) -> None:
    """One job."""
    weights = load_file(job["model"])
    encoders = {name: tensor for name, tensor in weights.items() if name.startswith("clip_")}
    denoiser = {name: tensor for name, tensor in weights.items() if name not in encoders}
    kind = getattr(comfy.model_base, job["kind"])
    model = type("Tiny", (kind, Model), {})(denoiser, job["config"])
    names = comfy.lora.model_lora_keys_unet(model, {})
    names = comfy.lora.model_lora_keys_clip(Model(encoders, {}), names)
    log.keys.clear()
    patches = comfy.lora.load_lora(comfy.lora_convert.convert_lora(load_file(job["adapter"])), names)
    changed: dict[str, Tensor] = {}
    for target, patch in patches.items():
        # A part of a weight is (name, (dim, start, length)), and may have a function that reorders the update.
        name, offset, function = (*target, None)[:3] if isinstance(target, tuple) else (target, None, None)
        weight = changed.get(name, weights[name]).clone()
        offset = tuple(map(int, offset)) if offset else None
        changed[name] = comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, function)], weight, name)
    unused = [key for key in log.keys if "lora_magnitude_vector" not in key]
    error = f"{len(unused)} keys are not used, first {unused[0]}" if unused else ""
    save_file(changed, job["to"], {"error": error})


def main() -> None:
    tree, jobs = map(Path, sys.argv[1:])
    comfy = load_tree(tree)
    log = Log()
    logging.basicConfig(handlers=[log], force=True)
    with torch.no_grad():
        for job in json.loads(jobs.read_text(encoding="utf-8")):
            try:
                apply(comfy, job, log)
            except Exception as error:  # noqa: BLE001  the caller tells which file it was
                save_file({}, job["to"], {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
