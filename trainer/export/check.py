"""Checks before the first step whether a run's export can be written. See DECISIONS 59."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.adapters.formats.writer import adapter_files
from trainer.adapters.state import TrainedAdapter
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ModelFamily
from trainer.models.pissa import factors_of, starts_from_singular_values
from trainer.models.saved_modules import saved_modules, saved_tensors
from trainer.models.state_dict import BaseWeights, naming
from trainer.system.errors import InputError


def check_export(cfg: RunConfig, family: ModelFamily, trainables: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Build the adapter's files from tensors without data, so that the writer refuses what it would refuse later.

    Args:
        cfg: The run's config.
        family: The run's family.
        trainables: {parameter: trained parameter}.

    Returns:
        Sentences for the log.

    Raises:
        InputError: `export.format` does not fit the family or the adapter's sizes; or users' programs load another
            base for the adapter than the one that is trained.
    """
    notes = _of_fewer_bits(cfg)
    if cfg.export_what != "adapter":
        return notes
    assert not isinstance(cfg.adapter, NoAdapter)
    base = BaseWeights(family)
    for component in family.live:
        try:
            family.loaded_by_users(component, family.component_folder(component), numbers=False)
        except RuntimeError as error:
            raise InputError(str(error)) from error
    # The writer itself is asked, with tensors that have no data: no second list of what a format can carry.
    with torch.device("meta"):
        weights = {name: torch.empty(p.shape) for name, p in trainables.items()}

        def weight(name: str) -> Tensor:
            return torch.empty(base.layer_shape(name))

        initial = factors_of(weights) if starts_from_singular_values(cfg) else None
        layers = TrainedAdapter(weights, cfg.adapter, weight, initial=initial)
        saved = saved_tensors(saved_modules(cfg, family), weights, base)
        files = adapter_files(layers, cfg.export.format, naming(family), weight, torch.float32, saved)
    readers = {reader for file in files for reader in file.readers}
    if cfg.export.format != "auto" or "diffusers" in readers or family.peft_fields is not None:
        return notes
    no_file = f"export.format: auto writes no file of this {cfg.adapter.type} for diffusers; export.what: merged does"
    return (*notes, no_file)


def _of_fewer_bits(cfg: RunConfig) -> tuple[str, ...]:
    if cfg.quantize.format == "none" or cfg.export_what not in ("adapter", "merged"):
        return ()
    what = "merged with" if cfg.export_what == "merged" else "for"
    return (
        f"the adapter is trained on a base in {cfg.quantize.format}; the export is {what} the base as its files store "
        "it, so that its loss differs a little from that of the run",
    )
