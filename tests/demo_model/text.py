"""The demo model's text encoder, a small Qwen3 with random weights, and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.models.parts.image.text_encoder import train_tokenizer

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


def tokenizer_of(captions: Sequence[str]) -> Any:
    """A byte-level tokenizer whose vocabulary is made of the captions' words."""
    return train_tokenizer([f" {caption}" for caption in captions], VOCABULARY, MAX_TOKENS, SPECIAL, CHAT_TEMPLATE)


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
