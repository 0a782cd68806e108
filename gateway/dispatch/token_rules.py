"""Creates the rules on the tokens that the answers of a request may have, in the form for
workers."""

from __future__ import annotations

from gateway.dispatch.prompts import Prompt
from gateway.exceptions import InvalidRequest
from gateway.generation_request import GenerationRequest
from gateway.text.tokenizer import ModelTokenizer
from workers.wire.protocol import ThoughtBound, TokenRules

MAX_BANNED_TOKENS = 4096
"""Maximum number of tokens of all banned words of a request. It is limited because the tokens are
sent with each sequence."""


async def token_rules(
    asked: GenerationRequest,
    tokenizer: ModelTokenizer,
    prompt: Prompt,
    domain: str,
    *,
    has_grammar: bool,
) -> TokenRules | None:
    """Returns the rules of a request, or None if any token is allowed. Raises InvalidRequest."""
    if asked.allowed_token_ids and has_grammar:
        raise InvalidRequest(
            "'allowed_token_ids' cannot be combined with a schema, a grammar or a call that is "
            "held to one.",
            param="allowed_token_ids",
            code="unsupported_parameter",
        )
    rules = TokenRules(
        asked.allowed_token_ids,
        await _banned(asked.bad_words, tokenizer, domain),
        _thought(asked, tokenizer, prompt),
    )
    return None if rules == TokenRules() else rules


async def _banned(
    words: list[str], tokenizer: ModelTokenizer, domain: str
) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that spell each word at the beginning of a text, and after a space."""
    if not words:
        return ()
    bare = [word.lstrip() or word for word in words]
    spelled = await tokenizer.encode_many(
        [*bare, *(f" {word}" for word in bare)], domain=domain, add_special_tokens=False
    )
    banned: dict[tuple[int, ...], None] = {}
    for number, tokens in enumerate(spelled):
        # If these tokens end with the tokens of the bare word, banning the bare word is enough.
        plain = spelled[number - len(bare)] if number >= len(bare) else []
        if tokens and not (plain and tokens[-len(plain) :] == plain):
            banned[tuple(tokens)] = None
    num_tokens = sum(map(len, banned))
    if num_tokens > MAX_BANNED_TOKENS:
        raise InvalidRequest(
            f"'bad_words' may have {MAX_BANNED_TOKENS} tokens in all; yours have {num_tokens}.",
            param="bad_words",
        )
    return tuple(banned)


def _thought(
    asked: GenerationRequest, tokenizer: ModelTokenizer, prompt: Prompt
) -> ThoughtBound | None:
    budget = asked.thought_budget
    if budget is None or prompt.form is None or not prompt.form.has_thoughts:
        return None
    if (markers := tokenizer.thought_tokens) is not None:
        return ThoughtBound(budget.max_tokens, *markers, is_begun=prompt.in_thought)
    if budget.is_wish:
        return None
    raise InvalidRequest(
        "The markers of this model's thoughts are no tokens of their own, so that thoughts cannot "
        "be bounded.",
        param=budget.param,
        code="unsupported_parameter",
    )


def is_thought_unbounded(asked: GenerationRequest, tokenizer: ModelTokenizer) -> bool:
    """Returns whether the request has a thought budget that is only a wish
    (`ThoughtBudget.is_wish`) and that cannot be enforced for this model."""
    budget = asked.thought_budget
    return budget is not None and budget.is_wish and tokenizer.thought_tokens is None
