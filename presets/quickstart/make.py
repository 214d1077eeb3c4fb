"""Draws the pictures of the quickstart dataset from a colour emoji font, and writes their captions.

Usage: python make.py [FONT]     FONT defaults to what `fc-match "Noto Color Emoji"` finds.
"""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FONT_SIZE = 109
"""The only size of the font's bitmaps, in pixels."""
PICTURE_SIZE = 128
MARGIN = 8
ANIMALS = "🐀🐁🐂🐃🐄🐅🐆🐇🐈🐉🐊🐋🐌🐍🐎🐏🐐🐑🐒🐓🐕🐖🐘🐙🐟🐢🐧🐪🐬🦀🦉🦔"


def main() -> None:
    font_file = sys.argv[1] if len(sys.argv) > 1 else installed_font()
    font = ImageFont.truetype(font_file, FONT_SIZE)
    for number, character in enumerate(ANIMALS, start=1):
        name = unicodedata.name(character).lower()
        stem = Path(__file__).with_name(f"{number:02}-{name.replace(' ', '-')}")
        # Flat colours: a palette of 256 looks the same and halves the file.
        picture(character, font).quantize(256).save(stem.with_suffix(".png"), optimize=True)
        article = "an" if name[0] in "aeiou" else "a"
        stem.with_suffix(".txt").write_text(f"a pictogram of {article} {name}\n", encoding="utf-8")


def installed_font() -> str:
    """Path of the font on a system with fontconfig."""
    found = subprocess.run(
        ["fc-match", "--format=%{file}", "Noto Color Emoji"], check=True, capture_output=True, text=True
    )
    return found.stdout


def picture(character: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The character on white, its glyph centred and scaled to leave a margin."""
    glyph = Image.new("RGBA", (2 * PICTURE_SIZE, 2 * PICTURE_SIZE))
    ImageDraw.Draw(glyph).text((FONT_SIZE // 2, FONT_SIZE // 2), character, font=font, embedded_color=True)
    glyph = glyph.crop(glyph.getbbox())
    scale = (PICTURE_SIZE - 2 * MARGIN) / max(glyph.size)
    glyph = glyph.resize((round(glyph.width * scale), round(glyph.height * scale)), Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    canvas.paste(glyph, ((PICTURE_SIZE - glyph.width) // 2, (PICTURE_SIZE - glyph.height) // 2), glyph)
    return canvas


if __name__ == "__main__":
    main()
