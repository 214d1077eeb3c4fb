"""Discrete diffusion: the prediction type and noise schedule of a model, and the samplers that use it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from torch import Tensor

from trainer.config.sections import ObjectiveConfig
from trainer.models.objectives.diffusion import Prediction
from trainer.models.parts.folder import ModelFolder
from trainer.system.errors import InputError

CONFIG = "scheduler/scheduler_config.json"
V_PREDICTION, ZERO_TERMINAL = "v_pred", "ztsnr"
MARKERS = (V_PREDICTION, ZERO_TERMINAL)
"""Names of empty tensors that mark a single file as predicting velocity, and as trained with zero-terminal SNR.
ComfyUI reads the second marker only together with the first."""
EDM_MARKERS = ("edm_mean", "edm_vpred.sigma_max")
"""Markers of models trained on continuous noise levels (arXiv 2206.00364), which is another recipe."""


@dataclass(frozen=True)
class NoiseSchedule:
    """How a model is trained and sampled.

    Attributes:
        config: The folder's scheduler_config.json, changed by the markers of the file and the config of the run.
        is_changed: Whether markers or config changed it.
        sentences: Sentences to show before training.
    """

    config: Mapping[str, Any]
    is_changed: bool
    sentences: tuple[str, ...]

    @property
    def prediction(self) -> Prediction:
        kind: Prediction = self.config["prediction_type"]
        return kind

    @property
    def is_zero_terminal(self) -> bool:
        """Whether the last timestep has no signal."""
        return bool(self.config.get("rescale_betas_zero_snr"))

    @property
    def markers(self) -> tuple[str, ...]:
        """The marker tensors of a single file of such a model."""
        if self.prediction != "v_prediction":
            return ()
        return MARKERS if self.is_zero_terminal else (V_PREDICTION,)

    def alpha_bar(self) -> Tensor:
        """Share of the data's variance at each timestep (T,); 0 at the last one with zero-terminal SNR.

        Source of the rescaled one: Common Diffusion Noise Schedules and Sample Steps are Flawed (arXiv 2305.08891),
        algorithm 1.
        """
        alpha_bar: Tensor = DDPMScheduler.from_config(dict(self.config)).alphas_cumprod
        return alpha_bar


def read_schedule(folder: ModelFolder, objective: ObjectiveConfig) -> NoiseSchedule:
    """Read the noise schedule of a folder's model, or of the single file in place of its denoiser.

    `objective` counts most, then the file's markers, then the folder's scheduler_config.json.

    Raises:
        InputError: The settings contradict each other, or the model is of a kind that is not trained here.
    """
    markers = folder.markers((*MARKERS, *EDM_MARKERS))
    edm = [name for name in EDM_MARKERS if name in markers]
    if edm:
        raise InputError(
            f"model.path {folder.single}: its tensor '{edm[0]}' marks a model of EDM (continuous noise levels), which "
            "is not trained here; name a model that predicts noise or velocity"
        )
    reading = _Reading(folder, folder.read(CONFIG), markers, objective)
    prediction, is_zero_terminal = reading.prediction(), reading.is_zero_terminal()
    changes: dict[str, Any] = {"prediction_type": prediction}
    if is_zero_terminal != reading.folder_is_zero_terminal:
        changes["rescale_betas_zero_snr"] = is_zero_terminal
    if changes.get("rescale_betas_zero_snr"):
        # Other spacings never sample at the last timestep, the only one without signal (arXiv 2305.08891, sec. 3.3).
        changes["timestep_spacing"] = "trailing"
    is_changed = len(changes) > 1 or prediction != reading.folder_prediction
    return NoiseSchedule({**reading.own, **changes}, is_changed, tuple(reading.sentences()))


@dataclass(frozen=True)
class _Reading:
    """The three sources of a model's settings.

    Attributes:
        folder: The model's folder.
        own: The folder's scheduler_config.json.
        markers: The markers of the single file.
        objective: The section of the config.
    """

    folder: ModelFolder
    own: Mapping[str, Any]
    markers: frozenset[str]
    objective: ObjectiveConfig

    @property
    def folder_prediction(self) -> Any:
        return self.own.get("prediction_type", "epsilon")

    @property
    def folder_is_zero_terminal(self) -> bool:
        return bool(self.own.get("rescale_betas_zero_snr"))

    def prediction(self) -> Prediction:
        if self.objective.prediction != "auto":
            return self.objective.prediction
        if V_PREDICTION in self.markers or self.folder_prediction == "v_prediction":
            return "v_prediction"
        if self.folder_prediction != "epsilon":
            raise InputError(
                f"{self._place} has prediction_type {self.folder_prediction}; "
                "set objective.prediction to epsilon or v_prediction"
            )
        if ZERO_TERMINAL in self.markers:
            raise InputError(
                f"model.path {self.folder.single}: has the marker {ZERO_TERMINAL} (zero-terminal SNR) without "
                f"{V_PREDICTION}, so what it predicts is not known; set objective.prediction: v_prediction, as for all "
                "known models with zero-terminal SNR, or epsilon, as ComfyUI reads it"
            )
        return "epsilon"

    def is_zero_terminal(self) -> bool:
        wanted, prediction = self.objective.zero_terminal_snr, self.prediction()
        if wanted == "on" and prediction == "epsilon":
            raise InputError(
                f"objective.zero_terminal_snr: on needs a model that predicts velocity, but {self._place} has "
                "prediction_type epsilon; set objective.prediction: v_prediction, or set this to auto"
            )
        if wanted != "auto":
            return wanted == "on"
        if self.markers and prediction == "v_prediction":
            return ZERO_TERMINAL in self.markers
        return self.folder_is_zero_terminal

    def sentences(self) -> Iterator[str]:
        """Sentences to show before training."""
        is_velocity, is_zero_terminal = self.prediction() == "v_prediction", self.is_zero_terminal()
        ends = "with" if is_zero_terminal else "without"
        how = f"trained and sampled as one that predicts {'velocity' if is_velocity else 'noise'}, {ends} zero-terminal"
        file, is_auto = f"model.path {self.folder.single}", self.objective.prediction == "auto"
        if self.markers:
            names = [name for name in MARKERS if name in self.markers]
            yield f"{file}: has the marker{'s' * (len(names) > 1)} {' and '.join(names)}; it is {how} SNR"
        if V_PREDICTION in self.markers and not is_velocity:
            yield (
                f"objective.prediction: epsilon contradicts the marker {V_PREDICTION} of {file}, which says that it "
                "predicts velocity; leave the field out unless you mean to change what the model predicts"
            )
        if self.folder.single is not None and not self.markers and is_velocity and is_auto:
            yield (
                f"{file}: has no marker {V_PREDICTION}, but {self._place} has prediction_type v_prediction; it is "
                f"{how} SNR. Set objective.prediction: epsilon if the file predicts noise"
            )
        if is_zero_terminal and not is_velocity:
            yield (
                f"{self._place} has rescale_betas_zero_snr, but noise is predicted: the last timestep is noise alone "
                "and teaches nothing; set objective.zero_terminal_snr: off, or objective.prediction: v_prediction if "
                "the model predicts velocity"
            )

    @property
    def _place(self) -> str:
        return f"{self.folder.field} {self.folder.path}: {CONFIG}"


@dataclass(frozen=True)
class NoiseSampler:
    """A sampler of diffusers, ready for its first step.

    Attributes:
        scheduler: The scheduler of diffusers.
        arguments: Additional arguments of its `step`.
    """

    scheduler: Any
    arguments: Mapping[str, Any]

    def step(self, prediction: Tensor, timestep: Tensor, latents: Tensor) -> Tensor:
        """The latents of the next timestep, (B, ...).

        Args:
            prediction: (B, ...).
            timestep: ().
            latents: (B, ...).
        """
        after: Tensor = self.scheduler.step(prediction, timestep, latents, **self.arguments, return_dict=False)[0]
        return after


EULER = EulerDiscreteScheduler.__name__


def sampler_name(folder: ModelFolder) -> str:
    """The class of diffusers that the folder's own pipeline samples with."""
    in_index = folder.read("model_index.json").get("scheduler")
    named = in_index[1] if isinstance(in_index, list) and len(in_index) == 2 else None
    name: str = named or folder.read(CONFIG).get("_class_name") or EULER
    return name


