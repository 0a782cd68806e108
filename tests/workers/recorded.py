"""Behaviour of the engine as it was recorded: tokens, frames of the wire, names of metrics.

`python -m tools.record_engine` writes `recorded.json` anew after a change that is meant;
`test_recorded.py` compares.
"""

from __future__ import annotations

import random
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import msgspec

from tests.workers.base_models.test_swapping import StoredModels
from tests.workers.driver import Driver
from tests.workers.simulation import Simulation, StubPool, generate, prompt_of
from tools.source_tree import ROOT
from workers.process.outbox import frames
from workers.wire import grammars
from workers.wire.frames import Abort, ToGateway, ToWorker
from workers.wire.protocol import FinishReason, Generate, ServiceClass

RECORD = Path(__file__).with_name("recorded.json")
NUM_REQUESTS = 200
FAMILIES = {"one": "llama", "two": "qwen2"}
METRIC = re.compile(r'"((?:vllm:|loraplex_)\w+)"')
GRAMMARS = (
    grammars.of_regex("(ab|[0-9]{2}){1,4}-[x-z]{3}"),
    grammars.of_json_schema('{"enum": [1, 23]}'),
)
"""Of languages whose texts are short, so that most end by themselves."""


class Recorded(msgspec.Struct):
    tokens: dict[str, list[int]]
    """Of the greedy requests to a worker, by number."""
    frames: list[str]
    """Digest of each step's frames in a simulation."""
    messages: dict[str, list[str]]
    """Fields of each message of the wire, in order."""
    metrics: list[str]


def mixed_requests(stored: StoredModels) -> list[Generate]:
    """Returns requests to two models and their adapters, some with grammars, some with prompts that
    share a prefix."""
    rng = random.Random(46)
    names = ("one", "two")
    shared = {name: [rng.randrange(256) for _ in range(40)] for name in names}
    requests: list[Generate] = []
    for number in range(NUM_REQUESTS):
        name = names[number // 50 % 2]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        prompt = rng.choice([[], shared[name]]) + own
        ref = rng.choice([None, *stored.refs[name]])
        request = stored.generate(number, name, prompt, rng.randrange(1, 80), ref)
        if number % 8 == 3:
            request = msgspec.structs.replace(request, grammar=GRAMMARS[number // 8 % 2])
        requests.append(request)
    return requests


def served_tokens(stored: StoredModels) -> dict[str, list[int]]:
    """Returns the tokens of each request, served by a worker that swaps two models, has too little
    memory for all sequences, and is told to abort one request in ten."""
    requests = mixed_requests(stored)
    aborted = {request.id for request in requests if request.id % 10 == 7}
    config = stored.config("one", "two", max_num_seqs=16, max_loaded_adapters=2, runs_ahead=True)
    with Driver(config) as driver:
        for request in requests:
            driver.submit(request)
        for number in sorted(aborted):
            driver.loop.post(0, Abort(number))
        driver.wait()
        status = driver.worker.status(False, 0)
    assert sum(model.num_preemptions for model in status.models) > 0
    assert all(model.num_swaps > 1 for model in status.models)
    ended = {number for number, end in driver.ended.items() if end is FinishReason.ABORT}
    assert ended <= aborted
    return {str(n): tokens for n, tokens in driver.answers.items() if n not in aborted}


def simulated_frames() -> list[str]:
    """Returns a digest of each step's frames in a simulation with adapters, tenants, classes,
    preemption, timeouts and aborts."""
    rng = random.Random(46)
    simulation = Simulation(
        num_pages=40, pool=StubPool(num_slots=2, delay_steps=2), runs_ahead=True
    )
    shared = prompt_of(rng, 40)
    digests: list[str] = []

    def record(events: list[Any]) -> None:
        encoded = msgspec.msgpack.encode(frames(events, take_own=lambda _: None))
        digests.append(sha256(encoded).hexdigest()[:8])

    for number in range(NUM_REQUESTS):
        prompt = rng.choice([[], shared]) + prompt_of(rng, rng.randrange(1, 50))
        adapter = rng.choice([None, "a", "b", "c"])
        request = generate(
            *(number, prompt, rng.randrange(1, 40), adapter),
            tenant=rng.choice(["x", "y", "z"]),
            service_class=rng.choice(list(ServiceClass)),
            timeout_s=rng.choice([None, 0.5]),
            traceparent=rng.choice([None, "00-" + "1" * 32 + "-" + "2" * 16 + "-01"]),
        )
        simulation.submit(request)
        if number % 10 == 9:
            record(simulation.engine.abort(0, rng.randrange(number)))
        for _ in range(rng.randrange(3)):
            record(simulation.engine.step())
    while simulation.engine.has_work:
        record(simulation.engine.step())
    assert simulation.scheduler.num_preemptions > 0
    return digests


def fields_of_messages() -> dict[str, list[str]]:
    kinds = {*get_args(ToWorker), *get_args(ToGateway)}
    return {kind.__name__: list(kind.__struct_fields__) for kind in kinds}


def names_of_metrics() -> list[str]:
    folders = (ROOT / "telemetry", ROOT / "workers" / "observe")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted({name for path in files for name in METRIC.findall(path.read_text())})


def recorded_now(stored: StoredModels) -> Recorded:
    return Recorded(
        served_tokens(stored), simulated_frames(), fields_of_messages(), names_of_metrics()
    )


def write(recorded: Recorded) -> None:
    """Writes one line for each list, so that a difference can be read."""
    text = msgspec.json.encode(recorded, order="sorted").decode()
    RECORD.write_text(text.replace("],", "],\n") + "\n")


def read() -> Recorded:
    return msgspec.json.decode(RECORD.read_bytes(), type=Recorded)
