"""Tiny base models with the special tokens and chat templates of published chat models."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

END_OF_TEXT = "<|endoftext|>"
MARKS = (
    *("<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|end|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"),
)
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
GLM = """\
{%- for message in messages -%}
{%- if message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}
{%- else %}{{ '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}"""
HARMONY = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{{ '<|start|>assistant to=' + message.tool_calls[0].function.name + '<|channel|>commentary<|message|>{}<|call|>' }}
{%- elif message.role == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else -%}
{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}"""
PHI = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif -%}"""
THINKS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{{ (message.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
OWN = {"chatml of its own": CHATML, "glm": GLM, "harmony": HARMONY, "phi": PHI, "thinks": THINKS}


def tokenizer(template: str | None = None, marks: tuple[str, ...] = MARKS) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, the end of a text and marks. Its end of text is that of a base model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token=END_OF_TEXT)
    made.add_tokens(list(marks), special_tokens=True)
    made.chat_template = template
    return made


def write_base(folder: Path, template: str | None = None) -> Path:
    """Write a base model, whose files say that a text ends with END_OF_TEXT."""
    made = tokenizer(template)
    config = Qwen3Config(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=made.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = made.eos_token_id
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