def choose_sampler(name: str, schedule: NoiseSchedule, num_steps: int) -> tuple[str, str | None]:
    """Return (`name`, None) if images can be sampled with this class, else (Euler's method, the reason)."""
    try:
        make_sampler(name, schedule, num_steps, torch.Generator(), torch.device("cpu"))
    except InputError as error:
        return EULER, str(error)
    return name, None


def make_sampler(
    name: str, schedule: NoiseSchedule, num_steps: int, generator: torch.Generator, device: torch.device
) -> NoiseSampler:
    """Make the sampler of diffusers' class `name`.

    Args:
        name: Class of diffusers.
        schedule: The noise schedule.
        num_steps: Number of sampling steps.
        generator: Source of all noise that the sampler adds.
        device: Device of its tensors.

    Raises:
        InputError: Images cannot be sampled with it; the message is the reason.
    """
    kind = _sampler_class(name, schedule)
    settings = dict(schedule.config)
    if "noise_sampler_seed" in _parameters(kind.__init__):
        settings["noise_sampler_seed"] = generator.initial_seed()
    try:
        scheduler = kind.from_config(settings)
        with warnings.catch_warnings():
            # Some let numpy copy a tensor, and numpy 2 warns of that.
            warnings.filterwarnings("ignore", message="__array_", category=DeprecationWarning)
            scheduler.set_timesteps(num_steps, device=device)
    except (ImportError, ValueError, NotImplementedError) as error:
        raise InputError(f"{name} refuses {num_steps} steps or its settings ({_line(error)})") from error
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return NoiseSampler(scheduler, {"generator": generator} if "generator" in _parameters(kind.step) else {})


def _sampler_class(name: str, schedule: NoiseSchedule) -> Any:
    version = diffusers.__version__
    if not name.endswith("Scheduler") or not hasattr(diffusers, name):
        raise InputError(f"diffusers {version} has no sampler {name}")
    kind: Any = getattr(diffusers, name)
    try:
        settings, steps, needs = _parameters(kind.__init__), _parameters(kind.set_timesteps), _parameters(kind.step)
    except ImportError as error:
        raise InputError(f"{name} cannot be loaded ({_line(error)})") from error
    required = [one for one in needs if needs[one].default is inspect.Parameter.empty]
    is_known = required == ["self", "model_output", "timestep", "sample"] and "num_inference_steps" in steps
    if not is_known or not {"beta_start", "prediction_type"} <= settings.keys():
        raise InputError(f"{name} does not sample with the noise schedule of such a model and a number of steps alone")
    if schedule.is_zero_terminal and "rescale_betas_zero_snr" not in settings:
        raise InputError(f"diffusers {version}'s {name} has no zero-terminal SNR")
    return kind


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
