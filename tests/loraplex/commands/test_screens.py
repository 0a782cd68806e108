"""Each list fits into 60, 80 and 120 columns and has tabbed values in a pipe. The list of adapters
is compared with `screens/adapter_list.txt`, which WRITE_SCREENS=1 rewrites."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from admin.tenants.tenants import find_tenant
from loraplex.cli import cli
from tests.admin.conftest import Plane
from tests.admin.lifecycle import add, prove_all, report_worker
from tests.admin.recorded import Recorder, recorder_on_thread
from tests.admin.workers.test_workers import STATUS

SCREENS = Path(__file__).parent / "screens"
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
WIDTHS = (60, 80, 120)
WORKER = "worker-gpu-node-7c9f-41d2"
ADAPTER = "contract-summariser-of-the-legal-department"
MODEL = "gemma3-270m-instruction-tuned"
COMMANDS = {
    "tenant_list": ("tenant", "list"),
    "tenant_show": ("tenant", "show", "acme"),
    "key_list": ("key", "list", "--tenant", "acme"),
    "adapter_list": ("adapter", "list"),
    "adapter_show": ("adapter", "show", "bot", "--tenant", "acme"),
    "adapter_show_version": ("adapter", "show", "bot@2", "--tenant", "acme"),
    "adapter_history": ("adapter", "history", "bot", "--tenant", "acme"),
    "adapter_rejected": ("adapter", "rejected", "--tenant", "acme"),
    "model_list": ("model", "list"),
    "model_show": ("model", "show", MODEL),
    "workers_list": ("workers", "list"),
    "workers_show": ("workers", "show", WORKER),
    "quota_show": ("quota", "show", "--tenant", "acme"),
    "price_list": ("price", "list"),
    "usage": (
        *("usage", "--since", "2026-03-05", "--end", "2026-03-06"),
        *("--group-by", "tenant,model,adapter,adapter_version,key"),
    ),
    "usage_credits": ("usage", "credits"),
    "audit_list": ("audit", "list"),
}


async def lengthen(made: Recorder, plane: Plane) -> None:
    """Adds things with long names, texts and lists."""
    admin, owner = made.callers["administrator"], made.callers["tenant"]
    key = {"name": "dashboard of the support team", "models": ["bot@*", MODEL]}
    model = {"name": MODEL, "digest": "b" * 64, "source": "google/gemma-3-270m-it"}
    reason = "20.00 was set in place of 0.20, from nine to two, before a review saw it"
    credit = {"model": "tiny", "input": "0", "output": "0", "reason": reason}
    span = {"start": "2026-03-05T00:00:00Z", "end": "2026-03-06T00:00:00Z"}
    for method, path, body in (
        ("POST", "tenants", {"name": "globex-research-and-development", "sharing_group": "one"}),
        ("POST", "tenants/acme/keys", key | {"cidrs": ["10.0.0.0/8", "192.168.0.0/16"]}),
        ("POST", "models", model),
        ("PUT", f"prices/{MODEL}", {"input": "2.50", "output": "0.000001"}),
        ("PUT", "usage/credits/c2", credit | span),
    ):
        answer = await admin.request(method, path, json=body)
        assert answer.is_success, answer.text
    canary = {"canary": {"1": 90, "2": 10}}
    assert (await owner.put("adapters/bot/aliases/prod", json=canary)).is_success
    files = {"adapter_config.json": b'{"peft_type": "IA3"}', "adapter_model.safetensors": b"x"}
    assert (await owner.post("adapters", data={"name": "bot"}, files=files)).status_code == 400
    async with plane.database.transaction() as connection:
        tenant = await find_tenant(connection, "globex-research-and-development")
        await add(connection, tenant.id, "d", name=ADAPTER)
    await prove_all(plane.database)
    held = [each | {"digest": "ab"[n % 2] * 64} for n, each in enumerate(STATUS["adapters"])]
    status = STATUS | {"adapters": held}
    await report_worker(plane.database, WORKER, "b" * 64, seconds_ago=-3600, **status)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with (
        recorder_on_thread(tmp_path_factory.mktemp("screens")) as (portal, made),
        portal.wrap_async_context_manager(made.copy()) as plane,
    ):
        portal.call(lengthen, made, plane)
        yield made


@pytest.fixture(autouse=True)
def environment(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    key = recorder.callers["administrator"].headers["authorization"]
    monkeypatch.setenv("LORAPLEX_URL", recorder.url)
    monkeypatch.setenv("LORAPLEX_KEY", key.removeprefix("Bearer "))
    monkeypatch.setenv("LORAPLEX_DATA_DIR", "/nonexistent")


def printed(arguments: tuple[str, ...], width: int | None) -> str:
    """By a command whose standard output is a terminal of this width; None: a pipe."""
    if width is None:
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        settings = termios.tcgetattr(writer)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(writer, termios.TCSANOW, settings)
    given, received = sys.stdout, bytearray()

    def read() -> None:
        try:
            while chunk := os.read(reader, 1 << 16):
                received.extend(chunk)
        except OSError:  # how a terminal says that its other side is closed
            pass

    reading = threading.Thread(target=read)
    reading.start()
    try:
        with open(writer, "w", encoding="utf-8") as sys.stdout:
            cli(arguments, standalone_mode=False)
    finally:
        sys.stdout = given
        reading.join()
        os.close(reader)
    return received.decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_list_fits_its_terminal(name: str) -> None:
    for width in WIDTHS:
        lines = printed(COMMANDS[name], width).splitlines()
        assert lines and max(map(cell_len, lines)) <= width
        assert not [line for line in lines if line != line.rstrip(" ")]
    lines = printed(COMMANDS[name], None).splitlines()
    assert lines and not [line for line in lines if line != line.rstrip(" ")]
    if name.endswith("_list"):
        assert len(lines) > 1 and len({line.count("\t") for line in lines}) == 1


def test_the_list_of_adapters_at_each_width() -> None:
    widths = [(str(width), width) for width in WIDTHS] + [("pipe", None)]
    found = "\n".join(
        f"{title}\n{MOMENT.sub('<time>', printed(COMMANDS['adapter_list'], width))}"
        for title, width in widths
    )
    file = SCREENS / "adapter_list.txt"
    if os.environ.get("WRITE_SCREENS"):
        file.write_text(found)
    assert found == file.read_text()
