"""The quantized base on disk, next to the cached images: converted once, read by any number of ranks."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.distributed.world import World
from trainer.parallel.load import Coded, own_rows
from trainer.parallel.mesh import REPLICATE
from trainer.system.errors import InputError
from trainer.system.files import make_private_if_new, rename
from trainer.weights.files import WeightFiles
from trainer.weights.identity import digest
from trainer.weights.tensors import VERSION, Layout, layout

ABANDONED_S = 3600
"""A draft that was not written to for so long is treated as left by a killed run."""

DRAFTS = f".{'[0-9a-f]' * 32}-{'[0-9a-f]' * 8}"
"""Pattern of the names of drafts. No other file is removed."""


class QuantizedCache:
    """Files of records, one per component, format and set of weight files. Every public method is collective.

    Args:
        folder: Shared by runs; all ranks must see it.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder, world

    def find(self, files: WeightFiles, coded: Mapping[str, Coded]) -> WeightFiles | None:
        """Find the records of all of `coded`, by their own names; None if they are not cached yet."""
        file = self._file(files, coded)
        try:
            found = WeightFiles.read([file]) if file.is_file() else None
        except (InputError, OSError):  # cut short by a full disk, or owned by another user; it is written again
            found = None
        return found if all(self._world.gather(found is not None)) else None

    def keep(self, module: nn.Module, files: WeightFiles, coded: Mapping[str, Coded]) -> str:
        """Write the records that the ranks hold. Returns the failure, empty when the file is complete."""
        tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in module.state_dict().items()}
        records = {name: tensors[name] for name in coded}
        plan = layout({name: ("U8", tuple(t.shape), t.numel()) for name, t in records.items()}, {})
        file = self._file(files, coded)
        draft = file.with_name(self._world.gather(f".{file.stem}-{secrets.token_hex(4)}")[0])
        failed = self._failed(lambda: self._begin(draft, plan))
        failed = failed or self._failed(lambda: _write(draft, plan, records))
        failed = failed or self._failed(lambda: rename(draft, file) if self._world.rank == 0 else None)
        if failed and self._world.rank == 0:
            with suppress(OSError):
                draft.unlink()
        return failed

    def _file(self, files: WeightFiles, coded: Mapping[str, Coded]) -> Path:
        sources = {file for made in coded.values() for file in files.entries[made.stored].sources()}
        made = [(name, made.format, files.entries[made.stored].identity()) for name, made in sorted(coded.items())]
        key = hashlib.sha256(f"{digest(sorted(sources))} {VERSION} {made}".encode()).hexdigest()
        return self._folder / f"{key[:32]}.safetensors"

    def _begin(self, draft: Path, plan: Layout) -> None:
        """Remove abandoned drafts and create a file of the right length, on rank 0."""
        if self._world.rank:
            return
        make_private_if_new(self._folder.parent)
        self._folder.mkdir(exist_ok=True)
        for left in self._folder.glob(DRAFTS):
            with suppress(FileNotFoundError):  # another run has renamed it meanwhile
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()
        with draft.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, plan.size)
            stream.write(plan.head)

    def _failed(self, act: Callable[[], object]) -> str:
        """Act on every rank. Returns the error of the first rank that failed, empty without one."""
        try:
            act()
            mine = ""
        except OSError as error:
            mine = str(error)
        return next(filter(None, self._world.gather(mine)), "")


def _write(draft: Path, plan: Layout, records: Mapping[str, Tensor]) -> None:
    """Write this rank's rows to their offsets; ranks that hold copies of the base divide the tensors."""
    with draft.open("r+b") as stream:
        for number, (name, tensor) in enumerate(records.items()):
            if not _is_its_turn(tensor, number):
                continue
            for rows, local in own_rows(tensor):
                stream.seek(plan.places[name] + rows.start * math.prod(tensor.shape[1:]))
                stream.write(local.cpu().contiguous().numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _is_its_turn(tensor: Tensor, number: int) -> bool:
    """Whether this copy of the base writes the tensor with this number."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if mesh is None or REPLICATE not in (mesh.mesh_dim_names or ()):
        return True
    copies = mesh[REPLICATE]
    return number % copies.size() == copies.get_local_rank()
