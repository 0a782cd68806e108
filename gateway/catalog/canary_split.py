"""Splits requests between the versions of a canary. A caller gets the same version as long as the
canary's weights do not change."""

from __future__ import annotations

import hashlib

from store.records import Alias


def pick_version(alias: Alias, subject: str) -> int:
    """Returns the version that a caller gets. The versions of a canary are chosen by weight, and
    `subject`, which identifies the caller, alone decides which.

    The range of hashes is divided in proportion to the weights. The versions other than the stable
    one take its beginning, in the order of their numbers, so that a version whose weight is raised
    keeps its callers.
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
    """Returns a hash that is uniform in [0, 2^64). The newest version is part of the hashed text,
    because otherwise the same callers would get the new version in every canary."""
    digest = hashlib.sha256()
    fields = {"t": alias.tenant_id, "n": alias.name, "a": alias.alias, "v": newest, "s": subject}
    for tag, value in fields.items():
        encoded = str(value).encode()
        digest.update(b"%s%d:%s" % (tag.encode(), len(encoded), encoded))
    return int.from_bytes(digest.digest()[:8])
