"""Keys: what is taken as one, from where, who it is; and settings that would guard nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import auth
from spec_serve.api.auth import ANONYMOUS, LOCAL, OPEN, Keys, Principal, configured, hashed
from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.settings import SettingError, settle
from spec_serve.spec.request import RequestError

ALICE, BOB, ROOT = "alice-" + "a" * 32, "bob-" + "b" * 32, "root-" + "r" * 32


def keys(**settings: Any) -> Keys:
    return configured(ServeSettings(**settings))


def code(held: Keys, presented: str | None, admin: bool = False) -> str:
    """The principal's name, or the code of the refusal."""
    try:
        return (held.check_admin if admin else held.check)(presented).name
    except RequestError as error:
        return error.code


def test_whoever_has_a_key_is_known_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who\n\nalice: {hashed(ALICE)}\nbob:{BOB}\n")
    held = keys(api_key_file=str(file), admin_key=ROOT, api_keys=("third-" + "c" * 20,))
    assert held.needed
    assert held.check(ALICE) == Principal("alice") and held.check(BOB) == Principal("bob")
    assert held.check("third-" + "c" * 20) == Principal("key-1")
    assert held.check(ROOT) == held.check_admin(ROOT) == Principal("admin", admin=True)
    assert code(held, ALICE, admin=True) == "forbidden"
    close = (ALICE[:-1], ALICE + "a", hashed(ALICE), ALICE.upper())
    for wrong in (None, "", *close, "x" * 513, "\ud800" * 20, "ü" * 9):
        assert code(held, wrong) == code(held, wrong, admin=True) == "unauthorized"


def test_without_keys_loopback_is_open_and_the_rest_is_refused() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        held = keys(host=host)
        assert not held.needed and held.check_admin(None) == held.check("any key") == LOCAL
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="host: .*api-keys"):
            keys(host=host)
        held = keys(host=host, anonymous=True)
        assert not held.needed and held.check(None) == held.check("any key") == ANONYMOUS
        assert code(held, None, admin=True) == "forbidden"
        assert keys(host=host, api_keys=(ALICE,)).needed


