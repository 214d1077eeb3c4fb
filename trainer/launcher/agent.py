"""torchrun, started more quickly: `python -m trainer.launcher.agent ARGUMENTS` is `python -m torch.distributed.run
ARGUMENTS`.

The ranks start when torchrun has imported torch, of which it uses only the parts that start and watch processes. It
does without the search for garbage while it imports, and without the operators' rules for tensors without data, the
export of graphs and nested tensors, which take two fifths of the time. Ranks import all of torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from trainer.config.imports import quick_imports

LEFT_OUT = ("torch._meta_registrations", "torch.export", "torch.nested")


def main() -> None:
    """Run torchrun with the arguments of this process."""
    sys.modules.update({name: ModuleType(name) for name in LEFT_OUT})
    with quick_imports():
        torchrun = importlib.import_module("torch.distributed.run")
    torchrun.main()


if __name__ == "__main__":
    main()
