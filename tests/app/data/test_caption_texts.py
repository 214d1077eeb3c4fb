"""Tags, texts in front of and behind captions, and captions that are nearly equal."""

from __future__ import annotations

import random

import pytest

from app.data.caption_texts import alike, extended, renamed, tags


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("", []),
        (" , ,", []),
        ("a fox", ["a fox"]),
        ('red ,fox,\nred, it\'s "new", \U0001f98a', ["red", "fox", 'it\'s "new"', "\U0001f98a"]),
        ("Red, red", ["Red", "red"]),
    ],
)
def test_tags_are_what_stands_between_commas(caption: str, expected: list[str]):
    assert tags(caption) == expected


@pytest.mark.parametrize(
    ("caption", "tag", "name", "expected"),
    [
        ("red,fox , snow", "fox", "cat", "red, cat, snow"),
        ("red, fox", "fox", "", "red"),
        ("fox", "fox", " , ", ""),
        ("red, fox, cat", "fox", "cat", "red, cat"),
        ("red, fox", "fox", "cat, dog", "red, cat, dog"),
        ("red,foxes", "fox", "cat", "red,foxes"),
        ("red, Fox", "fox", "cat", "red, Fox"),
    ],
)
def test_a_tag_is_renamed_and_each_stays_once(caption: str, tag: str, name: str, expected: str):
    assert renamed(caption, tag, name) == expected


@pytest.mark.parametrize(
    ("caption", "text", "front", "behind"),
    [
        ("a fox", "[trigger]", "[trigger], a fox", "a fox, [trigger]"),
        ("A fox.", " at night ", "at night, A fox.", "A fox. at night"),
        ("a fox", "a photo of:", "a photo of: a fox", "a fox, a photo of:"),
        ("a fox", ", red", ", red, a fox", "a fox, red"),
        ("[trigger] fox", "[trigger]", "[trigger] fox", "[trigger] fox, [trigger]"),
        ("reddish", "red", "red, reddish", "reddish, red"),
        ("fox, unred", "red", "red, fox, unred", "fox, unred, red"),
        ("red", "red", "red", "red"),
    ],
)
def test_a_text_is_put_in_front_or_behind_once(caption: str, text: str, front: str, behind: str):
    assert (extended(caption, text, False), extended(caption, text, True)) == (front, behind)


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        (["a fox", "a cat", "A fox."], [[0, 2]]),
        (["a red fox in deep snow", "in deep snow, a red fox", "a red fox in the snow"], [[0, 1]]),  # 6 of 6, 5 of 7
        (["a b c d e f g h i j", "a b c d e f g h i x", "z"], [[0, 1]]),  # 9 of 11
        (["\U0001f98a", "", "\U0001f98a", "", ".", "."], [[0, 2]]),
        (["word " * 1000 + "one", "word " * 1000 + "two"], [[0, 1]]),
        ([], []),
    ],
)
def test_captions_of_nearly_the_same_words_are_in_a_group(captions: list[str], expected: list[list[int]]):
    assert alike(captions) == expected


def test_rare_words_find_what_comparing_all_captions_finds():
    rng = random.Random(0)
    captions = [" ".join(rng.sample("abcdefghijkl", rng.randint(1, 10))) for _ in range(300)]
    sets, firsts = [set(caption.split()) for caption in captions], list[set[str]]()
    for own in sets:
        if not any(len(own & first) >= 0.8 * len(own | first) for first in firsts):
            firsts.append(own)
    groups = alike(captions)
    for first, *others in groups:
        assert all(len(sets[first] & sets[at]) >= 0.8 * len(sets[first] | sets[at]) for at in others)
    in_none = len(captions) - sum(map(len, groups))
    assert len(groups) + in_none == len(firsts) and len(groups) > 20
