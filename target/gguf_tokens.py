"""Tokens out of a GGUF file's metadata: byte-level BPE and SentencePiece-style BPE.

The file names its way of splitting text (`tokenizer.ggml.pre`) but doesn't spell it out; the table
below does. Knows nothing of tensors, prompts or chat messages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from spec_serve.target.gguf import CheckpointError, GGUFFile
from spec_serve.target.vocabulary import (
    PADDING,
    STOP_TOKENS,
    TokenCoding,
    Vocabulary,
    add_in_order,
)

_log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
_GPT2 = ("gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
# Words that are tokens as a whole are never merged together from pieces in these.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
_BEGIN_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_tokens(file: GGUFFile) -> Vocabulary:
    """Build the vocabulary of a GGUF file; 0.6 s for 152k tokens.

    Raises CheckpointError for a file without one, of a model of tokenizer that isn't known, or
    whose tables disagree.
    """
    return _Reader(file).read()


class _Reader:
    """The metadata below `tokenizer.` with every value checked as it is taken."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._metadata = file.metadata
        self.tokens = self._strings("tokens")
        types = self._array("token_type")
        self.types = [NORMAL] * len(self.tokens) if types is None else [int(t) for t in types]

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}")

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _strings(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, list) or not value:
            raise self._fail(f"tokenizer.ggml.{key} is missing; without it text can't be encoded")
        return value

    def _array(self, key: str) -> Sequence[Any] | None:
        """A list of numbers, one per token."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, (str, int, float)) or len(value) != len(self.tokens):
            raise self._fail(f"tokenizer.ggml.{key} does not hold one number for each token")
        return list(value.tolist() if hasattr(value, "tolist") else value)

    def _flag(self, key: str, otherwise: bool) -> bool:
        value = self._get(key)
        return otherwise if value is None else bool(value)

    def _id(self, key: str) -> int | None:
        value = self._get(key)
        # -1 is an older way to say there is none.
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._fail(f"tokenizer.ggml.{key}: {value!r} is no token")
        return value

    def read(self) -> Vocabulary:
        kind, pre = self._get("model"), self._get("pre")
        if kind == "gpt2":
            pipeline, coding = self._byte_level(pre), TokenCoding.BYTE_LEVEL
            bos_by_default = pre in _BEGIN_WITH_BOS
        elif kind == "llama":
            pipeline, coding = self._sentencepiece(), TokenCoding.SENTENCEPIECE
            bos_by_default = True
        else:
            what = f"tokenizer.ggml.model: {kind!r} is not supported"
            raise self._fail(f"{what}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)")
        tokens, types = self.tokens, self.types
        special = [i for i, t in enumerate(types) if t in (UNKNOWN, CONTROL) and tokens[i]]
        extra = [i for i, t in enumerate(types) if t == USER_DEFINED and tokens[i]]
        names = set(special)
        add_in_order(
            pipeline,
            [
                AddedToken(tokens[i], special=i in names, normalized=False)
                for i in sorted(special + extra)
            ],
        )
        bos = self._id("bos_token_id")
        stops = {self._id(key) for key in _STOP_KEYS} - {None}
        added = frozenset(special + extra)
        stops |= {i for i in added if tokens[i] in STOP_TOKENS}
        named = {name: self._id(key) for name, key in _NAMES.items()}
        return Vocabulary(
            pipeline=pipeline,
            coding=coding,
            texts=list(tokens),
            special=frozenset(special),
            added=added,
            unused=frozenset(
                i
                for i, t in enumerate(types)
                if t == UNUSED or (t != CONTROL and PADDING.fullmatch(tokens[i]))
            ),
            bos_id=bos,
            eos_ids=frozenset(i for i in stops if i is not None),
            add_bos=bos is not None and self._flag("add_bos_token", bos_by_default),
            named={name: tokens[i] for name, i in named.items() if i is not None},
            templates=self._templates(),
        )

    def _templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        found: dict[str, str] = {}
        for key, value in self._metadata.items():
            if key == prefix and isinstance(value, str):
                found["default"] = value
            elif key.startswith(prefix + ".") and isinstance(value, str):
                found.setdefault(key[len(prefix) + 1 :], value)
        return found

    def _merges(self) -> list[tuple[str, str]]:
        pairs = []
        for i, merge in enumerate(self._strings("merges")):
            # A token may itself hold a space: the split is at the first one after the start.
            at = merge.find(" ", 1)
            if at < 0:
                raise self._fail(f"tokenizer.ggml.merges: entry {i}, {merge!r}, is no pair")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def _vocab(self) -> dict[str, int]:
        # Backwards, so that of two tokens with one text the first keeps it.
        count = len(self.tokens)
        return dict(zip(reversed(self.tokens), range(count - 1, -1, -1), strict=True))

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        try:
            return models.BPE(vocab=self._vocab(), merges=merges, **options)
        except Exception as error:  # the binding raises bare Exceptions
            raise self._fail(f"tokenizer.ggml.merges don't fit the tokens ({error})") from error

    def _byte_level(self, pre: str | None) -> Tokenizer:
        pipeline = Tokenizer(self._bpe(self._merges(), ignore_merges=pre in _WHOLE_WORDS))
        if pre == "qwen2":
            pipeline.normalizer = normalizers.NFC()
        first: list[Any] = []
        if pre in _SPLITS:
            first = [pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")]
        elif pre in _DIGITS:
            first = [pre_tokenizers.Digits(individual_digits=True)]
        elif pre not in _GPT2:
            _log.warning(
                "%s: tokenizer.ggml.pre is %r, which is not known; text is split as in GPT-2 and"
                " may be encoded differently from how the model learnt it",
                self._path,
                pre,
            )
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
        pipeline.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
        pipeline.decoder = decoders.ByteLevel()
        return pipeline

    def _sentencepiece(self) -> Tokenizer:
        """BPE whose merges follow from the scores, unknown characters as byte tokens."""
        unknown = self._id("unknown_token_id")
        merges = self._merges() if self._get("merges") is not None else self._scored_merges()
        pipeline = Tokenizer(
            self._bpe(
                merges,
                byte_fallback=True,
                fuse_unk=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            )
        )
        prefix = self._flag("add_space_prefix", True)
        spaces = normalizers.Replace(" ", "▁")
        pipeline.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
        )
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        pipeline.decoder = decoders.Sequence(steps)
        return pipeline

    def _scored_merges(self) -> list[tuple[str, str]]:
        """All pairs of tokens that make a token, the best score first.

        SentencePiece merges the adjacent pair with the best score; ranking all possible pairs by
        the score of their result is the same rule written as a list of merges.
        """
        scores = self._array("scores")
        if scores is None:
            raise self._fail("tokenizer.ggml.scores is missing, and there are no merges either")
        ids = {
            text: i
            for i, text in enumerate(self.tokens)
            if self.types[i] == NORMAL and len(text) > 0
        }
        ranked: list[tuple[float, int, int, str, str]] = []
        for text, i in ids.items():
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in ids and right in ids:
                    ranked.append((-scores[i], ids[left], ids[right], left, right))
        ranked.sort(key=lambda merge: merge[:3])
        return [merge[3:] for merge in ranked]
