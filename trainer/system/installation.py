"""Where the program's files are and how to start it: from a checkout, or installed by pip. Standard library only.

The wheel holds the top-level folder `presets` as `trainer/presets` (`[tool.setuptools]` in pyproject.toml). An editable
install counts as a checkout. An installation may be read-only, so nothing is written there. See DECISIONS 143.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

COMMAND = "shardstudio"
"""The console script."""
_INSTALLED_PRESETS = Path(__file__).parents[1] / "presets"
CHECKOUT = None if _INSTALLED_PRESETS.is_dir() else Path(__file__).parents[2]
"""The root of the checkout; None if the program is installed from a wheel."""
PRESETS = CHECKOUT / "presets" if CHECKOUT else _INSTALLED_PRESETS

EXTRAS = {"adamw8bit": ("torchao", "eightbit")}
"""{value of `optim.type`: (package, extra that installs it)}. Not installed with the project: diffusers and peft import
torchao wherever they find it, which takes a second."""


def user_folder(variable: str, usual: str) -> Path | None:
    """Return a folder of this program below one of the user's own; None for a user without a home.

    Args:
        variable: Names the folder where it is set to a whole path, for example XDG_CACHE_HOME.
        usual: The folder below the home otherwise, for example .cache.
    """
    with suppress(RuntimeError):
        named = os.environ.get(variable, "")
        return (Path(named) if os.path.isabs(named) else Path.home() / usual) / "shardstudio"
    return None


def notices_file() -> Path | None:
    """Return the file that says where the end of a run is told, which need not exist (`launcher.notices`)."""
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return folder / "notices.json" if folder else None


def missing_package(optimizer: str) -> str:
    """Return why an optimizer cannot be used here: its package is not installed; "" if nothing is missing."""
    package, extra = EXTRAS.get(optimizer, ("", ""))
    if not package or importlib.util.find_spec(package):
        return ""
    return f"{optimizer} needs the package {package}; pip install 'shardstudio[{extra}]', or use adamw"


def program() -> str:
    """Return the command that starts the program, for help and examples: the one it was started with, if known."""
    return COMMAND if CHECKOUT is None or Path(sys.argv[0]).name == COMMAND else "python launch.py"


def start_command() -> list[str]:
    """Return the command that starts the program from any folder and shell, for example in a cluster job."""
    if CHECKOUT:
        return [sys.executable, str(CHECKOUT / "launch.py")]
    script = Path(sys.executable).with_name(COMMAND)  # pip puts it elsewhere for --user and --target
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "app"]
