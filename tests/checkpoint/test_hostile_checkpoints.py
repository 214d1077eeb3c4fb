"""Run folders of strangers: reading a checkpoint executes nothing, follows no path out of it, and says what is wrong.

The attacker adapts sizes and checksums in the manifest. Payloads only make a folder, which no test may find.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from app import notebook
from app.studio import Studio
from tests.checkpoint.test_save_and_restore import make_state, save, save_from_ranks
from tests.commands import launch_py, preset_folder
from tests.distributed import run_ranks
from tests.runs import alone, awaited, change_manifest, seal
from trainer.checkpoint.restore import StoredWeights, newest_intact, restore
from trainer.config.load import load_config
from trainer.run import process
from trainer.run.folder import RunDir
from trainer.run.manifest import complete
from trainer.system.errors import InputError

CONTENTS, METADATA, DATA = "contents.json", ".metadata", "__0_0.distcp"
VALUE, TENSOR = "optimizer.param_groups.0.amsgrad", "trainables.weight"


@dataclass
class Payload:
    """Makes a folder where it is unpickled."""

    marker: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.marker), 0o777, True)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """The folder that no attack may make."""
    folder = tmp_path / "executed"
    yield folder
    assert not folder.exists(), "a file of the checkpoint was executed"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A checkpoint of one rank."""
    save(tmp_path / "checkpoints", make_state(), 1)
    return tmp_path / "checkpoints" / "step-000001"


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def edit_contents(path: Path, edit: Callable[[Any], None]) -> None:
    contents = json.loads((path / CONTENTS).read_text())
    edit(contents)
    (path / CONTENTS).write_text(json.dumps(contents))
    seal(path)


def put(path: Path, name: str, content: bytes) -> None:
    """Let an entry, or the first piece of one, be other bytes, which are appended to its file."""

    def moves(contents: Any) -> None:
        pieces = [chunk["stored"] for chunk in contents["tensors"].get(name, {"chunks": ()})["chunks"]]
        piece = min(pieces or [contents["values"][name]], key=lambda one: one["file"])
        with (path / piece["file"]).open("ab") as stream:
            piece.update(start=stream.tell(), length=stream.write(content))

    edit_contents(path, moves)


def refused(act: Callable[[], object], path: Path) -> str:
    """The sentence that an act on a checkpoint ends with, without the path it begins with."""
    with pytest.raises(InputError) as error:
        act()
    sentence = str(error.value)
    assert sentence.startswith(str(path))
    assert sentence.isprintable()
    assert len(sentence) < 1000
    return sentence.removeprefix(f"{path}")


def read_all(path: Path) -> None:
    dict(StoredWeights(path))


def resume(path: Path) -> None:
    """Do what a rank does: find the newest intact checkpoint and restore it."""
    found, problems = newest_intact(path.parent, alone())
    assert (found, problems) == (path, [])
    restore(path, make_state(seed=5))


def test_the_table_of_torch_is_not_read(sound: Path, marker: Path) -> None:
    (sound / METADATA).write_bytes(pickle.dumps(Payload(marker)))
    seal(sound)
    read_all(sound)
    resume(sound)


@pytest.mark.parametrize("act", [read_all, resume])
@pytest.mark.parametrize("name", [VALUE, TENSOR])
def test_an_entry_that_is_a_program_is_refused_and_not_run(
    sound: Path, marker: Path, name: str, act: Callable[[Path], None]
) -> None:
    put(sound, name, saved(Payload(marker)))
    if (act, name) == (read_all, VALUE):
        return act(sound)  # settings of the optimizer are not part of the weights
    assert refused(lambda: act(sound), sound / DATA) == (
        f": '{name}' holds more than numbers, names and tensors; it may be made to run a program: "
        "remove this checkpoint"
    )
    return None


