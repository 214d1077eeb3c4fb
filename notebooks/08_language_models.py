# %% [markdown]
# # 8. Language models: QLoRA
#
# The same trainer, without images: a causal language model predicts the next token of a text. *QLoRA* is a LoRA on a
# base that is stored in 4 bits, which is how a model of 8 billion parameters is trained on one card of 24 GB.
#
# Here it is done on a small scale. A model of bytes is first trained on this project's documents from random weights,
# as a base. Then that base is stored in 4 bits, and a LoRA teaches it to answer.

# %% tags=["parameters"]
import json
import math
from pathlib import Path

from app import notebook

RUNS = notebook.RUNS
STEPS = 160  # of the base
TUNE_STEPS = 40  # of the LoRA
TALK_STEPS = 60  # of the conversations
PAIR_STEPS = 12  # on preferences
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## Text
#
# `data.path` is a folder or file of text: a `.txt` is one document, a `.jsonl` or `.parquet` has one per row, and a
# `.npy` holds token ids. A row has `text`, all of which is in the loss; `prompt` and `completion`, with only the
# completion in the loss; or `messages`, a conversation with only the assistant's words in the loss.

# %%
rooms = Path(notebook.__file__).parents[2] / "trainer"
text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(rooms.rglob("*.md")))
cut = len(text) * 9 // 10
for name, part in {"readmes/train.txt": text[:cut], "held-out.txt": text[cut:]}.items():
    (RUNS / name).parent.mkdir(parents=True, exist_ok=True)
    (RUNS / name).write_text(part, encoding="utf-8")
things = ("rat", "tiger", "rabbit", "cat", "dog", "owl", "ship", "train", "car", "bicycle", "apple", "banana")
lines = [{"prompt": f"Draw a {thing}. ", "completion": "In two inks, on yellow paper."} for thing in things]
tasks = RUNS / "tasks.jsonl"
tasks.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
print(f"{cut:,} characters to read, {len(text) - cut:,} held out, and lines like {lines[0]}")

# %% [markdown]
# ## One row, many documents
#
# A pass takes rows of `data.length` tokens. Padding each short document to that length would waste most of it, so
# documents are *packed*: one after the other, as many as fit. They must not see each other, or the end of one would be
# predicted from another. Attention stays inside a document, and positions restart in each.
#
# A check: the loss of one packed row, of each of its documents alone, and of the row as if it were one document.

# %%
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trainer.data.text.text_files import TextFolder
from trainer.data.text.text_source import encoder_of, example_of
from trainer.data.text.text_stream import TextStream
from trainer.models import families
from trainer.models.parts.language.chunked_loss import sum_losses_in_chunks
from trainer.models.parts.language.document_attention import attend_within
from trainer.rng import SampleRng

logging.disable_progress_bar()
preset = RUNS / "base.yaml"
preset.write_text(f"""
name: base
model: {{family: causal_lm, path: tiny}}
adapter: {{type: none}}
data: {{path: {RUNS / "readmes"}, validation: {RUNS / "held-out.txt"}, validation_every: 40, length: 256}}
optim: {{lr: 4.0e-3, beta2: 0.95}}
train: {{steps: {STEPS}, batch_size: 8, micro_batch: 4, precision: fp32}}
parallel: {{devices: 2, device: {DEVICE}, strategy: full}}
sample: {{every: {STEPS}, prompts: ["The "], tokens: 60, temperature: 0.5}}
export: {{dtype: fp32}}
""")

# %% [markdown]
# A row holds three kinds of numbers: the tokens, the loss mask (no prompt, no first byte), and which
# document each belongs to.

# %%
config = notebook.config(preset)
family = families.make(config.config, RUNS / "cache")
stream = TextStream([TextFolder((tasks,))], encoder_of(family), seed=0, length=256, packing="whole")
row = example_of(next(stream.rows())[0])
network = AutoModelForCausalLM.from_pretrained(family.folder)
attend_within(network)  # as in training: tokens see those of their own document only
sum_losses_in_chunks(network)  # as well: the logits of all tokens are never in memory at once
model = torch.nn.ModuleDict({"language_model": network})


