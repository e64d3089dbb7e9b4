"""Losses and calibration of the DSpark draft on a frozen target. Source: spec §5.2, §5.3, §5.5."""

import torch
from model import Model
from torch import Tensor, nn

ANCHORS = 96  # draft blocks per text: they cost little beside the target's pass
DECAY = 0.8  # weight of draft position k is DECAY^k: a late draft only counts if the earlier hold


def draft_blocks(model: Model, tokens: Tensor, generator: torch.Generator
                 ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Teacher-forced drafts at random anchors of each text.

    Args:
        tokens: int64 [B, T + 1].

    Returns: draft logits [B, A, block, V], the target's logits for the same tokens, confidence
        logits [B, A, block], and the true tokens [B, A, block].
    """
    cfg, draft, block = model.cfg, model.draft, model.cfg.dspark_block_size
    with torch.no_grad():
        h, taps, _ = model(tokens[:, :-1])
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    count = min(ANCHORS, length - block)
    # The anchor is the token at `anchor`; everything before it is committed.
    anchor = torch.stack([torch.randperm(length - block, generator=generator)[:count] + 1
                          for _ in range(batch)])
    offsets = torch.arange(block)
    positions = (anchor.unsqueeze(-1) + offsets).flatten(1)
    rows = torch.arange(batch).unsqueeze(-1)
    ids = torch.full((batch, count, block), cfg.dspark_noise_token_id)
    ids[..., 0] = tokens[rows, anchor]
    block_of = torch.arange(count).repeat_interleave(block)
    context = torch.arange(length)
    last = (anchor - 1).repeat_interleave(block, 1).unsqueeze(-1)
    seen = (context <= last) & (context > last - cfg.sliding_window)
    own = (block_of.unsqueeze(-1) == block_of).expand(batch, -1, -1)
    streams, pre = model.streams(ids.flatten(1))
    hidden = draft.hidden(streams, pre, positions, draft.context(taps), torch.cat((seen, own), -1))
    previous = tokens[rows, positions].view(batch, count, block)
    truth = tokens[rows, positions + 1].view(batch, count, block)
    e = draft.markov(previous)
    hidden = hidden.view(batch, count, block, -1)
    logits = model.head(draft.norm(hidden)) + draft.markov_head(e)
    with torch.no_grad():  # row i of the target judges the token after it
        judged = model.logits(h[rows, positions]).view(batch, count, block, -1)
    return logits, judged, draft.confidences(hidden.detach(), e.detach()), truth


def draft_loss(model: Model, tokens: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
    """Distil the target's distributions.

    Confidence learns 1 - ½·|p_draft - p_target|₁ at temperature 0, where it is measured and
    calibrated: whether both pick the same token.
    """
    logits, judged, confidence, _ = draft_blocks(model, tokens,
                                                 torch.Generator().manual_seed(step))
    block = logits.shape[-2]
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


@torch.no_grad()
def judge_drafts(model: Model, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Confidence logits of greedy drafts, and whether each and all before it are accepted."""
    sure, agreed = [], []
    for number, tokens in enumerate(batches):
        logits, judged, confidence, _ = draft_blocks(model, tokens,
                                                     torch.Generator().manual_seed(number))
        agreed.append((logits.argmax(-1) == judged.argmax(-1)).float().flatten(0, 1))
        sure.append(confidence.flatten(0, 1))
    return torch.cat(sure), torch.cat(agreed).cumprod(-1)


def survival(logit: Tensor, temperatures: list[float] | None = None) -> Tensor:
    """The chance that a draft and all before it are accepted. logit [N, block]."""
    if temperatures is not None:
        logit = logit / torch.tensor(temperatures)
    return logit.sigmoid().cumprod(-1)


def fit_temperatures(logit: Tensor, accepted: Tensor) -> list[float]:
    """One temperature per draft position: least ECE of the product, left to right."""
    temperatures: list[float] = []
    before = torch.ones(len(logit))
    grid = torch.logspace(-0.7, 0.7, 61)
    for k in range(logit.shape[1]):
        errors = [calibration_error(before * (logit[:, k] / t).sigmoid(), accepted[:, k])
                  for t in grid]
        best = grid[min(range(len(grid)), key=errors.__getitem__)]
        temperatures.append(float(best))
        before = before * (logit[:, k] / best).sigmoid()
    return temperatures


def calibrate(model: Model, fit: list[Tensor], check: list[Tensor]
              ) -> tuple[list[float], dict[str, float]]:
    """Temperatures for the confidences, fitted on one part of the held-out text.

    Returns: the temperatures, and on the other part: the ECE of each position before and after,
        and the drafts accepted in a row.
    """
    temperatures = fit_temperatures(*judge_drafts(model, fit))
    logit, accepted = judge_drafts(model, check)
    before = calibration_errors(survival(logit), accepted)
    after = calibration_errors(survival(logit, temperatures), accepted)
    return temperatures, {
        "ece_before": max(before), "ece_after": max(after),
        **{f"ece_before_{k + 1}": error for k, error in enumerate(before)},
        **{f"ece_after_{k + 1}": error for k, error in enumerate(after)},
        "drafts": float(accepted.sum(-1).mean())}
