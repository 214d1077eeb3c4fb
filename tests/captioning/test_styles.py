from __future__ import annotations

import time
from typing import Any

import pytest

from trainer.captioning.styles import cleaned, instruction
from trainer.run.captioning import CaptionRequest
from trainer.system.errors import InputError


def request(**changes: Any) -> CaptionRequest:
    return CaptionRequest.checked({"folder": "/images", "model": "/model", **changes})


def clean(answer: str, is_complete: bool = True, most_bytes: int = 1000, **changes: Any) -> str:
    return cleaned(answer, request(**changes), is_complete, most_bytes)


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("A red fox sleeps in the snow.", "A red fox sleeps in the snow."),
        ("The image shows a red fox.", "A red fox."),
        ("This photograph depicts a red fox.", "A red fox."),
        ("In this image, we can see two boats.", "Two boats."),
        ('Sure! Here is a caption for the image: "A fox."', "A fox."),
        ("**Caption:** a fox", "A fox"),
        ("\u201cA fox in \u2018snow\u2019\u201d", "A fox in \u2018snow\u2019"),
        ("A fox.\n\nIt sleeps.\r\n", "A fox. It sleeps."),
        ("A fox. It sleeps. A FOX. It sleeps.", "A fox. It sleeps."),
        ("<think>Is it a fox?</think>\nA fox.", "A fox."),
        ("Is it a fox?\n</think>\n\nA fox.", "A fox."),
        ("<think>Is it a fox", ""),
        ("A\u202e fox\x00 \ufffd.", "A fox ."),
        ('A sign reads "Stop!" near a road. It rains.', 'A sign reads "Stop!" near a road. It rains.'),
        ("It (a fox.) sleeps.", "It (a fox.) sleeps."),
        ("This painting shows a fox.", "This painting shows a fox."),
        ("```text\nA fox.\n```", "A fox."),
        ("## Caption\n\nA fox.", "A fox."),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"),
        ("The images of the artist hang on a wall.", "The images of the artist hang on a wall."),
        (' "" ', ""),
        ("   \n", ""),
    ],
)
def test_a_sentence_is_freed_of_what_says_nothing_of_the_image(answer, caption):
    assert clean(answer) == caption


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("fox, snow, night.", "fox, snow, night"),
        ("- fox\n- snow\n- red fur", "fox, snow, red fur"),
        ("1. fox\n2. snow", "fox, snow"),
        ("Tags: fox, Fox, snow; fox", "fox, snow"),
        ('"fox", "snow"', "fox, snow"),
        ('["fox", "snow"]', "fox, snow"),
        ("```\nfox, snow\n```", "fox, snow"),
        ("fox\u3001snow\uff0cnight", "fox, snow, night"),
        ("*fox*, [trigger]", "fox, [trigger]"),
        ("fox, watermark, snow", "fox, snow"),
    ],
)
def test_tags_are_words_between_commas_each_once_without_those_to_omit(answer, caption):
    assert clean(answer, style="tags", omit="Watermark, text") == caption


def test_an_answer_that_was_cut_off_loses_its_last_sentence_unless_it_has_one_only():
    assert clean("A fox. It sleeps in the sn", is_complete=False) == "A fox."
    assert clean("A fox sleeps in the sn", is_complete=False) == "A fox sleeps in the sn"
    assert clean("fox, snow, ni", is_complete=False, style="tags") == "fox, snow"


def test_a_caption_never_has_more_bytes_than_allowed_and_ends_at_a_sentence_or_a_word():
    assert clean("A fox. It sleeps.", most_bytes=10) == "A fox."
    assert clean("A fox sleeps in the snow", most_bytes=12) == "A fox sleeps"
    assert clean("\u72d0" * 10, most_bytes=10) == "\u72d0" * 3
    with_trigger = clean("A fox. It sleeps.", most_bytes=20, trigger=True)
    assert with_trigger == "[trigger], A fox." and len(with_trigger) <= 20


def test_an_answer_of_sixty_thousand_tags_is_shortened_in_a_moment():
    began = time.process_time()
    found = clean(", ".join(f"tag{number}" for number in range(60_000)), style="tags", most_bytes=65_536)
    assert 65_500 < len(found) <= 65_536 and found.endswith(found.split(", ")[-1]) and found.startswith("tag0, tag1")
    assert time.process_time() - began < 2


def test_the_trigger_is_put_in_front_of_captions_but_never_stands_alone():
    assert clean("The image shows a fox.", trigger=True) == "[trigger], A fox."
    assert clean("\n", trigger=True) == ""
    assert clean("A fox by [trigger].", trigger=True) == "A fox by [trigger].", "once"


def test_the_instruction_is_the_users_prompt_or_that_of_the_style_and_says_what_to_omit():
    assert instruction(request(prompt="Name the animal.")) == "Name the animal."
    assert (
        instruction(request(prompt="Name it.", omit="the man's name,, watermark "))
        == "Name it. Do not mention: the man's name, watermark."
    )
    assert instruction(request(prompt="Name it", omit="text")) == "Name it. Do not mention: text."
    assert instruction(request(style="tags")).startswith("List 10 to 30 short tags")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "poem"}, "captions: style: Input should be 'sentence', 'detailed' or 'tags'"),
        ({"ranks": 0}, "captions: ranks: Input should be greater than or equal to 1"),
        ({"shard": True}, "--shard: one rank has no other to share a model with; set --ranks to the number of GPUs"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_by_field(changes, message):
    with pytest.raises(InputError) as refused:
        request(**changes)
    assert str(refused.value) == message
