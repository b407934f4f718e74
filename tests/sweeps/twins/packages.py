"""Models of transformers and adapters of PEFT as they are installed, with random weights.

What draws random numbers is turned off: ranks draw their own. Tolerances are those of float32, to which many of these
models cast inside. The oracle is the same module on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.sweeps.twins.base import Natural

SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
RANDOM = """
activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout classifier_dropout_prob
drop_path_rate dropout dropout_rate embd_pdrop feat_proj_dropout final_dropout hidden_dropout hidden_dropout_prob
layerdrop resid_pdrop summary_last_dropout
"""
HEADS = {"head_dim": 8}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
SEQUENCES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
SEQUENCES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
PIXELS = {"image_size": 32, "patch_size": 8}

Batch = list[Tensor]
Inputs = dict[str, Tensor]


def tokens_of(batch: Batch) -> Inputs:
    return {"input_ids": batch[3] + 1, "labels": batch[3] + 1}


def long_tokens_of(batch: Batch) -> Inputs:
    return {name: tokens.repeat(1, 4) for name, tokens in tokens_of(batch).items()}


def images(batch: Batch) -> Tensor:
    return F.interpolate(batch[0].reshape(-1, 1, 6, 1).expand(-1, 3, -1, 6), size=(32, 32))


def classes_of_images(batch: Batch) -> Inputs:
    return {"pixel_values": images(batch), "labels": batch[1] % 2}


def captions(batch: Batch) -> Inputs:
    return {"input_ids": batch[3] + 1, "pixel_values": images(batch)}


@dataclass(frozen=True)
class Recipe:
    """A model of transformers.

    Attributes:
        model: its class.
        config: name of its configuration.
        sizes: arguments of the configuration, besides ``SIZES``; those that are None are left out.
        inputs: arguments of the model's forward.
        adapters: name and arguments of a configuration of PEFT.
        recomputes: whether its layers are checkpointed, as ``activation_checkpointing_enable`` does.
    """

    model: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Batch], Inputs] = tokens_of
    adapters: tuple[str, dict[str, Any]] | None = None
    recomputes: bool = False

    def build(self) -> Any:
        import peft  # here: the suite imports this file, and has no need of the packages
        import transformers

        arguments = {**SIZES, **dict.fromkeys(RANDOM.split(), 0.0), **self.sizes}
        config_class = transformers.CONFIG_MAPPING[self.config]
        config = config_class(**{name: value for name, value in arguments.items() if value is not None})
        model = getattr(transformers, self.model)(config)
        if self.adapters is not None:
            name, options = self.adapters
            model = peft.get_peft_model(model, getattr(peft, name)(**options))
        if self.recomputes:
            model.activation_checkpointing_enable()
        return model.train()


class FromPackage(Natural, abstract=True):
    """Trains a model of transformers, or its adapters, by the model's own loss."""

    recipe: Recipe
    net: Any

    def build(self) -> None:
        self.net = self.recipe.build()

    def loss(self, batch: Batch) -> Tensor:
        outputs = self.net(**self.recipe.inputs(batch))
        loss: Tensor | None = outputs.loss
        if loss is None:  # of images and captions: their loss compares samples of the batch, which ranks divide
            loss = (outputs.text_embeds * outputs.image_embeds).sum(1).mean() * self.net.logit_scale
        return loss

    def configure_optimizers(self) -> Any:
        if self.recipe.adapters is not None:
            return self.adamw()
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.recipe.adapters is not None and self.recipe.adapters[0] == "AdaLoraConfig":
            self.net.base_model.update_and_allocate(self.global_step)


