"""Jobs of a cluster: the files that are written, and that a job goes on by itself after its time was up."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import launch as command_line
from tests.commands import LAUNCH, TIMEOUT_S, launch_py, preset_folder
from tests.runs import run_config
from trainer.config.load import load_config
from trainer.launcher import schedulers
from trainer.run.events import AnyEvent, CheckpointEvent, EventReader, StatusEvent
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

SRUN = """\
#!/bin/bash
# As srun does with one task per node, on this machine: the same command on both, and the highest exit code.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task"; ended=$?; [ "$ended" -le "$code" ] || code=$ended; done
exit "$code"
"""
SCONTROL = """\
#!/bin/bash
case $1 in
    show) echo localhost; echo localhost;;
    requeue) echo "$2" >> requeued;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a preset, its dataset, and what a job calls of SLURM, in `bin`."""
    preset_folder(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_of(folder: Path, **changes: Any) -> RunDir:
    cfg = run_config(folder / "pictures", **{"parallel__devices": 8, "parallel__device": "cuda"} | changes)
    return RunDir.create(folder, cfg, at=folder / "my runs" / "Fox_7 100%")


def options_of(run: RunDir) -> list[str]:
    text = schedulers.sbatch(run.config(), run)
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_job_asks_slurm_for_its_nodes_and_gpus_and_for_a_warning_to_itself_before_its_time_is_up(folder):
    run = run_of(folder, parallel__nodes=2, parallel__rendezvous=schedulers.FIRST_NODE)
    assert options_of(run) == [
        "--job-name=tiny",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=32",
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
        f'--output="{folder}/my runs/Fox_7 100%%/logs/slurm-%j.log"',
    ]


def test_the_users_options_of_sbatch_count_and_a_run_on_cpus_asks_for_no_gpu(folder):
    slurm = {"partition": "cpu", "time": "24:00:00", "cpus-per-task": 4, "exclusive": "", "comment": 'the "last" one'}
    run = run_of(folder, parallel__device="cpu", cluster__slurm=slurm, cluster__warning=300)
    found = options_of(run)
    assert not [option for option in found if "gpu" in option]
    assert {"--signal=B:USR1@300", "--partition=cpu", "--time=24:00:00", "--exclusive"} < set(found)
    assert '--comment="the \\"last\\" one"' in found
    assert [option for option in found if "cpus" in option] == ["--cpus-per-task=4"]


def test_an_option_of_sbatch_that_a_site_does_not_know_is_left_out(folder):
    preset = folder / "preset.yaml"
    slurm = "cluster.slurm={gpus-per-node: null, gres: 'gpu:8', requeue: null}"
    run = RunDir.create(folder, load_config(preset, ["parallel.device=cuda", slurm]).config)
    found = [option.partition("=")[0] for option in options_of(run)]
    assert not {"--gpus-per-node", "--requeue"} & set(found)
    assert "--gres" in found


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("nodes: null", "cluster.slurm.nodes: is derived from parallel.nodes; set that instead"),
        ("ntasks: 2", "cluster.slurm.ntasks: is one per node; set parallel.nodes instead"),
        ("array: 0-3", "cluster.slurm.array: would start one run several times at once; submit a job for each run"),
        (
            "ntasks-per-gpu: 1",
            "cluster.slurm.ntasks-per-gpu: each node has one task, which starts its ranks; "
            "set parallel.devices instead",
        ),
        ("p: gpu", "cluster.slurm: 'p' is not a long sbatch option; write it without dashes: partition"),
    ],
)
def test_an_option_of_sbatch_that_would_make_another_run_is_refused(folder, option, message):
    with pytest.raises(InputError) as error:
        load_config(folder / "preset.yaml", [f"cluster.slurm={{{option}}}"])
    assert message in str(error.value)


def test_every_node_of_a_job_runs_the_same_command_and_meets_at_the_first_one(folder):
    run = run_of(folder, parallel__nodes=2, parallel__rendezvous=schedulers.FIRST_NODE)
    text = schedulers.sbatch(run.config(), run)
    command = f"{sys.executable} {LAUNCH} --resume {shlex.quote(str(run.path))}"
    assert f'    {command} "parallel.rendezvous=$first:$port" &\n' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    alone = run_of(folder / "alone")
    assert f"    {sys.executable} {LAUNCH} --resume {shlex.quote(str(alone.path))} &\n" in schedulers.sbatch(
        alone.config(), alone
    )


def test_slurm_is_asked_for_with_the_preset_checked_and_nothing_started(folder):
    done = launch_py(folder, "--headless", "preset.yaml", "parallel.nodes=2", "--slurm", "--run-dir", "a run")
    assert (done.returncode, done.stderr) == (0, "")
    run = RunDir.open(folder / "a run")
    assert done.stdout.splitlines() == [f"run folder: {run.path}", f"sbatch '{run.path}/job.sbatch'"]
    assert not run.launch_file.exists()
    assert not list(run.logs.iterdir())
    wrong = launch_py(folder, "--headless", "preset.yaml", "data.path=nowhere", "--slurm", "--run-dir", "another")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "data.path: no folder" in wrong.stderr
    assert not (folder / "another").exists()


@pytest.fixture
def submit(folder: Path) -> Iterator[Any]:
    """Run the script of a job as SLURM does at the given start. What still runs at the end is ended."""
    jobs: list[subprocess.Popen[bytes]] = []

    def submit(run: RunDir, restarts: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "localhost,localhost",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        with (run.logs / "slurm.log").open("ab") as output:
            job = subprocess.Popen(
                ["bash", run.path / "job.sbatch"],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait(60)


def states_of(events: list[AnyEvent]) -> list[str]:
    states = [event.state for event in events if isinstance(event, StatusEvent)]
    return [state for state in states if state in ("starting", "stopped", "finished", "failed")]


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_queues_again_and_goes_on_where_it_was(folder, submit):
    # So many steps that a busy machine has not done them before it is seen that one is saved.
    overrides = ("parallel.nodes=2", "parallel.devices=1", "train.steps=100000", "checkpoint.every=5")
    done = launch_py(folder, "--headless", "preset.yaml", *overrides, "--slurm", "--run-dir", "a run")
    assert done.returncode == 0, done.stderr
    run = RunDir.open(folder / "a run")
    job, reader = submit(run, 0), EventReader(run.events_file)
    deadline, events = time.monotonic() + TIMEOUT_S, []
    while not any(isinstance(event, CheckpointEvent) for event in events):
        assert job.poll() is None, (run.logs / "slurm.log").read_text()
        assert time.monotonic() < deadline
        events += reader.read()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(TIMEOUT_S) == 0, (run.logs / "slurm.log").read_text()
    assert (folder / "requeued").read_text() == f"{os.getpid()}\n"
    events += reader.read()
    assert states_of(events) == ["starting", "stopped"]
    stopped_at = events[-1].step

    run.replace_config(load_config(run.config_file, [f"train.steps={stopped_at + 3}"]).config)
    assert submit(run, 1).wait(TIMEOUT_S) == 0, (run.logs / "slurm.log").read_text()
    events = reader.read()
    assert states_of(events) == ["starting", "finished"]
    assert f"resumed from step-{stopped_at:06d}" in [event.message for event in events if hasattr(event, "message")]
    assert (folder / "requeued").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("warned", [False, True], ids=["by itself", "after the warning"])
def test_a_job_ends_with_the_code_of_srun_also_where_that_looks_like_the_warning(folder, submit, warned):
    """138 is what `wait` returns when the warning interrupts it, and what a task returns that SIGUSR1 killed."""
    srun = "touch began; sleep 2; exit 138" if warned else "exit 138"
    (folder / "bin" / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    run = run_of(folder, parallel__nodes=2, parallel__rendezvous=schedulers.FIRST_NODE)
    schedulers.write(run, "slurm")
    job = submit(run, 0)
    if warned:
        deadline = time.monotonic() + 30
        while not (folder / "began").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 138
    assert run.requested("stop") == warned
    assert not (folder / "requeued").exists()


# Of Kubeflow Trainer 2.2.0 to 2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go: {field: what it holds}. "!" = needed.
POD = {
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}],
    "containers": [{"name!": str, "volumeMounts": [{"name!": str, "mountPath!": str}]}],
}
JOB = {"name!": str, "template": {"spec": {"template": {"spec": POD}}}}
TRAIN_JOB = {
    "apiVersion!": str,
    "kind!": str,
    "metadata!": {"name!": str},
    "spec!": {
        "runtimeRef!": {"name!": str, "apiGroup": str, "kind": str},
        "trainer": {
            "image": str,
            "command": [str],
            "numNodes": int,
            "resourcesPerNode": {"limits": {"cpu": int, "nvidia.com/gpu": int}},
        },
        "runtimePatches": [
            {"manager!": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [JOB]}}}},
        ],
    },
}


def against(schema: Any, value: Any, at: str = "") -> Iterator[str]:
    """What of a value the schema does not allow."""
    if isinstance(schema, type):
        if not isinstance(value, schema):
            yield f"{at}: {value!r}"
    elif isinstance(schema, list):
        for item in value:
            yield from against(schema[0], item, f"{at}[]")
    else:
        fields = {name.rstrip("!"): below for name, below in schema.items()}
        yield from (f"{at}.{name[:-1]} is missing" for name in schema if name.endswith("!") and name[:-1] not in value)
        for name, below in value.items():
            if name not in fields:
                yield f"{at}.{name} is unknown"
            else:
                yield from against(fields[name], below, f"{at}.{name}")


def test_a_train_job_is_what_kubeflow_takes_and_its_pods_see_the_run_folder(folder):
    run = run_of(
        folder,
        parallel__nodes=2,
        parallel__rendezvous=schedulers.FIRST_NODE,
        cluster__image="registry.example.org/shardstudio:1",
        cluster__volume="team-storage",
        cluster__mount=str(folder),
    )
    job = yaml.safe_load(schedulers.write(run, "kubernetes").read_text())
    assert list(against(TRAIN_JOB, job)) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "fox-7-100"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert job["spec"]["trainer"] == {
        "image": "registry.example.org/shardstudio:1",
        "command": [
            *("python", "/opt/shardstudio/launch.py", "--resume", str(run.path)),
            "parallel.rendezvous=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
        ],
        "numNodes": 2,
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    # The runtime's own names: the patch is merged into what is called so.
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node")
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "team-storage"}} in pod["volumes"]
    assert {"name": "runs", "mountPath": str(folder)} in pod["containers"][0]["volumeMounts"]


def test_a_train_job_of_one_node_on_cpus_needs_no_meeting(folder):
    run = run_of(folder, parallel__device="cpu", cluster__image="i", cluster__volume="v", cluster__mount=str(folder))
    trainer = yaml.safe_load(schedulers.train_job(run.config(), run))["spec"]["trainer"]
    assert trainer["command"][-1] == str(run.path)
    assert trainer["resourcesPerNode"] == {"limits": {"cpu": 8}}


def test_a_train_job_of_an_image_that_pip_installed_into_starts_the_command(folder):
    image = {"cluster__image": "i", "cluster__volume": "v", "cluster__program": None}
    run = run_of(folder, cluster__mount=str(folder), **image)
    trainer = yaml.safe_load(schedulers.train_job(run.config(), run))["spec"]["trainer"]
    assert trainer["command"] == ["shardstudio", "--resume", str(run.path)]


@pytest.mark.parametrize(
    ("run", "job"),
    [
        ("fox-20261122-150503-abcdef", "fox-20261122-150503-abcdef"),
        ("Fox_7.final-", "fox-7-final"),
        ("7foxes", "run-7foxes"),
        ("a" * 70 + "-abcdef", "a" * 43 + "-abcdef"),
    ],
)
def test_a_train_job_is_named_after_its_run_in_letters_that_kubernetes_takes(run, job):
    assert schedulers.job_name(run) == job


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.volume=v"], "preset.yaml: cluster.image: is empty; --kubernetes needs it"),
        (["cluster.image=i"], "preset.yaml: cluster.volume: is empty; --kubernetes needs it"),
        (
            ["cluster.image=i", "cluster.volume=v", "cluster.mount=/data"],
            "{folder}/runs: is not on the volume that the pods mount at /data; mount it at the same path here "
            "and add --runs /data/runs, or set cluster.mount",
        ),
    ],
    ids=["image", "volume", "mount"],
)
def test_a_train_job_that_could_not_run_is_not_written(folder, overrides, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    argv = ["--headless", "preset.yaml", *overrides, "--kubernetes", "--runs", str(folder / "runs")]
    assert command_line.main(argv) == 2
    assert capsys.readouterr().err == message.format(folder=folder) + "\n"
    assert not (folder / "runs").exists()


def test_a_train_job_is_asked_for_and_the_command_that_submits_it_comes_last(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    where = [f"cluster.mount={folder}", "--runs", str(folder / "runs")]
    argv = ["--headless", "preset.yaml", "cluster.image=i", "cluster.volume=v", *where, "--kubernetes"]
    assert command_line.main(argv) == 0
    [run] = (folder / "runs").glob("fox-*")
    assert capsys.readouterr().out.splitlines()[-1] == f"kubectl apply -f {run}/trainjob.yaml"
    assert "rendezvous: null" in (run / "config.yaml").read_text()
