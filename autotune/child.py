"""A child process that answers one request at a time, with a time-out for each."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL = 600  # characters of what a child wrote before it ended
START_SECONDS = 900.0  # to import what it needs, on a machine that is busy with other things


def _search_path() -> str:
    """Where a child finds this package, whatever directory it starts in."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parents[1]), *([given] if given else [])])


class ChildFailed(Exception):
    """A request had no answer; ``kind`` is "timeout", "crash" or "error"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Child:
    """A worker in a process group of its own, started on first use and again after it ended.

    It says that it is ready before it answers; a request's time does not begin earlier.

    Args:
        command: to start it.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "autotune.worker")) -> None:
        self.command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()
        self._buffer = b""
        self._sent, self._deadline, self._seconds = 0, 0.0, 0.0
        self._ready = self.busy = False

    def fileno(self) -> int:
        """For ``select``: readable when an answer, or its end, is there."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def deadline(self) -> float:
        return self._deadline

    def send(self, request: Mapping[str, Any], seconds: float) -> None:
        """Begin a request that may take so long."""
        assert not self.busy
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._sent += 1
        self._seconds, self.busy = seconds, True
        self._deadline = time.monotonic() + (seconds if self._ready else START_SECONDS)
        line = json.dumps({**request, "id": self._sent}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: ``take`` says how

    def take(self) -> dict[str, Any] | None:
        """The answer, or None while there is none.

        Raises:
            ChildFailed: the worker said so, ended, or was too slow (it is killed then).
        """
        assert self.busy and self._process is not None
        if time.monotonic() > self._deadline:
            seconds = self._seconds if self._ready else START_SECONDS
            self.kill()
            raise ChildFailed("timeout", f"no answer within {seconds:g} s")
        readable, _, _ = select.select([self.fileno()], [], [], 0)
        if not readable:
            return None
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            code = self._process.wait()
            self.busy = False
            self.kill()
            how = (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
            raise ChildFailed("crash", f"the process ended with {how}{self._last_words()}")
        self._buffer += data
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if self._ready:
                self.busy, answer = False, json.loads(line)
                if "error" in answer:
                    raise ChildFailed("error", str(answer["error"]))
                return dict(answer["ok"])
            self._ready, self._deadline = True, time.monotonic() + self._seconds
        return None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send and wait.

        Raises:
            ChildFailed: as ``take``.
        """
        self.send(request, seconds)
        while True:
            answer = self.take()
            if answer is not None:
                return answer
            left = max(0.0, self._deadline - time.monotonic())
            select.select([self.fileno()], [], [], left + 0.01)

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # the whole group has ended
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        pass  # an unsent request of a child that is gone
            self._process, self._buffer = None, b""
            self._ready = self.busy = False

    def close(self) -> None:
        self.kill()
        self._errors.close()

    def _start(self) -> None:
        self.kill()
        self._errors.truncate(0)
        self._errors.seek(0)
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True, bufsize=0, env={**os.environ, "PYTHONPATH": _search_path()})
        self._buffer = b""

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f": {text[-TAIL:]}" if text else ""
