"""The colours of the page, the notebooks and the report, light and dark, as variables of CSS.

Text in `ink`, `ink2`, `ink3`, `acc`, `ok`, `warn` and `bad` has a contrast of at least 4.5 : 1 on `bg` and `panel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TOKENS: Mapping[str, tuple[str, str]] = {
    "--bg": ("#f6f6f7", "#0e0f11"),
    "--panel": ("#ffffff", "#16181b"),
    "--sunk": ("#f0f0f2", "#1e2024"),
    "--line": ("#e3e3e7", "#292c31"),
    "--edge": ("#8a8a94", "#6f737c"),
    "--ink": ("#17181c", "#ededf0"),
    "--ink2": ("#494b54", "#b9bcc4"),
    "--ink3": ("#62656f", "#969aa4"),
    "--acc": ("#2c57e0", "#8eabff"),
    "--fill": ("#2c57e0", "#3d66ea"),
    "--tint": ("#edf1fe", "#1c2540"),
    "--weights": ("#5c6f96", "#8fa3cc"),
    "--optimizer": ("#b86e00", "#e3a63c"),
    "--gathered": ("#0d8a80", "#35bdb0"),
    "--activations": ("#8455cf", "#b08df0"),
    "--reserve": ("#868691", "#767a84"),
    "--ok": ("#17744a", "#4cc98d"),
    "--warn": ("#8a5a00", "#e2b14d"),
    "--bad": ("#c0322b", "#ff8b82"),
    "--okt": ("#e8f5ee", "#13271d"),
    "--warnt": ("#fcf3e0", "#2a2212"),
    "--badt": ("#fdeceb", "#311a19"),
}
"""{variable: (light, dark)}. Surfaces (`bg`, `panel`, `sunk`, `line`, `edge`), text (`ink` and paler), the accent
(`acc` for text and lines, `fill` under white text, `tint` behind), kinds of memory, states and what is behind them."""

MEMORY_KINDS = ("weights", "optimizer", "gathered", "activations", "reserve")
"""Kinds of memory, each with the token of its name. Nothing else has these colours."""

LINES: Sequence[tuple[str, str]] = (
    TOKENS["--acc"],
    ("#b0247f", "#f18ac8"),
    ("#5f7000", "#b7c94a"),
    ("#00749c", "#4dc3ee"),
    ("#a8431a", "#f2976b"),
    TOKENS["--ink2"],
    TOKENS["--ink3"],
)
"""(light, dark) of the lines of a chart that has several, in their order; `--line-0` and on."""
ALL_TOKENS: Mapping[str, tuple[str, str]] = {
    **TOKENS,
    **{f"--line-{number}": pair for number, pair in enumerate(LINES)},
}


def variables(is_dark: bool) -> str:
    """Return the declarations of all tokens in one mode: the body of a CSS rule."""
    return " ".join(f"{name}: {pair[is_dark]};" for name, pair in ALL_TOKENS.items())


def both_variables() -> str:
    """Return the declarations of all tokens with `light-dark()`: the `color-scheme` of the element chooses."""
    return " ".join(f"{name}: light-dark({day}, {night});" for name, (day, night) in ALL_TOKENS.items())
