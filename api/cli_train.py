"""`spec-serve train`: a drafting head made for a target, from prompts to files ready to serve.

Four stages in one folder, each of which goes on where it was broken off: the target answers
prompts, its features are captured, the head is trained, and the best one is exported. Here the
engine answers and progress is drawn; what the stages do is known in draft/train.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_serve.api.cli_flags import Parser, fail, read_settings, say
from spec_serve.api.settings import SettingError, Settings

if TYPE_CHECKING:
    from spec_serve.draft.train.acceptance import Acceptance
    from spec_serve.draft.train.answers import Answer, Task
    from spec_serve.draft.train.loop import Told
    from spec_serve.draft.train.session import Folder, Ready
    from spec_serve.draft.train.start import Start
    from spec_serve.spec.engine import Engine
    from spec_serve.target.tokenizer import Tokenizer

STAGES = ("answers", "capture", "train", "export")
DRAFT_VOCAB, PAIRS = 8192, 2_000_000
FADES = {"eagle3": (3, 0.8), "block": (7, 0.87)}
"""By kind: steps or places by default, and what each weighs against the one before."""
Update = Callable[[float, str], None]  # (share done, what to say)


def parser() -> Parser:
    """The flags of `train`."""
    made = Parser(
        "spec-serve train",
        "Train a drafting head for a target: the target answers prompts, its hidden states are\n"
        "captured, the head is trained on them and exported. Interrupt it and run it again: it\n"
        "goes on. The prompts are a file of JSON lines with `prompt` (and `source`).",
    )
    add = made.add_argument_group("model").add_argument
    # The names of settings; what is given goes through the table like everywhere else.
    suppressed: dict[str, Any] = {"default": argparse.SUPPRESS}
    add("--target", metavar="MODEL", help="model to train for: path, short name or hub id",
        **suppressed)  # fmt: skip
    add("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N", **suppressed)
    add("--threads", metavar="N", help="processor threads; 0 = one per core", **suppressed)
    add("--max-rows", metavar="N", help="prompts answered at once (default: 32)", **suppressed)
    add("--quiet", action="store_const", const="true", help="no progress", **suppressed)
    add("--config", metavar="FILE", help="TOML file of settings")
    add = made.add_argument_group("data").add_argument
    add("--folder", metavar="DIR", help="where everything is kept (default: in the cache)")
    add("--stages", metavar="LIST", default=",".join(STAGES),
        help="which of answers, capture, train, export (default: all)")  # fmt: skip
    add("--prompts", metavar="FILE", action="append", default=[], help="JSON lines of prompts")
    add("--code-prompts", action="store_true",
        help="also prompts about Python's own library")  # fmt: skip
    add("--adapt", metavar="HEAD",
        help="train this head (folder or short name) further, and export it only if it got better")  # fmt: skip # noqa: E501
    add("--traffic", metavar="FILE",
        help="what the target said already: JSON lines of `messages` and `answer`")  # fmt: skip
    add("--from", dest="source", metavar="DIR",
        help="with --adapt: learn from the traffic a server kept there (its --adapt DIR), and let"
        " that server have the head if it is measured better")  # fmt: skip
    add("--answers", type=int, default=0, metavar="N", help="answers wanted; 0 = all prompts")
    add("--max-tokens", type=int, default=220, metavar="N", help="of an answer (default: 220)")
    add("--max-prompt", type=int, default=420, metavar="N",
        help="longer prompts are left out (default: 420 tokens)")  # fmt: skip
    add("--max-gib", type=float, default=4.0, metavar="G",
        help="captures may take so much disk (default: 4)")  # fmt: skip
    add = made.add_argument_group("training").add_argument
    add("--pairs", type=int, default=0, metavar="N",
        help="tokens trained in all, epochs counted (default: 2000000, or thrice the traffic)")  # fmt: skip # noqa: E501
    add("--kind", choices=tuple(FADES), default="eagle3",
        help="an EAGLE-3 head, or a drafter that guesses a block in one pass (default: eagle3)")  # fmt: skip # noqa: E501
    add("--block-layers", type=int, default=2, metavar="N", help="of such a drafter (default: 2)")
    add("--unrolled", type=int, default=0, metavar="N",
        help="steps unrolled, or guesses of a block (default: 3, or 7)")  # fmt: skip
    add("--batch-pairs", type=int, default=512, metavar="N", help="of a forward (default: 512)")
    add("--gather", type=int, default=1, metavar="N",
        help="forwards whose gradients make a step (default: 1)")  # fmt: skip
    add("--learning-rate", type=float, default=2e-4, metavar="R", help="highest (default: 2e-4)")
    add("--train-rows", action="store_true", help="also train the output rows")
    add("--candidates", type=int, default=2048, metavar="N",
        help="ids a batch's softmax is over, 0 = all (default: 2048)")  # fmt: skip
    add("--draft-vocab", type=int, default=DRAFT_VOCAB, metavar="N",
        help=f"ids the head can guess (default: {DRAFT_VOCAB})")  # fmt: skip
    add("--every", type=int, default=100, metavar="N",
        help="steps from one evaluation to the next (default: 100)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="of everything random (default: 1)")
    add = made.add_argument_group("result").add_argument
    add("--out", metavar="DIR", help="where the head is written (default: FOLDER/head)")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the stages asked for; returns the exit code."""
    made = parser()
    given = made.parse_args(argv)
    stages = [stage.strip() for stage in given.stages.split(",")]
    if given.adapt and given.kind != "eagle3":
        return fail("adapt: block drafters can't be trained further here")
    if given.kind == "block" and given.block_layers < 1:
        return fail("block-layers: must be at least 1")
    if given.source and not given.adapt:
        return fail("from: say which head is served, with --adapt HEAD")
    if wrong := [stage for stage in stages if stage not in STAGES]:
        return fail(f"stages: {wrong[0]!r} is none of {', '.join(STAGES)}")
    try:
        settings = read_settings(given)
        settings.engine_fields()
    except SettingError as error:
        return fail(error)
    import torch

    from spec_serve.draft.train.session import Folder
    from spec_serve.target.hub import cache_dir

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    name = Path(str(settings["target"])).name
    folder = Folder(Path(given.folder) if given.folder else cache_dir().parent / "train" / name)
    try:
        if given.source:
            from spec_serve.api.adapt_run import adapt

            adapt(given, settings, _bar)
            return 0
        given.pairs = given.pairs or PAIRS
        for stage in stages:
            _run(stage, folder, given, settings)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    return 0


