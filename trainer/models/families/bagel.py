"""BAGEL: one network that generates images and text, in sequences of both (arXiv 2505.14683).

`parts/bagel/bagel_sequences.py` says what its examples hold. See DECISIONS 46, 48.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.config.sections import (
    MODEL_WORDS,
    CompleteSample,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    SampleConfig,
)
from trainer.config.size import Size
from trainer.models.base import FLOW_FIELDS, LoadModule, MultimodalFamily, SequencePart, TextLength, references_of
from trainer.models.objectives.base import Batch, Example, Loss
from trainer.models.objectives.flow_matching import Shift
from trainer.models.parts.bagel.bagel_network import (
    BAGEL_7B_MOT,
    BLOCKS,
    Bagel,
    BagelSizes,
    VisionSizes,
    grid_waves,
    published_layout,
)
from trainer.models.parts.bagel.bagel_packing import (
    PATCH,
    ConditioningPiece,
    DrawnPiece,
    Marks,
    Piece,
    TextPiece,
    pack,
    sequences_of,
    unpatched,
)
from trainer.models.parts.bagel.bagel_sequences import (
    add_noise_to,
    clean_pieces,
    joined,
    loss_counts,
    loss_parts,
    sequences_in,
    size_within,
)
from trainer.models.parts.folder import ModelFolder, check_architecture, fill_random, open_folder, write_tiny
from trainer.models.parts.image.euler import denoise, euler_scheduler, spaced_sigmas
from trainer.models.parts.image.images import device_of, pixels_of
from trainer.models.parts.image.ldm_names import vae_layout
from trainer.models.parts.image.text_encoder import (
    TINY_CHAT_TEMPLATE,
    check_rows,
    from_folder,
    names_of_things,
    train_tokenizer,
)
from trainer.models.parts.image.vae import build_vae, decode_latents, encode_latents, vae_config
from trainer.models.parts.language.next_token import draw_token
from trainer.models.parts.progress import counted
from trainer.parallel.parallelize import ShardSpec
from trainer.rng import SampleRng
from trainer.system.errors import InputError
from trainer.weights.files import Fused, WeightFiles, safetensors_in

COMPONENT = "transformer"
WEIGHTS = "ema"
VAE_FILE = "ae.safetensors"
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
"""Tokens that begin and end a text and an image."""
LATENT_PIXELS = 8
"""Pixels per side of a latent pixel."""
SAMPLER = {"shift": 3.0}
"""Timestep shift of the published sampler."""
GUIDED_ABOVE = 0.4
"""Share of noise above which the published app applies guidance to a prompt; to an edit it always does."""
IMAGE_GUIDANCE = 2.0
"""Guidance by images of an edit in the published app."""
PROMPT_GUIDANCE = 1.5
"""Guidance by images of a prompt without one in the published app, where it multiplies the guidance by text."""
SHORTEST_CONDITIONING = 378 / 980
"""Shortest side of an conditioning image, of `data.seen_resolution`."""
SHORTEST_DRAWN = 512 / 1024
"""Shortest side of an image that is drawn, of `data.resolution`."""
MOST_CONDITIONING = 2_007_040
"""Most pixels of the images that a conversation looks at, together."""
BLANK_ANSWER = 64
"""Tokens of the answer in memory plans."""
ARCHITECTURES = {"7b-mot": BAGEL_7B_MOT}
DEFAULT_ARCHITECTURE = "7b-mot"


class BagelFamily(MultimodalFamily):
    """A folder in the format of the published BAGEL-7B-MoT: config.json, llm_config.json, vit_config.json, a tokenizer,
    ema.safetensors with the network and ae.safetensors with FLUX.1's autoencoder."""

    components = (COMPONENT,)
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "understanding": (r"layers\.\d+\.understanding", "text_embedding", "text_out", "understanding_norm"),
        "generation": (r"layers\.\d+\.generation", "generation_norm"),
        "vision": ("vision",),
        "connectors": ("vision_connector", "latent_in", "latent_out", "timestep", r"(vision|latent)_positions"),
    }
    shard = ShardSpec(blocks=BLOCKS, fp32_inputs=frozenset({"sigma"}))
    adapter_targets: Mapping[str, tuple[str, ...]] = {
        COMPONENT: (
            r"layers\.\d+\.(understanding|generation)\.(to_q|to_k|to_v|to_out|gate|up|down)",
            r"vision\.layers\.\d+\.(to_q|to_k|to_v|to_out|up|down)",
        )
    }
    objective_fields = FLOW_FIELDS | {"mse_weight", "text_weight", "token_weight"}
    reads_references = True
    in_buckets = False
    architectures = tuple(ARCHITECTURES)
    default_architecture = DEFAULT_ARCHITECTURE
    model_files: ClassVar = {"llm_config.json": ("", ""), "vit_config.json": ("", "")}
    size_multiple = LATENT_PIXELS * PATCH
    longest_side = LATENT_PIXELS * PATCH * BAGEL_7B_MOT.latent_side
    shift = Shift(constant=1.0)
    weights_stem = WEIGHTS
    keeps_layout = True
    companion_files = (
        "llm_config.json",
        "vit_config.json",
        VAE_FILE,
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    )

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig, cache: Path) -> None:
        super().__init__(model, objective, cache)
        folder = open_folder(model, ARCHITECTURES, self._write_tiny)
        self._folder = replace(folder, expects=f"a folder of BAGEL with {', '.join(FOLDER)}")
        config = _config(self._folder)
        self.sizes = _sizes(self._folder, config)
        self._vae = _vae_config(config)
        described = {name: _described(sizes) for name, sizes in ARCHITECTURES.items()}
        check_architecture(model, self._folder, described, _described(self.sizes))

    @property
    def loss_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        return self.objective.mse_weight, self.objective.text_weight

    @property
    def model_spec(self) -> str:
        return "bagel"

    @property
    def peft_fields(self) -> Mapping[str, str]:
        path = self.config.path
        return {"base_model_name_or_path": str(self.folder) if path in MODEL_WORDS else path}

    def component_folder(self, component: str) -> Path:
        return self.folder

    def component_config(self, component: str) -> Mapping[str, Any]:
        """The configs of the folder. The network here has no dropout, whatever they ask for."""
        return {"config.json": _config(self._folder)} | {name: self._folder.read(name) for name in NEEDED}

    def build(self, component: str) -> Bagel:
        with torch.device("meta"):
            return Bagel(self.sizes)

    def weights(self, component: str) -> WeightFiles:
        self._check_vision_layers()
        return self._folder.denoiser_weights("", self.build(component), self.layout(component), WEIGHTS)

    def _check_vision_layers(self) -> None:
        """Refuse a config of the encoder that already lacks the layer which is never run."""
        count = self.sizes.vision.num_layers
        begin = f"vit_model.vision_model.encoder.layers.{count}."
        stored = WeightFiles.read(safetensors_in(self.folder, WEIGHTS)).entries
        if any(name.startswith(begin) for name in stored):
            raise InputError(
                f"{self.folder / 'vit_config.json'}: num_hidden_layers is {count + 1}, and {WEIGHTS}.safetensors has "
                f"all of these layers. The model never runs the last one, and the file of the published model does not "
                f"hold it: set num_hidden_layers to {count + 2} if the last layer was left out of both, or else remove "
                f"the tensors {begin}* from the file"
            )

    def layout(self, component: str) -> tuple[Fused, ...]:
        return published_layout(self.build(component))

    def fingerprint(self) -> str:
        files = self._folder.digest("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", VAE_FILE)
        return hashlib.sha256(f"{files} {self._vae}".encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, a class of transformers."""
        from transformers import Qwen2TokenizerFast

        try:
            tokenizer = from_folder(Qwen2TokenizerFast, self.folder)
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder.field} {self.folder}: no tokenizer that can be read ({error})") from error
        check_rows(self._folder, "the tokenizer", tokenizer, self.sizes.vocabulary)
        return tokenizer

    @cached_property
    def marks(self) -> Marks:
        """The token ids of MARKS."""
        known = self.tokenizer.get_vocab()
        missing = [mark for mark in MARKS if mark not in known]
        if missing:
            raise InputError(
                f"{self._folder.field} {self.folder}: its tokenizer has no {missing[0]}; download the folder again"
            )
        return Marks(*(known[mark] for mark in MARKS))

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        ignored = cfg.data.max_aspect != type(cfg.data).model_fields["max_aspect"].default
        message = "data.max_aspect: has no effect; images of any shape are trained whole, without buckets"
        return (*super().warnings(cfg), *([message] if ignored else []))

    def text_encoder(self, load: LoadModule) -> Any:
        """Return None: the network reads token ids."""
        return None

    def image_encoder(self, load: LoadModule) -> nn.Module:
        vae = build_vae(self._vae)
        shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
        files = WeightFiles.read([self.folder / VAE_FILE]).by_our_names(vae_layout(vae, prefix=""), shapes)
        return load(vae, files, ())

    def encode_text(self, encoder: Any, caption: str) -> Example:
        return {"caption": self._ids(caption)}

    def text_lengths(self, captions: Sequence[str]) -> list[tuple[TextLength, ...]]:
        """Captions are not cut."""
        return [()] * len(captions)

    @torch.no_grad()
    def encode_image(self, encoder: Any, image: Image.Image) -> Example:
        return {"latents": encode_latents(encoder, image)[0].cpu()}

    def drawn_size(self, size: Size, resolution: int) -> Size:
        longest = min(resolution, self.longest_side) // self.size_multiple * self.size_multiple
        shortest = round(longest * SHORTEST_DRAWN)
        return size_within(size, longest, shortest, self.size_multiple, math.inf)

    def conditioning_size(self, size: Size, cfg: DataConfig, count: int = 1) -> Size:
        patch, side = self.sizes.vision.patch_size, self.sizes.vision.max_side
        longest = min(cfg.seen_resolution // patch, side) * patch
        shortest = round(longest * SHORTEST_CONDITIONING)
        return size_within(size, longest, shortest, patch, MOST_CONDITIONING / count)

    def encode_conditioning(self, image: Image.Image) -> Tensor:
        return pixels_of(image, torch.device("cpu"))[0]

    def encode_sequence(self, parts: Sequence[SequencePart]) -> Example:
        return {f"{number}.{part.kind}": self._content(part) for number, part in enumerate(parts)}

    def _content(self, part: SequencePart) -> Tensor:
        match part.content:
            case str():
                return self._ids(part.content)
            case Image.Image():
                return self.encode_conditioning(part.content)
            case Tensor():
                return part.content
        return torch.zeros(0, dtype=torch.int64)

    def count_tokens(self, parts: Sequence[SequencePart]) -> int:
        total = 0
        for part in parts:
            if isinstance(part.content, str):
                total += len(self._ids(part.content)) + 2
            elif isinstance(part.content, Size):
                side = self.sizes.vision.patch_size if part.kind == "conditioning" else self.size_multiple
                total += (part.content.width // side) * (part.content.height // side) + 2
        return total

    def pack_examples(self, examples: Mapping[int, Example]) -> Example:
        return joined(examples)

    def loss_counts(self, example: Example) -> tuple[float, ...]:
        return loss_counts(example, self.objective.token_weight)

    def batch_key(self, example: Example) -> Hashable:
        """Return one key: all examples may share a batch."""
        return None

    def collate(self, examples: Sequence[Example]) -> Batch:
        return {f"{n}.{key}": tensor for n, example in enumerate(examples) for key, tensor in example.items()}

    def sample_rows(self, batch: Batch) -> Mapping[str, Tensor]:
        sequences = sequences_in(batch)
        rows = sequences_of([clean_pieces(one) for one in sequences], self.marks, self.sizes)
        items = torch.tensor([one.item for one in sequences])
        conditioning, drawn = items[rows.conditioning], items[rows.drawn]
        return {
            r"layers\.\d+\.understanding\..+": torch.cat([items[rows.text], conditioning]),
            r"layers\.\d+\.generation\..+|latent_(in|out)|timestep\..+": drawn,
            # The encoder runs on every rank; without an image, on one empty row.
            r"vision(_connector)?\..+": conditioning if len(conditioning) else torch.zeros(1, dtype=torch.int64),
            "text_out": items[rows.predicted],
        }

    def loss(self, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        """Mean squared error of the velocity of each latent token, and cross-entropy of each token of target text."""
        weight = batch["weight"]
        noisy = add_noise_to(sequences_in(batch), self.objective, self.shift, rng)
        packed = pack(noisy.pieces, self.marks, self.sizes)
        outputs = model[COMPONENT](**packed.arguments)
        parts = loss_parts(noisy, packed, outputs, weight, self.objective.token_weight)
        return Loss(parts[:, 0] @ parts.new_tensor(self.loss_weights), weight.count_nonzero(), parts)

    @torch.no_grad()
    def draw(
        self,
        model: nn.ModuleDict,
        encoder: Any,
        text: Example,
        negative: Example | None,
        cfg: CompleteSample,
        rng: SampleRng,
    ) -> Image.Image:
        """Sample with the published guidance: off near the end, and never longer than the unguided velocity."""
        device = device_of(encoder)
        source = self._source(text, device)
        height, width = (side // LATENT_PIXELS for side in cfg.size[::-1])
        if references := references_of(text):  # an edit has the size of its source
            height, width = references[0].shape[1:]
        captions = [text["caption"], text["caption"][:0] if negative is None else negative["caption"]]
        with_text, without_text = ([TextPiece(ids.to(device))] if len(ids) else [] for ids in captions)

        def velocity_of(latents: Tensor, sigma: Tensor, condition: Sequence[Piece]) -> Tensor:
            packed = pack([[*condition, DrawnPiece(latents[0], sigma[0])]], self.marks, self.sizes)
            _, velocities = model[COMPONENT](**packed.arguments)
            found: Tensor = velocities[-(height * width // PATCH**2) :].float()
            return found

        def predict(latents: Tensor, sigma: Tensor) -> Tensor:
            found = velocity_of(latents, sigma, [*source, *with_text])
            if cfg.guidance > 1 and (source or float(sigma) > GUIDED_ABOVE):
                without = velocity_of(latents, sigma, [*source, *without_text])
                unseen = velocity_of(latents, sigma, with_text) if source and _image_guidance(cfg, True) > 1 else found
                found = _guided(found, without, unseen, cfg, bool(source))
            return unpatched(found, height, width)[None]

        noise = rng.normal("sample", (self._vae["latent_channels"], height, width)).to(device)
        # The published app counts both ends of the steps.
        steps = max(1, cfg.steps - 1)
        scheduler = euler_scheduler(SAMPLER, steps, device, sigmas=spaced_sigmas(steps))
        return decode_latents(encoder, denoise(scheduler, noise, predict))

    def _source(self, text: Example, device: torch.device) -> tuple[Piece, ...]:
        """The image before the edit: its clean latents, then the view of it."""
        zero = torch.zeros((), device=device)
        return tuple(
            piece
            for number, latents in enumerate(references_of(text))
            for piece in (
                DrawnPiece(latents.to(device), zero, clean=True),
                ConditioningPiece(text[f"conditioning_{number}"].to(device)),
            )
        )

    @torch.no_grad()
    def answer(self, model: nn.ModuleDict, image: Image.Image, question: str, cfg: SampleConfig, rng: SampleRng) -> str:
        device = torch.device(rng.device)
        pixels, question_ids = pixels_of(image, device)[0], self._ids(question).to(device)
        (generator,) = rng.generators("text")
        answer = question_ids[:0]
        for _ in counted(range(cfg.tokens)):
            # The tokens of the answer do not see its end mark; the last of them predicts the next token.
            pieces: list[Piece] = [ConditioningPiece(pixels), TextPiece(question_ids), TextPiece(answer, in_loss=True)]
            logits, _ = model[COMPONENT](**pack([pieces], self.marks, self.sizes).arguments)
            answer = torch.cat([answer, draw_token(logits[-1].float(), cfg.temperature, generator).view(1)])
        ids = answer.tolist()
        length = ids.index(self.marks.text_end) if self.marks.text_end in ids else len(ids)
        return str(self.tokenizer.decode(ids[:length], skip_special_tokens=True))

    def blank_example(self, size: Size, text_tokens: int, dtype: torch.dtype) -> Example:
        """A question about an image of that size, which takes more memory than drawing it.

        The image has any shape with about as many patches: if sides were rounded, twice the pixels would not be
        twice the patches. What is much more than the encoder's grid is a question about several images.
        """
        patch, longest = self.sizes.vision.patch_size, self.sizes.vision.max_side
        count, sides = size.pixels / patch**2, range(1, longest + 1)
        images = max(1, round(count / longest**2))
        rows, columns = min(product(sides, sides), key=lambda grid: abs(grid[0] * grid[1] - count / images))
        pixels = torch.zeros(3, rows * patch, columns * patch)
        ids = torch.zeros(text_tokens, dtype=torch.int64)
        images_read = {f"{number}.conditioning": pixels for number in range(images)}
        return {**images_read, f"{images}.text": ids, f"{images + 1}.target": ids.new_zeros(BLANK_ANSWER)}

    @classmethod
    def published(cls, architecture: str) -> dict[str, Any]:
        return _files(ARCHITECTURES[architecture], {"z_channels": 16, "downsample": LATENT_PIXELS})

    @classmethod
    def tiny(cls, architecture: str | None = None) -> dict[str, Any]:
        return _files(TINY, TINY_VAE)

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    def _write_tiny(self) -> Path:
        configs = self.tiny()
        return write_tiny(self.cache, "bagel", TINY_VERSION, configs, lambda folder: _write_tiny(folder, configs))


FAMILY = BagelFamily


def _image_guidance(cfg: CompleteSample, has_source: bool) -> float:
    if cfg.image_guidance is not None:
        return cfg.image_guidance
    return IMAGE_GUIDANCE if has_source else PROMPT_GUIDANCE


def _guided(found: Tensor, without: Tensor, unseen: Tensor, cfg: CompleteSample, has_source: bool) -> Tensor:
    """The published app's guidance, never longer than the velocity without guidance.

    Args:
        found: Velocity given text and image, (tokens, values of a token).
        without: Velocity given the image alone.
        unseen: Velocity given the text alone.
        cfg: Scales of both guidances.
        has_source: For an edit each token is shortened by itself, before the guidance by images; else all together.
    """
    scale = _image_guidance(cfg, has_source)
    by_text = without + cfg.guidance * (found - without)
    if has_source:
        by_text = _shortened(by_text, found.norm(dim=-1, keepdim=True), by_text.norm(dim=-1, keepdim=True))
    guided = unseen + scale * (by_text - unseen) if scale > 1 else by_text
    return guided if has_source else _shortened(guided, found.norm(), guided.norm())


def _shortened(guided: Tensor, norm: Tensor, guided_norm: Tensor) -> Tensor:
    return guided * (norm / (guided_norm + 1e-8)).clamp(max=1)


def _config(folder: ModelFolder) -> dict[str, Any]:
    """The folder's config.json. The original program needs none: without it the published values hold."""
    if (folder.path / "llm_config.json").is_file() and not (folder.path / "config.json").exists():
        return dict(BagelFamily.published(DEFAULT_ARCHITECTURE)["config.json"])
    return folder.read("config.json")


def _sizes(folder: ModelFolder, config: Mapping[str, Any]) -> BagelSizes:
    llm, vision = (_complete(folder, name, needed) for name, needed in NEEDED.items())
    if config.get("latent_patch_size", PATCH) != PATCH:
        raise InputError(
            f"{folder.path / 'config.json'}: latent_patch_size is {config['latent_patch_size']}; only models with "
            f"{PATCH} are trained"
        )
    latent_side = config.get("max_latent_size", BAGEL_7B_MOT.latent_side)
    if latent_side != BAGEL_7B_MOT.latent_side:
        raise InputError(
            f"{folder.path / 'config.json'}: max_latent_size is {latent_side}; only models with "
            f"{BAGEL_7B_MOT.latent_side} are trained"
        )
    return BagelSizes(
        width=llm["hidden_size"],
        num_layers=llm["num_hidden_layers"],
        num_heads=llm["num_attention_heads"],
        num_kv_heads=llm["num_key_value_heads"],
        hidden_width=llm["intermediate_size"],
        vocabulary=llm["vocab_size"],
        vision=VisionSizes(
            width=vision["hidden_size"],
            # The published model never runs the last layer.
            num_layers=vision["num_hidden_layers"] - 1,
            num_heads=vision["num_attention_heads"],
            hidden_width=vision["intermediate_size"],
            patch_size=vision["patch_size"],
            max_side=config.get("vit_max_num_patch_per_side", vision["image_size"] // vision["patch_size"]),
            eps=vision.get("layer_norm_eps", 1e-6),
        ),
        latent_side=latent_side,
        latent_numbers=PATCH**2 * _vae_config(config)["latent_channels"],
        rope_theta=llm.get("rope_theta", 1e6),
        eps=llm.get("rms_norm_eps", 1e-6),
    )


def _complete(folder: ModelFolder, name: str, needed: Sequence[str]) -> dict[str, Any]:
    config = folder.read(name)
    missing = [key for key in needed if key not in config]
    if missing:
        raise InputError(f"{folder.path / name}: has no {missing[0]}; download the folder again")
    return config


def _vae_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the autoencoder for diffusers: FLUX.1's, unless config.json has other sizes."""
    sizes = config.get("vae_config", {})
    width = sizes.get("ch", 128)
    changes = {
        "block_out_channels": [width * times for times in sizes.get("ch_mult", (1, 2, 4, 4))],
        "layers_per_block": sizes.get("num_res_blocks", 2),
        "norm_num_groups": sizes.get("num_groups", 32),
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return vae_config(sizes.get("z_channels", 16), scaling_factor=0.3611, shift_factor=0.1159, **changes)


def _described(sizes: BagelSizes) -> str:
    return f"{sizes.num_layers} layers of width {sizes.width}, {sizes.vision.num_layers} of its encoder"


FOLDER = ("llm_config.json", "vit_config.json", f"{WEIGHTS}.safetensors", VAE_FILE, "a tokenizer")
"""Files of the model's folder."""
NEEDED = {
    "llm_config.json": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    ),
    "vit_config.json": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "image_size",
    ),
}


def _files(sizes: BagelSizes, vae: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files of a model."""
    vision = sizes.vision
    return {
        "config.json": {
            "model_type": "bagel",
            "architectures": ["BagelForConditionalGeneration"],
            "connector_act": "gelu_pytorch_tanh",
            "latent_patch_size": PATCH,
            "max_latent_size": sizes.latent_side,
            "vit_max_num_patch_per_side": vision.max_side,
            "vae_config": dict(vae),
        },
        "llm_config.json": {
            "model_type": "qwen2",
            "hidden_size": sizes.width,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "intermediate_size": sizes.hidden_width,
            "vocab_size": sizes.vocabulary,
            "rope_theta": sizes.rope_theta,
            "rms_norm_eps": sizes.eps,
        },
        "vit_config.json": {
            "model_type": "siglip_vision_model",
            "hidden_size": vision.width,
            "num_hidden_layers": vision.num_layers + 1,
            "num_attention_heads": vision.num_heads,
            "intermediate_size": vision.hidden_width,
            "patch_size": vision.patch_size,
            "image_size": vision.max_side * vision.patch_size,
            "layer_norm_eps": vision.eps,
        },
    }


# The model of `model.path: tiny`.

TINY_VERSION = 1
"""Part of the folder's name: raise it when equal configs give other files than before."""
TINY = BagelSizes(
    width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_width=128,
    vocabulary=384,
    vision=VisionSizes(width=32, num_layers=2, num_heads=4, hidden_width=64, patch_size=8, max_side=16),
    latent_side=BAGEL_7B_MOT.latent_side,
    latent_numbers=16,
)
TINY_VAE = {
    "z_channels": 4,
    "downsample": LATENT_PIXELS,
    "ch": 8,
    "ch_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "num_groups": 4,
}
TINY_TOKENS = 4096


def _write_tiny(folder: Path, configs: Mapping[str, dict[str, Any]]) -> None:
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with torch.device("meta"):
        network = Bagel(TINY)
    fill_random(network, "bagel")
    for positions, side in (
        (network.vision_positions, TINY.vision.max_side),
        (network.latent_positions, TINY.latent_side),
    ):
        positions.grid.copy_(grid_waves(side, TINY.width))
    vae = build_vae(_vae_config(configs["config.json"]))
    fill_random(vae, "vae")
    _save(network, published_layout(network), folder / f"{WEIGHTS}.safetensors")
    _save(vae, vae_layout(vae, prefix=""), folder / VAE_FILE)
    special = ("<|endoftext|>", *MARKS)
    tokenizer = train_tokenizer(names_of_things(), TINY.vocabulary, TINY_TOKENS, special, TINY_CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)


def _save(module: nn.Module, layout: Iterable[Fused], file: Path) -> None:
    state = module.state_dict()
    tensors = {fused.name: fused.join([state[part] for part in fused.parts]).contiguous() for fused in layout}
    save_file(tensors, file, {"format": "pt"})
