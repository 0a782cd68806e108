"""What a version brings besides its weights, and what is told of it."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import jinja2
import pytest

from store.database import Connection, Database
from store.queries import catalog_generation, load_catalog
from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import FINGERPRINT, LAYOUT, add, prove_all, report
from tests.admin.serve import administration

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% else %}"
    "{% generation %}A:{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}A:"
)


async def push(
    client: httpx.AsyncClient, folder: Path, serving: object, **more: str
) -> httpx.Response:
    if not folder.exists():
        write_adapter(folder)
    files = {path.name: (path.name, path.read_bytes()) for path in folder.iterdir()}
    text = serving if isinstance(serving, str) else json.dumps(serving)
    fields = {"name": "bot", "tenant": "acme", "serving": text} | more
    return await client.post("adapters", data=fields, files=files)


@pytest.mark.parametrize(
    "defaults", [{"top_k": -1}, {"top_k": 1 << 30}, {"repetition_penalty": 9.5}]
)
async def test_defaults_may_be_all_that_a_request_may_ask(
    plane: Plane, base: str, tmp_path: Path, defaults: dict[str, Any]
):
    acme = await plane.tenant("acme")
    made = await push(acme, tmp_path / "a", {"defaults": defaults})
    assert made.status_code == 201, made.text
    assert made.json()["serving"]["defaults"] == defaults


async def test_serving_data_is_stored_shown_and_served(plane: Plane, base: str, tmp_path: Path):
    acme = await plane.tenant("acme")
    serving = {
        "chat_template": TEMPLATE,
        "stop": ["<end>", "\n\n"],
        "defaults": {"temperature": 0.2, "max_tokens": 64},
        "metadata": {"commit": "1f2e", "dataset": "tickets-7"},
        "pooling": "mean",
        "tool_format": "hermes",
    }
    made = await push(acme, tmp_path / "a", serving)
    assert made.status_code == 201, made.text
    shown = made.json()["serving"]
    assert shown["template"]["text"] == TEMPLATE
    assert shown["template"]["approved"] is False
    assert {name: shown[name] for name in serving if name != "chat_template"} == {
        name: serving[name] for name in serving if name != "chat_template"
    }
    assert made.json()["proving"] == {
        "detail": "waiting for a worker that serves tiny",
        "attempts": 0,
    }
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        snapshot = await load_catalog(connection)
    served = snapshot.versions[0].serving
    assert (served.chat_template, served.stop) == (TEMPLATE, ("<end>", "\n\n"))
    assert (served.defaults.temperature, served.defaults.top_p) == (0.2, None)
    assert snapshot.approved_templates == frozenset()


async def test_a_template_runs_once_an_admin_says_so(plane: Plane, base: str, tmp_path: Path):
    acme = await plane.tenant("acme")
    digest = (await push(acme, tmp_path / "a", {"chat_template": TEMPLATE})).json()["serving"][
        "template"
    ]["digest"]
    path = "adapters/bot/versions/1/template/approve"
    problem(await acme.post(path), 403)
    approved = await plane.client.post(path, params={"tenant": "acme"})
    assert approved.json()["serving"]["template"]["approved"] is True
    again = await plane.client.post(path, params={"tenant": "acme"})
    assert again.json() == approved.json()
    async with plane.database.acquire() as connection:
        assert (await load_catalog(connection)).approved_templates == {digest}
    await push(acme, tmp_path / "a", {})
    none = await plane.client.post(
        "adapters/bot/versions/2/template/approve", params={"tenant": "acme"}
    )
    assert problem(none, 404)["code"] == "template_not_found"


async def test_a_hostile_template_is_not_promoted(plane: Plane, base: str, tmp_path: Path):
    """A tenant uploads it and tries each way to have its alias point there."""
    acme = await plane.tenant("acme")
    hostile = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    made = await push(acme, tmp_path / "a", {"chat_template": hostile}, alias="next")
    assert made.json()["state"] == "proving"
    await prove_all(plane.database)

    async def show(number: int) -> dict[str, Any]:
        return (await acme.get(f"adapters/bot/versions/{number}")).json()

    shown = await show(1)
    assert (shown["state"], shown["served"], shown["aliases"]) == ("awaiting_approval", False, [])
    listed = (await acme.get("adapters")).json()["data"][0]
    assert (listed["states"], listed["last_state"], listed["aliases"]) == (
        {"awaiting_approval": 1},
        "awaiting_approval",
        {},
    )
    # Pushed again, now for `prod`; promoted; approved with its own key.
    again = await push(acme, tmp_path / "a", {"chat_template": hostile}, alias="prod")
    assert (again.status_code, again.json()["state"]) == (200, "awaiting_approval")
    refused = problem(await acme.put("adapters/bot/aliases/prod", json={"version": 1}), 409)
    assert refused["code"] == "template_not_approved"
    assert "loraplex adapter approve bot@1 --tenant acme" in str(refused["message"])
    problem(await acme.post("adapters/bot/versions/1/template/approve"), 403)
    # Behind a version that is ready, as a canary.
    await push(acme, tmp_path / "a", {})
    await prove_all(plane.database)
    assert (await show(2))["aliases"] == ["prod"]
    canary = {"canary": {"2": 50, "1": 50}}
    refused = problem(await acme.put("adapters/bot/aliases/prod", json=canary), 409)
    assert refused["code"] == "template_not_approved"
    async with plane.database.acquire() as connection:
        pointing = (await load_catalog(connection)).aliases
    assert [(alias.alias, alias.version, alias.canary) for alias in pointing] == [("prod", 2, None)]


async def test_an_alias_may_be_for_completions_only(plane: Plane, base: str, tmp_path: Path):
    """Whoever asks for it by name points an alias to a version whose chats are refused."""
    acme = await plane.tenant("acme")
    await push(acme, tmp_path / "a", {"chat_template": TEMPLATE})
    await push(acme, tmp_path / "a", {})
    await prove_all(plane.database)
    asked = {"completions_only": True}
    moved = await acme.put("adapters/bot/aliases/next", json={"version": 1, **asked})
    assert moved.json()["version"] == 1
    moved = await acme.put(
        "adapters/bot/aliases/prod", json={"canary": {"2": 50, "1": 50}, **asked}
    )
    assert moved.json()["canary"] == {"1": 50, "2": 50}
    # What is not proved is not called by any of them.
    await push(acme, tmp_path / "a", {"chat_template": TEMPLATE, "stop": ["x"]})
    refused = await acme.put("adapters/bot/aliases/next", json={"version": 3, **asked})
    assert problem(refused, 409)["code"] == "version_not_ready"


async def test_an_approval_makes_ready_what_waited_for_it(plane: Plane, base: str, tmp_path: Path):
    """Of every tenant: the first version takes `prod`, and what its upload asked for follows."""
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    for client, more in ((acme, {"alias": "next"}), (globex, {"tenant": "globex"})):
        await push(client, tmp_path / "a", {"chat_template": TEMPLATE}, **more)
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        await report(connection, "gw-1", await catalog_generation(connection), {})
    path = "adapters/bot/versions/1"
    approved = await plane.client.post(f"{path}/template/approve", params={"tenant": "acme"})
    assert approved.json()["state"] == "ready"
    # The gateway does not know yet.
    assert not approved.json()["served"]
    async with plane.database.acquire() as connection:
        await report(connection, "gw-1", await catalog_generation(connection), {})
    shown = (await acme.get(path)).json()
    assert (shown["served"], shown["aliases"], shown["wanted_alias"]) == (
        True,
        ["next", "prod"],
        None,
    )
    assert (await globex.get(path)).json()["aliases"] == ["prod"]


async def test_an_admins_upload_approves_only_when_told_to(plane: Plane, base: str, tmp_path: Path):
    """A template that an admin uploads for somebody else is not one that the admin has read."""
    acme = await plane.tenant("acme")
    serving = {"chat_template": TEMPLATE}
    made = await push(plane.client, tmp_path / "a", serving)
    assert made.json()["serving"]["template"]["approved"] is False
    problem(await push(acme, tmp_path / "a", serving, approve_template="true"), 403)
    refused = problem(
        await push(plane.client, tmp_path / "a", serving, approve_template="maybe"), 400
    )
    assert refused["param"] == "approve_template"
    shown = (await acme.get("adapters/bot")).json()["versions"][0]["serving"]["template"]
    assert shown["approved"] is False
    again = await push(plane.client, tmp_path / "a", serving, approve_template="true")
    assert again.json()["serving"]["template"]["approved"] is True


@pytest.mark.parametrize(
    ("serving", "code", "words"),
    [
        ("{", "serving_invalid", "truncated"),
        ("[]", "serving_invalid", "Expected `object`"),
        ({"stops": []}, "serving_invalid", "stops"),
        ({"defaults": {"temprature": 1}}, "serving_invalid", "temprature"),
        ({"defaults": {"temperature": 3}}, "serving_invalid", "$.defaults.temperature"),
        ({"stop": ["x"] * 17}, "serving_invalid", "$.stop"),
        ({"stop": [""]}, "serving_invalid", "$.stop"),
        ({"metadata": {"k": "v" * 513}}, "serving_invalid", "$.metadata"),
        ({"chat_template": "x" * ((64 << 10) + 1)}, "serving_invalid", "$.chat_template"),
        ({"chat_template": "a\n{% for %}"}, "template_syntax", "line 2"),
        ({"chat_template": "{{ messages"}, "template_syntax", "line 1"),
        ({"chat_template": "{{" + "(" * 30000}, "template_syntax", "nested too deeply"),
        ({"chat_template": "{% if a %}" * 5000}, "template_syntax", "nested too deeply"),
        ({"chat_template": "{{ " + "9" * 5000 + " }}"}, "template_syntax", "digits"),
        ({"chat_template": "{{ '\\x' }}"}, "template_syntax", "escape"),
    ],
)
async def test_serving_data_that_cannot_be_is_refused(
    plane: Plane, base: str, tmp_path: Path, serving: object, code: str, words: str
):
    acme = await plane.tenant("acme")
    refused = problem(await push(acme, tmp_path / "a", serving), 400)
    assert refused["code"] == code
    assert words in str(refused["message"])
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []


async def test_a_template_is_parsed_once_and_beside_the_plane(
    plane: Plane, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Parsing this one takes half a second, in which other tenants would wait."""

    def parse(*_: Any) -> None:
        raise AssertionError("a template was parsed in this process")

    monkeypatch.setattr(jinja2.Environment, "parse", parse)
    acme = await plane.tenant("acme")
    slow = "{{ [" + "1," * 32_000 + "] }}"
    created = await push(acme, tmp_path / "a", {"chat_template": slow})
    assert created.status_code == 201, created.text
    refused = problem(await push(acme, tmp_path / "b", {"chat_template": slow[:-3]}), 400)
    assert refused["code"] == "template_syntax"


