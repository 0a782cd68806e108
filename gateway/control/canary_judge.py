"""Rolls back a canary whose new version fails more often, or is slower, than the stable one. A
control task of the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gateway.catalog.catalog import Catalog
from gateway.metering.canary_outcomes import Outcomes, Tally, median_ms
from store.database import Connection, Database
from store.periodic import repeat
from store.queries import from_row, sql
from store.records import Alias

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 1.0
JUDGE_INTERVAL_S = 2.0
PRUNE_INTERVAL_S = 600.0


def judge(alias: Alias, seen: Mapping[int, Tally]) -> str | None:
    """Returns the reason, with figures, why the alias's canary must be rolled back. Returns None if
    the canary may continue.

    `seen` has the outcomes of each version within the policy's window.
    """
    policy, stable = alias.policy, seen.get(alias.version)
    if policy is None or stable is None:
        return None
    for version in sorted((alias.canary or {}).keys() - {alias.version}):
        canary = seen.get(version, Tally())
        fewest = min(canary.requests, stable.requests)
        if (
            fewest >= policy.min_requests
            and canary.error_rate > stable.error_rate + policy.max_error_rate
        ):
            return (
                f"version {version} failed {_share(canary)}, version {alias.version} "
                f"{_share(stable)} in the last {policy.window_s} s"
            )
        fewest = min(sum(canary.ttft), sum(stable.ttft))
        if fewest >= policy.min_requests:
            slow, usual = median_ms(canary.ttft), median_ms(stable.ttft)
            if slow > usual * policy.max_ttft_ratio:
                return (
                    f"version {version} took {slow:.3g} ms to the first token (median of "
                    f"{sum(canary.ttft)}), version {alias.version} {usual:.3g} ms (of "
                    f"{sum(stable.ttft)}) in the last {policy.window_s} s"
                )
    return None


def _share(tally: Tally) -> str:
    return f"{tally.errors} of {tally.requests} requests ({tally.error_rate:.1%})"


class CanaryJudge:
    """Task that writes the outcomes of this gateway's requests to the database, and rolls back
    canaries by the outcomes of all gateways."""

    def __init__(
        self, database: Database, gateway_id: str, catalog: Catalog, outcomes: Outcomes
    ) -> None:
        self._database = database
        self._id = gateway_id
        self._catalog = catalog
        self._outcomes = outcomes

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for what, work, interval_s in (
                ("outcomes are not written", self._write, WRITE_INTERVAL_S),
                ("canaries are not judged", self._judge_all, JUDGE_INTERVAL_S),
                ("old outcomes are not removed", self._prune, PRUNE_INTERVAL_S),
            ):
                tasks.create_task(repeat(what, work, interval_s))

    async def _write(self) -> None:
        await self._outcomes.write(self._database, self._id)

    async def _judge_all(self) -> None:
        judged = list(self._catalog.view.judged()) if self._catalog.view is not None else []
        if not judged:
            return
        seen: dict[int | None, dict[int, Tally]] = {alias.change: {} for alias in judged}
        windows = [alias.policy.window_s for alias in judged if alias.policy is not None]
        async with self._database.acquire() as connection:
            for row in await connection.fetch(sql["outcomes_of"], list(seen), windows):
                seen[row["change"]][row["version"]] = from_row(Tally, row)
            for alias in judged:
                if reason := judge(alias, seen[alias.change]):
                    await self._roll_back(connection, alias, reason)

    async def _roll_back(self, connection: Connection, alias: Alias, reason: str) -> None:
        where = (alias.tenant_id, alias.name, alias.alias)
        move = (alias.version, reason, alias.change)
        # The query returns null if another gateway or an operator has changed the alias first.
        if await connection.fetchval(sql["canary_roll_back"], *where, *move):
            log.warning("%s: %s@%s rolled back: %s", *where, reason)

    async def _prune(self) -> None:
        async with self._database.acquire() as connection:
            await connection.execute(sql["outcomes_prune"])
