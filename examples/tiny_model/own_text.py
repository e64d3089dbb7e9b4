"""Text that the target itself writes: the draft learns from it and is calibrated on it.

    python examples/tiny_model/own_text.py MODEL PROMPTS.npz OUT.npz --tokens 96

Decoding never shows the draft any other text. The compiled Program writes it, greedily.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from speculation import open_llm

from deepinfer import SamplingParams


def continuations(model: Path, prompts: dict[str, np.ndarray], tokens: int, threads: int
                  ) -> dict[str, np.ndarray]:
    """Rows [N, P + tokens] of each array of prompts [N, P]: they and what the model says next."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    found = {}
    with open_llm(model, threads, draft="off", max_num_seqs=64) as llm:
        for name, rows in prompts.items():
            outputs = llm.generate(rows.tolist(), params)
            found[name] = np.concatenate((rows, [o.token_ids for o in outputs]), 1)
            print(f"own text: {len(rows)} x {tokens} tokens", flush=True)
    return found


def write(model: Path, prompts: list[np.ndarray], tokens: int, out: Path) -> int:
    """The same in a process of its own, which no thread or setting of this one touches; `out`
    appears whole. Returns how many threads it took."""
    asked, part = out.with_suffix(".prompts.npz"), out.with_suffix(".part.npz")
    np.savez(asked, *prompts)
    threads = len(os.sched_getaffinity(0))
    subprocess.run([sys.executable, __file__, str(model), str(asked), str(part),
                    "--tokens", str(tokens), "--threads", str(threads)], check=True)
    part.replace(out)
    asked.unlink()
    return threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, help="int arrays [N, P], by name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with np.load(args.prompts) as prompts:
        found = continuations(args.model, dict(prompts), args.tokens, args.threads)
    np.savez(args.out, **found)


if __name__ == "__main__":
    main()
