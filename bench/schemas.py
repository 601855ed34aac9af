"""Schemas as people send them, made by a seed: what benches and tests of structured output ask for.

Objects of a dozen domains with nested objects, lists, enums, dates, patterns, references and values
that may be null. Every text is bounded, so that an answer ends by itself. Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

# Domain -> fields to choose from: name, and what it holds.
DOMAINS: dict[str, dict[str, str]] = {
    "customer": {
        "full_name": "name", "email": "email", "age": "small", "country": "code",
        "newsletter": "flag", "address": "address", "loyalty": "level", "notes": "maybe",
    },
    "order": {
        "order_number": "serial", "customer_name": "name", "items": "items", "total": "money",
        "currency": "currency", "paid": "flag", "ship_to": "address", "ordered_on": "date",
    },
    "ticket": {
        "title": "short", "priority": "level", "component": "word", "assignee": "maybe",
        "labels": "words", "opened": "date", "blocked": "flag", "estimate_hours": "small",
    },
    "event": {
        "name": "short", "starts": "date", "start_time": "time", "venue": "address",
        "speakers": "people", "capacity": "large", "online": "flag", "kind": "level",
    },
    "weather": {
        "city": "name", "temperature_celsius": "degrees", "humidity_percent": "percent",
        "wind": "measure", "condition": "sky", "alerts": "words", "observed_on": "date",
    },
    "product": {
        "sku": "serial", "title": "short", "price": "money", "in_stock": "flag",
        "dimensions": "box", "tags": "words", "rating": "stars", "discount": "maybe_number",
    },
    "invoice": {
        "invoice_id": "serial", "issued": "date", "due": "date", "lines": "items",
        "vat_percent": "percent", "bill_to": "address", "settled": "flag", "currency": "currency",
    },
    "recipe": {
        "dish": "short", "servings": "small", "ingredients": "items", "steps": "sentences",
        "vegetarian": "flag", "difficulty": "level", "minutes": "small",
    },
    "patient": {
        "patient_name": "name", "born": "date", "blood_type": "blood", "allergies": "words",
        "contact": "person", "insured": "flag", "ward": "code",
    },
    "flight": {
        "flight_number": "serial", "from_airport": "code", "to_airport": "code", "departs": "date",
        "passengers": "people", "delayed": "flag", "gate": "maybe", "seat_class": "level",
    },
    "review": {
        "stars": "stars", "summary": "short", "pros": "words", "cons": "words",
        "recommended": "flag", "reviewer": "person", "sentiment": "mood",
    },
    "device": {
        "hostname": "word", "address": "ipv4", "port": "large", "services": "words",
        "reading": "measure", "enabled": "flag", "firmware": "version", "owner": "person",
    },
}  # fmt: skip

CHOICES: dict[str, list[Any]] = {
    "level": ["low", "medium", "high"],
    "currency": ["EUR", "USD", "GBP", "JPY"],
    "sky": ["clear", "cloudy", "rain", "snow", "storm"],
    "blood": ["A+", "A-", "B+", "B-", "AB+", "AB-", "0+", "0-"],
    "mood": ["positive", "neutral", "negative"],
    "stars": [1, 2, 3, 4, 5],
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A schema, what it is of, and how somebody asks for it."""

    name: str
    schema: Schema
    prompt: str


