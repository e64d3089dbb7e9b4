"""The scheduler: which rows run in the next step. First come, first served.

A step mixes decode rows and prefill chunks. Decode goes first, so a long prompt never stalls those
who are generating. A prompt is cut at multiples of the chunk size from its own start, one chunk a
step: where the cuts fall depends on the request alone. A chunk that does not fit waits for the next
step; it is never shortened to what its neighbours left.
"""

from __future__ import annotations

from collections import deque

from deepinfer.errors import RequestError
from deepinfer.runtime.batch import Rows
from deepinfer.runtime.pages import PagePool, StateSizes
from deepinfer.runtime.request import Request


def default_chunk(max_num_batched_tokens: int, max_num_seqs: int, page_size: int) -> int:
    """The largest chunk that always fits beside the decode rows, whole pages if it has one.

    Raises:
        RequestError: fewer rows than requests.
    """
    room = max_num_batched_tokens - (max_num_seqs - 1)
    if room < 1:
        raise RequestError(f"max_num_batched_tokens is {max_num_batched_tokens}, expected at least "
                           f"max_num_seqs = {max_num_seqs}", where="scheduler",
                           next="raise max_num_batched_tokens or lower max_num_seqs")
    return room - room % page_size if room >= page_size else room


class Scheduler:
    """Waiting and running requests, and the state they hold.

    Args:
        sizes: pages and slots there are. max_num_batched_tokens: rows of one step.
        chunk: rows of a prefill chunk; None: ``default_chunk``.

    Raises:
        RequestError: a chunk that may not fit beside the decode rows, so that it could wait for
            ever.
    """

    def __init__(self, sizes: StateSizes, *, max_num_batched_tokens: int, chunk: int | None = None
                 ) -> None:
        largest = default_chunk(max_num_batched_tokens, sizes.num_slots, 1)
        if chunk is not None and not 1 <= chunk <= largest:
            raise RequestError(f"prefill_chunk is {chunk}, expected 1..{largest} (what "
                               f"{max_num_batched_tokens} rows leave beside {sizes.num_slots - 1} "
                               "decode rows)", where="scheduler",
                               next="lower prefill_chunk or raise max_num_batched_tokens")
        self.chunk = chunk or default_chunk(max_num_batched_tokens, sizes.num_slots,
                                            sizes.page_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sizes = sizes
        self.pool = PagePool(sizes.num_pages, sizes.num_slots)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests, the running ones first."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more pages than there are, so it could never run.
        """
        need = self.sizes.pages_for(request.positions)
        if need > self.sizes.num_pages:
            raise RequestError(
                f"the request needs {need} pages for {request.positions} positions, expected at "
                f"most {self.sizes.num_pages}", where=f"request {request.request_id}",
                next="lower max_tokens or raise cache_bytes")
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and give back what it holds."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self.pool.release(request.request_id)
        request.slot, request.pages = None, []

    def schedule(self) -> list[Rows]:
        """The rows of the next step; empty if there is nothing to do."""
        self._admit()
        pending = [(r, self._next_rows(r)) for r in self._running]
        batch, room = [], self.max_num_batched_tokens
        for decode in (True, False):
            for request, rows in pending:
                # A decode row is the one row that a request which has chosen a token waits for.
                if (request.computed >= request.prompt_len) is decode and len(rows) <= room:
                    batch.append(rows)
                    room -= len(rows)
        return batch

    def _admit(self) -> None:
        """Give state to waiting requests in order; the first that must wait holds up the others.

        All pages a request can ever need are taken at once, so a running one always finishes.
        """
        while self._waiting:
            head = self._waiting[0]
            taken = self.pool.take(head.request_id, self.sizes.pages_for(head.positions))
            if taken is None:
                return
            head.slot, head.pages = taken
            self._running.append(self._waiting.popleft())

    def _next_rows(self, request: Request) -> Rows:
        """Up to the next multiple of the chunk; a token is chosen after the last known one."""
        start, known = request.computed, len(request.tokens)
        end = min(known, start - start % self.chunk + self.chunk)
        return Rows(request, start, end, "last" if end == known else "none")
