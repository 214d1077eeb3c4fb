"""Start the ranks of a captioning job. Imports no torch."""

from __future__ import annotations

import json

from trainer.config.models import captioners
from trainer.launcher import torchrun
from trainer.run import process
from trainer.run.captioning import MODULE, CaptionJob
from trainer.system import files
from trainer.system.errors import InputError
from trainer.weights.hub import find_folder

EXAMPLE = "Qwen/Qwen2.5-VL-3B-Instruct"
ENDS_WITHIN_S = 60.0
"""A job has said that it ended a moment before its processes end."""


def start(job: CaptionJob) -> None:
    """Start or continue a job in a session of its own, and return at once.

    Raises:
        InputError: It is running, or a GPU is missing.
    """
    process.wait(job.run, ENDS_WITHIN_S)
    torchrun.start(job.request.config(), job.run, MODULE)


def check_model(path: str) -> None:
    """Raise InputError for what cannot be a model that describes images, before a process is started for it."""
    try:
        folder = find_folder("--model", path)
    except InputError as error:
        offered = captioners().get(path)
        how = f"on the screen Data, or with `{offered.download_command}`" if offered else f"with `hf download {path}`"
        raise InputError(
            f"--model {path}: neither a folder nor complete in the local Hugging Face cache; download it {how}, or "
            "name a folder of transformers, or demo"
        ) from error
    try:
        config = json.loads(files.read(folder / "config.json"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"--model {path}: no config.json; name a folder of transformers with a model that describes images, or a "
            f"hub id that is downloaded, for example {EXAMPLE}; or demo"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{folder / 'config.json'}: not valid JSON ({error}); download it again") from error
    if isinstance(config, dict) and "auto_map" in config:
        raise InputError(
            f"{folder / 'config.json'}: brings code of its own (auto_map), which is never run; name a copy for "
            "transformers, as florence-community/Florence-2-base is for Florence-2"
        )