def _run(stage: str, folder: Folder, given: argparse.Namespace, settings: Settings) -> None:
    folder.root.mkdir(parents=True, exist_ok=True)
    quiet = bool(settings["quiet"])
    if stage == "answers":
        with _bar("answering", quiet) as update:
            answer(folder, given, settings, update)
    elif stage == "capture":
        with _bar("capturing", quiet) as update:
            capture(folder, given, settings, update)
    elif stage == "train":
        with _bar("training", quiet) as update:
            best = train(folder, given, settings, update)
        say(f"best head: {_told(best)}")
    else:
        if given.adapt and not folder.best.exists():
            say("the head did not get better; nothing is written")
            return
        size = export(folder, given, settings)
        say(f"head of {size / 1e6:.1f} MB in {_out(folder, given)}")


@contextlib.contextmanager
def _bar(what: str, quiet: bool) -> Iterator[Update]:
    """A live bar on a terminal, a line every half minute elsewhere."""
    if quiet:
        yield lambda share, said: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        said = TextColumn("{task.fields[said]}")
        columns = (TextColumn(what), BarColumn(), TimeRemainingColumn(), said)
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(what, total=1.0, said="")
            yield lambda share, said: bars.update(task, completed=share, said=said)
    else:
        last = [0.0]

        def tell(share: float, said: str) -> None:
            if time.monotonic() - last[0] >= 30.0:
                last[0] = time.monotonic()
                say(f"{what}: {share:.0%}, {said}")

        yield tell


def _told(found: Acceptance) -> str:
    depths = ", ".join(f"{share:.3f}" for share in found.depths)
    return f"{found.per_step:.3f} tokens per step with a chain; accepted to depths 1..: {depths}"


# ---- answers


