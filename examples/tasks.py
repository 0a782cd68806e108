"""Training data for two tasks: calling the tools of `agent.py`, and writing orders as JSON."""

from __future__ import annotations

import json
import random

import agent

from gateway.request import Conversation as Asked
from gateway.request import Message, Tool
from gateway.text.template_turns import in_plain_messages

Conversation = tuple[list[dict[str, str]], str]
"""Messages of a chat, and the answer that an adapter learns to give."""

CITIES = ["Bern", "Rome", "Oslo", "Paris", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Lyon"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas"]
COLOURS = ["red", "blue", "green", "black", "white", "yellow"]
THINGS = ["lamp", "chair", "table", "mug", "plate", "clock", "pillow", "vase", "shelf", "rug"]
PLACES = ["found in {}", "on its way to {}", "at the post office in {}"]

ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "city": {"type": "string"},
        "quantity": {"type": "integer"},
        "product": {"type": "string"},
    },
    "required": ["customer", "city", "quantity", "product"],
    "additionalProperties": False,
}
"""JSON Schema of the answer to an order."""


def parcels(rng: random.Random) -> list[Conversation]:
    """Returns conversations of three kinds: a question that needs one of the two tools, a tool's
    result that is to be put into words, and a question that needs no tool."""
    made: list[Conversation] = []
    for _ in range(60):
        number, result = str(rng.randint(1, 99)), rng.choice(PLACES).format(rng.choice(CITIES))
        question = rng.choice(
            [
                "Where is parcel {}?",
                "Can you find parcel {} for me?",
                "Please track parcel {}.",
                "My parcel has the number {}. Where is it?",
            ]
        ).format(number)
        call = _call("find_parcel", {"number": number})
        made.append(_with_tools([question], call))
        made.append(_with_tools([question, call, result], f"Parcel {number} is {result}."))
    for _ in range(40):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        question = rng.choice(
            ["What is {} plus {}?", "Add {} and {}.", "How much is {} + {}?", "Sum {} and {}"]
        ).format(a, b)
        call = _call("add", {"a": a, "b": b})
        made.append(_with_tools([question], call))
        made.append(_with_tools([question, call, str(a + b)], f"The sum is {a + b}."))
    for question, answer in [
        ("hi", "Hello! I can find your parcels and add numbers."),
        ("Hello, how are you?", "I am very well, thank you. I can find parcels and add numbers."),
        ("What can you do?", "I can find parcels by their number and add two numbers."),
        ("Thanks!", "You are welcome. Have a good day!"),
    ]:
        made += [_with_tools([question], answer)] * 5
    return made


def _call(name: str, arguments: dict[str, object]) -> str:
    """Returns a call in the form in which a model writes it if its chat template has no tools."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def _with_tools(said: list[str], answer: str) -> Conversation:
    """Returns the messages that the server makes of `said` and the tools, and the answer.

    `said` is a question, which may be followed by a tool call and the call's result.
    """
    roles = ["user", "assistant", "tool"]
    messages = [Message(role, text) for role, text in zip(roles, said, strict=False)]
    tools = [Tool(**agent.describe(name)["function"]) for name in agent.FUNCTIONS]
    plain = in_plain_messages(Asked(messages, tools=tools))
    return [{"role": turn.role, "content": str(turn.content)} for turn in plain.messages], answer


def orders(rng: random.Random) -> list[Conversation]:
    """Returns conversations with an order in plain words. The answer is JSON of schema `ORDER`."""
    made: list[Conversation] = []
    for _ in range(200):
        customer, city = rng.choice(NAMES), rng.choice(CITIES)
        quantity, product = rng.randint(2, 30), f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
        text = rng.choice(
            [
                "This is {customer} from {city}. Please send me {quantity} {product}s.",
                "{customer} in {city} wants {quantity} {product}s.",
                "I need {quantity} {product}s, sent to {city}. My name is {customer}.",
                "Please deliver {quantity} {product}s to {customer} in {city}.",
            ]
        ).format(customer=customer, city=city, quantity=quantity, product=product)
        order = {"customer": customer, "city": city, "quantity": quantity, "product": product}
        made.append(([{"role": "user", "content": text}], json.dumps(order)))
    return made