MODELS = {
    "Gpt2": Recipe("GPT2LMHeadModel", "gpt2", GPT),
    "Llama": Recipe("LlamaForCausalLM", "llama", HEADS),
    "LlamaTied": Recipe("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    "Gemma2": Recipe("Gemma2ForCausalLM", "gemma2", {**HEADS, "query_pre_attn_scalar": 8}),
    "Falcon": Recipe("FalconForCausalLM", "falcon"),
    "Mamba": Recipe("MambaForCausalLM", "mamba", {"state_size": 4}),
    "MambaRecomputed": Recipe("MambaForCausalLM", "mamba", {"state_size": 4}, recomputes=True),
    "Mamba2": Recipe(
        *("Mamba2ForCausalLM", "mamba2"), {**HEADS, "state_size": 4, "num_heads": 4, "n_groups": 1, "chunk_size": 4}
    ),
    "Rwkv": Recipe("RwkvForCausalLM", "rwkv", {"attention_hidden_size": 16}),
    "RecurrentGemma": Recipe("RecurrentGemmaForCausalLM", "recurrent_gemma", {"lru_width": 16, "num_hidden_layers": 3}),
    "T5": Recipe("T5ForConditionalGeneration", "t5", {"d_model": 16, "d_kv": 8, "d_ff": 32}),
    "Bart": Recipe("BartForConditionalGeneration", "bart", SEQUENCES),
    "Bert": Recipe("BertForMaskedLM", "bert"),
    "Reformer": Recipe(
        *("ReformerForMaskedLM", "reformer"),
        {"attention_head_size": 8, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "is_decoder": False}
        | {"axial_pos_embds_dim": [8, 8], "axial_pos_shape": [4, 4], "feed_forward_size": 32}
        | {"max_position_embeddings": 16},
        long_tokens_of,
    ),
    "Vit": Recipe("ViTForImageClassification", "vit", PIXELS, classes_of_images),
    "Clip": Recipe(
        *("CLIPModel", "clip"),
        {"projection_dim": 8, "text_config": {**SIZES, "decoder_start_token_id": None}}
        | {"vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, **PIXELS}},
        captions,
    ),
}

LINEAR, SQUARE = {"target_modules": ["q_proj", "v_proj", "up_proj"]}, {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lora": ("LoraConfig", LINEAR),
    "LoraDora": ("LoraConfig", {**LINEAR, "use_dora": True}),
    "LoraPissa": ("LoraConfig", {**LINEAR, "init_lora_weights": "pissa"}),
    "LoraBiases": ("LoraConfig", {**LINEAR, "bias": "all", "lora_bias": True}),
    "LoraAndHead": ("LoraConfig", {**LINEAR, "modules_to_save": ["lm_head", "norm"]}),
    "LoraOfEmbedding": ("LoraConfig", {"target_modules": ["q_proj", "embed_tokens"]}),
    "LoraAndTokens": ("LoraConfig", {**LINEAR, "trainable_token_indices": [1, 2, 3]}),
    "LoraOfParameters": ("LoraConfig", {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]}),
    "LoraOnRepeatedLayers": ("LoraConfig", {**LINEAR, "layer_replication": [(0, 2), (1, 2)]}),
    "AdaLora": ("AdaLoraConfig", {**LINEAR, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 1}),
    "Ia3": ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {**LINEAR, "r": 4}),
    "Oft": ("OFTConfig", {**SQUARE, "oft_block_size": 8}),
    "Vera": ("VeraConfig", {**SQUARE, "r": 4}),
    "VbLora": ("VBLoRAConfig", {**SQUARE, "r": 2, "num_vectors": 8, "vector_length": 4}),
    "Shira": ("ShiraConfig", {**SQUARE, "r": 2}),
    "NormTuning": ("LNTuningConfig", {"target_modules": ["norm"]}),
    "PromptTuning": ("PromptTuningConfig", PROMPT),
    "PrefixTuning": ("PrefixTuningConfig", PROMPT),
    "AdaptionPrompt": ("AdaptionPromptConfig", {"task_type": "CAUSAL_LM", "adapter_len": 3, "adapter_layers": 1}),
}

RECIPES = {**MODELS, **{name: Recipe("LlamaForCausalLM", "llama", HEADS, adapters=of) for name, of in ADAPTERS.items()}}
for name, recipe in RECIPES.items():
    rounds = 1e-2 if name == "Reformer" else 2e-5  # it computes activations back from outputs, which rounds once more
    type(name, (FromPackage,), {"recipe": recipe}, tolerance=rounds)
