"""The screens Runs and compare: the table of all runs with tags and deletion, and several runs next to each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from app.data.thumbnails import FULL, SMALL
from app.runs import run_comparison, run_table, run_trash
from app.runs.monitor import Follower, RunView, explained
from app.runs.run_comparison import MOST_COMPARED
from app.runs.run_table import Summaries
from app.studio import Studio
from app.web.answers import Calls
from app.web.pages.results import references_shown
from app.web.served_files import address
from trainer.run.events import SampleEvent
from trainer.run.folder import RunDir, is_run
from trainer.system.errors import InputError
from trainer.view.chart import Chart


def calls(studio: Studio) -> Calls:
    """Return the functions of the screens' script."""
    summaries = Summaries(studio)

    def runs_list(token: str = "") -> dict[str, Any]:
        changes = summaries.changes(token)
        return {
            "token": changes.token,
            "is_whole": changes.is_whole,
            "rows": [asdict(row) for row in changes.rows],
            "gone": changes.gone,
            "num_unread": changes.num_unread,
            "deleted": [asdict(deleted) for deleted in run_trash.deletions(studio.runs)],
            "problem": run_table.tags_problem(studio.runs),
            "free": shutil.disk_usage(studio.runs).free if studio.runs.is_dir() else None,
        }

    def runs_images(runs: list[str]) -> dict[str, str]:
        return {name: _last_sample(studio, summaries, name) for name in runs}

    def runs_tag(runs: list[str], added: str = "", removed: str = "") -> None:
        names = [studio.run(name).path.name for name in runs]
        run_table.change_tags(studio.runs, names, added, removed)

    def runs_delete(runs: list[str]) -> dict[str, Any]:
        def delete(name: str) -> str:
            run = studio.found(name)
            draft = studio.draft_without(run)
            deletion = run_trash.delete(run)
            if draft is not None:
                studio.save_draft(draft)
            return deletion

        done, refused = _attempted(delete, runs)
        return {"deletions": done, "refused": refused}

    def runs_restore(deletions: list[str]) -> dict[str, Any]:
        done, refused = _attempted(lambda name: run_trash.restore(studio.runs, name), deletions)
        return {"runs": done, "refused": refused}

    def runs_empty(deletions: list[str]) -> int:
        return run_trash.empty(studio.runs, deletions)

    def runs_resume(run: str) -> None:
        studio.resume(studio.run(run))

    def compare_show(runs: list[str], known: str = "") -> dict[str, Any]:
        return _comparison(studio, runs, known)

    return {
        function.__name__: function
        for function in (
            *(runs_list, runs_images, runs_tag, runs_delete, runs_restore, runs_empty, runs_resume),
            compare_show,
        )
    }


def _attempted(act: Callable[[str], str], names: list[str]) -> tuple[list[str], list[str]]:
    """Return what came of an action on each of some names, and why it was refused: one does not keep the others."""
    done, refused = [], []
    for name in names:
        try:
            done.append(act(name))
        except (InputError, OSError) as error:
            refused.append(explained(error))
    return done, refused


def _last_sample(studio: Studio, summaries: Summaries, name: str) -> str:
    """The address of the thumbnail of a run's last sample; "" when there is none or its file cannot be shown."""
    try:
        file = summaries.sample(name)
        return address(studio.thumbnails.of(file)) if file else ""
    except (InputError, OSError, ValueError):  # the run's own page says why
        return ""


def _comparison(studio: Studio, names: list[str], known: str) -> dict[str, Any]:
    """The content of the screen; only `key` when that is `known`."""
    followers, problems, missing = [], [], []
    for name in dict.fromkeys(names):
        try:
            run = studio.run(name)
            with run.boundary():
                follower = studio.follower(run)
                run_comparison.result(follower)
        except (InputError, OSError) as error:
            if is_run(studio.runs / name):
                problems.append(explained(error))
            else:
                missing.append(name)
        else:
            followers.append(follower)
    if missing:
        problems.insert(0, run_comparison.missing(missing))
    if len(followers) > MOST_COMPARED:
        problems.append(f"{MOST_COMPARED} runs can be compared at once; the others are left out.")
        followers = followers[:MOST_COMPARED]
    views = [follower.view() for follower in followers]
    facts = [(view.path.name, RunDir(view.path).title, view.state, view.curves, len(view.samples)) for view in views]
    key = repr([problems, facts])
    return {"key": key} if key == known else {"key": key, "problems": problems} | _compared(studio, followers, views)


def _compared(studio: Studio, followers: list[Follower], views: list[RunView]) -> dict[str, Any]:
    labels = run_comparison.labels({view.path.name: RunDir(view.path).title for view in views})
    configs = [follower.config for follower in followers]
    pairs = run_comparison.same_prompts(views, configs)
    return {
        "runs": [
            {"name": name, "label": label, **asdict(run_comparison.result(follower))}
            for (name, label), follower in zip(labels.items(), followers, strict=True)
        ],
        "chart": Chart("Loss, smoothed", run_comparison.overlaid(followers, list(labels.values()))).json(),
        "settings": [asdict(setting) for setting in run_comparison.differing(configs)],
        "samples": [
            {
                "prompt": prompt,
                "cells": [_cell(studio, view, sample) for view, sample in zip(views, samples, strict=True)],
            }
            for prompt, samples in pairs.items()
        ],
    }


def _cell(studio: Studio, view: RunView, sample: SampleEvent | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    facts: dict[str, Any] = {"step": sample.step, "prompt": sample.prompt}
    if sample.references:
        facts["references"] = references_shown(studio, RunDir(view.path), sample.references)
    if sample.kind.is_text:
        return facts | {"text": sample.text}
    if not sample.picture:
        return facts | {"text": sample.path}
    try:
        file = RunDir(view.path).own_file(sample.picture)
        small, full = (address(studio.thumbnails.of(file, side)) for side in (2 * SMALL, FULL))
    except (InputError, OSError, ValueError) as error:
        return facts | {"problem": str(error)}
    return facts | {"small": small, "full": full}
