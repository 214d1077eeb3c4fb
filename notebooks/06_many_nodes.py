# %% [markdown]
# # 6. Many nodes
#
# When one machine has too few GPUs, several train together. The words:
#
# - a *node* is a machine;
# - a *rank* is one of the processes that train, counted over all nodes from 0; the *local rank* counts those of one
#   node, and is also the number of its GPU there;
# - the *rendezvous* is the place where the nodes meet, an address `host:port` on the first of them. Who comes there
#   waits until all have come.
#
# Here this machine plays two nodes, each with two ranks on the CPU. The commands, the meeting and the messages between
# the ranks are those of a real cluster; only the cable is missing.

# %% tags=["parameters"]
from app import notebook

RUNS = notebook.RUNS
STEPS = 8

# %% [markdown]
# ## Who holds what
#
# Two nodes with two ranks each are four ranks. With the strategy `full` all four share one copy of the model, a
# quarter each. With `hybrid` the two ranks of a node share a copy, a half each, and the other node has the same copy
# again. FSDP arranges the ranks as a table, one row per copy:

# %%
import torch

NODES, DEVICES = 2, 2
world = NODES * DEVICES
copies = torch.arange(world).reshape(NODES, DEVICES)
print("full:  ", torch.arange(world).reshape(1, world).tolist())
print("hybrid:", copies.tolist())
notebook.Table(
    ["rank", "node", "local rank", "holds part, full", "hybrid"],
    [
        [rank, *divmod(rank, DEVICES), f"{rank + 1} of {world}", f"{rank % DEVICES + 1} of {DEVICES}"]
        for rank in range(world)
    ],
)

# %% [markdown]
# ## Why copies, when sharding saves memory?
#
# Because of the cable. A rank that shares its weights must fetch the other parts whenever it computes: once in
# forward and once more in backward. Inside a node this goes over fast links, between nodes over a network that is
# many times slower.
#
# - `full`: half of the weights lie on the other node. So at least half of them come into each node, twice per step.
# - `hybrid`: weights never leave a node. Only the gradients do, once per step, and with an adapter there are few of
#   them: the frozen weights have none.

# %%
from safetensors import safe_open

from trainer.config.sections import DEMO

transformer = DEMO / "flux2" / "transformer" / "diffusion_pytorch_model.safetensors"
with safe_open(transformer, framework="pt") as file:
    weights = 4 * sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
print(f"the frozen weights, as fp32: {weights / 1e6:.1f} MB")

# %% [markdown]
# ### Exercise 1
#
# With `full` over these two nodes: how many MB of frozen weights come into each node per step, at least?

# %%
answer_1 = ...
notebook.exercise(
    answer_1,
    right=2 * weights / 2 / 1e6,
    hint="Half of them lie on the other node, and they are fetched in forward and again in backward.",
)

# %% [markdown]
# ## The first node
#
# Three fields make a run one of several nodes: `parallel.nodes`, `parallel.rendezvous`, and `parallel.devices` for the
# ranks of each node. Any free port will do.
#
# The first node starts the run as always. It makes the run folder, opens the rendezvous, and waits.
#
# (The device is the CPU here, also on a machine with GPUs: two nodes on one machine would take the same ones.)

# %%
import socket

with socket.create_server(("localhost", 0)) as server:
    port = server.getsockname()[1]
CHANGES = [
    *(f"train.steps={STEPS}", "train.batch_size=8", "train.micro_batch=2", "optim.warmup=2"),
    *("sample.every=0", "data.validation=0", "export.what=none"),
]
TWO_NODES = [
    *(f"parallel.nodes={NODES}", f"parallel.devices={DEVICES}"),
    *(f"parallel.rendezvous=localhost:{port}", "parallel.strategy=hybrid"),
]
run = notebook.start(notebook.config("quickstart", *CHANGES, *TWO_NODES), RUNS)
notebook.dashboard(run)

# %% [markdown]
# ## The second node
#
# It needs no config: it joins the run folder, which both nodes must see under the same path, and says its number. On a
# second machine you would type `shardstudio --join RUN_DIR --node-rank 1`. Both start torchrun, and only the
# number differs:

# %%
import shlex

second = notebook.join(run, node_rank=1)
print(shlex.join(second.argv))

# %% [markdown]
# Now both have met, and torchrun has dealt the ranks. It told each process its place by environment variables, which
# any program may look at as long as the process lives.
#
# Node 0 is the one that started the run: rank 0 is there, and writes what all see of the run.

