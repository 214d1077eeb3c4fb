"""Records models: `python -m trainer.plan record CONFIG CACHE` for one run, `tables` for those of the program."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.config.terminal import say
from trainer.plan.make_tables import record_model, record_published, traced


def main(argv: Sequence[str]) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m trainer.plan")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("record", "record one run's model"),
        ("trace", "print the bytes that a step of one run's whole model takes"),
    ):
        one = commands.add_parser(name, help=what)
        one.add_argument("config", type=Path)
        one.add_argument("cache", type=Path)
    many = commands.add_parser("tables", help="record the published models")
    many.add_argument("names", nargs="*", help="of models, as a file in trainer/plan/recorded; default: all")
    many.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    if options.command == "tables":
        return record_published(options.names, options.jobs)
    cfg = RunConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
    if options.command == "trace":
        say(traced(cfg, options.cache))
    else:
        record_model(cfg, options.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
