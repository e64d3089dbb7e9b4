"""The largest sizes a Program is built for. They size buffers; they never change a bit."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.graph.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes fixed when a Program is compiled.

    Args:
        max_num_batched_tokens: rows of one prefill step.
        max_num_seqs: requests that hold state at once.
        max_model_len: positions a request can reach; the table of rotations has this many rows.
        page_size: tokens per page of the compressed caches; even.
        draft_width: drafts verified per step; rings hold window + 1 + draft_width slots.
        top_logprobs: alternatives whose logprobs are reported.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 4096
    page_size: int = 128
    draft_width: int = 5
    top_logprobs: int = 20

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise RequestError(f"{name} is {value!r}, expected an int >= 1 and below 2^31",
                                   where="Limits", next=f"correct {name}")
        if self.page_size % 2:
            raise RequestError(f"page_size is {self.page_size}, expected an even number",
                               where="Limits", next="pages hold whole ratio-2 groups")

    @staticmethod
    def for_model(cfg: ModelConfig, **given: int | None) -> Limits:
        """Limits with the model's own context length and draft width as defaults."""
        known = {k: v for k, v in given.items() if v is not None}
        known.setdefault("max_model_len", cfg.max_position_embeddings)
        known["draft_width"] = cfg.dspark_block_size if cfg.n_stages else 0
        known["top_logprobs"] = min(20, cfg.vocab_size)
        limits = Limits(**known)
        if limits.max_model_len > cfg.max_position_embeddings:
            raise RequestError(
                f"max_model_len is {limits.max_model_len}, the model has "
                f"{cfg.max_position_embeddings} positions", where="Limits",
                next="lower max_model_len")
        return limits

    def ring(self, cfg: ModelConfig) -> int:
        """Slots of a window ring: no slot a verify step may still need is overwritten."""
        return cfg.sliding_window + 1 + self.draft_width

    @property
    def pending(self) -> int:
        """Even positions whose ratio-2 projections are kept: all of a verify step's."""
        return self.draft_width // 2 + 1

    @property
    def max_num_masks(self) -> int:
        """Token masks of one step: a row each at most, sampled in prefill or drafts and their
        anchor."""
        return self.max_num_batched_tokens + self.max_num_seqs * (1 + self.draft_width)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def table_rows(self) -> int:
        """Rows of the rotation tables: drafts may look past the last position."""
        return self.max_model_len + self.draft_width + 1
