"""The child process of the tuner: one JSON request a line on stdin, one answer a line on stdout.

It dies with its parent: when stdin ends, it kills its whole process group, a compiler that it
started and a kernel that never returns included.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autotune.building import Built, build, lower
from autotune.clock import Clock, ceilings
from autotune.keys import Policy
from autotune.space import Candidate, Problem, Sizes
from autotune.stand import Stand
from deepinfer.errors import DeepInferError
from deepinfer.targets.base import Schedule


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {"problem": candidate.problem.to_json(), "index": candidate.index,
            "schedule": [list(i) for i in candidate.schedule.items]}


def candidate_of(held: Mapping[str, Any]) -> Candidate:
    return Candidate(Problem.from_json(held["problem"]), held["index"],
                     Schedule(tuple((n, v) for n, v in held["schedule"])))


KEEP_BYTES = 1 << 28  # of stands: a search comes back to each of its points, round by round


class Worker:
    """Answers requests; keeps the arrays of the points that it worked on last."""

    def __init__(self) -> None:
        self._stands: dict[Any, Stand] = {}  # the latest last
        self._clocks: dict[tuple[str, int], Clock] = {}

    def stand(self, problem: Problem, sizes: Sizes, isa: str, threads: int) -> Stand:
        key = (problem, sizes, isa, threads)
        found = self._stands.pop(key, None)
        if found is None:
            # Memory is free before more is asked for.
            while sum(s.nbytes for s in self._stands.values()) > KEEP_BYTES:
                self._stands.pop(next(iter(self._stands))).close()
            if (isa, threads) not in self._clocks:
                self._clocks[isa, threads] = Clock(isa, threads)
            found = Stand(problem, sizes, isa, threads, self._clocks[isa, threads])
        self._stands[key] = found
        return found

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        what = request["do"]
        if what == "ceilings":
            return ceilings(request["isa"], request["threads"])
        candidate = candidate_of(request["candidate"])
        if what == "build":
            return asdict(build(candidate, request["isa"]))
        if what == "lower":
            return {"launch": lower(candidate).launch}
        built = Built(**request["built"])
        stand = self.stand(candidate.problem, tuple((n, v) for n, v in request["sizes"]),
                           request["isa"], request["threads"])
        if what == "reference":
            return {"digest": stand.reference()}
        if what == "gate":
            whole, cut = stand.digest(candidate, built)
            return {"whole": whole, "cut": cut}
        if what == "time":
            policy = Policy(**request["policy"])
            return {"ns": stand.time(candidate, built, policy, request["repeats"])}
        raise ValueError(f"no request '{what}'")


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(os.getpgid(0), signal.SIGKILL)  # the parent is gone, or is done with us

    threading.Thread(target=listen, daemon=True).start()
    worker = Worker()
    print(json.dumps({"ready": os.getpid()}), file=out, flush=True)
    while True:
        request = json.loads(lines.get())
        try:
            answer = {"id": request["id"], "ok": worker.answer(request)}
        except DeepInferError as error:
            answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        except MemoryError as error:
            answer = {"id": request["id"], "error": f"not enough memory: {error}"}
        except Exception as error:  # whatever happens ends this request, never the process
            answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
