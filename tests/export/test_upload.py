"""Uploads to a hub on this machine, each in a process of its own, and the model card."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.web.served_files import Downloads
from tests.launcher.hub import TOKEN, Hub, Repository, serving
from tests.runs import make_pictures, make_text, run_config, text_config
from trainer.export.card import SECOND_NAME, model_card, published
from trainer.export.upload import Upload
from trainer.launcher.jobs import uploads
from trainer.run.events import EventWriter, ExportEvent, SampleEvent, StepEvent
from trainer.run.folder import LINK, RunDir
from trainer.run.process import worker_environment
from trainer.run.samples import Film, FilmedPrompt
from trainer.system.errors import InputError

WEIGHTS, PIXELS = b"the weights", b"the pixels"
SECONDS = {f"seconds{part}": 0.1 for part in ("", "_data", "_forward", "_backward", "_optimizer", "_communication")}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as state:
        yield state


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that ended after 30 steps with an adapter and a sample of each of two prompts."""
    pictures = make_pictures(tmp_path / "pictures", count=3)
    model = {"family": "flux2", "path": "black-forest-labs/FLUX.2-dev"}
    cfg = run_config(pictures, name="my-fox", model=model, data__trigger="TOK")
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
    (run.export / "my-fox.safetensors").write_bytes(WEIGHTS)
    for step in (0, 30):
        for index in (0, 1):
            (run.samples / f"step-{step:06d}-{index}.png").write_bytes(PIXELS + bytes([step, index]))
    steps = [StepEvent(step=30, loss=0.5, lr=1e-4, grad_norm=1.0, **SECONDS)]
    record(run, *steps, ExportEvent(path="export/my-fox.safetensors", what="adapter", format="auto"))
    prompts = ("TOK *in* the\nsnow", 'a "quoted" <b>TOK</b>: #1')
    for step in (0, 30):
        files = (f"samples/step-{step:06d}-{index}.png" for index in (0, 1))
        record(
            run,
            *(
                SampleEvent(step=step, prompt=p, index=i, path=f)
                for i, (p, f) in enumerate(zip(prompts, files, strict=True))
            ),
        )
    return run


def record(run: RunDir, *events: Any) -> None:
    with EventWriter(run.events_file) as writer:
        for event in events:
            writer.write(event)


def uploaded(run: RunDir, hub: Hub, *arguments: str, token: str = TOKEN, url: str = "") -> tuple[int, str]:
    """The exit code and the output of the command."""
    environment = worker_environment() | {
        "HF_ENDPOINT": url or hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "HF_HOME": str(run.path.parent / "home"),
    }
    argv = [sys.executable, "-m", "trainer.export.upload", str(run.path), *arguments]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 2), done.stderr
    return done.returncode, done.stdout.strip()


def test_the_export_the_card_and_the_newest_samples_are_uploaded(run: RunDir, hub: Hub) -> None:
    before = hub.commits
    assert uploaded(run, hub, "--repo=ada/fox", "--private", "--yes") == (0, f"{hub.url}/ada/fox")
    repository = hub.repositories["ada/fox"]
    assert repository.private
    assert hub.commits == before + 1
    assert repository.files == {
        "README.md": model_card(run, "ada/fox").encode(),
        "my-fox.safetensors": WEIGHTS,
        "samples/step-000030-0.png": PIXELS + b"\x1e\x00",
        "samples/step-000030-1.png": PIXELS + b"\x1e\x01",
    }


def test_nothing_is_uploaded_without_consent_or_over_files_of_others(run: RunDir, hub: Hub) -> None:
    code, said = uploaded(run, hub, "--repo=ada/asked")
    assert (code, said.splitlines()[0], said.splitlines()[-1]) == (
        2,
        "4 files (0.0 MB) to ada/asked, which everyone can see:",
        "add --yes to upload this",
    )
    assert "ada/asked" not in hub.repositories
    hub.repositories["ada/held"] = Repository(files={"README.md": b"precious"})
    held = "ada/held: exists and has 1 files, first README.md; choose another name, or allow to overwrite (--overwrite)"
    assert uploaded(run, hub, "--repo=ada/held", "--yes") == (2, held)
    assert hub.repositories["ada/held"].files == {"README.md": b"precious"}
    public = "ada/held: exists and is public; make it private on the hub, or choose another name"
    assert uploaded(run, hub, "--repo=ada/held", "--private", "--yes") == (2, public)
    hub.repositories["ada/held"].files["notes.txt"] = b"kept"
    assert uploaded(run, hub, "--repo=ada/held", "--overwrite", "--yes")[0] == 0
    assert hub.repositories["ada/held"].files["notes.txt"] == b"kept"


