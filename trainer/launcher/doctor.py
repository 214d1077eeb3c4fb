"""`--doctor`: checks of this machine, each with a verdict and a remedy. Fast, because it imports no torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from trainer.launcher.capacity import MOST_TAKEN
from trainer.run.folder import freeing
from trainer.system import gpus
from trainer.system.amounts import GB, GIB
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, support, visible
from trainer.system.installation import CHECKOUT
from trainer.system.terminal import say

DISTRIBUTION = "shardstudio"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        verdict: ok, warn or fail.
        what: Name of the check.
        fact: What was found.
        remedy: What to do if the verdict is not ok.
    """

    verdict: Literal["ok", "warn", "fail"]
    what: str
    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:4}  {self.what}: {self.fact}" + (f"; {self.remedy}" if self.remedy else "")


def examine(runs: Path) -> int:
    """Print one line per check. Returns 1 if a check fails, else 0.

    Args:
        runs: Folder for run folders.
    """
    failed = False
    for check in checks(runs):
        say(check)
        failed |= check.verdict == "fail"
    return int(failed)


def checks(runs: Path) -> Iterator[Check]:
    """Yield the results of all checks, cheap ones first."""
    yield Check("ok", "python", platform.python_version())
    for requirement in requirements():
        yield package(requirement)
    yield from graphics()
    if gpus.exist():
        yield nccl()
    yield cores_and_memory()
    yield shared_memory(Path("/dev/shm"))
    yield disk(runs)
    yield limits()
    yield port()
    yield notebooks(requirements("notebook"))


def requirements(extra: str = "") -> list[Requirement]:
    """Return the required packages, from the checkout's pyproject.toml or from the installed distribution.

    Args:
        extra: Name of an extra: return only the additional packages it needs.
    """
    if CHECKOUT:
        table = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = table["optional-dependencies"][extra] if extra else table["dependencies"]
    else:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    wanted = map(Requirement, lines)
    # In a distribution, the packages of an extra have a marker that names it, and the always required ones have none.
    return [one for one in wanted if _applies(one, "" if CHECKOUT else extra)]


