"""The `deepinfer` command: parse the arguments, call one handler, turn errors into exit codes.

Exit codes: 0 ok; 1 a checked property is false; 2 usage, an argument that cannot be used included;
3 environment (a compiler, a library or a machine level is missing); 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from deepinfer import errors
from deepinfer.commands.output import say
from deepinfer.settings import ISA_LEVELS, warn_unknown

PHASES = ("prefill", "decode", "verify", "draft")
TARGETS = ("cpu", "sm100", "ascend950")  # a test compares them with deepinfer.targets.base
EXIT_CODES: tuple[tuple[type[errors.DeepInferError], int], ...] = (
    (errors.RequestError, 2), (errors.CheckpointError, 2), (errors.ProgramError, 2),
    (errors.ToolchainError, 3), (errors.TargetError, 3), (errors.NoKernelError, 3),
    (errors.DeepInferError, 1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: of the process); returns the exit code."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # generated text must print in any locale
            stream.reconfigure(errors="backslashreplace")
    args = parser().parse_args(argv)
    _warn()
    try:
        handler = importlib.import_module(f"deepinfer.commands.{args.handler}")
        code = int(handler.run(args))
        sys.stdout.flush()
        return code
    except errors.DeepInferError as error:
        say(f"deepinfer: {error}")
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except BrokenPipeError:
        _discard_stdout()  # the reader has seen enough
        return 0
    except OSError as error:
        _discard_stdout()
        say(f"deepinfer: the system refused: {error.strerror or error}\n"
            f"  where: {error.filename or 'standard output'}\n"
            "  next:  check the path, its permissions, and the free space")
        return 3
    except MemoryError as error:
        say(f"deepinfer: not enough memory: {error or 'an allocation failed'}\n"
            "  next:  ask for smaller limits, or use a machine with more memory")
        return 3
    except KeyboardInterrupt:
        say("deepinfer: interrupted")
        return 130


def _open_missing_streams() -> None:
    """A process started without stdin, stdout or stderr gets /dev/null in their places: else a file
    opened later would take the number, and what is printed would land in it."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _discard_stdout() -> None:
    """Python flushes stdout once more at exit: let that succeed, whatever is left in it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_unknown()
    for warning in found:
        say(f"deepinfer: warning: {warning.message}")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``handler`` names the module that does the work."""
    top = argparse.ArgumentParser(
        prog="deepinfer", description="Compile and run DeepSeek-V4.1-Flash with equal bits.",
        epilog="Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 a checked property is "
               "false, 2 usage, 3 environment, 130 interrupted.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    run = _command(commands, "run", "generate text from one prompt")
    run.add_argument("model", nargs="?", metavar="MODEL",
                     help="checkpoint directory (default: v41-tiny, which comes with the package)")
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--tokens", metavar="1,2,3|@FILE", help="token ids, or a JSON file of them")
    _sampling(run, max_tokens=64)
    _threads(run)
    _program(run)
    _json(run)

    chat = _command(commands, "chat", "talk to a model; reads one prompt a line from a pipe")
    chat.add_argument("model", nargs="?", metavar="MODEL",
                      help="checkpoint directory (default: that of `run`)")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--no-thinking", action="store_true", help="answer at once")
    _sampling(chat, max_tokens=512)
    _threads(chat)
    _program(chat)
    chat.add_argument("--json", action="store_true", help="one JSON object a line, one per answer")

    score = _command(commands, "score", "logits of every position of a token list")
    score.add_argument("model", metavar="MODEL", help="checkpoint directory")
    score.add_argument("--tokens", required=True, metavar="1,2,3|@FILE",
                       help="token ids, or a JSON file of them")
    score.add_argument("--out", required=True, metavar="FILE.npz",
                       help="gets the array `logits`, float32 [tokens, vocabulary]")
    score.add_argument("--chunk", type=int, metavar="N",
                       help="rows per prefill step; changes no bit")
    _threads(score)
    _program(score)
    _json(score)

    _check(_command(commands, "check", "prove that no bit of a request depends on its company"))

    build = _command(commands, "compile", "compile a Program ahead of time; reads no weights")
    build.add_argument("model", metavar="MODEL|CONFIG|v4.1-flash",
                       help="checkpoint directory, config.json, or the release's name")
    build.add_argument("--target", choices=TARGETS, default="cpu")
    build.add_argument("--out", required=True, metavar="DIR")
    build.add_argument("--isa", type=_levels, metavar="A,B", help="levels of target cpu, of: "
                       f"{', '.join(ISA_LEVELS)} (default: the highest of this machine)")
    build.add_argument("--op", nargs="+", action="extend", metavar="NAME", dest="ops",
                       help="only these ops, without a Program: kernels of a target in the making")
    build.add_argument("--emit", choices=("source", "cubin"),
                       help="with --op: sources only, or (default) binaries too where a compiler "
                            "is found: cubins of sm100, objects of ascend950")
    build.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: cores)")
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens"):
        build.add_argument(f"--{name}", type=int, metavar="N")
    _json(build)

    profile = _command(commands, "profile", "time steps here, for the budget of adaptive drafts")
    profile.add_argument("model", metavar="MODEL", help="checkpoint directory")
    profile.add_argument("--kernels", action="store_true",
                         help="show instead where the time of a step goes, op by op")
    profile.add_argument("--tokens", type=int, default=512, metavar="N",
                         help="with --kernels: tokens of the prompt (%(default)s)")
    profile.add_argument("--batch", type=int, default=1, metavar="N",
                         help="with --kernels: requests that decode (%(default)s)")
    _threads(profile)
    _program(profile)
    _json(profile)

    _inspect(_command(commands, "inspect", "show ops, passes, targets, kernels, graphs, Programs"))

    make = _command(commands, "make_model", "write a random checkpoint in the official layout")
    make.add_argument("kind", choices=("tiny", "mini"), help="4 MB or 0.5 GB")
    make.add_argument("out", metavar="OUT", help="directory")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")

    doctor = _command(commands, "doctor", "what this machine has, and what follows from it")
    doctor.add_argument("--model", metavar="MODEL|CONFIG|PROGRAM|v4.1-flash",
                        help="say instead what the model's caches take and how many tokens fit")
    doctor.add_argument("--cache-bytes", type=int, metavar="N",
                        help="with --model: bytes for caches (default: the free memory)")
    _json(doctor)

    stored = _command(commands, "cache", "list or collect packed weights or a prefix cache")
    actions = stored.add_subparsers(metavar="ACTION", required=True)
    for name, text in (("ls", "what is in it"), ("gc", "remove what is too old or too much")):
        action = _command(actions, name, text, "cache")
        action.set_defaults(action=name)
        action.add_argument("path", metavar="DIR", nargs="?",
                            help="a directory that was given as cache_dir (default: that of packed "
                                 "weights)")
        if name == "gc":
            action.add_argument("--max-bytes", type=int, metavar="N",
                                help="keep at most this much, the entries used last "
                                     "(default: whatever is young enough)")
            action.add_argument("--verify", action="store_true",
                                help="read everything and remove what is damaged")
        _json(action)
    return top


