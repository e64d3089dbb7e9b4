"""`deepinfer make-model`: a random checkpoint; also the one that `run` uses by default."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from deepinfer.commands.output import emit, say
from deepinfer.errors import CheckpointError
from deepinfer.settings import cache_dir


def run(args: argparse.Namespace) -> int:
    from deepinfer.graph.make_model import make_model

    say(f"writing a random {args.kind} model, seed {args.seed}")
    make_model(args.kind, Path(args.out), args.seed)
    emit(args.out)
    return 0


def default_model(seed: int = 0) -> Path:
    """The random tiny model of the cache, made on first use (and anew when its config changed)."""
    from deepinfer.graph.config import ModelConfig
    from deepinfer.graph.make_model import make_model, tiny_config

    path = cache_dir() / "models" / f"tiny-{seed}"
    say(f"no MODEL given: using a tiny model with random weights ({path}); "
        "expect random text")
    try:
        if ModelConfig.from_dir(path) == tiny_config():
            return path
    except CheckpointError:
        pass  # absent, or written by another version
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=".tiny-"))
    except OSError as error:
        raise CheckpointError(f"the cache cannot be written: {error.strerror or error}",
                              where=str(path.parent),
                              next="set DEEPINFER_CACHE_DIR to a directory you can write") from None
    try:
        make_model("tiny", scratch / "model", seed)
        if path.exists():
            os.rename(path, scratch / "old")
        os.rename(scratch / "model", path)  # whole or not at all, also when interrupted
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path
