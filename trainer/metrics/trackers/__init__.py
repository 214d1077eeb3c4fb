"""Experiment trackers (TensorBoard, wandb, trackio): a thread each on rank 0, which reads the run folder (`follow.py`).

Training never waits for one. `python -m trainer.metrics.trackers RUN_DIR NAME` sends what a tracker has not received.
See DECISIONS 113.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from trainer.config.schema import RunConfig
from trainer.config.sections import TrackersConfig
from trainer.system.errors import InputError, Problem

_SECRET = re.compile(
    r"""(?ix)
    ( (?:token|key|password|secret|authorization) (?!error) \w* [\\"']* \s* [=:] \s* [\\"']* (?:(?:bearer|basic)\s+)?
    | \b bearer \s+
    ) [^\s&'"\\]+
    | (?<=//) [^\s/@]+ @                       # user:password@ in an address
    | \b (?: hf_[a-z0-9]{20,} | [0-9a-f]{40} | wandb_v\d_\w+ ) \b  # of the Hub, of wandb
    """
)


def missing(cfg: TrackersConfig) -> list[Problem]:
    """A problem for every tracker of the config whose package is not installed."""
    return [
        Problem(f"trackers.{name}", f"true needs the package {package}; pip install {package}")
        for name in cfg.wanted
        if (package := cfg.packages[name]) and not _is_installed(package)
    ]


def require(cfg: TrackersConfig) -> None:
    """Raise InputError with the command that installs a tracker's package, if one is missing."""
    for problem in missing(cfg):
        raise InputError(str(problem))


def without_secrets(text: str) -> str:
    """A library's message with `***` in place of tokens, keys and passwords."""
    return _SECRET.sub(r"\1***", text)


def short(text: str) -> str:
    """A library's message in one line of at most 500 characters, without secrets."""
    return " ".join(without_secrets(text).split())[:500]


def shown_config(cfg: RunConfig) -> dict[str, Any]:
    """The config as trackers get it: without `cluster`, which names accounts, volumes and registries of a site."""
    return cfg.model_dump(mode="json", exclude={"cluster"})


def _is_installed(package: str) -> bool:
    """Whether the package exists. A mere folder of that name, such as wandb makes, is found too but has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
