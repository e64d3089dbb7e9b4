"""The command line itself: what is parsed, and how errors become messages and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types

import pytest

from deepinfer import cli, errors
from deepinfer.commands.inspect import all_ops
from deepinfer.commands.tokens import parse_tokens
from deepinfer.errors import RequestError
from deepinfer.graph.v41_flash import PHASES
from deepinfer.settings import ISA_LEVELS
from deepinfer.targets.base import TARGETS

COMMANDS = (
    ["run", "--prompt", "x"], ["score", "m", "--tokens", "1", "--out", "o.npz"],
    ["compile", "m", "--out", "d", "--isa", "generic,avx2"], ["make-model", "tiny", "d"],
    ["doctor"], ["profile", "m"],
    *(["inspect", what] for what in ("ops", "passes", "targets", "kernels")),
    ["inspect", "graph", "m"], ["inspect", "program", "d"],
)


def handled_by(monkeypatch: pytest.MonkeyPatch, do: object) -> None:
    """Make the handler of `doctor` do this instead."""
    module = types.ModuleType("deepinfer.commands.doctor")
    module.run = do  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_every_command_has_a_handler(argv):
    args = cli.parser().parse_args(argv)
    module = __import__(f"deepinfer.commands.{args.handler}", fromlist=["run"])
    assert callable(module.run)


def test_copied_names_agree_with_their_sources():
    assert cli.TARGETS == TARGETS
    assert cli.PHASES == (*PHASES, "draft")


@pytest.mark.parametrize("argv", [
    [], ["no-such"], ["run"], ["run", "--prompt", "x", "--tokens", "1"], ["score", "m"],
    ["run", "--prompt", "x", "--max-tokens", "many"], ["inspect"], ["inspect", "graph"],
    ["inspect", "graph", "m", "--config", "m"], ["inspect", "graph", "m", "--phase", "warmup"],
    ["compile", "m", "--out", "d", "--target", "tpu"], ["make-model", "huge", "d"],
    ["compile", "m", "--out", "d", "--isa", "avx3"],
], ids=" ".join)
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage: deepinfer" in err


def test_isa_levels_are_parsed_in_order_and_once():
    argv = ["compile", "m", "--out", "d", "--isa", "avx2,generic,avx2"]
    assert cli.parser().parse_args(argv).isa == ("avx2", "generic")
    with pytest.raises(argparse.ArgumentTypeError, match=",".join(ISA_LEVELS)):
        cli._levels("generic,sse9")


@pytest.mark.parametrize(("kind", "code"), [
    (errors.RequestError, 2), (errors.CheckpointError, 2), (errors.ProgramError, 2),
    (errors.ToolchainError, 3), (errors.TargetError, 3), (errors.NoKernelError, 3),
    (errors.DeterminismError, 1), (errors.IRError, 1), (errors.PassError, 1),
])
def test_an_error_prints_its_three_parts_and_gives_its_code(monkeypatch, capsys, kind, code):
    def fail(args):
        raise kind("found 1, expected 2", where="layer 3", next="count again")

    handled_by(monkeypatch, fail)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "deepinfer: found 1, expected 2\n  where: layer 3\n  next:  count again\n"


def test_an_unknown_error_is_not_hidden(monkeypatch):
    handled_by(monkeypatch, lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_the_handlers_code_is_the_exit_code(monkeypatch):
    handled_by(monkeypatch, lambda args: 3)
    assert cli.main(["doctor"]) == 3


def test_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    handled_by(monkeypatch, interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "deepinfer: interrupted\n"


def test_a_misspelled_variable_is_warned_about(monkeypatch, capsys):
    handled_by(monkeypatch, lambda args: 0)
    monkeypatch.setenv("DEEPINFER_CACHE_DIRR", "x")
    cli.warn_unknown.cache_clear()
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err.strip().endswith("did you mean DEEPINFER_CACHE_DIR?")
    cli.warn_unknown.cache_clear()


def start(*argv: str, **popen: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "deepinfer", *argv], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen)


def test_a_reader_that_leaves_ends_it_quietly():
    # The text is far larger than a pipe holds, so the write is under way when the reader leaves.
    running = start("inspect", "graph", "--config", "v4.1-flash")
    assert running.stdout.readline().startswith("# source graph")
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    assert running.wait() == 0
    assert "Traceback" not in err and "Broken" not in err


def test_it_starts_without_numpy_torch_and_tilelang():
    code = ("import sys, deepinfer.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
            "print(*({'numpy', 'torch', 'tilelang', 'rich'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_text_prints_in_a_locale_that_lacks_the_letters():
    op = next(op for op in all_ops().values() if not op.doc.isascii())
    running = start("inspect", "ops", op.name, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = running.communicate()
    assert running.returncode == 0 and err == ""
    assert op.doc.encode("ascii", "backslashreplace").decode() in out


@pytest.mark.parametrize(("redirect", "code"), [
    (">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0), (">/dev/full", 3), ("2>/dev/full", 0),
])
def test_standard_streams_that_are_closed_or_full(redirect, code, tmp_path):
    """make-model writes data to stdout and progress to stderr; the files it opens must not take
    the places of those two, and only data that is lost is an error."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" -m deepinfer make-model tiny "$1" {redirect}', sys.executable,
         str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stdout in ("", f"{tmp_path / 'm'}\n")
    assert done.stdout or ">&- " in f"{redirect} " or "full" in redirect
    if code:
        assert "No space left on device\n  where: standard output\n  next: " in done.stderr
    made = {f.name for f in (tmp_path / "m").iterdir()}
    assert made == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/a/file"),
                                   MemoryError("30 GB")])
def test_what_the_system_refuses_exits_with_3(error, monkeypatch, capsys):
    def fail(args):
        raise error

    handled_by(monkeypatch, fail)
    assert cli.main(["doctor"]) == 3
    assert "Permission denied\n  where: /a/file\n" in (err := capsys.readouterr().err) or (
        "not enough memory: 30 GB" in err)


@pytest.mark.parametrize(("text", "ids"), [
    ("1,2,3", [1, 2, 3]), ("7", [7]), (" 1, 2", [1, 2]), ("-1", [-1]),
])
def test_tokens_from_the_command_line(text, ids):
    assert parse_tokens(text) == ids


def test_tokens_from_a_file(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([5, 0, 511]))
    assert parse_tokens(f"@{file}") == [5, 0, 511]


@pytest.mark.parametrize(("text", "message"), [
    ("", "no tokens, expected at least one"), ("1,,2", "token 1 is '', expected an int"),
    ("1,x", "token 1 is 'x', expected an int"), ("1.5", "token 0 is '1.5'"),
    ("9" * 5000, "token 0 is '9+', expected an int"),  # more digits than int() takes
    ("@{}/none.json", "cannot read token ids: .*No such file"),
])
def test_bad_tokens_are_refused(text, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        parse_tokens(text.format(tmp_path))


@pytest.mark.parametrize(("content", "message"), [
    ("[1, 2", "cannot read token ids"), ('{"a": 1}', "found a JSON dict, expected a list"),
    ("[1, true]", "token 1 is True, expected an int"), ("[]", "no tokens"),
    ("[1.0]", "token 0 is 1.0, expected an int"), ("[" * 100_000, "cannot read token ids"),
])
def test_bad_token_files_are_refused(content, message, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(content)
    with pytest.raises(RequestError, match=message) as refused:
        parse_tokens(f"@{file}")
    assert refused.value.where == str(file)
