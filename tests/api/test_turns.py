"""Calls of tools and their results on the way into chat templates, and which tokens then show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spec_serve.api import messages as m
from spec_serve.api.convert import to_request
from spec_serve.api.tool_calls import ToolCallDelta, parser_for
from spec_serve.spec.request import RequestError
from spec_serve.target.chat_template import render, variables
from tests.api.echo import ByteTokens

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Köln"}'},
}
TALK = [
    m.ChatMessage("user", "How is it in Köln?"),
    m.ChatMessage("assistant", None, tool_calls=[CALL]),
    m.ChatMessage("tool", [{"type": "text", "text": "rain"}], tool_call_id="call_1"),
]
MAPPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "{% endfor %}{{ tools | tojson }}"
)
JOINING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}"
)
EITHER = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "{% endfor %}{% endfor %}{{ tools | length }}"
)
WITHOUT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
# In the manner of DeepSeek's and Mistral's.
NONE = (
    "{% for m in messages %}{% for c in m['tool_calls'] %}<call {{ c['function']['name'] + "
    "c['function']['arguments'] }}>{% endfor %}{% if m['role'] == 'assistant' and m['content'] "
    "is not none %}<said {{ m['content'] }}>{% endif %}{% endfor %}{{ tools | length }}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine letters!') }}{% endif %}{{ c.id }} {% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}{{ tools | length }}"
)
MARKS = {256: "<eos>", 257: "[TOOL_CALLS]", 258: "[ARGS]", 259: "<other>"}


class Templated(ByteTokens):
    """Renders its template to bytes; has Mistral's control tokens."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template
        self.rendered = ""

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        if special:
            for token, mark in MARKS.items():
                if text == mark:
                    return [token]
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return MARKS[token_id].encode() if token_id in MARKS else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id in MARKS

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        assert self.chat_template is not None
        self.rendered = render(self.chat_template, {"messages": messages, "tools": tools})
        return list(self.rendered.encode())


def rendered(template: str, **request: Any) -> str:
    tokens = Templated(template)
    to_request(m.Generate("g", **{"messages": TALK, "tools": TOOLS, **request}), tokens)
    return tokens.rendered


