# %% [markdown]
# # 1. Quickstart: from a config to an image
#
# You train an *adapter*: a small set of weights that changes what a model draws. You watch it learn, and load the
# result into another program. Everything happens on this machine, and nothing is downloaded.
#
# The model is called `demo`. It has the architecture of FLUX.2 in small, and it draws pictograms of 64 x 64 pixels by
# their names: a fox face, a bicycle, a teddy bear. It has never seen the style that you teach it.
#
# *Run All* works here: a cell that needs a finished run waits for it, and the buttons keep working.

# %% tags=["parameters"]
from pathlib import Path

from app import notebook

RUNS = notebook.RUNS  # the folder of runs, which the page (`make ui`) shows too
STEPS = 60  # how long to train
SUBJECTS = ["fox face", "bicycle", "sunflower", "teddy bear"]  # what to draw
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## What it learns from
#
# A *config* holds every setting of a run: the model, the adapter, the images, how to train, on how many ranks. You
# begin with a *preset*, a config that somebody wrote, and change what you want to be different, as `field=value`.
#
# Below are some of the preset's images with their captions. All have one style: two inks on yellow paper.
# `[trigger]` stands for a word of your choice, `data.trigger`. In the captions it marks the style, and later you write
# it into a prompt to ask for the style.

# %%
CHANGES = [
    f"train.steps={STEPS}",
    f"parallel.device={DEVICE}",
    f"sample.every={STEPS}",
    f"sample.prompts={[f'{subject} [trigger]' for subject in SUBJECTS]}",
    "sample.steps=12",
]
config = notebook.config("quickstart", *CHANGES)
images = sorted(Path(config.config.data.path).glob("*.png"))[::4]
captions = [image.with_suffix(".txt").read_text().strip() for image in images]
notebook.gallery({"": dict(zip(captions, images, strict=True))})

# %% [markdown]
# ## A config is checked before anything starts
#
# Every field has a type and limits. All mistakes are reported at once, each with its position:

# %%
try:
    notebook.config("quickstart", "adapter.rnk=8", "optim.lr=-1", "train.steps=many")
except ValueError as error:
    print(error)

# %% [markdown]
# ## The same as a form
#
# The form shows what you can set, with the meaning of each field: model, pictures and method, and everything else under
# *More*. Change something if you like, and press *Start*; where you do not, the next cell starts what the form shows.
# Two fields to look at in the group *Hardware*:
#
# - `parallel.devices` is the number of *ranks*. Each rank is a process with its own GPU or, without GPUs, a share of
#   the CPU.
# - `parallel.strategy: full` *shards* the model: every rank keeps only its part of the weights, and gathers the other
#   parts just before it computes with them. The next notebook measures this.

# %%
form = notebook.form("quickstart", *CHANGES, runs=RUNS)
form

# %% [markdown]
# ## Train
#
# `start` returns at once, as *Start* does. The run is a separate process: it continues when you close this notebook,
# and even when the kernel dies. The dashboard follows it. *Loss* is the error of the model's prediction; it is noisy,
# so look at the smoothed line.

# %%
run = form.run or notebook.start(form.config, RUNS)
notebook.dashboard(run)

# %% [markdown]
# The next cell waits for the end. It uses `await`, so the kernel stays free and *Stop* above works.

# %%
print("The run has", await notebook.ended(run))

# %% [markdown]
# ## Before and after
#
# The run drew its prompts before the first step and after the last one, each time from the same noise. None of these
# subjects is among the training images: the model knew the subject, and has learned the style.

# %%
notebook.gallery(notebook.samples(run))

# %% [markdown]
# ### Exercise 1
#
# Each step trains on `train.batch_size` images. How often has the run seen each of its training images, on
# average? Put your answer in place of the dots and run the cell again.

# %%
data, train = form.config.config.data, form.config.config.train
num_images = len(list(Path(data.path).glob("*.png")))
print(f"{train.steps} steps of {train.batch_size} images")
print(f"{num_images} images, {data.validation} of them held out")
answer_1 = ...
notebook.exercise(
    answer_1,
    right=train.steps * train.batch_size / (num_images - data.validation),
    hint="All images of all steps, divided by the images that are not held out.",
)

