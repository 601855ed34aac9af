"""Templates end: in time, in size, and without reaching for what is not theirs."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from spec_serve.target import chat_sandbox
from spec_serve.target.chat_template import ChatTemplateError, render

LOOP = "{% for a in range(99999) %}"
ENDLESS = {
    "loops in loops": LOOP * 3 + "{% endfor %}" * 3,
    "loops that say something": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "a loop of a set": "{% set ns = namespace(n=0) %}" + LOOP * 2
    + "{% set ns.n = ns.n + 1 %}" + "{% endfor %}" * 2,
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a wide range": "{% for a in range(10 ** 9) %}x{% endfor %}",
    "a text times a number": "{{ 'x' * 10 ** 9 }}",
    "a number times a text": "{{ 999999999 * 'x' }}",
    "a list times a number": "{{ ([1] * 999999999) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares of squares": "{% set ns = namespace(n=9) %}" + LOOP
    + "{% set ns.n = ns.n * ns.n %}" + "{% endfor %}",
    "a text doubled with ~": "{% set ns = namespace(t='x') %}" + LOOP
    + "{% set ns.t = ns.t ~ ns.t %}" + "{% endfor %}",
    "a text doubled with +": "{% set ns = namespace(t='x') %}" + LOOP
    + "{% set ns.t = ns.t + ns.t %}" + "{% endfor %}",
    "a list doubled with +": "{% set ns = namespace(t=[1]) %}" + LOOP
    + "{% set ns.t = ns.t + ns.t %}" + "{% endfor %}",
    "a text joined": "{{ range(99999) | join('x' * 100000) }}",
    "a text joined by a method": "{{ ('x' * 10000000).join(['a', 'b', 'c']) }}",
    "a text replaced": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "a wide field": "{{ 'x' | center(10 ** 9) }}",
    "a wide field of a method": "{{ 'x'.ljust(10 ** 9) }}",
    "a deep indent": "{{ 'x\n' | indent(10 ** 9) }}",
    "many slices": "{{ [1] | slice(10 ** 9) | list }}",
    "a large batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a starred format": "{{ '%*d' % (999999999, 1) }}",
    "text without end": "{{ lipsum(10 ** 6) }}",
    "much text": LOOP + "x" * 1000 + "{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "RENDER_S", 0.2)
    begun = time.thread_time()
    with pytest.raises(ChatTemplateError):
        render(source, {})
    assert time.thread_time() - begun < 5


def test_refusals_come_before_the_memory_is_taken() -> None:
    tracemalloc.start()
    try:
        for name in ("a text times a number", "a wide field", "a text replaced", "a wide format"):
            with pytest.raises(ChatTemplateError):
                render(ENDLESS[name], {})
        assert tracemalloc.get_traced_memory()[1] < 2 * chat_sandbox.MAX_CHARS
    finally:
        tracemalloc.stop()


REACHING = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['os'].system('true') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': messages}) }}",
    "{% set x = messages.append(1) %}",
    "{% set x = config.update(1) %}",
    "{{ (messages|map(attribute='__class__')|first)() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", REACHING)
def test_a_template_reaches_nothing_but_what_it_was_given(source: str) -> None:
    try:
        made = render(source, {"messages": ["x"], "config": {}})
    except ChatTemplateError:
        return
    except TypeError:
        pytest.fail("what a template does wrong is an error of the template")
    for betrayed in ("class", "root:", "module", "globals", "uid="):
        assert betrayed not in made


KEPT = {
    "{% for a in x %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}":
    "1/3,2/3,3/3.",
    "{% for a in x if a > 1 %}{{ a }}{{ loop.first }}{% else %}none{% endfor %}": "2True3False",
    "{% for a in nothing %}{{ a }}{% else %}none{% endfor %}": "none",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}": "a=1;b=2;",
    "{% for k in d %}{{ k }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}": "abba",
    "{% for a in x[1:] %}{{ a }}{{ loop.revindex }}{% endfor %}": "2231",
    "{% for a in x|map('string')|reject('equalto', '2') %}{{ a }}{% endfor %}": "13",
    "{% for a in tree recursive %}{{ a.n }}({{ loop(a.c) }}){% endfor %}": "1(2())",
    "{{ x | join(', ') }}{{ [] | join }}{{ d.values() | join('-') }}": "1, 2, 31-2",
    "{{ people | join(', ', attribute='n') }}": "1, 2",
    "{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%s!' % 'y' }}":
    "a1Nonexxx10243y!",
    "{{ 'a,b'.replace(',', ';') }}{{ '-'.join(['a', 'b']) }}{{ 'x'.ljust(3) }}|": "a;ba-bx  |",
    "{{ [1] + [2] }}{{ 1.5 * 2 }}{{ 'abc' | center(5) }}{{ 2.55 | round(1) }}": "[1, 2]3.0 abc 2.5",
    "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) }}{% call f(2) %}{% endcall %}": "<1><2>",
    "{% set ns = namespace(i=0) %}{% for a in x %}{% set ns.i = ns.i + a %}{% endfor %}{{ ns.i }}":
    "6",
    "{% for a in x %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}": "13",
    "{{ x | tojson }}{{ '100% sure' }}{{ x | length }}{{ range(3) | list }}":
    "[1, 2, 3]100% sure3[0, 1, 2]",
}  # fmt: skip


@pytest.mark.parametrize(("source", "made"), KEPT.items())
def test_what_templates_do_is_as_it_was(source: str, made: str) -> None:
    tree = [{"n": 1, "c": [{"n": 2, "c": []}]}]
    people = [{"n": 1}, {"n": 2}]
    given = {"x": [1, 2, 3], "d": {"a": 1, "b": 2}, "tree": tree, "people": people}
    if "call f" in source:
        source = source.replace("{{ a }}>", "{{ a }}>{{ caller() if caller else '' }}")
    assert render(source, given) == made


def test_long_conversations_are_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 100} for _ in range(4096)]
    source = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>' }}"
        "{% endfor %}"
    )
    assert len(render(source, {"messages": messages})) == 4096 * (len("<|user|><|end|>") + 499)
