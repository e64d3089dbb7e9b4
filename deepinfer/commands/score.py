"""`deepinfer score`: the logits of every position of a token list, as a file."""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from deepinfer.commands.output import emit, emit_json, say
from deepinfer.commands.run import check_threads, open_llm
from deepinfer.commands.tokens import parse_tokens
from deepinfer.errors import RequestError


def run(args: argparse.Namespace) -> int:
    check_threads(args.threads)
    if args.chunk is not None and args.chunk < 1:
        raise RequestError(f"chunk is {args.chunk}, expected an int >= 1", where="--chunk",
                           next="correct it or leave it out")
    tokens = parse_tokens(args.tokens)
    out = Path(args.out)
    if not out.parent.is_dir():
        raise RequestError("its directory does not exist", where=f"--out {out}",
                           next="make it first")
    with open_llm(args, Path(args.model)) as llm:
        logits = llm.score(tokens, chunk=args.chunk)
    write_npz(out, logits)
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    shape = list(logits.shape)
    if args.json:
        emit_json({"path": str(out), "shape": shape, "dtype": str(logits.dtype), "sha256": digest})
    else:
        emit(str(out))
    say(f"logits: {logits.dtype}{shape}, sha256 of the values {digest}")
    return 0


def write_npz(out: Path, logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Write exactly the file ``out`` (numpy alone would append .npz), whole or not at all.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        handle, scratch = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, logits=logits)
            os.chmod(scratch, 0o644)
            os.replace(scratch, out)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise RequestError(f"it cannot be written: {error.strerror or error}",
                           where=f"--out {out}", next="give another path") from None