async def test_proofs_and_faults_are_shown_with_their_version(
    plane: Plane, base: str, tmp_path: Path
):
    acme = await plane.tenant("acme")
    digest = (await push(acme, tmp_path / "a", {})).json()["digest"]
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        for name in (digest, "f" * 64):
            await connection.execute(
                "INSERT INTO adapter_faults (digest, worker, code, message)"
                " VALUES ($1, 'worker-2', 'adapter.checksum', 'the image is not the proved one')",
                name,
            )
    shown: dict[str, Any] = (await acme.get("adapters/bot")).json()["versions"][0]
    assert shown["state"] == "ready"
    assert shown["proving"] is None
    assert shown["aliases"] == ["prod"]
    proof = shown["proofs"][0]
    assert (proof["layout"], proof["worker"]) == (LAYOUT, "worker-1")
    assert proof["fingerprint"] == FINGERPRINT
    fault = shown["faults"][0]
    assert (fault["worker"], fault["code"]) == ("worker-2", "adapter.checksum")
    assert len(shown["faults"]) == 1


class CountingDatabase(Database):
    """Counts what its connections execute."""

    num_queries = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Connection, None]:
        async with super().acquire() as connection:
            yield cast(Connection, _Counting(self, connection))


class _Counting:
    def __init__(self, database: CountingDatabase, connection: Connection) -> None:
        self._database = database
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("fetch") or name == "execute":
            self._database.num_queries += 1
        return getattr(self._connection, name)


