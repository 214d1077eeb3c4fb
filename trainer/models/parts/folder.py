"""Finds, reads, checks and fingerprints a model's folder on disk; writes the folders of tiny models."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.sections import DEMO, ModelConfig
from trainer.models.recognition import wrong_files
from trainer.rng import generator
from trainer.system import files
from trainer.system.errors import InputError
from trainer.system.files import make_private_if_new, read
from trainer.weights.files import Fused, WeightFiles, give_storage, safetensors_in, stored_tensors
from trainer.weights.hub import find_folder
from trainer.weights.identity import digest

DIFFUSERS_STEM = "diffusion_pytorch_model"
TRANSFORMERS_STEM = "model"


@dataclass(frozen=True)
class ModelFolder:
    """A diffusers folder.

    Attributes:
        field: The config field that names it, for error messages.
        path: The folder.
        single: File with the denoiser, and perhaps other parts, that replaces the folder's own weights.
        expects: The kind of folder, for error messages.
    """

    field: str
    path: Path
    single: Path | None = None
    expects: str = "a diffusers folder"

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder, as `scheduler/scheduler_config.json`. Raises InputError as `read_json`."""
        return read_json(self.field, self.path, name, self.expects)

    def config(self, component: str, class_name: str) -> dict[str, Any]:
        """Read the config of a diffusers model. Raises InputError when it describes another class."""
        config = self._plain_config(component)
        kind = config.get("_class_name")
        if kind != class_name:
            raise InputError(
                f"{self.field} {self.path}: {component}/config.json describes a {kind}, "
                f"not a {class_name}; set model.family to the family of that model"
            )
        return config

    def encoder_config(self, component: str, *model_types: str) -> dict[str, Any]:
        """Read the config of a text encoder of transformers.

        Args:
            component: The encoder.
            model_types: Allowed types of the whole model, or of its text part if it also reads images.

        Raises:
            InputError: The config has another type.
        """
        config = self._plain_config(component)
        kind = config.get("model_type")
        if not {kind, config.get("text_config", {}).get("model_type")} & set(model_types):
            raise InputError(
                f"{self.field} {self.path}: {component}/config.json describes a {kind} text encoder, "
                f"expected {' or '.join(model_types)}; download the folder again"
            )
        return config

    def _plain_config(self, component: str) -> dict[str, Any]:
        """A component's config without the storage format of its weights, which their own file holds."""
        config = self.read(f"{component}/config.json")
        return {key: value for key, value in config.items() if key != "quantization_config"}

    def weights(
        self, component: str, stem: str = DIFFUSERS_STEM, rename: Callable[[str], str | None] = lambda key: key
    ) -> WeightFiles:
        """A component's tensors. stem: name of its files without number and suffix."""
        return WeightFiles.read(safetensors_in(self.path / component, stem), rename)

    def markers(self, names: Iterable[str]) -> frozenset[str]:
        """The `names` that are tensors of the single file."""
        stored = WeightFiles.read([self.single]).entries if self.single else {}
        return frozenset(name for name in names if name in stored)

    def denoiser_weights(
        self,
        component: str,
        empty: nn.Module,
        layout: Iterable[Fused] = (),
        stem: str = DIFFUSERS_STEM,
        markers: Collection[str] = (),
    ) -> WeightFiles:
        """The tensors of the denoiser `empty`, from the single file if there is one.

        Args:
            component: The denoiser's folder; empty where its files lie next to the other parts.
            empty: The denoiser on the meta device.
            layout: Tensor names of its publishers and other programs, which are read as well as diffusers' names.
            stem: As for `weights`.
            markers: Names of tensors that only mark how the model was trained.

        Raises:
            InputError: A file has tensors that the model does not have.
        """
        files = [self.single] if self.single else safetensors_in(self.path / component, stem)
        shapes = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
        read = WeightFiles.read(files, lambda key: None if key in markers else key)
        weights = read.by_our_names(layout, shapes)
        unknown = sorted(weights.entries.keys() - shapes.keys())
        if unknown:
            raise InputError(
                f"{files[0]}: {len(unknown)} tensors that the model does not have, first '{unknown[0]}'; "
                f"the weights and {Path(component, 'config.json')} belong to different models"
            )
        return weights

    def original_weights(self, empty: nn.Module, layout: Iterable[Fused]) -> WeightFiles | None:
        """The tensors of another component `empty`, from the single file if that holds them under `layout`'s names."""
        if self.single is None:
            return None
        layout = tuple(layout)
        names = {tensor.name for tensor in layout}
        stored = WeightFiles.read([self.single], lambda key: key if key in names else None)
        shapes = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
        return stored.by_our_names(layout, shapes) if len(stored) else None

    def digest(self, *components: str) -> str:
        """A digest that changes with the files of `components`, which are folders or files."""
        return digest(self.path / component for component in components)


