"""Turns of a conversation as chat templates want them: joined text, calls of tools, their results.

Templates disagree on a call's arguments (a mapping, or JSON text) and many know no tools at all;
for these, tools and calls are told in the text itself, in the way Hermes has it. Knows no tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from spec_serve.api.messages import ChatMessage
from spec_serve.spec.request import RequestError
from spec_serve.target.chat_template import variables

Turn = dict[str, Any]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ASKS_FOR_NONE = re.compile(r"content(?:'\]|\"\])? is (?:not )?none")
_SHORT_IDS = re.compile(r"length (?:!=|==|<) 9")
_ADVICE = """You can call functions. These are described here, as JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"some argument": "its value"}}}}
</tool_call>
The result will be given to you between <tool_response> and </tool_response>."""


def check_tools(tools: Sequence[dict[str, Any]]) -> None:
    """Raises RequestError for what is no list of functions in OpenAI's form."""
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(f"tools[{i}]", "must be {type: function, function: {...}}")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            told = "must be 1 to 128 letters, digits, _ . : -"
            raise RequestError(f"tools[{i}].function.name", told)


def turns(messages: Sequence[ChatMessage], template: str, as_text: bool) -> list[Turn]:
    """Messages for a template. as_text: arguments of calls are JSON text, not a mapping.

    Raises RequestError naming the message.
    """
    made = [_turn(i, message, as_text) for i, message in enumerate(messages)]
    # DeepSeek's write another turn of the assistant for a call's content unless it is none; others
    # add it to text and would fail.
    if _ASKS_FOR_NONE.search(template):
        for turn, message in zip(made, messages, strict=True):
            if message.tool_calls and not turn["content"]:
                turn["content"] = None
    if _SHORT_IDS.search(template):
        for turn in made:
            for call in (turn, *turn.get("tool_calls", ())):
                key = "tool_call_id" if call is turn else "id"
                if key in call:
                    call[key] = short_id(str(call[key]))
    return made


def short_id(name: str) -> str:
    """A call's id as nine letters and digits, as Mistral's templates demand; always the same."""
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _turn(i: int, message: ChatMessage, as_text: bool) -> Turn:
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(f"messages[{i}].content", "must not be null")
    if isinstance(content, list):
        texts = []
        for j, part in enumerate(content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"messages[{i}].content[{j}]", "only parts {type: text, text: ...} are served"
                )
            texts.append(part["text"])
        content = "".join(texts)
    made: Turn = {"role": message.role, "content": content or ""}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            _call(f"messages[{i}].tool_calls[{j}]", call, as_text)
            for j, call in enumerate(message.tool_calls)
        ]
    return made


def _call(field: str, call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(field, "must be {id, type: function, function: {name, arguments}}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, (str, dict)):
        raise RequestError(f"{field}.function.arguments", "must be JSON text or an object")
    if as_text:
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = _mapping(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _mapping(text: str) -> dict[str, Any] | str:
    """What is no JSON object, as a call cut short is none, stays as it is."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def prefers_text(template: str) -> bool:
    """Whether a template passes a call's text on as it is, which keeps cached prefixes whole."""
    return "arguments is string" in template


def takes_tools(template: str) -> bool:
    """Whether a template has a place for tools."""
    return "tools" in variables(template)


def told_in_text(given: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> list[Turn]:
    """The same conversation for a template without tools: all in the text of ordinary turns.

    Tools are told in the system message or, without one, before the first user's. Results of
    tools become a user's turn, as templates accept no other role there.
    """
    made: list[Turn] = []
    for turn in given:
        role, content = turn["role"], turn["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if made and made[-1].get("results"):
                made[-1]["content"] += f"\n{content}"
                continue
            made.append({"role": "user", "content": content, "results": True})
            continue
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            arguments = function["arguments"]
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
            said = f'{{"name": {json.dumps(function["name"])}, "arguments": {shown}}}'
            said = f"<tool_call>\n{said}\n</tool_call>"
            content = f"{content}\n{said}" if content else said
        made.append({"role": role, "content": content or ""})
    for turn in made:
        turn.pop("results", None)
    if tools:
        advice = _ADVICE.format(
            tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        )
        at = next((i for i, turn in enumerate(made) if turn["role"] in ("system", "developer")), -1)
        if at < 0:
            at = next((i for i, turn in enumerate(made) if turn["role"] == "user"), -1)
        if at < 0:
            made.insert(0, {"role": "user", "content": advice})
        elif made[at]["role"] == "user":
            made[at]["content"] = f"{advice}\n\n{made[at]['content']}"
        else:
            made[at]["content"] += f"\n\n{advice}"
    return made
