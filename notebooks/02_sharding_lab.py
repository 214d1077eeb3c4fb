# %% [markdown]
# # 2. Sharding lab: where the memory goes
#
# A model that does not fit on one GPU can be divided over several. There are many ways to divide it, and each has a
# cost. Here you train one model with every strategy of this program, on 2 and on 4 ranks. Every byte that a rank
# holds or sends is counted, and compared with a formula that you can evaluate in your head.
#
# On a machine with GPUs the ranks use them. Without GPUs they share the CPU: the bytes are the same, but the times say
# little about GPUs.

# %% tags=["parameters"]
from app import notebook
from app.notebook import comparison
from trainer.plan.simulate.zero import ModelBytes, expected

RUNS = notebook.RUNS  # the folder of runs, which the page (`make ui`) shows too
STEPS = 6  # of each trial
MODEL = "demo"  # 8 million parameters; `tiny` is faster still

# %% [markdown]
# ## Four kinds of bytes
#
# A *rank* is one process of a training run, with its own GPU. To train, it needs
#
# - **weights**: the numbers of the model,
# - **gradients**: for each trained weight, the direction in which it should move,
# - **optimizer state**: Adam remembers two averages for each trained weight,
# - **activations**: results of forward that backward needs; their number grows with the number of images.
#
# Plain data parallelism (**ddp**) puts a whole copy of the first three on every rank and gives each rank different
# images. The copies are equal, so most of that memory is redundant. *ZeRO*
# ([arXiv 1910.02054](https://arxiv.org/abs/1910.02054)) divides them instead:
#
# | strategy | between steps | during a step |
# |---|---|---|
# | `ddp` | everything on every rank | gradients are averaged over the ranks |
# | `grad_op` | each rank has 1/N of all three | all weights are gathered, and kept until backward is over |
# | `full` | each rank has 1/N of all three | one block at a time is gathered, used, and freed; in backward again |
# | `hybrid` | `full` inside a group of ranks | the groups hold copies of each other |
# | offload | `full`, but the shards are in the host's memory | each shard goes to the GPU when it is used |
#
# ## The arithmetic, for 7 billion parameters
#
# ZeRO counts 2 bytes per weight, 2 per gradient and 12 of optimizer state (an fp32 weight and two averages):
# 16 bytes per parameter, 112 GB for 7 billion. The table shows the share of one rank, without activations. (In the
# paper's second stage, here `grad_op`, each rank keeps all weights. Between steps this program shards them too.)

# %%
comparison.zero_table(7_000_000_000, ranks=(1, 2, 4, 8, 64))

# %% [markdown]
# ### Exercise 1
#
# How many GB does a rank hold when `full` divides a model of 32 billion parameters (FLUX.2), trained whole, over
# 8 ranks? Put your answer in place of the dots and run the cell again.

# %%
answer_1 = ...
notebook.exercise(
    answer_1,
    right=expected(ModelBytes.of_parameters(32_000_000_000), "full", 8, 8).allocated / 1e9,
    hint="16 bytes per parameter, divided by the number of ranks.",
)

# %% [markdown]
# ## Measure it: two ranks
#
# One `torchrun` starts the ranks, which then train one strategy after the other. All weights of the model are trained
# (`adapter.type=none`), in fp32: 4 bytes per weight, 4 per gradient, 8 of optimizer state. That is 16 bytes again.
#
# Each step sees four images, so each of two ranks sees two of them.

# %%
COMMON = [
    f"model.path={MODEL}",
    "model.train={transformer: full}",
    "adapter.type=none",
    "optim.lr=1e-3",
    "optim.warmup=2",
    f"train.steps={STEPS}",
    "train.batch_size=4",
    "sample.every=0",
    "checkpoint.every=0",
]
STRATEGIES = {
    "ddp": ["parallel.strategy=ddp"],
    "grad_op": ["parallel.strategy=grad_op"],
    "full": ["parallel.strategy=full"],
    "offload": ["parallel.strategy=full", "parallel.cpu_offload=true"],
}


def on(ranks):
    device = notebook.device(ranks)
    return notebook.config("quickstart", *COMMON, f"parallel.devices={ranks}", f"parallel.device={device}")


two = await notebook.compare(on(2), STRATEGIES, RUNS)

