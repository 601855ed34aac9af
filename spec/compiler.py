"""Constraints compiled aside from the engine and the loop: bounded in time, kept for the next time.

Compiling runs in two threads of its own (llguidance lets go of Python meanwhile), behind a trial in
a process that ends when it takes too long. Whose turn has not come within a second of its arrival
is told that others are being compiled. What compiled is kept by constraint, least lately used going
first beyond a number of bytes; so is what did not. Any thread may call. Knows no requests' lives.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

from spec_serve.spec.bounds import Bounds, Counters
from spec_serve.spec.grammar import Grammar, Lexicon, MatchError, Spelling, tidy
from spec_serve.spec.grammar_source import FIELD, refused, source_of
from spec_serve.spec.request import Constraint, Request, RequestError
from spec_serve.spec.schema_words import placed
from spec_serve.spec.trial import WITHIN_S, Busy, get_ready, try_out

log = logging.getLogger("spec_serve.engine")

HOSTILE = frozenset({"regex", "json_schema", "lark"})  # what can be made to take for ever
FIRST_S = 30.0  # for the tokenizer's words, which the very first one waits for
ANSWER_S = 0.8  # from a request's arrival to what becomes of its constraint
LEAST_S = 0.3  # of that, where reading the rest of the request took longer
PATIENCE_S = 10.0  # where nobody said when it arrived, as in batches
KEPT_BYTES = 64 << 20
KEPT = 2048
MOST_BANNED, MOST_BANNED_CHARS = 256, 4096


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the bounds beside it (None = there are none)."""

    constraint: Constraint
    grammar: Grammar
    bounds: Bounds | None


class Compiler:
    """Compiles constraints for one tokenizer."""

    def __init__(self, spelling: Spelling, within_s: float = WITHIN_S) -> None:
        self._spelling = spelling
        self._within_s = within_s
        self._lexicon: Lexicon | None = None
        self._counters: Counters | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._words = threading.Lock()
        self._kept: OrderedDict[Constraint, Compiled | RequestError] = OrderedDict()
        self._bytes = 0
        self._running: dict[Constraint, Future[Compiled]] = {}

    def compile(self, constraint: Constraint) -> Compiled:
        """Waits for it, patiently. Raises RequestError, "overloaded" if it never had its turn."""
        until = monotonic() + PATIENCE_S
        making = self.begin(constraint, until)
        for within in (PATIENCE_S, FIRST_S):
            with suppress(TooLate):
                return making.result(within)
            if not making.running():
                break
        raise overloaded()

    def begin(self, constraint: Constraint, until: float) -> Future[Compiled]:
        """Have it compiled. It is given up where it has not been begun in time (monotonic seconds;
        `due`). The future raises RequestError, and so does this."""
        check_bounds(constraint)
        with self._lock:
            known = self._kept.get(constraint)
            if known is not None:
                self._kept.move_to_end(constraint)
                if isinstance(known, RequestError):
                    raise refused(str(known).removeprefix(f"{known.field}: "), known.field)
                done: Future[Compiled] = Future()
                done.set_result(known)
                return done
            running = self._running.get(constraint)
            if running is None:
                running = self._workers().submit(self._work, constraint, until)
                self._running[constraint] = running
            return running

    @property
    def kept_bytes(self) -> int:
        """About what the kept grammars hold."""
        return self._bytes

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, "grammar")
            get_ready()
        return self._pool

    def _make_lexicon(self) -> Lexicon:
        with self._words:
            if self._lexicon is None:
                self._lexicon = Lexicon(self._spelling)
            return self._lexicon

    def _work(self, constraint: Constraint, until: float) -> Compiled:
        try:
            made: Compiled | RequestError = self._compiled(constraint, until)
        except Busy:
            with self._lock:
                self._running.pop(constraint, None)
            raise overloaded() from None
        except RequestError as error:
            made = error
        except MatchError as error:
            made = refused(str(error))
        except BaseException as error:  # a panic of compiled code is no Exception
            log.exception("a constraint of kind %s can't be compiled", constraint.kind)
            made = refused(f"it can't be compiled ({type(error).__name__})")
        with self._lock:
            self._running.pop(constraint, None)
            self._kept[constraint] = made
            self._bytes += _cost(made, constraint)
            while self._bytes > KEPT_BYTES or len(self._kept) > KEPT:
                oldest, dropped = self._kept.popitem(last=False)
                self._bytes -= _cost(dropped, oldest)
        if isinstance(made, RequestError):
            raise made
        return made

    def _compiled(self, constraint: Constraint, until: float) -> Compiled:
        if monotonic() > until:
            raise Busy  # whoever asked has been told so
        marker = None
        if constraint.after:
            marker = self._make_lexicon().control.get(constraint.after.encode("utf-8", "replace"))
        source, schema = source_of(constraint, marker)
        with self._lock:  # the grammar itself may be there already
            known = self._kept.get(_plain(constraint))
        grammar = known.grammar if isinstance(known, Compiled) else None
        hostile = grammar is None and constraint.kind in HOSTILE
        if hostile and (wrong := try_out(source, self._within_s, until)):
            raise refused(placed(tidy(wrong), schema))
        lexicon = self._make_lexicon()
        bounds = None
        if needs_bounds(constraint):
            with self._words:
                if self._counters is None:
                    self._counters = Counters(lexicon)
            bounds = Bounds(self._counters, constraint, marker)
        if grammar is None:
            try:
                grammar = Grammar(lexicon, source, schema)
            except MatchError as error:
                raise refused(placed(str(error), schema)) from None
        if bounds is not None:
            first = grammar.start().allowed()
            bounds.limit(bounds.start, first)
            if not first.any():
                raise refused("no text fits its grammar and its bounds")
        return Compiled(constraint, grammar, bounds)


