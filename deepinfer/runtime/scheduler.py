"""The scheduler: which rows run in the next step. First come, first served.

A step mixes decode rows and prefill chunks. Decode goes first, so a long prompt never stalls those
who are generating. A prompt is cut at multiples of the chunk size from its own start, and where the
prefix cache takes a snapshot; one chunk a step: where the cuts fall depends on the request alone.
A chunk that does not fit waits for the next step; it is never shortened to what its neighbours
left.

Pages are taken as a request grows. When there are none left, the request that came last gives back
everything and waits, in its old place in the queue; it recomputes what it had later, with the same
bits. The request that came first is never preempted by another, and fits alone, so it finishes:
whoever waits becomes the first at last.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from deepinfer.errors import RequestError
from deepinfer.runtime.batch import Rows
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.prefix import Hit, PrefixCache
from deepinfer.runtime.request import Request
from deepinfer.runtime.state import StateSizes


def default_chunk(max_num_batched_tokens: int, max_num_seqs: int, page_size: int,
                  draft_width: int = 0) -> int:
    """The largest chunk that always fits beside the decode rows, whole pages if it has one.

    Raises:
        RequestError: fewer rows than requests verify.
    """
    rows = 1 + draft_width
    room = max_num_batched_tokens - (max_num_seqs - 1) * rows
    if room < rows:
        raise RequestError(f"max_num_batched_tokens is {max_num_batched_tokens}, expected at least "
                           f"max_num_seqs * (1 + draft_width) = {max_num_seqs * rows}",
                           where="scheduler", next="raise max_num_batched_tokens or lower "
                                                   "max_num_seqs or draft_width")
    return room - room % page_size if room >= page_size else room


class Scheduler:
    """Waiting and running requests, and the state they hold.

    Args:
        sizes: pages and slots there are. pool: who holds them. prefix: what is cached.
        max_num_batched_tokens: rows of one step. draft_width: drafts verified per step at most.
        chunk: rows of a prefill chunk; None: ``default_chunk``.
        keep_tokens: positions at a prompt's end that decoder replay computes; 0: there is none.
        on_admit: called when a request gets its state, with what is cached of it.
        on_preempt: called before a request loses its state.

    Raises:
        RequestError: a chunk that may not fit beside the decode rows, so that it could wait for
            ever.
    """

    def __init__(self, sizes: StateSizes, pool: PagePool, prefix: PrefixCache, *,
                 max_num_batched_tokens: int, draft_width: int = 0, chunk: int | None = None,
                 keep_tokens: int = 0,
                 on_admit: Callable[[Request, Hit], None] = lambda request, hit: None,
                 on_preempt: Callable[[Request], None] = lambda request: None) -> None:
        largest = default_chunk(max_num_batched_tokens, sizes.num_slots, 1, draft_width)
        if chunk is not None and not 1 <= chunk <= largest:
            raise RequestError(f"prefill_chunk is {chunk}, expected 1..{largest} (what "
                               f"{max_num_batched_tokens} rows leave beside {sizes.num_slots - 1} "
                               "decoding requests)", where="scheduler",
                               next="lower prefill_chunk or raise max_num_batched_tokens")
        self.chunk = chunk or default_chunk(max_num_batched_tokens, sizes.num_slots,
                                            sizes.page_size, draft_width)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.sizes, self.pool, self.prefix = sizes, pool, prefix
        self.keep_tokens = keep_tokens
        self.preempted: list[Request] = []  # since the caller last emptied it
        self._on_admit, self._on_preempt = on_admit, on_preempt
        self._waiting: list[Request] = []  # by arrival
        self._running: list[Request] = []  # by arrival

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests, the running ones first."""
        return [*self._running, *self._waiting]

    @property
    def waiting(self) -> bool:
        """Whether requests wait for state."""
        return bool(self._waiting)

    @property
    def running(self) -> list[Request]:
        """Those that hold state, by arrival."""
        return self._running

    @property
    def prefill_rows(self) -> int:
        """Rows that the running requests which do not decode yet will take of the next step."""
        rows = sum(len(self._next_rows(r)) for r in self._running if not r.decoding)
        return min(rows, self.max_num_batched_tokens)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it needs more pages than there are, so it could never run.
        """
        self.sizes.require_room(request.request_id, request.positions)
        bisect.insort(self._waiting, request, key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and give back what it holds."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._release(request)

    def preempt(self, request: Request, *, damaged: bool = False) -> bool:
        """Take a running request's state away; it waits in its old place. False if it has none.

        Args:
            damaged: a step broke off: nobody may take anything of the state.
        """
        if request not in self._running:
            return False
        if not damaged:
            self._on_preempt(request)
        self._running.remove(request)
        self._release(request)
        request.restart()
        bisect.insort(self._waiting, request, key=lambda r: r.arrival)
        self.preempted.append(request)
        return True

    def _release(self, request: Request) -> None:
        self.pool.release(request.request_id)
        request.slot, request.pages = None, []

    def schedule(self) -> list[Rows]:
        """The rows of the next step; empty if there is nothing to do."""
        self._admit()
        batch: list[Rows] = []
        room = self.max_num_batched_tokens
        for decode in (True, False):
            for request in list(self._running):
                if request not in self._running or request.decoding is not decode:
                    continue
                rows = self._next_rows(request)
                if len(rows) <= room and self._grow(request, rows, batch):
                    batch.append(rows)
                    room -= len(rows)
        return [rows for rows in batch if rows.request in self._running]

    def _admit(self) -> None:
        """Give state to waiting requests in order; the first that must wait holds up the others."""
        while self._waiting and self.pool.free_slots:
            head = self._waiting[0]
            hit = self.prefix.lookup(head.tokens, head.params.cache_salt, self._cache_limit(head))
            if not self.prefix.fits(hit, self.sizes.pages_for(len(head.tokens))):
                return
            slot = self.pool.take_slot(head.request_id)
            assert slot is not None
            head.slot = slot
            self._waiting.pop(0)
            bisect.insort(self._running, head, key=lambda r: r.arrival)
            self.prefix.restore(head.request_id, slot, hit)
            head.pages = self.pool.table(head.request_id)
            self._on_admit(head, hit)

    def extend(self, requests: Sequence[Request], widths: Sequence[int]) -> bool:
        """Pages for the next rows of running requests, if nobody has to give any up for them."""
        missing = [max(0, self.sizes.pages_for(len(r.tokens) + w) - len(r.pages))
                   for r, w in zip(requests, widths, strict=True)]
        if sum(missing) > self.pool.free_pages:
            return False
        for request, count in zip(requests, missing, strict=True):
            if count:
                self.pool.grow(request.request_id, count)
                request.pages = self.pool.table(request.request_id)
        return True

    def _cache_limit(self, request: Request) -> int:
        """Positions that may come from the cache: not the last, whose row chooses a token; none
        that decoder replay computes; and none where every row of the prompt is wanted."""
        if request.params.prompt_logprobs is not None:
            return 0
        known = len(request.tokens) - 1
        return max(0, min(known, request.prompt_len - self.keep_tokens) if self.keep_tokens
                   else known)

    def _grow(self, request: Request, rows: Rows, batch: list[Rows]) -> bool:
        """Pages up to the rows' end, taken from whoever came last; False: it was this one."""
        while True:
            missing = self.sizes.pages_for(rows.end) - len(request.pages)
            if missing <= 0:
                return True
            if self.pool.grow(request.request_id, missing):
                request.pages = self.pool.table(request.request_id)
                return True
            last = self._running[-1]
            self.preempt(last)
            if last is request:
                return False

    def _next_rows(self, request: Request) -> Rows:
        """A chunk of known tokens, or the last one with its drafts."""
        start, known = request.computed, len(request.tokens)
        if request.decoding:
            width = max(0, min(request.width, len(request.drafts), request.max_len - known - 1))
            drafts = tuple(request.drafts[:width])
            return Rows(request, start, known + width, "all", drafts)
        end = min(known, start - start % self.chunk + self.chunk)
        end = self.prefix.cuts(start, end, request.prompt_len)
        if request.params.prompt_logprobs is not None and start < request.prompt_len:
            return Rows(request, start, end, "all", forced=True)
        return Rows(request, start, end, "last" if end == known else "none")

