"""Structured output: grammars compiled off the step path, for ``Matcher`` to give masks by."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from deepinfer.errors import RequestError
from deepinfer.runtime.grammar_matcher import Grammar, Matcher, Words, words
from deepinfer.runtime.grammar_probe import STACK_BYTES, Probe
from deepinfer.runtime.grammar_spec import GrammarLimits, Structured, lark_text

__all__ = ["Grammar", "GrammarCompiler", "GrammarLimits", "Matcher", "Structured"]

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_stack_size = threading.Lock()  # it is one setting of the process


class GrammarCompiler:
    """Compiles what requests ask for as structured output. Thread-safe.

    Kinds (exactly one): ``{"json": schema}`` (a mapping, JSON text, or True for any value),
    ``{"regex": text}`` (all of the output; syntax of Rust's regex without look-around),
    ``{"grammar": text}`` (Lark with llguidance's extensions, or GBNF where it has no rule
    ``start``; left recursion is fine), ``{"choice": [text, ...]}``. With ``"after": text`` besides,
    any text may come first, until this text or, if it is spelled like one, this token.

    JSON comes with at most ``limits.max_spaces`` spaces between two tokens and no other white
    space, properties in the schema's order, without \\u escapes.

    Args:
        tokenizer: of the model, or its JSON. vocab_size: width of the logits, may exceed the
            tokenizer's; ids that have no token are never allowed.
        eos: ids that end the output; never part of its text, whatever they spell.
        limits: what a grammar may cost.

    Raises:
        RequestError: no end id, or one outside the logits.
    """

    def __init__(self, tokenizer: Tokenizer | str, vocab_size: int, eos: Iterable[int],
                 limits: GrammarLimits | None = None) -> None:
        self.vocab_size, self.eos, self.limits = vocab_size, sorted(eos), limits or GrammarLimits()
        if not self.eos or not 0 <= self.eos[0] <= self.eos[-1] < vocab_size:
            raise RequestError(f"the end ids are {self.eos}, expected at least one in "
                               f"0..{vocab_size - 1}", where="GrammarCompiler",
                               next="structured output needs a model with an end-of-text id")
        self._tokenizer = Tokenizer.from_str(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._cache: OrderedDict[Structured, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Structured, Future[Grammar]] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        # These two belong to the worker.
        self._probe = Probe(self._tokenizer_arguments, self.limits)
        self._loaded: tuple[LLTokenizer, Words] | None = None  # and its ids that are just text
        self._closed = False

    def submit(self, structured: Structured | Mapping[str, Any]) -> Future[Grammar]:
        """Compile on the worker thread; whatever is wrong is a RequestError of the future."""
        future: Future[Grammar] = Future()
        try:
            asked = structured if isinstance(structured, Structured) else \
                Structured.of(structured, self.limits)
        except RequestError as error:
            future.set_exception(error)
            return future
        with self._lock:
            if self._closed:
                future.set_exception(_closed())
            elif asked in self._cache:
                self._cache.move_to_end(asked)
                future.set_result(self._cache[asked])
            else:
                self._jobs.put((asked, future))
                if self._worker is None:
                    self._worker = self._start_worker()
        return future

    def compile(self, structured: Structured | Mapping[str, Any]) -> Grammar:
        """The grammar, once it is there.

        Raises:
            RequestError: it is malformed, not supported, costs too much or permits no output.
        """
        return self.submit(structured).result()

    def close(self) -> None:
        """End the worker; what is still waiting or compiling fails."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        self._probe.kill()
        if self._worker is not None:
            self._worker.join()

    def _start_worker(self) -> threading.Thread:
        worker = threading.Thread(target=self._work, name="grammar compiler", daemon=True)
        with _stack_size:
            before = threading.stack_size(2 * STACK_BYTES)
            worker.start()
            threading.stack_size(before)
        return worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            asked, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._compiled(asked))
            except RequestError as error:
                future.set_exception(error)
            except Exception as error:  # a fault of ours or of llguidance ends this request only
                future.set_exception(RequestError(
                    f"the grammar compiler failed: {type(error).__name__}: {error}",
                    where="structured", next="report this, with the request"))
        self._probe.close()

    def _compiled(self, asked: Structured) -> Grammar:
        with self._lock:
            if self._closed:
                raise _closed()
            if asked in self._cache:  # it was asked for twice while it waited
                return self._cache[asked]
        added = self._tokenizer.get_added_tokens_decoder()
        start, free = _start(asked.after, added, self.eos)
        text = self._probe.finish(asked, start)
        tokenizer, ordinary = self._loaded = self._loaded or self._load()
        allowed = ordinary | words(added if asked.names_tokens else free, self.vocab_size)
        grammar = Grammar(lambda: self._build(tokenizer, text), allowed, self.eos, self.vocab_size)
        with self._lock:
            self._cache[asked] = grammar
            while len(self._cache) > self.limits.max_cached:
                self._cache.popitem(last=False)
        return grammar

    def _load(self) -> tuple[LLTokenizer, Words]:
        from llguidance import LLTokenizer
        ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        ordinary = words(ids - self._tokenizer.get_added_tokens_decoder().keys(), self.vocab_size)
        return LLTokenizer(*self._tokenizer_arguments()), ordinary

    def _tokenizer_arguments(self) -> tuple[str, int, list[int]]:
        spec = json.loads(self._tokenizer.to_str())
        spec |= {"truncation": None, "padding": None}
        for token in spec["added_tokens"]:
            token["special"] = True  # marks such as </think> are no text either
        return (json.dumps(spec), max(self.vocab_size, self._tokenizer.get_vocab_size()),
                self.eos[:1])

    def _build(self, tokenizer: LLTokenizer, text: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits
        return LLMatcher(tokenizer, text, log_level=0,
                         limits=LLParserLimits(**self.limits.parser))


def _start(after: str, added: Mapping[int, Any], ends: Sequence[int]) -> tuple[str, set[int]]:
    """The first rule, and the added tokens that it lets through."""
    if not after:
        return "start: @body", set()
    marks = {i for i, token in added.items() if token.content == after}
    if not marks:
        return f"start: free @body\nfree[suffix={lark_text(after)}]: /(?s:.*)/", set()
    if marks & set(ends):
        raise RequestError(f"'{after}' ends the output, expected a text that does not",
                           where="structured, 'after'", next="name the end of the thinking")
    # Free text may hold the added tokens that are ordinary ones for the model.
    others = {i for i, token in added.items() if not token.special} - marks - set(ends)
    listed = f" | <[{','.join(map(str, sorted(others)))}]>" if others else ""
    return f"start: (TEXT{listed})* <[{min(marks)}]> @body\nTEXT: /(?s:.+)/", marks | others


def _closed() -> RequestError:
    return RequestError("the engine is closed, expected an open one", where="structured",
                        next="make a new engine")