def test_the_film_is_uploaded_and_the_card_shows_it(run: RunDir, hub: Hub) -> None:
    names, contents = ("prompt-1.webp", "prompt-1.mp4", "prompt-1.jpg"), (b"loop", b"video", b"sheet")
    run.film.mkdir()
    for name, content in zip(names, contents, strict=True):
        (run.film / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in zip(names, contents, strict=True)}
    loop, video, sheet = names
    prompt = "TOK *in* the\nsnow"
    one = FilmedPrompt(0, prompt, (0, 30), loop, sheet, video)
    changed = FilmedPrompt(1, "another", (0, 30), "prompt-2.webp", "prompt-2.jpg")
    Film((one, changed), digests).write(run)
    assert uploaded(run, hub, "--repo=ada/film", "--yes")[0] == 0
    files = hub.repositories["ada/film"].files
    assert {name: files[name] for name in files if name.startswith("film/")} == {
        f"film/{name}": content for name, content in zip(names, contents, strict=True)
    }
    shown = "TOK \\*in\\* the snow"
    assert (
        f"![{shown}](film/prompt-1.webp)\n\n![Before, during and after training: {shown}](film/prompt-1.jpg)\n\n"
        f"*{shown}* ([loop](film/prompt-1.webp), [video](film/prompt-1.mp4))\n\n## Use"
    ) in files["README.md"].decode()


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("", "hf_abcdefghijklmnopqrstuvwx", "README.md: holds a token of the hub"),
        ("", "{runs}/private/fox.png", "README.md: holds a path of this machine"),
        ("notes.txt", "hf_abcdefghijklmnopqrstuvwx", "lora/notes.txt: holds a token of the hub"),
        ("train.json", '{"from": "{runs}/x"}', "lora/train.json: holds a path of this machine"),
    ],
)
def test_a_token_or_a_path_of_this_machine_ends_an_upload(
    run: RunDir, hub: Hub, file: str, text: str, sentence: str
) -> None:
    text = text.replace("{runs}", str(run.path.parent))
    if file:
        (run.export / "lora").mkdir()
        (run.export / "lora" / file).write_text(text)
        record(run, ExportEvent(path="export/lora", what="adapter", format="peft"))
    else:
        record(run, SampleEvent(step=30, prompt=text, index=0, path="samples/step-000030-0.png"))
    code, said = uploaded(run, hub, "--repo=ada/private", "--yes")
    assert (code, said.startswith(sentence), "ada/private" in hub.repositories) == (2, True, False)


def test_what_keeps_an_upload_from_happening_is_a_sentence(run: RunDir, hub: Hub) -> None:
    login = "log in with `hf auth login`, with a token that may write, or set HF_TOKEN"
    arguments = ("--repo=ada/none", "--yes")
    assert uploaded(run, hub, *arguments, token="") == (2, f"the hub does not know who you are: {login}")
    assert uploaded(run, hub, *arguments, token="hf_old") == (2, f"the hub refuses your token: {login}")
    words = "You don't have the rights to create a model under this namespace"
    denied = f"bob/fox: you may not write there ({words}); choose your own name as OWNER, or {login}"
    assert uploaded(run, hub, "--repo=bob/fox", "--yes") == (2, denied)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, said = uploaded(run, hub, *arguments, url=address)
    assert code == 2
    assert said.startswith(f"{address} cannot be reached (")
    assert "ada/none" not in hub.repositories


def test_the_page_starts_an_upload_and_reads_how_it_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code = uploads.begin(run, "ada/fox", False, False).wait()
    said = "the hub is not used, because HF_HUB_OFFLINE is set; remove it to upload"
    assert (code, uploads.output(run, code)) == (2, said)
    with pytest.raises(InputError, match="repo: 'fox' is not a name on the hub; write OWNER/NAME"):
        Upload("fox")
    with EventWriter(run.events_file) as events:  # the folder may be a stranger's
        events.write(ExportEvent(path="export/my-fox.safetensors", what="else", format="peft"))
    with pytest.raises(InputError, match="an export of 'else'; only exports of adapter, merged, full"):
        uploads.begin(run, "ada/fox", False, False)
    (run.export / "my-fox.safetensors").unlink()
    with pytest.raises(InputError, match="nothing was exported, or the files are gone; export the run first"):
        uploads.begin(run, "ada/fox", False, False)