def test_a_checkpoint_is_read_bit_for_bit(tmp_path: Path) -> None:
    mine, other = make_state(seed=1), make_state(seed=2)
    save(tmp_path, mine, 7)
    path = tmp_path / "step-000007"
    weights = StoredWeights(path)
    assert all(torch.equal(weights[name], mine.trainables[name]) for name in weights)
    assert restore(path, other).step == 7
    for ours, theirs in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, tensor in mine.optimizer.state[ours].items():
            assert torch.equal(tensor, other.optimizer.state[theirs][key])


@pytest.mark.slow
def test_shards_of_three_ranks_some_of_them_empty_are_put_together(tmp_path: Path) -> None:
    run_ranks(3, save_from_ranks, tmp_path)
    assert StoredWeights(tmp_path / "step-000002")["part"].tolist() == list(range(64))


def first_chunk(contents: Any) -> Any:
    return contents["tensors"][TENSOR]["chunks"][0]


def stored_in(name: str) -> Callable[[Any], None]:
    return lambda contents: first_chunk(contents)["stored"].update(file=name)


LEADS_OUT = "is not a file in this folder"
HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "above": (stored_in("../secret.distcp"), f"'../secret.distcp' {LEADS_OUT}"),
    "absolute": (stored_in("/dev/zero"), f"'/dev/zero' {LEADS_OUT}"),
    "link": (stored_in("link.distcp"), f"'link.distcp' {LEADS_OUT}"),
    "pipe": (stored_in("pipe.distcp"), f"'pipe.distcp' {LEADS_OUT}"),
    "nothing": (stored_in(""), f"'' {LEADS_OUT}"),
    "folder": (stored_in(".."), f"'..' {LEADS_OUT}"),
    "absent": (stored_in("__9_0.distcp"), f"'__9_0.distcp' {LEADS_OUT}"),
    "line break": (stored_in("a\nb"), f"'a\\nb' {LEADS_OUT}"),
    "end": (
        lambda contents: first_chunk(contents)["stored"].update(start=10**6),
        f"'{TENSOR}' ends at byte 1001833 of {DATA}, which has ",
    ),
    "negative": (
        lambda contents: first_chunk(contents)["stored"].update(start=-1),
        f"tensors.{TENSOR}.chunks.0.stored.start: Input should be greater than or equal to 0",
    ),
    "size": (
        lambda contents: contents["tensors"][TENSOR].update(shape=[2**40, 2**40]),
        f"the pieces of '{TENSOR}' do not make up its shape",
    ),
    "huge": (
        lambda contents: (
            contents["tensors"][TENSOR].update(shape=[2**40, 8]),
            first_chunk(contents).update(shape=[2**40, 8]),
        ),
        f"'{TENSOR}' has more numbers than bytes in {DATA}",
    ),
    "twice": (
        lambda contents: contents["values"][VALUE].update(first_chunk(contents)["stored"]),
        "byte ",
    ),
    "dims": (
        lambda contents: first_chunk(contents).update(offsets=[0]),
        f"the pieces of '{TENSOR}' do not make up its shape",
    ),
    "type": (
        lambda contents: contents["tensors"][TENSOR].update(dtype="nn"),
        f"tensors.{TENSOR}.dtype: Input should be ",
    ),
    "letters": (
        lambda contents: contents["values"].update({"a\nb" * 10**5: contents["values"][VALUE]}),
        r"'values.a\nba\nb",
    ),
    "field": (lambda contents: contents.pop("values"), "values: Field required"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_table_that_leads_out_of_the_checkpoint_or_lies_is_refused(sound: Path, attack: str) -> None:
    (sound.parent / "secret.distcp").write_bytes((sound / DATA).read_bytes())
    (sound / "link.distcp").symlink_to(sound.parent / "secret.distcp")
    os.mkfifo(sound / "pipe.distcp")
    edit, complaint = HOSTILE[attack]
    edit_contents(sound, edit)
    for act in (StoredWeights, lambda path: restore(path, make_state())):
        said = refused(lambda act=act: act(sound), sound / CONTENTS)
        assert said.startswith(f": damaged ({complaint}")
        assert said.endswith("); remove this checkpoint, so that the one before it is taken")


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"tensors": 1}', b"null"])
def test_a_table_that_is_no_table_is_refused(sound: Path, content: bytes) -> None:
    (sound / CONTENTS).write_bytes(content)
    seal(sound)
    assert refused(lambda: StoredWeights(sound), sound / CONTENTS).startswith(": damaged (")


