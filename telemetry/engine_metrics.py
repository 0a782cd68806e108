"""Counters and histograms of a worker's requests and steps.

A metric whose name begins with `vllm:` has the name that vLLM gives it. The labels and buckets of
such a metric are vLLM's too, so that dashboards and autoscalers made for vLLM can read it. Metrics
of a worker's current state are in workers/observe/metrics.py.
"""

from __future__ import annotations

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

prompt_tokens = Counter(
    "vllm:prompt_tokens", "Prompt tokens of requests that were answered.", MODEL
)
generation_tokens = Counter("vllm:generation_tokens", "Tokens generated.", MODEL)
requests = Counter(
    "vllm:request_success",
    "Requests that ended, by `finished_reason`: stop, length or abort.",
    (*MODEL, "finished_reason"),
)
failures = Counter(
    "loraplex_sequence_failures",
    "Sequences that ended in an error or were refused, by `code`.",
    (*MODEL, "code"),
)
time_to_first_token = Histogram(
    "vllm:time_to_first_token_seconds",
    "Time from a request's arrival at the worker to its first token.",
    *(TTFT_BUCKETS, MODEL),
)
inter_token_latency = Histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a request.",
    *(ITL_BUCKETS, MODEL),
    older_name="vllm:time_per_output_token_seconds",
)
time_per_output_token = Histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time between the tokens of a request.",
    *(ITL_BUCKETS, MODEL),
)
request_latency = Histogram(
    "vllm:e2e_request_latency_seconds",
    "Time from a request's arrival at the worker to its end.",
    *(REQUEST_BUCKETS, MODEL),
)
queue_time = Histogram(
    "vllm:request_queue_time_seconds",
    "Time from a request's arrival at the worker to its first step.",
    *(REQUEST_BUCKETS, MODEL),
)
inference_time = Histogram(
    "vllm:request_inference_time_seconds",
    "Time from a request's first step to its end.",
    *(REQUEST_BUCKETS, MODEL),
)
prefill_time = Histogram(
    "vllm:request_prefill_time_seconds",
    "Time from a request's first step to its first token.",
    *(REQUEST_BUCKETS, MODEL),
)
decode_time = Histogram(
    "vllm:request_decode_time_seconds",
    "Time from a request's first token to its end.",
    *(REQUEST_BUCKETS, MODEL),
)
request_prompt_tokens = Histogram(
    "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS, MODEL
)
request_generation_tokens = Histogram(
    "vllm:request_generation_tokens",
    "Tokens generated for a request.",
    *(TOKEN_BUCKETS, MODEL),
)
longest_generation = Histogram(
    "vllm:request_max_num_generation_tokens",
    "Tokens generated for the longest choice of a request. Here each choice is a request.",
    *(TOKEN_BUCKETS, MODEL),
)
max_generation_tokens = Histogram(
    "vllm:request_params_max_tokens",
    "Maximum number of tokens that a request may generate.",
    *(TOKEN_BUCKETS, MODEL),
)
class_queue_time = Histogram(
    "loraplex_queue_time_seconds",
    "Time from a request's arrival at the worker to its first step, by class.",
    *(TTFT_BUCKETS, (*MODEL, "class")),
)
step_tokens = Histogram(
    "vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKEN_BUCKETS, MODEL
)
step_seconds = Counter(
    "loraplex_step_seconds",
    "Time of the steps by `part`: schedule, build, forward, sample or update.",
    (*MODEL, "part"),
)
graph_failures = Counter(
    "loraplex_graph_failures", "Captures of graphs that failed; their steps run op by op."
)
