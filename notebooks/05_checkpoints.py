# %% [markdown]
# # 5. Checkpoints: stop, continue elsewhere, export
#
# A *checkpoint* holds what a run needs to go on as if it had never stopped: the trained weights, the optimizer's
# state, and the step. When a model is sharded, no rank has all of it, so a checkpoint is a folder to which every rank
# writes its own part.
#
# You stop a run on two ranks, look into that folder, continue on **one** rank, and compare the result with a run that
# was never stopped.

# %% tags=["parameters"]
from app import notebook

RUNS = notebook.RUNS
STEPS = 16  # of the whole run
STOP_AT = 4  # where it is stopped
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## Stop in the middle
#
# First the run, on two ranks with everything sharded:

# %%
config = notebook.config(
    "quickstart",
    *(f"train.steps={STEPS}", "train.batch_size=8", "train.micro_batch=4", "optim.warmup=2"),
    *(f"parallel.device={DEVICE}", "sample.every=0", "data.validation=0"),
)
run = notebook.start(config, RUNS)
notebook.dashboard(run)

# %% [markdown]
# *Stop* is a request: a file in the run folder, which the page, this notebook or a terminal may write. All ranks read
# it after the same step, write a checkpoint together, and exit. The *Stop* button above writes the same file.

# %%
await notebook.reached(run, STOP_AT)
run.request("stop")
print("The run has", await notebook.ended(run))

# %% [markdown]
# ## What is in the folder
#
# One `.distcp` file per rank, `contents.json` with the table of contents, and `manifest.json`. The manifest is written
# last, and only then the folder gets its name: a folder named `step-...` is complete, even after a power failure.

# %%
from trainer.checkpoint.restore import StoredWeights
from trainer.run import manifest

folder = manifest.complete(run.checkpoints)[-1]
print(folder.name, "holds", manifest.steps_in(folder), "steps")
files = sorted(folder.iterdir())
notebook.Table(["file", "bytes"], [[file.name, f"{file.stat().st_size:,}"] for file in files])

# %% [markdown]
# The table of contents lists every tensor: its whole shape, and the *chunks* it was written in, one per rank that
# held a part. The strategy was `full`: FSDP shards each tensor by rows, with equally many rows per rank.
#
# For each trained weight there are also AdamW's two running means, `exp_avg` and `exp_avg_sq`. In the table below `*`
# stands for the name of the tensor.
#
# (PyTorch also writes its own table, `.metadata`. It is a pickle, which can run code when PyTorch opens it: use
# its tools only on checkpoints that you trust. `trainer.checkpoint.contents` reads `contents.json` and runs nothing.)

# %%
from math import prod

from trainer.checkpoint import contents

tensors = contents.read(folder).tensors
weight = next(name for name in tensors if name.startswith("trainables.") and ".lora_B." in name)
weight = weight.removeprefix("trainables.")
print(f"{len(tensors)} tensors; those of {weight}:")
notebook.Table(
    ["tensor", "whole", "chunk begins at", "chunk's size", "lies in"],
    [
        [
            name.replace(weight, "*"),
            entry.shape,
            chunk.offsets,
            chunk.shape,
            chunk.stored.file,
        ]
        for name, entry in tensors.items()
        if weight in name
        for chunk in entry.chunks
    ],
)

# %% [markdown]
# ### Exercise 1
#
# All trained weights together are `P` numbers of 4 bytes. How many bytes does the whole checkpoint hold, counting
# weights and AdamW's state, but not the few bytes of tables around them?

# %%
P = sum(prod(entry.shape) for name, entry in tensors.items() if name.startswith("trainables."))
print(f"P = {P:,}")
answer_1 = ...
notebook.exercise(
    answer_1,
    right=3 * 4 * P,
    hint="Each weight is there once itself, and once in each of the two running means.",
)

# %% [markdown]
# ## From shards to one file
#
# Programs without sharding need one *full state dict*: {name: whole tensor}. PyTorch reads all shards
# and saves them as one file. It is loaded with `weights_only=True`, which refuses everything but tensors and plain
# values.
#
# This needs the whole state in the memory of one process. Here it is small. For a model that was sharded because it
# does not fit on one GPU it can be too much, so a run does not do it at each checkpoint.

