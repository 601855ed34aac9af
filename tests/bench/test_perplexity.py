"""`bench perplexity`: windows, a tiny model computed both ways, what llama.cpp is made to say.

The other program is a script of a few lines.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from spec_serve.bench import perplexity as bench
from spec_serve.bench.passage import passage
from spec_serve.bench.perplexity import Windows, error, judged, llama, perplexity, windows
from spec_serve.kernels.cpu.native import NativeUnavailable, load
from spec_serve.target.model import load_model
from spec_serve.target.native import load_native
from spec_serve.target.tokenizer import Tokenizer
from tests.tiny import VOCAB, tiny_checkpoint

try:
    load()
except NativeUnavailable as error_:
    pytest.skip(str(error_), allow_module_level=True)


class Letters:
    """A token per character behind one that begins the text."""

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """As a tokenizer does."""
        return [1] * (bos is not False) + [ord(letter) for letter in text]


def test_windows_are_whole_and_begin_like_texts() -> None:
    held = windows(cast(Tokenizer, Letters()), "abcdefghij", 4)
    assert held.first == 2
    assert [bytes(ids) for ids in held.ids] == [b"\1abc", b"\1efg"]
    with pytest.raises(ValueError, match="two windows need 12"):
        windows(cast(Tokenizer, Letters()), "abcdefghij", 6)


def test_kernels_are_as_perplexed_as_the_same_weights_in_float32() -> None:
    ids = [[(i * 37 + 11 * w) % VOCAB for i in range(100)] for w in range(2)]
    held, checkpoint = Windows(ids, 50), tiny_checkpoint()
    with torch.inference_mode():
        exact = judged(load_model(checkpoint), held)
        found = judged(load_native(checkpoint, 1, "q8_0"), held)
    assert [tuple(rows.shape) for rows in found] == [(49, VOCAB)] * 2
    # Eight bits of weights are the difference here.
    assert 0.001 < error(found, exact) < 0.03 and error(exact, exact) == 0
    assert perplexity(found, held) == pytest.approx(perplexity(exact, held), rel=0.02)
    level = [torch.zeros(49, VOCAB)] * 2
    assert perplexity(level, held) == pytest.approx(VOCAB)
    sure = [torch.nn.functional.one_hot(torch.tensor(one[51:]), VOCAB) * 9.0 for one in ids]
    assert math.log(perplexity(sure, held)) == pytest.approx(math.log(1 + (VOCAB - 1) / math.e**9))


def test_llama_cpps_figure_is_read_or_its_last_words_told(tmp_path: Path) -> None:
    script = tmp_path / "program"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
        "at = sys.argv.index('-f') + 1\nsize = len(Path(sys.argv[at]).read_text())\n"
        "if size > 100: sys.exit('too long for me')\n"
        "print(f'Final estimate: PPL = {size}.25 +/- 0.1')\n"
    )
    script.chmod(0o755)
    assert llama(script, tmp_path, "twelve chars", 512, 1) == 12.25
    with pytest.raises(RuntimeError, match="too long for me"):
        llama(script, tmp_path, passage(), 512, 1)


def test_the_text_is_long_enough_for_three_windows() -> None:
    assert 7000 < len(passage()) < 8000 and max(map(len, passage().split("\n"))) > 1000
    assert bench.arguments([]).context == 512
