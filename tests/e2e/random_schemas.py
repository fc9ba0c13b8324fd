"""Random JSON schemas whose instances are short, of all keywords that are supported."""

import random
from collections.abc import Callable
from typing import Any

type Schema = dict[str, Any]

PATTERNS = (r"^[A-Z]{2,4}-[0-9]{1,5}$", r"^(red|green|blue)$", r"^\d+(\.\d{2})?$", "b[aeiou]+d")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")
WORDS = ["red", "green", 'say "hi"', "back\\slash", "東京", "🌆", "", "a b", "tab\t", "é"]


def random_schema(rng: random.Random) -> Schema:
    """Return a schema, of which sub-schemas are nested up to four deep."""
    make = _Maker(rng)
    schema = make.schema(4)
    if make.num_refs:
        schema = {"$defs": {"leaf": make.leaf(), "pair": make.object(1)}, **schema}
    return schema


class _Maker:
    """Makes sub-schemas.

    Attributes:
      num_refs: references that were made.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_refs = 0

    def schema(self, depth: int) -> Schema:
        nested = [self.object, self.array, self.any_of, self.all_of]
        if depth and self.rng.random() < 0.7:
            return self.rng.choice(nested)(depth - 1)
        if self.rng.random() < 0.15:
            self.num_refs += 1
            return {"$ref": f"#/$defs/{self.rng.choice(['leaf', 'pair'])}"}
        return self.leaf()

    def leaf(self) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self.enum,
            self.string,
            self.pattern,
            self.format,
            self.integer,
            self.number,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"const": self.rng.choice([*WORDS, 3, -2.5, True, None, [1, "x"], {"a": 1}])},
            lambda: {"type": ["boolean", "null"]},
        ]
        return self.rng.choice(leaves)()

    def enum(self) -> Schema:
        return {"enum": self.rng.sample([*WORDS, 0, 17, -4, 2.5, True, None], 3)}

    def string(self) -> Schema:
        low = self.rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 5)}

    def pattern(self) -> Schema:
        return {"type": "string", "pattern": self.rng.choice(PATTERNS)}

    def format(self) -> Schema:
        return {"type": "string", "format": self.rng.choice(FORMATS)}

    def integer(self) -> Schema:
        low = self.rng.randint(-50, 50)
        bounds = {"minimum": low, "maximum": low + self.rng.randint(0, 500)}
        if self.rng.random() < 0.2:
            return {"type": "integer", "multipleOf": self.rng.choice([2, 5]), "minimum": 0}
        return {"type": "integer", **bounds}

    def number(self) -> Schema:
        low = self.rng.randint(-50, 50)
        return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 10}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(["a", "b c", "ä", "d-e", 'q"', "f", "$g"], self.rng.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "required": [name for name in names if self.rng.random() < 0.7],
        }
        kind = self.rng.random()
        if kind < 0.7:
            schema["additionalProperties"] = False
        elif kind < 0.85:
            schema["patternProperties"] = {"^x[0-9]$": self.leaf()}
            schema["additionalProperties"] = False
        return schema

    def array(self, depth: int) -> Schema:
        low = self.rng.randint(0, 2)
        schema: Schema = {"type": "array", "items": self.schema(depth), "minItems": low}
        if self.rng.random() < 0.3:
            schema |= {"prefixItems": [self.leaf(), self.leaf()], "items": False, "minItems": 2}
        else:
            schema["maxItems"] = low + self.rng.randint(0, 2)
        return schema

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self.rng.randint(1, 3))]}

    def all_of(self, depth: int) -> Schema:
        return {"allOf": [self.schema(depth), {"description": "anything"}]}
