"""The tensors of a folder of transformers by the names that its classes have today, and an export's in the folder's.

Files hold the names of when they were written: experts one by one, a head under another name, names without the prefix
of the base model. transformers converts them when it loads a model whole; here its own rules are applied to names and
shapes only, and every tensor is read by rows (see trainer.weights.composed). See DECISIONS 156.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.system.errors import InputError
from trainer.weights.composed import LazyTensor, entry_of, lazy, lazy_entry
from trainer.weights.files import WeightFiles, stored_tensors
from trainer.weights.tensors import OpenFiles, TensorEntry

COMPUTED = r"(^|\.)(inv_freq|masked_bias|position_ids)$"
"""Names of buffers that older files hold and models compute themselves."""
TEXT_PART = "language_model."
"""Part of the names of a text model inside one that also sees or hears."""
ROWS = 4096
"""Rows of two tensors that are compared at a time."""


@dataclass(frozen=True)
class StoredNames:
    """A model's tensors on disk.

    Attributes:
        entries: {name in the model: its entry}.
        reverse: Makes `written`.
    """

    entries: Mapping[str, TensorEntry]
    reverse: Callable[[], Mapping[str, Tensor]]

    @cached_property
    def written(self) -> Mapping[str, Tensor]:
        """{name in an export: how it is made of the model's tensors}. Takes seconds for thousands of experts."""
        return self.reverse()


def read_names(model: Any, files: Sequence[Path], whole: Any = None, transposed: Collection[str] = ()) -> StoredNames:
    """Find the tensors of a model.

    Args:
        model: The language model on the meta device.
        files: The safetensors files.
        whole: The model that the files hold, on the meta device, where `model` is only its text part.
        transposed: Names of weights whose rows are columns in the files.

    Raises:
        InputError: The files hold tensors that neither model has, or several values for a tensor that the model shares.
    """
    stored = WeightFiles.read(files).entries
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    own = {name: shape[::-1] if name in transposed else shape for name, shape in shapes.items()}
    naming = model if whole is None else whole
    shapes = own if whole is None else dict.fromkeys(whole.state_dict(), ())
    read = _Conversion.of(naming, model.state_dict().keys() if whole is None else shapes.keys())
    found, unknown = read.tensors(stored)
    if whole is not None:
        found = {name.replace(TEXT_PART, "", 1): tensor for name, tensor in found.items()}
        unknown = [key for key in unknown if TEXT_PART in key]
    firsts = first_names(model)
    entries: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if name in own:
            entries[name] = tensor
        # A tied weight is in the files under any one of its names, or under all of them.
        elif name in firsts:
            entries.setdefault(firsts[name], tensor)
        elif whole is None:
            unknown.append(name)
    _check_known(naming, files, unknown, stored)
    _check_shared({name: tensor for name, tensor in found.items() if name in firsts}, firsts)

    def written() -> dict[str, Tensor]:
        made = read.written(own, stored) if whole is None else _Conversion.default(model).reverted(own)
        return _turned(made, own, transposed)

    return StoredNames(
        {name: entry_of(tensor.t() if name in transposed else tensor) for name, tensor in entries.items()},
        written,
    )


def first_names(model: Any) -> dict[str, str]:
    """{other name of a shared tensor: its first}, as of a head that is the embedding."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}


def _check_shared(found: Mapping[str, Tensor], firsts: Mapping[str, str]) -> None:
    """Refuse two stored tensors with other numbers where config.json says that the model has one.

    transformers 5 loads both and shares nothing; other programs drop one of them. Read in pieces: a head may be large.
    """
    first_found: dict[str, str] = {}
    for name, tensor in found.items():
        other = first_found.setdefault(firsts[name], name)
        one, two = entry_of(found[other]), entry_of(tensor)
        if other != name and not _are_equal(one, two):
            raise InputError(
                f"{two.file}: '{two.key}' and '{one.key}' hold other numbers, but by config.json they are one tensor "
                "(tie_word_embeddings). transformers loads both, other programs drop one: set tie_word_embeddings to "
                f"false in {two.file.parent / 'config.json'}, or remove the one that is not meant from the file"
            )


def _are_equal(one: TensorEntry, two: TensorEntry) -> bool:
    """Whether two stored tensors hold the same numbers."""
    if one.shape != two.shape:
        return False
    files, starts = OpenFiles(), range(0, one.shape[0], ROWS)
    pairs = ([entry.rows(files, start, min(start + ROWS, one.shape[0])) for entry in (one, two)] for start in starts)
    return all(torch.equal(first.float(), second.float()) for first, second in pairs)


def _turned(
    written: Mapping[str, Tensor], own: Mapping[str, tuple[int, ...]], transposed: Collection[str]
) -> dict[str, Tensor]:
    """Make written tensors of the model's, where the model's are turned."""
    if not transposed:
        return dict(written)
    turned = {name: lazy(name, own[name][::-1], torch.float32).t() for name in transposed}
    # Weights that are turned are only renamed.
    return {key: turned.get(_source(tensor), tensor) for key, tensor in written.items()}


def _source(tensor: Tensor) -> str:
    """Name of the first of the model's tensors that it is made of."""
    assert isinstance(tensor, LazyTensor)
    return str(next(iter(tensor.node.leaves())))


def _check_known(naming: Any, files: Sequence[Path], unknown: Sequence[str], stored: Mapping[str, Any]) -> None:
    ignored = [COMPUTED, *(naming._keys_to_ignore_on_load_unexpected or ())]
    lost = {name for name, _ in naming.named_buffers()} - naming.state_dict().keys()
    left = sorted(
        key
        for key in unknown
        if not any(re.search(pattern, key) for pattern in ignored) and not any(name.endswith(key) for name in lost)
    )
    if left:
        raise InputError(
            f"{files[0]}: {len(left)} tensors that the model does not have, first '{left[0]}'; "
            "the weights and config.json belong to different models"
        )


@dataclass
class _Conversion:
    """transformers' rules for one class of models.

    Attributes:
        names: Names of the model's tensors.
        transforms: The rules, in order; they note whether they were used.
        renamed: {name in the model: name in the files} of tensors that are only renamed.
        composed: Names of tensors that are made of several, or of parts, of stored ones, with the stored ones' names.
    """

    model: Any
    names: Collection[str]
    transforms: Sequence[Any]
    renamed: dict[str, str]
    composed: list[tuple[tuple[str, ...], frozenset[str]]]

    @classmethod
    def of(cls, model: Any, names: Collection[str]) -> _Conversion:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return cls(model, frozenset(names), get_model_conversion_mapping(model), {}, [])

    @classmethod
    def default(cls, model: Any) -> _Conversion:
        """The rules by which transformers saves a model that it did not load."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        transforms = get_model_conversion_mapping(model, add_legacy=False)
        kept = [transform for transform in transforms if not isinstance(transform, PrefixChange)]
        return cls(model, frozenset(model.state_dict()), kept, {}, [])

    def tensors(self, stored: Mapping[str, TensorEntry]) -> tuple[dict[str, Tensor], list[str]]:
        """Return {name in the model: tensor}, and the names in the files of tensors that the model does not have."""
        from transformers.core_model_loading import dot_natural_key

        renamings, converters = _kinds(self.transforms)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, tuple[Any, list[str]]] = {}
        found: dict[str, Tensor] = {}
        unknown = []
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = self._name(key, renamings, converters)
            if name not in self.names:
                unknown.append(key)
            elif pattern is None:
                found[name] = lazy_entry(stored[key])
                self.renamed[name] = key
            else:
                converter, keys = groups.setdefault(name, (deepcopy(by_pattern[pattern]), []))
                converter.add_tensor(name, key, pattern, lazy_entry(stored[key]))
                keys.append(key)
        for name, (converter, keys) in groups.items():
            made = self._converted(name, converter, stored[keys[0]])
            self.composed.append((tuple(made), frozenset(keys)))
            found |= made
        return found, unknown

    def written(self, own: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
        """{name in the files: how it is made of the model's tensors}, in the model's order.

        A group of tensors whose rule cannot be reversed is written under the model's names, which transformers reads.
        """
        in_files: dict[str, dict[str, Tensor]] = {
            name: {key: lazy(name, own[name], torch.float32)} for name, key in self.renamed.items() if name in own
        }
        for names, keys in self.composed:
            if not all(name in own for name in names):
                continue
            plain: dict[str, Tensor] = {name: lazy(name, own[name], torch.float32) for name in names}
            made = self.reverted({name: own[name] for name in names})
            fits = made.keys() == keys and all(tuple(made[key].shape) == stored[key].shape for key in keys)
            in_files[names[0]] = made if fits else plain
        return {key: tensor for name in own for key, tensor in in_files.get(name, {}).items()}

    def reverted(self, own: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """{name in the files: how it is made of these tensors of the model} by the reversed rules that were used."""
        from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

        used = [transform for transform in self.transforms if transform.was_used() or not self.renamed]
        renamings, converters = _kinds([transform.reverse_transform() for transform in reversed(used)])
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        made: dict[str, Tensor] = {}
        groups: dict[str, Any] = {}
        for name in sorted(own, key=dot_natural_key):
            tensor = lazy(name, own[name], torch.float32)
            renamed, pattern = apply_converters(name, converters)
            if pattern is None:
                made[apply_renamings(name, renamings)] = tensor
            else:
                group = groups.setdefault(renamed, deepcopy(by_pattern[pattern]))
                group.add_tensor(renamed, name, pattern, tensor)
        for name, converter in groups.items():
            parts = self._converted(name, converter, None)
            made |= {apply_renamings(part, renamings): tensor for part, tensor in parts.items()}
        return made

    def _name(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix, known = self.model.base_model_prefix, dict.fromkeys(self.names, True)
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in self.names and key in self.names:  # a file of today's names
            name, pattern = rename_source_key(key, [], [], prefix, known)
        return name, pattern

    def _converted(self, name: str, converter: Any, first: TensorEntry | None) -> dict[str, Tensor]:
        try:
            made = converter.convert(name, model=self.model, config=self.model.config)
        except (ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
            where = f"{first.file}: '{first.key}'" if first else f"'{name}'"
            raise InputError(
                f"{where}: '{name}' cannot be made of the stored tensors ({error}); download the folder again, or name "
                "a copy that transformers has saved"
            ) from error
        return {key: one[0] if isinstance(one, list) else one for key, one in made.items()}


def _kinds(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Split rules into those that only rename and those that convert."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    listed = list(transforms)
    return [t for t in listed if isinstance(t, WeightRenaming)], [t for t in listed if isinstance(t, WeightConverter)]
