import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles, read_tensor, safetensors_in
from trainer.weights.tensors import OpenFiles, TensorEntry


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
    assert error_of(file) == f"{file}: not a safetensors file; convert it to .safetensors, or download it again"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A file in the original layout: q and k in one tensor, a norm's scale behind its shift."""
    tensors = {
        "model.diffusion_model.qk.weight": torch.arange(10.0).view(5, 2),
        "model.diffusion_model.last.weight": torch.arange(4.0),
        "model.diffusion_model.table": torch.arange(6.0),
        "first_stage_model.conv.weight": torch.zeros(1),
    }
    save_file(tensors, tmp_path / "original.safetensors")
    return tmp_path / "original.safetensors"


LAYOUT = (
    Fused("model.diffusion_model.qk.weight", ("q.weight", "k.weight")),
    Fused("model.diffusion_model.last.weight", ("norm.weight",), halves_swapped=True),
    Fused("model.diffusion_model.table", ("scale", "shift"), flattened=True),
)
SHAPES = {"q.weight": (2, 2), "k.weight": (3, 2), "norm.weight": (4,), "scale": (1, 2), "shift": (2, 2)}


def test_tensors_of_the_original_layout_are_rows_of_those_in_the_file(original):
    entries = WeightFiles.read([original]).by_our_names(LAYOUT, SHAPES).entries
    assert {name: read_tensor(entry).tolist() for name, entry in entries.items()} == {
        "q.weight": [[0, 1], [2, 3]],
        "k.weight": [[4, 5], [6, 7], [8, 9]],
        "norm.weight": [2, 3, 0, 1],
        "scale": [[0, 1]],
        "shift": [[2, 3], [4, 5]],
    }


def test_rows_of_a_flattened_tensor_are_read_alone_and_it_is_split_as_it_was_joined(original):
    entry = WeightFiles.read([original]).by_our_names(LAYOUT, SHAPES).entries["shift"]
    assert entry.rows(OpenFiles(), 1, 2).tolist() == [[4, 5]]
    parts = (torch.tensor([[0, 1]]), torch.tensor([[2, 3], [4, 5]]))
    whole = LAYOUT[-1].join(parts)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert LAYOUT[-1].shape([part.shape for part in parts]) == whole.shape
    assert all(a.equal(b) for a, b in zip(LAYOUT[-1].split(whole, (1, 2)), parts, strict=True))


def test_any_rows_of_a_tensor_with_swapped_halves_are_read_in_their_order(original):
    entry = WeightFiles.read([original]).by_our_names(LAYOUT, SHAPES).entries["norm.weight"]
    files = OpenFiles()
    found = {(i, j): entry.rows(files, i, j).tolist() for i in range(4) for j in range(i, 5)}
    assert found == {(i, j): [2, 3, 0, 1][i:j] for i in range(4) for j in range(i, 5)}


def test_files_in_diffusers_layout_stay_as_they_are(file):
    files = WeightFiles.read([file])
    assert files.by_our_names(LAYOUT, SHAPES) is files


def test_an_original_tensor_of_another_shape_is_refused_with_both(original):
    with pytest.raises(InputError) as caught:
        WeightFiles.read([original]).by_our_names(LAYOUT, {**SHAPES, "k.weight": (4, 2)})
    assert str(caught.value) == (
        f"{original}: 'model.diffusion_model.qk.weight' has shape [5, 2], the model needs [6, 2]; "
        "the file and the folder's config.json belong to different models"
    )
