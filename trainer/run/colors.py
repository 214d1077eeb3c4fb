"""The colours of the page, the notebooks and the report, light and dark."""

from __future__ import annotations

from collections.abc import Mapping

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
"""{CSS variable: (light, dark)}"""
