"""Config files and overrides: what is read, and the whole text of what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import aliases
from trainer.config.fields import all_names
from trainer.config.load import (
    SCHEMA,
    ConfigError,
    ConfigFile,
    dump_config,
    load_config,
    write_schema,
)
from trainer.config.schema import RunConfig
from trainer.config.sections import BoftAdapter, LoraAdapter, NoAdapter, family_names
from trainer.system.errors import Problem

ADAPTERS = "lora, locon, dora, loha, lokr, diag-oft, boft, none"
ANY_ADAPTER = ADAPTERS.replace(", ", " or ")
DATA = "data: {path: /photos}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that a preset's path is short and the same everywhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, *overrides: str) -> ConfigFile:
    """A preset of that text; the family, which every config must name, is given where the text does not."""
    preset = Path("preset.yaml")
    if "family:" not in text:
        overrides = (*overrides, "model.family=flux2")
    preset.write_text(text, encoding="utf-8")
    return load_config(preset, overrides)


def refusal(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return str(caught.value).splitlines()


@pytest.mark.usefixtures("folder")
class TestErrors:
    def test_all_mistakes_of_file_and_command_line_are_reported_at_once_in_order(self) -> None:
        text = """\
name: 🦊
model:
  family: flux22
  options: {text_layers: [9, true]}
adapter:
  rnk: 8
  rank: 0
  rank_pattern: {attn.to_q: many}
data:
  folders:
    - weight: 0
    - {path: /photos, wieght: 2}
train:
  steps: abc
  precision: fp8
  checkpointing: [full]
  batch_size:
parallel:
  nodes: 2
  cpu_offload: [yes]
