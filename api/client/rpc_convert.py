"""Between the messages all transports share and protobuf, from the client's side.

Knows no calls. Fields are named as the proto names them once the server has refused one.
"""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import grpc
import msgspec
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.client.answers import ConnectionLost, GenerationEvent, ServerError

_DETAIL = {
    "steps": pb.SPEC_DETAIL_STEPS,
    "tokens": pb.SPEC_DETAIL_TOKENS,
    "summary": pb.SPEC_DETAIL_SUMMARY,
    "none": pb.SPEC_DETAIL_NONE,
}
_MODE = {"auto": pb.Speculation.AUTO, "off": pb.Speculation.OFF, "max": pb.Speculation.MAX}
_WHITESPACE = {
    "bounded": pb.WHITESPACE_BOUNDED, "compact": pb.WHITESPACE_COMPACT, "any": pb.WHITESPACE_ANY,
}  # fmt: skip
_REASON: dict[int, m.Reason] = {
    pb.Finished.STOP: "stop",
    pb.Finished.LENGTH: "length",
    pb.Finished.CANCELLED: "cancelled",
}
# Statuses that come without our own details, from a proxy or from gRPC itself.
_CODES: dict[grpc.StatusCode, m.Code] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request",
    grpc.StatusCode.NOT_FOUND: "model_not_found",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.ALREADY_EXISTS: "duplicate_id",
    grpc.StatusCode.UNAUTHENTICATED: "unauthorized",
    grpc.StatusCode.PERMISSION_DENIED: "forbidden",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limited",
    grpc.StatusCode.INTERNAL: "engine_error",
    grpc.StatusCode.UNKNOWN: "engine_error",
}
KNOWN: dict[str, m.Code] = {code.upper(): code for code in get_args(m.Code)}


def to_proto(wire: m.Generate, request_id: str = "") -> pb.GenerateRequest:
    """The request as protobuf. Raises BadMessage for content that is no text."""
    made = pb.GenerateRequest(
        request_id=request_id,
        model=wire.model,
        sampling=_sampling(wire.sampling),
        stop=pb.Stop(
            max_tokens=wire.max_tokens,
            min_tokens=wire.min_tokens,
            strings=wire.stop,
            token_ids=wire.stop_token_ids,
            ignore_eos=wire.ignore_eos,
            include_stop_in_output=wire.include_stop,
            bad_words=wire.bad_words,
        ),
        output=pb.Output(
            token_ids=wire.ids,
            logprobs=wire.logprobs,
            prompt_logprobs=wire.prompt_logprobs,
            spec_detail=_DETAIL[wire.steps],
            skip_special_tokens=wire.skip_special_tokens,
        ),
        speculation=pb.Speculation(
            mode=_MODE[wire.speculation.mode],
            max_nodes=wire.speculation.max_nodes,
            sources=wire.speculation.sources,
            prediction=wire.speculation.prediction,
        ),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        keep=wire.keep,
        continuations=[pb.TokenIds(ids=ids) for ids in wire.continuations],
    )
    if wire.prompt is not None:
        made.prompt = wire.prompt
    if wire.token_ids is not None:
        made.token_ids.SetInParent()
        made.token_ids.ids[:] = wire.token_ids
    if wire.messages is not None:
        made.chat.CopyFrom(_chat(wire.messages, wire.tools))
        if isinstance(wire.tool_choice, m.NamedTool):
            made.chat.tool_name = wire.tool_choice.name
        elif wire.tool_choice == "required":
            made.chat.tool_required = True
        made.chat.single_tool_call = not wire.parallel_tool_calls
    elif wire.tool_choice != "auto":
        raise m.BadMessage("tool_choice", "tool_choice: needs messages")
    made.segments.extend(map(_segment, wire.segments))
    if wire.constraint is not None:
        made.constraint.CopyFrom(_constraint(wire.constraint))
    return made


def _segment(segment: m.Segment) -> pb.GenerateRequest:
    """A segment as a request, without what it does not have."""
    made = to_proto(m.Generate("segment", **msgspec.structs.asdict(segment)))
    made.ClearField("speculation")
    return made


def _constraint(asked: m.Constraint) -> pb.Constraint:
    made = pb.Constraint(
        whitespace=_WHITESPACE[asked.whitespace],
        lenient=not asked.strict,
        max_chars=asked.max_chars,
        min_chars=asked.min_chars,
        max_words=asked.max_words,
        max_sentences=asked.max_sentences,
        banned=asked.banned,
        after=asked.after,
        no_forcing=not asked.forcing,
    )
    if asked.kind == "choices":
        try:
            texts = msgspec.json.decode(asked.source, type=list[str])
        except (msgspec.MsgspecError, RecursionError):
            told = "constraint.source: choices must be a JSON list of strings"
            raise m.BadMessage("constraint.source", told) from None
        made.choices.SetInParent()
        made.choices.texts.extend(texts)
    elif asked.kind in ("text", "json_object"):
        if asked.source:
            told = f"constraint.source: kind {asked.kind} takes none"
            raise m.BadMessage("constraint.source", told)
        setattr(made, asked.kind, True)
    else:
        setattr(made, asked.kind, asked.source)
    return made


