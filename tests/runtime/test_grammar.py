"""Structured output: masks, rollback, drafts and free text before the grammar."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.errors import RequestError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.runtime.grammar import GrammarCompiler, GrammarLimits

# Logits are wider than the vocabulary; id 9 ends the output and is a byte's token as well.
BYTES, WIDTH, EOS = byte_level_tokenizer(512), 528, (1, 9)
A_BOOL = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}
KINDS = {
    "json": {"json": {"type": "object", "properties": {
        "name": {"type": "string"}, "n": {"type": "integer", "minimum": -5},
        "tags": {"type": "array", "items": {"enum": ["x", "yé", None]}}}, "required": ["n"]}},
    "any": {"json": True},
    "regex": {"regex": r"(?:[a-c]/|\n)+d{2,3}"},
    "lark": {"grammar": 'start: sum "!"?\nsum: sum "+" NUM | NUM\nNUM: /[0-9]+/\n%ignore " "\n'},
    "gbnf": {"grammar": 'root ::= "a" root | "b" [0-9]*\n'},
    "inline": {"grammar": 'start: "call " %json {"type": "object"} <think>'},
    "choice": {"choice": ["yes", "no", 'y"\\\n\x7f😀']},
    "after": {"json": A_BOOL, "after": "</think>"},
    "after text": {"regex": "[0-9]+", "after": "END"},
}


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(BYTES, WIDTH, EOS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bpe():
    """A tokenizer with longer tokens, trained here, and a compiler for it."""
    text = ['{"name": "once upon a time", "a": true, "tags": ["x", null]}', "12 and false "] * 9
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=330, show_progress=False, special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    made = GrammarCompiler(tokenizer.to_str(), 352, [tokenizer.token_to_id("<end>")])
    yield tokenizer, made
    made.close()


def ids(text, tokenizer=BYTES):
    return tokenizer.encode(text, add_special_tokens=False).ids


def legal(mask):
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def feed(grammar, tokens):
    matcher = grammar.matcher()
    assert all(matcher.accept(token) for token in tokens)
    return matcher


def takes(grammar, text):
    """Whether the text is a complete output."""
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in ids(text)) and matcher.accepting


def random_walk(matcher, rng, longest, prefer=()):
    """Accept random legal tokens to the end or for a while; returns them with their masks."""
    tokens, masks = [], []
    while not matcher.ended and len(tokens) < longest:
        masks.append(matcher.mask())
        choices = sorted(legal(masks[-1]))
        liked = [token for token in choices if token in prefer]
        tokens.append(rng.choice(liked if liked and rng.random() < 0.5 else choices))
        assert matcher.accept(tokens[-1])
    return tokens, masks


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_holds_what_accept_takes(compiler, kind):  # J4, J2
    matcher = compiler.compile(KINDS[kind]).matcher()
    rng = random.Random(kind)
    for _ in range(12):
        mask = matcher.mask()
        assert mask.dtype == np.int32 and mask.shape == (17,)
        accepted = {token for token in range(-1, WIDTH + 9) if matcher.copy().accept(token)}
        assert legal(mask) == accepted and accepted
        assert all(token < 512 for token in accepted)  # a padded id is never legal
        assert ({1, 9} <= accepted) == matcher.accepting == bool({1, 9} & accepted)
        assert not matcher.finished or accepted == {1, 9}
        matcher.accept(rng.choice(sorted(accepted)))


@pytest.mark.parametrize("kind", KINDS)
def test_rollback_equals_a_fresh_replay(compiler, kind):  # J4
    grammar, rng = compiler.compile(KINDS[kind]), random.Random(kind)
    matcher = grammar.matcher()
    tokens, masks = random_walk(matcher, rng, 14)
    masks.append(matcher.mask())
    for _ in range(8):
        back = rng.randint(0, len(tokens))
        kept = len(tokens) - back
        matcher.rollback(back)
        assert np.array_equal(matcher.mask(), masks[kept])
        assert np.array_equal(feed(grammar, tokens[:kept]).mask(), masks[kept])
        for token, mask in zip(tokens[kept:], masks[kept + 1:], strict=True):
            assert matcher.accept(token) and np.array_equal(matcher.mask(), mask)
    with pytest.raises(RequestError, match="cannot be taken back"):
        matcher.rollback(len(tokens) + 1)


def test_rollback_over_end_ids(compiler):  # J4
    grammar, text = compiler.compile({"json": A_BOOL}), ids('{"a":true}')
    for back in range(6):
        matcher = feed(grammar, [*text, 1, 9])  # what follows the first end id is only end ids
        assert matcher.ended and legal(matcher.mask()) == {1, 9} and not matcher.accept(text[0])
        matcher.rollback(back)
        fresh = feed(grammar, [*text, 1, 9][: len(text) + 2 - back])
        assert matcher.ended == fresh.ended == (back < 2)
        assert matcher.finished == fresh.finished == (back < 3)  # the brace closes it
        assert np.array_equal(matcher.mask(), fresh.mask())


@pytest.mark.parametrize("j", range(6))
def test_drafts_legal_up_to_j(compiler, j):  # J4
    grammar = compiler.compile({"json": A_BOOL})
    text = ids('{"a": true}')
    drafts = text[2:7]
    if j < 5:
        drafts[j] = 300
    matcher = feed(grammar, text[:2])
    before = matcher.mask()
    masks = matcher.draft_masks(drafts)
    assert len(masks) == 6 and [mask is None for mask in masks] == [i > j for i in range(6)]
    for i in range(j + 1):
        assert np.array_equal(masks[i], feed(grammar, text[: 2 + i]).mask())
    assert np.array_equal(matcher.mask(), before)  # the state is as it was
    assert matcher.draft_masks([])[0].tolist() == before.tolist()


def test_drafts_past_the_closing_brace(compiler):  # J4
    grammar, text = compiler.compile({"json": A_BOOL}), ids('{"a":true}')
    masks = feed(grammar, text[:-1]).draft_masks([text[-1], 20, 1])
    assert legal(masks[1]) == {1, 9} and masks[2:] == [None, None]
    masks = feed(grammar, text[:-1]).draft_masks([text[-1], 9, 1])
    assert legal(masks[2]) == {1, 9}


@pytest.mark.parametrize("at", range(5))
def test_drafts_with_the_end_of_thinking(compiler, at):  # J4
    mark, open_ = BYTES.token_to_id("</think>"), BYTES.token_to_id("<think>")
    grammar, free = compiler.compile({"json": A_BOOL, "after": "</think>"}), ids("hm, so")
    drafts = [*free[:at], mark, *ids('{"a":')][:5]
    matcher = feed(grammar, free)
    assert {mark, open_, *ids('a{"} the')} <= legal(matcher.mask())
    assert not {0, 1, 9, BYTES.token_to_id("<｜User｜>")} & legal(matcher.mask())
    masks = matcher.draft_masks(drafts)
    for i, mask in enumerate(masks):
        assert np.array_equal(mask, feed(grammar, free + drafts[:i]).mask())
        assert (legal(mask) == set(ids("{"))) == (i == at + 1)
    broken = matcher.draft_masks([*drafts[: at + 1], ids("x")[0], mark])
    assert broken[at + 1] is not None and broken[at + 2] is None


def test_masks_depend_on_nothing_but_the_output(compiler):
    """Neighbours with the same grammar and rejected drafts leave no trace."""
    asked, rng = KINDS["json"], random.Random(3)
    shared, own = compiler.compile(asked), GrammarCompiler(BYTES, WIDTH, EOS)
    tokens, masks = random_walk(own.compile(asked).matcher(), rng, 25, ids('",:'))
    own.close()
    matcher = shared.matcher()
    for token, mask in zip(tokens, masks, strict=True):
        random_walk(shared.matcher(), rng, 6)
        drafts, _ = random_walk(matcher.copy(), rng, 5)
        assert np.array_equal(matcher.draft_masks(drafts)[0], mask) and matcher.accept(token)


def test_spaces_between_tokens_are_bounded(compiler):  # J5
    space, rng = BYTES.token_to_id("Ġ"), random.Random(0)
    schema = {"type": "object", "required": ["k"], "additionalProperties": False, "properties": {
        "k": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}}}
    for structured in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        matcher, text = compiler.compile(structured).matcher(), []
        while not matcher.ended:
            choices = legal(matcher.mask())
            text.append(space if space in choices else rng.choice(sorted(choices)))
            assert matcher.accept(text[-1])
        written = BYTES.decode(text)
        assert " : " in written and "  " not in written and not {"\n", "\t"} & set(written)
    none = GrammarCompiler(BYTES, WIDTH, EOS, GrammarLimits(max_spaces=0))
    assert takes(none.compile({"json": A_BOOL}), '{"a":true}')
    assert not takes(none.compile({"json": A_BOOL}), '{"a": true}')
    none.close()


J1 = [
    ({"type": "integer", "minimum": 2}, ["2", "10"], ["1", "02"]),
    ({"type": "integer", "minimum": -5}, ["-5", "-1", "0"], ["-6"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1"], ["0", "0.0"]),
    ({"type": "number", "minimum": -4, "maximum": 4}, ["-0.5", "4"], ["4.5", "-4.1"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
]
J2 = [  # one for each keyword that is enforced
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, ["5"], ["3", '"a"']),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ["true"]),
    ({"type": "integer", "multipleOf": 7}, ["-14", "0"], ["8"]),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}},
      "additionalProperties": False}, ['{"xa":1}', "{}"], ['{"y":1}', '{"x":null}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"b":"q"}'],
     ['{"a":"q"}', '{"\\u0061":"q"}']),  # a name spelled otherwise is still that name
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.255"'], ['"1.2.3.256"', '"x"']),
    ({"const": {"k": [1, None]}}, ['{"k":[1,null]}'], ['{"k":[2,null]}']),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"},
      "minItems": 1}, ["[1]", "[1,null]"], ["[]", "[null]", "[1,2]"]),
    ({"enum": [1.5, "a"]}, ["1.5", '"a"'], ["1", '"b"']),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": ["string", "null"], "minLength": 2}}},
     ["null", '"ab"'], ['"a"', "1"]),
    ({"type": "object", "required": ["a"], "minProperties": 2, "maxProperties": 2,
      "additionalProperties": {"type": "boolean"}}, ['{"a":true,"b":false}'], ['{"a":true}']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), J1 + J2, ids=str)
def test_limits_and_keywords_are_enforced(compiler, schema, good, bad):  # J1, J2
    grammar = compiler.compile({"json": schema})
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert all(takes(grammar, text) and validator.is_valid(json.loads(text)) for text in good)
    assert not any(takes(grammar, text) for text in bad)


def check_random_texts(compiler, count):
    rng, enders = random.Random(1), ids('"}],')
    for schema, _, _ in J1 + J2:
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker())
        grammar, complete = compiler.compile({"json": schema}), 0
        for _ in range(count):
            matcher = grammar.matcher()
            tokens, _ = random_walk(matcher, rng, 60, (*enders, 1))
            if matcher.ended:
                complete += 1
                text = BYTES.decode(tokens[:-1], skip_special_tokens=False)
                assert validator.is_valid(json.loads(text)), (schema, text)
        assert complete > count / 2, schema


def test_random_texts_fit_their_schema(compiler):  # J1
    check_random_texts(compiler, 50)


@pytest.mark.full
def test_many_random_texts_fit_their_schema(compiler):  # J1
    check_random_texts(compiler, 500)


def test_another_tokenizer(bpe):
    tokenizer, compiler = bpe
    mark = tokenizer.token_to_id("</think>")
    grammar = compiler.compile({"json": A_BOOL, "after": "</think>"})
    text = [*ids("once upon a time", tokenizer), mark, *ids('{"a": false}', tokenizer)]
    matcher = grammar.matcher()
    for token in text:
        assert token in legal(matcher.mask()) and not legal(matcher.mask()) - set(range(331))
        assert legal(matcher.mask()) == {t for t in range(352) if matcher.copy().accept(t)}
        assert matcher.accept(token)
    assert legal(matcher.mask()) == {tokenizer.token_to_id("<end>")}


def test_end_ids_of_a_request(compiler):
    quote = ids('"')[0]  # as a stop id: it must not end the output before it is complete
    grammar = compiler.compile({"choice": ['a"', "ab"]})
    matcher = grammar.matcher(end_ids=[quote, 100_000])
    assert matcher.accept(ids("a")[0]) and not matcher.accept(quote) and matcher.accept(ids("b")[0])
    assert legal(matcher.mask()) == {1, 9, quote} and matcher.accept(quote) and matcher.ended


def test_importing_is_light():
    code = "import sys, deepinfer.runtime.grammar; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
