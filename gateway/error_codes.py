"""Describes each error `code` for the API reference of the data plane."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[int, str]] = {
    "adapter_unavailable": (
        503,
        "The adapter cannot be loaded now, because the store or one of its files is unavailable.",
    ),
    "ambiguous_header": (
        400,
        "A header appears twice, `host` is missing or repeated, or `x-api-key` and "
        "`authorization` have two keys.",
    ),
    "ambiguous_path": (
        400,
        "The path can be read in more than one way, for example because of `//` or `%2e`.",
    ),
    "answer_too_large": (
        400,
        "The answer would exceed its bound. Ask for fewer choices or for less in each.",
    ),
    "catalog_stale": (503, "The gateway has had no connection to its database for too long."),
    "context_length_exceeded": (
        400,
        "The prompt and the answer do not fit into the model's context.",
    ),
    "deadline_exceeded": (504, "No answer began within `x-request-timeout`."),
    "draining": (
        503,
        "The worker or the gateway is shutting down. Repeat the request: another one serves it.",
    ),
    "insufficient_quota": (429, "The budget of the day or the month is used up."),
    "insufficient_scope": (403, "The key lacks the scope `inference`, or may not use this model."),
    "internal_error": (500, "The server failed. The operator finds the cause by `x-request-id`."),
    "invalid_api_key": (401, "The key is missing, unknown, expired or revoked."),
    "ip_not_allowed": (403, "The key may not be used from this address."),
    "key_unconfirmed": (
        503,
        "The gateway does not know the key yet and cannot reach the database to check it.",
    ),
    "logits_nan": (
        500,
        "The model computed values that are not numbers, because it or the adapter is faulty.",
    ),
    "method_not_allowed": (
        405,
        "The route exists but takes another method, which the header `allow` names.",
    ),
    "model_not_found": (404, "The tenant has no such model, or the key may not use it."),
    "model_unavailable": (503, "The base model is unloaded or could not be loaded."),
    "model_unsatisfiable": (503, "No worker can serve the model as the workers are configured."),
    "no_worker": (503, "No worker that is ready has the model."),
    "overloaded": (503, "All queues are full, or the request would wait too long."),
    "poison_request": (500, "Workers crashed while they ran this request. It is not tried again."),
    "quota_unavailable": (503, "The gateway cannot check now whether a limit leaves room."),
    "rate_limit_exceeded": (429, "A limit on requests, tokens or concurrency is reached."),
    "request_timeout": (408, "The rest of the request did not arrive, or arrived too slowly."),
    "request_too_large": (
        413,
        "The body or its prompts exceed a bound. The status is 400 if the bound counts tokens.",
    ),
    "route_not_found": (404, "There is no such route."),
    "template_budget_exceeded": (400, "Rendering the chat template exceeds its budget."),
    "template_not_approved": (409, "No admin has approved the adapter's chat template."),
    "text_indivisible": (
        400,
        "A run of more than 65,536 characters, mostly one that is repeated, cannot be tokenised.",
    ),
    "too_many_anonymous_requests": (
        429,
        "One address sent too many requests without a key. The status is 503 if all together did.",
    ),
    "too_many_body_bytes": (
        503,
        "The bodies of all requests together fill the memory that is reserved for them.",
    ),
    "too_many_refusals": (429, "Too many of the tenant's requests were refused recently."),
    "too_many_unread": (
        503,
        "Answers that are generated or not read yet are too large in all. Stream, or ask for less.",
    ),
    "unsupported_constraint": (
        400,
        "The schema, expression or grammar cannot be enforced exactly.",
    ),
    "unsupported_content": (400, "No model here can read content of this kind, such as images."),
    "unsupported_encoding": (
        415,
        "The body has a content coding other than gzip, deflate and zstd.",
    ),
    "unsupported_item": (
        400,
        "An item of a Responses input refers to a stored response, and none is stored.",
    ),
    "unsupported_parameter": (400, "The field or its value is not supported."),
    "usage_spool_full": (503, "Too much usage is waiting to be stored."),
    "usage_unavailable": (503, "The usage of the request could not be recorded."),
    "worker_lost": (503, "The worker was lost before the answer could continue on another one."),
}
"""HTTP status and meaning of each error code."""
