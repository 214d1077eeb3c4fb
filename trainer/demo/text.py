"""The demo model's text encoder, a small Qwen3 with random weights, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 4096
MAX_TOKENS = 12
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{{ ' ' + messages[0].content }}<|im_end|>"
"""The caption alone: what a published model's template says around it is the same for every caption. With the space
a word has the same token at the start as elsewhere."""
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path, captions: Sequence[str]) -> Any:
    """A byte-level tokenizer whose vocabulary is made of the captions' words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([f" {caption}" for caption in captions], trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2TokenizerFast(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=list(SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def random_text_encoder(tokenizer: Any, seed: int) -> Any:
    """A Qwen3ForCausalLM whose hidden states are a random vector per token, and a little of the tokens before it.

    One that had learned to continue the captions gave states too much alike: after as many steps the transformer knew
    a twentieth of the pictures by name, with these half of them.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1 if "embed_tokens" in name else 0.02)
    return model.eval()
