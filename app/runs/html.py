"""HTML and CSS of a run for the page and notebooks, and the requests that their buttons send to it.

HTML is made by `Markup("...{}...").format(...)`, which escapes every value that is not Markup itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from app.runs.monitor import SILENT_S, RankState, RunView
from trainer.launcher.remedy import with_remedy
from trainer.plan.memory import MemoryPlan, verdict
from trainer.plan.simulate.phases import Item, memory_kind, moment
from trainer.run import process
from trainer.run.events import SampleEvent
from trainer.run.folder import Request, RunDir
from trainer.system.amounts import GIB, file_size, memory_size
from trainer.system.errors import InputError
from trainer.system.gpus import Gpu
from trainer.view.charts import CHART_STYLE, step_split
from trainer.view.colors import both_variables
from trainer.view.numbers import format_seconds, format_speed

CONFIRMATIONS: Mapping[Request, str] = {
    "stop": "Stopping after this step, with a checkpoint.",
    "save": "Saving a checkpoint after this step.",
    "sample": "Generating samples after this step.",
}
"""{request: message after it was sent}"""


def request(run: RunDir, what: Request) -> str:
    """Send a request to the trainer and return its confirmation. Raises InputError when a run to stop has ended."""
    if what == "stop":
        process.stop(run)
    else:
        run.request(what)
    return CONFIRMATIONS[what]


def status(view: RunView, element_id: str = "") -> Markup:
    """Return the state as a sentence, a progress bar, and loss, speed and seconds of the last steps."""
    share = 100 * view.step / view.num_steps if view.num_steps else 0.0
    rate, unit = format_speed(*view.speed).split()
    facts = [("step", f"{view.step:,} / {view.length}"), (unit, rate)]
    if view.epoch:
        facts.insert(1, ("epoch", view.epoch.removeprefix("epoch ")))
    if view.loss is not None:
        facts.insert(-1, ("loss, smoothed", f"{view.loss:.4f}"))
        facts.append(("a step", format_seconds(view.step_s)))
        facts += [(part, format_seconds(seconds)) for part, seconds in view.seconds.items()]
    if view.waited_s > 0:
        facts.append(("of which waiting for ranks", format_seconds(view.waited_s)))
    return Markup(
        '<div{id} class="run {mood}" data-run="{run}" data-state="{state}" data-step="{step}">'
        '<p role="status" aria-live="polite" class="sentence">{sentence}</p>{error}'
        '<div class="progress" role="progressbar" aria-label="steps" aria-valuenow="{step}" aria-valuemin="0" '
        'aria-valuemax="{num_steps}"><i style="width:{share:.1f}%"></i></div><dl>{cells}</dl></div>'
    ).format(
        id=Markup(' id="{}"').format(element_id) if element_id else "",
        mood=_mood(view),
        run=view.path.name,
        state=view.state,
        step=view.step,
        num_steps=view.num_steps,
        sentence=view.sentence,
        error=_error(view),
        share=share,
        cells=Markup().join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*fact) for fact in facts),
    )


def split(view: RunView) -> Markup:
    """Return the seconds of the last steps as a bar of parts that add up, and in words. CHART_STYLE styles it."""
    return step_split(view.seconds, view.waited_s) if view.loss is not None else Markup()


def text_sample(sample: SampleEvent) -> Markup:
    """Return a sample that is text. It can be scrolled by keyboard."""
    return Markup('<pre class="written" tabindex="0" aria-label="Sample of step {}">{}</pre>').format(
        sample.step, sample.text
    )


def figure(content: Markup, sample: SampleEvent) -> Markup:
    """Return a sample's content with its prompt and step below."""
    return Markup("<figure>{}<figcaption>{}, step {}</figcaption></figure>").format(content, sample.prompt, sample.step)


def missing(reason: str) -> Markup:
    """Return a small mark for a sample whose file cannot be shown; the reason is its tooltip."""
    return Markup('<span class="missing" title="{}">missing</span>').format(reason)


def newest(figures: Iterable[Markup]) -> Markup:
    """Return the section of the newest samples."""
    return Markup('<h2>Newest samples</h2><div class="newest">{}</div>').format(Markup().join(figures))


