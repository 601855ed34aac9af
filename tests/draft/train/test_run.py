"""A run from answers to a head: captures, checkpoints, what goes on after a break, the command."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from spec_serve.api import cli, cli_train
from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.train.answers import (
    Answer,
    add_answers,
    make_tasks,
    read_answers,
    read_prompts,
)
from spec_serve.draft.train.capture import Captured, Capturer, read_shard, shards, write_shards
from spec_serve.draft.train.code_prompts import code_prompts
from spec_serve.draft.train.loop import Told, TrainOptions
from spec_serve.draft.train.plot import plot
from spec_serve.draft.train.session import Folder, Ready, capture, prepare, read_log, train
from spec_serve.draft.train.traffic import Traffic
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.adapt_link import adapted, current
from spec_serve.target.config import ModelConfig
from spec_serve.target.weights import open_checkpoint
from tests.tiny import MemoryCheckpoint, tiny_checkpoint, tiny_model, write_tiny_model_dir

LAYERS, TAPS = 6, (2, 3, 3)
OPTIONS = TrainOptions(pairs=400, unrolled=2, batch_pairs=32, learning_rate=1e-3, half=False)


def weights() -> MemoryCheckpoint:
    return tiny_checkpoint("llama", 3, num_hidden_layers=LAYERS)


def answer(number: int, prompt: int, tokens: int, held: bool = False) -> Answer:
    chance = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, 290, (prompt + tokens,), generator=chance)
    ids = drawn.tolist()
    return Answer(number, "test", 0.0, held, ids[:prompt], ids[prompt:])


ANSWERS = [answer(i, 3 + i, 14, held=i >= 6) for i in range(9)]


@pytest.fixture(scope="module")
def capturer() -> Capturer:
    model = tiny_model("llama", 3, num_hidden_layers=LAYERS)
    return Capturer(model, TorchAttention(), TAPS, 200)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, capturer: Capturer) -> Path:
    folder = Folder(tmp_path_factory.mktemp("captured"))
    add_answers(folder.answers, ANSWERS)
    assert capture(folder, capturer, 1 << 30) == len(ANSWERS)
    assert capture(folder, capturer, 1 << 30) == 0
    return folder.root


def fresh(captured: Path, root: Path) -> Folder:
    """A folder with the same captures and nothing else."""
    for name in ("train", "held", "answers.jsonl"):
        (root / name).symlink_to(captured / name)
    return Folder(root)


def test_captures_equal_the_hidden_states_of_transformers(capturer: Capturer) -> None:
    held = weights()
    raw = {key: value for key, value in held.config.items() if key != "torch_dtype"}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**raw), attn_implementation="eager"
    ).eval()
    theirs.load_state_dict(dict(held.tensors))
    given = answer(50, 150, 20)  # more than one chunk
    with torch.inference_mode():
        out = theirs(torch.tensor([[*given.prompt, *given.answer]]), output_hidden_states=True)
    found = capturer(given)
    wanted = torch.cat([out.hidden_states[tap][0] for tap in TAPS], -1)
    torch.testing.assert_close(found.taps.float(), wanted, atol=5e-3, rtol=1e-3)
    final = out.hidden_states[-1][0]
    torch.testing.assert_close(found.hidden.float(), final, atol=5e-3, rtol=1e-3)
    assert found.best.tolist() == out.logits[0].argmax(-1).tolist()
    torch.testing.assert_close(found.mass, out.logits[0].logsumexp(-1), atol=1e-3, rtol=1e-4)
    with pytest.raises(ValueError, match="201 tokens"):
        capturer(answer(51, 200, 1))


def test_captures_go_on_and_keep_to_their_size(tmp_path: Path) -> None:
    asked: list[int] = []

    def fake(one: Answer) -> Captured:
        asked.append(one.number)
        n = len(one.prompt) + len(one.answer)
        tokens = torch.tensor([*one.prompt, *one.answer], dtype=torch.int32)
        wide = torch.full((n, 8), float(one.number)).half()
        return Captured(one.number, len(one.prompt), tokens, wide, wide, tokens, wide[:, 0].float())

    def write(answers: Sequence[Answer], most: int = 1 << 30) -> int:
        return write_shards(tmp_path, answers, fake, shard_bytes=1200, most_bytes=most)

    assert write(ANSWERS[:4]) == 4
    assert write(ANSWERS[:6]) == 2
    assert asked == [0, 1, 2, 3, 4, 5]
    read = [one for shard in shards(tmp_path) for one in read_shard(shard)]
    assert [one.number for one in read] == asked and len(shards(tmp_path)) > 2
    for one, given in zip(read, ANSWERS, strict=False):
        assert one.tokens.tolist() == [*given.prompt, *given.answer]
        assert one.start == len(given.prompt) and bool((one.taps == one.number).all())
    full = sum(shard.stat().st_size for shard in shards(tmp_path))
    assert write(ANSWERS, full + 800) == 1


def ready(folder: Folder, options: TrainOptions = OPTIONS, **more: Any) -> Ready:
    return prepare(
        folder, weights(), options, taps=TAPS, draft_vocab=128, ends=[298, 299], candidates=100,
        **more,
    )  # fmt: skip


def test_a_run_that_was_broken_off_ends_the_same(captured: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, broken = fresh(captured, tmp_path / "a"), fresh(captured, tmp_path / "b")
    steps: list[Told] = []

    def note(told: Told, found: object) -> bool:
        steps.append(told)
        return True

    first = ready(whole)
    train(whole, first, 100, note)
    assert steps[-1].place.pairs >= OPTIONS.pairs and steps[-1].place.epoch >= 2
    assert sum(steps[-1].loss) < sum(steps[0].loss)

    train(broken, ready(broken), 100, lambda told, found: told.place.step < 5)
    going_on = ready(broken)
    assert going_on.trainer.place == steps[4].place
    rest: list[Told] = []
    train(broken, going_on, 100, lambda told, found: rest.append(told) is None)
    assert [told.loss for told in rest] == [told.loss for told in steps[5:]]
    for name, held in first.trainer.head.named().items():
        assert torch.equal(held, going_on.trainer.head.named()[name]), name
    log = read_log(whole)
    assert log[-1]["pairs"] == steps[-1].place.pairs
    assert "<polyline" in (whole.root / "log.svg").read_text()
    with pytest.raises(ValueError, match="draft-vocab"):
        prepare(whole, weights(), OPTIONS, taps=TAPS, draft_vocab=64, ends=[])


def test_a_head_starts_from_its_target(captured: Path, tmp_path: Path) -> None:
    folder = fresh(captured, tmp_path)
    begun = ready(folder)
    head = begun.trainer.head
    assert torch.equal(head["lm_head"], weights().tensors["lm_head.weight"][begun.kept])
    assert not head["lm_head"].requires_grad
    # The regression says more about the next state than the state itself does.
    examples = begun.corpus.examples()
    here, there = [], []
    for one in examples:
        part = slice(one.first, -2)
        states = one.hidden.float() / weights().tensors["model.norm.weight"]
        made = head.fuse(one.taps.float())
        here.append((made[part] - states[part]).pow(2).mean())
        there.append((made[part] - states[one.first + 1 : -1]).pow(2).mean())
    assert sum(here) < 0.5 * sum(there)
    assert ready(folder, replace(OPTIONS, train_rows=True)).trainer.head["lm_head"].requires_grad


def test_answers_are_kept_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    add_answers(path, ANSWERS[:2])
    with path.open("a") as out:
        out.write('{"n":7,"prompt":[1')  # cut short
    assert [one.number for one in read_answers(path)] == [0, 1]
    add_answers(path, ANSWERS[2:3])
    assert list(read_answers(path)) == ANSWERS[:3]
    prompts = [("gsm8k/train", f"question {i}") for i in range(100)] + [("self-instruct/x", "do")]
    tasks = make_tasks(prompts, (0.0, 1.0))
    assert tasks == make_tasks(prompts, (0.0, 1.0)) and len(tasks) == 102
    assert 0 < sum(task.held for task in tasks) < 12
    assert all(task.temperature == 0.0 for task in tasks if task.held)
    (tmp_path / "p").write_text('{"prompt": "a"}\n[]\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(tmp_path / "p")
    asked = dict(code_prompts(("textwrap",)))
    assert "def wrap(text, width=70" in asked["stdlib/textwrap"]


def test_the_command_makes_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model_dir(tmp_path / "model", "llama", 3, num_hidden_layers=LAYERS)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(60)))
    folder = tmp_path / "run"
    argv = [
        "train", "--target", str(model), "--folder", str(folder), "--prompts", str(prompts),
        "--max-tokens", "16", "--max-rows", "8", "--pairs", "300", "--batch-pairs", "64",
        "--unrolled", "2", "--draft-vocab", "120", "--every", "3", "--quiet",
    ]  # fmt: skip
    assert cli.main(argv) == 0
    said = capsys.readouterr().err
    assert "tokens per step with a chain" in said and "head of" in said
    config = ModelConfig.from_checkpoint_config(open_checkpoint(model).config)
    head = read_eagle3(open_checkpoint(folder / "head"), config)
    assert head.config.taps == (2, 3, 3) and head.config.draft_vocab == 120
    assert sum(1 for _ in read_answers(Folder(folder).answers)) == 60
    adapt(model, folder / "head", tmp_path)
    block(model, Folder(folder), tmp_path)
    adapt_from_traffic(model, folder / "head", tmp_path)
    assert "better" in capsys.readouterr().err
    assert cli.main([*argv, "--stages", "bake"]) == 2
    assert cli.main([*argv, "--folder", str(tmp_path / "new"), "--stages", "train"]) == 1
    assert "no captured sequences" in capsys.readouterr().err
    assert "--pairs" in cli_train.parser().format_help()


def adapt(model: Path, head: Path, root: Path) -> None:
    """A head goes on from where it was, and is written only once it is better."""
    traffic = root / "traffic.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(60)]
    traffic.write_text(
        "".join(json.dumps({**one, "answer": "the inner one and another"}) + "\n" for one in asked)
    )
    run = Folder(root / "adapted")
    argv = [
        "train", "--target", str(model), "--folder", str(run.root), "--adapt", str(head),
        "--traffic", str(traffic), "--pairs", "60", "--every", "1", "--unrolled", "2",
        "--learning-rate", "1e-9", "--quiet",
    ]  # fmt: skip
    assert cli.main(argv) == 0
    log = read_log(run)
    assert log[0]["step"] == 0 and log[0]["depths"] == log[-1]["depths"]
    assert not run.best.exists() and not (run.root / "head").exists()


def block(model: Path, captured: Folder, root: Path) -> None:
    """A block drafter from the same captures."""
    folder = Folder(root / "block")
    folder.root.mkdir()
    for name in ("train", "held", "answers.jsonl"):
        (folder.root / name).symlink_to(captured.root / name)
    argv = [
        "train", "--target", str(model), "--folder", str(folder.root), "--stages", "train",
        "--kind", "block", "--pairs", "100", "--unrolled", "3", "--draft-vocab", "120", "--quiet",
    ]  # fmt: skip
    assert cli.main([*argv, "--block-layers", "0"]) == 2
    assert cli.main([*argv, "--adapt", str(model)]) == 2
    assert cli.main(argv) == 0
    log = read_log(folder)
    assert len(log[-1]["loss"]) == 3 and log[-1]["pairs"] >= 100
    with safe_open(folder.checkpoint, "pt") as opened:
        names = set(opened.keys())
    assert "weight/layers/1/mlp/up_proj" in names and "weight/layers/2/mlp/up_proj" not in names


def adapt_from_traffic(model: Path, head: Path, root: Path) -> None:
    """What a server kept makes its head better, and `current` names the better one."""
    kept = root / "server"
    argv = [
        "train", "--target", str(model), "--adapt", str(head), "--from", str(kept), "--every", "4",
        "--unrolled", "2", "--batch-pairs", "64", "--quiet", "--learning-rate",
    ]  # fmt: skip
    assert cli.main([*argv, "5e-3"]) == 1  # no such folder
    ring = Traffic(kept, 1 << 20)
    said = [one for one in read_answers(head.parent / "answers.jsonl") if not one.temperature]
    for i in range(12):  # servers are asked the same again and again
        ring.add(said[i % 2].prompt, said[i % 2].answer, 0.0)
    ring.close()
    with (kept / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli.main([*argv, "1e-9"]) == 1  # one run at a time
    assert cli.main([*argv, "1e-9", "--pairs", "64"]) == 0
    assert current(kept) is None and adapted("lookup+x", str(kept)) == "lookup+x"
    assert cli.main([*argv, "5e-3", "--pairs", "600"]) == 0
    found = current(kept)
    assert found is not None and found.name == "00001" and not (kept / "candidate").exists()
    assert adapted("lookup+x", str(kept)) == f"lookup+{found}"
    verdict = json.loads((found / "judged.json").read_text())
    assert verdict["candidate"] > 1.2 * verdict["served"] and verdict["answers"] == 1


def test_a_plot_of_nothing_is_nothing() -> None:
    assert plot([]) == ""
