"""Data-parallel training in processes of one thread each, on shared memory.

Small matrices keep two threads of one process busy little more than one; two processes do twice the
work. Parameters, gradients and the optimiser's state lie in shared memory: each process adds up the
gradients of the parameters it owns and updates those in place.
"""

import multiprocessing
import os
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor, nn

TIMEOUT = 900  # seconds; a process that waits longer has lost the others


class Team:
    """One of `size` processes that train one model.

    Args:
        model: its parameters move to shared memory. size: processes.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        model.share_memory()
        self.rank, self.size = 0, size
        self.parameters = list(model.parameters())
        total = sum(p.numel() for p in self.parameters)
        self.gradients = torch.zeros(size, total).share_memory_()
        # What the processes tell each other between two barriers: seconds used, squared norms.
        self.told = torch.zeros(size, 2, dtype=torch.float64).share_memory_()
        routers = [m for m in model.modules() if hasattr(m, "load")]
        self.loads = torch.zeros(size, len(routers), max(len(m.load) for m in routers)
                                 ).share_memory_()
        self._barrier = multiprocessing.get_context("fork").Barrier(size)
        self._begins = torch.tensor([0, *(p.numel() for p in self.parameters)]).cumsum(0).tolist()
        self._index = {id(p): i for i, p in enumerate(self.parameters)}

    def start(self, work) -> list[BaseProcess]:
        """Fork the other processes; each calls `work(rank)`. Call before any backward pass."""
        context = multiprocessing.get_context("fork")
        others = [context.Process(target=work, args=(rank,), daemon=True)
                  for rank in range(1, self.size)]
        for process in others:
            process.start()
        return others

    def join(self, rank: int) -> None:
        """Take a rank: from here on backward passes add to this process's own gradients."""
        self.rank = rank
        for p, part in zip(self.parameters, self._parts(rank), strict=True):
            p.grad = part.view_as(p) if p.requires_grad else None

    def _parts(self, rank: int) -> list[Tensor]:
        return [self.gradients[rank, a:b]
                for a, b in zip(self._begins, self._begins[1:], strict=False)]

    def zero(self) -> None:
        self.gradients[self.rank].zero_()

    def gradient(self, p: Tensor) -> Tensor:
        """The mean gradient over the processes; ranks are added in ascending order."""
        i = self._index[id(p)]
        part = self.gradients[:, self._begins[i]:self._begins[i + 1]]
        return part.mean(0).view_as(p)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            self._barrier.wait(TIMEOUT)

    def abort(self) -> None:
        """End the others' waiting when this process fails."""
        self._barrier.abort()
        if self.rank:
            os._exit(1)
