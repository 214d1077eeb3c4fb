"""Writes a plan as a page in one HTML file: memory over a training step, the parts of the run, and what would fit.

The file loads nothing from a server and has no scripts, so it can be mailed or archived. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from markupsafe import Markup

from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.picture import Limit, draw
from trainer.plan.simulate.phases import Item, Phase, by_kind, memory_kind, moment
from trainer.plan.simulate.timeline import Point
from trainer.system import files
from trainer.system.amounts import GIB
from trainer.system.errors import InputError
from trainer.view.colors import both_variables
from trainer.view.render import POLICY

FIRST_LINE = "<!doctype html><!-- a memory plan of ShardStudio: --html replaces this file -->"
"""Only files that begin with it are replaced."""
STYLE = f"""
:root {{ color-scheme: light dark; {both_variables()} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; font: 14px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; color: var(--ink);
  background: var(--bg); }}
main {{ max-width: 960px; margin: auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 22px; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 18px; margin: 32px 0 4px; }} h3 {{ font-size: 14px; margin: 0 0 8px; }}
p {{ margin: 0 0 8px; color: var(--ink2); overflow-wrap: anywhere; }}
section.card {{ background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px;
  margin-top: 16px; }}
.verdict {{ border-radius: 6px; padding: 8px 12px; margin: 12px 0 0; font-weight: 600; background: var(--sunk); }}
.fits {{ color: var(--ok); background: var(--okt); }} .tight {{ color: var(--warn); background: var(--warnt); }}
.does-not-fit {{ color: var(--bad); background: var(--badt); }}
.wide {{ overflow-x: auto; }} .wide svg {{ min-width: 640px; }} .wide + p {{ margin: 8px 0 0; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; vertical-align: top; padding: 3px 16px 3px 0; }}
th {{ font-weight: 400; color: var(--ink3); white-space: nowrap; }}
td.size {{ text-align: right; white-space: nowrap; }}
tr.sum td, tr.sum th {{ font-weight: 600; color: var(--ink); border-top: 1px solid var(--line); }}
.sw {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }}
.phase {{ display: grid; grid-template-columns: 9rem minmax(0, 1fr) 5.5rem; gap: 4px 12px; align-items: center;
  margin: 6px 0; }} .phase b {{ text-align: right; font-weight: 400; }}
.bar {{ position: relative; height: 14px; background: var(--sunk); border-radius: 3px; }}
.bar span {{ display: flex; gap: 1px; height: 100%; border-radius: 3px; overflow: hidden; }}
.bar span i {{ display: block; height: 100%; }} .bar > i {{ position: absolute; top: -3px; bottom: -3px; width: 0;
  border-left: 2px solid var(--bad); }}
code {{ font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }} li {{ margin: 4px 0; }}
ul {{ margin: 0; padding-left: 20px; }}
@media (max-width: 560px) {{ .phase {{ grid-template-columns: minmax(0, 1fr) 5.5rem; }}
  .phase .bar {{ grid-column: 1 / -1; grid-row: 2; }} }}
