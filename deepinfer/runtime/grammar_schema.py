"""JSON schemas of structured output: what is enforced, and the refusal of everything else.

llguidance drops a keyword that it does not know, and what contradicts itself where that is
optional. Here every keyword that a value can reach is checked first, so that a schema is enforced
as a whole or refused by keyword and place. Draft 2020-12.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from deepinfer.errors import RequestError
from deepinfer.runtime.grammar_finite import TYPES, Node, find_endless

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
           "uri")  # as regular expressions: in those, every February may have 29 days
# The largest multipleOf, count and length that are taken; larger ones make huge automata.
MAX_COUNT, MAX_MULTIPLE = 100_000, 10_000

# keyword -> the kind of its value, see _VALUES.
ENFORCED = {
    "$ref": "a reference", "type": "types", "enum": "values", "const": "a value",
    "allOf": "schemas", "anyOf": "schemas", "oneOf": "schemas",
    "properties": "named schemas", "patternProperties": "named schemas",
    "additionalProperties": "a schema", "required": "names",
    "minProperties": "a count", "maxProperties": "a count",
    "items": "a schema", "prefixItems": "schemas", "minItems": "a count", "maxItems": "a count",
    "minLength": "a count", "maxLength": "a count", "pattern": "a text", "format": "a format",
    "minimum": "a number", "maximum": "a number", "exclusiveMinimum": "a number",
    "exclusiveMaximum": "a number", "multipleOf": "a multiple",
}
# They say nothing about values. Names that begin with x- are annotations too, x-guidance aside.
ANNOTATIONS = ("$defs", "definitions", "$comment", "title", "description", "default", "examples",
               "example", "deprecated", "readOnly", "writeOnly", "discriminator")
ONLY_AT_ROOT = ("$schema", "$id")
_OLD = {"additionalItems": "items", "dependencies": "properties of each branch of anyOf",
        "nullable": 'type: [..., "null"]', "id": "nothing"}
# A value is below the first and above the second: (low, high, whether they may be equal).
_BOUNDS = (("minimum", "maximum", True), ("minimum", "exclusiveMaximum", False),
           ("exclusiveMinimum", "maximum", False), ("exclusiveMinimum", "exclusiveMaximum", False),
           ("minLength", "maxLength", True), ("minItems", "maxItems", True),
           ("minProperties", "maxProperties", True))


def check_schema(schema: Any, where: str) -> dict[str, Any]:
    """A schema as llguidance is to see it.

    Args:
        schema: parsed JSON, nested no deeper than Python may recurse. where: for errors.

    Raises:
        RequestError: a keyword that is not enforced, a malformed value, a ``$ref`` that leads
            nowhere, bounds that contradict each other, or a place where no finite value fits.
    """
    if schema is True:
        return {}
    nodes = _Walk(schema, where).nodes
    path = find_endless(nodes)
    if path is not None:
        raise RequestError("no finite JSON value fits the schema here, expected at least one",
                           where=f"{where}, {path}",
                           next="look for a $ref or a required property that needs itself, and "
                                "for a required property or item that is not allowed")
    return {name: value for name, value in schema.items() if name not in ONLY_AT_ROOT}


def explain(schema: dict[str, Any], message: str, where: str) -> RequestError:
    """The error for a checked schema that llguidance refuses, with the keywords it is about."""
    for sign, keywords, advice in _REFUSALS:
        if sign in message:
            found = [(name, path) for path, node in _Walk(schema, where).nodes.items()
                     for name in keywords if isinstance(node.schema, dict) and name in node.schema]
            names = ", ".join(f"'{name}'" for name in dict(found)) or f"'{keywords[0]}'"
            places = ", ".join(dict.fromkeys(path for _, path in found[:4])) or "#"
            return RequestError(f"JSON schema keyword {names} is not supported as it is used: "
                                f"{message}", where=f"{where}, {places}", next=advice)
    return RequestError(f"the schema does not compile: {message}", where=where,
                        next="simplify the schema")


# (part of llguidance's message, keywords it is about, what to do next)
_REFUSALS = (
    ("oneOf constraints", ("oneOf",), "use anyOf, or branches that differ in type or in the const "
     "of a required property, so that they cannot overlap"),
    ("min/maxProperties", ("minProperties", "maxProperties"),
     "require all names in 'properties', or leave the number of properties open"),
    ("patternProperty", ("patternProperties",), "use patterns that no name matches two of"),
    ("circular references", ("$ref", "allOf"), "let no $ref with keywords beside it reach itself"),
    ("ultiple", ("multipleOf",), "use a smaller multipleOf, or fewer of them at one place"),
    ("egex", ("pattern", "patternProperties"), "use a pattern without look-around, \\b and "
     "backreferences that some value matches"),
)


class _Walk:
    """Every schema that a value can reach, by path, each checked by itself."""

    def __init__(self, root: Any, where: str) -> None:
        self.root, self.where = root, where
        self.nodes: dict[str, Node] = {}
        # (reference, where it stands). No recursion: a chain of references may be long.
        self._waiting = [("#", "#")]
        while self._waiting:
            path, source = self._waiting.pop()
            if path not in self.nodes:
                self._visit(self._resolve(path, source), path)

    def _visit(self, schema: Any, path: str) -> str:
        if path in self.nodes:
            return path
        if not isinstance(schema, bool | dict):
            raise self._wrong(path, f"a schema is {_brief(schema)}", "an object, true or false")
        children: dict[str, str] = {}
        self.nodes[path] = Node(schema, children)
        for name, value in schema.items() if isinstance(schema, dict) else ():
            if name in ENFORCED:
                self._check(name, value, path)
                children.update(self._children(name, value, path))
            elif not self._is_annotation(name, path):
                raise self._unsupported(name, path)
        if isinstance(schema, dict):
            self._check_together(schema, path)
        return path

    def _children(self, name: str, value: Any, path: str) -> Iterator[tuple[str, str]]:
        kind = ENFORCED[name]
        if kind == "a reference":
            self._waiting.append((value, path))
            yield name, value
        elif kind == "a schema":
            yield name, self._visit(value, f"{path}/{name}")
        elif kind in ("schemas", "named schemas"):
            for key, child in value.items() if kind == "named schemas" else enumerate(value):
                step = str(key).replace("~", "~0").replace("/", "~1")
                yield f"{name}/{key}", self._visit(child, f"{path}/{name}/{step}")

    def _resolve(self, path: str, source: str) -> Any:
        found = self.root
        for step in path.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, ValueError, TypeError):
                raise self._wrong(source, f"$ref '{path}' leads nowhere, '{step}' is missing",
                                  "a place in this schema such as '#/$defs/name'") from None
        return found

    def _check(self, name: str, value: Any, path: str) -> None:
        kind = ENFORCED[name]
        if not _VALUES[kind][1](value):
            raise self._wrong(path, f"'{name}' is {_brief(value)}", _VALUES[kind][0])
        for number in _numbers(value) if kind in ("values", "a value") else ():
            if not _is_exact(number):
                raise self._wrong(path, f"'{name}' holds {_brief(number)}", _VALUES["a number"][0])

    def _check_together(self, schema: dict[str, Any], path: str) -> None:
        for low, high, may_equal in _BOUNDS:
            if low in schema and high in schema:
                a, b = schema[low], schema[high]
                if a > b or (a == b and not may_equal):
                    raise self._wrong(path, f"'{low}' is {a} and '{high}' is {b}",
                                      "bounds that leave a value between them")
        required = len(set(schema.get("required", ())))
        if required > schema.get("maxProperties", required):
            raise self._wrong(path, f"'maxProperties' is {schema['maxProperties']} and 'required' "
                              f"has {required} names", "no more names than properties")
        # Of the names that are not listed, the grammar cannot tell whether one comes twice.
        if schema.get("minProperties", 0) > required + 1:
            raise self._wrong(path, f"'minProperties' is {schema['minProperties']} and 'required' "
                              f"has {required} names", "at most one more than 'required' has")

    def _is_annotation(self, name: str, path: str) -> bool:
        return (name in ANNOTATIONS or name in ONLY_AT_ROOT and path == "#"
                or name.startswith("x-") and name != "x-guidance")

    def _unsupported(self, name: str, path: str) -> RequestError:
        near = difflib.get_close_matches(name, ENFORCED, n=1)
        instead = f"use {_OLD[name]}" if name in _OLD else f"did you mean '{near[0]}'?" if near \
            else "remove it, and check that in the answer yourself"
        return RequestError(f"JSON schema keyword '{name}' is not supported, expected one of "
                            f"{', '.join(ENFORCED)}", where=f"{self.where}, {path}", next=instead)

    def _wrong(self, path: str, what: str, expected: str) -> RequestError:
        return RequestError(f"{what}, expected {expected}", where=f"{self.where}, {path}",
                            next="correct the schema (JSON Schema draft 2020-12)")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_exact(value: Any) -> bool:
    """A number that is the same as a float64, with digits that come back when it is read."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int):
        return abs(value) <= 2**53
    return abs(value) < 1e100 and float(f"{value:.15g}") == value


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


