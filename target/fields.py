"""Single fields of a config.json, read and checked; what is wrong is named by its key.

Shared by target/config.py and the recipes. Knows nothing of what the fields mean, of tensors or of
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]


class ConfigError(ValueError):
    """A checkpoint's configuration is incomplete, contradictory or not supported."""


def count(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive whole number; missing or null = `default`, ConfigError without one."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key}: missing from the model's configuration")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: {value!r} is not a positive whole number")
    return value


def natural(raw: Raw, key: str, default: int = 0) -> int:
    """A whole number from 0 on; missing or null = `default`."""
    return 0 if raw.get(key) == 0 else count(raw, key, default) if raw.get(key) else default


def one_of(raw: Raw, key: str, known: tuple[str, ...], default: str) -> str:
    """One of `known`; missing or null = `default`."""
    value = raw.get(key)
    if value is None:
        return default
    if value not in known:
        raise ConfigError(f"{key}: {value!r} is not supported; supported: {', '.join(known)}")
    return str(value)