"""


@dataclass(frozen=True)
class Section:
    """The plan of a run or of one of its stages.

    Attributes:
        name: Name of the stage; "" for a run without stages.
        title: Method, base, size and ranks in a line.
        plan: The plan.
        facts: (name, text) of host memory, disk, links and time.
        points: The moments of a training step.
        ways: Changes with which it fits, each as a sentence.
        remarks: Sentences to know before the run.
    """

    name: str
    title: str
    plan: MemoryPlan
    facts: Sequence[tuple[str, str]]
    points: Sequence[Point]
    ways: Sequence[str]
    remarks: Sequence[str]


def refuse(file: Path) -> None:
    """Raise InputError if a page cannot be written to a file, or would replace a file of another kind."""
    if not file.parent.is_dir():
        raise InputError(f"--html {file}: the folder {file.parent} does not exist; make it, or name another file")
    if file.is_dir():
        raise InputError(f"--html {file}: a folder; name a file in it, for example {file / 'plan.html'}")
    if file.is_symlink() or (file.exists() and not _is_ours(file)):
        raise InputError(f"--html {file}: exists and is not the page of a plan; move it, or name another file")
    try:
        with TemporaryFile(dir=file.parent):
            pass  # a right to write is not enough: the file system may be read-only or full
    except OSError as error:
        sentence = f"the folder {file.parent} cannot be written ({error.strerror}); name another file"
        raise InputError(f"--html {file}: {sentence}") from error


def _is_ours(file: Path) -> bool:
    """Whether a regular file begins as the pages do."""
    try:
        with files.opened(file) as stream:
            return stream.readline(len(FIRST_LINE) + 1).decode(errors="replace").rstrip("\n") == FIRST_LINE
    except (OSError, InputError):  # no right to read it, or not a file: it is not replaced
        return False


def write(file: Path, name: str, whole: str, sections: Sequence[Section]) -> None:
    """Write the page of a plan.

    Args:
        file: Where to write it.
        name: Name of the run.
        whole: Length of all stages as a sentence; "" without stages.
        sections: The run, or its stages.

    Raises:
        InputError: It cannot be written.
    """
    refuse(file)  # a plan may take minutes, in which others write files too
    page = Markup(
        '{first}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>Plan of {name}</title><style>{style}</style></head>"
        "<body><main><h1>Plan of {name}</h1>{whole}{sections}</main></body></html>\n"
    ).format(
        first=Markup(FIRST_LINE),
        policy=POLICY,
        name=name,
        style=Markup(STYLE),
        whole=_paragraph(whole),
        sections=Markup().join(map(_section, sections)),
    )
    try:
        files.replace(file, page)
    except OSError as error:
        raise InputError(f"--html {file}: cannot be written ({error.strerror}); name another file") from error


def _section(one: Section) -> Markup:
    plan = one.plan
    card = Markup('<section class="card"><h3>{}</h3>{}</section>')
    limit = Limit.of(plan)
    step = Markup('<div class="wide">{}</div>').format(draw(one.points, limit))
    parts = [card.format("Memory of each GPU over one training step", step + _paragraph(_explained(plan, limit)))]
    parts.append(card.format("Memory of each GPU at its fullest", _memory(plan)))
    parts.append(card.format("Parts of the run", _phases(plan)))
    if one.ways:
        parts.append(card.format("What would fit", _list(one.ways)))
    parts.append(card.format("Time and space", _table(one.facts)))
    if one.remarks:
        parts.append(card.format("Remarks", _list(one.remarks)))
    mood = (plan.verdict or "").replace(" ", "-")
    return Markup('{name}<p>{title}</p><p class="verdict {mood}">{verdict}</p>{parts}').format(
        name=Markup("<h2>{}</h2>").format(one.name) if one.name else "",
        title=one.title,
        mood=mood,
        verdict=f"{verdict(plan)[0].upper()}{verdict(plan)[1:]}.",
        parts=Markup().join(parts),
    )


def _explained(plan: MemoryPlan, limit: Limit) -> str:
    is_drawn = limit.seen(plan.training.peak).reserve > 0
    where = "The pale band on top is" if is_drawn else f"Not drawn is, with {limit.reserve / GIB:.2f} GiB,"
    what = next((item.sentence for item in plan.training.items if item.name == "reserve"), "")
    return (
        "Each block is drawn at its fullest moment; its width is its share of the computing, not of the time. "
        f"{where} the reserve: {what}."
    )


def _memory(plan: MemoryPlan) -> Markup:
    row = Markup(
        '<tr><td class="size">{:.2f} GiB</td><th scope="row"><i class="sw" style="background:var(--{})"></i>{}</th>'
        "<td>{}</td></tr>"
    )
    rows = [row.format(item.size / GIB, memory_kind(item.name), item.name, item.sentence) for item in _shown(plan)]
    total = Markup('<tr class="sum"><td class="size">{:.2f} GiB</td><th scope="row">in all</th><td>in {}</td></tr>')
    most = plan.fullest
    return Markup('<div class="wide"><table>{}{}</table></div>').format(
        Markup().join(rows), total.format(most.need / GIB, moment(most))
    )


def _shown(plan: MemoryPlan) -> list[Item]:
    return [item for item in plan.fullest.items if item.size >= GIB / 100]


def _phases(plan: MemoryPlan) -> Markup:
    """Return a bar for each part of the run, on one scale with the card."""
    memory = plan.card.memory if plan.card else 0.0
    whole = max(plan.need, memory)
    line = Markup('<i style="left:calc({:.2f}% - 1px)"></i>').format(100 * memory / whole) if memory else Markup()
    row = Markup('<div class="phase"><span>{}</span><div class="bar"><span>{}</span>{}</div><b>{:.2f} GiB</b></div>')
    rows = [row.format(phase.name, _parts(phase, whole), line, phase.need / GIB) for phase in plan.phases]
    legend = f"The line is the {plan.card.memory / GIB:.2f} GiB of {plan.card.name}." if plan.card else ""
    return Markup("{}{}").format(Markup().join(rows), _paragraph(legend))


def _parts(phase: Phase, whole: float) -> Markup:
    part = Markup('<i title="{} {:.2f} GiB" style="width:{:.2f}%;background:var(--{})"></i>')
    sizes = by_kind({item.name: item.size for item in phase.items})
    return Markup().join(
        part.format(kind, size / GIB, 100 * size / whole, kind) for kind, size in sizes.items() if size
    )


def _table(facts: Sequence[tuple[str, str]]) -> Markup:
    row = Markup('<tr><th scope="row">{}</th><td>{}</td></tr>')
    return Markup('<div class="wide"><table>{}</table></div>').format(
        Markup().join(row.format(*fact) for fact in facts)
    )


def _list(sentences: Sequence[str]) -> Markup:
    return Markup("<ul>{}</ul>").format(Markup().join(Markup("<li>{}</li>").format(text) for text in sentences))


def _paragraph(text: str) -> Markup:
    return Markup("<p>{}</p>").format(text) if text else Markup()
