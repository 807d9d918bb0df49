"""Writes the goldens of this directory with llama.cpp's Python package `gguf`: `python make_gguf.py`."""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

HERE = Path(__file__).parent
EMBED, HEADS, INNER, FEED, VOCABULARY = 32, 2, 64, 96, 40
KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0")]


def shapes():
    """Names and shapes of a gated T5 of one layer in each tower, as llama.cpp's converter names them."""
    found = {"token_embd.weight": (VOCABULARY, EMBED), "output.weight": (VOCABULARY, EMBED)}
    for tower, attentions in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        for attention in attentions:
            found |= {f"{tower}.blk.0.{attention}_{one}.weight": (INNER, EMBED) for one in "qkv"}
            found[f"{tower}.blk.0.{attention}_o.weight"] = (EMBED, INNER)
            found[f"{tower}.blk.0.{attention}_norm.weight"] = (EMBED,)
        found[f"{tower}.blk.0.attn_rel_b.weight"] = (32, HEADS)
        found |= {f"{tower}.blk.0.ffn_{one}.weight": (FEED, EMBED) for one in ("gate", "up")}
        found[f"{tower}.blk.0.ffn_down.weight"] = (EMBED, FEED)
        found[f"{tower}.blk.0.ffn_norm.weight"] = found[f"{tower}.output_norm.weight"] = (EMBED,)
    return found


def main():
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(HERE / "t5_mixed.gguf", "t5")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list([f"token{number}".encode() for number in range(300)])
    writer.add_token_scores([float(number) for number in range(300)])
    writer.add_array("test.small", [1, 2, 3])
    writer.add_bool("test.flag", True)
    expected = {}
    for number, (name, shape) in enumerate(sorted(shapes().items())):
        array = rng.normal(size=shape).astype(np.float32)
        kind = KINDS[number % 4] if shape[-1] % 32 == 0 else KINDS[0]
        stored = quantize(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        # bfloat16 in float32
        expected[name] = dequantize(stored, kind).reshape(shape).astype(np.float32)
    small = rng.normal(size=(2, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("test.q4", quantize(small, kind), raw_dtype=kind)
    for name, dtype in (("i8", np.int8), ("i32", np.int32), ("i64", np.int64), ("f64", np.float64)):
        expected[f"test.{name}"] = array = np.arange(-6, 6, dtype=dtype).reshape(3, 4)
        writer.add_tensor(f"test.{name}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(HERE / "t5_mixed_expected.npz", **expected)


main()
