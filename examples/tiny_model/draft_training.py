"""Losses and calibration of the DSpark draft on a frozen target. Source: spec §5.2, §5.3, §5.5."""

from dataclasses import dataclass

import torch
from model import Model
from torch import Tensor, nn

ANCHORS = (12, 8)  # draft blocks per row: in the target's own text, and in the prompt before it
SETTLED = 0.01  # of ECE, that a temperature must gain over 1 to be worth it
DECAY = 0.7  # weight of draft position k is DECAY^k: a late draft only counts if the earlier hold


@dataclass
class Committed:
    """Texts, and what the target computes of them. While the draft trains none of it changes.

    Args:
        tokens: int64 [N, T + 1]. h: bf16 [N, T, d]. taps: bf16 [N, T, taps·d].
    """

    tokens: Tensor
    h: Tensor
    taps: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: Model, tokens: Tensor) -> "Committed":
        found = [model(rows[:, :-1])[:2] for rows in tokens.split(8)]
        h, taps = (torch.cat([x.bfloat16() for x in part]) for part in zip(*found, strict=True))
        return Committed(tokens, h, taps)

    def __getitem__(self, rows: Tensor) -> "Committed":
        return Committed(self.tokens[rows], self.h[rows], self.taps[rows])


def some_anchors(batch: int, first: int, end: int, count: int, generator: torch.Generator
                 ) -> Tensor:
    """Of the positions first .. end - 1 `count` random ones, or all: int64 [batch, A]."""
    return first + torch.stack([torch.randperm(end - first, generator=generator)[:count]
                                for _ in range(batch)])


