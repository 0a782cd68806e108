"""Metrics and recent steps of an engine."""

from __future__ import annotations

import logging

from memory.reuse import RecentRatio
from telemetry import engine_metrics
from telemetry.tallies import Recent
from workers.execution.observer import FinishedStep
from workers.observe.meter import RequestMeter
from workers.observe.ring import StepRing
from workers.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineReport:
    """Observer of an engine's steps and sequences. All methods are called with the memory lock
    held."""

    def __init__(self, name: str, scheduler: Scheduler, ring: StepRing) -> None:
        """name: name of the base model."""
        self._name = name
        self._scheduler = scheduler
        self._ring = ring
        self._meter = RequestMeter(name)
        # Set as attributes instead of defined as methods, which saves a call per token.
        self.on_tokens, self.on_end = self._meter.on_tokens, self._meter.on_end
        self._decode_steps = RecentRatio()
        self._recent_itl = Recent(engine_metrics.inter_token_latency)
        self.num_integrity_failures = 0
        """Number of failed calls of `workers.observe.status.check_integrity`."""

    def on_step(self, step: FinishedStep, now: float) -> None:
        self._meter.end_step(now)
        schedule, output = step.schedule, step.output
        num_tokens, num_prefill_tokens = schedule.num_tokens, schedule.num_prefill_tokens
        if num_prefill_tokens == 0:
            self._decode_steps.add(step.device_s, 1)
        labels = self._name, engine_metrics.ENGINE
        parts_us = {**step.host_us, "forward": output.forward_us, "sample": output.sample_us}
        engine_metrics.step_tokens.record(num_tokens, *labels)
        for part, us in parts_us.items():
            engine_metrics.step_seconds.add(us * 1e-6, *labels, part)
        adapters = {item.adapter_slot for item in schedule.items if item.adapter_slot >= 0}
        self._ring.append(
            start_s=step.start_s,
            num_tokens=num_tokens,
            num_sequences=len(schedule.items),
            num_prefill_tokens=num_prefill_tokens,
            num_sampled=sum(len(result.tokens) for result in output.sequences),
            num_adapters=len(adapters),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_pages=self._scheduler.kv.num_free,
            num_preempted=schedule.num_preempted,
            **{f"{part}_us": us for part, us in parts_us.items()},
        )

    @property
    def decode_step_s(self) -> float:
        """Mean seconds of recent steps without prefill."""
        return self._decode_steps.value

    def inter_token_latency(self) -> list[tuple[float, int]]:
        """Returns the buckets of the recent times between two tokens."""
        _, (itl,) = self._recent_itl.read()
        values = itl.get((self._name, engine_metrics.ENGINE), ())
        return engine_metrics.inter_token_latency.buckets(values)