def _applies(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return not extra
    return requirement.marker.evaluate({"extra": extra})


def package(requirement: Requirement) -> Check:
    """Check that a package is installed in the required version."""
    remedy = f"pip install '{requirement}'"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check("fail", requirement.name, "not installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check("fail", requirement.name, f"{version} is not {requirement.specifier}", remedy)
    return Check("ok", requirement.name, version)


def graphics() -> Iterator[Check]:
    """Check each GPU, the links between them, and whether torch can use them. A machine without GPUs passes: everything
    also runs on CPUs."""
    build = support.installed()
    other = support.other_makers(build)
    if not gpus.exist():
        if other:
            yield Check("warn", "gpu", other.fact, other.remedy)
        else:
            yield Check("ok", "gpu", "no NVIDIA driver found; training runs on the CPU")
        return
    try:
        found = gpus.read()
        link = gpus.links() if len(found) > 1 else ""
    except InputError as error:
        yield Check("fail", "gpu", str(error), "reinstall the driver, or restart the machine")
        return
    for gpu in found:
        yield _gpu(gpu)
    yield from _use(found, build)
    if link:
        yield _link(link)


def _gpu(gpu: Gpu) -> Check:
    what, fact = f"gpu {gpu.index}", f"{gpu.name}, {gpu.memory} MiB, {gpu.memory_used} MiB in use"
    if gpu.is_slice:
        return Check("ok", what, f"{gpu.name}, about {gpu.memory} MiB, for runs on one GPU")
    if gpu.memory_used > MOST_TAKEN * gpu.memory:
        return Check("warn", what, fact, "end the processes that use it (nvidia-smi lists them), or choose another GPU")
    if support.lacks_bf16(gpu):
        remedy = "bf16 needs 8.0 or more: set train.precision: fp32"
        return Check("warn", what, f"{fact}, compute capability {gpu.compute_cap}", remedy)
    return Check("ok", what, fact)


def _use(found: Sequence[Gpu], build: support.Build | None) -> Iterator[Check]:
    """Check whether torch started here can use the GPUs."""
    try:
        given = visible.visible(found)
        hidden = visible.hidden(found)
    except InputError as error:
        yield Check("fail", "visible gpus", str(error))
        return
    if hidden:
        yield Check("warn", "visible gpus", hidden)
    elif len(given) < len(found):
        numbers = ", ".join(str(gpu.index) for gpu in given)
        yield Check("ok", "visible gpus", f"{visible.VISIBLE} leaves {numbers}")
    wrong = support.unusable(given, build)
    if wrong:
        yield Check("fail", "driver", wrong.fact, wrong.remedy)
    elif given and build and given[0].driver_version:
        yield Check("ok", "driver", f"{given[0].driver_version}, torch {build.version} can use it")


def _link(slowest: str) -> Check:
    if slowest in ("SYS", "NODE"):
        remedy = "this slows down sharded training: prefer parallel.strategy ddp or hybrid if the model fits"
        return Check("warn", "links", f"{slowest}: some GPUs are connected only across CPU sockets", remedy)
    return Check("ok", "links", f"{slowest} is the slowest link")


def nccl() -> Check:
    """Check for NCCL, the library for communication between GPUs, which comes with torch."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Check("ok", "nccl", importlib.metadata.version(name))
    return Check("warn", "nccl", "not installed along with torch", "install the CUDA build of torch")


def notebooks(wanted: Sequence[Requirement]) -> Check:
    """Check that JupyterLab can show forms and dashboards: it must be in the same environment as the widgets."""
    remedy = f"for the notebooks: pip install '{DISTRIBUTION}[notebook]'"
    found = [package(requirement) for requirement in wanted]
    if missing := [check for check in found if check.verdict != "ok"]:
        return Check("warn", "notebooks", ", ".join(f"{check.what} {check.fact}" for check in missing), remedy)
    extension = Path(sys.prefix, "share", "jupyter", "labextensions", "@jupyter-widgets", "jupyterlab-manager")
    if not extension.is_dir():
        return Check("warn", "notebooks", f"JupyterLab has no widgets: no {extension}", remedy)
    return Check("ok", "notebooks", ", ".join(f"{check.what} {check.fact}" for check in found))


def limits() -> Check:
    """Check the shell's limits: each rank opens model files, data files and sockets to the other ranks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    fact = f"{soft} open files" + ("" if memory == resource.RLIM_INFINITY else f", {memory / GIB:.1f} GiB memory")
    if soft < 1024:
        return Check("warn", "limits", fact, "ulimit -n 4096 before the start")
    if memory != resource.RLIM_INFINITY:
        return Check("warn", "limits", fact, "ulimit -v unlimited before the start, or a rank may run out of memory")
    return Check("ok", "limits", fact)


def cores_and_memory() -> Check:
    """Check the free host memory."""
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    fact = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free"
    if memory.available < 2 * GIB:
        return Check("warn", "machine", fact, "close other programs: a run needs at least 2 GiB")
    return Check("ok", "machine", fact)


def shared_memory(folder: Path) -> Check:
    """Check the shared memory, through which NCCL and data loaders exchange data. Containers often have 64 MiB."""
    if not folder.is_dir():
        return Check("warn", "shared memory", f"no {folder}", "mount it; in a container: --shm-size=8g")
    free = shutil.disk_usage(folder).free
    fact = f"{free / GIB:.1f} GiB free in {folder}"
    if free < GIB:
        return Check("warn", "shared memory", fact, "several GPUs need 1 GiB; in a container: --shm-size=8g")
    return Check("ok", "shared memory", fact)


def disk(runs: Path) -> Check:
    """Check the disk space for run folders and their checkpoints."""
    existing = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    fact = f"{free / GB:.1f} GB free for {runs}"
    if not os.access(existing, os.W_OK):
        return Check("fail", "disk", f"{existing} is not writable", "choose another folder with --runs DIR")
    if free < GB:
        return Check("fail", "disk", fact, f"{freeing(existing)}, or choose another folder with --runs DIR")
    if free < 20 * GB:
        return Check("warn", "disk", fact, "enough for adapters; a full model's checkpoint needs more")
    return Check("ok", "disk", fact)


def port() -> Check:
    """Check that ranks on this machine can connect to each other."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            return Check("ok", "port", f"localhost:{server.getsockname()[1]} can be used")
    except OSError as error:
        return Check("fail", "port", f"localhost: {error.strerror}", "allow connections on the loopback interface")
