"""What the page and notebooks show of a run, as HTML with its style, and what they ask of it. Every text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from app.monitor import SILENT_S, RunView
from trainer import launch
from trainer.config import InputError
from trainer.events import SampleEvent, told_speed
from trainer.gpus import Gpu
from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.phases import Item, Phase, moment
from trainer.plan.storage import amount
from trainer.report import CHART_STYLE, LINE_COLORS
from trainer.rundir import Request, RunDir

GIB = 2**30
ANSWERS: Mapping[Request, str] = {
    "stop": "Stopping after this step, with a checkpoint.",
    "save": "A checkpoint follows after this step.",
    "sample": "Samples follow after this step.",
}
"""{request: what is said when it was made}"""


def ask(run: RunDir, what: Request) -> str:
    """Ask the trainer for something, and say what follows. Raises InputError when a run to be stopped has ended."""
    if what == "stop":
        launch.stop(run)
    else:
        run.request(what)
    return ANSWERS[what]


def figures(view: RunView, element_id: str = "") -> str:
    """The state in a sentence, the progress, and the figures of the last steps."""
    share = 100 * view.step / view.num_steps
    facts = [("step", f"{view.step} / {view.num_steps}"), _speed(view)]
    if view.loss is not None:
        facts.insert(1, ("loss", f"{view.loss:.4f}"))
    facts += [(f"s {part}", f"{seconds:.3f}") for part, seconds in view.seconds.items() if not math.isnan(seconds)]
    cells = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{fact}</dd></div>" for name, fact in facts)
    name = f' id="{element_id}"' if element_id else ""
    return (
        f'<div{name} class="run {_mood(view)}" data-run="{html.escape(view.path.name)}" '
        f'data-state="{view.state}" data-step="{view.step}">'
        f'<p role="status" aria-live="polite" class="sentence">{html.escape(view.sentence)}</p>{_error(view)}'
        f'<div class="progress" role="progressbar" aria-label="steps" aria-valuenow="{view.step}" aria-valuemin="0" '
        f'aria-valuemax="{view.num_steps}"><i style="width:{share:.1f}%"></i></div><dl>{cells}</dl></div>'
    )


def written(sample: SampleEvent) -> str:
    """A sample that is text, which can be scrolled by keyboard too."""
    name = html.escape(f"Sample of step {sample.step}")
    return f'<pre class="written" tabindex="0" aria-label="{name}">{html.escape(sample.text)}</pre>'


def _speed(view: RunView) -> tuple[str, str]:
    rate, unit = told_speed(*view.speed).split()
    return unit, rate


def plan_bar(plan: MemoryPlan, checked: str = "") -> str:
    """What a run takes of each GPU at its fullest, as a bar with its parts, and in sentences. checked: by a trace."""
    most = plan.fullest
    whole = max(most.need, plan.card.memory if plan.card else 0)
    parts = [item for item in most.items if item.size >= whole / 200]
    colors = [f"var(--line-{number % len(LINE_COLORS)})" for number in range(len(parts))]
    bars = "".join(
        f'<i style="width:{100 * item.size / whole:.2f}%;background:{color}"></i>'
        for item, color in zip(parts, colors, strict=True)
    )
    legend = "".join(
        f'<li title="{html.escape(item.sentence)}"><i style="background:{color}"></i>'
        f"{html.escape(item.name)} {item.size / GIB:.2f}</li>"
        for item, color in zip(parts, colors, strict=True)
    )
    mood = {"fits": "good", "tight": "slow", "does not fit": "bad"}.get(plan.verdict or "", "good")
    time = f" {plan.time.low:.1f} to {plan.time.high:.1f} s per step." if plan.time else ""
    others = ", ".join(f"{phase.name} {phase.need / GIB:.2f}" for phase in plan.phases if phase is not most)
    return (
        f'<div class="plan run {mood}" data-verdict="{plan.verdict or ""}"><p role="status" class="sentence">'
        f"{plan.need / GIB:.2f} GiB on each GPU. {html.escape(_sentence(verdict(plan)))}</p>"
        f'<div class="parts" role="img" aria-label="{html.escape(_spoken(most))}">{bars}</div><ul>{legend}</ul>'
        f"<p>GiB at the fullest moment: {html.escape(moment(most))}; the other parts of the run: {others}. "
        f"Strategy {html.escape(plan.strategy)}.{time} Reserve and time are estimates.</p>"
        f"<p>On the host: {_stored(plan.host)}. On disk: {_stored(plan.disk)}.</p>"
        f"{f'<p>{html.escape(_sentence(checked))}</p>' if checked else ''}</div>"
    )


def _stored(items: Sequence[Item]) -> str:
    return ", ".join(
        f'<span title="{html.escape(item.sentence)}">{html.escape(item.name)} {amount(item.size)}</span>'
        for item in items
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _spoken(phase: Phase) -> str:
    return ", ".join(f"{item.name} {item.size / GIB:.2f} GiB" for item in phase.items)


def _mood(view: RunView) -> str:
    if view.state == "failed":
        return "bad"
    return "slow" if view.is_stuck else "good"


def _error(view: RunView) -> str:
    if view.error is None or view.state != "failed":
        return ""
    remedy = f"<p>What to do: {html.escape(view.error.remedy)}</p>" if view.error.remedy else ""
    log = f"<p>Log: {html.escape(str(view.path / view.error.log))}</p>" if view.error.log else ""
    return f'<div role="alert" class="alert">{remedy}{log}</div>'


def ranks(view: RunView, gpus: Sequence[Gpu] = ()) -> str:
    """A bar per rank: allocated, reserved and peak against the limit, and when it last spoke. Below them the GPUs."""
    rows = []
    for rank in view.ranks:
        limit = max(rank.limit, 1)
        bars = "".join(
            f'<i class="{name}" style="width:{min(100.0, 100 * value / limit):.1f}%"></i>'
            for name, value in (("peak", rank.peak), ("reserved", rank.reserved), ("allocated", rank.allocated))
        )
        heard = f"{rank.age_s:.0f} s ago" if view.is_running else "ended"
        late = " late" if view.is_running and rank.age_s > SILENT_S else ""
        rows.append(
            f'<li class="rank{late}" data-rank="{rank.rank}"><span>rank {rank.rank}</span><div class="bar">{bars}</div>'
            f"<span>{rank.allocated / GIB:.2f} allocated, {rank.reserved / GIB:.2f} reserved, {rank.peak / GIB:.2f} "
            f"peak of {rank.limit / GIB:.1f} GiB</span><span>step {rank.step}, {rank.phase}, "
            f"{heard}</span></li>"
        )
    imbalance = f"<p>Largest peak to the mean: {view.imbalance:.2f}</p>" if len(view.ranks) > 1 else ""
    cards = "".join(f"<li>{html.escape(gpu_line(gpu))}</li>" for gpu in gpus)
    machine = f'<h2>GPUs</h2><ul class="ranks">{cards}</ul>' if cards else ""
    return f'<h2>Memory per rank</h2><ul class="ranks">{"".join(rows)}</ul>{imbalance}{machine}'


def gpu_line(gpu: Gpu) -> str:
    """What a GPU does, in words. What the driver does not tell is left out."""
    told = [f"{gpu.memory_used / 1024:.1f} of {gpu.memory / 1024:.1f} GiB used"]
    told += [f"{gpu.busy} % busy"] * (gpu.busy >= 0) + [f"{gpu.celsius} °C"] * (gpu.celsius >= 0)
    return f"{gpu.index} {gpu.name}: {', '.join(told)}"


def alert(message: str) -> str:
    """Something that went wrong, read aloud by a screen reader."""
    return f'<div role="alert" class="alert"><pre>{html.escape(message)}</pre></div>'


def note(message: str) -> str:
    """Something that went well."""
    return f'<p role="status">{html.escape(message)}</p>'


def attempted(act: Callable[[], str]) -> str:
    """What an action says, or what kept it from acting: the user's mistake, or a disk."""
    try:
        return note(act())
    except (InputError, OSError) as error:
        return alert(str(error))


