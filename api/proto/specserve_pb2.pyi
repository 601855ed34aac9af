from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpecDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEC_DETAIL_STEPS: _ClassVar[SpecDetail]
    SPEC_DETAIL_TOKENS: _ClassVar[SpecDetail]
    SPEC_DETAIL_SUMMARY: _ClassVar[SpecDetail]
    SPEC_DETAIL_NONE: _ClassVar[SpecDetail]

class Whitespace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHITESPACE_BOUNDED: _ClassVar[Whitespace]
    WHITESPACE_COMPACT: _ClassVar[Whitespace]
    WHITESPACE_ANY: _ClassVar[Whitespace]
SPEC_DETAIL_STEPS: SpecDetail
SPEC_DETAIL_TOKENS: SpecDetail
SPEC_DETAIL_SUMMARY: SpecDetail
SPEC_DETAIL_NONE: SpecDetail
WHITESPACE_BOUNDED: Whitespace
WHITESPACE_COMPACT: Whitespace
WHITESPACE_ANY: Whitespace

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "token_ids", "chat", "sampling", "stop", "output", "speculation", "priority", "cache_salt", "constraint", "continuations", "segments", "keep")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    token_ids: TokenIds
    chat: Chat
    sampling: Sampling
    stop: Stop
    output: Output
    speculation: Speculation
    priority: int
    cache_salt: str
    constraint: Constraint
    continuations: _containers.RepeatedCompositeFieldContainer[TokenIds]
    segments: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    keep: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., continuations: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ..., keep: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "tool_required", "tool_name", "single_tool_call")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools_json: str
    tool_required: bool
    tool_name: str
    single_tool_call: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools_json: _Optional[str] = ..., tool_required: _Optional[bool] = ..., tool_name: _Optional[str] = ..., single_tool_call: _Optional[bool] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name", "tool_call_id", "tool_calls_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., tool_calls_json: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    n: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "strings", "token_ids", "ignore_eos", "include_stop_in_output", "bad_words")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_in_output: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_in_output: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "spec_detail", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DETAIL_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bool
    logprobs: int
    prompt_logprobs: int
    spec_detail: SpecDetail
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., spec_detail: _Optional[_Union[SpecDetail, str]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "max_nodes", "sources", "prediction")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AUTO: _ClassVar[Speculation.Mode]
        OFF: _ClassVar[Speculation.Mode]
        MAX: _ClassVar[Speculation.Mode]
    AUTO: Speculation.Mode
    OFF: Speculation.Mode
    MAX: Speculation.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    mode: Speculation.Mode
    max_nodes: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    prediction: str
    def __init__(self, mode: _Optional[_Union[Speculation.Mode, str]] = ..., max_nodes: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ..., prediction: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("text", "regex", "json_schema", "json_object", "choices", "lark", "name", "whitespace", "lenient", "max_chars", "min_chars", "max_words", "max_sentences", "banned", "after", "no_forcing")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    MAX_CHARS_FIELD_NUMBER: _ClassVar[int]
    MIN_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SENTENCES_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NO_FORCING_FIELD_NUMBER: _ClassVar[int]
    text: bool
    regex: str
    json_schema: str
    json_object: bool
    choices: Choices
    lark: str
    name: str
    whitespace: Whitespace
    lenient: bool
    max_chars: int
    min_chars: int
    max_words: int
    max_sentences: int
    banned: _containers.RepeatedScalarFieldContainer[str]
    after: str
    no_forcing: bool
    def __init__(self, text: _Optional[bool] = ..., regex: _Optional[str] = ..., json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ..., lark: _Optional[str] = ..., name: _Optional[str] = ..., whitespace: _Optional[_Union[Whitespace, str]] = ..., lenient: _Optional[bool] = ..., max_chars: _Optional[int] = ..., min_chars: _Optional[int] = ..., max_words: _Optional[int] = ..., max_sentences: _Optional[int] = ..., banned: _Optional[_Iterable[str]] = ..., after: _Optional[str] = ..., no_forcing: _Optional[bool] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Constrained(_message.Message):
    __slots__ = ("complete", "ignored", "schema_valid", "forced")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VALID_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    ignored: _containers.RepeatedScalarFieldContainer[str]
    schema_valid: bool
    forced: int
    def __init__(self, complete: _Optional[bool] = ..., ignored: _Optional[_Iterable[str]] = ..., schema_valid: _Optional[bool] = ..., forced: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("seq", "started", "delta", "prompt_scored", "finished")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    started: Started
    delta: Delta
    prompt_scored: PromptScored
    finished: Finished
    def __init__(self, seq: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., prompt_scored: _Optional[_Union[PromptScored, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "cached_tokens", "queue_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    queue_ms: float
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "steps")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    steps: _containers.RepeatedCompositeFieldContainer[SpecStep]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[SpecStep, _Mapping]]] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token: str
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token: _Optional[str] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token: _Optional[str] = ...) -> None: ...

class SpecStep(_message.Message):
    __slots__ = ("step", "drafted", "accepted", "sources", "draft_us", "verify_us", "host_us", "drafted_ids", "drafted_parents", "drafted_text")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    HOST_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TEXT_FIELD_NUMBER: _ClassVar[int]
    step: int
    drafted: int
    accepted: int
    sources: _containers.RepeatedCompositeFieldContainer[SpecSource]
    draft_us: int
    verify_us: int
    host_us: int
    drafted_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted_parents: _containers.RepeatedScalarFieldContainer[int]
    drafted_text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SpecSource, _Mapping]]] = ..., draft_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., host_us: _Optional[int] = ..., drafted_ids: _Optional[_Iterable[int]] = ..., drafted_parents: _Optional[_Iterable[int]] = ..., drafted_text: _Optional[_Iterable[str]] = ...) -> None: ...

