"""The sections of a run config: every option with its unit, its default and its help, declared once.

The form, the command line, the presets' schema, the documentation and the error texts are generated from these
classes. Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from trainer.config.size import Size
from trainer.system.errors import Problem

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
NAME_HELP = "1 to 64 letters, digits, '_', '.' or '-', not beginning with '.' or '-'"
MODEL_WORDS = ("tiny", "demo", "random")
TEMPLATE_SUFFIX = ".jinja"
"""Ends the path of a chat template; one of our own is named without it."""
TRIGGER_PLACE = "[trigger]"
"""Stands for `data.trigger` in captions and prompts."""
DEMO = Path(__file__).parents[1] / "assets" / "demo"
DEMO_CAPTIONER = DEMO.parent / "captioner"
"""The model of `--caption FOLDER --model demo`."""
WEIGHT_FILES = (".safetensors", ".sft")
"""Ends of the names of single files with weights. A .sft is a safetensors file: FLUX.1 was first published so."""
NUMBERED_FOLDER = re.compile(r".*?(\d+)")
"""A folder in `data.references` with one reference image of each set, as control_1."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)(?<!\.sft)(?<!\.gguf)(?<!\.ckpt)", re.ASCII)
HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):(?P<port>\d{1,5})")


def _refuse_bool(value: object) -> object:
    """pydantic reads true as 1, so that `train.steps: true` would be a run of one step."""
    if isinstance(value, bool):
        raise PydanticCustomError("bool_as_number", "expected a number, got true/false")
    return value


def as_name(value: object) -> object:
    """Return the name of a run that a text stands for, as my-photos for "my photos"; the value itself where none is
    left of it. A name stays as it is."""
    if not isinstance(value, str) or re.fullmatch(NAME_PATTERN, value):
        return value
    plain = unicodedata.normalize("NFKD", value).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip(".-")[:64].rstrip("-") or value


Whole = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Rank = Annotated[Whole, Field(ge=1, le=1024)]
Pixels = Annotated[Whole, Field(ge=16, le=8192)]
Layer = Annotated[Whole, Field(ge=0)]
Side = Annotated[Whole, Field(ge=16, le=4096)]
COLOUR = r"^#[0-9a-fA-F]{6}$"
Colour = Annotated[str, StringConstraints(to_lower=True)]
"""One spelling for each colour, since it is part of the keys of caches."""
ExportFormat = Literal["auto", "diffusers", "comfyui", "kohya", "lycoris", "peft", "single_file"]
BaseFormat = Literal["none", "nf4", "int8", "fp8"]
SINGLE_FILES = ("comfyui", "single_file")
LOHA_RATE = 3e-4
"""Learning rates below this are usual for lora; with them, loha needs about ten times as many steps (DECISIONS 55)."""
ADAPTER_FILES = ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft")


def has_trigger_place(text: str) -> bool:
    """Whether a caption or prompt holds [trigger], in upper or lower case."""
    return TRIGGER_PLACE in text.lower()


def fill_trigger(text: str, trigger: str) -> str:
    """Return a caption or prompt with the trigger in place of [trigger], in upper or lower case."""
    return re.sub(re.escape(TRIGGER_PLACE), lambda _: trigger, text, flags=re.IGNORECASE)


def half_character(text: str) -> str | None:
    """Return what is wrong with a text that is not valid Unicode, as the end of a sentence; None for valid text.

    JSON and YAML can write half of a character (a lone surrogate), which tokenizers and files refuse.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds \\u{ord(text[error.start]):04x}, which is half a character; remove it"
    return None


@cache
def family_names() -> tuple[str, ...]:
    """Names of the model families: one per module in `models/families/` whose name begins with a letter."""
    modules = (Path(__file__).parents[1] / "models" / "families").glob("[a-z]*.py")
    return tuple(sorted(module.stem for module in modules))


@cache
def demo_families() -> tuple[str, ...]:
    """Families that have a built-in demo model: one per folder in `assets/demo/`."""
    return tuple(sorted(folder.name for folder in DEMO.iterdir()))


def option(
    default: Any,
    *,
    title: str | None = None,
    unit: str = "",
    path: Literal["", "file", "folder", "model", "template"] = "",
    keywords: str = "",
    **limits: Any,
) -> Any:
    """Declare a field of a section.

    Args:
        default: Its default; `...` for a required field.
        title: Its name in words, where `weight_decay` read as "Weight decay" is not enough.
        unit: The unit shown in the form and in errors.
        path: Marks a file or folder: a relative path in a preset is relative to the preset. A "model" may also be a hub
            id or one of MODEL_WORDS; it is taken for a path when it exists. A "template" ends in TEMPLATE_SUFFIX.
        keywords: Words by which other programs, or newcomers, know it, for the form's search.
        limits: pydantic's limits (`ge`, `gt`, `le`, `lt`, `pattern`).
    """
    extra: dict[str, Any] = {
        key: value for key, value in (("unit", unit), ("path", path), ("keywords", keywords)) if value
    }
    return Field(default, title=title, json_schema_extra=extra or None, **limits)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


MOST_TEXT_WINDOWS = 8
"""600 tokens."""


class ModelOptions(Section):
    architecture: str | None = None
    """Published variant whose architecture `model.path: tiny` imitates. Weights on disk are checked against it."""
    text_layers: tuple[Layer, ...] | None = option(None, title="Text encoder layers")
    """Layers of the text encoder whose hidden states are concatenated. Empty: evenly spaced layers, as in the published
    models."""
    max_tokens: Whole | None = option(
        None, title="Max caption length", ge=8, le=4096, unit="tokens", keywords="longest maximum"
    )
    """Captions are padded or truncated to this length. Empty: the length of the published model, or the tokenizer's
    maximum if that is shorter."""
    text_windows: Whole = option(1, title="CLIP windows", ge=1, le=MOST_TEXT_WINDOWS, keywords="prompt chunks long")
    """Number of 75-token windows in which CLIP reads a caption, as ComfyUI and A1111 do with long prompts. For
    example 3 for captions of up to 225 tokens."""
    without: tuple[str, ...] = option((), title="Omitted text encoders", keywords="left out drop skip t5")
    """Text encoders that are not loaded, where the model works without them: for example `text_encoder_3`, a large
    third one."""
    blocks: str | None = option(None, title="Block classes", keywords="fsdp wrap transformer layer")
    """Class names of the blocks that are sharded one by one, comma-separated. Empty: the blocks the model itself
    declares."""
    new_tokens: tuple[str, ...] = option((), title="New tokens", keywords="vocabulary tokenizer special tokens resize")
    """Tokens to add to a language model's tokenizer, for example `<tool_call>`. Their embeddings start at the mean of
    the others and must be trained: fully, or by `adapter.modules_to_save`."""
    attention: Literal["auto", "sdpa", "eager"] = option("auto", title="Attention implementation")
    """Implementation of a language model's attention in transformers. auto: sdpa where the model's class has it, else
    eager, which needs memory for all pairs of tokens."""
    distilled: bool | None = None
    """Whether the model was distilled to generate in few steps without guidance. Empty: detected from its folder."""


class ModelConfig(Section):
    family: str = option("", title="Model family")
    """Model family: the architecture of the base model. Required."""
    path: str = option("tiny", title="Base model", path="model", keywords="pretrained checkpoint hf hugging face")
    """Base model: a diffusers folder, a single .safetensors or .sft file, a downloaded Hugging Face id, `demo` (a
    small built-in model that generates pictograms of 64 x 64 pixels), or `tiny` (random weights, trains in seconds on a
    CPU). For a language model: a transformers folder, or `random` for random weights in the full size of
    `model.options.architecture` or `model.base`."""
    base: str | None = option(None, title="Components folder", path="model", keywords="other")
    """Needed if `model.path` is a single file: a diffusers folder with the configs and the components which that file
    lacks. For `random`: a folder with config.json and tokenizer."""
    train: dict[str, Literal["frozen", "adapter", "full"]] = option(
        {}, title="Trained components", keywords="freeze unfreeze full finetune text encoder unet parts"
    )
    """Training of each component of the model: by the adapter (adapter), of all weights (full), or none (frozen).
    Components not listed are frozen. Empty: the denoiser is trained, by the adapter or, without an adapter, fully."""
    options: ModelOptions = ModelOptions()

    @property
    def is_single_file(self) -> bool:
        """Whether the path is that of a file with weights, which needs `base`."""
        return self.path.lower().endswith(WEIGHT_FILES)


class Method(Section):
    """Training method: an adapter, or the model's own weights.

    Attributes:
        title: Name of the method on every screen.
        line: A line about it, for the form.
        formats: Values of `export.format` that can carry it.
        is_portable: Whether diffusers, ComfyUI and kohya's programs read the same tensors, for every kind of model.
        in_diffusers: Whether diffusers' `load_lora_weights` reads its tensors, for every model that takes adapters.
        peft_transposes: Whether peft has it for layers whose weights are (inputs, outputs).
        network_module: The module that kohya's programs load for it.
        is_linear_in_rank: Whether its sizes grow linearly with its rank.
    """

    title: ClassVar[str]
    line: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ADAPTER_FILES
    is_portable: ClassVar[bool] = False
    in_diffusers: ClassVar[bool] = False
    peft_transposes: ClassVar[bool] = False
    network_module: ClassVar[str] = "lycoris.kohya"
    is_linear_in_rank: ClassVar[bool] = False

    @property
    def size(self) -> int | None:
        """Rank or block size, by which people tell two of them apart."""
        return None

    @property
    def takes_from_base(self) -> bool:
        """Whether training starts by moving a part of the base's weights into the adapter."""
        return False

    def problems(self) -> Iterator[Problem]:
        """Yield fields that cannot be combined with each other."""
        yield from ()

    def advice(self, lr: float) -> Iterator[Problem]:
        """Yield settings that are allowed but rarely intended. lr: the learning rate."""
        yield from ()