COLORS: Mapping[str, tuple[str, str]] = {
    **{f"--line-{at}": colors for at, colors in enumerate(LINE_COLORS)},
    "--bad": ("#b91c1c", "#fca5a5"),
    "--slow": ("#92400e", "#fcd34d"),
}
"""{variable of CSS: by day and by night}"""

PANELS = """
.alert { border-left: 4px solid var(--bad); padding: .25rem .75rem; }
.alert pre { white-space: pre-wrap; }
.sentence { font-size: 1.1rem; margin: 0 0 .5rem; }
.bad .sentence { color: var(--bad); } .slow .sentence { color: var(--slow); }
.progress { height: .6rem; background: color-mix(in srgb, currentColor 15%, transparent); border-radius: .3rem; }
.progress i { display: block; height: 100%; background: var(--line-0); border-radius: .3rem; }
.run dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .5rem 0 0; }
.run dt { font-size: .8rem; opacity: .75; } .run dd { margin: 0; font-variant-numeric: tabular-nums; }
ul.ranks { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.rank { display: grid; grid-template-columns: 4rem 1fr; gap: 0 .5rem; margin-bottom: .5rem; align-items: center; }
.rank span:nth-of-type(n+2) { grid-column: 2; } .rank.late { color: var(--slow); }
.bar { position: relative; height: .8rem; background: color-mix(in srgb, currentColor 15%, transparent); }
.bar i { position: absolute; inset: 0 auto 0 0; }
.bar .peak { border-right: 2px solid currentColor; }
.bar .reserved { background: color-mix(in srgb, var(--line-0) 45%, transparent); }
.bar .allocated { background: var(--line-0); }
.plan .parts { display: flex; height: 1rem; background: color-mix(in srgb, currentColor 15%, transparent); }
.plan .parts i { height: 100%; } .plan p { font-size: .85em; margin: 0; }
.plan ul { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: .25rem 0; padding: 0; }
.plan li { font-size: .85em; } .plan li i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.plan p.sentence { font-size: 1rem; margin: 0 0 .25rem; }
.newest { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: .5rem; }
.newest figure { margin: 0; } .newest img { width: 100%; } .newest figcaption { font-size: .8rem; }
.newest:has(.written) { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
.written { white-space: pre-wrap; overflow-wrap: anywhere; text-align: start; margin: 0; padding: .5rem;
  font-size: .8rem; max-height: 16rem; overflow: auto;
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); }
.matrix .written { min-width: 14rem; }
"""

IN_NOTEBOOK = f"""
.shardstudio {{ color-scheme: light dark;
  {" ".join(f"{name}: light-dark({day}, {night});" for name, (day, night) in COLORS.items())}
  {CHART_STYLE}{PANELS}
}}
[data-jp-theme-light="true"] .shardstudio {{ color-scheme: light; }}
[data-jp-theme-light="false"] .shardstudio {{ color-scheme: dark; }}
"""
"""For everything in an element of the class `shardstudio`, by JupyterLab's theme or, elsewhere, the browser's."""


def in_notebook(content: str) -> str:
    """HTML as the output of a cell, with the style it needs."""
    return f'<div class="shardstudio"><style>{IN_NOTEBOOK}</style>{content}</div>'
