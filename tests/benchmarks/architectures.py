"""Every causal language model of transformers, tiny: `python -m tests.benchmarks.architectures`.

Each is made by `tiny_config`, saved by transformers itself, and trained for two steps by plain transformers, then by
this program on two ranks: fully, with a LoRA, and with a LoRA on a base in nf4. The loss of the first step is compared
with the one of plain transformers on the same rows, each document alone. Results are kept in a file as they come, and
a call takes up where the one before ended; names as arguments are measured again. Writes ARCHITECTURES.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.benchmarks.architectures_config import CHANGES
from tests.distributed import run_ranks
from tests.runs import make_run, steps_of, text_config
from trainer.distributed.world import World
from trainer.models.parts.language.language_configs import causal_class
from trainer.models.parts.language.random_language_models import write_byte_tokenizer
from trainer.models.parts.language.tiny_configs import tiny_config
from trainer.train.loop import Trainer

REPORT = Path(__file__).with_name("ARCHITECTURES.md")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "full": {"adapter__type": "none"},
    "lora": {"sample__every": 2, "sample__prompts": ["1 s", "2"], "sample__tokens": 4, "sample__temperature": 0.0},
    "nf4": {"quantize__format": "nf4"},
}
TOLERANCE = 1e-5
"""Most difference of the first loss from transformers' own, for `equal`."""
MOST_REASON = 230
SHARPER = 3.0
"""Factor of the weights that transformers draws."""


def model_types() -> list[str]:
    """Names of the causal language models that transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(model_type: str) -> Any:
    """The config of a tiny model of this type, with transformers' own switches."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    changes = dict(CHANGES.get(model_type, {}))
    if "is_decoder" in config.to_dict():  # else each token sees those after it
        changes["is_decoder"] = True
    if "text_config" in config.sub_configs and model_type not in CHANGES:
        of_text = CHANGES.get(config.text_config.model_type, {})
        changes["text_config"] = tiny_config(config.text_config, **of_text).to_dict()
    return tiny_config(config, **changes)


def write_model(model_type: str, folder: Path) -> Any:
    """Save a tiny model with a tokenizer of bytes. Returns the model."""
    from transformers import AutoModelForCausalLM

    config = config_of(model_type)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so that a token that should not be seen is not lost in rounding
                parameter.mul_(SHARPER)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, SimpleNamespace(max_position_embeddings=256))
    return model


def plain_steps(model: Any) -> None:
    """Train two steps with nothing but transformers and torch. Raises what they raise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        tokens = torch.randint(5, 250, (2, 48))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_loss(folder: Path, rows: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """The loss of these rows by transformers, each document alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model = causal_class(config).from_pretrained(folder, config=config).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            for number in range(int(row["documents"].max()) + 1):
                inside = row["documents"] == number
                tokens, in_loss = row["tokens"][inside][None], row["loss_mask"][inside][1:]
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                losses = torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:], reduction="none")
                total, count = total + float(losses[in_loss].sum()), count + int(in_loss.sum())
    return total / count


