"""Grammars by name: texts that fit and texts that don't, and what readers make of them."""

from __future__ import annotations

import configparser
import tomllib
from datetime import date, datetime, time

import pytest

from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.request import Constraint
from spec_serve.spec.shipped import SHIPPED
from tests.grammars import spelling

GOOD = {
    "sql_select": [
        "SELECT * FROM orders;",
        "SELECT name, COUNT(*) FROM a.b WHERE x >= -2.5 AND y LIKE 'z%' OR c IS NOT NULL "
        "GROUP BY name ORDER BY name DESC, x LIMIT 10",
    ],
    "python_function": [
        "def add(a: int, b: list[int] | None) -> int:\n    \"\"\"Sums.\"\"\"\n    return a\n",
        "def go():\n    pass\n",
    ],
    "ini": ["[main]\nkey = value\nother = \n[second]\n", "[a]\n"],
    "toml": ['a = 1\nb = "x"\n[t.u]\nc = [true, 2.5]\nd = 2024-02-28\n', "[t]\n"],
    "yaml": ['name: "x"\nitems:\n  - 1\n  - null\n'],
    "fenced_code": ["```python\nprint(1)\n\n```", "```\n```"],
    "date": ["2024-12-31"],
    "time": ["23:59:00"],
    "datetime": ["2024-12-31T23:59:00Z", "2024-12-31T23:59:00+02:00"],
    "multiple_choice": ["A", "E"],
}
BAD = {
    "sql_select": ["DROP TABLE x", "SELECT * FROM x; DROP", "SELECT 'a' FROM b"],
    "python_function": ["import os\n", "def f():\n"],
    "ini": ["key = value\n", "[a]\nb = [c]\n"],
    "toml": ["a: 1\n", 'a = "x\n"\n'],
    "yaml": ["name: x: y\n", "- 1\n"],
    "fenced_code": ["```python\nprint(1)", "print(1)"],
    "date": ["2024-13-01", "24-01-01"],
    "time": ["24:00:00"],
    "datetime": ["2024-12-31 23:59:00"],
    "multiple_choice": ["F", "AB"],
}


def fits(name: str, text: str) -> bool:
    matcher = compiler_of(spelling()).compile(Constraint("name", name)).grammar.start()
    return all(map(matcher.advance, spelling().encode(text))) and matcher.complete


@pytest.mark.parametrize("name", SHIPPED)
def test_examples(name: str) -> None:
    for text in GOOD[name]:
        assert fits(name, text), text
    for text in BAD[name]:
        assert not fits(name, text), text


def test_readers_take_the_examples() -> None:
    for text in GOOD["toml"]:
        tomllib.loads(text)
    for text in GOOD["ini"]:
        configparser.ConfigParser().read_string(text)
    for text in GOOD["python_function"]:
        compile(text, "example", "exec")
    assert date.fromisoformat(GOOD["date"][0]) and time.fromisoformat(GOOD["time"][0])
    assert all(map(datetime.fromisoformat, GOOD["datetime"]))
