"""The parts of a request that say how its text is made: sampling, speculation, constraint.

Shared by all transports, with their bounds; api/messages.py offers them as its own. Knows no
tokens and no engine; imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

MAX_STOP_CHARS = 256
MAX_STOPS, MAX_BAD_WORDS, MAX_IDS, MAX_SEGMENTS = 16, 64, 1024, 64
MAX_SOURCE_CHARS = 256 << 10  # of a grammar or schema
MAX_BANNED, MAX_TOOL_NAME = 256, 256
INT64 = 2**63 - 1

Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Most = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Part(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a message; unknown fields are refused, not ignored."""


class Sampling(Part):
    """Every field optional: absent = the model's generation_config, then greedy."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] = 1
    # Keys are token ids; JSON knows only strings as keys.
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None


class Speculation(Part):
    """The request's say in speculation: see docs; `prediction` is the text the client expects."""

    mode: Literal["auto", "off", "max"] = "auto"
    max_nodes: Annotated[int, Meta(ge=0, le=1024)] | None = None
    sources: Annotated[list[str], Meta(max_length=16)] | None = None
    prediction: Annotated[str, Meta(max_length=1_000_000)] | None = None


class Constraint(Part):
    """What the text of every choice has to look like; the fields are those of spec/request.py's.

    source: of a "json_schema" the schema as JSON text, of "choices" a JSON list of strings, of
    "name" the name of a grammar that is shipped; "text" and "json_object" have none.
    """

    kind: Literal["text", "regex", "json_schema", "json_object", "choices", "lark", "name"]
    source: Annotated[str, Meta(max_length=MAX_SOURCE_CHARS)] = ""
    whitespace: Literal["bounded", "compact", "any"] = "bounded"
    strict: bool = True
    max_chars: Most | None = None
    min_chars: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    max_words: Most | None = None
    max_sentences: Most | None = None
    banned: Annotated[list[StopString], Meta(max_length=MAX_BANNED)] = []
    after: Annotated[str, Meta(max_length=256)] = ""
    forcing: bool = True


class Segment(Part):
    """A further generation of a request: the ids that stand before it, and how it is made.

    Fields as of Generate. It begins behind what the one before keeps: all but the token that ended
    it, or those of its stop string.
    """

    token_ids: Annotated[list[Token], Meta(min_length=1)]
    constraint: Constraint | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64)] = 0
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Meta(max_length=MAX_IDS)] = []
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class NamedTool(Part):
    """The tool that must be called."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME)]


class Constrained(Part):
    """What became of a constraint on one choice.

    complete: the text fits all that was enforced, which it doesn't when cut short. ignored:
    keywords of the schema that were not enforced. schema_valid: whether the text is valid under
    the whole schema; None = not a schema, not complete, or it can't be told. forced: tokens the
    constraint left no choice about.
    """

    complete: bool
    ignored: list[str] = []
    schema_valid: bool | None = None
    forced: int = 0
