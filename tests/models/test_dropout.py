"""Dropout that a base model's config asks for: off in training, whatever the model, and said once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.common import batch_of, edit_json, examples, make, picture, question_of
from tests.runs import (
    alone,
    difference,
    make_run,
    make_text,
    run_config,
    step_numbers,
    steps_of,
    text_config,
)
from trainer import adapters
from trainer.config.schema import RunConfig
from trainer.export.export import export
from trainer.models import families
from trainer.models.base import ModelFamily, MultimodalFamily
from trainer.models.build import LoadedModel, build_model, load_model
from trainer.models.objectives.base import Example
from trainer.rng import SampleRng, generator
from trainer.run.events import AnyEvent, Emit, WarningEvent
from trainer.run.folder import RunDir
from trainer.train.loop import Trainer
from trainer.weights.quantization import quantized_layers

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_local_experts": 4}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "starcoder2": SIZES,
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": SIZES | EXPERTS,
    "phimoe": SIZES | EXPERTS,
    "qwen2_moe": SIZES | MANY | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": SIZES | MANY,
    "llama4_text": SIZES | EXPERTS | {"intermediate_size_mlp": 64},
    "granitemoe": SIZES | EXPERTS,
    "bart": SIZES | {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "falcon": {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_kv_heads": 2},
    **dict.fromkeys(
        ["qwen3", "llama", "mistral", "gemma3_text", "phi", "phi3", "stablelm", "olmo2", "seed_oss", "gpt_neox"], SIZES
    ),
    **dict.fromkeys(["persimmon", "nemotron", "cohere", "modernbert-decoder"], SIZES),
}
"""Sizes of causal language models by `model_type`."""
QUICK = ("gpt2", "starcoder2", "opt", "phimoe")
UNADAPTED = ("gpt2",)
"""Whose layers are none of torch's."""
HEADS = ("summary_first_dropout", "classifier_dropout")
TOLERANCE = 1e-6


def with_dropout(config: Mapping[str, Any], share: float) -> tuple[dict[str, Any], list[str]]:
    """The config with its fields of dropout set to `share`, and their names."""
    names = [name for name in config if "drop" in name or name.endswith("jitter_noise")]
    return {**config, **dict.fromkeys(names, share)}, names


@dataclass(frozen=True)
class Model:
    """A language model in the state that a full fine-tune trains it in."""

    family: Any
    loaded: LoadedModel

    def loss(self, *rows: int) -> Tensor:
        """The sum over the tokens in the loss of some of four rows of two documents."""
        items = [row(number) for number in rows]
        total: Tensor = self.family.loss(self.loaded.module, batch_of(self.family, items), SampleRng(0, rows)).total
        return total

    def gradient(self) -> Tensor:
        """Of all parameters, for two rows."""
        return gradient_of(self.loaded.module, self.loss(0, 1))


def row(number: int) -> Example:
    tokens = torch.randint(1, 257, (24,), generator=generator("row", number))
    documents = torch.tensor([0] * 10 + [1] * 14)
    return {"tokens": tokens, "documents": documents, "loss_mask": torch.tensor([False, True] * 12)}


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    return torch.cat(gradients)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Kind:
    """A kind of language model in folders of its own. root: holds them and the cache."""

    name: str
    root: Path

    def family(self, share: float) -> tuple[ModelFamily, list[str]]:
        """One with this share in every field of dropout, and the names of the fields."""
        cfg, fields = self._config(share)
        return families.make(cfg, self.root / "cache"), fields

    def model(self, share: float, checkpointing: str) -> Model:
        cfg, _ = self._config(share, train__checkpointing=checkpointing)
        family = families.make(cfg, self.root / "cache")
        return Model(family, load_model(build_model(cfg, family), cfg, family, alone()))

    def adapted(self, **changes: Any) -> tuple[RunConfig, ModelFamily]:
        """A config with an adapter, and the family, with no dropout of the base."""
        cfg, _ = self._config(0.0, adapter__type="lora", **changes)
        return cfg, families.make(cfg, self.root / "cache")

    def _config(self, share: float, **changes: Any) -> tuple[RunConfig, list[str]]:
        from transformers import AutoConfig

        config = AutoConfig.for_model(self.name, **KINDS[self.name])
        written, fields = with_dropout(config.to_dict(), share)
        base = self.root / str(share)
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps(written), encoding="utf-8")
        model = {"family": "causal_lm", "path": "random", "base": str(base)}
        base_only = {"adapter__type": "none", "parallel__strategy": "none"}
        return text_config(self.root, model=model, **base_only | changes), fields


