"""Who may use the server: keys, held as hashes, and what their holders may do.

No key configured, on loopback: everybody who reaches the server is LOCAL. Knows no transport; each
asks `check` with what its client presented. Keys are compared as hashes in constant time, all of
them always. A file of keys has a line `NAME:SHA256` or `NAME:KEY` each, and # begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spec_serve.api.ports import is_loopback
from spec_serve.api.server_settings import ServeSettings
from spec_serve.spec.request import RequestError

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
PREFIX = "sk-spec-"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

Held = tuple[str, str]  # name, sha256 hex


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. name: of the key, for logs and limits, never the key. admin: flush and friends.

    digest: of the key that was presented, "" for none; two keys of one name are the same principal.
    """

    name: str
    admin: bool = False
    digest: str = field(default="", repr=False, compare=False)


LOCAL = Principal("local", admin=True)
ANONYMOUS = Principal("anonymous")


def hashed(key: str) -> str:
    """The form in which keys are held: sha256 in hex. Keys are random and long, not passwords."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def fresh_key() -> str:
    """A new key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


class Keys:
    """The keys of a server. keys: (name, sha256 hex); admin: those that may administer too.

    otherwise: who presents no key, or none that is known; None = is refused. Without any keys it
    is LOCAL. file: held keys are taken from it too, and again by `reread`. Raises ValueError.
    """

    def __init__(
        self,
        keys: Iterable[Held] = (),
        admin: Iterable[Held] = (),
        otherwise: Principal | None = None,
        file: str = "",
    ) -> None:
        self._own, self._admin, self._file = tuple(keys), tuple(admin), file
        self._otherwise = otherwise
        self._held: list[tuple[str, Principal]] = []
        self.reread()

    @property
    def needed(self) -> bool:
        """Whether clients must present a key."""
        return self._otherwise is None and bool(self._held)

    def reread(self) -> int:
        """Read the file again; how many keys there are. ValueError leaves all as it was."""
        keys = [*self._own, *(read_file(self._file) if self._file else ())]
        names: dict[str, str] = {}
        digests: dict[str, str] = {}
        for name, digest in (*keys, *self._admin):
            if name in names:
                raise ValueError(f"{self._where}: the name {name!r} is there twice")
            if digest in digests:
                raise ValueError(f"{self._where}: {name} and {digests[digest]} are the same key")
            names[name], digests[digest] = digest, name
        if self._file and not keys:
            raise ValueError(f"api-key-file: {self._file} holds no key")
        self._held = [(digest, Principal(name, False, digest)) for name, digest in keys]
        self._held += [(digest, Principal(name, True, digest)) for name, digest in self._admin]
        return len(self._held)

    def knows(self, who: Principal) -> bool:
        """Whether what let them in still does: their key is in force, or they needed none."""
        return not who.digest or any(who.digest == digest for digest, _ in self._held)

    @property
    def _where(self) -> str:
        return "api-key-file" if self._file else "api-keys"

    def check(self, presented: str | None) -> Principal:
        """Whose key this is. Raises RequestError with code unauthorized."""
        if not self._held:
            return self._otherwise or LOCAL
        found = None
        if presented is not None and 0 < len(presented) <= MAX_KEY_CHARS:
            digest = hashed(presented)
            for held, principal in self._held:
                if hmac.compare_digest(held, digest):
                    found = principal
        found = found or self._otherwise
        if found is None:
            told = "this API key is not known here" if presented else "an API key is needed"
            raise RequestError("", told, "unauthorized")
        return found

    def check_admin(self, presented: str | None) -> Principal:
        """Like check, for administration. Raises RequestError: unauthorized or forbidden."""
        found = self.check(presented)
        if not found.admin:
            raise RequestError("", "this needs an admin key", "forbidden")
        return found


OPEN = Keys()


def configured(settings: ServeSettings) -> Keys:
    """The keys of these settings. Raises ValueError naming the setting that won't do.

    Beyond loopback something must be said: keys, or `anonymous`.
    """
    file, loopback = settings.api_key_file, is_loopback(settings.host)
    keys = [
        (f"key-{i}", _accepted("api-keys", f"key {i}", key))
        for i, key in enumerate(settings.api_keys, 1)
    ]
    admin = []
    if settings.admin_key:
        admin.append(("admin", _accepted("admin-key", "it", settings.admin_key)))
    if settings.anonymous and (keys or file):
        other = "api-keys" if keys else "api-key-file"
        raise ValueError(f"anonymous: {other} is set too; either keys are needed or they are not")
    if not (keys or file or settings.anonymous or loopback):
        raise ValueError(
            f"host: {settings.host or 'every address'} can be reached from other machines; set "
            "api-keys or api-key-file, or say --anonymous to serve whoever comes"
        )
    otherwise = None
    if settings.anonymous:
        otherwise = LOCAL if loopback and not admin else ANONYMOUS
    return Keys(keys, admin, otherwise, file)


def read_file(path: str) -> list[Held]:
    """The keys of a file, as (name, sha256 hex). ValueError names file and line, never a key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"api-key-file: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"api-key-file: {path} is not UTF-8 text") from None
    found: list[Held] = []
    for number, line in enumerate(text.splitlines(), 1):
        said = line.strip()
        if not said or said.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in said.partition(":"))
        where = f"{path}, line {number}"
        if not colon or not _NAME.fullmatch(name):
            raise ValueError(f"api-key-file: {where}: must be NAME:SHA256 or NAME:KEY")
        if _DIGEST.fullmatch(key):
            found.append((name, key.lower()))
        else:
            found.append((name, _accepted("api-key-file", where, key)))
    return found


def _accepted(setting: str, which: str, key: str) -> str:
    """The hash of a key that will do."""
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ValueError(
            f"{setting}: {which} has {len(key)} characters, but a key has {MIN_KEY_CHARS} to "
            f"{MAX_KEY_CHARS}; `spec-serve keys new NAME` makes one"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{setting}: {which} has characters that a header can't carry")
    return hashed(key)
