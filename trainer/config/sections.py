"""The sections of a run config: every option with its unit, its default and its help, declared once.

The form, the command line, the presets' schema, the documentation and the error texts are generated from these
classes. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
NAME_HELP = "1 to 64 letters, digits, '_', '.' or '-', the first no '.' or '-'"
MODEL_WORDS = ("tiny", "demo", "random")
DEMO = Path(__file__).parents[1] / "assets" / "demo"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)", re.ASCII)
HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):(?P<port>\d{1,5})")


def _refuse_bool(value: object) -> object:
    """pydantic reads true as 1, so that `train.steps: true` would be a run of one step."""
    if isinstance(value, bool):
        raise PydanticCustomError("bool_as_number", "true and false are no numbers")
    return value


Whole = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Rank = Annotated[Whole, Field(ge=1, le=1024)]
Pixels = Annotated[Whole, Field(ge=16, le=8192)]
Layer = Annotated[Whole, Field(ge=0)]
ExportFormat = Literal["auto", "diffusers", "comfyui", "kohya", "lycoris", "peft", "single_file"]
BaseFormat = Literal["none", "nf4", "int8", "fp8"]
SINGLE_FILES = ("comfyui", "single_file")
ADAPTER_FILES = ("auto", "diffusers", "comfyui", "kohya", "lycoris", "peft")


def half_character(text: str) -> str | None:
    """The end of a sentence about a text that is not valid Unicode; None for any other text.

    JSON and YAML can write half of a character (a lone surrogate), which tokenizers and files refuse.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds \\u{ord(text[error.start]):04x}, which is half a character; remove it"
    return None


@cache
def family_names() -> tuple[str, ...]:
    """Names of the model families: one per module in `families/`, `base` aside."""
    modules = (Path(__file__).parents[1] / "models" / "families").glob("[a-z]*.py")
    return tuple(sorted(module.stem for module in modules))


@cache
def demo_families() -> tuple[str, ...]:
    """Families of which a demo model comes with the program: one per folder in `assets/demo/`."""
    return tuple(sorted(folder.name for folder in DEMO.iterdir()))


def option(default: Any, *, unit: str = "", path: Literal["", "file", "folder", "model"] = "", **limits: Any) -> Any:
    """A field with its default, its unit and pydantic's limits (`ge`, `gt`, `le`, `lt`, `pattern`).

    `path` marks a file or folder: a relative one in a preset is relative to the preset. A "model" may also be a hub
    id or one of MODEL_WORDS: it is taken for a path when it exists.
    """
    extra: dict[str, Any] = {key: value for key, value in (("unit", unit), ("path", path)) if value}
    return Field(default, json_schema_extra=extra or None, **limits)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


MOST_TEXT_WINDOWS = 8
"""600 tokens."""


class ModelOptions(Section):
    architecture: str | None = None
    """Published variant that `model.path: tiny` imitates; for weights on disk it is compared with them."""
    text_layers: tuple[Layer, ...] | None = None
    """Hidden states of the text encoder that are stacked. Empty: evenly spaced ones, as in the published models."""
    max_tokens: Whole | None = option(None, ge=8, le=4096, unit="tokens")
    """Length captions are padded or cut to. Empty: that of the published model, or of a tokenizer for shorter texts."""
    text_windows: Whole = option(1, ge=1, le=MOST_TEXT_WINDOWS)
    """Windows of 75 tokens in which CLIP reads a caption, as ComfyUI and A1111 read long prompts: 3 for 225 tokens."""
    without: tuple[str, ...] = ()
    """Text encoders that are left out, where the model can do without: a large third one, as `text_encoder_3`."""
    blocks: str | None = None
    """Class names of the blocks that are sharded one by one, separated by commas. Empty: those that the model names
    itself."""
    distilled: bool | None = None
    """Whether the model was distilled to draw in few steps without guidance. Empty: what its folder says."""


