"""SAM 2 that the page asks for objects: a tiny model of the real class, compared with transformers' own reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Sam2Config, Sam2Model

from app.data.mask_models import MaskModels
from trainer.models.parts.folder import write_random
from trainer.models.segmentation import DEVIATION, MEAN, Question, Segmenter, pixels
from trainer.system.errors import InputError

SIDE = 64
CPU = torch.device("cpu")


def tiny_config() -> Sam2Config:
    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": 8, "num_attention_heads": 1, "image_size": [SIDE, SIDE],
        "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 32, 64], "global_attention_blocks": [3],
        "num_attention_heads_per_stage": [1, 2, 4, 8], "window_size_per_stage": [8, 4, 4, 2],
    }  # fmt: skip
    return Sam2Config(
        vision_config={
            "backbone_config": backbone,
            "backbone_channel_list": [64, 32, 16, 8],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 16,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )


def write_tiny(folder: Path) -> Path:
    """A tiny SAM 2 with random weights, in a folder as transformers writes it."""
    folder.mkdir(parents=True)
    write_random(folder, lambda: Sam2Model(tiny_config()), "sam2")
    return folder


def photo(width: int = 90, height: int = 50) -> Image.Image:
    ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    return Image.fromarray((ramp + 60 * np.sin(ramp)).clip(0, 255).astype("uint8"))


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    return str(caught.value)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "sam2")


def test_an_image_is_seen_as_torchvision_would_scale_it():
    image = photo()
    exact = torch.from_numpy(np.asarray(image).astype("float32")).permute(2, 0, 1)[None] / 255
    scaled = F.interpolate(exact, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    seen = pixels(image, SIDE) * torch.tensor(DEVIATION).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert (seen - scaled).abs().max() < 1.01 / 255  # Pillow rounds to bytes


@pytest.mark.parametrize(
    ("points", "box"),
    [
        (((30.0, 20.0, True),), None),
        (((30.0, 20.0, True), (60.0, 5.0, False)), None),
        ((), (10.0, 5.0, 80.0, 40.0)),
        (((30.0, 20.0, True),), (10.0, 5.0, 80.0, 40.0)),
    ],
)
@torch.no_grad()
def test_an_object_is_what_transformers_own_model_finds(tiny: Path, points: tuple, box: tuple | None):
    image = photo()
    found = Segmenter.load(str(tiny), CPU).find(image, Question("", points, box))
    reference = Sam2Model.from_pretrained(tiny).eval()
    scale = torch.tensor([SIDE / image.width, SIDE / image.height])
    answer = reference(
        pixel_values=pixels(image, SIDE),
        input_points=(torch.tensor([[point[:2] for point in points]]) * scale)[None] if points else None,
        input_labels=torch.tensor([[[int(belongs) for *_, belongs in points]]]) if points else None,
        input_boxes=(torch.tensor(box) * scale.repeat(2)).view(1, 1, 4) if box else None,
        multimask_output=len(points) == 1 and not box,
    )
    best = answer.pred_masks[0, 0, answer.iou_scores[0, 0].argmax()]
    whole = F.interpolate(best[None, None], (image.height, image.width), mode="bilinear", align_corners=False)
    expected = (whole[0, 0] > 0).numpy()
    assert (found.mode, found.size) == ("L", image.size)
    assert np.array_equal(np.asarray(found), expected * np.uint8(255))
    assert 0 < expected.mean() < 1


def test_the_published_files_for_videos_are_read_too(tiny: Path, tmp_path: Path):
    whole = Segmenter.load(str(tiny), CPU).find(photo(), Question("", ((30, 20, True),)))
    weights = load_file(tiny / "model.safetensors")
    save_file({**weights, "memory_attention.layers.0.weight": torch.zeros(2)}, tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"model_type": "sam2_video", "num_maskmem": 7}))
    again = Segmenter.load(str(tiny), CPU).find(photo(), Question("", ((30, 20, True),)))
    assert again.tobytes() == whole.tobytes()


def test_what_is_not_a_whole_model_is_named_with_what_to_do(tiny: Path, tmp_path: Path):
    assert "hf download nobody/nothing" in refused(lambda: Segmenter.load("nobody/nothing", CPU))
    assert "no config.json" in refused(lambda: Segmenter.load(str(tmp_path / "away"), CPU))
    assert "neither a point nor a box" in refused(lambda: Segmenter.load(str(tiny), CPU).find(photo(), Question("")))
    weights = load_file(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    save_file(
        {name: value for name, value in weights.items() if name != "no_memory_embedding"}, tiny / "model.safetensors"
    )
    wrong = refused(lambda: Segmenter.load(str(tiny), CPU))
    assert "1 of 225 weights are missing or have another shape, first no_memory_embedding" in wrong
    for changes, wrong in (
        ({"model_type": "clip"}, "describes a clip"),
        ({"vision_config": {"backbone_config": 7}}, "transformers cannot build this sam2"),
    ):
        (tiny / "config.json").write_text(json.dumps(config | changes))
        assert wrong in refused(lambda: Segmenter.load(str(tiny), CPU))


@pytest.mark.slow
def test_a_process_of_its_own_answers_and_says_what_is_wrong(tiny: Path, tmp_path: Path):
    models = MaskModels(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    photo().save(tmp_path / "a.webp", lossless=True)
    question = {"image": str(tmp_path / "a.webp"), "points": [[30.0, 20.0, True]]}
    first = models.find(str(tiny), question)
    assert models.find(str(tiny), question) == first
    assert "neither a point nor a box" in refused(lambda: models.find(str(tiny), {"image": str(tmp_path / "a.webp")}))
    assert "No such file" in refused(lambda: models.find(str(tiny), question | {"image": str(tmp_path / "b.webp")}))
    assert "no config.json" in refused(lambda: models.find(str(tmp_path), question))
    for path in ("", " ", "--help", "a\0b"):
        assert "is not the path of a model" in refused(lambda path=path: models.find(path, question))
    models.end()
