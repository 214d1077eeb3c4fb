"""The recipes of `trainer/README.md`, carried out in copies of the code by the files they name."""
