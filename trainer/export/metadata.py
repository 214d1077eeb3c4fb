"""Pairs of strings in a file's header that other programs display. Loaders do not need them."""

from __future__ import annotations

import datetime
import json

from trainer.config.schema import RunConfig
from trainer.config.sections import BoftAdapter, DiagOftAdapter, NoAdapter
from trainer.models.base import ModelFamily
from trainer.models.pissa import starts_from_singular_values

NETWORK_MODULES = {"lora": "networks.lora", "locon": "lycoris.kohya", "dora": "networks.lora"}


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
    size = adapter.block_size if isinstance(adapter, DiagOftAdapter | BoftAdapter) else adapter.rank
    if starts_from_singular_values(cfg):
        size *= 2
    return model_metadata(cfg, family) | {
        "modelspec.architecture": f"{family.model_spec}/{adapter.type}",
        "ss_base_model_version": family.model_spec,
        "ss_network_module": NETWORK_MODULES.get(adapter.type, "lycoris.kohya"),
        "ss_network_dim": str(size),
        "ss_network_alpha": str(size),
        "ss_network_args": json.dumps({"algo": adapter.type}),
        "ss_output_name": cfg.name,
        "ss_steps": str(step),
        "ss_learning_rate": str(cfg.optim.lr),
        "ss_seed": str(cfg.train.seed),
        **family.adapter_metadata,
    }