class NoAdapter(Method):
    title: ClassVar[str] = "All weights"
    line: ClassVar[str] = "No adapter: all weights. Large files, much more memory."
    type: Literal["none"] = "none"
    """Train the model's own weights."""


class AdapterSection(Method):
    """Fields that all adapters share."""

    type: str
    """Kind of adapter."""
    targets: tuple[str, ...] = option((), title="Target modules", keywords="target modules attention layers to adapt")
    """Layers to adapt, by name or regular expression, for example `attn.to_q`. Empty: all linear layers in the model's
    blocks."""
    modules_to_save: tuple[str, ...] = option(
        (), title="Fully trained modules", keywords="embeddings lm_head full new tokens whole"
    )
    """Modules whose weights are trained fully in addition to the adapter, by name or regular expression, for example
    `embed_tokens` and `lm_head`. Folders of peft and merged exports hold them."""
    start: str | None = option(None, title="Adapter to continue from", path="file", keywords="resume pretrained lora")
    """Existing adapter file to continue from, in the format of ShardStudio, diffusers, peft, kohya or LyCORIS."""


class RankAdapter(AdapterSection):
    """Adapters whose size is a rank."""

    is_linear_in_rank: ClassVar[bool] = True

    rank: Whole = option(16, ge=1, le=1024, keywords="network dim dimension size")
    """Rank of the update. A higher rank can learn more and makes a larger adapter."""
    alpha: Number | None = option(None, gt=0, keywords="network alpha strength scale")
    """The update is scaled by alpha / rank. Empty: alpha = rank."""
    dropout: Number = option(0.0, ge=0, lt=1)
    """Probability with which each input of the adapter is dropped during training."""
    rank_pattern: dict[str, Rank] = option({}, title="Rank per layer")
    """Different ranks for some layers: {name or regular expression: rank}."""

    @property
    def size(self) -> int:
        return self.rank

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of the update. It is the same for all layers, including those of another rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def scale_at(self, rank: int) -> float:
        """Factor of the update of a layer of this rank."""
        return self.scale


class LowRankAdapter(RankAdapter):
    """Adapters that add one product of two matrices."""

    in_diffusers: ClassVar[bool] = True
    peft_transposes: ClassVar[bool] = True
    rank_stabilized: bool = option(False, title="Rank-stabilized scale", keywords="rslora scaling alpha sqrt")
    """Scale the update by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv 2312.03732), so that high ranks
    learn as fast as low ones. Each layer's own rank counts, as in peft."""

    def scale_at(self, rank: int) -> float:
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / math.sqrt(rank) if self.rank_stabilized else self.scale


class ConvAdapter(RankAdapter):
    """Adapters that also change convolutions."""

    conv_rank: Rank | None = option(None, title="Convolution rank", keywords="conv dim")
    """Rank for the convolutions in the model's blocks, if it has any. Empty: convolutions are not adapted."""

    @property
    def rank_of_convolutions(self) -> int | None:
        """Rank for convolutions; None: they are not adapted."""
        return self.conv_rank


class LoraAdapter(LowRankAdapter):
    """Low-rank update of each target layer (arXiv 2106.09685)."""

    type: Literal["lora"] = "lora"
    title: ClassVar[str] = "LoRA"
    line: ClassVar[str] = "A small update of each layer. Loads everywhere."
    is_portable: ClassVar[bool] = True
    network_module: ClassVar[str] = "networks.lora"
    init: Literal["default", "pissa"] = option(
        "default", title="Initialization", keywords="pissa svd qpissa initial values"
    )
    """Initial values of the adapter: no change to the model (default), or the largest singular values of each layer,
    which are taken out of the frozen base (pissa, arXiv 2404.02948). The export is then an ordinary LoRA of twice the
    rank."""

    @property
    def takes_from_base(self) -> bool:
        return self.init == "pissa"

    def problems(self) -> Iterator[Problem]:
        if self.takes_from_base and self.start:
            yield Problem(
                "adapter.init",
                "pissa starts from the base's singular values, not from adapter.start; leave one of them out",
                depends_on=("adapter.start",),
            )


