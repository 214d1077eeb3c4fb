"""Pairs of strings in a file's header that other programs display. Loaders do not need them."""

from __future__ import annotations

import datetime
import json

from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ModelFamily


def model_metadata(cfg: RunConfig, family: ModelFamily) -> dict[str, str]:
    """Return the pairs of a whole model. Source of the names: the modelspec standard, version 1.0.1."""
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": family.model_spec,
        "modelspec.title": cfg.name,
        "modelspec.implementation": "diffusers",
        "modelspec.resolution": "{0}x{0}".format(cfg.data.all_sides[-1]),
        "modelspec.date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "modelspec.trigger_phrase": cfg.data.trigger,
        **family.file_metadata,
    }


def adapter_metadata(cfg: RunConfig, family: ModelFamily, step: int) -> dict[str, str]:
    """Return the pairs of an adapter after `step` steps, with kohya's `ss_` names, which most programs list.

    Captions are left out: they may be private.
    """
    assert not isinstance(cfg.adapter, NoAdapter)
    adapter = cfg.adapter
    size = adapter.size
    if size is not None and adapter.takes_from_base:
        size *= 2  # the export adds the difference to the whole base
    sizes = {} if size is None else {"ss_network_dim": str(size), "ss_network_alpha": str(size)}
    return model_metadata(cfg, family) | {
        "modelspec.architecture": f"{family.model_spec}/{adapter.type}",
        "ss_base_model_version": family.model_spec,
        "ss_network_module": adapter.network_module,
        **sizes,
        "ss_network_args": json.dumps({"algo": adapter.type}),
        "ss_output_name": cfg.name,
        "ss_steps": str(step),
        "ss_learning_rate": str(cfg.optim.lr),
        "ss_seed": str(cfg.train.seed),
        **family.adapter_metadata,
    }
