"""Train `v41-tiny`: the target with quantisation-aware forward, then the draft, then export.

    python examples/tiny_model/train.py --out RUN          # 75 minutes on 2 cores
    python examples/tiny_model/train.py --out RUN          # the same command resumes; after the
                                                           # end it calibrates and exports again
    python examples/tiny_model/train.py --out RUN --smoke  # every stage in under 2 minutes
"""

import argparse
import json
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import own_text
import torch
from bigrams import set_bigrams
from chats import KINDS, chat
from circuits import set_circuits
from config import SMOKE, TRAINED, make_config
from data import Batches, encode_files, held_out, is_held_out, read_corpus
from draft_training import Committed, calibrate, draft_loss
from export import export
from model import Model
from optim import Optimizer, balance, initialise
from quant import Precision
from team import Team
from tokenizer import token_classes, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

INDEX_LOSS = 0.1  # the indexer's parameters get gradients from nothing else
QUANTISE = 0.4  # progress from which the forward pass is quantised; before, it is faster


@dataclass
class Plan:
    """Lengths of the stages. Progress is the larger share of steps or of minutes used, so a slow
    machine trains less but ends in time. A minute is one of processor time of the first process:
    on an idle machine the same as a minute of the clock."""

    target_steps: int = 6000
    target_minutes: float = 54
    draft_steps: int = 6000
    draft_minutes: float = 15.4
    draft_rows: int = 4  # per process and step
    own_rows: int = 2400  # that the target writes, to train the draft
    own_tokens: int = 96
    own_held_out: tuple[int, int] = (256, 256)  # such rows to calibrate it, and to check that
    own_held_out_tokens: int = 48
    prompt: int = 160  # tokens before each of them
    tokens: int = 1024  # per step; one row per process if a row is longer
    lengths: tuple[tuple[float, int], ...] = ((0.0, 512), (0.7, 1024))
    files: int | None = None  # of the corpus; None: all
    save_seconds: float = 300


SMOKE_PLAN = Plan(target_steps=24, target_minutes=0.6, draft_steps=12, draft_minutes=0.3,
                  tokens=256, lengths=((0.0, 64), (0.7, 128)), own_rows=32, own_tokens=32,
                  own_held_out=(8, 8), own_held_out_tokens=16, prompt=64, files=12, save_seconds=2)


class Run:
    """A training run's directory: resumable state, tokenizer, log."""

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out, self.plan = out, plan
        out.mkdir(parents=True, exist_ok=True)
        self.log_file, self.state_file = out / "log.jsonl", out / "state.pt"
        self.state = torch.load(self.state_file) if self.state_file.exists() else {}
        self.saved = time.monotonic()

    def log(self, **values: float | str) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps(values) + "\n")
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                        for k, v in values.items()), flush=True)

    def save(self, **values: object) -> None:
        """Replace the state at once: a stop while writing leaves the one before."""
        self.state |= values
        part = self.state_file.with_suffix(".part")
        torch.save(self.state, part)
        part.replace(self.state_file)
        self.saved = time.monotonic()


def prepare(run: Run, sizes: dict, seed: int) -> tuple[Model, Tokenizer, dict[str, str]]:
    texts = read_corpus()
    if run.plan.files is not None:
        texts = dict(sorted(texts.items(), key=lambda t: len(t[1]))[-8 * run.plan.files::8])
    file = run.out / "tokenizer.json"
    if not file.exists():
        rng = random.Random(seed)
        chats = [chat(rng.choice(KINDS), rng) for _ in range(2000 if not run.plan.files else 100)]
        train_tokenizer([t for n, t in texts.items() if not is_held_out(n)] + chats,
                        sizes["vocab_size"]).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    classes = token_classes(tokenizer, sizes["vocab_size"], 2)
    cfg = make_config(sizes, int(classes.max()) + 1)
    model = Model(cfg, classes, Precision(bf16=False, tiled=False))
    initialise(model, seed)
    set_circuits(model)
    return model, tokenizer, texts


