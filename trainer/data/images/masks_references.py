"""Images that go with those of the data by their names: masks of the loss, references of edit training, and the images
that are rejected in preference training. See DECISIONS 77."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from trainer.config.sections import NUMBERED_FOLDER
from trainer.data.images.image_io import ImageFile, same_name
from trainer.data.images.known_files import KnownFiles


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
    """The images of a folder by name, and their images of the data.

    A name is the path below the folder, without suffix, as `same_name` has it.

    Attributes:
        field: The field of the config that names the folder; messages begin with it.
        findings: Takes the messages.
        files: {name: image}.
        alone: (name, file) of the images of the data without a companion.
    """

    def __init__(self, field: str, folder: Path, files: Iterable[Path], findings: Findings, known: KnownFiles) -> None:
        self.field, self.folder, self.findings, self._known = field, folder, findings, known
        self.files: dict[str, Path] = {}
        self.num_images = 0
        self.alone: list[tuple[str, Path]] = []
        self._owners: dict[Path, Path] = {}
        for file in files:
            name = same_name(file.relative_to(folder).with_suffix("").as_posix())
            other = self.files.setdefault(name, file)
            if other != file:
                findings.problems.append(f"{field}: {other} and {file} have the same name; remove one of them")

    def claim(self, names: Sequence[str], name: str, image: Path) -> tuple[ImageFile, ...]:
        """The companions of these names, for the image called `name`. Raises InputError when one cannot be read."""
        self.num_images += 1
        if not names:
            self.alone.append((name, image))
        for file in (self.files[wanted] for wanted in names):
            owner = self._owners.setdefault(file, image)
            if owner != image:
                self.findings.problems.append(
                    f"{self.field}: {file} belongs to both {owner} and {image}; give the images different names"
                )
        return tuple(self._known.header(self.files[wanted]) for wanted in names)

    def warn_of_unused(self) -> None:
        unused = [file for file in self.files.values() if file not in self._owners]
        if unused:
            self.findings.warnings.append(
                f"{self.field}: {len(unused)} of {len(self.files)} images belong to no image of the data, "
                f"first {unused[0]}"
            )

    def miss(self, what: str, remedy: str) -> None:
        """Collect a problem about the images that have none, of which there is at least one."""
        self.findings.problems.append(
            f"{self.field}: {len(self.alone)} of {self.num_images} images have no {what}, first {self.alone[0][1]}; "
            f"add {remedy}"
        )


class Masks(_Companions):
    """Masks by name. An image may have none."""

    def of(self, name: str, image: ImageFile) -> ImageFile | None:
        """The mask of the image called `name`, or None. Raises InputError when it cannot be read.

        A mask whose shape is not the image's is collected as a problem.
        """
        masks = self.claim([name] if name in self.files else [], name, image.path)
        for mask in masks:
            if not _same_shape(mask, image):
                self.findings.problems.append(
                    f"{self.field}: {mask.path} is {mask.width} x {mask.height}, but {image.path} is "
                    f"{image.width} x {image.height}; give the mask its image's size or aspect ratio"
                )
        return masks[0] if masks else None

    def finish(self) -> None:
        """Collect messages about masks and images that do not match. To be called after the last image."""
        self.warn_of_unused()
        if not self.alone:
            return
        name, image = self.alone[0]
        if len(self.alone) == self.num_images:
            self.findings.problems.append(
                f"{self.field}: {self.folder}: none of its images has the name of an image of the data; "
                f"name the mask of {image} {name}.png"
            )
            return
        self.findings.warnings.append(
            f"{self.field}: {len(self.alone)} of {self.num_images} images have no mask and are in the loss as a whole, "
            f"first {image}"
        )


class ReferenceNames:
    """Finds the references of an image in a folder by their names.

    Args:
        names: Paths of the folder's images below it, without suffix, as `same_name` has them.
    """

    def __init__(self, names: Collection[str]) -> None:
        found = map(NUMBERED_FOLDER.fullmatch, {name.partition("/")[0] for name in names if "/" in name})
        self._folders = [folder for _, folder in sorted((int(match[1]), match[0]) for match in found if match)]
        self._names = names

    def of(self, name: str) -> list[str]:
        """The image called `name`, else those called `name_0`, `name_1` and so on, else those called `name` in numbered
        folders, by their numbers."""
        if name in self._names:
            return [name]
        numbered = list(takewhile(self._names.__contains__, (f"{name}_{number}" for number in count())))
        return numbered or [place for place in self.places(name) if place in self._names]

    def places(self, name: str) -> list[str]:
        """The name in each numbered folder, by their numbers, whether an image is there or not."""
        return [f"{folder}/{name}" for folder in self._folders]


class References(_Companions):
    """Reference images by name. Each image of the data needs one."""

    def __init__(self, field: str, folder: Path, files: Iterable[Path], findings: Findings, known: KnownFiles) -> None:
        super().__init__(field, folder, files, findings, known)
        self._names = ReferenceNames(self.files)
        self._shifted: list[tuple[Path, str]] = []

    def of(self, name: str, image: ImageFile) -> tuple[ImageFile, ...]:
        """The references of the image called `name`, as `ReferenceNames` finds them. Raises as `Masks.of`."""
        found, places = self._names.of(name), self._names.places(name)
        if found and found[0] in places and found != places[: len(found)]:
            self._shifted.append((image.path, next(place for place in places if place not in self.files)))
        return self.claim(found, name, image.path)

    def finish(self) -> None:
        """Collect messages about references and images that do not match. To be called after the last image."""
        self.warn_of_unused()
        if self.alone:
            name, _ = self.alone[0]
            self.miss("reference", f"{self.folder / name}.png, or {name}_0.png, {name}_1.png and so on")
        if self._shifted:
            image, place = self._shifted[0]
            self.findings.warnings.append(
                f"{self.field}: {len(self._shifted)} of {self.num_images} images are in a numbered folder but not in "
                f"all before it, and those behind the gap move up: first {image}, without {self.folder / place}.png"
            )


class Rejected(_Companions):
    """The images that are not preferred, by name. Each image of the data needs one."""

    def __init__(self, field: str, folder: Path, files: Iterable[Path], findings: Findings, known: KnownFiles) -> None:
        super().__init__(field, folder, files, findings, known)
        self._cropped: list[Path] = []

    def of(self, name: str, image: ImageFile) -> ImageFile | None:
        """The image called `name`, None where it is missing, which is collected as a problem. Raises as `Masks.of`."""
        found = self.claim([name] if name in self.files else [], name, image.path)
        self._cropped += [one.path for one in found if not _same_shape(one, image)]
        return found[0] if found else None

    def finish(self) -> None:
        """Collect messages about images that do not match. To be called after the last image."""
        self.warn_of_unused()
        if self.alone:
            name, _ = self.alone[0]
            self.miss("rejected image", f"{self.folder / name}.png")
        if self._cropped:
            self.findings.warnings.append(
                f"{self.field}: {len(self._cropped)} of {self.num_images} images are cropped to another aspect ratio, "
                f"that of the preferred image, first {self._cropped[0]}"
            )


def _same_shape(one: ImageFile, other: ImageFile) -> bool:
    """Whether both have the same aspect ratio, up to rounding to whole pixels."""
    sides = (one.width, one.height, other.width, other.height)
    return abs(one.width * other.height - one.height * other.width) <= max(sides)
