"""Faults that the tests must catch: one wrong line each, in code that matters. See DECISIONS 145."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A line that is changed for the worse.

    Attributes:
        name: What is wrong then.
        file: Path from the project's root.
        right: Text that stands in the file once.
        wrong: What takes its place.
        near: Tests that are run first, since they should find it.
    """

    name: str
    file: str
    right: str
    wrong: str
    near: tuple[str, ...]

    def plant(self, root: Path = ROOT) -> None:
        """Change the file below `root`."""
        path = root / self.file
        path.write_text(self.in_text(path.read_text(encoding="utf-8")), encoding="utf-8")

    def in_text(self, text: str) -> str:
        """The text of the file with the fault. Raises ValueError where `right` does not stand in it once."""
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} holds {self.right!r} {text.count(self.right)} times")
        return text.replace(self.right, self.wrong)


def _fault(name: str, file: str, right: str, wrong: str, *near: str) -> Fault:
    return Fault(name, file, right, wrong, tuple(f"tests/{test}" for test in near))


FAULTS = (
    # What a step minimizes
    _fault(
        "the velocity points from noise to data",
        "trainer/models/objectives/flow_matching.py",
        "    return noise - latents\n",
        "    return latents - noise\n",
        "models/test_objectives.py",
    ),
    _fault(
        "timesteps are shifted the wrong way",
        "trainer/models/objectives/flow_matching.py",
        "return factor * sigma / (1 + (factor - 1) * sigma)",
        "return sigma / (factor + (1 - factor) * sigma)",
        "models/test_objectives.py",
    ),
    _fault(
        "min-SNR weighs by the larger of the two",
        "trainer/models/objectives/diffusion.py",
        "return (gamma / snr).clamp(max=1)",
        "return (gamma / snr).clamp(min=1)",
        "models/test_objectives.py",
    ),
    _fault(
        "the velocity of discrete diffusion adds the latents",
        "trainer/models/objectives/diffusion.py",
        "return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * latents",
        "return alpha_bar.sqrt() * noise + (1 - alpha_bar).sqrt() * latents",
        "models/test_objectives.py",
        "models/test_sdxl_schedules.py",
    ),
    _fault(
        "a language model predicts the token it was given",
        "trainer/models/families/causal_lm.py",
        'targets = batch["tokens"].flatten()[predicted + 1]',
        'targets = batch["tokens"].flatten()[predicted]',
        "train/test_language_models.py",
        "models/test_causal_models.py",
        "audit/test_audit.py",
    ),
    _fault(
        "packed documents see each other",
        "trainer/models/parts/language/document_attention.py",
        "begins[:, 1:] = documents[:, 1:] != documents[:, :-1]",
        "begins[:, 1:] = False",
        "train/test_language_models.py",
        "models/test_causal_models.py",
    ),
    _fault(
        "blocks without a group of their own sum gradients in another order",
        "trainer/parallel/parallelize.py",
        "        return method(*_summed_alone(args), **_summed_alone(kwargs))\n",
        "        return method(*args, **kwargs)\n",
        "parallel/test_mixed_precision.py",
    ),
    _fault(
        "the plan forgets gradients that wait for the root",
        "trainer/plan/simulate/timeline.py",
        "            self.waiting[self.groups.roots[unit]] += self.groups.computed[unit]\n",
        "            self.waiting[self.groups.roots[unit]] += 0\n",
        "plan/simulate/test_timeline.py",
    ),
    # The loop
    _fault(
        "gradients are a mean over the ranks instead of a sum",
        "trainer/train/loop.py",
        "(mine * world.data_size).backward()",
        "mine.backward()",
        "distributed/test_parity.py",
    ),
    _fault(
        "gradients are reduced in the first pass of a step instead of the last",
        "trainer/train/loop.py",
        "i == len(micro_batches) - 1",
        "i == 0",
        "distributed/test_parity.py",
        "parallel/test_accumulation.py",
    ),
    _fault(
        "a step of few tokens moves the weights less",
        "trainer/train/loop.py",
        "torch.where(weight == 0, 1.0, batch_size / weight)",
        "torch.where(weight == 0, 1.0, 1.0 + 0 * weight)",
        "train/test_language_models.py",
    ),
    _fault(
        "padding of the validation counts",
        "trainer/train/loop.py",
        "mine = 1.0 if index < count else 0.0",
        "mine = 1.0",
        "train/test_loop.py",
    ),
    _fault(
        "a loss that is not finite moves the weights",
        "trainer/train/loop.py",
        "(~norm.isfinite() | (row[NON_FINITE] > 0)",
        "(~norm.isfinite() & (row[NON_FINITE] > 0)",
        "train/test_loop.py",
    ),
    _fault(
        "the last checkpoint is saved before its step is in the moving average",
        "trainer/train/loop.py",
        "    def _save_last(self) -> None:\n        self.flush_metrics()\n",
        "    def _save_last(self) -> None:\n",
        "train/test_step_numbers.py",
    ),
    _fault(
        "the device does not know that a step is to be skipped",
        "trainer/train/loop.py",
        "self.optimizer.found_inf = is_bad",
        "self.optimizer.found_inf = torch.zeros_like(is_bad)",
        "train/test_step_numbers.py",
        "train/test_loop.py",
    ),
    _fault(
        "validation leaves dropout off for the rest of the run",
        "trainer/train/loop.py",
        "            module.train()\n",
        "            module.eval()\n",
        "train/test_loop.py",
        "models/test_dropout.py",
    ),
    _fault(
        "every rank draws its own noise",
        "trainer/train/passes.py",
        "SampleRng(seed, indices, device)",
        "SampleRng(seed + self._world.rank, indices, device)",
        "distributed/test_parity.py",
    ),
    _fault(
        "a step's tokens are counted as its images",
        "trainer/train/step_log.py",
        'tokens_per_second=tokens / seconds if self._unit == "tokens"',
        'tokens_per_second=self._batch_sizes.now / seconds if self._unit == "tokens"',
        "train/test_language_models.py",
    ),
    # Optimizers
    _fault(
        "the learning rate warms up one step late",
        "trainer/optim.py",
        "cfg.lr * (step + 1) / cfg.warmup",
        "cfg.lr * step / cfg.warmup",
        "test_optim.py",
    ),
    _fault(
        "each rank clips by its own norm",
        "trainer/optim.py",
        "if placement.is_shard():",
        "if False:",
        "distributed/test_parity.py",
    ),
    _fault(
        "the moving average keeps what it should take in",
        "trainer/optim.py",
        "local(self._parameters.values()), 1 - decay)",
        "local(self._parameters.values()), decay)",
        "test_optim.py",
    ),
    # Checkpoints
    _fault(
        "a resumed run forgets the optimizer's state",
        "trainer/checkpoint/restore.py",
        '    set_optimizer_state_dict(state.model, state.optimizer, tensors["optimizer"], options=TRAINABLE_ONLY)\n',
        "",
        "distributed/test_resume.py",
    ),
    _fault(
        "a resumed run draws the batch before once more",
        "trainer/data/loader.py",
        "taken = min(steps, step - sum(steps for _, steps in parts))",
        "taken = min(steps, max(0, step - 1 - sum(steps for _, steps in parts)))",
        "distributed/test_resume.py",
        "data/test_loader.py",
    ),
    _fault(
        "a damaged checkpoint is taken for whole",
        "trainer/run/manifest.py",
        "is_right = hashlib.file_digest(stream, checksum).hexdigest() == expected",
        "is_right = bool(hashlib.file_digest(stream, checksum).hexdigest())",
        "checkpoint/test_save_and_restore.py",
    ),
    _fault(
        "the newest checkpoint is the last of the alphabet",
        "trainer/run/manifest.py",
        'key=lambda path: int(path.name.removeprefix("step-")))',
        "key=lambda path: path.name)",
        "checkpoint/test_save_and_restore.py",
    ),
    _fault(
        "a file that is replaced is not flushed before it gets its name",
        "trainer/system/files.py",
        "    flush(temporary)\n    os.replace(temporary, final)\n    flush(final.parent)\n",
        "    os.replace(temporary, final)\n    flush(final)\n    flush(final.parent)\n",
        "system/test_power_cut.py",
        "system/test_files.py",
    ),
    # Adapters and exports
    _fault(
        "a lora's file is scaled twice",
        "trainer/adapters/lora.py",
        "return (scale * up) @ down",
        "return (scale**2 * up) @ down",
        "adapters",
    ),
    _fault(
        "a dora is merged by the norms of columns",
        "trainer/adapters/dora.py",
        "weight.norm(dim=1).clamp_min(SHORTEST)).view(-1, 1)",
        "weight.norm().clamp_min(SHORTEST)).view(-1, 1)",
        "adapters",
    ),
    _fault(
        "a rotation turns the other way",
        "trainer/adapters/orthogonal.py",
        "torch.linalg.solve(identity - skew, 2 * skew)",
        "torch.linalg.solve(identity + skew, -2 * skew)",
        "adapters",
    ),
    # Bytes
    _fault(
        "4-bit codes take the nearest lower level",
        "trainer/weights/quantization.py",
        "cell = (levels * CELLS + CELLS).int()",
        "cell = (levels * CELLS + CELLS - 1).int()",
        "weights/test_quantization.py",
    ),
    _fault(
        "8-bit codes are cut off instead of rounded",
        "trainer/weights/quantization.py",
        "return levels.round().clamp(-127, 127)",
        "return levels.trunc().clamp(-127, 127)",
        "weights/test_quantization.py",
    ),
    _fault(
        "tokens are multiplied with the experts of others",
        "trainer/weights/quantized_experts.py",
        "hidden_states[order // k]",
        "hidden_states[order % len(hidden_states)]",
        "weights/test_quantized_experts.py",
    ),
    _fault(
        "the parts of an expert are read from its first row",
        "trainer/weights/composed.py",
        "((index, index + 1), (begin, end), (0, self.shape[2]))",
        "((index, index + 1), (0, end - begin), (0, self.shape[2]))",
        "train/test_mixtures.py",
    ),
    _fault(
        "a rank reads the rows of its neighbour",
        "trainer/parallel/load.py",
        "yield slice(offset[0], offset[0] + local.shape[0]), local",
        "yield slice(max(0, offset[0] - 1), max(0, offset[0] - 1) + local.shape[0]), local",
        "parallel",
        "distributed/test_parity.py",
    ),
    # Sharding
    _fault(
        "grad_op frees the weights after forward",
        "trainer/parallel/strategy.py",
        'return strategy in ("full", "hybrid", "ddp")',
        'return strategy in ("full", "hybrid", "ddp", "grad_op")',
        "benchmark",
        "parallel",
    ),
    _fault(
        "replicas that differ are not noticed",
        "trainer/parallel/replicas.py",
        "differing = [name for name in digests if any(copy[name] != digests[name] for copy in copies)]",
        "differing = [name for name in digests if all(copy[name] != digests[name] for copy in copies)]",
        "parallel",
        "train",
    ),
    # Data
    _fault(
        "padding of the last pass is trained on",
        "trainer/data/loader.py",
        "self._loss_weight(batch[position]) if number < num_present else 0.0",
        "self._loss_weight(batch[position])",
        "data/test_loader.py",
    ),
    _fault(
        "captions are dropped where they should be kept",
        "trainer/data/loader.py",
        'draw("caption_dropout") < int(choices.caption_dropout * 2**63)',
        'draw("caption_dropout") > int(choices.caption_dropout * 2**63)',
        "data/test_loader.py",
    ),
    _fault(
        "a crop stands at its focus point by its edge, not its middle",
        "trainer/data/images/image_io.py",
        "max(focus - kept / 2, 0.0)",
        "max(focus - kept, 0.0)",
        "data/images/test_framing.py",
    ),
    _fault(
        "a mirrored image keeps its mask as it was",
        "trainer/data/images/image_io.py",
        "return ImageOps.mirror(levels) if framing.is_mirrored else levels",
        "return ImageOps.mirror(levels) if framing.is_padded else levels",
        "data/images/test_framing.py",
    ),
    _fault(
        "borders of a padded image are learned as a mask's black parts",
        "trainer/data/images/image_io.py",
        'whole = _bordered(weights, Image.new("F", size, 0.0))',
        'whole = _bordered(weights, Image.new("F", size, outside))',
        "data/images/test_framing.py",
    ),
    _fault(
        "a kept scan is found again though a file has changed",
        "trainer/data/images/scan_memory.py",
        'content.update(stamp.encode("utf-8", "surrogateescape"))',
        "",
        "data/images/test_scan_memory.py",
    ),
    _fault(
        "an image goes into the bucket of the nearest difference, not ratio",
        "trainer/data/images/buckets.py",
        "abs(math.log(size.width / size.height) - aspect)",
        "abs(size.width / size.height - math.exp(aspect))",
        "data/images/test_buckets.py",
    ),
    _fault(
        "all epochs have one order",
        "trainer/data/loader.py",
        'generator(self._seed, "order", epoch)',
        'generator(self._seed, "order", 0)',
        "data/test_loader.py",
    ),
    # Around a run
    _fault(
        "the last failure is named as the cause",
        "trainer/run/failure.py",
        "cause = min(failures, key=lambda failure: (failure.is_consequence, failure.when), default=torchrun_itself)",
        "cause = max(failures, key=lambda failure: (failure.is_consequence, failure.when), default=torchrun_itself)",
        "launcher/test_torchrun.py",
    ),
    _fault(
        "an ended run is recorded as failed a second time",
        "trainer/run/process.py",
        'if end != "failed":',
        "if True:",
        "launcher/test_torchrun.py",
    ),
    _fault(
        "a tracker whose package is missing is found by the ranks only",
        "trainer/launcher/preflight.py",
        "loaded.refuse([*trackers.missing(loaded.config.trackers), *optimizer])",
        "loaded.refuse(optimizer)",
        "metrics/test_trackers.py",
        "launcher",
    ),
    _fault(
        "the watchdog swallows what it found",
        "trainer/distributed/watchdog.py",
        "if stalled_s > self._limit_s or self._channel.alarm:",
        "if stalled_s > 1000 * self._limit_s:",
        "distributed/test_watchdog.py",
    ),
    _fault(
        "the plan counts one moment of AdamW",
        "trainer/config/sections.py",
        'state_bytes: ClassVar[Mapping[str, float]] = {"adamw": 8.0,',
        'state_bytes: ClassVar[Mapping[str, float]] = {"adamw": 4.0,',
        "plan",
    ),
    _fault(
        "the page answers under any name",
        "app/web/security.py",
        "if name not in self._hosts:",
        "if not name:",
        "app/web/test_security.py",
        "app/web/test_probes.py",
    ),
    _fault(
        "a layer whose output was changed in place is taken as it was kept",
        "trainer/parallel/recompute.py",
        "return self.is_whole and (self.result is None or _versions(self.result) == self.versions)",
        "return self.is_whole",
        "parallel/test_recompute.py",
    ),
    _fault(
        "attention with a large mask runs again",
        "trainer/parallel/recompute.py",
        "if is_layer else None",
        "if True else None",
        "parallel/test_recompute.py",
    ),
    _fault(
        "an offloaded block is freed that is still in use",
        "trainer/parallel/offload_order.py",
        "frees = sorted(self.present - {*wanted, *busy})",
        "frees = sorted(self.present - {block})",
        "parallel/test_offload_order.py",
        "parallel/test_offload.py",
    ),
    _fault(
        "blocks are offloaded for training, not for sampling",
        "trainer/plan/search/decide.py",
        "    if not search.can_draw(fewest):\n        fewest = 0",
        "    fewest = 0",
        "plan/search/test_decide.py",
    ),
    _fault(
        "after memory ran out, what was missing is not reserved",
        "trainer/plan/search/ladder.py",
        "lift = max(0, math.ceil(TIGHT * card.memory - limit))",
        "lift = 0",
        "plan/search/test_ladder.py",
    ),
    _fault(
        "after memory ran out, the result is changed first",
        "trainer/plan/search/ladder.py",
        "for effect in EFFECTS[: EFFECTS.index(most) + 1]:",
        "for effect in EFFECTS[: EFFECTS.index(most) + 1][::-1]:",
        "plan/search/test_ladder.py",
    ),
    _fault(
        "the search lowers the bits of layers that have formats of their own",
        "trainer/plan/search/choices.py",
        "min(8.0, max(_all_bits(own.format, own.formats)))",
        "min(8.0, min(_all_bits(own.format, own.formats)))",
        "plan/search/test_fit.py",
    ),
    _fault(
        "a focus point drops the fields of its row that stand behind it",
        "app/data/focus.py",
        "return text[: former[-1].value] + value + text[former[-1].end :]",
        'return text[: former[-1].value] + value + "}"',
        "app/data/test_focus.py",
    ),
    _fault(
        "a metadata.jsonl that is a link is replaced",
        "app/data/focus.py",
        "if not stat.S_ISREG(file.lstat().st_mode):",
        "if not stat.S_ISREG(file.stat().st_mode):",
        "app/data/test_focus.py",
    ),
    _fault(
        "hashes are compared that differ in one bit of a part, not in two",
        "trainer/data/images/looks.py",
        "for mask in _masks(width, MOST_BITS // BANDS):",
        "for mask in _masks(width, 1):",
        "data/images/test_looks.py",
    ),
    _fault(
        "an image that has changed since it was looked at is not looked at again",
        "trainer/data/images/known_files.py",
        "return known if known is not None and known.stamp == stamp else None",
        "return known",
        "data/images/test_looks.py",
    ),
    _fault(
        "a copy that is held out is one among others",
        "app/data/looks.py",
        "return Group(members, mirrored, 0 < num_held_out < len(members))",
        "return Group(members, mirrored, 0 < num_held_out == len(members))",
        "app/data/test_looks.py",
    ),
    # Masks
    _fault(
        "a mask that another program changed is overwritten",
        "app/data/masks.py",
        "if _digest(former) != before:",
        "if former is None and before:",
        "app/data/test_masks.py",
    ),
    _fault(
        "the mask that an earlier image left behind is not seen by the upload of another one",
        "app/data/masks.py",
        "return {name: present[stem] for name, stem in stems.items() if stem in present}",
        "return {}",
        "app/data/test_masks.py",
    ),
    _fault(
        "a mask is written through a link out of its folder",
        "app/data/data_folders.py",
        "below = _below(part, descriptor, place, _FLAGS)",
        "below = _below(part, descriptor, place, _FLAGS & ~os.O_NOFOLLOW)",
        "app/data/test_masks.py",
    ),
    _fault(
        "a click of the page falls elsewhere in what the model sees",
        "trainer/models/segmentation.py",
        "scale = torch.tensor([side / image.width, side / image.height])",
        "scale = torch.tensor([side / image.height, side / image.width])",
        "models/test_segmentation.py",
    ),
    # Stages, and what to do about a failure
    _fault(
        "another field of a stage that has ended is accepted, saved and without effect",
        "trainer/launcher/preflight.py",
        "    loaded.refuse(list(_too_late(loaded.config, run)))\n",
        "",
        "run/test_stages.py",
    ),
    _fault(
        "a field may be taken out of a stage that has ended",
        "trainer/launcher/preflight.py",
        "sorted(stage.set.keys() | former.set.keys())",
        "sorted(stage.set.keys())",
        "run/test_stages.py",
    ),
    _fault(
        "a resume cannot mend a wrong value in config.yaml",
        "trainer/launcher/preflight.py",
        "    except InputError:  # something else in it is wrong, which this change mends\n",
        "    except FileNotFoundError:\n",
        "run/test_stages.py",
    ),
    _fault(
        "an override of a stage adds to a field with free keys",
        "trainer/config/load.py",
        'stage["set"] = others | _stage_resolved',
        'stage["set"] = own | _stage_resolved',
        "run/test_stages.py",
    ),
    _fault(
        "an override hides that a stage's set is malformed",
        "trainer/config/load.py",
        'own = {} if stage.get("set") is None else stage["set"]',
        'own = stage["set"] if isinstance(stage.get("set"), dict) else {}',
        "run/test_stages.py",
    ),
    _fault(
        "a stage that has ended takes its steps from the config of today",
        "trainer/run/stages.py",
        'return int(files.read(folder / "ended-0"))',
        'int(files.read(folder / "ended-0"))',
        "run/test_stages.py",
        "launcher/test_remedy.py",
    ),
    _fault(
        "a run that lacks a stage's folder ends in a traceback",
        "trainer/run/stages.py",
        "if at >= min(len(folders), len(cfg.stages)):",
        "if at > max(len(folders), len(cfg.stages)):",
        "run/test_stages.py",
        "launcher/test_remedy.py",
    ),
    _fault(
        "the remedy changes all stages",
        "trainer/launcher/remedy.py",
        "settings = stages.of_stage(whole, run.current_stage, rung.settings)",
        "settings = rung.settings",
        "launcher/test_remedy.py",
    ),
    _fault(
        "a damaged config takes a failure's reason away",
        "trainer/run/failure.py",
        "    except (InputError, IndexError):",
        "    except IndexError:",
        "run/test_stages.py",
    ),
    _fault(
        "an amount of hundreds of digits in a message is read",
        "trainer/run/failure.py",
        r'_AMOUNT = rf"(\d{{1,18}}(?:\.\d+)?)',
        r'_AMOUNT = rf"(\d+(?:\.\d+)?)',
        "launcher/test_remedy.py",
    ),
    _fault(
        "a run on the CPU that is out of memory is sent to more GPUs",
        "trainer/plan/search/ladder.py",
        '    if cfg.parallel.device == "cpu":\n        fewer',
        '    if cfg.parallel.device == "host":\n        fewer',
        "plan/search/test_ladder.py",
    ),
    _fault(
        "the report of a failed run does not say what to do",
        "trainer/view/report.py",
        "return [add_remedy(run, errors[-1]) if event is errors[-1] else event for event in messages]",
        "return messages",
        "view/test_report.py",
    ),
    _fault(
        "the report gives the remedy to the error of an earlier start",
        "trainer/view/report.py",
        "errors = [event for event in since_start(events) if isinstance(event, ErrorEvent)]",
        "errors = [event for event in events if isinstance(event, ErrorEvent)]",
        "view/test_report.py",
    ),
    _fault(
        "one checkpoint of another version takes the whole run away",
        "trainer/run/manifest.py",
        "return [path for path in named(folder) if problem(path) is None]",
        "return [path for path in named(folder) if defect(path) is None]",
        "run/test_formats.py",
    ),
    _fault(
        "samples of a step are divided by process instead of by data rank",
        "trainer/train/setup.py",
        "        world.data_size,\n",
        "        world.size,\n",
        "distributed/test_data_ranks.py",
    ),
    # What is remembered, and what a process leaves behind
    _fault(
        "an index is not used since its log is being removed",
        "trainer/system/index.py",
        "status.st_nlink <= 1",
        "status.st_nlink == 1",
        "system/test_index.py",
    ),
    _fault(
        "a stranger's journal is followed",
        "trainer/system/index.py",
        "if parts[-1].exists():",
        "if not parts[-1].parent.exists():",
        "system/test_index.py",
    ),
    _fault(
        "a record of another type than bytes ends a start",
        "trainer/system/index.py",
        "if not is_plain or zlib",
        "if zlib",
        "system/test_index.py",
    ),
    _fault(
        "digests that are known are written again at every start",
        "trainer/data/images/known_files.py",
        "if known.stamp == stamp and self._digests.known(path, stamp) is None:",
        "if known.stamp == stamp:",
        "data/images/test_known_files.py",
    ),
    _fault(
        "the question whether a disk is full leaves a file where a process is killed",
        "trainer/system/files.py",
        "tempfile.TemporaryFile(dir=folder)",
        "tempfile.NamedTemporaryFile(dir=folder)",
        "system/test_files.py",
    ),
    _fault(
        "a package is hidden that a library has already found",
        "trainer/system/imports.py",
        "if name not in sys.modules] if _come_first() else []",
        "if name not in sys.modules]",
        "system/test_imports.py",
    ),
    _fault(
        "a rank that has finished is finalized, and aborts",
        "trainer/system/process_exit.py",
        "    os._exit(code)\n",
        "    sys.exit(code)\n",
        "system/test_process_exit.py",
    ),
    # Trackers
    _fault(
        "the end of a run waits for a tracker that hangs",
        "trainer/metrics/trackers/follow.py",
        "            atexit.register(os._exit, code)\n",
        "            atexit.register(time.sleep, 600)\n",
        "metrics/test_trackers.py",
    ),
    _fault(
        "a tracker that raises stops without a word",
        "trainer/metrics/trackers/follow.py",
        '            self.report(f"{type(error).__name__}: {short(str(error))}")\n',
        "",
        "metrics/test_trackers.py",
    ),
    _fault(
        "a tracker is told that a failed run has finished",
        "trainer/metrics/trackers/follow.py",
        "sender.has_failed = code != 0",
        "sender.has_failed = False",
        "metrics/test_trackers.py",
    ),
    _fault(
        "the page may evaluate text as a script",
        "app/web/security.py",
        "script-src 'self' {scripts};",
        "script-src 'self' 'unsafe-eval' {scripts};",
        "app/web/test_security.py",
    ),
)
