"""`python -m benchmarks.structured_output`: compares the throughput with and without grammars.

One worker serves the demo model with eight adapters. All sequences run at the same time, with
random prompts of 32 tokens and greedy sampling. Three kinds of answers take turns: free answers,
answers with a regular expression that allows any text, and answers with eight JSON Schemas. The
second kind shows the cost of masks, because each token is sampled with a mask and the answers are
as long as free ones. With a schema, a token that is the only possible one is not sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.lone_worker import House, Worker
from benchmarks.machine import describe
from workers.wire import grammars

NUM_ADAPTERS = 8
NUM_PROMPT = 32

console = Console()


def schema(number: int) -> str:
    """Returns the grammar of a JSON object with strings, a number, an enum and a list."""
    properties = {
        f"name_{number}": {"type": "string", "minLength": 20, "maxLength": 60},
        "count": {"type": "integer", "minimum": 0, "maximum": 10 ** (number + 1)},
        "state": {"enum": ["open", "paid", f"state {number}"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2},
    }
    return grammars.of_json_schema(
        json.dumps(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    )


FORMS = {
    "free": [""],
    "any text": [grammars.of_regex("(?s:.*)")],
    "schemas": [schema(number) for number in range(8)],
}


async def turn(worker: Worker, form: str, num_sequences: int, num_output: int) -> float:
    """Runs `num_sequences` requests at the same time. Returns the output tokens per second."""
    refs, held = worker.house.refs, FORMS[form]
    begin = time.perf_counter()
    streams = await asyncio.gather(
        *(
            worker.ask(refs[n % len(refs)], NUM_PROMPT, num_output, held[n % len(held)])
            for n in range(num_sequences)
        )
    )
    num_tokens = sum(len(stream.arrivals_s) for stream in streams)
    return num_tokens / (time.perf_counter() - begin)


async def run(house: House, num_rounds: int, num_sequences: int, num_output: int) -> None:
    speeds: dict[str, list[float]] = {form: [] for form in FORMS}
    async with house.worker(room=NUM_ADAPTERS, host=NUM_ADAPTERS) as worker:
        for form in FORMS:
            await turn(worker, form, num_sequences, num_output)
        for number in track(range(num_rounds), "rounds", console=console):
            for form in list(FORMS)[:: 1 if number % 2 else -1]:
                speeds[form].append(await turn(worker, form, num_sequences, num_output))
    free = np.array(speeds["free"])
    for form, found in speeds.items():
        ratios = np.array(found) / free
        console.print(
            f"{form:10} {np.median(found):6.0f} tokens/s, {np.median(ratios):.2f} of free answers "
            f"({ratios.min():.2f} to {ratios.max():.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--threads", type=int, help="of the worker's kernels")
    arguments = parser.parse_args()
    console.print(describe())
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        house = House(Path(name), NUM_ADAPTERS, arguments.threads)
        asyncio.run(run(house, arguments.rounds, arguments.sequences, arguments.tokens))


if __name__ == "__main__":
    main()
