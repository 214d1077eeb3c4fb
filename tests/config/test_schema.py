"""The rules between fields, each with its whole text, and what the config derives from its fields."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config.fields import all_names
from trainer.config.schema import RunConfig
from trainer.config.sections import LoraAdapter, Section, family_names
from trainer.system.errors import RuleError

MINIMAL = {"model": {"family": "flux2"}, "data": {"path": "photos"}}
ADAPTER_NONE = {"type": "none"}


def problems_of(sections: dict[str, Any]) -> list[str]:
    """What the rules say about a config whose fields are each valid."""
    try:
        RunConfig.model_validate(MINIMAL | sections | {"model": MINIMAL["model"] | sections.get("model", {})})
    except ValidationError as error:
        cause = error.errors()[0]["ctx"]["error"]
        assert isinstance(cause, RuleError)
        assert pickle.loads(pickle.dumps(cause)).problems == cause.problems  # it comes from other processes too
        return [str(problem) for problem in cause.problems]
    return []


RULES: list[tuple[dict[str, Any], str]] = [
    ({"model": {"family": ""}}, f"model.family: is needed; name one of {', '.join(family_names())}"),
    (
        {"model": {"family": "sdxl", "path": "demo"}},
        "model.path: demo is a model of family flux2, not sdxl; set model.family: flux2",
    ),
    ({"model": {"path": ""}}, "model.path: is empty; name a model, or tiny for random weights"),
    (
        {"model": {"train": {"transformer": "frozen", "vae": "frozen"}}},
        "model.train: freezes every component, so nothing is trained; set one to adapter or full",
    ),
    (
        {"model": {"train": {"transformer": "full"}}},
        "model.train: gives no component the lora adapter; set one to adapter, or set adapter.type: none",
    ),
    (
        {"model": {"train": {"transformer": "adapter"}}, "adapter": ADAPTER_NONE},
        "model.train.transformer: adapter needs adapter.type, which is none; use full or set a type",
    ),
    (
        {"export": {"what": "merged"}, "adapter": ADAPTER_NONE},
        "export.what: merged needs an adapter, but adapter.type is none; use full",
    ),
    (
        {"export": {"what": "full"}},
        "export.what: full needs adapter.type none, not lora; use merged for base + adapter",
    ),
    (
        {"adapter": {"type": "lora", "targets": ["attn.(to_q"]}},
        "adapter.targets: 'attn.(to_q' is not a layer name or regular expression: "
        "missing ), unterminated subpattern at position 5",
    ),
    (
        {"adapter": {"type": "lora", "rank_pattern": {"*": 4}}},
        "adapter.rank_pattern: '*' is not a layer name or regular expression: nothing to repeat at position 0",
    ),
    (
        {"train": {"checkpointing": 0}},
        "train.checkpointing: 0 is not none, selective, full, auto, n >= 1 for every n-th block, "
        "or a mixture as 'full 12, selective 20'",
    ),
    (
        {"train": {"checkpointing": "sometimes"}},
        "train.checkpointing: sometimes is not none, selective, full, auto, n >= 1 for every n-th block, "
        "or a mixture as 'full 12, selective 20'",
    ),
    (
        {"optim": {"schedule": "cosine", "warmup": 20}, "train": {"steps": 20}},
        "optim.warmup: must be less than train.steps 20, not 20; lower it",
    ),
    (
        {"optim": {"type": "schedulefree", "schedule": "linear"}},
        "optim.schedule: linear cannot be combined with optim.type schedulefree; use constant",
    ),
    (
        {"parallel": {"strategy": "ddp", "cpu_offload": True}},
        "parallel.cpu_offload: true needs parallel.strategy full, grad_op or hybrid, not ddp",
    ),
    (
        {"parallel": {"strategy": "none", "cpu_offload": True}},
        "parallel.cpu_offload: true needs parallel.strategy full, grad_op or hybrid, not none",
    ),
    (
        {"parallel": {"strategy": "full", "cpu_offload": True, "offload_blocks": 4}},
        "parallel.offload_blocks: 4 cannot be combined with parallel.cpu_offload, which offloads all blocks; set 0, or "
        "parallel.cpu_offload: false",
    ),
    (
        {"parallel": {"offload_blocks": 0.5}, "adapter": ADAPTER_NONE, "export": {"what": "full"}},
        "parallel.offload_blocks: 0.5 is for frozen weights, but the whole model is trained; train an adapter "
        "(adapter.type), or set 0 and parallel.cpu_offload: true",
    ),
    (
        {"parallel": {"offload_blocks": 1.5}},
        "parallel.offload_blocks: 1.5 is not auto, a number of blocks, or a share of them from 0 to 1.0; 0 offloads "
        "none",
    ),
    (
        {"parallel": {"offload_blocks": -1}},
        "parallel.offload_blocks: -1 is not auto, a number of blocks, or a share of them from 0 to 1.0; 0 offloads "
        "none",
    ),
    ({"parallel": {"nodes": 2}}, "parallel.rendezvous: 2 nodes need host:port of the first node"),
    (
        {"cluster": {"slurm": {"nodes": 4}}},
        "cluster.slurm.nodes: is derived from parallel.nodes; set that instead",
    ),
    (
        {"cluster": {"slurm": {"--partition": "gpu"}}},
        "cluster.slurm: '--partition' is not a long sbatch option; write it without dashes: partition",
    ),
    (
        {"cluster": {"slurm": {"comment": "one\ntwo"}}},
        "cluster.slurm.comment: contains a line break; write one line",
    ),
    (
        {"parallel": {"nodes": 2, "rendezvous": "node0"}},
        "parallel.rendezvous: 'node0' is not host:port, for example node0:29400",
    ),
    (
        {"parallel": {"nodes": 2, "rendezvous": "node0:70000"}},
        "parallel.rendezvous: 'node0:70000' is not host:port, for example node0:29400",
    ),
    (
        {"parallel": {"strategy": "hybrid", "devices": 4, "shard_size": 3}},
        "parallel.shard_size: 3 does not divide the 4 ranks; use a divisor of 4",
    ),
    (
        {"parallel": {"strategy": "full", "devices": 4, "shard_size": 2}},
        "parallel.shard_size: needs parallel.strategy hybrid, not full; leave it empty",
    ),
    (
        {"parallel": {"strategy": "grad_op", "reshard_after_forward": True}},
        "parallel.reshard_after_forward: needs parallel.strategy full or hybrid, not grad_op; leave it empty",
    ),
    (
        {"parallel": {"strategy": "auto", "devices": 2, "reshard_after_forward": 2}},
        "parallel.reshard_after_forward: needs parallel.strategy full or hybrid, not auto; leave it empty",
    ),
    (
        {"parallel": {"strategy": "full", "devices": 4, "reshard_after_forward": 3}},
        "parallel.reshard_after_forward: 3 is not true, false or a divisor above 1 of the 4 ranks that share a copy",
    ),
    (
        {"parallel": {"strategy": "hybrid", "devices": 4, "shard_size": 2, "reshard_after_forward": 4}},
        "parallel.reshard_after_forward: 4 is not true, false or a divisor above 1 of the 2 ranks that share a copy",
    ),
    ({"data": {}}, "data.path: no images or text given; name a folder"),
    (
        {"data": {"path": "photos", "validation": -1}},
        "data.validation: -1 is not a folder or a number of images >= 0",
    ),
    (
        {"sample": {"every": 10}},
        "sample.prompts: sample.every is 10, but there are no prompts; add one or set sample.every: 0",
    ),
    (
        {"sample": {"prompts": ["a photo of [trigger]"]}},
        "sample.prompts: [trigger] stands for data.trigger, which is empty; set it or remove [trigger]",
    ),
    (
        {"data": {"path": "photos", "masks": "photos"}},
        "data.masks: photos is the folder of the training data itself; name another",
    ),
    (
        {"data": {"path": "photos", "masks": "./photos/"}},
        "data.masks: ./photos/ is the folder of the training data itself; name another",
    ),
    (
        {"data": {"folders": [{"path": "photos"}], "regularization": "photos"}},
        "data.regularization: photos is the folder of the training data itself; name another",
    ),
    (
        {"data": {"path": "photos", "mask_background": 0.1}},
        "data.mask_background: has no effect without data.masks; name the folder of masks",
    ),
    (
        {"data": {"path": "photos", "regularization_weight": 0.5}},
        "data.regularization_weight: has no effect without data.regularization; name the folder of images",
    ),
    (
        {"data": {"path": "photos", "reference_dropout": 0.5}},
        "data.reference_dropout: has no effect without data.references; name the folder of images",
    ),
    *(
        (
            {"data": {"path": "photos", "pair_suffixes": endings}},
            f"data.pair_suffixes: [{', '.join(endings)}] is not two endings of which none ends with the other; give "
            "two, as [_A, _B]",
        )
        for endings in (["_A"], ["_A", "_A"], ["", "_B"], ["_B", "x_B"], ["_A", "_B", "_C"])
    ),
    (
        {"data": {"path": "photos", "references": "before", "pair_suffixes": ["_A", "_B"]}},
        "data.pair_suffixes: the images before the edit are those of data.references; leave out one of both",
    ),
    (
        {"sample": {"prompts": ["one", "two"], "references": ["a.png"]}},
        "sample.references: 1 files for 2 prompts; give one for each, or none",
    ),
    (
        {"adapter": {"type": "lokr", "factor": 0}},
        "adapter.factor: 0 is not a size; use 1 to 1024, or -1 for factors as close to square as possible",
    ),
    (
        {"quantize": {"keep": ["attn"]}},
        "quantize.keep: needs quantize.format nf4, int8 or fp8, but it is none; set it, or leave this out",
    ),
    (
        {"quantize": {"format": "nf4"}, "adapter": ADAPTER_NONE},
        "quantize.format: nf4 is for frozen layers, but the whole model is trained; train an adapter (adapter.type), "
        "or set none",
    ),
    (
        {"quantize": {"format": "int8", "formats": {"a(": "none"}}},
        "quantize.formats: 'a(' is not a layer name or regular expression: missing ), unterminated subpattern at "
        "position 1",
    ),
]


@pytest.mark.parametrize(("sections", "text"), RULES, ids=[text.partition(":")[0] for _, text in RULES])
def test_fields_that_do_not_go_together_are_refused_with_the_way_out(sections: dict[str, Any], text: str) -> None:
    assert problems_of(sections) == [text]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"strategy": "full", "cpu_offload": True}},
        *({"parallel": {"offload_blocks": value}} for value in ("auto", 1, 999, 0.01, 1.0)),
        {"model": {"train": {"transformer": "full"}}, "adapter": ADAPTER_NONE, "parallel": {"offload_blocks": 2}},
        {"parallel": {"strategy": "hybrid", "devices": 2, "nodes": 2, "rendezvous": "[::1]:29400"}},
        {"parallel": {"strategy": "full", "devices": 4, "reshard_after_forward": 2}},
        {"model": {"train": {"transformer": "full"}}, "adapter": ADAPTER_NONE, "export": {"what": "full"}},
        {"data": {"path": "photos", "trigger": "sks"}, "sample": {"every": 1, "prompts": ["a [trigger]"]}},
        {"optim": {"type": "schedulefree", "warmup": 5}},
        {"quantize": {"format": "nf4", "keep": ["to_out"], "formats": {"norm.linear": "int8"}}},
        {"quantize": {"format": "int8", "encoders": True}, "adapter": ADAPTER_NONE},
    ],
)
def test_what_goes_together_is_accepted(sections: dict[str, Any]) -> None:
    assert problems_of(sections) == []


def test_all_broken_rules_are_named_at_once() -> None:
    assert problems_of({"data": {}, "parallel": {"nodes": 2}, "sample": {"every": 1}}) == [
        "parallel.rendezvous: 2 nodes need host:port of the first node",
        "data.path: no images or text given; name a folder",
        "sample.prompts: sample.every is 1, but there are no prompts; add one or set sample.every: 0",
    ]


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("train", "steps"),
        ("train", "checkpointing"),
        ("parallel", "offload_blocks"),
        ("optim", "lr"),
        ("data", "validation"),
        ("adapter", "alpha"),
    ],
)
def test_true_is_not_read_as_the_number_one(section: str, field: str) -> None:
    values = {field: True, **({"type": "lora"} if section == "adapter" else {})}
    with pytest.raises(ValidationError, match="expected a number, got true/false"):
        RunConfig.model_validate({"data": {"path": "photos"}, section: values})


def test_a_config_cannot_be_changed() -> None:
    cfg = RunConfig.model_validate(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        cfg.train.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "devices", "nodes", "micro_steps"),
    [(1, 1, 1, 1, 1), (8, 1, 4, 1, 2), (8, 2, 2, 2, 1), (7, 2, 2, 1, 2), (1, 1, 4, 1, 1)],
)
def test_passes_per_step_cover_the_batch(
    batch_size: int, micro_batch: int, devices: int, nodes: int, micro_steps: int
) -> None:
    cfg = RunConfig.model_validate(
        {
            **MINIMAL,
            "train": {"batch_size": batch_size, "micro_batch": micro_batch},
            "parallel": {"devices": devices, "nodes": nodes, "rendezvous": "node0:29400"},
        }
    )
    assert cfg.micro_steps == micro_steps


@pytest.mark.parametrize(
    ("adapter", "what", "written"),
    [
        ({"type": "lora"}, "auto", "adapter"),
        (ADAPTER_NONE, "auto", "full"),
        ({"type": "lora"}, "merged", "merged"),
        (ADAPTER_NONE, "none", "none"),
    ],
)
def test_export_auto_is_the_adapter_or_the_whole_model(adapter: dict[str, str], what: str, written: str) -> None:
    cfg = RunConfig.model_validate({**MINIMAL, "adapter": adapter, "export": {"what": what}})
    assert cfg.export_what == written


FP8 = {"what": "merged", "format": "single_file", "dtype": "fp8"}


@pytest.mark.parametrize(
    ("export", "asked", "becomes"),
    [
        ({"format": "kohya", "dtype": "fp16"}, ("auto", None, None), ("adapter", "kohya", "fp16")),
        ({"format": "kohya", "dtype": "fp16"}, ("merged", None, None), ("merged", "auto", "fp16")),
        (FP8, ("auto", None, None), ("merged", "single_file", "fp8")),
        (FP8, ("adapter", None, None), ("adapter", "auto", "bf16")),
        ({}, ("merged", "comfyui", "fp8"), ("merged", "comfyui", "fp8")),
    ],
)
def test_another_export_keeps_of_the_runs_own_what_it_can_carry(
    export: dict[str, str], asked: tuple[str, str | None, str | None], becomes: tuple[str, str, str]
) -> None:
    cfg = RunConfig.model_validate({"model": {"family": "flux2"}, "data": {"path": "photos"}, "export": export})
    changed = cfg.exporting(*asked).export
    assert (changed.what, changed.format, changed.dtype) == becomes


def test_an_adapter_without_alpha_has_scale_one() -> None:
    assert LoraAdapter(rank=8).scale == 1.0
    assert LoraAdapter(rank=8, alpha=4.0).scale == 0.5


def test_every_field_says_what_it_is() -> None:
    def undescribed(section: type[Section]) -> list[str]:
        return [
            f"{section.__name__}.{name}"
            for name, field in section.model_fields.items()
            if not field.description and name not in RunConfig.model_fields and name not in ("options", "type")
        ]

    assert [field for section in Section.__subclasses__() for field in undescribed(section)] == []
    assert len(list(all_names())) == len(set(all_names()))
