# SPDX-License-Identifier: GPL-3.0-or-later
"""How many tokens per second one stream can decode at most, from what memory must deliver per token.

tok/s <= active GPUs x memory bandwidth / bytes per token. It is a filter for impossible and for suspiciously
low figures, not a forecast: it leaves out communication, kernels' efficiency and the attention over long
contexts beyond the KV bytes, so every result carries the assumptions it was made from.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any, Optional

#: Bytes per weight by quantisation. NVFP4: 4 bits and an FP8 scale per 16; MXFP4: a scale per 32.
BYTES_PER_WEIGHT = {
    "BF16": 2.0,
    "FP16": 2.0,
    "FP8": 1.0,
    "INT8": 1.0,
    "NVFP4": 0.5625,
    "MXFP4": 0.53125,
    "INT4": 0.5,
}
UNQUANTISED = "BF16"


@dataclasses.dataclass(frozen=True)
class Part:
    """Weights that one decode step reads, in one kind of module; ``module`` is an example of its name."""

    name: str
    weights: int
    module: str


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The ceiling for one stream: tok/s, GB read per token, and the sentences it rests on."""

    name: str
    tokens_per_s: float
    gb_per_token: float
    bandwidth_gbps: float
    assumptions: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return dataclasses.asdict(self)


def memory_bandwidth_gbps(clock_mhz: float, bus_bits: int) -> float:
    """Return GB/s of a GPU's memory from its clock (as NVML reports it, data moves on both edges) and bus."""
    if clock_mhz <= 0 or bus_bits <= 0:
        raise ValueError(f"A memory clock of {clock_mhz} MHz on {bus_bits} bits moves nothing")
    return 2 * clock_mhz * bus_bits / 8 / 1000


def gpus_active_per_step(tensor_parallel: int, pipeline_parallel: int = 1) -> int:
    """Return how many GPUs work on one token at a time: with one stream a pipeline's stages take turns."""
    if tensor_parallel < 1 or pipeline_parallel < 1:
        raise ValueError("Tensor and pipeline parallel sizes start at 1")
    return tensor_parallel


def roofline(name: str, gb_per_token: float, gpus: int, gpu_gbps: float, assumptions: list[str]) -> Roofline:
    """Return the ceiling for ``gpus`` active GPUs of ``gpu_gbps`` GB/s each."""
    if gb_per_token <= 0:
        raise ValueError("A token that reads no bytes has no ceiling")
    total = gpus * gpu_gbps
    said = [
        f"{gpus} GPUs active per step at {gpu_gbps:.0f} GB/s each",
        *assumptions,
        "no communication, one stream",
    ]
    return Roofline(name, total / gb_per_token, gb_per_token, total, said)


def from_active_parameters(
    active_billions: float, bytes_per_weight: float, kv_gb: float, gpus: int, gpu_gbps: float
) -> Roofline:
    """Return the recorded assumption's ceiling: every active weight in one format, plus the KV bytes."""
    assumptions = [
        f"{active_billions:g} B active parameters, every one at {bytes_per_weight:g} bytes",
        f"{kv_gb:.2f} GB of KV cache read per token",
    ]
    gb_per_token = active_billions * bytes_per_weight + kv_gb
    return roofline("recorded assumption", gb_per_token, gpus, gpu_gbps, assumptions)


def _attention(config: dict[str, Any]) -> list[Part]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layers, prefix = config["num_hidden_layers"], "model.layers.0.self_attn"
    if config.get("kv_lora_rank"):  # multi-head latent attention
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value, query = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
        weights = hidden * query + query * heads * (nope + rope) + hidden * (rank + rope)
        weights += rank * heads * (nope + value) + heads * value * hidden
        if config.get("index_n_heads"):  # the sparse attention's indexer
            index = config["index_n_heads"] * config["index_head_dim"]
            weights += query * index + hidden * config["index_head_dim"] + hidden * config["index_n_heads"]
    else:
        head = config.get("head_dim") or hidden // heads
        shared = config.get("num_key_value_heads") or heads
        weights = 2 * hidden * heads * head + 2 * hidden * shared * head
    return [Part("attention", layers * weights, f"{prefix}.o_proj")]


