"""Generates with a random model and two of its adapters in a batch: `python -m examples.engine`."""

import json
import tempfile
from pathlib import Path
from time import monotonic

import torch
from safetensors.torch import save_file

from adapters.pool.source import FixedAdapters
from adapters.reference import AdapterRef
from memory.arena import Arena
from memory.kv_cache import KVCache
from ops.base import AdapterTables
from ops.commands import PendingCommands
from ops.reference import ReferenceOps
from workers.execution.batch import ModelBuffers
from workers.execution.engine import Engine
from workers.execution.model_runner import ModelRunner
from workers.execution.observer import NoObserver
from workers.models import read_spec
from workers.models.checkpoint import expected_tensors
from workers.models.loading import LoadedModel, load_model
from workers.models.plan import ModelPlan
from workers.scheduling.constraint import Unconstrained
from workers.scheduling.policy import FifoPolicy
from workers.scheduling.scheduler import Scheduler
from workers.wire.protocol import Generate, ModelInfo, SamplingParams, SequenceOutput
from workers.wire.request_check import RequestLimits

CONFIG = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "eos_token_id": 0}
CONFIG |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
RANK, NUM_PAGES, NUM_SEQS = 4, 32, 4


def random_model(folder: Path, ops: ReferenceOps) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {name: torch.randn(shape) / 2 for name, shape in expected_tensors(read_spec(CONFIG))}
    save_file(weights, folder / "model.safetensors")
    return load_model(ModelPlan.read(folder, "model", torch.float32), ops)


def random_adapters(plan: ModelPlan, count: int, begin: int) -> tuple[torch.Tensor, AdapterTables]:
    """Returns memory with random factors from `begin` on, and tables of the factors' offsets."""
    shape, end = plan.shape, begin
    a, b, rank = torch.zeros(3, count, shape.num_layers + 1, len(shape.projections)).long()
    for at in torch.nonzero(rank[:, :-1] == 0).tolist():
        k, n = shape.projection_shape(at[1], shape.projections[at[2]])
        a[*at], b[*at], rank[*at], end = end, end + 4 * RANK * k, RANK, end + 4 * RANK * (k + n)
    return (torch.randn(end // 4) / 2).view(torch.uint8), AdapterTables(a, b, rank.int())


def run(names: list[str]) -> dict[int, list[int]]:
    torch.manual_seed(0)
    ops, pool = ReferenceOps(), FixedAdapters(dict.fromkeys(names, RANK))
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), ops)
    page, commands = model.plan.kv_layout.page_bytes, PendingCommands()
    kv = KVCache(Arena(NUM_PAGES * page, 4 * page, first_byte=page), "model", page)
    memory, tables = random_adapters(model.plan, len(names), (NUM_PAGES + 1) * page)
    buffers = ModelBuffers(memory, torch.zeros(NUM_SEQS, 128, dtype=torch.int32), tables)
    runner = ModelRunner(model, ops, buffers)
    policy, limits = FifoPolicy(64), {"max_num_seqs": NUM_SEQS, "max_batched_tokens": 64}
    scheduler = Scheduler(kv, pool, commands, policy, **limits)
    parts = ModelInfo("model", "model", 128), scheduler, runner, NoObserver(), Unconstrained()
    engine = Engine(*parts, RequestLimits(128, NUM_PAGES, 64, frozenset([0])), clock=monotonic)
    params = SamplingParams(8, seed=0, temperature=0.0)
    for number, ref in enumerate([None, *map(AdapterRef, names)]):
        engine.submit(0, Generate(number, "", "model", [1, 2, 3], params, "", adapter=ref))
    tokens: dict[int, list[int]] = {number: [] for number in range(1 + len(names))}
    while engine.has_work:
        for output in (event for _, event in engine.step() if isinstance(event, SequenceOutput)):
            tokens[output.id] += output.tokens
    return tokens


if __name__ == "__main__":
    print(run(["polite", "rude"]))
