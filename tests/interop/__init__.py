"""`make interop`: every file this program writes, given to the programs that read it."""
