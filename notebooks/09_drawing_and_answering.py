# %% [markdown]
# # 9. Drawing and answering
#
# BAGEL is one network that draws an image from a caption, answers questions about an image, and edits an image. Other
# programs that train it on several GPUs stop at its first backward pass. Here a tiny one with random weights learns all
# of it at once, on two ranks, from the images that come with ShardStudio.

# %% tags=["parameters"]
import json
import shutil
from pathlib import Path

from PIL import Image, ImageOps

from app import notebook

RUNS = notebook.RUNS
STEPS = 200
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## Two kinds of data
#
# To draw, the network needs images with captions, like every image model here. To answer and to edit, it needs a
# `.jsonl` file. A line is a question (an image, a question and an answer), or a sequence of text and images in any
# order: an edit is the image before it, which the network sees both as latents and through its image encoder, then the
# instruction, then the image that is drawn. All are made from the 32 shipped pictograms; edits of the last eight are
# kept for a measurement:

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
INSTRUCTION = "by night"


def edited(image: Path) -> Image.Image:
    return ImageOps.invert(Image.open(image).convert("RGB"))


(RUNS / "edited").mkdir(exist_ok=True)
for image in shipped[:-8]:
    edited(image).save(RUNS / "edited" / image.name)
    before, after = {"image": f"to-draw/{image.name}", "as": "both"}, {"image": f"edited/{image.name}", "as": "drawn"}
    rows.append({"sequence": [before, {"text": INSTRUCTION}, after]})
questions = RUNS / "questions.jsonl"
questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
print(*(json.dumps(row) for row in (*rows[:2], rows[-1])), sep="\n")

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
data: {{path: {folder}, questions: {questions}, question_share: 0.5, resolution: 64}}
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

from trainer.models import families
from trainer.models.parts.bagel.bagel_packing import ConditioningPiece, DrawnPiece, TextPiece, pack

family = families.make(config.config, RUNS / "cache")
sizes = family.sizes
patch = sizes.vision.patch_size
words = torch.arange(3)
asked = [ConditioningPiece(torch.zeros(3, 2 * patch, 2 * patch)), TextPiece(words), TextPiece(words[:2], in_loss=True)]
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
# The loss of images is the mean squared error of the velocity over all latent tokens of the step, that of texts the
# mean cross-entropy over all text tokens in the loss. The gradient is that of their sum, weighted by
# `objective.mse_weight` and `objective.text_weight`; the chart also shows each of them. A rank whose pass has no
# question still runs every layer of the network, because the other rank waits for its shard.

# %%
run = notebook.start(config, RUNS)
notebook.dashboard(run)

# %% [markdown]
# Wait for the end. Both losses fell:

# %%
from trainer.run.events import EventReader, latest_steps
from trainer.view.steps import losses_by_name

print("The run has", await notebook.ended(run))
steps = latest_steps(EventReader(run.events_file).read())
losses = losses_by_name(steps)
for name, values in losses.items():
    first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
    print(f"{name}: {first:.3f} in the first five steps, {last:.3f} in the last five")
    assert last < first

# %% [markdown]
# ### Exercise 2
#
# What was the loss of the last step, from its two losses? Both weights are 1, as published.

# %%
last = steps[-1]
print(f"images {last.losses['images']:.4f}, text {last.losses['text']:.4f}")
answer_2 = ...
notebook.exercise(
    answer_2,
    right=last.losses["images"] + last.losses["text"],
    hint="Each is a mean of its own; the loss is their weighted sum.",
)

# %% [markdown]
# ## Its answers
#
# Three questions, asked before the first step and after the last. (Its *images* show nothing: the autoencoder of the
# tiny model is random too. That it learns to draw shows in the velocity's error.)

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
# ## What drawing alone does to editing
#
# A fine-tune on captioned images alone does not train edits. Does the network keep them? Here is the loss of the eight
# edits that were kept aside, with the same noise each time: of the random network, after the run, and after a shorter
# run on captioned images alone which continues from it. If the last is higher, drawing alone has unlearned editing, and
# edits belong into the data.

# %%
from trainer.models.base import SequencePart
from trainer.rng import SampleRng
from trainer.weights.files import read_tensor


def loaded(module, files, blocks=()):
    module = module.to_empty(device="cpu").requires_grad_(False)
    module.load_state_dict({name: read_tensor(entry) for name, entry in files.entries.items()})
    return module


def editing_loss(path: Path) -> float:
    """Mean squared error of the velocity of the edits that were kept aside, by the network in a folder."""
    one = families.make(notebook.config(preset, f"model.path={path}").config, RUNS / "cache")
    network = torch.nn.ModuleDict({name: loaded(one.build(name), one.weights(name)) for name in one.components})
    autoencoder, examples = one.image_encoder(loaded), []
    for image in shipped[-8:]:
        before, after = Image.open(image).convert("RGB").resize((64, 64)), edited(image).resize((64, 64))
        clean, drawn = (one.encode_image(autoencoder, picture)["latents"] for picture in (before, after))
        parts = [("clean", clean), ("conditioning", before), ("text", INSTRUCTION), ("drawn", drawn)]
        examples.append(one.encode_sequence([SequencePart(*part) for part in parts]))
    batch = one.collate(examples) | {"weight": torch.ones(8)}
    with torch.no_grad():
        total, count = one.loss(network, batch, SampleRng(0, range(8))).parts[0]
    return float(total / count)


# %% [markdown]
# The run on images alone is a quarter as long:

# %%
measured = {"random": editing_loss(family.folder), "after drawing, answering and editing": editing_loss(exported)}
changes = ["name=drawing", "data.questions=null", f"train.steps={STEPS // 4}", "sample.every=0"]
alone = notebook.start(notebook.config(preset, f"model.path={exported}", *changes), RUNS)
print("The run has", await notebook.ended(alone))
measured[f"after {STEPS // 4} more steps of drawing alone"] = editing_loss(notebook.exported(alone))
assert measured["random"] > measured["after drawing, answering and editing"]
notebook.Table(["network", "loss of the edits"], [[name, f"{loss:.3f}"] for name, loss in measured.items()])

# %% [markdown]
# ## BAGEL-7B-MoT
#
# 14.6 billion parameters, of which each token uses half. The plan of a LoRA on a base in 4 bits, on one GPU of 24 GB
# (not measured on a GPU):

# %%
notebook.plan(notebook.config("bagel-7b-mot-lora-nf4-1x24gb"), "1x24gb")