class LoconAdapter(ConvAdapter, LowRankAdapter):
    """Low-rank update of linear layers and convolutions (LyCORIS, arXiv 2309.14859)."""

    type: Literal["locon"] = "locon"
    title: ClassVar[str] = "LoCon"
    line: ClassVar[str] = "LoRA that changes convolutions as well."
    is_portable: ClassVar[bool] = True
    conv_rank: Rank | None = option(None, title="Convolution rank")
    """Rank for the convolutions in the model's blocks, if it has any. Empty: `adapter.rank`."""

    @property
    def rank_of_convolutions(self) -> int:
        return self.rank if self.conv_rank is None else self.conv_rank


class DoraAdapter(LowRankAdapter):
    """Low-rank update of the direction of each weight row, with a separately trained magnitude (arXiv 2402.09353)."""

    type: Literal["dora"] = "dora"
    title: ClassVar[str] = "DoRA"
    line: ClassVar[str] = "LoRA with trained lengths: closer to full training."
    network_module: ClassVar[str] = "networks.lora"


class LohaAdapter(ConvAdapter):
    """Element-wise product of two low-rank updates (arXiv 2108.06098)."""

    type: Literal["loha"] = "loha"
    title: ClassVar[str] = "LoHa"
    line: ClassVar[str] = "Products of small matrices: more detail for the same size."

    def advice(self, lr: float) -> Iterator[Problem]:
        if lr < LOHA_RATE:
            yield Problem(
                "optim.lr",
                f"{lr:g} is a usual learning rate for lora, but loha learns about ten times more slowly with it; "
                "try 10 times as much",
            )


class LokrAdapter(ConvAdapter):
    """Kronecker product of a small matrix and a low-rank one (arXiv 2309.14859)."""

    type: Literal["lokr"] = "lokr"
    title: ClassVar[str] = "LoKr"
    line: ClassVar[str] = "Kronecker products: small files, good for styles."
    is_linear_in_rank: ClassVar[bool] = False
    factor: Whole = option(-1, ge=-1, le=1024)
    """Largest size of the small matrix. -1: split each layer as close to square as its sizes allow."""
    decompose_both: bool = option(False, title="Decompose both matrices")
    """Factor the small matrix into a low-rank product, too."""
    full_matrix: bool = option(False, title="Full matrices", keywords="keep both whole")
    """Do not factor either matrix. Rank and alpha are then ignored: the update is not scaled, as in LyCORIS."""

    def problems(self) -> Iterator[Problem]:
        if self.factor == 0:
            yield Problem(
                "adapter.factor", "0 is not a size; use 1 to 1024, or -1 for factors as close to square as possible"
            )

    def advice(self, lr: float) -> Iterator[Problem]:
        if self.full_matrix and self.scale != 1:
            yield Problem("adapter.alpha", "has no effect with adapter.full_matrix: the update is not scaled")


class BlockAdapter(AdapterSection):
    """Adapters that rotate blocks of a layer's outputs. peft and diffusers rotate its inputs."""

    formats: ClassVar[tuple[str, ...]] = ("auto", "comfyui", "lycoris")
    block_size: Whole = option(8, ge=2, le=1024, unit="outputs")
    """Number of outputs that are rotated together."""

    @property
    def size(self) -> int:
        return self.block_size


class DiagOftAdapter(BlockAdapter):
    """Rotation of each block of a layer's outputs (arXiv 2306.07280), in LyCORIS' form."""

    type: Literal["diag-oft"] = "diag-oft"
    title: ClassVar[str] = "Diag-OFT"
    line: ClassVar[str] = "Rotates blocks of outputs; a small, gentle change."
    block_size: Whole = option(8, ge=2, le=1024, unit="outputs")
    """Number of outputs that are rotated together. A layer whose width is not divisible by it uses the next larger
    divisor."""


class BoftAdapter(BlockAdapter):
    """Several stages of block rotations, interleaved like a butterfly (arXiv 2311.06243), in LyCORIS' form."""

    type: Literal["boft"] = "boft"
    title: ClassVar[str] = "BOFT"
    line: ClassVar[str] = "Rotates the weights; keeps best what the model knows."
    block_size: Whole = option(8, ge=2, le=1024, unit="outputs")
    """Number of outputs that are rotated together. Each layer uses the smallest even size, from this one up, that
    splits its width into a power of two of blocks."""
    num_stages: Whole | None = option(None, title="Butterfly stages", ge=1, le=16)
    """Number of butterfly stages. Empty: enough for every output to mix with every other."""


AnyAdapter = (
    LoraAdapter | LoconAdapter | DoraAdapter | LohaAdapter | LokrAdapter | DiagOftAdapter | BoftAdapter | NoAdapter
)
ADAPTERS: dict[str, type[Method]] = {adapter.model_fields["type"].default: adapter for adapter in get_args(AnyAdapter)}
"""{`adapter.type`: its section}, in the order of the form."""
PORTABLE = tuple(
    name for name, adapter in ADAPTERS.items() if issubclass(adapter, AdapterSection) and adapter.is_portable
)
"""Adapters that every program reads."""
Adapter = Annotated[AnyAdapter, Field(discriminator="type")]


class QuantizeConfig(Section):
    format: BaseFormat = option(
        "none", title="Base quantization", keywords="4bit 8bit qlora bitsandbytes vram memory precision"
    )
    """Storage of the linear layers and experts of the frozen base model: bf16 (`none`), 8 bits (`int8`, or `fp8`, which
    keeps layers that are already stored in fp8 unchanged), or 4 bits (`nf4`). Norms, modulation, embedders and the
    output layer stay in bf16. Fewer bits need less GPU memory."""
    keep: tuple[str, ...] = option((), title="Layers kept in bf16")
    """Layers that stay in bf16, by name or regular expression."""
    formats: dict[str, BaseFormat] = option({}, title="Quantization per layer", keywords="precision")
    """A different format for some layers of the blocks, including modulation: {name or regular expression: format}."""
    encoders: bool = option(False, title="Quantize text encoders", keywords="vram memory t5")
    """Also quantize the text encoders while captions are encoded, except small ones, and a second transformer that
    guides samples."""
    cache: bool = option(False, title="Cache quantized base")
    """Keep the quantized base model on disk, in the cache folder, so that later runs load it without converting."""


