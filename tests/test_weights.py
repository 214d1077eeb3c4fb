import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.config import InputError
from trainer.weights import TensorEntry, WeightFiles, safetensors_in


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {"a.weight": torch.zeros(2, 3), "b.count": torch.tensor(7), "c": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def error_of(file: Path) -> str:
    with pytest.raises(InputError) as caught:
        WeightFiles.read([file])
    return str(caught.value)


def test_reading_a_file_gives_the_place_shape_and_type_of_each_tensor(file):
    assert WeightFiles.read([file]).entries == {
        "a.weight": TensorEntry(file, "a.weight", (2, 3), "F32"),
        "b.count": TensorEntry(file, "b.count", (), "I64"),
        "c": TensorEntry(file, "c", (4,), "BF16"),
    }


def test_rename_gives_module_names_and_drops_what_the_module_does_not_have(file):
    files = WeightFiles.read([file], rename=lambda key: {"a.weight": "x.weight"}.get(key))
    assert len(files) == 1
    assert files.entries == {"x.weight": TensorEntry(file, "a.weight", (2, 3), "F32")}


def test_an_index_names_the_files_of_a_component_each_once(tmp_path):
    parts = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, parts[0])
    save_file({"c": torch.zeros(1)}, parts[1])
    weight_map = {"a": parts[0].name, "b": parts[0].name, "c": parts[1].name}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert safetensors_in(tmp_path, "model") == parts
    assert sorted(WeightFiles.read(parts).entries) == ["a", "b", "c"]


def test_a_component_without_index_is_a_single_file(file):
    assert safetensors_in(file.parent, "model") == [file]


def test_a_folder_without_weights_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(InputError) as caught:
        safetensors_in(tmp_path, "model")
    assert str(caught.value) == (
        f"{tmp_path}: neither model.safetensors nor model.safetensors.index.json; "
        "expected the weights of this component"
    )


def test_an_index_whose_files_are_missing_names_the_first(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"b": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(InputError) as caught:
        safetensors_in(tmp_path, "model")
    assert str(caught.value) == f"{tmp_path}: 1 of 2 weight files are missing, first model-1.safetensors"


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(InputError) as caught:
        safetensors_in(tmp_path, "model")
    assert str(caught.value) == f"{index}: not a safetensors index; download the folder again"


def test_a_missing_file_is_refused(tmp_path):
    file = tmp_path / "none.safetensors"
    assert error_of(file) == f"{file}: no such weight file; download it again"


def test_a_truncated_file_is_refused_with_both_sizes(file):
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-8])
    assert error_of(file) == f"{file}: truncated, {size - 8} of {size} bytes; download it again"


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"\x80\x02}q\x00." * 30,
        with_header(b"{ no json"),
        with_header(b"\xff\xfe"),
        with_header(b"[1, 2]"),
        with_header(b'{"a": 1}'),
        with_header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert error_of(file) == f"{file}: not a safetensors file; convert or download it again"
