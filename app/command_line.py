"""ShardStudio's command line. It does not import torch, so it checks and starts a run in a fraction of a second."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from trainer.config.load import load_config
from trainer.config.presets import preset_file
from trainer.config.sections import ExportConfig
from trainer.run.captioning import CaptionRequest, Style
from trainer.run.manifest import Wanted
from trainer.system.errors import InputError
from trainer.system.installation import program
from trainer.system.terminal import complain, printable, say

REFUSED_PATHS = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP), "name another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable for you, or name another path"),
}
"""{what the system says of a path: what to do}"""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CAPTION_FIELDS = {
    "model": ("PATH", "folder or downloaded hub id of a vision-language model; demo names pictograms only"),
    "style": ("STYLE", f"{', '.join(get_args(Style))}; default: {CaptionRequest.style}"),
    "prompt": (
        "TEXT",
        "question to the model, instead of the style's instruction; or number of the prompt to film (--film)",
    ),
    "omit": ("WORDS", "subjects that captions leave unmentioned, comma-separated"),
    "trigger": ("", "put [trigger] in front, which stands for data.trigger"),
    "overwrite": ("WHICH", "model: also captions that a model wrote; all: also those of a person; default: missing"),
    "quantize": ("FORMAT", "store the language model in int8, fp8 or nf4"),
    "device": ("DEVICE", "auto, cuda or cpu"),
    "ranks": ("N", "processes, one per GPU; each captions images of its own"),
    "shard": ("", "the ranks share one copy of the model, for one that does not fit on one GPU"),
    "temperature": ("T", "0 takes the likeliest words; default: 0"),
    "seed": ("N", "seed of the random choice of words at a temperature above 0"),
    "tokens": ("N", f"most tokens of a caption; default: {CaptionRequest.tokens}"),
    "pixels": ("N", f"larger images are scaled down to this many pixels; default: {CaptionRequest.pixels}"),
}
"""{option of --caption, a field of `CaptionRequest`: (name of its value, or "" for a switch, help)}"""
TAKEN_BY = {
    "run_dir": ("headless",),
    "rehearse": ("headless",),
    "slurm": ("headless",),
    "kubernetes": ("headless",),
    "node_rank": ("resume", "join"),
    "what": ("export",),
    "step": ("export", "resume"),
    "format": ("export", "extract"),
    "dtype": ("export", "extract", "caption"),
    "base": ("extract",),
    "family": ("extract",),
    "rank": ("extract",),
    "to": ("extract",),
    "gpus": ("plan", "fit"),
    "keep": ("fit",),
    "price": ("fit", "film"),
    "write": ("fit", "import"),
    "write_family": ("certify",),
    "prove": ("fit",),
    "json": ("plan",),
    "exactly": ("plan",),
    "html": ("plan",),
    **dict.fromkeys((*CAPTION_FIELDS, "undo"), ("caption",)),
    "prompt": ("caption", "film"),
    "name": (),
    "auth_file": (),
}
"""{option: the modes that accept it}; () for options of the page only."""
TAKE_OVERRIDES = ("headless", "certify", "plan", "fit", "import", "resume", "join")
MODES_WITH_VALUE = {
    "headless": "PRESET",
    "certify": "PRESET",
    "plan": "PRESET",
    "fit": "PRESET",
    "import": "FILE",
    "resume": "RUN_DIR",
    "join": "RUN_DIR",
    "export": "RUN_DIR",
    "film": "RUN_DIR",
    "extract": "TUNED",
    "caption": "FOLDER",
}
"""{mode: name of its value}"""
EPILOG = """\
examples:
  {program} --headless quickstart
  {program} --headless quickstart train.steps=200 optim.lr=2e-4 --run-dir runs/second
  {program} --headless my.yaml --rehearse
  {program} --plan quickstart train.micro_batch=8 --gpus 2x24gb
  {program} --fit quickstart --gpus 2x24gb --price 0.5
  {program} --import kohya.toml --write mine.yaml
  {program} --resume runs/second train.steps=400
  {program} --join runs/big --node-rank 1
  {program} --headless quickstart --slurm
  {program} --export runs/second --what merged
  {program} --export runs/second --step best
  {program} --film runs/second --prompt 1
  {program} --resume runs/second --step 50 optim.lr=5e-5
  {program} --rename runs/second "Fox, rank 32"
  {program} --caption my-images --model Qwen/Qwen2.5-VL-3B-Instruct
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
    except OSError as error:
        if error.errno in REFUSED_PATHS and error.filename is not None:
            complain(f"{error.filename}: {error.strerror}; {REFUSED_PATHS[error.errno]}")
        elif error.errno in NO_SPACE:
            complain(f"{error.filename or 'a file'}: cannot be written ({error.strerror}); free some space")
        else:
            raise
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in a line, without the list of all options in front of it."""
        remedy = "" if "; " in message else "; --help lists the options"
        self.exit(2, f"{printable(message)}{remedy}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program().removeprefix("python "),
        usage="%(prog)s [what to do] [options] [key=value ...]",
        description="Fine-tune image and language models that do not fit on one GPU.",
        epilog=EPILOG.format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_modes(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that replace those of the config")
    runs = parser.add_argument_group("run folders")
    runs.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are made")
    _add_page_options(parser)
    runs.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="use exactly this path as the run folder (--headless)"
    )
    runs.add_argument(
        "--rehearse",
        action="store_const",
        const=True,
        help="train the small demo model on the preset's pictures instead, for a minute on the CPU, to look at crops, "
        "masks and captions (--headless)",
    )
    _add_node_options(parser)
    exports = parser.add_argument_group("checkpoints and exports (--export, --resume, --extract)")
    exports.add_argument(
        "--what", choices=_choices("what"), help="content of the export (--export); default: the run's own"
    )
    exports.add_argument(
        "--step",
        type=_wanted,
        metavar="N|best",
        help="another checkpoint than the newest: that of a step, or the one of lowest validation loss, to export "
        "(--export) or for a new run that goes on from it (--resume)",
    )
    exports.add_argument(
        "--format",
        choices=_choices("format"),
        help="file format (--export, --extract); default: the run's own, or auto",
    )
    exports.add_argument(
        "--dtype", choices=_choices("dtype"), help="precision (--export, --extract); default: the run's own, or bf16"
    )
    exports.add_argument("--base", metavar="BASE", help="the base that TUNED was fine-tuned from (--extract)")
    exports.add_argument("--family", metavar="FAMILY", help="model family of TUNED and BASE (--extract)")
    exports.add_argument("--rank", metavar="RANK", help="rank of the LoRA (--extract)")
    exports.add_argument("--to", metavar="FILE.safetensors", help="output file (--extract)")
    plans = parser.add_argument_group("plans (--plan, --fit)")
    plans.add_argument(
        "--gpus",
        metavar="NxCARD",
        help="GPUs to plan for, for example 4x24gb or 8xh100 (--plan, --fit); default: this machine's",
    )
    plans.add_argument("--json", action="store_const", const=True, help="print the plan as JSON (--plan)")
    plans.add_argument(
        "--keep",
        metavar="FIELD,...",
        help="fields that stay as they are, for example resolution,rank (--fit); default: resolution,rank,format, "
        "where format means that the base is not stored in fewer than 8 bits",
    )
    plans.add_argument("--price", type=float, metavar="P", help="price of a GPU-hour (--fit, --film; in dollars)")
    plans.add_argument(
        "--prove", action="store_const", const=True, help="train a few steps of what fits, on this machine (--fit)"
    )
    plans.add_argument("--write", type=Path, metavar="FILE", help="file for the config (--fit, --import)")
    plans.add_argument(
        "--write-family",
        metavar="NAME",
        help="keep what was concluded of a model without a family as a family of this name (--certify)",
    )
    plans.add_argument(
        "--exactly", action="store_const", const=True, help="also trace the whole model, half a minute (--plan)"
    )
    plans.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page about the plan, with memory over a step (--plan)"
    )
    captions = parser.add_argument_group("captions (--caption)")
    for name, (value, text) in CAPTION_FIELDS.items():
        if value:
            captions.add_argument(f"--{name}", metavar=value, help=text)
        else:
            captions.add_argument(f"--{name}", action="store_const", const=True, help=text)
    captions.add_argument("--undo", action="store_const", const=True, help="take back captions, the latest job's first")
    return parser


def _add_modes(parser: argparse.ArgumentParser) -> None:
    # For argparse the modes' values are optional, so that `--headless --help` prints help instead of an error.
    group = parser.add_argument_group("what to do; without one of these, the page is opened")
    modes = group.add_mutually_exclusive_group()
    modes.add_argument(
        "--headless",
        nargs="?",
        const="",
        metavar="PRESET",
        help="train a preset, by its name or a file, export at the end",
    )
    modes.add_argument(
        "--certify",
        nargs="?",
        const="",
        metavar="PRESET",
        help="load the model of a preset, let it draw, and look for faults of its wiring; nothing is trained",
    )
    modes.add_argument(
        "--plan", nargs="?", const="", metavar="PRESET", help="memory of a preset per GPU, and whether it fits"
    )
    modes.add_argument(
        "--fit", nargs="?", const="", metavar="PRESET", help="the fastest config of a preset that fits the GPUs"
    )
    modes.add_argument(
        "--import",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a preset from a config of kohya's sd-scripts, ai-toolkit, OneTrainer, SimpleTuner or "
        "diffusion-pipe, and list what was taken, changed and left out",
    )
    modes.add_argument(
        "--resume", nargs="?", const="", metavar="RUN_DIR", help="continue a run from its newest checkpoint"
    )
    modes.add_argument(
        "--join", nargs="?", const="", metavar="RUN_DIR", help="join a run on several nodes as a further node"
    )
    modes.add_argument("--export", nargs="?", const="", metavar="RUN_DIR", help="export a checkpoint of a run")
    modes.add_argument(
        "--film", nargs="?", const="", metavar="RUN_DIR", help="make a loop and a sheet of the samples of a run"
    )
    modes.add_argument(
        "--extract",
        nargs="?",
        const="",
        metavar="TUNED",
        help="extract a LoRA from the difference between a fine-tuned checkpoint and its base",
    )
    modes.add_argument(
        "--caption",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="let a vision-language model caption the images of a folder that have no caption",
    )
    modes.add_argument(
        "--rename", nargs=2, metavar=("RUN_DIR", "NAME"), help="give a run another name; '' is the name it had at first"
    )
    modes.add_argument("--queue", action="store_true", help="start the queued runs one after the other")
    modes.add_argument("--doctor", action="store_true", help="check Python, packages, GPUs, disk, memory and ports")


def _add_page_options(parser: argparse.ArgumentParser) -> None:
    page = parser.add_argument_group("the page")
    page.add_argument("--port", type=int, metavar="N", help="port of the page; default: 7860")
    page.add_argument("--host", metavar="H", help="address the page listens on; default: localhost only")
    page.add_argument(
        "--name",
        action="append",
        metavar="HOST[:PORT]",
        help="name under which others reach the page, for example through a TLS proxy (app/web/proxy); may be repeated",
    )
    password = page.add_mutually_exclusive_group()
    password.add_argument(
        "--auth-file",
        type=Path,
        metavar="FILE",
        help="login of the page: one line USER:PASS, readable by its owner only; or set SHARDSTUDIO_AUTH; "
        "required for another --host",
    )
    password.add_argument(
        "--auth", metavar="USER:PASS", help="the same on the command line, where every user of this machine can read it"
    )


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    nodes = parser.add_argument_group("several machines")
    jobs = nodes.add_mutually_exclusive_group()
    jobs.add_argument(
        "--slurm", action="store_const", const="slurm", help="write a SLURM job instead of starting (--headless)"
    )
    jobs.add_argument(
        "--kubernetes",
        action="store_const",
        const="kubernetes",
        help="write a Kubeflow TrainJob instead of starting (--headless)",
    )
    nodes.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="rank of this node (--join, --resume); default: as set by SLURM or Kubeflow",
    )


def _wanted(text: str) -> Wanted:
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:16]) < 10**15):
        raise argparse.ArgumentTypeError(f"'{text}' is neither the step of a checkpoint, such as 50, nor best")
    return int(text)


def _choices(field: str) -> list[str]:
    return [value for value in get_args(ExportConfig.model_fields[field].annotation) if value != "none"]


def _dispatch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    for mode, value in MODES_WITH_VALUE.items():
        if getattr(options, mode) == "":
            parser.error(f"--{mode} needs {value}")
    if options.overrides and all(getattr(options, mode) is None for mode in TAKE_OVERRIDES):
        *takers, last = [f"--{mode}" for mode in TAKE_OVERRIDES]
        parser.error(f"{options.overrides[0]}: only {', '.join(takers)} and {last} take key=value")
    _refuse_unused(options, parser)
    if options.doctor:
        from trainer.launcher import doctor

        return doctor.examine(options.runs)
    if options.extract is not None:
        return _extract(options, parser)
    if options.caption is not None:
        return _caption(options, parser)
    if options.film is not None:
        return _film(options)
    if options.plan is not None:
        from trainer.launcher import plan_command

        preset = preset_file(options.plan, options.runs / "presets")
        as_json, exactly = bool(options.json), bool(options.exactly)
        return plan_command.show(preset, options.overrides, options.runs, options.gpus, as_json, exactly, options.html)
    if options.certify is not None:
        from app import certify_command

        preset = preset_file(options.certify, options.runs / "presets")
        return certify_command.certify(load_config(preset, options.overrides), options.runs, options.write_family)
    if options.fit is not None:
        return _fit(options)
    if options.rename is not None:
        return _rename(*options.rename)
    if (foreign := getattr(options, "import")) is not None:
        from app import import_command

        if options.write is not None:
            _check_writable(options.write)
        return import_command.write(Path(foreign), options.overrides, options.write)
    if options.queue:
        from trainer.launcher import queue

        return queue.run_queue(options.runs, say)
    return _page(options) if _is_page(options) else _headless(options)


def _is_page(options: argparse.Namespace) -> bool:
    """Whether no mode was chosen."""
    others = options.doctor or options.queue or options.rename
    return not others and all(getattr(options, mode) is None for mode in MODES_WITH_VALUE)


def _page(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("gradio") is None:
        raise InputError("the page needs gradio: pip install 'gradio>=6.31,<7'; --headless needs none")
    from app.web.access import Access

    host, port = options.host or "127.0.0.1", options.port or 7860
    access = Access.checked(host, port, options.name or (), options.auth, options.auth_file)
    from app.web import server

    server.serve(options.runs, access)
    return 0


def _refuse_unused(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options of other modes, which would be ignored."""
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
        return commands.resume(Path(options.resume), options.overrides, options.node_rank, options.step)
    if options.join is not None:
        return commands.join(Path(options.join), options.overrides, options.node_rank)
    if options.export is not None:
        wanted: Wanted = options.step or "newest"
        return commands.export(Path(options.export), options.what or "auto", options.format, options.dtype, wanted)
    preset = preset_file(options.headless, options.runs / "presets")
    scheduler = options.slurm or options.kubernetes
    if options.rehearse:
        if scheduler or options.run_dir:
            raise InputError("--rehearse makes its own run folder: leave out --run-dir, --slurm and --kubernetes")
        from app import rehearsal_command

        return rehearsal_command.rehearse(load_config(preset, options.overrides), options.runs)
    if scheduler is not None:
        return commands.write_job(preset, options.overrides, options.runs, options.run_dir, scheduler)
    return commands.train(preset, options.overrides, options.runs, options.run_dir)