@pytest.mark.full
async def test_a_thousand_adapters_are_listed_in_few_queries(plane: Plane, base: str, dsn: str):
    key = (await plane.tenant("acme")).headers["authorization"]
    async with plane.database.transaction() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await fill(connection, tenant_id, 1000)
        await add(connection, tenant_id, "b", name="a0007")
    database = await CountingDatabase.connect(dsn)
    async with administration(database, plane.store, has_upkeep=False) as client:
        client.headers["authorization"] = key

        async def list_adapters(**query: str | int) -> dict[str, Any]:
            before = cast(CountingDatabase, database).num_queries
            answer = await client.get("adapters", params=query)
            assert cast(CountingDatabase, database).num_queries - before <= 5
            return answer.json()

        page = await list_adapters(limit=100)
        assert [adapter["name"] for adapter in page["data"]] == [f"a{i:04}" for i in range(100)]
        assert page["has_more"]
        assert page["data"][0]["aliases"] == {"prod": 1}
        states = [(page["data"][i]["states"], page["data"][i]["last_state"]) for i in (0, 7)]
        assert states == [({"ready": 1}, "ready"), ({"ready": 1, "proving": 1}, "proving")]
        seen: list[str] = []
        while page["data"]:
            seen += [adapter["name"] for adapter in page["data"]]
            page = await list_adapters(limit=400, after=seen[-1])
    assert seen == [f"a{i:04}" for i in range(1000)]
    await database.close()


