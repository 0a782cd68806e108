"""Frames that gateways and workers exchange. Does not import torch.

A frame consists of a 4-byte big-endian length and one msgpack-encoded message of at most
`MAX_FRAME_BYTES`. Each side first sends its `Hello`. Both sides then use the newest version that
both support. A field that is added in a new version has a default. If a peer that ignores the field
would answer wrongly, the gateway's `version_needed` returns the new version for requests that use
the field. The gateway chooses the sequence ids, which are unique on its connection.
"""

from __future__ import annotations

import msgspec

from adapters.reference import AdapterRef
from workers.wire.protocol import Failed, Generate, ModelInfo, PromptProgress, SequenceOutput
from workers.wire.status import WorkerStatus

PROTOCOL_VERSION = 7
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""Oldest version that a peer may use, which is the version of the previous release."""
MAX_FRAME_BYTES = 16 << 20
PULSE_PERIOD_S = 0.5


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Request to end a sequence. The worker answers with a `SequenceOutput` whose finish reason is
    `abort`, unless the sequence has already ended or failed."""

    id: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Request to load an adapter to the host tier. The worker sends no answer."""

    model: str
    adapter: AdapterRef


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Request to verify that the loaded adapter has the effect that its files describe. The worker
    answers with one `ProbeResult`. The gateway chooses the ids of probes. A probe and a sequence
    may have the same id."""

    id: int
    model: str
    adapter: AdapterRef


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Request to drop a probe that is queued or in progress. The worker sends no answer. Sent only
    to workers of protocol version 7 or newer."""

    id: int


class Pin(msgspec.Struct, frozen=True):
    model: str
    adapter: AdapterRef


class DesiredModel(msgspec.Struct, frozen=True):
    """Base model of the catalog. A worker must load the model if `is_pinned` is set, and must not
    load it if `is_unloaded` is set."""

    digest: str
    name: str
    is_pinned: bool = False
    is_unloaded: bool = False


class Desired(msgspec.Struct, frozen=True, tag="desired"):
    """Pinned adapters and base models of the catalog. `generation` increases with each change of
    the catalog. The worker ignores the frame if it has applied a newer generation."""

    generation: int
    pins: list[Pin]
    models: list[DesiredModel] = []


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Request to refuse new work and finish running sequences, or to accept work again if `is_on`
    is false. `WorkerStatus.draining` shows the worker's current state."""

    is_on: bool = True


class Models(msgspec.Struct, frozen=True, tag="models"):
    """All models of the worker, which replace the models of its `Hello`. Sent when models have been
    registered or unregistered."""

    models: list[ModelInfo]


class Fingerprint(msgspec.Struct, frozen=True):
    """Likeliest next tokens after the probe's prompt, computed by the model with the adapter."""

    tokens: list[int]
    logprobs: list[float]
    effect: float
    """Largest absolute change that the adapter causes in a log-probability of the probe prompt."""


class ProbeResult(msgspec.Struct, frozen=True, tag="probed"):
    """Result of a `Probe`. If `error` is empty, the adapter has passed. Otherwise `error` is an
    error code, and `message` says what failed. If `is_final` is false, another probe may succeed,
    because the failure may have a cause other than the adapter."""

    id: int
    layout: str = ""
    checksum: str = ""
    fingerprint: Fingerprint | None = None
    error: str = ""
    message: str = ""
    is_final: bool = True


class StepFrame(msgspec.Struct, frozen=True, omit_defaults=True, tag="step"):
    """All results of one engine step for this gateway. The gateway applies `progress` before
    `sequences`."""

    sequences: list[SequenceOutput]
    progress: list[PromptProgress] = []


class CachedPages(msgspec.Struct, frozen=True, tag="cached"):
    """Pages that were added to and removed from a model's prefix cache. `added` and `removed` are
    concatenations of the first 8 bytes of each page's key (`memory.page_key`). If `is_whole` is
    set, `added` replaces all keys that were sent before."""

    model: str
    added: bytes
    removed: bytes = b""
    is_whole: bool = False


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Heartbeat, sent every `PULSE_PERIOD_S` seconds by the event loop that also sends all other
    frames. A worker that sends no frame has stopped, is stuck or is unreachable."""

    step_age_s: float = 0.0
    """Seconds since the engine's current step began; 0 while the engine waits for work."""
    num_received: int = 0
    """Number of frames that the worker has received from this gateway, including its Hello. If the
    number stays below the number of frames sent, the gateway's frames do not arrive."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    """Oldest version that this side supports."""
    instance_id: str
    models: list[ModelInfo] = []
    newest: int = 0
    """Newest version that this side supports; 0 if it supports only `version`."""


def own_hello(instance_id: str, models: list[ModelInfo] | None = None) -> Hello:
    """Returns the Hello that this process sends."""
    return Hello(OLDEST_VERSION, instance_id, models or [], PROTOCOL_VERSION)


def common_version(own: Hello, peer: Hello) -> int | None:
    """Returns the newest version that both sides support, or None if there is none."""
    newest = min(max(own.version, own.newest), max(peer.version, peer.newest))
    return newest if newest >= max(own.version, peer.version) else None


ToWorker = Hello | Generate | Abort | Prefetch | Probe | Withdraw | Desired | Drain
ToGateway = Hello | Models | Pulse | StepFrame | Failed | ProbeResult | WorkerStatus | CachedPages