class DataFolder(Section):
    path: str = option(..., title="Folder", path="folder")
    """Folder of images with captions; for a language model, a folder or file of text."""
    weight: Number = option(1.0, title="Repeats", gt=0, le=1000)
    """Number of times that each of its images or documents occurs per epoch. 1.5 = every one once, and every second one
    twice."""
    resolutions: tuple[Side, ...] = option((), title="Resolutions", unit="pixels")
    """`data.resolutions` for its images. Empty: as `data` has them."""
    micro_batch: Whole | None = option(
        None, title="Micro batch size", ge=1, le=4096, unit="samples", keywords="images per gpu at once"
    )
    """`train.micro_batch` for batches with its images, for example fewer of larger ones. Empty: `train.micro_batch`."""
    caption_prefix: str = option("", title="Caption prefix")
    """Put in front of each of its captions, with a space between them. It may hold [trigger]."""
    caption_dropout: Number | None = option(
        None, title="Caption dropout", ge=0, le=1, keywords="left out unconditional cfg"
    )
    """`data.caption_dropout` for its images. Empty: as `data` has it."""
    masks: str | None = option(None, title="Mask folder", path="folder", keywords="loss mask")
    """`data.masks` for its images. Empty: `data.masks`."""
    flip: bool | None = option(None, title="Horizontal flip", keywords="mirrored images")
    """`data.flip` for its images. Empty: as `data` has it."""

    @property
    def settings(self) -> dict[str, Any]:
        """{field: value} of those that only images have, where they are set."""
        names = set(type(self).model_fields) - {"path", "weight"}
        return {name: value for name, value in self if name in names and value not in ((), None, "")}


