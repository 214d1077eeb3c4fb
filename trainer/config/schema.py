"""RunConfig and the rules between its sections.

Nothing here imports torch, and nothing assigns to a config after it was validated: a derived value is a property.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, model_validator

from trainer.config.models import published_models
from trainer.config.recompute import mixture
from trainer.config.sections import (
    ADAPTERS,
    HOST_PORT,
    NAME_PATTERN,
    SINGLE_FILES,
    Adapter,
    AdapterSection,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ExportConfig,
    ExportFormat,
    LoraAdapter,
    ModelConfig,
    NoAdapter,
    ObjectiveConfig,
    OptimConfig,
    ParallelConfig,
    QuantizeConfig,
    RankAdapter,
    SampleConfig,
    Section,
    StageConfig,
    TrackersConfig,
    TrainConfig,
    as_name,
    demo_families,
    family_names,
    has_trigger_place,
    option,
)
from trainer.system.errors import Problem, RuleError, not_one_of


class RunConfig(Section):
    """The complete configuration of a run. It is saved as `config.yaml` in the run folder, with all defaults."""

    name: Annotated[str, BeforeValidator(as_name)] = option("run", pattern=NAME_PATTERN)
    """Name of the run and of the exported file. Characters that no name holds, as spaces, become dashes."""
    model: ModelConfig = ModelConfig()
    adapter: Adapter = LoraAdapter()
    quantize: QuantizeConfig = QuantizeConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    trackers: TrackersConfig = TrackersConfig()
    cluster: ClusterConfig = ClusterConfig()
    stages: tuple[StageConfig, ...] = ()
    """Consecutive parts of the run. Each is started by its own torchrun and continues from the weights of the one
    before."""

    @model_validator(mode="after")
    def _check_rules(self) -> RunConfig:
        problems = tuple(rules(self))
        if problems:
            raise RuleError(problems)
        return self

    @property
    def stage_steps(self) -> tuple[int | None, ...]:
        """Optimizer steps of each stage, None where `train.epochs` decides; a run without stages counts as one stage.

        `trainer.run.length` has the steps of a run whose data were read.
        """
        sets = [stage.set for stage in self.stages] or [{}]
        steps = [values.get("train.steps", self.train.steps) for values in sets]
        return tuple(None if epochs else number for epochs, number in zip(self.stage_epochs, steps, strict=True))

    @property
    def stage_epochs(self) -> tuple[float | None, ...]:
        """Epochs of each stage, None where `train.steps` decides. A stage's own steps replace the run's epochs."""
        sets = [stage.set for stage in self.stages] or [{}]
        runs = [None if "train.steps" in values else self.train.epochs for values in sets]
        return tuple(values.get("train.epochs", epochs) for values, epochs in zip(sets, runs, strict=True))

    @property
    def export_what(self) -> str:
        """`export.what` with `auto` resolved: none, adapter, merged or full."""
        if self.export.what != "auto":
            return self.export.what
        if isinstance(self.adapter, NoAdapter):
            return "full"
        return "merged" if "full" in self.model.train.values() else "adapter"

    def exporting(self, what: str, format: str | None, dtype: str | None) -> RunConfig:
        """Return the config with another export.

        Args:
            what: `export.what`; `auto` keeps the run's own.
            format: `export.format`; None keeps the run's own if it can hold `what`, else takes auto.
            dtype: `export.dtype`; None keeps the run's own if it can hold `what`, else takes bf16.

        Raises:
            RuleError: The three cannot be combined.
        """
        wanted = self.export_what if what == "auto" else what
        if format is None:
            fits = self.export.format in export_formats(self.adapter.type, wanted)
            format = self.export.format if fits else "auto"
        if dtype is None:
            fits = self.export.dtype != "fp8" or (wanted != "adapter" and format in SINGLE_FILES)
            dtype = self.export.dtype if fits else "bf16"
        section = ExportConfig.model_validate({"what": wanted, "format": format, "dtype": dtype})
        changed = self.model_copy(update={"export": section})
        problems = tuple(_export_rules(changed))
        if problems:
            raise RuleError(problems)
        return changed

    def with_prompts(self, prompts: Sequence[str]) -> RunConfig:
        """Return the config with other `sample.prompts`.

        Raises:
            RuleError: They cannot be combined with the other fields.
        """
        changed = self.model_copy(update={"sample": self.sample.model_copy(update={"prompts": tuple(prompts)})})
        problems = tuple(_sample_rules(changed))
        if problems:
            raise RuleError(problems)
        return changed

    def mode(self, component: str) -> Literal["frozen", "adapter", "full"]:
        """How a component of the model is trained: per `model.train`, else by the adapter, or fully without one."""
        if self.model.train:
            return self.model.train.get(component, "frozen")
        return "full" if isinstance(self.adapter, NoAdapter) else "adapter"

    def shards_gradients(self, strategy: str) -> bool:
        """Whether gradients must stay sharded, because the whole gradient is as large as the sharded model.

        Args:
            strategy: `parallel.strategy` with `auto` resolved.
        """
        trained = "full" in self.model.train.values() if self.model.train else isinstance(self.adapter, NoAdapter)
        has_whole_modules = isinstance(self.adapter, AdapterSection) and bool(self.adapter.modules_to_save)
        return (trained or has_whole_modules) and strategy in ("full", "grad_op", "hybrid")

    @property
    def micro_steps(self) -> int:
        """Forward passes per rank and optimizer step. The last one may hold padding, which has no weight in the
        loss."""
        return math.ceil(self.train.batch_size / (self.parallel.data_size * self.train.micro_batch))


def rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield every problem with a combination of fields that are each valid by themselves."""
    yield from _model_rules(cfg)
    yield from _adapter_rules(cfg)
    yield from _quantize_rules(cfg)
    if isinstance(cfg.adapter, NoAdapter) and not cfg.model.train:
        yield from nothing_frozen(cfg)
    yield from _objective_rules(cfg)
    yield from _optim_rules(cfg)
    yield from _strategy_rules(cfg)
    yield from _group_rules(cfg)
    yield from _data_rules(cfg)
    yield from _preference_rules(cfg)
    yield from _sample_rules(cfg)
    yield from _cluster_rules(cfg)
    yield from _stage_rules(cfg)


