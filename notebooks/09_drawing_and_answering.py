# %% [markdown]
# # 9. Drawing and answering
#
# BAGEL is one network that does two things: it draws an image from a caption, and it answers questions about an
# image. Other programs that train it on several GPUs stop at its first backward pass. Here a tiny one with random
# weights learns both at once, on two ranks, from the images that come with ShardStudio.

# %% tags=["parameters"]
import json
import shutil
from pathlib import Path

from app import notebook

RUNS = notebook.RUNS
STEPS = 200
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## Two kinds of data
#
# To draw, the network needs images with captions, like every image model here. To answer, it needs a `.jsonl` file
# with an image, a question and an answer in each line. Both are made from the 32 shipped pictograms:

# %%
shipped = sorted(Path(notebook.config("quickstart").config.data.path).glob("*.png"))
folder = RUNS / "to-draw"
folder.mkdir(parents=True, exist_ok=True)
rows = []
for image in shipped:
    thing = image.with_suffix(".txt").read_text().replace("[trigger]", "").strip()
    shutil.copy(image, folder)
    (folder / image.name).with_suffix(".txt").write_text(f"a {thing}, two inks on yellow paper")
    rows.append({"image": f"to-draw/{image.name}", "question": "What is it?", "answer": f"A {thing}."})
    rows.append({"image": f"to-draw/{image.name}", "question": "On what paper?", "answer": "On yellow paper."})
questions = RUNS / "questions.jsonl"
questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
notebook.Table(["image", "question", "answer"], [list(row.values()) for row in rows[:4]])

# %% [markdown]
# And the config. `understanding`, `generation`, `vision` and `connectors` are the parts of the network, each of which
# can be trained fully, by an adapter, or not at all. Here the image encoder, `vision`, is frozen.

# %%
preset = RUNS / "both.yaml"
preset.write_text(f"""
name: both
model:
  family: bagel
  train: {{understanding: full, generation: full, connectors: full, vision: frozen}}
adapter: {{type: none}}
data: {{path: {folder}, questions: {questions}, question_share: 0.5, resolution: 64, validation: 4}}
objective: {{text_weight: 0.25}}
optim: {{lr: 3.0e-3, ema: 0.95}}
train: {{steps: {STEPS}, batch_size: 16, micro_batch: 8, precision: fp32, checkpointing: full}}
parallel: {{devices: 2, device: {DEVICE}, strategy: full}}
sample:
  every: {STEPS}
  prompts: [a rat]
  size: [64, 64]
  steps: 8
  questions: ["What is it?", "What is it?", "On what paper?"]
  images: {[str(folder / image.name) for image in shipped[:3]]}
  tokens: 12
  temperature: 0
export: {{dtype: fp32}}
""")
config = notebook.config(preset)

# %% [markdown]
# ## One sequence
#
# A batch holds images to draw and questions. For the matrix products all of them are *one* sequence of tokens: the
# words of texts, then the patches of input images, then those of noisy latents that are drawn. Each kind has its own
# weights in every layer (words and input patches those of `understanding`, drawn patches those of `generation`). In
# attention they meet, with each question and each image in its own row. A mask determines which token sees which:
#
# - text sees what came before it, as in a language model;
# - an input image sees all of itself, and is seen by the question and the answer after it;
# - an image that is drawn sees its caption and all of itself, and nothing sees it: it is noise.
#
# Below are the masks of a question about an image of four patches, and of a caption with four patches to draw. A line
# is a token, dark where it sees another.

# %%
import torch
from PIL import Image

from trainer.models import families
from trainer.models.parts.bagel_packing import DrawnPiece, SeenPiece, TextPiece, pack

