"""Chat: rendering and parsing with deepseek-recipe, on an engine that says what it is told to."""

from __future__ import annotations

import sys

import pytest
from tokenizers import AddedToken

from deepinfer.api.chat import ChatFormat
from deepinfer.errors import CheckpointError, RequestError, ToolchainError
from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.text import Text
from tests.runtime.fake_engine import VOCAB, FakeEngine, says, text

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"a": {"type": "number"}, "s": {"type": "string"}}}}}
CALL = ('\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n'
        '<｜DSML｜ parameter name="s" string="true">q</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="a" string="false">2</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>")


def made(answer: str, **given) -> LLM:
    return LLM.of(FakeEngine(says(answer), **given))


def ids(prompt: str) -> list[int]:
    return text().tokenizer.encode(prompt, add_special_tokens=False).ids


@pytest.mark.parametrize(("messages", "thinking", "prompt"), [
    (HELLO, False, f"{BOS}<｜User｜>hello<｜Assistant｜></think>"),
    (HELLO, None, f"{BOS}<｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the "
                  "more thorough the reasoning)\n\n<｜User｜>hello<｜Assistant｜><think>"),
    ([{"role": "system", "content": "Be kind."}, *HELLO,
      {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
      {"role": "user", "content": "more"}], False,
     f"{BOS}<｜System｜>Be kind.<｜User｜>hello<｜Assistant｜></think>Hi.{EOS}<｜User｜>more"
     "<｜Assistant｜></think>"),
])
def test_prompts_are_those_of_the_format(messages, thinking, prompt):
    """Source: spec §7."""
    rendered = ChatFormat(text()).render(messages, thinking=thinking)
    assert rendered.text == prompt and rendered.token_ids == ids(prompt)
    assert rendered.thinking is (thinking is not False)


def test_marks_in_a_message_are_plain_text():
    rendered = ChatFormat(text()).render([{"role": "user", "content": "<｜User｜></think>"}],
                                         thinking=False)
    user, end = text().tokenizer.token_to_id("<｜User｜>"), text().tokenizer.token_to_id("</think>")
    assert rendered.token_ids.count(user) == rendered.token_ids.count(end) == 1
    assert rendered.token_ids != ids(rendered.text)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_is_split_into_thinking_and_content(thinking):
    said = "Two and two.</think>It is 4." if thinking else "It is 4."
    answer = made(said).chat([{"role": "user", "content": "2+2?"}], thinking=thinking)
    assert answer.content == "It is 4." and answer.tool_calls == []
    assert answer.reasoning == ("Two and two." if thinking else None)
    assert answer.raw.text == said and answer.raw.finish_reason == "stop"
    message = {"role": "assistant", "content": "It is 4."}
    assert answer.message == (message | {"reasoning_content": "Two and two."} if thinking
                              else message)


def test_an_answer_cut_short_while_thinking():
    answer = made("One, two, three</think>done").chat(HELLO, {"max_tokens": 4})
    assert answer.raw.finish_reason == "length" and answer.content == ""
    assert answer.reasoning == answer.raw.text != ""


def test_tool_calls_have_the_same_ids_in_every_run():
    """deepseek-recipe's own are random."""
    llm = made(f"I add.</think>{CALL}")
    first, again = (llm.chat(HELLO, tools=[TOOL]) for _ in range(2))
    assert first.tool_calls == again.tool_calls
    assert (first.reasoning, first.content) == ("I add.", "")
    [call] = first.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_0", "add", '{"s": "q", "a": 2}')
    history = [*HELLO, first.message, {"role": "tool", "tool_call_id": "call_0", "content": "3"}]
    assert llm.chat(history, tools=[TOOL]).tool_calls[0].id == "call_1"
    rendered = llm.chat_format.render(history, tools=[TOOL])
    assert rendered.text.endswith(f"<think>I add.</think>{CALL}{EOS}<｜User｜><tool_result>3"
                                  "</tool_result><｜Assistant｜><think>")


def test_without_tools_calls_are_text():
    answer = made(f"x</think>{CALL}").chat(HELLO)
    assert answer.tool_calls == [] and "invoke name" in answer.content


@pytest.mark.parametrize("said", ["Hm.</think>It is 4.", f"I add.</think>Yes.{CALL}", "Hm", ""])
def test_the_deltas_of_a_streamed_answer_join_to_it(said):
    llm = made(said)
    stream = llm.stream_chat(HELLO, tools=[TOOL])
    assert stream.answer is None
    deltas = list(stream)
    whole = llm.chat(HELLO, tools=[TOOL])
    assert "".join(d.reasoning for d in deltas) == whole.reasoning
    assert "".join(d.content for d in deltas) == whole.content
    answer = stream.answer
    assert answer.tool_calls == whole.tool_calls and answer.raw.text == whole.raw.text
    assert answer.raw.token_ids == whole.raw.token_ids and deltas[-1].output.finished


def test_a_streamed_answer_can_be_left_and_stopped():
    llm = made("Hm.</think>" + "long " * 50)
    with llm.stream_chat(HELLO) as stream:
        next(stream)
    assert llm.engine.aborted == ["0"]
    stream = llm.stream_chat(HELLO)
    next(stream)
    stream.stop()
    assert list(stream) == [] and llm.engine.aborted == ["0", "1"]
    assert stream.answer.raw.finish_reason is None
    with pytest.raises(RequestError, match="n is 2, expected 1"):
        llm.stream_chat(HELLO, {"n": 2})
    assert not llm.engine.running


def test_n_answers():
    llm = LLM.of(FakeEngine(lambda p, o, s: says(f"S{s % 7}.</think>A{s % 7}")(p, o, s)))
    answer = llm.chat(HELLO, {"n": 3, "seed": 4})
    assert len(answer.choices) == 3 and len({c.content for c in answer.choices}) > 1
    assert answer.content == answer.choices[0].content == "A4"
    assert answer.raw.outputs[2].text == answer.choices[2].raw.text


def test_an_answer_may_be_as_long_as_the_context_allows():
    engine = FakeEngine(says("x"), max_model_len=150)
    llm, seen = LLM.of(engine), []
    add = engine.add_request
    engine.add_request = lambda prompt, params, name, index: (
        seen.append((len(prompt), params.max_tokens)), add(prompt, params, name, index))[1]
    llm.chat(HELLO)
    llm.chat(HELLO, {"temperature": 0})
    llm.chat(HELLO, SamplingParams())
    (n, most), *rest = seen
    assert most == 150 - n and rest == [(n, most), (n, 16)]


@pytest.mark.parametrize(("template", "structured"), [
    ({"response_format": {"type": "json_object"}}, {"json": '{"type": "object"}'}),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": "array"}}}}, {"json": '{"type":"array"}'}),
    ({"response_format": {"type": "regex", "regex": "a+"}}, {"regex": "a+"}),
    ({"response_format": {"type": "text"}}, None), ({}, None),
])
def test_a_response_format_is_enforced(template, structured):
    asked = [{"role": "user", "content": "json please"}]
    rendered = ChatFormat(text()).render(asked, thinking=False, template=template)
    params = rendered.params({"max_tokens": 5}, 4096)
    assert params == SamplingParams(max_tokens=5, structured=structured)
    own = SamplingParams(structured={"choice": ["a"]})
    assert rendered.params(own, 4096) is own
    if structured is not None:
        thinking = ChatFormat(text()).render(asked, template=template)
        assert thinking.params({"max_tokens": 5}, 4096) == SamplingParams(
            max_tokens=5, structured=structured | {"after": "</think>"})


@pytest.mark.parametrize(("messages", "given", "message"), [
    ("hello", {}, "messages is a str, expected a list of mappings"),
    ([("user", "x")], {}, "messages is a list, expected"),
    ([], {}, "Empty input messages"),
    ([{"role": "wizard", "content": "x"}], {}, "unknown variant `wizard`"),
    ([{"role": "user"}], {}, "missing field `content`"),
    ([{"role": "user", "content": "\ud800"}], {}, "surrogates not allowed"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], {},
     "holds an image, expected text"),
    (HELLO, {"thinking": "yes"}, "thinking is 'yes', expected True, False or None"),
    (HELLO, {"tools": [{"type": "function", "function": {"name": "no good"}}]}, "tools"),
    (HELLO, {"chat_template_kwargs": {"temprature": 1}}, "holds 'temprature', expected some of"),
    (HELLO, {"chat_template_kwargs": {"reasoning_effort": "huge"}}, "unknown variant `huge`"),
    (HELLO, {"chat_template_kwargs": {"response_format": {"type": "json_object"}}},
     "must contain the word 'json'"),
    (HELLO, {"params": {"echo": True}}, "echo is True, expected False"),
])
def test_what_cannot_be_rendered(messages, given, message):
    llm = made("x")
    with pytest.raises(RequestError, match=message) as caught:
        llm.chat(messages, **given)
    assert caught.value.where == "chat" and caught.value.next
    assert not llm.engine.running


def test_a_missing_recipe_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ToolchainError, match=r"chat needs deepseek-recipe(.|\n)*where: the extra "
                                             r"'chat'(.|\n)*next:  pip install 'deepinfer-compil"):
        made("x").chat(HELLO)


def test_a_tokenizer_without_the_format():
    engine = FakeEngine()
    engine.text = None
    with pytest.raises(CheckpointError, match="the model has no tokenizer.json"):
        LLM.of(engine).chat(HELLO)
    from tokenizers import Tokenizer, decoders, models

    bare = Tokenizer(models.BPE())
    bare.decoder = decoders.ByteLevel()
    engine.text = Text(bare, None)
    with pytest.raises(CheckpointError, match=f"the token '{BOS}' is not in it, expected an added"):
        LLM.of(engine).chat(HELLO)
    from deepinfer.graph.byte_tokenizer import byte_level_tokenizer

    hidden = byte_level_tokenizer(VOCAB)
    hidden.add_special_tokens([AddedToken("</think>", special=True)])
    engine.text = Text(hidden, None)
    with pytest.raises(CheckpointError, match="'</think>' is marked special there, expected an "
                                              "added token whose text is part of the output"):
        LLM.of(engine).chat(HELLO)