@pytest.fixture(scope="module", params=[pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return Kind(request.param, tmp_path_factory.mktemp("kind"))


def test_the_gradient_is_that_of_a_model_without_dropout_also_where_blocks_are_recomputed(kind: Kind) -> None:
    found, recomputed = (kind.model(0.1, again).gradient() for again in ("none", "full"))
    assert relative(recomputed, found) <= TOLERANCE
    if kind.name != "phimoe":  # whose router has router_jitter_noise for a threshold too, in eval mode as well
        assert relative(found, kind.model(0.0, "none").gradient()) <= TOLERANCE


def test_four_rows_cost_together_what_they_cost_one_by_one_and_nothing_is_drawn(kind: Kind) -> None:
    model = kind.model(0.1, "none")
    before = torch.get_rng_state()
    together, alone = model.loss(0, 1, 2, 3), sum(model.loss(number) for number in range(4))
    torch.testing.assert_close(together, alone, atol=0, rtol=TOLERANCE)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fields_are_named_with_their_values_but_those_of_other_heads(kind: Kind) -> None:
    family, fields = kind.family(0.1)
    named = ", ".join(f"{name} 0.1" for name in fields if name not in HEADS)
    assert family.warnings(text_config(kind.root)) == (
        f"{family.folder / 'config.json'} asks for dropout in training ({named}); the base is trained without it, "
        "because its masks would not repeat when a block is recomputed, after a resume and on another number of ranks",
    )
    assert kind.family(0.0)[0].warnings(text_config(kind.root)) == ()


# Every family


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "z_image" else pytest.mark.slow) for name in families.names()]
)
def test_no_family_trains_with_dropout_whatever_its_configs_and_layers_ask_for(
    name: str, cache: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(make(name, cache).folder, tmp_path / "model")
    configs = [file for file in sorted(folder.rglob("config.json")) if file.parent.name != "vae"]
    for file in configs:
        edit_json(file, **with_dropout(json.loads(file.read_text("utf-8")), 0.1)[0])
    config = text_config if families.get(name).trains_on == "text" else run_config
    train = dict.fromkeys(families.get(name).trained_names(), "full")

    def gradient(checkpointing: str) -> Tensor:
        cfg = config(
            tmp_path,
            model={"family": name, "path": str(folder), "train": train},
            adapter__type="none",
            parallel__strategy="none",
            train__checkpointing=checkpointing,
        )
        family = families.make(cfg, cache)
        model = load_model(build_model(cfg, family), cfg, family, alone()).module
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return gradient_of(model, family.loss(model, batch_of(family, examples(family, 2)), SampleRng(0, [0, 1])).total)

    before = torch.get_rng_state()
    assert relative(gradient("full"), gradient("none")) <= TOLERANCE
    assert torch.equal(torch.get_rng_state(), before)


def test_every_trained_component_is_named_that_asks_for_dropout(cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(make("sdxl", cache).folder, tmp_path / "model")
    for part in ("unet", "text_encoder", "text_encoder_2"):
        edit_json(folder / part / "config.json", **{"dropout" if part == "unet" else "attention_dropout": 0.2})

    def said(**modes: str) -> list[str]:
        cfg = run_config(tmp_path, model={"family": "sdxl", "path": str(folder), "train": modes})
        return [warning.partition(";")[0] for warning in families.make(cfg, cache).warnings(cfg)]

    unet = f"{folder / 'unet' / 'config.json'} asks for dropout in training (dropout 0.2)"
    assert said() == [unet]
    second = f"{folder / 'text_encoder_2' / 'config.json'} asks for dropout in training (attention_dropout 0.2)"
    assert said(unet="adapter", text_encoder_2="adapter") == [unet, second]


def test_fields_of_the_parts_of_bagel_are_named_with_their_file(cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(make("bagel", cache).folder, tmp_path / "model")
    edit_json(folder / "llm_config.json", attention_dropout=0.1)
    (warning,) = make("bagel", cache, str(folder)).warnings(run_config(tmp_path, model__family="bagel"))
    assert "(llm_config.json.attention_dropout 0.1)" in warning


# The adapters' own


class Dropping:
    """A model with an adapter that drops, and items that it is trained on."""

    def __init__(self, cfg: RunConfig, family: ModelFamily, items: Sequence[Example]) -> None:
        self._family, self._items = family, items
        self.module = load_model(build_model(cfg, family), cfg, family, alone()).module
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.1, generator=generator("adapter", name))

    def loss(self, *numbers: int) -> Tensor:
        """The sum over some of the items."""
        batch = batch_of(self._family, [self._items[number] for number in numbers])
        adapters.set_samples(adapters.dropouts(self.module), 0, numbers, self._family.sample_rows(batch))
        total: Tensor = self._family.loss(self.module, batch, SampleRng(0, numbers)).total
        return total

    def check(self, recomputed: Dropping) -> None:
        """recomputed: the same with blocks that are recomputed."""
        everything = range(len(self._items))
        together, alone = self.loss(*everything).detach(), sum(self.loss(number).detach() for number in everything)
        torch.testing.assert_close(together, alone, atol=0, rtol=TOLERANCE)
        found, again = (gradient_of(model.module, model.loss(*everything)) for model in (self, recomputed))
        assert relative(again, found) <= TOLERANCE
        for dropout in adapters.dropouts(self.module):
            dropout.eval()
        assert relative(gradient_of(self.module, self.loss(*everything)), found) > 1e-3


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in ("opt", "qwen2_moe") else pytest.mark.slow) for k in KINDS if k not in UNADAPTED],
    indirect=True,
)
def test_an_adapter_drops_of_a_row_what_it_drops_in_any_batch_and_when_blocks_are_recomputed(kind: Kind) -> None:
    dropping(kind, "none").check(dropping(kind, "full"))


