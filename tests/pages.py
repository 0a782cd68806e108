"""The command blocks of the pages, and a shell that runs them.

A block is run if it is fenced as `sh` or `python`, or is indented and begins with `$ ` or with a
command, unless a comment that readers do not see names a reason against it: `<!-- not run: REASON
-->` in the line before the block, or `<!-- not run on this page: REASON -->` for all of a page.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools.source_tree import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/use").glob("*.md")),
    *sorted((ROOT / "docs/operate").glob("*.md")),
]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
NOT_RUN_ON_PAGE = re.compile(r"^<!-- not run on this page: (.+) -->$", re.MULTILINE)
COMMAND = re.compile(
    r"\$ |\. |(?:loraplex|curl|make|kubectl|export|openssl|pg_dump|pip|python)\b|[A-Z_]+="
)
SAYING = re.compile(r"\b(?:is now|deleted|revoked|cannot be served)\b")
"""What messages of commands say whatever the figures and ids are."""
DEFAULT_URL = "http://127.0.0.1:8000"


class Block(NamedTuple):
    page: Path
    line: int
    """Of its first line, from 1."""
    kind: str
    """`sh` or `python`."""
    lines: list[str]
    reason: str | None
    """Why it is not run."""

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command with the output that the page shows for it."""
        if not self.lines[0].startswith("$ "):
            for command in "\n".join(self.lines).replace("\\\n", " ").split("\n"):
                yield command, []
            return
        command, shown = "", list[str]()
        goes_on = False
        for line in self.lines:
            if line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            elif goes_on:
                command += f"\n{line}"
            else:
                shown.append(line)
            goes_on = line.endswith("\\") and not shown
        yield command, shown


def blocks(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in their order."""
    text = page.read_text()
    lines = text.splitlines()
    of_page = NOT_RUN_ON_PAGE.search(text)
    number, last, before = 0, "", ""
    while number < len(lines):
        line = lines[number]
        start = number
        if line.startswith("```"):
            number += 1
            while not lines[number].startswith("```"):
                number += 1
            kind, inside = line[3:], lines[start + 1 : number]
        elif line.startswith("    ") and not before:
            while number + 1 < len(lines) and (
                lines[number + 1].startswith("    ")
                or (
                    not lines[number + 1]
                    and lines[number + 2 : number + 3] != []
                    and lines[number + 2].startswith("    ")
                )
            ):
                number += 1
            inside = [each[4:] for each in lines[start : number + 1]]
            kind = "sh" if COMMAND.match(inside[0]) else ""
        else:
            last, before, number = line or last, line, number + 1
            continue
        if kind in ("sh", "python"):
            mark = NOT_RUN.fullmatch(last) or of_page
            yield Block(page, start + 1, kind, inside, mark[1] if mark else None)
        last, before, number = "", "", number + 1


class Shell:
    """One bash in a folder; what a command exports and defines the next one finds."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env={**environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Its exit status and output."""
        self._number += 1
        script, output = (self._folder / f".{self._number}.{end}" for end in ("sh", "out"))
        script.write_text(command + "\n")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"source {script} > {output} 2>&1 < /dev/null; echo $?\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return status, output.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def missing_words(shown: list[str], output: str) -> list[str]:
    """What the shown lines have and the output has nowhere: fields of JSON, a table's
    columns, or the words of a message. Figures, ids, times and what a model says differ
    from run to run."""
    lines = [line for line in shown if line.strip() not in ("", "...")]
    if not lines:
        return []
    if lines[0].startswith(("{", "[")):
        words = re.findall(r'"(\w+)":', lines[0])
    elif re.match(r"[A-Za-z_/]+( {2,}[A-Za-z_/]+)+ *$", lines[0]):
        # As a terminal shows them; into a pipe they are written small.
        words = lines[0].lower().split()
    else:
        words = SAYING.findall(" ".join(lines))
    return [word for word in words if word not in output]


def failures(page: Path, shell: Shell, url: str) -> list[str]:
    """What of a page's commands is not true with the server at `url`, in whose place pages name
    the default address. Commands first, then all of the page's Python in one process."""
    found: list[str] = []
    scripts: list[str] = []
    for block in blocks(page):
        here = f"{page.name}:{block.line}"
        if block.reason:
            continue
        if block.kind == "python":
            code = "\n".join(block.lines).replace(DEFAULT_URL, url)
            scripts.append(f"exec(compile({code!r}, {here!r}, 'exec'), {{'__name__': '__main__'}})")
            continue
        for command, shown in block.commands:
            status, output = shell.run(command.replace(DEFAULT_URL, url))
            is_refusal = any('"error":' in line or "loraplex: " in line for line in shown)
            if (status or '"error":{' in output) and not is_refusal:
                found.append(f"{here}: {command}\nfails with {status}\n{output}")
            elif missing := missing_words(shown, output):
                found.append(f"{here}: {command}\nhas no {missing}\n{output}")
    if scripts:
        status, output = shell.run("python - <<'END'\n" + "\n".join(scripts) + "\nEND")
        if status:
            found.append(f"{page.name}, Python\n{output}")
    return found