class DataConfig(Section):
    path: str | None = option(None, title="Folder", path="folder", keywords="dataset images pictures")
    """Folder of training images with their captions: a .txt file of the same name next to each image, or one
    metadata.jsonl. Or a .parquet, .csv or .tar file (webdataset) of images with captions, or a folder of such files,
    which are read without being unpacked. For a language model: a folder or file of text, with one document per .txt
    file, one per row of a .jsonl, .json, .csv or .parquet file (text, prompt and completion, a conversation, or a
    question and its answer), or token ids in a .npy file."""
    folders: tuple[DataFolder, ...] = option((), title="More folders", keywords="dataset concepts mixture")
    """More folders of training data, each with a weight."""
    resolution: Whole = option(1024, ge=16, le=4096, unit="pixels", keywords="image size bucket width height")
    """Images are scaled to about this value squared in pixels, and keep their aspect ratio. A model that generates
    images and text has images whose longest side is at most this, and whose shortest is at least half of it."""
    resolutions: tuple[Side, ...] = option(
        (), title="Several resolutions", unit="pixels", keywords="multi resolution bucket sizes scales"
    )
    """Sizes in place of `data.resolution`, for example [512, 768, 1024], for a model that generates at each of them.
    `data.at_resolutions` says which image is trained at which. Empty: `data.resolution` alone."""
    at_resolutions: Literal["each", "largest"] = option("each", title="Resolutions per image")
    """With several resolutions: train every image at each of them, or only at the largest that it fills without being
    enlarged; an image that fills none is trained at the smallest."""
    fit: Literal["crop", "pad", "drop"] = option(
        "crop", title="Fit to bucket", keywords="crop pad letterbox border bucket aspect another shape"
    )
    """Fitting of an image to the shape of its bucket. crop: the excess is cropped around the focus point, or the
    center. pad: the image is kept whole; borders of `data.background` fill the bucket and are masked out of the loss.
    drop: as crop, but images that lose more than `data.most_cropped` are skipped."""
    most_cropped: Number = option(1 / 3, title="Largest crop", ge=0, lt=1)
    """With `data.fit: drop`, the largest share of an image that may be cut off."""
    background: Colour = option(
        "#ffffff", title="Background", pattern=COLOUR, keywords="transparency alpha border colour"
    )
    """Colour behind transparent images and of borders, as #rrggbb."""
    flip: bool = option(False, title="Horizontal flip", keywords="flip augmentation horizontal mirror mirrored images")
    """Mirror half of the samples, left to right. Not for text, faces or anything with a left and a right side."""
    seen_resolution: Whole = option(
        980, title="Conditioning image size", ge=14, le=4096, unit="pixels", keywords="seen resolution"
    )
    """Longest side of a conditioning image: one that a model looks at to answer a question or to make an edit. Small
    images are enlarged until their shortest side is 27/70 of it (378 of 980 pixels)."""
    max_aspect: Number = option(
        2.0, title="Largest aspect ratio", ge=1, le=8, keywords="aspect ratio bucket crop most elongated shape maximum"
    )
    """Aspect ratio (longest : shortest side) of the most elongated bucket. Images beyond it are cropped. 1 = squares
    only."""
    trigger: str = option("", title="Trigger word", keywords="token keyword instance prompt")
    """Trigger word for the subject or style. It replaces [trigger] in captions, or is prepended to captions
    without it."""
    image_column: str = option("", title="Image column", keywords="parquet csv webdataset hub datasets")
    """In a .parquet or .csv file, the column of the images (their bytes, or paths relative to the file); in a .tar
    file, their suffix. Empty: image, jpg, png, file_name or another usual name."""
    caption_column: str = option("", title="Caption column", keywords="parquet csv webdataset hub datasets text")
    """In the same files, the column of the captions: a text, or a list from which each sample takes one. In a .tar file
    it may be a key of a .json. Empty: text, caption, prompt or another usual name."""
    reference_columns: tuple[str, ...] = option((), title="Reference columns", keywords="control edit before")
    """In the same files, the columns of the reference images for edit training, one or several."""
    repeats: Whole = option(1, ge=1, le=10000, keywords="epochs")
    """Number of times that each image occurs per epoch."""
    max_images: Whole | None = option(
        None, title="Most images", ge=1, unit="images", keywords="max_train_samples subset limit few debug"
    )
    """At most this many images are used, chosen evenly from all in their order: so many to train on, as many of those
    held out, and as many for regularization. For a first trial of many images. Empty: all."""
    caption_dropout: Number = option(0.0, title="Caption dropout", ge=0, le=1, keywords="left out unconditional cfg")
    """Share of samples that are trained with an empty caption, so that the model still works with classifier-free
    guidance. Captions of `data.regularization` are never dropped. In an edit or a sequence with generated images: share
    of the texts before them that are dropped."""
    latents_dropout: Number = option(0.3, title="Source dropout (latents)", ge=0, le=1, keywords="left out")
    """Share of the source images whose latents are dropped from an edit, or from a sequence with generated images, for
    a model that generates images and text."""
    vision_dropout: Number = option(0.3, title="Source dropout (views)", ge=0, le=1, keywords="left out")
    """Share of the source images whose visual features are dropped from an edit, or from a sequence with generated
    images, for a model that generates images and text."""
    caption_lines: bool = option(False, title="Caption per line", keywords="several captions variants wildcard")
    """Each line of a caption's .txt file is a separate caption; each sample uses one of them. A list of texts in a
    metadata.jsonl is always read this way."""
    missing_caption: Literal["stop", "empty"] = option("stop", title="On missing caption", keywords="without")
    """When an image has no caption: stop and name the image, or train it with an empty caption."""
    bad_image: Literal["stop", "warn"] = option("stop", title="On broken image", keywords="damaged")
    """When an image cannot be decoded: stop and name the image, or leave it out with a warning."""
    validation: str | Whole = option(0, title="Held out", path="folder", keywords="overfitting evaluation test split")
    """Held-out images for the validation loss: a folder, or the number of images to hold out from the training data.
    For a language model, the folder may also be a file of text."""
    validation_every: Whole = option(100, title="Validation every", ge=1, unit="steps")
    """Steps between two measurements of the validation loss."""
    masks: str | None = option(None, title="Mask folder", path="folder", keywords="loss mask")
    """Folder of loss masks with the file names of the training images: white (or opaque) pixels are in the loss, black
    (or transparent) ones are not. Without a mask, the whole image is in the loss."""
    mask_background: Number = option(0.0, title="Loss weight outside masks", ge=0, le=1, keywords="unmasked weight")
    """Loss weight of the black parts of a mask. White parts have weight 1."""
    regularization: str | None = option(
        None,
        title="Regularization images",
        path="folder",
        keywords="prior preservation class images overfitting dreambooth",
    )
    """Folder of captioned images of the same class without the subject, so that the model keeps its knowledge
    of the class. In total they occur as often as the training images, in rotation. Trigger, masks and references do not
    apply to them."""
    regularization_weight: Number = option(1.0, title="Regularization loss weight", gt=0, le=100, keywords="prior")
    """Loss weight of a regularization image. A training image has weight 1."""
    references: str | None = option(
        None, title="Reference images", path="folder", keywords="control kontext source before after"
    )
    """For edit training: folder of the images before the edit, with the file names of the training images. For several,
    with _0, _1 and so on after the name, or in numbered folders in it, as control_1 and control_2. They are scaled to
    `data.resolution` and keep their aspect ratio."""
    pair_suffixes: tuple[str, ...] = option((), title="Endings of pairs", keywords="control edit before after _A _B")
    """For edit training on pairs in one folder: how the file names of the image before an edit and of the one after it
    end, as [_A, _B]. The caption has the name of the pair, or of the image after the edit."""
    reference_dropout: Number = option(
        0.0, title="Reference dropout", ge=0, le=1, keywords="left out unconditional control edit"
    )
    """Share of samples that are trained without their reference images, in addition to `data.caption_dropout`."""
    rejected: str | None = option(
        None, title="Rejected images", path="folder", keywords="dpo preference loser worse negative"
    )
    """For preference training (`objective.dpo_beta`): folder of the images that are not preferred, with the file names
    of the training images, which are preferred. Each is scaled and cropped to the size of the preferred image."""
    cache: str | None = option(None, title="Cache folder", path="folder", keywords="latents disk")
    """Folder for encoded images and captions, shared by all runs. Empty: `cache` next to the run folders."""
    length: Whole = option(1024, title="Sequence length", ge=2, le=1048576, unit="tokens")
    """Sequence length. Short documents are packed into one sequence without attending to each other, as `data.packing`
    says."""
    packing: Literal["auto", "whole", "split"] = option("auto", title="Packing", keywords="pack bfd best fit")
    """Filling of sequences with documents: `whole` keeps each in one sequence, those of a shuffled window by best fit,
    with padding where none fits; `split` cuts a document at the end of a sequence and continues it in the next. auto:
    whole if the files hold prompts with completions or conversations, else split."""
    too_long: Literal["drop", "cut"] = option(
        "drop", title="Overlong documents", keywords="truncate max length too long for a sequence"
    )
    """A prompt with completion or a conversation that is longer than `data.length`, with whole packing: skipped with a
    warning, or truncated. Plain text is cut into several sequences."""
    chat_template: str | None = option(
        None, title="Chat template", path="template", keywords="chatml jinja conversation messages"
    )
    """Template that renders conversations: chatml, gemma, llama-3, mistral, or a .jinja file. Empty: the template of
    the model's tokenizer."""
    system: str = option("", title="System message", keywords="system prompt chat conversation")
    """System message for conversations that have none."""
    shuffle_window: Whole = option(1024, ge=1, le=1000000, unit="documents")
    """Number of consecutive documents that are shuffled among themselves; they are kept in memory."""
    questions: str | None = option(
        None,
        title="Questions, edits and sequences",
        path="file",
        keywords="vqa instruction edit interleaved multi-turn conversation thinking parquet",
    )
    """For a model that generates images and text: a .jsonl file whose lines are questions (image, question, answer),
    conversations about images, or sequences of text and images in any order; or a .parquet file with edits or
    captioned images; or a folder of such files. Paths are relative to the file. If `data.validation` is a number, as
    many rows are held out too."""
    question_share: Number = option(0.5, title="Question share", gt=0, lt=1)
    """Share of the samples that are rows of `data.questions`, if there are captioned images as well."""
    pack_tokens: Whole | None = option(
        None, title="Tokens per pack", ge=16, le=1048576, unit="tokens", keywords="packing balance expected_num_tokens"
    )
    """For a model that generates images and text: whole sequences are packed until they have about this many tokens,
    and such a pack counts as one sample of `train.batch_size`, so that all ranks do equal work. Empty: every sequence
    is a sample."""

    @property
    def companions(self) -> dict[str, str | None]:
        """{field: folder} of the images that accompany those of the data."""
        of_folders = {f"folders.{number}.masks": folder.masks for number, folder in enumerate(self.folders)}
        return {
            "masks": self.masks,
            "regularization": self.regularization,
            "references": self.references,
            "rejected": self.rejected,
            **{field: folder for field, folder in of_folders.items() if folder},
        }

    @property
    def sides(self) -> tuple[int, ...]:
        """The resolutions of images whose folder has none of its own, from small to large, in pixels."""
        return tuple(sorted(set(self.resolutions))) or (self.resolution,)

    @property
    def sides_of_folders(self) -> tuple[tuple[int, ...], ...]:
        """The resolutions of `data.path` and of each of `data.folders`."""
        own = (self.sides,) if self.path or not self.folders else ()
        return (*own, *(tuple(sorted(set(folder.resolutions))) or self.sides for folder in self.folders))

    @property
    def all_sides(self) -> tuple[int, ...]:
        """All resolutions of the run, from small to large, in pixels."""
        return tuple(sorted({side for sides in self.sides_of_folders for side in sides}))

    @property
    def has_one_resolution(self) -> bool:
        """Whether `resolution` is the resolution of all images."""
        return not self.resolutions and not any(folder.resolutions for folder in self.folders)

    @property
    def has_references(self) -> bool:
        """Whether images are made from others, as in edit training."""
        return bool(self.references or self.reference_columns or self.pair_suffixes)

    @property
    def has_masks(self) -> bool:
        """Whether the loss of some part of an image counts less: by a mask, or as a border."""
        return self.fit == "pad" or self.names_masks

    @property
    def names_masks(self) -> bool:
        """Whether there is a folder of masks, of all images or of a folder's."""
        return bool(self.masks) or any(folder.masks for folder in self.folders)


