"""The streaming parser of tool calls: every family's format, every way to cut it, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_serve.api.tool_calls import TextPiece, ToolCallDelta, ToolParser, parser_for
from spec_serve.api.tool_formats import (
    BARRED,
    DEEPSEEK,
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    Format,
    format_of,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "note": {"type": ["string", "null"]},
        "any": {},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"weather": SCHEMA, "clock": {}, "a.b-c": {}}
FORMATS = (HERMES, LLAMA, MISTRAL, DEEPSEEK, BARRED, GEMMA)

Result = tuple[str, list[tuple[str, str]]]


def joined(pieces: list[Any]) -> Result:
    text, names, arguments, ids = "", [], [], []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            assert piece.text
            text += piece.text
            continue
        assert isinstance(piece, ToolCallDelta)
        if piece.name is not None:
            assert piece.index == len(names), "calls are numbered in order"
            names.append(piece.name)
            arguments.append("")
            ids.append(piece.id)
        assert piece.id == ids[piece.index] and piece.index == len(names) - 1
        arguments[piece.index] += piece.arguments
    assert len(set(ids)) == len(ids)
    return text, list(zip(names, arguments, strict=True))


def parse(form: Format, *parts: str) -> Result:
    parser = ToolParser(form, TOOLS)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined(pieces + parser.finish())


CASES: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "n": [1, {"a": null}]}}\n'
        "</tool_call>",
        "",
        [("weather", '{"city": "Paris", "n": [1, {"a": null}]}')],
    ),
    (
        HERMES,
        'I look.\n\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"name":"clock"}</tool_call>\n',
        "I look.",
        [("weather", "{}"), ("clock", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"city": "</tool_call>"}, "name": "weather"}</tool_call> Done.',
        " Done.",
        [("weather", '{"city": "</tool_call>"}')],
    ),
    (
        HERMES,  # a closing brace too few, as small models write it
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}\n</tool_call>',
        "",
        [("weather", '{"city": "Oslo"}')],
    ),
    (
        HERMES,  # line breaks in a string are escaped, other white space stays
        '<tool_call>{"name": "weather", "arguments":\n { "city" : "a\nb\t" } }</tool_call>',
        "",
        [("weather", '{ "city" : "a\\nb\\t" }')],
    ),
    (
        HERMES,
        r'<tool_call>{"name": "clock", "arguments": "{\"a\": \"\\u00e9\"}"}</tool_call>',
        "",
        [("clock", '{"a": "\\u00e9"}')],
    ),
    (
        HERMES,
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\"York\" </b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=note>\nnull\n</parameter>\n'
        "<parameter=any>\nfree\n</parameter>\n<parameter=new>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [
            (
                "weather",
                '{"city": "New\\n\\"York\\" </b>", "days": 3, "exact": true, "tags": ["a", 1], '
                '"note": null, "any": "free", "new": "7"}',
            )
        ],
    ),
    (HERMES, "<function=clock></function> then", " then", [("clock", "{}")]),
    (
        HERMES,
        "<function=weather><parameter=city></parameter><parameter=days></parameter></function>",
        "",
        [("weather", '{"city": "", "days": ""}')],
    ),
    (
        HERMES,  # as Qwen2.5-Coder 0.5B has been seen to do
        '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```',
        "",
        [("weather", '{\n    "city": "Paris"\n  }')],
    ),
    (
        HERMES,
        '{"name": "weather", "arguments": {"city": "Paris"}}\n{"name": "clock"}',
        "",
        [("weather", '{"city": "Paris"}'), ("clock", "{}")],
    ),
    (HERMES, '{"name": "Paris", "size": 1}', '{"name": "Paris", "size": 1}', []),
    (HERMES, '```json\n{"name": "x"}\n```\n', '```json\n{"name": "x"}\n```\n', []),
    (
        LLAMA,
        '{"name": "weather", "parameters": {"city": "Rom"}}; {"name":"clock","parameters":{}}',
        "",
        [("weather", '{"city": "Rom"}'), ("clock", "{}")],
    ),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "clock", "parameters": {"a": -1.5e3}}\nwell',
        "\nwell",
        [("clock", '{"a": -1.5e3}')],
    ),
    (LLAMA, '<|python_tag|>search("x")', '<|python_tag|>search("x")', []),
    (LLAMA, ' {"city": "Paris"}', ' {"city": "Paris"}', []),
    (LLAMA, 'See {"name": "clock"}', 'See {"name": "clock"}', []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}, '
        '{"name": "clock", "arguments": {}}]',
        "",
        [("weather", '{"city": "Bern"}'), ("clock", "{}")],
    ),
    (
        MISTRAL,
        'So:[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}'
        "[TOOL_CALLS]a.b-c{}",
        "So:",
        [("weather", '{"city": "Bern"}'), ("clock", "{}"), ("a.b-c", "{}")],
    ),
    (
        DEEPSEEK,
        "Let me.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Ulm"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me.",
        [("weather", '{"city": "Ulm"}'), ("clock", "{}")],
    ),
    (
        BARRED,
        '<|tool_call|>[{"name": "weather", "arguments": {"days": 2}}]<|/tool_call|>',
        "",
        [("weather", '{"days": 2}')],
    ),
    (
        GEMMA,
        "```tool_code\nprint(weather(city='Bonn', days=2))\nclock()\n```",
        "",
        [("weather", '{"city": "Bonn", "days": 2}'), ("clock", "{}")],
    ),
    (
        GEMMA,
        '```json\n{"name": "clock", "parameters": {"z": [true, false]}}\n```\nok',
        "\nok",
        [("clock", '{"z": [true, false]}')],
    ),
    (GEMMA, "```tool_code\n[weather(city='x'), clock()]\n```", "",
     [("weather", '{"city": "x"}'), ("clock", "{}")]),
    (
        LLAMA,
        "[weather(city='a\\'])', tags=[1, (2)], exact=true), clock(a=None)] so",
        " so",
        [("weather", '{"city": "a\'])", "tags": [1, 2], "exact": true}'), ("clock", '{"a": null}')],
    ),
    (LLAMA, r"[clock(a='\d')]", "", [("clock", r'{"a": "\\d"}')]),
    (GEMMA, '[{"name": "clock"}]', "", [("clock", "{}")]),
    (GEMMA, "[1] a source", "[1] a source", []),
    (LLAMA, "[nobody(city='x')]", "[nobody(city='x')]", []),
    (LLAMA, "[weather(city)] is odd", "[weather(city)] is odd", []),
    (GEMMA, '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    (GEMMA, "```python\nx = {}\n```", "```python\nx = {}\n```", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_formats(form: Format, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert parse(form, text) == (shown, calls)
    assert parse(form, *text) == (shown, calls)
    for name, arguments in calls:
        assert isinstance(json.loads(arguments), dict), name


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_every_cut_in_two(
    form: Format, text: str, shown: str, calls: list[tuple[str, str]]
) -> None:
    for at in range(len(text)):
        assert parse(form, text[:at], text[at:]) == (shown, calls)


FRAGMENTS = sorted(
    {marker for form in FORMATS for marker in (*form.markers, *form.controls)}
    | {
        '{"name": "weather", "arguments": ', '{"name": "clock"', '"arguments"', '"parameters": {',
        '{"city": "x"}', "{", "}", "[", "]", '"', ",", ":", "\\", "\\u00", "1", "-", "tru", "null",
        " ", "\n", "weather", "clock", "unknown", "<", "</", "<parameter=city>", "</parameter>",
        "<parameter=days>", ">", "`", "```", "(city='x')", "(", ")", "'", "é", "😀", "\x00",
        "[ARGS", ";",
    }
)  # fmt: skip
PIECES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMATS), PIECES, st.data())
def test_cuts_do_not_matter_and_nothing_raises(
    form: Format, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = parse(form, text)
    assert parse(form, *text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, *parts) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), PIECES)
@example(HERMES, ["<tool_call>", '{"name": "nobody", "arguments": {"a": 1}}', "</tool_call>"])
@example(GEMMA, ["```tool_code", "unknown(city='x')", "```", " so"])
def test_without_a_tool_of_that_name_all_is_text(form: Format, fragments: list[str]) -> None:
    text = "".join(fragments)
    parser = ToolParser(form, {"nothing that occurs": {}})
    shown, calls = joined([*parser.push(text), *parser.finish()])
    assert calls == []
    if not form.silent:
        assert shown == text


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(("hermes", "llama", "mistral 3", "mistral 11", "deepseek 3", "deepseek 3.1")),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TOOLS)),
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=8)
                    | st.floats(allow_nan=False, allow_infinity=False),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=6,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from((None, 2)),
)  # fmt: skip
def test_any_arguments_come_through(
    style: str, wanted: list[tuple[str, dict[str, Any]]], indent: int | None
) -> None:
    def dumped(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    named = [dumped({"name": name, "arguments": args}) for name, args in wanted]
    if style == "hermes":
        form, text = HERMES, "\n".join(f"<tool_call>\n{x}\n</tool_call>" for x in named)
    elif style == "llama":
        form, text = LLAMA, "; ".join(named)
    elif style == "mistral 3":
        form, text = MISTRAL, "[TOOL_CALLS] [" + ", ".join(named) + "]"
    elif style == "mistral 11":
        form = MISTRAL
        text = "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(args)}" for name, args in wanted)
    else:
        form = DEEPSEEK
        between = "function<｜tool▁sep｜>{}\n```json\n{}\n```"
        if style == "deepseek 3.1":
            between = "{}<｜tool▁sep｜>{}"
        calls = "".join(
            f"<｜tool▁call▁begin｜>{between.format(name, dumped(args))}<｜tool▁call▁end｜>"
            for name, args in wanted
        )
        text = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
    shown, found = parse(form, *text)
    assert shown == ""
    assert [(name, json.loads(args)) for name, args in found] == wanted


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_family_is_understood_when_told_in_text(form: Format) -> None:
    """Models whose templates know no tools are told to write calls between these tags."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert parse(form, f"So: {call}\n{call}") == ("So:", [("weather", '{"city": "Bern"}')] * 2)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(HERMES, TOOLS)
    assert parser.push('Yes. <tool_call>\n{"name": "weather", "argu') == [
        TextPiece("Yes."),
        ToolCallDelta(0, parser._id, "weather", ""),
    ]
    [piece] = parser.push('ments": {"city": "Par')
    assert piece == ToolCallDelta(0, parser._id, None, '{"city": "Par')
    [piece] = parser.push('is"}}\n</tool_call>')
    assert piece == ToolCallDelta(0, parser._id, None, 'is"}')
    assert parser.finish() == [] and parser.called == 1


