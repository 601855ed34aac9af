"""Which family writes tool calls in which way: markers and grammars, picked by the chat template.

Written after the families' chat templates (Hermes and Qwen2.5/3, Qwen3-Coder, Llama 3.x, Mistral
before and since tekken v11, DeepSeek V3/R1 and V3.1, Granite and Phi-4-mini) and, for Gemma 3,
which has none, what its makers advise. The grammars are in api/tool_grammars.py. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spec_serve.api.tool_grammars import (
    SEPARATOR,
    Grammar,
    bracketed_calls,
    deepseek_call,
    fenced_calls,
    fenced_json,
    json_calls,
    listed_calls,
    mistral_calls,
    tagged_call,
    xml_call,
)


@dataclass(frozen=True, slots=True)
class Format:
    """One family's way.

    openers: marker -> grammar. bare: first character of the text -> grammar to read it with.
    closers: markers dropped behind a call, text anywhere else. silent: always dropped. controls:
    those of all markers that are control tokens in some vocabularies. Mistral's templates take no
    id but nine letters and digits: short_ids.
    """

    name: str
    openers: Mapping[str, Grammar]
    bare: Mapping[str, Grammar] = field(default_factory=dict)
    closers: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    short_ids: bool = False
    markers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "markers", (*self.openers, *self.closers, *self.silent))


# Understood from every family: what models are told whose templates know no tools (api/turns.py).
_TAGGED: dict[str, Grammar] = {"<tool_call>": tagged_call}
_TAGS = ("<tool_call>", "</tool_call>")
# Small models forget their tags: Qwen2.5-Coder writes calls as bare or fenced JSON more often than
# not. It is read as a call only if it begins like one and names a tool, so little else is caught.
_FENCED: dict[str, Grammar] = {"```json": fenced_json}

# Where tools are strict: what else looks like a call was not enforced, and is text.
TAGGED = Format("tagged", _TAGGED, closers=("</tool_call>",), controls=_TAGS)
HERMES = Format(
    "hermes",
    {**_TAGGED, **_FENCED, "<function=": xml_call},
    bare={"{": listed_calls},
    closers=("</tool_call>", "</function>"),
    controls=_TAGS,
)
LLAMA = Format(
    "llama",
    {"<|python_tag|>": listed_calls, **_TAGGED, **_FENCED},
    bare={"{": listed_calls, "[": bracketed_calls},
    closers=("</tool_call>",),
    controls=("<|python_tag|>", *_TAGS),
)
MISTRAL = Format(
    "mistral",
    {"[TOOL_CALLS]": mistral_calls, **_TAGGED, **_FENCED},
    closers=("</tool_call>",),
    controls=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *_TAGS),
    short_ids=True,
)
DEEPSEEK = Format(
    "deepseek",
    {"<｜tool▁call▁begin｜>": deepseek_call, **_TAGGED},
    closers=("```", "</tool_call>"),
    silent=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    controls=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>", SEPARATOR, *_TAGS,
    ),
)  # fmt: skip
BARRED = Format(
    "barred",
    {"<|tool_call|>": json_calls, **_TAGGED, **_FENCED},
    closers=("<|/tool_call|>", "</tool_call>"),
    controls=("<|tool_call|>", "<|/tool_call|>", *_TAGS),
)
GEMMA = Format(
    "gemma",
    {"```tool_code": fenced_calls, "```tool_call": fenced_calls, **_TAGGED, **_FENCED},
    bare={"{": listed_calls, "[": bracketed_calls},
    closers=("</tool_call>",),
)
# A text that only this family's template holds -> the family.
_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<｜tool▁call", DEEPSEEK),
    ("<|python_tag|>", LLAMA),
    ("<|start_header_id|>", LLAMA),
    ("<|tool_call|>", BARRED),
    ("<|tool|>", BARRED),
    ("<start_of_turn>", GEMMA),
)


def format_of(chat_template: str) -> Format:
    """The family's format, told by its template; Hermes's, the commonest, where no sign is found.

    <tool_call> in the template comes before all signs: fine-tunes keep the other marks.
    """
    if "<tool_call>" in chat_template and "<|tool_call|>" not in chat_template:
        return HERMES
    return next((found for sign, found in _SIGNS if sign in chat_template), HERMES)


