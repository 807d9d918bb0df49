"""One small T5 in every layout, and trees of its relatives, by NumPy alone; names and shapes are those of the models.

E embed, H heads, D head_dim, J = H*D, F mlp, V vocab: all differ, so that every transpose or swap shows.
"""

from __future__ import annotations

import re

import numpy as np

E, H, D, F, V, X = 12, 2, 5, 14, 40, 3
J = H * D
DEPTHS = {"encoder": 3, "decoder": 4}
_SUBLAYERS = {
    "encoder": (("SelfAttention", "attention"), ("DenseReluDense", "mlp")),
    "decoder": (
        ("SelfAttention", "self_attention"),
        ("EncDecAttention", "encoder_decoder_attention"),
        ("DenseReluDense", "mlp"),
    ),
}
_NORMS = {"encoder_decoder_attention": "pre_cross_attention_layer_norm"}
_QKVO = {"query": "q", "key": "k", "value": "v", "out": "o"}
_SHAPES = {"out": (J, E), "wo": (F, E), **dict.fromkeys(("wi", "wi_0", "wi_1"), (E, F))}


def _filled(shapes):
    """Arrays of distinct numbers."""
    values, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        values[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    return values


def minimal(*, gated=True, bias="tower", towers=("encoder", "decoder"), cross=True, head=True):
    """T5X's minimal T5, without a prefix; `bias`: "tower", "layer" or ""."""
    shapes = {"token_embedder/embedding": (V, E)}
    for tower in towers:
        shapes[f"{tower}/{tower}_norm/scale"] = (E,)
        if bias == "tower":
            shapes[f"{tower}/relpos_bias/rel_embedding"] = (H, 32)
        for i in range(DEPTHS[tower]):
            layer = f"{tower}/layers_{i}"
            if bias == "layer":
                shapes[f"{layer}/relpos_bias/rel_embedding"] = (H, 32)
            for _, name in _SUBLAYERS[tower]:
                if name == "encoder_decoder_attention" and not cross:
                    continue
                shapes[f"{layer}/{_NORMS.get(name, f'pre_{name}_layer_norm')}/scale"] = (E,)
                gates = ("wi_0", "wi_1") if gated else ("wi",)
                for kernel in (*gates, "wo") if name == "mlp" else _QKVO:
                    shapes[f"{layer}/{name}/{kernel}/kernel"] = _SHAPES.get(kernel, (E, J))
    if head and "decoder" in towers:
        shapes["decoder/logits_dense/kernel"] = (E, V)
    return _filled(shapes)


def _split(name, value):
    if "attention/" not in name or not name.endswith("kernel"):
        return value
    return value.reshape((H, D, E) if "/out/" in name else (E, H, D))


def unscanned(plain, *, split=True):
    """Scalable T5: heads split, and a bias in every layer."""
    result = {}
    for name, value in plain.items():
        tower, _, rest = name.partition("/")
        if rest == "relpos_bias/rel_embedding":
            result.update({f"{tower}/layers_{i}/{rest}": value for i in range(DEPTHS[tower])})
        else:
            result[name] = _split(name, value) if split else value
    return result


def scanned(plain, *, split=True, axis=1):
    """Scalable T5 with the layers on one axis; with joined heads, Flaxformer's."""
    layers, result = {}, {}
    for name, value in unscanned(plain, split=split).items():
        match = re.fullmatch(r"(\w+)/layers_(\d+)/(.*)", name)
        if match:
            layers.setdefault(f"{match[1]}/{match[1]}/{match[3]}", []).append(value)
        else:
            result[name] = value
    return {**result, **{name: np.stack(values, axis) for name, values in layers.items()}}


def below(prefix, tree):
    return {prefix + name: value for name, value in tree.items()}


def hugging_face(plain):
    result = {}
    for name, value in plain.items():
        match = re.fullmatch(r"(\w+)/layers_(\d+)/(\w+)(?:/(\w+))?/(\w+)", name)
        if match is None:
            tower = name.partition("/")[0]
            bias = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            embedding = "shared.weight" if tower == "token_embedder" else f"{tower}.embed_tokens.weight"
            new = {"embedding": embedding, "rel_embedding": bias, "kernel": "lm_head.weight"}
            new = new.get(name.rpartition("/")[2], f"{tower}.final_layer_norm.weight")
        else:
            tower, i, part, kernel, _ = match.groups()
            block = f"{tower}.block.{i}.layer"
            ours = [name for _, name in _SUBLAYERS[tower]]
            norms = [_NORMS.get(one, f"pre_{one}_layer_norm") for one in ours]
            if part in norms:
                new = f"{block}.{norms.index(part)}.layer_norm.weight"
            elif part == "relpos_bias":
                new = f"{block}.0.SelfAttention.relative_attention_bias.weight"
            else:
                number = ours.index(part)
                new = f"{block}.{number}.{_SUBLAYERS[tower][number][0]}.{_QKVO.get(kernel, kernel)}.weight"
        result[new] = value if name.endswith("embedder/embedding") else value.T
    return result


def hugging_face_flax(plain):
    return _names_of_flax(hugging_face(plain))


def _names_of_flax(torch):
    result = {}
    for name, value in torch.items():
        is_embedding = name == "shared.weight" or "relative" in name
        kind = "embedding" if is_embedding else "weight" if value.ndim == 1 else "kernel"
        result[name.removesuffix("weight").replace(".", "/") + kind] = value if is_embedding else value.T
    return result


def mesh_tf(plain):
    result = {}
    for name, value in hugging_face(plain).items():
        new = re.sub(r"\.block\.(\d+)\.layer\.(\d+)", lambda m: f".block_{int(m[1]):03}.layer_{int(m[2]):03}", name)
        new = new.replace("relative_attention_bias.weight", "relative_attention_bias").replace(".", "/")
        new = new.replace("shared/weight", "shared/embedding").replace("lm_head/weight", "decoder/logits/kernel")
        new = re.sub(r"/([qkvo])/weight", r"/\1", new)
        new = re.sub(r"norm/weight", "norm/scale", new).replace("/weight", "/kernel")
        result[new] = value if new == "shared/embedding" else value.T
    return result


def maxtext(plain, *, scan=True, axis=1):
    """MaxText's names of a decoder without relative bias."""
    result, layers = {}, {}
    for name, value in plain.items():
        new = name.replace("pre_mlp_layer_norm", "post_self_attention_layer_norm")
        new = new.replace("decoder/token_embedder", "token_embedder")
        match = re.fullmatch(r"decoder/layers_\d+/(.*)", new)
        if scan and match:
            layers.setdefault(f"decoder/layers/{match[1]}", []).append(_split(name, value))
        else:
            result[new] = _split(name, value)
    return {**result, **{name: np.stack(values, axis) for name, values in layers.items()}}


def _more(tree, shapes, without=""):
    kept = {name: value for name, value in tree.items() if not without or not re.search(without, name)}
    return {**kept, **_filled(shapes)}


def models():
    """Models in T5X's minimal layout, by name: T5's versions and parts, and relatives with more beside the layers."""
    plain = minimal()
    separate = {name: value for name, value in plain.items() if "token_embedder" not in name}
    return {
        "t5 1.1": plain,
        "t5 1.0": minimal(gated=False, head=False),
        "umt5": minimal(bias="layer"),
        "encoder": minimal(towers=("encoder",)),
        "decoder": minimal(towers=("decoder",), cross=False),
        "decoder without bias": {
            name.replace("token_embedder", "decoder/token_embedder"): value
            for name, value in minimal(towers=("decoder",), cross=False, bias="").items()
        },
        "calm": _more(plain, {"decoder/meta_cls/kernel": (E, 2), "decoder/meta_cls/bias": (2,)}),
        "prompts": _more(plain, {"encoder/prompt/prompt/prompt": (7, E)}),
        "separate embeddings": _more(separate, {f"{t}/token_embedder/embedding": (V, E) for t in DEPTHS}),
    }


def relatives():
    """Trees of relatives, by name; each is whole for some packs only."""
    plain = minimal()
    torch, ours = hugging_face(plain), below("target/", plain)
    tower = {"encoder": 1, "decoder": 2}
    experts = {
        f"{t}.block.{i}.layer.{at}.mlp.{rest}": shape
        for t, at in tower.items()
        for i in range(DEPTHS[t])
        for rest, shape in (
            [("router.classifier.weight", (X, E))]
            + [(f"experts.expert_{x}.wi.weight", (F, E)) for x in range(X)]
            + [(f"experts.expert_{x}.wo.weight", (E, F)) for x in range(X)]
            if i % 2
            else [("wi.weight", (F, E)), ("wo.weight", (E, F))]
        )
    }
    moe = {
        f"target/{t}/layers_{i}/mlp/{rest}": shape
        for t in tower
        for i in range(1, DEPTHS[t], 2)
        for rest, shape in (
            ("expert/wi/kernel", (X, E, F)),
            ("expert/wo/kernel", (X, F, E)),
            ("router/router_weights/w/kernel", (E, X)),
        )
    }
    local = {
        name.replace("SelfAttention", "LocalSelfAttention" if "enc" == name[:3] else "SelfAttention"): v
        for name, v in torch.items()
    }
    transient = {name.replace("Local", "TransientGlobal"): v for name, v in local.items()}
    norms = {
        f"encoder.block.{i}.layer.0.TransientGlobalSelfAttention.global_input_layer_norm.weight": (E,) for i in range(3)
    }
    wide = "encoder.block.0.layer.0.TransientGlobalSelfAttention.global_relative_attention_bias.weight"
    tg = {f"target/encoder/layers_{i}/attention/T5LayerNorm_0/scale": (E,) for i in range(3)}
    return {
        "switch": _more(torch, experts, "DenseReluDense"),
        "switch t5x": _more(ours, moe, r"layers_[13]/mlp"),
        "longt5 local": local,
        "longt5 tg": _more(transient, {**norms, wide: (32, H)}),
        "longt5 tg flax": _names_of_flax(_more(transient, {**norms, wide: (32, H)})),
        "longt5 tg t5x": _more(ours, {**tg, "target/encoder/side_relpos_bias/rel_embedding": (H, 32)}),
        "with a head": _more(torch, {"qa_outputs.weight": (2, E), "qa_outputs.bias": (2,)}),
        "fused": _more(
            ours,
            {f"target/{t}/layers_{i}/mlp/wi_fused/kernel": (E, 2, F) for t in tower for i in range(DEPTHS[t])},
            "/wi_[01]/",
        ),
    }
