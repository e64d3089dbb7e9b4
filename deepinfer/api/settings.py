"""What a caller may set about an engine, checked before anything is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from deepinfer.errors import RequestError
from deepinfer.runtime.draft import check_width
from deepinfer.runtime.replay import kept_tokens
from deepinfer.runtime.values import is_int

PrefixCacheMode = Literal["exact", "replay", "off"]
ReplayMode = Literal["off", "mask", "compact"]
DraftMode = Literal["fixed", "adaptive", "off"]
Verification = Literal["exact", "rejection", "block"]
_CHOICES = {"prefix_cache": PrefixCacheMode, "replay": ReplayMode, "draft": DraftMode,
            "verification": Verification}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that do not shape the Program.

    Args:
        prefill_chunk: rows of a prefill chunk; None: the largest that fits beside decode rows.
        prefix_cache: "exact" takes equal prefixes from the cache with the bits of a cold run;
            "replay" keeps less and recomputes the last 128 tokens, an approximation; "off".
        cache_dir: directory in which prefixes outlive the process; None: nowhere.
        cache_dir_bytes: of all its entries at most; None: only their age bounds them.
        snapshot_interval: pages between two snapshots of the window state of a prefix.
        replay: "off" runs all layers over the whole prompt; "mask" and "compact" run the decoder's
            over its last keep_tokens, an approximation; "compact" skips the work for real.
        keep_tokens: see replay; at least the window, the drafts and one more; None: as the model
            says, 140 in the release.
        draft: "fixed" verifies draft_width drafts a step, "adaptive" as many as pay off, "off"
            none; a model without draft stages always runs as "off". No output depends on it.
        draft_width: drafts to verify at most; None: all that the model makes.
        verification: "exact" gives what the model alone would have given; "rejection" and "block"
            keep its distribution only.
        overlap: schedule a step while the one before it runs. No output depends on it.

    Raises:
        RequestError: names the setting, the value and what was expected.
    """

    prefill_chunk: int | None = None
    prefix_cache: PrefixCacheMode = "exact"
    cache_dir: str | Path | None = None
    cache_dir_bytes: int | None = None
    snapshot_interval: int = 8
    replay: ReplayMode = "off"
    keep_tokens: int | None = None
    draft: DraftMode = "fixed"
    draft_width: int | None = None
    verification: Verification = "exact"
    overlap: bool = True

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise _wrong(name, getattr(self, name),
                             "one of " + ", ".join(map(repr, get_args(kind))))
        check_count("snapshot_interval", self.snapshot_interval)
        for name in ("prefill_chunk", "keep_tokens", "cache_dir_bytes"):
            check_count(name, getattr(self, name), optional=True)
        check_count("draft_width", self.draft_width, optional=True, low=0)
        if not isinstance(self.overlap, bool):
            raise _wrong("overlap", self.overlap, "True or False")
        if self.cache_dir is None:
            return
        if not isinstance(self.cache_dir, str | os.PathLike) or not os.fspath(self.cache_dir):
            raise _wrong("cache_dir", self.cache_dir, "a directory")
        if self.prefix_cache == "off":
            raise RequestError(f"cache_dir is '{self.cache_dir}' and prefix_cache is 'off', "
                               "expected a prefix cache to store", where="LLM",
                               next="leave out one of the two")

    def width(self, drafts: int) -> int:
        """Drafts verified per step at most, of a model that makes ``drafts`` of them."""
        if self.draft == "off" or not drafts:
            return 0
        return drafts if self.draft_width is None else self.draft_width

    def snapshot_parts(self, drafts: int) -> tuple[str, ...]:
        """Parts of the model whose window state a snapshot holds: what is replayed, and a draft
        that is off, need none."""
        if self.replay != "off":
            return ("encoder",)
        return ("encoder", "decoder", *(("draft",) if self.width(drafts) else ()))

    def check_model(self, *, window: int, drafts: int, can_replay: bool = True) -> None:
        """What depends on the model.

        Args:
            window: positions a window layer sees. drafts: a step's at most, 0 without a draft.
            can_replay: nothing of it reads across the cut.

        Raises:
            RequestError: draft_width, replay or keep_tokens does not fit it.
        """
        check_width(self.draft_width, drafts)
        width = self.width(drafts)
        kept_tokens(self.replay, self.keep_tokens, window=window, drafts=width,
                    default=window + width + 1, can_replay=can_replay, where="LLM")

    def for_engine(self, drafts: int) -> dict[str, Any]:
        """The keyword arguments of Engine."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given["cache_dir"] = None if self.cache_dir is None else Path(self.cache_dir)
        return given | ({} if drafts else {"draft": "off"})


def check_count(name: str, value: Any, *, optional: bool = False, low: int = 1) -> None:
    """Raises RequestError for what is not an int >= ``low``, nor None if that is allowed."""
    if value is None and optional:
        return
    if not is_int(value) or value < low:
        raise _wrong(name, value, f"an int >= {low}")


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} is {value!r}, expected {expected}", where="LLM",
                        next=f"correct {name} or leave it out")
