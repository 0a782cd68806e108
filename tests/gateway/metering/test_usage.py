"""One row a request, whatever ends it, on the disk before the answer ends."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from gateway.metering.usage_loader import AT_ONCE, FIRST_PAUSE_S, UsageLoader, UsageRecord
from gateway.metering.wal import WriteAheadLog
from gateway.metering.wal_files import frame, read_frames
from store.queries import sql
from tests.gateway.live import GatewayPlane, Live
from tests.scripted_worker import Reply
from tests.waiting import eventually
from workers.wire.protocol import ErrorCode, Generate

SECRET = "correct horse battery staple"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def rows(live: Live, count: int) -> list[Any]:
    """All there are, when there are so many."""

    async def are_there() -> bool:
        return len(await live.fetch("SELECT 1 FROM usage")) >= count

    await eventually(are_there)
    found = await live.fetch("SELECT * FROM usage ORDER BY admitted_at")
    assert len(found) == count
    return found


def encoded(row: Any, **changes: Any) -> bytes:
    """The record of a row, as a gateway writes it."""
    fields: dict[str, Any] = {n: row[n] for n in UsageRecord.__struct_fields__ if n in row}
    fields |= {"admitted_at": row["admitted_at"].timestamp(), **changes}
    return msgspec.msgpack.encode(UsageRecord(**fields))


def endless(_: Generate) -> Reply:
    return Reply([65], never_ends=True)


async def test_a_row_says_all_but_what_was_said(live: Live) -> None:
    live.worker.script = lambda _: Reply([65, 66, 67], num_cached_tokens=2)
    await live.make_ready("a")
    async with live.worker, live.gateway("gateway-1") as plane:
        plane.client.headers["traceparent"] = f"00-{TRACE}-00f067aa0ba902b7-01"
        answer = await plane.complete(prompt=SECRET, max_tokens=8, user=SECRET)
        (row,) = await rows(live, 1)
    usage = answer.json()["usage"]
    assert row["request_id"] == answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{row['request_id']}"
    assert (row["tenant_id"], row["key_id"]) == (live.tenant_id, live.key[4:16])
    assert (row["model"], row["adapter"], row["adapter_version"]) == ("tiny", "bot", 1)
    assert row["prompt_tokens"] == usage["prompt_tokens"] > 2
    assert (row["cached_tokens"], row["completion_tokens"]) == (2, 3)
    assert (row["finish_reasons"], row["status"]) == (["stop"], "completed")
    assert (row["worker"], row["trace_id"]) == (answer.headers["loraplex-worker"], TRACE)
    assert 0 < row["ttft_ms"] <= row["duration_ms"]
    assert row["day"] == row["admitted_at"].date()
    for secret in (SECRET, live.key):
        assert secret not in str(dict(row))
        for path in live.wal.rglob("*"):
            assert path.is_dir() or secret.encode() not in path.read_bytes()


async def test_the_base_alone_has_no_adapter(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        plane.client.headers["traceparent"] = f"00-{TRACE}-00f067aa0ba902b7-01-no-trace"
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
    assert (row["model"], row["adapter"], row["adapter_version"]) == ("tiny", None, None)
    assert row["trace_id"] is None


async def test_a_segment_may_have_more_than_one_load(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
        for i in range(AT_ONCE + 2):
            plane.gateway.wal.append(encoded(row, request_id=str(i)))
        await rows(live, AT_ONCE + 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_counts_once_however_many_choices(live: Live, stream: bool) -> None:
    async with live.worker, live.gateway() as plane:
        fields = {"prompt": ["Hi", "Hello"], "n": 3, "max_tokens": 3, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        answer = await plane.complete("tiny", **fields)
        assert answer.status_code == 200
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 18)
    assert len(row["finish_reasons"]) == 6
    told = '"prompt_tokens":7,"completion_tokens":18,'
    assert told in answer.text.replace(" ", "")


async def test_a_client_that_leaves_pays_for_what_was_generated(live: Live) -> None:
    live.worker.script, live.worker.step_s = endless, 0.01
    async with live.worker, live.gateway() as plane:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 500, "stream": True}
        async with plane.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            seen = 0
            while seen < 5:
                seen += (await anext(lines)).startswith("data: ")
        (row,) = await rows(live, 1)
    assert (row["status"], row["finish_reasons"]) == ("cancelled", [None])
    assert 5 <= row["completion_tokens"] < 500
    assert row["ttft_ms"] + 30 < row["duration_ms"]


@pytest.mark.parametrize(("stream", "num_tokens"), [(False, 0), (True, 0), (False, 2), (True, 2)])
async def test_one_that_fails_is_recorded(live: Live, stream: bool, num_tokens: int) -> None:
    live.worker.script = lambda _: Reply([65] * num_tokens, failure=ErrorCode.INTERNAL)
    async with live.worker, live.gateway() as plane:
        answer = await plane.complete("tiny", max_tokens=9, stream=stream)
        assert answer.status_code == (200 if stream and num_tokens else 500)
        assert "internal_error" in answer.text and "[DONE]" not in answer.text
        (row,) = await rows(live, 1)
    assert (row["status"], row["completion_tokens"]) == ("failed", num_tokens)


async def test_one_that_was_not_admitted_has_no_row(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        assert (await plane.complete("nothing")).status_code == 404
        assert (await plane.complete("tiny", prompt="x" * 999)).status_code == 400
        live.worker.script = lambda _: Reply([], failure=ErrorCode.OVERLOADED)
        assert (await plane.complete("tiny")).status_code == 503
        live.worker.script = lambda _: Reply([65])
        assert (await plane.complete("tiny")).status_code == 200
        (row,) = await rows(live, 1)
    assert row["status"] == "completed"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.PROMPT_TOO_LONG, 400),
        (ErrorCode.ADAPTER_UNAVAILABLE, 503),
        (ErrorCode.EXPIRED, 504),
    ],
)
async def test_what_no_worker_has_begun_costs_nothing(
    live: Live, code: ErrorCode, status: int
) -> None:
    live.worker.script = lambda _: Reply([], failure=code)
    async with live.worker, live.gateway() as plane:
        plane.client.headers["x-request-timeout"] = "0.5"
        assert (await plane.complete("tiny")).status_code == status
    assert not await live.fetch("SELECT 1 FROM usage")


async def test_one_prompt_that_expires_does_not_make_the_others_free(live: Live) -> None:
    """Before the first output: the others have come as far as their workers told."""

    def one_expires(request: Generate) -> Reply:
        if len(request.tokens) == 2:
            return Reply([], failure=ErrorCode.EXPIRED)
        return Reply([], idle_steps=1 << 30, progress=(4, 1))

    live.worker.script = one_expires
    async with live.worker, live.gateway() as plane:
        plane.client.headers["x-request-timeout"] = "0.3"
        answer = await plane.complete("tiny", prompt=["Hi", "Hello"])
        assert answer.status_code == 504
        (row,) = await rows(live, 1)
    assert (row["status"], row["completion_tokens"]) == ("failed", 0)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (4, 1)


@pytest.mark.parametrize("reached", [0, 128])
async def test_one_that_expires_is_billed_the_positions_reached(live: Live, reached: int) -> None:
    progress = (reached, 16) if reached else None
    live.worker.script = lambda _: Reply([], idle_steps=1 << 30, progress=progress)
    await live.price(input=10, cached_input=1, output=100)
    async with live.worker, live.gateway() as plane:
        plane.client.headers["x-request-timeout"] = "0.5"
        assert (await plane.complete("tiny", prompt=[5] * 500)).status_code == 504
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["status"]) == (reached, "failed")
    assert row["cost"] == ((128 - 16) * 10 + 16 if reached else 0)


async def test_a_client_that_leaves_early_is_billed_the_positions_reached(live: Live) -> None:
    """Its worker has the last word, after the client has left."""
    live.worker.script = lambda _: Reply([], idle_steps=1 << 30, last_progress=(3, 0))
    async with live.worker, live.gateway() as plane:
        asked = asyncio.create_task(plane.complete("tiny", prompt="Hello"))
        await eventually(lambda: live.worker.num_running)
        asked.cancel()
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["status"]) == (3, "cancelled")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.OVERLOADED, 503),
        (ErrorCode.PROMPT_TOO_LONG, 400),
        (ErrorCode.ADAPTER_UNAVAILABLE, 503),
        (ErrorCode.EXPIRED, 504),
        (None, 504),
    ],
)
async def test_a_refused_prompt_does_not_make_free_what_a_long_step_computes_of_the_others(
    live: Live,
    code: ErrorCode | None,
    status: int,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker reports the step when the client has long been answered. Without a code the
    request expires at the gateway."""

    def one_is_refused(request: Generate) -> Reply:
        if len(request.tokens) == 2 and code is not None:
            return Reply([], failure=code)
        return Reply([], idle_steps=1 << 30, last_progress=(len(request.tokens), 1))

    monkeypatch.setattr("gateway.http.streaming.ANSWER_WAIT_S", 0.05)
    live.worker.script, live.worker.abort_s = one_is_refused, 1.0
    await live.price(input=10, cached_input=1, output=100)
    async with live.worker, live.gateway() as plane:
        await live.limit(tokens_per_day=1000)
        await eventually(lambda: plane.gateway.catalog.current.limits_of(live.tenant_id, ""))
        plane.client.headers["x-request-timeout"] = "0.5" if status == 504 else "20"
        answer = await plane.complete("tiny", prompt=["Hi", "Hello", "Bye"], stream=stream)
        assert answer.status_code == status
        assert plane.gateway.admission.num_open == 1
        (row,) = await rows(live, 1)
        reached = 8 if code else 10
        assert (row["prompt_tokens"], row["completion_tokens"]) == (reached, 0)
        assert row["metered_tokens"] == reached
        num_cached = 2 if code else 3
        assert row["cost"] == (reached - num_cached) * 10 + num_cached
        assert plane.gateway.admission.num_open == 0


