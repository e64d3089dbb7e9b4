"""`deepinfer make-model`: a random checkpoint. Also: the trained one that is the default."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.commands.output import emit, say


def run(args: argparse.Namespace) -> int:
    from deepinfer.graph.make_model import make_model

    say(f"writing a random {args.kind} model, seed {args.seed}")
    make_model(args.kind, Path(args.out), args.seed)
    emit(args.out)
    return 0


def default_model() -> Path:
    """The trained model that comes with the package."""
    say("no MODEL given: using v41-tiny, a small model for testing engines")
    return Path(__file__).parents[1] / "models" / "v41_tiny"