class ModelConfig(Section):
    family: str = ""
    """Kind of model: the name of a module in trainer/families. Needed."""
    path: str = option("tiny", path="model")
    """A diffusers folder, a single file, a cached hub id, `demo` (a small model that comes with the program and draws
    pictograms of 64 x 64 pixels), or `tiny` (random weights, seconds on a CPU). Of a language model the folder of
    transformers, or `random`: random weights in the full size of `model.options.architecture` or `model.base`."""
    base: str | None = option(None, path="model")
    """Diffusers folder with the configs, and with what `model.path` does not hold when that is a single file. For
    `random` a folder with config.json and tokenizer."""
    train: dict[str, Literal["frozen", "adapter", "full"]] = option({})
    """What is trained, per component or part of the model; others are frozen. Empty: the denoiser, by the adapter or
    fully without one."""
    options: ModelOptions = ModelOptions()


class NoAdapter(Section):
    type: Literal["none"] = "none"
    """Train the model's own weights."""


class AdapterSection(Section):
    """What all adapters share."""

    type: str
    """Kind of adapter."""
    targets: tuple[str, ...] = ()
    """Layers by name or regular expression, as `attn.to_q`. Empty: all linear layers of the family's blocks."""
    start: str | None = option(None, path="file")
    """Adapter file to continue from: this program's, or one for diffusers, peft, kohya or LyCORIS."""


