"""Checks the serving data of an upload."""

from __future__ import annotations

from typing import Any

import msgspec

from admin.schemas import AliasName, EntityName
from store.database import FORMS
from store.errors import Invalid
from store.records import GenerationDefaults, ServingData
from store.stored_text import check_json


class _GivenDefaults(
    GenerationDefaults, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    pass


class _Given(ServingData, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    defaults: _GivenDefaults = _GivenDefaults()


def check_names(name: str | None, model: str | None, alias: str | None) -> None:
    """Raises Invalid if the name of the adapter, model or alias is given and its form is wrong."""
    check_entity_name("name", name)
    check_entity_name("model", model)
    _check_form("alias", alias, AliasName, "alias_name_form")


def check_entity_name(field: str, given: str | None) -> None:
    """Raises Invalid if the text is given and cannot be the name of an adapter."""
    _check_form(field, given, EntityName, "entity_name_form")


def _check_form(field: str, given: str | None, kind: Any, form: str) -> None:
    try:
        msgspec.convert(given, kind | None)
    except msgspec.ValidationError:
        raise Invalid(FORMS[form], param=field) from None


def parse_serving(written: str | msgspec.Raw, field: str = "serving") -> ServingData:
    """Parses the serving data of an upload, a JSON object. `field` is the name of the upload's
    field, for error messages. Does not parse the chat template (see `chat_template`). Raises
    Invalid."""
    try:
        text = written if isinstance(written, str) else bytes(written).decode()
        if not text:
            return ServingData()
        serving = msgspec.json.decode(text, type=_Given)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{field}: {error}", "serving_invalid", field) from None
    check_json(text.encode(), field)
    return serving
