"""Prints which traces of small models are equal when every operation is run: python -m tests.plan.forgetful FOLDER"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

from tests.plan.record.test_fake_mode import Forgetful
from trainer.config.load import load_config_text
from trainer.models import families
from trainer.plan.record import fake_device, fake_mode
from trainer.plan.record.trace import PassTraces, trace_passes
from trainer.plan.simulate.steps import PassInput

SIZE = PassInput(64 * 64, 2, 16)
CASES = {
    "flux2": ("lora", "locon", "loha", "lokr", "dora", "boft", "diag-oft", "none", "dora quantize.format=nf4"),
    "sdxl": ("locon",),
    "z_image": ("lora adapter.dropout=0.1",),
    "causal_lm": ("lora quantize.format=fp8",),
}


def main(cache: Path) -> None:
    """Trace each case twice."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    device, known = fake_device.install(), fake_mode._KNOWN

    def traced(family: str, method: str) -> PassTraces:
        fields = (f"model.family={family}", "model.path=tiny", *f"adapter.type={method}".split())
        cfg = load_config_text("data: {path: .}", fields, Path("run.yaml")).config
        size = PassInput(64, 2) if family == "causal_lm" else SIZE
        return trace_passes(cfg, families.make(cfg, cache), device, [size])

    found = {}
    for family, methods in CASES.items():
        for method in methods:
            fake_mode._KNOWN = known
            remembered = traced(family, method)
            fake_mode._KNOWN = Forgetful()
            found[f"{family} {method}"] = traced(family, method) == remembered
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
