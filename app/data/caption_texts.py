"""The texts of captions: their tags, what is put in front of or behind all of them, and which are nearly equal.

A tag is what stands between two commas; it has no comma of its own. See DECISIONS 234.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

NEAR = 0.8
"""Least Jaccard index of nearly equal captions: one of ten words may be another."""
MOST_COMPARED = 2000
"""Letters of a caption that are compared."""
WORD = re.compile(r'[^\s,.;:!?()"]+')
PUNCTUATION = ".,;:!?"


def tags(caption: str) -> list[str]:
    """Return the tags of a caption, each once."""
    return list(dict.fromkeys(filter(None, (part.strip() for part in caption.split(",")))))


def renamed(caption: str, tag: str, name: str) -> str:
    """Return a caption with other tags in the place of one, and each once; it stays as it is where it has not the tag.

    Args:
        name: The new tag, or several between commas; without any the tag is removed.
    """
    own = tags(caption)
    if tag not in own:
        return caption
    return ", ".join(dict.fromkeys(chain.from_iterable(tags(name) if one == tag else [one] for one in own)))


def extended(caption: str, text: str, is_behind: bool) -> str:
    """Return a caption with a text in front of or behind it, unless it begins or ends with it.

    A comma is put between them where neither brings punctuation: `[trigger]` and `a fox` are `[trigger], a fox`, and
    `A fox.` and `at night` are `A fox. at night`.
    """
    own, text = caption.strip(), text.strip()
    first, second = (own, text) if is_behind else (text, own)
    is_there = own.endswith(text) if is_behind else own.startswith(text)
    if is_there:
        cut = len(own) - len(text) if is_behind else len(text)
        # `red` is not the beginning of `reddish`.
        if not (own[cut - 1 : cut].isalnum() and own[cut : cut + 1].isalnum()):
            return caption
    if second[:1] in PUNCTUATION:
        return f"{first}{second}"
    return f"{first} {second}" if first[-1:] in PUNCTUATION else f"{first}, {second}"


def alike(captions: Sequence[str]) -> list[list[int]]:
    """Group captions of nearly the same words, in any order and in upper or lower case.

    Each member's Jaccard index with the first one, the share of their words that both have, is at least NEAR. Two sets
    of n words with such an index have one of their n - ceil(NEAR n) + 1 rarest words in common, so that few are
    compared: Bayardo, Ma, Srikant, "Scaling Up All Pairs Similarity Search", 2007, section 4.

    Returns:
        Places of the captions, each group and the groups in their order; captions without words are in none.
    """
    words = [frozenset(WORD.findall(caption[:MOST_COMPARED].casefold())) for caption in captions]
    counts = Counter(chain.from_iterable(words))
    # Sets as bits of a number are compared 30 times as fast; a word of a single caption is in no other.
    bit = {word: 1 << at for at, (word, count) in enumerate(counts.most_common()) if count > 1}
    firsts: defaultdict[str, list[tuple[frozenset[str], int]]] = defaultdict(list)
    first_of: dict[frozenset[str], frozenset[str]] = {}
    groups: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    for at, own in enumerate(words):
        if not own:
            continue
        if own not in first_of:
            bits = sum(bit.get(word, 0) for word in own)
            rare = sorted(own, key=lambda word: (counts[word], word))[: len(own) - math.ceil(NEAR * len(own)) + 1]
            for other, other_bits in chain.from_iterable(firsts[word] for word in rare):
                shared = (bits & other_bits).bit_count()
                if shared >= NEAR * (len(own) + len(other) - shared):
                    first_of[own] = other
                    break
            else:
                first_of[own] = own
                for word in rare:
                    firsts[word].append((own, bits))
        groups[first_of[own]].append(at)
    return [members for members in groups.values() if len(members) > 1]
