"""Traces models: `python -m trainer.plan record CONFIG CACHE` for one run, `tables` for the program's own tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.plan.record.make_tables import add_missing_tables, make_published_tables, trace_peak
from trainer.system.terminal import say


def main(argv: Sequence[str]) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m trainer.plan")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("record", "trace one run's model and write its tables"),
        ("trace", "print the most bytes that a step of one run's whole model takes"),
    ):
        one = commands.add_parser(name, help=what)
        one.add_argument("config", type=Path)
        one.add_argument("cache", type=Path)
    many = commands.add_parser("tables", help="make the tables of published models")
    many.add_argument("names", nargs="*", help="names of files in trainer/plan/recorded; default: all")
    many.add_argument("--missing", action="store_true", help="keep the tables that are there")
    many.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    if options.command == "tables":
        return make_published_tables(options.names, options.jobs, options.missing)
    cfg = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
    if options.command == "trace":
        say(trace_peak(cfg, options.cache))
    else:
        os.nice(5)  # the page starts it by itself: whatever else this machine does goes first
        add_missing_tables(cfg, options.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
