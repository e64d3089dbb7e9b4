"""Data on stdout and progress on stderr: tables, JSON, bars."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any


def emit(text: str) -> None:
    """Write data: one text, ended by a newline."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def emit_json(value: Any) -> None:
    """Write data for machines: one JSON value on one line."""
    emit(json.dumps(value, ensure_ascii=False))


def say(text: str) -> None:
    """Write a line of progress."""
    with contextlib.suppress(OSError):  # a full or closed stderr must not end what it reports on
        print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[object]], *, indent: str = "") -> str:
    """Rows in aligned columns; the last column is not padded."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(r[:-1] for r in cells), strict=True)]
    return "\n".join(
        (indent + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]))
        .rstrip() for row in cells)


def size(nbytes: int) -> str:
    """A number of bytes with three digits or so and a decimal unit."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


class Progress:
    """Reports the stages of a compile: a rich bar on a terminal, plain lines elsewhere.

    Use it as a context manager; it is called as (what, done, total).
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._begun: dict[str, float] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        first = what not in self._begun
        begun = self._begun.setdefault(what, time.monotonic())
        if sys.stderr.isatty():
            self._show(what, done, total, first)
        elif first and done < total:
            say(f"{what}: {total}")
        elif done >= total:
            say(f"{what}: {done}/{total} in {time.monotonic() - begun:.1f} s")

    def _show(self, what: str, done: int, total: int, first: bool) -> None:
        if self._bar is None:
            import rich.progress
            from rich.console import Console

            self._bar = rich.progress.Progress(console=Console(stderr=True))
            self._bar.start()
        if first:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
