"""The sandbox that chat templates run in: jinja's, with what transformers gives them and a budget for what they do.

A template is a stranger's program. Jinja's sandbox keeps it from files and modules, but not from running forever or
filling the memory. Here each round of a loop, each call and each filter is a step, and each text, list or number that
one of them makes has a limit, which is checked before it is made where it may be far larger than what it is made of.
Not bounded are comparisons of lists that hold each other many times. See DECISIONS 207.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Span = tuple[int, int]
"""Letters of a text, [start, stop)."""

MOST_SOURCE = 2**20
"""Limit for a template, letters; published ones have up to 20,000."""
MOST_STEPS = 200_000
"""Steps of a rendering, with one more for each letter of its conversation; published templates need some 40 for a
message."""
MOST_LETTERS = 2**22
"""Letters of a rendering and of each text in it, with four more for each letter of its conversation."""
MOST_NUMBER = 100_000
"""Limit for numbers that say how much a function makes."""
MOST_BITS = 4096
"""Limit for numbers that are computed."""
MOST_PADDING = 200
"""Limit for what is given to functions that write it in each line or column."""
LETTERS_PER_STEP, ITEMS_PER_STEP = 1000, 50
"""A text or a list of so many counts as one more step."""
WRITES = frozenset({"pprint", "string", "tojson"})
"""Filters that write all that a list holds."""
PADS = frozenset({"center", "expandtabs", "indent", "ljust", "rjust", "tojson", "wordwrap", "zfill"})
SIZED = PADS | {"batch", "round", "slice", "to_bytes"}
"""Filters and methods that are given numbers which say how much they make."""
MULTIPLIES = PADS | WRITES | {"format", "join", "replace", "translate"}
WIDTH = re.compile(r"%[-+ #0]*(?:\*|\d{4,})|%[^%\w]*\d*\.(?:\*|\d{4,})|:[^{}]*(?:\{|\d{4,})")
"""A column of thousands of letters, or of as many as a value says, in a text for `%` or `format`."""
COUNT, JOIN = "shardstudio_count", "shardstudio_join"
"""Filters that this module puts into a template."""


class OverBudgetError(Exception):
    """A template needs more steps or memory than any conversation should take."""


class Budget:
    """The steps and letters that are left to a rendering.

    Attributes:
        steps: Number of steps; negative after the last one.
        most: Limit for each text and list.
        letters: Those that the rendering may still write.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, letters: int) -> None:
        """Begin a rendering. letters: those of its conversation."""
        self.steps = MOST_STEPS + letters
        self.most = self.letters = MOST_LETTERS + 4 * letters

    def step(self, made: object = None) -> None:
        """Count a step. made: its result."""
        self.steps -= 1
        if isinstance(made, str | bytes | list | tuple | dict) and len(made) > ITEMS_PER_STEP:
            self.require(len(made))
            self.steps -= len(made) // (LETTERS_PER_STEP if isinstance(made, str | bytes) else ITEMS_PER_STEP)
        if self.steps < 0:
            raise OverBudgetError(f"it takes more than {MOST_STEPS:,} steps")

    def write(self, size: int) -> None:
        """Count letters that are written."""
        self.letters -= size
        if self.letters < 0:
            self.require(self.most + 1)

    def require(self, size: int) -> None:
        """Raise OverBudgetError for a text or list of a size that is too large."""
        if size > self.most:
            raise OverBudgetError(f"it makes a text or list of more than {self.most:,} letters or items")

    def require_writable(self, value: object) -> None:
        """Raise OverBudgetError for lists that hold each other so often that writing them would never end."""
        size, waiting = 0, [value]
        while waiting:
            held = waiting.pop()
            if isinstance(held, list | tuple | dict):
                size += len(held)
                self.require(size)
                waiting += held.values() if isinstance(held, dict) else held


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=self._writable, extensions=[_Generation, loopcontrols]
        )
        self.budget = Budget()
        self.written: list[str] = []
        self.spans: list[Span] = []
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {name: self._bounded(name, one) for name, one in filters.items()}
        self.filters |= {COUNT: _counting(self.budget), JOIN: _join, "sum": _adding(self.budget)}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _dict, "namespace": _namespace}
        del self.globals["lipsum"]  # texts of any length, which no conversation needs

    def concat(self, parts: Any) -> str:
        """Join what a block, a macro or the template wrote."""
        held = [str(self._writable(part)) for part in parts]
        self.budget.step()
        self.budget.require(sum(map(len, held)))
        return "".join(held)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            made = left + right
            self.budget.step(made)
            return made
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if abs(bits) > MOST_BITS:
                raise OverBudgetError(f"it computes a number of more than {MOST_BITS:,} bits")
        elif operator == "*":
            many, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                self.budget.require(len(many) * times)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        made = super().call_binop(context, operator, left, right)
        self.budget.step(made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, BuiltinMethodType):
            args = __self._checked(__obj.__name__, (__obj.__self__, *args), kwargs)[1:]
        made = super().call(__context, __obj, *args, **kwargs)
        __self.budget.step(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        """Count the rounds of loops, and join texts within the budget: jinja has no hook for either."""
        for loop in source.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(True), COUNT, loop), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(_filtered(nodes.Const(True), COUNT, loop), loop.test, lineno=loop.lineno)
        for joined in source.find_all(nodes.Concat):
            held = nodes.List(joined.nodes, lineno=joined.lineno)
            joined.nodes = [_filtered(held, JOIN, joined)]
        return super()._generate(source, *args, **options)

    def _writable(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            self.budget.require_writable(value)
        return value

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            made = function(*self._checked(name, args, kwargs), **kwargs)
            self.budget.step(made)
            return made

        return bounded

    def _checked(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Check what a function is given, as it may make far more of that. Returns the arguments."""
        if name in SIZED:
            most = MOST_PADDING if name in PADS else MOST_NUMBER
            for one in (*_given(args)[1:], *kwargs.values()):
                if isinstance(one, int) and not -most <= one <= most:
                    raise OverBudgetError(f"it gives {one:,} to {name}")
        return self._multiplied(name, args, kwargs) if name in MULTIPLIES else args

    def _multiplied(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Check what a function is given that writes one thing as often as another says. Returns the arguments."""
        given = _given(args)
        padding = [one for one in (*given[1:], *kwargs.values()) if isinstance(one, str)]
        if name in PADS and any(len(one) > MOST_PADDING for one in padding):
            raise OverBudgetError(f"it gives a text of more than {MOST_PADDING} letters to {name}")
        if name in WRITES:
            self._writable(given[0])
        elif name == "replace" and len(given) > 2:
            text, old, new = (str(one) for one in given[:3])
            self.budget.require(len(text) + (text.count(old) if len(new) > len(old) else 0) * len(new))
        elif name == "translate":
            table = given[1].values() if isinstance(given[1], Mapping) else given[1]
            self.budget.require(len(given[0]) * max((len(one) for one in table if isinstance(one, str)), default=1))
        elif name == "format":
            _check_widths(str(given[0]))
        elif name == "join":
            return self._join_checked(args, given)
        return args

    def _join_checked(self, args: tuple[Any, ...], given: list[Any]) -> tuple[Any, ...]:
        """The arguments of `join`, of a filter (parts, text between) or of a text (itself, parts)."""
        is_method = len(args) == 2 and isinstance(args[0], str)
        parts = given[1] if is_method else given[0]
        between = given[0] if is_method else (given[1] if len(given) > 1 else "")
        held = list(parts)
        self.budget.require(sum(len(str(part)) + len(str(between)) for part in held))
        return tuple(held if one is parts else one for one in args)


class _Generation(Extension):
    """The tag around what the assistant writes, as transformers has it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body, lineno=line)

    def _mark(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        text, start = caller(), sum(map(len, environment.written))
        environment.spans.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """Jinja's namespace without names that mean something to Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Sandbox:
    """A compiled template.

    Raises:
        OverBudgetError: It is too long or nested too deep.
        jinja2.TemplateSyntaxError: It is not jinja.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MOST_SOURCE:
            raise OverBudgetError(f"it has more than {MOST_SOURCE:,} letters")
        self._environment = BoundedEnvironment()
        self._lock = threading.Lock()  # samples are generated while other conversations are read ahead
        try:
            self._template = self._environment.from_string(source)
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's own compiler too
            raise OverBudgetError("it is nested too deep") from error

    def render(self, variables: Mapping[str, Any], letters: int) -> tuple[str, list[Span]]:
        """Render a conversation. letters: about as many as it has, for the budget.

        Returns:
            The text, and the parts of it that the template marks as the assistant's.

        Raises:
            Exception: The template is a program, which may raise anything; OverBudgetError if it takes too long.
        """
        with self._lock:
            environment = self._environment
            environment.budget.begin(letters)
            environment.written, environment.spans = [], []
            for part in self._template.generate(variables):
                environment.written.append(part)
                environment.budget.write(len(part))
            return "".join(environment.written), environment.spans


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _dict(*pairs: Any, **entries: Any) -> dict[str, Any]:
    return dict(*pairs, **entries)


def _namespace(*pairs: Any, **entries: Any) -> Namespace:
    names = dict(*pairs, **entries)
    for name in names:
        _check_name(name)
    return _Namespace(names)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}")


def _counting(budget: Budget) -> Callable[[Context, bool], bool]:
    @pass_context  # jinja would compute a filter without it once, when it compiles
    def count(context: Context, value: bool) -> bool:
        budget.steps -= 1
        if budget.steps < 0:
            budget.step()
        return value

    return count


def _adding(budget: Budget) -> Callable[..., Any]:
    @pass_environment
    def add(environment: Environment, values: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        for one in values if attribute is None else map(make_attrgetter(environment, attribute), values):
            start = start + one
            budget.step(start)
        return start

    return add


@pass_context
def _join(context: Context, parts: list[Any]) -> str:
    return context.environment.concat(parts)


def _given(args: tuple[Any, ...]) -> list[Any]:
    """Arguments that a template gives a function: for a filter or a method, its object comes first."""
    return [one for one in args if not isinstance(one, Context | Environment | nodes.EvalContext)]


def _filtered(node: nodes.Expr, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=at.lineno)


def _check_widths(text: str) -> None:
    if found := WIDTH.search(text):
        raise OverBudgetError(f"it formats with {found[0]!r}")
