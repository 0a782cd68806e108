"""Draws docs/picture.svg, the picture of the README: `python -m tools.picture`.

The picture has plain shapes and text, in colours that are readable on light and dark pages.
"""

from __future__ import annotations

from html import escape

from tools.source_tree import ROOT

PATH = ROOT / "docs" / "picture.svg"
WIDTH, HEIGHT = 960, 400
TEXT, LINE, PLAIN = "#1f2937", "#64748b", "#f8fafc"
TENANTS = (("acme", "#fde68a"), ("globex", "#bfdbfe"), ("initech", "#bbf7d0"))


def box(x: int, y: int, width: int, height: int, title: str, lines: list[str], fill: str) -> str:
    """Returns a box with a bold title and lines of text below it."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" '
        f'stroke="{LINE}"/>',
        _text(x + 12, y + 24, title, "bold"),
    ]
    parts += [_text(x + 12, y + 46 + 18 * row, line) for row, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    """Returns a line with a head at its end."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{LINE}" marker-end="url(#head)"/>'


def rows(x: int, y: int) -> str:
    """Returns one step of a worker: rows of the base model with their tenants' adapters."""
    order = (0, 1, 1, 2, 0, 2, 1, 0)
    return "\n".join(
        f'<rect x="{x + 26 * column}" y="{y}" width="22" height="22" rx="4" '
        f'fill="{TENANTS[tenant][1]}" stroke="{LINE}"/>'
        for column, tenant in enumerate(order)
    )


def picture() -> str:
    """Returns the picture as SVG."""
    tenants = [
        box(10, 30 + 100 * row, 170, 70, name, ["model: support-bot"], colour)
        for row, (name, colour) in enumerate(TENANTS)
    ]
    gateway = ["keys, quotas, metering", "chat templates, tools", "canaries, routing"]
    worker = ["one base model in memory", "paged KV cache", "each step, many adapters:"]
    adapters = [
        box(760, 50 + 80 * row, 190, 56, f"{name}'s LoRA", ["support-bot@2"], colour)
        for row, (name, colour) in enumerate(TENANTS)
    ]
    parts = [
        *tenants,
        box(250, 90, 190, 120, "gateway", gateway, PLAIN),
        box(250, 290, 190, 80, "PostgreSQL", ["tenants, versions,", "limits, usage, audit"], PLAIN),
        box(500, 60, 232, 160, "worker, one per device", worker, PLAIN),
        rows(512, 182),
        *adapters,
        _text(760, 306, "disk → host → device,"),
        _text(760, 324, "paged while requests run"),
        *(arrow(180, 65 + 100 * row, 248, 120 + 30 * row) for row in range(len(TENANTS))),
        arrow(440, 150, 498, 150),
        arrow(345, 210, 345, 288),
        arrow(758, 158, 734, 158),
    ]
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
font-family="system-ui, sans-serif" role="img" aria-label="Tenants, gateway, worker and adapters">
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>
<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#eef2f7"/>
{body}
</svg>
"""


def _text(x: int, y: int, words: str, weight: str = "normal") -> str:
    font = f'font-size="14" font-weight="{weight}" fill="{TEXT}"'
    return f'<text x="{x}" y="{y}" {font}>{escape(words)}</text>'


if __name__ == "__main__":
    PATH.write_text(picture())
