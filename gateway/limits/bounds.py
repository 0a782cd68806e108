"""How large one request may be: each prompt with its answer against the model's context, and all
prompts and choices together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gateway.exceptions import ContextLengthExceeded, InvalidRequest
from gateway.generation_request import AllowedTools, GenerationRequest, NamedTool, Tool, ToolChoice

MAX_REQUEST_TOKENS = 1 << 18
"""Prompt tokens of one request, each counted once a choice: a worker is sent so many ids. A single
prompt may fill a context that is longer than this."""
MAX_TOKEN_IDS = 1 << 20
"""Token ids of one prompt at most: more than any context; to look at ten times as many would hold
up the loop."""
MAX_LOGPROBS = 1 << 17
"""Log-probabilities of one answer, the likeliest others of each token included: some 10 MB of JSON.
A worker tells those of a prompt in one frame, which takes 25 ms to read."""
MAX_ECHO_CHARS = 4 << 20
"""Characters of prompts that one answer repeats."""
MAX_TOOLS = 256
MAX_SCHEMA_BYTES = 256 << 10
"""Bytes of all tools of a request at most, as JSON with names and descriptions."""
MAX_DEPTH = 64
"""Lists and objects inside each other, of what a caller may nest as it likes."""
MAX_TEMPLATE_ARGUMENTS = 64
MAX_TEMPLATE_BYTES = 64 << 10
"""Bytes of a caller's own variables for the chat template at most, as JSON."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
NESTING = np.zeros(256, np.int8)
"""What each byte of JSON outside strings adds to the depth."""
NESTING[list(b"[{")], NESTING[list(b"]}")] = 1, -1
VARIABLE_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")
TEMPLATE_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message")
)
"""Variables of a template that are fields of the request."""
MAX_VECTOR_NUMBERS = 1 << 21
"""Numbers of all vectors of one answer: some 40 MB of JSON, or 11 MB in base64."""


def completion_tokens(prompt: int, asked: int | None, default: int, max_model_len: int) -> int:
    """Returns how many tokens an answer to `prompt` tokens may have. What was asked for is cut to
    the room that is left. Raises ContextLengthExceeded if none is left, or if more than the whole
    context was asked for."""
    room = max_model_len - prompt
    wanted = default if asked is None else asked
    if (asked is not None and asked > max_model_len) or room < min(wanted, 1):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {prompt + max(wanted, 1)} tokens "
            f"({prompt} in the prompt, {wanted} in the completion)."
        )
    return min(wanted, room)


def check_total(
    lengths: Sequence[int], num_choices: int, max_model_len: int, *, param: str
) -> None:
    """Checks all prompts together, by their lengths in tokens or by the fewest that they can have.
    Raises InvalidRequest."""
    total, most = sum(lengths) * num_choices, max(MAX_REQUEST_TOKENS, max_model_len)
    if total > most:
        raise InvalidRequest(
            f"A request may have {most} prompt tokens, each counted once a choice; yours has "
            f"{total}. Send fewer prompts or choices in one request.",
            param=param,
            code="request_too_large",
        )


def check_answer(num_logprobs: int, num_echoed: int) -> None:
    """Checks an answer before it is begun: its log-probabilities, and the characters that it
    repeats. Raises InvalidRequest."""
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"An answer may have {MAX_LOGPROBS} log-probabilities; yours could have "
            f"{num_logprobs}: each token has its own and those of the likeliest others. Ask for "
            "fewer, set 'max_tokens', or stream the answer: then only those of prompts count.",
            param="logprobs",
            code="answer_too_large",
        )
    if num_echoed > MAX_ECHO_CHARS:
        raise InvalidRequest(
            f"An answer may repeat {MAX_ECHO_CHARS} characters of prompts; yours would repeat "
            f"{num_echoed}. Send fewer prompts or choices in one request.",
            param="echo",
            code="answer_too_large",
        )


