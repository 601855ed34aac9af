"""Tokens out of a model directory: tokenizer.json and the small JSON files beside it.

Reads tokenizer.json through the `tokenizers` library; a directory that has only the older files
(vocab.json, tokenizer.model, ...) is converted by transformers, imported only then and without any
code of the directory's own. Knows nothing of weights, prompts or chat messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from spec_serve.target.gguf import CheckpointError
from spec_serve.target.vocabulary import PADDING, STOP_TOKENS, TokenCoding, Vocabulary

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def read_directory_tokens(path: Path) -> Vocabulary:
    """Read the vocabulary of a Hugging Face model directory.

    Raises CheckpointError where there is no tokenizer or a file of it is damaged.
    """
    settings = read_json(path / "tokenizer_config.json")
    pipeline = _pipeline(path)
    # A padding or truncation left in the file by its author's training is not wanted here.
    pipeline.no_padding()
    pipeline.no_truncation()
    vocab = pipeline.get_vocab(with_added_tokens=True)
    texts: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, i in vocab.items():
        texts[i] = text
    decoder = pipeline.get_added_tokens_decoder()
    for i, token in decoder.items():
        texts[i] = token.content
    special = frozenset(i for i, token in decoder.items() if token.special)
    named = _named(path, settings)
    bos = vocab.get(named.get("bos_token", ""))
    stops = {i for i, token in decoder.items() if token.content in STOP_TOKENS}
    stops |= {i for i in _declared_stops(path) if i < len(texts)}
    if named.get("eos_token") in vocab:
        stops.add(vocab[named["eos_token"]])
    return Vocabulary(
        pipeline=pipeline,
        coding=_coding(json.loads(pipeline.to_str())),
        texts=texts,
        special=special,
        added=frozenset(decoder),
        unused=frozenset(
            i
            for i, text in enumerate(texts)
            if text is None or (i not in special and PADDING.fullmatch(text))
        ),
        bos_id=bos,
        eos_ids=frozenset(stops),
        add_bos=bos is not None and _adds_bos(pipeline, settings, bos),
        named=named,
        templates=_templates(path, settings),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__} instead of an object")
    return value


def _pipeline(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the binding raises bare Exceptions
            raise CheckpointError(f"{file}: can't be read as a tokenizer ({error})") from error
    if not any((path / name).is_file() for name in _OLDER_FILES):
        raise CheckpointError(f"{path}: no tokenizer.json; without it text can't be encoded")
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        return Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: no tokenizer.json, and its older files can't be converted ({said})"
        ) from error


def _coding(pipeline: dict[str, Any]) -> TokenCoding:
    kinds = {part.get("type") for part in _parts(pipeline)}
    if "ByteLevel" in kinds:
        return TokenCoding.BYTE_LEVEL
    marks = any("▁" in part.values() for part in _parts(pipeline))
    if marks or "Metaspace" in kinds or pipeline["model"].get("byte_fallback"):
        return TokenCoding.SENTENCEPIECE
    return TokenCoding.PLAIN


def _parts(pipeline: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The normalizers, pre-tokenizers and decoders, sequences opened."""
    waiting = [pipeline.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            for nested in ("normalizers", "pretokenizers", "decoders"):
                waiting.extend(part.get(nested, ()))


def _named(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Texts of bos_token and its like; a text may be wrapped in an object."""
    named: dict[str, str] = {}
    for source in (settings, read_json(path / "special_tokens_map.json")):
        for name in _NAMES:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str) and name not in named:
                named[name] = value
    return named


def _declared_stops(path: Path) -> set[int]:
    stops: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        content = read_json(path / name)
        inner = content.get("text_config")
        for source in (content, inner if isinstance(inner, dict) else {}):
            value = source.get("eos_token_id")
            for i in value if isinstance(value, list) else [value]:
                if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                    stops.add(i)
    return stops


def _adds_bos(pipeline: Tokenizer, settings: dict[str, Any], bos: int) -> bool:
    declared = settings.get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    return pipeline.encode("a", add_special_tokens=True).ids[:1] == [bos]


def _templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name; a file of its own wins over the settings."""
    found: dict[str, str] = {}
    for value in (
        settings.get("chat_template"),
        read_json(path / "chat_template.json").get("chat_template"),
    ):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    found[str(entry.get("name"))] = entry["template"]
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.is_file():
            try:
                found[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: can't be read ({error})") from error
    return found
