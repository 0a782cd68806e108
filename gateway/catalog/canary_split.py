"""Splits the requests of a canary: a caller gets the same version as long as the canary lasts."""

from __future__ import annotations

import hashlib

from store.records import Alias


def pick_version(alias: Alias, subject: str) -> int:
    """Returns one of the alias's versions by weight, chosen by `subject` alone.

    Versions other than the stable one take the low end in order, so that a version whose weight is
    raised keeps its callers.
    """
    if alias.canary is None:
        return alias.version
    point = _draw(alias, max(alias.canary), subject) * sum(alias.canary.values()) >> 64
    for version, weight in sorted(alias.canary.items()):
        if version == alias.version:
            continue
        point -= weight
        if point < 0:
            return version
    return alias.version


def _draw(alias: Alias, newest: int, subject: str) -> int:
    """Returns a uniform number in [0, 2^64). The newest version is part of the hash, because
    otherwise the same callers would get every canary."""
    digest = hashlib.sha256()
    fields = {"t": alias.tenant_id, "n": alias.name, "a": alias.alias, "v": newest, "s": subject}
    for tag, value in fields.items():
        encoded = str(value).encode()
        digest.update(b"%s%d:%s" % (tag.encode(), len(encoded), encoded))
    return int.from_bytes(digest.digest()[:8])
