"""Finds the position in a prompt at which an activated LoRA begins to act."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.stop_strings import failure_function


def find_activation(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Returns the start of the last occurrence of the adapter's invocation in a prompt.

    Returns 0 if the invocation is empty, because an ordinary adapter acts from the start. Returns
    None if the prompt does not contain the invocation. Then only the base model answers, and
    generated tokens do not activate the adapter, as in peft. Takes linear time for any input
    (Knuth-Morris-Pratt, from the end).
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