def answer(folder: Folder, given: argparse.Namespace, settings: Settings, update: Update) -> int:
    """Let the target answer the prompts that lack an answer; returns how many were added."""
    from spec_serve.draft.train.answers import add_answers, make_tasks, read_answers, read_prompts
    from spec_serve.draft.train.code_prompts import code_prompts
    from spec_serve.spec.assemble import EngineOptions
    from spec_serve.spec.load import build_engine

    if given.traffic:
        return _told_before(folder, given, settings)
    prompts = [one for path in given.prompts for one in read_prompts(Path(path))]
    if given.code_prompts:
        prompts += code_prompts()
    if not prompts:
        raise ValueError("prompts: none; name a file with --prompts, or give --code-prompts")
    tasks = make_tasks(prompts, seed=given.seed)
    tasks = tasks[: given.answers or None]
    done = {one.number for one in read_answers(folder.answers)}
    left = [task for task in tasks if task.number not in done]
    if not left:
        return 0
    # Many rows at once leave nothing for guesses to gain.
    fields = {**settings.engine_fields(), "draft": "none", "speculation": "off"}
    engine, tokenizer = build_engine(EngineOptions(**fields))
    begun, tokens = time.monotonic(), 0

    def counted() -> Iterator[Answer]:
        nonlocal tokens
        for count, one in enumerate(
            answers(engine, tokenizer, left, given.max_prompt, given.max_tokens), 1
        ):
            tokens += len(one.answer)
            rate = tokens / max(time.monotonic() - begun, 1e-9)
            update(count / len(left), f"{tokens} tokens, {rate:.0f}/s")
            yield one

    return add_answers(folder.answers, counted())


def _told_before(folder: Folder, given: argparse.Namespace, settings: Settings) -> int:
    """Take answers over from a file of traffic; returns how many were added."""
    from spec_serve.draft.train.answers import (
        Answer,
        add_answers,
        held_out,
        read_answers,
        read_traffic,
    )
    from spec_serve.target.hub import resolve
    from spec_serve.target.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve(str(settings["target"]), progress=False))
    done = {one.number for one in read_answers(folder.answers)}

    def made() -> Iterator[Answer]:
        for number, (messages, text) in enumerate(read_traffic(Path(given.traffic))):
            if number in done:
                continue
            prompt = tokenizer.render_chat(messages)
            ids = tokenizer.encode(text)[: given.max_tokens]
            if len(prompt) <= given.max_prompt:
                held = held_out(messages[-1]["content"])
                yield Answer(number, "traffic", 0.0, held, prompt, ids)

    return add_answers(folder.answers, made())


def answers(
    engine: Engine, tokenizer: Tokenizer, tasks: Sequence[Task], max_prompt: int, max_tokens: int
) -> Iterator[Answer]:
    """Answers as they are finished, by an engine kept full; prompts that are too long are skipped.

    The tokens of a task follow from its number and temperature alone.
    """
    from spec_serve.draft.train.answers import Answer
    from spec_serve.spec.request import Delta, Finished, Request, Sampling, Speculation, Stopping

    waiting = iter(tasks)
    live: dict[str, tuple[Task, list[int], list[int]]] = {}

    def feed() -> None:
        for task in waiting:
            ids = tokenizer.render_chat([{"role": "user", "content": task.prompt}])
            if len(ids) > max_prompt:
                continue
            name = str(task.number)
            engine.submit(
                Request(
                    id=name,
                    prompt=ids,
                    sampling=Sampling(temperature=task.temperature, seed=task.number),
                    stopping=Stopping(max_tokens=max_tokens, eos=frozenset(tokenizer.eos_ids)),
                    speculation=Speculation(mode="off"),
                )
            )
            live[name] = (task, ids, [])
            if len(live) > engine.info.max_rows:
                return

    feed()
    while not engine.idle():
        for event in engine.step():
            if isinstance(event, Delta):
                live[event.request.id][2].extend(event.tokens)
            elif isinstance(event, Finished):
                task, ids, made = live.pop(event.request.id)
                if event.error is not None:
                    raise ValueError(f"prompt {task.number}: {event.error}")
                yield Answer(task.number, task.source, task.temperature, task.held, ids, made)
        if len(live) <= engine.info.max_rows:
            feed()


# ---- capture, train, export


def checkpoint(settings: Settings) -> Any:
    """The target's files, opened."""
    from spec_serve.target.hub import resolve
    from spec_serve.target.weights import open_checkpoint

    return open_checkpoint(resolve(str(settings["target"]), progress=not settings["quiet"]))


def _device(settings: Settings) -> Any:
    from spec_serve.spec.load import pick_device

    return pick_device(str(settings["device"]))


def _taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    from spec_serve.draft.eagle3 import default_taps
    from spec_serve.target.config import ModelConfig

    layers = ModelConfig.from_checkpoint_config(config).layers
    if layers < 6:
        raise ValueError(f"target: its {layers} layers are too few for a low, a middle and a high"
                         " one to be tapped")  # fmt: skip
    return default_taps(layers)