def target_loss(model: Model, tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Next-token loss, and the KL of the indexer's scores to the attention on the entries."""
    h, _, aux = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(model.logits(h).flatten(0, 1), tokens[:, 1:].flatten())
    index = torch.zeros(())
    for scores, attention in aux.values():
        mass = attention.sum(-1, keepdim=True)
        goal = attention / mass.clamp_min(1e-9)
        chosen = attention > 0
        log_q = scores.masked_fill(~chosen, -1e9).log_softmax(-1)
        kl = (goal * (goal.clamp_min(1e-9).log() - log_q)).masked_fill(~chosen, 0).sum(-1)
        index = index + (kl * (mass.squeeze(-1) > 1e-6)).mean()
    return loss + INDEX_LOSS * index, {"loss": float(loss.detach()), "index": float(index.detach())}


def learning_rate(progress: float) -> float:
    """Warm up over 2 %, hold, then decay linearly to zero over the last 60 %."""
    return min(1.0, progress / 0.02 + 0.02) * min(1.0, (1 - progress) / 0.6)


def train_stage(run: Run, name: str, model: Model, team: Team, parameters: list, steps: int,
                minutes: float, batch: Callable[[int, float], Tensor],
                loss_of: Callable[[Tensor, int], tuple[Tensor, dict[str, float]]],
                quantise: float = 0) -> None:
    """One stage, from where its saved state stands. Logs every 20 steps, saves every 5 minutes."""
    optimizer = Optimizer(parameters, team)
    team.join(team.rank)  # which parameters have gradients differs between the stages
    team.zero()
    state = run.state.get(name, {"step": 0, "seconds": 0.0, "tokens": 0})
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    if state.get("done"):
        return
    step, seconds, seen, sums, count = state["step"], state["seconds"], state["tokens"], {}, 0
    while True:
        begin = time.process_time()
        team.told[team.rank, 0] = seconds
        team.wait()
        progress = max(step / steps, float(team.told[0, 0]) / 60 / minutes)
        if progress >= 1:
            break
        model.precision.quantize = progress >= quantise
        tokens = batch(step * team.size + team.rank, progress)
        loss, values = loss_of(tokens, step)
        if not math.isfinite(float(loss.detach())):
            raise FloatingPointError(f"stage {name}, step {step}: the loss is {float(loss)}")
        loss.backward()
        optimizer.step(learning_rate(progress))
        values["load"] = balance(model, team, 3e-3 * (1 - progress))
        step, count, seen = step + 1, count + 1, seen + tokens[:, 1:].numel() * team.size
        for key, value in values.items():
            sums[key] = sums.get(key, 0.0) + value
        seconds += time.process_time() - begin
        if team.rank:  # the first process logs and saves
            continue
        if count == 20:
            run.log(stage=name, step=step, minutes=seconds / 60, tokens=seen,
                    length=tokens.shape[1] - 1, rate=learning_rate(progress),
                    **{k: v / count for k, v in sums.items()})
            sums, count = {}, 0
        if time.monotonic() - run.saved > run.plan.save_seconds:
            run.save(model=model.state_dict(), **{name: {
                "step": step, "seconds": seconds, "tokens": seen,
                "optimizer": optimizer.state_dict()}})
    if team.rank:
        return
    run.log(stage=name, step=step, minutes=seconds / 60, tokens=seen, done="yes")
    run.save(model=model.state_dict(), **{name: {"step": step, "seconds": seconds, "done": True}})


def stages(run: Run, plan: Plan, model: Model, tokenizer: Tokenizer, texts: dict[str, str],
           team: Team, rank: int, seed: int) -> None:
    """Both training stages, in one process of the team."""
    team.rank = rank
    documents = encode_files(tokenizer, [t for n, t in texts.items() if not is_held_out(n)])
    batches = Batches(documents, tokenizer, seed)
    per_process = plan.tokens // team.size

    def batch(step: int, progress: float) -> Tensor:
        length = [n for start, n in plan.lengths if progress >= start][-1]
        rows = max(1, per_process // length)
        copies = 0.15 if progress < 0.5 else 0.05
        return torch.from_numpy(batches(step, rows, length, copies)).long()

    try:
        model.train()
        of_target = [(n, p) for n, p in model.named_parameters() if not n.startswith("draft.")]
        train_stage(run, "target", model, team, of_target, plan.target_steps, plan.target_minutes,
                    batch, lambda tokens, step: target_loss(model, tokens), quantise=QUANTISE)
        for _, p in of_target:
            p.requires_grad_(False)
        model.eval()  # the target is frozen and no longer balanced
        if rank == 0:
            if "draft" not in run.state:
                set_bigrams(model.draft, documents)
            own_text_of_training(run, model, tokenizer, batches)
        team.wait()  # from here on the file is there
        own = own_text_of_training(run, model, tokenizer, batches)[rank::team.size]
        text = None if "done" in run.state.get("draft", {}) else committed(run, model, own, rank)

        def turn(step: int) -> Tensor:
            return torch.arange(step * plan.draft_rows, (step + 1) * plan.draft_rows) % len(own)

        model.draft.train()
        of_draft = [(n, p) for n, p in model.named_parameters() if n.startswith("draft.")]
        train_stage(run, "draft", model, team, of_draft, plan.draft_steps, plan.draft_minutes,
                    lambda step, _: own[turn(step // team.size)],
                    lambda _, step: draft_loss(model, text[turn(step)],
                                               step * team.size + rank, plan.prompt),
                    quantise=QUANTISE)
        model.eval()
    except BaseException:
        team.abort()
        raise


def committed(run: Run, model: Model, own: Tensor, rank: int) -> Committed:
    """What the frozen target, quantised, computes of this process's rows: once for all steps."""
    begin, model.precision.quantize = time.process_time(), True
    text = Committed.of(model, own)
    if rank == 0:
        run.log(stage="own text", name="read", tokens=own[:, 1:].numel(),
                minutes=(time.process_time() - begin) / 60)
    return text


def own_rows(run: Run, model: Model, tokenizer: Tokenizer, name: str, prompts: list[np.ndarray],
             tokens: int) -> list[Tensor]:
    """What the target writes behind each array of prompts; written once a run."""
    file = run.out / f"{name}.npz"
    if not file.exists():
        target, before = run.out / "target", resource.getrusage(resource.RUSAGE_CHILDREN)
        export(model, tokenizer, target, [1.0] * model.cfg.dspark_block_size)
        threads = own_text.write(target, prompts, tokens, file)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        run.log(stage="own text", name=name, tokens=sum(map(len, prompts)) * tokens,
                minutes=(after.ru_utime - before.ru_utime) / 60 / threads)
    with np.load(file) as found:
        return [torch.from_numpy(found[key]).long() for key in found]


def own_text_of_training(run: Run, model: Model, tokenizer: Tokenizer, batches: Batches) -> Tensor:
    plan = run.plan
    return own_rows(run, model, tokenizer, "own_text",
                    [batches(2 * 10**6, plan.own_rows, plan.prompt - 1)], plan.own_tokens)[0]


def own_text_held_out(run: Run, model: Model, tokenizer: Tokenizer, texts: dict[str, str],
                      seed: int) -> list[Tensor]:
    """Behind prompts of both halves of the held-out files, with chats among them."""
    plan, prompts = run.plan, []
    for half, count in enumerate(plan.own_held_out):
        chosen = held_out(texts, half) or list(texts.values())[:1]
        batches = Batches(encode_files(tokenizer, chosen), tokenizer, seed + 1)
        prompts.append(batches(half, count, plan.prompt - 1))
    return own_rows(run, model, tokenizer, "own_text_held_out", prompts, plan.own_held_out_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--minutes", type=float, help="of both training stages; default 69.4")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan, sizes = (SMOKE_PLAN, SMOKE) if args.smoke else (Plan(), TRAINED)
    if args.minutes is not None:
        share = args.minutes / (plan.target_minutes + plan.draft_minutes)
        plan = replace(plan, target_minutes=plan.target_minutes * share,
                       draft_minutes=plan.draft_minutes * share)
    run = Run(args.out, plan)
    model, tokenizer, texts = prepare(run, sizes, args.seed)
    if "model" in run.state:
        model.load_state_dict(run.state["model"])
    team = Team(model, args.workers)
    others = team.start(lambda rank: stages(run, plan, model, tokenizer, texts, team, rank,
                                            args.seed))
    stages(run, plan, model, tokenizer, texts, team, 0, args.seed)
    for process in others:
        process.join()
    model.precision.bf16 = True  # as it will run, but for the tiles, which only take time here
    torch.set_num_threads(args.workers)
    temperatures, report = calibrate(
        model, *own_text_held_out(run, model, tokenizer, texts, args.seed), own=plan.prompt)
    run.log(stage="calibration", **report)
    size = export(model, tokenizer, args.out / "v41-tiny", temperatures)
    run.log(stage="export", bytes=size)


if __name__ == "__main__":
    main()
