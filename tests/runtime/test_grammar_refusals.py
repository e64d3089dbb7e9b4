"""Structured output that is refused, before any token or in the middle, for its request only."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from deepinfer.errors import RequestError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.runtime.grammar import GrammarCompiler, GrammarLimits, Structured
from deepinfer.runtime.grammar_schema import ANNOTATIONS, ENFORCED

TOKENIZER, WIDTH = byte_level_tokenizer(512), 512


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(TOKENIZER, WIDTH, [1])
    yield made
    made.close()


def refusal(compiler, structured):
    """The error; it has all three parts and took at most a second of this process's time."""
    before = time.process_time()
    with pytest.raises(RequestError) as caught:
        compiler.compile(structured)
    assert caught.value.what and caught.value.where and caught.value.next
    assert "expected" in caught.value.what or "not" in caught.value.what
    assert time.process_time() - before < 1
    return caught.value


def chain(links):
    """A schema of references one after the other, each to the next."""
    return {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"}
                                           for i in range(links)} | {str(links): True}}


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}
UNSUPPORTED = {  # J2: never dropped
    "not": {"type": "null"}, "uniqueItems": True, "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": {}, "contains": True, "minContains": 2,
    "maxContains": 2, "if": True, "then": True, "else": True, "unevaluatedProperties": False,
    "unevaluatedItems": False, "additionalItems": False, "dependencies": {}, "$anchor": "a",
    "$dynamicRef": "#a", "contentEncoding": "base64", "nullable": True, "minLenght": 3,
    "x-guidance": {"lenient": True}, "$id": "http://a.b/c", "id": "a",
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keywords_are_named(compiler, keyword):  # J2
    inner = {"type": "string", keyword: UNSUPPORTED[keyword]}
    places = {
        "#/properties/a~1b": {"properties": {"a/b": inner}},
        "#/anyOf/1/items": {"anyOf": [True, {"items": inner}]},
        "#/$defs/d": {"allOf": [{"$ref": "#/$defs/d"}], "$defs": {"d": inner}},
    }
    for path, schema in places.items():
        error = refusal(compiler, {"json": schema})
        assert f"'{keyword}' is not supported" in error.what and error.where.endswith(path)
    error = refusal(compiler, {"grammar": f'start: "x" %json {json.dumps({"items": inner})}'})
    assert f"'{keyword}'" in error.what and "%json number 1" in error.where


def test_what_says_nothing_is_let_through(compiler):
    compiler.compile({"json": {
        **{name: {} for name in ANNOTATIONS}, "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://a.b/c", "x-order": 3, "type": "integer", "$defs": {"unused": {"not": {}}}}})
    assert not set(ENFORCED) & set(ANNOTATIONS)


MALFORMED = [  # J5: (schema, what, the end of where)
    ({"type": "strin"}, "'type' is \"strin\", expected one of null, boolean", "#"),
    ({"items": {"type": []}}, "'type' is [], expected one of", "#/items"),
    ({"$ref": "#"}, "no finite JSON value fits", "#"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     "no finite JSON value fits", "#"),
    ({"properties": {"o": {"$ref": "#/$defs/x"}}, "$defs": {"x": ENDLESS}},
     "no finite JSON value fits", "#/properties/o"),
    ({"type": "array", "items": False, "minItems": 1}, "no finite JSON value fits", "#"),
    ({"type": "object", "required": ["a"], "additionalProperties": False},
     "no finite JSON value fits", "#"),
    (False, "no finite JSON value fits", "#"),
    ({"items": {"$ref": "#/$defs/a"}}, "$ref '#/$defs/a' leads nowhere", "#/items"),
    ({"$ref": "http://a.b/c"}, "'$ref' is \"http://a.b/c\", expected '#'", "#"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "no finite JSON value fits", "#"),
    ({"enum": []}, "'enum' is [], expected a list of at least one", "#"),
    ({"anyOf": []}, "'anyOf' is [], expected a list of at least one", "#"),
    ({"properties": {"a": {"minimum": 5, "maximum": 3}}}, "'minimum' is 5 and 'maximum' is 3",
     "#/properties/a"),
    ({"minimum": 5, "exclusiveMaximum": 5}, "'minimum' is 5 and 'exclusiveMaximum' is 5", "#"),
    ({"minLength": 5, "maxLength": 3}, "'minLength' is 5", "#"),
    ({"minItems": 5, "maxItems": 3}, "'minItems' is 5", "#"),
    ({"required": ["a", "b"], "maxProperties": 1}, "'required' has 2 names", "#"),
    ({"minProperties": 2}, "'minProperties' is 2", "#"),
    ({"minLength": -1}, "'minLength' is -1, expected an int in 0..", "#"),
    ({"minLength": "a"}, "'minLength' is \"a\"", "#"),
    ({"pattern": 3}, "'pattern' is 3, expected a text", "#"),
    ({"format": "unknown"}, "'format' is \"unknown\", expected one of date-time", "#"),
    ({"exclusiveMinimum": True}, "'exclusiveMinimum' is true, expected a number", "#"),
    ({"multipleOf": 0}, "'multipleOf' is 0, expected a number in (0,", "#"),
    ({"const": [2**53 + 1]}, "'const' holds 9007199254740993", "#"),
    ({"items": [True]}, "'items' is [true], expected an object", "#"),
    ({"properties": {"a": 3}}, "a schema is 3, expected an object, true or false",
     "#/properties/a"),
    ({"required": "a"}, "'required' is \"a\", expected a list of texts", "#"),
    ({"type": "string", "pattern": "a(?=b)"}, "'pattern' is not supported as it is used", "#"),
    ({"properties": {"p": {"type": "string", "pattern": "("}}}, "'pattern' is not supported",
     "#/properties/p"),
    ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
     "'oneOf' is not supported as it is used", "#/items"),
    ({"patternProperties": {"^x": True, "y$": True}}, "'patternProperties' is not supported", "#"),
    ({"allOf": [{"type": "null"}, {"type": "integer"}]}, "the schema does not compile", "'json'"),
    ('{"items":' * 10_000 + "{}" + "}" * 10_000, "nested deeper than 64", "'json'"),
    ({"title": "x" * 2**20}, "bytes, expected at most 262144", "'json'"),
    ('{"minimum": NaN}', "it is not JSON (NaN", "'json'"),
    ("{", "it is not JSON", "'json'"),
    ({"const": {1, 2}}, "it is not JSON", "'json'"),
    ({"const": "\ud800"}, "half of a surrogate pair", "'json'"),
    (3, "it is 3, expected a JSON schema", "'json'"),
    ([], "it is [], expected a JSON schema", "'json'"),
]


