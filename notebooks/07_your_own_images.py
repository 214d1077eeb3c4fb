# %% [markdown]
# # 7. Your own images
#
# From a folder of images to a run: captions, the checks before the start, how images of all shapes are trained
# together, and how often each one is seen.
#
# Put your own folder into the next cell. Without one, this notebook makes a folder of images in three shapes from
# those that come with ShardStudio.

# %% tags=["parameters"]
from pathlib import Path

from app import notebook

RUNS = notebook.RUNS
IMAGES = None  # or your own folder, as Path("/home/ada/photos")
TRIGGER = "risograph"  # the word that will stand for the style
STEPS = 40
DEVICE = notebook.device(2)  # cuda where this machine has two GPUs

# %% [markdown]
# ## A folder
#
# An image is a file of type png, jpg, webp, bmp or tif, of any size, in any depth of folders. Its *caption* is a text
# file of the same name in the same folder. (Many captions also fit into one `metadata.jsonl`, see
# `trainer/data/IMAGES.md`.)

# %%
from PIL import Image

SHAPES = {"square": (160, 160), "wide": (200, 120), "tall": (120, 200)}
shipped = sorted(Path(notebook.config("quickstart").config.data.path).glob("*.png"))


def make_folder(folder: Path, count: int = 24) -> Path:
    """Copy the shipped images with their captions, padded to three shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(shipped[:count]):
        shape, size = list(SHAPES.items())[number % len(SHAPES)]
        with Image.open(file) as image:
            thing = image.convert("RGB").resize((min(size), min(size)))
        paper = Image.new("RGB", size, thing.getpixel((0, 0)))
        paper.paste(thing, ((size[0] - min(size)) // 2, (size[1] - min(size)) // 2))
        copy = folder / f"{file.stem}-{shape}.png"
        paper.save(copy)
        copy.with_suffix(".txt").write_text(file.with_suffix(".txt").read_text())
    return folder


folder = Path(IMAGES) if IMAGES else make_folder(RUNS / "my-images")
files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".png", ".jpg", ".webp"))
notebook.gallery({"": {file.name: file for file in files[:12]}})

# %% [markdown]
# ## Errors are reported before the start
#
# A typing mistake should not show up after an hour of loading on a GPU. So `start` first checks every file. Here is a
# folder with four mistakes in it:

# %%
wrong = make_folder(RUNS / "images-with-mistakes", count=5)
spoilt = sorted(wrong.glob("*.png"))
spoilt[0].write_bytes(spoilt[0].read_bytes()[:20])  # an incomplete download
spoilt[1].with_suffix(".txt").unlink()  # no caption
spoilt[2].with_suffix(".txt").write_text("  \n")  # an empty one
spoilt[3].with_suffix(".txt").write_bytes("Kaninchen, müde".encode("latin-1"))  # not UTF-8
CHANGES = [
    *(f"data.trigger={TRIGGER}", f"train.steps={STEPS}", f"parallel.device={DEVICE}"),
    *(f"sample.every={STEPS}", "sample.steps=12", "data.validation=0"),
]
try:
    notebook.start(notebook.config("quickstart", *CHANGES, f"data.path={wrong}"), RUNS)
except ValueError as error:
    print(str(error).replace(f"{wrong}/", ""))

# %% [markdown]
# Each line names the file and the remedy. Some of it you may want to allow: `data.missing_caption: empty` trains an
# image without a caption, and `data.bad_image: warn` leaves out unreadable files. The fourth has to be repaired.

# %%
from trainer.data.images import image_files

spoilt[3].with_suffix(".txt").write_text("Kaninchen, müde", encoding="utf-8")
LENIENT = ["data.missing_caption=empty", "data.bad_image=warn", "data.validation=0"]
patient = notebook.config("quickstart", f"data.path={wrong}", *LENIENT)
found = image_files.scan(patient.config.data)
print(*(warning.replace(f"{wrong}/", "") for warning in found.warnings), sep="\n")
print(f"{len(found.train)} images to train")

# %% [markdown]
# ## Captions and the trigger
#
# The caption describes the image, *except* the style or subject, which the trigger stands for. `[trigger]` in a
# caption is replaced by the trigger; a caption without `[trigger]` gets it in front.
#
# The best trigger is a word that means nothing to the model yet. Below are captions as the model will read them.
#
# Hundreds of images are better described by a model that sees. With such a model on this machine (`hf download
# Qwen/Qwen2.5-VL-3B-Instruct`), a cell captions what has no caption yet; `notebook.undo_captions(folder)` takes that
# back:
#
# ```
# await notebook.caption(folder, "Qwen/Qwen2.5-VL-3B-Instruct", style="sentence", trigger=True)
# ```

# %%
config = notebook.config("quickstart", *CHANGES, f"data.path={folder}")
dataset = image_files.scan(config.config.data)
notebook.Table(
    ["file", "width", "height", "caption"],
    [[image.path.name, image.width, image.height, image.caption] for image in dataset.train[:6]],
)

# %% [markdown]
# ## Buckets
#
# Images that are trained in one pass must have one size. Fitting all into a square would crop the wide ones. So there
# are *buckets*: sizes of about the same area, `data.resolution` squared, in several shapes. Each image goes into the
# bucket whose shape is nearest to its own, is scaled to cover it, and cropped. A batch is taken from one bucket.

# %%
from trainer.config import families
from trainer.data.images.buckets import bucket_sizes, choose_bucket, images_per_bucket

data = config.config.data
multiple = families.of(config.config.model.family).size_multiple
sizes = bucket_sizes(data.resolution, multiple, data.max_aspect)
filled = images_per_bucket((choose_bucket(image.size, sizes) for image in dataset.train), sizes)
print("all buckets:", ", ".join(f"{size.width} x {size.height}" for size in sizes))
notebook.Table(
    ["bucket", "pixels", "images"],
    [[f"{size.width} x {size.height}", size.pixels, count] for size, count in filled.items()],
)

# %% [markdown]
# Some of the images as the model would get them, bucket by bucket:

# %%
from trainer.data.images.image_io import load_rgb

cut = RUNS / "as-trained"
cut.mkdir(exist_ok=True)
rows: dict[str, dict[str, Path]] = {f"{size.width} x {size.height}": {} for size in filled}
for image in dataset.train[:12]:
    size = choose_bucket(image.size, sizes)
    load_rgb(image, size.frame).save(cut / image.path.name)
    row = rows[f"{size.width} x {size.height}"]
    row[f"{len(row) + 1}"] = cut / image.path.name
notebook.gallery(rows, size=max(max(size.frame) for size in sizes))

# %% [markdown]
# The excess is cropped around the center. Another focus point is set on the page (*Crop* at an image), and kept in a
# `metadata.jsonl`: `{"file_name": "fox.png", "focus": [0.5, 0.2]}`. With `data.fit: pad` nothing is cut off:
# an image gets borders, which are masked out of the loss. With `data.resolutions: [48, 64]` each image is trained at
# both sizes:

# %%
from trainer.data.images.buckets import Buckets

several = notebook.config("quickstart", *CHANGES, f"data.path={folder}", "data.resolutions=[48,64]").config.data
buckets = Buckets.of(several, multiple, longest=None)
for image in dataset.train[:3]:
    print(image.path.name, *(f"{size.width} x {size.height}" for _, size in buckets.of_image(image, several.sides)))

# %% [markdown]
# ### Exercise 1
#
# `data.repeats: 5` would show each image five times per *epoch*, one round through all images. How many steps of
# `train.batch_size` images would an epoch of your folder then take, if no image were left over? (A number, perhaps
# with a fraction.)

# %%
print(f"{len(dataset.train)} images, {config.config.train.batch_size} per step")
answer_1 = ...
notebook.exercise(
    answer_1,
    right=5 * len(dataset.train) / config.config.train.batch_size,
    hint="Images times repeats, divided by the images of a step.",
)

# %% [markdown]
# ### Exercise 2
#
# When an image is drawn, the prompt counts more than what the model would draw without one. For that the model must
# know what it draws without a prompt. So `data.caption_dropout` trains a share of the samples with an empty caption.
# How many samples of this run will that be, on average?

# %%
print(f"{STEPS} steps of {config.config.train.batch_size}, caption_dropout {data.caption_dropout}")
answer_2 = ...
notebook.exercise(
    answer_2,
    right=STEPS * config.config.train.batch_size * data.caption_dropout,
    hint="The share of all samples of all steps.",
)

# %% [markdown]
# ## Will it fit?
#
# `plan` computes the peak memory of a run per GPU, part by part, before anything is started or downloaded. Without a
# second argument it is for this machine's GPUs. Here it is for a model three thousand times larger than the demo's, on
# four cards of 24 GB, with the changes that would make it fit. Encoding captions and drawing samples are included.

# %%
notebook.plan(notebook.config("flux2-dev-lora-4gpu"), "4x24gb")

# %% [markdown]
# ## Train
#
# One more decision. `data.max_aspect` says how long and narrow a bucket may be: 2 by default, as published models were
# trained in many shapes. The demo model has only ever seen squares, and would forget how to draw them while it learned
# other shapes. So here it is 1. Change it if you want to see that.
#
# The sample prompts of the preset name things that are in none of the images.

# %%
config = notebook.config("quickstart", *CHANGES, f"data.path={folder}", "data.max_aspect=1")
run = notebook.start(config, RUNS)
notebook.dashboard(run)

# %% [markdown]
# Wait for the end:

# %%
print("The run has", await notebook.ended(run))

# %% [markdown]
# ## Before and after
#
# Each pair is drawn from the same noise.

# %%
notebook.gallery(notebook.samples(run))

# %% [markdown]
# ## With a model of your own
#
# Everything above is the same for a published model: take its preset, download what it names, and set `data.path` and
# `data.trigger`. These are all families of image models. For a model without a preset, take one of its family, and set
# `model.path` and `model.options.architecture`. Some models make an image from others, their references.

# %%
from trainer.config import presets

own: dict[str, list[str]] = {}
for name, file in presets.find_presets(RUNS / "presets").items():
    own.setdefault(notebook.config(file).config.model.family, []).append(name)
notebook.Table(
    ["family", "models", "references", "presets"],
    [
        [family, ", ".join(known.architectures), "yes" if known.reads_references else "", ", ".join(names)]
        for family, names in sorted(own.items())
        if (known := families.of(family)).trains_on == "images"
    ],
)

# %% [markdown]
# A few dozen images are usual for one subject or one look. Then:
#
# - look at the samples of the first few hundred steps, not only at the loss;
# - if samples copy your images, train shorter, or with a smaller `adapter.rank`, or add images;
# - if they do not change, check that the trigger is in the prompt, then raise `optim.lr`.
#
# `notebook.form("flux2-klein-4b-lora-1gpu", "data.path=...")` shows what can be set. The page (`make ui`) has a
# screen *Data* in which captions are edited next to their images.
