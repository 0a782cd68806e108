"""Uses transformers to read the Hugging Face directory of a model that has no native family.

transformers converts the checkpoint to the names and layouts of its modules; for example, it joins
the experts of a layer into one tensor. The whole model is in memory during the import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adapters.manifest import RECORDED
from workers.importer.transformers_probe import probe
from workers.models.spec import UnsupportedModel, positive
from workers.models.text_part import OTHER_PARTS, is_composite, text_part
from workers.models.transformers_modules import NotComputable, library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT_ROOTS = {
    r"^model\.(language|text)_model\.": "model.",
    r"^(language|text)_model\.model\.": "model.",
    r"^(language|text)_model\.lm_head\.": "lm_head.",
}
"""Maps prefixes of tensor names (regular expressions) in checkpoints with image or audio parts to
the prefixes that the same tensors have in a language model without other parts."""
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """Parameter or buffer of a loaded model. dtype: the safetensors name of the tensor's type."""

    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> ModuleTensor:
        return cls(tensor, TYPES[tensor.dtype], tuple(tensor.shape))

    def read(self) -> NDArray[Any]:
        """Returns the numbers in the tensor's type. Returns bfloat16 numbers as unsigned integers
        with the same bits."""
        plain = self.tensor.detach().contiguous()
        if self.dtype == "BF16":
            return plain.view(torch.int16).numpy().view(np.uint16)
        return plain.numpy()

    def read_floats(self) -> NDArray[np.float32]:
        return self.tensor.detach().float().numpy()


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """Canonical config and tensors of a model. tensors: tensors by their names in the weight file.
    matrices: names of the tensors that may be stored in quantised blocks."""

    config: dict[str, Any]
    tensors: dict[str, ModuleTensor]
    matrices: frozenset[str]


def read_transformers_model(source: Path, config: dict[str, Any]) -> TransformersModel:
    """Loads the model, records its structure, and tests that it can be served. If the checkpoint
    also has image or audio parts, only the language model is read.

    config: content of the source's config.json. Raises UnsupportedModel if the model cannot be
    loaded or served.
    """
    transformers = library()
    if config.get("auto_map"):
        raise UnsupportedModel("auto_map", config["auto_map"], "absent: remote code is never run")
    is_quantized = bool(config.get("quantization_config"))
    is_part, config = is_composite(config), text_part(config)
    model_type = str(config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            "model_type", model_type, f"those of transformers {transformers.__version__}"
        )
    if is_quantized or config.get("quantization_config"):
        raise NotComputable(
            model_type, "quantised checkpoints are supported for native families only"
        )
    try:
        parsed = transformers.CONFIG_MAPPING[model_type].from_dict(config)
    except Exception as error:  # transformers may raise any kind of exception
        raise NotComputable(model_type, f"its config cannot be read: {error}") from error
    if parsed.is_encoder_decoder:
        raise NotComputable(model_type, "it is an encoder-decoder")
    if type(parsed) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotComputable(model_type, "it is no causal language model")
    _refuse_ropes(parsed)
    model = _load(source, parsed, is_part)
    known: Any = model.config
    facts = {name: getattr(known, name, None) for name in ("vocab_size", "max_position_embeddings")}
    for name in facts:
        positive(facts, name)
    if known.tie_word_embeddings and _is_untied(model):
        known.tie_word_embeddings = facts["tie_word_embeddings"] = False
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: _module_tensor(model_type, name, tensor) for name, tensor in named}
    table = [name for name, own in named if own is _table(model)]
    recorded = probe(model)
    linears = {linear.path for linear in recorded.shape.linears} | {*recorded.plain_linears}
    matrices = frozenset([*table, *(f"{path}.weight" for path in linears)])
    canonical = config | facts | {RECORDED: msgspec.to_builtins(recorded)}
    return TransformersModel(canonical, tensors, matrices)


def _load(source: Path, config: Any, is_part: bool) -> PreTrainedModel:
    """Loads the language model. Suppresses transformers' log, which would list all tensors of image
    and audio parts as unexpected keys. is_part: whether the checkpoint has image or audio parts."""
    logging = library().logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = library().AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            key_mapping=TEXT_ROOTS if is_part else None,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel("model", str(source), f"what transformers loads: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(key for key in map(str, report[kind]) if not (is_part and _is_other(key)))
        if keys:
            raise UnsupportedModel(kind, keys[:3], "none")
    return model.eval()


def _is_untied(model: PreTrainedModel) -> bool:
    """Returns whether the output matrix differs from the embedding, although the config says that
    they are tied. transformers does not tie them if the checkpoint has both."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.weight is not _table(model)


def _is_other(key: str) -> bool:
    """Returns whether a tensor belongs to a part other than the language model."""
    return f"model.{key.removeprefix('model.')}".startswith(OTHER_PARTS)


def _refuse_ropes(config: Any) -> None:
    """Raises UnsupportedModel if the rotary frequencies depend on the length of the longest text in
    a step, because the result of a text would then depend on the other texts in the step."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in ropes.values() if isinstance(each, dict)]
    for rope in (ropes, *nested):
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            raise UnsupportedModel("rope_type", kind, "those that do not depend on the text")


def _module_tensor(model_type: str, name: str, tensor: Tensor) -> ModuleTensor:
    if tensor.dtype not in TYPES:
        raise NotComputable(model_type, f"{name} is {tensor.dtype}")
    if math.prod(tensor.shape) == 0:
        raise NotComputable(model_type, f"{name} is empty")
    return ModuleTensor.of(tensor)


def _table(model: PreTrainedModel) -> Tensor:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding.weight
