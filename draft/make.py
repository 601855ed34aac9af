"""From the text of `--draft` to what drafts: the only place that knows drafters by name.

Accepts `none`, `lookup`, `nextn` (modules in the target's own checkpoint), a head or a model (path,
hub id or short name), or several joined by `+`. Loading is the caller's business, so that names can
be checked before anything large is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_serve.cache.store import KVStore
from spec_serve.draft.base import Source
from spec_serve.draft.follow import Prediction
from spec_serve.draft.lookup import Continuations, Ngram
from spec_serve.draft.shared import Corpora, Shared

LOOKUPS = ("prediction", "suffix", "radix", "shared")


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What `--draft` asks for: host look-ups or not, and a head's or model's name or none.

    nextn: the drafter is what the target's checkpoint itself brings; model is None then.
    """

    lookup: bool
    model: str | None
    nextn: bool = False


def parse_draft(text: str) -> DraftChoice:
    """Read `--draft`. Raises ValueError naming the part that is wrong."""
    lookup, model, nextn = False, None, False
    parts = [part.strip() for part in text.split("+")]
    for part in parts:
        if not part:
            raise ValueError(f"draft: {text!r} has an empty part")
        if part == "none":
            if len(parts) > 1:
                raise ValueError("draft: none can't be joined with anything")
        elif part == "lookup":
            lookup = True
        elif model is not None or nextn:
            other = model or "nextn"
            raise ValueError(f"draft: two models ({other} and {part}); one can be used at a time")
        elif part == "nextn":
            nextn = True
        else:
            model = part
    return DraftChoice(lookup, model, nextn)


def parse_taps(text: str) -> tuple[int, ...] | None:
    """Read `--draft-taps`: boundaries joined by commas, "" = what the head's file says."""
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"draft-taps: {text!r} is no list of whole numbers such as 2,15,27"
        ) from None


class Lookups:
    """Makes the look-up sources of each row and keeps the text they share, apart by salt."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._corpora = Corpora()

    def sources(
        self, salt: str, tokens: Sequence[int], prediction: Sequence[int], prompt: int
    ) -> list[Source]:
        """The sources of a row that begins with `tokens`; already told about them.

        prompt: how many of the tokens are the prompt, which `prediction` is no copy of.
        """
        made: list[Source] = []
        if prediction:
            made.append(Prediction(prediction, skip=prompt))
        made.append(Ngram())
        made.append(Continuations(self._store.cursor(salt)))
        made.append(Shared(self._corpora.of(salt)))
        for source in made:
            source.extend(tokens)
        return made

    def retired(self, salt: str, tokens: Sequence[int]) -> None:
        """A row's text is complete: others under the same salt may find it."""
        self._corpora.of(salt).add(tokens)
