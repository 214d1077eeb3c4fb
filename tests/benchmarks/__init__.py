"""Measurements with limits: each module is a command, `python -m tests.benchmarks.<name>`; figures in RESULTS.md."""
