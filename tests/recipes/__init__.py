"""The recipes of `trainer/RECIPES.md`, carried out in copies of the code by the files they name."""
