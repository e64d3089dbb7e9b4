"""Short generated chats of four kinds, rendered in the V4.1 prompt format by deepseek-recipe."""

import json
import random
from collections.abc import Callable
from typing import Any

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

WORDS = ("apple river stone cloud green table music paper light horse bread water python garden "
         "window silver orange summer winter bridge castle forest letter number planet rocket "
         "school street ticket yellow basket button carpet doctor engine flower guitar hammer "
         "island jacket kitten ladder magnet needle ocean pencil quartz rabbit saddle tunnel"
         ).split()
NAMES = ("Alice Bruno Carla David Elena Frank Grace Henry Irene Jonas Karin Louis Maria Nils "
         "Olga Peter Quinn Rosa Simon Tina Uwe Vera Walter Yusuf Zoe").split()
CITIES = ("Paris Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Cairo Lima Quito "
          "Tokyo Seoul Delhi Sydney Boston Denver Austin").split()
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy")
COLOURS = ("red", "blue", "green", "black", "white", "pink")
KINDS = ("arithmetic", "string", "json", "tool")

TOOLS = [ToolDefinition("get_weather", "Look up the weather of a city.",
                        {"type": "object", "properties": {"city": {"type": "string"}},
                         "required": ["city"]})]
Chat = tuple[list[Message], dict[str, Any]]


def arithmetic(rng: random.Random) -> Chat:
    a, b = rng.randrange(100), rng.randrange(100)
    sign, word, result = rng.choice((("+", "plus", a + b), ("-", "minus", a - b)))
    question = rng.choice((f"What is {a} {sign} {b}?", f"Compute {a} {word} {b}.",
                           f"{a} {sign} {b} = ?", f"Please calculate {a} {sign} {b}."))
    return [UserMessage(question), AssistantMessage(
        f"{a} {sign} {b} = {result}.", f"I need {a} {word} {b}. That is {result}.")], {}


def string(rng: random.Random) -> Chat:
    word = rng.choice(WORDS)
    question, answer, thought = rng.choice((
        (f'Write "{word}" in upper case.', word.upper(), "Each letter becomes a capital."),
        (f'Reverse the word "{word}".', word[::-1], f"The letters are {' '.join(word)}."),
        (f'How many letters has "{word}"?', str(len(word)), f"I count {' '.join(word)}."),
        (f'What is the first letter of "{word}"?', word[0], f"The word is {word}."),
        (f'Repeat "{word}" three times.', " ".join([word] * 3), f"Say {word} again and again."),
    ))
    return [UserMessage(question), AssistantMessage(answer, thought)], {}


def json_answer(rng: random.Random) -> Chat:
    name, age, city = rng.choice(NAMES), rng.randrange(5, 95), rng.choice(CITIES)
    colour, count, word = rng.choice(COLOURS), rng.randrange(2, 50), rng.choice(WORDS)
    question, value = rng.choice((
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age,
                                                             "city": city}),
        (f"There are {count} items called {word} in {colour}.", {"item": word, "count": count,
                                                                 "colour": colour}),
        (f"{name} bought {count} of {word}.", {"name": name, "item": word, "count": count}),
    ))
    return [UserMessage(f"{question} Answer in JSON."), AssistantMessage(
        json.dumps(value), f"The keys are {', '.join(value)}.")], {"response_format": "json_object"}


def tool(rng: random.Random) -> Chat:
    city, sky, degrees = rng.choice(CITIES), rng.choice(WEATHER), rng.randrange(-10, 40)
    question = rng.choice((f"What is the weather in {city}?", f"How is the weather in {city}?",
                           f"Is it {rng.choice(WEATHER)} in {city}?"))
    call = ToolCall("call_0", "get_weather", json.dumps({"city": city}))
    result = json.dumps({"sky": sky, "degrees": degrees})
    return [UserMessage(question),
            AssistantMessage("", f"I look up {city}.", [call]),
            ToolMessage(result, "call_0"),
            AssistantMessage(f"It is {sky} in {city} with {degrees} degrees.",
                             f"The tool says {sky}.")], {"tools": TOOLS}


MAKERS: dict[str, Callable[[random.Random], Chat]] = {
    "arithmetic": arithmetic, "string": string, "json": json_answer, "tool": tool}


def render(messages: list[Message], options: dict[str, Any]) -> str:
    """The prompt text of a conversation; a finished last answer ends in the end token."""
    return DeepseekV41Encoding().render_conversation(Conversation(messages, **options)).prompt


def chat(kind: str, rng: random.Random) -> str:
    """A finished chat of one kind: thinking on or off, sometimes with a system message."""
    messages, options = MAKERS[kind](rng)
    options["thinking_mode"] = rng.random() < 0.6
    if rng.random() < 0.2:
        messages = [SystemMessage("You are a helpful assistant."), *messages]
    return with_last_answer(messages, options)


def with_last_answer(messages: list[Message], options: dict[str, Any]) -> str:
    """Render up to the last answer as its prompt, then the answer as the model should write it.

    Rendered as history, an answer would lose its reasoning (spec §7), so it is put together here.
    """
    last = messages[-1]
    text = render(messages[:-1], options)
    if options["thinking_mode"]:
        text += f"{last.reasoning_content}</think>"
    return text + last.content + "<｜end▁of▁sentence｜>"


def prompt(kind: str, rng: random.Random) -> tuple[str, bool]:
    """An unanswered first turn, and whether thinking is on."""
    messages, options = MAKERS[kind](rng)
    options["thinking_mode"] = rng.random() < 0.6
    return render(messages[:1], options), options["thinking_mode"]
