"""Who may use the server: keys, held as hashes, and what their holders may do.

No key configured: everybody who reaches the server is LOCAL. Knows no transport; each asks `check`
with what its client presented. Keys are compared as hashes in constant time, all of them always.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from spec_serve.spec.request import RequestError

MAX_KEY_CHARS = 512


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. name: of the key, for logs and limits, never the key. admin: flush and friends."""

    name: str
    admin: bool = False


LOCAL = Principal("local", admin=True)


def hashed(key: str) -> str:
    """The form in which keys are held: sha256 in hex. Keys are random and long, not passwords."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Keys:
    """The keys of a server. keys: (name, sha256 hex); admin: those that may administer too."""

    def __init__(
        self, keys: Iterable[tuple[str, str]] = (), admin: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._held = [(digest, Principal(name)) for name, digest in keys]
        self._held += [(digest, Principal(name, admin=True)) for name, digest in admin]

    @property
    def needed(self) -> bool:
        """Whether clients must present a key."""
        return bool(self._held)

    def check(self, presented: str | None) -> Principal:
        """Whose key this is. Raises RequestError with code unauthorized."""
        if not self._held:
            return LOCAL
        if presented is None or not 0 < len(presented) <= MAX_KEY_CHARS:
            raise RequestError("", "an API key is needed", "unauthorized")
        digest = hashed(presented)
        found = None
        for held, principal in self._held:
            if hmac.compare_digest(held, digest):
                found = principal
        if found is None:
            raise RequestError("", "this API key is not known here", "unauthorized")
        return found

    def check_admin(self, presented: str | None) -> Principal:
        """Like check, for administration. Raises RequestError: unauthorized or forbidden."""
        found = self.check(presented)
        if not found.admin:
            raise RequestError("", "this needs an admin key", "forbidden")
        return found


OPEN = Keys()
