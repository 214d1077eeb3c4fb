"""launch.py as a person uses it: what it prints, and the code it exits with."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import launch as command_line
from tests.runs import full_disk
from tests.system.gpus.machines import CPU, CU130, HIDDEN, MIXED, OLD_DRIVER, SLICED, TURING, install, pretend
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig, ModelConfig
from trainer.launcher import console, torchrun
from trainer.launcher.doctor import graphics, notebooks, package, requirements, shared_memory
from trainer.run.events import CheckpointEvent, LengthEvent, SampleEvent, StatusEvent, StepEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.system.amounts import GIB
from trainer.system.gpus.support import Build

ROOT = Path(__file__).parents[2]


def run_command(argv: list[str], capsys) -> tuple[int, str]:
    """Exit code and stderr of launch.py."""
    try:
        code = command_line.main(argv)
    except SystemExit as exit_:
        code = exit_.code
    return code, capsys.readouterr().err


def test_a_python_without_the_projects_packages_is_told_which_one_to_use():
    bare = subprocess.run(
        [sys.executable, "-S", "launch.py", "--headless", "presets/quickstart.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert bare.returncode == 2
    assert bare.stderr == (
        f"{sys.executable} has no module 'pydantic': it is not the Python ShardStudio is installed in. "
        "Run `make .venv`, then .venv/bin/python launch.py\n"
    )


@pytest.mark.parametrize(
    ("argv", "code"), [(["--doctor"], 141), (["--plan", "quickstart"], 141), (["--help"], 0), (["--resume", "no"], 2)]
)
def test_a_reader_that_goes_away_as_head_does_ends_a_command_quietly(argv, code):
    command = [sys.executable, ROOT / "launch.py", *argv]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        started.stdout.close()
        complaints = started.stderr.read()
    assert started.returncode == code
    assert "Traceback" not in complaints and "BrokenPipeError" not in complaints
    assert len(complaints.splitlines()) == (code == 2)


def test_help_names_every_mode_and_imports_neither_torch_nor_gradio():
    script = (
        "import sys, launch\n"
        "try: launch.main(['--headless', '--help'])\n"
        "except SystemExit as exit_: assert exit_.code == 0\n"
        "import trainer.launcher.commands, trainer.launcher.doctor, trainer.view.report\n"
        "import trainer.data.images.image_files\n"
        "assert not {'torch', 'numpy', 'diffusers', 'gradio', 'ipywidgets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    for mode in ("--headless [PRESET]", "--resume [RUN_DIR]", "--export [RUN_DIR]", "--doctor", "key=value"):
        assert mode in done.stdout
    usage, _, rest = done.stdout.partition("\n\n")
    assert usage == "usage: launch.py [what to do] [options] [key=value ...]"
    assert "options:\n  -h, --help            show this help message and exit\n\n" in rest  # all others have a group


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0: others could start runs here; add --auth-file FILE with one line USER:PASS, "
            "or set SHARDSTUDIO_AUTH\n",
        ),
        (["--resume", "nowhere"], "nowhere: not a run folder (it has no config.yaml); name a folder below runs/\n"),
        (["--export", "nowhere"], "nowhere: not a run folder (it has no config.yaml); name a folder below runs/\n"),
        (
            ["--join", "nowhere"],
            f"{Path.cwd()}/nowhere: not a run folder (it has no config.yaml); if this machine does not see the first "
            "node's run folder, add parallel.nodes=N parallel.devices=N parallel.rendezvous=HOST:PORT with its "
            "values\n",
        ),
        (
            ["--join", "nowhere", "train.steps=5"],
            "train.steps=5: is not a field of parallel; --join takes only those, for example parallel.nodes=2\n",
        ),
        (
            ["--join", "nowhere", "parallel.nodes=[2", "devices=x"],
            "command line: parallel.devices: needs a whole number, not 'x'\ncommand line: parallel.nodes: not YAML: "
            "while parsing a flow sequence, expected ',' or ']', but got '<stream end>'\n",
        ),
    ],
    ids=["page", "resume", "export", "join", "join with a field", "join with a wrong value"],
)
def test_what_cannot_be_done_is_said_with_exit_code_2(argv, message, capsys):
    assert run_command(argv, capsys) == (2, message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--headless"], "--headless needs PRESET"),
        (["--resume"], "--resume needs RUN_DIR"),
        (
            ["--doctor", "train.steps=3"],
            "train.steps=3: only --headless, --certify, --plan, --fit, --import, --resume and --join take key=value",
        ),
        (["--fit"], "--fit needs PRESET"),
        (["--plan", "p", "--price", "2"], "--price goes with --fit or --film only; leave it out"),
        (["--headless", "a.yaml", "--doctor"], "argument --doctor: not allowed with argument --headless"),
        (["--headless", "a.yaml", "--what", "merged"], "--what goes with --export only; leave it out"),
        (
            ["--resume", "run", "--dtype", "fp32"],
            "--dtype goes with --export or --extract or --caption only; leave it out",
        ),
        (["--export", "run", "--rank", "4"], "--rank goes with --extract only; leave it out"),
        (["--caption", "pictures"], "--caption needs --model PATH, or --model demo to try it without a download"),
        (["--headless", "p", "--ranks", "2"], "--ranks goes with --caption only; leave it out"),
        (["--export", "run", "--run-dir", "other"], "--run-dir goes with --headless only; leave it out"),
        (["--resume", "run", "--slurm"], "--slurm goes with --headless only; leave it out"),
        (["--headless", "p", "--node-rank", "1"], "--node-rank goes with --resume or --join only; leave it out"),
        (["--join"], "--join needs RUN_DIR"),
        (["--headless", "p", "--slurm", "--kubernetes"], "argument --kubernetes: not allowed with argument --slurm"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(argv, message, capsys):
    code, err = run_command(argv, capsys)
    assert code == 2
    assert err == f"{message}{'' if '; ' in message else '; --help lists the options'}\n"


@pytest.mark.parametrize("argv", ["--headless {}.yaml", "--headless {}", "--plan ./{}", "--doctor --runs {}"])
def test_a_path_that_the_system_refuses_is_named_in_one_line(argv, capsys):
    long = "x" * 300
    assert command_line.main(argv.format(long).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert long in line
    assert line.endswith(": File name too long; name another path")


def test_options_may_stand_between_overrides(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    preset.write_text("name: fox\n")
    argv = ["--headless", str(preset), "train.steps=x", "--run-dir", str(tmp_path / "run"), "optim.lr=y"]
    code, err = run_command(argv, capsys)
    assert code == 2
    assert "train.steps" in err
    assert "optim.lr" in err


def test_a_wrong_preset_starts_nothing_and_writes_nothing(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    preset.write_text("model:\n  family: flux2\ndata:\n  path: photos\n")
    code, err = run_command(["--headless", str(preset), "--runs", str(tmp_path / "runs")], capsys)
    assert code == 2
    assert f"{preset}:4: data.path" in err
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "photos").mkdir()
    cfg = RunConfig(name="fox", model=ModelConfig(family="flux2"), data=DataConfig(path=str(tmp_path / "photos")))
    return RunDir.create(tmp_path, cfg, at=tmp_path / "fox")


def test_a_node_is_asked_for_its_number_where_no_scheduler_gave_it_one(run, capsys):
    message = "--join needs the number of this node: --node-rank 1, --node-rank 2 on the next, and so on\n"
    assert run_command(["--join", str(run.path)], capsys) == (2, message)


def test_a_run_folder_is_made_on_the_first_node_alone(run, tmp_path, monkeypatch, capsys):
    preset = tmp_path / "preset.yaml"
    preset.write_text(run.config_file.read_text())
    monkeypatch.setenv("SLURM_NODEID", "1")
    nodes = ["parallel.nodes=2", "parallel.rendezvous=node0:29400"]
    assert run_command(["--headless", str(preset), *nodes, "--runs", str(tmp_path / "runs")], capsys) == (
        2,
        "this is node 1, but the run folder is made on node 0: use --headless only there, and --join RUN_DIR here; "
        "or let --slurm write the job\n",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("nodes", "end"), [(2, "--node-rank 1"), (4, "--node-rank K  # K = 1 to 3, another on each")])
def test_the_other_nodes_are_told_what_to_type(run, nodes, end):
    assert torchrun.joining(run, nodes) == f"{sys.executable} {ROOT}/launch.py --join {run.path} {end}"


def test_a_run_that_is_to_export_nothing_is_exported_only_on_request(tmp_path, capsys):
    silent = RunConfig.model_validate(
        {"model": {"family": "flux2"}, "data": {"path": str(tmp_path)}, "export": {"what": "none"}}
    )
    run = RunDir.create(tmp_path, silent)
    assert run_command(["--export", str(run.path)], capsys) == (
        2,
        f"{run.config_file}: export.what is none; choose what to export with --what\n",
    )


@pytest.mark.parametrize("step", ["0", "-5", "1.5", "last", "9" * 5000])
def test_a_step_is_a_number_or_best(run, capsys, step):
    code, err = run_command(["--export", str(run.path), f"--step={step}"], capsys)
    assert (code, err.count("neither the step of a checkpoint, such as 50, nor best")) == (2, 1)


def test_an_export_that_does_not_fit_the_run_is_the_users_mistake(run, capsys):
    message = "export.what: full needs adapter.type none, not lora; use merged for base + adapter\n"
    assert run_command(["--export", str(run.path), "--what", "full"], capsys) == (2, message)


def test_resuming_with_a_wrong_override_leaves_the_config_as_it_was(run, capsys):
    before = run.config_file.read_text()
    code, err = run_command(["--resume", str(run.path), "train.steps=0"], capsys)
    assert code == 2
    assert "train.steps" in err
    assert run.config_file.read_text() == before
    assert not list(run.path.glob("config-*.yaml"))


def step_event(step: int) -> StepEvent:
    return StepEvent(
        step=step, loss=0.5, lr=1e-4, grad_norm=2.0, seconds=2.0, seconds_data=0.1, seconds_forward=0.6,
        seconds_backward=0.9, seconds_optimizer=0.2, seconds_communication=0.2, images_per_second=4.0,
    )  # fmt: skip


STORY = (
    StatusEvent(state="encoding", total=36),
    StatusEvent(state="encoding", done=1, total=36),
    StatusEvent(state="encoding", done=36, total=36),
    StatusEvent(state="loading", message="loaded 32.2 GiB in 41 s"),
    WarningEvent(message="fox.png is smaller than 64 pixels"),
    StatusEvent(state="training"),
    StatusEvent(state="training"),
    step_event(1),
    step_event(2),
    step_event(3),
    CheckpointEvent(step=3, path="checkpoints/step-000003"),
    SampleEvent(step=3, prompt="a fox", index=0, path="samples/step-000003-0.png"),
)


def length_of(steps, **more):
    data = {"model": {"family": "flux2"}, "data": {"path": "/pictures"}, "train": {"steps": steps} | more}
    return RunLength(RunConfig.model_validate(data))


def test_a_log_file_gets_a_line_per_change_and_the_last_step_before_each_result(capsys):
    with console.LineDisplay(length_of(10)) as face:
        face.summary.peaks.update({1: 300 * 2**20, 0: 200 * 2**20})
        for event in STORY:
            face.show(event)
    assert capsys.readouterr().out.splitlines() == [
        "encoding  0/36",
        "encoding  1/36",
        "encoding  36/36",
        "loading  loaded 32.2 GiB in 41 s",
        "warning: fox.png is smaller than 64 pixels",
        "training",
        "step 3/10  loss 0.5000  4.00 images/s  ETA 0:00:14  peak 0.29 GiB on rank 1",
        "step 3: checkpoint checkpoints/step-000003",
        "step 3: sample samples/step-000003-0.png",
    ]


def test_a_run_in_epochs_says_its_steps_once_they_are_known(capsys):
    length = LengthEvent(step=1, steps=40, epoch_steps=10, epoch=0.1)
    with console.LineDisplay(length_of(1000, epochs=4)) as face:
        for event in (step_event(1), StatusEvent(state="saving"), length, step_event(2), StatusEvent(state="sampling")):
            face.show(event)
    with console.LineDisplay(length_of(40)) as face:
        face.show(length)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/4 epochs  loss 0.5000  4.00 images/s  ETA unknown",
        "saving",
        "length: 40 steps, 10 per epoch",
        "step 2/40  epoch 0.2 of 4  loss 0.5000  4.00 images/s  ETA 0:01:16",
        "sampling",
    ]


def test_a_terminal_keeps_results_above_a_bar_with_the_figures(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with console.BarDisplay(length_of(10)) as face:
        for event in STORY:
            face.show(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "loading  loaded 32.2 GiB in 41 s",
        "warning: fox.png is smaller than 64 pixels",
        "step 3: checkpoint checkpoints/step-000003",
        "step 3: sample samples/step-000003-0.png",
    ]
    assert lines[-1].split() == ["training", "━━━━━━", "3/10", "loss", "0.5000", "4.00", "images/s", "ETA", "0:00:14"]


@pytest.mark.parametrize(
    ("columns", "steps", "shown"),
    [
        (80, 100, "training 3/100 loss 0.5000 4.00 images/s ETA 0:03:14 peak 0.44 GiB"),
        (80, 20_000, "training 3/20000 loss 0.5000 4.00 images/s ETA 11:06:34 peak 0.44 GiB"),
        (70, 20_000, "training 3/20000 loss 0.5000 4.00 images/s ETA 11:06:34"),
        (50, 100, "training 3/100 loss 0.5000 4.00 images/s"),
        (160, 100, "training 3/100 loss 0.5000 4.00 images/s ETA 0:03:14 peak 0.44 GiB on rank 1"),
    ],
)
def test_the_line_at_the_bottom_leaves_out_the_figures_that_would_wrap_it(
    capsys, monkeypatch, columns: int, steps: int, shown: str
):
    monkeypatch.setenv("COLUMNS", str(columns))
    with console.BarDisplay(length_of(steps)) as face:
        face.summary.peaks = {0: 1, 1: int(0.44 * GIB)}
        for event in STORY:
            face.show(event)
    line = re.sub("[━╸╺]+", "", capsys.readouterr().out.splitlines()[-1])
    assert line.split() == shown.split()


def test_the_time_left_has_the_pauses_for_samples_but_not_that_of_a_new_start(capsys):
    story = [replace(step_event(step), time=at) for step, at in ((1, 100.0), (2, 102.0), (3, 107.0))]
    assert eta_after(story, capsys) == "ETA 0:00:24", "7 steps of 2 s, and a pause of 3 s in 2 steps"
    again = [replace(step_event(step), time=at) for step, at in ((3, 907.0), (4, 909.0))]
    assert eta_after([*story, StatusEvent(state="starting"), *again], capsys) == "ETA 0:00:12"


def eta_after(story, capsys):
    with console.LineDisplay(length_of(10)) as face:
        for event in (*story, StatusEvent(state="exporting")):
            face.show(event)
    steps = [line for line in capsys.readouterr().out.splitlines() if " ETA " in line]
    return "ETA" + steps[-1].partition("ETA")[2]


def test_the_doctor_reports_each_requirement_of_the_project_and_a_remedy():
    assert {"torch", "diffusers", "peft", "transformers"} <= {requirement.name for requirement in requirements()}
    assert str(package(Requirement("pydantic>=99"))) == (
        f"fail  pydantic: {metadata.version('pydantic')} is not >=99; pip install 'pydantic>=99'"
    )
    assert str(package(Requirement("no-such-package"))) == (
        "fail  no-such-package: not installed; pip install 'no-such-package'"
    )


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            """case "$1" in
            topo) printf ' GPU0 GPU1 NIC0\\nGPU0 X SYS PIX\\nGPU1 SYS X PIX\\n';;
            *) echo 'NVIDIA H200, 143771, 12, 97, 61, GPU-1, 580.65.06, 9.0, Disabled'
               echo 'NVIDIA H200, 143771, 99000, [N/A], 55, GPU-2, 580.65.06, 9.0, Disabled';;
            esac""",
            [
                "ok    gpu 0: NVIDIA H200, 143771 MiB, 12 MiB in use",
                "warn  gpu 1: NVIDIA H200, 143771 MiB, 99000 MiB in use; end the processes that use it (nvidia-smi "
                "lists them), or choose another GPU",
                "ok    driver: 580.65.06, torch 2.13.0+cu130 can use it",
                "warn  links: SYS: some GPUs are connected only across CPU sockets; this slows down sharded training: "
                "prefer parallel.strategy ddp or hybrid if the model fits",
            ],
        ),
        (
            "echo 'Driver/library version mismatch'; exit 18",
            [
                "fail  gpu: nvidia-smi says: Driver/library version mismatch; "
                "reinstall the driver, or restart the machine"
            ],
        ),
    ],
    ids=["two", "broken"],
)
def test_the_doctor_reports_each_gpu_or_why_it_cannot(script, lines, tmp_path, monkeypatch):
    pretend(CU130, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert [str(check) for check in graphics()] == lines


T4 = "Tesla T4, 15360 MiB, 0 MiB in use"
A100 = "NVIDIA A100-SXM4-80GB MIG 3g.40gb, about 38912 MiB, for runs on one GPU"


@pytest.mark.parametrize(
    ("machine", "build", "visible", "lines"),
    [
        (
            TURING,
            CU130,
            None,
            [
                f"warn  gpu 0: {T4}, compute capability 7.5; bf16 needs 8.0 or more: set train.precision: fp32",
                "ok    driver: 580.65.06, torch 2.13.0+cu130 can use it",
            ],
        ),
        (
            OLD_DRIVER,
            CU130,
            None,
            [
                "ok    gpu 0: NVIDIA A100-SXM4-40GB, 40536 MiB, 0 MiB in use",
                "fail  driver: driver 450.51.06 is too old for torch 2.13.0+cu130: CUDA 13.0 needs 580 or newer; "
                "update the driver, install a torch built for CUDA 12, or set parallel.device: cpu",
            ],
        ),
        (
            MIXED,
            CPU,
            "1",
            [
                "ok    gpu 0: NVIDIA GeForce RTX 3060, 12288 MiB, 310 MiB in use",
                "ok    gpu 1: NVIDIA GeForce RTX 4090, 24564 MiB, 10 MiB in use",
                "ok    visible gpus: CUDA_VISIBLE_DEVICES leaves 1",
                "fail  driver: torch 2.13.0+cpu is built without CUDA and cannot use the NVIDIA GeForce RTX 4090 here; "
                "install the CUDA build (pip install torch), or set parallel.device: cpu",
                "ok    links: NV4 is the slowest link",
            ],
        ),
        (
            SLICED,
            CU130,
            None,
            [
                f"ok    gpu 1: {A100}",
                f"ok    gpu 2: {A100}",
                "ok    driver: 580.65.06, torch 2.13.0+cu130 can use it",
                "ok    links: NV4 is the slowest link",
            ],
        ),
        (
            HIDDEN,
            CU130,
            None,
            [
                "warn  visible gpus: nvidia-smi lists no GPU; a container needs --gpus all, a scheduler's job must ask "
                "for GPUs"
            ],
        ),
    ],
    ids=["turing", "old driver", "cpu build", "slices", "none"],
)
def test_the_doctor_says_what_torch_makes_of_the_gpus(machine, build, visible, lines, tmp_path, monkeypatch):
    install(machine, tmp_path, monkeypatch, build)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [str(check) for check in graphics()] == lines


def test_the_doctor_speaks_of_other_makers_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    pretend(Build("2.13.0+xpu", xpu="20250302"), monkeypatch)
    assert [str(check) for check in graphics()] == [
        "warn  gpu: torch 2.13.0+xpu is built for Intel GPUs: ShardStudio trains on NVIDIA GPUs, and here on the CPU"
    ]
    pretend(CPU, monkeypatch)
    assert [str(check) for check in graphics()] == ["ok    gpu: no NVIDIA driver found; training runs on the CPU"]


def test_the_doctor_warns_of_a_container_with_little_shared_memory(tmp_path):
    assert str(shared_memory(tmp_path / "shm")) == (
        f"warn  shared memory: no {tmp_path}/shm; mount it; in a container: --shm-size=8g"
    )


def test_the_doctor_tells_what_the_notebooks_lack(tmp_path, monkeypatch):
    wanted = requirements("notebook")
    assert {"ipykernel", "ipywidgets", "jupyterlab"} == {requirement.name for requirement in wanted}
    assert str(notebooks([Requirement("no-such-widgets"), *wanted])) == (
        "warn  notebooks: no-such-widgets not installed; for the notebooks: pip install 'shardstudio[notebook]'"
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert str(notebooks(wanted)) == (
        f"warn  notebooks: JupyterLab has no widgets: no {tmp_path}/share/jupyter/labextensions/@jupyter-widgets/"
        "jupyterlab-manager; for the notebooks: pip install 'shardstudio[notebook]'"
    )


def test_the_doctor_finds_this_machine_fit(tmp_path, capsys):
    assert command_line.main(["--doctor", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines)
    assert any(line.startswith("ok    torch: ") for line in lines)
    assert any(line.startswith("ok    notebooks: ipykernel ") for line in lines)


def test_a_run_is_renamed_and_named_as_at_first_by_the_command_line(tmp_path, capsys):
    config = RunConfig(name="fox", model=ModelConfig(family="flux2"), data=DataConfig(path=str(tmp_path)))
    folder = RunDir.create(tmp_path, config, tmp_path / "fox-20261124-211219-aebff6").path
    for name, title in (("Fox, rank 32", "Fox, rank 32"), ("", "fox")):
        assert command_line.main(["--rename", str(folder), name]) == 0
        said = capsys.readouterr().out
        assert said == f"{folder} is named {title} now; the folder and exported files keep their names\n"
        assert RunDir(folder).title == title
    assert run_command(["--rename", str(tmp_path), "x"], capsys)[1].startswith(f"{tmp_path}: not a run folder")
    assert "expected 2 arguments" in run_command(["--rename", str(folder)], capsys)[1]
    with full_disk():
        refused = run_command(["--rename", str(folder), "x"], capsys)
    assert refused == (2, "a file: cannot be written (File too large); free some space\n")
