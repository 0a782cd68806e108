"""Counts requests that are refused for their API key, and writes the counts to the audit log at
intervals, so that a flood of refused keys adds few entries and no request waits for the database.

Nothing of a refused key is written but the id of a key that exists and whose whole text was
presented.
"""

from __future__ import annotations

import hmac
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from store.database import Database
from store.periodic import repeat
from store.queries import fetch_all, sql
from store.records import ApiKey, hash_key, parse_key
from web.errors import Forbidden, Unauthenticated
from web.request_head import address_prefix, bearer_key, client_address, number_request

INTERVAL_S = 60.0
"""Seconds between writes."""
MAX_ENTRIES = 100
"""Maximum number of audit entries in a write. The last one has the sum of the groups that have no
entry of their own."""
MAX_ADDRESSES = 256
"""Maximum number of address prefixes that are counted apart between two writes. Requests from all
further prefixes are counted together."""
MAX_KEYS = 16
"""Maximum number of keys of an address prefix that are looked up in a write. Requests with further
keys are counted together."""
MANY = "many"
"""Name that stands for all address prefixes that are not counted apart."""


class Presented(NamedTuple):
    """What a request was refused for: the error's code and the key that it presented."""

    code: str
    key_id: str | None
    """Id in the text of the key. None if the text is malformed or its key is not looked up."""
    hash: bytes
    """Keyed hash of the whole text, to be compared with that of the key. Empty without `key_id`."""


class Group(NamedTuple):
    """Refused requests that share an audit entry."""

    prefix: str
    key: ApiKey | None
    """None if no such key exists."""
    reason: str


class Count(msgspec.Struct):
    """Number of refused requests, with the time, address and id of the first one."""

    number: int
    since: datetime
    address: str | None
    request_id: str | None

    def add(self, other: Count) -> None:
        self.number += other.number
        self.since = min(self.since, other.since)


class RefusedKeys:
    """Counts of one process since the last write. Used only on the event loop."""

    def __init__(self, process: str, pepper: bytes) -> None:
        """`process`: name of the process in the entries."""
        self._process = process
        self._pepper = pepper
        self._counts: dict[str, dict[Presented, Count]] = {}

    @contextmanager
    def noting(self, scope: Any, authorization: str | None) -> Generator[None]:
        """Counts a request if Unauthenticated or Forbidden is raised within, as `note` does."""
        try:
            yield
        except (Unauthenticated, Forbidden) as error:
            self.note(scope, authorization, error)
            raise

    def note(
        self, scope: Any, authorization: str | None, error: Unauthenticated | Forbidden
    ) -> None:
        """Counts a request that is refused for the key in its Authorization header. A request
        without a key is not counted."""
        text = bearer_key(authorization)
        if text is None:
            return
        number_request(scope)
        key_id = parse_key(text)
        hash = b"" if key_id is None else hash_key(text, self._pepper)
        address = client_address(scope)
        count = Count(1, datetime.now(UTC), address, scope["state"]["request_id"])
        self._add(address_prefix(address), Presented(str(error.code), key_id, hash), count)

    async def run(self, database: Database) -> None:
        """Writes the counts at intervals until cancelled."""
        what = "refused keys are not written to the audit log"
        await repeat(what, lambda: self.write(database), INTERVAL_S)

    async def write(self, database: Database) -> None:
        """Writes the counts to the audit log. If this fails, they are kept for the next write.
        Raises ApiError."""
        counts, self._counts = self._counts, {}
        if not counts:
            return
        shown = {each.key_id for own in counts.values() for each in own} - {None}
        try:
            async with database.transaction() as connection:
                found = await fetch_all(connection, ApiKey, "keys_shown", list(shown))
                groups = _grouped(counts, {key.id: key for key in found})
                entries = [self._entry(group, count) for group, count in _bounded(groups)]
                await connection.execute(sql["audit_refused_keys"], entries)
        except BaseException:
            for prefix, own in counts.items():
                for presented, count in own.items():
                    self._add(prefix, presented, count)
            raise

    def _add(self, prefix: str, presented: Presented, count: Count) -> None:
        """Adds to the counts, within their bounds."""
        if prefix not in self._counts and len(self._counts) >= MAX_ADDRESSES:
            prefix, count.address = MANY, None
        own = self._counts.setdefault(prefix, {})
        if presented not in own and len(own) >= MAX_KEYS:
            presented = Presented(presented.code, None, b"")
        if presented in own:
            own[presented].add(count)
        else:
            own[presented] = count

    def _entry(self, group: Group, count: Count) -> Mapping[str, Any]:
        return {
            "key_id": None if group.key is None else group.key.id,
            "tenant_id": None if group.key is None else group.key.tenant_id,
            "address": count.address,
            "request_id": count.request_id,
            "details": {
                "reason": group.reason,
                "requests": count.number,
                "since": count.since.isoformat(timespec="milliseconds"),
                "process": self._process,
            },
        }


def _grouped(
    counts: Mapping[str, Mapping[Presented, Count]], keys: Mapping[str, ApiKey]
) -> dict[Group, Count]:
    """Returns the counts by address prefix, key and reason. Takes a key from `keys` only if the
    request presented its whole text."""
    now, groups = datetime.now(UTC), dict[Group, Count]()
    for prefix, own in counts.items():
        for presented, count in own.items():
            key = keys.get(presented.key_id or "")
            if key is not None and not hmac.compare_digest(key.hash, presented.hash):
                key = None
            group = Group(prefix, key, _reason(presented.code, key, now))
            if group in groups:
                groups[group].add(count)
            else:
                # A copy, because the counts are kept if the write fails.
                groups[group] = msgspec.structs.replace(count)
    return groups


def _reason(code: str, key: ApiKey | None, now: datetime) -> str:
    if code != Unauthenticated.code:
        return code
    if key is None:
        return "unknown"
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    # The key may have been created a moment ago, or its tenant is deleted.
    return "not_yet_valid" if not key.is_live(now) else "not_served"


def _bounded(groups: Mapping[Group, Count]) -> Iterable[tuple[Group, Count]]:
    """Returns at most `MAX_ENTRIES` groups: first those of keys that exist, then those with the
    most requests. The last one is the sum of all others if there are more."""
    ordered = sorted(groups.items(), key=lambda each: (each[0].key is None, -each[1].number))
    if len(ordered) <= MAX_ENTRIES:
        return ordered
    kept, rest = ordered[: MAX_ENTRIES - 1], [count for _, count in ordered[MAX_ENTRIES - 1 :]]
    total = Count(0, rest[0].since, None, None)
    for count in rest:
        total.add(count)
    return [*kept, (Group(MANY, None, "various"), total)]