class ObjectiveConfig(Section):
    density: Literal["logit_normal", "uniform", "mode", "cosmap"] = option("logit_normal", title="Timestep density")
    """Distribution from which the timesteps of flow matching are sampled, before the shift."""
    logit_mean: Number = option(0.0, title="Logit mean", ge=-10, le=10, keywords="timesteps")
    """Mean of the logit-normal density. Positive values train more on noisy timesteps, as in arXiv 2403.03206 and
    kohya. diffusers' training scripts use the opposite sign: negate values copied from them."""
    logit_std: Number = option(1.0, title="Logit std", gt=0, le=10, keywords="spread timesteps")
    """Standard deviation of the logit-normal density."""
    mode_scale: Number = option(1.29, ge=-1, le=1.75)
    """Scale of the mode density."""
    shift: Literal["auto", "linear", "empirical", "constant", "none"] = option("auto", title="Timestep shift")
    """Shift of the timesteps toward noise: `linear` in the number of image tokens, `empirical` as in the 50-step
    sampler, `constant` by `shift_factor`, or `none`. auto: the model family's own recipe."""
    shift_factor: Number = option(3.0, title="Shift factor", gt=0, le=100, keywords="timesteps")
    """Multiplicative shift for `shift: constant`."""
    prediction: Literal["auto", "epsilon", "v_prediction"] = option("auto", title="Prediction type")
    """Output of a discrete diffusion model: the noise (epsilon) or the velocity. auto: the marker `v_pred` in a
    single file decides, else the scheduler config in the model's folder."""
    zero_terminal_snr: Literal["auto", "on", "off"] = option("auto", title="Zero terminal SNR")
    """Whether the noise schedule of a discrete diffusion model ends in pure noise (arXiv 2305.08891), as in many models
    that predict velocity; they can then generate very dark and very bright images. Sampling starts from that end. auto:
    the marker `ztsnr` in a single file decides, else the scheduler config in the model's folder."""
    min_snr_gamma: Number | None = option(None, title="Min-SNR gamma", gt=0, le=100)
    """Upper limit of the signal-to-noise loss weight of discrete diffusion (arXiv 2303.09556); 5 is usual. Empty: no
    weighting."""
    # 1.0 as in five of six public trainers: see DECISIONS 30.
    guidance: Number = option(1.0, title="Training guidance", ge=0, le=100)
    """Guidance value that a guidance-distilled model receives as input during training."""
    mse_weight: Number = option(1.0, title="Image loss weight", ge=0, le=100)
    """Weight of the mean loss of generated images, for models that are trained on both text and images."""
    text_weight: Number = option(1.0, title="Text loss weight", ge=0, le=100, keywords="ce_weight")
    """Weight of the mean loss of text, for models that are trained on both text and images."""
    token_weight: Literal["token", "item", "sqrt"] = option(
        "token", title="Token loss weighting", keywords="ce_loss_reweighting sample square"
    )
    """Weighting within these two means: equal for every token (token), or for every image and every text, whatever its
    length (item). sqrt is in between for text: each of n tokens has the weight 1 / sqrt(n)."""
    router_weight: Number | None = option(
        None, title="Router balance loss", ge=0, le=10, keywords="weight of balanced moe auxiliary aux_loss"
    )
    """Weight of the auxiliary loss that balances tokens over the experts of a mixture (arXiv 2101.03961); 0.001 to 0.01
    is usual. Empty: as in the model's config.json."""
    dpo_beta: Number | None = option(
        None,
        title="DPO beta",
        gt=0,
        le=1e6,
        keywords="preference alignment rlhf chosen rejected direct optimization",
    )
    """Preference training (DPO, arXiv 2305.18290) on pairs of a preferred and a rejected answer or image: how strongly
    the adapter is kept near the base model. Text: 0.1 is usual. Images (arXiv 2311.12908): 2000 to 5000. Empty: off."""

    @property
    def compares_pairs(self) -> bool:
        """Whether the run is trained on pairs of a chosen and a rejected answer or image."""
        return self.dpo_beta is not None


class OptimConfig(Section):
    type: Literal["adamw", "adamw8bit", "schedulefree"] = option(
        "adamw", title="Optimizer", keywords="8bit adam prodigy schedule-free"
    )
    """AdamW, AdamW with 8-bit state (needs the extra `eightbit`), or schedule-free AdamW."""
    state_bytes: ClassVar[Mapping[str, float]] = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "schedulefree": 8.0}
    """Bytes of state per trained number, by `type`: two moments in fp32; two in 8 bits with a scale per 256; one moment
    and a second copy of the weights."""
    lr: Number = option(1e-4, title="Learning rate", gt=0, le=10, keywords="lr speed of learning")
    """Learning rate, reached after warm-up."""
    beta1: Number = option(0.9, title="Beta 1", ge=0, lt=1)
    """Decay of the first moment."""
    beta2: Number = option(0.999, title="Beta 2", ge=0, lt=1)
    """Decay of the second moment."""
    eps: Number = option(1e-8, title="Epsilon", gt=0, le=1)
    """Added to the denominator of the update, for numerical stability."""
    weight_decay: Number = option(0.01, ge=0, le=10)
    """Decoupled weight decay, of matrices and embeddings; norms and biases keep their size."""
    decay_norms: bool = option(False, title="Decay norms and biases")
    """Weight decay also shrinks norms, biases and every other trained vector."""
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", title="Learning rate schedule", keywords="scheduler decay cosine lr"
    )
    """Learning rate after warm-up: constant, or decaying to zero at the last step, linearly or along a cosine."""
    warmup: Whole = option(0, title="Warm-up", ge=0, unit="steps")
    """Steps over which the learning rate rises linearly from zero."""
    clip_norm: Number | None = option(1.0, title="Gradient clipping", gt=0)
    """Gradients are clipped to this global norm. Empty: no clipping."""
    ema: Number = option(0.0, title="EMA decay", ge=0, lt=1, keywords="average of the weights")
    """Decay of the exponential moving average (EMA) of the trained weights, which samples and the export then use.
    0 = off."""