class SpecSource(_message.Message):
    __slots__ = ("name", "drafted", "accepted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    drafted: int
    accepted: int
    def __init__(self, name: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class SpecSummary(_message.Message):
    __slots__ = ("steps", "drafted", "accepted", "mean_accepted_length", "acceptance_rate", "histogram")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    acceptance_rate: float
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., mean_accepted_length: _Optional[float] = ..., acceptance_rate: _Optional[float] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "ttft_ms", "decode_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "reason", "stop_token_id", "stop_string", "usage", "speculation", "timings", "last", "constraint")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finished.Reason]
        STOP: _ClassVar[Finished.Reason]
        LENGTH: _ClassVar[Finished.Reason]
        CANCELLED: _ClassVar[Finished.Reason]
    REASON_UNSPECIFIED: Finished.Reason
    STOP: Finished.Reason
    LENGTH: Finished.Reason
    CANCELLED: Finished.Reason
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: Finished.Reason
    stop_token_id: int
    stop_string: str
    usage: Usage
    speculation: SpecSummary
    timings: Timings
    last: bool
    constraint: Constrained
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[Finished.Reason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpecSummary, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., last: _Optional[bool] = ..., constraint: _Optional[_Union[Constrained, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("generate", "cancel", "ping", "resume", "ack", "tokenize", "program")
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    generate: SessionGenerate
    cancel: SessionCancel
    ping: SessionPing
    resume: SessionResume
    ack: SessionAck
    tokenize: SessionTokenize
    program: bytes
    def __init__(self, generate: _Optional[_Union[SessionGenerate, _Mapping]] = ..., cancel: _Optional[_Union[SessionCancel, _Mapping]] = ..., ping: _Optional[_Union[SessionPing, _Mapping]] = ..., resume: _Optional[_Union[SessionResume, _Mapping]] = ..., ack: _Optional[_Union[SessionAck, _Mapping]] = ..., tokenize: _Optional[_Union[SessionTokenize, _Mapping]] = ..., program: _Optional[bytes] = ...) -> None: ...

class SessionTokenize(_message.Message):
    __slots__ = ("ask", "text", "turns", "begun")
    ASK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    ask: str
    text: Parts
    turns: Turns
    begun: Parts
    def __init__(self, ask: _Optional[str] = ..., text: _Optional[_Union[Parts, _Mapping]] = ..., turns: _Optional[_Union[Turns, _Mapping]] = ..., begun: _Optional[_Union[Parts, _Mapping]] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Turns(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("role", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, role: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class SessionGenerate(_message.Message):
    __slots__ = ("gen", "request", "timeout_s", "resumable")
    GEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    gen: str
    request: GenerateRequest
    timeout_s: float
    resumable: bool
    def __init__(self, gen: _Optional[str] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., timeout_s: _Optional[float] = ..., resumable: _Optional[bool] = ...) -> None: ...

class SessionCancel(_message.Message):
    __slots__ = ("gen",)
    GEN_FIELD_NUMBER: _ClassVar[int]
    gen: str
    def __init__(self, gen: _Optional[str] = ...) -> None: ...

class SessionPing(_message.Message):
    __slots__ = ("t",)
    T_FIELD_NUMBER: _ClassVar[int]
    t: float
    def __init__(self, t: _Optional[float] = ...) -> None: ...

class SessionAck(_message.Message):
    __slots__ = ("gen", "seq")
    GEN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    gen: str
    seq: int
    def __init__(self, gen: _Optional[str] = ..., seq: _Optional[int] = ...) -> None: ...

class SessionResume(_message.Message):
    __slots__ = ("resume_token", "gens")
    class GensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENS_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    gens: _containers.ScalarMap[str, int]
    def __init__(self, resume_token: _Optional[str] = ..., gens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("hello", "generation", "error", "draining", "pong", "resumed", "tokens", "program")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    generation: SessionGeneration
    error: SessionError
    draining: SessionDraining
    pong: SessionPong
    resumed: SessionResumed
    tokens: SessionTokens
    program: bytes
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., generation: _Optional[_Union[SessionGeneration, _Mapping]] = ..., error: _Optional[_Union[SessionError, _Mapping]] = ..., draining: _Optional[_Union[SessionDraining, _Mapping]] = ..., pong: _Optional[_Union[SessionPong, _Mapping]] = ..., resumed: _Optional[_Union[SessionResumed, _Mapping]] = ..., tokens: _Optional[_Union[SessionTokens, _Mapping]] = ..., program: _Optional[bytes] = ...) -> None: ...

class SessionTokens(_message.Message):
    __slots__ = ("ask", "pieces")
    ASK_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ask: str
    pieces: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, ask: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("session", "version", "max_generations", "models", "resume_token", "resume_window_s", "programs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    session: str
    version: str
    max_generations: int
    models: _containers.RepeatedScalarFieldContainer[str]
    resume_token: str
    resume_window_s: float
    programs: bool
    def __init__(self, session: _Optional[str] = ..., version: _Optional[str] = ..., max_generations: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., resume_token: _Optional[str] = ..., resume_window_s: _Optional[float] = ..., programs: _Optional[bool] = ...) -> None: ...

class SessionGeneration(_message.Message):
    __slots__ = ("gen", "event")
    GEN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    gen: str
    event: GenerateEvent
    def __init__(self, gen: _Optional[str] = ..., event: _Optional[_Union[GenerateEvent, _Mapping]] = ...) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("code", "message", "gen", "seq", "param", "retryable", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GEN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    gen: str
    seq: int
    param: str
    retryable: bool
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., gen: _Optional[str] = ..., seq: _Optional[int] = ..., param: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SessionDraining(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class SessionPong(_message.Message):
    __slots__ = ("t", "server_t")
    T_FIELD_NUMBER: _ClassVar[int]
    SERVER_T_FIELD_NUMBER: _ClassVar[int]
    t: float
    server_t: float
    def __init__(self, t: _Optional[float] = ..., server_t: _Optional[float] = ...) -> None: ...

class SessionResumed(_message.Message):
    __slots__ = ("gens",)
    GENS_FIELD_NUMBER: _ClassVar[int]
    gens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gens: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "prompt", "chat", "detokenize")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    chat: Chat
    detokenize: TokenIds
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., detokenize: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "text")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "target", "draft", "max_context", "vocab_size", "dtype", "device", "max_nodes", "sources")
    ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    id: str
    target: str
    draft: str
    max_context: int
    vocab_size: int
    dtype: str
    device: str
    max_nodes: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., target: _Optional[str] = ..., draft: _Optional[str] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., max_nodes: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "uptime_s", "models", "max_running", "draining", "stats")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    models: _containers.RepeatedCompositeFieldContainer[Model]
    max_running: int
    draining: bool
    stats: ServerStats
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., max_running: _Optional[int] = ..., draining: _Optional[bool] = ..., stats: _Optional[_Union[ServerStats, _Mapping]] = ...) -> None: ...

class ServerStats(_message.Message):
    __slots__ = ("running", "waiting", "kv_used", "kv_total", "requests", "finished", "aborted", "preempted", "steps", "tokens_out", "drafted", "accepted", "prompt_tokens", "prefix_hit_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OUT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    requests: int
    finished: int
    aborted: int
    preempted: int
    steps: int
    tokens_out: int
    drafted: int
    accepted: int
    prompt_tokens: int
    prefix_hit_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_used: _Optional[int] = ..., kv_total: _Optional[int] = ..., requests: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., preempted: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_out: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ...) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class StatsSample(_message.Message):
    __slots__ = ("stats", "interval_s", "requests_per_s", "steps_per_s", "tokens_per_s", "tokens_per_step", "acceptance_rate", "prefix_hit_rate", "draining")
    STATS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    stats: ServerStats
    interval_s: float
    requests_per_s: float
    steps_per_s: float
    tokens_per_s: float
    tokens_per_step: float
    acceptance_rate: float
    prefix_hit_rate: float
    draining: bool
    def __init__(self, stats: _Optional[_Union[ServerStats, _Mapping]] = ..., interval_s: _Optional[float] = ..., requests_per_s: _Optional[float] = ..., steps_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., tokens_per_step: _Optional[float] = ..., acceptance_rate: _Optional[float] = ..., prefix_hit_rate: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...
