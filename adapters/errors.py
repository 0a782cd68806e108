"""Why an adapter was refused, and why one cannot be served now. Torch-free."""

from __future__ import annotations

from typing import Any

from adapters.hints import hint_for


class AdapterRejected(Exception):
    """An uploaded adapter breaks a rule.

    `code` is stable; `field` names the config key, tensor or file; `got` and
    `allowed` are JSON values, what came from the uploader cut to a few hundred characters. `hint`
    says what to change in the training script, by default what is known for the code.
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
        """The object the upload route answers with, and the `rejected` row keeps."""
        names = ("code", "field", "got", "allowed", "hint")
        return {name: getattr(self, name) for name in names}


class AdapterUnavailable(Exception):
    """An adapter version cannot be brought to the device: missing, corrupt or too large."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def _shorten(value: Any, limit: int = 200) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    text = value if isinstance(value, str) else _render(value)
    shown = text if len(text) <= limit else text[:limit] + "..."
    # Neither a half of a surrogate pair nor U+0000 can be stored.
    return shown.encode("utf-8", "replace").decode().replace("\0", r"\x00")


def _render(value: object) -> str:
    """repr, of the head alone where the whole could be large."""
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict | list | tuple | set) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)} items"
    return repr(value)
