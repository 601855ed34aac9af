"""Prompts to measure on: a small built-in set, or evaluation files given by path.

Knows two public formats, Spec-Bench's question.jsonl ({category, turns}) and HumanEval's
({task_id, prompt}). None of these prompts is ever used for training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTION = '''def summarize_orders(orders, currency="EUR"):
    """Group orders by customer and compute totals, counts and averages."""
    customers = {}
    for order in orders:
        customer = order.get("customer", "unknown")
        entry = customers.setdefault(customer, {"count": 0, "total": 0.0, "items": []})
        entry["count"] += 1
        entry["total"] += float(order.get("amount", 0.0))
        for item in order.get("items", []):
            name = item.get("name", "")
            quantity = int(item.get("quantity", 1))
            price = float(item.get("price", 0.0))
            entry["items"].append((name, quantity, price))
    result = []
    for customer, entry in sorted(customers.items()):
        average = entry["total"] / entry["count"] if entry["count"] else 0.0
        lines = []
        for name, quantity, price in entry["items"]:
            value = quantity * price
            lines.append(f"{name}: {quantity} x {price:.2f} {currency} = {value:.2f} {currency}")
        result.append(
            {
                "customer": customer,
                "count": entry["count"],
                "total": round(entry["total"], 2),
                "average": round(average, 2),
                "lines": lines,
            }
        )
    return result


def print_summary(orders, currency="EUR", width=72):
    """Print one block per customer with aligned columns."""
    summary = summarize_orders(orders, currency=currency)
    if not summary:
        print("no orders")
        return
    print("=" * width)
    for entry in summary:
        customer = entry["customer"]
        header = f"{customer} ({entry['count']} orders)"
        print(header)
        print("-" * width)
        for line in entry["lines"]:
            print("  " + line)
        print(f"  total:   {entry['total']:.2f} {currency}")
        print(f"  average: {entry['average']:.2f} {currency}")
        print("=" * width)
    grand_total = sum(entry["total"] for entry in summary)
    print(f"grand total: {grand_total:.2f} {currency}")
'''

ARTICLE = (
    "The harbour of Lindau was enlarged in 1856, when the railway reached the island. A lighthouse "
    "of 33 metres and a stone lion were built at its entrance. The lighthouse is one of few in the "
    "world that has a clock in its face. Since 1991 it has been switched on by ships on demand, by "
    "radio. The lion, made of sandstone, weighs fifty tons and looks towards the lake. In winter, "
    "when few ships call, the harbour is quiet, and swans gather near the old customs house."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: user turns (answered one after the other) or, with raw, plain text."""

    category: str
    turns: tuple[str, ...]
    raw: bool = False


BUILT_IN = (
    Prompt("edit", (f"Rename the variable `customer` to `client` everywhere in this code. Answer "
                    f"with the complete code only.\n\n```python\n{FUNCTION}```",)),
    Prompt("summary", (f"Summarize in two sentences, quoting the text:\n\n{ARTICLE}",)),
    Prompt("question", (f"{ARTICLE}\n\nHow tall is the lighthouse, and who switches it on?",)),
    Prompt("chat", ("What makes a good morning routine?", "Shorten your answer to one sentence.")),
    Prompt("chat", ("Explain to a child why the sky is blue.",)),
    Prompt("writing", ("Write a short story about a clockmaker who loses track of time.",)),
    Prompt("math", ("A train leaves at 9:40 and arrives at 13:05. How long does it travel?",)),
    Prompt("code", ("Write a Python function that checks whether a string is a palindrome, with "
                    "a docstring and three examples.",)),
    Prompt("list", ("List the planets of the solar system with one fact about each.",)),
)  # fmt: skip


def load(paths: Sequence[str], per_category: int) -> list[Prompt]:
    """The built-in prompts, or those of the given files: the first `per_category` of each category.

    Raises ValueError naming the file and line that can't be read.
    """
    if not paths:
        return list(BUILT_IN)
    prompts: list[Prompt] = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                if "turns" in entry:
                    prompts.append(Prompt(str(entry["category"]), tuple(entry["turns"])))
                else:
                    prompts.append(Prompt("humaneval", (str(entry["prompt"]),), raw=True))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a prompt ({error})") from error
    kept: list[Prompt] = []
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if not per_category or counts[prompt.category] <= per_category:
            kept.append(prompt)
    return kept
