"""Reasons why TLS peers are refused, and a rate-limited log of refusals."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

REPEAT_S = 600.0
"""Seconds after which the same refusal of the same peer is logged again."""
MAX_REMEMBERED = 256
"""Maximum number of remembered refusals. A refusal is identified by its peer and its reason."""
WINDOW_S = 60.0
MAX_LINES = 20
"""Maximum number of log lines in `WINDOW_S` seconds. Further refusals are only counted."""

UNKNOWN_AUTHORITY = "its certificate is not signed by the authority in transport_authority"
VERIFY_FAILURES = {
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: UNKNOWN_AUTHORITY,
    19: UNKNOWN_AUTHORITY,
    20: UNKNOWN_AUTHORITY,
    21: UNKNOWN_AUTHORITY,
    26: "its certificate is not meant for clients (extended key usage)",
}
"""Explanation, for the log, of each error code with which OpenSSL rejects a peer's certificate
(X509_V_ERR)."""
PLAIN_TEXT = "it speaks plain text, and this port speaks TLS"
SSL_FAILURES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has shown no certificate",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS 1.3",
    "HTTP_REQUEST": PLAIN_TEXT,
    "HTTPS_PROXY_REQUEST": PLAIN_TEXT,
    "WRONG_VERSION_NUMBER": PLAIN_TEXT,
}
"""Explanation, for the log, of each OpenSSL error that ends a TLS handshake (SSL_R), by name."""
LEFT = (
    "it closed the connection during the handshake. Perhaps it does not accept this worker's"
    " certificate, for its authority, dates or name; its own log says why"
)


def why_no_handshake(error: OSError) -> str:
    """Returns the reason why a TLS handshake failed, as text for the log."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=detail):
            return f"{VERIFY_FAILURES.get(code, 'its certificate is not accepted')} ({detail})"
        case ssl.SSLError(reason=str(reason)):
            words = reason.lower().replace("_", " ")
            if "ALERT" in reason:
                return f"it does not accept this worker's certificate or TLS ({words})"
            return SSL_FAILURES.get(reason, words)
        case _:
            # An error has no text if the peer closed the connection during the handshake.
            return str(error) or LEFT


class RefusalLog:
    """Log of refused peers, limited so that no peer can fill it. The same refusal of the same peer
    is logged again only after `REPEAT_S` seconds, and at most `MAX_LINES` lines are logged in
    `WINDOW_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}
        """Time of the last log line for each peer and reason, the oldest first."""
        self._window_end_s = 0.0
        self._num_lines = 0
        self._num_dropped = 0
        """Number of refusals in the current window that were not logged because of `MAX_LINES`."""

    def refuse(self, peer: str, reason: str) -> None:
        """Logs that the peer is refused, unless the same refusal was logged recently or the current
        window already has `MAX_LINES` lines."""
        now, key = self._clock(), (peer, reason)
        if now - self._logged.get(key, -REPEAT_S) < REPEAT_S:
            return
        if not self._has_room(now):
            self._num_dropped += 1
            return
        self._logged.pop(key, None)
        if len(self._logged) >= MAX_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = now
        self._num_lines += 1
        log.warning("the gateway at %s is refused: %s", peer, reason)

    def accept(self, peer: str) -> None:
        """Forgets the peer's refusals, so that its next refusal is logged."""
        self._logged = {key: at_s for key, at_s in self._logged.items() if key[0] != peer}

    def _has_room(self, now: float) -> bool:
        if now >= self._window_end_s:
            if self._num_dropped:
                log.warning("%d more refusals of gateways were not logged", self._num_dropped)
            self._window_end_s, self._num_lines, self._num_dropped = now + WINDOW_S, 0, 0
        return self._num_lines < MAX_LINES
