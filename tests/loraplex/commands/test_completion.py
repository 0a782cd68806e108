"""`loraplex completion`, asked by the shell as a user's line asks it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """eval "$(loraplex completion bash)"
COMP_WORDS=(loraplex adapter pro) COMP_CWORD=2
_loraplex_completion loraplex
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_a_command() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", SCRIPT], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["promote"]
