#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a tiny random Llama with its tokenizer, from nothing: ``tiny_model.py FOLDER [hidden] [layers]``.

Writes tokenizer.json, tokenizer_config.json, model.gguf, and config.json with model.safetensors; needs
tokenizers, gguf, safetensors and numpy, no torch, no download. Two choices make a load generator's token
counts exact: the alphabet is printable ASCII, so that every token is text of its own, and the output rows of
the special tokens are zero, so that greedy decoding never ends early.
"""

from __future__ import annotations

import json
import pathlib
import random
import string
import sys
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 1024
WORDS = ["measure", "before", "change", "then", "read", "back", "and", "write", "the", "record"]


def make_tokenizer(folder: pathlib.Path) -> None:
    """Train a byte-level BPE on a made-up corpus and save it the way transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    alphabet = [split(character)[0][0] for character in string.printable[:95]]
    pick = random.Random(0)
    corpus = ["".join(pick.choices(string.ascii_lowercase + "  ", k=400)) for _ in range(200)]
    corpus += [" ".join(pick.choices(WORDS, k=60)) for _ in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


#: name in the safetensors file -> name in the GGUF file, of what each layer has
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Shape:
    """A Llama with grouped queries; ``hidden`` is a multiple of its four heads."""

    def __init__(self, hidden: int, layers: int) -> None:
        self.hidden, self.layers, self.heads, self.shared, self.wide = hidden, layers, 4, 2, hidden * 3
        self.head = hidden // self.heads

    def weights(self, vocabulary: int, special: list[int]) -> dict[str, Any]:
        """Return random weights by safetensors name; norms are ones, rows of special tokens are zero."""
        import numpy

        numbers = numpy.random.default_rng(0)
        hidden, wide, shared = self.hidden, self.wide, self.shared * self.head
        rows = {"q_proj": hidden, "k_proj": shared, "v_proj": shared, "o_proj": hidden, "down_proj": hidden}
        found = {}
        for layer in range(self.layers):
            for name in LAYER:
                last = name.split(".")[-1]
                shape = (rows.get(last, wide), wide if last == "down_proj" else hidden)
                full = f"model.layers.{layer}.{name}"
                found[full] = numpy.ones(hidden) if "norm" in name else numbers.standard_normal(shape) * 0.02
        found["model.norm"] = numpy.ones(hidden)
        for name in ("model.embed_tokens", "lm_head"):
            found[name] = numbers.standard_normal((vocabulary, hidden)) * 0.02
        found["lm_head"][special] = 0
        return {f"{name}.weight": weights.astype(numpy.float32) for name, weights in found.items()}


def gguf_name(name: str) -> str:
    """Translate a weight's name."""
    short = name.removesuffix(".weight")
    if short in WHOLE:
        return f"{WHOLE[short]}.weight"
    _, _, layer, rest = short.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def make_models(folder: pathlib.Path, shape: Shape) -> None:
    """Write the same weights in both formats."""
    from safetensors.numpy import save_file

    saved = json.loads((folder / "tokenizer.json").read_text())
    special = [one["id"] for one in saved["added_tokens"]]
    tokens = {**saved["model"]["vocab"], **{one["content"]: one["id"] for one in saved["added_tokens"]}}
    weights = shape.weights(max(tokens.values()) + 1, special)
    make_gguf(folder, shape, weights, tokens, saved)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.wide, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.shared, "head_dim": shape.head, "vocab_size": max(tokens.values()) + 1,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": special[0], "eos_token_id": special[0],
        "pad_token_id": special[0], "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def make_gguf(folder: pathlib.Path, shape: Shape, weights: Any, tokens: Any, saved: Any) -> None:
    """Write model.gguf with the tokenizer in it."""
    import gguf

    special = [one["id"] for one in saved["added_tokens"]]
    names = [""] * (max(tokens.values()) + 1)
    for text, index in tokens.items():
        names[index] = text
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in range(len(names))]
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.wide)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head)
    writer.add_vocab_size(len(names))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[0])
    writer.add_add_bos_token(False)
    for name, value in weights.items():
        writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Make everything in the given folder."""
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    hidden, layers = (int(text) for text in (sys.argv[2:4] or ("128", "2")))
    make_tokenizer(folder)
    make_models(folder, Shape(hidden, layers))


if __name__ == "__main__":
    main()
