"""What a caller waits for: the completions of one request, all at once or as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from deepinfer.api.delivery import Delivery
from deepinfer.errors import RequestError
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.params import SamplingParams


class Completions:
    """The newest output of each of a request's n children.

    Args:
        count: n.
    """

    def __init__(self, count: int) -> None:
        self.outputs: list[RequestOutput | None] = [None] * count
        self._running = count

    @staticmethod
    def failed(request_id: str, error: RequestError) -> Completions:
        """Of a request that was refused."""
        refused = Completions(1)
        refused.receive(0, RequestOutput.failed(request_id, error))
        return refused

    def receive(self, index: int, output: RequestOutput) -> None:
        self.outputs[index] = output
        self._running -= output.finished

    @property
    def finished(self) -> bool:
        return not self._running

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(output.token_ids) for output in self.outputs if output is not None)

    def result(self) -> RequestOutput:
        """Child 0's output; with n > 1 it holds those of all children, its own first."""
        outputs = [output for output in self.outputs if output is not None]
        return outputs[0] if len(self.outputs) == 1 else RequestOutput.group(
            outputs[0].request_id, outputs)


class _Newest:
    """Outputs not yet taken, by child. Apart from Stream, so that the engine's side holds nothing
    that keeps a dropped Stream alive."""

    def __init__(self) -> None:
        self.outputs: dict[int, RequestOutput] = {}

    def receive(self, index: int, output: RequestOutput) -> None:
        self.outputs[index] = output  # one not yet taken is part of this one


class Stream:
    """The outputs of one request as they grow: an iterator of deltas, and a context manager.

    A delta is a RequestOutput whose ``text``, ``token_ids`` and ``logprobs`` are what is new since
    the one before; all of them joined are the whole. ``usage`` and ``metrics`` count everything so
    far. With n > 1 the deltas of the children alternate; ``index`` tells them apart. The last delta
    of each child has a ``finish_reason``. Whoever stops early closes it, which aborts the request;
    an iterator that is dropped closes itself.

    Args:
        delivery: of the engine. prompt: token ids. params: how to sample.

    Raises:
        RequestError: the request cannot be served.
    """

    def __init__(self, delivery: Delivery, prompt: Sequence[int], params: SamplingParams) -> None:
        self._ids: tuple[str, ...] = ()  # first: __del__ also runs where submit raises
        self._delivery = delivery
        self._newest = _Newest()
        self._seen = [(0, 0)] * params.n  # characters and tokens given of each child
        self._stopping = False
        self.count = self._running = params.n
        with delivery.turn:
            self._ids = delivery.submit(prompt, params, self._newest.receive)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> RequestOutput:
        try:
            while not self._newest.outputs:
                if not self._running or self._stopping:
                    raise StopIteration
                with self._delivery.turn:
                    if not self._newest.outputs:  # else another caller's step brought it
                        self._delivery.step()
        except BaseException:
            self.close()
            raise
        index = next(iter(self._newest.outputs))  # the oldest news
        output = self._newest.outputs.pop(index)
        self._running -= output.finished
        return self._delta(index, output)

    def stop(self) -> None:
        """End the iteration after the step that runs now; a signal handler may call it."""
        self._stopping = True

    def close(self) -> None:
        """Abort what still runs. Harmless a second time."""
        ids, self._ids, self._running = self._ids, (), 0
        self._newest.outputs.clear()
        if ids:
            with self._delivery.turn:
                self._delivery.forget(ids)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._ids:
            self._delivery.drop(self._ids)

    def _delta(self, index: int, output: RequestOutput) -> RequestOutput:
        chars, tokens = self._seen[index]
        self._seen[index] = (len(output.text), len(output.token_ids))
        return replace(output, text=output.text[chars:], token_ids=output.token_ids[tokens:],
                       logprobs=None if output.logprobs is None else output.logprobs[tokens:])
