"""The doors of the program, and generated files, texts and requests that are put to them: `make fuzz`.

See DECISIONS 139.
"""
