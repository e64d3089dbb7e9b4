"""What a request may ask for as structured output, and the grammar text llguidance gets for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.runtime.grammar_schema import check_schema

KINDS = ("json", "regex", "grammar", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What a grammar may cost. Compiling is limited in a process of its own.

    Args:
        max_bytes: of the grammar as a text. max_depth: of nested objects and lists of a schema.
        compile_seconds: of processor time for compiling one grammar.
        compile_bytes: of memory of the process that tries grammars (on Linux).
        max_spaces: between two tokens of JSON; other white space is never allowed there.
        max_cached: compiled grammars that are kept, the least recently used one goes first.
        initial_lexer_fuel, step_lexer_fuel, step_max_items, max_items_in_row, max_lexer_states,
            max_grammar_size: limits of llguidance's parser, in its own units.

    Raises:
        RequestError: a value that is not positive (``max_spaces``: negative).
    """

    max_bytes: int = 256 * 1024
    max_depth: int = 64
    compile_seconds: float = 1.0
    compile_bytes: int = 2 * 1024**3
    max_spaces: int = 1
    max_cached: int = 128
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 1_000_000
    step_max_items: int = 50_000
    max_items_in_row: int = 2_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 500_000

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), 0 if f.name == "max_spaces" else 1
            seconds = f.name == "compile_seconds"
            number = isinstance(value, int | float if seconds else int)
            if not number or isinstance(value, bool) or not (value > 0 or value >= least):
                raise RequestError(f"{f.name} is {value!r}, expected "
                                   f"{'a number > 0' if seconds else f'an int >= {least}'}",
                                   where="GrammarLimits", next=f"correct {f.name}")

    @property
    def parser(self) -> dict[str, Any]:
        """Arguments of llguidance's LLParserLimits."""
        names = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_items_in_row",
                 "max_lexer_states", "max_grammar_size")
        # Verbose errors quote the whole grammar.
        return {name: getattr(self, name) for name in names} | {"verbose_errors": False}


@dataclass(frozen=True, slots=True)
class Structured:
    """A request for structured output, checked by itself.

    Args:
        kind: one of KINDS. source: the schema as JSON, the regex, the grammar, or the choices as
            JSON; equal sources make equal grammars. after: free text ends with this; "" is none.
    """

    kind: str
    source: str
    after: str = ""

    @staticmethod
    def of(given: Any, limits: GrammarLimits) -> Structured:
        """Read ``SamplingParams.structured``. Cheap: no compiler is asked.

        Raises:
            RequestError: not exactly one kind, a value of the wrong type, too long or too deep.
        """
        names = set(given) if isinstance(given, Mapping) else set()
        found = [kind for kind in KINDS if kind in names]
        if len(found) != 1 or names - {*found, "after"}:
            raise _wrong("structured", f"structured is {_brief(given)}",
                         f"a mapping with exactly one of {', '.join(KINDS)}, and perhaps 'after'")
        kind, value, after = found[0], given[found[0]], given.get("after", "")
        where = f"structured, '{kind}'"
        if not isinstance(after, str) or after == "" and "after" in given:
            raise _wrong("structured, 'after'", f"it is {_brief(after)}", "a text, not empty")
        if kind == "json":
            source = _json_source(value, where, limits)
        elif kind == "choice":
            listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            if not listed or not value or not all(isinstance(v, str) and v for v in value):
                raise _wrong(where, f"it is {_brief(value)}", "a list of texts, none of them empty")
            source = json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)
        else:
            if not isinstance(value, str) or not value.strip():
                raise _wrong(where, f"it is {_brief(value)}", "a text, not empty")
            source = value
        try:
            size = len(source.encode()) + len(after.encode())
        except UnicodeEncodeError:
            raise _wrong(where, "it holds half of a surrogate pair", "valid Unicode") from None
        if size > limits.max_bytes:
            raise RequestError(f"the grammar has {size} bytes, expected at most "
                               f"{limits.max_bytes}", where=where,
                               next="shorten it, or raise GrammarLimits.max_bytes")
        return Structured(kind, source, after)

    def body(self, limits: GrammarLimits) -> dict[str, Any]:
        """The grammar after the free text, in llguidance's form; {"gbnf": text} and
        {"regex": text} are yet to be converted.

        Raises:
            RequestError: see ``check_schema``.
        """
        if self.kind == "json":
            schema = check_schema(json.loads(self.source), "structured, 'json'")
            return {"json_schema": schema | {"x-guidance": _json_options(limits)}}
        if self.kind == "choice":
            texts = " | ".join(map(lark_text, json.loads(self.source)))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        if self.kind == "regex":
            return {"regex": self.source}
        if not _IS_LARK.search(self.source):
            return {"gbnf": self.source}
        return {"lark_grammar": _with_checked_schemas(self.source, limits)}

    @property
    def names_tokens(self) -> bool:
        """Whether a Lark grammar refers to tokens: <name> or <[id]>."""
        return self.kind == "grammar" and any(m[0][0] == "<" for m in _LARK.finditer(self.source))


