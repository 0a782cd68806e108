"""`python -m tools.quantized_checkpoints LIBRARY FOLDER`: writes the test files in
`tests/workers/importer/quantized` of one quantisation library.

Each test file is a small checkpoint in a quantised format, together with the weights that the
library dequantises from it. LIBRARY is bitsandbytes, compressed-tensors, gptqmodel, autoawq or
transformers. It must be installed with its dependencies, and runs on a CPU. None of them is a
dependency of this project.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.doubles import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""Sizes of the model. 160 is not a multiple of the block size 128, and the 32 rows of k_proj are
less than one block, so that the checkpoints contain partial blocks."""
COMPARED = ("self_attn.k_proj", "mlp.down_proj")
"""Modules of layer 0 whose dequantised weights are stored with a checkpoint."""
GROUP = 32


def main(library: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "source"
        write_source(source)
        LIBRARIES[library](source, folder)


def write_source(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.08)
    model.bfloat16().save_pretrained(folder)
    make_tokenizer(folder)


def finish(written: Path, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Copies the config and the weights that a library wrote, and adds the `expected` dequantised
    weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((written / "config.json").read_text())
    # Removes GPTQModel's record of the run, which contains paths of this machine.
    config["quantization_config"].pop("meta", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(written / "model.safetensors", folder / "model.safetensors")
    rounded = {name: each.bfloat16().contiguous() for name, each in expected.items()}
    save_file(rounded, folder / "expected.safetensors")


def compared(model: Any, dequantize: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    return {
        f"{layer}{name}.weight": dequantize(model.get_submodule(layer + name)) for name in COMPARED
    }


def bitsandbytes(source: Path, folder: Path) -> None:
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from transformers import BitsAndBytesConfig

    def four_bits(module: Any) -> torch.Tensor:
        """Dequantises a weight. If blocks cross the ends of rows, calls the library's general form,
        because its CPU kernel returns wrong values for such blocks."""
        codes, state = module.weight.data, module.weight.quant_state
        if state.shape[1] % state.blocksize == 0:
            return functional.dequantize_4bit(codes, state)
        scales = state.absmax
        if state.nested:
            scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
        octets = codes.view(torch.uint8).reshape(-1)
        return _dequantize_4bit_compute(
            octets, scales, state.code, state.blocksize, state.shape, state.dtype
        )

    def int8(module: Any) -> torch.Tensor:
        return functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)

    forms: dict[str, dict[str, Any]] = {
        "nf4": {"bnb_4bit_quant_type": "nf4"},
        "nf4-double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4": {"bnb_4bit_quant_type": "fp4"},
        "nf4-bfloat16-storage": {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_quant_storage": torch.bfloat16,
        },
    }
    for name, options in forms.items():
        config = BitsAndBytesConfig(load_in_4bit=True, **options)
        _write_transformers(source, folder / f"bitsandbytes-{name}", config, four_bits)
    config = BitsAndBytesConfig(load_in_8bit=True)
    _write_transformers(source, folder / "bitsandbytes-int8", config, int8)


def _write_transformers(
    source: Path, folder: Path, config: Any, dequantize: Callable[[Any], torch.Tensor]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    expected = compared(model, dequantize)
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        finish(Path(written), folder, expected)


def transformers_fp8(source: Path, folder: Path) -> None:
    """Writes the FP8 checkpoints. transformers quantises whole models to FP8 only on a GPU, so its
    quantisation function is called for each matrix here."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    for name, scale_format in (("block", "float"), ("block-ue8m0", "ue8m0")):
        config = FineGrainedFP8Config(weight_block_size=(GROUP, GROUP), scale_fmt=scale_format)
        holder = SimpleNamespace(quantization_config=config)
        tensors: dict[str, torch.Tensor] = {}
        expected: dict[str, torch.Tensor] = {}
        for key, value in load_file(source / "model.safetensors").items():
            parts = {key: value}
            if key.endswith("_proj.weight"):
                quantize: Any = Fp8Quantize(holder)
                parts = quantize.convert({key: value})
                if any(each in key for each in COMPARED):
                    expected[key] = Fp8Dequantize(holder)._dequantize_one(
                        parts[key], parts[key.replace(".weight", ".weight_scale_inv")]
                    )
            tensors |= parts
        with tempfile.TemporaryDirectory() as written:
            _write_folder(source, Path(written), tensors, config.to_dict())
            finish(Path(written), folder / f"transformers-fp8-{name}", expected)


def _write_folder(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    contiguous = {name: each.contiguous() for name, each in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def compressed_tensors(source: Path, folder: Path) -> None:
    tokens = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    static = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    float8 = {"num_bits": 8, "type": "float"}
    forms: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "w4-symmetric": (int4 | {"symmetric": True}, None),
        "w4-asymmetric": (int4 | {"symmetric": False}, None),
        "w8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, None),
        "w8a8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, tokens | {"type": "int"}),
        "fp8-tensor": (float8 | {"strategy": "tensor"}, static),
        "fp8-channel": (float8 | {"strategy": "channel"}, tokens | {"type": "float"}),
        "fp8-block": (float8 | {"strategy": "block", "block_structure": [128, 128]}, tokens),
    }
    for name, (weights, inputs) in forms.items():
        _compress(source, folder / f"compressed-tensors-{name}", weights, inputs)


def _compress(
    source: Path, folder: Path, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    args = QuantizationArgs(**weights)
    if inputs is not None and "type" not in inputs:
        inputs = inputs | {"type": "float"}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale, zero = calculate_qparams(*_extremes(module.weight.data, args), args)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(1.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        compressor.update_config(written)
        compressor.decompress_model(model)
        finish(Path(written), folder, compared(model, lambda module: module.weight.data))


def _extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the minimum and the maximum of each part of the weight that has its own scale."""
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            height, width = rows, columns
        case "channel":
            height, width = 1, columns
        case "group":
            height, width = 1, args.group_size
        case _:
            height, width = args.block_structure
    parts = [list(row.split(width, 1)) for row in weight.split(height)]
    low = torch.stack([torch.stack([part.min() for part in row]) for row in parts])
    high = torch.stack([torch.stack([part.max() for part in row]) for row in parts])
    return (low[0], high[0]) if args.strategy == "tensor" else (low, high)


def gptqmodel(source: Path, folder: Path) -> None:
    """Writes the GPTQ checkpoints. Needs the environment variable TORCHDYNAMO_DISABLE=1, and on a
    machine with few cores also GPTQMODEL_CPU_WORKERS=3."""
    forms: dict[str, dict[str, Any]] = {
        "gptq-4-act-order": {"bits": 4, "desc_act": True, "sym": True},
        "gptq-4-asymmetric": {"bits": 4, "desc_act": False, "sym": False},
        "gptq-4-second-layout": {"bits": 4, "desc_act": False, "sym": True, "format": "gptq_v2"},
        "gptq-3": {"bits": 3, "desc_act": False, "sym": True},
        "gptq-2": {"bits": 2, "desc_act": False, "sym": True},
        "gptq-8": {
            "bits": 8,
            "desc_act": False,
            "sym": True,
            "group_size": -1,
            "act_group_aware": False,
        },
    }
    for name, options in forms.items():
        _quantize_gptq(source, folder / f"gptqmodel-{name}", {"group_size": GROUP} | options)


def _quantize_gptq(source: Path, folder: Path, options: dict[str, Any]) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(**options), device="cpu")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (64,), generator=generator).tolist() for _ in range(8)]
    calibration = [{"input_ids": each, "attention_mask": [1] * len(each)} for each in prompts]
    model.quantize(calibration, batch_size=1)

    def dequantize(module: Any) -> torch.Tensor:
        """Dequantises a weight. Converts the scales from float16 to float32 first, so that the
        result is rounded only once."""
        module.scales.data = module.scales.data.float()
        return module.dequantize_weight().T

    with tempfile.TemporaryDirectory() as written:
        model.save(written)
        loaded = GPTQModel.load(written, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
        finish(Path(written), folder, compared(loaded.model, dequantize))


def autoawq(source: Path, folder: Path) -> None:
    """Writes the AWQ checkpoint. AutoAWQ's model classes need an older version of transformers, so
    each matrix is quantised separately here."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.group_size, quantizer.w_bit, quantizer.zero_point = GROUP, 4, True
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value.half()
            continue
        linear = torch.nn.Linear(*reversed(value.shape), bias=False, dtype=torch.float16)
        rounded, scales, zeros = quantizer.pseudo_quantize_tensor(value.half())
        linear.weight.data = rounded
        packed = WQLinear_GEMM.from_linear(
            linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        module = name.removesuffix(".weight")
        for part, tensor in packed.state_dict().items():
            tensors[f"{module}.{part}"] = tensor
        if module.endswith(COMPARED):
            expected[name] = dequantize_gemm(
                packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP
            ).T
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    with tempfile.TemporaryDirectory() as written:
        _write_folder(source, Path(written), tensors, config)
        finish(Path(written), folder / "autoawq", expected)


LIBRARIES: dict[str, Callable[[Path, Path], None]] = {
    "autoawq": autoawq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
    "transformers": transformers_fp8,
}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
