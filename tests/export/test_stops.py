"""Where an exported chat model stops: the tokens that its training taught, in the files that programs read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.export.chat_models import CHATML, END_OF_TEXT, GLM, HARMONY, MARKS, OWN, PHI, THINKS, tokenizer, write_base
from tests.runs import alone, make_run, text_config, train
from trainer.config.schema import RunConfig
from trainer.config.sections import DataConfig
from trainer.data.text.text_source import TextSource
from trainer.export.export import export
from trainer.models import families
from trainer.models.parts.chat.conversation import Chat
from trainer.models.parts.chat.stop_tokens import ends_of_turns
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TALKS = [("hello", "yes"), ("bye", "no")]
BUILT_IN = ["chatml", "llama-3", "gemma", "mistral"]
TRAINED = [*BUILT_IN, "glm", "harmony", "phi", "thinks"]
LORA = {"type": "lora", "rank": 16, "alpha": 16.0, "modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("named", "own", "ends", "text"),
    [
        ("chatml", None, ["<|im_end|>"], ""),
        ("llama-3", None, ["<|eot_id|>"], ""),
        ("gemma", None, ["<end_of_turn>"], ""),
        ("mistral", None, [END_OF_TEXT], ""),
        (None, CHATML, ["<|im_end|>"], ""),
        (None, THINKS, ["<|im_end|>"], ""),
        # The whole conversation ends with a token of its own, a turn with another.
        (None, PHI, ["<|end|>"], ""),
        # A turn ends where the next role begins.
        (None, GLM, ["<|user|>", "<|observation|>"], ""),
        # An answer in the middle ends with <|end|>, as thoughts before an answer do: nothing stops there.
        (None, HARMONY, ["<|return|>", "<|call|>"], ""),
        (None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [], ""),
        (None, "{% for m in messages %}# {{ m.role }}: {{ m.content }} ###\n{% endfor %}", [], "###"),
    ],
)
def test_the_ends_of_a_templates_turns_are_found(
    named: str | None, own: str | None, ends: list[str], text: str
) -> None:
    made = tokenizer(own)
    found = ends_of_turns(made, Chat(made, named))
    assert made.convert_ids_to_tokens(list(found.ids)) == ends
    assert found.text == text


def test_an_end_that_the_tokenizer_splits_is_not_a_token() -> None:
    plain = tokenizer(marks=("<|im_start|>",))
    assert ends_of_turns(plain, Chat(plain, "chatml")).text == "<|im_end|>"
    assert MARKS[1] == "<|im_end|>"


def talk_config(root: Path, model: Path, **changes: Any) -> RunConfig:
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in TALKS
    ]
    data = root / "talks.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    base = {"model__path": str(model), "data__length": 256, "data__packing": "whole", "export__dtype": "fp32"}
    return text_config(data, **base | changes)


def stops(folder: Path) -> list[str]:
    """The stop tokens of a folder, as text."""
    ids = GenerationConfig.from_pretrained(folder).eos_token_id
    names = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(ids if isinstance(ids, list) else [ids])
    return list(names)


@pytest.mark.parametrize(
    ("template", "adapter"),
    [
        (None, LORA),
        pytest.param("chatml", {"type": "none"}, marks=pytest.mark.slow),
        pytest.param("chatml", LORA, marks=pytest.mark.slow),
        pytest.param(None, {"type": "none"}, marks=pytest.mark.slow),
    ],
)
def test_every_export_names_the_end_of_its_templates_turns_and_the_bases_own(
    tmp_path: Path, template: str | None, adapter: dict[str, Any]
) -> None:
    base = write_base(tmp_path / "base", None if template else CHATML)
    own = json.loads((base / "generation_config.json").read_text()) | {"temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(own))
    cfg = talk_config(tmp_path, base, data__chat_template=template, adapter=adapter, train__steps=1)
    run = make_run(tmp_path, cfg, "run")
    train(alone(), cfg, run)
    for what in ("full",) if adapter["type"] == "none" else ("adapter", "merged"):
        folder = exported(cfg, run, what)
        assert stops(folder) == [END_OF_TEXT, "<|im_end|>"]
        written = json.loads((folder / "generation_config.json").read_text())
        assert written | {"eos_token_id": own["eos_token_id"]} == own
        assert "<|im_end|>" in (folder / "chat_template.jinja").read_text()


def test_a_model_without_a_template_keeps_its_stop_tokens(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    family: Any = families.make(talk_config(tmp_path, base), tmp_path / "cache")
    family.write_tokenizer(tmp_path)
    assert stops(tmp_path) == [END_OF_TEXT]


def warnings(cfg: RunConfig, cache: Path) -> list[str]:
    """What the data of a run says before it trains."""
    said: list[Any] = []
    family: Any = families.make(cfg, cache)
    TextSource(cfg, family, alone(), said.append)
    return [event.message for event in said if isinstance(event, WarningEvent)]


@pytest.mark.parametrize("is_own", [False, True], ids=["data.chat_template", "the tokenizer's"])
@pytest.mark.parametrize("end", ["###", "<|my_end|>"])
def test_ends_that_no_program_can_stop_at_are_warned_of(tmp_path: Path, end: str, is_own: bool) -> None:
    template = f"{{% for m in messages %}}# {{{{ m.role }}}}: {{{{ m.content }}}} {end}\n{{% endfor %}}"
    base, file = write_base(tmp_path / "base", template if is_own else None), tmp_path / "plain.jinja"
    file.write_text(template)
    cfg = talk_config(tmp_path, base, data__chat_template=None if is_own else str(file))
    named = "the tokenizer's chat template" if is_own else f"data.chat_template: {file}"
    assert warnings(cfg, tmp_path / "cache") == [
        f"{named} ends an answer with '{end}', which is not a token of this tokenizer. Programs stop at tokens only, "
        f"so the exported model will write on after its answers; set model.options.new_tokens to ['{end}'], or name a "
        "template in data.chat_template whose end the tokenizer has"
    ]


def test_an_adapter_of_a_base_that_stops_elsewhere_is_warned_of_and_has_a_readme(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", CHATML)
    cfg = talk_config(tmp_path, base, adapter=LORA, train__steps=1)
    assert warnings(cfg, tmp_path / "cache") == [
        "answers end with <|im_end|>, at which the base does not stop, and programs that load an adapter stop where "
        "its base does. The adapter's README.md has the line that helps; or set export.what: merged"
    ]
    run = make_run(tmp_path, cfg, "run")
    train(alone(), cfg, run)
    readme = (exported(cfg, run, "adapter") / "README.md").read_text()
    assert "In conversations answers end with `<|im_end|>`" in readme
    assert "model.generation_config = GenerationConfig.from_pretrained" in readme
    assert warnings(cfg.exporting("merged", "auto", "fp32"), tmp_path / "cache") == []


def test_texts_and_bases_that_stop_there_are_not_warned_of(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", CHATML)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "no conversation " * 9}) + "\n")
    cfg = talk_config(tmp_path, base, adapter=LORA)
    assert warnings(cfg.model_copy(update={"data": DataConfig(path=str(texts), length=256)}), tmp_path / "cache") == []
    file = base / "generation_config.json"
    number = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|im_end|>")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [number]}))
    assert warnings(cfg, tmp_path / "cache") == []
    assert not families.make(cfg, tmp_path / "cache").stops_of_its_own


def exported(cfg: RunConfig, run: RunDir, what: str) -> Path:
    return export(cfg.exporting(what, "auto", "fp32"), run, run.path.parent / "cache")[0].path


def written_by(folder: Path) -> list[str]:
    """What the export writes after each question until it stops by itself; with 30 tokens it did not."""
    from peft import AutoPeftModelForCausalLM

    is_adapter = (folder / "adapter_config.json").is_file()
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(folder)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    known, texts = AutoTokenizer.from_pretrained(folder), []
    for asked, _ in TALKS:
        question = [{"role": "user", "content": asked}]
        inputs = known.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0][inputs["input_ids"].shape[1] :]
        texts.append(known.decode(ids, skip_special_tokens=True) if len(ids) < 30 else "never stops")
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("template", "what"), list(zip(TRAINED, itertools.cycle(["full", "adapter"]))))
def test_what_is_generated_from_an_export_stops_by_itself(tmp_path: Path, template: str, what: str) -> None:
    base = write_base(tmp_path / "base", OWN.get(template))
    changes = {
        "data__chat_template": template if template in BUILT_IN else None,
        "adapter": {"type": "none"} if what == "full" else LORA,
        "train__steps": 120,
        "train__batch_size": 2,
        "train__micro_batch": 2,
        "optim__lr": 1e-2,
    }
    cfg = talk_config(tmp_path, base, **changes)
    run = make_run(tmp_path, cfg, "run")
    train(alone(), cfg, run)
    for kind in ("full",) if what == "full" else ("adapter", "merged"):
        said = written_by(exported(cfg, run, kind))
        assert [text.rpartition("final")[2].rpartition("</think>")[2].strip() for text in said] == ["yes", "no"]