# %% [markdown]
# ## And four ranks
#
# With four there is one more way: `hybrid` makes two groups of two. Inside a group the model is divided, and the two
# groups hold the same. On several machines a group is one machine, so that the many gathers stay on its fast links.

# %%
HYBRID = {"hybrid": ["parallel.strategy=hybrid", "parallel.shard_size=2"]}
four = await notebook.compare(on(4), STRATEGIES | HYBRID, RUNS)

# %% [markdown]
# ## Memory, time and loss of each strategy
#
# *MB per rank* counts weights, gradients and optimizer state on the rank's device; *saved* is relative to `ddp` on as
# many ranks. *Loss* is the loss on held-out images before and after training. All strategies compute the same
# numbers, so the loss falls equally in each of them.
#
# (Where the device is the CPU, the host's memory is the same memory, so offload saves nothing.)

# %%
table = comparison.summary(two + four)
print(f"full on 4 ranks saves {comparison.saving(four, 'full'):.0%} of what ddp holds.")
assert all(trial.validation[-1] < trial.validation[0] for trial in two + four), "a loss did not fall"
table

# %% [markdown]
# The same as bars, with the two kinds of bytes that exist only within a step: *gathered* weights, and *activations*,
# which forward keeps for backward. FSDP2 computes on copies of the trained weights even where a rank has all weights
# already, as in `ddp`.

# %%
comparison.memory(two + four)

# %% [markdown]
# ## The formulas
#
# Let `W`, `G` and `O` be the bytes of all weights, gradients and optimizer state, `N` the number of ranks, and `S` the
# number of ranks that share one copy: 1 for `ddp`, `N` for `grad_op` and `full`, the size of a group for `hybrid`. Then
# each rank
#
# - holds `W/S`, `G/S` and `O/S`,
# - has gathered at most `W` with `grad_op`; with the others the largest block, and the weights outside blocks, of which
#   `ddp` copies only those that are trained,
# - sends, with ring algorithms, `(S-1)/S` of all that is gathered or reduced inside the group, and between groups
#   `2 (N/S - 1)/(N/S)` of its part of the gradients. `grad_op` gathers `W` once and reduces `G` once. `full` gathers
#   the blocks twice: what it freed after forward it needs again in backward.
#
# Counted, and by the formula:

# %%
worst = max(map(comparison.deviation, two + four))
print(f"largest deviation of any rank: {worst:.4%}")
assert worst < 0.02
comparison.against_formula(two + four)

# %% [markdown]
# ### Exercise 2
#
# How many MB of weights, gradients and optimizer state would a rank hold if `full` divided this model over 16 ranks?

# %%
model = two[0].cost.model
print(f"weights {model.weights / 1e6:.1f} MB, optimizer state {model.optimizer_state / 1e6:.1f} MB")
answer_2 = ...
notebook.exercise(
    answer_2,
    right=expected(model, "full", 16, 16).allocated / 1e6,
    hint="Gradients are as many bytes as the weights. Add the three, divide by 16.",
)

# %% [markdown]
# ## Activations: what no strategy divides
#
# Sharding divides the state of the model. Activations belong to the images: they grow with a rank's number of
# images, whatever the strategy. More ranks only mean fewer images for each. The next notebook shows how to make
# activations smaller.

# %%
comparison.activations(two + four)

# %% [markdown]
# ### Exercise 3
#
# The price of memory is communication. Which of the strategies sends most bytes in a step on 4 ranks: `ddp`, `grad_op`,
# `full` or `hybrid`? Answer with a word in quotes. See the column *sent per step* above.

# %%
answer_3 = ...
by_bytes = {
    trial.cost.ranks[0].sent: trial.label for trial in four if trial.label in ("ddp", "grad_op", "full", "hybrid")
}
notebook.exercise(answer_3, right=by_bytes[max(by_bytes)], hint="One of them gathers most weights twice.")

# %% [markdown]
# ## Summary
#
# - Choose `ddp` while everything fits: it gathers nothing.
# - Choose `full` when it does not, and `hybrid` on several machines.
# - `grad_op` is in between: little memory between steps, but a whole copy of the weights during each.
# - Offload when `full` is still too much and time matters less.
# - `parallel.strategy: auto` makes these choices for you.
#
# With a frozen base and an adapter, `G` and `O` are tiny and the weights remain: there `full` saves most. Try it: put
# `"adapter.type=lora"` and `"model.train={transformer: adapter}"` into `COMMON`.
