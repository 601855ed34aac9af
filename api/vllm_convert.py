"""Between vLLM's gRPC messages (package smg-grpc-proto) and those every transport shares.

A request becomes `messages.Generate`, so the same bounds hold; what can't be served is refused by
name. In that proto 0 stands for "not said" where a field is not optional. Text goes in, only token
ids come out: the gateway makes the text, so settings of its text have no effect here
(spaces_between_special_tokens). Knows no calls and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from spec_serve.api import messages as m

_SAMPLING = (
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_UNSERVED = (
    "kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs",
)  # fmt: skip
_OWN = "sampling_params."
_FIELDS = {
    "prompt": "text",
    "token_ids": "tokenized.input_ids",
    "sampling": "sampling_params",
    "include_stop": _OWN + "include_stop_str_in_output",
    "id": "request_id",
}
_PLAIN = (
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip
REASON = {"stop": "stop", "length": "length", "cancelled": "abort"}


def renamed(error: m.Error, constraint: str | None = None) -> m.Error:
    """The error, its field named as this proto names it. constraint: which kind was asked for."""
    field = error.param
    if not field:
        return error
    head = field.partition(".")[0].partition("[")[0]
    if head == "constraint" and constraint is not None:
        name = _OWN + constraint
        said = name + error.message.removeprefix(field)
        return msgspec.structs.replace(error, param=name, message=said)
    name = _FIELDS.get(head, _OWN + head if head in _PLAIN else head) + field[len(head) :]
    said = name + error.message.removeprefix(field)
    return msgspec.structs.replace(error, param=name, message=said)


def generate(request: vllm.GenerateRequest) -> m.Generate:
    """Checked like a message from a WebSocket. Raises BadMessage, fields named as on the wire."""
    _served(request)
    asked = request.sampling_params
    sampling: dict[str, Any] = {}
    for name in _SAMPLING:
        if value := getattr(asked, name):
            sampling[name] = value
    for name in ("temperature", "seed"):
        if asked.HasField(name):
            sampling[name] = getattr(asked, name)
    sampling["n"] = asked.n or 1
    if asked.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    values: dict[str, Any] = {
        "gen": "call",
        "sampling": sampling,
        "min_tokens": asked.min_tokens,
        "stop": list(asked.stop),
        "stop_token_ids": list(asked.stop_token_ids),
        "ignore_eos": asked.ignore_eos,
        "include_stop": asked.include_stop_str_in_output,
        "skip_special_tokens": asked.skip_special_tokens,
        "ids": True,
        "steps": "summary",
    }
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        if asked.HasField(name):
            values[name] = getattr(asked, name)
    if (constraint := _constraint(asked)) is not None:
        values["constraint"] = constraint
    kind = request.WhichOneof("input")
    if kind == "text":
        values["prompt"] = request.text
    elif kind == "tokenized":
        values["token_ids"] = list(request.tokenized.input_ids)
    return m.generate(values)


def _constraint(asked: vllm.SamplingParams) -> dict[str, Any] | None:
    """What the text has to look like. vLLM has no lenient schemas."""
    kind = asked.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not asked.json_object):
        return None
    if kind == "json_object":
        return {"kind": kind}
    if kind == "choice":
        texts = list(asked.choice.choices)
        return {"kind": "choices", "source": msgspec.json.encode(texts).decode()}
    source = getattr(asked, kind)
    if kind == "grammar" and "::=" in source:
        name = f"{_OWN}grammar"
        raise m.BadMessage(name, f"{name}: must be in Lark, not in GBNF or EBNF")
    return {"kind": "lark" if kind == "grammar" else kind, "source": source}


def _served(request: vllm.GenerateRequest) -> None:
    """Refuse by name what is asked for and not served."""
    for name in _UNSERVED:
        if any(field.name == name for field, _ in request.ListFields()):
            raise m.BadMessage(name, f"{name}: is not served")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank:
        rank = request.data_parallel_rank
        raise m.BadMessage("data_parallel_rank", f"data_parallel_rank: there is only 0, got {rank}")
    asked = request.sampling_params
    if asked.HasField("structural_tag"):
        name = f"{_OWN}structural_tag"
        raise m.BadMessage(name, f"{name}: is not served")
    if asked.HasField("truncate_prompt_tokens"):
        name = f"{_OWN}truncate_prompt_tokens"
        raise m.BadMessage(name, f"{name}: prompts are not truncated")


class Answers:
    """Turns the messages of one generation into responses.

    stream: chunks besides the whole. eos: ids that end a turn, which no client asked to stop at.
    `prompt` is to be set once it is known.
    """

    def __init__(self, stream: bool, eos: frozenset[int], n: int) -> None:
        self.prompt: list[int] = []
        self._stream, self._eos = stream, eos
        self._prompt_tokens = self._cached = 0
        self._scored: vllm.InputLogProbs | None = None
        self._scored_sent = [False] * n
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._scores: list[list[m.Logprob]] = [[] for _ in range(n)]
        self._usual = vllm.GenerateResponse()
        self._chunk = self._usual.chunk
        self._chunk_ids = self._chunk.token_ids

    def of(self, message: m.Started | m.Delta | m.PromptLogprobs | m.Finished) -> Iterator[Any]:
        """The responses for a message; each is to be encoded before the next is asked for."""
        if type(message) is m.Delta:
            if message.ids:
                self._ids[message.index] += message.ids
                self._scores[message.index] += message.logprobs
                if self._stream:
                    yield self._piece(message)
        elif isinstance(message, m.Started):
            self._prompt_tokens, self._cached = message.prompt_tokens, message.cached_tokens
        elif isinstance(message, m.PromptLogprobs):
            self._scored = self._input(message.logprobs)
        elif isinstance(message, m.Finished):
            yield self._whole(message)

    def _piece(self, message: m.Delta) -> vllm.GenerateResponse:
        index = message.index
        response, chunk = self._usual, self._chunk
        if message.logprobs or (self._scored is not None and not self._scored_sent[index]):
            response = vllm.GenerateResponse()
            chunk = response.chunk
            chunk.token_ids.extend(message.ids)
            if message.logprobs:
                chunk.output_logprobs.CopyFrom(_output(message.logprobs))
            if self._scored is not None and not self._scored_sent[index]:
                self._scored_sent[index] = True
                chunk.input_logprobs.CopyFrom(self._scored)
        else:
            self._chunk_ids[:] = message.ids
        chunk.index = index
        chunk.prompt_tokens, chunk.cached_tokens = self._prompt_tokens, self._cached
        chunk.completion_tokens = len(self._ids[index])
        return response

    def _whole(self, message: m.Finished) -> vllm.GenerateResponse:
        index, usage, spec = message.index, message.usage, message.speculation
        made = vllm.GenerateComplete(
            output_ids=self._ids[index],
            finish_reason=REASON[message.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            index=index,
        )
        if self._scores[index]:
            made.output_logprobs.CopyFrom(_output(self._scores[index]))
        if self._scored is not None:
            made.input_logprobs.CopyFrom(self._scored)
        if isinstance(message.matched, str):
            made.matched_stop_str = message.matched
        elif message.matched is not None and message.matched not in self._eos:
            made.matched_token_id = message.matched
        if spec is not None:
            made.spec_draft_tokens, made.spec_accepted_tokens = spec.drafted, spec.accepted
        return vllm.GenerateResponse(complete=made)

    def _input(self, scores: list[m.Logprob]) -> vllm.InputLogProbs:
        """Of the prompt; its first token has none."""
        first = self.prompt[:1]
        return vllm.InputLogProbs(
            token_logprobs=[
                *(vllm.InputTokenLogProb() for _ in first),
                *(vllm.InputTokenLogProb(value=score.logprob) for score in scores),
            ],
            token_ids=[*first, *(score.id for score in scores)],
            top_logprobs=[*(vllm.TopLogProbs() for _ in first), *map(_top, scores)],
        )


def _top(score: m.Logprob) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[logprob for _, logprob, _ in score.top],
        token_ids=[token for token, _, _ in score.top],
    )


def _output(scores: list[m.Logprob]) -> vllm.OutputLogProbs:
    return vllm.OutputLogProbs(
        token_logprobs=[score.logprob for score in scores],
        token_ids=[score.id for score in scores],
        top_logprobs=map(_top, scores),
    )
