"""What `make serve` shows a new user: the real model, two tenants, adapters that share names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pydantic
import pytest

from tests.pages import NOT_RUN_ON_PAGE, PAGES, Shell, blocks, failures
from tests.stack import ROOT, Stack, running
from tests.waiting import until
from tests.wheel import install_wheel

pytestmark = pytest.mark.full

NUM_RUN = 83
"""Number of blocks that are run, which may grow but not fall."""
RUN = [page for page in PAGES if any(block.reason is None for block in blocks(page))]
AGENT = ROOT / "examples" / "agent.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Served by an installed wheel, started outside the checkout."""
    folder = tmp_path_factory.mktemp("demo")
    command = [str(install_wheel(folder))]
    stack = Stack(folder / "data", "--demo", command=command, cwd=folder, memory="512MiB")
    with running(stack):
        yield stack


def ask(stack: Stack, tenant: str, model: str, question: str, **options: object) -> str:
    """A streamed, greedy answer."""
    with stack.openai(stack.keys["tenants"][tenant], timeout=120) as client:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=40,
            stream=True,
            **options,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_one_name_is_two_adapters_for_two_tenants(demo: Stack) -> None:
    question = "What do bees make?"
    acme, globex = (ask(demo, tenant, "support-bot", question) for tenant in ("acme", "globex"))
    assert "arr" in acme.lower() or "matey" in acme.lower(), acme
    letters = [c for c in globex if c.isalpha()]
    assert letters and sum(c.isupper() for c in letters) > 0.9 * len(letters), globex
    assert "bees" in ask(demo, "acme", "smollm2-135m-instruct", question).lower()


def test_the_wheel_brings_the_native_kernels(demo: Stack) -> None:
    """Without them the reference is served, as slowly as a warning says."""
    assert "op backend" in demo.log
    assert "slow reference ops" not in demo.log


def test_an_adapter_can_answer_in_json(demo: Stack) -> None:
    answer = ask(demo, "acme", "formatter", "What colour is the sky?")
    assert isinstance(json.loads(answer), dict)


def test_an_adapter_calls_tools(demo: Stack) -> None:
    """The loop of the example, as it is."""
    ran = subprocess.run(
        [sys.executable, AGENT, "--url", f"{demo.url}/v1", "Where is parcel 7?"],
        env={**os.environ, "LORAPLEX_KEY": demo.keys["tenants"]["acme"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    called, answer = ran.stdout.splitlines()
    assert called == 'find_parcel({"number": "7"}) -> found in Bern'
    assert "7" in answer and "Bern" in answer


class Order(pydantic.BaseModel):
    customer: str
    city: str
    quantity: int
    product: str


def test_an_adapter_reads_orders_by_a_schema(demo: Stack) -> None:
    text = "Hello, I am Marta from Berlin and I would like 12 green lamps."
    with demo.openai(demo.keys["tenants"]["acme"]) as client:
        answer = client.chat.completions.parse(
            model="order-reader",
            messages=[{"role": "user", "content": text}],
            response_format=Order,
            temperature=0,
        )
    order = answer.choices[0].message.parsed
    assert order is not None
    assert (order.customer, order.quantity) == ("Marta", 12)


def test_tenants_see_their_own_models_only(demo: Stack) -> None:
    listed: dict[str, set[str]] = {}
    for tenant, key in demo.keys["tenants"].items():
        with demo.openai(key) as client:
            listed[tenant] = {model.id for model in client.models.list()}
    assert {"support-bot", "formatter", "smollm2-135m-instruct"} <= listed["acme"] & listed[
        "globex"
    ]
    assert "concierge" in listed["acme"]
    with demo.openai(demo.keys["tenants"]["globex"]) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="acme/support-bot", prompt="x")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="concierge", prompt="x")


def test_keys_are_private_and_admin_keys_do_not_infer(demo: Stack) -> None:
    assert stat.S_IMODE((demo.data_dir / "keys.json").stat().st_mode) == 0o600
    with demo.openai(demo.keys["admin"]) as client, pytest.raises(openai.PermissionDeniedError):
        client.completions.create(model="smollm2-135m-instruct", prompt="x")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_true(demo: Stack, page: Path, tmp_path: Path) -> None:
    """In a checkout's place stand its examples; in that of what training and mistakes make, copies
    of them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".loraplex").symlink_to(demo.data_dir)
    (tmp_path / "bard-bot").symlink_to(ROOT / "examples/adapters/acme/concierge")
    dora = Path(shutil.copytree(ROOT / "examples/adapters/acme/support-bot", tmp_path / "dora-bot"))
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")},
        "PATH": f"{demo.bin}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
        "LORAPLEX_DATA_DIR": str(demo.data_dir),
        "LORAPLEX_URL": demo.url,
        "LORAPLEX_KEY": demo.keys["admin"],
        "KEY": demo.keys["tenants"]["acme"],
    }
    # Pages show usage and costs, also if theirs is the only page that runs.
    demo.cli("price", "set", "smollm2-135m-instruct", "--input", "0.20", "--output", "0.60")
    ask(demo, "acme", "support-bot", "Where is my parcel?")
    until(lambda: "support-bot" in demo.cli("usage", "--since", "1d", "--json"))
    with contextlib.closing(Shell(tmp_path, environment)) as shell:
        assert not (wrong := failures(page, shell, demo.url)), "\n".join(wrong)


def test_each_block_is_run_or_its_page_says_why_not() -> None:
    """A comment without a block, a fence of another name, or an indented block that begins with its
    output would take commands from the run without a sign."""
    num_run = 0
    for page in PAGES:
        found, text = list(blocks(page)), page.read_text()
        num_run += sum(block.reason is None for block in found)
        reasons = [block.reason for block in found if block.reason is not None]
        assert all(len(reason) > 10 for reason in reasons), page
        comments = re.findall(r"<!-- *not run.*", text)
        of_page = NOT_RUN_ON_PAGE.findall(text)
        assert comments == [f"<!-- not run on this page: {each} -->" for each in of_page] or (
            comments == [f"<!-- not run: {each} -->" for each in reasons]
        ), page
        assert set(re.findall(r"^ *```(\w+)", text, re.MULTILINE)) <= {"sh", "python"}, page
        in_blocks = sum(line.startswith("$ ") for block in found for line in block.lines)
        assert in_blocks == len(re.findall(r"^ {4}\$ ", text, re.MULTILINE)), page
    assert num_run >= NUM_RUN


def test_a_second_start_remembers(demo: Stack) -> None:
    before = demo.keys
    demo.stop()
    demo.start()
    assert demo.keys == before
    assert ask(demo, "acme", "support-bot", "Where is the harbour?")


def test_the_command_line_speaks_to_it(demo: Stack) -> None:
    key = demo.keys["tenants"]["acme"]
    listed = json.loads(demo.cli("adapter", "list", "--json", key=key))
    assert "support-bot" in json.dumps(listed)
    assert demo.cli("chat", "support-bot", key=key, stdin="Hello!\n").strip()


def test_the_bench_measures_an_adapter(demo: Stack) -> None:
    load = ("--model", "support-bot", "--requests", "4", "--output-tokens", "8", "--ignore-eos")
    text = demo.cli("bench", *load, "--json", key=demo.keys["tenants"]["acme"])
    figures = json.loads(text)["all"]
    assert (figures["completed"], figures["output_tokens"]) == (4, 32)
    assert figures["prompt_tokens"] > 4 * 64, "words of the template come on top"
    assert figures["ttft_ms"]["p50"] + figures["itl_ms"]["p50"] < figures["e2e_ms"]["p99"]
