"""Runs as cluster jobs: write the job file for SLURM or Kubernetes into the run folder.

Each node of a job runs the same `--resume`: the number that the scheduler gave the node decides whether it starts the
run or joins it. A job that is restarted continues from the newest checkpoint. See DECISIONS 110, 111.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from trainer.config.load import ConfigFile, load_config
from trainer.config.schema import RunConfig
from trainer.run.folder import RunDir
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.installation import COMMAND, start_command

Scheduler = Literal["slurm", "kubernetes"]
FIRST_NODE = "first-node.invalid:29400"
"""`parallel.rendezvous` until the job knows its first node: a name that never belongs to a machine (RFC 2606)."""
CPUS_PER_GPU = 4
"""For a rank, its image reader, its checkpoint writer and NCCL's thread."""
POD_NAME = 50
"""Longest name of a Kubernetes job: names of its pods and their addresses are longer, and are limited to 63."""


def load(preset: Path, overrides: Sequence[str], scheduler: Scheduler) -> ConfigFile:
    """Load a preset for a cluster job. Raises InputError if a field that the job needs is empty."""
    loaded = load_config(preset, [*overrides, f"parallel.rendezvous={FIRST_NODE}"])
    if loaded.config.parallel.nodes == 1:
        loaded = load_config(preset, overrides)
    if scheduler == "kubernetes":
        for field in ("image", "volume"):
            if not getattr(loaded.config.cluster, field):
                where = loaded.where(f"cluster.{field}")
                raise InputError(f"{where}: cluster.{field}: is empty; --kubernetes needs it")
    return loaded


def check_run_folder_path(loaded: ConfigFile, runs: Path, scheduler: Scheduler) -> None:
    """Raise InputError if the pods of a job could not see a run folder in `runs`."""
    mount = loaded.config.cluster.mount
    if scheduler == "kubernetes" and not runs.absolute().is_relative_to(mount):
        raise InputError(
            f"{runs}: is not on the volume that the pods mount at {mount}; mount it at the same path here and "
            f"add --runs {mount}/runs, or set cluster.mount"
        )


def write(run: RunDir, scheduler: Scheduler) -> Path:
    """Write the job file into the run folder. Returns its path."""
    text, name = (sbatch, "job.sbatch") if scheduler == "slurm" else (train_job, "trainjob.yaml")
    file = run.path / name
    files.replace(file, text(run.config(), run))
    return file


def submission(file: Path, scheduler: Scheduler) -> str:
    """Return the command that submits a job."""
    return f"{'sbatch' if scheduler == 'slurm' else 'kubectl apply -f'} {shlex.quote(str(file))}"


def sbatch(cfg: RunConfig, run: RunDir) -> str:
    """Return the script for sbatch: one task per node, with a checkpoint and a requeue when the time is up.

    SLURM sends its warning to the script only (`B:`). The script then requests a stop, as a user would, and requeues
    the job when the run has stopped. A warning to the tasks could not be distinguished from the SIGTERM of scancel or
    preemption.
    """
    options = "\n".join(
        f"#SBATCH --{name}{_value(value)}" for name, value in _options(cfg, run).items() if value is not None
    )
    argv = [*start_command(), "--resume", str(run.path)]
    rendezvous = ' "parallel.rendezvous=$first:$port"' if cfg.parallel.nodes > 1 else ""
    return _SBATCH.format(
        options=options, stop=shlex.quote(str(run.requests / "stop")), command=f"{shlex.join(argv)}{rendezvous}"
    )


def _options(cfg: RunConfig, run: RunDir) -> dict[str, object]:
    """Return {sbatch option: value, "" for one without a value, None to leave it out}. The config's values win."""
    ranks = cfg.parallel.devices
    on_cpu = cfg.parallel.device == "cpu"
    return {
        "job-name": cfg.name,
        "nodes": cfg.parallel.nodes,
        "ntasks-per-node": 1,
        **({"cpus-per-task": ranks} if on_cpu else {"gpus-per-node": ranks, "cpus-per-task": CPUS_PER_GPU * ranks}),
        "signal": f"B:USR1@{cfg.cluster.warning}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{run.logs}/slurm-".replace("%", "%%") + "%j.log",
        **cfg.cluster.slurm,
    }


def _value(value: object) -> str:
    text = str(value)
    if re.fullmatch(r"[\w.,:@%+/=-]+", text):
        return f"={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'="{escaped}"' if text else ""


_SBATCH = """\
#!/bin/bash
# Written by ShardStudio (--slurm). Each time this job starts, the run goes on from its newest checkpoint.
{options}

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on one node must not meet
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # from SLURM 22.05 on srun does not ask for them by itself
fi

stop={stop}
time_is_up=
trap 'time_is_up=yes; touch "$stop"' USR1
# A node that fails must not end the first one before that has recorded why; and it exports when the others are gone.
srun --kill-on-bad-exit=0 --wait=0 \\
    {command} &
step=$!
# The warning ends the waiting, not the step. Whether the step lives tells the two apart; its code alone does not.
while :; do
    wait "$step"
    kill -0 "$step" 2>/dev/null || break
done
wait "$step"
code=$?
if [ -n "$time_is_up" ] && [ "$code" -eq 130 ]; then  # stopped, with a checkpoint
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def train_job(cfg: RunConfig, run: RunDir) -> str:
    """Return the manifest of a TrainJob for Kubeflow Trainer 2.2 or newer, with its runtime torch-distributed.

    That runtime passes torchrun's options to every pod as variables: PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
    PET_MASTER_ADDR and PET_MASTER_PORT. The program reads only the node's number from them and passes the other options
    to torchrun itself. Kubernetes inserts the first pod's address into the command before the pods run.
    """
    cluster, parallel = cfg.cluster, cfg.parallel
    program = [COMMAND] if cluster.program is None else ["python", f"{cluster.program}/launch.py"]
    command = [*program, "--resume", str(run.path)]
    if parallel.nodes > 1:
        command.append("parallel.rendezvous=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
    resource = "cpu" if parallel.device == "cpu" else "nvidia.com/gpu"
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job_name(run.path.name)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": cluster.image,
                "command": command,
                "numNodes": parallel.nodes,
                "resourcesPerNode": {"limits": {resource: parallel.devices}},
            },
            "runtimePatches": [{"manager": "shardstudio", "trainingRuntimeSpec": _volumes(cfg)}],
        },
    }
    return _TRAIN_JOB + yaml.safe_dump(manifest, sort_keys=False, width=120)


def job_name(name: str) -> str:
    """Return the name of a run as Kubernetes allows it: lower-case letters, digits and `-`, beginning with a letter.

    Of a name that is too long the end is kept, because it differs between runs.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-POD_NAME:].strip("-")
    return label if label[:1].isalpha() else f"run-{label}"[:POD_NAME].strip("-")


def _volumes(cfg: RunConfig) -> dict[str, Any]:
    """Return the volumes of every pod: the claim, and shared memory, because NCCL needs more than a pod's 64 MiB."""
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": cfg.cluster.volume}}
    mounts = [{"name": "runs", "mountPath": cfg.cluster.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    pod = {
        "volumes": [claim, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"template": {"spec": {"replicatedJobs": [job]}}}


_TRAIN_JOB = """\
# Written by ShardStudio (--kubernetes). Pods that are started again go on from the newest checkpoint.
# The user of the pods must be the owner of the run folder, or be allowed to write in it.
# To end the run for good, delete this job: one that was only stopped is started again.
"""