def front_of(card: str) -> dict[str, Any]:
    front: dict[str, Any] = yaml.safe_load(card.split("---\n", 2)[1])
    return front


def test_the_card_says_what_the_hub_and_a_reader_need(run: RunDir) -> None:
    card = model_card(run, "ada/fox", "apache-2.0")
    assert front_of(card) == {
        "base_model": "black-forest-labs/FLUX.2-dev",
        "base_model_relation": "adapter",
        "license": "apache-2.0",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["lora", "diffusers", "text-to-image", "shardstudio"],
        "instance_prompt": "TOK",
        "widget": [
            {"text": "TOK *in* the\nsnow", "output": {"url": "samples/step-000030-0.png"}},
            {"text": 'a "quoted" <b>TOK</b>: #1', "output": {"url": "samples/step-000030-1.png"}},
        ],
    }
    assert "Write `TOK` in a prompt to use what it was trained on." in card
    assert 'pipe.load_lora_weights("ada/fox", weight_name="my-fox.safetensors")' in card
    assert "![TOK \\*in\\* the snow](samples/step-000030-0.png)" in card
    assert 'a "quoted" &lt;b&gt;TOK&lt;/b&gt;: \\#1' in card
    for row in ("Method | LoRA", "Rank | 4", "Steps | 30", "Dataset | 3 images with captions"):
        assert f"| {row} |" in card
    known = front_of(model_card(run))
    assert [known[name] for name in ("license", "license_name", "license_link")] == [
        "other",
        "flux-non-commercial-license",
        "https://huggingface.co/black-forest-labs/FLUX.2-dev/blob/main/LICENSE.md",
    ]


def test_the_card_of_an_older_checkpoint_has_its_steps_and_samples(run: RunDir) -> None:
    (run.export / "my-fox-step20.safetensors").write_bytes(WEIGHTS)
    for step in (10, 20):
        file = f"samples/step-{step:06d}-0.png"
        (run.path / file).write_bytes(PIXELS)
        record(run, SampleEvent(step=step, prompt="TOK early", index=0, path=file))
    record(run, ExportEvent(step=20, path="export/my-fox-step20.safetensors", what="adapter", format="auto"))
    card = model_card(run)
    assert 'weight_name="my-fox-step20.safetensors"' in card and "| Steps | 20 |" in card
    assert "Generated after 20 steps" in card and "samples/step-000020-0.png" in card
    assert "step-000030" not in card


def test_a_licence_that_the_hub_does_not_list_is_refused_with_its_words(run: RunDir, hub: Hub) -> None:
    said = uploaded(run, hub, "--repo=ada/licensed", "--licence=Apache 2.0", "--yes")
    words = '"license" must be one of [apache-2.0, mit, openrail++, other]'
    assert said == (2, f"ada/licensed: the hub refuses the model card (Invalid metadata in README.md. - {words})")


@pytest.mark.parametrize(
    "name", ["fox", "ada/fox/red", "ada/my fox", "ada/-fox", "ada/a--b", "ada/a..b", "ada/" + 97 * "x"]
)
def test_a_name_that_the_hub_does_not_take_is_refused_before_anything_is_asked(name: str) -> None:
    with pytest.raises(InputError, match=f"^repo: '{name}' is not a name on the hub"):
        Upload(name)


def test_the_card_names_nothing_of_this_machine(run: RunDir) -> None:
    card = model_card(run)
    for private in (str(run.path.parent), os.sep + "tmp", socket.gethostname(), f"/{getpass.getuser()}/"):
        assert private not in card
    model = run.config().model.model_copy(update={"path": str(run.path)})
    run.replace_config(run.config().model_copy(update={"model": model}))
    card = model_card(run)
    assert str(run.path) not in card
    assert "base_model" not in front_of(card)
    assert "Replace `BASE` with the folder of the base model." in card