# %% [markdown]
# ## The exported file
#
# When a run ends it *exports* the adapter: it writes one file, reloads it, and compares. A LoRA changes a layer's
# weight `W` (out x in) to `W + B A`, where `A` has `rank` rows and `B` has `rank` columns. Only `A` and `B` are in
# the file.

# %%
from safetensors import safe_open

from trainer.config.sections import DEMO

lora = notebook.exported(run)
with safe_open(lora, framework="pt") as file:
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
base = DEMO / "flux2" / "transformer" / "diffusion_pytorch_model.safetensors"
name = next(name.removesuffix(".lora_A.weight") for name in shapes if ".lora_A." in name)
down, up = shapes[f"{name}.lora_A.weight"], shapes[f"{name}.lora_B.weight"]
notebook.Table(
    ["file", "kB", "tensors"],
    [
        [lora.name, f"{lora.stat().st_size / 1e3:,.0f}", len(shapes)],
        ["the transformer it belongs to", f"{base.stat().st_size / 1e3:,.0f}", ""],
    ],
)

# %% [markdown]
# ### Exercise 2
#
# Why is the file so small? Take one layer of it. How many numbers does its LoRA hold, `A` and `B` together?

# %%
print(f"{name}: a weight of {up[0]} x {down[1]}, changed by a LoRA of rank {down[0]}")
answer_2 = ...
notebook.exercise(
    answer_2,
    right=down[0] * (down[1] + up[0]),
    hint="A is rank x in, B is out x rank; the weight itself would be out x in.",
)

# %% [markdown]
# ## Draw with it in diffusers
#
# The file does not depend on ShardStudio. [diffusers](https://github.com/huggingface/diffusers) loads the model, then
# the adapter. The same lines load a LoRA of a published FLUX.2; only the last two arguments belong to the demo, whose
# text encoder is so small.

# %%
import torch
import transformers
from diffusers import Flux2KleinPipeline
from diffusers.utils import logging

logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
pipe = Flux2KleinPipeline.from_pretrained(DEMO / "flux2", dtype=torch.float32).to(DEVICE)
pipe.set_progress_bar_config(disable=True)


def draw(subject: str, file: Path) -> Path:
    """An image of the subject, always from the same noise."""
    noise = torch.Generator().manual_seed(0)
    settings = {"height": 64, "width": 64, "num_inference_steps": 12, "guidance_scale": 1.5}
    num_tokens = pipe.tokenizer.model_max_length
    demo = {"max_sequence_length": num_tokens, "text_encoder_out_layers": (1, 2, 3)}
    pipe(prompt=f"{subject} risograph", generator=noise, **settings, **demo).images[0].save(file)
    return file


OTHERS = ["cat face", "umbrella", "snowman"]
without = {subject: draw(subject, run.path / f"{subject}, without.png") for subject in OTHERS}

# %% [markdown]
# Now the adapter. `risograph` is the trigger of this preset. Without the adapter the word means nothing to the model.

# %%
pipe.load_lora_weights(lora.parent, weight_name=lora.name, local_files_only=True)
with_lora = {subject: draw(subject, run.path / f"{subject}, with.png") for subject in OTHERS}
notebook.gallery({"without": without, "with the LoRA": with_lora})

# %% [markdown]
# ## After a restart of the kernel
#
# Choose *Kernel*, *Restart Kernel*. All variables are gone, but the run is not: it is stored in its folder. Run the
# first cell and then this one: `attach` finds the latest run, finished or not. `notebook.attach("its name")` finds any
# other.

# %%
notebook.dashboard(notebook.attach(runs=RUNS))

# %% [markdown]
# ## Where to go next
#
# - `02_sharding_lab`: the memory of a rank under each strategy, measured.
# - `03_mixed_precision_and_checkpointing`: the other two ways to save memory.
# - `04_adapters`: the seven adapters side by side.
# - `05_checkpoints`: stop, continue elsewhere, export.
# - `06_many_nodes`: several machines.
# - `07_your_own_images`: your images instead of ours.
#
# This run without a notebook, in a terminal: `shardstudio --headless quickstart`. With a page in the browser:
# `shardstudio`. In a checkout without an active environment, `.venv/bin/shardstudio` or `.venv/bin/python launch.py`.