def plan_bar(plan: MemoryPlan, checked: str = "") -> Markup:
    """Return the peak memory per GPU as a bar with its parts, and in sentences.

    Args:
        checked: Result of the comparison with a trace; "" without one.
    """
    most = plan.fullest
    whole = max(most.need, plan.card.memory if plan.card else 0)
    parts = [item for item in most.items if item.size >= whole / 200]
    colors = [f"var(--{memory_kind(item.name)})" for item in parts]
    bar = Markup('<i style="width:{:.2f}%;background:{}"></i>')
    label = Markup('<li title="{}"><i style="background:{}"></i>{} {:.2f}</li>')
    colored = list(zip(parts, colors, strict=True))
    named = [label.format(item.sentence, color, item.name, item.size / GIB) for item, color in colored]
    mood = {"fits": "good", "tight": "slow", "does not fit": "bad"}.get(plan.verdict or "", "good")
    time = f" {plan.time}." if plan.time else ""
    others = ", ".join(f"{phase.name} {phase.need / GIB:.2f}" for phase in plan.phases if phase is not most)
    return Markup(
        '<div class="plan run {mood}" data-verdict="{fits}"><p role="status" class="sentence">'
        "{need:.2f} GiB on each GPU. {verdict}</p>"
        '<div class="parts" role="img" aria-label="{spoken}">{bars}</div><ul>{legend}</ul>'
        "<p>Peak, in GiB: {moment}; other phases of the run: {others}. "
        "Strategy {strategy}.{time} Reserve and time are estimates.</p>"
        "<p>On the host: {host}. On disk: {disk}.</p>{checked}</div>"
    ).format(
        mood=mood,
        fits=plan.verdict or "",
        need=plan.need / GIB,
        verdict=_sentence(verdict(plan)),
        spoken=", ".join(f"{item.name} {item.size / GIB:.2f} GiB" for item in most.items),
        bars=Markup().join(bar.format(100 * item.size / whole, color) for item, color in colored),
        legend=Markup().join(named),
        moment=moment(most),
        others=others,
        strategy=plan.strategy,
        time=time,
        host=_stored(plan.host, memory_size),
        disk=_stored(plan.disk, file_size),
        checked=Markup("<p>{}</p>").format(_sentence(checked)) if checked else "",
    )


def _stored(items: Sequence[Item], size: Callable[[float], str]) -> Markup:
    stored = Markup('<span title="{}">{} {}</span>')
    return Markup(", ").join(stored.format(item.sentence, item.name, size(item.size)) for item in items)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _mood(view: RunView) -> str:
    if view.state == "failed":
        return "bad"
    return "slow" if view.is_stuck else "good"


def _error(view: RunView) -> Markup:
    if view.error is None or view.state != "failed":
        return Markup()
    found = with_remedy(RunDir(view.path), view.error)
    remedy = Markup("<p>What to do: {}</p>").format(found.remedy) if found.remedy else ""
    log = Markup("<p>Log: {}</p>").format(view.path / view.error.log) if view.error.log else ""
    return Markup('<div role="alert" class="alert">{}{}</div>').format(remedy, log)


def ranks(view: RunView, gpus: Sequence[Gpu] = ()) -> Markup:
    """Return a bar per rank (allocated, reserved and peak memory of its limit, age of its last line), and the GPUs."""
    rows = Markup().join(_rank(rank, view.is_running) for rank in view.ranks)
    imbalance = (
        Markup("<p>Largest peak, relative to the mean: {:.2f}</p>").format(view.imbalance)
        if len(view.ranks) > 1
        else ""
    )
    cards = Markup().join(Markup("<li>{}</li>").format(gpu_line(gpu)) for gpu in gpus)
    machine = Markup('<h2>GPUs</h2><ul class="ranks">{}</ul>').format(cards) if cards else ""
    return Markup('<h2>Memory per rank</h2><ul class="ranks">{}</ul>{}{}').format(rows, imbalance, machine)


def _rank(rank: RankState, is_running: bool) -> Markup:
    bar = Markup('<i class="{}" style="width:{:.1f}%"></i>')
    sizes = {"peak": rank.peak, "reserved": rank.reserved, "allocated": rank.allocated}
    limit = max(rank.limit, 1)
    return Markup(
        '<li class="rank{late}" data-rank="{rank.rank}"><span>rank {rank.rank}</span><div class="bar">{bars}</div>'
        "<span>{allocated:.2f} allocated, {reserved:.2f} reserved, {peak:.2f} peak of {limit:.1f} GiB</span>"
        "<span>step {rank.step}, {rank.phase}, {heard}</span></li>"
    ).format(
        late=" late" if is_running and rank.age_s > SILENT_S else "",
        rank=rank,
        bars=Markup().join(bar.format(name, min(100.0, 100 * size / limit)) for name, size in sizes.items()),
        limit=rank.limit / GIB,
        heard=f"{rank.age_s:.0f} s ago" if is_running else "ended",
        **{name: size / GIB for name, size in sizes.items()},
    )


