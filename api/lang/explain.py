"""A graph for people: as text, and drawn.

Says for each operation what is known before a run. Knows no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.sax.saxutils import escape

from spec_serve.lang.chains import fused
from spec_serve.lang.parts import (
    Append,
    Call,
    Cond,
    Const,
    Fork,
    Gen,
    Item,
    Loop,
    Op,
    Plain,
    Ref,
    Select,
    asked,
)

WIDE, HIGH, GAP = 220, 40, 16
_COLOURS = {
    "Append": "#e8f0fe", "Fork": "#f3e8fd", "Call": "#fef3e0", "Cond": "#e6f4ea", "Loop": "#fce8e6",
}  # fmt: skip


def _short(text: object, most: int = 40) -> str:
    told = repr(text)
    return told if len(told) <= most else told[: most - 4] + "...'"


def _item(item: Item | Plain) -> str:
    if isinstance(item, Const):
        return _short(item.text)
    if isinstance(item, Ref):
        return f"<{item.key}>"
    if isinstance(item, Gen):
        limit = item.options.get("max_tokens")
        kind = item.options.get("constraint", {}).get("kind", "free")
        return f"gen {named(item.key)} ({kind}{f', at most {limit}' if limit else ''})"
    if isinstance(item, Select):
        return f"select {named(item.key)} of {len(item.choices)} ({item.rule})"
    return _short(item.value)


def named(key: str) -> str:
    """The name of a variable by its key."""
    return key.partition("/")[2].rpartition("#")[0]


def _line(op: Op) -> str:
    if isinstance(op, Call):
        return f"{op.key} = {op.function}({', '.join(map(_item, op.args))})"
    if isinstance(op, Fork):
        pairs = zip(op.names, op.children, strict=True)
        told = ", ".join(f"{name} = state {child}" for name, child in pairs)
        return f"state {op.parent}: fork {told}"
    if isinstance(op, Cond):
        return f"state {op.state}: cond {named(op.on) or op.on}"
    if isinstance(op, Loop):
        until = f" until {named(op.end)} in {_short(op.until)}" if op.end else ""
        return f"state {op.state}: loop at most {op.most}{until}"
    return f"state {op.state}: {op.role or 'text'}: " + " + ".join(map(_item, op.items))


def _told(ops: Iterable[Op]) -> Iterator[tuple[Op, str]]:
    """Each operation and its line; those of bodies below theirs, further in."""
    for op in ops:
        yield op, _line(op)
        if isinstance(op, Loop):
            yield from ((one, f"  {line}") for one, line in _told(op.body.ops))
        elif isinstance(op, Cond):
            cases = [*((_short(text), body) for text, body in op.cases.items()), ("else", op.other)]
            for case, body in cases:
                yield from ((one, f"  {case}: {line}") for one, line in _told(body.ops))


def explained(
    name: str,
    ops: Iterable[Op],
    known: Mapping[bytes, list[list[int]]],
    prefix: list[int],
    cut: str,
) -> str:
    """Lines of text."""
    held = list(ops)
    asking = sum(1 if isinstance(item, Gen) else len(item.choices) for item in asked(held))
    ids = sum(len(piece) for pieces in known.values() for piece in pieces[-1:])
    lines = [f"program {name}", *(f"  {line}" for _, line in _told(held))]
    lines += [f"in one request: {', '.join(map(named, chain))}" for chain in fused(held)]
    lines += [
        f"prompts known before a run: {len(known)} of {asking} ({ids} tokens of theirs)",
        f"constant beginning: {len(prefix)} tokens, computed at compile time",
    ]
    if cut:
        lines.append(f"from here on interpreted: {cut}")
    return "\n".join(lines)


def drawn(ops: Iterable[Op]) -> str:
    """An SVG: time runs down; a column for calls, then one for each state."""
    held = list(_told(ops))
    columns: dict[object, int] = {}
    boxes: list[str] = []
    lines: list[str] = []
    last: dict[int, tuple[int, int]] = {}
    for row, (op, line) in enumerate(held):
        owner: object = "calls"
        if isinstance(op, Append | Cond | Loop):
            owner = op.state
        elif isinstance(op, Fork):
            owner = op.parent
        column = columns.setdefault(owner, len(columns))
        x, y = GAP + column * (WIDE + GAP), GAP + row * (HIGH + GAP)
        if isinstance(owner, int):
            if owner in last:
                lines.append(_arrow(last[owner], (x + WIDE // 2, y)))
            last[owner] = (x + WIDE // 2, y + HIGH)
        if isinstance(op, Fork):
            for child in op.children:
                last[child] = (x + WIDE // 2, y + HIGH)
        boxes.append(
            f'<g><title>{escape(line)}</title><rect x="{x}" y="{y}" width="{WIDE}" '
            f'height="{HIGH}" rx="6" fill="{_COLOURS[type(op).__name__]}" stroke="#5f6368"/>'
            f'<text x="{x + 8}" y="{y + 24}">{escape(line[:34])}</text></g>'
        )
    wide = GAP + max(1, len(columns)) * (WIDE + GAP)
    high = GAP + max(1, len(held)) * (HIGH + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="monospace" font-size="11">' + "".join(lines + boxes) + "</svg>\n"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    return f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#5f6368"/>'
