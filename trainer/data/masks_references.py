"""Images that go with photos by their names: masks of the loss, and references of edit training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from trainer.data.image_io import Picture, open_picture


@dataclass
class Findings:
    """Messages about a dataset.

    Attributes:
        problems: Messages that stop the run.
        warnings: Messages that do not.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _Companions:
    """The images of a folder by name (their path below the folder, without suffix), and the photos they belong to.

    Attributes:
        field: The field of the config that names the folder; messages begin with it.
        findings: Takes the messages.
        files: {name: image}.
        alone: (name, file) of the photos without a companion.
    """

    def __init__(self, field: str, folder: Path, files: Iterable[Path], findings: Findings) -> None:
        self.field, self.folder, self.findings = field, folder, findings
        self.files: dict[str, Path] = {}
        self.num_photos = 0
        self.alone: list[tuple[str, Path]] = []
        self._owners: dict[Path, Path] = {}
        for file in files:
            name = file.relative_to(folder).with_suffix("").as_posix()
            other = self.files.setdefault(name, file)
            if other != file:
                findings.problems.append(f"{field}: {other} and {file} have the same name; remove one of them")

    def claim(self, names: Sequence[str], name: str, photo: Path) -> tuple[Picture, ...]:
        """The images of these names, for the photo called `name`. Raises InputError when one cannot be read."""
        self.num_photos += 1
        if not names:
            self.alone.append((name, photo))
        for file in (self.files[wanted] for wanted in names):
            owner = self._owners.setdefault(file, photo)
            if owner != photo:
                self.findings.problems.append(
                    f"{self.field}: {file} belongs to both {owner} and {photo}; give the images different names"
                )
        return tuple(open_picture(self.files[wanted]) for wanted in names)

    def warn_of_unused(self) -> None:
        unused = [file for file in self.files.values() if file not in self._owners]
        if unused:
            self.findings.warnings.append(
                f"{self.field}: {len(unused)} of {len(self.files)} images belong to no image of the data, "
                f"first {unused[0]}"
            )


class Masks(_Companions):
    """Masks by name. A photo may have none."""

    def of(self, name: str, photo: Picture) -> Picture | None:
        """The mask of the photo called `name`, or None. Raises InputError when it cannot be read.

        A mask whose shape is not the photo's is collected as a problem.
        """
        masks = self.claim([name] if name in self.files else [], name, photo.path)
        for mask in masks:
            if not _same_shape(mask, photo):
                self.findings.problems.append(
                    f"{self.field}: {mask.path} is {mask.width} x {mask.height}, but {photo.path} is "
                    f"{photo.width} x {photo.height}; give the mask its photo's size or aspect ratio"
                )
        return masks[0] if masks else None

    def finish(self) -> None:
        """Collect messages about masks and photos that do not match. To be called after the last photo."""
        self.warn_of_unused()
        if not self.alone:
            return
        name, photo = self.alone[0]
        if len(self.alone) == self.num_photos:
            self.findings.problems.append(
                f"{self.field}: {self.folder}: none of its images has the name of an image of the data; "
                f"name the mask of {photo} {name}.png"
            )
            return
        self.findings.warnings.append(
            f"{self.field}: {len(self.alone)} of {self.num_photos} images have no mask and are learned whole, "
            f"first {photo}"
        )


class References(_Companions):
    """Reference images by name. Each photo needs one."""

    def of(self, name: str, photo: Picture) -> tuple[Picture, ...]:
        """The image called `name`, else those called `name_0`, `name_1` and so on. Raises as `Masks.of`."""
        numbered = takewhile(self.files.__contains__, (f"{name}_{number}" for number in count()))
        return self.claim([name] if name in self.files else list(numbered), name, photo.path)

    def finish(self) -> None:
        """Collect messages about references and photos that do not match. To be called after the last photo."""
        self.warn_of_unused()
        if self.alone:
            name, photo = self.alone[0]
            self.findings.problems.append(
                f"{self.field}: {len(self.alone)} of {self.num_photos} images have no reference, first {photo}; "
                f"add {self.folder / name}.png, or {name}_0.png, {name}_1.png and so on"
            )


def _same_shape(one: Picture, other: Picture) -> bool:
    """Whether both have the same aspect ratio, up to rounding to whole pixels."""
    sides = (one.width, one.height, other.width, other.height)
    return abs(one.width * other.height - one.height * other.width) <= max(sides)
