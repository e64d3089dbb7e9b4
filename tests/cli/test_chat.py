"""`deepinfer chat`: piped, as JSON, on a terminal; its commands, Ctrl-C and errors."""

from __future__ import annotations

import io
import json
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from deepinfer import cli
from deepinfer.commands import chat
from deepinfer.llm import LLM
from tests.runtime.fake_engine import FakeEngine, says, text


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Script:
    """An engine that answers by turn. Args: answers: what it says in each."""

    def __init__(self, *answers: str, **given) -> None:
        self.prompts: list[str] = []
        models = [says(answer) for answer in answers]

        def choose(prompt, output, seed):
            if not output:
                self.prompts.append(text().tokenizer.decode(prompt, skip_special_tokens=False))
                self.seeds.append(seed)
            return models[(len(self.prompts) - 1) % len(models)](prompt, output, seed)

        self.seeds: list[int] = []
        self.engine = FakeEngine(choose, **given)


@pytest.fixture
def serve(monkeypatch, capsys, tmp_path):
    """Runs the command on a script with these lines; gives (code, stdout, stderr)."""
    # A background job ignores Ctrl-C, and so would what it starts: these tests do not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(script: Script, *lines: str, argv=(), attended: bool = False):
        @contextmanager
        def open_llm(args, model):
            with LLM.of(script.engine) as llm:
                yield llm

        monkeypatch.setattr(chat, "open_llm", open_llm)
        kind = Tty if attended else io.StringIO
        monkeypatch.setattr(sys, "stdin", kind("".join(f"{line}\n" for line in lines)))
        code = cli.main(["chat", str(tmp_path), *argv])
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    signal.signal(signal.SIGINT, before)


def test_a_pipe_gets_one_answer_a_line_and_thinking_goes_to_stderr(serve):
    script = Script("I add.</think>4", "Again.</think>5\n")
    code, out, err = serve(script, "2+2?", "", "2+3?")
    assert (code, out) == (0, "4\n5\n")
    assert err.startswith("I add.\n") and "Again.\n" in err and "ended by stop" in err
    first, second = script.prompts
    assert first.endswith("<｜User｜>2+2?<｜Assistant｜><think>")
    assert second.endswith("<｜User｜>2+2?<｜Assistant｜></think>4<｜end▁of▁sentence｜>"
                           "<｜User｜>2+3?<｜Assistant｜><think>")
    assert script.engine.closed == 1


def test_json_lines(serve):
    script = Script("Hm.</think>\x1bfour", "</think>x")
    code, out, _ = serve(script, "2+2?", "/stats", "more", argv=["--json", "--seed", "7"])
    assert code == 0 and script.seeds == [7, 7]
    first, stats, second = map(json.loads, out.splitlines())
    assert (first["prompt"], first["reasoning"], first["content"]) == ("2+2?", "Hm.", "\x1bfour")
    assert first["finish_reason"] == "stop" and first["tool_calls"] == []
    assert first["usage"]["completion_tokens"] == first["metrics"]["steps"] > 5
    assert stats["stats"] == {"steps": first["metrics"]["steps"], "requests": 1}
    assert second["content"] == "x"


def test_commands(serve):
    script = Script("one", "two", "three", "four")
    code, out, err = serve(
        script, "a", "/seed 5", "/system Be kind.", "b", "/reset", "c", "/system", " /d",
        "/help", "/stats", "/quit", "never", argv=["--no-thinking", "--system", "Be brief."])
    assert code == 0 and out.startswith("one\ntwo\nthree\nfour\nsteps     ")
    assert script.seeds == [0, 5, 5, 5]
    a, b, c, d = (p.removeprefix("<｜begin▁of▁sentence｜>") for p in script.prompts)
    end = "<｜end▁of▁sentence｜>"
    assert a == "<｜System｜>Be brief.<｜User｜>a<｜Assistant｜></think>"
    assert b == ("<｜System｜>Be kind.<｜User｜>a<｜Assistant｜></think>one" + end
                 + "<｜User｜>b<｜Assistant｜></think>")
    assert c == "<｜System｜>Be kind.<｜User｜>c<｜Assistant｜></think>"
    assert d == ("<｜User｜>c<｜Assistant｜></think>three" + end
                 + "<｜User｜>/d<｜Assistant｜></think>")
    assert chat.HELP in err and "the seed is 5" in err


@pytest.mark.parametrize(("line", "message"), [
    ("/jump", "no command '/jump', expected one of /reset /seed"),
    ("/seed x", "seed is 'x', expected an int in 0"), ("/seed", "seed is ''"),
    ("/seed -1", "seed is '-1'"), ("/seed " + "9" * 5000, "seed is '999"),
    ("word " * 2000, "the prompt is bad"),
])
def test_what_cannot_be_done_is_said_and_the_chat_goes_on(serve, line, message):
    script = Script("yes")
    script.engine.add_request = refuse_long(script.engine.add_request)
    code, out, err = serve(script, "a", line, "b", argv=["--no-thinking"])
    assert code == 2 and out == "yes\nyes\n" and message in err
    assert script.prompts[1].endswith("yes<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜></think>")
    as_json = serve(Script("yes"), "/jump", argv=["--json"])
    assert json.loads(as_json[1])["error"]["where"] == "chat" and as_json[0] == 2
    assert serve(Script("yes"), "/jump", attended=True)[0] == 0  # whoever typed it has seen it