class RankAdapter(AdapterSection):
    """Adapters whose size is a rank."""

    rank: Whole = option(16, ge=1, le=1024)
    """Rank of the update: size and capacity of the adapter."""
    alpha: Number | None = option(None, gt=0)
    """Scale of the update is alpha / rank. Empty: alpha = rank."""
    dropout: Number = option(0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""
    rank_pattern: dict[str, Rank] = option({})
    """Other ranks for some layers: {name or regular expression: rank}."""

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of the update: one number for the whole adapter, whatever a layer's own rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ConvAdapter(RankAdapter):
    """Adapters that also change convolutions."""

    conv_rank: Rank | None = None
    """Rank for the convolutions of the family's blocks, where it has any. Empty: they are left alone."""


class LoraAdapter(RankAdapter):
    """Low-rank update of each target layer (arXiv 2106.09685)."""

    type: Literal["lora"] = "lora"


class LoconAdapter(ConvAdapter):
    """Low-rank update of linear layers and convolutions (LyCORIS, arXiv 2309.14859)."""

    type: Literal["locon"] = "locon"
    conv_rank: Rank | None = None
    """Rank for the convolutions of the family's blocks, where it has any. Empty: `adapter.rank`."""


class DoraAdapter(RankAdapter):
    """Low-rank update of the direction of each weight row, and its length by itself (arXiv 2402.09353)."""

    type: Literal["dora"] = "dora"


class LohaAdapter(ConvAdapter):
    """Element-wise product of two low-rank updates (arXiv 2108.06098)."""

    type: Literal["loha"] = "loha"


class LokrAdapter(ConvAdapter):
    """Kronecker product of a small matrix and a low-rank one (arXiv 2309.14859)."""

    type: Literal["lokr"] = "lokr"
    factor: Whole = option(-1, ge=-1, le=1024)
    """Largest size of the small matrix; -1: as near to square as the layer's sizes allow."""
    decompose_both: bool = False
    """Also write the small matrix as a low-rank product."""
    full_matrix: bool = False
    """Keep both matrices whole. Neither rank nor alpha is used: the update is not scaled, as in LyCORIS."""


class DiagOftAdapter(AdapterSection):
    """Rotation of each block of a layer's outputs (arXiv 2306.07280), as LyCORIS writes it."""

    type: Literal["diag-oft"] = "diag-oft"
    block_size: Whole = option(8, ge=2, le=1024, unit="outputs")
    """Outputs that are rotated together; a layer whose width it does not divide takes the next larger that does."""


class BoftAdapter(AdapterSection):
    """Several stages of block rotations, interleaved like a butterfly (arXiv 2311.06243), as LyCORIS writes it."""

    type: Literal["boft"] = "boft"
    block_size: Whole = option(8, ge=2, le=1024, unit="outputs")
    """Outputs that are rotated together; a layer takes the smallest even size from here that leaves a power of two."""
    num_stages: Whole | None = option(None, ge=1, le=16)
    """Butterfly stages. Empty: as many as let every output reach every other."""


Adapter = Annotated[
    LoraAdapter | LoconAdapter | DoraAdapter | LohaAdapter | LokrAdapter | DiagOftAdapter | BoftAdapter | NoAdapter,
    Field(discriminator="type"),
]


class QuantizeConfig(Section):
    format: BaseFormat = "none"
    """How the layers of the frozen base are stored: in bf16 (`none`), in 8 bits (`int8`, or `fp8`, which keeps the
    codes of what is stored in fp8 already), or in 4 bits (`nf4`). Norms, modulation, embedders and the output stay in
    bf16."""
    keep: tuple[str, ...] = ()
    """Layers that stay in bf16, by name or regular expression."""
    formats: dict[str, BaseFormat] = option({})
    """Another format for some layers of the blocks, also of modulation, by name or regular expression."""
    encoders: bool = False
    """Store the text encoders in the same format while captions are encoded; small ones stay as they are."""
    cache: bool = False
    """Keep the base in this format on disk, beside the cached images, so that later runs need not convert it."""


class DataFolder(Section):
    path: str = option(..., path="folder")
    """Folder of images with captions."""
    weight: Number = option(1.0, gt=0, le=1000)
    """How often each of its images occurs per epoch, 1.5 = once, and every second one twice."""


class DataConfig(Section):
    path: str | None = option(None, path="folder")
    """Folder of images, each with a .txt caption of the same name, or with a metadata.jsonl. For a language model a
    folder or file of text: a document per .txt, a line per document in a .jsonl (text, or prompt and completion), or
    token ids in a .npy."""
    folders: tuple[DataFolder, ...] = ()
    """More folders, each with a weight."""
    resolution: Whole = option(1024, ge=16, le=4096, unit="pixels")
    """Images are scaled to about this width times this height, whatever their aspect ratio."""
    max_aspect: Number = option(2.0, ge=1, le=8)
    """Longest side : shortest side of the widest bucket; what is longer is cropped. 1 = squares only."""
    trigger: str = ""
    """Word that stands for what is learned: replaces [trigger] in captions, or is put before them."""
    repeats: Whole = option(1, ge=1, le=10000)
    """How often each image occurs per epoch."""
    caption_dropout: Number = option(0.0, ge=0, le=1)
    """Share of samples trained with an empty caption, so that guidance works afterwards. Captions of
    `data.regularization` stay."""
    missing_caption: Literal["stop", "empty"] = "stop"
    """An image without caption: stop with its name, or train it with an empty caption."""
    bad_image: Literal["stop", "warn"] = "stop"
    """An image that cannot be decoded: stop with its name, or leave it out and warn."""
    validation: str | Whole = option(0, path="folder")
    """Held-out images for the validation loss: a folder, or how many images to set aside from the data. For a language
    model a folder or file of text."""
    validation_every: Whole = option(100, ge=1, unit="steps")
    """Steps between two validation losses."""
    masks: str | None = option(None, path="folder")
    """Folder of images named as those of the data, white where to learn and black where not, or cut out by
    transparency. An image without one is learned whole."""
    mask_background: Number = option(0.0, ge=0, le=1)
    """Weight of the loss where a mask is black, beside 1 where it is white."""
    regularization: str | None = option(None, path="folder")
    """Folder of captioned images of the same kind without what is learned, so that the model keeps what it knows of
    them. Together they occur as often as the data, each in its turn; without trigger, masks and references."""
    regularization_weight: Number = option(1.0, gt=0, le=100)
    """Weight of a regularization image's loss, beside 1 for an image of the data."""
    references: str | None = option(None, path="folder")
    """Folder of images that those of the data are made from, for edit training: named as them, or with _0, _1 and so
    on after the name. They are scaled to `data.resolution` in their own aspect ratio."""
    cache: str | None = option(None, path="folder")
    """Folder for encoded latents and captions, shared by all runs. Empty: `cache` beside the run folders."""
    length: Whole = option(1024, ge=2, le=1048576, unit="tokens")
    """Tokens of a row of text. Short documents share a row without seeing each other; long ones are cut."""
    shuffle_window: Whole = option(1024, ge=1, le=1000000, unit="documents")
    """Consecutive documents of a file that are shuffled among themselves; they are held in memory."""
    questions: str | None = option(None, path="file")
    """Questions about images, for a model that answers them: a .jsonl with image (its path from the file), question
    and answer in each line. Of `data.validation` images to set aside, as many questions are set aside too."""
    question_share: Number = option(0.5, gt=0, lt=1)
    """Share of the samples that are questions, where there are images with captions besides."""

    @property
    def companions(self) -> dict[str, str | None]:
        """{field: folder} of what is trained beside the images of the data."""
        return {"masks": self.masks, "regularization": self.regularization, "references": self.references}


class ObjectiveConfig(Section):
    density: Literal["logit_normal", "uniform", "mode", "cosmap"] = "logit_normal"
    """How timesteps of flow matching are drawn before the shift."""
    logit_mean: Number = option(0.0, ge=-10, le=10)
    """Mean of the logit-normal density. Positive: more noise, as in arXiv 2403.03206 and in kohya. diffusers' training
    scripts have the opposite sign: negate a value that is copied from them."""
    logit_std: Number = option(1.0, gt=0, le=10)
    """Standard deviation of the logit-normal density."""
    mode_scale: Number = option(1.29, ge=-1, le=1.75)
    """Scale of the mode density."""
    shift: Literal["auto", "linear", "empirical", "constant", "none"] = "auto"
    """Move timesteps toward noise: by image tokens, as in the 50-step sampler, by `shift_factor`, or not. auto: as the
    family's recipe says."""
    shift_factor: Number = option(3.0, gt=0, le=100)
    """Multiplicative shift for `shift: constant`."""
    prediction: Literal["auto", "epsilon", "v_prediction"] = "auto"
    """What a model of discrete diffusion predicts: the noise (epsilon) or the velocity. auto: what the single file says
    by its marker `v_pred`, else what the scheduler's config of the model's folder says."""
    zero_terminal_snr: Literal["auto", "on", "off"] = "auto"
    """Whether the noise schedule of discrete diffusion ends in pure noise (arXiv 2305.08891), as that of many models
    that predict velocity, which can then draw very dark and very bright images. Samples begin at that end. auto: what
    the single file says by its marker `ztsnr`, else what the scheduler's config of the model's folder says."""
    min_snr_gamma: Number | None = option(None, gt=0, le=100)
    """Limit of the signal-to-noise weight in discrete diffusion (arXiv 2303.09556); 5 is usual. Empty: no weighting."""
    guidance: Number = option(1.0, ge=0, le=100)
    """Guidance value the model is told while training, for guidance-distilled models."""
    text_weight: Number = option(0.25, gt=0, le=100)
    """Weight of the loss of an answer, beside 1 for that of an image, for models that learn both."""


class OptimConfig(Section):
    type: Literal["adamw", "adamw8bit", "schedulefree"] = "adamw"
    """AdamW, AdamW with 8-bit state (needs the extra `eightbit`), or schedule-free AdamW."""
    lr: Number = option(1e-4, gt=0, le=10)
    """Learning rate after warm-up."""
    beta1: Number = option(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: Number = option(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: Number = option(1e-8, gt=0, le=1)
    """Added to the denominator of the update."""
    weight_decay: Number = option(0.01, ge=0, le=10)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or down to zero at the last step."""
    warmup: Whole = option(0, ge=0, unit="steps")
    """Steps over which the learning rate rises linearly from zero."""
    clip_norm: Number | None = option(1.0, gt=0)
    """Largest global gradient norm; empty: no clipping."""
    ema: Number = option(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the trained weights, used for samples and export. 0 = off."""


class TrainConfig(Section):
    steps: Whole = option(1000, ge=1, le=10_000_000, unit="steps")
    """Optimizer steps."""
    batch_size: Whole = option(1, ge=1, le=65536, unit="samples")
    """Images, or rows of text, per optimizer step, all ranks together."""
    micro_batch: Whole = option(1, ge=1, le=4096, unit="samples")
    """Images, or rows of text, per rank and pass; the gradient is accumulated until `train.batch_size` is reached."""
    seed: Whole = option(0, ge=0, le=2**31 - 1)
    """Noise, timesteps, order and the adapter's start come from it, whatever the number of ranks."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Compute type. Trained weights and their optimizer state are fp32 either way."""
    checkpointing: Literal["none", "full"] | Whole = "none"
    """Recompute activations in backward: never, in every block, or in every n-th block."""
    compile: bool = False
    """torch.compile each block."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    check_replicas: Whole = option(100, ge=0, unit="steps")
    """Steps between two comparisons of replicated weights across ranks. 0 = never."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: end the run, or pass over the step and count it; 20 in a row end it."""
    out_of_memory: Literal["stop", "retry"] = "stop"
    """When memory runs out: end the run, or start the ranks again with recomputed activations, and then with smaller
    passes of the same batch. Each retry is one of `parallel.max_restarts`."""


class ParallelConfig(Section):
    devices: Whole = option(1, ge=1, le=1024, unit="ranks")
    """Ranks (GPUs) per node."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto takes CUDA where there is one."""
    nodes: Whole = option(1, ge=1, le=1024)
    """Number of machines."""
    rendezvous: str | None = None
    """host:port of the first node, needed for more than one node."""
    strategy: Literal["auto", "full", "grad_op", "hybrid", "ddp", "none"] = "auto"
    """What is sharded: everything, gradients and optimizer, everything inside groups, nothing (copies), one rank."""
    shard_size: Whole | None = option(None, ge=1, unit="ranks")
    """Ranks that share one copy under `hybrid`. Empty: the ranks of a node."""
    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory between uses."""
    reshard_after_forward: bool | Whole | None = None
    """Free gathered blocks after forward: yes, no, or keep them on n ranks each. Empty: what the strategy means."""
    prefetch_forward: Whole = option(0, ge=0, le=16, unit="blocks")
    """Blocks gathered ahead in forward. 0 = torch's own order."""
    prefetch_backward: Whole = option(0, ge=0, le=16, unit="blocks")
    """Blocks gathered ahead in backward. 0 = torch's own order (one)."""
    max_restarts: Whole = option(0, ge=0, le=100)
    """How often torchrun starts the ranks again after a failure, from the newest checkpoint."""
    timeout: Whole = option(600, ge=10, le=86400, unit="seconds")
    """Longest wait for another rank in a collective."""

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return self.devices * self.nodes


class SampleConfig(Section):
    every: Whole = option(0, ge=0, unit="steps")
    """Steps between two sets of samples: images, or text of a language model. 0 = none."""
    prompts: tuple[str, ...] = ()
    """Prompts of the sample images, in which [trigger] stands for `data.trigger`; beginnings of the sample texts."""
    negative: str = ""
    """What the sample should not show, for guidance above 1 on models without guidance embedding."""
    size: tuple[Pixels, Pixels] = option((1024, 1024), unit="pixels")
    """Width and height of the samples."""
    steps: Whole | None = option(None, ge=1, le=1000)
    """Denoising steps. Empty: 28, or those that a distilled model was made for."""
    guidance: Number | None = option(None, ge=0, le=100)
    """Guidance scale of the samples. Empty: 4. A distilled model is always drawn without."""
    seed: Whole = option(0, ge=0, le=2**31 - 1)
    """Seed of the samples: the same noise at every step."""
    scheduler: Literal["auto", "euler"] = "auto"
    """Sampler of a model of discrete diffusion. auto: that of the model's folder, with which its pipeline in diffusers
    draws, as DPM++ or Euler ancestral. euler: Euler's method, whatever the folder names."""
    references: tuple[str, ...] = option((), path="file")
    """Image files to sample from, one per prompt in their order, for edit training."""
    tokens: Whole = option(100, ge=1, le=65536, unit="tokens")
    """Most tokens of a sample text."""
    temperature: Number = option(0.8, ge=0, le=10)
    """How freely the tokens of a sample text are drawn; 0 takes the likeliest."""
    questions: tuple[str, ...] = ()
    """Questions about the images of `sample.images` that a model answers as further samples."""
    images: tuple[str, ...] = option((), path="file")
    """Image files that `sample.questions` are about, one for each in their order."""


class CompleteSample(SampleConfig):
    """The section with the model's own steps and guidance where they are empty."""

    steps: Whole
    guidance: Number


FORMER_DEFAULTS: Mapping[str, object] = {"sample.steps": 28, "sample.guidance": 4.0}
"""{field: what it was when it was not set}, in configs that earlier versions wrote complete into run folders."""


class CheckpointConfig(Section):
    every: Whole = option(500, ge=0, unit="steps")
    """Steps between two checkpoints. 0 = only at the end and on stop."""
    keep: Whole = option(3, ge=1, le=10000)
    """How many of the newest checkpoints are kept."""
    keep_best: Whole = option(1, ge=0, le=10000)
    """How many are kept besides, of those with the lowest validation loss, which is measured before each is saved."""


class ExportConfig(Section):
    what: Literal["auto", "none", "adapter", "merged", "full"] = "auto"
    """What is written at the end: the adapter, base + adapter, or all weights. auto: adapter, or full without one."""
    format: ExportFormat = "auto"
    """Layout and names of the files. auto: what diffusers and ComfyUI both load, in two files where one cannot do; of a
    language model what peft and transformers load."""
    dtype: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """Number type of the file; fp8 (e4m3) for single files only."""


class TrackersConfig(Section):
    tensorboard: bool = False
    """Also write the figures for TensorBoard into the run folder (needs tensorboard)."""
    wandb: bool = False
    """Also send the figures to wandb; without login or network they are kept for `wandb sync` (needs wandb)."""
    trackio: bool = False
    """Also send the figures to trackio, which shows them on this machine (needs trackio)."""
    project: str = option("shardstudio", pattern=NAME_PATTERN)
    """Name of the project at wandb and trackio."""
    debug: bool = False
    """Every rank also writes what it does, with times, to logs/debug-rank0.log and on."""


class ClusterConfig(Section):
    slurm: dict[str, str | Whole | None] = option({})
    """Options for sbatch by their long names, as {partition: gpu, time: 24:00:00}; an empty text for one without value.
    They count more than those written from the other fields; null leaves one of those out: {gpus-per-node: null}."""
    warning: Whole = option(120, ge=1, le=65535, unit="seconds")
    """How long before the end of a SLURM job's time its run stops with a checkpoint and queues again. A step and a
    checkpoint must fit into it."""
    image: str | None = None
    """Container image with this program, for Kubernetes."""
    program: str | None = option("/opt/shardstudio", pattern=r"^/")
    """Folder of this program's checkout in the image; empty: pip installed it there."""
    volume: str | None = None
    """PersistentVolumeClaim that holds runs, images and models, for Kubernetes. All nodes must be able to write it."""
    mount: str = option("/data", pattern=r"^/")
    """Where that volume is mounted: in the pods, and where the manifest is written."""


class StageConfig(Section):
    name: str = option(..., pattern=NAME_PATTERN)
    """Name of the stage: its folder and its label."""
    set: dict[str, Any] = option({})
    """Fields that differ from the run's own in this stage, as {train.steps: 500, optim.lr: 1e-5}."""
