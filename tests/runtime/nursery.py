"""Writers of a store in processes of their own, which tests kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Nursery:
    """A process that starts writers; see store_writer. Args: module: what runs there."""

    def __init__(self, module: str = "tests.runtime.store_writer") -> None:
        self._module = module

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen([sys.executable, "-m", self._module],
                                         cwd=ROOT, bufsize=0, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, *words: object) -> None:
        self._process.stdin.write(("|".join(map(str, words)) + "\n").encode())

    def read(self, kind: str) -> int:
        """The number in the next line of this kind."""
        while (line := self.line())[0] != kind:
            pass
        return line[1]

    def line(self) -> tuple[str, int]:
        """What kind of line comes next, and the number in it."""
        kind, number = self._process.stdout.readline().decode().split()
        return kind, int(number)

    def start(self, path: Path, first: int, count: int, *dies: object) -> int:
        """The pid of a writer of this many entries; ``dies``: at which call, and after how many."""
        self.ask("start", path, first, count, *dies)
        return self.read("pid")

    def let_write(self, entries: int) -> None:
        """Returns when the only writer is about to begin its entry of this number."""
        for _ in range(entries):
            self.read("entry")

    def wait(self, pid: int) -> int:
        """The status of a writer, after its end."""
        self.ask("wait", pid)
        return self.read("ended")
