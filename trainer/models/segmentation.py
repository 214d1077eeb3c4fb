"""Finds an object in an image by clicks or a box, with SAM 2 of transformers. A side process of the page runs it.

`python -m trainer.models.segmentation MODEL` answers each line of standard input, a `Question` in JSON, by a line with
`{"mask": PNG in base64}` or `{"error": sentence}`. Images are prepared with Pillow: transformers' own processor of
SAM 2 needs torchvision.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from torch import Tensor

from trainer.models.parts.folder import TRANSFORMERS_STEM, ModelFolder
from trainer.models.parts.language.language_configs import first_line
from trainer.system.errors import InputError
from trainer.system.files import first_problem
from trainer.system.terminal import say
from trainer.weights.files import WeightFiles, give_storage, read_tensor, safetensors_in
from trainer.weights.hub import find_folder

FIELD = "--model"
EXPECTS = "a folder of transformers with a SAM 2 model, for example facebook/sam2.1-hiera-tiny"
TYPES = ("sam2", "sam2_video")
"""Model types that hold SAM 2; the published files hold the parts for videos too, which are not read."""
PARTS = ("vision_config", "prompt_encoder_config", "mask_decoder_config")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of the pixels that every SAM 2 was trained on, from 0 to 1."""
BUILD_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)
"""Errors of transformers for a config that is wrong."""
LEAST_FREE = 4 * 2**30
"""Bytes that a GPU must have free to be used: a training run may need the rest."""


@dataclass(frozen=True)
class Question:
    """A request to find something in an image.

    Attributes:
        image: The WebP file, upright and in sRGB, which the page has made.
        points: (x, y, whether it belongs to the object) of clicks, in pixels of the image.
        box: (left, top, right, bottom) around the object, in pixels; None without.
    """

    image: str
    points: tuple[tuple[FiniteFloat, FiniteFloat, bool], ...] = ()
    box: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat] | None = None


_QUESTION = TypeAdapter(Question)


