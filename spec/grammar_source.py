"""From a `Constraint` to the text llguidance compiles, and what is refused before it sees it.

Sizes, depths, repetitions and divisors are bounded here, as some short grammars take minutes or
gigabytes to compile: measured with llguidance 1.9, only large `multipleOf`s and large counted
repetitions escape its own limits. Knows no tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from spec_serve.spec.request import Constraint, RequestError
from spec_serve.spec.schema_words import BY_NAME, DATA, anchored, contained, counted, negated
from spec_serve.spec.shipped import SHIPPED

FIELD = "constraint"
MOST_CHARS = 512 << 10
MOST_DEPTH = 64
MOST_CHOICES = 10_000
MOST_REPEATS = 5_000
MOST_DIVISORS = 10_000  # product of the different multipleOfs of a schema

# At most a newline and its indentation, or two blanks: a bound on what is known as a model's
# endless white space.
_UNFORCED = '%llguidance {"no_forcing": true}\n'
BOUNDED = r"(\x0A[\x20\x09]{0,20}|[\x20\x09]{1,2})"
_REPEAT = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")
_IN_PLACE = frozenset(
    {"allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas",
     "contains"}
)  # fmt: skip
_OF_JSON: dict[str, dict[str, object]] = {
    "bounded": {"whitespace_pattern": BOUNDED},
    "compact": {"whitespace_flexible": False},
    "any": {"whitespace_flexible": True},
}


def refused(message: str, field: str = FIELD) -> RequestError:
    """What is raised for a constraint that can't be served."""
    return RequestError(field, message)


def source_of(constraint: Constraint, marker: int | None = None) -> tuple[str, Any]:
    """The grammar as llguidance takes it, and the parsed schema if it is one.

    marker: the control token that `constraint.after` is, if it is one. Raises RequestError.
    """
    if len(constraint.source) > MOST_CHARS:
        raise refused(f"{len(constraint.source)} characters; at most {MOST_CHARS} are compiled")
    schema: Any = None
    match constraint.kind:
        case "text":
            _empty(constraint)
            text = LLMatcher.grammar_from_regex("(?s:.)*")
        case "regex":
            _repeats(constraint.source)
            text = LLMatcher.grammar_from_regex(ascii_digits(constraint.source))
        case "json_schema" | "json_object":
            if constraint.kind == "json_object":
                _empty(constraint)
                schema = {"type": "object"}
            else:
                schema = _json(constraint.source, "schema")
            text = _from_schema(schema, constraint)
        case "choices":
            text = _from_choices(_json(constraint.source, "list of choices"))
        case "lark":
            _check_lark(constraint.source)
            text = LLMatcher.grammar_from_lark(constraint.source)
        case "name":
            if constraint.source not in SHIPPED:
                known = ", ".join(sorted(SHIPPED))
                raise refused(f"no grammar is named {constraint.source[:64]!r}; there are: {known}")
            text = LLMatcher.grammar_from_lark(SHIPPED[constraint.source])
        case _:
            raise refused(f"kind {str(constraint.kind)[:32]!r} is not known")
    if constraint.after:
        text = _behind(text, constraint.after, marker)
    return (text if constraint.forcing else _free(text)), schema