class TrainConfig(Section):
    steps: Whole = option(1000, ge=1, le=10_000_000, unit="steps", keywords="iterations epochs length duration")
    """Optimizer steps. `train.epochs` decides instead where it is set."""
    epochs: Number | None = option(
        None, title="Epochs", gt=0, le=100_000, unit="epochs", keywords="passes num_train_epochs length duration"
    )
    """Passes over the data, in place of `train.steps`; 0.5 is half a pass. Empty: `train.steps` decides. The number of
    steps is known once the data are read. Of the two fields, the one given later counts: a command line or a form
    before its preset, a stage before its run."""
    time_limit: Whole | None = option(
        None, title="Time limit", ge=1, le=10_000_000, unit="seconds", keywords="max_time duration hours minutes budget"
    )
    """Training ends after this time even if steps are left, with samples, checkpoint and export as after the last step.
    It counts from the first step since the run was started or resumed. A learning rate that falls with the steps does
    not reach its end. Empty: no limit."""
    batch_size: Whole = option(
        1,
        title="Batch size",
        ge=1,
        le=65536,
        unit="samples",
        keywords="batch size accumulation samples per step global",
    )
    """Images, or sequences of text, per optimizer step, over all ranks."""
    micro_batch: Whole = option(
        1,
        title="Micro batch size",
        ge=1,
        le=4096,
        unit="samples",
        keywords="batch size gradient accumulation vram memory speed samples per gpu at once",
    )
    """Images, or sequences of text, per rank and forward pass. Gradients are accumulated until `train.batch_size` is
    reached."""
    seed: Whole = option(0, ge=0, le=2**31 - 1)
    """Seed of the noise, the timesteps, the order of the data and the adapter's initialization. They do not depend on
    the number of ranks."""
    precision: Literal["fp32", "bf16"] = option("bf16", keywords="mixed precision fp16 speed")
    """Number type of computation. Trained weights and their optimizer state are fp32 either way. bf16 needs a GPU of
    compute capability 8.0 or more (Ampere)."""
    checkpointing: Literal["none", "selective", "full", "auto"] | str | Whole = option(
        "none", title="Gradient checkpointing", keywords="vram memory gradient checkpointing recompute activations"
    )
    """Gradient checkpointing: backward recomputes activations, which saves memory and costs time. none: in no block.
    selective: recompute only cheap operations (norms, activations, the adapter); keep the base's linear layers and
    attention. full: recompute everything in all blocks. A number n: everything in every n-th block. A mixture: "full
    12, selective" is full in the first 12 blocks and selective in the others. auto: the least with which the run fits
    the GPUs, by the plan."""
    neftune_alpha: Number = option(0.0, title="NEFTune alpha", ge=0, le=1000, keywords="neftune noise")
    """Size of the uniform noise on a language model's embeddings in training (arXiv 2310.05914): each number is within
    alpha / sqrt(tokens of the document x width). The paper uses 5, 10 and 15. 0 = none."""
    compile: Literal["auto"] | bool = option(
        "auto", title="torch.compile", keywords="speed faster inductor torch compile the blocks"
    )
    """Compile each block with torch.compile. Steps take about a quarter less time, the first one half a minute more,
    and numbers differ by rounding. auto: on GPUs where torch can compile; a resumed run keeps its choice."""
    compile_backend: str = option("inductor", title="Compile backend", keywords="compiler")
    """Backend of torch.compile."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "flash3"] = option(
        "auto", title="Attention kernel", keywords="sdpa speed"
    )
    """Kernel of torch that computes attention on a GPU. auto: torch's own choice, which is cuDNN on Hopper and
    Blackwell. flash3 needs the package flash_attn_3. If the GPU lacks the kernel, torch's default is used."""
    check_replicas: Whole = option(100, title="Compare replicas every", ge=0, unit="steps")
    """Steps between two checks that replicated weights are equal on all ranks. 0 = never."""
    non_finite: Literal["stop", "skip"] = option("stop", title="On non-finite loss", keywords="nan inf crash")
    """When a loss or gradient is not finite: end the run, or skip the step and count it. 20 skipped steps in a row end
    the run."""
    out_of_memory: Literal["stop", "retry"] = option("stop", title="On out of memory", keywords="oom vram cuda crash")
    """When memory runs out: end the run, or restart the ranks with a change that saves what was missing and leaves the
    result the same: more recompute and offload, fewer samples per pass at the same batch size, more sharding. Each
    retry counts toward `parallel.max_restarts`."""

    def compiles_on(self, device: str) -> bool:
        """Whether blocks are compiled on a kind of device, as far as the config says. device: "cuda" or "cpu"."""
        return device == "cuda" if self.compile == "auto" else self.compile


class ParallelConfig(Section):
    devices: Whole = option(
        1, title="GPUs per machine", ge=1, le=1024, unit="ranks", keywords="multi gpu distributed number of processes"
    )
    """Number of ranks (GPUs) per node."""
    device: Literal["auto", "cuda", "cpu"] = option("auto", title="Device", keywords="gpu cpu cuda train on")
    """Device to train on. auto: CUDA if there is an NVIDIA GPU, else the CPU. A GPU that CUDA cannot use is an
    error."""
    nodes: Whole = option(1, title="Machines", ge=1, le=1024, keywords="multi node distributed cluster")
    """Number of nodes (machines)."""
    rendezvous: str | None = option(None, title="Rendezvous address", keywords="first machine master")
    """host:port of the first node. Required for more than one node."""
    strategy: Literal["auto", "full", "grad_op", "hybrid", "ddp", "none"] = option(
        "auto", title="Sharding strategy", keywords="fsdp deepspeed zero ddp distributed multi gpu vram memory speed"
    )
    """State that is sharded across ranks: parameters, gradients and optimizer state (full), gradients and optimizer
    state only (grad_op), everything within groups of ranks (hybrid), or nothing (ddp: every rank has a full copy).
    none: a single rank. auto: the fastest of these in which the model fits."""
    shard_size: Whole | None = option(None, title="Shard group size", ge=1, unit="ranks", keywords="gpus hsdp hybrid")
    """Number of ranks that share one copy of the model under `hybrid`. Empty: the ranks of one node."""
    cpu_offload: bool = option(False, title="CPU offload", keywords="vram memory ram")
    """Keep shards and optimizer state in host memory while they are not used. Slower; needs less GPU memory."""
    offload_blocks: Literal["auto"] | Whole | Number = option(
        0, title="Block offload", keywords="vram memory ram block swap blocks to swap"
    )
    """Keep the frozen weights of some blocks in host memory, and copy each block's to the GPU ahead of its use: a
    number of blocks, or a share of them such as 0.5 (1.0 is all of them; 1 is one block). Slower where the copies take
    longer than the blocks compute. auto: as few blocks as make the run fit."""
    reshard_after_forward: bool | Whole | None = option(
        None, title="Reshard after forward", keywords="free blocks zero"
    )
    """Free the unsharded parameters of a block after its forward: true, false, or a number n to keep them sharded over
    groups of n ranks. Empty: decided by the strategy."""
    prefetch_forward: Whole = option(
        0, title="Forward prefetch", ge=0, le=16, unit="blocks", keywords="blocks gathered ahead"
    )
    """Number of blocks whose parameters are gathered ahead in forward. 0 = torch's default order."""
    prefetch_backward: Whole = option(
        0, title="Backward prefetch", ge=0, le=16, unit="blocks", keywords="blocks gathered ahead"
    )
    """Number of blocks whose parameters are gathered ahead in backward. 0 = torch's default order (one)."""
    max_restarts: Whole = option(0, title="Max restarts", ge=0, le=100, keywords="crash resume retry restarts after")
    """Number of times that torchrun restarts the ranks from the newest checkpoint after a failure."""
    timeout: Whole = option(600, title="Timeout", ge=10, le=86400, unit="seconds", keywords="wait nccl hang")
    """Longest time that a rank waits for the others in a collective operation."""

    @property
    def world_size(self) -> int:
        """Total number of ranks on all nodes."""
        return self.devices * self.nodes

    @property
    def data_size(self) -> int:
        """Number of shares into which the samples of a step are divided: one per rank."""
        return self.world_size