def _plain(constraint: Constraint) -> Constraint:
    """Without its bounds."""
    return replace(
        constraint, max_chars=None, min_chars=0, max_words=None, max_sentences=None, banned=()
    )


def due(arrived: float) -> float:
    """When a request that arrived then is told what becomes of its constraint."""
    return max(arrived + ANSWER_S, monotonic() + LEAST_S)


def overloaded() -> RequestError:
    """Nothing is wrong with it; it could not be found out in time."""
    return RequestError(FIELD, "too many constraints are being compiled", "overloaded")


def _cost(made: Compiled | RequestError, constraint: Constraint) -> int:
    own = 512 + 4 * len(constraint.source) + 8 * sum(map(len, constraint.banned))
    if isinstance(made, RequestError):
        return own
    return own + made.grammar.cost + (made.bounds.cost if made.bounds is not None else 0)


def needs_bounds(constraint: Constraint) -> bool:
    """Whether there is more to it than its grammar."""
    given = (constraint.max_chars, constraint.max_words, constraint.max_sentences)
    return any(x is not None for x in given) or constraint.min_chars > 0 or bool(constraint.banned)


def check_bounds(constraint: Constraint) -> None:
    """Raise RequestError naming a bound that makes no sense."""
    for name in ("max_chars", "max_words", "max_sentences"):
        value = getattr(constraint, name)
        if value is not None and not 1 <= value <= 2**31 - 1:
            raise refused(f"must be a whole number from 1, got {value!r}", f"{FIELD}.{name}")
    most = constraint.max_chars
    if constraint.min_chars < 0 or (most is not None and constraint.min_chars > most):
        raise refused("must be from 0 to max_chars", f"{FIELD}.min_chars")
    if len(constraint.banned) > MOST_BANNED:
        raise refused(f"has more than {MOST_BANNED} entries", f"{FIELD}.banned")
    if any(not text for text in constraint.banned):
        raise refused("an entry is empty", f"{FIELD}.banned")
    if sum(map(len, constraint.banned)) > MOST_BANNED_CHARS:
        raise refused(f"has more than {MOST_BANNED_CHARS} characters", f"{FIELD}.banned")
    if len(constraint.after) > 256:
        raise refused("has more than 256 characters", f"{FIELD}.after")
    if constraint.whitespace not in ("bounded", "compact", "any"):
        raise refused("must be bounded, compact or any", f"{FIELD}.whitespace")


_compilers: dict[int, Compiler] = {}  # by id; each holds its tokenizer, so ids stay unique
_making = threading.Lock()


def compile_for(request: Request, compiler: Compiler | None) -> None:
    """Compile a request's constraint if it has one that isn't compiled. Raises RequestError."""
    for one in request.segments:
        compile_for(one, compiler)
    if request.constraint is None or request.compiled is not None:
        return
    if compiler is None:
        raise refused("this engine has no tokenizer to compile it for")
    request.compiled = compiler.compile(request.constraint)


def compiler_of(spelling: Spelling) -> Compiler:
    """The one compiler of a tokenizer: the server and an engine in its process share it."""
    with _making:
        made = _compilers.get(id(spelling))
        if made is None:
            made = _compilers[id(spelling)] = Compiler(spelling)
        return made
