# %% [markdown]
# # 3. Mixed precision and activation checkpointing
#
# The previous lab divided the state of the model. Two more settings save memory: computing with numbers of 16 bits
# instead of 32, and recomputing activations instead of keeping them. Both are measured here, with their cost.

# %% tags=["parameters"]
import torch

from app import notebook
from app.notebook import comparison

RUNS = notebook.RUNS  # the folder of runs, which the page (`make ui`) shows too
STEPS = 8  # of each trial
MODEL = "demo"  # 8 million parameters; `tiny` is faster still
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## Two kinds of numbers
#
# An **fp32** number has 32 bits: 24 significant ones, and a range up to 10^38. A **bf16** number has the same range
# in 16 bits, but less precision: 8 significant bits, two to three decimal digits. Matrix units of GPUs compute in bf16
# several times as fast, and everything takes half the memory.
#
# Eight bits are enough for a product of a weight and an activation. They are not enough to *learn*: a step of training
# changes a weight by very little, and in bf16 the sum can round back to what it was. Here a thousand steps of 0.001
# are added to a weight of 1:

# %%
rows = []
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight += 0.001
    rows.append([str(dtype).removeprefix("torch."), f"{float(weight):.4f}", torch.finfo(dtype).bits])
notebook.Table(["type", "after 1000 steps of 0.001", "bits"], rows)

# %% [markdown]
# ### Exercise 1
#
# What is the smallest step, a power of two, that bf16 can add to 1 so that something changes? It has 8 significant
# bits, the first of them stands for 1 itself. Put your answer in place of the dots and run the cell again.

# %%
answer_1 = ...
notebook.exercise(
    answer_1,
    right=torch.finfo(torch.bfloat16).eps,
    hint="The last of 8 significant bits of a number from 1 to 2 stands for 2**-7.",
)

# %% [markdown]
# ## Mixed precision
#
# So the trained weights stay in fp32, the *master weights*, with fp32 gradients and optimizer state. Each block
# computes with a copy in bf16. That is `train.precision: bf16`. Under sharding there is a second gain: ranks gather the
# bf16 copy, and only gradients are sent in fp32. (Weights that are not trained need no master copy: they are kept in
# bf16.)
#
# ## Activation checkpointing
#
# Backward needs the results of forward. `train.checkpointing: full` keeps only the *input* of each block, and backward
# runs the forward of a block once more before it needs it. That costs about a third more compute. A number `n` does
# it for every n-th block only. `selective` keeps what is expensive, the outputs of matrix products and attention, and
# computes the rest again: norms, activation functions, modulation. `auto` takes the least with which the run fits.
#
# ## The third lever: fewer images at a time
#
# `train.micro_batch` is the number of images of a rank in one pass. A step of more images takes several passes,
# whose gradients are added up. The result is the same, the activations are those of one pass.
#
# ## Measure them
#
# The same model and images, trained on two ranks with `full` sharding: seven trials by one `torchrun`.

# %%
config = notebook.config(
    "quickstart",
    f"model.path={MODEL}",
    "model.train={transformer: full}",
    "adapter.type=none",
    "optim.lr=1e-3",
    "optim.warmup=2",
    f"train.steps={STEPS}",
    "train.batch_size=8",
    "train.micro_batch=4",
    "sample.every=0",
    f"parallel.device={DEVICE}",
)
VARIANTS = {
    "fp32": [],
    "fp32, every 2nd block again": ["train.checkpointing=2"],
    "fp32, what is cheap again": ["train.checkpointing=selective"],
    "fp32, every block again": ["train.checkpointing=full"],
    "fp32, one image at a time": ["train.micro_batch=1"],
    "bf16": ["train.precision=bf16"],
    "bf16, every block again": ["train.precision=bf16", "train.checkpointing=full"],
}
found = await notebook.compare(config, VARIANTS, RUNS)

# %% [markdown]
# Activations, gathered weights and sent bytes are in MB of one rank. Seconds are of this machine; a CPU gains little
# from bf16, or even loses.

# %%
comparison.levers(found)

# %% [markdown]
# The same as bars. Master weights, gradients and optimizer state are unchanged: these settings only change the memory
# within a step.

# %%
comparison.memory(found)

# %% [markdown]
# ## Is it still the same training?
#
# Computing a block again gives the same numbers, bit for bit, so checkpointing must not change a single loss. Smaller
# passes add the same gradients in another order, which rounds differently in the last bits. bf16 rounds for real:

# %%
by_label = {trial.label: trial for trial in found}
plain = by_label["fp32"].losses
for again in ("what is cheap", "every block"):
    assert by_label[f"fp32, {again} again"].losses == plain, "checkpointing changed a loss"
apart = {
    label: max(abs(ours - theirs) / theirs for ours, theirs in zip(trial.losses, plain, strict=True))
    for label, trial in by_label.items()
}
notebook.Table(["trial", "largest relative difference of a loss to fp32"], [[k, f"{v:.1e}"] for k, v in apart.items()])

# %% [markdown]
# ### Exercise 2
#
# In the trial `fp32` a rank takes four images in a pass. How many MB of activations would it have with
# `train.micro_batch=2`?

# %%
activations = by_label["fp32"].cost.activations[0] / 1e6
print(f"fp32, four images in a pass: {activations:.2f} MB")
answer_2 = ...
notebook.exercise(answer_2, right=activations / 2, hint="Each image has its own activations.")

# %% [markdown]
# ### Exercise 3
#
# Under `full` sharding, which setting makes a rank *send* less: `bf16`, `checkpointing` or `micro_batch`?
# Look at the column, and mind that more passes gather the weights more often. Answer with a word in quotes.

# %%
answer_3 = ...
notebook.exercise(answer_3, right="bf16", hint="A rank sends the weights that a block computes with.")

# %% [markdown]
# ## Summary
#
# - `train.precision: bf16` is the default, on GPUs the faster one as well.
# - When activations do not fit, lower `train.micro_batch` first: it costs little until passes become tiny.
# - Then `train.checkpointing: full`: about a third more compute for a fraction of the activations.
# - When the model itself does not fit, shard it, as in the previous lab.
