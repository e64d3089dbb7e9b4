"""`deepinfer chat`: talk to a model, on a terminal or through a pipe with one prompt a line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.api.chat import import_recipe
from deepinfer.api.chat_output import ChatOutput
from deepinfer.commands.chat_view import JsonView, TerminalView, TextView, View
from deepinfer.commands.make_model import default_model
from deepinfer.commands.output import say
from deepinfer.commands.run import check_threads, open_llm
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

HELP = """\
/reset          forget the conversation
/seed N         sample with seed N from now on
/system TEXT    set the system message; without TEXT, remove it
/stats          counts of the engine
/help           this list
/quit           end the chat, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a space is never a command."""


def run(args: argparse.Namespace) -> int:
    # All that can be wrong with the arguments is found before anything is compiled.
    check_threads(args.threads)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature,
                            top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    import_recipe()
    model = Path(args.model) if args.model is not None else default_model()
    view = JsonView() if args.json else TerminalView() if sys.stdout.isatty() else TextView()
    attended = sys.stdin is not None and sys.stdin.isatty()
    with open_llm(args, model) as llm:
        llm.chat_format  # noqa: B018 (a tokenizer without the format's tokens is refused here)
        chat = Chat(llm, params, view, thinking=not args.no_thinking, system=args.system,
                    interruptible=attended)
        if attended:
            say("/help lists the commands; Ctrl-D ends the chat")
        failures = chat.serve(_reader(attended and sys.stdout.isatty(), attended))
    return 0 if attended or not failures else 2


class Chat:
    """One conversation.

    Args:
        llm: answers. params: of every answer. view: where it is shown. thinking: whether the model
            thinks first. system: the system message. interruptible: Ctrl-C stops an answer.
    """

    def __init__(self, llm: LLM, params: SamplingParams, view: View, *, thinking: bool = True,
                 system: str | None = None, interruptible: bool = False) -> None:
        self.llm, self.params, self.view = llm, params, view
        self.thinking, self.system, self.interruptible = thinking, system, interruptible
        self.history: list[dict[str, Any]] = []

    def serve(self, read: Callable[[], str]) -> int:
        """Answer lines until there are no more.

        Args:
            read: the next line; raises EOFError at the end.

        Returns:
            How many lines could not be served.
        """
        failures = 0
        while True:
            try:
                line = read()
            except EOFError:
                return failures
            except KeyboardInterrupt:
                if not self.interruptible:
                    raise
                continue  # the line is given up, not the chat
            if not line.strip():
                continue
            if line.startswith("/"):
                name, _, rest = line.strip().partition(" ")
                if name == "/quit":
                    return failures
                done = self.command(name, rest.strip())
            else:
                done = self.ask(line.strip())
            failures += not done

    def ask(self, prompt: str) -> bool:
        """Answer one prompt, and remember both if there is an answer. False: it failed."""
        begun = time.monotonic()
        asked = [*self.history, {"role": "user", "content": prompt}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        answer: ChatOutput | None = None
        try:
            with self.llm.stream_chat(system + asked, self.params, thinking=self.thinking
                                      ) as stream, self._interrupts(stream.stop):
                for delta in stream:
                    self.view.delta(delta)
                answer = stream.answer
            if answer is not None and answer.raw.error is not None:
                raise answer.raw.error
        except DeepInferError as error:
            self.view.failed(prompt, error)
            return False
        if answer is None:
            say("stopped before the answer began")
            return True
        self.view.answered(prompt, answer, time.monotonic() - begun, not answer.raw.finished)
        if answer.content or answer.raw.finished:  # not one stopped while it was thinking
            self.history = [*asked, answer.message]
        return True

    def command(self, name: str, rest: str) -> bool:
        """Obey a line that begins with a slash. False: it cannot be."""
        if name == "/reset":
            self.history = []
            say("the conversation is forgotten")
        elif name == "/seed":
            seed: Any = int(rest) if rest.isdecimal() and len(rest) < 30 else rest
            try:
                self.params = dataclasses.replace(self.params, seed=seed)
            except RequestError as error:
                self.view.failed(name, error)
                return False
            say(f"the seed is {seed}")
        elif name == "/system":
            self.system = rest or None
            say("the system message is " + ("set" if rest else "removed"))
        elif name == "/stats":
            self.view.stats(dataclasses.asdict(self.llm.stats()))
        elif name == "/help":
            say(HELP)
        else:
            self.view.failed(name, RequestError(
                f"no command '{name}', expected one of /reset /seed /system /stats /help /quit",
                where="chat", next="begin the line with a space if it is a prompt"))
            return False
        return True

    @contextlib.contextmanager
    def _interrupts(self, stop: Callable[[], None]) -> Iterator[None]:
        """While it lasts, Ctrl-C calls ``stop``: no step of the engine is cut in the middle. A
        second Ctrl-C ends the program."""
        if not self.interruptible or threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            stop()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _reader(terminal: bool, attended: bool) -> Callable[[], str]:
    """A function that reads the next line.

    Args:
        terminal: both ends are one: lines can be edited. attended: somebody types.
    """
    if terminal:
        try:
            toolkit = importlib.import_module("prompt_toolkit")
        except ImportError:
            with contextlib.suppress(ImportError):  # not on every system
                import readline  # noqa: F401 (it lets ``input`` edit and remember lines)
            return lambda: input("> ")
        session = toolkit.PromptSession()
        return lambda: str(session.prompt("> "))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")

    def read() -> str:
        if attended:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    return read
