"""Meaning of each error `code` for clients, for the API reference of the data plane."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[int, str]] = {
    "adapter_unavailable": (503, "The adapter cannot be loaded now: the store is away, or a file."),
    "ambiguous_header": (
        400,
        "A header is there twice, no `host` or two, or `x-api-key` beside another `authorization`.",
    ),
    "ambiguous_path": (400, "The path can be read in more than one way, such as `//` or `%2e`."),
    "answer_too_large": (400, "The answer would exceed its bound: ask for fewer choices or less."),
    "catalog_stale": (503, "The gateway has been without its database for too long."),
    "context_length_exceeded": (400, "Prompt and answer do not fit the model's context."),
    "deadline_exceeded": (504, "No answer began in time: `x-request-timeout`."),
    "draining": (503, "The worker or gateway is being stopped. Another one serves the next try."),
    "insufficient_quota": (429, "A budget of the day or the month is used up."),
    "insufficient_scope": (
        403,
        "The key lacks the scope `inference`, or the model is not its own.",
    ),
    "internal_error": (500, "The server failed. The operator finds it by `x-request-id`."),
    "invalid_api_key": (401, "No key, or one that is unknown, expired or revoked."),
    "ip_not_allowed": (403, "The key may not be used from this address."),
    "key_unconfirmed": (503, "The key is new here, and the database cannot be asked."),
    "logits_nan": (500, "The model computed numbers that are none; a fault of model or adapter."),
    "method_not_allowed": (405, "The route is there, and takes another method (`allow`)."),
    "model_not_found": (404, "The tenant has no such model, or the key may not use it."),
    "model_unavailable": (503, "The base model is unloaded, or could not be loaded."),
    "model_unsatisfiable": (503, "No worker, as they are set up, can ever serve the model."),
    "no_worker": (503, "No ready worker has the model."),
    "overloaded": (503, "All queues are full, or the wait would be too long."),
    "poison_request": (500, "Workers were lost of this request; it is not tried again."),
    "quota_unavailable": (503, "Whether a limit leaves room cannot be found out now."),
    "rate_limit_exceeded": (429, "A limit of requests, tokens or concurrency is reached."),
    "request_timeout": (408, "The rest of the request did not come, or too slowly."),
    "request_too_large": (413, "The body or its prompts exceed a bound; 400 where it is counted."),
    "route_not_found": (404, "There is no such route."),
    "template_budget_exceeded": (400, "Rendering the chat template takes more than its budget."),
    "template_not_approved": (409, "No admin has approved the adapter's chat template."),
    "too_many_anonymous_requests": (429, "Too many requests without a key; 503 from all together."),
    "too_many_body_bytes": (503, "The bodies of all requests together fill their memory."),
    "too_many_refusals": (429, "Too many requests of the tenant were refused recently."),
    "unsupported_constraint": (400, "A schema, expression or grammar that cannot be held exactly."),
    "unsupported_content": (400, "Content of a kind that no model here can read, as an image."),
    "unsupported_item": (
        400,
        "An item of a Responses input that only a stored response could resolve.",
    ),
    "unsupported_parameter": (400, "A field, or a value of it, that is not supported."),
    "usage_spool_full": (503, "Too much usage waits to be stored."),
    "usage_unavailable": (503, "What the request uses could not be recorded."),
    "worker_lost": (503, "The worker was lost before the answer could go on elsewhere."),
}
"""Status and meaning, by code."""
