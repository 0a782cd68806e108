"""Metrics of an engine's requests: numbers of tokens, and times of requests and tokens."""

from __future__ import annotations

from telemetry import engine_metrics
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, FinishReason


class RequestMeter:
    """Recorder of the metrics of gateways' requests. Requests with a negative connection are the
    engine's own (warm-up, verification) and are not counted. All times are seconds of the engine's
    clock."""

    def __init__(self, model_name: str) -> None:
        self._labels = model_name, engine_metrics.ENGINE
        self._num_tokens = 0
        """Number of tokens that the current step has generated."""
        self._intervals: dict[float, int] = {}
        """Number of sequences that received a token from the current step, by the time (in seconds)
        of the sequences' previous token."""
        # Adding 0 creates each time series, so that Prometheus's `rate()` counts the first event.
        for counter, values in (
            (engine_metrics.requests, FinishReason),
            (engine_metrics.failures, ErrorCode),
        ):
            for value in values:
                counter.add(0, *self._labels, value.value)

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Records `num_tokens` tokens that the sequence received from the current step."""
        if sequence.connection < 0:
            return
        last_s, intervals = sequence.times.last_token_s, self._intervals
        if last_s is None:
            engine_metrics.time_to_first_token.record(now - sequence.times.arrival_s, *self._labels)
            engine_metrics.prompt_tokens.add(sequence.num_prompt, *self._labels)
        else:
            intervals[last_s] = intervals.get(last_s, 0) + 1
        self._num_tokens += num_tokens

    def end_step(self, now: float) -> None:
        """Records the tokens of the step and the times between tokens. Sequences whose previous
        token came at the same time are recorded together, with their number."""
        if self._num_tokens:
            engine_metrics.generation_tokens.add(self._num_tokens, *self._labels)
            self._num_tokens = 0
        for last_s, count in self._intervals.items():
            engine_metrics.inter_token_latency.record(now - last_s, *self._labels, count=count)
        self._intervals.clear()

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        """Records the end of a request. Aborted and failed requests are only counted. Their
        durations are not recorded, because an aborted request's duration depends on the client."""
        if sequence.connection < 0:
            return
        labels = self._labels
        if isinstance(end, ErrorCode):
            engine_metrics.failures.add(1, *labels, end.value)
            return
        engine_metrics.requests.add(1, *labels, end.value)
        started_s, first_s = sequence.times.started_s, sequence.times.first_token_s
        if end is FinishReason.ABORT or started_s is None:
            return
        num_generated = sequence.num_generated - sequence.request.num_resumed
        engine_metrics.request_latency.record(now - sequence.times.arrival_s, *labels)
        waited_s = max(0.0, started_s - sequence.times.arrival_s)
        engine_metrics.queue_time.record(waited_s, *labels)
        service_class = sequence.request.service_class.value
        engine_metrics.class_queue_time.record(waited_s, *labels, service_class)
        engine_metrics.inference_time.record(now - started_s, *labels)
        engine_metrics.request_prompt_tokens.record(sequence.num_prompt, *labels)
        engine_metrics.request_generation_tokens.record(num_generated, *labels)
        engine_metrics.longest_generation.record(num_generated, *labels)
        engine_metrics.max_generation_tokens.record(sequence.request.params.max_tokens, *labels)
        if first_s is None:
            engine_metrics.prompt_tokens.add(sequence.num_prompt, *labels)
            return
        engine_metrics.prefill_time.record(first_s - started_s, *labels)
        engine_metrics.decode_time.record(now - first_s, *labels)
        if num_generated > 1:
            per_token_s = (now - first_s) / (num_generated - 1)
            engine_metrics.time_per_output_token.record(per_token_s, *labels)
