"""Settings an operator can choose, and where each value comes from.

One table names every setting; flags, variables, the configuration file and the help are made from
it. A flag wins over a SPEC_SERVE_* variable, that over the file, that over the default. Reads no
environment itself (it is handed one), imports no torch, and knows what values mean only as far as
types, choices and bounds go.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from spec_serve.api.server_settings import BLOCK_TOKENS, ServeSettings

Kind = Literal["text", "whole", "number", "switch", "port", "list"]
Value = str | int | float | bool | tuple[str, ...] | None

PREFIX = "SPEC_SERVE_"


class SettingError(ValueError):
    """A value that can't be used; the message names the setting and where it was given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. key: as in the flag and the file; low and high: bounds, both allowed.

    kind "port" also takes "off" (None) where `off` is set; "list" is given as repeated flags, as
    an array in the file, or joined by commas in the variable. secret: never shown. filled:
    given empty it is an error, since an empty key would look like one and guard nothing.
    """

    key: str
    group: str
    kind: Kind
    default: Value
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    off: bool = False
    secret: bool = False
    filled: bool = False

    @property
    def flag(self) -> str:
        """--max-rows"""
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        """SPEC_SERVE_MAX_ROWS"""
        return PREFIX + self.key.upper().replace("-", "_")

    @property
    def field(self) -> str:
        """max_rows, the name in a dataclass."""
        return self.key.replace("-", "_")


MODEL, MEMORY, SPECULATION = "model", "memory and batching", "speculation"
SERVER, SECURITY, LIMITS = "server", "security", "limits"
TRANSPORTS, METRICS = "transports", "metrics and traces"
LOGGING, PROCESS = "logging", "process"
KERNELS, ADAPTING = "kernels", "adapting"
ENGINE_GROUPS = (MODEL, MEMORY, SPECULATION, KERNELS)
EVERYDAY = (MODEL, MEMORY, SPECULATION, SERVER, PROCESS)  # what --help shows
# What --help-all shows too.
FURTHER = (KERNELS, ADAPTING, TRANSPORTS, SECURITY, LIMITS, LOGGING, METRICS)

SETTINGS: tuple[Setting, ...] = (
    Setting("target", MODEL, "text", "", "model to serve: path, short name or hub id", "MODEL"),
    Setting(
        "draft", MODEL, "text", "lookup",
        "what guesses: none, lookup, nextn, a head or small model, or several joined by +", "DRAFT",
    ),
    Setting("device", MODEL, "text", "auto", "auto, cpu, cuda, cuda:N", "DEVICE"),
    Setting(
        "dtype", MODEL, "text", "auto", "type of weights and K/V",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Setting(
        "quantize", MODEL, "text", "none",
        "how weights that are not quantised are held on a CPU",
        choices=("none", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    ),
    Setting(
        "kv-fraction", MEMORY, "number", 0.3,
        "share of the memory free after loading that K/V may take", "F", low=0.001, high=0.95,
    ),
    Setting(
        "kv-tokens", MEMORY, "whole", 0, "tokens the K/V store holds; 0 = by kv-fraction", "N",
        low=0,
    ),
    Setting("max-rows", MEMORY, "whole", 32, "requests running at once", "N", low=1),
    Setting(
        "max-context", MEMORY, "whole", 0, "tokens a request may have; 0 = the model's own", "N",
        low=0,
    ),
    Setting(
        "step-tokens", MEMORY, "whole", 512, "tokens of all rows in one step", "N", low=16
    ),
    Setting(
        "speculation", SPECULATION, "text", "auto",
        "auto: what pays off; off: none; max: as much as allowed", choices=("auto", "off", "max"),
    ),
    Setting(
        "max-nodes", SPECULATION, "whole", 32, "guesses per request and step at most", "N", low=0
    ),
    Setting(
        "draft-taps", KERNELS, "text", "",
        "layers' boundaries a head reads, if not what its file says, as 2,15,27", "LIST",
    ),
    Setting("host", SERVER, "text", "127.0.0.1", "address to listen on", "ADDRESS"),
    Setting("port", SERVER, "port", 8000, "HTTP and WebSocket port; 0 = a free one", "N"),
    Setting(
        "grpc-port", SERVER, "port", 50051, "gRPC port; 0 = a free one, off = none", "N", off=True
    ),
    Setting("model-name", SERVER, "text", "", "name clients see; default: target", "NAME"),
    Setting(
        "allow-origins", SERVER, "list", (),
        "web page that may connect besides the server's own; repeat for more; * = any", "ORIGIN",
    ),
    Setting(
        "drain-s", SERVER, "number", 30.0,
        "seconds running requests get to finish after SIGTERM", "S", low=0, high=86400,
    ),
    Setting(
        "programs", TRANSPORTS, "text", "", "folder of compiled programs to offer (*.graph)", "DIR"
    ),
    Setting(
        "program-functions", TRANSPORTS, "text", "",
        "Python module whose functions they may call", "MODULE",
    ),
    Setting(
        "attention", KERNELS, "text", "auto",
        "attention: auto, torch, triton, flashinfer or flash-attn", "NAME",
    ),
    Setting(
        "cuda-graphs", KERNELS, "text", "auto",
        "record steps as graphs at start, where the GPU and attention allow it",
        choices=("auto", "off"),
    ),
    Setting(
        "activations", KERNELS, "text", "16",
        "bits of activations in compiled CPU kernels: 8 is quicker and less exact",
        choices=("16", "8"),
    ),
    Setting(
        "kv-dtype", KERNELS, "text", "auto",
        "K and V in compiled CPU kernels: int8 holds nearly twice the tokens, less exactly",
        choices=("auto", "int8"),
    ),
    Setting(
        "adapt-folder", ADAPTING, "text", "",
        "keep token ids of this server's traffic there, for `spec-serve train --adapt`, and serve "
        "the better head it makes; empty = keep nothing", "DIR",
    ),
    Setting("adapt-mib", ADAPTING, "whole", 64, "MiB of traffic kept at most", "N", low=1),
    Setting(
        "adapt-salted", ADAPTING, "switch", False, "keep requests with a cache salt too"
    ),
    Setting("page", TRANSPORTS, "text", "on", "the chat page at /", choices=("on", "off")),
    Setting(
        "reflection", TRANSPORTS, "text", "on", "gRPC reflection", choices=("on", "off")
    ),
    Setting(
        "ws-impl", TRANSPORTS, "text", "picows", "WebSocket implementation",
        choices=("picows", "websockets"),
    ),
    Setting(
        "engine-process", TRANSPORTS, "switch", False, "run the engine in a process of its own"
    ),
    Setting(
        "engine-hang-s", TRANSPORTS, "number", 300.0,
        "seconds an engine process may make no progress before it is killed; 0 = any", "S",
        low=0, high=86400,
    ),
    Setting(
        "resume-window-s", TRANSPORTS, "number", 60.0,
        "seconds a resumable generation outlives its dropped WebSocket", "S", low=0, high=3600,
    ),
    Setting(
        "api-keys", SECURITY, "list", (),
        "key a client must present; repeat for more; better as a variable or in a file", "KEY",
        secret=True, filled=True,
    ),
    Setting(
        "api-key-file", SECURITY, "text", "", "file of keys, a line NAME:SHA256 each", "FILE",
        filled=True,
    ),
    Setting(
        "admin-key", SECURITY, "text", "", "key that may also administer", "KEY",
        secret=True, filled=True,
    ),
    Setting(
        "anonymous", SECURITY, "switch", False, "serve without keys on more than loopback"
    ),
    Setting("tls-cert", SECURITY, "text", "", "certificate chain (PEM) for all ports", "FILE"),
    Setting("tls-key", SECURITY, "text", "", "its private key (PEM)", "FILE"),
    Setting(
        "tls-client-ca", SECURITY, "text", "",
        "authorities (PEM) one of which must have signed the client's certificate", "FILE",
    ),
    Setting("max-queue", LIMITS, "whole", 256, "requests that may wait; 0 = no bound", "N", low=0),
    Setting(
        "max-queue-tokens", LIMITS, "whole", 0, "prompt tokens that may wait; 0 = no bound", "N",
        low=0,
    ),
    Setting(
        "first-token-timeout-s", LIMITS, "number", 0.0,
        "seconds within which a request must have its first token; 0 = any", "S",
        low=0, high=86400,
    ),
    Setting(
        "total-timeout-s", LIMITS, "number", 0.0,
        "seconds a request may take; 0 = any", "S", low=0, high=86400,
    ),
    Setting(
        "key-parallel", LIMITS, "whole", 0, "requests at once per key; 0 = any", "N", low=0
    ),
    Setting(
        "key-requests-per-minute", LIMITS, "whole", 0, "per key; 0 = any", "N", low=0
    ),
    Setting(
        "key-tokens-per-minute", LIMITS, "whole", 0,
        "prompt and completion tokens per key; 0 = any", "N", low=0,
    ),
    Setting(
        "metrics-compat", METRICS, "text", "none", "also metrics under others' names",
        choices=("none", "vllm"),
    ),
    Setting(
        "otel-endpoint", METRICS, "text", "", "where traces go (OTLP over HTTP); empty = nowhere",
        "URL",
    ),
    Setting(
        "kv-events", METRICS, "text", "",
        "ZMQ address for cache events, such as tcp://127.0.0.1:5557, or grpc for subscribers by "
        "gRPC alone; they tell prompts' tokens",
        "ADDRESS",
    ),
    Setting(
        "kv-events-replay", METRICS, "text", "", "ZMQ address to replay cache events from",
        "ADDRESS",
    ),
    Setting(
        "log-format", LOGGING, "text", "text", "form of the log lines", choices=("text", "json")
    ),
    Setting(
        "threads", PROCESS, "whole", 0, "processor threads to compute with; 0 = one per core", "N",
        low=0, high=4096,
    ),
    Setting("quiet", PROCESS, "switch", False, "no progress, warnings only"),
)  # fmt: skip
BY_KEY = {setting.key: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A value and its origin: "flag --port", "variable SPEC_SERVE_PORT", "file x.toml" or
    "default"."""

    value: Value
    origin: str