def _model_rules(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.model.family:
        yield Problem("model.family", f"is needed; name one of {', '.join(family_names())}")
    elif cfg.model.family not in family_names():
        yield Problem("model.family", not_one_of(cfg.model.family, family_names()))
    if not cfg.model.path:
        yield Problem("model.path", "is empty; name a model, or tiny for random weights")
    if cfg.model.path == "demo" and cfg.model.family not in demo_families():
        families = " or ".join(demo_families())
        message = f"demo is a model of family {families}, not {cfg.model.family}; set model.family: {families}"
        yield Problem("model.path", message, depends_on=("model.family",))
    yield from _trained_rules(cfg)
    yield from _export_rules(cfg)


def _export_rules(cfg: RunConfig) -> Iterator[Problem]:
    what, adapter = cfg.export.what, cfg.adapter.type
    if what in ("adapter", "merged") and adapter == "none":
        yield Problem(
            "export.what", f"{what} needs an adapter, but adapter.type is none; use full", depends_on=("adapter.type",)
        )
    if what == "full" and adapter != "none":
        yield Problem(
            "export.what",
            f"full needs adapter.type none, not {adapter}; use merged for base + adapter",
            depends_on=("adapter.type",),
        )
    if what == "adapter" and "full" in cfg.model.train.values():
        component = next(name for name, mode in cfg.model.train.items() if mode == "full")
        yield Problem(
            "export.what",
            f"adapter leaves out {component}, which is trained fully; use merged",
            depends_on=("model.train",),
        )
    fitting = export_formats(adapter, cfg.export_what)
    if cfg.export.format not in fitting:
        content = f"a {adapter} adapter" if cfg.export_what == "adapter" else "a whole model"
        yield Problem(
            "export.format",
            f"{cfg.export.format} cannot carry {content}; use {', '.join(fitting)}",
            depends_on=("adapter.type", "export.what", "model.train"),
        )
    if cfg.export.dtype == "fp8" and (cfg.export_what == "adapter" or cfg.export.format not in SINGLE_FILES):
        yield Problem(
            "export.dtype",
            "fp8 is for the single file of a whole model; set export.what: merged or full and "
            "export.format: single_file, or use bf16",
            depends_on=("adapter.type", "export.what", "export.format"),
        )


def export_formats(adapter: str, what: str) -> tuple[str, ...]:
    """Return the formats that can hold an export. The model family decides which of them it has a layout for.

    Args:
        adapter: Type of the adapter.
        what: none, adapter, merged or full.
    """
    if what == "none":
        return get_args(ExportFormat)
    if what != "adapter":
        return ("auto", "diffusers", *SINGLE_FILES)
    return ADAPTERS[adapter].formats


def _trained_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Check that something is trained, and that an adapter is trained if and only if the config has one."""
    modes, adapter = cfg.model.train, cfg.adapter.type
    if modes and set(modes.values()) == {"frozen"}:
        yield Problem("model.train", "freezes every component, so nothing is trained; set one to adapter or full")
    elif modes and adapter != "none" and "adapter" not in modes.values():
        yield Problem(
            "model.train",
            f"gives no component the {adapter} adapter; set one to adapter, or set adapter.type: none",
            depends_on=("adapter.type",),
        )
    for component, mode in modes.items():
        if mode == "adapter" and adapter == "none":
            yield Problem(
                f"model.train.{component}",
                "adapter needs adapter.type, which is none; use full or set a type",
                depends_on=("adapter.type",),
            )


def _adapter_rules(cfg: RunConfig) -> Iterator[Problem]:
    yield from cfg.adapter.problems()
    yield from _pattern_rules(cfg)


def _pattern_rules(cfg: RunConfig) -> Iterator[Problem]:
    patterns = [("quantize.keep", pattern) for pattern in cfg.quantize.keep]
    patterns += [("quantize.formats", pattern) for pattern in cfg.quantize.formats]
    if isinstance(cfg.adapter, AdapterSection):
        patterns += [("adapter.targets", pattern) for pattern in cfg.adapter.targets]
        patterns += [("adapter.modules_to_save", pattern) for pattern in cfg.adapter.modules_to_save]
    if isinstance(cfg.adapter, RankAdapter):
        patterns += [("adapter.rank_pattern", pattern) for pattern in cfg.adapter.rank_pattern]
    for field, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(field, f"'{pattern}' is not a layer name or regular expression: {error}")


def _quantize_rules(cfg: RunConfig) -> Iterator[Problem]:
    quantize = cfg.quantize
    for name, value in quantize:
        if quantize.format == "none" and value != QuantizeConfig.model_fields[name].default:
            yield Problem(
                f"quantize.{name}",
                "needs quantize.format nf4, int8 or fp8, but it is none; set it, or leave this out",
                depends_on=("quantize.format",),
            )


def nothing_frozen(cfg: RunConfig) -> Iterator[Problem]:
    """Yield fields that are for frozen weights, for a run that trains the whole model."""
    quantize, offloaded = cfg.quantize, cfg.parallel.offload_blocks
    if quantize.format != "none" and not quantize.encoders:
        yield Problem(
            "quantize.format",
            f"{quantize.format} is for frozen layers, but the whole model is trained; train an adapter "
            "(adapter.type), or set none",
            depends_on=("adapter.type", "model.train"),
        )
    if offloaded != 0:
        yield Problem(
            "parallel.offload_blocks",
            f"{offloaded} is for frozen weights, but the whole model is trained; train an adapter (adapter.type), or "
            "set 0 and parallel.cpu_offload: true",
            depends_on=("adapter.type", "model.train"),
        )


def _objective_rules(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.objective.zero_terminal_snr == "on" and cfg.objective.prediction == "epsilon":
        yield Problem(
            "objective.zero_terminal_snr",
            "on needs a model that predicts velocity, because the last timestep is pure noise; set "
            "objective.prediction: v_prediction, or set this to auto",
            depends_on=("objective.prediction",),
        )


def _preference_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Check that pairs are compared with a model without the adapter, and that nothing in the data applies to one image
    of a pair only."""
    if not cfg.objective.compares_pairs:
        if cfg.data.rejected:
            yield Problem(
                "data.rejected",
                "has no effect without objective.dpo_beta; set it, for example to 2000",
                depends_on=("objective.dpo_beta",),
            )
        return
    if cfg.adapter.type == "none":
        yield Problem(
            "objective.dpo_beta",
            "compares the model with itself without its adapter, but adapter.type is none; set a type, or leave this "
            "out",
            depends_on=("adapter.type",),
        )
    for component, mode in cfg.model.train.items():
        if mode == "full":
            yield Problem(
                f"model.train.{component}",
                "full would change the model that objective.dpo_beta compares with; use adapter or frozen",
                depends_on=("objective.dpo_beta",),
            )
    # An answer that is cut, or an image of which a part is masked, has another likelihood than the one that was judged:
    # the two of a pair could not be compared.
    yield from _reference_rules(cfg)
    cuts = (("packing", cfg.data.packing, "split", "whole"), ("too_long", cfg.data.too_long, "cut", "drop"))
    for name, value, cut, kept in cuts:
        if value == cut:
            yield Problem(
                f"data.{name}",
                f"{cut} cannot be combined with objective.dpo_beta, which compares whole answers; use {kept}",
                depends_on=("objective.dpo_beta",),
            )
    for name, folder in cfg.data.companions.items():
        if folder and name not in ("references", "rejected"):
            yield Problem(
                f"data.{name}",
                "cannot be combined with objective.dpo_beta, which compares whole images of pairs; leave it out",
                depends_on=("objective.dpo_beta",),
            )
    if cfg.data.fit == "pad":
        yield Problem(
            "data.fit",
            "pad cannot be combined with objective.dpo_beta, which compares whole images of pairs; use crop or drop",
            depends_on=("objective.dpo_beta",),
        )


def _reference_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Check that the model without its adapter is the one that training began with."""
    adapter = cfg.adapter
    if isinstance(adapter, AdapterSection) and adapter.modules_to_save:
        yield Problem(
            "adapter.modules_to_save",
            "would change the model that objective.dpo_beta compares with; leave it out",
            depends_on=("objective.dpo_beta",),
        )
    if adapter.takes_from_base:
        yield Problem(
            "adapter.init",
            "pissa takes a part of the model that objective.dpo_beta compares with into the adapter; use default",
            depends_on=("objective.dpo_beta",),
        )
    if cfg.train.neftune_alpha:
        yield Problem(
            "train.neftune_alpha",
            "would also disturb the model that objective.dpo_beta compares with; set 0",
            depends_on=("objective.dpo_beta",),
        )


def _optim_rules(cfg: RunConfig) -> Iterator[Problem]:
    optim, every = cfg.optim, cfg.train.checkpointing
    is_known = every >= 1 if isinstance(every, int) else every == "auto" or mixture(every) is not None
    if not is_known:
        yield Problem(
            "train.checkpointing",
            f"{every} is not none, selective, full, auto, n >= 1 for every n-th block, "
            "or a mixture as 'full 12, selective 20'",
        )
    if cfg.train.out_of_memory == "retry" and not cfg.parallel.max_restarts:
        yield Problem(
            "train.out_of_memory",
            "retry restarts the ranks, but parallel.max_restarts is 0; set it to 2 or more",
            depends_on=("parallel.max_restarts",),
        )
    if cfg.train.epochs is None and optim.schedule != "constant" and optim.warmup >= cfg.train.steps:
        yield Problem(
            "optim.warmup",
            f"must be less than train.steps {cfg.train.steps}, not {optim.warmup}; lower it",
            depends_on=("optim.schedule", "train.steps", "train.epochs"),
        )
    if optim.type == "schedulefree" and optim.schedule != "constant":
        yield Problem(
            "optim.schedule",
            f"{optim.schedule} cannot be combined with optim.type schedulefree; use constant",
            depends_on=("optim.type",),
        )
    if optim.type == "schedulefree" and optim.ema:
        yield Problem(
            "optim.ema",
            f"{optim.ema:g} cannot be combined with optim.type schedulefree, which averages the weights itself; set 0",
            depends_on=("optim.type",),
        )


def _strategy_rules(cfg: RunConfig) -> Iterator[Problem]:
    parallel, world = cfg.parallel, cfg.parallel.world_size
    strategy = parallel.strategy
    if strategy in ("ddp", "none") and parallel.cpu_offload:
        yield Problem(
            "parallel.cpu_offload",
            f"true needs parallel.strategy full, grad_op or hybrid, not {strategy}",
            depends_on=("parallel.strategy",),
        )
    yield from _offload_rules(cfg)
    if strategy == "none" and world > 1:
        yield Problem(
            "parallel.strategy",
            f"none is for a single rank, but there are {world}; use full, or ddp for a copy on every rank",
            depends_on=("parallel.devices", "parallel.nodes"),
        )
    if parallel.nodes > 1 and not parallel.rendezvous:
        yield Problem(
            "parallel.rendezvous",
            f"{parallel.nodes} nodes need host:port of the first node",
            depends_on=("parallel.nodes",),
        )
    endpoint = HOST_PORT.fullmatch(parallel.rendezvous) if parallel.rendezvous else None
    if parallel.rendezvous and not (endpoint and 0 < int(endpoint["port"]) < 65536):
        yield Problem("parallel.rendezvous", f"'{parallel.rendezvous}' is not host:port, for example node0:29400")


def _offload_rules(cfg: RunConfig) -> Iterator[Problem]:
    wanted, parallel = cfg.parallel.offload_blocks, cfg.parallel
    if wanted == 0:
        return
    if not isinstance(wanted, str) and (wanted < 0 or (isinstance(wanted, float) and wanted > 1)):
        yield Problem(
            "parallel.offload_blocks",
            f"{wanted} is not auto, a number of blocks, or a share of them from 0 to 1.0; 0 offloads none",
        )
    if parallel.cpu_offload:
        yield Problem(
            "parallel.offload_blocks",
            f"{wanted} cannot be combined with parallel.cpu_offload, which offloads all blocks; set 0, or "
            "parallel.cpu_offload: false",
            depends_on=("parallel.cpu_offload",),
        )


def _group_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Check which ranks share one copy of the parameters, and how much of it they keep after forward."""
    parallel, world = cfg.parallel, cfg.parallel.world_size
    strategy, reshard = parallel.strategy, parallel.reshard_after_forward
    sizes = ("parallel.strategy", "parallel.devices", "parallel.nodes")
    group = (parallel.shard_size or parallel.devices) if strategy == "hybrid" else world
    if strategy == "hybrid" and world % group:
        yield Problem(
            "parallel.shard_size",
            f"{group} does not divide the {world} ranks; use a divisor of {world}",
            depends_on=sizes,
        )
    if strategy != "hybrid" and parallel.shard_size is not None:
        yield Problem(
            "parallel.shard_size",
            f"needs parallel.strategy hybrid, not {strategy}; leave it empty",
            depends_on=("parallel.strategy",),
        )
    if reshard is not None and strategy not in ("full", "hybrid"):
        yield Problem(
            "parallel.reshard_after_forward",
            f"needs parallel.strategy full or hybrid, not {strategy}; leave it empty",
            depends_on=("parallel.strategy",),
        )
    if isinstance(reshard, int) and not isinstance(reshard, bool) and (reshard < 2 or group % reshard):
        yield Problem(
            "parallel.reshard_after_forward",
            f"{reshard} is not true, false or a divisor above 1 of the {group} ranks that share a copy",
            depends_on=(*sizes, "parallel.shard_size"),
        )


def _data_rules(cfg: RunConfig) -> Iterator[Problem]:
    data = cfg.data
    has_folders = bool(data.path or data.folders)
    if not has_folders and not data.questions:
        yield Problem(
            "data.path", "no images or text given; name a folder", depends_on=("data.folders", "data.questions")
        )
    if data.question_share != 0.5 and not (has_folders and data.questions):
        yield Problem(
            "data.question_share",
            "has no effect without data.path and data.questions; name both, or leave it out",
            depends_on=("data.path", "data.folders", "data.questions"),
        )
    if data.pack_tokens is not None and data.regularization_weight != 1:
        yield Problem(
            "data.pack_tokens",
            f"a pack has one weight, but data.regularization_weight is {data.regularization_weight:g}; set that to 1",
            depends_on=("data.regularization_weight",),
        )
    if isinstance(data.validation, int) and data.validation < 0:
        yield Problem("data.validation", f"{data.validation} is not a folder or a number of images >= 0")
    yield from _companion_rules(data)
    yield from _framing_rules(data)


def _framing_rules(data: DataConfig) -> Iterator[Problem]:
    """Check that what is set of several resolutions, crops and borders has an effect."""
    if data.at_resolutions != "each" and not any(len(sides) > 1 for sides in data.sides_of_folders):
        yield Problem(
            "data.at_resolutions",
            f"{data.at_resolutions} has no effect without several data.resolutions; name them, or leave it out",
            depends_on=("data.resolutions", "data.folders"),
        )
    if data.most_cropped != type(data).model_fields["most_cropped"].default and data.fit != "drop":
        yield Problem(
            "data.most_cropped", f"has no effect with data.fit: {data.fit}; set drop", depends_on=("data.fit",)
        )


def _companion_rules(data: DataConfig) -> Iterator[Problem]:
    """Check that masks, regularization images and references have their own folders, and no weight without a folder."""
    own = {os.path.normpath(path) for path in (data.path, *(one.path for one in data.folders)) if path}
    for name, folder in data.companions.items():
        if folder and os.path.normpath(folder) in own:
            yield Problem(f"data.{name}", f"{folder} is the folder of the training data itself; name another")
    if data.mask_background and not data.names_masks:
        yield Problem("data.mask_background", "has no effect without data.masks; name the folder of masks")
    endings = data.pair_suffixes
    alike = any(one != other and one.endswith(other) for one, other in itertools.permutations(endings, 2))
    if endings and ((len(endings), len({*endings})) != (2, 2) or not all(endings) or alike):
        yield Problem(
            "data.pair_suffixes",
            f"[{', '.join(endings)}] is not two endings of which none ends with the other; give two, as [_A, _B]",
        )
    if endings and data.references:
        yield Problem(
            "data.pair_suffixes", "the images before the edit are those of data.references; leave out one of both"
        )
    if data.reference_dropout and not data.has_references:
        yield Problem("data.reference_dropout", "has no effect without data.references; name the folder of images")
    if data.regularization_weight != 1 and not data.regularization:
        yield Problem(
            "data.regularization_weight", "has no effect without data.regularization; name the folder of images"
        )


def _sample_rules(cfg: RunConfig) -> Iterator[Problem]:
    sample = cfg.sample
    if sample.every and not sample.prompts and not sample.questions:
        yield Problem(
            "sample.prompts",
            f"sample.every is {sample.every}, but there are no prompts; add one or set sample.every: 0",
            depends_on=("sample.every",),
        )
    if sample.references and len(sample.references) != len(sample.prompts):
        yield Problem(
            "sample.references",
            f"{len(sample.references)} files for {len(sample.prompts)} prompts; give one for each, or none",
            depends_on=("sample.prompts",),
        )
    if len(sample.images) != len(sample.questions):
        yield Problem(
            "sample.images",
            f"{len(sample.images)} files for {len(sample.questions)} questions; give one for each",
            depends_on=("sample.questions",),
        )
    if not cfg.data.trigger and any(has_trigger_place(prompt) for prompt in sample.prompts):
        yield Problem(
            "sample.prompts",
            "[trigger] stands for data.trigger, which is empty; set it or remove [trigger]",
            depends_on=("data.trigger",),
        )


LEAST_IMAGE_BETA, MOST_TEXT_BETA = 100, 5
"""Betas beyond which a run probably has that of the other kind of data."""
LEAST_SIDE, MOST_DEMO_SIDE = 256, 128
"""Resolutions beyond which a run probably has that of another model: published ones were trained at 512 to 1536 pixels,
the demo model at 64."""


def advice(cfg: RunConfig) -> Iterator[Problem]:
    """Yield settings that are allowed but rarely intended, each with a better one. They are shown at the start of a run
    and not logged."""
    yield from cfg.adapter.advice(cfg.optim.lr)
    known, sides = published_models().get(cfg.model.path), cfg.data.all_sides
    field = "data.resolutions" if cfg.data.resolutions else "data.resolution"
    if known and known.is_built_in and sides[-1] > MOST_DEMO_SIDE:
        yield Problem(field, f"{sides[-1]} is much for the demo model, which draws at 64 pixels; 64 to 128 is usual")
    if known and not known.is_built_in and sides[0] < LEAST_SIDE:
        yield Problem(field, f"{sides[0]} is little for {known.name}, which then learns a blur; 512 to 1024 is usual")
    beta = cfg.objective.dpo_beta
    if beta is not None and cfg.data.rejected and beta < LEAST_IMAGE_BETA:
        yield Problem(
            "objective.dpo_beta",
            f"{beta:g} is of the size that is usual for text; for images, whose errors are means over all latents, "
            "2000 to 5000 is usual",
        )
    if beta is not None and not cfg.data.rejected and beta > MOST_TEXT_BETA:
        yield Problem("objective.dpo_beta", f"{beta:g} is large for text; 0.01 to 0.5 is usual, 0.1 most often")
    if cfg.train.epochs is not None and cfg.train.steps != TrainConfig.model_fields["steps"].default:
        yield Problem(
            "train.steps",
            f"{cfg.train.steps} has no effect, because train.epochs is {cfg.train.epochs:g}; set train.epochs: null to "
            "train that many steps",
        )


SBATCH_OPTIONS = {
    "nodes": "is derived from parallel.nodes; set that instead",
    "ntasks": "is one per node; set parallel.nodes instead",
    "signal": "is derived from cluster.warning; set that instead",
    "array": "would start one run several times at once; submit a job for each run",
}
"""{option of sbatch: why it is refused}: the run depends on its value."""


def _cluster_rules(cfg: RunConfig) -> Iterator[Problem]:
    for name, value in cfg.cluster.slurm.items():
        if name in SBATCH_OPTIONS:
            yield Problem(f"cluster.slurm.{name}", SBATCH_OPTIONS[name])
        elif name.startswith("ntasks-per-"):
            yield Problem(
                f"cluster.slurm.{name}", "each node has one task, which starts its ranks; set parallel.devices instead"
            )
        elif not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            yield Problem("cluster.slurm", f"'{name}' is not a long sbatch option; write it without dashes: partition")
        elif not str(value).isprintable():
            yield Problem(f"cluster.slurm.{name}", "contains a line break; write one line")


OF_ALL_STAGES = (
    "name",
    "parallel.devices",
    "parallel.device",
    "parallel.nodes",
    "parallel.rendezvous",
    "parallel.max_restarts",
    "data.cache",
    "trackers",
    "cluster",
    "stages",
)
"""Fields that all stages of a run share."""
OF_THE_FIRST_STAGE = ("model.path", "model.base", "adapter.start")
"""Fields that only the first stage may set: every later stage takes them from the one before."""


def _stage_rules(cfg: RunConfig) -> Iterator[Problem]:
    names = [stage.name for stage in cfg.stages]
    for index, stage in enumerate(cfg.stages):
        if stage.name in names[:index]:
            yield Problem(f"stages[{index}].name", f"'{stage.name}' is the name of two stages; give each its own name")
        for field in stage.set:
            set_field = f"stages[{index}].set.{field}"
            if any(f"{field}.".startswith(f"{fixed}.") for fixed in OF_ALL_STAGES):
                yield Problem(set_field, "must be the same for all stages; set it outside of them")
            elif index and any(f"{field}.".startswith(f"{first}.") for first in OF_THE_FIRST_STAGE):
                yield Problem(set_field, f"comes from stage {names[index - 1]}; leave it out")