steps: 100
sample: 3
"""
        assert refusal(text, "train.stps=5", "parallel.timeout=1", "sample.every=2", "trackers.tensorboard=1.5") == [
            "preset.yaml:1: name: '🦊' is not 1 to 64 letters, digits, '_', '.' or '-', not beginning with '.' or '-'",
            f"preset.yaml:3: model.family: 'flux22' is not one of {', '.join(family_names())}; did you mean 'flux2'?",
            "preset.yaml:4: model.options.text_layers[1]: needs a whole number, not true",
            "preset.yaml:6: adapter.rnk: unknown field; did you mean 'adapter.rank'?",
            "preset.yaml:7: adapter.rank: is 0, must be >= 1 and <= 1024",
            "preset.yaml:8: adapter.rank_pattern.attn.to_q: needs a whole number, not 'many'",
            "preset.yaml:11: data.folders[0].path: is needed: Folder of images with captions; for a language model, "
            "a folder or file of text.",
            "preset.yaml:11: data.folders[0].weight: is 0, must be > 0 and <= 1000",
            "preset.yaml:12: data.folders[1].wieght: unknown field; did you mean 'data.folders[1].weight'?",
            "preset.yaml:14: train.steps: needs a whole number, not 'abc'",
            "preset.yaml:15: train.precision: 'fp8' is not one of fp32, bf16",
            "preset.yaml:16: train.checkpointing: needs none, selective, full, auto, text or a whole number, "
            "not a list",
            "preset.yaml:17: train.batch_size: is empty; give it a whole number, or remove it",
            "preset.yaml:19: parallel.rendezvous: 2 nodes need host:port of the first node",
            "preset.yaml:20: parallel.cpu_offload: needs true or false, not a list",
            "preset.yaml:21: steps: unknown field; did you mean 'train.steps'?",
            "preset.yaml:22: sample: needs a section of fields, not 3",
            "command line: parallel.timeout: is 1, must be >= 10 and <= 86400 seconds",
            "command line: trackers.tensorboard: needs true or false, not 1.5",
            "command line: train.stps: unknown field; did you mean 'train.steps'?",
        ]

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("train: {steps: true}", "train.steps: needs a whole number, not true"),
            ("train: {steps: 0}", "train.steps: is 0, must be >= 1 and <= 10000000 steps"),
            ("train: {steps: 1.5}", "train.steps: needs a whole number, not 1.5"),
            ("optim: {lr: .inf}", "optim.lr: is inf, must be > 0 and <= 10"),
            ("optim: {clip_norm: .nan}", "optim.clip_norm: is nan, must be > 0"),
            ("sample: {size: 512}", "sample.size: needs a list of 2, each a whole number, not 512"),
            ("sample: {size: [64, 64, 64]}", "sample.size: needs a list of 2, each a whole number, not a list"),
            ("sample: {size: [64, 8]}", "sample.size[1]: is 8, must be >= 16 and <= 8192"),
            ("sample: {prompts: a cat}", "sample.prompts: needs a list, each text, not 'a cat'"),
            ("name: 2024", "name: needs text, not 2024; put it in quotes"),
            ("model: {train: full}", "model.train: needs a section, each value frozen, adapter or full, not 'full'"),
            (
                "model: {train: {vae: ful}}",
                "model.train.vae: 'ful' is not one of frozen, adapter, full; did you mean 'full'?",
            ),
            ("adapter:", f"adapter: is empty; give it a section with type: {ANY_ADAPTER}, or remove it"),
            ("adapter: lora", f"adapter: needs a section with type: {ANY_ADAPTER}, not 'lora'"),
            ("adapter: {type: lorra}", f"adapter.type: 'lorra' is not one of {ADAPTERS}; did you mean 'lora'?"),
            (
                "adapter: {type: }",
                f"adapter.type: is empty; give it {ADAPTERS.replace(', none', ' or none')}, or remove it",
            ),
            (
                "adapter: {type: none, rank: 8}",
                "adapter.rank: is not a field of adapter.type none; remove it or change the type",
            ),
            ("adapter: {lora: {rank: 8}}", "adapter.lora: unknown field"),
            ("trian: {steps: 5, seed: 1}", "trian: unknown field; did you mean 'train'?"),
            ("extra: {}", "extra: unknown field"),
            ("lr: 1e-4", "lr: unknown field; did you mean 'optim.lr'?"),
            (
                "parallel: {strategy: fsdp}",
                "parallel.strategy: 'fsdp' is not one of auto, full, grad_op, hybrid, ddp, none",
            ),
            ("name: a\nname: b", "name: is given twice, first in line 2; remove one"),
        ],
    )
    def test_one_mistake_gives_one_line(self, line: str, text: str) -> None:
        where = 3 if "twice" in text else 2
        assert refusal(f"{DATA}{line}\n") == [f"preset.yaml:{where}: {text}"]

    def test_a_wrong_type_of_adapter_does_not_hide_what_is_wrong_with_its_fields(self) -> None:
        assert refusal(f"{DATA}adapter:\n  type: dorra\n  rank: 0\n") == [
            f"preset.yaml:3: adapter.type: 'dorra' is not one of {ADAPTERS}; did you mean 'dora'?",
            "preset.yaml:4: adapter.rank: is 0, must be >= 1 and <= 1024",
        ]

    def test_a_rule_is_silent_while_a_field_it_depends_on_is_unknown(self) -> None:
        text = f"{DATA}parallel: {{strategy: hybrid, shard_size: 2, %s: 4}}\n"
        assert refusal(text % "devics") == [
            "preset.yaml:2: parallel.devics: unknown field; did you mean 'parallel.devices'?"
        ]
        assert read(text % "devices").config.parallel.world_size == 4

    def test_a_rule_points_at_the_field_it_follows_from_when_its_own_is_not_given(self) -> None:
        assert refusal("train: {steps: 5}\nparallel:\n  devices: 2\n  nodes: 2\n") == [
            "preset.yaml: data.path: no images or text given; name a folder",
            "preset.yaml:4: parallel.rendezvous: 2 nodes need host:port of the first node",
        ]

    @pytest.mark.parametrize(
        ("override", "text"),
        [
            ("train.steps", "'train.steps': is not an override; write field=value, for example train.steps=100"),
            ("=5", "'=5': is not an override; write field=value, for example train.steps=100"),
            ("name.first=x", "name.first: unknown field"),
            (
                "train.steps=[1",
                "train.steps: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
            ),
            (
                "parallel.strategy=none",
                "parallel.strategy: none is for a single rank, but there are 2; "
                "use full, or ddp for a copy on every rank",
            ),
            ("train=", "train: is empty; give one of its fields, for example train.steps, or leave it out"),
            ("adapter=null", "adapter: is empty; give one of its fields, for example adapter.type, or leave it out"),
            ("train={seed: 1, seed: 2}", "train.seed: is given twice; remove one"),
            ("train={stps: 1}", "train.stps: unknown field; did you mean 'train.steps'?"),
            ("cluster.program=opt", "cluster.program: 'opt' is not a path from the root; begin with /"),
            ("a\nb=1", "'a\\nb': unknown field"),
            (
                "data.folders=[{weight: 2}]",
                "data.folders[0].path: is needed: Folder of images with captions; for a language model, "
                "a folder or file of text.",
            ),
            ("train=fast", "train: needs a section of fields, not 'fast'"),
        ],
    )
    def test_a_wrong_override_is_reported_for_the_command_line(self, override: str, text: str) -> None:
        assert refusal(f"{DATA}parallel: {{devices: 2}}\n", override) == [f"command line: {text}"]


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"", "preset.yaml: is empty; name at least data.path"),
            (b"# nothing yet\n", "preset.yaml: is empty; name at least data.path"),
            (b"- a\n- b\n", "preset.yaml:1: needs lines of field: value, not a list"),
            (b"steps\n", "preset.yaml:1: needs lines of field: value, not 'steps'"),
            (b"train:\n\tsteps: 5\n", "preset.yaml:2: tab in the indentation; indent with spaces"),
            (b"name: a\ntrain: b: c\n", "preset.yaml:2: not YAML: mapping values are not allowed here"),
            (
                b"name: a\n---\nname: b\n",
                "preset.yaml:2: not YAML: expected a single document in the stream, but found another document",
            ),
            (b"name: a\ntrigger: \xe9t\xe9\n", "preset.yaml:2: not UTF-8; save the file as UTF-8"),
            (b"name: a\x00\n", "preset.yaml:1: control character, which YAML does not allow; remove it"),
            (b"a: &x {b: c}\nd: *x\n", "preset.yaml:2: aliases (*name) are not supported; write the value again"),
            (b"{[a]: 3}\n", "preset.yaml:1: a list or mapping as a key; keys must be words"),
            (b"a:\n " + b"[" * 5000, "preset.yaml:2: nested deeper than 20 levels; a config is flatter than that"),
        ],
    )
    def test_a_file_that_is_no_config_is_refused_with_its_line(self, folder: Path, content: bytes, text: str) -> None:
        (folder / "preset.yaml").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(Path("preset.yaml"))
        assert str(caught.value) == text

    def test_a_missing_file_is_answered_with_the_nearest_name(self, folder: Path) -> None:
        (folder / "preset.yaml").write_text(DATA)
        with pytest.raises(ConfigError) as caught:
            load_config(Path("prest.yaml"))
        assert str(caught.value) == "prest.yaml: no such file; did you mean 'preset.yaml'?"
        with pytest.raises(ConfigError) as caught:
            load_config(folder)
        assert str(caught.value) == f"{folder}: is a folder; name a YAML file in it"


@pytest.mark.usefixtures("folder")
class TestValues:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ('name: "a\\0b"', "name: holds a null byte; remove it"),
            (
                'data: {path: p, trigger: "\\ud83d"}',
                "data.trigger: holds \\ud83d, which is half a character; remove it",
            ),
            ('sample: {prompts: [a, "b\\0"]}', "sample.prompts: holds a null byte; remove it"),
            ('stages: [{name: a, set: {data.path: "\\0"}}]', "stages: holds a null byte; remove it"),
        ],
    )
    def test_a_text_that_no_file_can_hold_is_refused(self, line: str, problem: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read(f"{line}\n", "data.path=photos")
        assert str(caught.value).endswith(f": {problem}")

    def test_a_problem_with_a_value_of_20000_letters_is_still_a_sentence(self) -> None:
        loaded = read(f"{DATA}", f"data.validation=/{'x' * 20_000}")
        with pytest.raises(ConfigError) as caught:
            loaded.refuse([Problem("data.validation", f"no folder '{loaded.config.data.validation}'; name one")])
        assert len(str(caught.value)) == 1500
        assert str(caught.value).startswith("command line: data.validation: no folder '/xxx")
        assert str(caught.value).endswith("xxx'; name one")

    @pytest.mark.parametrize("field", ["data.folders[0].path", "train..steps", "stages[0].name"])
    def test_an_unknown_field_of_the_command_line_is_not_looked_for_in_the_file(self, field: str) -> None:
        with pytest.raises(ConfigError, match=r"^command line: .*: unknown field"):
            read(f"{DATA}train: {{steps: 3}}\n", f"{field}=3")

    def test_numbers_and_words_are_read_as_people_write_them(self) -> None:
        loaded = read(
            "data: {path: /photos, trigger: on, validation: /held_out}\n"
            "optim: {lr: 1e-4, eps: 1.e-8}\n"
            "train: {steps: 1e3, compile: yes}\n"
            "parallel: {nodes: 2, rendezvous: 10:20}\n"
            "model:\n"
        )
        assert (loaded.config.optim.lr, loaded.config.optim.eps, loaded.config.train.steps) == (1e-4, 1e-8, 1000)
        assert (loaded.config.train.compile, loaded.config.data.trigger) == (True, "on")
        assert (loaded.config.parallel.rendezvous, loaded.config.data.validation) == ("10:20", "/held_out")

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("my photos", "my-photos"),
            ("  Füchse & Hasen! ", "Fuchse-Hasen"),
            ("../../etc/passwd", "etc-passwd"),
            ("a" * 200, "a" * 64),
            ("fox.v2_", "fox.v2_"),
            ("-", None),
            ("🦊", None),
            ("", None),
        ],
    )
    def test_a_name_is_made_of_what_was_typed(self, text: str, name: str | None) -> None:
        typed = f"name={json.dumps(text)}"
        if name is None:
            assert len(refusal(DATA, typed)) == 1
        else:
            assert read(DATA, typed).config.name == name

    def test_an_override_wins_over_the_file_and_over_earlier_ones(self) -> None:
        loaded = read(
            f"{DATA}name: photos\ntrain: {{steps: 5, seed: 7}}\nsample: {{prompts: [a, b]}}\n",
            "train.steps=10",
            "train.steps=20",
            "data.validation=3",
            "name=2024",
            "data.trigger=",
            "sample.prompts=[c]",
            "model.base=null",
            "optim={lr: 1e-3, ema: 0.9}",
        )
        assert (loaded.config.train.steps, loaded.config.train.seed) == (20, 7)
        assert (loaded.config.data.validation, loaded.config.name) == (3, "2024")
        assert (loaded.config.data.trigger, loaded.config.sample.prompts) == ("", ("c",))
        assert (loaded.config.model.base, loaded.config.optim.lr, loaded.config.optim.ema) == (None, 1e-3, 0.9)

    def test_an_override_of_one_key_keeps_the_others(self) -> None:
        loaded = read(f"{DATA}adapter: {{rank_pattern: {{to_q: 4}}}}\n", "adapter.rank_pattern.attn.to_k=8")
        assert isinstance(loaded.config.adapter, LoraAdapter)
        assert loaded.config.adapter.rank_pattern == {"to_q": 4, "attn.to_k": 8}

    def test_an_adapter_without_type_is_lora(self) -> None:
        assert read(f"{DATA}adapter: {{rank: 4}}\n").config.adapter == LoraAdapter(rank=4)
        assert read(f"{DATA}", "adapter.rank=4").config.adapter == LoraAdapter(rank=4)

    def test_an_adapter_type_on_the_command_line_leaves_out_the_file_s_fields_of_the_other_type(self) -> None:
        loaded = read(f"{DATA}adapter:\n  type: lora\n  rank: 4\n", "adapter.type=none")
        assert loaded.config.adapter == NoAdapter()
        assert loaded.notes == ("preset.yaml:4: adapter.rank is left out: adapter.type is none",)

    def test_a_section_on_the_command_line_keeps_the_fields_that_it_does_not_name(self) -> None:
        loaded = read(f"{DATA}train:\n  steps: 5\n  seed: 1\n", "train={seed: 2}", "sample={}")
        assert (loaded.config.train.steps, loaded.config.train.seed) == (5, 2)
        assert loaded.where("train.steps") == "preset.yaml:3"
        assert loaded.where("train.seed") == "command line"

    def test_a_section_of_another_type_on_the_command_line_leaves_out_the_file_s_fields_of_the_old_type(self) -> None:
        loaded = read(f"{DATA}adapter:\n  type: lora\n  rank: 4\n", "adapter={type: boft, block_size: 4}")
        assert loaded.config.adapter == BoftAdapter(block_size=4)
        assert loaded.notes == ("preset.yaml:4: adapter.rank is left out: adapter.type is boft",)

    def test_advice_is_noted_at_the_field_it_is_about_and_with_stages_for_what_they_set(self) -> None:
        slow = "is a usual learning rate for lora, but loha learns about ten times more slowly with it; "
        slow += "try 10 times as much"
        assert read(f"{DATA}adapter: {{type: loha}}\n").notes == (f"preset.yaml: optim.lr: 0.0001 {slow}",)
        given = f"{DATA}adapter: {{type: loha}}\noptim: {{lr: 1e-3}}\n"
        assert read(given).notes == ()
        assert read(given, "optim.lr=2e-4").notes == (f"command line: optim.lr: 0.0002 {slow}",)
        stages = "stages: [{name: one, set: {train.steps: 5}}, {name: two, set: {optim.lr: 1e-5}}]\n"
        assert read(given + stages).notes == (f"preset.yaml:3: optim.lr: 1e-05 {slow}",)
        whole = "adapter: {type: lokr, full_matrix: true, alpha: 1}\n"
        assert read(DATA + whole).notes == (
            "preset.yaml:2: adapter.alpha: has no effect with adapter.full_matrix: the update is not scaled",
        )
        assert read(DATA + whole, "adapter.rank=1").notes == ()

    def test_a_beta_of_the_other_kind_of_data_is_advised_against(self) -> None:
        text = "model: {family: causal_lm}\ndata: {path: pairs.jsonl}\n"
        assert read(f"{text}objective: {{dpo_beta: 0.1}}\n").notes == ()
        assert read(f"{text}objective: {{dpo_beta: 2000}}\n").notes == (
            "preset.yaml:3: objective.dpo_beta: 2000 is large for text; 0.01 to 0.5 is usual, 0.1 most often",
        )
        images = f"{DATA}objective: {{dpo_beta: 0.1}}\n"
        assert read(images, "data.rejected=worse").notes == (
            "preset.yaml:2: objective.dpo_beta: 0.1 is of the size that is usual for text; for images, whose errors "
            "are means over all latents, 2000 to 5000 is usual",
        )

    @pytest.mark.parametrize(
        ("path", "change", "said"),
        [
            (
                "black-forest-labs/FLUX.2-klein-base-4B",
                "data.resolution=64",
                "64 is little for FLUX.2 klein 4B, which then learns a blur",
            ),
            ("black-forest-labs/FLUX.2-klein-base-4B", "data.resolutions=[768, 128]", "128 is little for FLUX.2"),
            ("black-forest-labs/FLUX.2-klein-base-4B", "data.resolution=512", ""),
            ("demo", "data.resolution=512", "512 is much for the demo model, which draws at 64 pixels"),
            ("demo", "data.resolution=64", ""),
            ("tiny", "data.resolution=64", ""),
        ],
    )
    def test_a_resolution_of_another_model_is_advised_against(self, path: str, change: str, said: str) -> None:
        notes = read(f"{DATA}model: {{family: flux2, path: {path}}}\n", change).notes
        assert len(notes) == bool(said)
        assert all(note.startswith(f"command line: {change.partition('=')[0]}: {said}") for note in notes)

    def test_one_key_of_a_field_that_the_new_type_lacks_is_refused_where_it_was_given(self) -> None:
        assert refusal(DATA, "adapter.rank_pattern.attn.to_q=4", "adapter={type: boft}") == [
            "command line: adapter.rank_pattern: is not a field of adapter.type boft; remove it or change the type"
        ]

    def test_where_names_the_line_of_a_field_the_command_line_or_the_file(self) -> None:
        loaded = read(f"{DATA}train:\n  steps: 5\n  seed: 1\n", "train.seed=2", "data.folders=[{path: /more}]")
        assert loaded.where("train.steps") == "preset.yaml:3"
        assert loaded.where("train.seed") == "command line"
        assert loaded.where("data.folders[0].path") == "command line"
        assert loaded.where("train.precision") == "preset.yaml"


class TestPaths:
    def test_paths_of_a_file_are_relative_to_it_and_those_of_the_command_line_to_the_current_folder(
        self, folder: Path
    ) -> None:
        presets = folder / "presets"
        (presets / "model").mkdir(parents=True)
        preset = presets / "preset.yaml"
        preset.write_text(
            "model: {family: flux2, path: model}\n"
            "data: {path: ../photos, cache: cache, validation: held_out, folders: [{path: more}, {path: /far}]}\n"
        )
        cfg = load_config(Path("presets/preset.yaml"), ["model.base=presets/model"]).config
        assert (cfg.model.path, cfg.model.base) == (str(presets / "model"), str(presets / "model"))
        assert (cfg.data.path, cfg.data.cache) == (str(folder / "photos"), str(presets / "cache"))
        assert cfg.data.validation == str(presets / "held_out")
        assert [more.path for more in cfg.data.folders] == [str(presets / "more"), "/far"]
        assert load_config(preset, ["data.path=photos"]).config.data.path == str(folder / "photos")

    @pytest.mark.parametrize("text", ["'{}'", '"{}"', "file://{}", "file://localhost{}", " {} ", '"file://{}"'])
    def test_a_path_is_read_as_file_managers_and_terminals_copy_it(self, folder: Path, text: str) -> None:
        images = folder / "my images"
        images.mkdir()
        pasted = text.format(str(images).replace(" ", "%20") if "file" in text else images)
        assert read(f"model: {{family: flux2}}\ndata: {{path: {json.dumps(pasted)}}}").config.data.path == str(images)
        assert read(DATA, f"data.path={json.dumps(pasted)}").config.data.path == str(images)

    def test_quotes_and_signs_in_a_path_are_kept(self, folder: Path) -> None:
        for name in ('"', "'", "100%20", "it's"):
            path = str(folder / name)
            assert read(DATA, f"data.path={json.dumps(path)}").config.data.path == path

    def test_the_name_of_a_model_is_not_taken_for_a_path(self, folder: Path) -> None:
        (folder / "tiny").mkdir()
        assert read(DATA).config.model.path == "tiny"
        assert read(f"{DATA}model: {{path: tiny}}\n").config.model.path == "tiny"
        assert read(f"{DATA}model: {{path: ./tiny}}\n").config.model.path == str(folder / "tiny")
        assert read(DATA, "model.path=org/name").config.model.path == "org/name"

    def test_the_name_of_a_chat_template_is_not_taken_for_a_path(self, folder: Path) -> None:
        (folder / "chatml").touch()
        assert read("data: {path: text, chat_template: chatml}\n").config.data.chat_template == "chatml"
        own = read("data: {path: text, chat_template: own.jinja}\n").config.data.chat_template
        assert own == str(folder / "own.jinja")


FOREIGN = [
    ("parallel: {sharding_strategy: FULL_SHARD}", {"strategy": "full"}),
    ("parallel: {strategy: Shard_Grad_Op}", {"strategy": "grad_op"}),
    ("parallel: {strategy: HYBRID_SHARD}", {"strategy": "hybrid"}),
    ("sharding_strategy: NO_SHARD", {"strategy": "ddp"}),
    ("parallel: {strategy: _HYBRID_SHARD_ZERO2}", {"strategy": "hybrid", "reshard_after_forward": False}),
    (
        "parallel: {strategy: _HYBRID_SHARD_ZERO2, reshard_after_forward: true}",
        {"strategy": "hybrid", "reshard_after_forward": True},
    ),
    (
        "fsdp: {fsdp_sharding_strategy: FULL_SHARD, fsdp_forward_prefetch: true}",
        {"strategy": "full", "prefetch_forward": 1},
    ),
    ("parallel: {forward_prefetch: true}", {"prefetch_forward": 1}),
    ("parallel: {forward_prefetch: false}", {"prefetch_forward": 0}),
    ("parallel: {backward_prefetch: BACKWARD_PRE}", {"prefetch_backward": 1}),
    ("parallel: {backward_prefetch: BACKWARD_POST}", {"prefetch_backward": 0}),
    ("parallel: {backward_prefetch: NONE}", {"prefetch_backward": 0}),
    ("parallel: {backward_prefetch: null}", {"prefetch_backward": 0}),
    ("parallel: {num_gpus: 4}", {"devices": 4}),
    ("gpus: 2", {"devices": 2}),
    ("train: {precision: bf16-mixed}", {"precision": "bf16"}),
    ("train: {precision: bf16-true}", {"precision": "bf16"}),
    ("mixed_precision: bfloat16", {"precision": "bf16"}),
    ("train: {precision: BF16}", {"precision": "bf16"}),
    ("train: {precision: 32}", {"precision": "fp32"}),
    ("train: {precision: 32-true}", {"precision": "fp32"}),
    ("train: {precision: float32}", {"precision": "fp32"}),
    ("train: {gradient_checkpointing: true}", {"checkpointing": "full"}),
    ("train: {gradient_checkpointing: false}", {"checkpointing": "none"}),
    ("train: {learning_rate: 2e-4}", {"lr": 2e-4}),
    ("optim: {type: adamw_8bit}", {"type": "adamw8bit"}),
    ("adapter: {type: LoRA}", {"type": "lora"}),
]


@pytest.mark.usefixtures("folder")
class TestForeignSpellings:
    @pytest.mark.parametrize(("line", "meaning"), FOREIGN, ids=[line for line, _ in FOREIGN])
    def test_a_spelling_with_a_meaning_is_understood_and_noted(self, line: str, meaning: dict[str, object]) -> None:
        loaded = read(f"{DATA}{line}\n")
        cfg = loaded.config
        sections = (cfg.parallel, cfg.train, cfg.optim, cfg.adapter)
        for field, value in meaning.items():
            assert value in [getattr(section, field) for section in sections if field in type(section).model_fields]
        assert loaded.notes
        assert all(note.startswith("preset.yaml:2: ") for note in loaded.notes)

    def test_a_note_says_what_was_read_as_what(self) -> None:
        loaded = read(f"{DATA}fsdp: {{sharding_strategy: FULL_SHARD}}\n", "learning_rate=1e-3")
        assert loaded.notes == (
            "preset.yaml:2: fsdp.sharding_strategy 'FULL_SHARD' is read as parallel.strategy 'full'",
            "command line: learning_rate 0.001 is read as optim.lr 0.001",
        )
        assert loaded.where("parallel.strategy") == "preset.yaml:2"

    def test_a_foreign_override_wins_over_our_field_in_the_file(self) -> None:
        assert read(f"{DATA}optim: {{lr: 1e-4}}\n", "learning_rate=1e-3").config.optim.lr == 1e-3

    def test_two_spellings_of_one_field_in_one_file_are_refused(self) -> None:
        assert refusal(f"{DATA}optim: {{lr: 1e-4}}\nlearning_rate: 1e-3\n") == [
            "preset.yaml:3: learning_rate: means optim.lr, which is also given; remove one of them"
        ]

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            (
                "parallel: {limit_all_gathers: true}",
                "parallel.limit_all_gathers: FSDP2 limits its all-gathers by itself; remove it",
            ),
            ("use_orig_params: true", "use_orig_params: FSDP2 always keeps the original parameters; remove it"),
            (
                "fsdp: {fsdp_use_orig_params: 1}",
                "fsdp.fsdp_use_orig_params: FSDP2 always keeps the original parameters; remove it",
            ),
            ("sync_module_states: true", "sync_module_states: every rank reads only its own slices; remove it"),
            ("train: {sync_batchnorm: true}", "train.sync_batchnorm: no model here has batch norm to train; remove it"),
            (
                "train: {precision: fp16}",
                "train.precision: 'fp16' overflows above 65504 and needs loss scaling; use bf16",
            ),
            ("train: {precision: 16}", "train.precision: 16 overflows above 65504 and needs loss scaling; use bf16"),
            ("mixed_precision: fp16", "mixed_precision: 'fp16' overflows above 65504 and needs loss scaling; use bf16"),
            (
                "optim: {type: Muon}",
                "optim.type: 'Muon' gives results that differ by 1.5e-3 from one process if sharded; use adamw",
            ),
            (
                "optim: {type: adafactor}",
                "optim.type: 'adafactor' raises an error on sharded weights (DTensors) in torch; use adamw8bit",
            ),
            (
                "optim: {type: prodigy}",
                "optim.type: 'prodigy' is not built in; use schedulefree, which needs no schedule either",
            ),
            ("optim: {type: lion}", "optim.type: 'lion' is not built in; use adamw, or adamw8bit for smaller state"),
        ],
    )
    def test_a_spelling_without_a_meaning_is_answered_with_one_sentence(self, line: str, text: str) -> None:
        assert refusal(f"{DATA}{line}\n") == [f"preset.yaml:2: {text}"]

    @pytest.mark.parametrize(
        "key",
        ["blocks_to_swap", "block_swap", "low_vram", "lowvram", "medvram", "layer_offloading_percent", "swap_blocks"],
    )
    def test_block_swapping_and_low_vram_switches_are_answered_with_the_fields_for_it(self, key: str) -> None:
        answer = (
            "use parallel.offload_blocks: auto, or a number of blocks, for frozen weights; train.checkpointing: full "
            "for activations; parallel.cpu_offload: true with parallel.strategy: full where the whole model is trained"
        )
        assert refusal(f"{DATA}{key}: 20\n") == [f"preset.yaml:2: {key}: {answer}"]
        assert refusal(f"{DATA}model: {{{key}: true}}\n") == [f"preset.yaml:2: model.{key}: {answer}"]
        assert refusal(DATA, f"train.{key}=5") == [f"command line: train.{key}: {answer}"]

    def test_a_key_for_models_split_over_gpus_is_answered_with_the_strategy(self) -> None:
        answer = "is what parallel.strategy: full does over all GPUs; set that"
        assert refusal(f"{DATA}split_model_over_gpus: true\n") == [f"preset.yaml:2: split_model_over_gpus: {answer}"]

    def test_what_an_answer_tells_to_set_can_be_set(self) -> None:
        keys, values = aliases.REFUSED_KEYS, aliases.REFUSED_VALUES
        named = [
            found for _, answer in keys for found in re.findall(r"([a-z_]+\.[a-z_.]+[a-z])(?:: ([a-z]+))?", answer)
        ]
        named += [
            (field, word) for field, of in values.items() for word in re.findall(r"use (\w+)", " ".join(of.values()))
        ]
        assert len(named) >= 8
        for field, value in named:
            assert field in all_names()
            if value:
                assert read(DATA, f"{field}={value}").config

    def test_the_table_names_only_fields_that_exist_and_no_key_of_ours(self) -> None:
        fields = set(all_names())
        assert {*aliases.KEYS.values(), *aliases.VALUES, *aliases.REFUSED_VALUES} <= fields
        keys = {part for field in fields for part in field.split(".")}
        assert not keys & set(aliases.KEYS)
        assert [key for key in sorted(keys) if aliases.refused_key(key)] == []


class TestDump:
    @pytest.mark.parametrize(
        "trigger",
        [
            "",
            "yes",
            "null",
            "1e-4",
            "007",
            "1_000",
            ".5",
            "10:20",
            "- a",
            "a: b #c",
            "'\"",
            "*x",
            "é\n\tz",
            "2024-01-01",
            "\u2028 \x07",
        ],
    )
    def test_what_is_dumped_loads_as_an_equal_config(self, folder: Path, trigger: str) -> None:
        cfg = RunConfig.model_validate(
            {
                "data": {"path": "/photos", "trigger": trigger, "folders": [{"path": "/more", "weight": 0.5}]},
                "adapter": {"type": "lora", "rank_pattern": {"attn.to_q": 4}, "targets": ["to_q", "to_k"]},
                "model": {"family": "flux2", "options": {"text_layers": [9, 18]}, "train": {"transformer": "adapter"}},
                "optim": {"eps": 1e-20},
                "parallel": {"strategy": "full", "reshard_after_forward": False},
                "sample": {"size": [64, 128], "prompts": [trigger, "b"]},
            }
        )
        loaded = read(dump_config(cfg))
        assert loaded.config == cfg
        assert loaded.notes == ()
        assert dump_config(loaded.config) == dump_config(cfg)

    def test_a_dump_names_every_field_once(self, folder: Path) -> None:
        loaded = read(dump_config(read(DATA).config))
        of_other_adapters = {
            field
            for field in all_names()
            if field.startswith("adapter.") and field.removeprefix("adapter.") not in LoraAdapter.model_fields
        }
        assert {field for field in all_names() if loaded.where(field) == "preset.yaml"} == of_other_adapters


class TestSchema:
    def test_the_committed_schema_is_that_of_the_config(self, tmp_path: Path) -> None:
        write_schema(tmp_path / "schema.json")
        assert SCHEMA.read_bytes() == (tmp_path / "schema.json").read_bytes(), "run python -m trainer.config.load"

    def test_it_tells_editors_type_range_unit_default_and_meaning(self) -> None:
        assert RunConfig.model_json_schema()["$defs"]["TrainConfig"]["properties"]["steps"] == {
            "type": "integer",
            "title": "Steps",
            "minimum": 1,
            "maximum": 10_000_000,
            "default": 1000,
            "unit": "steps",
            "keywords": "iterations epochs length duration",
            "description": "Optimizer steps. `train.epochs` decides instead where it is set.",
        }


def test_reading_a_config_imports_nothing_heavy() -> None:
    code = "import sys, trainer.config.load; print({'torch', 'numpy', 'gradio', 'diffusers'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"
