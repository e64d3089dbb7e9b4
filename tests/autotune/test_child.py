"""Child processes: time-outs, crashes, errors, and that nothing survives its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from autotune.child import Child, ChildFailed
from autotune.lock import exclusive
from deepinfer.errors import TargetError

SERVER = """
import json, os, sys, signal
print('{"ready": 1}', flush=True)
for line in sys.stdin:
    held = json.loads(line)
    what = held["do"]
    if what == "hang":
        signal.pause()
    if what == "crash":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "leave":
        sys.exit(7)
    answer = {"error": "TargetError: no"} if what == "error" else {"ok": {"pid": os.getpid()}}
    print(json.dumps({"id": held["id"], **answer}), flush=True)
"""


@pytest.fixture
def child():
    made = Child((sys.executable, "-c", SERVER))
    yield made
    made.close()


def test_answers_come_from_one_process(child):
    assert child.ask({"do": "x"}, 60) == child.ask({"do": "x"}, 60)


@pytest.mark.parametrize(("what", "kind", "reason"), [
    ("error", "error", "TargetError: no"),
    ("crash", "crash", "ended with signal SIGSEGV: last words"),
    ("leave", "crash", "ended with exit code 7"),
])
def test_failures_have_a_reason_and_the_next_request_works(child, what, kind, reason):
    child.ask({"do": "x"}, 60)
    with pytest.raises(ChildFailed, match=reason) as caught:
        child.ask({"do": what}, 60)
    assert caught.value.kind == kind
    assert child.ask({"do": "x"}, 60)["pid"] > 0


def test_a_request_that_takes_too_long_is_killed(child):
    pid = child.ask({"do": "x"}, 60)["pid"]
    with pytest.raises(ChildFailed, match=r"no answer within 0\.05 s") as caught:
        child.ask({"do": "hang"}, 0.05)
    assert caught.value.kind == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert child.ask({"do": "x"}, 60)["pid"] != pid


def test_the_time_of_a_request_begins_when_the_worker_is_ready(child):
    """Imports on a busy machine take longer than many a request may."""
    child.send({"do": "x"}, 60)
    assert child.deadline - time.monotonic() > 600
    while child.take() is None:
        select.select([child], [], [])
    assert child.deadline - time.monotonic() <= 60


def test_an_answer_in_pieces_together_with_the_greeting():
    """Whatever the system puts into one read, it is the same answer."""
    code = ("import sys\nsys.stdin.readline()\n"
            "for piece in ('{\"ready\"', ': 1}\\n{\"id\": 1, ', '\"ok\": {\"a\": ', '5}}\\n'):\n"
            "    print(piece, end='', flush=True)\nsys.stdin.readline()\n")
    made = Child((sys.executable, "-c", code))
    assert made.ask({"do": "x"}, 60) == {"a": 5}
    made.close()


def test_a_worker_ends_with_its_parent():
    """The real worker kills its own group when stdin ends, in the middle of a request, too."""
    worker = subprocess.Popen([sys.executable, "-m", "autotune.worker"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdin is not None
    worker.stdin.write(b'{"id": 1, "do": "ceilings", "isa": "no such level", "threads": 1}\n')
    worker.stdin.close()
    assert worker.wait(60) == -9


def test_one_holder_of_the_lock(tmp_path):
    path, told = tmp_path / "lock", []
    with exclusive(1, path=path):
        with pytest.raises(TargetError, match="another tuner has held the machine for 0 s"):
            with exclusive(0, path=path):
                pass
        naps = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):  # it waits, and says so once
            with exclusive(60, lambda: told.append(1), path, nap):
                pass
        assert told == [1] and len(naps) == 3
    with exclusive(0, path=path):
        pass


def test_the_lock_is_free_when_its_holder_was_killed(tmp_path):
    path = tmp_path / "lock"
    code = ("import signal, sys\nfrom pathlib import Path\nfrom autotune.lock import exclusive\n"
            "with exclusive(1, path=Path(sys.argv[1])):\n"
            "    print('held', flush=True)\n    signal.pause()\n")
    with subprocess.Popen([sys.executable, "-c", code, str(path)],
                          stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(TargetError), exclusive(0, path=path):
            pass
        holder.kill()
    with exclusive(5, path=path):
        pass
