"""A process that tries grammars first, so that one that never ends or crashes the compiler harms
nobody: llguidance can be neither interrupted nor kept from running out of stack or memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.errors import RequestError
from deepinfer.runtime.grammar_schema import explain
from deepinfer.runtime.grammar_spec import GrammarLimits, Structured

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK_BYTES = 4 * 1024**2  # of the thread that tries; who compiles the same afterwards needs more
_WALL_SECONDS = 600.0  # for an answer; only a process that is stopped needs as long


class Probe:
    """The process, started when it is first needed and again when a grammar has ended it.

    Args:
        tokenizer: gives the arguments of llguidance's LLTokenizer; called when they are needed.
        limits: what a grammar may cost.
    """

    def __init__(self, tokenizer: Callable[[], tuple[str, int, list[int]]], limits: GrammarLimits
                 ) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._process: subprocess.Popen[str] | None = None

    def finish(self, asked: Structured, start: str) -> str:
        """The grammar as llguidance takes it, which is then known to compile.

        Args:
            start: the first rule, in Lark; it refers to what is asked for as @body.

        Raises:
            RequestError: it is not supported, does not compile, costs too much, or permits no
                output.
        """
        messages: list[Any] = [{"asked": asdict(asked), "start": start}]
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.runtime.grammar_probe"], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2], start_new_session=True)
            messages.insert(0, asdict(self._limits))
        answer = self._ask(messages)
        if "needs" in answer:  # only now: much of what is wrong is found without the vocabulary
            answer = self._ask([self._tokenizer()])
        if "text" in answer:
            return str(answer["text"])
        where = f"structured, '{asked.kind}'"
        if "what" not in answer:
            raise RequestError(self._obituary(), where=where, next="simplify the grammar")
        raise RequestError(answer["what"], where=answer.get("where") or where,
                           next=answer.get("next") or
                           "correct the grammar; its syntax is that of llguidance")

    def _ask(self, messages: list[Any]) -> dict[str, Any]:
        """The answer; empty if the process has ended, or had to be, before one."""
        assert self._process and self._process.stdin and self._process.stdout
        timer = threading.Timer(_WALL_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.writelines(json.dumps(message) + "\n" for message in messages)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else {}

    def _obituary(self) -> str:
        assert self._process
        code = self._process.wait()
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            return (f"the grammar is not compiled after {self._limits.compile_seconds} s, "
                    "expected it to be")
        what = "ran out of stack" if code in (-signal.SIGSEGV, -signal.SIGBUS) else \
            f"ran out of memory or failed (exit code {code})"
        return f"the compiler {what}, expected a grammar it can hold"

    def kill(self) -> None:
        """End the process from any thread; who waits for its answer gets an error."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and forget it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _serve() -> None:
    """Answer jobs line by line until there are no more."""
    limits = GrammarLimits(**json.loads(sys.stdin.readline()))
    if sys.platform == "linux":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (limits.compile_bytes, limits.compile_bytes))
    tokenizer = None
    while line := sys.stdin.readline():
        job = json.loads(line)
        try:
            with _Limited(limits.compile_seconds):
                body = _body(Structured(**job["asked"]), limits)
            tokenizer = tokenizer or _load()
            with _Limited(limits.compile_seconds):
                answer = {"text": _try(job["start"], body, tokenizer, limits)}
        except RequestError as error:
            answer = {"what": error.what, "where": error.where, "next": error.next}
        except Exception as error:  # a fault of ours or of llguidance
            answer = {"what": f"the grammar compiler failed: {type(error).__name__}: {error}",
                      "next": "report this, with the request"}
        print(json.dumps(answer), flush=True)


class _Limited:
    """Ends the process when the block has used its processor time, whatever it does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _load() -> LLTokenizer:
    from llguidance import LLTokenizer
    print(json.dumps({"needs": "tokenizer"}), flush=True)
    text, vocab_size, eos = json.loads(sys.stdin.readline())
    return LLTokenizer(text, vocab_size, eos)


def _body(asked: Structured, limits: GrammarLimits) -> dict[str, Any]:
    """What is asked for, in the two forms that llguidance's parser takes: JSON schema and Lark."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    body = asked.body(limits)
    if "regex" in body:
        return dict(json.loads(LLMatcher.grammar_from_regex(body["regex"]))["grammars"][0])
    if "gbnf" in body:
        try:
            return {"lark_grammar": gbnf_to_lark(body["gbnf"])}
        except Exception as error:  # it raises bare Exceptions, and recurses
            raise RequestError(f"the grammar is no GBNF ({_brief(str(error))}), and has no rule "
                               "'start' as Lark has, expected one of these", where="structured",
                               next="write it as GBNF or Lark") from None
    return body


def _try(start: str, body: dict[str, Any], tokenizer: LLTokenizer, limits: GrammarLimits) -> str:
    from llguidance import LLMatcher, LLParserLimits

    # Forced tokens would make a mask depend on how its state was reached: after a rollback,
    # llguidance forces other ones.
    top = f'%llguidance {{"no_forcing": true}}\n{start}\n'
    text = json.dumps({"grammars": [{"lark_grammar": top}, {**body, "name": "body"}]})
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits.parser))
    if matcher.is_error():
        message = _brief(matcher.get_error())
        if body.get("json_schema"):
            schema = {k: v for k, v in body["json_schema"].items() if k != "x-guidance"}
            raise explain(schema, message, "structured, 'json'")
        raise RequestError(f"the grammar does not compile: {message}", where="structured",
                           next="correct the grammar")
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError("the grammar permits no output at all, expected at least one",
                           where="structured", next="correct the grammar")
    legal = (8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
    if any(matcher.try_consume_tokens([token]) for token in legal) and not matcher.rollback(1):
        raise RequestError("rules with max_tokens= or stop= cannot be taken back, which drafts "
                           "need; expected suffix= or none of these", where="structured",
                           next="rewrite the rules")
    return text


def _brief(message: str) -> str:
    """The message without the picture of the place, which is that in our text."""
    kept = [line.strip() for line in message.splitlines() if line.strip() != "<non-verbose/>"]
    text = "; ".join(line for line in kept if line and "|" not in line[:8] and set(line) != {"^"})
    return text if len(text) <= 300 else f"{text[:297]}..."


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
