"""`--headless PRESET --rehearse`: a rehearsal, with its film and what it shows."""

from __future__ import annotations

from pathlib import Path

from app.runs import film
from app.runs.monitor import explained
from app.runs.rehearsals import SHOWS, Rehearsal, captions_of
from trainer.config.load import ConfigFile
from trainer.launcher import commands, rehearsal
from trainer.run.events import EventReader
from trainer.system.errors import InputError
from trainer.system.terminal import complain, say

MOST_LINES = 8


def rehearse(loaded: ConfigFile, runs: Path) -> int:
    """Rehearse a run, and print its film, its first pictures as they are trained, and what it cannot show.

    Returns:
        The exit code, as `commands.train`.

    Raises:
        InputError: As `rehearsal.begin`.
    """
    handle = rehearsal.begin(loaded, runs)
    run = handle.run
    say(f"a rehearsal with the demo model, about {rehearsal.SECONDS} s on the CPU")
    code = commands.watch(run.config(), run, EventReader(run.events_file))
    handle.process.wait()
    if code:
        return code
    found = Rehearsal.of(run)
    try:
        pairs = found.pictures()
        files = [name for one in film.make(run).prompts for name in one.files]
    except (InputError, OSError) as error:  # pictures were moved meanwhile, or the disk is full: it has run
        complain(f"warning: {explained(error)}")
        pairs, files = [], []
    for real, _ in pairs[:MOST_LINES]:
        size = f"{real.size.width} x {real.size.height}" if real.size else "left out"
        masked = ", masked" if real.image.mask else ""
        say(f"{real.path.name}: {size}, {real.share:.0%} of it{masked}: {'; '.join(captions_of(real))}")
    if len(pairs) > MOST_LINES:
        say(f"and {len(pairs) - MOST_LINES} more")
    say(f"it shows: {SHOWS}")
    for sentence in found.cannot_show:
        say(f"it cannot show: {sentence}")
    for name in files:
        say(run.film / name)
    return code
