"""Runs an agent with the official OpenAI client: the model calls functions until it can answer.

    python examples/agent.py [--model dispatcher] [--url http://127.0.0.1:8000/v1] [QUESTION]

Reads the API key from LORAPLEX_KEY. The demo's `dispatcher` belongs to tenant acme, so it needs a
key of acme. Requires the `openai` package.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from openai import OpenAI

PARCELS = {"7": "found in Bern", "8": "on its way to Rome"}
MAX_TURNS = 8


def find_parcel(number: str) -> str:
    """Where a parcel is."""
    return PARCELS.get(number, "not known")


def add(a: float, b: float) -> str:
    """The sum of two numbers."""
    return str(a + b)


FUNCTIONS: dict[str, tuple[Callable[..., str], dict[str, str]]] = {
    "find_parcel": (find_parcel, {"number": "string"}),
    "add": (add, {"a": "number", "b": "number"}),
}


def describe(name: str) -> dict[str, Any]:
    """Returns the definition of the function as a tool of the Chat Completions API."""
    function, arguments = FUNCTIONS[name]
    parameters = {
        "type": "object",
        "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    about = {"name": name, "description": function.__doc__, "parameters": parameters}
    return {"type": "function", "function": about}


def run(name: str, arguments: str) -> str:
    """Calls the function and returns its result, or the error as a text for the model."""
    try:
        function, _ = FUNCTIONS[name]
        return function(**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def answer(client: OpenAI, model: str, question: str) -> str:
    """Runs the functions that the model calls until it answers, and returns the answer. Gives up
    after `MAX_TURNS` turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    tools: Any = [describe(name) for name in FUNCTIONS]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=0
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            if call.type == "function":
                result = run(call.function.name, call.function.arguments)
                print(f"{call.function.name}({call.function.arguments}) -> {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Where is parcel 7?")
    parser.add_argument("--model", default="dispatcher")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key=os.environ["LORAPLEX_KEY"])
    print(answer(client, arguments.model, arguments.question))


if __name__ == "__main__":
    main()
