"""ShardStudio's command line. It imports no torch: a run is checked and started in a fraction of a second."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args


def not_installed(error: ModuleNotFoundError) -> str:
    """What a Python without the project's packages is told."""
    return (
        f"{sys.executable} has no module '{error.name}': it is not the Python ShardStudio is installed in. "
        "Run `make .venv`, then .venv/bin/python launch.py"
    )


try:
    from trainer.config import ExportConfig, InputError
except ModuleNotFoundError as missing:
    print(not_installed(missing), file=sys.stderr)
    sys.exit(2)

EPILOG = """\
examples:
  python launch.py --headless presets/quickstart.yaml
  python launch.py --headless presets/quickstart.yaml train.steps=200 optim.lr=2e-4 --run-dir runs/second
  python launch.py --resume runs/second train.steps=400
  python launch.py --export runs/second --what merged

exit codes: 0 done, 1 the run failed, 2 the config or the input is wrong, 130 stopped
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    try:
        return _dispatch(options, parser)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(not_installed(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Fine-tune image models that do not fit on one GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # The modes' values may be missing for argparse, so that `--headless --help` is help and not an error.
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--headless", nargs="?", const="", metavar="PRESET", help="train a preset, export at the end")
    modes.add_argument(
        "--resume", nargs="?", const="", metavar="RUN_DIR", help="continue a run from its newest checkpoint"
    )
    modes.add_argument("--export", nargs="?", const="", metavar="RUN_DIR", help="export a run's newest checkpoint")
    modes.add_argument("--doctor", action="store_true", help="check Python, packages, GPUs, disk, memory and ports")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that replace those of the config")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are made")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="make this very run folder (--headless)")
    parser.add_argument("--what", choices=_choices("what"), default="auto", help="what is written (--export)")
    parser.add_argument(
        "--format", choices=_choices("format"), default="diffusers", help="its layout; there is one so far"
    )
    return parser


def _choices(field: str) -> list[str]:
    return [value for value in get_args(ExportConfig.model_fields[field].annotation) if value != "none"]


def _dispatch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    for mode, value in (("headless", "PRESET"), ("resume", "RUN_DIR"), ("export", "RUN_DIR")):
        if getattr(options, mode) == "":
            parser.error(f"--{mode} needs {value}")
    if options.headless is None and options.resume is None and options.overrides:
        parser.error(f"{options.overrides[0]}: only --headless and --resume take key=value")
    if options.doctor:
        from trainer import doctor

        return doctor.examine(options.runs)
    if options.headless is None and options.resume is None and options.export is None:
        raise InputError("the page is not in this version; train with: python launch.py --headless PRESET.yaml")
    return _headless(options)


def _headless(options: argparse.Namespace) -> int:
    from trainer import headless

    if options.resume is not None:
        return headless.resume(Path(options.resume), options.overrides)
    if options.export is not None:
        return headless.export(Path(options.export), options.what)
    return headless.train(Path(options.headless), options.overrides, options.runs, options.run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