def trained(world: World, folder: str, text: str, changes: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Two steps of this program on this rank: {losses, rows} or {error}."""
    _quiet()
    try:
        cfg = text_config(
            Path(text),
            model__path=folder,
            train__steps=2,
            parallel__devices=world.size,
            parallel__strategy="full",
            **changes,
        )
        at = Path(root) / f"run-{len(str(changes))}"
        run = make_run(Path(root), cfg, at.name) if world.rank == 0 else None
        world.gather(0)
        run = run or _opened(at)
        events: list[Any] = []
        trainer = Trainer(cfg, run, world, Path(root) / "cache", events.append)
        try:
            parts = trainer.loader.micro_batches(0)
            rows = [
                example for part in parts for example, weight in zip(part.examples, part.weights, strict=True) if weight
            ]
            trainer.train()
        finally:
            trainer.close()
        return {"losses": [event.loss for event in steps_of(events)], "rows": rows}
    except Exception as error:  # noqa: BLE001 - it is the result
        return {
            "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "known": type(error).__name__ == "InputError",
        }


def _opened(folder: Path) -> Any:
    from trainer.run.folder import RunDir

    return RunDir(folder)


def _quiet() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def measure(model_type: str, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Any]:
    """Measure one type of model."""
    _quiet()
    root = Path(tempfile.mkdtemp(prefix="architectures-"))
    found: dict[str, Any] = {"type": model_type}
    try:
        try:
            plain_steps(write_model(model_type, root / "model"))
        except Exception as error:  # noqa: BLE001 - it is the result
            return {**found, "plain": f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_REASON]}
        text = root / "text"
        text.mkdir()
        (text / "short.jsonl").write_text("".join(f'{{"text": "{i} says {i * i}."}}\n' for i in range(80)), "utf-8")
        for kind in kinds:
            found[kind] = _of_kind(root, text, kind)
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _of_kind(root: Path, text: Path, kind: str) -> dict[str, Any]:
    try:
        ranks = run_ranks(2, trained, str(root / "model"), str(text), KINDS[kind], str(root))
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())[-MOST_REASON:]}
    failed = next((rank for rank in ranks if "error" in rank), None)
    if failed:
        return {"error": failed["error"].replace(str(root), "")[: MOST_REASON * 2], "refused": failed["known"]}
    losses = ranks[0]["losses"]
    rows = [row for rank in ranks for row in rank["rows"]]
    try:
        expected = plain_loss(root / "model", rows)
    except Exception as error:  # noqa: BLE001 - it is the result
        return {"losses": losses, "plain": f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_REASON]}
    return {"losses": losses, "difference": abs(losses[0] - expected), "rows": len(rows)}


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the table."""
    import transformers

    plain = [found for found in results.values() if "plain" not in found]
    counts = {kind: sum("losses" in found.get(kind, {}) for found in plain) for kind in KINDS}
    equal = sum(found["full"].get("difference", 1) <= TOLERANCE for found in plain if "full" in found)
    lines = [
        "# Causal language models of transformers that can be trained",
        "",
        f"`python -m tests.benchmarks.architectures` with transformers {transformers.__version__}, torch "
        f"{torch.__version__.partition('+')[0]}; tiny models with random weights, saved by transformers, two ranks on "
        "CPUs, fp32. What was measured says nothing about memory or speed at full size. A call measures only what is "
        "missing, so results may be of several commits; remove the file of --results to measure all again.",
        "",
        f"Of {len(results)} types, transformers itself trains the tiny model of {len(plain)} "
        f"from token ids alone. Of these, this program trains {counts['full']} fully, {counts['lora']} with a LoRA and "
        f"{counts['nf4']} with a LoRA on a base in nf4. The loss of the first step is that of plain transformers, each "
        f"document alone, within {TOLERANCE:g} in {equal}.",
        "",
        "| type | full | LoRA | LoRA on nf4 | first loss against transformers' own |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if "plain" in found:
            continue
        cells = ["yes" if "losses" in found.get(kind, {}) else "no" for kind in KINDS]
        difference = found.get("full", {}).get("difference")
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if difference is None else f'{difference:.0e}'} |")
    lines += ["", "## Not trained, and why", ""]
    for name, found in results.items():
        for kind in KINDS:
            if "error" in found.get(kind, {}):
                lines.append(f"- {name}, {kind}: {found[kind]['error'][:MOST_REASON]}")
    lines += ["", "## Not trained by transformers from token ids alone", ""]
    lines += [f"- {name}: {found['plain'][:MOST_REASON]}" for name, found in results.items() if "plain" in found]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Measure what is missing, or the named types, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "architectures.json")
    given = parser.parse_args(arguments)
    results = json.loads(given.results.read_text()) if given.results.is_file() else {}
    for name in given.types or [name for name in model_types() if name not in results]:
        results[name] = measure(name)
        given.results.write_text(json.dumps(dict(sorted(results.items())), indent=1))
        print(json.dumps(results[name]), flush=True)
    REPORT.write_text(report(dict(sorted(results.items()))), "utf-8")
    print(Counter("plain" not in found for found in results.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