def test_a_language_model_is_loaded_by_peft_and_its_config_names_no_local_path(tmp_path: Path, hub: Hub) -> None:
    cfg = text_config(make_text(tmp_path / "text"), name="story")
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
    (run.export / "story").mkdir()
    (run.export / "story" / "adapter_model.safetensors").write_bytes(WEIGHTS)
    config = {"base_model_name_or_path": str(tmp_path), "r": 4}
    (run.export / "story" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (run.samples / "step-000005-0.txt").write_text("Once upon", encoding="utf-8")
    record(
        run,
        SampleEvent(step=5, prompt="Once", index=0, path="samples/step-000005-0.txt", text="Once upon"),
        ExportEvent(path="export/story", what="adapter", format="peft"),
    )
    card = model_card(run, "ada/story")
    assert front_of(card)["tags"] == ["lora", "peft", "text-generation", "shardstudio"]
    assert front_of(card)["widget"] == [{"text": "Once", "output": {"text": "Once upon"}}]
    assert 'PeftModel.from_pretrained(model, "ada/story", subfolder="story")' in card
    assert "| Dataset | 2 files of text, " in card
    assert uploaded(run, hub, "--repo=ada/story", "--yes")[0] == 0
    files = hub.repositories["ada/story"].files
    assert sorted(files) == ["README.md", "story/adapter_config.json", "story/adapter_model.safetensors"]
    assert json.loads(files["story/adapter_config.json"]) == {"base_model_name_or_path": "", "r": 4}


@pytest.mark.parametrize("what", ["adapter", "full"])
def test_the_card_of_a_language_model_names_the_tokens_at_which_its_texts_end(tmp_path: Path, what: str) -> None:
    cfg = text_config(make_text(tmp_path / "text"), name="story")
    run = RunDir.create(tmp_path, cfg, at=tmp_path / "run")
    folder = run.export / "story"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}), encoding="utf-8")
    tokens = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|im_start|>"}]}
    record(run, ExportEvent(path="export/story", what=what, format="auto"))
    line = 'model.generation_config = GenerationConfig.from_pretrained("ada/story", subfolder="story")'
    assert "Texts end at" not in model_card(run, "ada/story")
    assert line not in model_card(run, "ada/story")
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    card = model_card(run, "ada/story")
    assert "```\n\nReplace `BASE`" in card or what == "full"
    assert "\n\nTexts end at `<|im_end|>` or `token 9`.\n" in card
    assert (line in card) == (what == "adapter")


def test_a_link_in_an_exported_folder_publishes_no_private_file(run: RunDir, hub: Hub, tmp_path: Path) -> None:
    """The run folder may come from somebody else, and the question lists the name alone."""
    (tmp_path / "id_ed25519").write_text("private")
    (run.export / "assistant").mkdir()
    (run.export / "assistant" / "merges.txt").symlink_to(tmp_path / "id_ed25519")
    record(run, ExportEvent(path="export/assistant", what="full", format="auto"))
    before = hub.commits
    code, said = uploaded(run, hub, "--repo=ada/fox-linked", "--yes")
    assert (code, said) == (2, f"{run.export}/assistant/merges.txt: {LINK}")
    with pytest.raises(InputError, match=r"merges.txt: leads out of the run folder"):
        published(run).files(run)
    assert (hub.commits, "ada/fox-linked" in hub.repositories) == (before, False)


@pytest.mark.parametrize("place", ["export/assistant/merges.txt", "samples/step-000030-0.png"])
def test_a_second_name_of_a_private_file_is_not_published(run: RunDir, hub: Hub, tmp_path: Path, place: str) -> None:
    """An archive that is unpacked in the home can hold one, as it can hold a link."""
    (tmp_path / "id_ed25519").write_text("private")
    (run.export / "assistant").mkdir()
    record(run, ExportEvent(path="export/assistant", what="full", format="auto"))
    (run.path / place).unlink(missing_ok=True)
    (run.path / place).hardlink_to(tmp_path / "id_ed25519")
    (run.path.parent / "downloads" / "a").mkdir(parents=True)
    (run.path.parent / "downloads" / "a" / Path(place).name).symlink_to(run.path / place)  # the page makes no such link
    before = hub.commits
    code, said = uploaded(run, hub, "--repo=ada/fox-named", "--yes")
    assert (code, said) == (2, f"{run.path / place}: {SECOND_NAME}")
    assert (hub.commits, "ada/fox-named" in hub.repositories) == (before, False)


def test_an_export_that_the_page_has_offered_is_published(run: RunDir) -> None:
    for folder in ("downloads", "moved"):
        link = Downloads(run.path.parent / "downloads").offer(run.export / "my-fox.safetensors")
        assert link.samefile(run.export / "my-fox.safetensors")
        link.parent.rename(link.parent.with_name(folder))  # offered before the runs were moved
    assert set(published(run).files(run)) == {"my-fox.safetensors", *(f"samples/step-000030-{n}.png" for n in (0, 1))}
