"""What a checkpoint's files say about its tokens, in one form whatever the container.

`Vocabulary` is what target/gguf_tokens.py and target/directory_tokens.py hand to
target/tokenizer.py: the `tokenizers` pipeline and a table of texts, kinds and stop ids. Here too is
the way from a token's text to its bytes. Knows nothing of files, prompts or chat templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

import tokenizers

STOP_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
)
"""Added tokens that end a turn whether or not a checkpoint declares them as such."""

PADDING = re.compile(r"\[PAD\d+\]")
"""Rows that fill an embedding up to a round number, as converters to GGUF name them."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class TokenCoding(Enum):
    """How the text of an ordinary token stands for bytes."""

    BYTE_LEVEL = "byte-level"  # each character is one byte, in GPT-2's alphabet
    SENTENCEPIECE = "sentencepiece"  # U+2581 is a space, <0xNN> a byte
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of one checkpoint.

    pipeline: encodes text, control tokens recognised. texts: by id, None where there is no token.
    special: control tokens. added: tokens found in text before anything else, the special ones
    included. unused: padding and holes. add_bos: whether a prompt begins with `bos_id`. named:
    texts under the names templates use (bos_token, ...). templates: chat templates by name, the
    ordinary one is "default".
    """

    pipeline: tokenizers.Tokenizer
    coding: TokenCoding
    texts: list[str | None]
    special: frozenset[int]
    added: frozenset[int]
    unused: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    named: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character -> byte: printable Latin-1 stands for itself, the rest follows U+0100.

    Source: Radford et al. 2019, the published encoder's byte table.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of every token, by id; b"" where there is none. 0.1 s for 152k tokens."""
    coding = vocabulary.coding
    table: list[bytes]
    if coding is TokenCoding.BYTE_LEVEL:
        to_latin = {ord(character): byte for character, byte in byte_alphabet().items()}
        # A character outside the alphabet must not pass for the byte of the same number.
        to_latin = dict.fromkeys(range(256), 0xFFFF) | to_latin
        table = [_byte_level(text, to_latin) for text in vocabulary.texts]
    elif coding is TokenCoding.SENTENCEPIECE:
        table = [_sentencepiece(text) for text in vocabulary.texts]
    else:
        table = [b"" if text is None else text.encode() for text in vocabulary.texts]
    for i in vocabulary.added:
        table[i] = (vocabulary.texts[i] or "").encode()
    return table


def _byte_level(text: str | None, to_latin: dict[int, int]) -> bytes:
    if text is None:
        return b""
    try:
        return text.translate(to_latin).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _sentencepiece(text: str | None) -> bytes:
    if text is None:
        return b""
    byte = _BYTE_TOKEN.fullmatch(text) if len(text) == 6 else None
    if byte is not None:
        return bytes((int(byte[1], 16),))
    return text.replace(_SPACE_MARK, " ").encode()


def without_specials(pipeline: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same pipeline, to which the text of a control token is text like any other.

    The model (the big part) is shared with `pipeline`. Whether control tokens are recognised is a
    switch of the whole object, hence a second one instead of flipping it under other threads.
    """
    plain = tokenizers.Tokenizer(pipeline.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        value = getattr(pipeline, part)
        if value is not None:
            setattr(plain, part, value)
    added = pipeline.get_added_tokens_decoder()
    add_in_order(plain, [added[i] for i in sorted(added)])
    if plain.get_added_tokens_decoder().keys() != added.keys():
        # Ids with holes can't be given again; a copy keeps them at the price of a second model.
        plain = tokenizers.Tokenizer.from_str(pipeline.to_str())
    plain.encode_special_tokens = True
    return plain


def add_in_order(pipeline: tokenizers.Tokenizer, tokens: list[tokenizers.AddedToken]) -> None:
    """Add tokens, special or not, in exactly this order: new ids are given by order."""
    batch: list[tokenizers.AddedToken] = []
    for i, token in enumerate(tokens):
        batch.append(token)
        if i + 1 == len(tokens) or tokens[i + 1].special != token.special:
            add = pipeline.add_special_tokens if token.special else pipeline.add_tokens
            add(batch)
            batch = []
