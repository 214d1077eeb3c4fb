"""How fast a vision-language model of a published size captions images on one device: real layers, random weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.benchmarks.gpu_report import GIB, Place, Report, Row
from tests.captioning import models
from tests.runs import alone, run_config
from trainer.models.vision_language import Decoding, VisionLanguage, VisionLanguageFolder

TOKENS, REPEATS = 64, 3
TEXT_3B = {
    **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    **{"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096},
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
VISION_3B = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
    **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
CASES = {"fp32": ("fp32", "none"), "bf16": ("bf16", "none"), "nf4": ("bf16", "nf4"), "int8": ("bf16", "int8")}


def captions(place: Place, report: Report) -> None:
    """Answers of a tiny model against the CPU's, then the seconds of an answer of a model of 3B."""
    tiny = models.write_qwen3_vl(_fresh(place, "captions-tiny"))
    with report.measuring("a tiny model"):
        image = Image.effect_mandelbrot((96, 96), (-2, -1.5, 1, 1.5), 20).convert("RGB")
        here, there = (_answer(_loaded(tiny, device, "fp32"), image).text for device in ("cpu", place.device))
        figure = "as on the CPU" if here == there else f"another answer: {there!r}, on the CPU {here!r}"
        report.add(Row("captions, tiny", figure, "equal", here == there))
    folder = tiny if place.tiny else _write_3b(place)
    side = 96 if place.tiny else 1024
    image = Image.effect_mandelbrot((side, side), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    for name, (precision, format) in CASES.items():
        with report.measuring(f"captions, {name}"):
            report.add(_row(name, _loaded(folder, place.device, precision, format), image, place))


def _row(name: str, model: VisionLanguage, image: Image.Image, place: Place) -> Row:
    _answer(model, image)
    place.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        _answer(model, image)
    place.synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    peak = torch.cuda.max_memory_allocated() / GIB if place.device == "cuda" else 0.0
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = len(model.source.inputs(image, "Describe it.")["input_ids"][0])
    figure = f"{seconds:.2f} s for {TOKENS} tokens after {tokens}, {TOKENS / seconds:.0f} tokens/s, peak {peak:.1f} GiB"
    return Row(f"captions, {name}", figure, numbers={"seconds": seconds, "gib": peak})


def _answer(model: VisionLanguage, image: Image.Image) -> Any:
    model.model.generation_config.eos_token_id = None  # random weights would end anywhere
    return model.answer(model.source.inputs(image, "Describe it."), Decoding(TOKENS), "image")


def _loaded(folder: Path, device: str, precision: str, format: str = "none") -> VisionLanguage:
    world = alone(torch.device("cuda", 0) if device == "cuda" else torch.device(device))
    cfg = run_config(folder, train__precision=precision, quantize__format=format, parallel__device=device)
    return VisionLanguage.load(VisionLanguageFolder(str(folder)), cfg, world)


def _fresh(place: Place, name: str) -> Path:
    """A folder that does not exist yet."""
    return place.folder / f"{name}-{time.time_ns()}"


def _write_3b(place: Place) -> Path:
    """The sizes of Qwen2.5-VL-3B, bf16, with the tokenizer of the tiny models."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder = models.write_qwen2_5_vl(_fresh(place, "captions-3b"))
    tiny = json.loads((folder / "config.json").read_text())
    ids = {name: value for name, value in tiny.items() if name.endswith("_id")}
    config = Qwen2_5_VLConfig(text_config=TEXT_3B, vision_config=VISION_3B, tie_word_embeddings=True, **ids)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with place.here:
            model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    limits = {
        "min_pixels": 56 * 56,
        "max_pixels": 1024 * 1024,
        "size": {"shortest_edge": 3136, "longest_edge": 1 << 20},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | limits))
    return folder
