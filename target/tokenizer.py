"""Text to token ids and back, for prompts and for chats.

One rule holds everywhere: the text of a control token becomes that token only where the caller said
so (`special=True`) or a chat template wrote it; in a message it is text like any other. Where the
tokens come from is the business of target/gguf_tokens.py and target/directory_tokens.py. Knows
nothing of requests or of streaming text out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from spec_serve.target.chat_template import ChatTemplateError, Marks, render, restore
from spec_serve.target.directory_tokens import read_directory_tokens
from spec_serve.target.gguf import CheckpointError, read_metadata
from spec_serve.target.gguf_tokens import read_gguf_tokens
from spec_serve.target.vocabulary import TokenCoding, Vocabulary, token_bytes, without_specials


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads.

    vocab_size: ids known, at most the embedding's rows. eos_ids: every id that ends a turn.
    unused_ids: padding and holes. chat_template: source of the ordinary template, if there is one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._full = vocabulary.pipeline
        self._plain = without_specials(vocabulary.pipeline)
        self._special = vocabulary.special
        self._templates = vocabulary.templates
        self._add_bos = vocabulary.add_bos
        self._ids = {
            text: i for i in vocabulary.special if (text := vocabulary.texts[i]) is not None
        }
        self._marks = Marks(self._ids)
        added = vocabulary.pipeline.get_added_tokens_decoder()
        self._strip = {i: (token.lstrip, token.rstrip) for i, token in added.items()}
        # Such a token is looked for after normalising, which could make its text of other text.
        self._normalised = vocabulary.pipeline.normalizer is not None and any(
            added[i].normalized for i in self._special if i in added
        )
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.unused_ids = vocabulary.unused
        self.kind = vocabulary.coding.value
        self.chat_template: str | None = self._templates.get("default")

    @cached_property
    def _bytes(self) -> list[bytes]:
        return token_bytes(self._vocabulary)

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        """Ids of a text.

        special: whether the texts of control tokens are those tokens. bos: whether the ids begin
        with the start token, by default as the checkpoint says; it is never doubled. Raises
        UnicodeEncodeError (a ValueError) for half a surrogate pair.
        """
        text.encode()
        ids = self._encode(self._full, text) if special else self._encode_plain(text)
        return self._with_bos(ids, self._add_bos if bos is None else bos)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        kept = [i for i in ids if not (skip_special and i in self._special)]
        if self._vocabulary.coding is TokenCoding.BYTE_LEVEL:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        known = [i for i in kept if 0 <= i < self.vocab_size]
        return str(self._full.decode(known, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, control tokens as their text; b"" where there is none."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token for display; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token, which never shows in text."""
        return token_id in self._special

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation as the model's template writes it, one start token at most.

        Control tokens come from the template only: their texts in `messages`, `tools` and further
        template variables (`kwargs`) are encoded as text. Raises ChatTemplateError where there is
        no template or it refuses the messages, UnicodeEncodeError for half a surrogate pair.
        """
        given = {"messages": messages, "tools": tools, **kwargs}
        text, free = self._rendered(given, add_generation_prompt)
        return self._with_bos(self._encode_rendered(text, free), self._add_bos)

    def render_around(
        self, messages: list[dict[str, Any]], begun: str | None, hole: str
    ) -> list[list[int]]:
        """Ids of a conversation's pieces before, between and behind the places where `hole` is.

        hole: a text that is nowhere else; it stands in contents for tokens that are known as ids.
        begun: what the assistant's open turn begins with, None where no turn is open. Otherwise as
        `render_chat`. Raises ChatTemplateError too where the template loses or doubles a hole.
        """
        given = {"messages": messages, "tools": None}
        text, free = self._rendered(given, begun is not None, begun or "")
        wanted = sum(str(message["content"]).count(hole) for message in messages)
        first, *others = text.split(hole)
        if len(others) != wanted + (begun or "").count(hole):
            raise ChatTemplateError("this model's template does not keep contents as they are")
        ids = self._with_bos(self._encode_rendered(first, free), self._add_bos)

        def encode(piece: str) -> list[int]:
            return self._encode_rendered(piece, free)

        return [ids, *(self._encode_behind(piece, encode) for piece in others)]

    def encode_around(self, parts: Sequence[str]) -> list[list[int]]:
        """Ids of plain texts between which stand tokens that are known as ids."""
        first, *others = parts
        behind = [self._encode_behind(text, self._encode_plain) for text in others]
        return [self.encode(first), *behind]

    def _rendered(
        self, given: dict[str, Any], open_turn: bool, begun: str = ""
    ) -> tuple[str, dict[str, str]]:
        """The template's text, marks in what was given hidden, and how they are restored."""
        source = self._template(given["tools"])
        free = self._marks.replacements(given, source, begun)
        text = render(
            source,
            {
                **self._vocabulary.named,
                "documents": None,
                "add_generation_prompt": open_turn,
                **self._marks.hide(given, free),
            },
        )
        text += self._marks.hide(begun, free)
        text.encode()
        return text, free

    def _encode_rendered(self, text: str, free: dict[str, str]) -> list[int]:
        if self._normalised or any(hidden in text for hidden in free.values()):
            return self._encode_parts(text, free)
        return self._encode(self._full, text)

    @cached_property
    def _pads(self) -> bool:
        """Whether a text's beginning gets a space of its own, as with SentencePiece."""
        return b"".join(map(self.token_bytes, self._encode_plain("x"))) != b"x"

    def _encode_behind(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of text behind other tokens: without what only a text's beginning gets."""
        if not text:
            return []
        if self._pads:
            start, both = encode("\n"), encode("\n" + text)
            if both[: len(start)] == start:
                return both[len(start) :]
        return encode(text)

    def files(self) -> dict[str, bytes]:
        """The tokenizer as files that Hugging Face's libraries read: name -> content.

        For whoever makes text and prompts elsewhere; it may take a while for a large vocabulary.
        """
        held = self._vocabulary
        templates: Any = self.chat_template
        if set(held.templates) - {"default"}:
            templates = [{"name": name, "template": t} for name, t in held.templates.items()]
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **held.named,
            "add_bos_token": held.add_bos,
            "clean_up_tokenization_spaces": False,
            **({"chat_template": templates} if templates else {}),
        }
        return {
            "tokenizer.json": held.pipeline.to_str().encode(),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False).encode(),
        }

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError("this model has no chat template")
        return self._templates[name]

    def _encode(self, pipeline: Any, text: str) -> list[int]:
        ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text that may hold the texts of control tokens, but never these tokens."""
        ids = self._encode(self._plain, text)
        if self._special.isdisjoint(ids):
            return ids
        # Some models hold control tokens among their ordinary pieces: keep their texts apart.
        cuts = [0, *(start + 1 for start, _ in self._marks.find(text)), len(text)]
        pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        unknown = self._ids.get(self._vocabulary.named.get("unk_token", ""))
        parts = [i for piece in pieces for i in self._encode(self._plain, piece)]
        return [i for i in parts if i == unknown or i not in self._special]

    def _encode_parts(self, text: str, free: dict[str, str]) -> list[int]:
        """Ids of rendered text: its marks are tokens, what lies between is text."""
        ids: list[int] = []
        at, strip_left = 0, False
        for start, end in [*self._marks.find(text), (len(text), len(text))]:
            mark = self._ids.get(text[start:end])
            between = restore(text[at:start], free)
            left, right = (
                self._strip.get(mark, (False, False)) if mark is not None else (False,) * 2
            )
            if strip_left:
                between = between.lstrip()
            if left:
                between = between.rstrip()
            if between:
                ids += self._encode_plain(between)
            if mark is not None:
                ids.append(mark)
            at, strip_left = end, right
        return ids

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        bos = self.bos_id
        if not wanted or bos is None:
            return ids
        begin = 0
        while begin < len(ids) and ids[begin] == bos:
            begin += 1
        return [bos, *ids[begin:]]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or of a model directory (one with a single GGUF file too).

    Raises CheckpointError for a path that holds none or a damaged one.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1 or (path / "tokenizer.json").is_file():
            return Tokenizer(read_directory_tokens(path))
        path = files[0]
    if path.is_file():
        return Tokenizer(read_gguf_tokens(read_metadata(path)))
    raise CheckpointError(f"{path}: there is no such file or directory")
