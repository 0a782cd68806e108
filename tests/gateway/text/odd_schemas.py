"""Schemas of tools that are rarely written: valid ones, and ones that are none."""

from __future__ import annotations

from typing import Any

VALID: list[dict[str, Any]] = [
    {},
    {"type": ["object", "null"]},
    {"type": "object", "properties": {"x": True}},
    {"type": "object", "properties": {"x": False}},
    {"type": "object", "properties": {"x": {}}},
    {"type": "object", "properties": {"x": {"anyOf": [True]}}},
    {"type": "object", "properties": {"x": {"anyOf": [False, {"type": ["string", "null"]}]}}},
    {"type": "object", "properties": {"x": {"oneOf": [True]}}},
    {"type": "object", "properties": {"x": {"allOf": [True, {"type": "string"}]}}},
    {"type": "object", "properties": {"x": {"type": ["integer", "string"]}}},
    {"type": "object", "properties": {"x": {"type": "array", "items": False}}},
    {
        "type": "object",
        "properties": {"x": {"type": "array", "prefixItems": [True], "items": True}},
    },
    {"type": "object", "properties": {"x": {"enum": [1, None, "a", [], {}]}}},
    {"type": "object", "properties": {"x": {"const": None}}},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": True}},
    {"type": "object", "properties": {"x": {"not": {}}, "y": {"if": True, "then": False}}},
    {"type": "object", "additionalProperties": True, "patternProperties": {"^x": True}},
    {"type": "object", "properties": {}, "required": ["x"]},
    {"allOf": [True], "anyOf": [True], "oneOf": [True, False]},
]
INVALID: list[dict[str, Any]] = [
    {"properties": 5},
    {"properties": {"x": 5}},
    {"properties": {"x": {"anyOf": 5, "type": 5}}},
    {"properties": {"x": {"anyOf": [5, [], None]}}},
    {"properties": {"x": {"type": {"a": 1}}}},
    {"properties": {"x": {"type": [[], {}, 5]}}},
    {"properties": {"x": {"type": None, "items": None}}},
    {"required": [[], {}, 5], "properties": {"x": {}}},
    {"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [], "allOf": None},
    {"oneOf": 5, "discriminator": 5, "$ref": 5, "enum": 5},
    {"nullable": True, "type": {}, "enum": 5, "$ref": []},
]
ODD_SCHEMAS = VALID + INVALID