@torch.no_grad()
def loss(row: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {**family.collate([row]), "weight": torch.ones(1)}
    return family.loss(model, batch, SampleRng(0, [0])).total


documents = row["documents"]
alone = [loss({key: part[documents == n] for key, part in row.items()}) for n in range(int(documents.max()) + 1)]
packed, as_one = loss(row), loss({**row, "documents": torch.zeros_like(documents)})
print(f"{len(alone)} documents in one row, {int(row['loss_mask'].sum())} of {len(documents)} tokens are in the loss")
print(f"packed {packed:.4f}, each alone {sum(alone):.4f}, as one document {as_one:.4f}")
assert abs(packed - sum(alone)) < 1e-6 * packed, "a document saw another"
assert abs(as_one - packed) > 1e-4 * packed, "what is before a document makes no difference"

# %% [markdown]
# ## A base
#
# Every token in the loss has the same weight on all ranks, whatever row it is in. The loss is the mean per token. For
# held-out text the *perplexity* is logged too: between how many equally likely tokens the model hesitates.

# %%
base = notebook.start(config, RUNS)
notebook.dashboard(base)

# %% [markdown]
# Wait for the end. After so few steps it writes letters and spaces like a text, but without sense:

# %%
print("The run has", await notebook.ended(base))
*_, [(_, written)] = notebook.texts(base).values()
print(" ".join(written.split()))

# %% [markdown]
# ### Exercise 1
#
# The tokens of this model are the 256 bytes and an end of text. What would be the perplexity of a model that knows
# nothing, and considers all of them equally likely?

# %%
from trainer.run.events import EventReader, ValidationEvent

held_out = [event for event in EventReader(base.events_file).read() if isinstance(event, ValidationEvent)]
for event in held_out:
    print(f"step {event.step}: validation loss {event.loss:.3f}, perplexity {event.perplexity:.1f}")
assert held_out[-1].perplexity < family.vocabulary / 4, "the base learned nothing"
answer_1 = ...
notebook.exercise(answer_1, right=family.vocabulary, hint="It hesitates between all of them.")

# %% [markdown]
# ## The base in four bits
#
# The export of that run is a folder in the format of transformers, and now the `model.path` of the next run. With
# `quantize.format: nf4` the linear layers of its blocks are stored as 4 bits per number and a scale per 64 of them.

# %%
qlora = RUNS / "qlora.yaml"
qlora.write_text(f"""
name: qlora
model: {{family: causal_lm, path: {notebook.exported(base)}}}
adapter: {{type: lora, rank: 8}}
quantize: {{format: nf4}}
data: {{path: {tasks}, length: 256}}
optim: {{lr: 1.0e-2}}
train: {{steps: {TUNE_STEPS}, batch_size: 4, micro_batch: 2, precision: bf16, checkpointing: full}}
parallel: {{devices: 2, device: {DEVICE}, strategy: full}}
sample: {{every: {TUNE_STEPS}, prompts: ["Draw a fox. ", "Draw a tiger. "], tokens: 40, temperature: 0}}
export: {{dtype: fp32}}
""")
tuning = notebook.config(qlora)

# %% [markdown]
# The memory of that, counted from the model as it is built:

# %%
from trainer.models.build import build_model


def held(*changes: str) -> list[str]:
    """Number of trained parameters, and kB of the frozen ones in the blocks."""
    cfg = notebook.config(qlora, *changes).config
    built = build_model(cfg, families.make(cfg, RUNS / "cache"))
    blocks = [p for name, p in built.module.named_parameters() if ".layers." in name and not p.requires_grad]
    assert all(".lora_" in name for name in built.trainables), "more than the LoRA is trained"
    trained = sum(p.numel() for p in built.trainables.values())
    return [f"{trained:,}", f"{sum(p.numel() * p.element_size() for p in blocks) / 1e3:.0f}"]


notebook.Table(
    ["base", "numbers trained", "kB of the frozen blocks"],
    [["bf16", *held("quantize.format=none")], ["int8", *held("quantize.format=int8")], ["nf4", *held()]],
)

# %% [markdown]
# ### Exercise 2
#
# How many GB do 8 billion numbers take in nf4, with a scale of 2 bytes for each 64 of them?

# %%
answer_2 = ...
notebook.exercise(answer_2, right=8 * (0.5 + 2 / 64), hint="Half a byte for each, and 2 bytes for every 64.")

# %% [markdown]
# ## QLoRA
#
# The quantized bytes are sharded like any weights: each rank holds half of them, and a block's bytes are gathered when
# it computes. Only the LoRA has gradients.

# %%
run = notebook.start(tuning, RUNS)
notebook.dashboard(run)

# %% [markdown]
# Before and after; a fox was not among the tasks:

# %%
from trainer.run.events import latest_steps

print("The run has", await notebook.ended(run))
losses = [step.loss for step in latest_steps(EventReader(run.events_file).read())]
print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 2, "the LoRA learned little"
for moment, written in notebook.texts(run).items():
    for _, text in written:
        print(f"{moment}: {' '.join(text.split())}")

# %% [markdown]
# ## Conversations
#
# A *chat template* writes a conversation as one text, with marks around each message. The model brings its own; without
# one, `data.chat_template` names a template of this project (`chatml`, `gemma`, `llama-3`, `mistral`) or a .jinja file.
# Only the words of the assistant are in the loss, in every turn, with the mark that ends the turn: from it the model
# learns to stop.

# %%
from itertools import compress

talks = RUNS / "talks.jsonl"
answer = "In two inks, on yellow paper."
turns = [
    [{"role": "user", "content": f"Draw a {thing}."}, {"role": "assistant", "content": answer}] for thing in things
]
talks.write_text("".join(f"{json.dumps({'messages': one})}\n" for one in turns), encoding="utf-8")
tokens, loss_mask = family.encode_chat(turns[0])
print(family.tokenizer.decode(tokens))
print("in the loss:", family.tokenizer.decode(list(compress(tokens, loss_mask))))
assert sum(loss_mask) == len(answer) + len("<|im_end|>"), "more than the assistant's words is in the loss"

# %% [markdown]
# Documents of this kind are never cut at the end of a row: `data.packing` is `whole` for prompts and conversations. In
# the samples each prompt is a user's message, and the model answers through the template.

# %%
chat = RUNS / "chat.yaml"
chat.write_text(f"""
name: chat
model: {{family: causal_lm, path: {notebook.exported(base)}}}
adapter: {{type: none}}
data: {{path: {talks}, length: 256}}
optim: {{lr: 4.0e-3, beta2: 0.95}}
train: {{steps: {TALK_STEPS}, batch_size: 4, micro_batch: 4, precision: fp32}}
parallel: {{device: {DEVICE}}}
sample: {{every: {TALK_STEPS}, prompts: ["Draw a fox."], tokens: 60, temperature: 0}}
""")
talking = notebook.start(notebook.config(chat), RUNS)
print("The run has", await notebook.ended(talking))
*_, [(_, written)] = notebook.texts(talking).values()
print(written)
assert written == f"Draw a fox.\n\n{answer}", "the model did not learn to answer and to stop"

# %% [markdown]
# ## In other programs
#
# The LoRA is exported as a peft folder. It was trained on a rounded base, and is added to the original one: by peft,
# and in the merged model that transformers loads.

# %%
import warnings

from peft import AutoPeftModelForCausalLM

warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # of transformers, to peft
adapter = notebook.exported(run)
merged = await notebook.export(run, "merged", dtype="fp32")
tokens = torch.tensor([family.tokenize("Draw a fox. In two inks")])
with torch.no_grad():
    with_peft = AutoPeftModelForCausalLM.from_pretrained(adapter)
    ours, theirs = (one.eval()(tokens).logits for one in (AutoModelForCausalLM.from_pretrained(merged), with_peft))
print(f"logits differ by at most {(ours - theirs).abs().max():.1e}, the largest is {ours.abs().max():.1f}")
assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)