@pytest.mark.parametrize(("schema", "what", "where"), MALFORMED, ids=lambda v: str(v)[:40])
def test_malformed_schemas(compiler, schema, what, where):  # J5
    error = refusal(compiler, {"json": schema})
    assert what in error.what and error.where.endswith(where)


@pytest.mark.parametrize(("structured", "what"), [
    ({"json": {}, "regex": "a"}, "exactly one of json, regex, grammar, choice"),
    ({"after": "x"}, "exactly one of"), ({}, "exactly one of"), ("json", "exactly one of"),
    ({"json": {}, "before": "x"}, "exactly one of"), (None, "exactly one of"),
    ({"regex": "a", "after": ""}, "expected a text, not empty"),
    ({"regex": "a", "after": "<｜end▁of▁sentence｜>"}, "ends the output"),
    ({"regex": ""}, "expected a text, not empty"), ({"regex": 3}, "expected a text, not empty"),
    ({"regex": "("}, "unclosed group"), ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": r"[^\s\S]"}, "permits no output at all"),
    ({"choice": []}, "expected a list of texts"), ({"choice": "ab"}, "expected a list of texts"),
    ({"choice": ["a", ""]}, "expected a list of texts"), ({"choice": [3]}, "a list of texts"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "hello"}, "no GBNF"), ({"grammar": "root ::= " + "(" * 5000}, "no GBNF"),
    ({"grammar": 'start: start "a"'}, "permits no output at all"),  # left recursion to no end
    ({"grammar": "root ::= root"}, "permits no output at all"),
    ({"grammar": 'start: a "b"\na[max_tokens=3]: /[a-z]*/'}, "max_tokens= or stop="),
    ({"grammar": 'start: %json {"type": '}, "no JSON follows"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
], ids=lambda v: str(v)[:40])
def test_malformed_requests(compiler, structured, what):  # J5
    assert what in str(refusal(compiler, structured))


