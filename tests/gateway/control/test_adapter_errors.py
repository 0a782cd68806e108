"""What workers could not load is in Postgres as long as they say so."""

from __future__ import annotations

from tests.gateway.live import Live
from tests.waiting import eventually
from workers.wire.status import AdapterStatus


def status(digit: str, error: str = "", message: str = "") -> AdapterStatus:
    return AdapterStatus(digit * 64, "store", 0, 0, False, error, message)


async def faults(live: Live) -> dict[tuple[str, str], tuple[str, str]]:
    rows = await live.fetch("SELECT * FROM adapter_faults")
    return {(r["worker"], r["digest"][0]): (r["code"], r["message"]) for r in rows}


async def test_faults_come_change_and_go(live: Live) -> None:
    async def are(wanted: dict[str, tuple[str, str]]) -> bool:
        return await faults(live) == {("scripted", digit): said for digit, said in wanted.items()}

    async with live.worker, live.gateway():
        live.worker.adapters = [status("a"), status("b", "corrupt", "one"), status("c", "gone", "")]
        live.worker.report()
        await eventually(lambda: are({"b": ("corrupt", "one"), "c": ("gone", "")}))
        live.worker.adapters = [status("a"), status("b", "corrupt", "two"), status("c")]
        live.worker.report()
        await eventually(lambda: are({"b": ("corrupt", "two")}))
        live.worker.adapters = []
        live.worker.report()
        await eventually(lambda: are({}))


async def test_nothing_is_left_of_workers_that_were_replaced(live: Live) -> None:
    """Whoever wrote it: an earlier gateway may have."""
    async with live.database.transaction() as connection:
        for worker, digit in (("worker-of-old", "a"), ("scripted", "b"), ("scripted", "c")):
            await connection.execute(
                "INSERT INTO adapter_faults (digest, worker, code, message)"
                " VALUES ($1, $2, 'corrupt', '')",
                *(digit * 64, worker),
            )
    live.worker.adapters = [status("c", "corrupt")]

    async def only_what_is_so() -> bool:
        return await faults(live) == {("scripted", "c"): ("corrupt", "")}

    async with live.worker, live.gateway() as plane:
        await eventually(lambda: plane.gateway.fleet.why_not_serving() is None)
        live.worker.report()
        await eventually(only_what_is_so)
