"""`loraplex bench` against a gateway with a scripted worker, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loraplex.api import endpoint
from loraplex.commands.bench import bench_command
from loraplex.errors import ApiFailure, BadSettings
from loraplex.load import loops
from loraplex.load.client import Call, Client, Outcome
from loraplex.load.figures import Percentiles, Targets, summarise
from loraplex.load.loops import closed_loop, open_loop
from loraplex.settings import Settings
from tests.gateway.scripts import say
from tests.gateway.service import Service, make_store
from tests.loraplex.roles.test_management import make_certificate

TEXT = "hello"
NUM_OUTPUT = len(TEXT) + 1
"""With the end of the turn."""
SHORT = ("--model", "tiny", "--prompt-tokens", "4")
CALL = Call("all", "key", "/completions", b"{}")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(make_store(tmp_path_factory.mktemp("store")))
    service.start()
    service.worker.script = say(TEXT)
    yield service
    service.stop()


def bench(service: Service, *arguments: str, **environment: str) -> Result:
    known = {"LORAPLEX_KEY": service.keys.acme, "LORAPLEX_DATA_DIR": "/nonexistent"}
    command = ["--url", service.url, *arguments]
    return CliRunner().invoke(bench_command, command, env=known | environment)


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_a_closed_loop_is_told_as_it_was(service: Service) -> None:
    before = len(service.worker.requests)
    found = told(bench(service, *SHORT, "--requests", "20", "--concurrency", "4", "--json"))
    assert len(service.worker.requests) == before + 21, "one goes ahead"
    figures = found["all"]
    assert (figures["requests"], figures["completed"]) == (20, 20)
    assert figures["output_tokens"] == 20 * NUM_OUTPUT
    assert figures["output_per_s"] == pytest.approx(20 * NUM_OUTPUT / found["seconds"])
    ttft, e2e = figures["ttft_ms"], figures["e2e_ms"]
    assert 0 < ttft["p50"] <= ttft["p90"] <= ttft["p99"] < e2e["p99"]
    assert figures["itl_ms"]["p50"] < e2e["p50"] - ttft["p50"] < found["seconds"] * 1e3
    assert figures["goodput_per_s"] is None and found["failures"] == []


def test_an_open_loop_has_figures_for_each_class(service: Service) -> None:
    classes = ("--class", "gold=GOLD", "--class", "bulk=BULK")
    keys = {"GOLD": service.keys.acme, "BULK": service.keys.globex}
    load = ("--rate", "200", "--requests", "12", "--ttft-target", "1e-6", "--itl-target", "1e6")
    found = told(bench(service, *SHORT, *classes, *load, "--json", **keys))
    assert [found["classes"][name]["requests"] for name in ("gold", "bulk")] == [6, 6]
    assert found["all"]["completed"] == 12
    assert found["all"]["goodput_per_s"] == 0, "no answer keeps the first target"
    assert not any(key in json.dumps(found) for key in keys.values())


def test_a_duration_bounds_the_load(service: Service) -> None:
    found = told(bench(service, *SHORT, "--rate", "100", "--duration", "0.3", "--json"))
    assert 5 < found["all"]["requests"] < 80


def test_models_are_asked_by_their_popularity(service: Service) -> None:
    before = len(service.worker.requests)
    models = ("--model", "support-bot", "--model", "support-bot@staging", "--zipf", "3")
    assert told(bench(service, *models, "--prompt-tokens", "4", "--requests", "60", "--json"))
    digests = [request.adapter.digest for request in service.worker.requests[before:]]
    numbers = [digests.count(f"ten_acme-support-bot-{version}") for version in (7, 3)]
    assert sum(numbers) == 61
    assert 40 < numbers[0] < 61, "8 of 9 are for the first"


def test_the_table_shows_failures_and_bars(service: Service) -> None:
    load = ("--model", "nope", "--requests", "20", "--seed", "1", "--plot", "--ttft-target", "1e6")
    result = bench(service, *SHORT, *load)
    assert result.exit_code == 0, result.output
    table = result.stdout
    assert "model_not_found" in table and "does not exist" in table
    for column in ("requests/s", "TTFT", "ITL", "e2e", "goodput/s"):
        assert column in table
    bars = [int(line.split()[3]) for line in table.splitlines() if line.endswith("█")]
    (row,) = [line.split() for line in table.splitlines() if line.startswith("all\t")]
    assert sum(bars) == 2 * (int(row[1]) - int(row[2])), "TTFT and e2e of whole answers"


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (("--model", "nope"), {}, "model_not_found"),
        (SHORT, {"LORAPLEX_KEY": "lpx_wrong"}, "invalid_api_key"),
        (SHORT, {"LORAPLEX_KEY": "lpx_é"}, "only printable ASCII"),
        ((*SHORT, "--url", "ftp://x"), {}, "not a URL of http or https"),
        ((*SHORT, "--url", "http://[::1"), {}, "is not a URL"),
        ((*SHORT, "--url", "http://127.0.0.1:1"), {}, "connect_failed"),
        ((*SHORT, "--url", f"http://{'a' * 80}"), {}, "connect_failed"),
        ((*SHORT, "--class", "x=ABSENT"), {}, "variable ABSENT is not set"),
    ],
)
def test_what_cannot_be_measured_is_named(
    service: Service, arguments: Sequence[str], environment: dict[str, str], expected: str
) -> None:
    result = bench(service, *arguments, **environment)
    assert isinstance(result.exception, ApiFailure | BadSettings)
    assert expected in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rate", "1", "--concurrency", "1"),
        ("--rate", "nan"),
        ("--rate", "1e9"),
        ("--requests", "100000000"),
        ("--duration", "inf"),
        ("--class", "all=KEY"),
        ("--plot", "--json"),
    ],
)
def test_a_load_without_sense_or_bound_is_refused(
    service: Service, arguments: Sequence[str]
) -> None:
    before = len(service.worker.requests)
    assert bench(service, *SHORT, *arguments).exit_code == 2
    assert len(service.worker.requests) == before


def test_a_key_goes_to_its_own_server_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, url="http://ours", key="secret")
    assert endpoint(settings, None) == ("http://ours", "secret")
    assert endpoint(settings, "http://ours/") == ("http://ours", "secret")
    assert endpoint(settings, "http://theirs") == ("http://theirs", None)
    alone = Settings(data_dir=tmp_path, key="secret")
    assert endpoint(alone, "http://theirs") == ("http://theirs", "secret")


def test_figures_of_known_times() -> None:
    """Two answers of three tokens, one twice as slow; a refusal."""
    fast, slow, refused = (Outcome(CALL.group, 10.0) for _ in range(3))
    fast.arrivals_s.extend([10.1, 10.2, 10.3])
    slow.arrivals_s.extend([10.2, 10.4, 10.6])
    for outcome, ended_s in ((fast, 10.5), (slow, 11.0), (refused, 10.0)):
        outcome.ended_s, outcome.num_prompt, outcome.num_output = ended_s, 5, 3
    refused.fail("rate_limit_exceeded", "later")
    refused.fail("stream_cut", "which is not why")
    outcomes = [fast, slow, refused]
    figures = summarise(outcomes, 2.0, Targets(ttft_ms=150))
    assert (figures.requests, figures.completed, figures.output_tokens) == (3, 2, 6)
    assert (figures.output_per_s, figures.total_per_s) == (3.0, 8.0)
    assert figures.ttft_ms is not None and figures.itl_ms is not None
    assert figures.ttft_ms.p50 == pytest.approx(150)
    assert figures.itl_ms.p50 == pytest.approx(150)
    assert figures.e2e_ms == Percentiles(*map(pytest.approx, (750, 950, 995)))
    assert figures.goodput_per_s == 0.5
    assert figures.good_share == pytest.approx(1 / 3)
    assert summarise(outcomes, 2.0, Targets(itl_ms=150)).goodput_per_s == 0.5
    assert summarise(outcomes, 2.0, Targets(ttft_ms=300, itl_ms=300)).goodput_per_s == 1.0
    assert summarise([refused], 2.0).ttft_ms is None


HEAD = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
LONG = b"data: " + b" " * (1 << 20) + b"\n\n"
DONE = b"data: [DONE]\n\n"


def whole(body: bytes) -> bytes:
    return HEAD % len(body) + body


@asynccontextmanager
async def answering(
    *answers: bytes, tls: ssl.SSLContext | None = None, until: asyncio.Event | None = None
) -> AsyncGenerator[tuple[str, list[int]]]:
    """A server's URL, and how many requests each of its connections brought. It answers with these
    in their order, once `until` is set, and closes a connection after a request that is left
    without."""
    left, counts, serving = list(answers), list[int](), list[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(counts)
        counts.append(0)
        while await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                assert line
            await reader.readexactly(len(CALL.body))
            counts[place] += 1
            if not left or not (answer := left.pop(0)):
                return
            if until is not None:
                await until.wait()
            writer.write(answer)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        try:
            await serve(reader, writer)
        except ConnectionError:
            pass  # a client that has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}", counts
        await asyncio.gather(*serving)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (whole(EVENT + DONE), ""),
        (whole(EVENT), "stream_cut"),
        (HEAD % 1000 + EVENT, "timeout"),
        (b"what?\r\n\r\n", "bad_answer"),
        (whole(b"data: {]\n\n"), "bad_answer"),
        (whole(LONG[:-2]), "bad_answer"),
        (whole(b'data: {"error":{"message":"no","code":"overloaded"}}\n\n'), "overloaded"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 2\r\n\r\nno", "http_502"),
        (b"", "connection_lost"),
    ],
)
async def test_an_answer_that_is_not_whole_has_its_error(answer: bytes, error: str) -> None:
    timeout_s = 0.5 if error == "timeout" else 60
    async with answering(answer) as (url, _), Client(url, timeout_s=timeout_s) as client:
        outcome = await client.send(CALL)
    assert outcome.error == error
    assert outcome.ended_s >= outcome.begun_s


async def test_connections_are_kept_and_made_again() -> None:
    good = whole(EVENT + EVENT + DONE)
    async with (
        answering(good, good, b"", good) as (url, counts),
        Client(url, timeout_s=60) as client,
    ):
        outcomes = [await client.send(CALL) for _ in range(3)]
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert [outcome.num_output for outcome in outcomes] == [2] * 3, "counted, without a usage"
    assert counts == [3, 1], "the third was closed and sent once more"


async def test_a_certificate_that_is_not_trusted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with answering(whole(EVENT + DONE), tls=tls) as (url, _):
        async with Client(url, timeout_s=60) as client:
            assert (await client.send(CALL)).error == "connect_failed"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with Client(url, timeout_s=60) as client:
            assert (await client.send(CALL)).error == ""


async def test_an_open_loop_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers nothing before all requests are due. Requests above the bound are
    reported and not sent."""
    monkeypatch.setattr(loops, "MAX_OPEN", 3)
    outcomes: list[Outcome] = []
    all_due = asyncio.Event()

    def end(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 7:
            all_due.set()

    good = repeat(whole(EVENT + DONE), 3)
    async with (
        answering(*good, until=all_due) as (url, counts),
        Client(url, timeout_s=60) as client,
    ):
        await open_loop(client, iter([CALL] * 10), 1000.0, end, rng=random.Random(0))
    assert [outcome.error for outcome in outcomes] == ["not_sent"] * 7 + [""] * 3
    assert counts == [1, 1, 1]


async def test_a_closed_loop_ends_with_its_time() -> None:
    outcomes: list[Outcome] = []
    good = repeat(whole(EVENT + DONE), 100_000)
    async with answering(*good) as (url, counts), Client(url, timeout_s=60) as client:
        await closed_loop(client, repeat(CALL), 2, outcomes.append, seconds=0.1)
    assert 2 <= len(outcomes) == sum(counts) < 100_000
    assert len(counts) == 2
