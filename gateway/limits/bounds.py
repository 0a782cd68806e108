"""Checks the size limits of one request: each prompt and its answer must fit the model's context,
and the prompts, choices, tools and template variables are limited in total."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gateway.exceptions import ContextLengthExceeded, InvalidRequest
from gateway.request import AllowedTools, NamedTool, Request, Tool, ToolChoice

MAX_REQUEST_TOKENS = 1 << 18
"""Maximum prompt tokens of a request. A prompt's tokens count once for each choice, because workers
receive the token ids with every choice. A single prompt may be longer if the model's context is
longer."""
MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in one prompt. No model has a longer context. Checking ten times this
number would block the event loop."""
MAX_LOGPROBS = 1 << 17
"""Maximum log-probabilities of one answer, including the alternatives of each token. This many take
about 10 MB of JSON. A worker sends all log-probabilities of a prompt in one frame, which takes 25
ms to read."""
MAX_ECHO_CHARS = 4 << 20
"""Maximum characters of prompts that one answer repeats."""
MAX_TOOLS = 256
MAX_SCHEMA_BYTES = 256 << 10
"""Maximum bytes of all tools of a request together, as JSON with names, descriptions and
schemas."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects in JSON whose structure the caller chooses."""
MAX_TEMPLATE_ARGUMENTS = 64
MAX_TEMPLATE_BYTES = 64 << 10
"""Maximum bytes, as JSON, of a caller's own variables for the chat template."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
NESTING = np.zeros(256, np.int8)
"""Change of the nesting depth that each byte value causes outside of JSON strings."""
NESTING[list(b"[{")], NESTING[list(b"]}")] = 1, -1
VARIABLE_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")
TEMPLATE_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message")
)
"""Template variables that a caller may not set, because the gateway sets them."""
MAX_VECTOR_NUMBERS = 1 << 21
"""Maximum numbers in all vectors of one answer together. This many take about 40 MB in JSON, or 11
MB in base64."""
VECTOR_NUMBER_BYTES = 25
"""Maximum bytes of a vector's number in JSON, such as `-1.2345678918063641e-05,`."""
LOGPROB_BYTES = 100
"""Bytes of a log-probability in JSON, with the texts and bytes of tokens of the usual lengths."""
TOKEN_BYTES = 16
"""Bytes of a generated token in JSON, with its id."""
ECHOED_BYTES = 6
"""Maximum bytes of a repeated character in JSON."""
CHOICE_BYTES = 1024
"""Bytes of a choice in JSON without its tokens."""


class AnswerSize(NamedTuple):
    """Maximum size of an answer in one body."""

    num_choices: int
    num_tokens: int = 0
    num_logprobs: int = 0
    num_echoed: int = 0
    """Characters of prompts that the answer repeats."""
    num_vector_numbers: int = 0

    @property
    def num_bytes(self) -> int:
        return (
            self.num_choices * CHOICE_BYTES
            + self.num_tokens * TOKEN_BYTES
            + self.num_logprobs * LOGPROB_BYTES
            + self.num_echoed * ECHOED_BYTES
            + self.num_vector_numbers * VECTOR_NUMBER_BYTES
        )


def completion_tokens(prompt: int, asked: int | None, default: int, max_model_len: int) -> int:
    """Returns the maximum number of completion tokens after a prompt of `prompt` tokens: `asked`,
    or `default` if `asked` is None, but at most the room left in the context. Raises
    ContextLengthExceeded if no room is left."""
    room = max_model_len - prompt
    wanted = default if asked is None else asked
    if room < min(wanted, 1):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {prompt + max(wanted, 1)} tokens "
            f"({prompt} in the prompt, {wanted} in the completion)."
        )
    return min(wanted, room)


def check_total(
    lengths: Sequence[int], num_choices: int, max_model_len: int, *, param: str
) -> None:
    """Raises InvalidRequest if all prompts together have too many tokens. `lengths` are the
    prompts' numbers of tokens, or lower bounds of these numbers."""
    total, most = sum(lengths) * num_choices, max(MAX_REQUEST_TOKENS, max_model_len)
    if total > most:
        raise InvalidRequest(
            f"A request may have {most} prompt tokens, each counted once a choice; yours has "
            f"{total}. Send fewer prompts or choices in one request.",
            param=param,
            code="request_too_large",
        )


def check_answer(num_logprobs: int, num_echoed: int) -> None:
    """Raises InvalidRequest if an answer could have too many log-probabilities or repeated
    characters."""
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
    """Raises InvalidRequest if the tools are too many or too large, two tools have the same name,
    or `choice` names a tool that is not among them. `dropped` are the names of request fields that
    were ignored. The error message lists the ignored tools of other types."""
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
    large, or have a reserved name."""
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
    """Returns the value as JSON. Raises InvalidRequest if it is too long or too deeply nested."""
    try:
        encoded = msgspec.json.encode(value)
    except RecursionError:
        raise _too_deep(param) from None
    check_json(encoded, max_bytes, param=param)
    return encoded.decode()


def check_json(written: bytes, max_bytes: int, *, param: str) -> None:
    """Raises InvalidRequest if JSON text is too long or too deeply nested. Determines the nesting
    from the bytes with numpy, because a Python loop over the values of 256 KiB would block the
    event loop."""
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


def check_vectors(num_vectors: int, size: int, request: Request) -> int:
    """Returns the number of all numbers in an answer's vectors, which count once for each form.
    Raises InvalidRequest if there would be too many, or if the request asks for more dimensions
    than `size`, the number that the model's vectors have."""
    dimensions = request.dimensions
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(
            f"This model's vectors have {size} dimensions; you asked for {dimensions}.",
            param=request.dimensions_param,
        )
    total = num_vectors * (dimensions or size) * request.num_vector_forms
    if total > MAX_VECTOR_NUMBERS:
        raise InvalidRequest(
            f"The vectors of an answer may have {MAX_VECTOR_NUMBERS} numbers, each counted once a "
            f"form; yours would have {total}. Send fewer inputs in one request, or ask for fewer "
            f"'{request.dimensions_param}'.",
            param=request.prompts_param,
            code="answer_too_large",
        )
    return total