class Segmenter:
    """A SAM 2 model in fp32. It keeps what it has seen of the last image, so that a further click is quick."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model.to(device)
        self._device = device
        self._known: tuple[Image.Image, list[Tensor]] | None = None

    @classmethod
    def load(cls, path: str, device: torch.device) -> Segmenter:
        """Read a model.

        Args:
            path: A folder, or a hub id in the local Hugging Face cache.
            device: Where it computes.

        Raises:
            InputError: There is no such model, or it is damaged or of another kind.
        """
        folder = _folder(path)
        model = _build(folder)
        own = model.state_dict()
        paths = safetensors_in(folder.path, TRANSFORMERS_STEM)
        files = WeightFiles.read(paths, lambda key: key if key in own else None)
        wrong = [name for name, value in own.items() if _shape(files, name) != tuple(value.shape)]
        if wrong:
            raise InputError(
                f"{folder.path}: {len(wrong)} of {len(own)} weights are missing or have another shape, first "
                f"{wrong[0]}; download the folder again"
            )
        give_storage(model, torch.device("cpu"))
        model.load_state_dict({name: read_tensor(entry) for name, entry in files.entries.items()})
        return cls(model, device)

    @torch.inference_mode()
    def find(self, image: Image.Image, question: Question) -> Image.Image:
        """Return the object as white on black, mode L, in the image's size.

        Args:
            image: The image, RGB.
            question: Its points and box.

        Raises:
            InputError: There is neither a point nor a box.
        """
        if not question.points and question.box is None:
            raise InputError("points: neither a point nor a box is given; click the object, or draw a box around it")
        side = self._side
        scale = torch.tensor([side / image.width, side / image.height])
        inputs: dict[str, Tensor] = {}
        if question.points:
            inputs["input_points"] = (torch.tensor([point[:2] for point in question.points]) * scale)[None, None]
            inputs["input_labels"] = torch.tensor([[[int(point[2]) for point in question.points]]])
        if question.box is not None:
            inputs["input_boxes"] = (torch.tensor(question.box).view(2, 2) * scale).view(1, 1, 4)
        # A single click may mean a part or the whole: of three masks the likeliest is taken, as the model's authors do.
        is_open = len(question.points) == 1 and question.box is None
        if self._known is None or self._known[0] is not image:
            self._known = (image, self._model.get_image_embeddings(pixels(image, self._side).to(self._device)))
        found = self._model(
            image_embeddings=self._known[1],
            multimask_output=is_open,
            **{name: value.to(self._device) for name, value in inputs.items()},
        )
        best = found.pred_masks[0, 0, found.iou_scores[0, 0].argmax()].float()
        levels = F.interpolate(best[None, None], (image.height, image.width), mode="bilinear", align_corners=False)
        return Image.fromarray((levels[0, 0] > 0).mul(255).byte().cpu().numpy())

    @property
    def _side(self) -> int:
        return int(self._model.config.prompt_encoder_config.image_size)


def pixels(image: Image.Image, side: int) -> Tensor:
    """Return what the model sees of an image, (1, 3, side, side): each side is scaled by itself."""
    scaled = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    normal = (scaled - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
    return torch.from_numpy(normal).permute(2, 0, 1)[None].contiguous()


def _folder(path: str) -> ModelFolder:
    """The folder of a model. Raises InputError, where it is not here, with how to get it."""
    try:
        found = find_folder(FIELD, path)
    except InputError as error:
        how = f"download it with `hf download {path}`, or name {EXPECTS}"
        raise InputError(f"{path}: neither a folder nor in the local Hugging Face cache; {how}") from error
    if not (found / "config.json").is_file():
        raise InputError(f"{path}: no config.json; name {EXPECTS}")
    return ModelFolder(FIELD, found, expects=EXPECTS)


def _build(folder: ModelFolder) -> Any:
    """The model on the meta device, in eval mode."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import Sam2Config, Sam2Model

    stored = folder.read("config.json")
    kind = stored.get("model_type")
    if kind not in TYPES:
        raise InputError(f"{folder.path / 'config.json'}: describes a {kind}; name {EXPECTS}")
    try:
        with torch.device("meta"):
            model = Sam2Model(Sam2Config(**{part: stored.get(part) for part in PARTS}))
    except (StrictDataclassError, *BUILD_ERRORS) as error:
        raise InputError(
            f"{folder.path / 'config.json'}: transformers cannot build this {kind} ({first_line(error)}); "
            "download the folder again"
        ) from error
    return model.eval().requires_grad_(False)


def _shape(files: WeightFiles, name: str) -> tuple[int, ...] | None:
    entry = files.entries.get(name)
    return None if entry is None else tuple(entry.shape)


def best_device() -> torch.device:
    """Return the first GPU where it has LEAST_FREE bytes free, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info(0)[0] >= LEAST_FREE:
        return torch.device("cuda", 0)
    return torch.device("cpu")


class _Answers:
    """Answers questions with one model, which is read for the first of them."""

    def __init__(self, model: str) -> None:
        self._path = model
        self._segmenter: Segmenter | None = None
        self._image: tuple[str, Image.Image] | None = None

    def to(self, line: str) -> dict[str, str]:
        """Answer a line of standard input."""
        try:
            question = _QUESTION.validate_json(line)
            self._segmenter = self._segmenter or Segmenter.load(self._path, best_device())
            buffer = io.BytesIO()
            if self._image is None or self._image[0] != question.image:
                with Image.open(Path(question.image), formats=("WEBP",)) as image:
                    self._image = (question.image, image.convert("RGB"))
            self._segmenter.find(self._image[1], question).save(buffer, "PNG")
        except ValidationError as error:
            return {"error": f"the question is wrong ({first_problem(error)}); reload the page"}
        except (InputError, OSError, torch.OutOfMemoryError) as error:
            return {"error": str(error)}
        return {"mask": base64.b64encode(buffer.getvalue()).decode()}


def main() -> None:
    """Answer every line of standard input."""
    answers = _Answers(sys.argv[1])
    for line in sys.stdin:
        say(json.dumps(answers.to(line)))


if __name__ == "__main__":
    main()
