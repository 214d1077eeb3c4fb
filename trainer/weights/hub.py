"""Find a model's folder: local, or in the Hugging Face cache. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.config.errors import InputError
from trainer.config.sections import HUB_ID


def find_folder(field: str, path: str) -> Path:
    """Find the folder that a config field names: a local one, or a hub id's snapshot in the local Hugging Face cache.

    Nothing is downloaded. Raises InputError with the download command for a hub id that is not cached. A local folder
    that does not exist is left to `read_json`, whose error says what was expected in it.
    """
    if os.path.exists(path) or not HUB_ID.fullmatch(path):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{field} {path}: neither a folder nor in the local Hugging Face cache. "
            f"Download it with `hf download {path}`, name a diffusers folder, or set model.path: tiny"
        ) from error
