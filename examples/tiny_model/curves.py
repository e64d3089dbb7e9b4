"""Draw a training run: losses, expert balance, acceptance of drafts, calibration.

    python examples/tiny_model/curves.py RUN        # writes curves.json and curves.png beside this
"""

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Series = dict[str, list[float]]


def read_log(file: Path) -> dict[str, Any]:
    """The curves of both stages, the last calibration, and what training took.

    Steps that ran twice, because a stop lost them, count once, as they ran last.
    """
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    found: dict[str, Any] = {}
    for stage in ("target", "draft"):
        of_stage = [e for e in entries if e["stage"] == stage]
        points = {e["step"]: e for e in of_stage if "loss" in e}
        ordered = [points[step] for step in sorted(points)]
        keys = [k for k in ordered[0] if k != "stage"] if ordered else []
        found[stage] = {k: [_short(e[k]) for e in ordered] for k in keys}
        last = max(of_stage, key=lambda e: e["step"])
        found[f"{stage}_steps"], found[f"{stage}_minutes"] = last["step"], _short(last["minutes"])
        found[f"{stage}_tokens"] = last["tokens"]
    written = {e["name"]: e["minutes"] for e in entries if e["stage"] == "own text"}
    found["own_text_minutes"] = _short(sum(written.values()))
    calibrations = [e for e in entries if e["stage"] == "calibration"]
    found["calibration"] = {k: _short(v) for k, v in calibrations[-1].items() if k != "stage"}
    return found


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def draw(found: dict[str, Any], file: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((loss, balance), (accept, ece)) = plt.subplots(2, 2, figsize=(9, 6.4))
    target, draft = found["target"], found["draft"]
    loss.plot(target["step"], target["loss"], label="target, next token", color="tab:blue")
    loss.plot(target["step"], target["index"], label="indexer, KL", color="tab:green")
    loss.plot([found["target_steps"] + s for s in draft["step"]], draft["loss"],
              label="draft, next tokens", color="tab:orange")
    loss.set(title="Training loss, nats per token", xlabel="step", ylim=(0, None))
    loss.legend(loc="upper center")
    balance.plot(target["step"], target["load"], color="tab:blue")
    balance.set(title="Largest expert's load / mean load", xlabel="step", ylim=(1, None))
    positions = [k for k in draft if k.startswith("accept_")]
    for k in positions:
        accept.plot(draft["step"], draft[k], label=f"draft {k.removeprefix('accept_')}")
    accept.set(title="Drafts that are the target's choice", xlabel="step of the draft",
               ylim=(0, 1))
    accept.legend(ncols=2)
    errors = found["calibration"]
    at = range(1, len(positions) + 1)
    for shift, name in ((-0.2, "before"), (0.2, "after")):
        ece.bar([x + shift for x in at], [errors[f"ece_{name}_{k}"] for k in at], 0.4,
                label=f"{name} calibration")
    ece.axhline(0.05, color="grey", linewidth=1, linestyle=":")
    ece.set(title="Calibration error of the confidences", xlabel="position of the draft")
    ece.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    found = read_log(args.run / "log.jsonl")
    (args.out / "curves.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    draw(found, args.out / "curves.png")


if __name__ == "__main__":
    main()
