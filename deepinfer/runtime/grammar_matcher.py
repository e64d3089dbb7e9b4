"""Matchers: which tokens keep an output inside its grammar, step by step and along drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.int32]
T = TypeVar("T")


def words(ids: Iterable[int], vocab_size: int) -> Words:
    """A mask with the bits of ``ids`` set, but for those that are too large: bit i % 32 of word
    i // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.fromiter((i for i in ids if i < vocab_size), dtype=np.intp)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class Grammar:
    """A compiled grammar. Immutable; requests share it.

    Args:
        build: a new parser of it. allowed: tokens that may be text. eos: end ids.
        vocab_size: width of the logits.
    """

    def __init__(self, build: Callable[[], LLMatcher], allowed: Words, eos: Sequence[int],
                 vocab_size: int) -> None:
        self.build, self.allowed, self.eos, self.vocab_size = build, allowed, eos, vocab_size
        self._first = build()

    def matcher(self, end_ids: Iterable[int] = ()) -> Matcher:
        """A matcher at the output's beginning.

        Args:
            end_ids: ids besides ``eos`` that end this request; they are no text for it either.
        """
        ends = {*self.eos, *(i for i in end_ids if 0 <= i < self.vocab_size)}
        return Matcher(self, frozenset(ends), self._first.deep_copy())


class Matcher:
    """Where one request is in its grammar. Not thread-safe; made by ``Grammar.matcher``.

    For every state and token, the token's bit in ``mask()`` is set exactly if ``accept`` takes it.
    An end id is legal exactly when the grammar is complete, and after one only end ids are. All
    methods raise RequestError when the parser fails or no token is legal any more.
    """

    def __init__(self, grammar: Grammar, ends: frozenset[int], parser: LLMatcher) -> None:
        self.grammar, self._ends, self._parser = grammar, ends, parser
        self._tokens: list[int] = []  # accepted as text
        self._ended = 0  # end ids accepted after them
        self._end_words = words(ends, grammar.vocab_size)
        self._text_words = grammar.allowed & ~self._end_words

    @property
    def ended(self) -> bool:
        """Whether an end id was accepted."""
        return self._ended > 0

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing but an end id can follow."""
        return self.ended or self.accepting and self._parser.is_stopped()

    @property
    def accepting(self) -> bool:
        """Whether the output so far is complete."""
        return self._ask(lambda parser: parser.is_accepting())

    def mask(self) -> Words:
        """The legal tokens: i32[ceil(vocab_size / 32)], bit t % 32 of word t // 32 for token t."""
        if self.ended:
            return self._end_words.copy()
        raw = self._ask(lambda parser: parser.compute_bitmask())
        legal: Words = np.frombuffer(raw, "<i4")[: len(self._text_words)] & self._text_words
        if self.accepting:
            legal |= self._end_words
        if not legal.any():
            raise self._failure("no token is legal")
        return legal

    def accept(self, token: int) -> bool:
        """Go on by one token; False if it is illegal here, which changes nothing."""
        if token in self._ends:
            legal = self.ended or self.accepting
            self._ended += legal
            return legal
        if self.ended or not 0 <= token < self.grammar.vocab_size or \
                not self._text_words[token // 32] >> (token % 32) & 1:
            return False
        taken = self._ask(lambda parser: 0 if parser.is_stopped() and not parser.is_error()
                          else parser.try_consume_tokens([token]))
        self._tokens += [token] * taken
        return taken == 1

    def rollback(self, count: int) -> None:
        """Take back the last tokens, end ids too; the state equals that of a fresh replay.

        Raises:
            RequestError: also where fewer tokens were accepted.
        """
        if not 0 <= count <= len(self._tokens) + self._ended:
            raise self._failure(f"{count} tokens cannot be taken back")
        kept = len(self._tokens) - max(0, count - self._ended)
        back, self._ended = len(self._tokens) - kept, max(0, self._ended - count)
        self._tokens = self._tokens[:kept]
        if back and not self._parser.rollback(back):
            self._parser = self._replayed()

    def draft_masks(self, drafts: Sequence[int]) -> list[Words | None]:
        """Masks of the 1 + len(drafts) rows that verify drafts; the state stays as it is.

        Row i assumes that the drafts before i are accepted: from the first illegal one on, and
        where a draft leads into a dead end, rows are None, as they cannot be reached.
        """
        masks: list[Words | None] = [self.mask()]
        ahead = self.copy() if drafts else self
        for token in drafts:
            try:
                mask = ahead.mask() if ahead.accept(int(token)) else None
            except RequestError:  # this request fails only if the target really goes there
                mask = None
            if mask is None:
                break
            masks.append(mask)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        other = copy.copy(self)
        other._parser, other._tokens = self._parser.deep_copy(), list(self._tokens)
        return other

    def _ask(self, question: Callable[[LLMatcher], T]) -> T:
        answer = question(self._parser)
        if self._parser.is_error():
            # Parsers of a grammar share an automaton, which other requests have grown and may have
            # broken. What counts is what a parser of one's own says.
            self._parser = self._replayed()
            answer = question(self._parser)
            if self._parser.is_error():
                raise self._failure(self._parser.get_error())
        return answer

    def _replayed(self) -> LLMatcher:
        parser = self.grammar.build()
        if self._tokens and not parser.consume_tokens(self._tokens):
            raise self._failure(parser.get_error())
        return parser

    def _failure(self, why: str) -> RequestError:
        reason = why.splitlines()[0] if why else "the parser failed"
        if reason.startswith("NoExtension"):
            reason = "no token is legal"
        return RequestError(f"structured output cannot go on: {reason}, expected a legal token",
                            where=f"output, token {len(self._tokens) + self._ended}",
                            next="simplify the grammar, or raise GrammarLimits")
