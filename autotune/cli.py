"""The `deepinfer-tune` command: parse the arguments, call one handler, turn errors into exit codes.

Exit codes: 0 ok; 1 a checked property is false; 2 usage; 3 environment; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer import errors
from deepinfer.settings import ISA_LEVELS, warn_unknown
from deepinfer.targets.base import TARGETS

USAGE = (errors.CheckpointError, errors.RequestError, errors.ProgramError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: of the process); returns the exit code."""
    args = parser().parse_args(argv)
    warn_unknown()
    try:
        from autotune import commands  # numpy and the graphs: only when there is something to do

        code = int(getattr(commands, args.handler)(args))
        sys.stdout.flush()
        return code
    except errors.DeepInferError as error:
        print(f"deepinfer-tune: {error}", file=sys.stderr)
        return 2 if isinstance(error, USAGE) else 3
    except BrokenPipeError:
        return 0  # the reader has seen enough
    except OSError as error:
        print(f"deepinfer-tune: the system refused: {error.strerror or error}\n"
              f"  where: {error.filename or 'standard output'}\n"
              "  next:  check the path, its permissions, and the free space", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("deepinfer-tune: interrupted; nothing measured is lost\n"
              "  next:  deepinfer-tune resume", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="deepinfer-tune", description="Choose kernel schedules for this machine. A schedule "
        "changes speed only, never a bit of a result.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        made.set_defaults(handler=name)
        made.add_argument("--db", type=Path, metavar="FILE",
                          help="the tuning database (tuning.sqlite3 in the cache directory)")
        return made

    tune = command("tune", "search the schedules of a model's kernels")
    tune.add_argument("model", nargs="?", default="mini", metavar="tiny|mini|MODEL|v4.1-flash",
                      help="whose kernels (%(default)s)")
    tune.add_argument("--target", choices=TARGETS, default="cpu")
    tune.add_argument("--op", nargs="+", action="extend", default=[], metavar="NAME", dest="ops",
                      help="only kernels of these ops")
    tune.add_argument("--rows", type=_rows, metavar="1,16,256", help="row counts to tune at")
    tune.add_argument("--mode", choices=("halving", "exhaustive"), default="halving",
                      help="halving visits the default, what ships or won before, and the quarter "
                      "that a static model ranks best; exhaustive visits all (%(default)s)")
    tune.add_argument("--budget", type=length_of_time, metavar="TIME",
                      help="stop after 90, 90s, 5m, 2h")
    tune.add_argument("--isa", choices=ISA_LEVELS, help="level of target cpu (highest of here)")
    tune.add_argument("--threads", type=int, metavar="N", help="of the kernels (all cores)")
    tune.add_argument("--fresh", action="store_true", help="measure what the database has, too")
    tune.add_argument("--dry-run", action="store_true", help="say what would be tuned")
    _running(tune)

    resume = command("resume", "go on with a run that was interrupted or ran out of time")
    resume.add_argument("run", nargs="?", metavar="RUN", help="(the latest that is not done)")
    resume.add_argument("--budget", type=length_of_time, metavar="TIME",
                        help="stop after this long")
    _running(resume)

    status = command("status", "runs, machines, and what is quarantined")
    status.add_argument("--json", action="store_true", help="one JSON object")

    report = command("report", "results as a table and a self-contained HTML page")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    report.add_argument("--machine", metavar="ID", help="whose results, or the start of its id")

    apply = command("apply", "write the winners into a target's schedules.json")
    apply.add_argument("--machine", metavar="ID", help="whose winners, or the start of its id")
    apply.add_argument("--target", choices=TARGETS, default="cpu")
    apply.add_argument("--out", type=Path, metavar="FILE", help="write another file")
    apply.add_argument("--dry-run", action="store_true", help="only show the difference")
    apply.add_argument("--undo", action="store_true", help="put back what stood there before")

    verify = command("verify", "gate and time the shipped schedules on this machine")
    verify.add_argument("models", nargs="*", default=["tiny", "mini"], metavar="MODEL",
                        help="whose kernels to look for in the file (tiny mini)")
    verify.add_argument("--file", type=Path, metavar="FILE", help="another schedules file")
    verify.add_argument("--isa", choices=ISA_LEVELS, help="(highest of here)")
    verify.add_argument("--threads", type=int, metavar="N", help="(all cores)")
    _running(verify)

    export = command("export", "write the database as lines of JSON")
    export.add_argument("--out", type=Path, metavar="FILE", help="(standard output)")
    merge = command("merge", "add the rows of exports or databases from other machines")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    gc = command("gc", "remove outdated measurements and unused libraries")
    gc.add_argument("--days", type=float, default=30.0, metavar="N", help="(%(default)s)")
    gc.add_argument("--failures", action="store_true", help="lift quarantine: try those again")
    gc.add_argument("--dry-run", action="store_true", help="only count")
    return top


def _running(command: argparse.ArgumentParser) -> None:
    command.add_argument("--jobs", type=int, metavar="N", help="builds at once (all cores)")
    command.add_argument("--lock-timeout", type=length_of_time, default=600.0, metavar="TIME",
                         help="wait so long for another tuner (10m)")
    command.add_argument("--build-timeout", type=length_of_time, default=180.0, metavar="TIME",
                         help="of one build (3m)")
    command.add_argument("--time-timeout", type=length_of_time, default=60.0, metavar="TIME",
                         help="of one visit (1m)")
    command.add_argument("--repeats", type=int, default=24, metavar="N",
                         help="timed runs of a visit (%(default)s)")
    command.add_argument("--visits", type=int, default=5, metavar="N",
                         help="visits to each finalist (%(default)s)")
    command.add_argument("--json", action="store_true", help="events as lines of JSON on stdout")


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(r) for r in text.split(","))
    except ValueError:
        rows = ()
    if not rows or min(rows) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of row counts, as 1,16,256")
    return rows


def length_of_time(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        value = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        value = -1.0
    if value < 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no length of time, as 90, 90s, 5m or 2h")
    return value
