# %% [markdown]
# # 6. Many nodes
#
# When one machine has too few GPUs, several train together. The terms:
#
# - a *node* is a machine;
# - a *rank* is one of the processes that train, numbered over all nodes from 0; the *local rank* numbers those of one
#   node, and is also the index of its GPU there;
# - the *rendezvous* is an address `host:port` on the first node, at which the nodes find each other. Each waits there
#   until all have joined.
#
# Here this machine plays two nodes, each with two ranks on the CPU. The commands, the rendezvous and the messages
# between the ranks are those of a real cluster; only the network is missing.

# %% tags=["parameters"]
from app import notebook

RUNS = notebook.RUNS
STEPS = 8

# %% [markdown]
# ## Which rank holds what
#
# Two nodes with two ranks each are four ranks. With the strategy `full` all four share one copy of the model, a
# quarter each. With `hybrid` the two ranks of a node share a copy, a half each, and the other node has another copy.
# FSDP arranges the ranks as a table, one row per copy:

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
# Because of the network. A rank with sharded weights must gather the other parts whenever it computes: once in forward
# and once more in backward. Inside a node this goes over fast links, between nodes over a network that is many times
# slower.
#
# - `full`: half of the weights are on the other node. So each node receives at least half of them, twice per step.
# - `hybrid`: weights never leave a node. Only the gradients do, once per step, and with an adapter they are few: the
#   frozen weights have none.

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
# With `full` over these two nodes: how many MB of frozen weights does each node receive per step, at least?

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
# The first node starts the run as usual. It creates the run folder, opens the rendezvous, and waits.
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
# It needs no config: it joins the run folder, which both nodes must see under the same path, with its node rank. On a
# second machine you would type `shardstudio --join RUN_DIR --node-rank 1`. Both start torchrun, and only the node
# rank differs:

# %%
import shlex

second = notebook.join(run, node_rank=1)
print(shlex.join(second.argv))

# %% [markdown]
# Now both have joined, and torchrun has assigned the ranks. It passes them to each process in environment variables,
# which any program may read while the process is running.
#
# Node 0 is the one that started the run: it has rank 0, which writes the events of the run.

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
        environ = rank.environ()
        rows.append([how, environ["RANK"], environ["GROUP_RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]])
notebook.Table(["begun by", "RANK", "GROUP_RANK (node)", "LOCAL_RANK", "WORLD_SIZE"], rows)

# %% [markdown]
# Each rank on every node writes its own status file, so that one page shows them all. Only rank 0 writes events.

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
# Four ranks of one node with the strategy `full`. The training is the same: the same images, the same noise.

# %%
alone = notebook.start(notebook.config("quickstart", *CHANGES, f"parallel.devices={world}"), RUNS)
print("The run has", await notebook.ended(alone))

# %% [markdown]
# How do the results differ? Only the order of sums does, and with it the last digit.

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
# The checkpoints show how each tensor was sharded: into halves under `hybrid`, with equal halves on the other node, and
# into quarters under `full`. What two ranks hold alike is written once, by one of them.

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
# A cluster of 16 nodes with 8 GPUs each trains with `hybrid`. Which fraction of the weights does each rank hold? (A
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
# 1. All nodes see the same run folder, images and model under the same paths (a network file system), and each has
#    ShardStudio.
# 2. On the first node, with its name and a free port:
#    `shardstudio --headless flux2-dev-lora-2x8gpu parallel.rendezvous=node0:29400`. It prints the
#    command for the others.
# 3. On each other node: that command; or in a notebook there `notebook.join(notebook.attach("the run"), node_rank=1)`.
#
# Where SLURM or Kubernetes assigns the nodes, `--slurm` or `--kubernetes` writes the job file instead.
#
# Which strategy? `hybrid` when the model fits on the GPUs of one node; `auto` chooses it then. When it does not, `full`
# shards it over all nodes at the cost of network traffic. `parallel.shard_size` is in between: any number of ranks that
# share a copy.
#
# When a node fails, the others cannot continue: the run ends, and reports which rank failed. `shardstudio --resume`
# continues from the newest checkpoint, also on fewer nodes (`05_checkpoints`).
