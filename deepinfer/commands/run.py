"""`deepinfer run`: generate text from one prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.commands.make_model import default_model
from deepinfer.commands.output import Progress, emit, emit_json, say
from deepinfer.commands.tokens import parse_tokens
from deepinfer.errors import CheckpointError, RequestError
from deepinfer.program import Program
from deepinfer.runtime.request import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM


@contextmanager
def open_llm(args: argparse.Namespace, model: Path) -> Iterator[LLM]:
    """The model of this command with the Program given, compiled, or found in the cache.

    Raises:
        CheckpointError: no weights there. Otherwise what ``LLM`` and ``compile`` raise.
    """
    check_checkpoint(model)
    from deepinfer.compiler import compile
    from deepinfer.llm import LLM

    program = Program.load(args.program) if args.program is not None else None
    if program is None:
        with Progress() as progress:
            program = compile(model, report=progress)
    with LLM(model, program=program, num_threads=args.threads, progress=False) as llm:
        yield llm


def check_checkpoint(model: Path) -> None:
    """Find out that there is no good checkpoint before a minute goes into compiling.

    Raises:
        CheckpointError: nothing there, or something damaged.
    """
    if not model.is_dir():
        raise CheckpointError(f"no checkpoint directory at '{model}'", where="MODEL",
                              next="give a directory with config.json and weights; "
                                   "`deepinfer make-model` writes a random one")
    with CheckpointReader(model):
        pass


def check_threads(threads: int | None) -> None:
    """Raises RequestError for a number of threads that is none."""
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}, expected an int >= 1", where="--threads",
                           next="correct it or leave it out")


def run(args: argparse.Namespace) -> int:
    # All that can be wrong with the arguments is found before anything is compiled.
    check_threads(args.threads)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature,
                            top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    prompt = args.prompt if args.tokens is None else parse_tokens(args.tokens)
    model = Path(args.model) if args.model is not None else default_model()
    with open_llm(args, model) as llm:
        begun = time.monotonic()
        (output,) = llm.generate(prompt, params)
        seconds = time.monotonic() - begun
    if output.error is not None:
        raise output.error  # found while it ran
    if args.json:
        emit_json({"prompt_token_ids": output.prompt_token_ids, "text": output.text,
                   "token_ids": output.token_ids, "finish_reason": output.finish_reason,
                   "usage": asdict(output.usage)})
    elif output.text or not output.token_ids:
        emit(printable(output.text) if sys.stdout.isatty() else output.text)
    else:  # the model has no tokenizer.json, or all of its tokens were special ones
        emit(",".join(map(str, output.token_ids)))
    usage = output.usage
    say(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated in "
        f"{seconds:.2f} s, ended by {output.finish_reason}")
    return 0


def printable(text: str) -> str:
    """Text for a terminal: a generated control character must not steer it."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
