"""Put generated values to every door, for so many minutes altogether; ends with 1 when one answer was wrong.

`python -m tests.fuzz [--minutes 10] [--only NAME] [--seed N]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.caches import CACHES
from tests.fuzz.configs import CONFIGS
from tests.fuzz.datasets import DATASETS
from tests.fuzz.requests import REQUESTS
from tests.fuzz.run_folders import RUN_FOLDERS
from tests.fuzz.target import LIMIT_S, Count, Target, attack
from tests.fuzz.weight_files import WEIGHTS

TARGETS: tuple[Target, ...] = (CONFIGS, WEIGHTS, RUN_FOLDERS, CACHES, DATASETS, REQUESTS)
BATCH = 100
"""Values between two looks at the clock."""
HANGS_S = 10 * LIMIT_S
"""Without a new value, shrinking aside: then the process is ended from outside."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [target for target in TARGETS if options.only in (None, target.name)]
    seconds = 60 * options.minutes / len(chosen)
    if options.alone:
        _attack_for(chosen[0], seconds, options.seed)
        return 0
    print(f"seed {options.seed}, {seconds:.0f} s for each of {len(chosen)} targets", flush=True)
    return max([_in_a_process(target, seconds, options.seed) for target in chosen])


def _attack_for(target: Target, seconds: float, number: int) -> None:
    """Batches of values until the time is over; what they came to is the last line of the output."""
    count = Count()
    with tempfile.TemporaryDirectory() as folder, target.prepare(Path(folder)) as answer:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            attack(answer, target, BATCH, number, Path(os.environ["FUZZ_NOTE"]), count)
            number += 1
    print(json.dumps(asdict(count)), flush=True)


def _in_a_process(target: Target, seconds: float, number: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "value"
        note.touch()
        argv = [sys.executable, "-m", "tests.fuzz", "--alone", "--only", target.name]
        argv += ["--minutes", str(seconds / 60), "--seed", str(number)]
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "FUZZ_NOTE": str(note)}
            )
            is_hanging = _hangs(process, note)
            output.seek(0)
            lines = output.read().splitlines()
    if is_hanging or process.returncode:
        print("\n".join(lines[-80:]))
        print(f"{target.name}: {'hangs' if is_hanging else 'failed'}, --seed {number}", flush=True)
        return 1
    count = Count(**json.loads(lines[-1]))
    peak = f"peak {count.peak / 2**20:.0f} MiB"
    print(f"{target.name}: {count.values} values, slowest {count.slowest:.2f} s, {peak}", flush=True)
    return 0


def _hangs(process: subprocess.Popen[bytes], note: Path) -> bool:
    """Wait for its end. Whether it had to be ended, as it was at one value for too long."""
    while process.poll() is None:
        time.sleep(0.5)
        if note.stat().st_size and time.time() - note.stat().st_mtime > HANGS_S:
            process.kill()
            process.wait()
            print(f"hung at {note.read_text(encoding='utf-8')[:2000]}")
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