def lark_text(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Lark must have a rule `start`; that of GBNF is `root`.
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*[:\[{])")
# Comments, texts and regexes of Lark, in which nothing else is looked for; then what is.
_LARK = re.compile(r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/"""
                   r"""|%json\b|<[^<>\s]+>""", re.DOTALL)
_BLANK = re.compile(r"\s*")


def _with_checked_schemas(lark: str, limits: GrammarLimits) -> str:
    """A Lark grammar whose ``%json`` schemas are checked and bounded like any other."""
    parts: list[str] = []
    at = kept = 0
    while found := _LARK.search(lark, at):
        at = found.end()
        if found[0] != "%json":
            continue
        where = f"structured, 'grammar', %json number {1 + len(parts) // 2}"
        start = _BLANK.match(lark, at).end()  # type: ignore[union-attr]
        try:
            schema, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(lark, start)
        except RecursionError:
            raise _too_deep(where, limits) from None
        except ValueError as error:
            raise _wrong(where, f"no JSON follows ({error})", "a JSON schema") from None
        _check_depth(schema, where, limits)
        checked = check_schema(schema, where) | {"x-guidance": _json_options(limits)}
        parts += [lark[kept:at], " " + json.dumps(checked)]
        at = kept = end
    return "".join(parts) + lark[kept:]


def _json_options(limits: GrammarLimits) -> dict[str, Any]:
    spaces = {"whitespace_pattern": rf"\x20{{1,{limits.max_spaces}}}"} if limits.max_spaces else \
        {"whitespace_flexible": False}
    # Without \u: it would spell the name of a property in a way that escapes its schema.
    return {**spaces, "json_allowed_escapes": 'nrbtf\\"'}


def _json_source(value: Any, where: str, limits: GrammarLimits) -> str:
    if not isinstance(value, str | bool | Mapping):
        raise _wrong(where, f"it is {_brief(value)}", "a JSON schema: a mapping, JSON text or True")
    if isinstance(value, str) and len(value) > limits.max_bytes:
        return value  # refused by its size
    try:
        if isinstance(value, str):
            schema = json.loads(value, parse_constant=_no_constant)
        else:
            schema = dict(value) if isinstance(value, Mapping) else value
            schema = json.loads(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise _too_deep(where, limits) from None
    except (TypeError, ValueError) as error:
        raise _wrong(where, f"it is not JSON ({error})", "a JSON schema") from None
    _check_depth(schema, where, limits)
    # Names keep their order: it is the order of the properties in the output.
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def _check_depth(value: Any, where: str, limits: GrammarLimits) -> None:
    level, depth = [value], 0
    while level:
        inner = [v for v in level if isinstance(v, list | dict)]
        level = [x for v in inner for x in (v.values() if isinstance(v, dict) else v)]
        depth += bool(inner)
        if depth > limits.max_depth:
            raise _too_deep(where, limits)


def _too_deep(where: str, limits: GrammarLimits) -> RequestError:
    return RequestError(f"the schema is nested deeper than {limits.max_depth} objects and lists, "
                        "expected at most that", where=where,
                        next="put parts of it into $defs and refer to them")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _wrong(where: str, what: str, expected: str) -> RequestError:
    return RequestError(f"{what}, expected {expected}", where=where, next="correct the request")


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # whatever a caller passes, and however deep
        text = f"a {type(value).__name__} without repr ({type(error).__name__})"
    return text if len(text) <= 60 else f"{text[:57]}..."