def test_left_recursion_and_long_repeats_work(compiler):  # J5: refused or right
    for structured, text in [({"grammar": 'start: start "a" | "b"'}, "baa"),
                             ({"regex": "a{99999}"}, "aaa")]:
        matcher = compiler.compile(structured).matcher()
        assert all(map(matcher.accept, TOKENIZER.encode(text).ids))
        assert matcher.accepting == (text == "baa")


def test_compilers_that_crash_or_never_end_harm_nobody(compiler):  # J5
    """Each of these ends or hangs the process that compiles it."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(9000))
    for structured in ({"grammar": f'start: r0\n{rules}r9000: "a"'}, {"json": chain(7000)}):
        assert "ran out of stack" in refusal(compiler, structured).what
    limits = GrammarLimits(compile_seconds=0.1)
    slow = GrammarCompiler(TOKENIZER, WIDTH, [1], limits)
    remainders = [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]
    assert "not compiled after 0.1 s" in refusal(slow, {"json": {"allOf": remainders}}).what
    slow.close()
    assert compiler.compile({"choice": ["still here"]}).matcher().accept(
        TOKENIZER.encode("s").ids[0])


def test_a_dead_end_ends_that_request_only():
    """A vocabulary that cannot spell what the grammar asks for."""
    vocab = {"<end>": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = byte_level_tokenizer(512).decoder
    compiler = GrammarCompiler(tokenizer, 4, [0])
    assert "permits no output" in refusal(compiler, {"choice": ["x"]}).what
    grammar = compiler.compile({"choice": ["ab", "bx", "ac"]})
    matcher, other = grammar.matcher(), grammar.matcher()
    assert [mask is not None for mask in matcher.draft_masks([2, 3])] == [True, False, False]
    assert matcher.mask()[0] == 0b0110  # a draft into the dead end leaves no trace
    assert matcher.accept(2) and other.accept(1)
    with pytest.raises(RequestError, match=r"no token is legal[^$]*token 1"):
        matcher.mask()
    assert other.mask()[0] == 0b1100 and other.accept(3) and other.accepting
    matcher.rollback(1)
    assert matcher.mask()[0] == 0b0110
    compiler.close()


def test_a_parser_that_fails_ends_that_request_only(compiler):
    """One whose automaton grows with the output, up to a limit; the others share the automaton."""
    small = GrammarCompiler(TOKENIZER, WIDTH, [1], GrammarLimits(max_lexer_states=400))
    grammar = small.compile({"regex": "(?:a|b)*a(?:a|b){12}c"})
    a, b = (TOKENIZER.token_to_id(letter) for letter in "ab")
    letters = [(a, b)[bit] for bit in np.random.default_rng(0).integers(0, 2, 600)]
    failing, other = grammar.matcher(), grammar.matcher()
    with pytest.raises(RequestError, match="structured output cannot go on") as caught:
        for token in letters:
            failing.mask()
            failing.accept(token)
    assert "NoExtension" not in str(caught.value) and "raise GrammarLimits" in caught.value.next
    for token in letters[:20]:
        assert other.mask().any() and other.accept(token)
    small.close()


def test_futures_cache_and_close():
    compiler = GrammarCompiler(TOKENIZER, WIDTH, [1], GrammarLimits(max_cached=2))
    futures = [compiler.submit({"choice": [text]}) for text in ("a", "a", "b", "c")]
    first, same, *_ = [future.result() for future in futures]
    assert first is same and threading.current_thread().name != "grammar compiler"
    assert compiler.compile({"choice": ["c"]}) is futures[3].result()
    assert compiler.compile(Structured("choice", '["a"]')) is not first  # it was the oldest of 3
    ordered = [{"properties": {a: True, b: True}, "type": "object"} for a, b in ("xy", "yx")]
    assert compiler.compile({"json": ordered[0]}) is not compiler.compile({"json": ordered[1]})
    assert compiler.compile({"json": json.dumps(ordered[1], indent=1)}) is compiler.compile(
        {"json": ordered[1]})
    compiler.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        compiler.compile({"choice": ["a"]})


def test_settings_are_checked():
    with pytest.raises(RequestError, match=r"max_bytes is 0, expected an int >= 1"):
        GrammarLimits(max_bytes=0)
    with pytest.raises(RequestError, match=r"compile_seconds is -1, expected a number > 0"):
        GrammarLimits(compile_seconds=-1)
    with pytest.raises(RequestError, match=r"the end ids are \[512\], expected at least one in 0"):
        GrammarCompiler(TOKENIZER, WIDTH, [512])