def test_plain_text_is_not_delayed() -> None:
    parser = ToolParser(HERMES, TOOLS)
    assert parser.push("Hello world") == [TextPiece("Hello world")]
    assert parser.push(", a < b") == [TextPiece(", a < b")]
    assert parser.push(" <tool") == []
    assert parser.push("s> ") == [TextPiece(" <tools>")]
    assert parser.finish() == [TextPiece(" ")]


def test_a_call_cut_by_the_token_limit_keeps_what_came() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert parse(HERMES, text) == ("", [("weather", '{"city": "Par')])
    before = '<tool_call>{"name": "weath'
    assert parse(HERMES, before) == (before, [])


def test_hostile_text_takes_linear_time() -> None:
    for form in FORMATS:
        arguments = '<tool_call>{"arguments": {"a": "'
        for part in (arguments, "[TOOL_CALLS] [", "<", "{", " ", "```json"):
            parser = ToolParser(form, TOOLS)
            parser.push(part * 4_000)
            parser.finish()
    for odd in ("[clock(a=" + "(" * 30_000, "[clock(a=" + "-" * 30_000 + "1)]"):
        assert parse(LLAMA, odd) == (odd, [])
    deep = '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 50_000
    shown, [(name, arguments)] = parse(HERMES, deep)
    assert name == "weather" and arguments.count("{") == 200
    assert len(arguments) + len(shown) == 5 * 50_000


