"""Turns a folder of captioned images, or text files, into the examples of each step. Importing it imports nothing."""