@pytest.mark.parametrize(
    ("name", "value", "present"),
    [
        ("amsgrad", "yes", "False"),
        ("betas", (0.9,), "(0.9, 0.999)"),
        ("betas", (0.9, "x"), "(0.9, 0.999)"),
        ("betas", 0.9, "(0.9, 0.999)"),
        ("params", ["weight", "other"], "['weight', 'bias']"),
        ("params", [["weight"], {}], "['weight', 'bias']"),
    ],
)
def test_a_setting_of_another_kind_is_refused(sound: Path, name: str, value: object, present: str) -> None:
    name = f"optimizer.param_groups.0.{name}"
    put(sound, name, saved(value))
    assert refused(lambda: resume(sound), sound) == (
        f": '{name}' is {value!r}, not like {present}; remove this checkpoint, so that the one before it is taken"
    )


def test_settings_that_the_config_changed_do_not_keep_a_checkpoint_from_being_read(sound: Path) -> None:
    other = make_state()
    other.optimizer.param_groups[0].update(betas=(0.5, 0.6), lr=1, foreach=True)
    restore(sound, other)
    assert other.optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def squeezed(value: Any) -> bytes:
    """A file of torch.save whose parts are compressed: a bomb."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(value))) as whole, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name))
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (squeezed(torch.zeros(8, 8)), "is compressed"),
        (saved(torch.zeros(4, 16)), "has shape [4, 16], not [8, 8]"),
        (saved(torch.zeros(8, 8, dtype=torch.float64)), "is float64, not float32"),
        (saved([1, 2]), "is not a tensor"),
        (b"no archive" * 100, "is not a file of torch"),
        (saved(torch.zeros(8, 8))[:-100], "is not a file of torch"),
    ],
    ids=["bomb", "shape", "type", "list", "garbage", "torn"],
)
@pytest.mark.parametrize("act", [read_all, resume])
def test_a_tensor_that_is_not_what_the_table_says_is_refused(
    sound: Path, act: Callable[[Path], None], content: bytes, complaint: str
) -> None:
    put(sound, TENSOR, content)
    said = refused(lambda: act(sound), sound / DATA)
    assert said == f": '{TENSOR}' {complaint}; remove this checkpoint, so that the one before it is taken"


@pytest.mark.parametrize("name", ["/dev/zero", "../../pipe", "pipe"])
def test_a_manifest_that_names_what_never_ends_is_passed_over(sound: Path, name: str) -> None:
    for place in (sound / "pipe", sound.parent.parent / "pipe"):
        os.mkfifo(place)
    facts = json.loads((sound / "manifest.json").read_text())
    change_manifest(sound, checksums=facts["checksums"] | {name: "0"})
    found, (problem,) = newest_intact(sound.parent, alone())
    assert found is None
    assert problem.endswith(f"'{name}' {LEADS_OUT}")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"files": []},
        {"batch_sizes": 3},
        {"batch_sizes": [[1]]},
        {"config": 3},
        {"skipped": None, "validation_loss": "low"},
        {"place": [1]},
    ],
    ids=str,
)
def test_a_manifest_with_other_values_is_that_of_no_complete_checkpoint(sound: Path, changes: dict[str, Any]) -> None:
    change_manifest(sound, **changes)
    assert complete(sound.parent) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real run of two ranks, which has ended."""
    folder = preset_folder(tmp_path_factory.mktemp("stranger"))
    done = launch_py(folder, "--headless", "preset.yaml", "--run-dir", "runs/fox")
    assert done.returncode == 0, done.stderr
    return folder


