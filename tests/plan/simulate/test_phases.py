"""The parts of a run, from its first caption to its export, and what it takes beside its GPUs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.plan.common import NOWHERE, planned, run
from trainer.config.load import load_config
from trainer.plan.hardware import CARDS, like
from trainer.plan.search import fixes as fixing
from trainer.plan.search.ladder import CPU, next_rung, ways_to_fit
from trainer.plan.simulate import sizes as sizes_module
from trainer.plan.simulate.phases import CAPTIONS, EXPORT, IMAGES, SAMPLING, TRAINING, Item
from trainer.system.amounts import GIB

PRESETS = Path(__file__).parents[3] / "presets"
SAMPLES = ("sample.every=100", "sample.prompts=[a fox]")
OFTEN = ("flux2 dev", "flux2 klein-4b", "flux1 dev", "sd3 sd35-large", "qwen_image qwen-image", "z_image z-image")


def peaks(model: str, *fields: str) -> dict[str, float]:
    """GiB of tensors in each part of a run."""
    return {phase.name: phase.peak / GIB for phase in planned(model, *fields).phases}


def sizes(items: tuple[Item, ...]) -> dict[str, float]:
    return {item.name: item.size for item in items}


@pytest.mark.parametrize("model", OFTEN)
def test_a_run_has_all_its_parts_and_needs_what_the_fullest_takes(model: str) -> None:
    found = planned(model, *SAMPLES)
    assert [phase.name for phase in found.phases] == [CAPTIONS, IMAGES, TRAINING, SAMPLING, EXPORT]
    for phase in found.phases:
        assert sum(item.size for item in phase.items) == pytest.approx(phase.need)
        assert phase.need > phase.peak > 0
    assert found.need == max(phase.need for phase in found.phases) == found.fullest.need


def test_pairs_are_planned_with_both_images_and_the_forward_of_the_reference() -> None:
    pairs = planned("flux2 klein-4b", "objective.dpo_beta=2000", "data.rejected=elsewhere")
    twice = planned("flux2 klein-4b", "train.micro_batch=2", "train.batch_size=8")
    assert pairs.training.peak == twice.training.peak
    assert pairs.flops == pytest.approx(1.5 * twice.flops)
    again = ("train.checkpointing=full", "train.batch_size=8")
    pairs = planned("flux2 klein-4b", "objective.dpo_beta=2000", "data.rejected=elsewhere", *again)
    assert pairs.flops == pytest.approx(4 / 3 * 2 * planned("flux2 klein-4b", *again).flops)


def test_nothing_is_drawn_without_prompts_and_nothing_exported_where_that_is_not_wanted() -> None:
    assert SAMPLING not in peaks("flux2 klein-4b", "sample.prompts=[a fox]")
    assert EXPORT not in peaks("flux2 klein-4b", "export.what=none")


def test_text_encoders_are_whole_on_one_gpu_and_sharded_over_several() -> None:
    alone = peaks("flux2 dev", "parallel.devices=1", "parallel.strategy=none")[CAPTIONS]
    # 31 of Mistral Small's 40 layers in bf16: the embeddings have 0.671 B parameters, each layer 0.556 B
    assert alone == pytest.approx((0.671 + 31 * 0.5558) * 1e9 * 2 / GIB, rel=0.01)
    shared = [peaks("flux2 dev", f"parallel.devices={ranks}")[CAPTIONS] for ranks in (2, 4, 8)]
    assert shared == sorted(shared, reverse=True)
    assert shared[0] < 0.7 * alone


def test_text_encoders_in_fewer_bits_or_on_the_host_take_less() -> None:
    one = ("parallel.devices=1", "parallel.strategy=none", "quantize.format=nf4")
    whole, coded = (peaks("flux2 dev", *one, f"quantize.encoders={value}")[CAPTIONS] for value in ("false", "true"))
    assert coded < 0.35 * whole
    offloaded = peaks("flux2 dev", "parallel.devices=1", "parallel.strategy=full", "parallel.cpu_offload=true")
    assert offloaded[CAPTIONS] < 0.2 * whole


def test_a_text_encoder_that_is_trained_is_not_loaded_a_second_time() -> None:
    assert peaks("sdxl base")[CAPTIONS] == pytest.approx(3.02, abs=0.05)  # both CLIPs in fp32, whole on each rank
    live = load_config(PRESETS / "sdxl-locon-text-encoders-2gpu.yaml").config
    found = fixing.planned(live, None, NOWHERE)
    assert found is not None
    assert CAPTIONS not in [phase.name for phase in found.phases]


def test_larger_samples_need_more_and_say_when() -> None:
    found = [
        planned("flux2 klein-4b", *SAMPLES, "train.checkpointing=full", f"sample.size=[{side},{side}]")
        for side in (512, 1024, 1536)
    ]
    drawing = [phase for plan in found for phase in plan.phases if phase.name == SAMPLING]
    assert [phase.peak for phase in drawing] == sorted(phase.peak for phase in drawing)
    assert drawing[-1].when == "decoding the image"
    assert found[-1].fullest.name == SAMPLING


def guides(*fields: str) -> float:
    """Bytes of the components that guide samples, on each rank while samples are generated."""
    found = planned("ideogram4 ideogram-4", *SAMPLES, *fields)
    parts = {phase.name: sizes(phase.items).get("guiding transformer", 0) for phase in found.phases}
    assert {name for name, size in parts.items() if size} <= {SAMPLING}
    return parts[SAMPLING]


def test_a_second_transformer_that_guides_samples_takes_memory_then_and_only_with_guidance() -> None:
    whole = 9.279288448e9 * 2  # parameters in bf16
    assert guides("parallel.devices=1", "parallel.strategy=none") == whole
    assert guides("parallel.devices=4") == whole / 4
    assert guides("parallel.devices=4", "parallel.cpu_offload=true") == 0
    assert guides("sample.guidance=1") == 0
    nf4 = ("parallel.devices=1", "parallel.strategy=none", "quantize.format=nf4")
    assert guides(*nf4) == whole
    assert guides(*nf4, "quantize.encoders=true") < 0.4 * whole


def test_the_samples_of_a_schedule_free_run_put_the_trained_weights_aside() -> None:
    usual, free = (planned("flux2 klein-4b", *SAMPLES, f"optim.type={name}") for name in ("adamw", "schedulefree"))
    aside = [sizes(phase.items).get("averaged weights", 0) for phase in free.phases if phase.name == SAMPLING]
    trained = sizes(usual.disk)["export"] / 2  # in bf16
    assert aside == [pytest.approx(4 * trained / 4)]  # fp32, on four ranks


def test_the_export_of_a_full_fine_tune_gathers_its_largest_tensor() -> None:
    found = planned("flux2 klein-4b", "adapter.type=none", "train.checkpointing=full")
    (export,) = (phase for phase in found.phases if phase.name == EXPORT)
    # single_transformer_blocks.*.attn.to_qkv_mlp_proj: 3072 inputs, three times 3072 and twice 9216 outputs
    assert sizes(export.items)["gathered weights"] == 4 * 3072 * (3 * 3072 + 2 * 9216)


def disk(*fields: str) -> dict[str, float]:
    return sizes(planned("flux2 dev", *fields).disk)


def test_what_is_kept_of_an_image_are_its_latents_and_the_embeddings_of_its_caption() -> None:
    captions, latents = 512 * 3 * 5120 * 2, 128 * 64 * 64 * 4
    assert disk()["cached image"] == captions + latents
    assert disk("data.resolution=512")["cached image"] == captions + latents / 4


def test_checkpoints_and_exports_hold_what_is_trained() -> None:
    lora, full = disk(), disk("adapter.type=none")
    numbers = 32.22e9  # parameters of the model
    assert full["checkpoint"] == pytest.approx(12 * numbers, rel=0.001)
    assert full["export"] == pytest.approx(2 * numbers, rel=0.001)
    assert lora["checkpoint"] / 12 == lora["export"] / 2
    assert disk("export.what=merged")["export"] == pytest.approx(full["export"], rel=0.005)
    nf4 = disk("export.what=merged", "quantize.format=nf4")
    assert nf4["export"] == pytest.approx(full["export"], rel=0.005)


def test_a_base_that_is_kept_in_fewer_bits_takes_its_place() -> None:
    fields = ("quantize.format=nf4", "quantize.cache=true")
    assert "cached base" not in disk("quantize.format=nf4")
    assert disk(*fields)["cached base"] / GIB == pytest.approx(17.06 - 2.4, abs=1)
    assert disk(*fields, "quantize.encoders=true")["cached base"] > 1.5 * disk(*fields)["cached base"]


def host(*fields: str) -> dict[str, float]:
    return sizes(planned("flux2 klein-4b", *fields).host)


def test_a_rank_holds_on_the_host_what_is_offloaded_and_the_copy_of_its_checkpoint() -> None:
    assert "offloaded" not in host()
    assert host("parallel.cpu_offload=true")["offloaded"] / GIB == pytest.approx(3.88 * 2 / 4 / 1.0737, rel=0.2)
    checkpoint = sizes(planned("flux2 klein-4b").disk)["checkpoint"]
    assert host()["checkpoint"] == checkpoint / 4
    assert host()["export"] == checkpoint / 3


def test_offloaded_weights_take_up_to_twice_their_bytes_where_torch_rounds_pinned_memory() -> None:
    def offloaded(is_exact: bool) -> float:
        with mock.patch.object(sizes_module, "pins_exactly", lambda cfg: is_exact):
            fields = ("parallel.devices=4", "parallel.strategy=full", "parallel.cpu_offload=true")
            return sizes(planned("flux2 dev", *fields).host)["offloaded"] / GIB

    assert offloaded(True) == pytest.approx(15.1, rel=0.03)
    assert offloaded(False) > 1.5 * offloaded(True)


def ways(plan_for: str, model: str, *fields: str) -> list[str]:
    return [str(fix) for fix in ways_to_fit(run(model, *fields), CARDS[plan_for], NOWHERE)]


def test_where_captions_do_not_fit_and_nothing_can_be_offloaded_their_encoders_are_made_smaller() -> None:
    one = ("parallel.devices=1", "parallel.strategy=none", "quantize.format=nf4", "train.checkpointing=full")
    assert ways("32gb", "flux2 dev", *one) == ["parallel.cpu_offload=true parallel.strategy=full"]
    found = next_rung(run("flux2 dev", *one), like(CPU, 32 * GIB), NOWHERE, state="encoding")
    assert str(found) == "quantize.encoders=true"


def test_samples_are_made_smaller_where_nothing_else_makes_them_fit() -> None:
    fields = ("parallel.devices=1", "parallel.strategy=none", "quantize.format=nf4", "quantize.encoders=true")
    samples = (*SAMPLES, "sample.size=[2048,2048]", "train.checkpointing=full")
    assert not any("sample.size" in way for way in ways("16gb", "flux2 klein-4b", *fields, *samples))
    assert ways("12gb", "flux2 klein-4b", *fields, *samples) == ["sample.size=[1024,1024]"]
