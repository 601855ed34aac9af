"""What Anthropic's clients send and get on /v1/messages, as msgspec structs.

Fields that say something about the caller or its bill are taken and have no effect; a field that
is not named here is refused by name, and so is every block but text and tools. Our own extras
stand at the end of a request. Knows no service and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from spec_serve.api import messages as m
from spec_serve.api.openai_forms import Constrained

_INT64 = 2**63 - 1
MAX_TOOLS = 128
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]
CacheControl = dict[str, Any]


class Text(m.Part, tag_field="type", tag="text"):
    """A block of text. Prefixes are cached without being told, so cache_control has no effect."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUse(m.Part, tag_field="type", tag="tool_use"):
    """A call an earlier answer made."""

    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ToolResult(m.Part, tag_field="type", tag="tool_result"):
    """What came of a call."""

    tool_use_id: CallId
    content: str | list[Text] = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Text | ToolUse | ToolResult


class Turn(m.Part):
    """A turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(m.Part):
    """A function the client has; the server's own tools are refused by their type."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(m.Part):
    """any: one of the tools must be called; tool: this one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(m.Part):
    """Only disabled is served."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(m.Part):
    """JSON that is valid under a schema; what of it can't be enforced is refused."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(m.Part):
    """What the answer has to look like."""

    format: JsonFormat | None = None


class Counted(m.Part, kw_only=True):
    """What POST /v1/messages/count_tokens takes, and the first half of a message request."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    model: str = ""
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None


class Request(Counted, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=_INT64)]
    stream: bool | None = None
    stop_sequences: Annotated[list[m.StopString], Meta(max_length=m.MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # -1 is this API's way to say none.
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    output_config: OutputConfig | None = None
    constraint: m.Constraint | None = None
    seed: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    speculation: m.Speculation | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None


# ---------------------------------------------------------------------- answers


class Usage(Struct):
    """input_tokens: those of the prompt that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(Struct, tag_field="type", tag="message"):
    """A whole answer, or its head in a stream. constraint: what became of it, if there was one."""

    id: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    usage: Usage
    role: str = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    constraint: Constrained | UnsetType = UNSET


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


class Ending(Struct):
    """How a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    constraint: Constrained | UnsetType = UNSET


class Start(Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: TextBlock | ToolUseBlock


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """More of the open block."""

    index: int
    delta: TextDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The open block is complete."""

    index: int


class Delta(Struct, tag_field="type", tag="message_delta"):
    """The end, with usage."""

    delta: Ending
    usage: Usage


class Stop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(Struct, tag_field="type", tag="ping"):
    """Says only that the connection lives."""


Event = Start | BlockStart | BlockDelta | BlockStop | Delta | Stop | Ping


class ErrorDetail(Struct):
    """type: Anthropic's name of the kind."""

    type: str
    message: str


class Failure(Struct, tag_field="type", tag="error"):
    """The body of an answer that failed, and the event in a stream that fails."""

    error: ErrorDetail
    request_id: str | UnsetType = UNSET
