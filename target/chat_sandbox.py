"""Jinja's sandbox with an end to time and size: a template can neither reach out nor run for ever.

A thread can't be stopped from outside, so the template's own loops, calls and operators are counted
and look at the clock: the processor time of the thread that renders. Numbers and texts that would
make one operation huge are refused before it is done. Knows no models and no messages.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 1.0  # of the thread's processor time
MAX_CHARS = 16 << 20  # of what is rendered, and of any text on the way there
MAX_NUMBER = 100_000  # where a number says how much is made; Jinja's bound on range()
MAX_BITS = 4096  # of an integer
_EVERY = 64  # how often the clock is looked at
_CHARS_A_COUNT = 4096  # work on texts counts, too
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})")  # a field of a format as wide as memory
_SIZED = frozenset({"center", "indent", "wordwrap", "truncate", "slice", "batch", "round"})

_thread = threading.local()


class Budget:
    """What one rendering may use; in force in this thread inside `with`."""

    def __init__(self, seconds: float) -> None:
        self._until = time.thread_time() + seconds
        self._count = 0

    def __enter__(self) -> Budget:
        _thread.budget = self
        return self

    def __exit__(self, *of: object) -> None:
        _thread.budget = None

    def spend(self, amount: int = 1) -> None:
        """Raises TemplateError when the time is up."""
        before, self._count = self._count, self._count + amount
        if before // _EVERY != self._count // _EVERY and time.thread_time() > self._until:
            raise jinja2.TemplateError("rendering takes too long")


def _spend(amount: int = 1) -> None:
    budget = getattr(_thread, "budget", None)
    if budget is not None:
        budget.spend(amount)


def _fits(chars: int) -> None:
    if chars > MAX_CHARS:
        raise jinja2.TemplateError("a text becomes too long")
    _spend(chars // _CHARS_A_COUNT)


class _Counted:
    """Something to iterate over; each step counts."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> Iterator[Any]:
        for entry in self._value:
            _spend()
            yield entry

    def __len__(self) -> int:
        return len(self._value)


def _checked(text: Any) -> Any:
    if isinstance(text, str):
        _fits(len(text))
    return text


class _Counting(NodeTransformer):
    """Puts the counting into a template's loops and the check behind its `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (Jinja's name)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "checked")


def _filter(node: nodes.Node, name: str) -> nodes.Node:
    made = nodes.Filter(node, f"spec_serve_{name}", [], [], None, None)
    return made.set_lineno(node.lineno, override=True)


class Environment(ImmutableSandboxedEnvironment):
    """An environment whose templates count what they do; see `Budget`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals.pop("lipsum")  # text without end, of no use here
        for name in _SIZED:
            self.filters[name] = _sized(self.filters[name])
        self.filters["join"] = _join(self.filters["join"])
        self.filters |= {"spec_serve_counted": _Counted, "spec_serve_checked": _checked}

    def template(self, source: str) -> jinja2.Template:
        """Compiled from text. Raises TemplateError."""
        tree = _Counting().visit(self.parse(source))
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """What a template calls; methods of texts only with numbers that can be meant."""
        _spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, unless its result would be huge."""
        _spend()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _fits(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str) and _WIDE.search(left):
                raise jinja2.TemplateError("a text becomes too long")
        elif isinstance(left, int) and isinstance(right, int):
            _fits_number(operator, left, right)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                    _fits(len(text) * max(times, 0))
        return super().call_binop(context, operator, left, right)


def _fits_number(operator: str, left: int, right: int) -> None:
    bits = left.bit_length()
    bits = bits * max(right, 0) if operator == "**" else bits + right.bit_length()
    if bits > MAX_BITS:
        raise jinja2.TemplateError("a number becomes too large")


def _check_method(text: str, method: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, int) and arg > MAX_NUMBER and method not in ("find", "index", "count"):
            raise jinja2.TemplateError(f"{method}: the number is too large")
    if method == "replace" and len(args) >= 2 and isinstance(args[0], str):
        _fits(len(text) + text.count(args[0]) * len(str(args[1])))
    elif method == "join" and args and isinstance(args[0], (list, tuple)):
        _fits(sum(len(str(entry)) + len(text) for entry in args[0]))


def _sized(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter one of whose numbers says how much it makes."""

    @functools.wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _spend()
        if any(isinstance(a, int) and abs(a) > MAX_NUMBER for a in (*args, *kwargs.values())):
            raise jinja2.TemplateError(f"{original.__name__}: the number is too large")
        return original(*args, **kwargs)

    return bounded


def _join(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bounded(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        entries = list(_Counted(value))
        _fits(len(str(d)) * len(entries))
        return _checked(original(context, entries, d, attribute))

    return bounded


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of a template. Raises TemplateError when it takes too long or gets too long."""
    pieces: list[str] = []
    size = 0
    with Budget(RENDER_S) as budget:
        for piece in template.generate(variables):
            budget.spend()
            size += len(piece)
            if size > MAX_CHARS:
                raise jinja2.TemplateError("the text becomes too long")
            pieces.append(piece)
    return "".join(pieces)
