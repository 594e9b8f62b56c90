#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a tiny random Llama with its tokenizer, from nothing: ``tiny_model.py FOLDER [hidden] [layers]``.

Writes tokenizer.json, tokenizer_config.json and model.gguf; needs tokenizers, gguf and numpy, no torch, no
download. Two choices make a load generator's token counts exact: the alphabet is printable ASCII, so that
every token is text of its own, and the output rows of the special tokens are zero, so that greedy decoding
never ends early.
"""

from __future__ import annotations

import json
import pathlib
import random
import string
import sys

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


def make_gguf(folder: pathlib.Path, hidden: int, layers: int) -> None:
    """Write random weights of a Llama with grouped queries as model.gguf."""
    import gguf
    import numpy

    heads, shared, wide = 4, 2, hidden * 3
    head = hidden // heads
    saved = json.loads((folder / "tokenizer.json").read_text())
    tokens = {**saved["model"]["vocab"], **{one["content"]: one["id"] for one in saved["added_tokens"]}}
    special = [one["id"] for one in saved["added_tokens"]]
    count = max(tokens.values()) + 1
    names = [""] * count
    for text, index in tokens.items():
        names[index] = text
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(count)]

    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(count)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[0])
    writer.add_add_bos_token(False)

    numbers = numpy.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weights = (numbers.standard_normal(shape) * 0.02).astype(numpy.float32)
        if name == "output.weight":
            weights[special] = 0
        writer.add_tensor(name, weights)

    add("token_embd.weight", count, hidden)
    add("output.weight", count, hidden)
    writer.add_tensor("output_norm.weight", numpy.ones(hidden, numpy.float32))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{norm}.weight", numpy.ones(hidden, numpy.float32))
        add(f"{prefix}attn_q.weight", heads * head, hidden)
        add(f"{prefix}attn_k.weight", shared * head, hidden)
        add(f"{prefix}attn_v.weight", shared * head, hidden)
        add(f"{prefix}attn_output.weight", hidden, heads * head)
        add(f"{prefix}ffn_gate.weight", wide, hidden)
        add(f"{prefix}ffn_up.weight", wide, hidden)
        add(f"{prefix}ffn_down.weight", hidden, wide)
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
    make_gguf(folder, hidden, layers)


if __name__ == "__main__":
    main()
