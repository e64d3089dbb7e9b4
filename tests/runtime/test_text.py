"""Text: incremental decoding in whole characters, and stop texts across token edges."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deepinfer.errors import CheckpointError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.runtime.text import Detokenizer, OutputText, StopTexts, Text

TEXT = Text(byte_level_tokenizer(512), bos=0)
BYTES = {TEXT.token_bytes(i): i for i in range(3, 259)}


def ids_of(raw: bytes) -> list[int]:
    """One token for each byte."""
    return [BYTES[bytes([b])] for b in raw]


def stream(text: Text, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(text)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 511), max_size=30))
def test_streamed_pieces_join_to_the_decoded_text(ids):
    assert "".join(stream(TEXT, ids)) == TEXT.decode(ids)


@given(st.text(max_size=20))
def test_characters_come_whole(text):
    ids = ids_of(text.encode())
    assert "".join(stream(TEXT, ids)) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in stream(TEXT, ids))


def test_a_character_over_three_tokens():
    assert stream(TEXT, ids_of("a€b".encode())) == ["a", "", "", "€", "b", ""]
    assert stream(TEXT, ids_of("a€".encode()[:3])) == ["a", "", "", "\ufffd"]
    # The prompt is no part of the text: its unfinished character is not completed by the output.
    assert stream(TEXT, ids_of("€".encode()[2:])) == ["\ufffd", ""]


def test_a_prompt_is_neither_cut_nor_padded():
    """A tokenizer.json may hold the truncation and padding of its training."""
    tokenizer = byte_level_tokenizer(512)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    assert len(tokenizer.encode("a" * 40).ids) == 50
    text = Text(Tokenizer.from_str(tokenizer.to_str()), bos=0)
    assert text.encode("a, b, c " * 20) == TEXT.encode("a, b, c " * 20)
    assert text.encode("a") == TEXT.encode("a")


def test_special_tokens_have_no_text():
    mark, role = TEXT.tokenizer.token_to_id("<think>"), TEXT.tokenizer.token_to_id("<｜User｜>")
    assert stream(TEXT, [0, role, *ids_of(b"a"), mark, 1]) == ["", "", "a", "<think>", "", ""]


def test_bos_is_put_in_front_once():
    ids = TEXT.encode("ab")
    assert ids[0] == 0 and TEXT.encode(TEXT.tokenizer.id_to_token(0) + "ab") == ids
    assert Text(TEXT.tokenizer, None).encode("ab") == ids[1:]


def test_a_tokenizer_that_is_not_byte_level():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3},
                                     merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = Text(tokenizer, None)
    assert not text.byte_level and stream(text, [0, 1, 2, 3, 0]) == ["a", "", "", "€", "a", ""]
    assert stream(text, [0, 1]) == ["a", "", "\ufffd"]


def test_load(tmp_path):
    assert Text.load(tmp_path, 0) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Text.load(tmp_path, 0)
    TEXT.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text.load(tmp_path, 0).encode("ab") == TEXT.encode("ab")


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """The final text, the stop text, and what was safe to show after each piece."""
    watch, shown = StopTexts(tuple(stops)), []
    for piece in pieces:
        ended = watch.add(piece)
        shown.append(watch.safe)
        if ended:
            break
    return watch.text, watch.matched, shown


def test_stop_texts():
    assert run(["END"], list("abENDc")) == ("ab", "END", ["a", "ab", "ab", "ab", "ab"])
    assert run(["N", "END"], list("abENDc"))[:2] == ("abE", "N")
    assert run(["N", "END"], ["ab", "ENDc"])[:2] == ("abE", "N")
    assert run(["D", "END"], ["abEN", "Dc"])[:2] == ("ab", "END")
    assert run(["END"], ["abEN", "x"]) == ("abENx", None, ["ab", "abENx"])
    assert run(["aab"], list("aaab"))[:2] == ("a", "aab")
    assert run([], ["a", "b"]) == ("ab", None, ["a", "ab"])


def test_an_inactive_piece_does_not_stop_later():
    watch = StopTexts(("ab",))
    assert not watch.add("ab", active=False) and not watch.add("a") and watch.safe == "ab"
    assert watch.add("b") and watch.text == "ab"
    straddling = StopTexts(("ab",))
    assert not straddling.add("a", active=False) and straddling.add("b")


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
       st.lists(st.text("ab", max_size=3), max_size=12))
def test_stops_depend_on_the_text_alone(stops, pieces):
    text, matched, shown = run(stops, pieces)
    assert (text, matched) == run(stops, list("".join(pieces)))[:2]
    assert not any(s in text for s in stops) if matched else text == "".join(pieces)
    # What was shown once stays, and never holds what is cut off later.
    assert all(text.startswith(s) for s in shown)
    assert all(b.startswith(a) for a, b in zip(shown, shown[1:], strict=False))


def grow(text: OutputText, ids: list[int]) -> tuple[str, list[str]]:
    """The final text, and what is new after each token and at the end."""
    pieces, before = [], ""
    for token in ids:
        ended = text.add(token)
        shown = text.shown(ended)
        assert shown.startswith(before)
        pieces.append(shown[len(before):])
        before = shown
        if ended:
            return before, pieces
    pieces.append(text.shown(True)[len(before):])
    return text.shown(True), pieces


def test_output_text_stops():
    """Case B7: stops over token edges, two that overlap, one that also ends the prompt."""
    raw = ids_of(b"abENDc")
    for prompt in ([], ids_of("x€END".encode())):
        before = "x€END" if prompt else ""
        text = OutputText(TEXT, ("END",), prompt)
        final, pieces = grow(text, raw)
        assert (final, text.matched) == (before + "ab", "END")
        assert "".join(pieces) == final and pieces[2:] == ["", "", ""]
    text = OutputText(TEXT, ("N", "END"))
    assert grow(text, raw)[0] == "abE" and text.matched == "N"
    # A stop is never looked for across the end of the prompt.
    assert grow(OutputText(TEXT, ("xa",), ids_of(b"x")), raw)[0] == "xabENDc"


def test_output_text_withholds_and_gives_back():
    text = OutputText(TEXT, ("END",))
    assert grow(text, ids_of(b"abEN"))[1] == ["a", "b", "", "", "EN"] and text.matched is None
    # Part of a character is withheld too, and is U+FFFD if it never comes.
    assert grow(OutputText(TEXT, ()), ids_of("a€".encode()[:3]))[1] == ["a", "", "", "\ufffd"]
    finished = OutputText(TEXT, ())
    grow(finished, ids_of(b"a\xe2"))
    assert finished.shown(True) == finished.shown(True) == "a\ufffd"


def test_echo_and_a_character_cut_by_the_end_of_the_prompt():
    """Case B7: the prompt ends with 2 of 3 bytes of U+20AC, the output begins with the third."""
    head, tail = "a€".encode()[:3], "€".encode()[2:] + b"b"
    assert grow(OutputText(TEXT, ()), ids_of(tail))[0] == "\ufffdb"
    echoed, pieces = grow(OutputText(TEXT, (), ids_of(head)), ids_of(tail))
    assert echoed == "a\ufffd\ufffdb" and pieces == ["a\ufffd\ufffd", "b", ""]


def test_output_text_with_a_special_stop():
    user = TEXT.special_id("<｜User｜>")
    assert user is not None and TEXT.special_id("a") is None is TEXT.special_id("<think>")
    early = OutputText(TEXT, ("<｜User｜>",))
    assert not early.add(user, active=False) and early.matched is None
    assert early.add(user) and early.matched == "<｜User｜>" and early.shown(True) == ""
    # A mark that is no special token has a text, and is found there.
    think = TEXT.tokenizer.token_to_id("</think>")
    text = OutputText(TEXT, ("</think>",))
    assert grow(text, [*ids_of(b"a"), think])[0] == "a" and text.matched == "</think>"


@given(st.lists(st.integers(0, 511), max_size=40), st.lists(st.text("aeE ", min_size=1, max_size=3),
                                                            max_size=3))
def test_pieces_join_to_the_final_text(ids, stops):
    """Case B7: pieces joined equal the final text and never show the stop text."""
    text = OutputText(TEXT, tuple(stops), [5, 6])
    final, pieces = grow(text, ids)
    assert "".join(pieces) == final
    body = final[len(TEXT.decode([5, 6])):]
    assert not any(stop in body for stop in stops)
    if text.matched is None:
        assert body == TEXT.decode(ids)
