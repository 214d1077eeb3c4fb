"""Reference images of a drawing: what is refused before a process is started. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config import families
from trainer.config.load import similar_name
from trainer.config.schema import RunConfig
from trainer.data.images.image_io import read_header
from trainer.models import editing
from trainer.run.drawings import MOST_REFERENCES, DrawingRequest, check_request, references_of
from trainer.run.folder import RunDir
from trainer.system.amounts import counted
from trainer.system.errors import InputError


def check_drawing(run: RunDir, request: DrawingRequest) -> RunConfig:
    """Return the config to draw with, as `check_request`.

    Raises:
        InputError: As `check_request`, or a reference image cannot be read, or not by this model.
    """
    cfg = check_request(run, request)
    for files in dict.fromkeys(references_of(run, request, cfg)):
        _check(cfg, files)
    return cfg


def _check(cfg: RunConfig, files: Sequence[Path]) -> None:
    if not files:
        return
    known, kind = families.of(cfg.model.family), editing.kind_of(cfg.model)
    if known is not None and not known.reads_references:
        raise InputError(
            f"reference: {files[0]}: models of family {cfg.model.family} read no reference images; leave it out"
        )
    if known is not None and known.edits and kind is None:
        names = " or ".join(one.model for one in known.edits)
        raise InputError(
            f"reference: {files[0]}: {cfg.model.path} reads no reference images, as {names} does; leave it out"
        )
    most = MOST_REFERENCES if kind is None else kind.references
    if len(files) > most:
        reader = "a drawing" if kind is None else kind.model
        raise InputError(f"reference: {len(files)} files, but {reader} reads {counted(most, 'image')}; give fewer")
    for file in files:
        if file.is_dir():
            raise InputError(f"reference: '{file}' is a folder; name an image")
        if not file.is_file():
            raise InputError(f"reference: no file '{file}'{similar_name(file) or '; name an image'}")
        try:
            read_header(file)
        except InputError as error:
            raise InputError(f"reference: {error}") from error
