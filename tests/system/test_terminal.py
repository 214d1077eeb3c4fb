"""What strangers named or wrote never reaches a terminal as commands to it, on any way that the command line prints."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import LAUNCH, preset_folder
from trainer.config.schema import RunConfig
from trainer.launcher.commands import explain
from trainer.launcher.console import BarDisplay, LineDisplay
from trainer.run import failure
from trainer.run.events import EventWriter, PromptsEvent, SampleEvent, StatusEvent, WarningEvent
from trainer.run.folder import RunDir
from trainer.run.length import RunLength
from trainer.system.terminal import complain, printable, say, shortened

EVIL = "\x1b[2J\x1b]0;pwned\x07\x9b31m\u202egnp\u2066"
SHOWN = r"\x1b[2J\x1b]0;pwned\x07\x9b31m\u202egnp\u2066"


def is_harmless(text: str) -> bool:
    return not any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in text) and not (
        set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    )


def launch(folder: Path, *arguments: str | bytes | Path) -> tuple[int, str]:
    """The exit code and all that `launch.py` prints, in the terminal's own bytes."""
    argv = [sys.executable, str(LAUNCH), *arguments]
    done = subprocess.run(argv, cwd=folder, capture_output=True, timeout=120, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_every_control_character_becomes_an_escape_and_ordinary_text_stays() -> None:
    codes = [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    for code in codes:
        shown = printable(f"a{chr(code)}b")
        assert is_harmless(shown) and (shown == f"a{chr(code)}b") is (chr(code) in "\n\t")
    assert printable(EVIL) == SHOWN
    ordinary = "déjà vu, Straße, 日本語, שלום, العربية, 👩‍👩‍👧, a\n\tb \\x1b"
    assert printable(ordinary) == ordinary


def test_a_name_that_is_no_utf_8_is_shown_by_its_bytes_in_any_encoding() -> None:
    name = b"caf\xe9 \xff.png".decode("utf-8", "surrogateescape")
    for encoding, expected in (("utf-8", "caf\\xe9 \\xff.png é\n"), ("ascii", "caf\\xe9 \\xff.png \\xe9\n")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        say(f"{name} é", stream)
        stream.seek(0)
        assert stream.read() == expected


def test_a_long_text_keeps_its_begin_and_end() -> None:
    assert shortened("abc", 4) == "abc"
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa…bbbb"


def test_a_picture_whose_name_commands_the_terminal_is_shown_by_escapes(tmp_path: Path) -> None:
    folder = preset_folder(tmp_path)
    (folder / "pictures" / f"{EVIL}.png").write_bytes(b"none")
    (folder / "pictures" / b"caf\xe9.png".decode("utf-8", "surrogateescape")).write_bytes(b"none")
    code, said = launch(folder, "--headless", "preset.yaml")
    assert code == 2 and is_harmless(said)
    assert f"{SHOWN}.png: cannot be read (not an image of a known format)" in said
    assert "caf\\xe9.png: cannot be read (not an image of a known format)" in said


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--headless", "preset.yaml", f"train.steps={EVIL}"), "train.steps"),
        (("--headless", f"{EVIL}.yaml"), SHOWN),
        (("--plan", "preset.yaml", f"adapter.{EVIL}=1"), "adapter."),
        (("--resume", f"runs/{EVIL}"), SHOWN),
        (("--what", EVIL), SHOWN),
        (("--doctor", "--runs", EVIL), SHOWN),
        (("--queue", f"--{EVIL}"), SHOWN),
        (("--extract", EVIL, "--base", EVIL, "--family", "sdxl", "--rank", "4", "--to", "a.safetensors"), SHOWN),
    ],
    ids=["value", "preset", "field", "run", "choice", "doctor", "option", "extract"],
)
@pytest.mark.slow
def test_no_command_prints_what_commands_the_terminal(tmp_path: Path, arguments: tuple[str, ...], shown: str) -> None:
    code, said = launch(preset_folder(tmp_path), *arguments)
    assert is_harmless(said) and shown in said, said
    assert code in (0, 1, 2)


def test_values_of_a_config_are_shown_by_escapes(tmp_path: Path) -> None:
    folder = preset_folder(tmp_path)
    preset = folder / "preset.yaml"
    preset.write_text(preset.read_text().replace("strategy: full", r'strategy: "\e[2J\u202e"'))
    code, said = launch(folder, "--headless", "preset.yaml")
    assert code == 2 and is_harmless(said) and "parallel.strategy" in said


def test_what_a_run_says_is_shown_by_escapes_in_lines_and_in_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = (
        SampleEvent(step=1, prompt=EVIL, index=0, path="samples/a.txt", text=f"written {EVIL}"),
        PromptsEvent(step=1, prompts=("a", EVIL)),
        WarningEvent(message=f"left out: {EVIL}"),
        StatusEvent(state="encoding", done=1, total=2, message=EVIL),
        StatusEvent(state="training", message=EVIL),
    )
    length = RunLength(RunConfig.model_validate({"model": {"family": "flux2"}, "data": {"path": "/pictures"}}))
    for event in events:
        LineDisplay(length).show(event)
    lines = capsys.readouterr().out
    assert is_harmless(lines) and lines.count(SHOWN) == 5
    monkeypatch.setenv("COLUMNS", "300")
    with BarDisplay(length) as bar:
        for event in events:
            bar.show(event)
    shown = capsys.readouterr().out
    assert is_harmless(shown) and shown.count(SHOWN) >= 3


def test_why_a_run_failed_is_shown_by_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = preset_folder(tmp_path)
    cfg = RunConfig.model_validate({"model": {"family": "flux2"}, "data": {"path": str(folder / "pictures")}})
    run = RunDir.create(tmp_path, cfg, tmp_path / "run")
    failure.output_file(run, 1).write_text(f"RuntimeError: {EVIL}\n")
    with EventWriter(run.events_file) as events:
        events.write(StatusEvent(state="training", step=1))
    error = failure.diagnose(run, [])
    complain(explain(error, run))
    said = capsys.readouterr().err
    assert SHOWN in said and is_harmless(said)