def _check(check: argparse.ArgumentParser) -> None:
    check.add_argument("model", metavar="MODEL", help="checkpoint directory")
    check.add_argument("--axis", nargs="+", action="extend", metavar="NAME",
                       help="only these: repeat, batch_size, batch_order, neighbours, chunking, "
                            "page_placement, prefix_hit, preemption, prefill_vs_decode, "
                            "draft_width, acceptance, sampling_seed, together, overlap, threads, "
                            "isa, restart, replay (approximate)")
    check.add_argument("--requests", type=int, default=6, metavar="N",
                       help="to serve in each condition (%(default)s)")
    check.add_argument("--seed", type=int, default=0, metavar="S",
                       help="decides their prompts and parameters (%(default)s)")
    check.add_argument("--text", metavar="FILE",
                       help="cut prompts from this text's paragraphs (default: random tokens)")
    check.add_argument("--no-controls", action="store_true",
                       help="do not inject the faults that each axis must catch")
    check.add_argument("--certificate", metavar="FILE", help="write the whole result there as JSON")
    _program(check)
    _json(check)


def _inspect(inspect: argparse.ArgumentParser) -> None:
    things = inspect.add_subparsers(metavar="WHAT", required=True)
    ops = _command(things, "ops", "the vocabulary", "inspect")
    ops.add_argument("name", nargs="?", metavar="OP", help="show all of one op")
    for name, text in (("passes", "a target's passes in order"),
                       ("targets", "machine facts with their sources")):
        command = _command(things, name, text, "inspect")
        command.add_argument("--target", choices=TARGETS)
        _json(command)
    kernels = _command(things, "kernels", "how each op runs on each target", "inspect_kernels")
    kernels.add_argument("--target", choices=TARGETS)
    kernels.add_argument("--config", metavar="MODEL|CONFIG|v4.1-flash",
                         help="whose graphs say which kernels are needed (default: the tiny model "
                              "for cpu, v4.1-flash for the others)")
    kernels.add_argument("--program", metavar="DIR", help="a Program whose kernels count as built")
    graph = _command(things, "graph", "the graph of a phase, or one layer of it", "inspect_graph")
    source = graph.add_mutually_exclusive_group(required=True)
    source.add_argument("model", nargs="?", metavar="MODEL|CONFIG|v4.1-flash")
    source.add_argument("--config", metavar="MODEL|CONFIG|v4.1-flash", help="the same, by name")
    graph.add_argument("--phase", choices=PHASES, help="(decode; draft where --layer is a stage)")
    graph.add_argument("--layer", type=int, metavar="N")
    graph.add_argument("--target", choices=TARGETS, default="cpu")
    graph.add_argument("--lowered", action="store_true", help="after the target's passes")
    graph.add_argument("--print-after", action="append", default=[], metavar="PASS",
                       help="after this pass; may be repeated; 'all' for every pass")
    program = _command(things, "program", "check a Program and say what is in it",
                       "inspect_program")
    program.add_argument("path", metavar="DIR")
    program.add_argument("--phase", choices=PHASES, help="list its launches")
    for command in (ops, kernels, program):
        _json(command)


def _command(to: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str,
             handler: str | None = None) -> argparse.ArgumentParser:
    made = to.add_parser(name.replace("_", "-"), help=text, description=text)
    made.set_defaults(handler=handler or name, what=name)
    return made


def _sampling(command: argparse.ArgumentParser, max_tokens: int) -> None:
    command.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N",
                         help="(%(default)s)")
    command.add_argument("--temperature", type=float, default=0.0, metavar="T",
                         help="0 is greedy (%(default)s)")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(%(default)s)")
    command.add_argument("--top-k", type=int, default=0, metavar="K",
                         help="0 keeps all (%(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="S",
                         help="of the sampling noise (%(default)s)")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object, for machines")


def _threads(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=int, metavar="N",
                         help="changes no bit (default: all cores)")


def _program(command: argparse.ArgumentParser) -> None:
    command.add_argument("--program", metavar="DIR",
                         help="use this Program (default: compile one, kept in the cache)")


def _levels(text: str) -> tuple[str, ...]:
    levels = tuple(dict.fromkeys(text.split(",")))
    for level in levels:
        if level not in ISA_LEVELS:
            raise argparse.ArgumentTypeError(
                f"no ISA level '{level}', expected some of {','.join(ISA_LEVELS)}")
    return levels