def _start(given: argparse.Namespace, config: Mapping[str, Any]) -> Start | None:
    """The head that is trained further, if one is named."""
    if not given.adapt:
        return None
    from spec_serve.draft.heads import find_head
    from spec_serve.draft.train.start import read_start
    from spec_serve.target.config import ModelConfig
    from spec_serve.target.weights import open_checkpoint

    head = open_checkpoint(find_head(given.adapt) or Path(given.adapt))
    return read_start(head, ModelConfig.from_checkpoint_config(config))


def capture(folder: Folder, given: argparse.Namespace, settings: Settings, update: Update) -> int:
    """Capture the features of all answers; returns how many sequences were added."""
    import torch

    from spec_serve.draft.train.answers import read_answers
    from spec_serve.draft.train.capture import Capturer
    from spec_serve.draft.train.session import capture as capture_all
    from spec_serve.spec.assemble import attention_for
    from spec_serve.target.model import load_model
    from spec_serve.target.native import load_native, unfit

    target, device = checkpoint(settings), _device(settings)
    if device.type == "cpu" and not unfit(target):
        # What will serve: features of the very weights and kernels the head will read from.
        model: Any = load_native(target)
    else:
        kind = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = load_model(target, kind, device)
    start = _start(given, target.config)
    taps = _taps(target.config) if start is None else start.shape.taps
    capturer = Capturer(model, attention_for(model), taps, given.max_prompt + given.max_tokens)
    total = sum(1 for _ in read_answers(folder.answers))
    begun = time.monotonic()

    def told(sequences: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - begun, 1e-9)
        update(sequences / max(total, 1), f"{tokens} tokens, {rate:.0f}/s")

    return capture_all(folder, capturer, int(given.max_gib * 2**30), told)


def prepare(folder: Folder, given: argparse.Namespace, settings: Settings) -> Ready:
    """The head, new or from the folder's checkpoint, with its data."""
    from spec_serve.draft.train.loop import TrainOptions
    from spec_serve.draft.train.session import prepare as prepared
    from spec_serve.target.hub import resolve
    from spec_serve.target.tokenizer import load_tokenizer

    target = checkpoint(settings)
    start = _start(given, target.config)
    steps, fade = FADES[given.kind]
    options = TrainOptions(
        pairs=given.pairs,
        unrolled=given.unrolled or steps,
        fade=fade,
        batch_pairs=given.batch_pairs,
        gather=given.gather,
        learning_rate=given.learning_rate,
        train_rows=given.train_rows,
        seed=given.seed,
    )
    options.check()
    return prepared(
        folder,
        target,
        options,
        taps=_taps(target.config) if start is None else start.shape.taps,
        draft_vocab=given.draft_vocab,
        start=start,
        block_layers=given.block_layers if given.kind == "block" else 0,
        ends=load_tokenizer(resolve(str(settings["target"]), progress=False)).eos_ids,
        candidates=given.candidates,
        device=_device(settings),
    )


def train(
    folder: Folder, given: argparse.Namespace, settings: Settings, update: Update
) -> Acceptance:
    """Train to the end; returns the best acceptance."""
    from spec_serve.draft.train.session import train as run

    ready = prepare(folder, given, settings)
    begun, first, last = time.monotonic(), ready.trainer.place.pairs, ""

    def told(happened: Told, found: Acceptance | None) -> bool:
        nonlocal last
        pairs = happened.place.pairs
        rate = (pairs - first) / max(time.monotonic() - begun, 1e-9)
        if found is not None:
            last = f", held out {found.per_step:.3f} tokens/step"
        losses = " ".join(f"{loss:.2f}" for loss in happened.loss)
        update(pairs / given.pairs, f"loss {losses}, {rate:.0f} pairs/s{last}")
        return True

    return run(folder, ready, given.every, told)


def _out(folder: Folder, given: argparse.Namespace) -> Path:
    return Path(given.out) if given.out else folder.root / "head"


def export(folder: Folder, given: argparse.Namespace, settings: Settings) -> int:
    """Write the best head; returns bytes of its weights."""
    from spec_serve.draft.train.export import export as write

    if not folder.best.exists():
        raise ValueError(f"{folder.root}: holds no trained head yet")
    ready = prepare(folder, given, settings)
    ready.trainer.load(folder.best)
    return write(ready.lesson.head, ready.kept, _out(folder, given))
