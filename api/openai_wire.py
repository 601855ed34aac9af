"""What OpenAI's clients send and get, as msgspec structs: chat and text completions.

The bounds of sampling are those of api/messages.py. A field that is not named here is refused by
name. The fields in `Ignored` are taken and have no effect; every other field does what it says or
is refused. Knows no service and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from spec_serve.api import messages as m
from spec_serve.api.openai_forms import Constrained, ResponseFormat, StructuredOutputs

_INT64 = 2**63 - 1
MAX_TOOLS, MAX_PROMPTS = 128, 128
COMPLETION_TOKENS = 16  # of a text completion that names no limit, as at OpenAI

Count = Annotated[int, Meta(ge=1, le=_INT64)]
Top = Annotated[int, Meta(ge=0, le=20)]
ToolName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Ignored(m.Sampling, kw_only=True):
    """Fields that say something about the caller or its bill, not about the answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(m.Part):
    """include_usage: one more chunk with usage. include_obfuscation has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Request(Ignored, kw_only=True):
    """What both kinds of completion share; extras beyond OpenAI's are at the end."""

    # null is as good as absent everywhere; a struct's own n could not say so.
    n: Annotated[int, Meta(ge=1, le=8)] | None = None  # type: ignore[assignment]
    seed: Annotated[int, Meta(ge=-(2**63), le=_INT64)] | None = None
    model: str | None = None
    stop: m.StopString | Annotated[list[m.StopString], Meta(max_length=m.MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[m.Token], Meta(max_length=m.MAX_IDS)] | None = None
    bad_words: Annotated[list[m.StopString], Meta(max_length=m.MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: m.Speculation | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    prompt_logprobs: Top | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    constraint: m.Constraint | None = None


class Function(m.Part):
    """A function the model may call; parameters is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(m.Part):
    """Only functions."""

    type: Literal["function"]
    function: Function


class CalledFunction(m.Part):
    """arguments: JSON text."""

    name: str
    arguments: str


class CalledTool(m.Part):
    """A call an earlier answer made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class TextPart(m.Part):
    """The only kind of part: nothing is ever fetched."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class ChatMessage(m.Part):
    """A turn. The last fields are what answers hold beside their text; sent back they say nothing.

    The assistant may have a refusal in place of content.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None


class Prediction(m.Part):
    """The text that the answer is expected to be like."""

    type: Literal["content"]
    content: Text


class ChatRequest(Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Request, kw_only=True):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of token ids.

    max_tokens 0 answers with the prompt alone (echo) and its log-probabilities.
    """

    # msgspec takes one list type to a union; api/openai_convert.py tells the four forms apart.
    prompt: str | Annotated[list[str | m.Token | list[m.Token]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    logprobs: Top | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=8)] | None = None
    prediction: Prediction | None = None


# ---- answers


class Answer(Struct, omit_defaults=True):
    """A part of an answer: what has its default is left out."""


class TokenDetails(Answer):
    """Of the prompt: those found in the prefix cache."""

    cached_tokens: int | UnsetType = UNSET


class CompletionDetails(Answer):
    """Predicted Outputs: tokens of the prediction that became text, and those verified in vain."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class Usage(Answer):
    """prompt_tokens: each prompt once. completion_tokens: those delivered, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Timings(Answer):
    """llama.cpp's dialect. Counts are sums over choices, times those of the slowest choice.

    prompt_n: tokens computed, cache_n: those found in the cache; draft_*: guesses verified and
    accepted. prompt_ms: admission to first token; predicted_ms: first to last token.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None = None
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class SpeculativeDecoding(Answer):
    """vLLM's dialect, over all steps of all choices. acceptance_histogram[j]: steps accepting j."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class Metrics(Answer):
    """vLLM's place for it."""

    speculative_decoding: SpeculativeDecoding


class TopLogprob(Answer):
    """token: its text; "bytes:..." where its bytes are no text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer):
    """A token of the answer and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per token of the answer."""

    content: list[TokenLogprob]


class TextLogprobs(Answer):
    """The older shape: parallel lists. text_offset: characters into the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Answer):
    """vLLM's shape of a token's log-probability in a prompt; rank: among the likeliest, from 1."""

    logprob: float
    decoded_token: str
    rank: int | None = None


# Per token of the prompt, by token id: itself and the likeliest in its place; none for the first.
PromptLogprobs = list[dict[str, PromptToken] | None]


class CallFunction(Answer):
    """name: in the first piece of a call only. arguments: a piece of JSON text."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Answer):
    """A call. index, in streams: which call of the answer this piece belongs to."""

    function: CallFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(Answer):
    """The answer of one choice."""

    content: str | None
    role: Literal["assistant"] | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Answer):
    """What a step added. role: in the first chunk of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


Reason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    """One of n."""

    index: int
    message: Message
    finish_reason: Reason
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    constraint: Constrained | None = None


class ChunkChoice(Answer):
    """A piece of one of n."""

    index: int
    delta: ChatDelta
    finish_reason: Reason | None
    logprobs: ChatLogprobs | None | UnsetType = UNSET
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    constraint: Constrained | None = None


class TextChoice(Answer):
    """One choice of a text completion, or a piece of it."""

    index: int
    text: str
    finish_reason: Reason | None
    logprobs: TextLogprobs | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    constraint: Constrained | None = None


class Head(Answer, kw_only=True):
    """What every answer and chunk of a request begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Tail(Head, kw_only=True):
    """What the last one ends with. usage: null in earlier chunks of a stream that asked for it."""

    usage: Usage | None | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatCompletion(Tail, kw_only=True):
    """The whole answer of a chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(Tail, kw_only=True):
    """A chunk of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(Tail, kw_only=True):
    """A text completion, or a chunk of one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(Answer):
    """A served model."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    object: Literal["model"] | UnsetType = UNSET


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class ErrorDetail(Struct):
    """What went wrong; param: the field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct):
    """Every refusal has this shape."""

    error: ErrorDetail