def check_tools(
    tools: Sequence[Tool], choice: ToolChoice = "auto", dropped: Sequence[str] = ()
) -> None:
    """Raises InvalidRequest if the tools are too many, too large or not told apart by name, or the
    choice names none of them. `dropped`: what the request gave beside them."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"A request may have {MAX_TOOLS} tools; yours has {len(tools)}.", param="tools"
        )
    names = _check_names(tools)
    if tools:
        check_nested([tool.for_template() for tool in tools], MAX_SCHEMA_BYTES, param="tools")
    if choice in ("auto", "none"):
        return
    others = [name for name in dropped if name.startswith("tools.") and name != "tools.options"]
    beside = f" Tools of other types were dropped: {', '.join(others[:8])}." if others else ""
    if not tools:
        raise InvalidRequest(
            f"'tool_choice' needs a function in 'tools'.{beside}", param="tool_choice"
        )
    wanted = [choice.name] if isinstance(choice, NamedTool) else []
    if isinstance(choice, AllowedTools):
        wanted = choice.names
        if not wanted:
            raise InvalidRequest(
                f"'tool_choice' requires a call and allows no function.{beside}",
                param="tool_choice",
            )
    for name in wanted:
        if name not in names:
            raise InvalidRequest(
                f"'tools' has no function {name[:128]!r}.{beside}", param="tool_choice"
            )


def _check_names(tools: Sequence[Tool]) -> set[str]:
    names: set[str] = set()
    for tool in tools:
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(
                "A tool's name has 1 to 128 letters, digits, '_', '-' or '.'; yours is "
                f"{tool.name[:128]!r}.",
                param="tools",
            )
        if tool.name in names:
            raise InvalidRequest(f"'tools' has {tool.name!r} twice.", param="tools")
        names.add(tool.name)
    return names


def check_template_arguments(arguments: dict[str, Any]) -> None:
    """Raises InvalidRequest if a caller's variables for the chat template are too many or too
    large, or take the place of others."""
    param = "chat_template_kwargs"
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise InvalidRequest(f"At most {MAX_TEMPLATE_ARGUMENTS} variables are taken.", param=param)
    for name in arguments:
        if not VARIABLE_NAME.fullmatch(name) or name in TEMPLATE_VARIABLES:
            raise InvalidRequest(
                f"A variable has 1 to 64 letters, digits or '_', begins with a letter, and is none "
                f"of {', '.join(sorted(TEMPLATE_VARIABLES))}; yours is {name[:64]!r}.",
                param=param,
            )
    if arguments:
        check_nested(arguments, MAX_TEMPLATE_BYTES, param=param)


def check_nested(value: Any, max_bytes: int, *, param: str) -> str:
    """The value as JSON. Raises InvalidRequest if that is too long, or lists and objects are too
    deep inside each other."""
    try:
        encoded = msgspec.json.encode(value)
    except RecursionError:
        raise _too_deep(param) from None
    check_json(encoded, max_bytes, param=param)
    return encoded.decode()


def check_json(written: bytes, max_bytes: int, *, param: str) -> None:
    """Raises InvalidRequest if JSON text is too long, or lists and objects are too deep inside each
    other. Counted in its bytes: to walk over the values of 256 KiB would hold up the loop."""
    if len(written) > max_bytes:
        raise InvalidRequest(
            f"'{param}' may have {max_bytes} bytes of JSON; yours has {len(written)}.", param=param
        )
    bare = written.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(bare, np.uint8)
    is_in_string = (np.cumsum(text == ord('"'), dtype=np.uint8) & 1).astype(np.bool_)
    depths = np.cumsum(np.where(is_in_string, 0, NESTING[text]), dtype=np.int32)
    if depths.max(initial=0) > MAX_DEPTH:
        raise _too_deep(param)


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' may have {MAX_DEPTH} lists and objects inside each other.", param=param
    )


def check_vectors(num_vectors: int, size: int, asked: GenerationRequest) -> None:
    """Checks an answer of vectors before it is begun. size: numbers that the model's vectors have.
    Raises InvalidRequest."""
    dimensions = asked.dimensions
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(
            f"This model's vectors have {size} dimensions; you asked for {dimensions}.",
            param=asked.dimensions_param,
        )
    total = num_vectors * (dimensions or size)
    if total > MAX_VECTOR_NUMBERS:
        raise InvalidRequest(
            f"The vectors of an answer may have {MAX_VECTOR_NUMBERS} numbers; yours would have "
            f"{total}. Send fewer inputs in one request, or ask for fewer "
            f"'{asked.dimensions_param}'.",
            param=asked.prompts_param,
            code="answer_too_large",
        )
