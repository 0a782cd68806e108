"""What a server answers, as the admin plane's schemas have it: a small house with two tenants."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import msgspec

from admin.adapters.adapters import AdapterSummaryView
from admin.adapters.schemas import AdapterView, AliasView, VersionView
from admin.adapters.versions import RejectedUploadView
from admin.audit.audit import AuditView
from admin.keys.schemas import KeyView
from admin.models.schemas import ModelDetails
from admin.prices.routes import PriceView
from admin.quotas.schemas import TenantQuotaView
from admin.tenants.schemas import TenantView
from admin.usage.credit_routes import CreditView
from admin.usage.routes import UsageView
from admin.workers.schemas import WorkerDetails, WorkerView

GIB = 1 << 30
DIGEST = "5f2c9a1be0d74c68a3f19b27dd0e6c4513aa97f08be2546c1d7e90b3f8a26c5d"
OTHER = "c07d13e8fa96425bb1e4d2207c98ab3fe1650d4a7bb3f2c89e0157d64afc23b1"
LONG_AGO = "2025-01-31T09:30:00Z"


def answers(now: datetime) -> dict[str, Any]:
    """By path under /admin/v1."""

    def ago(**span: float) -> str:
        return (now - timedelta(**span)).isoformat().replace("+00:00", "Z")

    def ahead(**span: float) -> str:
        return ago(**{unit: -number for unit, number in span.items()})

    def tenant(name: str, id: str, created: str, group: str | None = None) -> dict[str, Any]:
        known = {"id": id, "name": name, "sharing_group": group, "created_at": created}
        return known | {"require_signature": False}

    tenants = [
        tenant("acme", "ten_4f0Zk1q9XbT2", LONG_AGO, "family"),
        tenant("globex-research-and-development", "ten_9sQwErTyUi3o", ago(days=3)),
    ]

    def key(id: str, name: str, **fields: Any) -> dict[str, Any]:
        empty = dict.fromkeys(
            (
                *("not_before", "expires_at", "revoked_at", "models", "cidrs", "replaces"),
                "last_used_at",
            )
        )
        scopes = ["adapters:write", "inference", "usage:read"]
        known = {"id": id, "tenant_id": "ten_4f0Zk1q9XbT2", "name": name, "scopes": scopes}
        return known | empty | {"created_at": ago(days=12)} | fields

    keys = [
        key("4f0Zk1q9XbT2", "ci", last_used_at=ago(minutes=3), expires_at=ahead(days=18, hours=1)),
        key(
            *("8sDfGhJkL0pQ", "dashboard of the support team"),
            scopes=["usage:read"],
            revoked_at=ago(hours=5),
            last_used_at=ago(hours=6),
        ),
        key(
            *("ZxCvBnM12345", ""),
            scopes=["inference"],
            models=["support-bot@*", "smollm2-135m-instruct"],
            cidrs=["10.0.0.0/8"],
        ),
    ]
    worker_tiers = [
        {"worker": "worker-0", "tier": "device"},
        {"worker": "worker-gpu-node-7c9f-41d2", "tier": "host"},
    ]
    adapters = [
        {
            "name": "support-bot",
            "tenant": "acme",
            "created_at": ago(days=9),
            "aliases": {"prod": 1, "staging": 2},
            "canaries": {"prod": {"1": 90, "2": 10}},
            "pinned": ["prod"],
            "states": {"ready": 2, "awaiting_approval": 1},
            "last_state": "awaiting_approval",
            "tiers": [{**tier, "version": 1} for tier in worker_tiers],
        },
        {
            "name": "pirate",
            "tenant": "acme",
            "created_at": ago(minutes=3),
            "aliases": {},
            "canaries": {},
            "pinned": [],
            "states": {"proving": 1},
            "last_state": "proving",
            "tiers": [],
        },
        {
            "name": "contract-summariser-of-the-legal-department",
            "tenant": "globex-research-and-development",
            "created_at": LONG_AGO,
            "aliases": {"prod": 7},
            "canaries": {},
            "pinned": [],
            "states": {"ready": 4, "rejected": 1},
            "last_state": "ready",
            "tiers": [],
        },
    ]

    def version(number: int, **fields: Any) -> dict[str, Any]:
        return {
            "name": "support-bot",
            "version": number,
            "state": "ready",
            "served": True,
            "model": "smollm2-135m-instruct",
            "digest": DIGEST,
            "max_rank": 16,
            "num_parameters": 1843200,
            "file_bytes": 3_713_824,
            "warnings": [],
            "error": None,
            "created_at": ago(days=9),
            "aliases": [],
            "wanted_alias": None,
            "uploaded_by": "4f0Zk1q9XbT2",
            "retired_at": None,
            "expires_at": None,
            "signed_by": None,
            "signing_key_revoked_at": None,
            "effect_proof": "passed",
            "serving": {
                "template": None,
                "stop": [],
                "stop_token_ids": [],
                "defaults": {},
                "metadata": {},
            },
            "proving": None,
            "proofs": [],
            "faults": [],
            "tiers": [],
        } | fields

    template = {"digest": OTHER, "approved": False, "text": "{% for m in messages %}\n{{ m }}\n"}
    versions = [
        version(1, aliases=["prod"], tiers=worker_tiers),
        version(
            2,
            digest=OTHER,
            aliases=["prod", "staging"],
            created_at=ago(hours=5),
            faults=[
                {
                    "worker": "worker-0",
                    "code": "adapter_corrupt",
                    "message": "the file is shorter than it was",
                    "since": ago(minutes=4),
                }
            ],
        ),
        version(
            3,
            state="awaiting_approval",
            served=False,
            created_at=ago(minutes=3),
            serving={
                "template": template,
                "stop": ["</s>"],
                "stop_token_ids": [2],
                "defaults": {"temperature": 0.2},
                "metadata": {"run": "7"},
            },
        ),
    ]
    adapter = {name: adapters[0][name] for name in ("name", "tenant", "created_at", "aliases")}
    adapter |= {name: adapters[0][name] for name in ("canaries", "pinned")} | {"versions": versions}
    proof = {
        "layout": "cpu/bfloat16/1",
        "checksum": DIGEST,
        "worker": "worker-0",
        "proved_at": ago(hours=5),
        "fingerprint": {"effect": 0.25},
    }

    def move(reason: str, number: int, when: str, **fields: Any) -> dict[str, Any]:
        known = {"version": number, "previous": None, "reason": reason, "changed_at": when}
        return known | {"changed_by": "4f0Zk1q9XbT2"} | fields

    alias = {
        "name": "support-bot",
        "alias": "prod",
        "version": 1,
        "canary": {"1": 90, "2": 10},
        "policy": None,
        "pinned": True,
        "change": 3,
        "history": [
            move("canary", 1, ago(minutes=3), canary={"1": 90, "2": 10}),
            move(
                *("auto_rollback", 1, ago(hours=5)),
                changed_by=None,
                detail="version 2 failed 12 of 40 requests, the stable version none",
            ),
            move("first", 1, ago(days=9)),
        ],
    }
    rejected = [
        {
            "name": "support-bot",
            "error": {
                "code": "adapter.unsupported.dora",
                "field": "use_dora",
                "got": True,
                "allowed": False,
                "hint": "Train with use_dora=False: its magnitudes are not a low-rank change.",
            },
            "uploaded_by": "4f0Zk1q9XbT2",
            "rejected_at": ago(minutes=3),
        }
    ]
    states = [
        {
            "worker": worker,
            "tier": tier,
            "num_bytes": 269_060_000,
            "num_swaps": 2,
            "num_running": running,
            "num_waiting": 0,
            "idle_since": idle,
            "load_s": 0.731,
            "error": "",
            "reported_at": ago(minutes=3),
        }
        for worker, tier, running, idle in (
            ("worker-0", "device", 3, None),
            ("worker-gpu-node-7c9f-41d2", "host", 0, ago(minutes=40)),
        )
    ]

    def model(name: str, digest: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "name": name,
            "digest": digest,
            "model_type": "llama",
            "served_by": "native",
            "max_model_len": 8192,
            "residency": "auto",
            "source": "SmolLM2-135M-Instruct",
            "created_at": ago(days=20),
            "workers": workers,
        }

    models = [
        model("gemma3-270m-instruction-tuned", OTHER, []),
        model("smollm2-135m-instruct", DIGEST, states),
    ]
    workers = [
        {
            "id": "worker-0",
            "address": "unix:/home/ada/.loraplex/run/worker-0.sock",
            "state": "ready",
            "reason": "",
            "drain_wanted": False,
            "num_running": 3,
            "num_waiting": 0,
            "tokens_per_s": 141.37,
            "resident": ["smollm2-135m-instruct"],
            "is_registered": False,
            "registered_at": ago(days=2),
            "reported_at": ago(minutes=3),
        },
        {
            "id": "worker-gpu-node-7c9f-41d2",
            "address": "tcp://10.2.0.17:7100",
            "state": "unreached",
            "reason": "certificate verify failed: unable to get local issuer certificate",
            "drain_wanted": False,
            "num_running": 0,
            "num_waiting": 0,
            "tokens_per_s": 0.0,
            "resident": [],
            "is_registered": True,
            "registered_at": ago(minutes=3),
            "reported_at": None,
        },
    ]
    held = {"num_bytes": 3_670_016, "leases": 2, "pinned": True, "error": "", "message": ""}
    resident = {"digest": DIGEST, "name": "smollm2-135m-instruct", "num_bytes": 269_060_000}
    worker = workers[0] | {
        "reported_by": "gw-1",
        "models": [resident | {"pages_total": 4096, "pages_free": 4001, "num_running": 3}],
        "adapters": {
            "device": [
                held
                | {"digest": DIGEST, "tier": "device"}
                | {"names": ["acme/support-bot@1", "acme/support-bot@3"]}
            ],
            "host": [held | {"digest": OTHER, "tier": "host", "leases": 0, "names": []}],
        },
        "arena_bytes": GIB,
        "extents": "wwwwkk....aa",
        "tenants": [
            {"tenant": "ten_4f0Zk1q9XbT2", "kv_bytes": 40 << 20, "adapter_bytes": 3_670_016}
        ],
        "step": 12,
        "settings": {"memory": "1073741824", "dtype": "bfloat16"},
    }

    def use(limit: Any, used: Any, held: Any, left: Any, ends: str | None) -> dict[str, Any]:
        return {"limit": limit, "used": used, "held": held, "left": left, "ends_at": ends}

    quota = {
        "requests_per_minute": 600,
        "tokens_per_day": 2_000_000,
        "spend_per_month": "250.00",
        "adapter_bytes": 2 * GIB,
        "weight": 4,
        "class": "interactive",
        "use": {
            "requests_per_minute": use(600, 12, 8, 580, ahead(minutes=41)),
            "tokens_per_day": use(2_000_000, 182_311, 1024, 1_816_665, ahead(hours=5, minutes=1)),
            "spend_per_month": use("250.00", "17.83", "0.02", "232.15", ahead(days=5, hours=1)),
            "adapter_bytes": use(2 * GIB, 3_713_824, 0, 2 * GIB - 3_713_824, None),
        },
        "updated_at": ago(days=2),
    }
    prices = [
        {"model": name, "input": "2.50", "cached_input": "0.25", "output": output}
        | {"updated_at": ago(days=2)}
        for name, output in (
            ("gemma3-270m-instruction-tuned", "10.00"),
            ("smollm2-135m-instruct", "0.000001"),
        )
    ]
    usage = [
        {
            "start": f"2026-11-{day:02}T00:00:00Z",
            "tenant": "ten_4f0Zk1q9XbT2",
            "tenant_name": "acme",
            "model": "smollm2-135m-instruct",
            "adapter": adapter,
            "adapter_version": number,
            "key": "4f0Zk1q9XbT2",
            "requests": 1204 * day,
            "prompt_tokens": 1_182_311 * day,
            "cached_tokens": 811_000,
            "completion_tokens": 92_004,
            "metered_tokens": 1_463_315,
            "cost": "12.503311",
            "input_cost": "8.25",
            "cached_input_cost": "1.0",
            "output_cost": "3.253311",
            "credited": "0.00",
        }
        for day, adapter, number in ((1, "support-bot", 1), (2, "", 0))
    ]
    credits = [
        {
            "id": f"credit-7c0e9f1a2b{number}",
            "model": "smollm2-135m-instruct",
            "tenant_id": tenant,
            "since": "2026-11-02T09:00:00Z",
            "until": "2026-11-02T14:00:00Z",
            "input": "0.20",
            "cached_input": "0.20",
            "output": "0.60",
            "reason": "20.00 was set in place of 0.20, from nine to two, before a review saw it",
            "requests": 1204,
            "cost_before": "2403.201",
            "cost_after": "24.03201",
            "created_at": ago(hours=3),
        }
        for number, tenant in enumerate((None, "ten_4f0Zk1q9XbT2"))
    ]
    audit = [
        {
            "seq": seq,
            "at": ago(minutes=3),
            "key_id": "4f0Zk1q9XbT2",
            "tenant_id": "ten_4f0Zk1q9XbT2",
            "action": action,
            "object": object,
            "details": details,
            "request_id": "req_1",
            "address": "10.2.0.9",
            "hash": DIGEST,
        }
        for seq, action, object, details in (
            (1041, "alias.move", "support-bot@prod", {"version": [1, 2]}),
            (1042, "key.create", "8sDfGhJkL0pQ", {"scopes": ["usage:read"]}),
        )
    ]
    several: dict[str, tuple[list[Any], Any]] = {
        "tenants": (tenants, TenantView),
        "tenants/acme/keys": (keys, KeyView),
        "adapters": (adapters, AdapterSummaryView),
        "uploads/rejected": (rejected, RejectedUploadView),
        "models": (models, ModelDetails),
        "workers": (workers, WorkerView),
        "prices": (prices, PriceView),
        "usage": (usage, UsageView),
        "usage/credits": (credits, CreditView),
        "audit": (audit, AuditView),
    }
    one: dict[str, tuple[Any, Any]] = {
        "tenants/acme": (tenants[0], TenantView),
        "adapters/support-bot": (adapter, AdapterView),
        "adapters/support-bot/versions/2": (
            versions[1] | {"proofs": [proof], "stored": {"state": "present"}},
            VersionView,
        ),
        "adapters/support-bot/aliases/prod": (alias, AliasView),
        "models/smollm2-135m-instruct": (models[1], ModelDetails),
        "workers/worker-0": (worker, WorkerDetails),
        "tenants/acme/quota": (quota, TenantQuotaView),
    }
    known = {path: _checked(value, kind) for path, (value, kind) in one.items()}
    for path, (values, kind) in several.items():
        data = [_checked(value, kind) for value in values]
        known[path] = {"data": data, "has_more": False, "after": None}
    return known


def _checked(value: Any, kind: Any) -> Any:
    """As the plane would send it: a field that it does not know, or one that lacks, is an error."""
    sent = json.loads(msgspec.json.encode(msgspec.convert(value, kind, strict=False)))
    assert value.keys() <= sent.keys(), value.keys() - sent.keys()
    return sent
