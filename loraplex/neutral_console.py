"""Console of rich that escapes control sequences in texts, but writes its own unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from loraplex.neutral_text import ExactText, neutral


class NeutralConsole(Console):
    """Console on standard output or standard error."""

    def __init__(self, file: IO[str], **options: Any) -> None:
        super().__init__(file=cast(IO[str], ExactText(file)), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is not None:
                yield segment
            else:
                yield Segment(neutral(segment.text), segment.style)
