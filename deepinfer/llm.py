"""LLM: the front door. Load or compile a Program, make an Engine, generate."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from deepinfer.compiler import compile, read_config
from deepinfer.errors import ProgramError, RequestError, TargetError
from deepinfer.graph.limits import Limits
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.pages import StateSizes
from deepinfer.runtime.request import RequestOutput, SamplingParams, is_int
from deepinfer.runtime.scheduler import default_chunk
from deepinfer.runtime.text import Text
from deepinfer.runtime.weights import load_weights
from deepinfer.settings import warn_unknown

Prompt: TypeAlias = str | Sequence[int]
Params: TypeAlias = SamplingParams | Mapping[str, Any]


class LLM:
    """A model ready to generate. Calls from several threads take turns.

    Args:
        model: the checkpoint directory.
        program: a Program or its directory; None: compile one, or take it from the cache.
        target: what to compile for and run on.
        num_threads: of the device; default: all cores. No result depends on it.
        max_model_len: tokens of a request, prompt and output; default: the model's context, or the
            given Program's.
        max_num_seqs: requests that run at once. max_num_batched_tokens: rows of one step. Both are
            at most what a given Program was compiled for.
        prefill_chunk: rows of a prefill chunk; default: the largest that fits beside decode rows.
        cache_bytes: bound on the paged caches; default: all requests at full length.
        progress: show bars on stderr; default: if it is a terminal.

    Raises:
        CheckpointError, ProgramError, RequestError, TargetError, ToolchainError: say what is wrong.
    """

    def __init__(self, model: str | Path, *, program: Program | str | Path | None = None,
                 target: str = "cpu", num_threads: int | None = None,
                 max_model_len: int | None = None, max_num_seqs: int = 64,
                 max_num_batched_tokens: int = 2048, prefill_chunk: int | None = None,
                 cache_bytes: int | None = None, progress: bool | None = None) -> None:
        warn_unknown()
        self.model = Path(model)
        self.progress = sys.stderr.isatty() if progress is None else progress
        self._lock = threading.Lock()
        for name, value in (("num_threads", num_threads), ("prefill_chunk", prefill_chunk),
                            ("cache_bytes", cache_bytes)):
            if value is not None and (not is_int(value) or value < 1):
                raise RequestError(f"{name} is {value!r}, expected an int >= 1", where="LLM",
                                   next=f"correct {name} or leave it out")
        cfg = read_config(self.model)
        sizes_given = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
                       "max_num_batched_tokens": max_num_batched_tokens}
        given = {name: value for name, value in sizes_given.items() if value is not None}
        limits = Limits.for_model(cfg, **given) if program is None else Limits(**given)
        if program is None:
            # Refused before a minute goes into compiling.
            default_chunk(limits.max_num_batched_tokens, limits.max_num_seqs, 1)
            with _bar(self.progress) as report:
                program = compile(cfg, target=target, limits=limits, report=report)
        elif not isinstance(program, Program):
            program = Program.load(program)
        program.require(target=target, model=cfg.to_json())
        if target != "cpu":
            raise TargetError(f"target is '{target}', expected 'cpu': no other device can run here",
                              where="LLM", next="compile for it with `deepinfer compile`")
        built = program.manifest["limits"]
        length = built["max_model_len"] if max_model_len is None else limits.max_model_len
        if not 1 < length <= built["max_model_len"]:
            raise ProgramError(f"field limits.max_model_len is {built['max_model_len']}, "
                               f"max_model_len {length} needs 2 or more, and no more than that",
                               where=f"Program {program.path}",
                               next="lower max_model_len or compile with a larger one")
        seqs = min(limits.max_num_seqs, built["max_num_seqs"])
        sizes = StateSizes.plan(program, max_num_seqs=seqs, max_model_len=length,
                                cache_bytes=cache_bytes)
        text = Text.load(self.model, program.manifest["facts"]["bos"])
        weights = load_weights(program.manifest["weights"], self.model)
        device = CpuDevice(program, weights, sizes.for_device(), num_threads=num_threads)
        self.engine = Engine(
            program, device, sizes, max_model_len=length, text=text, model=self.model,
            max_num_batched_tokens=min(limits.max_num_batched_tokens,
                                       built["max_num_batched_tokens"]),
            prefill_chunk=prefill_chunk)

    @property
    def program(self) -> Program:
        return self.engine.program

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. A text gets the begin-of-text id unless it is spelled out in it.

        Raises:
            RequestError: an empty text, one that is not Unicode, or a text for a model without
                tokenizer.json.
        """
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise RequestError("the prompt is empty, expected at least 1 character", where="prompt",
                               next="pass a text or token ids")
        if self.engine.text is None:
            raise RequestError("the prompt is a text, expected token ids: the model has no "
                               "tokenizer.json", where="prompt", next="pass token ids")
        try:
            return self.engine.text.encode(prompt)
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
            raise RequestError(f"the prompt is not Unicode text: {error}", where="prompt",
                               next="decode the bytes with errors='replace' first") from None

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: Params | Sequence[Params] | None = None) -> list[RequestOutput]:
        """Generate for one prompt or for several at once.

        A prompt is a text or a list of token ids. One bad prompt given by itself raises; in a list
        of prompts it ends alone, as an output with finish_reason "error" and the RequestError.

        Args:
            prompts: a prompt, or a list of prompts.
            params: for all, or one for each; SamplingParams or a mapping of its fields. Equal
                params mean equal seeds: equal prompts then give equal outputs.

        Returns:
            An output for each prompt, in order.

        Raises:
            RequestError: one prompt that cannot be served, no prompt, or not one params for each.
        """
        alone = _is_prompt(prompts)
        several: list[Any] = [prompts] if alone else list(prompts)
        each = _for_each(params, len(several))
        with self._lock:
            return self._generate(several, each, alone)

    def _generate(self, several: Sequence[Any], each: Sequence[Params], alone: bool
                  ) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        ids = []
        try:
            for prompt, wanted in zip(several, each, strict=True):
                try:
                    ids.append(self.engine.add_request(self.encode(prompt),
                                                       SamplingParams.of(wanted)))
                except RequestError as error:
                    if alone:
                        raise
                    ids.append(self.engine.new_id())
                    done[ids[-1]] = RequestOutput.failed(ids[-1], error)
            with _bar(self.progress and len(ids) > 1) as report:
                while len(done) < len(ids):
                    done.update((x.request_id, x) for x in self.engine.step()
                                if x.finished and x.request_id in ids)
                    if report is not None:
                        report("requests", len(done), len(ids))
        finally:  # only after an exception is anything left
            for request_id in ids:
                self.engine.abort(request_id)
        return [done[request_id] for request_id in ids]

    def score(self, prompt: Prompt, chunk: int | None = None) -> np.ndarray[Any, Any]:
        """The logits after every position of a text.

        Args:
            prompt: a text or token ids, up to max_model_len. chunk: rows of one step; no bit
                depends on it.

        Returns:
            f32[n, vocab_size]; row i is about the token after token i.

        Raises:
            RequestError: as ``generate`` for one prompt.
        """
        with self._lock:
            return self.engine.score(self.encode(prompt), chunk)

    def close(self) -> None:
        """Free the device. The LLM cannot be used afterwards."""
        with self._lock:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _is_prompt(prompts: Any) -> bool:
    """One prompt rather than a list of them: a text, or ids."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2  # a number is a prompt too, and refused as one
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        return True
    return not isinstance(prompts[0], str | Sequence | np.ndarray)


def _for_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, Mapping | str) or not isinstance(params, Sequence):
        return [params] * count  # what is no params at all is refused request by request
    if len(params) != count:
        raise RequestError(f"there are {len(params)} params for {count} prompts, expected one for "
                           "all or one for each", where="generate", next="pass as many")
    return list(params)


@contextmanager
def _bar(show: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on stderr, as a function of (what, done, total); None if not to be shown."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done,
                                                   total=total)