def test_the_parser_is_chosen_by_template_and_request() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("clock", "weather")]
    assert parser_for("<tool_call>", None) is None
    assert parser_for("<tool_call>", []) is None
    assert parser_for("<tool_call>", tools, "none") is None
    only = parser_for("<tool_call>", tools, {"type": "function", "function": {"name": "clock"}})
    assert only is not None
    text = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ("clock", "weather"))
    shown, calls = joined(only.push(text) + only.finish())
    assert (shown, calls) == (text.partition("</tool_call>")[2], [("clock", "{}")])
    assert format_of("x [TOOL_CALLS] y") is MISTRAL
    assert format_of("<|start_header_id|> <|python_tag|>") is LLAMA
    assert format_of("<|im_start|> <tool_call>") is HERMES
    assert format_of("{{ '<｜tool▁calls▁begin｜>' }}") is DEEPSEEK
    assert format_of("<|tool|>") is BARRED
    assert format_of("<start_of_turn>") is GEMMA
    assert format_of("") is HERMES


def test_ids() -> None:
    for form, length in ((HERMES, 29), (MISTRAL, 9)):
        parser = ToolParser(form, TOOLS)
        opener = "[TOOL_CALLS]" if form is MISTRAL else "<tool_call>"
        [piece] = parser.push(opener + '{"name": "clock"}')
        assert isinstance(piece, ToolCallDelta) and len(piece.id) == length
        assert piece.id.startswith("call_") or piece.id.isalnum()
