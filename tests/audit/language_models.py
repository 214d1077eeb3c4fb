"""The loss of documents packed into rows, against transformers with each document alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.audit.check import Check
from tests.audit.run import Model, started
from tests.runs import step_numbers

LOSS_LIMIT = 1e-6
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    # Ten times the usual: what a token attends to changes the loss.
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"model_type": "qwen3"},
    "llama, tied, llama3 rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "mistral, window 16": {"model_type": "mistral", "sliding_window": 16},
    "gemma3, window 16": {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, **LAYERS},
    "phi": {"model_type": "phi"},
    "gpt2, with its dropout of 0.1": {"model_type": "gpt2"},
    "starcoder2, dropout 0.1": {
        "model_type": "starcoder2",
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
    },
    "qwen3, dropout 0.1": {"model_type": "qwen3", "attention_dropout": 0.1},
}


@dataclass(frozen=True)
class Document:
    """tokens: ids, with the end of the text.  loss_mask: which of them a model is to predict."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    def masks(self, piece: tuple[int, ...]) -> set[tuple[bool, ...]]:
        """The loss masks that a piece may have wherever it stands in the document; nothing predicts its first token."""
        size = len(piece)
        starts = (at for at in range(len(self.tokens) - size + 1) if self.tokens[at : at + size] == piece)
        return {(False, *self.loss_mask[at + 1 : at + size]) for at in starts}


def apart(network: str, folder: Path) -> float:
    """Relative difference of the first loss, the mean over the learned tokens of a batch of rows."""
    model = Model(network, "causal_lm")
    path = model.write(folder / "cache")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **NETWORKS[network]}))
    made.save_pretrained(path)
    documents = write_documents(folder / "text" / "a.jsonl", AutoTokenizer.from_pretrained(path))
    sections = {
        "adapter": {"type": "none"},
        "data": {"path": str(folder / "text"), "length": 96, "shuffle_window": 16},
        "train": {"batch_size": 4, "micro_batch": 2, "steps": 1},
    }
    with started(model, path, folder, sections) as trainer:
        rows = [example for step in trainer.loader.micro_batches(0) for example in step.examples]
        ours = step_numbers(trainer).loss
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    pieces = [piece for row in rows for piece in pieces_of(row["tokens"], row["documents"])]
    assert len(pieces) > len(rows), "rows of one document each show no packing"
    losses = torch.cat([losses_of(reference, piece, documents) for piece in pieces])
    return abs(ours / float(losses.mean()) - 1)


def write_documents(file: Path, tokenizer: Any) -> list[Document]:
    """Texts of 10 to 60 tokens, and prompts with a completion, whose prompt is not learned."""
    file.parent.mkdir()
    lines, documents = [], []
    for number in range(40):
        text, prompt, completion = (
            f"{number} squared is {number**2}. " * (1 + number % 3),
            f"Double {number}: ",
            "x" * 9,
        )
        has_prompt = number % 3 == 0
        lines.append({"prompt": prompt, "completion": completion} if has_prompt else {"text": text})
        parts = [(prompt, False), (completion, True)] if has_prompt else [(text, True)]
        ids = [(token, in_loss) for part, in_loss in parts for token in tokenizer(part)["input_ids"]]
        tokens, loss_mask = zip(*ids, (tokenizer.eos_token_id, True), strict=True)
        documents.append(Document(tokens, loss_mask))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return documents


def pieces_of(tokens: Tensor, documents: Tensor) -> list[tuple[int, ...]]:
    """The pieces of a row; its padding, marked -1, is none."""
    numbers = range(int(documents.max()) + 1)
    return [tuple(tokens[documents == number].tolist()) for number in numbers]


@torch.no_grad()
def losses_of(model: nn.Module, piece: tuple[int, ...], documents: Sequence[Document]) -> Tensor:
    """The cross-entropy of each learned token of a piece, in fp64, given those before it in the piece."""
    (mask,) = set().union(*(document.masks(piece) for document in documents))
    logits = model(input_ids=torch.tensor([piece])).logits[0, :-1].double()
    losses = nn.functional.cross_entropy(logits, torch.tensor(piece[1:]), reduction="none")
    return losses[torch.tensor(mask[1:])]


CHECKS = tuple(
    Check(f"causal_lm {network}", "loss of packed documents", LOSS_LIMIT, partial(apart, network), is_quick=True)
    for network in NETWORKS
)
