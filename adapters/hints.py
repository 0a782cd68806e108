"""Hints on what to change in the training script, by error code. Torch-free."""

from __future__ import annotations

_DAMAGED = (
    "The file is not as safetensors writes it: save the adapter again with save_pretrained, and"
    " upload when that has ended."
)
_INITIALISATION = (
    "Such an adapter belongs to a changed base model: save it with"
    " save_pretrained(folder, path_initial_model_for_weight_conversion=...), which makes a plain"
    " LoRA of it, or train with init_lora_weights=True."
)
_SMALLER_RANK = "Train with a smaller r (and rank_pattern), or have max_lora_rank raised."

_HINTS = {
    "adapter.base.ambiguous": (
        "Several registered base models fit: say which is meant, with --model NAME (the field"
        " model)."
    ),
    "adapter.base.mismatch": (
        "Train on a registered base model, or name the right one in the field model: its layers"
        " have other sizes."
    ),
    "adapter.config": "Upload adapter_config.json as save_pretrained of peft wrote it.",
    "adapter.config.alpha": "Train with a finite lora_alpha of usual size, such as r or 2 * r.",
    "adapter.config.pattern": "Write the pattern with plain names, '.*' and '|'.",
    "adapter.config.pattern_too_complex": "Write the pattern with plain names, '.*' and '|'.",
    "adapter.config.rank": "Train with r of at least 1 everywhere.",
    "adapter.config.token_indices": (
        "trainable_token_indices must name tokens of the base model's vocabulary, each once."
    ),
    "adapter.config.too_many_patterns": "Name the modules with fewer, wider patterns.",
    "adapter.config.unknown_key": (
        "The key may change what is computed, so it is not ignored: train without the feature it"
        " turns on, or remove it if it has no effect."
    ),
    "adapter.file": _DAMAGED,
    "adapter.file.git_lfs": (
        "The file names its contents and does not have them: run git lfs pull in the repository,"
        " then push again."
    ),
    "adapter.file.missing": (
        "Upload both files that save_pretrained writes: adapter_config.json and"
        " adapter_model.safetensors."
    ),
    "adapter.file.kind": "Upload the files themselves, not links or folders.",
    "adapter.file.too_large": (
        "Save the LoRA factors alone (save_embedding_layers=False, no modules_to_save) in bfloat16,"
        " or have max_upload raised."
    ),
    "adapter.header": _DAMAGED,
    "adapter.rank.mismatch": (
        "The tensor's rank is not what r and rank_pattern say: upload the two files of one run."
    ),
    "adapter.rank.too_large": _SMALLER_RANK,
    "adapter.tensor.doubled_prefix": (
        "A prefix was added twice: save with save_pretrained of one PeftModel, not of one that"
        " wraps another."
    ),
    "adapter.tensor.dtype": "Save the factors as float32, float16 or bfloat16.",
    "adapter.tensor.empty": (
        "The tensor has no numbers, as when one process of a sharded training (DeepSpeed ZeRO-3,"
        " FSDP) saves its own part: gather before saving, with trainer.save_model and"
        " stage3_gather_16bit_weights_on_model_save (ZeRO-3) or a full state dict (FSDP)."
    ),
    "adapter.tensor.missing": "Save the whole adapter: every target needs its lora_A and lora_B.",
    "adapter.tensor.name": "Use peft's own names of tensors, as save_pretrained writes them.",
    "adapter.tensor.none": "The file is empty: save after training, from the model with adapters.",
    "adapter.tensor.not_finite": (
        "The training has diverged: lower the learning rate, clip gradients, or use an earlier"
        " checkpoint."
    ),
    "adapter.store.modules": (
        "The list that was stored with the adapter is missing or damaged: restore the store, or"
        " delete the version and push the adapter again."
    ),
    "adapter.tensor.not_targeted": (
        "adapter_config.json excludes this module: upload the two files of one run."
    ),
    "adapter.tensor.several_adapters": (
        "The file has tensors of several adapters: save each into a folder of its own with"
        " save_pretrained(folder, selected_adapters=[name])."
    ),
    "adapter.tensor.shape": (
        "Use peft's LoRA for linear layers: its factors have two dimensions. If a sharded training"
        " (DeepSpeed ZeRO-3, FSDP) wrote the file, gather before saving."
    ),
    "adapter.tensor.two_namings": (
        "The two tensors name the model's modules in different ways, so which values are meant"
        " cannot be known: save once, with save_pretrained."
    ),
    "adapter.tensor.unbound": (
        "The base model has no such module: train on the registered base model, and adapt its"
        " linear layers (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)."
    ),
    "adapter.unsupported.activated_embedding": (
        "An activated LoRA cannot change the embedding or replace weights, which act on the whole"
        " prompt: leave embed_tokens out of target_modules, and set neither modules_to_save nor"
        " trainable_token_indices."
    ),
    "adapter.unsupported": "Train without this feature: plain LoRA and rsLoRA are served.",
    "adapter.unsupported.base_weights": (
        "The file has weights of the base model: save with save_pretrained of the PeftModel, which"
        " writes the LoRA factors alone, not the state_dict of the whole model."
    ),
    "adapter.unsupported.bias": "Train with bias='none'.",
    "adapter.unsupported.changed_twice": (
        "The adapter changes this module in two ways, and which comes first cannot be known: name"
        " it in one of target_modules, modules_to_save and trainable_token_indices."
    ),
    "adapter.unsupported.corda": _INITIALISATION,
    "adapter.unsupported.dora": (
        "Train with use_dora=False. A DoRA update has full rank: it can be merged into a base model"
        " of its own (merge_and_unload), not converted to LoRA."
    ),
    "adapter.unsupported.experts": (
        "Leave the experts' layers out of target_modules and target_parameters."
    ),
    "adapter.unsupported.fan_in_fan_out": "Train with fan_in_fan_out=False, for linear layers.",
    "adapter.unsupported.full_checkpoint": (
        "The file has the weights of a whole model and no LoRA factors: register it as a base model"
        " with loraplex model add, or push the adapter that it was merged from."
    ),
    "adapter.unsupported.full_embedding": (
        "The file has a weight of lm_head or embed_tokens that adapter_config.json does not name:"
        " train with the base model's own vocabulary (no resize_token_embeddings) and save with"
        " save_embedding_layers=False, or name the module in modules_to_save."
    ),
    "adapter.unsupported.gguf": (
        "Adapters are served from peft's files: push the folder that the GGUF file was converted"
        " from."
    ),
    "adapter.unsupported.init_lora_weights": _INITIALISATION,
    "adapter.unsupported.kohya": (
        "The names are those of kohya's scripts, which train image models: train a language model"
        " with peft."
    ),
    "adapter.unsupported.layer_replication": "Train without layer_replication, on all layers once.",
    "adapter.unsupported.loftq": _INITIALISATION,
    "adapter.unsupported.lora_bias": "Train with lora_bias=False.",
    "adapter.unsupported.lora_ga": _INITIALISATION,
    "adapter.unsupported.mica": _INITIALISATION,
    "adapter.unsupported.mlx": (
        "The names are MLX's. Convert the adapter to peft's form: lora_A is the transpose of"
        " lora_a, lora_B that of lora_b, and lora_alpha is scale * rank."
    ),
    "adapter.unsupported.modules_to_save": (
        "Train without modules_to_save, or with lm_head and embed_tokens alone in it."
    ),
    "adapter.unsupported.nested_adapter": (
        "The adapter was trained on a model that had an adapter already: merge the first one"
        " (merge_and_unload) and train on that, or continue training the first one."
    ),
    "adapter.unsupported.norm": (
        "The file has weights of norms, which were trained in addition to the factors: train the"
        " factors alone."
    ),
    "adapter.unsupported.olora": _INITIALISATION,
    "adapter.unsupported.peft_type": (
        "Train with LoraConfig: other methods, such as prefix tuning (PREFIX_TUNING) and prompt"
        " tuning, are not served."
    ),
    "adapter.unsupported.pickle": "Save with save_pretrained(safe_serialization=True).",
    "adapter.unsupported.pissa": _INITIALISATION,
    "adapter.unsupported.prompt_tuning": "Train with LoraConfig: prompt tuning is not served.",
    "adapter.unsupported.replaced_weights": (
        "The base model is computed by transformers' own code, where an adapter cannot replace"
        " weights: train without modules_to_save and trainable_token_indices."
    ),
    "adapter.unsupported.resized_vocabulary": (
        "The saved weight has another number of rows than the base model's vocabulary: train"
        " without resize_token_embeddings, with tokens that the base model has."
    ),
    "adapter.unsupported.target_parameters": (
        "The file has factors of a parameter: name linear layers in target_modules instead."
    ),
    "adapter.unsupported.task_type": "Train with task_type='CAUSAL_LM' or 'FEATURE_EXTRACTION'.",
    "adapter.unsupported.auto_mapping": (
        "'auto_mapping' names the class of the base that was trained: 'base_model_class' must be a "
        "...ForCausalLM or ...Model class and 'parent_library', if given, of transformers.models. "
        "Classes of one's own are not served."
    ),
    "adapter.unsupported.trainable_tokens": (
        "Train tokens of embed_tokens and lm_head alone, in the form of peft's LoraConfig."
    ),
    "adapter.unsupported.vision": (
        "Only the text model is served: leave the image encoder and its projector out of"
        " target_modules (finetune_vision_layers=False in Unsloth)."
    ),
}


def hint_for(code: str) -> str:
    """Returns the hint for the code, or for the longest of its dotted prefixes that has a hint.
    Returns an empty string if there is none."""
    while code:
        if code in _HINTS:
            return _HINTS[code]
        code = code.rpartition(".")[0]
    return ""
