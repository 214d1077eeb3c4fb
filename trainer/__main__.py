"""`python -m trainer RUN_DIR`: one rank of a run, which torchrun starts, or an export."""

from __future__ import annotations

from trainer.train.rank import main

if __name__ == "__main__":
    main()
