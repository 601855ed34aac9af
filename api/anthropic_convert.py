"""From Anthropic's requests to `messages.Generate`, and failures back in Anthropic's words.

Blocks become turns as chat templates know them: results of tools are turns of their own, turns of
one role in a row are one. What this server can't do is refused by name. Knows no sockets.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from spec_serve.api import anthropic_wire as w
from spec_serve.api import messages as m
from spec_serve.api.calls import HttpError
from spec_serve.api.parts import MAX_SOURCE_CHARS

_BREAK = "\n"  # between blocks of text, and between turns of one role
# Code -> Anthropic's type, and the status where it differs from ours.
_KINDS: dict[str, tuple[str, int | None]] = {
    "unauthorized": ("authentication_error", None),
    "forbidden": ("permission_error", None),
    "model_not_found": ("not_found_error", None),
    "not_found": ("not_found_error", None),
    "too_large": ("request_too_large", None),
    "rate_limited": ("rate_limit_error", None),
    "overloaded": ("overloaded_error", 529),
    "draining": ("overloaded_error", 529),
    "timeout": ("timeout_error", None),
    "engine_error": ("api_error", None),
}
FORM = "output_config.format"
# Our name of a field -> the one on this wire.
_NAMES = {"stop": "stop_sequences"}


class AnthropicError(HttpError):
    """A failure as Anthropic's clients expect it."""

    def body(self) -> dict[str, Any]:
        """Anthropic's shape."""
        return {"type": "error", "error": {"type": self.type, "message": self.message}}


def restated(error: HttpError) -> HttpError:
    """The same failure in Anthropic's shape."""
    if isinstance(error, AnthropicError):
        return error
    made = AnthropicError(error.code, error.message, error.param, headers=error.headers)
    made.headers = list(error.headers)
    kind, status = _KINDS.get(error.code, ("", None))
    made.status = status or error.status
    made.type = kind or ("invalid_request_error" if made.status < 500 else "api_error")
    return made


def named(error: m.Error, form: str = "") -> HttpError:
    """A failure from further in, under the name of the field that the client knows.

    form: what the constraint is called on this wire, if not so.
    """
    field = error.param or ""
    name = form if form and field.startswith("constraint") else _name(field)
    said = name + error.message.removeprefix(field) if name != field else error.message
    made = HttpError.of(error)
    made.message, made.param = said, name or None
    return restated(made)


def _name(field: str) -> str:
    first, dot, rest = field.partition(".")
    if first == "sampling" and rest:
        return rest
    name, bracket, index = first.partition("[")
    return _NAMES.get(name, name) + bracket + index + dot + rest


def refused(field: str, message: str) -> HttpError:
    """400 for a field."""
    return HttpError("invalid_request", f"{field}: {message}", field)


def generate(request: w.Request) -> m.Generate:
    """A message request. Raises HttpError."""
    values = _conversation(request)
    values["max_tokens"] = request.max_tokens
    values["stop"] = request.stop_sequences or []
    sampling: dict[str, Any] = {}
    for name in ("temperature", "top_p", "seed"):
        if (value := getattr(request, name)) is not None:
            sampling[name] = value
    if request.top_k is not None:
        sampling["top_k"] = max(request.top_k, 0)
    values["sampling"] = sampling
    for name in ("cache_salt", "priority", "timeout_s"):
        if (value := getattr(request, name)) is not None:
            values[name] = value
    form = request.output_config.format if request.output_config is not None else None
    if form is not None:
        if request.constraint is not None:
            raise refused("constraint", f"does not go with {FORM}")
        source = msgspec.json.encode(form.schema).decode()
        if len(source) > MAX_SOURCE_CHARS:
            raise refused(FORM, f"a schema may have at most {MAX_SOURCE_CHARS} characters")
        values["constraint"] = {"kind": "json_schema", "source": source}
    made = _checked(values)
    if request.constraint is not None:
        made.constraint = request.constraint
    if request.speculation is not None:
        made.speculation = request.speculation
    return made


def counted(request: w.Counted) -> m.Generate:
    """A request to count tokens. Raises HttpError."""
    return _checked(_conversation(request))


def _checked(values: dict[str, Any]) -> m.Generate:
    try:
        return m.generate({"gen": "0", "steps": "none", **values})
    except m.BadMessage as error:
        name = _name(error.field)
        said = name + str(error).removeprefix(error.field)
        raise HttpError("invalid_request", said, name or None) from None


def _conversation(request: w.Counted) -> dict[str, Any]:
    if request.thinking is not None and request.thinking.type != "disabled":
        raise refused("thinking", "is not served")
    turns = _Turns()
    system = request.system
    if system:
        text = system if isinstance(system, str) else _BREAK.join(part.text for part in system)
        if text:
            turns.add("system", text)
    for i, turn in enumerate(request.messages):
        _read(turns, f"messages[{i}]", turn)
    if turns.made[-1]["role"] not in ("user", "tool"):
        raise refused("messages", "the last must be the user's: begun answers are not continued")
    values: dict[str, Any] = {"model": request.model, "messages": turns.made}
    choice = request.tool_choice
    kind = choice.type if choice is not None else "auto"
    if kind in ("any", "tool") and not request.tools:
        raise refused("tool_choice", "needs tools")
    if kind != "none" and request.tools:
        values["tools"] = [_tool(tool) for tool in request.tools]
    if choice is not None:
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if kind == "any":
            values["tool_choice"] = "required"
        elif kind == "tool":
            if choice.name is None or all(choice.name != tool.name for tool in request.tools or ()):
                raise refused("tool_choice", "must name one of the tools")
            values["tool_choice"] = {"name": choice.name}
    return values


class _Turns:
    """Turns in the making; what follows from the same role joins the turn before."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add(self, role: str, text: str) -> dict[str, Any]:
        """Text of a role; the turn it is in."""
        last = self.made[-1] if self.made else None
        if last is not None and last["role"] == role and not last.get("tool_calls"):
            last["content"] = f"{last['content']}{_BREAK}{text}" if last["content"] else text
            return last
        self.made.append({"role": role, "content": text})
        return self.made[-1]


def _read(turns: _Turns, field: str, turn: w.Turn) -> None:
    if isinstance(turn.content, str):
        turns.add(turn.role, turn.content)
        return
    if not turn.content:
        raise refused(f"{field}.content", "must not be empty")
    for j, block in enumerate(turn.content):
        where = f"{field}.content[{j}]"
        if isinstance(block, w.Text):
            turns.add(turn.role, block.text)
        elif isinstance(block, w.ToolUse):
            if turn.role != "assistant":
                raise refused(where, "tool_use only in the assistant's turns")
            last = turns.made[-1] if turns.made else None
            if last is None or last["role"] != "assistant":
                last = turns.add("assistant", "")
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            call = {"id": block.id, "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        else:
            if turn.role != "user":
                raise refused(where, "tool_result only in the user's turns")
            text = block.content
            if not isinstance(text, str):
                text = _BREAK.join(part.text for part in text)
            if block.is_error:
                text = f"Error: {text}"
            turns.made.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})


def _tool(tool: w.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