def _rename(folder: str, name: str) -> int:
    from app.runs import notes
    from trainer.run.folder import RunDir

    run = RunDir.open(Path(folder))
    notes.give_title(run, name)
    say(f"{run.path} is named {run.title} now; the folder and exported files keep their names")
    return 0


def _caption(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from app import caption_command

    if options.undo:
        return caption_command.undo(Path(options.caption), options.runs)
    if options.model is None:
        parser.error("--caption needs --model PATH, or --model demo to try it without a download")
    given = {name: getattr(options, name) for name in CAPTION_FIELDS if getattr(options, name) is not None}
    given |= {"precision": options.dtype} if options.dtype else {}
    request = CaptionRequest.checked({"folder": options.caption, **given})
    return caption_command.caption(request, options.runs)


def _film(options: argparse.Namespace) -> int:
    from app.runs import film
    from trainer.launcher.fit_command import check_price
    from trainer.run.folder import RunDir

    check_price(options.price, "--price")
    number = options.prompt
    if number is not None and not (number.isascii() and number.isdecimal() and 0 < int(number[:9]) < 10**6):
        raise InputError(f"--prompt: '{number}' is not the number of a prompt, such as 1")
    run = RunDir.open(Path(options.film))
    made = film.make(run, None if number is None else int(number), options.price)
    for note in made.notes:
        complain(f"note: {note}")
    for name in (name for one in made.prompts for name in one.files):
        say(run.film / name)
    return 0


def _fit(options: argparse.Namespace) -> int:
    from trainer.launcher import fit_command

    fit_command.check_price(options.price, "--price")
    if options.write is not None:
        _check_writable(options.write)
    preset, runs = preset_file(options.fit, options.runs / "presets"), options.runs
    keep = None if options.keep is None else [name.strip() for name in options.keep.split(",") if name.strip()]
    found = fit_command.search(load_config(preset, options.overrides), runs, options.gpus, keep)
    fit_command.show(found, options.price)
    if options.prove and found.is_complete:
        from app.form.fit_proof import prove

        found = prove(found, runs)
    if not found.is_complete:
        return 1
    say(f"written: {fit_command.write(found, preset, runs, options.write)}")
    return 0


def _check_writable(file: Path) -> None:
    if file.is_dir():
        raise InputError(f"--write: {file} is a folder; name a file in it, {file / 'fits.yaml'}")
    if not file.parent.is_dir():
        raise InputError(f"--write: {file.parent} is not a folder; make it, or name another file")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"--write: nothing can be written in {file.parent}; name another file")


def _extract(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Extract a LoRA in a separate process, which loads torch."""
    from trainer.run.process import worker_environment

    missing = [f"--{name}" for name in ("base", "family", "rank", "to") if getattr(options, name) is None]
    if missing:
        parser.error(f"--extract needs {', '.join(missing)}")
    argv = [sys.executable, "-m", "trainer.export.extract", "--extract", options.extract, "--base", options.base]
    argv += ["--family", options.family, "--rank", options.rank, "--format", options.format or "auto"]
    argv += ["--dtype", options.dtype or "bf16", "--to", options.to]
    done = subprocess.run(argv, env=worker_environment(), stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stderr.splitlines()
    if done.returncode:  # libraries print to stderr while they load, which is of no use to a person
        complain("\n".join(lines[-1:] if done.returncode == 2 else lines))
    return done.returncode if done.returncode in (0, 2) else 1
