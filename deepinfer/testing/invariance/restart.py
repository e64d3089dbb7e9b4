"""Serving the bench's requests in another process, and what that process itself does.

The two talk through files: the job as JSON, the results as arrays, so that no bit is lost.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import DeterminismError
from deepinfer.runtime.request import TokenLogprobs
from deepinfer.testing.faults import OrderByProcess
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.record import Logits, Run, Served
from deepinfer.testing.invariance.subject import Setting

HASH_SEED = "4242"  # of the new process; Python's own is random or from the environment
START = f"import sys, pathlib, {__name__} as here; here.main(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What another process gave.

    Args:
        run: its requests. pid: its process id. hash_differs: whether its hashes of texts differ
            from ours, and so the order of its sets.
    """

    run: Run
    pid: int
    hash_differs: bool


def serve_elsewhere(bench: Bench, setting: Setting) -> Elsewhere:
    """Serve the bench's requests, with its fault, in a new process.

    Raises:
        DeterminismError: it failed; the message holds what it wrote.
    """
    assert all(getattr(setting, f.name) == f.default for f in dataclasses.fields(setting)
               if f.name != "seqs")
    job = {"spec": bench.subject.spec(), "requests": bench.requests, "seed": bench.seed,
           "texts": [list(map(int, t)) for t in bench.texts], "fault": bench.fault,
           "seqs": setting.seqs, "home": os.getpid()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        done = subprocess.run([sys.executable, "-c", START, folder], capture_output=True,
                              text=True, check=False,
                              env={**os.environ, "PYTHONHASHSEED": HASH_SEED,
                                   "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
        if done.returncode:
            raise DeterminismError(f"the new process ended with {done.returncode}: "
                                   f"{done.stderr.strip()[-2000:]}", where="axis restart",
                                   next="run the same check there by hand")
        facts = json.loads((Path(folder) / "facts.json").read_text())
        run = Run(served={name: _read(Path(folder) / f"{i}.npz")
                          for i, name in enumerate(facts["names"])})
    return Elsewhere(run, facts["pid"], facts["hash"] != hash("DeepInfer"))


def main(folder: Path) -> None:
    """The other process: read job.json, serve, write an .npz a request and facts.json."""
    job = json.loads((folder / "job.json").read_text())
    spec = job["spec"]
    make = getattr(importlib.import_module(spec["module"]), spec["function"])
    OrderByProcess.home = job["home"]
    bench = Bench(make(**spec["args"]), requests=job["requests"], seed=job["seed"],
                  texts=job["texts"], fault=job["fault"])
    (run,) = bench.serve(Trial("another process", Setting(seqs=job["seqs"]), [Stage(bench.jobs)]))
    for i, served in enumerate(run.served.values()):
        _write(folder / f"{i}.npz", served)
    facts = {"names": list(run.served), "pid": os.getpid(), "hash": hash("DeepInfer")}
    (folder / "facts.json").write_text(json.dumps(facts))


def _write(path: Path, served: Served) -> None:
    logprobs = served.logprobs or []
    arrays: dict[str, Any] = {
        "prompt": np.array(served.prompt, np.int64), "tokens": np.array(served.tokens, np.int64),
        "has_logprobs": np.array(served.logprobs is not None),
        "chosen": np.array([x.chosen for x in logprobs], np.float64),
        "top_ids": np.array([[i for i, _ in x.top] for x in logprobs], np.int64),
        "top": np.array([[v for _, v in x.top] for x in logprobs], np.float64),
        "finish_reason": np.array(served.finish_reason or ""),
        "positions": np.array([x.position for x in served.logits], np.int64),
        "steps": np.array([x.step for x in served.logits], np.int64),
        "logits": np.array([x.row for x in served.logits]),
    }
    np.savez(path, **arrays)


def _read(path: Path) -> Served:
    with np.load(path) as x:
        logprobs = [TokenLogprobs(float(c), list(zip(i.tolist(), v.tolist(), strict=True)))
                    for c, i, v in zip(x["chosen"], x["top_ids"], x["top"], strict=True)]
        logits = [Logits(p, s, "", row) for p, s, row in zip(
            x["positions"].tolist(), x["steps"].tolist(), x["logits"], strict=True)]
        return Served(tuple(x["prompt"].tolist()), x["tokens"].tolist(),
                      logprobs if x["has_logprobs"] else None, str(x["finish_reason"]) or None,
                      logits=logits)

