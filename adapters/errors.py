"""Error for refused adapters. Torch-free."""

from __future__ import annotations

from typing import Any

from adapters.hints import hint_for


class AdapterRejected(Exception):
    """Error for an uploaded adapter that is refused because it breaks a rule.

    `code` is a stable identifier. `field` names the config key, tensor or file. `got` and `allowed`
    are JSON values; text from the uploader is cut to about 200 characters. `hint` says what to
    change in the training script. By default, `hint` is the hint for the code (`adapters.hints`).
    """

    def __init__(
        self, code: str, field: str, got: object = None, allowed: object = None, hint: str = ""
    ) -> None:
        self.code = code
        self.field = _shorten(field)
        self.got = _shorten(got)
        self.allowed = allowed
        self.hint = hint or hint_for(code)
        super().__init__(f"{code} ({self.field}): got {self.got!r}. {self.hint}".rstrip())

    def to_dict(self) -> dict[str, Any]:
        """Returns the error as a JSON object, for responses to uploads and for the database."""
        names = ("code", "field", "got", "allowed", "hint")
        return {name: getattr(self, name) for name in names}


def _shorten(value: Any, limit: int = 200) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    text = value if isinstance(value, str) else _render(value)
    shown = text if len(text) <= limit else text[:limit] + "..."
    # The database stores neither lone surrogates nor U+0000.
    return shown.encode("utf-8", "replace").decode().replace("\0", r"\x00")


def _render(value: object) -> str:
    """Returns the value's repr, or a summary if the repr could be large."""
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict | list | tuple | set) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)} items"
    return repr(value)
