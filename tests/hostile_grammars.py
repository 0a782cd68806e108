"""Schemas, expressions and grammars that grow in size or depth, each in a way in which a compiler
could take too long, too much memory or too much of its stack. Schemas are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from hypothesis import strategies as st

DEFINITIONS = ',"$defs":{'
INTEGER = '{"type":"integer"}'
WRAPS = {
    "items": '{"type":"array","items":%s}',
    "prefixItems": '{"type":"array","prefixItems":[%s]}',
    "properties": '{"type":"object","properties":{"a":%s}}',
    "patternProperties": '{"type":"object","patternProperties":{"^a":%s}}',
    "additionalProperties": '{"type":"object","additionalProperties":%s}',
    "anyOf": '{"anyOf":[%s,{"type":"null"}]}',
    "allOf": '{"allOf":[%s]}',
}
DOUBLES = {
    "allOf": '{"allOf":[%s,%s]}',
    "anyOf": '{"anyOf":[%s,{"type":"array","items":%s}]}',
}
RULES = {
    "rules": 'r%d "a"',
    "optional rules": '("b" r%d)?',
    "repeated rules": '(("b" r%d)? "c"){2,3}',
    "two rules": "r%d r%d",
    "terminals": 'R%d "a"',
    "optional terminals": '("b" | R%d)+',
    "two terminals": "R%d R%d",
}
EXPRESSIONS: dict[str, Callable[[int], str]] = {
    "a?": lambda n: "a?" * n,
    "(a|b)?": lambda n: "(a|b)?" * n,
    "(|a)": lambda n: "(|a)" * n,
    "a??": lambda n: "a??" * n,
    "(a*b*)*": lambda n: "(a*b*)*" * n,
    "a? and .": lambda n: "a?" * n + "." * n,
    r"\pL?": lambda n: r"\pL?" * n,
    "a repeat": lambda n: f"a{{0,{n}}}",
    "nested repeats": lambda n: f"x((a{{0,{n}}}b?){{0,{n}}}c?){{0,{n}}}",
    "groups": lambda n: "(" * n + "a" + ")" * n,
    "optional groups": lambda n: "(b" * n + "a" + ")?" * n,
    "alternatives": lambda n: "|".join(f"w{number}" for number in range(n)),
}


def chain(definition: str, length: int, last: str = INTEGER) -> str:
    """A schema of definitions that refer to each other."""
    definitions = [f'"d{length}":{last}']
    for number in range(length):
        reference = f'{{"$ref":"#/$defs/d{number + 1}"}}'
        definitions.append(f'"d{number}":{definition.replace("%s", reference)}')
    return f'{{"$ref":"#/$defs/d0"{DEFINITIONS}{",".join(definitions)}}}}}'


def deep(wrap: str, depth: int, inner: str = "%s") -> str:
    before, after = wrap.split("%s")
    return before * depth + inner + after * depth


def nest(wrap: str, depth: int) -> str:
    return deep(wrap, depth, INTEGER)


def double(wrap: str, depth: int) -> str:
    """A schema whose size doubles with each level."""
    schema = INTEGER
    for _ in range(depth):
        schema = wrap.replace("%s", schema)
    return schema


def rules(rule: str, length: int) -> str:
    """A grammar of rules, or terminals, that name each other."""
    name = "R" if "R%d" in rule else "r"
    lines = [f"start: {name}0"]
    for number in range(length):
        lines.append(f"{name}{number}: {rule.replace('%d', str(number + 1))}")
    return "\n".join([*lines, f'{name}{length}: "x"?'])


def pattern(expression: str) -> str:
    return json.dumps({"type": "string", "pattern": f"^{expression}$"})


def properties(count: int) -> str:
    listed = ",".join(f'"p{number}":{INTEGER}' for number in range(count))
    return f'{{"type":"object","properties":{{{listed}}}}}'


def hidden(schema: str) -> str:
    """A schema whose first token costs nothing."""
    inner, _, definitions = schema.partition(DEFINITIONS)
    rest = f"{DEFINITIONS}{definitions}" if definitions else "}"
    inner = f"{inner}}}" if definitions else inner
    return f'{{"type":"object","properties":{{"x":{inner}}},"required":["x"]{rest}'


SIZES = st.sampled_from([1, 3, 10, 30, 100, 128, 300, 1_000, 2_700, 8_000, 20_000])
expressions = st.builds(
    lambda build, size: build(size), st.sampled_from(list(EXPRESSIONS.values())), SIZES
)
wraps = st.sampled_from(list(WRAPS.values()))
visible = st.one_of(
    st.builds(chain, wraps, SIZES),
    st.builds(lambda wrap, size: chain(deep(wrap, 4), size), wraps, SIZES),
    st.builds(chain, st.sampled_from(list(DOUBLES.values())), SIZES, expressions.map(pattern)),
    st.builds(nest, wraps, SIZES),
    st.builds(double, st.sampled_from(list(DOUBLES.values())), st.integers(0, 12)),
    expressions.map(pattern),
    SIZES.map(properties),
    SIZES.map(lambda size: json.dumps({"enum": [f"v{number}" for number in range(size)]})),
    SIZES.map(lambda size: json.dumps({"type": "integer", "multipleOf": size * 9_973})),
)
schemas = visible | visible.map(hidden)
larks = st.one_of(
    st.builds(rules, st.sampled_from(list(RULES.values())), SIZES),
    SIZES.map(lambda size: f'start: {"(" * size}"a"{")" * size}'),
    expressions.map(lambda expression: f'start: "x" T\nT: /{expression}/'),
    schemas.map(lambda schema: f'start: "x" %json {schema}'),
)
