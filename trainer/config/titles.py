"""The names of model and method that people use, on every screen, in the report and on the model card."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.models import published_models
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, MODEL_WORDS, NoAdapter, RankAdapter

METHODS = {kind: adapter.title for kind, adapter in ADAPTERS.items()}
"""{`adapter.type`: its name}"""


def model_title(path: str, family: str) -> str:
    """Return the name of a model as every screen shows it: "FLUX.2 dev", or of a folder its last part.

    Args:
        path: `model.path` of a config.
        family: Its `model.family`, which tells the tiny models of the tests apart.
    """
    known = published_models().get(path)
    if known:
        return known.name
    if path in MODEL_WORDS:
        return f"{path.capitalize()} model ({family})"
    return path.rstrip("/").rpartition("/")[2] or path


def method_title(cfg: RunConfig, is_sized: bool = False) -> str:
    """Return method and base of a config: "LoRA, nf4 base", or with its size "LoRA rank 16, nf4 base"."""
    method = METHODS[cfg.adapter.type]
    if is_sized and isinstance(cfg.adapter, RankAdapter):
        method += f" rank {cfg.adapter.rank}"
    if isinstance(cfg.adapter, NoAdapter) or cfg.quantize.format == "none":
        return method
    return f"{method}, {cfg.quantize.format} base"


def size_title(sides: Sequence[int]) -> str:
    """Return the resolutions of a run's images in words: "1024 px", or "512, 768 and 1024 px"."""
    *some, last = map(str, sides)
    return f"{', '.join(some)} and {last} px" if some else f"{last} px"
