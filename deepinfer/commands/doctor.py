"""`deepinfer doctor`: what this machine has, and what follows from it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from deepinfer.commands.output import emit, emit_json, table
from deepinfer.commands.probes import Finding, findings


def run(args: argparse.Namespace) -> int:
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
