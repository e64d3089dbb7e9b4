"""Which places of a JSON schema no finite value fits: there, a model would write on without end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Node:
    """A schema and where the schemas in it are: keyword or keyword/name -> path."""

    schema: Any
    children: Mapping[str, str]


def find_endless(nodes: Mapping[str, Node]) -> str | None:
    """The first path that no finite value fits, or None. Contradictions between the branches of
    ``allOf`` are not seen here.

    Args:
        nodes: every schema that a value can reach, by path; the root is "#".
    """
    # Lowest fixed point: places where some finite value fits. Parts mostly stand after the whole.
    finite: set[str] = set()
    before = -1
    while before < len(finite):
        before = len(finite)
        for path in reversed(list(nodes)):
            if path not in finite and _is_finite(nodes[path], finite):
                finite.add(path)
    # `false` is a way to leave something out: below additionalProperties, say.
    return next((path for path, node in nodes.items()
                 if path not in finite and (node.schema is not False or path == "#")), None)


def _is_finite(node: Node, finite: set[str]) -> bool:
    """Whether some finite value fits, given the places where one is known to fit."""
    schema, children = node.schema, node.children
    if isinstance(schema, bool):
        return schema
    parts = {k: [p in finite for name, p in children.items() if name.startswith(k + "/")]
             for k in ("allOf", "anyOf", "oneOf")}
    if "$ref" in children and children["$ref"] not in finite or not all(parts["allOf"]):
        return False
    if any(parts[k] and not any(parts[k]) for k in ("anyOf", "oneOf")):
        return False
    types = schema.get("type", TYPES)
    types = {types} if isinstance(types, str) else set(types)
    if types - {"array", "object"}:
        return True
    return ("array" in types and _has_finite_items(node, finite)
            or "object" in types and _has_finite_properties(node, finite))


def _has_finite_items(node: Node, finite: set[str]) -> bool:
    listed = node.schema.get("prefixItems", [])
    needed = node.schema.get("minItems", 0)
    paths = [node.children[f"prefixItems/{i}"] for i in range(min(needed, len(listed)))]
    if needed > len(listed) and "items" in node.children:
        paths.append(node.children["items"])
    return all(path in finite for path in paths)


def _has_finite_properties(node: Node, finite: set[str]) -> bool:
    other = None if "patternProperties" in node.schema else node.children.get(
        "additionalProperties")
    paths = [node.children.get(f"properties/{name}", other)
             for name in node.schema.get("required", ())]
    return all(path in finite for path in paths if path is not None)
