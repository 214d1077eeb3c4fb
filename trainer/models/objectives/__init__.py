"""The loss that a step minimizes: a file per objective, and their common parts."""
