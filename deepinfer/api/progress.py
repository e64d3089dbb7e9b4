"""Progress on stderr: a bar that shows what a long call is doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]
_SECONDS = 0.1  # between two updates: a step may take less than drawing takes


@contextmanager
def progress_bar(show: bool) -> Iterator[Report | None]:
    """A bar as a function of (what, done, total); None if it is not to be shown.

    It vanishes at the end, and needs a terminal: elsewhere rich draws nothing.
    """
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        shown = 0.0

        def report(what: str, done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= _SECONDS or done >= total:
                shown = now
                bar.update(task, description=what, completed=done, total=total)

        yield report