def gpu_line(gpu: Gpu) -> str:
    """Return a GPU's memory, load and temperature as text, without values that the driver does not report."""
    facts = [f"{gpu.memory_used / 1024:.1f} of {gpu.memory / 1024:.1f} GiB used"]
    facts += [f"{gpu.busy} % busy"] * (gpu.busy >= 0) + [f"{gpu.celsius} °C"] * (gpu.celsius >= 0)
    return f"{gpu.index} {gpu.name}: {', '.join(facts)}"


def alert(message: str) -> Markup:
    """Return an error message, which screen readers read aloud."""
    return Markup('<div role="alert" class="alert"><pre>{}</pre></div>').format(message)


def blockers(lines: Markup) -> Markup:
    """Return the errors that prevent the start. `lines` are the items of a list."""
    return Markup('<div role="alert" class="alert"><p>Cannot start yet:</p><ul>{}</ul></div>').format(lines)


def note(message: str) -> Markup:
    """Return a message that is not an error."""
    return Markup('<p role="status">{}</p>').format(message)


def attempted(act: Callable[[], str]) -> Markup:
    """Run an action and return its message, or the InputError or OSError that it raised."""
    try:
        return note(act())
    except (InputError, OSError) as error:
        return alert(str(error))


PANELS = """
.alert { border-left: 4px solid var(--bad); padding: .25rem .75rem; }
.alert pre { white-space: pre-wrap; }
.sentence { font-size: 1.1rem; margin: 0 0 .5rem; }
.bad .sentence { color: var(--bad); } .slow .sentence { color: var(--warn); }
.progress { height: .6rem; background: color-mix(in srgb, currentColor 15%, transparent); border-radius: .3rem; }
.progress i { display: block; height: 100%; background: var(--fill); border-radius: .3rem; }
.run dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .5rem 0 0; }
.run dt { font-size: .8rem; opacity: .75; } .run dd { margin: 0; font-variant-numeric: tabular-nums; }
ul.ranks { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.rank { display: grid; grid-template-columns: 4rem 1fr; gap: 0 .5rem; margin-bottom: .5rem; align-items: center; }
.rank span:nth-of-type(n+2) { grid-column: 2; } .rank.late { color: var(--warn); }
.bar { position: relative; height: .8rem; background: color-mix(in srgb, currentColor 15%, transparent); }
.bar i { position: absolute; inset: 0 auto 0 0; }
.bar .peak { border-right: 2px solid currentColor; }
.bar .reserved { background: color-mix(in srgb, var(--fill) 45%, transparent); }
.bar .allocated { background: var(--fill); }
.plan .parts { display: flex; gap: 2px; height: 1rem; border-radius: 4px; overflow: hidden;
  background: color-mix(in srgb, currentColor 15%, transparent); }
.plan .parts i { height: 100%; } .plan p { font-size: .85em; margin: 0; }
.plan ul { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: .25rem 0; padding: 0; }
.plan li { font-size: .85em; } .plan li i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.plan p.sentence { font-size: 1rem; margin: 0 0 .25rem; }
.missing { display: inline-block; font-size: 12px; color: var(--bad); background: var(--badt); border-radius: 99px;
  padding: 0 8px; }
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
  {both_variables()}
  {CHART_STYLE}{PANELS}
}}
[data-jp-theme-light="true"] .shardstudio {{ color-scheme: light; }}
[data-jp-theme-light="false"] .shardstudio {{ color-scheme: dark; }}
"""
"""Style of elements of the class `shardstudio`, in JupyterLab's theme or, elsewhere, the browser's."""


def in_notebook(content: Markup) -> Markup:
    """Return HTML as the output of a cell, with its style."""
    return Markup('<div class="shardstudio"><style>{}</style>{}</div>').format(Markup(IN_NOTEBOOK), content)
