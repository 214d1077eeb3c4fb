"""The size of a sample that a model generates and trains on: an image, or a clip. See DECISIONS 211."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """The size of an image or a clip.

    Attributes:
        width: Pixels.
        height: Pixels.
        frames: Number of frames; 1 for a still.
    """

    width: int
    height: int
    frames: int = 1

    @property
    def frame(self) -> tuple[int, int]:
        """(width, height) of one frame, as Pillow takes it."""
        return self.width, self.height

    @property
    def values(self) -> tuple[int, ...]:
        """(width, height), and the frames of a clip: `Size(*values)` is the size. Keys of caches and records hold it,
        in which a still is the same with and without clips."""
        return self.frame if self.frames == 1 else (*self.frame, self.frames)

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.width * self.height * self.frames