class SampleConfig(Section):
    every: Whole = option(0, title="Samples every", ge=0, unit="steps", keywords="preview images test")
    """Steps between two sets of samples: images, or text from a language model. 0 = no samples."""
    prompts: tuple[str, ...] = option((), title="Sample prompts")
    """Prompts of the samples; [trigger] is replaced by `data.trigger`. A language model continues them."""
    negative: str = option("", title="Negative prompt")
    """Negative prompt: what the samples should not show. Used with guidance above 1 by models without guidance
    embedding."""
    size: tuple[Pixels, Pixels] = option(
        (1024, 1024), title="Sample size", unit="pixels", keywords="width height resolution"
    )
    """Width and height of the samples."""
    frames: Whole = option(1, title="Sample frames", ge=1, le=10_000, unit="frames", keywords="video clip")
    """Number of frames of the samples, for a model that generates clips."""
    steps: Whole | None = option(None, title="Denoising steps", ge=1, le=1000)
    """Denoising steps. Empty: 28, or the number a distilled model was made for."""
    guidance: Number | None = option(None, ge=0, le=100, keywords="cfg scale")
    """Guidance scale of the samples. Empty: 4, or 1 (none) for a model that is made to be sampled without. A distilled
    model is always sampled without guidance."""
    image_guidance: Number | None = option(None, title="Image guidance", ge=0, le=100, keywords="cfg_img_scale by")
    """Scale of the second guidance, away from the prediction without the source image, for a model that generates
    images and text. Empty: as published, 2 with an image of `sample.references`, and 1.5 without one, where it
    multiplies the guidance by text. 1 = off."""
    seed: Whole = option(0, title="Sample seed", ge=0, le=2**31 - 1)
    """Seed of the samples. All sets start from the same noise, so that they can be compared."""
    scheduler: Literal["auto", "euler"] = option("auto", title="Sampler", keywords="scheduler euler dpm")
    """Sampler of a discrete diffusion model. auto: the one its diffusers pipeline uses according to the model's folder,
    for example DPM++ or Euler ancestral. euler: Euler's method, whatever the folder names."""
    references: tuple[str, ...] = option((), title="Sample reference images", path="file")
    """For edit training: input images of the samples, one per prompt, in the same order."""
    tokens: Whole = option(
        100, title="Max sample length", ge=1, le=65536, unit="tokens", keywords="longest text max_new_tokens"
    )
    """Maximum number of tokens of a sample text."""
    temperature: Number = option(0.8, ge=0, le=10)
    """Sampling temperature of text: higher values give more varied text; 0 always takes the most likely token."""
    chat: Literal["auto", "on", "off"] = option(
        "auto", title="Chat samples", keywords="chat template assistant answers"
    )
    """Whether a language model answers each sample prompt as a user's message, through the chat template, instead of
    continuing it. auto: on if the training data are conversations."""
    questions: tuple[str, ...] = option((), title="Sample questions")
    """Questions about `sample.images` that the model answers as additional samples."""
    images: tuple[str, ...] = option((), title="Question images", path="file")
    """Images that `sample.questions` are about, one per question, in the same order."""

    @property
    def full_size(self) -> Size:
        """The size of a sample with its frames."""
        return Size(*self.size, self.frames)


class CompleteSample(SampleConfig):
    """The section with the model's own steps and guidance filled in where they are empty."""

    steps: Whole
    guidance: Number


class CheckpointConfig(Section):
    every: Whole = option(500, title="Checkpoint every", ge=0, unit="steps", keywords="save resume continue")
    """Steps between two checkpoints. 0 = only at the end and when the run is stopped."""
    keep: Whole = option(3, title="Checkpoints kept", ge=1, le=10000)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: Whole = option(1, title="Best checkpoints kept", ge=0, le=10000)
    """Number of checkpoints with the lowest validation loss to keep as well. Above 0, the loss is measured before each
    save, and a validation with the lowest loss so far saves one too."""


class ExportConfig(Section):
    what: Literal["auto", "none", "adapter", "merged", "full"] = option(
        "auto", title="Exported weights", keywords="merge output lora file"
    )
    """Content of the export at the end: the adapter alone, the base model merged with the adapter, or the fully trained
    model. auto: adapter, or full without an adapter."""
    format: ExportFormat = option("auto", title="File format", keywords="safetensors comfyui a1111 output")
    """File layout. auto: files that both diffusers and ComfyUI load (two files if one does not work for both); for a
    language model, files that peft and transformers load."""
    dtype: Literal["bf16", "fp16", "fp32", "fp8"] = option("bf16", title="Export precision", keywords="dtype")
    """Number type of the exported weights. fp8 (e4m3) works for single files only."""


class TrackersConfig(Section):
    packages: ClassVar[Mapping[str, str]] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
    """{field of a tracker, which is also its module in `metrics/trackers/`: the package it needs; "" for none}"""
    tensorboard: bool = option(False, title="TensorBoard", keywords="logging logs")
    """Also write metrics and samples for TensorBoard into the run folder. Needs the package tensorboard."""
    wandb: bool = option(False, title="Weights & Biases", keywords="logging logs")
    """Also log metrics and samples to wandb. Without login or network they are kept for `wandb sync`. Needs the package
    wandb."""
    trackio: bool = False
    """Also log metrics and samples to trackio, a dashboard on this machine. Needs the package trackio."""
    project: str = option("shardstudio", title="Project name", pattern=NAME_PATTERN)
    """Project name in wandb and trackio."""
    debug: bool = option(False, title="Per-rank debug log", keywords="every")
    """Every rank also writes a timed debug log: logs/debug-rank0.log, logs/debug-rank1.log and so on."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The trackers that are on."""
        return tuple(name for name, value in self if name in self.packages and value)


class ClusterConfig(Section):
    slurm: dict[str, str | Whole | None] = option({}, title="SLURM options", keywords="sbatch")
    """Long options of sbatch, for example {partition: gpu, time: 24:00:00}; an empty text for an option without a
    value. They override the options that are derived from other fields; null removes one: {gpus-per-node: null}."""
    warning: Whole = option(120, title="Warning before the time limit", ge=1, le=65535, unit="seconds")
    """Time before the SLURM limit at which the run saves a checkpoint, stops and is requeued. One step and one
    checkpoint must fit into this time."""
    image: str | None = option(None, title="Container image")
    """Kubernetes: container image with ShardStudio."""
    program: str | None = option("/opt/shardstudio", title="Checkout in the image", pattern=r"^/")
    """Kubernetes: folder of the ShardStudio checkout in the image. Empty: installed by pip in the image."""
    volume: str | None = None
    """Kubernetes: PersistentVolumeClaim that holds runs, data and models. All nodes must be able to write to it."""
    mount: str = option("/data", title="Mount point", pattern=r"^/")
    """Kubernetes: path at which the volume is mounted, both in the pods and on the machine that writes the manifest."""


class StageConfig(Section):
    name: str = option(..., pattern=NAME_PATTERN)
    """Name of the stage, used for its folder and its label."""
    set: dict[str, Any] = option({})
    """Fields with a different value in this stage, for example {train.steps: 500, optim.lr: 1e-5}."""