def open_folder(model: ModelConfig, architectures: Iterable[str], write_tiny: Callable[[], Path]) -> ModelFolder:
    """Find the folder that the config names; for `tiny` the one that `write_tiny` returns, for `demo` our own.

    Args:
        model: The section `model` of the config.
        architectures: Allowed values of `model.options.architecture`.
        write_tiny: Writes the folder of a tiny model and returns it.

    Raises:
        InputError: The folder or the single file cannot be found.
    """
    _check_paths(model, tuple(architectures))
    if model.path == "tiny":
        return ModelFolder("model.path", write_tiny())
    if model.path == "demo":
        return ModelFolder("model.path", DEMO / model.family)
    if model.base is None:
        return ModelFolder("model.path", find_folder("model.path", model.path))
    return ModelFolder("model.base", find_folder("model.base", model.base), Path(model.path))


def check_architecture(model: ModelConfig, folder: ModelFolder, published: Mapping[str, Any], found: Any) -> None:
    """Refuse weights on disk of another architecture than the config names; `tiny` only imitates it.

    Args:
        model: The section `model` of the config.
        folder: The model's folder.
        published: {name: sizes}; the sizes print as in "has {sizes}".
        found: The sizes of the folder's model.

    Raises:
        InputError: The sizes differ.
    """
    name = model.options.architecture
    if name is None or model.path == "tiny" or found == published[name]:
        return
    raise InputError(
        f"model.options.architecture: {name} has {published[name]}, "
        f"but {folder.path} has {found}; leave it empty or set {folder.field} to {name}"
    )


def check_inputs(folder: ModelFolder, reads: tuple[int, int], given: tuple[int, int]) -> None:
    """Refuse parts that do not fit together.

    Args:
        folder: The model's folder.
        reads: Latent channels and text features that the denoiser reads.
        given: Latent channels of the autoencoder and text features of the text encoder.

    Raises:
        InputError: They differ.
    """
    if reads != given:
        raise InputError(
            f"{folder.field} {folder.path}: the transformer reads {reads[0]} latent channels and {reads[1]} text "
            f"features, but vae and text_encoder give {given[0]} and {given[1]}; download the folder again"
        )


def read_json(field: str, folder: Path, name: str, expects: str = "a diffusers folder") -> dict[str, Any]:
    """Read a JSON file of a model's folder, as a family reads its `transformer/config.json`.

    Args:
        field: The config field that names the folder.
        folder: The folder.
        name: The file.
        expects: The kind of folder, for error messages.

    Raises:
        InputError: The file is missing or is not a JSON object.
    """
    file = folder / name
    try:
        content = json.loads(read(file))
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{field} {folder}: no {name}; expected {expects}. Download it or set model.path: tiny"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a JSON object; download it again")
    return content


