"""Terms of the service classes."""

from __future__ import annotations

from typing import NamedTuple

from workers.wire.protocol import ServiceClass


class Terms(NamedTuple):
    """Terms of a service class.

    share: fraction of the device that the class gets, relative to other classes with work. ttft_s:
    promised seconds until the first token. tpot_s: promised seconds between later tokens.
    gap_factor: maximum time between two tokens, as a multiple of `max_token_gap_s`.
    """

    share: float
    ttft_s: float
    tpot_s: float
    gap_factor: float


TERMS = {
    ServiceClass.INTERACTIVE: Terms(0.6, 1.0, 0.1, 1),
    ServiceClass.STANDARD: Terms(0.3, 4.0, 0.2, 1),
    ServiceClass.BATCH: Terms(0.1, 60.0, 2.0, 8),
}
