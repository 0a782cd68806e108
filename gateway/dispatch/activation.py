"""Where in a prompt an activated LoRA begins to act."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.stop_strings import failure_function


def find_activation(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Start of the last occurrence of the adapter's invocation in a prompt.

    0 without an invocation: an ordinary adapter acts from the start. None where it does not occur:
    the base model answers alone, and what is generated activates nothing, as in peft. Takes linear
    time, whatever the caller sent (Knuth, Morris and Pratt, from the end).
    """
    if not invocation:
        return 0
    word = invocation[::-1]
    failure = failure_function(word)
    matched = 0
    for position in range(len(tokens) - 1, -1, -1):
        token = tokens[position]
        while matched and token != word[matched]:
            matched = failure[matched - 1]
        if token == word[matched]:
            matched += 1
            if matched == len(word):
                return position
    return None
