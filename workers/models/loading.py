"""Loads a base model into the decoder that can compute it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ops.base import ForwardBatch, LoRABatch, Ops
from workers.device.weight_image import Arrival, WeightImage
from workers.models.checkpoint import Checkpoint, weight_files
from workers.models.decoder import Decoder
from workers.models.loader import WeightLoader
from workers.models.plan import ModelPlan
from workers.models.progress import ByteProgress, ProgressMeter
from workers.models.spec import ModelSpec


class LoadedModel(Protocol):
    """Loaded base model. num_bytes: bytes of the model's weights in their packed form."""

    plan: ModelPlan
    arrival: Arrival
    num_bytes: int

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the hidden states [T, K] of the step's rows, after the final norm."""
        ...

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        """Computes the logits, float32 [N, V], of hidden states [N, K], which are rows of the
        result of `forward`. Writes them to `out` if it is given. lora: adapter segments of these
        rows."""
        ...


def load_model(
    plan: ModelPlan,
    ops: Ops,
    *,
    image: WeightImage | None = None,
    progress: ByteProgress | None = None,
) -> LoadedModel:
    """Reads a canonical folder and packs its weights one by one. image: weight image in host memory
    that receives the weights. The model can compute once this image has been copied to the device.
    If `image` is None, the weights are loaded to the device directly.

    Raises CheckpointError, UnsupportedModel, MemoryError, and any error that `progress` raises to
    stop the load.
    """
    if image is not None:
        image.begin()
    meter = ProgressMeter(sum(path.stat().st_size for path in weight_files(plan.folder)), progress)
    with Checkpoint(plan.folder) as checkpoint:
        loader = WeightLoader(checkpoint, ops, plan.dtype, meter, image)
        if isinstance(plan.spec, ModelSpec):
            checkpoint.check(plan.spec)
            model = Decoder(plan, loader)
        else:
            # transformers is imported only for models that need it.
            from workers.models.transformers_decoder import TransformersDecoder

            model = TransformersDecoder(plan, loader)
    meter.finish()
    return model