def copy_files(source: Path, names: Iterable[str], folder: Path) -> None:
    """Copy the files that exist of those named in a folder.

    Raises:
        InputError: One is a link to a file elsewhere, which would be given away with the copy.
    """
    for file in (source / name for name in names):
        if file.is_file():
            if file.suffix != ".safetensors" and files.leads_out_of_model(file, source):  # weights were read as weights
                raise InputError(f"{file}: {files.LEADS_OUT}")
            shutil.copyfile(file, folder / file.name)


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `write(empty folder)` unless it exists.

    Other processes see the complete folder or none: it is written under another name and renamed. When several
    processes write it at once, the first one's folder stays.
    """
    if folder.is_dir():
        return folder
    make_private_if_new(folder.parent)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        write(made)
        files.flush_all(made)
        try:
            files.rename(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def write_tiny(cache: Path, name: str, version: int, configs: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """The folder of a tiny model under `cache`, written on first use.

    Args:
        cache: Folder shared by runs.
        name: Part of the folder's name.
        version: Part of the folder's name; raise it when equal configs give other files than before.
        configs: Part of the folder's name.
        write: Writes the files into an empty folder.
    """
    key = hashlib.sha256(json.dumps([version, configs], sort_keys=True).encode()).hexdigest()[:12]
    return write_once(cache / f"tiny-{name}-{key}", write)


def write_random(folder: Path, build: Callable[[], Any], name: str | None = None) -> None:
    """Write a component of diffusers or transformers with random weights.

    Args:
        folder: The component's folder.
        build: Builds the component; called on the meta device.
        name: Seed of the weights; None takes the folder's name.
    """
    with torch.device("meta"):
        module = build()
    fill_random(module, name or folder.name)
    save_module(folder, module)


def save_module(folder: Path, module: Any) -> None:
    """Write a module as `save_pretrained` of diffusers and transformers does."""
    from diffusers.models.modeling_utils import ModelMixin

    if isinstance(module, ModelMixin):
        module.save_pretrained(folder)
    else:
        # save_pretrained of transformers would draw a progress bar.
        module.config.save_pretrained(folder)
        save_file(stored_tensors(module), folder / f"{TRANSFORMERS_STEM}.safetensors", metadata={"format": "pt"})


def write_model_index(
    folder: Path, pipeline: str, settings: Mapping[str, Any] | None = None, **parts: tuple[str, str] | None
) -> None:
    """Write the index that makes the folder a pipeline of diffusers.

    Args:
        folder: The folder.
        pipeline: The class of the pipeline.
        settings: Arguments of its constructor other than its components.
        parts: {component: (library, class)}.
    """
    index = {"_class_name": pipeline} | {name: part or (None, None) for name, part in sorted(parts.items())}
    index |= dict(settings or {})
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def fill_random(module: nn.Module, name: str) -> None:
    """Give a module on the meta device CPU weights drawn from (name, parameter name): the same on every machine.

    Matrices and convolutions keep the variance of their input; vectors are 0 for biases and means, 1 for the rest.
    """
    give_storage(module, torch.device("cpu"))
    with torch.no_grad():
        for key, tensor in stored_tensors(module).items():
            tensor.copy_(random_weight(name, key, tensor.shape))


def random_weight(name: str, key: str, shape: Sequence[int]) -> Tensor:
    """A weight drawn from (name, key), on the CPU, fp32."""
    if len(shape) < 2:
        return torch.full(tuple(shape), 0.0 if key.endswith(("bias", "mean")) else 1.0)
    return torch.randn(*shape, generator=generator(name, key)) / math.sqrt(math.prod(shape[1:]))


def _check_paths(model: ModelConfig, architectures: tuple[str, ...]) -> None:
    architecture = model.options.architecture
    if architecture is not None and architecture not in architectures:
        raise InputError(f"model.options.architecture: '{architecture}' is not one of {', '.join(architectures)}")
    for problem in wrong_files(model):
        raise InputError(f"{problem.field} {problem.message}")
    is_file = model.is_single_file
    if is_file and not Path(model.path).is_file():
        raise InputError(f"model.path {model.path}: no such file; name a safetensors file or a diffusers folder")
    if model.base is not None and not is_file:
        raise InputError(
            f"model.base {model.base}: is only used with a single file, but model.path is {model.path}; leave it empty"
        )
