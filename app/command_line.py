"""ShardStudio's command line. It imports no torch: a run is checked and started in a fraction of a second."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from trainer.config.errors import InputError
from trainer.config.installation import program
from trainer.config.presets import preset_file
from trainer.config.sections import ExportConfig
from trainer.config.terminal import complain, not_installed, printable, say

TAKEN_BY = {
    "run_dir": ("headless",),
    "slurm": ("headless",),
    "kubernetes": ("headless",),
    "node_rank": ("resume", "join"),
    "what": ("export",),
    "format": ("export", "extract"),
    "dtype": ("export", "extract"),
    "base": ("extract",),
    "family": ("extract",),
    "rank": ("extract",),
    "to": ("extract",),
    "gpus": ("plan",),
    "json": ("plan",),
    "exactly": ("plan",),
    "name": (),
    "auth_file": (),
}
"""{option: the modes that take it}; the page alone takes what none does."""
TAKE_OVERRIDES = ("headless", "plan", "resume", "join")
MODES_WITH_VALUE = {
    "headless": "PRESET",
    "plan": "PRESET",
    "resume": "RUN_DIR",
    "join": "RUN_DIR",
    "export": "RUN_DIR",
    "extract": "TUNED",
}
"""{mode: what it is given}"""
EPILOG = """\
examples:
  {program} --headless quickstart
  {program} --headless quickstart train.steps=200 optim.lr=2e-4 --run-dir runs/second
  {program} --plan quickstart train.micro_batch=8 --gpus 2x24gb
  {program} --resume runs/second train.steps=400
  {program} --join runs/big --node-rank 1
  {program} --headless quickstart --slurm
  {program} --export runs/second --what merged
  {program} --extract TUNED --base BASE --family FAMILY --rank 32 --to lora.safetensors

exit codes: 0 done, 1 the run failed, 2 the config or the input is wrong, 130 stopped
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    try:
        return _dispatch(options, parser)
    except InputError as error:
        complain(error)
        return 2
    except ModuleNotFoundError as error:
        complain(not_installed(error))
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program().removeprefix("python "),
        description="Fine-tune image and language models that do not fit on one GPU.",
        epilog=EPILOG.format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_modes(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that replace those of the config")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are made")
    _add_page_options(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="make this very run folder (--headless)")
    _add_node_options(parser)
    parser.add_argument("--what", choices=_choices("what"), help="what is written (--export); default: the run's own")
    parser.add_argument(
        "--format",
        choices=_choices("format"),
        help="its layout and names (--export, --extract); default: the run's own, or auto",
    )
    parser.add_argument(
        "--dtype", choices=_choices("dtype"), help="its numbers (--export, --extract); default: the run's own, or bf16"
    )
    parser.add_argument("--base", metavar="BASE", help="the checkpoint that TUNED was made from (--extract)")
    parser.add_argument("--family", metavar="FAMILY", help="their kind of model (--extract)")
    parser.add_argument("--rank", metavar="RANK", help="rank of the lora (--extract)")
    parser.add_argument("--to", metavar="FILE.safetensors", help="where it is written (--extract)")
    parser.add_argument(
        "--gpus", metavar="NxCARD", help="GPUs to plan for, as 4x24gb (--plan); default: this machine's"
    )
    parser.add_argument("--json", action="store_const", const=True, help="the plan for programs (--plan)")
    parser.add_argument(
        "--exactly", action="store_const", const=True, help="trace the whole model besides: half a minute (--plan)"
    )
    return parser


def _add_modes(parser: argparse.ArgumentParser) -> None:
    # The modes' values may be missing for argparse, so that `--headless --help` is help and not an error.
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--headless",
        nargs="?",
        const="",
        metavar="PRESET",
        help="train a preset, by its name or a file, export at the end",
    )
    modes.add_argument(
        "--plan", nargs="?", const="", metavar="PRESET", help="what a preset takes on each GPU, and whether it fits"
    )
    modes.add_argument(
        "--resume", nargs="?", const="", metavar="RUN_DIR", help="continue a run from its newest checkpoint"
    )
    modes.add_argument(
        "--join", nargs="?", const="", metavar="RUN_DIR", help="be another node of a run that the first one starts"
    )
    modes.add_argument("--export", nargs="?", const="", metavar="RUN_DIR", help="export a run's newest checkpoint")
    modes.add_argument(
        "--extract",
        nargs="?",
        const="",
        metavar="TUNED",
        help="write a lora of what a checkpoint learned over its base",
    )
    modes.add_argument("--queue", action="store_true", help="start what waits in the queue, one after the other")
    modes.add_argument("--doctor", action="store_true", help="check Python, packages, GPUs, disk, memory and ports")


