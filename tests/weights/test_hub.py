"""Models in the Hugging Face cache: what is here, what is missing, and how to get it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.weights.hub_server import COMMIT, Hub, HubServer
from trainer.config.models import published_models
from trainer.system.errors import InputError
from trainer.weights.hub import CachedModel, cached, find_folder

FLUX2 = "black-forest-labs/FLUX.2-dev"
SD35 = "stabilityai/stable-diffusion-3.5-large"
PARTS = ("transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
         "transformer/diffusion_pytorch_model-00002-of-00002.safetensors")  # fmt: skip
INDEX = json.dumps({"weight_map": {"a": Path(PARTS[0]).name, "b": Path(PARTS[1]).name}}).encode()
FILES = {
    "model_index.json": b'{"_class_name": "Pipe", "transformer": ["d", "T"], "vae": ["d", "V"]}',
    "transformer/config.json": b"{}",
    "transformer/diffusion_pytorch_model.safetensors.index.json": INDEX,
    PARTS[0]: b"1" * 1000,
    PARTS[1]: b"2" * 500,
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": b"v" * 100,
    "flux2-dev.safetensors": b"the same again" * 100,
    "README.md": b"read",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def command_line_download(command: str, cache: Path, server: HubServer) -> None:
    """Run `hf download ...` as a user would type it."""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    words = shlex.split(command)
    argv = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def store(cache: Path, model_id: str, names: tuple[str, ...], has_listing: bool = True) -> Path:
    """Write a cache as the hub's library does, with these files of FILES. Returns the snapshot."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for name in names:
        blob = folder / "blobs" / f"blob-{name.replace('/', '-')}"
        pointer = snapshot / name
        for path in (blob, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(FILES[name])
        pointer.symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    if has_listing:
        (folder / "trees").mkdir()
        listing = {name: {"size": len(content), "blob_id": "0"} for name, content in FILES.items()}
        (folder / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    return snapshot


NEEDED = tuple(name for name in FILES if published_models()[FLUX2].needs(name))


def test_what_the_command_downloads_is_a_whole_model(cache):
    """The listing that the hub's library keeps names all files, also those that were left out."""
    model = published_models()[FLUX2]
    with HubServer(Hub(FLUX2, FILES)) as server:
        command_line_download(model.download_command, cache, server)
    num_bytes = sum(len(FILES[name]) for name in NEEDED)
    assert cached(FLUX2) == CachedModel(num_bytes, is_complete=True)
    folder = find_folder("model.path", FLUX2)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(NEEDED)


def test_a_model_that_was_never_downloaded_is_refused_with_size_licence_login_and_command(cache):
    assert cached(FLUX2) == CachedModel(0, is_complete=False)
    assert refusal(FLUX2) == (
        f"model.path {FLUX2}: neither a folder nor in the local Hugging Face cache. "
        "FLUX.2 dev is a download of 113 GB. Its licence is FLUX Non-Commercial License: non-commercial. "
        f"It is gated: accept its licence on https://huggingface.co/{FLUX2}, and log in with `hf auth login`. "
        f"Then download it with `{published_models()[FLUX2].download_command}`, "
        "or name a diffusers folder, or set model.path: tiny"
    )


def test_a_model_without_a_gate_is_refused_with_less_to_do(cache):
    assert "gated" not in refusal("Qwen/Qwen3-8B") and "16 GB" in refusal("Qwen/Qwen3-8B")
    assert "licence" not in refusal("black-forest-labs/flux-3-image-klein-base")


@pytest.mark.parametrize("has_listing", [True, False], ids=["with a listing", "of an older library"])
@pytest.mark.parametrize(
    "absent", [*PARTS, "vae/diffusion_pytorch_model.safetensors", "model_index.json"], ids=lambda name: name[-12:]
)
def test_a_download_that_was_interrupted_is_refused(cache, absent, has_listing):
    here = tuple(name for name in NEEDED if name != absent)
    store(cache, FLUX2, here, has_listing)
    assert cached(FLUX2) == CachedModel(sum(len(FILES[name]) for name in here), is_complete=False)
    assert refusal(FLUX2).startswith(f"model.path {FLUX2}: only 0.0 GB of it are in the local Hugging Face cache; ")
    assert has_listing is False or f"; {absent} is missing. FLUX.2 dev is a download of 113 GB." in refusal(FLUX2)


@pytest.mark.parametrize("has_listing", [True, False], ids=["with a listing", "of an older library"])
def test_a_whole_model_is_found(cache, has_listing):
    snapshot = store(cache, FLUX2, NEEDED, has_listing)
    assert cached(FLUX2).is_complete and find_folder("model.path", FLUX2) == snapshot


def test_a_component_that_is_absent_is_refused_also_without_a_listing(cache):
    store(cache, FLUX2, tuple(name for name in NEEDED if not name.startswith("vae/")), has_listing=False)
    assert "; vae/config.json is missing." in refusal(FLUX2)


def test_a_file_whose_content_was_deleted_is_missing(cache):
    snapshot = store(cache, FLUX2, NEEDED)
    (snapshot / PARTS[0]).resolve().unlink()
    assert not cached(FLUX2).is_complete and f"; {PARTS[0]} is missing." in refusal(FLUX2)


def test_only_what_is_needed_counts_and_what_has_no_name_yet(cache):
    store(cache, FLUX2, tuple(FILES))
    needed = sum(len(FILES[name]) for name in NEEDED)
    assert cached(FLUX2) == CachedModel(needed, is_complete=True)
    blobs = cache / f"models--{FLUX2.replace('/', '--')}" / "blobs"
    (blobs / "abc").write_bytes(b"whole")
    (blobs / "def.incomplete").write_bytes(b"part")
    (blobs / "def.01234567.incomplete").write_bytes(b"left by another program, which begins again")
    assert cached(FLUX2) == CachedModel(needed + 9, is_complete=True)


def test_an_encoder_that_a_run_can_do_without_may_be_absent_but_not_in_part(cache):
    model = published_models()[SD35]
    names = tuple(name for name in FILES if model.needs(name))
    snapshot = store(cache, SD35, names)
    listing = cache / f"models--{SD35.replace('/', '--')}" / "trees" / f"{COMMIT}.json"
    named = {name: {} for name in (*names, "text_encoder_3/config.json", "text_encoder_3/model-1.safetensors")}
    listing.write_text(json.dumps({"format_version": 1, "files": named}))
    assert not cached(SD35).is_complete and find_folder("model.path", SD35) == snapshot
    (snapshot / "text_encoder_3").mkdir()
    (snapshot / "text_encoder_3" / "config.json").write_text("{}")
    assert "; text_encoder_3/model-1.safetensors is missing." in refusal(SD35)


def test_a_model_that_no_preset_trains_is_taken_as_it_is(cache):
    assert refusal("org/other") == (
        "model.path org/other: neither a folder nor in the local Hugging Face cache. "
        "Download it with `hf download org/other`, name a diffusers folder, or set model.path: tiny"
    )
    snapshot = store(cache, "org/other", NEEDED[:1])
    assert find_folder("model.path", "org/other") == snapshot


def test_a_damaged_cache_is_an_absent_model(cache):
    snapshot = store(cache, FLUX2, NEEDED)
    (snapshot.parents[1] / "trees" / f"{COMMIT}.json").write_text("{")
    assert cached(FLUX2).is_complete, "which its files say themselves"
    (snapshot.parents[1] / "refs" / "main").write_text("../../secret")
    assert refusal(FLUX2).startswith(f"model.path {FLUX2}: neither a folder nor in the local Hugging Face cache. ")
    shutil.rmtree(snapshot.parents[1])
    assert cached(FLUX2) == CachedModel(0, is_complete=False)


def test_the_demo_model_is_always_here(cache):
    assert cached("demo") == CachedModel(0, is_complete=True)


def refusal(model_id: str) -> str:
    with pytest.raises(InputError) as refused:
        find_folder("model.path", model_id)
    return str(refused.value)