family = families.make(config.config, RUNS / "cache")
sizes = family.sizes
patch = sizes.vision.patch_size
words = torch.arange(3)
asked = [SeenPiece(torch.zeros(3, 2 * patch, 2 * patch)), TextPiece(words), TextPiece(words[:2], learned=True)]
drawn = [TextPiece(words), DrawnPiece(torch.zeros(sizes.latent_numbers // 4, 4, 4), torch.tensor(0.5))]
masks = {}
for name, pieces in {"a question": asked, "an image to draw": drawn}.items():
    (mask,) = pack([pieces], family.marks, sizes).arguments["mask"]
    masks[f"{name}, {len(mask)} tokens"] = file = RUNS / f"{name}.png"
    Image.fromarray((255 - 200 * mask.byte()).numpy()).resize([10 * side for side in mask.shape], 0).save(file)
print(", ".join(masks))
notebook.gallery({"": masks}, size=150)

# %% [markdown]
# ### Exercise 1
#
# An input image of 64 x 64 pixels becomes square patches, with a mark before and after it. How many tokens is that
# in this network?

# %%
print(f"a patch has {patch} x {patch} pixels")
answer_1 = ...
notebook.exercise(answer_1, right=(64 // patch) ** 2 + 2, hint="Patches per side, squared, and two marks.")

# %% [markdown]
# ## Parameters of each part

# %%
from trainer.models.build import build_model


def trained(part: str) -> int:
    one = notebook.config(preset, f"model.train={{{part}: full}}").config
    return sum(p.numel() for p in build_model(one, family).trainables.values())


parts = {part: trained(part) for part in family.parts}
notebook.Table(["part", "numbers"], [[part, f"{count:,}"] for part, count in parts.items()])

# %% [markdown]
# ## Train
#
# The loss of an image is the mean squared error of its velocity, that of a question the mean cross-entropy of the
# answer's tokens. The gradient is that of their weighted sum; the chart also shows each of them. A rank whose pass has
# no question still runs every layer of the network, because the other rank waits for its shard.

# %%
run = notebook.start(config, RUNS)
notebook.dashboard(run)

# %% [markdown]
# Wait for the end:

# %%
print("The run has", await notebook.ended(run))

# %% [markdown]
# Both losses fell:

# %%
from trainer.run.events import EventReader, latest_steps, losses_by_name

steps = latest_steps(EventReader(run.events_file).read())
losses = losses_by_name(steps)
for name, values in losses.items():
    first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
    print(f"{name}: {first:.3f} in the first five steps, {last:.3f} in the last five")
    assert last < first

# %% [markdown]
# ### Exercise 2
#
# Of each batch half are questions. What was the loss of the last step, from its two losses and `objective.text_weight`?

# %%
last = steps[-1]
print(f"images {last.losses['images']:.4f}, text {last.losses['text']:.4f}, text_weight 0.25")
answer_2 = ...
notebook.exercise(
    answer_2,
    right=(last.losses["images"] + 0.25 * last.losses["text"]) / 2,
    hint="The mean over all samples, of which half are images, with the weight of answers.",
)

# %% [markdown]
# ## Its answers
#
# Three questions, before and after. (Its *images* show nothing: the autoencoder of the tiny model is random too. That
# it learns to draw shows in the velocity's error.)

# %%
notebook.gallery({"": {image.stem: folder / image.name for image in shipped[:3]}}, size=64)

# %% [markdown]
# It was asked before the first step and after the last:

# %%
answers = {moment: [text for _, text in written] for moment, written in notebook.texts(run).items()}
first, last = answers.values()
asked = zip(config.config.sample.questions, config.config.sample.images, first, last, strict=True)
notebook.Table(
    ["image", "question", *answers],
    [[Path(image).stem, question, *(" ".join(text.split()) for text in texts)] for question, image, *texts in asked],
)

# %% [markdown]
# ## The published folder
#
# BAGEL-7B-MoT was published with the network in `ema.safetensors`. A run reads that file, a slice of each tensor per
# rank, and exports a folder of the same format, with the moving average of the weights (`optim.ema`). Weights that were
# not trained are exported bit for bit:

# %%
from safetensors.torch import load_file

exported = notebook.exported(run)
print(*sorted(file.name for file in exported.iterdir()), sep="\n")
before, after = (load_file(path / "ema.safetensors") for path in (family.folder, exported))
same = {name for name in before if torch.equal(before[name], after[name])}
assert before.keys() == after.keys()
assert all(name in same for name in before if name.startswith("vit_model."))
print(f"{len(before)} tensors; {len(before) - len(same)} were trained, {len(same)} are the same bit for bit")

# %% [markdown]
# ## BAGEL-7B-MoT
#
# 14.6 billion parameters, of which each token uses half. The plan of a LoRA on a base in 4 bits, on one GPU of 24 GB
# (not measured on a GPU):

# %%
notebook.plan(notebook.config("bagel-7b-mot-lora-nf4-1x24gb"), "1x24gb")