ATTACKS: dict[str, Callable[[Path, Path], object]] = {
    "tensor": lambda path, marker: put(path, first_tensor(path), saved(Payload(marker))),
    "path": lambda path, marker: edit_contents(path, leads_out),
}


def first_tensor(path: Path) -> str:
    tensors = json.loads((path / CONTENTS).read_text())["tensors"]
    return next(
        name
        for name, tensor in tensors.items()
        if name.startswith("trainables.") and any(chunk["stored"]["file"] == DATA for chunk in tensor["chunks"])
    )


def leads_out(contents: Any) -> None:
    for tensor in contents["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["stored"]["file"] = "/dev/zero"


def stranger(finished: Path, tmp_path: Path, marker: Path, attack: str) -> RunDir:
    run = RunDir(shutil.copytree(finished / "runs" / "fox", tmp_path / "runs" / "downloaded"))
    (run.path / "export" / "fox.safetensors").unlink()
    ATTACKS[attack](complete(run.checkpoints)[-1], marker)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_of_a_stranger_is_neither_exported_nor_resumed_by_the_command(
    finished: Path, tmp_path: Path, marker: Path, attack: str
) -> None:
    run = stranger(finished, tmp_path, marker, attack)
    exported = launch_py(finished, "--export", run.path)
    assert (exported.returncode, exported.stdout) == (2, "")
    assert exported.stderr.startswith(f"{run.checkpoints}/step-000002/")
    assert exported.stderr.count("\n") == 1
    resumed = launch_py(finished, "--resume", run.path, "train.steps=4")
    assert resumed.returncode == 2
    assert resumed.stderr.startswith(f"error: {run.checkpoints}/step-000002/")
    assert resumed.stderr.count("\n") == 1
    assert not list(run.path.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_setting_of_a_stranger_is_not_run_by_a_resume(finished: Path, tmp_path: Path, marker: Path) -> None:
    run = stranger(finished, tmp_path, marker, "tensor")
    path = complete(run.checkpoints)[-1]
    shutil.copytree(finished / "runs" / "fox" / "checkpoints" / path.name, path, dirs_exist_ok=True)
    put(path, VALUE, saved(Payload(marker)))
    resumed = launch_py(finished, "--resume", run.path, "train.steps=4")
    assert resumed.returncode == 2
    assert resumed.stderr.count("\n") == 1
    assert f"'{VALUE}' holds more than numbers, names and tensors" in resumed.stderr


@pytest.mark.slow
def test_a_run_of_a_stranger_is_neither_exported_nor_resumed_by_a_notebook(
    finished: Path, tmp_path: Path, marker: Path
) -> None:
    run = stranger(finished, tmp_path, marker, "tensor")
    said = refused(lambda: awaited(notebook.export(run, "adapter")), complete(run.checkpoints)[-1])
    assert "holds more than numbers, names and tensors" in said
    with pytest.raises(RuntimeError, match="holds more than numbers, names and tensors"):
        awaited(notebook.ended(notebook.resume(run, "train.steps=4")))


@pytest.mark.slow
def test_a_run_of_a_stranger_is_neither_exported_nor_resumed_by_the_page(
    finished: Path, tmp_path: Path, marker: Path
) -> None:
    run = stranger(finished, tmp_path, marker, "tensor")
    run.replace_config(load_config(run.config_file, ["train.steps=4"]).config)
    studio = Studio(run.path.parent)
    studio.export(run, "adapter", "auto", "fp32")
    with pytest.raises(InputError, match="holds more than numbers, names and tensors"):
        while studio.export_state(run).startswith("Exporting"):
            time.sleep(0.1)
    studio.resume(run)
    while process.alive(run):
        time.sleep(0.1)
    process.record_end(run)
    error = studio.follower(run).view().error
    assert error is not None
    assert "holds more than numbers, names and tensors" in error.message
