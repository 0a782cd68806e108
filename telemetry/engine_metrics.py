"""Counters and histograms of a worker's requests and steps.

A metric whose name begins with `vllm.` has the name that vLLM gives it. On a Prometheus page, a
colon replaces the period. The labels and buckets of such a metric are vLLM's too, so that
dashboards and autoscalers made for vLLM can read it. Metrics of a worker's current state are in
workers/observe/metrics.py.
"""

from __future__ import annotations

from opentelemetry import metrics

from telemetry.tallies import Counter, Histogram

MODEL = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine`, with which vLLM numbers data-parallel engines. Always 0, because a
worker has one engine for each model."""

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKEN_BUCKETS = (1, *(1 << power for power in range(3, 15)))

meter = metrics.get_meter("loraplex.worker")

prompt_tokens = Counter(
    meter, "vllm.prompt_tokens", "Prompt tokens of requests that were answered.", MODEL
)
generation_tokens = Counter(meter, "vllm.generation_tokens", "Tokens generated.", MODEL)
requests = Counter(
    meter,
    "vllm.request_success",
    "Requests that ended, by `finished_reason`: stop, length or abort.",
    (*MODEL, "finished_reason"),
)
failures = Counter(
    meter,
    "loraplex_sequence_failures",
    "Sequences that ended in an error or were refused, by `code`.",
    (*MODEL, "code"),
)
time_to_first_token = Histogram(
    meter,
    "vllm.time_to_first_token_seconds",
    "Time from a request's arrival at the worker to its first token.",
    *(TTFT_BUCKETS, MODEL, "s"),
)
inter_token_latency = Histogram(
    meter,
    "vllm.inter_token_latency_seconds",
    "Time between two tokens of a request.",
    *(ITL_BUCKETS, MODEL, "s"),
    older_name="vllm.time_per_output_token_seconds",
)
time_per_output_token = Histogram(
    meter,
    "vllm.request_time_per_output_token_seconds",
    "Mean time between the tokens of a request.",
    *(ITL_BUCKETS, MODEL, "s"),
)
request_latency = Histogram(
    meter,
    "vllm.e2e_request_latency_seconds",
    "Time from a request's arrival at the worker to its end.",
    *(REQUEST_BUCKETS, MODEL, "s"),
)
queue_time = Histogram(
    meter,
    "vllm.request_queue_time_seconds",
    "Time from a request's arrival at the worker to its first step.",
    *(REQUEST_BUCKETS, MODEL, "s"),
)
inference_time = Histogram(
    meter,
    "vllm.request_inference_time_seconds",
    "Time from a request's first step to its end.",
    *(REQUEST_BUCKETS, MODEL, "s"),
)
prefill_time = Histogram(
    meter,
    "vllm.request_prefill_time_seconds",
    "Time from a request's first step to its first token.",
    *(REQUEST_BUCKETS, MODEL, "s"),
)
decode_time = Histogram(
    meter,
    "vllm.request_decode_time_seconds",
    "Time from a request's first token to its end.",
    *(REQUEST_BUCKETS, MODEL, "s"),
)
request_prompt_tokens = Histogram(
    meter, "vllm.request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS, MODEL
)
request_generation_tokens = Histogram(
    meter,
    "vllm.request_generation_tokens",
    "Tokens generated for a request.",
    *(TOKEN_BUCKETS, MODEL),
)
longest_generation = Histogram(
    meter,
    "vllm.request_max_num_generation_tokens",
    "Tokens generated for the longest choice of a request. Here each choice is a request.",
    *(TOKEN_BUCKETS, MODEL),
)
max_generation_tokens = Histogram(
    meter,
    "vllm.request_params_max_tokens",
    "Maximum number of tokens that a request may generate.",
    *(TOKEN_BUCKETS, MODEL),
)
class_queue_time = Histogram(
    meter,
    "loraplex_queue_time_seconds",
    "Time from a request's arrival at the worker to its first step, by class.",
    *(TTFT_BUCKETS, (*MODEL, "class"), "s"),
)
step_tokens = Histogram(
    meter, "vllm.iteration_tokens_total", "Tokens of a step.", STEP_TOKEN_BUCKETS, MODEL
)
step_seconds = Counter(
    meter,
    "loraplex_step_seconds",
    "Time of the steps by `part`: schedule, build, forward, sample or update.",
    (*MODEL, "part"),
    "s",
)
graph_failures = Counter(
    meter, "loraplex_graph_failures", "Captures of graphs that failed; their steps run op by op."
)