async def fill(connection: Connection, tenant_id: str, count: int) -> None:
    """Adapters a0000, a0001, ... of one ready version each."""
    for number in range(count):
        await add(connection, tenant_id, "a", name=f"a{number:04}")
        await connection.fetchval("SELECT version_ready($1, $2, 1)", tenant_id, f"a{number:04}")


async def test_what_a_folder_says_is_taken_where_the_base_has_another(
    plane: Plane, base: str, tmp_path: Path
):
    own = plane.store / "models" / base
    (own / "chat_template.jinja").write_text(TEMPLATE)
    (own / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "top_p": 0.9, "eos_token_id": [1, 2]})
    )
    acme = await plane.tenant("acme")
    alike = {"chat_template": TEMPLATE + "\n", "defaults": {"top_p": 0.9}, "stop_token_ids": [2]}
    other = {
        "chat_template": "{{ messages }}",
        "defaults": {"temperature": 0.2, "top_p": 0.9, "top_k": 5},
        "stop_token_ids": [2, 3],
    }

    async def pushed(name: str, found: object, serving: object | None = None) -> Any:
        more = {"name": name, "folder_serving": json.dumps(found)}
        made = await push(acme, tmp_path / "a", serving or {}, **more)
        assert made.status_code == 201, made.text
        return made.json()["serving"]

    shown = await pushed("alike", alike)
    assert (shown["template"], shown["defaults"], shown["stop_token_ids"]) == (None, {}, [])
    shown = await pushed("other", other)
    assert shown["template"]["text"] == "{{ messages }}" and not shown["template"]["approved"]
    assert shown["defaults"] == {"temperature": 0.2, "top_k": 5}
    assert shown["stop_token_ids"] == [3]
    said = {"chat_template": TEMPLATE, "defaults": {"temperature": 0}, "stop_token_ids": [9]}
    shown = await pushed("said", other, said)
    assert shown["template"]["text"] == TEMPLATE
    assert shown["defaults"] == {"temperature": 0, "top_k": 5}
    assert shown["stop_token_ids"] == [9]


async def test_wrong_words_of_a_folder_are_refused_by_the_name_of_the_field(
    plane: Plane, base: str, tmp_path: Path
):
    acme = await plane.tenant("acme")
    for found, words in (
        ('{"defaults": {"temperature": 9}}', "folder_serving"),
        ('{"chat_template": "{% if %}"}', "not valid Jinja"),
        ('{"stop_token_ids": [320]}', "below 320"),
        ("{", "folder_serving"),
    ):
        refused = problem(await push(acme, tmp_path / "a", {}, folder_serving=found), 400)
        assert words in refused["message"]


async def test_tokens_of_a_folder_that_the_base_lacks_are_named(
    plane: Plane, base: str, tmp_path: Path
):
    """The end token of the folder ends answers in addition to the base's."""
    own = plane.store / "models" / base
    added = [{"id": n, "content": token} for n, token in enumerate(["<s>", "</s>", "<im_end>"])]
    (own / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "model": {"vocab": {"a": 9}}})
    )
    (own / "generation_config.json").write_text('{"eos_token_id": 1}')
    acme = await plane.tenant("acme")

    async def pushed(name: str, tokens: object, **serving: object) -> Any:
        more = {"name": name, "folder_tokens": json.dumps(tokens)}
        made = await push(acme, tmp_path / "a", serving, **more)
        assert made.status_code == 201, made.text
        return made.json()

    plain = await pushed("plain", {"added": {"<s>": 0, "</s>": 1, "a": 9}, "end": "</s>"})
    assert plain["serving"]["stop_token_ids"] == []
    assert not any("tokenizer" in warning for warning in plain["warnings"])
    chat = await pushed("chat", {"added": {"<im_end>": 2}, "end": "<im_end>"})
    assert chat["serving"]["stop_token_ids"] == [2]
    said = await pushed("said", {"end": "<im_end>"}, stop_token_ids=[9])
    assert said["serving"]["stop_token_ids"] == [9]
    more = await pushed("more", {"added": {"<tool>": 400, "<s>": 0}, "end": "<stop>"})
    assert more["serving"]["stop_token_ids"] == []
    assert more["warnings"][-1].endswith("split into other tokens: <tool>, <stop>")
    refused = await push(acme, tmp_path / "a", {}, folder_tokens='{"added": [1]}')
    assert "folder_tokens" in problem(refused, 400)["message"]
