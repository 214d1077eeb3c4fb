"""Captions that are edited where they lie, and taken back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from app.data import captions
from app.data.captions import Captions, Card, ChangedElsewhere
from tests.runs import make_pictures
from trainer.system.errors import InputError


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", count=3)


def cards_of(folder: Path) -> list[Card]:
    return [Card(image, captions.saved(image) or "") for image in sorted(folder.glob("*.png"))]


def replace(captions: Captions, cards: list[Card], search: str, replacement: str) -> int:
    known = [(card, card.caption) for card in cards]
    changed, kept = captions.edit(known, lambda caption: caption.replace(search, replacement))
    assert not kept
    return changed


def captions_of(folder: Path) -> list[str]:
    return [card.caption for card in cards_of(folder)]


def test_a_change_is_taken_back_also_by_a_page_that_was_started_again(pictures: Path, tmp_path: Path):
    first, *_ = cards_of(pictures)
    Captions(tmp_path / "log" / "captions.jsonl").write(first, "another")
    assert captions_of(pictures)[0] == "another"
    again = Captions(tmp_path / "log" / "captions.jsonl")
    assert again.undo() == 1
    assert captions_of(pictures)[0] == "picture number 0"
    assert again.undo() == 0


def test_a_caption_that_was_not_there_is_gone_after_it_is_taken_back(pictures: Path, tmp_path: Path):
    (pictures / "00.txt").unlink()
    captions = Captions(tmp_path / "captions.jsonl")
    captions.write(cards_of(pictures)[0], "new")
    captions.undo()
    assert not (pictures / "00.txt").exists()


def test_a_caption_of_a_megabyte_is_named_and_not_shown(pictures: Path):
    (pictures / "01.txt").write_text("word " * 200_000)
    with pytest.raises(InputError) as caught:
        cards_of(pictures)
    assert str(caught.value) == (
        f"{pictures}/01.txt: 999999 bytes are too many for a caption, the limit is 65536; shorten or remove it"
    )


def test_a_caption_that_was_changed_elsewhere_since_is_not_taken_back(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    new, old = Card(pictures / "new.png", ""), Card(pictures / "00.png", "")
    before = old.file.read_text()
    captions.write(old, "first")
    captions.write(new, "second")
    new.file.write_text("typed in an editor\n")
    with pytest.raises(InputError, match=r"new\.txt: changed elsewhere since; left unchanged"):
        captions.undo()
    assert new.file.read_text() == "typed in an editor\n"
    assert captions.undo() == 1
    assert old.file.read_text().strip() == before.strip()


@pytest.mark.parametrize(
    ("caption", "complaint"),
    [("a" * 70_000, "are too many for a caption"), ("bad \ud83d", "half a character")],
    ids=["long", "half"],
)
def test_a_caption_that_could_not_be_read_again_is_refused_before_it_is_noted(
    pictures: Path, tmp_path: Path, caption: str, complaint: str
):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    card = Card(pictures / "00.png", "")
    before = card.file.read_text()
    with pytest.raises(InputError, match=complaint):
        captions.write(card, caption)
    assert card.file.read_text() == before
    assert captions.undo() == 0


def test_a_caption_that_another_window_changed_is_kept_and_shown(pictures: Path, tmp_path: Path):
    captions, image = Captions(tmp_path / "drafts" / "captions.jsonl"), pictures / "00.png"
    captions.save(image, "picture number 0", "mine")
    with pytest.raises(ChangedElsewhere) as caught:
        captions.save(image, "picture number 0", "theirs")
    assert caught.value.text == "mine" and captions_of(pictures)[0] == "mine"
    captions.save(image, "picture number 0", "mine")  # the same words from both
    captions.save(image, "mine", "theirs")
    image.with_suffix(".txt").unlink()
    with pytest.raises(ChangedElsewhere) as caught:
        captions.save(image, "theirs", "again")
    assert caught.value.text is None
    captions.save(image, None, "again")
    assert captions_of(pictures)[0] == "again"


def test_what_can_be_undone_is_known_before(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    assert captions.undoable() == 0 and not (tmp_path / "drafts").exists()
    captions.save(pictures / "00.png", "picture number 0", "picture number 0")
    assert captions.undoable() == 0
    assert replace(captions, cards_of(pictures), "picture", "drawing") == 3
    captions.save(pictures / "00.png", "drawing number 0", "one")
    assert captions.undoable() == 1 and captions.undo() == 1
    assert captions.undoable() == 3 and captions.undo() == 3
    assert captions.undoable() == 0


def test_a_change_of_all_leaves_what_was_written_since_it_was_read(pictures: Path, tmp_path: Path):
    captions, known = Captions(tmp_path / "drafts" / "captions.jsonl"), [(c, c.caption) for c in cards_of(pictures)]
    (pictures / "00.txt").write_text("typed in an editor")
    (pictures / "01.txt").unlink()
    changed, kept = captions.edit(known, lambda caption: f"a {caption}")
    assert changed == 1
    assert kept == [
        f"{pictures}/{name}.txt: was {what} meanwhile; left as it is"
        for name, what in (("00", "written"), ("01", "removed"))
    ]
    assert captions_of(pictures) == ["typed in an editor", "", "a picture number 2"]
    assert captions.undo() == 1 and captions_of(pictures)[2] == "picture number 2"


def test_a_caption_that_two_images_share_is_changed_and_taken_back_once(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    shared = [Card(pictures / "00.jpg", "picture number 0"), *cards_of(pictures)]
    assert replace(captions, shared, "picture", "drawing") == 3
    assert captions.undoable() == 3 and captions.undo() == 3
    assert captions_of(pictures) == [f"picture number {number}" for number in range(3)]


def test_the_mark_that_windows_puts_in_front_of_a_text_is_no_letter_of_a_caption(pictures: Path, tmp_path: Path):
    (pictures / "00.txt").write_bytes(b"\xef\xbb\xbfpicture number 0\r\n")
    assert captions.saved(pictures / "00.png") == "picture number 0"
    log = Captions(tmp_path / "drafts" / "captions.jsonl")
    assert replace(log, cards_of(pictures)[:1], "picture", "a picture") == 1
    assert (pictures / "00.txt").read_bytes() == b"a picture number 0\n"
    assert log.undo() == 1 and captions_of(pictures)[0] == "picture number 0"


def test_the_caption_of_a_name_that_no_log_can_hold_is_left_as_it_is(pictures: Path, tmp_path: Path):
    for suffix in (b"png", b"txt"):
        os.rename(os.fsencode(pictures) + b"/00." + suffix, os.fsencode(pictures) + b"/caf\xe9." + suffix)
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    known = [(card, card.caption) for card in cards_of(pictures)]
    changed, [why] = captions.edit(known, lambda caption: f"a {caption}")
    assert (
        changed,
        why.endswith("caf\udce9.txt: its name is not UTF-8, so that nothing could be undone; rename it"),
    ) == (
        2,
        True,
    )
    assert captions.undo() == 2 and captions.problem == ""
    assert sorted(captions_of(pictures)) == [f"picture number {number}" for number in range(3)]


def test_each_folder_has_its_own_history(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    other = make_pictures(tmp_path / "pictures-2", count=3)
    replace(captions, cards_of(pictures), "picture", "drawing")
    replace(captions, [*cards_of(other), *cards_of(pictures)], "number", "No.")
    captions.write(cards_of(other)[0], "another")
    assert captions.undoable([pictures]) == captions.undo([pictures]) == 3
    assert captions_of(pictures) == ["drawing number 0", "drawing number 1", "drawing number 2"]
    assert captions_of(other) == ["another", "picture No. 1", "picture No. 2"]
    assert captions.undo([pictures]) == 3 and captions.undo([pictures]) == 0
    assert captions_of(pictures) == ["picture number 0", "picture number 1", "picture number 2"]
    assert [captions.undo([other]) for _ in range(3)] == [1, 3, 0]
    assert captions_of(other) == ["picture number 0", "picture number 1", "picture number 2"]
    assert (tmp_path / "drafts" / "captions.jsonl").read_text() == captions.problem == ""


def test_a_history_of_several_folders_is_undone_by_either_or_by_both(pictures: Path, tmp_path: Path):
    captions = Captions(tmp_path / "drafts" / "captions.jsonl")
    other = make_pictures(tmp_path / "\u00fc 2", count=1)
    captions.write(cards_of(pictures)[0], "one")
    captions.write(cards_of(other)[0], "two")
    assert captions.undoable([]) == 0 and captions.undoable([tmp_path / "pict"]) == 0
    assert captions.undo([pictures, other]) == 1 and captions_of(other) == ["picture number 0"]
    assert captions.undo([tmp_path]) == 1 and captions_of(pictures)[0] == "picture number 0"


@pytest.mark.parametrize(
    ("place", "sentence"), [(0, "No caption was changed"), (2, "2 of 3 captions were changed; Undo restores them")]
)
def test_of_a_replacement_that_fails_midway_what_was_written_can_be_undone_and_no_more(
    pictures: Path, tmp_path: Path, place: int, sentence: str
):
    captions = Captions(tmp_path / "log" / "captions.jsonl")
    captions.save(pictures / "01.png", "picture number 1", "picture 1")
    cards = cards_of(pictures)
    unwritable = pictures / "unwritable"
    unwritable.mkdir()
    for file in pictures.glob(f"{place:02d}.*"):
        file.rename(unwritable / file.name)
    (unwritable / f".{os.getpid()}-{threading.get_ident()}.part").mkdir()  # the name of what is being written
    cards[place] = Card(unwritable / f"{place:02d}.png", cards[place].caption)
    with pytest.raises(InputError, match=f"cannot be written .*{sentence}"):
        replace(captions, cards, "picture", "drawing")
    assert captions.undoable() == (place or 1)
    assert captions.undo() == (place or 1)
    if place == 2:
        assert captions_of(pictures) == ["picture number 0", "picture 1"]
