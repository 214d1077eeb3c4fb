"""Pages in one HTML file, which load nothing from a server. No torch."""

from __future__ import annotations

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The Content-Security-Policy of the file: inline style and embedded images only, no scripts and no network."""