def obj(properties: Schema, required: list[str] | None = None) -> Schema:
    """An object of these properties and no others; all are required unless told."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _text(most: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(of: Schema, most: int) -> Schema:
    return {"type": "array", "items": of, "minItems": 1, "maxItems": most}


_ADDRESS = obj({"street": _text(20), "city": _text(16), "postcode": {
    "type": "string", "pattern": "^[0-9]{5}$"}})  # fmt: skip
_PERSON = obj({"name": _text(16), "phone": {"type": "string", "pattern": r"^\+[0-9]{8,11}$"}})
_ITEM = obj({"name": _text(16), "quantity": _whole(1, 99)})

PLAIN: dict[str, Callable[[], Schema]] = {
    "name": lambda: _text(24),
    "short": lambda: _text(32),
    "word": lambda: {"type": "string", "pattern": "^[a-z][a-z0-9-]{1,14}$"},
    "code": lambda: {"type": "string", "pattern": "^[A-Z]{3}$"},
    "serial": lambda: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
    "version": lambda: {"type": "string", "pattern": r"^[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,3})?$"},
    "email": lambda: {"type": "string", "format": "email", "maxLength": 40},
    "ipv4": lambda: {"type": "string", "format": "ipv4"},
    "date": lambda: {"type": "string", "format": "date"},
    "time": lambda: {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "flag": lambda: {"type": "boolean"},
    "small": lambda: _whole(0, 120),
    "large": lambda: _whole(1, 65535),
    "degrees": lambda: _whole(-40, 50),
    "percent": lambda: _whole(0, 100),
    "money": lambda: {"type": "number", "minimum": 0, "maximum": 100000, "multipleOf": 0.01},
    "maybe": lambda: {"anyOf": [_text(16), {"type": "null"}]},
    "maybe_number": lambda: {"anyOf": [_whole(0, 90), {"type": "null"}]},
    "address": lambda: _ADDRESS,
    "person": lambda: _PERSON,
    "box": lambda: obj({side: _whole(1, 500) for side in ("width", "height", "depth")}),
    "measure": lambda: obj({"value": _whole(0, 999), "unit": {"enum": ["m/s", "km/h", "kW", "C"]}}),
    "items": lambda: _list(_ITEM, 3),
    "people": lambda: _list(_PERSON, 2),
    "words": lambda: _list({"type": "string", "pattern": "^[a-z]{2,12}$"}, 3),
    "sentences": lambda: _list(_text(32), 3),
}


def _made(kind: str) -> Schema:
    return {"enum": CHOICES[kind]} if kind in CHOICES else PLAIN[kind]()


def made(count: int = 100, seed: int = 1) -> list[Asked]:
    """`count` schemas, the same for the same seed."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        domain = list(DOMAINS)[number % len(DOMAINS)]
        fields = DOMAINS[domain]
        names = chance.sample(list(fields), chance.randint(3, min(6, len(fields))))
        properties = {name: _made(fields[name]) for name in names}
        required = [name for name in names if chance.random() < 0.85]
        schema = obj(properties, required if chance.random() < 0.5 else names)
        match number % 5:
            case 1:  # a list of such objects
                schema = obj({f"{domain}s": _list(schema, 2)})
            case 2:  # under a constant that tells what it is
                schema["properties"] = {"type": {"const": domain}, **properties}
                schema["required"] = ["type", *schema["required"]]
            case 3:  # what is nested stands under a name
                schema = {
                    "$defs": {domain: schema},
                    **obj({"version": {"const": 1}, domain: {"$ref": f"#/$defs/{domain}"}}),
                }
        told = ", ".join(name.replace("_", " ") for name in names)
        prompt = f"Make up one {domain} with {told}. Answer with a JSON object only."
        found.append(Asked(f"{domain} {number}", schema, prompt))
    return found


ORDER = obj(
    {
        "order_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "customer_name": _text(20),
        "delivery_address": obj({"street_and_number": _text(20), "city": _text(16)}),
        "ordered_products": _list(
            obj({"product_name": _text(16), "quantity": _whole(1, 99)}), 2
        ),
        "payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        "express_delivery": {"type": "boolean"},
    }
)  # fmt: skip
EXAMPLE = {
    "order_number": "AB-1234",
    "customer_name": "Ann Lee",
    "delivery_address": {"street_and_number": "Main Road 5", "city": "Leeds"},
    "ordered_products": [{"product_name": "desk lamp", "quantity": 2}],
    "payment_method": "credit_card",
    "express_delivery": False,
}
_WHO = ("Ruth Olsen", "Ivo Braun", "Mia Chen", "Tom Price", "Lena Roth", "Omar Said", "Eva Kolar")
_WHAT = ("garden chair", "tea pot", "desk lamp", "road bike", "wool coat", "phone case")
_WHERE = ("Oslo", "Bonn", "Leeds", "Graz", "Turin", "Porto", "Ghent", "Basel")


def orders(count: int = 100, seed: int = 1) -> list[str]:
    """Orders in words, each to be written as `ORDER` has it."""
    chance = random.Random(seed)
    return [
        f"{chance.choice(_WHO)} in {chance.choice(_WHERE)}, Mill Lane {chance.randint(1, 99)}, "
        f"orders {chance.randint(2, 9)} of {chance.choice(_WHAT)} under number "
        f"{chance.choice('ABCDE')}{chance.choice('KLMNO')}-{chance.randint(1000, 9999)}, pays by "
        f"{chance.choice(('credit card', 'bank transfer', 'cash'))}."
        for _ in range(count)
    ]
