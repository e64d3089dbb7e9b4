"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows in aligned columns; the last column is not padded."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                     for row in cells)
