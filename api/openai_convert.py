"""From OpenAI's requests to `messages.Generate`, and failures back in OpenAI's words.

What OpenAI's API has and this server can't do is refused here, by name. Knows no sockets, no
engine and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import HttpError
from spec_serve.api.openai_constraint import constraint

_SAMPLING = tuple(name for name in m.Sampling.__struct_fields__ if name not in ("n", "seed"))
_SAME = (
    "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "skip_special_tokens", "cache_salt",
    "priority", "timeout_s",
)  # fmt: skip
_SEED_BITS = 2**63 - 1
# Names on our own wire -> names here, where a request did not say otherwise.
_NAMES = {"token_ids": "prompt", "speculation.prediction": "prediction"}
ToolUse = Literal["none", "auto", "required"] | dict[str, str]
_USES: tuple[Literal["none", "auto", "required"], ...] = ("none", "auto", "required")


def refused(field: str, message: str) -> HttpError:
    """400 for a field."""
    return HttpError("invalid_request", f"{field}: {message}", field)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request translated. wires: one per prompt. names: our name of a field -> the client's.

    echoes: the text of each prompt, or its ids, where it shall come back. nothing: no token is
    wanted, only the prompt.
    """

    wires: list[m.Generate]
    names: Mapping[str, str]
    n: int
    stream: bool
    usage_chunk: bool
    token_ids: bool
    timings: bool
    prompt_logprobs: bool
    logprobs: bool
    parallel: bool = True
    echoes: list[str | list[int]] | None = None
    nothing: bool = False

    def error(self, error: m.Error) -> HttpError:
        """A failure, under the name that the client knows."""
        if error.param:
            named, said = _renamed(error.param, error.message, self.names)
            error = msgspec.structs.replace(error, param=named, message=said)
        return HttpError.of(error)


def _renamed(field: str, said: str, names: Mapping[str, str]) -> tuple[str, str]:
    """A field as the client calls it, and what was said about it."""
    head, bracket, rest = field.partition("[")
    if head.startswith("constraint") and "constraint" in names:
        # Only our own form has parts of these names.
        named = field if names["constraint"] == "constraint" else names["constraint"]
        return named, named + said.removeprefix(field) if said.startswith(field) else said
    named = names.get(head) or _NAMES.get(head) or head.removeprefix("sampling.")
    named += bracket + rest
    return named, named + said.removeprefix(field) if said.startswith(field) else said