def test_anonymous_users_beside_an_administrator() -> None:
    held = keys(anonymous=True, admin_key=ROOT)
    assert code(held, None) == code(held, "unknown") == "anonymous" and not held.needed
    assert code(held, None, admin=True) == "forbidden" and code(held, ROOT, admin=True) == "admin"
    held = keys(admin_key=ROOT)
    assert held.needed and code(held, None) == "unauthorized" and code(held, ROOT) == "admin"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"api_keys": ("",)}, "api-keys: key 1 has 0"),
        ({"api_keys": (ALICE, "short")}, "api-keys: key 2 has 5"),
        ({"api_keys": (ALICE, ALICE)}, "api-keys: key-2 and key-1 are the same"),
        ({"api_keys": ("a key with some spaces",)}, "api-keys: key 1 has characters"),
        ({"api_keys": ("ü" * 20,)}, "api-keys: key 1 has characters"),
        ({"api_keys": ("x" * 513,)}, "api-keys: key 1 has 513"),
        ({"admin_key": "short"}, "admin-key: it has 5"),
        ({"admin_key": ALICE, "api_keys": (ALICE,)}, "the same key"),
        ({"api_key_file": "/nowhere/keys"}, "api-key-file: /nowhere/keys: No such file"),
        ({"api_key_file": "/"}, "api-key-file: /: Is a directory"),
        ({"api_keys": (ALICE,), "anonymous": True}, "anonymous: api-keys is set too"),
    ],
)
def test_keys_that_would_guard_nothing_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        keys(**settings)
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no key"),
        ("# nobody\n", "holds no key"),
        ("alice:\n", "line 1 has 0"),
        ("alice\n", "line 1: must be NAME"),
        ("alice:short\n", "line 1 has 5"),
        (f"\nal ice:{ALICE}\n", "line 2: must be NAME"),
        (f":{ALICE}\n", "line 1: must be NAME"),
        (f"alice:{ALICE}\nalice:{BOB}\n", "the name 'alice' is there twice"),
        (f"alice:{ALICE}\nbob:{ALICE}\n", "bob and alice are the same key"),
        (f"alice:{hashed(ALICE)}\nbob:{ALICE}\n", "the same key"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_files_of_keys_that_are_wrong(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"api-key-file: .*{named}") as caught:
        keys(api_key_file=str(file))
    assert ALICE not in str(caught.value)


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{hashed(ALICE)}\n")
    held = keys(api_key_file=str(file), admin_key=ROOT)
    file.write_text(f"bob:{hashed(BOB)}\n")
    assert code(held, BOB) == "unauthorized"
    assert held.reread() == 2
    assert [code(held, key) for key in (ALICE, BOB, ROOT)] == ["unauthorized", "bob", "admin"]
    file.write_text("alice:short\n")
    with pytest.raises(ValueError, match="api-key-file"):
        held.reread()
    file.unlink()
    with pytest.raises(ValueError, match="api-key-file"):
        held.reread()
    assert code(held, BOB) == "bob"


def test_every_key_is_compared_whole_whatever_is_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(held: str, digest: str) -> bool:
        compared.append((held, digest))
        return held == digest

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    held = keys(api_keys=(ALICE, BOB), admin_key=ROOT)
    for presented in (ALICE, BOB, ROOT, "unknown", ALICE[:-1]):
        compared.clear()
        code(held, presented)
        digest = hashlib.sha256(presented.encode()).hexdigest()
        assert compared == [(hashed(key), digest) for key in (ALICE, BOB, ROOT)]


@pytest.mark.parametrize("name", ["API_KEYS", "ADMIN_KEY", "API_KEY_FILE"])
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_variable_is_not_no_key(name: str, empty: str) -> None:
    key = name.lower().replace("_", "-")
    with pytest.raises(SettingError, match=f"{key}: must be .*empty"):
        settle({}, {f"SPEC_SERVE_{name}": empty})
    with pytest.raises(SettingError, match=key):
        settle({key: [empty] if name == "API_KEYS" else empty}, {})
    with pytest.raises(SettingError, match="api-keys"):
        settle({}, {"SPEC_SERVE_API_KEYS": f"{ALICE},,{BOB}"})
    assert settle({}, {"SPEC_SERVE_API_KEYS": f"{ALICE}, {BOB}"})["api-keys"] == (ALICE, BOB)


def spec_serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "spec_serve.api.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_keys_are_made_by_a_command(tmp_path: Path) -> None:
    made = [spec_serve("keys", "new", "alice") for _ in range(2)]
    lines = [one.stdout for one in made]
    assert lines[0] != lines[1] and not any(one.returncode for one in made)
    file = tmp_path / "keys"
    file.write_text(lines[0])
    key = made[0].stderr.removeprefix("key: ").strip()
    assert keys(api_key_file=str(file)).check(key) == Principal("alice")
    assert key not in lines[0]
    wrong = spec_serve("keys", "new", "two words")
    assert wrong.returncode == 2 and "NAME: must be" in wrong.stderr


def test_a_server_that_would_be_open_is_not_started() -> None:
    for words, named in (
        (("--host", "0.0.0.0"), "host: 0.0.0.0 can be reached"),
        (("--api-keys", "short"), "api-keys: key 1 has 5"),
        (("--admin-key", ""), "admin-key: must be not empty"),
    ):
        found = spec_serve("--target", "nowhere", "--port", "0", "--grpc-port", "0", *words)
        assert found.returncode == 2 and named in found.stderr, found.stderr


def test_keys_are_never_shown() -> None:
    words = ("--api-keys", ALICE, "--admin-key", ROOT)
    for form in ((), ("--json",)):
        found = spec_serve("config", "show", *form, *words)
        assert found.returncode == 0 and ALICE not in found.stdout and ROOT not in found.stdout
        assert found.stdout.count("(hidden)") == 2
    assert OPEN.check(None) == LOCAL and ALICE not in repr(keys(api_keys=(ALICE,)))