# %% [markdown]
# ## Preferences
#
# Of two answers, one is often better, even where neither is the only right one. *DPO* trains on such pairs: the loss is
# `-log sigmoid(beta * gain)`, where the gain is how much more likely the chosen answer became, relative to the rejected
# one, than it is to the *reference*. The reference is the same model with its adapter switched off.
#
# The merged model says two inks; here pairs tell it that three are preferred.

# %%
pairs = [
    {"prompt": f"Draw a {thing}. ", "chosen": "In three inks, on white.", "rejected": "In two inks, on yellow paper."}
    for thing in things
]
(RUNS / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
preferring = RUNS / "preferences.yaml"
preferring.write_text(f"""
name: preferences
model: {{family: causal_lm, path: {merged}}}
adapter: {{type: lora, rank: 8}}
objective: {{dpo_beta: 0.1}}
data: {{path: {RUNS / "pairs.jsonl"}, length: 256}}
optim: {{lr: 5.0e-3}}
train: {{steps: {PAIR_STEPS}, batch_size: 4, micro_batch: 2, precision: fp32}}
parallel: {{devices: 2, device: {DEVICE}, strategy: full}}
export: {{what: none}}
""")
preferred = notebook.start(notebook.config(preferring), RUNS)

# %% [markdown]
# The first step has a gain of 0, as the adapter still does nothing. `accuracies` is the share of pairs whose chosen
# answer gained more:

# %%
print("The run has", await notebook.ended(preferred))
compared = latest_steps(EventReader(preferred.events_file).read())
for step in (compared[0], compared[-1]):
    print(f"step {step.step}: loss {step.loss:.3f}, " + ", ".join(f"{n} {v:.2f}" for n, v in step.metrics.items()))
assert abs(compared[0].loss - math.log(2)) < 1e-6, "the adapter did something before it was trained"
assert compared[-1].metrics["accuracies"] == 1, "the chosen answers do not win"

# %% [markdown]
# ### Exercise 3
#
# What is the loss of a pair whose chosen answer became 10 nats likelier, and whose rejected one 10 nats less likely?

# %%
answer_3 = ...
notebook.exercise(answer_3, right=-math.log(1 / (1 + math.exp(-0.1 * 20))), hint="The gain is 20, and beta 0.1.")

# %% [markdown]
# ## The real thing
#
# The plan of Qwen3-8B on one card of 24 GB (not measured on a GPU). In a terminal:
# `shardstudio --plan qwen3-8b-qlora-1x24gb --gpus 1x24gb`.

# %%
notebook.plan(notebook.config("qwen3-8b-qlora-1x24gb"), "1x24gb")

# %% [markdown]
# ## Where to go next
#
# - Put your text into `data.path` of that preset, and some that is not trained on into `data.validation`. Where the
#   validation loss rises while the loss falls, train shorter.
# - `quantize.format: int8` takes about twice the bytes and rounds less: see `trainer/weights/README.md`.
# - To pretrain and tune in one run, see *Stages* in `trainer/run/README.md`.
# - `05_checkpoints`: stop, continue on another number of ranks, export.
