"""From a folder of captioned images to the examples of each step. Importing this package imports nothing else."""
