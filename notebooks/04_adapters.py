# %% [markdown]
# # 4. Seven adapters, side by side
#
# An *adapter* changes the layers of a frozen model by a few trained numbers. There are many kinds, and they differ in
# the number of parameters, in speed, and in the changes that they can represent. Here all seven train on the same
# images, and then each is fitted to changes of a single layer, to see what it can and cannot represent.

# %% tags=["parameters"]
import torch

from app import notebook
from trainer.adapters.fit import remaining

RUNS = notebook.RUNS  # the folder of runs, which the page (`make ui`) shows too
STEPS = 12  # of each adapter
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## The seven kinds
#
# A linear layer multiplies by a weight `W` (out x in). An adapter replaces it by
#
# | | the new weight | in words |
# |---|---|---|
# | `lora` | `W + B A` | a sum of `rank` simple changes |
# | `locon` | the same | also for convolutions (this model has none, so here it is `lora`) |
# | `dora` | `m (W + B A) / length` | the same for each row's direction; its length `m` is trained separately |
# | `loha` | `W + (B1 A1) * (B2 A2)` | two low-rank changes, multiplied element by element: rank up to `rank` squared |
# | `lokr` | `W + C kron (B A)` | a small pattern, repeated in large with other signs and sizes |
# | `diag-oft` | `R W` | rotates groups of `block_size` outputs, keeps all lengths and angles inside `W` |
# | `boft` | `R1 R2 ... W` | several such rotations, each of other groups, like the stages of a butterfly |
#
# ## Train all seven
#
# One `torchrun` trains them one after the other, on two ranks that share the frozen model. `boft` needs a smaller
# learning rate.

# %%
config = notebook.config(
    "quickstart",
    f"train.steps={STEPS}",
    "train.batch_size=8",
    "optim.warmup=3",
    f"sample.every={STEPS}",
    "sample.steps=8",
    "sample.prompts=['fox face [trigger]', 'teddy bear [trigger]']",
    f"parallel.device={DEVICE}",
)
ADAPTERS = ["lora", "locon", "dora", "loha", "lokr", "diag-oft", "boft"]
VARIANTS = {name: [f"adapter.type={name}", *["optim.lr=5e-4"] * (name == "boft")] for name in ADAPTERS}
found = await notebook.compare(config, VARIANTS, RUNS)

# %% [markdown]
# ## Size and speed
#
# *Trained* is the number of the adapter's parameters, and *of the model* their share. The exported file holds just
# these. Only they have optimizer state, which is why adapters need so little memory. The loss is the one on held-out
# images after these few steps; with its own learning rate each adapter gets further.

# %%
notebook.Table(
    ["adapter", "trained", "of the model", "as fp32, kB", "optimizer state, kB", "s per step", "loss before", "after"],
    [
        [
            trial.label,
            f"{trial.cost.num_trained:,}",
            f"{trial.cost.num_trained / (trial.cost.num_parameters - trial.cost.num_trained):.1%}",
            f"{4 * trial.cost.num_trained / 1e3:,.0f}",
            f"{trial.cost.model.optimizer_state / 1e3:,.0f}",
            f"{trial.seconds:.3f}",
            *(f"{trial.validation[at]:.3f}" for at in (0, -1)),
        ]
        for trial in found
    ],
)

# %% [markdown]
# ### Exercise 1
#
# A LoRA of rank 16 on a layer of 6144 x 6144 (FLUX.2 has many of them): how many numbers are `A` and `B` together? Put
# your answer in place of the dots and run the cell again.

# %%
answer_1 = ...
notebook.exercise(answer_1, right=16 * (6144 + 6144), hint="A is rank x in, B is out x rank.")

# %% [markdown]
# ## What they draw
#
# After a few steps only, from the same noise each. Neither is among the training images.

# %%
drawn = {trial.label: notebook.samples(trial.run)[f"step {STEPS}"] for trial in found}
notebook.gallery({prompt: {label: row[prompt] for label, row in drawn.items()} for prompt in drawn["lora"]})

# %% [markdown]
# ## What each can express
#
# Now one layer of 32 x 32. Each adapter is fitted to a given change of its weight as well as possible. The table shows
# which share of the change is *left*: 0 is a perfect fit, 1 is as bad as no adapter.
#
# Four changes: one of rank 2; other lengths of the rows; a rotation of small groups of outputs; and a small pattern
# repeated in large.

# %%
numbers = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=numbers)


def turn(size):
    """A rotation by angles of about 0.4."""
    half = random(size, size) * 0.3
    return torch.matrix_exp(half - half.T)


weight = random(32, 32) / 32**0.5
CHANGES = {
    "rank 2": random(32, 2) @ random(2, 32) / 20,
    "lengths of rows": 0.3 * random(32, 1) * weight,
    "turned groups": torch.block_diag(*[turn(4) for _ in range(8)]) @ weight - weight,
    "repeated pattern": torch.kron(random(4, 4), random(8, 8)) / 20,
}

# %% [markdown]
# The fit takes a few seconds. Look for the zeros: each kind of adapter makes its own kind of change exactly, with few
# parameters, and cannot make some others at all.

# %%
SMALL = {
    "lora": ["adapter.rank=4"],
    "dora": ["adapter.rank=4"],
    "loha": ["adapter.rank=4"],
    "lokr": ["adapter.rank=4", "adapter.factor=4"],
    "diag-oft": ["adapter.block_size=4"],
    "boft": ["adapter.block_size=4"],
}
left = {}
for name, options in SMALL.items():
    adapter = notebook.config("quickstart", f"adapter.type={name}", *options).config.adapter
    left[name] = {kind: remaining(adapter, weight, change) for kind, change in CHANGES.items()}
notebook.Table(
    ["left of", *CHANGES], [[name, *(f"{share:.2f}" for share in row.values())] for name, row in left.items()]
)

# %% [markdown]
# ### Exercise 2
#
# Which adapter makes a repeated pattern exactly? Answer with its name in quotes.

# %%
answer_2 = ...
best = min(left, key=lambda name: left[name]["repeated pattern"])
notebook.exercise(answer_2, right=best, hint="Look for the smallest number in the last column.")

# %% [markdown]
# ### Exercise 3
#
# `dora` is a `lora` with one more number per row. Which of the four changes did that make possible? Answer with the
# head of its column in quotes.

# %%
answer_3 = ...
gain = {kind: left["lora"][kind] - left["dora"][kind] for kind in CHANGES}
notebook.exercise(
    answer_3, right=max(gain, key=gain.get), hint="Compare the first two rows: where does the number fall most?"
)

# %% [markdown]
# ## Summary
#
# - `lora` is the one every program reads, and a good first choice; `dora` for a little more at a little more time.
# - `lokr` is by far the smallest. It needs a higher learning rate or more steps.
# - `loha` reaches higher ranks with the parameters of a LoRA of twice the rank, and takes longer.
# - `diag-oft` and `boft` rotate the outputs of a layer and keep their lengths; they keep more of what the model knew.
# - All seven can be sharded, and train the same on any number of ranks: `make parity` proves it.