# kind -> what is expected, and the test of it.
_VALUES: dict[str, tuple[str, Any]] = {
    "a reference": ("'#' or '#/' and a path into this schema",
                    lambda v: isinstance(v, str) and (v == "#" or v.startswith("#/"))),
    "types": (f"one of {', '.join(TYPES)}, or a list of them",
              lambda v: v in TYPES if isinstance(v, str) else
              _is_texts(v) and bool(v) and set(v) <= set(TYPES)),
    "values": ("a list of at least one value", lambda v: isinstance(v, list) and bool(v)),
    "a value": ("any value", lambda v: True),
    "a schema": ("an object, true or false", lambda v: isinstance(v, bool | dict)),
    "schemas": ("a list of at least one schema", lambda v: isinstance(v, list) and bool(v)),
    "named schemas": ("an object of schemas", lambda v: isinstance(v, dict)),
    "names": ("a list of texts", _is_texts),
    "a count": (f"an int in 0..{MAX_COUNT}", _is_count),
    "a text": ("a text", lambda v: isinstance(v, str)),
    "a format": (f"one of {', '.join(FORMATS)}", lambda v: v in FORMATS),
    "a number": ("a number of at most 15 digits, or an int up to 2^53 either way", _is_exact),
    "a multiple": (f"a number in (0, {MAX_MULTIPLE}] of at most 15 digits",
                   lambda v: _is_exact(v) and 0 < v <= MAX_MULTIPLE),
}


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
