"""Which of the machine's GPUs a run may use, and the environment that gives it exactly those. Imports no torch.

CUDA_VISIBLE_DEVICES of this process restricts it, and the queue may choose some of the rest. CUDA numbers GPUs from the
fastest, nvidia-smi by their place on the bus, so that on mixed machines a number names different ones: runs get UUIDs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.system import gpus
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu, support

VISIBLE = "CUDA_VISIBLE_DEVICES"
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
ENDS_THE_LIST = ("", "-1", "NoDevFiles")
"""CUDA stops at such an entry."""


def visible(listed: Sequence[Gpu] | None = None) -> list[Gpu]:
    """Return the GPUs that processes started here may use, in the order of CUDA_VISIBLE_DEVICES if it is set.

    Numbers in it are read as nvidia-smi's.

    Args:
        listed: The machine's GPUs. None: nvidia-smi is asked.

    Raises:
        InputError: nvidia-smi fails, or the variable names a GPU that does not exist.
    """
    listed = gpus.read() if listed is None else listed
    text = os.environ.get(VISIBLE)
    return list(listed) if text is None or not listed else _named(listed, text)


def _named(listed: Sequence[Gpu], text: str) -> list[Gpu]:
    found: list[Gpu] = []
    for word in map(str.strip, text.split(",")):
        if word in ENDS_THE_LIST:
            break
        by_number = [gpu for gpu in listed if word.isdecimal() and gpu.index == int(word)]
        by_uuid = [gpu for gpu in listed if not word.isdecimal() and gpu.uuid.startswith(word)]
        # CUDA takes the first slice of a divided GPU that is named as a whole.
        of_card = [gpu for gpu in listed if gpu.is_slice and _is_of(gpu.card, word)]
        matching = of_card[:1] if word.isdecimal() and of_card else by_number or by_uuid or of_card[:1]
        if len(matching) != 1 or matching[0] in found:
            wrong = "occurs twice" if matching and matching[0] in found else f"names {len(matching) or 'none'}"
            numbers = ", ".join(str(gpu.index) for gpu in listed)
            raise InputError(
                f"{VISIBLE}={text}: '{word}' {wrong} of this machine's GPUs ({numbers}), and CUDA may ignore it and "
                "all that follow; correct the variable, or unset it"
            )
        found += matching
    return found


def _is_of(card: tuple[int, str], word: str) -> bool:
    index, uuid = card
    return word == str(index) or (not word.isdecimal() and uuid.startswith(word))


def hidden(listed: Sequence[Gpu]) -> str:
    """Return why a machine with an NVIDIA driver offers no GPU, as a sentence; "" if it does, or has no driver."""
    if not gpus.exist():
        return ""
    if not listed:
        return "nvidia-smi lists no GPU; a container needs --gpus all, a scheduler's job must ask for GPUs"
    if not visible(listed):
        return f"{VISIBLE}={os.environ.get(VISIBLE)} hides the GPUs of this machine; unset it to use them"
    return ""


def for_run(chosen: Sequence[int] = (), listed: Sequence[Gpu] | None = None) -> list[Gpu]:
    """Return the GPUs that a run may use, that of local rank 0 first.

    Without a choice by the user the newest and largest come first. Of MIG slices a run gets one: CUDA shows a process
    no second one.

    Args:
        chosen: Indices of GPUs; empty for all that are visible.
        listed: The machine's GPUs. None: nvidia-smi is asked.

    Raises:
        InputError: As `visible`, or a chosen GPU is not visible.
    """
    offered = visible(listed)
    if chosen:
        known = {gpu.index: gpu for gpu in offered}
        if missing := [index for index in chosen if index not in known]:
            numbers = ", ".join(map(str, known)) or "none"
            raise InputError(f"GPU {missing[0]} was chosen for this run, but the GPUs that it may use are: {numbers}")
        offered = [known[index] for index in chosen]
    elif VISIBLE not in os.environ:
        offered = sorted(support.usable(offered, support.installed()) or offered, key=_rank)
    return [gpu for gpu in offered if not gpu.is_slice] or offered[:1]


def _rank(gpu: Gpu) -> tuple[tuple[int, ...], int]:
    return tuple(-number for number in gpu.capability), -gpu.memory


def environment(chosen: Sequence[int], listed: Sequence[Gpu] | None = None) -> dict[str, str]:
    """Return the variables with which a run's processes see the GPUs of `for_run`, in its order.

    Args:
        chosen, listed: As for `for_run`.

    Raises:
        InputError: As `for_run`.
    """
    listed = gpus.read() if listed is None else listed
    if not listed:  # nothing is known about the GPUs, if there are any
        return {VISIBLE: ",".join(map(str, chosen)), **BY_BUS} if chosen else {}
    given = for_run(chosen, listed)
    if not chosen and VISIBLE not in os.environ and given == listed and len({gpu.name for gpu in listed}) == 1:
        return {}
    if all(gpu.uuid for gpu in given):
        return {VISIBLE: ",".join(gpu.uuid for gpu in given)}
    return {VISIBLE: ",".join(str(gpu.index) for gpu in given), **BY_BUS}


def why_no_cuda() -> str:
    """Return why CUDA finds no GPU on a machine where one is visible; "" where none is."""
    try:
        offered = visible()
    except InputError as error:
        return str(error)
    if not offered:
        return ""
    found = support.unusable(offered, support.installed())
    return str(found) if found else f"CUDA cannot use the {offered[0].name} here; see --doctor, {support.OR_CPU}"