def _add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, metavar="N", help="port of the page; default: 7860")
    parser.add_argument("--host", metavar="H", help="address of the page; default: this machine alone")
    parser.add_argument(
        "--name",
        action="append",
        metavar="HOST[:PORT]",
        help="name by which others reach the page, as through a proxy with TLS (app/web/proxy); may be repeated",
    )
    password = parser.add_mutually_exclusive_group()
    password.add_argument(
        "--auth-file",
        type=Path,
        metavar="FILE",
        help="who may use the page: one line USER:PASS, readable by its owner only; or set SHARDSTUDIO_AUTH; "
        "needed for another --host",
    )
    password.add_argument(
        "--auth", metavar="USER:PASS", help="the same on the command line, where every user of this machine reads it"
    )


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_mutually_exclusive_group()
    jobs.add_argument(
        "--slurm", action="store_const", const="slurm", help="write a SLURM job instead of starting (--headless)"
    )
    jobs.add_argument(
        "--kubernetes",
        action="store_const",
        const="kubernetes",
        help="write a Kubeflow TrainJob instead of starting (--headless)",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="number of this node (--join, --resume); default: what SLURM or Kubeflow gave it",
    )


def _choices(field: str) -> list[str]:
    return [value for value in get_args(ExportConfig.model_fields[field].annotation) if value != "none"]


def _dispatch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    for mode, value in MODES_WITH_VALUE.items():
        if getattr(options, mode) == "":
            parser.error(f"--{mode} needs {value}")
    if options.overrides and all(getattr(options, mode) is None for mode in TAKE_OVERRIDES):
        parser.error(f"{options.overrides[0]}: only --headless, --plan, --resume and --join take key=value")
    _refuse_unused(options, parser)
    if options.doctor:
        from trainer.launcher import doctor

        return doctor.examine(options.runs)
    if options.extract is not None:
        return _extract(options, parser)
    if options.plan is not None:
        from trainer.launcher import plan_command

        preset = preset_file(options.plan, options.runs / "presets")
        as_json, exactly = bool(options.json), bool(options.exactly)
        return plan_command.show(preset, options.overrides, options.runs, options.gpus, as_json, exactly)
    if options.queue:
        from trainer.launcher import queue

        return queue.run_queue(options.runs, say)
    return _page(options) if _is_page(options) else _headless(options)


def _is_page(options: argparse.Namespace) -> bool:
    """Whether no mode was asked for."""
    return not (options.doctor or options.queue) and all(getattr(options, mode) is None for mode in MODES_WITH_VALUE)


def _page(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("gradio") is None:
        raise InputError("the page needs gradio: pip install 'gradio>=6.31,<7'; --headless needs none")
    from app.web import server

    host, port = options.host or "127.0.0.1", options.port or 7860
    server.serve(options.runs, host, port, options.name or (), options.auth, options.auth_file)
    return 0


def _refuse_unused(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """An option that another mode takes would be passed over."""
    for name, modes in TAKEN_BY.items():
        if getattr(options, name) is None or any(getattr(options, mode) is not None for mode in modes):
            continue
        option = f"--{name.replace('_', '-')}"
        if modes:
            parser.error(f"{option} goes with {' or '.join(f'--{mode}' for mode in modes)} only; leave it out")
        if not _is_page(options):
            parser.error(f"{option} goes with the page only; leave it out")


def _headless(options: argparse.Namespace) -> int:
    from trainer.launcher import commands

    if options.resume is not None:
        return commands.resume(Path(options.resume), options.overrides, options.node_rank)
    if options.join is not None:
        return commands.join(Path(options.join), options.overrides, options.node_rank)
    if options.export is not None:
        return commands.export(Path(options.export), options.what or "auto", options.format, options.dtype)
    preset = preset_file(options.headless, options.runs / "presets")
    scheduler = options.slurm or options.kubernetes
    if scheduler is not None:
        return commands.write_job(preset, options.overrides, options.runs, options.run_dir, scheduler)
    return commands.train(preset, options.overrides, options.runs, options.run_dir)


def _extract(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """In a process of its own, which loads torch."""
    from trainer.run.process import worker_environment

    missing = [f"--{name}" for name in ("base", "family", "rank", "to") if getattr(options, name) is None]
    if missing:
        parser.error(f"--extract needs {', '.join(missing)}")
    argv = [sys.executable, "-m", "trainer.export.extract", "--extract", options.extract, "--base", options.base]
    argv += ["--family", options.family, "--rank", options.rank, "--format", options.format or "auto"]
    argv += ["--dtype", options.dtype or "bf16", "--to", options.to]
    code = subprocess.run(argv, env=worker_environment(), check=False).returncode
    return code if code in (0, 2) else 1
