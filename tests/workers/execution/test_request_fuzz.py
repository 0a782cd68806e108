"""Requests with any values that the wire can carry, straight into an engine beside a healthy
sequence: each is refused, fails or is answered alone, and the healthy one gets its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tests.workers.formed_worker import FormedWorker
from tests.workers.process.test_worker import Setup
from workers.execution.engine import Engine
from workers.process.build import Worker
from workers.wire.protocol import FinishReason, Generate, PromptProgress, SequenceOutput

Paths = dict[tuple[str, ...], inspect.Type]

MAX_STEPS = 400
HEALTHY = 1 << 40
INTEGERS = st.one_of(
    st.integers(-3, 400),
    st.sampled_from([-(1 << 63), -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
"""All that msgpack can carry, and more often those near the ids and sizes of the model."""


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of the type, also outside of the range that a gateway would send."""
    match kind:
        case inspect.IntType():
            return INTEGERS
        case inspect.FloatType():
            return st.one_of(st.floats(-3, 3), st.floats())
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return st.text(max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=80)
        case inspect.EnumType():
            return st.sampled_from(cast("list[Enum]", [*kind.cls]))
        case inspect.ListType():
            return st.lists(values_of(kind.item_type), max_size=5)
        case inspect.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=5).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(values_of, kind.item_types))
        case inspect.DictType():
            keys, values = values_of(kind.key_type), values_of(kind.value_type)
            return st.dictionaries(keys, values, max_size=5)
        case inspect.UnionType():
            return st.one_of(*map(values_of, kind.types))
        case inspect.StructType():
            return structs_of(kind)
        case _:
            raise AssertionError(f"the schema has a new type: {kind}")


def structs_of(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    return st.builds(kind.cls, **{field.name: values_of(field.type) for field in kind.fields})


def paths_of(kind: inspect.StructType, above: tuple[str, ...] = ()) -> Paths:
    """Every field of the struct, and of structs in it that a request always has."""
    paths: Paths = {}
    for field in kind.fields:
        path = (*above, field.name)
        paths[path] = field.type
        if isinstance(field.type, inspect.StructType):
            paths |= paths_of(field.type, path)
    return paths


def replaced(struct: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    inner = replaced(getattr(struct, name), tuple(rest), value) if rest else value
    return msgspec.structs.replace(struct, **{name: inner})


PATHS = paths_of(cast("inspect.StructType", inspect.type_info(Generate)))


@st.composite
def requests(draw: st.DrawFn, usual: Generate) -> Generate:
    """A valid request in which some fields have any value, as it is after the wire."""
    request = usual
    for path in draw(st.lists(st.sampled_from([*PATHS]), min_size=1, max_size=3, unique=True)):
        request = replaced(request, path, draw(values_of(PATHS[path])))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", {"r4": {"rank": 4}})


@pytest.fixture(scope="module", params=["cpu", "cpu-ahead", "reference"])
def engine(llama: Setup, request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend, _, ahead = request.param.partition("-")
    config = llama.config(ops=backend, runs_ahead=bool(ahead))
    worker: Worker = FormedWorker(config, instance_id="test", progress=lambda *_: None)
    yield worker.instances[llama.digest].engine
    worker.close()


def healthy(llama: Setup) -> Generate:
    return llama.generate(HEALTHY, [5, 6, 7], 8, None)


def run(engine: Engine, healthy: Generate, others: list[Generate]) -> list[int]:
    """The tokens of the healthy request, which is submitted first. The others end with it."""
    with engine.scheduler.kv.lock:
        assert engine.submit(0, healthy) is None
        for number, other in enumerate(others, start=1):
            refused = engine.submit(number, other)
            assert refused is None or refused.message
    tokens: list[int] = []
    for _ in range(MAX_STEPS):
        for connection, event in engine.step():
            if connection != 0 or isinstance(event, PromptProgress):
                continue
            assert isinstance(event, SequenceOutput), event
            tokens += event.tokens
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.LENGTH
                with engine.scheduler.kv.lock:
                    for number, other in enumerate(others, start=1):
                        engine.abort(number, other.id)
                while engine.has_work:
                    engine.step()
                return tokens
    raise AssertionError("the healthy sequence does not end")


@given(st.data())
@settings(deadline=None)
def test_a_request_of_any_values_harms_no_other(llama: Setup, engine: Engine, data: Any) -> None:
    params = msgspec.structs.replace(healthy(llama).params, temperature=1.0)
    usual = msgspec.structs.replace(llama.generate(1, [1, 2, 3], 6, None), params=params)
    others = data.draw(st.lists(requests(usual), min_size=1, max_size=8))
    expected = run(engine, healthy(llama), [])
    assert run(engine, healthy(llama), others) == expected