def draft_blocks(model: Model, text: Committed, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Teacher-forced drafts. A block is a row of the draft's batch: it sees its own window of
    committed keys, and no other block.

    Args:
        anchor: int64 [B, A], positions of the tokens that begin a block; all before is committed.

    Returns: draft logits [B, A, block, V], the target's logits for the same tokens, and confidence
        logits [B, A, block].
    """
    cfg, draft, block = model.cfg, model.draft, model.cfg.dspark_block_size
    tokens, h, taps = text.tokens[:, :-1], text.h.float(), text.taps.float()
    first = torch.arange(len(tokens)).unsqueeze(-1) * tokens.shape[1]  # rows of flattened tokens
    begin = anchor.reshape(-1, 1)
    own = torch.arange(block).expand(len(begin), -1)
    at = (anchor + first).reshape(-1, 1) + own
    committed = begin + torch.arange(-cfg.sliding_window, 0)
    window = (first.expand_as(anchor).reshape(-1, 1) + committed.clamp_min(0)).flatten()
    context = [keys.flatten(0, 1)[window].view(len(begin), -1, keys.shape[-1])
               for keys in draft.context(taps)]
    seen = torch.cat((committed >= 0, own >= 0), -1).unsqueeze(1).expand(-1, block, -1)
    previous = tokens.flatten()[at]
    ids = previous.masked_fill(own > 0, cfg.dspark_noise_token_id)
    hidden = draft.hidden(*model.streams(ids), begin + own, context, seen)
    e = draft.markov(previous)
    logits = model.head(draft.norm(hidden)) + draft.markov_head(e)
    with torch.no_grad():  # row i of the target judges the token after it
        judged = model.logits(h.flatten(0, 1)[at])
    found = logits, judged, draft.confidences(hidden.detach(), e.detach())
    return tuple(x.unflatten(0, anchor.shape) for x in found)


def draft_loss(model: Model, text: Committed, seed: int, own: int
               ) -> tuple[Tensor, dict[str, float]]:
    """Distil the target's distributions at random anchors. From position `own` on the rows are the
    target's text.

    Confidence learns 1 - ½·|p_draft - p_target|₁ at temperature 0, where it is measured and
    calibrated: whether both pick the same token.
    """
    block, (batch, length) = model.cfg.dspark_block_size, text.h.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    spans = ((own, length - block + 1), (1, own))
    logits, judged, confidence = draft_blocks(model, text, torch.cat(
        [some_anchors(batch, *span, count, generator)
         for span, count in zip(spans, ANCHORS, strict=True)], 1))
    weight = DECAY ** torch.arange(block)
    weight = weight / weight.sum()
    p_target = judged.softmax(-1)
    log_draft = logits.log_softmax(-1)
    cross = -(p_target * log_draft).sum(-1).mean((0, 1))
    overlap = 1 - 0.5 * (log_draft.exp() - p_target).abs().sum(-1)
    agree = (logits.argmax(-1) == judged.argmax(-1)).float()
    sure = nn.functional.binary_cross_entropy_with_logits(
        confidence, agree, reduction="none").mean((0, 1))
    loss = (weight * (cross + 2 * (1 - overlap.mean((0, 1))) + sure)).sum()
    values = {"loss": float((weight * cross).sum().detach()),
              "confidence": float(sure.mean().detach()),
              "drafts": float(agree.cumprod(-1).sum(-1).mean())}
    return loss, values | {f"accept_{k + 1}": float(v)
                           for k, v in enumerate(agree.mean((0, 1)))}


def calibration_error(sure: Tensor, accepted: Tensor, bins: int = 15) -> float:
    """ECE: the mean gap between stated and observed acceptance over equal-width bins."""
    which = (sure * bins).long().clamp_max(bins - 1)
    total = 0.0
    for b in range(bins):
        inside = which == b
        if inside.any():
            total += float((sure[inside].mean() - accepted[inside].mean()).abs() * inside.sum())
    return total / len(sure)


def calibration_errors(sure: Tensor, accepted: Tensor) -> list[float]:
    """The ECE at each draft position. Both [N, block]: stated survival and what became of it."""
    return [calibration_error(sure[:, k], accepted[:, k]) for k in range(sure.shape[1])]


@dataclass
class Judged:
    """The rounds of greedy drafts in a text, and what became of them.

    Args:
        logit: of the confidences, before temperatures, [N, block].
        agreed: whether draft and target pick the same token, bool [N, block].
    """

    logit: Tensor
    agreed: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: Model, rows: Tensor, own: int) -> "Judged":
        """Of rows [N, T + 1] that the target itself wrote from position `own` on.

        A round begins behind the last token of the one before, so where drafts fail there are
        more of them than elsewhere.
        """
        parts = []
        anchors = torch.arange(own, rows.shape[1] - model.cfg.dspark_block_size)
        for tokens in rows.split(4):
            logits, judged, logit = draft_blocks(
                model, Committed.of(model, tokens), anchors.expand(len(tokens), -1))
            agreed = logits.argmax(-1) == judged.argmax(-1)
            visited = torch.zeros(agreed.shape[:2], dtype=torch.bool)
            for row, accepted in enumerate(agreed.long().cumprod(-1).sum(-1).tolist()):
                at = 0
                while at < len(accepted):
                    visited[row, at] = True
                    at += 1 + accepted[at]
            parts.append((logit[visited], agreed[visited]))
        return Judged(*map(torch.cat, zip(*parts, strict=True)))

    def accepted(self) -> Tensor:
        """Whether a draft and all before it are accepted, fp32 [N, block]."""
        return self.agreed.cumprod(-1).float()


def survival(logit: Tensor, temperatures: list[float] | None = None) -> Tensor:
    """The chance that a draft and all before it are accepted. logit [N, block]."""
    if temperatures is not None:
        logit = logit / torch.tensor(temperatures)
    return logit.sigmoid().cumprod(-1)


def fit_temperatures(judged: Judged) -> list[float]:
    """One temperature per draft position: least ECE of the product, left to right; 1 where no
    other is clearly better."""
    temperatures: list[float] = []
    logit, accepted = judged.logit, judged.accepted()
    before = torch.ones(len(logit))
    grid = torch.logspace(-0.7, 0.7, 61)
    for k in range(logit.shape[1]):
        errors = [calibration_error(before * (logit[:, k] / t).sigmoid(), accepted[:, k])
                  for t in (1.0, *grid)]
        least = min(range(len(errors)), key=errors.__getitem__)
        best = grid[least - 1] if errors[least] < errors[0] - SETTLED else 1.0
        temperatures.append(float(best))
        before = before * (logit[:, k] / best).sigmoid()
    return temperatures


def calibrate(model: Model, fit: Tensor, check: Tensor, own: int
              ) -> tuple[list[float], dict[str, float]]:
    """Temperatures of the confidences, fitted on one part of the held-out text.

    Args:
        fit, check: rows that the target wrote from position `own` on, behind held-out prompts.

    Returns: the temperatures, and on the other part: the ECE of each position before and after,
        and the drafts accepted in a row.
    """
    temperatures = fit_temperatures(Judged.of(model, fit, own))
    other = Judged.of(model, check, own)
    accepted = other.accepted()
    before = calibration_errors(survival(other.logit), accepted)
    after = calibration_errors(survival(other.logit, temperatures), accepted)
    return temperatures, {
        "ece_before": max(before), "ece_after": max(after),
        **{f"ece_before_{k + 1}": error for k, error in enumerate(before)},
        **{f"ece_after_{k + 1}": error for k, error in enumerate(after)},
        "drafts": float(accepted.sum(-1).mean())}
