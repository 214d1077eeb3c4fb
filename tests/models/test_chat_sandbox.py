"""Chat templates have a budget: one that runs forever or fills the memory is refused, and others are as before."""

from __future__ import annotations

import time
from typing import Any

import pytest

from trainer.models.parts.chat.chat_sandbox import Sandbox
from trainer.models.parts.chat.chat_template import check_jinja
from trainer.system.errors import InputError

GROWS = "{% set ns = namespace(x=NINE) %}{% for i in range(99) %}{% set ns.x = DOUBLE %}{% endfor %}"
STEPS = "it takes more than 200,000 steps"
SIZE = "it makes a text or list of more than 4,194,304 letters or items"
BITS = "it computes a number of more than 4,096 bits"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", STEPS),
        ("{% for i in range(99999) %}{% set a = range(99999) | list %}{% endfor %}", STEPS),
        ("{{ 2 ** 10000000000 }}", BITS),
        (GROWS.replace("DOUBLE", "ns.x * ns.x").replace("NINE", "9"), BITS),
        (GROWS.replace("DOUBLE", "ns.x ~ ns.x").replace("NINE", "'123456789'"), SIZE),
        (GROWS.replace("DOUBLE", "ns.x + ns.x").replace("NINE", "[1]"), SIZE),
        (GROWS.replace("DOUBLE", "[ns.x, ns.x]").replace("NINE", "9") + "{{ ns.x }}", SIZE),
        ("{{ 'a' * 10000000000 }}", SIZE),
        ("{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}", SIZE),
        ("{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}", SIZE),
        ("{% set a = 'a' * 1000000 %}{{ range(99999) | join(a) }}", SIZE),
        ("{% set a = 'a' * 1000000 %}{{ a.join(range(99999) | list | map('string')) }}", SIZE),
        ("{% set a = 'a' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}", SIZE),
        ("{% set a = 'a' * 1000000 %}{% set b %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}", SIZE),
        ("{{ 'a'.ljust(10000000000) }}", "it gives 10,000,000,000 to ljust"),
        ("{{ 'a' | center(10000000000) }}", "it gives 10,000,000,000 to center"),
        ("{{ 1 | round(-10000000000) }}", "it gives -10,000,000,000 to round"),
        ("{% set a = 'a' * 1000000 %}{{ a.translate({97: a}) }}", SIZE),
        ("{% set a = [0] * 1000000 %}{{ ([a] * 1000) | sum(start=[]) }}", STEPS),
        ("{{ 'a' | indent('b' * 9999) }}", "it gives a text of more than 200 letters to indent"),
        ("{{ '%1000000000d' % 1 }}", "it formats with '%1000000000'"),
        ("{{ '%*d' % (1000000000, 1) }}", "it formats with '%*'"),
        ("{{ '{:1000000000}'.format(1) }}", "it formats with ':1000000000'"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}", STEPS),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "maximum recursion depth exceeded"),
        ("{{ lipsum(n=99999) }}", "'lipsum' is undefined"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "a namespace has no '__class__'"),
        ("{{ namespace(__init__=1) }}", "a namespace has no '__init__'"),
    ],
)
def test_a_template_that_takes_too_long_or_too_much_is_stopped(source: str, wrong: str) -> None:
    sandbox = Sandbox(source)
    began = time.process_time()
    with pytest.raises(Exception, match=r".") as caught:
        sandbox.render({}, 0)
    assert str(caught.value).startswith(wrong)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "it is nested too deep"),
        ("a" * 2**21, "it has more than 1,048,576 letters"),
        ("\n{{ 1 +", "line 2: unexpected 'end of template'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused_by_its_name(source: str, wrong: str) -> None:
    with pytest.raises(InputError) as caught:
        check_jinja("own.jinja", source)
    assert str(caught.value) == (
        f"data.chat_template: own.jinja is not a jinja template ({wrong}); correct it, or name one of chatml, gemma, "
        "llama-3, mistral"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}{{ messages | tojson(indent=4) }}{{ messages | tojson(ensure_ascii=True) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{% endfor %}",
        "  {% set ns = namespace(a=1, b='x') %}\n  {% set ns.a = ns.a + 1 %}\n{{ ns.a }}{{ dict(a=ns.b) }}\n",
        "{% macro m(x, y=2) %}{{ x * y }}{% endmacro %}{{ m('ab') }}{{ m(3, 4) }}{{ 'a%sb' % 5 }}",
        "{{ messages[::-1] | map(attribute='role') | join(', ') }}{{ '{:>3}'.format(1) }}"
        "{% for m in messages recursive %}{{ m.content or loop([]) }}{% endfor %}{{ [1, 2] + [3] }}"
        "{{ ('a', 'b') | join }}{{ 'é' | upper }}{{ none }}{{ 'x' | indent(2) }}",
        "{{ messages | sum(attribute='n', start=5) }}{{ [[1], [2]] | sum(start=[]) }}{{ 'ab'.translate({97: 'xy'}) }}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{% set n = messages[0].n %}{{ m(n) }}{{ n | tojson }}{{ n | string }}"
        "{{ n | abs }}{{ '{}'.format(n) }}{{ none | default(n) }}{{ namespace(n=n).n }}{{ n | round }}",
        "{% generation %}a{% endgeneration %}{{ strftime_now('%Y') }}{{ messages[0].content.replace('H', 'J') }}",
    ],
)
def test_other_templates_write_what_they_write_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hé <b>", "n": 1_700_000_000},
        {"role": "assistant", "content": "So'", "n": 2},
    ]
    expected, spans = render_jinja_template([messages], chat_template=source, return_assistant_tokens_mask=True)
    variables: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    assert Sandbox(source).render(variables, 0) == (expected[0], spans[0])


def test_a_long_conversation_is_within_the_budget() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content.split(' ') %}{% if part %}{{ part | trim + ' ' }}{% endif %}"
        "{% endfor %}{{ m.content ~ '\\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a word and another " * 50}] * 1000
    text, _ = Sandbox(source).render({"messages": messages}, 1000 * 950)
    assert len(text) == 1000 * 2 * 950 + 1000
