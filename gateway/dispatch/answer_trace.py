"""Fills the spans of an answered request. The spans contain no text of prompts and answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter

from gateway import telemetry
from gateway.dispatch.generation import Generation, WorkerTimes
from gateway.dispatch.run import Run
from gateway.tracing import Detail, Event, Stage, Value
from workers.wire.client import WorkerClient

MAX_CANDIDATES = 8
"""Maximum number of candidate workers that a span lists for one routing decision."""


def routing_attributes(weighed: Mapping[WorkerClient, float]) -> dict[str, Value]:
    """Returns the span attributes of a routing decision: the candidate workers and their predicted
    seconds, best first."""
    ranked = sorted(weighed.items(), key=itemgetter(1))[:MAX_CANDIDATES]
    return {
        "loraplex.routing.candidates": [worker.instance_id for worker, _ in ranked],
        "loraplex.routing.predicted_s": [seconds for _, seconds in ranked],
    }


def answer_detail(run: Run, generation: Generation, outcome: str) -> Detail:
    """Returns the span details of an answer that has ended."""
    attributes: dict[str, Value] = {
        **_request_attributes(run),
        **_usage_attributes(generation),
        "loraplex.outcome": outcome,
        "loraplex.worker": generation.worker_id,
    }
    return Detail(attributes, _events(generation), _stages(generation))


def _request_attributes(run: Run) -> dict[str, Value]:
    """Returns span attributes of the request. The names that begin with `gen_ai` follow
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""
    request, target, caller = run.request, run.target, run.caller
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": run.operation,
        "gen_ai.provider.name": telemetry.PROVIDER,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.choice.count": request.num_choices if request.num_choices > 1 else None,
        "gen_ai.request.stream": request.stream,
        "loraplex.request.id": run.request_id,
        "loraplex.key.id": caller.key.id,
        "loraplex.base_model": target.base.name,
        "loraplex.service_class": run.caller.service.service_class.value,
        "loraplex.prompts": len(run.prompts),
    }
    if (version := target.version) is not None:
        found["loraplex.adapter.name"] = version.name
        found["loraplex.adapter.version"] = version.version
        found["loraplex.adapter.digest"] = version.digest
    return {name: value for name, value in found.items() if value is not None}


def _usage_attributes(generation: Generation) -> dict[str, Value]:
    usage = generation.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [each or "none" for each in generation.finish_reasons],
    }


def _events(generation: Generation) -> list[Event]:
    """Returns the moves of all sequences to other workers as events. Adds preemptions and adapter
    evictions, but only of the sequence whose worker reported times last."""
    events = [
        Event(
            "resume" if move.num_resumed else "retry",
            move.at,
            {
                "loraplex.worker.from": move.from_worker,
                "loraplex.worker.to": move.to_worker,
                "error.type": move.reason,
                "loraplex.tokens_resumed": move.num_resumed,
            },
        )
        for move in generation.moves
    ]
    if (told := generation.worker_times) is not None:
        worker: dict[str, Value] = {"loraplex.worker": told.worker_id}
        events += [
            Event("preemption", told.sent_at + at_s, worker) for at_s in told.times.preempted_s
        ]
        load = told.times.adapter_load
        if load is not None and load.num_evicted:
            evicted = {**worker, "loraplex.adapters.evicted": load.num_evicted}
            events.append(Event("eviction", told.sent_at + load.copy_begun_s, evicted))
    return events


def _stages(generation: Generation) -> list[Stage]:
    """Returns the stages of the sequence whose worker reported times last. The worker's clock
    differs from the gateway's, so the stages are placed as if the sequence had reached the worker
    at the moment when it was sent."""
    told = generation.worker_times
    if told is None:
        return []
    times, worker = told.times, told.worker_id
    attributes: dict[str, Value] = {"loraplex.worker": worker}
    started_s, first_s, ended_s = times.started_s, times.first_token_s, _ended_s(generation, told)
    bounds = [("queue", 0.0, ended_s if started_s is None else started_s)]
    if started_s is not None:
        bounds.append(("prefill", started_s, ended_s if first_s is None else first_s))
    if first_s is not None:
        bounds.append(("decode", first_s, ended_s))
    if times.model_wait is not None:
        bounds.append(("model_swap", *times.model_wait))
    stages = [
        Stage(name, told.sent_at + begun_s, told.sent_at + end_s, attributes)
        for name, begun_s, end_s in bounds
    ]
    if (load := times.adapter_load) is not None:
        begun_at, ended_at = told.sent_at + load.begun_s, told.sent_at + load.ended_s
        tier: dict[str, Value] = {**attributes, "loraplex.adapter.tier": load.tier}
        stages.append(Stage("adapter_load", begun_at, ended_at, tier))
    return stages


def _ended_s(generation: Generation, told: WorkerTimes) -> float:
    """Returns the seconds from the sequence's arrival at the worker to its end. Uses the gateway's
    clock if the gateway ended the sequence, for example at a stop string, because the worker has
    not reported that end."""
    if told.is_last:
        return told.times.told_s
    return (generation.ended_at or time.perf_counter()) - told.sent_at
