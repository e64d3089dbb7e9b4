"""`deepinfer doctor`: what this machine has, and what follows from it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from deepinfer.commands.output import emit, emit_json, table
from deepinfer.commands.probes import Finding, findings
from deepinfer.errors import RequestError


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        from deepinfer.commands import capacity  # not needed to find out what is missing

        return capacity.run(args)
    if args.cache_bytes is not None:
        raise RequestError("--cache-bytes was given without --model, expected both",
                           where="doctor", next="add --model MODEL")
    found = findings()
    if args.json:
        emit_json([asdict(f) for f in found])
    else:
        for group in dict.fromkeys(f.group for f in found):
            emit(group)
            rows = [(_mark(f), f.name, f.detail, f.follows) for f in found if f.group == group]
            emit(table(rows, indent="  "))
    return 3 if any(f.required and not f.found for f in found) else 0


def _mark(finding: Finding) -> str:
    return "yes" if finding.found else "NO" if finding.required else "no"
