"""What a step found, taken over by one row: tokens, cache place, counters, and what is told of it.

The walk's path and the token behind it join the row until something ends the choice; the drafters
learn how their guesses fared. Knows one row at a time: no requests' lives, no scheduling, no
threads (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable

from spec_serve.spec import report
from spec_serve.spec.build import Builder
from spec_serve.spec.request import Delta, Event, PromptScored, Reason
from spec_serve.spec.row import Row
from spec_serve.spec.stats import EngineStats
from spec_serve.spec.step import Job, Result, Scored

Tell = Callable[[Event], None]


def commit_row(
    row: Row,
    b: int,
    job: Job,
    result: Result,
    builder: Builder,
    stats: EngineStats,
    tell: Tell,
    now: float,
    host_us: int,
) -> tuple[Reason, int | str | None] | None:
    """Take over what the step found for batch row `b`; why the choice ended, and what matched.

    now: monotonic seconds. host_us: what building the job took. None: the choice goes on.
    """
    path, bonus = result.paths[b], result.bonus[b]
    twig = job.twigs[b]
    tree = twig.tree
    tokens = tree.tokens
    given = tree.given
    goes_on = job.next_tokens[b] >= 0
    if not row.scored or row.request.continuations:
        _prompt_scores(row, result.prompt.get(b), not goes_on, tell)
    if goes_on:  # a prompt chunk: nothing was chosen
        builder.commit(row, twig, [], job, b)
        return None
    new = [tokens[node] for node in path]
    new.append(bonus)
    if len(tokens) > given:
        row.learn(builder.calibration, path, given)
    if row.sources:
        row.follow(builder.calibration, new)
    taken, reason, matched = row.accept(new)
    if taken < len(new):
        del new[taken:]
        path = path[:taken]
    guessed = len(tokens) > given and not row.request.continuations
    drafted, accepted = (len(tokens) - given, len(path)) if guessed else (0, 0)
    builder.commit(row, twig, path, job, b)
    row.device_tree = result.trees.get(b)
    if row.first_token == 0.0:
        row.first_token = now
    row.last_token = now
    row.steps += 1
    stats.tokens_out += taken
    stats.drafted += drafted
    stats.accepted += accepted
    lps = None
    if row.request.logprobs is not None:
        lps = report.logprobs(result.logprobs.get(b, []), taken)
    told = builder.sources(row, path, given) if drafted else report.NOT_GUESSED
    record = report.step_record(row, job, b, result, accepted, host_us, told)
    tell(Delta(row.owner, row.index, new, lps, record))
    return None if reason is None else (reason, matched)


def _prompt_scores(row: Row, scored: Scored | None, last: bool, tell: Tell) -> None:
    row.prompt_scored += report.logprobs(scored or [])
    if last:
        row.scored = True
        tell(PromptScored(row.owner, row.index, row.prompt_scored))
        row.prompt_scored = []