def _empty(constraint: Constraint) -> None:
    if constraint.source:
        raise refused(f"kind {constraint.kind} takes no source")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise refused(f"the {what} is nested too deeply") from None
    except ValueError as error:
        raise refused(f"the {what} is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _from_schema(schema: Any, constraint: Constraint) -> str:
    if not isinstance(schema, (dict, bool)):
        raise refused("a schema must be an object or a boolean")
    check_schema(schema)
    # Said either way, as a schema could say it itself.
    loose = not constraint.strict
    options: dict[str, Any] = {
        **_OF_JSON[constraint.whitespace], "lenient": loose, "coerce_one_of": loose
    }  # fmt: skip
    if schema is False:
        raise refused("no text fits it")
    given = {} if schema is True else _written(anchored(schema))
    if given is False:
        raise refused("no text fits it")
    try:
        return LLMatcher.grammar_from_json_schema(given, overrides=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise refused(str(error)[:300]) from None


def check_schema(schema: Any) -> None:
    """Bounds on depth, patterns and divisors anywhere in a parsed schema."""
    divisors: set[float] = set()
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise refused(f"the schema is nested more than {MOST_DEPTH} deep")
        if isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, dict):
            divisor, pattern = value.get("multipleOf"), value.get("pattern")
            if isinstance(divisor, (int, float)) and not isinstance(divisor, bool):
                divisors.add(divisor)
            if isinstance(pattern, str):
                _repeats(pattern)
            patterns = value.get("patternProperties")
            for name in patterns if isinstance(patterns, dict) else ():
                _repeats(name)
            waiting += [(inner, depth + 1) for inner in value.values()]
    product = 1.0
    for divisor in divisors:
        product *= _weight(divisor)
        if product > MOST_DIVISORS:
            raise refused(f"multipleOf: all different ones multiply to over {MOST_DIVISORS}")


def ascii_digits(pattern: str, words: bool = False) -> str:
    r"""The same regular expression with \d for the ten digits, and no other script's; with `words`
    also \w for ASCII's, as ECMAScript has them, which schemas are written in."""
    made: list[str] = []
    in_class = False
    meant = {"d": "0-9", "w": "0-9A-Za-z_"} if words else {"d": "0-9"}
    at = 0
    while at < len(pattern):
        piece = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if piece[1:] in meant and len(piece) == 2:
            piece = meant[piece[1]] if in_class else f"[{meant[piece[1]]}]"
        elif piece == "[":
            in_class = True
        elif piece == "]":
            in_class = False
        made.append(piece)
    return "".join(made)


def _written(schema: Any) -> Any:
    """A schema, its patterns as they are meant and its keywords in plainer ones. Depth is bounded
    before."""
    if isinstance(schema, list):
        return [_written(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            patterns = name == "patternProperties"
            made[name] = {
                (ascii_digits(key, words=True) if patterns else key): _written(inner)
                for key, inner in value.items()
            }
        elif name == "pattern" and isinstance(value, str):
            made[name] = ascii_digits(value, words=True)
        else:
            made[name] = value if name in DATA else _written(value)
    return _plainer(made)


def _plainer(schema: dict[str, Any]) -> Any:
    """The same schema without keywords that can't be enforced and needn't be: those that say
    nothing as they stand, and those that another keyword says as well."""
    made = contained(counted(schema))
    if (other := negated(made)) is not made:
        return _plainer(other) if isinstance(other, dict) else other
    for name, plain in (("unevaluatedProperties", "additionalProperties"),
                        ("unevaluatedItems", "items")):  # fmt: skip
        # What other keywords evaluate is known where none of them applies schemas in place.
        if name in made and (plain in made or not _IN_PLACE & made.keys()):
            value = made.pop(name)
            made.setdefault(plain, value)
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if made.get("not") is False:
        del made["not"]
    if "contains" not in made:
        for name in ("minContains", "maxContains"):
            made.pop(name, None)
    if "if" not in made or not {"then", "else"} & made.keys():
        for name in ("if", "then", "else"):
            made.pop(name, None)
    elif isinstance(made["if"], bool):
        taken = made.pop("then", True), made.pop("else", True)
        made["allOf"] = [*made.get("allOf", ()), taken[0 if made.pop("if") else 1]]
    for name in ("dependentRequired", "dependentSchemas"):
        if not made.get(name, True):
            del made[name]
    return _named(made)


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with `propertyNames` as the properties it allows, where it can be said."""
    names = schema.get("propertyNames", True)
    if names is True or names == {} or names == {"type": "string"}:
        return {name: value for name, value in schema.items() if name != "propertyNames"}
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return schema
    own = {name: value for name, value in names.items() if (name, value) != ("type", "string")}
    value = schema.get("additionalProperties", True)
    made = {**schema, "additionalProperties": False}
    match own:
        case {"pattern": str(pattern), **rest} if not rest:
            made["patternProperties"] = {pattern: value}
        case {"const": str(text), **rest} if not rest:
            made["properties"] = {text: value}
        case {"enum": list(texts), **rest} if not rest and all(isinstance(t, str) for t in texts):
            made["properties"] = dict.fromkeys(texts, value)
        case {"maxLength": int(most), **rest} if (
            not rest and most is not True and 0 <= most <= MOST_REPEATS
        ):
            made["patternProperties"] = {f"^[\\s\\S]{{0,{most}}}$": value}
        case _:
            return schema
    del made["propertyNames"]
    return made


def _weight(divisor: float) -> float:
    """How many remainders a divisor has, decimals counted: 0.25 is 25 hundredths."""
    digits = repr(abs(divisor))
    if "e" in digits or "inf" in digits or len(digits) > 12:
        return MOST_DIVISORS + 1.0
    return float(int(digits.replace(".", "") or "0")) if "." in digits else abs(divisor)


def _repeats(pattern: str) -> None:
    for low, high in _REPEAT.findall(pattern):
        most = max((int(n[:12]) for n in (low, high) if n), default=0)
        if most > MOST_REPEATS:
            raise refused(f"a repetition of {most} is more than {MOST_REPEATS}")


def _from_choices(choices: Any) -> str:
    if not isinstance(choices, list) or not choices:
        raise refused("choices must be a list of at least one string")
    if len(choices) > MOST_CHOICES:
        raise refused(f"{len(choices)} choices; at most {MOST_CHOICES} are compiled")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise refused(f"choice {i} must be a string that is not empty")
        _no_halves(choice, f"choice {i}")
    return LLMatcher.grammar_from_regex("|".join(map(_literal, dict.fromkeys(choices))))


def _no_halves(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused(f"{what} holds half a surrogate pair") from None


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(
        c if c.isalnum() or c in " _-" and c != "-" else f"\\x{{{ord(c):X}}}" for c in text
    )


def _check_lark(source: str) -> None:
    _repeats(source)
    at = source.find("%json")
    while at >= 0:
        start = source.find("{", at)
        if start >= 0:
            try:
                inner, _ = json.JSONDecoder().raw_decode(source, start)
            except (ValueError, RecursionError):
                raise refused("what follows %json is not JSON, or nested too deeply") from None
            check_schema(inner)
        at = source.find("%json", at + 5)


def _behind(text: str, marker: str, token: int | None) -> str:
    """The same grammar behind anything that ends with a marker; the first one ends it."""
    _no_halves(marker, "after")
    if token is not None:
        main = f"start: FREE <[{token}]> @constrained\nFREE: /(?s:.)*/"
    else:
        # Lazy: the shortest text that ends with the marker.
        main = f"start: free @constrained\nfree[lazy]: /(?s:.)*{_literal(marker)}/"
    return _within(main, text)


def _within(main: str, text: str) -> str:
    """A grammar in Lark around another one, which it calls @constrained."""
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    grammars[0]["name"] = "constrained"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *grammars]})


def _free(text: str) -> str:
    """The same grammar, every way to cut its text into tokens allowed."""
    if text.startswith("{"):
        grammars = json.loads(text)["grammars"]
        if grammars[0].get("name") == "main":
            grammars[0]["lark_grammar"] = _UNFORCED + grammars[0]["lark_grammar"]
            return json.dumps({"grammars": grammars})
    return _within(_UNFORCED + "start: @constrained", text)