class Settings:
    """Every setting with its value; made by `settle`. notes: what a user should be told."""

    def __init__(self, chosen: Mapping[str, Chosen], notes: Sequence[str] = ()) -> None:
        self._chosen = dict(chosen)
        self.notes = tuple(notes)

    def __getitem__(self, key: str) -> Any:
        return self._chosen[key].value

    def origin(self, key: str) -> str:
        """Where the value of `key` comes from."""
        return self._chosen[key].origin

    def __iter__(self) -> Iterator[tuple[Setting, Chosen]]:
        return ((setting, self._chosen[setting.key]) for setting in SETTINGS)

    def engine_fields(self) -> dict[str, Any]:
        """Keyword arguments of spec/assemble.py's EngineOptions. SettingError without a target."""
        if not self["target"]:
            raise SettingError("target: say which model to use, for example --target MODEL")
        fields = {s.field: chosen.value for s, chosen in self if s.group in ENGINE_GROUPS}
        blocks = BLOCK_TOKENS if self["kv-events"] else 0
        return {**fields, "block_events": blocks, "adapt_folder": self["adapt-folder"]}

    def serve_settings(self) -> ServeSettings:
        """What the server needs."""
        shared = {field.name for field in fields(ServeSettings)}
        values: dict[str, Any] = {s.field: c.value for s, c in self if s.field in shared}
        switches = {name: values[name] == "on" for name in ("page", "reflection")}
        return ServeSettings(**{**values, **switches})