def refuse_long(add):
    return lambda prompt, *more: add(prompt if len(prompt) < 1000 else [], *more)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(serve):
    before = signal.getsignal(signal.SIGINT)
    script = Script("long " * 30, "short", on_step=lambda step: (
        step == 9 and signal.raise_signal(signal.SIGINT)))
    code, out, err = serve(script, "a", "b", argv=["--no-thinking"], attended=True)
    stopped, short = out.splitlines()
    assert code == 0 and short == "short" and ("long " * 9).startswith(stopped) and stopped
    assert script.engine.aborted == ["0"] and "generated in" in err and "stopped" in err
    assert script.prompts[1].endswith(
        f"</think>{stopped}<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜></think>")
    assert signal.getsignal(signal.SIGINT) is before


def test_what_was_stopped_while_it_was_thinking_is_forgotten(serve):
    script = Script("thinking on and on", "b</think>short", on_step=lambda step: (
        step == 5 and signal.raise_signal(signal.SIGINT)))
    code, out, _ = serve(script, "a", "b", attended=True)
    assert (code, out) == (0, "\nshort\n") and "<｜User｜>a" not in script.prompts[1]


def test_a_second_ctrl_c_ends_it(serve):
    script = Script("long " * 30, on_step=lambda step: step == 3 and [
        signal.raise_signal(signal.SIGINT) for _ in range(2)])
    assert serve(script, "a", attended=True)[0] == 130
    assert script.engine.closed == 1


def test_a_pipe_is_interrupted_at_once(serve):
    script = Script("long " * 30, on_step=lambda step: step == 3 and signal.raise_signal(
        signal.SIGINT))
    assert serve(script, "a", "b")[0] == 130 and script.engine.steps == 3


def test_ctrl_c_at_the_prompt_gives_up_the_line(monkeypatch):
    lines = iter([KeyboardInterrupt, "hello", EOFError])
    llm = LLM.of(Script("</think>hi").engine)
    shown = []
    view = SimpleNamespace(delta=lambda d: None, answered=lambda *args: shown.append(args[1]))

    def read() -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    talk = chat.Chat(llm, chat.SamplingParams(max_tokens=50), view, interruptible=True)
    assert talk.serve(read) == 0 and [a.content for a in shown] == ["hi"]


def test_a_terminal_shows_thinking_dim_and_no_control_characters(monkeypatch, capsys):
    from deepinfer.commands.chat_view import TerminalView

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    view = TerminalView()
    llm = LLM.of(Script("I \x1b[31madd.</think>4\x07 [b]x[/b]").engine)
    assert chat.Chat(llm, chat.SamplingParams(max_tokens=99), view).ask("2+2?")
    thought, _, answer = screen.getvalue().rpartition("\x1b[0m")
    assert "".join(thought.split("\x1b[2m")).replace("\x1b[0m", "") == "I \\x1b[31madd."
    assert answer == "\n\n4\\x07 [b]x[/b]\n"
    assert "generated in" in capsys.readouterr().err


def test_lines_are_read_with_what_is_there(monkeypatch):
    toolkit = SimpleNamespace(PromptSession=lambda: SimpleNamespace(prompt=lambda p: f"{p}typed"))
    monkeypatch.setitem(sys.modules, "prompt_toolkit", toolkit)
    assert chat._reader(True, True)() == "> typed"
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr("builtins.input", lambda p: f"{p}plain")
    assert chat._reader(True, True)() == "> plain"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nlast")))
    read = chat._reader(False, False)
    assert [read(), read()] == ["a\ufffdb", "last"]
    with pytest.raises(EOFError):
        read()
    monkeypatch.setattr(sys, "stdin", None)  # the process was started without
    with pytest.raises(EOFError):
        chat._reader(False, False)()


@pytest.mark.parametrize(("argv", "code", "message"), [
    (["--threads", "0"], 2, "threads is 0"), (["--temperature", "-1"], 2, "temperature is -1.0"),
    (["--seed", "-1"], 2, "seed is -1"),
])
def test_arguments_are_checked_first(argv, code, message, capsys, monkeypatch):
    monkeypatch.setattr(chat, "open_llm", lambda *args: pytest.fail("opened"))
    monkeypatch.setattr(chat, "default_model", lambda: pytest.fail("made a model"))
    assert cli.main(["chat", *argv]) == code
    assert message in capsys.readouterr().err


def test_a_missing_recipe_is_said_first(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    monkeypatch.setattr(chat, "default_model", lambda: pytest.fail("made a model"))
    assert cli.main(["chat"]) == 3
    assert "next:  pip install 'deepinfer-compiler[chat]'" in capsys.readouterr().err