# %%
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

full = run.path / "full.pt"
dcp_to_torch_save(folder, full)
state = torch.load(full, weights_only=True)
print(f"{full.name}: {full.stat().st_size / 1e3:,.0f} kB with", ", ".join(state))
tensor = state["trainables"][weight]
print(f"one tensor of it: {tuple(tensor.shape)}, {tensor.dtype}")

# %% [markdown]
# ## Continue on one rank
#
# `resume` takes the newest checkpoint. Here it also changes a field: one rank instead of two. Each rank looks up in
# the table of contents which rows it needs now, and reads them from whichever files hold them. That is called
# *resharding*.
#
# Nothing else about the run changes: `train.batch_size` counts the images of all ranks together, and noise and
# order come from the seed and the number of the image, not from the rank.

# %%
notebook.resume(run, "parallel.devices=1")
print("The run has", await notebook.ended(run))

# %% [markdown]
# ## The same without a stop
#
# A second run of the same config, on two ranks from its first step to its last.

# %%
straight = notebook.start(config, RUNS)
print("The run has", await notebook.ended(straight))

# %% [markdown]
# Do they end at the same weights? Sums in another order are rounded differently, so a difference of one millionth
# would not be an error. `StoredWeights` reads one tensor after the other from a checkpoint.

# %%
ends = [StoredWeights(manifest.complete(one.checkpoints)[-1]) for one in (run, straight)]
difference = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
largest = max(float(ends[1][name].abs().max()) for name in ends[1])
print(f"stopped after {manifest.steps_in(folder)} of {STEPS} steps, then continued on one rank")
print(f"largest difference of a weight: {difference:.1e}; largest weight: {largest:.3f}")
print("within 1e-6" if difference <= 1e-6 else "NOT within 1e-6")

# %% [markdown]
# ### Exercise 2
#
# The checkpoint holds no random numbers and no list of images already seen. Which one value in it tells the resumed
# run what noise and which images come next? (One word.)

# %%
answer_2 = ...
notebook.exercise(
    answer_2,
    right="step",
    hint="Everything else follows from the config: manifest.json holds it next to the optimizer's name.",
)

# %% [markdown]
# ## Export
#
# A checkpoint is for this program, an *export* is for others. The end of a run exports the adapter. At any time you
# can export something else from the newest checkpoint: `merged` is the whole transformer with `W + B A` in place of
# each `W`. Each file is reloaded with another program's loader before it gets its name.

# %%
merged = await notebook.export(run, "merged", dtype="fp32")
for event in notebook.exports(run):
    print(f"{event.what}: {event.path}, read back, differs by {event.difference:.1e}")

# %% [markdown]
# ## Check it yourself
#
# Two ways to the same model: the base with the adapter's file on top, and the merged folder. diffusers loads both.
# The adapter's file is bf16, which keeps about three decimal digits; that rounds its updates, which are smaller than
# the weights they are added to.

# %%
from diffusers import Flux2Transformer2DModel

from trainer.config.sections import DEMO

base = Flux2Transformer2DModel.from_pretrained(DEMO / "flux2" / "transformer", dtype=torch.float32)
whole = Flux2Transformer2DModel.from_pretrained(merged, dtype=torch.float32).state_dict()
before = {name: weight.clone() for name, weight in base.state_dict().items()}
adapter = next(run.path / event.path for event in notebook.exports(run) if event.what == "adapter")
base.load_lora_adapter(adapter, prefix="transformer")
base.fuse_lora()
base.unload_lora()
fused = base.state_dict()
moved = max(float((whole[name] - before[name]).abs().max()) for name in whole)
apart = max(float((whole[name] - fused[name]).abs().max()) for name in whole)
print(f"{len(whole)} tensors; training moved a weight by at most {moved:.1e}")
print(f"base + adapter's file and merged folder differ by at most {apart:.1e}")

# %% [markdown]
# ## Where to go next
#
# - `checkpoint.every` and `checkpoint.keep` set how often one is written and how many are kept. Training continues
#   while it is written.
# - In a terminal: `shardstudio --resume RUN_DIR parallel.devices=1`, and
#   `shardstudio --export RUN_DIR --what merged`.
# - `06_many_nodes`: when one machine is not enough.