def _feed_forward(config: dict[str, Any]) -> list[Part]:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return [
            Part("dense", layers * 3 * hidden * config["intermediate_size"], "model.layers.0.mlp.up_proj")
        ]
    dense = config.get("first_k_dense_replace", 0)
    size = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    sparse = layers - dense
    last = f"model.layers.{layers - 1}.mlp"
    parts = [
        Part("routed experts", sparse * config["num_experts_per_tok"] * size, f"{last}.experts.0.up_proj")
    ]
    if config.get("n_shared_experts"):
        shared = sparse * config["n_shared_experts"] * size
        parts.append(Part("shared experts", shared, f"{last}.shared_experts.up_proj"))
    if dense:
        weights = dense * 3 * hidden * config["intermediate_size"]
        parts.append(Part("dense layers", weights, "model.layers.0.mlp.up_proj"))
    return parts


def active_parts(config: dict[str, Any]) -> list[Part]:
    """Return what one decode step reads of a checkpoint, from its ``config.json``.

    Knows Llama-like models, mixtures of experts, and latent attention with or without an indexer. Raises
    ValueError naming the missing field for anything else.
    """
    try:
        head = Part("output head", config["vocab_size"] * config["hidden_size"], "lm_head")
        return [*_attention(config), *_feed_forward(config), head]
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}: this architecture is not known here") from None


def kv_bytes_per_token(config: dict[str, Any], bytes_per_value: float = 2.0) -> float:
    """Return the KV cache bytes of one context token over all layers."""
    layers = config["num_hidden_layers"]
    if config.get("kv_lora_rank"):
        return float(layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * bytes_per_value)
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return float(layers * 2 * (config.get("num_key_value_heads") or heads) * head * bytes_per_value)


def quantisation(config: dict[str, Any], quant: Optional[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return (format, name patterns left unquantised) from ``hf_quant_config.json`` or ``config.json``."""
    own = (quant or {}).get("quantization") or config.get("quantization_config") or {}
    algorithm = str(own.get("quant_algo") or own.get("quant_method") or UNQUANTISED).upper()
    left = own.get("exclude_modules") or own.get("ignore") or own.get("modules_to_not_convert") or []
    return algorithm, [str(pattern) for pattern in left]


def _excluded(module: str, patterns: list[str]) -> bool:
    """Tell whether a module stays unquantised; a pattern may name the module, a parent, or use wildcards."""
    for pattern in patterns:
        text = pattern[3:].rstrip("$") if pattern.startswith("re:") else pattern
        text = text.replace(".*", "*")
        if fnmatch.fnmatchcase(module, text) or fnmatch.fnmatchcase(module, f"{text}*"):
            return True
    return False


def from_checkpoint(
    config: dict[str, Any], quant: Optional[dict[str, Any]], context: int, gpus: int, gpu_gbps: float
) -> Roofline:
    """Return the ceiling with each kind of weight in the format that the checkpoint keeps it in."""
    algorithm, left = quantisation(config, quant)
    if algorithm not in BYTES_PER_WEIGHT:
        known = ", ".join(sorted(BYTES_PER_WEIGHT))
        raise ValueError(f"The checkpoint's format {algorithm} is not one of {known}")
    total, assumptions = 0.0, []
    for part in active_parts(config):
        form = UNQUANTISED if _excluded(part.module, left) else algorithm
        total += part.weights * BYTES_PER_WEIGHT[form]
        assumptions.append(f"{part.name}: {part.weights / 1e9:.2f} B in {form}")
    kv = context * kv_bytes_per_token(config)
    assumptions.append(f"{kv / 1e9:.2f} GB of BF16 KV cache for {context} context tokens")
    return roofline("checkpoint's own formats", (total + kv) / 1e9, gpus, gpu_gbps, assumptions)