def _sampling(sampling: m.Sampling) -> pb.Sampling:
    values = msgspec.structs.asdict(sampling)
    bias = values.pop("logit_bias") or {}
    try:
        numbered = {int(token): value for token, value in bias.items()}
    except ValueError:
        told = "sampling.logit_bias: keys must be token ids"
        raise m.BadMessage("sampling.logit_bias", told) from None
    return pb.Sampling(logit_bias=numbered, **values)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""


def _chat(messages: list[m.ChatMessage], tools: list[dict[str, Any]] | None) -> pb.Chat:
    chat = pb.Chat(tools_json=_json(tools))
    for i, turn in enumerate(messages):
        content = turn.content or ""
        if isinstance(content, list):
            if any(part.get("type", "text") != "text" for part in content):
                field = f"messages[{i}].content"
                raise m.BadMessage(field, f"{field}: only text goes over gRPC")
            content = "".join(str(part.get("text", "")) for part in content)
        chat.messages.add(
            role=turn.role,
            content=content,
            name=turn.name,
            tool_call_id=turn.tool_call_id,
            tool_calls_json=_json(turn.tool_calls),
        )
    return chat


def event(gen: str, said: pb.GenerateEvent) -> GenerationEvent:
    """An event as every transport has it."""
    kind = said.WhichOneof("event")
    if kind == "delta":
        delta = said.delta
        return m.Delta(
            gen,
            said.seq,
            delta.index,
            delta.text,
            list(delta.token_ids),
            [_logprob(entry) for entry in delta.logprobs],
            [_step(step) for step in delta.steps],
        )
    if kind == "started":
        one = said.started
        return m.Started(
            gen, said.seq, one.request_id, one.model, one.prompt_tokens, one.cached_tokens,
            one.queue_ms,
        )  # fmt: skip
    if kind == "prompt_scored":
        scored = [_logprob(entry) for entry in said.prompt_scored.logprobs]
        return m.PromptLogprobs(gen, said.seq, scored)
    return _finished(gen, said.seq, said.finished)


def _step(step: pb.SpecStep) -> m.Step:
    return m.Step(
        step.step,
        step.drafted,
        step.accepted,
        {source.name: (source.drafted, source.accepted) for source in step.sources},
        step.draft_us,
        step.verify_us,
        step.host_us,
        list(step.drafted_ids),
        list(step.drafted_parents),
        list(step.drafted_text),
    )


def _logprob(entry: pb.Logprob) -> m.Logprob:
    top = [(one.token_id, one.logprob, one.token) for one in entry.top]
    return m.Logprob(entry.token_id, entry.logprob, entry.token, top)


def _finished(gen: str, seq: int, end: pb.Finished) -> m.Finished:
    kind = end.WhichOneof("matched")
    usage, times, spec = end.usage, end.timings, end.speculation
    return m.Finished(
        gen=gen,
        seq=seq,
        index=end.index,
        reason=_REASON.get(end.reason, "stop"),
        matched=getattr(end, kind) if kind else None,
        usage=m.Usage(**{name: getattr(usage, name) for name in m.Usage.__struct_fields__}),
        timings=m.Timings(**{name: getattr(times, name) for name in m.Timings.__struct_fields__}),
        speculation=m.Summary(
            spec.steps, spec.drafted, spec.accepted, spec.mean_accepted_length,
            spec.acceptance_rate, list(spec.histogram),
        ) if end.HasField("speculation") else None,
        constraint=_constrained(end.constraint) if end.HasField("constraint") else None,
        last=end.last,
    )  # fmt: skip


def _constrained(told: pb.Constrained) -> m.Constrained:
    known = told.schema_valid if told.HasField("schema_valid") else None
    return m.Constrained(told.complete, list(told.ignored), known, told.forced)


def failure(error: Any) -> ServerError | ConnectionLost:
    """What a call's error means; `error` is a grpc.RpcError of either kind of channel."""
    status, said = error.code(), error.details() or ""
    code: m.Code | None = None
    field, wait_ms = "", 0
    rich = None
    with contextlib.suppress(ValueError):  # details of another status than the call's
        rich = rpc_status.from_call(_Trailing(error))
    for packed in rich.details if rich is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if packed.Unpack(info):
            code = KNOWN.get(info.reason)
        elif packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif packed.Unpack(retry):
            wait_ms = retry.retry_delay.seconds * 1000 + retry.retry_delay.nanos // 1_000_000
    code = code or _CODES.get(status)
    if code is None:  # UNAVAILABLE without our details, CANCELLED: nobody is there any more
        return ConnectionLost(None, f"the call ended ({status.name}): {said}")
    return ServerError(
        m.Error(code, said, param=field or None, retryable=wait_ms > 0, retry_after_ms=wait_ms)
    )


class _Trailing:
    """The part of a call that grpc_status reads; aio's errors have None where it wants a list."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def trailing_metadata(self) -> Any:
        """Key and value pairs."""
        return self._error.trailing_metadata() or ()

    def code(self) -> Any:
        """The call's status."""
        return self._error.code()

    def details(self) -> Any:
        """The call's message."""
        return self._error.details()