def _shared(asked: w.Request, names: dict[str, str]) -> dict[str, Any]:
    """The fields of `Generate` that both kinds of completion have."""
    sampling: dict[str, Any] = {
        name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None
    }
    if asked.seed is not None:
        sampling["seed"] = asked.seed & _SEED_BITS  # OpenAI's may be negative
    if asked.n is not None:
        sampling["n"] = asked.n
    values: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(asked, name)) is not None
    }
    if asked.stop is not None:
        values["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    if asked.include_stop_str_in_output:
        values["include_stop"] = True
    if asked.return_token_ids or asked.timings_per_token:
        values["ids"] = True
    if asked.speculation is not None:
        values["speculation"] = msgspec.to_builtins(asked.speculation)
        names["speculation.prediction"] = "speculation.prediction"
    if asked.prompt_logprobs is not None:
        if asked.stream:
            raise refused("prompt_logprobs", "only without stream")
        values["prompt_logprobs"] = asked.prompt_logprobs
    if (form := constraint(asked, names)) is not None:
        values["constraint"] = form
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise refused("stream_options", "only with stream")
    return {"model": asked.model or "", "sampling": sampling, "steps": "summary", **values}


def _predict(
    values: dict[str, Any], given: w.Prediction | None, choices: int, names: dict[str, str]
) -> None:
    """Predicted Outputs; the guess costs nothing but time, so only n > 1 is barred."""
    if given is None:
        return
    if choices > 1:
        raise refused("prediction", "only with one choice")
    speculation = values.setdefault("speculation", {})
    if speculation.get("prediction") is not None:
        raise refused("prediction", "stands in speculation too")
    speculation["prediction"] = _text(given.content)
    names["speculation.prediction"] = "prediction"


def _generate(values: dict[str, Any], gen: int, names: Mapping[str, str]) -> m.Generate:
    try:
        return m.generate({"gen": str(gen), **values})
    except m.BadMessage as error:
        named, said = _renamed(error.field, str(error), names)
        raise HttpError("invalid_request", said, named or None) from None


def _asked(
    request: w.Request, wires: list[m.Generate], names: Mapping[str, str], **more: Any
) -> Asked:
    options = request.stream_options
    return Asked(
        wires,
        names,
        request.n or 1,
        bool(request.stream),
        options is not None and bool(options.include_usage),
        bool(request.return_token_ids),
        bool(request.timings_per_token),
        request.prompt_logprobs is not None,
        **more,
    )


def chat(request: w.ChatRequest) -> Asked:
    """A chat completion. Raises HttpError."""
    names: dict[str, str] = {}
    values = _shared(request, names)
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", "only with logprobs: true")
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
        names["logprobs"] = "top_logprobs"
    limit, newer = request.max_tokens, request.max_completion_tokens
    if limit is not None and newer is not None and limit != newer:
        raise refused("max_tokens", "differs from max_completion_tokens")
    if newer is not None:
        names["max_tokens"] = "max_completion_tokens"
    if limit is not None or newer is not None:
        values["max_tokens"] = limit if limit is not None else newer
    _predict(values, request.prediction, request.n or 1, names)
    values["messages"] = [_message(i, turn) for i, turn in enumerate(request.messages)]
    use = _tool_use(request)
    if use != "none":
        values["tools"] = [_tool(tool) for tool in request.tools or ()]
        values["tool_choice"] = use
        values["parallel_tool_calls"] = request.parallel_tool_calls is not False
    return _asked(
        request,
        [_generate(values, 0, names)],
        names,
        logprobs=bool(request.logprobs),
        parallel=request.parallel_tool_calls is not False,
    )


def _text(content: w.Text) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _message(i: int, turn: w.ChatMessage) -> dict[str, Any]:
    content = _text(turn.content) if turn.content is not None else turn.refusal
    made: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name is not None:
        made["name"] = turn.name
    if turn.tool_call_id is not None:
        if turn.role != "tool":
            raise refused(f"messages[{i}].tool_call_id", "only in messages of the role tool")
        made["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        if turn.role != "assistant":
            raise refused(f"messages[{i}].tool_calls", "only in messages of the assistant")
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in turn.tool_calls
        ]
    return made


def _tool(tool: w.Tool) -> dict[str, Any]:
    """As chat templates know it: what was left out stays out."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    if tool.function.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_use(request: w.ChatRequest) -> ToolUse:
    """Whether the model may, or must, call tools; or the one it must call."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", "needs tools")
        return "none"
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise refused("tools", "two have the same name")
    if choice is None:
        return "auto"
    for known in _USES:
        if choice == known:
            return known
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function")
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            if named["name"] not in names:
                raise refused("tool_choice", f"no tool is named {named['name'][:64]!r}")
            return {"name": named["name"]}
    raise refused("tool_choice", "must be none, auto, required or a function's name")


def completions(request: w.CompletionRequest) -> Asked:
    """Text completions, one per prompt. Raises HttpError."""
    names: dict[str, str] = {}
    values = _shared(request, names)
    prompts = _prompts(request)
    choices = len(prompts) * (request.n or 1)
    if choices > w.MAX_PROMPTS:
        raise refused("prompt", f"{choices} choices, at most {w.MAX_PROMPTS} at once")
    if request.suffix is not None:
        raise refused("suffix", "is not supported")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise refused("best_of", "must be n, or absent")
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo:
            if request.prompt_logprobs is not None:
                raise refused("prompt_logprobs", "echo and logprobs give them already")
            values["prompt_logprobs"] = request.logprobs
            names["prompt_logprobs"] = "logprobs"
    _predict(values, request.prediction, choices, names)
    limit = w.COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    values["max_tokens"] = max(limit, 1)
    if not limit and values.get("min_tokens"):
        raise refused("min_tokens", "is more than max_tokens")
    wires = [
        _generate(
            {**values, "prompt" if isinstance(prompt, str) else "token_ids": prompt}, i, names
        )
        for i, prompt in enumerate(prompts)
    ]
    return _asked(
        request,
        wires,
        names,
        logprobs=request.logprobs is not None,
        echoes=prompts if request.echo else None,
        nothing=not limit,
    )


def _prompts(request: w.CompletionRequest) -> list[str | list[int]]:
    given = request.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if kinds == {int}:
        return [[part for part in given if isinstance(part, int)]]
    if len(kinds) > 1:
        raise refused("prompt", "a list holds texts, token ids or lists of token ids, one kind")
    return [part for part in given if not isinstance(part, int)]