async def test_a_client_that_leaves_during_a_long_step_is_billed_what_it_computes(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.streaming.ANSWER_WAIT_S", 0.05)
    live.worker.script = lambda _: Reply([], idle_steps=1 << 30, last_progress=(5, 0))
    live.worker.abort_s = 0.5
    async with live.worker, live.gateway() as plane:
        asked = asyncio.create_task(plane.complete("tiny", prompt="Hello"))
        await eventually(lambda: live.worker.num_running)
        asked.cancel()
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["status"]) == (5, "cancelled")


async def test_a_worker_that_is_lost_during_the_last_step_ends_the_wait_for_it(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had reported is billed."""
    monkeypatch.setattr("gateway.http.streaming.ANSWER_WAIT_S", 0.05)
    live.worker.script = lambda _: Reply([], idle_steps=1 << 30, progress=(2, 0))
    live.worker.abort_s = 3600
    async with live.gateway() as plane:
        async with live.worker:
            await eventually(lambda: plane.gateway.fleet.why_not_serving() is None)
            plane.client.headers["x-request-timeout"] = "0.5"
            assert (await plane.complete("tiny", prompt="Hello")).status_code == 504
            assert not await live.fetch("SELECT FROM usage")
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["status"]) == (2, "failed")


async def test_a_second_choice_and_a_second_worker_are_not_billed_again(live: Live) -> None:
    """What the first computed, the second may find or compute: it was billed."""
    replies = [
        Reply([], progress=(2, 1), failure=ErrorCode.MODEL_UNKNOWN),
        Reply([65], progress=(5, 4)),
        Reply([65], num_cached_tokens=5),
    ]
    live.worker.script = lambda _: replies.pop(0)
    async with live.worker, live.gateway() as plane:
        answer = await plane.complete("tiny", prompt="Hello", n=2, echo=True, logprobs=0)
        assert answer.status_code == 200 and not replies
        (row,) = await rows(live, 1)
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (5, 3, 2)


async def test_what_a_worker_has_begun_is_paid_for_although_it_then_does_not_fit(
    live: Live,
) -> None:
    live.worker.script = lambda _: Reply([65, 66], failure=ErrorCode.PROMPT_TOO_LONG)
    async with live.worker, live.gateway() as plane:
        assert (await plane.complete("tiny", max_tokens=9)).status_code == 400
        (row,) = await rows(live, 1)
    assert (row["status"], row["completion_tokens"]) == ("failed", 2)


async def test_what_no_worker_was_sent_costs_nothing(live: Live) -> None:
    """The only one goes while the request waits for its limit, and no other comes."""
    async with live.gateway() as plane:
        gateway = plane.gateway
        gateway.failover.wait_s = 0.2
        await live.limit(tokens_per_day=1000)
        await eventually(lambda: gateway.catalog.current.limits_of(live.tenant_id, ""))
        async with live.database.transaction() as elsewhere:
            await elsewhere.execute("SELECT FROM quotas FOR UPDATE")
            async with live.worker:
                await eventually(lambda: gateway.fleet.why_not_serving() is None)
                asked = asyncio.create_task(plane.complete("tiny"))
                await eventually(lambda: live.fetch("SELECT FROM pg_locks WHERE NOT granted"))
            await eventually(lambda: gateway.fleet.why_not_serving() is not None)
        assert (await asked).json()["error"]["code"] == "no_worker"
    assert not await live.fetch("SELECT 1 FROM usage")


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.EXPIRED])
async def test_a_choice_that_is_refused_when_another_has_begun_waits_for_room(
    live: Live, code: ErrorCode
) -> None:
    """The answer goes on, and is billed, as one: the deadline is of its first token."""
    refusals = [Reply([], failure=code, idle_steps=100)]

    def refuse_once(request: Generate) -> Reply:
        return refusals.pop() if request.params.choice and refusals else Reply([65])

    live.worker.script = refuse_once
    async with live.worker, live.gateway() as plane:
        plane.client.headers["x-request-timeout"] = "2"
        answer = await plane.complete("tiny", n=2)
        assert answer.status_code == 200 and not refusals
        assert [choice["text"] for choice in answer.json()["choices"]] == ["b", "b"]
        (row,) = await rows(live, 1)
    assert (row["status"], row["completion_tokens"]) == ("completed", 2)


def hold_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is on the disk until the event is set."""
    may_sync = threading.Event()
    real = os.fdatasync

    def wait(file: int) -> None:
        assert may_sync.wait(20)
        real(file)

    monkeypatch.setattr(os, "fdatasync", wait)
    return may_sync


async def test_when_one_choice_fails_the_others_do_not_wait_for_the_disk(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_fails(request: Generate) -> Reply:
        return endless(request) if request.params.choice else Reply([], failure=ErrorCode.INTERNAL)

    live.worker.script, live.worker.step_s = one_fails, 0.05
    async with live.worker, live.gateway() as plane:
        may_sync = hold_disk(monkeypatch)
        asked = asyncio.create_task(plane.complete("tiny", n=2, max_tokens=500))
        await eventually(lambda: live.worker.aborted)
        assert not asked.done()
        may_sync.set()
        assert (await asked).status_code == 500


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_ends_when_the_disk_has_it(
    live: Live, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live.worker, live.gateway() as plane:
        may_sync = hold_disk(monkeypatch)
        asked = asyncio.create_task(plane.complete("tiny", stream=stream))
        done, _ = await asyncio.wait([asked], timeout=0.5)
        assert not done
        # Nor does anything else wait for the disk.
        assert (await plane.client.get("/livez")).status_code == 200
        may_sync.set()
        assert (await asked).status_code == 200
        await rows(live, 1)


async def test_a_disk_that_fails_ends_the_answer_and_refuses_the_next(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    async with live.worker, live.gateway() as plane:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", broken)
            streamed = await plane.complete("tiny", stream=True)
            assert "usage_unavailable" in streamed.text and "[DONE]" not in streamed.text
            refused = await plane.complete("tiny")
            assert refused.json()["error"]["code"] == "usage_unavailable"
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        await eventually(lambda: _serves(plane))
        await rows(live, 2)


async def readiness(plane: GatewayPlane) -> tuple[int, str]:
    answer = await plane.client.get("/readyz")
    return answer.status_code, answer.json().get("reason", "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_gateway_that_cannot_write_usage_is_not_ready(
    live: Live, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It finds out without a request, says why, and is ready again when the disk is."""

    def broken(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("gateway.app.WAL_CHECK_S", 0.01)
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: plane.serves("tiny"))
        assert await readiness(plane) == (200, "")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", broken)
            await eventually(lambda: plane.gateway.wal.failure)
            reason = f"the usage log cannot be written: {os.strerror(number)}"
            assert await readiness(plane) == (503, reason)
            refused = await plane.complete("tiny")
            assert refused.json()["error"]["code"] == "usage_unavailable"
        await eventually(lambda: plane.gateway.wal.failure is None)
        assert await readiness(plane) == (200, "")


async def _serves(plane: GatewayPlane) -> bool:
    return (await plane.client.get("/livez")).status_code == 200 and (
        plane.gateway.wal.failure is None and await plane.serves("tiny")
    )


async def test_without_postgres_the_log_grows_and_then_refuses(live: Live) -> None:
    live.max_wal_bytes = 2000
    async with live.worker, live.gateway() as plane:
        async with live.postgres_away():
            taken = 0
            while (answer := await plane.complete("tiny")).status_code == 200:
                taken += 1
                assert taken < 100
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "usage_spool_full"
            assert "the usage log is full" in (plane.gateway.why_not_ready() or "")
            assert answer.headers["retry-after"]
            assert taken > 5
            assert plane.gateway.wal.num_bytes >= 2000
            # Twice in one load would be charged twice.
            kept = [read_frames(path.read_bytes())[0] for path in live.wal.rglob("0*")]
            assert sum(map(len, kept)) == taken
        await eventually(lambda: plane.gateway.wal.num_bytes == 0)
        await rows(live, taken)
        assert await plane.serves("tiny")


async def test_a_clean_end_leaves_nothing_behind(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        for _ in range(3):
            await plane.complete("tiny")
    assert len(await live.fetch("SELECT 1 FROM usage")) == 3
    assert [path for path in live.wal.iterdir() if path.is_dir()] == []


async def test_what_comes_too_late_to_be_counted_is_told(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was counted before its day was dropped cannot be known."""
    await live.fetch(sql["usage_upkeep"], 3)
    async with live.worker, live.gateway() as plane:
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
        late = (datetime.now(UTC) - timedelta(days=10)).timestamp()
        plane.gateway.wal.append(encoded(row, request_id="late", admitted_at=late))
        await eventually(lambda: "1 requests of days that are no longer kept" in caplog.text)
        await eventually(lambda: plane.gateway.wal.num_bytes == 0)
        await rows(live, 1)


async def test_what_cannot_be_loaded_is_set_aside(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """It alone: the rest of its segment is in the ledger, and the next segments too."""
    async with live.worker, live.gateway() as plane:
        wal = plane.gateway.wal
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
        bad = [
            encoded(row, request_id="more-cached", cached_tokens=row["prompt_tokens"] + 1),
            b"\xc1 no record of ours",
            encoded(row, request_id="nul", trace_id="\0"),
        ]
        good = [encoded(row, request_id=str(i)) for i in range(4)]
        given = [good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3]]
        # Gathered in one batch, so that they are in one segment.
        for each in given:
            wal.append(each)
        await rows(live, 5)
        await eventually(lambda: wal.num_bytes == 0)
        (kept,) = live.wal.glob("*.set-aside")
        assert sorted(read_frames(kept.read_bytes())[0]) == sorted(bad)
        for refused in ("more-cached", "nul"):
            assert f"the usage of request {refused} is refused" in caplog.text
        await plane.complete("tiny")
        await rows(live, 6)
        assert [kept] == list(live.wal.glob("*.set-aside"))


async def test_what_a_disk_spoilt_is_set_aside_and_named(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """The records before and behind it are loaded: their requests were answered."""
    async with live.worker, live.gateway() as plane:
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
    frames = [frame(encoded(row, request_id=f"request-{i}")) for i in range(3)]
    frames[1] = frames[1][:-1] + b"!"
    folder = live.wal / "gateway-0"
    folder.mkdir()
    (folder / "0000000001").write_bytes(b"".join(frames))
    async with live.worker, live.gateway():
        await rows(live, 3)
        await eventually(lambda: not folder.exists())
    (kept,) = live.wal.glob("*.set-aside")
    assert kept.read_bytes() == frames[1]
    assert "requests: request-1\n" in caplog.text


async def test_what_was_cut_off_is_set_aside_and_named(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """By a crash in the midst of a write, or from records whose requests were answered: the file
    does not tell which."""
    async with live.worker, live.gateway() as plane:
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
    ids = ["req_" + "0" * 32, "a" * 200, "c"]
    frames = [frame(encoded(row, request_id=each)) for each in ids]
    folder = live.wal / "gateway-0"
    folder.mkdir()
    cut = [frames[1][:-1], frames[2][:9]]
    (folder / "0000000001").write_bytes(frames[0] + cut[0])
    (folder / "0000000002").write_bytes(cut[1])
    # A file system may have left zeros behind the last that was synced.
    (folder / "0000000003").write_bytes(bytes(100))
    async with live.worker, live.gateway():
        await rows(live, 2)
        await eventually(lambda: not folder.exists())
    assert sorted(kept.read_bytes() for kept in live.wal.glob("*.set-aside")) == sorted(cut)
    told = [r.getMessage() for r in caplog.records if "cut off" in r.getMessage()]
    assert [line.rpartition("requests: ")[2] for line in told] == ["a" * 200, "none can be read"]


async def test_a_segment_that_lost_whole_records_says_so(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them is left to be read; how many bytes they were is known."""
    wal = WriteAheadLog(live.wal, "gateway-1")
    await wal.open()
    await wal.append(b"x" * 100).synced()
    (segment,) = await wal.on_thread(wal.files.seal)
    segment.write_bytes(b"")

    async def release(_: Sequence[str]) -> None: ...

    await UsageLoader(live.database, wal, release).load()
    assert f"{segment} has lost its last 108 bytes" in caplog.text
    await wal.close()


async def test_what_cannot_be_set_aside_waits_and_keeps_nothing_else(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that stays full: it is read again after a pause, and then after a longer one."""
    async with live.worker, live.gateway() as plane:
        await plane.complete("tiny")
        (row,) = await rows(live, 1)
    bad = frame(encoded(row, request_id="nul", trace_id="\0"))
    folder = live.wal / "gateway-0"
    folder.mkdir()
    (folder / "0000000001").write_bytes(bad)
    (folder / "0000000002").write_bytes(frame(encoded(row, request_id="good")))
    name = f"gateway-0-0000000001-{hashlib.sha256(bad).hexdigest()[:16]}.set-aside"
    (live.wal / name).symlink_to("/dev/full")
    wal = WriteAheadLog(live.wal, "gateway-1")
    await wal.open()
    released: list[str] = []

    async def release(owners: Sequence[str]) -> None:
        released.extend(owners)

    loader = UsageLoader(live.database, wal, release)

    async def num_told() -> int:
        for _ in range(3):
            await loader.load()
        return caplog.text.count("the usage of request nul is refused")

    assert await num_told() == 1
    await rows(live, 2)
    assert released == []
    await asyncio.sleep(FIRST_PAUSE_S)
    assert await num_told() == 2
    await asyncio.sleep(FIRST_PAUSE_S)
    assert await num_told() == 2
    (live.wal / name).unlink()
    await asyncio.sleep(FIRST_PAUSE_S)
    assert await num_told() == 3
    assert (live.wal / name).read_bytes() == bad
    assert (wal.num_bytes, released) == (0, ["gateway-0"])
    # Full again: the pause is the first one.
    (live.wal / name).unlink()
    (live.wal / name).symlink_to("/dev/full")
    folder.mkdir()
    (folder / "0000000001").write_bytes(bad)
    assert await num_told() == 4
    await asyncio.sleep(FIRST_PAUSE_S)
    assert await num_told() == 5
    await wal.close()