def test_each_template_gets_arguments_in_the_form_it_takes() -> None:
    assert "[assistant]city=Köln;[tool]rain" in rendered(MAPPING)
    assert '[assistant]weather:{"city":"Köln"}[tool]rain' in rendered(JOINING)
    assert rendered(EITHER) == '{"city":"Köln"}1', "the client's own text, not written anew"
    given = {**CALL, "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    talk = [TALK[0], m.ChatMessage("assistant", "", tool_calls=[given])]
    assert "city=Köln;" in rendered(MAPPING, messages=talk)
    assert 'weather:{"city": "Köln"}' in rendered(JOINING, messages=talk)


def test_a_call_without_text_has_none_where_templates_tell_it_apart() -> None:
    assert rendered(NONE) == '<call weather{"city":"Köln"}>1'
    talk = [TALK[0], m.ChatMessage("assistant", "Hm.", tool_calls=[CALL])]
    assert rendered(NONE, messages=talk) == '<call weather{"city":"Köln"}><said Hm.>1'
    assert rendered(NONE, messages=[TALK[0], m.ChatMessage("assistant", "")]) == "<said >1"


def test_ids_are_made_short_for_templates_that_want_nine_characters() -> None:
    one, two = rendered(NINE).removesuffix("1").split(" ")
    assert one == two and len(one) == 9 and one.isalnum(), "a result still finds its call"
    nine = {**CALL, "id": "aB3dE6gH9"}
    talk = [TALK[0], m.ChatMessage("assistant", None, tool_calls=[nine])]
    assert rendered(NINE, messages=talk) == "aB3dE6gH9 1"


def test_arguments_cut_short_are_passed_on_as_they_are() -> None:
    cut = {**CALL, "function": {"name": "weather", "arguments": '{"city":"K'}}
    talk = [m.ChatMessage("user", "x"), m.ChatMessage("assistant", None, tool_calls=[cut])]
    assert '{"city":"K' in rendered(JOINING, messages=talk)
    assert rendered(EITHER, messages=talk) == '{"city":"K1'


def test_a_template_without_tools_gets_all_in_text() -> None:
    told = rendered(WITHOUT)
    assert told.count("[") == told.count("[user]") + told.count("[assistant]") == 3
    advice, _, rest = told.partition("How is it in Köln?")
    assert json.dumps(TOOLS[0]) in advice
    assert rest == (
        '[assistant]<tool_call>\n{"name": "weather", "arguments": {"city":"Köln"}}\n</tool_call>'
        "[user]<tool_response>\nrain\n</tool_response>"
    )
    parser = parser_for(WITHOUT, TOOLS)
    assert parser is not None
    pieces = [piece for piece in parser.push(rest) if isinstance(piece, ToolCallDelta)]
    assert [(piece.name, piece.arguments) for piece in pieces] == [("weather", '{"city":"Köln"}')]


def test_two_results_are_one_turn_and_a_system_message_takes_the_tools() -> None:
    talk = [*TALK, m.ChatMessage("tool", "wind", tool_call_id="call_2")]
    assert rendered(STRICT, messages=talk).endswith(
        "rain\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
    )
    talk = [m.ChatMessage("system", "Be kind."), TALK[0]]
    told = rendered(WITHOUT, messages=talk)
    assert told.startswith("[system]Be kind.\n\n") and told.endswith("[user]How is it in Köln?")
    assert rendered(WITHOUT, messages=[m.ChatMessage("system", "S"), TALK[0]], tools=None) == (
        "[system]S[user]How is it in Köln?"
    )


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("tools[0]", {"tools": [{"x": 1}]}),
        ("tools[0]", {"tools": [{"type": "function", "function": 1}]}),
        ("tools[1].function.name", {"tools": [*TOOLS, {"type": "function", "function": {}}]}),
        (
            "tools[0].function.name",
            {"tools": [{"type": "function", "function": {"name": "<|im_end|> x"}}]},
        ),
        ("tools", {"tools": TOOLS * 200}),
        ("messages[0].tool_calls[0]", {"messages": [m.ChatMessage("assistant", tool_calls=[{}])]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    m.ChatMessage(
                        "assistant", tool_calls=[{"function": {"name": "f", "arguments": 1}}]
                    )
                ]
            },
        ),
        ("messages[0].content", {"messages": [m.ChatMessage("tool", None)]}),
        ("messages[0].content[0]", {"messages": [m.ChatMessage("tool", [{"type": "image_url"}])]}),
    ],
)
def test_what_is_refused(field: str, request_: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(MAPPING, **request_)
    assert caught.value.field == field


def test_a_template_that_refuses_says_why_once() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        rendered(STRICT, messages=[TALK[0], TALK[0]])
    assert caught.value.field == "messages"


def test_control_tokens_of_the_tool_format_show_when_tools_are_given() -> None:
    tokens = Templated(MAPPING + "{# [TOOL_CALLS] #}")
    said = [257, *b"weather", 258, *b"{}", 259]
    wire = m.Generate("g", messages=TALK, tools=TOOLS, stop=["S]w"])
    made = to_request(wire, tokens)
    stream = made.text_stream()
    assert stream.push(said) + stream.finish() == "[TOOL_CALL", "up to the stop string"
    assert made.request.stopping.watch is not None
    assert made.request.stopping.watch().feed(said, 0) == (2, "S]w"), "both sides agree"
    made = to_request(m.Generate("g", messages=TALK, tools=TOOLS), tokens)
    assert made.text_stream().push(said) == "[TOOL_CALLS]weather[ARGS]{}"
    made = to_request(m.Generate("g", messages=TALK), tokens)
    assert made.text_stream().push(said) == "weather{}"


def test_a_developer_is_the_system_where_templates_know_no_developer() -> None:
    told = [m.ChatMessage("developer", "be brief"), m.ChatMessage("user", "hi")]
    assert rendered(WITHOUT, messages=told, tools=None) == "[system]be brief[user]hi"
    knows = "{# developer #}" + WITHOUT
    assert rendered(knows, messages=told, tools=None) == "[developer]be brief[user]hi"


def test_variables_of_a_template() -> None:
    assert variables("{% if tools %}{{ messages[0]['tools'] }}{% endif %}") == {"tools", "messages"}
    assert variables("{% set tools = 1 %}{{ tools }}{{ x.tools }}") == {"x"}
    assert variables("{% if %}") == frozenset()
    assert variables("{% generation %}{{ a }}{% endgeneration %}") == {"a"}


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"])
def test_real_templates(name: str) -> None:
    from spec_serve.target.hub import resolve
    from spec_serve.target.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve(name, progress=False))
    made = to_request(m.Generate("g", messages=TALK, tools=TOOLS), tokenizer)
    text = tokenizer.decode(made.request.prompt, skip_special=False)
    arguments = '{"city": "Köln"}' if name.startswith("qwen") else '{"city":"Köln"}'
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in text
    assert '"description": "How it is outside"' in text
    assert text.endswith("<|im_start|>assistant\n")
