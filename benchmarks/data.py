"""The checkpoints that the benchmarks restore, made once into a folder: incompressible values, real shapes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.sparse_checkpoints import t5_xxl, write_bundle, write_t5x

# T5.1.1-base: 248 million parameters, 0.99 GB in float32, and Adafactor's factored slots.
_EMBED, _HEADS, _MLP, _VOCAB, _BUCKETS, _LAYERS = 768, 12 * 64, 2048, 32128, 32, 12
_PREFIX = "model.ckpt-1000000"


def mesh_tf_shapes(
    layers: int = _LAYERS, embed: int = _EMBED, vocabulary: int = _VOCAB
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of T5.1.1-base by their Mesh TensorFlow names, or of one of another width."""
    heads, mlp = embed * _HEADS // _EMBED, embed * _MLP // _EMBED
    yield "shared/embedding", (vocabulary, embed)
    yield "decoder/logits/kernel", (embed, vocabulary)
    for tower, attentions in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        yield f"{tower}/rms_norm/scale", (embed,)
        for block in range(layers):
            prefix = f"{tower}/block_{block:03d}"
            for index, attention in enumerate(attentions):
                layer = f"{prefix}/layer_{index:03d}"
                for kernel in "qkv":
                    yield f"{layer}/{attention}/{kernel}", (embed, heads)
                yield f"{layer}/{attention}/o", (heads, embed)
                yield f"{layer}/rms_norm/scale", (embed,)
                if attention == "SelfAttention" and not block:
                    yield f"{layer}/{attention}/relative_attention_bias", (12, _BUCKETS)
            layer = f"{prefix}/layer_{len(attentions):03d}"
            yield f"{layer}/DenseReluDense/wi_0/kernel", (embed, mlp)
            yield f"{layer}/DenseReluDense/wi_1/kernel", (embed, mlp)
            yield f"{layer}/DenseReluDense/wo/kernel", (mlp, embed)
            yield f"{layer}/rms_norm/scale", (embed,)


def scaled_shapes(scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of T5.1.1-base and their slots in about `scale` of its bytes: all names, narrower matrices."""
    width = max(1, round(_EMBED * scale**0.5 / 24)) * 24
    return with_slots(mesh_tf_shapes(embed=width, vocabulary=_VOCAB * width // _EMBED))


def with_slots(shapes: Iterator[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each parameter and its Adafactor slots: v_row drops the largest axis, v_col the other."""
    for name, shape in shapes:
        yield name, shape
        if len(shape) == 2 and min(shape) >= 128:
            large = int(shape[1] >= shape[0])
            yield name + "_slot_vr", (shape[1 - large],)
            yield name + "_slot_vc", (shape[large],)
        else:
            yield name + "_slot_v", shape


def bundle(folder: Path) -> Path:
    """A 1 GB bundle of T5.1.1-base shapes, written by TensorFlow in a process of its own; returns its prefix."""
    prefix = folder / "bundle" / _PREFIX
    if not prefix.with_name(_PREFIX + ".index").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "benchmarks.data", "bundle", str(prefix)], check=True)
    return prefix


def _write_bundle(prefix: str) -> None:
    import tensorflow as tf

    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in with_slots(mesh_tf_shapes())}
    tensors["global_step"] = np.int64(1_000_000)
    names = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=[tensors[name] for name in names]
    )
    (Path(prefix).parent / "checkpoint").write_text(f'model_checkpoint_path: "{_PREFIX}"\n')


def plain_bundle(folder: Path, scale: float = 1) -> Path:
    """A bundle of the shapes of `bundle`, or about `scale` of its bytes, without TensorFlow; returns its prefix."""
    directory = folder / f"plain_bundle_{scale:g}"
    prefix = directory / _PREFIX
    if not prefix.with_name(_PREFIX + ".index").exists():
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["write_plain_bundle", str(prefix), str(scale)]
        subprocess.run([sys.executable, "-m", "benchmarks.jobs", *arguments], check=True)
    return prefix


def many_leaves(folder: Path, count: int) -> Path:
    """A safetensors file of many small leaves in 100 families, as `plan_many` plans them."""
    path = folder / f"{count}_leaves.safetensors"
    if not path.exists():
        array = np.zeros((8, 8), np.float32)
        save_file({f"old_{index % 100}/layer_{index}/kernel": array for index in range(count)}, path)
    return path


def sparse(folder: Path) -> dict[str, Path]:
    """T5.1.1-XXL with Adafactor's slots as a bundle and as a step of T5X's, without the bytes of its arrays."""
    places = {"bundle": folder / "sparse_bundle", "T5X step": folder / "sparse_t5x"}
    writers = {"bundle": partial(write_bundle, num_shards=8), "T5X step": write_t5x}
    for name, place in places.items():
        if not place.exists():
            place.mkdir(parents=True)
            writers[name](place, t5_xxl())
    return places


def orbax_layers(folder: Path, layers: int = 24) -> Path:
    """A 0.96 GB Orbax checkpoint of 24 layers, sharded over 8 devices when it was written."""
    path = folder / f"orbax_{layers}_layers"
    if not path.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.jobs", "write_layers", str(path), str(layers)], check=True)
    return path


def orbax_small(folder: Path, count: int = 3000) -> Path:
    """An Orbax checkpoint of many small leaves."""
    path = folder / f"orbax_{count}_small"
    if not path.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.jobs", "write_small", str(path), str(count)], check=True)
    return path


def orbax_state(folder: Path) -> Path:
    """The bundle's translated values, with Adafactor's placeholders, as stock Orbax saves them."""
    path = folder / "orbax_state"
    if not path.exists():
        subprocess.run(
            [sys.executable, "-m", "benchmarks.jobs", "write_state", str(bundle(folder)), str(path)], check=True
        )
    return path


def in_format(folder: Path, name: str) -> Path:
    """The parameters of T5.1.1-base, 0.99 GB: "safetensors", "msgpack", "orbax", "t5x_gzip" or "t5x_zstd"."""
    path = folder / f"base.{name}"
    if not path.exists():
        maker, _, codec = name.partition("_")
        arguments = [f"make_{maker}", str(path), *([codec] if codec else [])]
        subprocess.run([sys.executable, "-m", "benchmarks.format_jobs", *arguments], check=True)
    return path


def layer_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder of `layers` layers, 40 MB each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for kernel in ("query", "key", "value", "out"):
            shapes[f"decoder/layers_{layer}/attention/{kernel}/kernel"] = (1024, 1024)
        shapes[f"decoder/layers_{layer}/mlp/wi/kernel"] = (1024, 3072)
        shapes[f"decoder/layers_{layer}/mlp/wo/kernel"] = (3072, 1024)
    return shapes


if __name__ == "__main__":
    _write_bundle(sys.argv[2])
