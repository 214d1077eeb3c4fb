"""An auditor of our own: the trainer's numbers against references written from the publications and from diffusers.

A reference imports nothing of `trainer` but the thing under test. `make audit` runs every check and writes
tests/benchmarks/AUDIT.md; `tests/audit/test_*.py` runs a covering part of them. See DECISIONS 140.
"""
