"""What a rehearsal shows of the run that is to come, in words and pictures, and what it cannot show."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from app.data import trained
from app.data.trained import Trained
from trainer.config.load import load_config, stage_configs
from trainer.config.schema import RunConfig
from trainer.config.titles import model_title
from trainer.launcher.rehearsal import LEFT, MOST_LETTERS, SIDE
from trainer.run.folder import RunDir
from trainer.system.errors import InputError

SHOWS = (
    "Crops, masks and captions are as the real run trains them: judge them by the pictures. The film shows the colours "
    "and the layout that a small model takes from them in a minute, with and without the trigger word."
)
LARGE_SIDE = 384
"""Pixels of the longer side of a picture that is shown as the real run crops it."""


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal and the run that it stands for.

    Attributes:
        real: The config of that run; of a run in stages, of its first stage.
        own: Its own config.
    """

    real: RunConfig
    own: RunConfig
    num_stages: int

    @classmethod
    def of(cls, run: RunDir) -> Rehearsal:
        """Read a rehearsal. Raises InputError for another run, and for one whose files are damaged."""
        if not run.is_rehearsal:
            raise InputError(f"{run.path.name}: not a rehearsal")
        whole = load_config(run.rehearsed_file).config
        return cls(stage_configs(whole)[0], run.config(), len(whole.stages))

    @property
    def model(self) -> str:
        """Name of the model of the real run."""
        return model_title(self.real.model.path, self.real.model.family)

    @property
    def cannot_show(self) -> list[str]:
        """Sentences about what only the real run shows."""
        own = self.own
        return [
            f"Likeness and detail: its pictures have {SIDE} × {SIDE} pixels. No face, hand, text or texture is judged "
            "by them.",
            f"What {self.model} knows: the demo model has only seen pictograms, and draws every other word of a prompt "
            "from your captions alone.",
            f"Whether steps, learning rate and method suit {self.model}: the demo model has its own, "
            f"{own.adapter.title} at {own.optim.lr:g}, and as many steps as a minute allows.",
            f"The end of long captions: it reads about {MOST_LETTERS} letters of each.",
            f"Memory, time and price of {self.model}: New run has them.",
            *self.left,
        ]

    @property
    def left(self) -> list[str]:
        """Sentences about what of the real run's data the demo model is not trained with."""
        data = self.real.data
        found = [sentence for field, sentence in LEFT.items() if getattr(data, field)]
        if any(folder.resolutions for folder in data.folders):
            found.append(LEFT["resolutions"])
        if self.num_stages:
            found.append("Further stages: it rehearses the first one.")
        return list(dict.fromkeys(found))

    def pictures(self) -> list[tuple[Trained, Trained]]:
        """Return the images as the real run and as the rehearsal train them. Raises InputError as a scan does."""
        data = self.real.data.model_copy(update={"max_images": self.own.data.max_images})
        return trained.compared(self.real.model_copy(update={"data": data}), self.own)

    def draw(self, pair: tuple[Trained, Trained]) -> tuple[Image.Image, Image.Image]:
        """Return both pictures of an image. Raises InputError as `trained.drawn`."""
        real, own = pair
        return trained.drawn(real, self.real.data, LARGE_SIDE), trained.drawn(own, self.own.data, LARGE_SIDE)


def captions_of(one: Trained) -> list[str]:
    """Return the captions of an image as they are trained, and how often it has none."""
    dropped = one.image.caption_dropout
    return [
        *(caption or "(no caption)" for caption in one.image.captions),
        *([f"without a caption {dropped:.0%} of the time"] if dropped and not one.is_held_out else []),
    ]
