"""What the engine tells of a row, out of what it knows: usage, timings, log-probabilities, steps.

Pure functions of rows and results; who is told, and when, is the engine's business.
"""

from __future__ import annotations

from time import monotonic

from spec_serve.spec.request import (
    Constrained,
    Finished,
    Reason,
    RequestError,
    RequestTimings,
    SegmentFinished,
    StepRecord,
    TokenLogprob,
    Usage,
)
from spec_serve.spec.row import Row
from spec_serve.spec.step import Job, Result, Scored

Guessed = tuple[dict[str, tuple[int, int]], list[str]]  # (drafted, accepted) by source; of each
NOT_GUESSED: Guessed = ({}, [])


def finished(
    row: Row, reason: Reason, matched: int | str | None, error: RequestError | None
) -> Finished:
    """The end of a row."""
    constrained = outcome(row, matched)
    if row.walk is not None and constrained is not None and reason == "error" and error is None:
        error = RequestError("constraint", row.walk.failed or "no token is left that fits it")
    own = None if row.before is None else _alone(row)
    return Finished(
        row.owner, row.index, reason, matched, usage(row), timings(row), error, constrained, own
    )


def segment_finished(row: Row, reason: Reason, matched: int | str | None) -> SegmentFinished:
    """The end of a row that another one follows."""
    alone, constrained = _alone(row), outcome(row, matched)
    return SegmentFinished(row.owner, row.index, reason, matched, alone, timings(row), constrained)


def outcome(row: Row, matched: int | str | None) -> Constrained | None:
    """What became of a row's constraint."""
    if row.walk is None or row.cached < 0:
        return None
    return row.walk.outcome(isinstance(matched, str))


def usage(row: Row) -> Usage:
    """The tokens a row, and those it follows, have read and made so far."""
    own, before = _alone(row), row.before
    if before is None:
        return own
    given = row.owner.prompt, *(one.prompt for one in row.owner.segments[: row.segment])
    return Usage(
        sum(map(len, given)), before.cached_tokens,
        before.completion_tokens + own.completion_tokens,
        before.accepted_prediction_tokens + own.accepted_prediction_tokens,
        before.rejected_prediction_tokens + own.rejected_prediction_tokens,
    )  # fmt: skip


def _alone(row: Row) -> Usage:
    return Usage(
        row.prompt_len, max(row.cached, 0), row.emitted,
        row.accepted_prediction, row.rejected_prediction,
    )  # fmt: skip


def timings(row: Row) -> RequestTimings:
    """How long a row has waited and run, in milliseconds."""
    begun, first = row.admitted or monotonic(), row.first_token
    return RequestTimings(
        (begun - row.arrived) * 1e3,
        (first - begun) * 1e3 if first else 0.0,
        (first - row.arrived) * 1e3 if first else 0.0,
        (row.last_token - first) * 1e3,
    )


def logprobs(scored: Scored, count: int | None = None) -> list[TokenLogprob]:
    """Of the first `count` tokens scored, None = all."""
    return [TokenLogprob(token, lp, top) for token, lp, top in scored[:count]]


def step_record(
    row: Row,
    job: Job,
    b: int,
    result: Result,
    accepted: int,
    host_us: int,
    told: Guessed,
) -> StepRecord:
    """Twig `b` of a job; told: by whom it was guessed. Continuations are no guesses."""
    tree = job.twigs[b].tree
    given = len(tree.tokens) if row.request.continuations else tree.given
    return StepRecord(
        row.steps, len(tree.tokens) - given, accepted, told[0],
        result.draft_us, result.verify_us, host_us, len(job.twigs),
        list(tree.tokens[given:]), [p - given for p in tree.parents[given:]], told[1],
    )  # fmt: skip
