"""POST /v1/completions: text goes on from a prompt, or from each of several.

Choices are numbered prompt by prompt. With echo each begins with its prompt, log-probabilities
included; max_tokens 0 then gives those alone. The request is read by api/openai_convert.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import Call, Route
from spec_serve.api.generation import Numbered
from spec_serve.api.openai_convert import Asked, completions
from spec_serve.api.openai_forms import told
from spec_serve.api.openai_logprobs import TextScores, joined
from spec_serve.api.openai_logprobs import prompt as prompt_scores
from spec_serve.api.openai_run import Run
from spec_serve.api.openai_stream import head, matched, reason, send
from spec_serve.api.openai_usage import Clock, Totals
from spec_serve.api.service import Service

PATH = "/v1/completions"


def routes(service: Service) -> list[Route]:
    """The one route."""

    async def handle(call: Call) -> None:
        asked = completions(await call.json(w.CompletionRequest))
        async with Run(service, call, "cmpl", asked.error) as run:
            await run.start(asked.wires)
            answer = _Answer(service, run, asked)
            if asked.stream:
                await send(call, run, answer.chunks, answer.last)
                return
            async for messages in run.messages():
                for message in messages:
                    answer.keep(message)
            await call.say(answer.whole())

    return [Route("POST", PATH, handle)]


class _Choice:
    """One choice of one prompt. echo: the prompt's text, "" where it doesn't come back."""

    __slots__ = ("begun", "clock", "echo", "pieces", "prompt", "scores")

    def __init__(self, echo: str, prompt: list[int], scores: TextScores) -> None:
        self.echo, self.prompt, self.scores = echo, prompt, scores
        self.begun = False
        self.clock = Clock()
        self.pieces: list[w.TextChoice] = []


class _Answer:
    """All choices of all prompts of a request."""

    def __init__(self, service: Service, run: Run, asked: Asked) -> None:
        self._asked = asked
        self._head = head(service, run, asked)
        self._totals = Totals(not asked.nothing)
        self._prompt_scores: dict[str, list[m.Logprob]] = {}
        self._choices: list[_Choice] = []
        self._bytes = token_bytes = service.tokenizer.token_bytes
        for i, prepared in enumerate(run.prepared):
            ids = prepared.request.prompt
            echo = ""
            if asked.echoes is not None:
                given = asked.echoes[i]
                echo = (
                    given
                    if isinstance(given, str)
                    else b"".join(map(token_bytes, given)).decode("utf-8", "replace")
                )
            self._choices += [_Choice(echo, ids, TextScores(token_bytes)) for _ in range(asked.n)]
        self._left = len(self._choices)

    def _pieces(self, message: Numbered) -> Iterator[w.TextChoice]:
        """What a message adds to its choice."""
        if type(message) is m.PromptLogprobs:
            self._prompt_scores[message.gen] = message.logprobs
        elif type(message) is m.Delta:
            index = self._index(message)
            choice = self._choices[index]
            begun = choice.begun
            made = self._begin(index, message.gen)
            if not self._asked.nothing:
                made.text += message.text
                if made.logprobs is not None:
                    made.logprobs = joined([made.logprobs, choice.scores.add(message.logprobs)])
                if self._asked.token_ids:
                    made.token_ids = message.ids
            if not begun or made.text or message.logprobs or message.ids:
                yield made
        elif type(message) is m.Finished:
            self._totals.add(message)
            self._left -= 1
            made = self._begin(self._index(message), message.gen)
            made.finish_reason = "length" if self._asked.nothing else reason(message)
            wire = self._asked.wires[int(message.gen)]
            made.stop_reason = None if self._asked.nothing else matched(message, wire)
            made.constraint = told(message)
            yield made

    def _index(self, message: m.Delta | m.Finished) -> int:
        return int(message.gen) * self._asked.n + message.index

    def _begin(self, index: int, gen: str) -> w.TextChoice:
        """A piece without news; a choice's first holds its prompt, if that was asked for."""
        choice, asked = self._choices[index], self._asked
        logprobs = w.TextLogprobs([], [], [], []) if asked.logprobs else None
        made = w.TextChoice(index, "", None, logprobs)
        if choice.begun:
            return made
        choice.begun = True
        made.text = choice.echo
        if asked.token_ids:
            made.prompt_token_ids = choice.prompt
        if logprobs is not None and asked.echoes is not None:
            made.logprobs = joined(
                [
                    choice.scores.first(choice.prompt[0]),
                    choice.scores.add(self._prompt_scores.get(gen, [])),
                ]
            )
        return made

    # ---- streamed

    def chunks(self, message: Numbered) -> Iterator[w.TextCompletion]:
        """The chunks a message becomes."""
        if type(message) is m.Started:
            first = int(message.gen) * self._asked.n
            for choice in self._choices[first : first + self._asked.n]:
                choice.clock.start(message)
        for piece in self._pieces(message):
            made = w.TextCompletion(object="text_completion", choices=[piece], **self._head)
            if self._asked.usage_chunk:
                made.usage = None
            elif not self._left:
                made.timings = self._totals.timings()
            if self._asked.timings and type(message) is m.Delta:
                made.timings = self._choices[piece.index].clock.step(len(message.ids))
            yield made

    def last(self) -> w.TextCompletion | None:
        """The chunk with usage, for who asked."""
        if not self._asked.usage_chunk:
            return None
        return self._tail([])

    def _tail(self, choices: list[w.TextChoice]) -> w.TextCompletion:
        return w.TextCompletion(
            object="text_completion",
            choices=choices,
            usage=self._totals.usage(),
            timings=self._totals.timings(),
            metrics=self._totals.metrics(),
            **self._head,
        )

    # ---- whole

    def keep(self, message: Numbered) -> None:
        """Remember what a message says."""
        for piece in self._pieces(message):
            self._choices[piece.index].pieces.append(piece)

    def whole(self) -> w.TextCompletion:
        """The answer, once all choices are over."""
        return self._tail([self._whole(i, choice) for i, choice in enumerate(self._choices)])

    def _whole(self, index: int, choice: _Choice) -> w.TextChoice:
        pieces = choice.pieces
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        made = w.TextChoice(
            index,
            "".join(piece.text for piece in pieces),
            pieces[-1].finish_reason,
            joined(scored) if self._asked.logprobs else None,
            pieces[-1].stop_reason,
            constraint=pieces[-1].constraint,
        )
        if self._asked.token_ids:
            ids = [piece.token_ids for piece in pieces if piece.token_ids is not UNSET]
            made.token_ids = [token for part in ids for token in part]
            made.prompt_token_ids = choice.prompt
        if self._asked.prompt_logprobs:
            entries = self._prompt_scores.get(str(index // self._asked.n), [])
            made.prompt_logprobs = prompt_scores(entries, self._bytes)
        return made
