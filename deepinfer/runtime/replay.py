"""Bounded replay: how much of a prompt the layers after the cut compute (spec §4.1)."""

from __future__ import annotations

from typing import Any

from deepinfer.errors import RequestError
from deepinfer.runtime.values import is_int

REPLAYS = ("off", "mask", "compact")


def kept_tokens(replay: str, keep: Any, *, window: int, drafts: int, default: int,
                can_replay: bool, where: str) -> int:
    """Positions at a prompt's end that the layers after the cut compute; 0: all of it.

    Args:
        replay: "off", "mask" or "compact". keep: as asked for; None: ``default``.
        window: positions a window layer sees. drafts: a step's at most.
        can_replay: nothing of the model reads across the cut.
        where: whose setting it is, for the error.

    Raises:
        RequestError: an unknown mode, a model that cannot, or fewer than window + drafts + 1.
    """
    if replay not in REPLAYS:
        raise RequestError(f"replay is {replay!r}, expected one of {', '.join(REPLAYS)}",
                           where=where, next="choose one of them")
    if replay == "off":
        return 0
    if not can_replay:
        raise RequestError(f"replay is '{replay}', expected 'off': this model reads n-grams or "
                           "taps on both sides of its cut", where=where, next="leave replay out")
    least = window + drafts + 1
    keep = default if keep is None else keep
    if not is_int(keep) or keep < least:
        raise RequestError(f"keep_tokens is {keep!r}, expected at least {least} (the window of "
                           f"{window}, {drafts} drafts and 1) with replay='{replay}'", where=where,
                           next="raise keep_tokens or set replay='off'")
    return int(keep)