@pytest.mark.parametrize("kind", ["phimoe", pytest.param("llama4_text", marks=pytest.mark.slow)], indirect=True)
def test_a_router_that_is_a_linear_layer_and_chooses_is_not_stored_in_fewer_bits(kind: Kind) -> None:
    quantized = dropping(kind, "none", quantize__format="nf4")
    assert quantized_layers(quantized.module)
    assert not any("router" in name for name in quantized_layers(quantized.module))
    quantized.check(dropping(kind, "full", quantize__format="nf4"))


def dropping(kind: Kind, checkpointing: str, **changes: Any) -> Dropping:
    changes |= {"adapter__dropout": 0.2, "train__checkpointing": checkpointing}
    return Dropping(*kind.adapted(**changes), [row(number) for number in range(3)])


WINDOWS = {"sdxl": {"text_windows": 3}}
"""Options with which an item has several rows in some of a family's layers."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, marks=() if name == "bagel" else pytest.mark.slow) for name in families.names()),
        *(pytest.param(name, options, id=f"{name}-{options}") for name, options in WINDOWS.items()),
    ],
)
def test_an_adapter_of_every_part_of_every_family_drops_of_an_item_what_it_drops_in_any_batch(
    name: str, options: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    config = text_config if families.get(name).trains_on == "text" else run_config
    model = {"family": name, "options": options, "train": dict.fromkeys(families.get(name).trained_names(), "adapter")}

    def dropping(checkpointing: str) -> Dropping:
        changes = {"adapter__dropout": 0.2, "train__checkpointing": checkpointing, "parallel__strategy": "none"}
        cfg = config(tmp_path, model=model, **changes)
        family = families.make(cfg, cache)
        return Dropping(cfg, family, items_of(family))

    dropping("none").check(dropping("full"))


def items_of(family: ModelFamily) -> list[Example]:
    """Three, of which one is a question where the family answers such."""
    items = examples(family, 3)
    if isinstance(family, MultimodalFamily):
        items[1] = question_of(family, picture(64, 32), "What is this?", "A picture.")
    return items


# Runs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("runs") / "text")


class Runs:
    """Runs of a kind of language model whose config asks for dropout. text: what they read.  changes: of all."""

    def __init__(self, kind: str, text: Path, changes: Mapping[str, Any]) -> None:
        from transformers import AutoConfig

        self._text, self._changes = text, changes
        self.root = text.parent / kind
        self._base = self.root / "base"
        tiny = families.make(text_config(text), self.root / "cache").folder
        self._base.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny / name, self._base / name)
        config = with_dropout(AutoConfig.for_model(kind, **KINDS[kind]).to_dict(), 0.1)[0]
        (self._base / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def run(self, name: str, **changes: Any) -> tuple[RunConfig, RunDir]:
        """A run of four steps, or the one of this name."""
        model = {"family": "causal_lm", "path": "random", "base": str(self._base)}
        cfg = text_config(self._text, model=model, train__steps=4, **self._changes, **changes)
        folder = self.root / name
        return cfg, RunDir(folder) if folder.exists() else make_run(self.root, cfg, name)

    @contextmanager
    def trainer(self, name: str, say: Emit = lambda event: None, **changes: Any) -> Iterator[Trainer]:
        trainer = Trainer(*self.run(name, **changes), alone(), self.root / "cache", say)
        try:
            yield trainer
        finally:
            trainer.close()

    def trained(self, name: str, steps: int = 4, **changes: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
        """Train to this step and save, or go on to it. Returns losses, trained weights and warnings."""
        events: list[AnyEvent] = []
        with self.trainer(name, events.append, **changes) as trainer:
            while trainer.step < steps:
                trainer.train_step()
            trainer._save_last()
            warnings = [event.message for event in events if isinstance(event, WarningEvent)]
            return [event.loss for event in steps_of(events)], trainer.trained_weights(), warnings


FULL: dict[str, Any] = {"adapter__type": "none", "optim__eps": 1e-6}
RUNS: dict[str, dict[str, Any]] = {
    "starcoder2": {"adapter__dropout": 0.1},
    "qwen3": {"adapter__dropout": 0.1},
    "gpt2": FULL,
    "opt": {"adapter__dropout": 0.1},
    "mixtral": FULL,
    "phimoe": {},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "starcoder2" else pytest.mark.slow) for kind in RUNS]
)
def test_a_run_repeats_goes_on_and_is_the_same_in_passes_of_any_size_and_with_recompute(text: Path, kind: str) -> None:
    runs = Runs(kind, text, RUNS[kind])
    losses, weights, warnings = runs.trained("straight")
    assert [warning.partition(" asks for dropout in training (")[1] != "" for warning in warnings] == [True]
    again, same, _ = runs.trained("again")
    assert (again, difference(same, weights)) == (losses, 0)
    begun, rest = runs.trained("parts", steps=2), runs.trained("parts")
    assert (begun[0] + rest[0], difference(rest[1], weights)) == (losses, 0)
    for name, other in (("passes", {"train__micro_batch": 4}), ("recomputed", {"train__checkpointing": "full"})):
        found, moved, _ = runs.trained(name, **other)
        assert found == pytest.approx(losses, abs=0, rel=TOLERANCE)
        assert difference(moved, weights) <= 10 * TOLERANCE


def test_the_adapters_own_dropout_is_on_in_training_and_off_in_validation(text: Path) -> None:
    held_out = make_text(text.parent / "held-out", 3)
    runs = Runs("starcoder2", text, {"optim__lr": 1e-2, "data__validation": str(held_out)})
    with runs.trainer("dropping", adapter__dropout=0.5) as trainer, runs.trainer("plain") as plain:
        first, second = ([step_numbers(one).loss for one in (trainer, plain)] for _ in range(2))
        assert first[0] == first[1]  # nothing is added yet
        assert abs(second[0] - second[1]) > 1e-4
        validated = trainer.validate()
        for dropout in adapters.dropouts(trainer.model):
            dropout.p = 0.0
        assert trainer.validate() == validated


def test_an_exported_config_keeps_the_dropout_it_was_published_with(text: Path) -> None:
    runs = Runs("starcoder2", text, FULL)
    runs.trained("exported")
    exported = export(*runs.run("exported"), runs.root / "cache")[0].path / "config.json"
    shares = with_dropout(json.loads(exported.read_text("utf-8")), 0.1)
    assert shares == (
        json.loads(exported.read_text("utf-8")),
        ["attention_dropout", "embedding_dropout", "residual_dropout"],
    )
