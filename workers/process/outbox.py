"""Groups engines' events into the frames that gateways receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workers.execution.engine import Event
from workers.verification.adapter_verifier import CONNECTION
from workers.wire.frames import StepFrame
from workers.wire.protocol import Failed, PromptProgress, SequenceOutput


def frames(
    events: Iterable[Event], take_own: Callable[[SequenceOutput | Failed], None]
) -> list[tuple[int, StepFrame | Failed]]:
    """Returns one frame per connection with all events of this connection except failures, followed
    by the failures of all connections. Failures are last, because the prompt progress of a failed
    sequence must be received before its failure. Passes events of the adapter verifier's own
    sequences, except prompt progress, to `take_own`."""
    steps: dict[int, StepFrame] = {}
    failures: list[tuple[int, Failed]] = []
    for connection, event in events:
        if connection == CONNECTION:
            if not isinstance(event, PromptProgress):
                take_own(event)
        elif isinstance(event, Failed):
            failures.append((connection, event))
        else:
            if (frame := steps.get(connection)) is None:
                frame = steps[connection] = StepFrame([], [])
            if isinstance(event, PromptProgress):
                frame.progress.append(event)
            else:
                frame.sequences.append(event)
    return [*steps.items(), *failures]