# %%
import asyncio

import psutil

from trainer.run import process
from trainer.run.process import Launch

while len(list(run.ranks.iterdir())) < world and process.alive(run):
    await asyncio.sleep(0.2)
rows = []
for how, pid in (("start", Launch.read(run).pid), ("join", second.process.pid)):
    for rank in psutil.Process(pid).children():
        told = rank.environ()
        rows.append([how, told["RANK"], told["GROUP_RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]])
notebook.Table(["begun by", "RANK", "GROUP_RANK (node)", "LOCAL_RANK", "WORLD_SIZE"], rows)

# %% [markdown]
# Each rank writes a file of its own, whatever node it is on, so that one page shows them all. Events are written by
# rank 0 alone.

# %%
from trainer.run.events import RankReader

print("The run has", await notebook.ended(run))
notebook.Table(
    ["file", "steps", "peak of the process, MB"],
    [
        [file.name, line.step, f"{line.peak / 1e6:,.0f}"]
        for file in sorted(run.ranks.iterdir())
        for line in RankReader(file).read()[-1:]
    ],
)

# %% [markdown]
# ## The same on one node
#
# Four ranks of one node with the strategy `full`. Nothing of the training changes: the same pictures, the same noise.

# %%
alone = notebook.start(notebook.config("quickstart", *CHANGES, f"parallel.devices={world}"), RUNS)
print("The run has", await notebook.ended(alone))

# %% [markdown]
# Where are the ranks in the result? Nowhere, if all is right: only the order of sums differs, and with it the last
# digit.

# %%
from trainer.run.events import EventReader, latest_steps

steps = [latest_steps(EventReader(one.events_file).read()) for one in (run, alone)]
losses = [[step.loss for step in of_one] for of_one in steps]
difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
verdict = "within 1e-6" if difference <= 1e-6 else "NOT within 1e-6"
print(f"largest difference of a loss: {difference:.1e}; {verdict}")
notebook.Table(
    ["step", "2 nodes, hybrid", "1 node, full"],
    [[step, f"{a:.6f}", f"{b:.6f}"] for step, (a, b) in enumerate(zip(*losses, strict=True), 1)],
)

# %% [markdown]
# Where are they in the weights? The checkpoints tell how a tensor was cut: into halves under `hybrid`, of which the
# other node had the same, and into quarters under `full`. What two ranks hold alike is written once, by one of them.

# %%
from trainer.checkpoint import contents
from trainer.run.manifest import complete

rows = []
for label, one in (("2 nodes, hybrid", run), ("1 node, full", alone)):
    tensors = contents.read(complete(one.checkpoints)[-1]).tensors
    name = next(name for name in tensors if name.startswith("trainables.") and ".lora_B." in name)
    for chunk in tensors[name].chunks:
        first, last = chunk.offsets[0], chunk.offsets[0] + chunk.shape[0] - 1
        rows.append([label, f"{first} to {last}", chunk.stored.file])
print(name.removeprefix("trainables."))
notebook.Table(["run", "rows", "written by one rank into"], rows)

# %% [markdown]
# ### Exercise 2
#
# A cluster of 16 nodes with 8 GPUs each trains with `hybrid`. Which part of the weights does each rank hold? (A
# number.)

# %%
answer_2 = ...
notebook.exercise(
    answer_2,
    right=1 / 8,
    hint="The ranks of one node share one copy, however many nodes there are.",
)

# %% [markdown]
# ## On a real cluster
#
# 1. All nodes see the same run folder, pictures and model under the same paths (a network file system), and each has
#    ShardStudio.
# 2. On the first node, with its name and a free port:
#    `shardstudio --headless flux2-dev-lora-2x8gpu parallel.rendezvous=node0:29400`. It prints the
#    command for the others.
# 3. On each other node: that command; or in a notebook there `notebook.join(notebook.attach("the run"), node_rank=1)`.
#
# Where SLURM or Kubernetes deals the nodes, `--slurm` or `--kubernetes` writes the file of the job instead.
#
# Which strategy? `hybrid` when the model fits on the GPUs of one node, and `auto` takes it then. When it does not,
# `full` shares it over all nodes and pays with the network. `parallel.shard_size` is in between: any number of ranks
# that share a copy.
#
# When a node fails, the others cannot go on: the run ends, and says which rank failed. `shardstudio --resume` continues
# from the newest checkpoint, also on fewer nodes (`05_checkpoints`).