def settle(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Decide every setting. flags: by key, only those given, as text (a list for "list").

    Raises SettingError for a bad value, an unreadable file or a key the file should not have.
    """
    held = read_file(file) if file is not None else {}
    chosen: dict[str, Chosen] = {}
    notes: list[str] = []
    for setting in SETTINGS:
        variable = environ.get(setting.variable)
        if variable is not None and setting.kind == "port" and variable.startswith("tcp://"):
            # Kubernetes describes a service named spec-serve to its pods by this very variable.
            notes.append(f"{setting.variable}={variable} describes a service and is ignored")
            variable = None
        raw: object
        if setting.key in flags:
            raw, origin = flags[setting.key], f"flag {setting.flag}"
        elif variable is not None:
            raw, origin = variable, f"variable {setting.variable}"
        elif setting.key in held:
            raw, origin = held[setting.key], f"file {file}"
        else:
            chosen[setting.key] = Chosen(setting.default, "default")
            continue
        chosen[setting.key] = Chosen(parse(setting, raw, origin), origin)
    return Settings(chosen, notes)


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, all of them known. SettingError names what is wrong."""
    try:
        held = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"config: {path}: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise SettingError(f"config: {path} is not TOML: {error}") from error
    for key in held:
        if key not in BY_KEY:
            near = difflib.get_close_matches(key.replace("_", "-"), BY_KEY, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingError(f"config: {path}: unknown key {key!r}{hint}")
    return held


def parse(setting: Setting, raw: object, origin: str) -> Value:
    """`raw`, text or a TOML value, as the setting's kind. SettingError names key and origin."""

    def wrong(wanted: str) -> SettingError:
        got = "" if setting.secret else f", got {raw!r}"
        return SettingError(f"{setting.key}: must be {wanted}{got} ({origin})")

    match setting.kind:
        case "text":
            if not isinstance(raw, str):
                raise wrong("text")
            if setting.choices and raw not in setting.choices:
                raise wrong("one of " + ", ".join(setting.choices))
            if setting.filled and not raw.strip():
                raise wrong("not empty")
            return raw
        case "switch":
            words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
            value = words.get(raw.lower()) if isinstance(raw, str) else raw
            if not isinstance(value, bool):
                raise wrong("true or false")
            return value
        case "list":
            parts = raw.split(",") if isinstance(raw, str) else raw
            if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
                raise wrong("a list of texts")
            if setting.filled and not all(part.strip() for part in parts or [""]):
                raise wrong("a list of keys, none of them empty")
            return tuple(part.strip() for part in parts if part.strip())
        case "port":
            if setting.off and raw == "off":
                return None
            wanted = "a port from 0 to 65535" + (" or off" if setting.off else "")
            port = _whole(raw)
            if port is None or not 0 <= port <= 65535:
                raise wrong(wanted)
            return port
        case "whole" | "number":
            number = _whole(raw) if setting.kind == "whole" else _number(raw)
            what = "a whole number" if setting.kind == "whole" else "a number"
            bounds = ""
            if setting.low > -math.inf:
                bounds = f" of at least {setting.low:g}"
            if setting.high < math.inf:
                bounds = f" from {setting.low:g} to {setting.high:g}"
            if number is None or not setting.low <= number <= setting.high:
                raise wrong(what + bounds)
            return number


def _whole(raw: object) -> int | None:
    if isinstance(raw, str):
        digits = raw.strip().removeprefix("-")
        return int(raw) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _number(raw: object) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        return None
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None
