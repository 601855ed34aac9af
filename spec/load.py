"""From what an operator writes to an engine: options checked, models found, loaded and paired.

The one place where names of models become parts of an engine; spec/assemble.py puts them together.
Options are checked, and target and draft compared, before anything large is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from spec_serve.draft.base import Drafter
from spec_serve.draft.make import parse_draft, parse_taps
from spec_serve.draft.standalone import real_vocabulary
from spec_serve.kernels.base import pick_backend
from spec_serve.kernels.cpu.quantise import QUANTISERS
from spec_serve.spec.adapt import ExchangeableHead
from spec_serve.spec.adapt_link import adapted
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.drafting import DraftLoader
from spec_serve.spec.engine import Engine
from spec_serve.target.gguf import headers_kept
from spec_serve.target.hub import resolve
from spec_serve.target.model import Model, load_model
from spec_serve.target.native import load_native, unfit
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer
from spec_serve.target.weights import open_checkpoint

Progress = Callable[[str, float], None]  # (what is going on, share done 0..1)

QUANTISATIONS = ("none", *(kind.lower() for kind in QUANTISERS))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _quiet(what: str, share: float) -> None:
    return None


def _share(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done / max(total, 1))


def check_options(options: EngineOptions) -> None:
    """Raise ValueError naming the first option that is wrong."""
    for name, low in (("max_rows", 1), ("step_tokens", 16), ("max_nodes", 0), ("kv_tokens", 0)):
        value = getattr(options, name)
        if value < low:
            raise ValueError(f"{name.replace('_', '-')}: must be at least {low}, got {value}")
    if options.max_context < 0 or options.max_context == 1:
        raise ValueError(f"max-context: must be at least 2, got {options.max_context}")
    if not 0.0 < options.kv_fraction <= 0.95:
        raise ValueError(f"kv-fraction: must be in (0, 0.95], got {options.kv_fraction}")
    if options.speculation not in ("auto", "off", "max"):
        raise ValueError(f"speculation: must be auto, off or max, got {options.speculation!r}")
    if options.activations not in ("16", "8"):
        raise ValueError(f"activations: must be 16 or 8, got {options.activations!r}")
    if options.kv_dtype not in ("auto", "int8"):
        raise ValueError(f"kv-dtype: must be auto or int8, got {options.kv_dtype!r}")
    if options.cuda_graphs not in ("auto", "off"):
        raise ValueError(f"cuda-graphs: must be auto or off, got {options.cuda_graphs!r}")
    parse_taps(options.draft_taps)
    if options.quantize not in QUANTISATIONS:
        known = ", ".join(QUANTISATIONS)
        raise ValueError(f"quantize: must be one of {known}, got {options.quantize!r}")
    if options.dtype != "auto" and options.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"dtype: must be auto or one of {known}, got {options.dtype!r}")


def pick_device(name: str) -> torch.device:
    """The device meant: "auto" = the first GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is not a device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no GPU here")
    return device


def _load(
    path: Path, options: EngineOptions, device: torch.device, dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> Model:  # fmt: skip
    """A model as compiled code where it can be: quantised, on a CPU, and no dtype asked for."""
    checkpoint = open_checkpoint(path)
    try:
        wanted = options.quantize != "none"
        if device.type == "cpu" and options.dtype == "auto" and options.attention == "auto":
            reason = unfit(checkpoint, options.quantize)
            if not reason:
                return load_native(
                    checkpoint, 0, options.quantize, progress,
                    activations=int(options.activations),
                    kv=torch.int8 if options.kv_dtype == "int8" else torch.float16,
                )  # fmt: skip
            if wanted:
                raise ValueError(f"quantize: {path.name} can't be held so: {reason}")
        elif wanted:
            raise ValueError("quantize: only on a CPU, with dtype and attention left at auto")
        if options.kv_dtype != "auto":
            raise ValueError("kv-dtype: only compiled kernels on a CPU keep K and V as int8")
        return load_model(checkpoint, dtype, device, progress)
    finally:
        checkpoint.close()


def _no_model(path: Path) -> Model:
    raise ValueError(f"{path} is a whole model, not a head")


@headers_kept()
def build_engine(options: EngineOptions, progress: Progress = _quiet) -> tuple[Engine, Tokenizer]:
    """Load what `options` names. Raises ValueError (with the option's name) for what can't be."""
    check_options(options)
    choice = parse_draft(adapted(options.draft, options.adapt_folder))
    device = pick_device(options.device)
    dtype = DTYPES.get(options.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    pick_backend(device, options.attention)
    shown = progress is not _quiet
    path = resolve(options.target, progress=shown)
    progress("tokenizer", 0.0)
    tokenizer = load_tokenizer(path)
    loader = DraftLoader(choice, options, path, tokenizer, device, dtype, shown)
    target = _load(path, options, device, dtype, _share(progress, "target"))
    drafter = None
    if options.speculation != "off" and options.max_nodes:
        drafter = loader.drafter(
            target,
            lambda found: _load(found, options, device, dtype, _share(progress, "draft")),
        )
    told = ""
    if drafter is not None and drafter.taps:
        progress("trying the head", 0.0)
        told = loader.rehearse(target, drafter).told(drafter.name)
    following: ExchangeableHead | None = None
    if options.adapt_folder and told and choice.model is not None and device.type == "cpu":
        assert drafter is not None

        def another(head: Path) -> Drafter | None:
            named = replace(choice, model=str(head), nextn=False)
            found = DraftLoader(named, options, path, tokenizer, device, dtype, False)
            return found.drafter(target, _no_model)

        drafter = following = ExchangeableHead(drafter, Path(options.adapt_folder), another)
    progress("measuring", 0.0)
    engine = assemble(
        target,
        options,
        drafter=drafter,
        lookup=choice.lookup,
        vocab_size=real_vocabulary(tokenizer),
        spelling=tokenizer,
        draft_told=told,
        progress=lambda share: progress("recording graphs", share),
    )
    if following is not None:
        following.exchanged = engine.flush
    progress("ready", 1.0)
    return engine, tokenizer
