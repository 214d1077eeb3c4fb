"""The kill test: a run that is killed again and again ends bit for bit where it would have without.

`python -m tests.survival` kills 200 times in chains of ten, and exits with 1 if anything was lost. See DECISIONS 141.
"""
