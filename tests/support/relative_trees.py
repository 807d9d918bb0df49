"""Small models of T5's relatives in every layout that they have, by NumPy alone; names and shapes are those of the
models' own code (goldens/trees), which no module of the package is asked for.

The sizes all differ, so that every transpose, swap or mixture shows; a depth equals the heads, which shapes alone do
not tell apart.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

BUCKETS = 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """E embed, H heads, D head_dim, F mlp, V vocab, X experts, G an expert's mlp, K the extra mlp; layers."""

    E: int = 12
    H: int = 2
    D: int = 5
    F: int = 14
    V: int = 40
    X: int = 3
    G: int = 9
    K: int = 11
    encoder: int = 4
    decoder: int = 2
    subblocks: int = 2

    @property
    def J(self):
        return self.H * self.D


@dataclasses.dataclass(frozen=True)
class Relative:
    """A relative of T5; `bias`: "tower" or "layer"; `experts` in the last layer of each subblock.

    `embedding`: below the one tower. `beside`: leaves of its own, by T5X's names, with shapes in sizes.
    """

    name: str
    gated: bool = True
    bias: str = "tower"
    attention: str = ""
    experts: bool = False
    extra: bool = False
    head: bool = True
    towers: tuple[str, ...] = ("encoder", "decoder")
    cross: bool = True
    own_embedding: bool = False
    beside: tuple[tuple[str, str], ...] = ()


RELATIVES = (
    Relative("T5.1.0", gated=False, head=False),
    Relative("T5.1.1, mT5, ByT5, Flan-T5, UL2"),
    Relative("encoder only", towers=("encoder",)),
    Relative("umT5, Pile-T5", bias="layer"),
    Relative("umT5's encoder", bias="layer", towers=("encoder",)),
    Relative("language model", towers=("decoder",), cross=False, own_embedding=True),
    Relative("Pix2Struct's decoder", towers=("decoder",), own_embedding=True),
    Relative("dual encoder", towers=("encoder",), own_embedding=True, beside=(("projection_layer/kernel", "EK"),)),
    Relative(
        "CALM, soft prompts",
        beside=(
            ("encoder/prompt/prompt/prompt", "KE"),
            ("decoder/meta_cls/kernel", "EK"),
            ("decoder/meta_cls/bias", "K"),
        ),
    ),
    Relative("LongT5, local", attention="local"),
    Relative("LongT5, transient-global", attention="transient-global"),
    Relative("Switch", gated=False, head=False, experts=True),
    Relative("gated mixture of experts", experts=True),
    Relative("ST-MoE", experts=True, extra=True),
)


def by_name(name):
    return next(one for one in RELATIVES if one.name == name)


def _shapes(one, n):
    """T5X's minimal layout: joined heads, a name for each layer."""
    own = f"{one.towers[0]}/" if one.own_embedding else ""
    found: dict[str, tuple[int, ...]] = {f"{own}token_embedder/embedding": (n.V, n.E)}
    found |= {name: tuple(getattr(n, size) for size in sizes) for name, sizes in one.beside}
    gates = ("wi_0", "wi_1") if one.gated else ("wi",)
    for tower in one.towers:
        found[f"{tower}/{tower}_norm/scale"] = (n.E,)
        if one.bias == "tower":
            found[f"{tower}/relpos_bias/rel_embedding"] = (n.H, BUCKETS)
        attentions = {"attention": "pre_attention_layer_norm"}
        if tower == "decoder":
            attentions = {
                "self_attention": "pre_self_attention_layer_norm",
                **({"encoder_decoder_attention": "pre_cross_attention_layer_norm"} if one.cross else {}),
            }
        for i in range(getattr(n, tower)):
            layer = f"{tower}/layers_{i}"
            for attention, norm in attentions.items():
                found[f"{layer}/{norm}/scale"] = (n.E,)
                found |= {f"{layer}/{attention}/{name}/kernel": (n.E, n.J) for name in ("query", "key", "value")}
                found[f"{layer}/{attention}/out/kernel"] = (n.J, n.E)
            found[f"{layer}/pre_mlp_layer_norm/scale"] = (n.E,)
            if one.bias == "layer":
                found[f"{layer}/relpos_bias/rel_embedding"] = (n.H, BUCKETS)
            if one.attention == "transient-global" and tower == "encoder":
                found[f"{layer}/attention/T5LayerNorm_0/scale"] = (n.E,)
                found["encoder/side_relpos_bias/rel_embedding"] = (n.H, BUCKETS)
            if one.experts and i % n.subblocks == n.subblocks - 1:
                found |= {f"{layer}/mlp/expert/{name}/kernel": (n.X, n.E, n.G) for name in gates}
                found[f"{layer}/mlp/expert/wo/kernel"] = (n.X, n.G, n.E)
                found[f"{layer}/mlp/router/router_weights/w/kernel"] = (n.E, n.X)
                if one.extra:
                    found[f"{layer}/pre_extra_mlp_layer_norm/scale"] = (n.E,)
                    found |= {f"{layer}/extra_mlp/{name}/kernel": (n.E, n.K) for name in gates}
                    found[f"{layer}/extra_mlp/wo/kernel"] = (n.K, n.E)
            else:
                found |= {f"{layer}/mlp/{name}/kernel": (n.E, n.F) for name in gates}
                found[f"{layer}/mlp/wo/kernel"] = (n.F, n.E)
    if one.head and "decoder" in one.towers:
        found["decoder/logits_dense/kernel"] = (n.E, n.V)
    return found


def minimal(one, n):
    """Arrays of distinct numbers under the names of T5X's minimal layout."""
    values, start = {}, 0
    for name, shape in _shapes(one, n).items():
        size = int(np.prod(shape))
        values[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape).astype(np.float32)
        start += size
    return values


# -- T5X's and Flaxformer's layouts


def split(plain, n):
    """Heads apart."""
    return {
        name: value.reshape((n.H, n.D, n.E) if "/out/" in name else (n.E, n.H, n.D))
        if re.search(r"attention/(query|key|value|out)/kernel", name)
        else value
        for name, value in plain.items()
    }


def bias_per_layer(plain, n):
    """The tower's bias in each of its layers."""
    found = {}
    for name, value in plain.items():
        tower, _, rest = name.partition("/")
        layers = range(getattr(n, tower)) if rest == "relpos_bias/rel_embedding" else ()
        found |= {f"{tower}/layers_{i}/{rest}": value for i in layers} or {name: value}
    return found


def stacked(plain, n, subblocks=None, axis=1):
    """All layers on one axis, or every `subblocks`-th one."""
    found, layers = {}, {}
    for name, value in bias_per_layer(plain, n).items():
        match = re.fullmatch(r"(\w+)/layers_(\d+)/(.*)", name)
        if match is None:
            found[name] = value
            continue
        tower, i, rest = match[1], int(match[2]), match[3]
        block = f"subblock_{i % subblocks}/" if subblocks else ""
        layers.setdefault(f"{tower}/{tower}/{block}{rest}", {})[i] = value
    return found | {name: np.stack([one[i] for i in sorted(one)], axis) for name, one in layers.items()}


def fused(plain, n):
    """Keys and values, and gates, in one array each."""
    found = split(plain, n)
    for name in [name for name in found if name.endswith(("/key/kernel", "/mlp/wi_0/kernel"))]:
        other, new = ("value", "kv_fused") if "/key/" in name else ("wi_1", "wi_fused")
        module = name.split("/")[-2]
        pair = found.pop(name), found.pop(name.replace(f"/{module}/", f"/{other}/"))
        found[name.replace(f"/{module}/", f"/{new}/")] = np.stack(pair, 1)
    return found


# -- other programs' names


def _numbered(tower, part):
    """The number of a sublayer in Hugging Face's and Mesh TensorFlow's blocks."""
    order = ["attention", "mlp"] if tower == "encoder" else ["self_attention", "encoder_decoder_attention", "mlp"]
    norms = {f"pre_{name}_layer_norm": at for at, name in enumerate(order)} | {"pre_cross_attention_layer_norm": 1}
    return norms.get(part, order.index(part) if part in order else 0)


def hugging_face(plain, one):
    """The names and orientation of Transformers' PyTorch modules; None where it has no such model."""
    if one.extra or (one.experts and one.gated) or one.own_embedding or one.beside:
        return None
    own = {"local": "LocalSelfAttention", "transient-global": "TransientGlobalSelfAttention"}
    kernels = {"query": "q", "key": "k", "value": "v", "out": "o"}
    found = {}
    for name, value in plain.items():
        tower, _, rest = name.partition("/")
        attention = own.get(one.attention, "SelfAttention") if tower == "encoder" else "SelfAttention"
        mlp = "mlp" if one.experts else "DenseReluDense"
        module = f"{tower}.block.0.layer.0.{attention}"
        top = {
            "embedding": "shared.weight",
            "logits_dense/kernel": "lm_head.weight",
            f"{tower}_norm/scale": f"{tower}.final_layer_norm.weight",
            "relpos_bias/rel_embedding": f"{module}.relative_attention_bias.weight",
            "side_relpos_bias/rel_embedding": f"{module}.global_relative_attention_bias.weight",
        }
        if rest in top:
            found[top[rest]] = value if rest == "embedding" else value.T
            continue
        layer, part, *more = rest.split("/")
        block = f"{tower}.block.{layer.removeprefix('layers_')}.layer.{_numbered(tower, part)}"
        if part.endswith("layer_norm"):
            found[f"{block}.layer_norm.weight"] = value
        elif part == "relpos_bias":
            found[f"{block}.{attention}.relative_attention_bias.weight"] = value.T
        elif more[0] == "T5LayerNorm_0":
            found[f"{block}.{attention}.global_input_layer_norm.weight"] = value
        elif more[0] == "expert":
            found |= {f"{block}.mlp.experts.expert_{x}.{more[1]}.weight": value[x].T for x in range(len(value))}
        elif more[0] == "router":
            found[f"{block}.mlp.router.classifier.weight"] = value.T
        elif part == "mlp":
            found[f"{block}.{mlp}.{more[0]}.weight"] = value.T
        else:
            module = "EncDecAttention" if part == "encoder_decoder_attention" else attention
            found[f"{block}.{module}.{kernels[more[0]]}.weight"] = value.T
    return found


def hugging_face_flax(plain, one):
    """The names of Transformers' Flax modules; None where it has no such model."""
    torch = None if one.experts or one.bias == "layer" else hugging_face(plain, one)
    found = {}
    for name, value in (torch or {}).items():
        is_embedding = name == "shared.weight" or "attention_bias" in name
        kind = "embedding" if is_embedding else "weight" if value.ndim == 1 else "kernel"
        found[name.removesuffix("weight").replace(".", "/") + kind] = value if is_embedding else value.T
    return found or None


def mesh_tf(plain, one):
    """Mesh TensorFlow's names of a T5; None of a relative whose names there are not known."""
    if one.extra or one.attention or one.beside or one.bias == "layer" or (one.own_embedding and one.cross):
        return None
    if one.own_embedding:
        return _mesh_tf_language_model(plain)
    found, dense = {}, {}
    for name, value in plain.items():
        match = re.fullmatch(r"(\w+)/layers_(\d+)/mlp/(?:expert|router)/(\w+)(?:/w)?/kernel", name)
        if match is None:
            dense[name] = value
            continue
        layer = f"{match[1]}/block_{int(match[2]):03}/layer_{_numbered(match[1], 'mlp'):03}/MoE1D"
        found[f"{layer}/{match[3].replace('router_weights', 'switch_gating')}/kernel"] = value
    for name, value in (hugging_face(dense, dataclasses.replace(one, experts=False)) or {}).items():
        new = re.sub(r"\.block\.(\d+)\.layer\.(\d+)", lambda m: f".block_{int(m[1]):03}.layer_{int(m[2]):03}", name)
        new = new.replace("relative_attention_bias.weight", "relative_attention_bias").replace(".", "/")
        new = new.replace("shared/weight", "shared/embedding").replace("lm_head/weight", "decoder/logits/kernel")
        new = re.sub(r"norm/weight", "norm/scale", re.sub(r"/([qkvo])/weight", r"/\1", new)).replace(
            "/weight", "/kernel"
        )
        found[new] = value if new == "shared/embedding" else value.T
    return found


def _mesh_tf_language_model(plain):
    """Mesh TensorFlow's names of a decoder without an encoder."""
    short, found = {"query": "q", "key": "k", "value": "v", "out": "o"}, {}
    for name, value in plain.items():
        new = name.removeprefix("decoder/").removeprefix("token_embedder/").replace("decoder_norm", "rms_norm")
        new = new.replace("logits_dense", "logits")
        new = new.replace("relpos_bias/rel_embedding", "block_000/layer_000/SelfAttention/relative_attention_bias")
        match = re.fullmatch(r"layers_(\d+)/(\w+)/(?:(\w+)/)?\w+", new)
        if match is not None:
            layer = f"block_{int(match[1]):03}/layer_00{'mlp' in match[2]:d}"
            module = (
                f"SelfAttention/{short.get(match[3], '')}"
                if "attention" in match[2]
                else f"DenseReluDense/{match[3]}/kernel"
            )
            new = f"{layer}/{module if match[3] else 'rms_norm/scale'}"
        found[f"transformer/{new}"] = value
    return found


def wan(plain, one):
    """The names of Wan's text encoder, a gated encoder; None of other models."""
    if one.towers != ("encoder",) or one.own_embedding:
        return None
    theirs = {
        **{f"attention/{ours}/kernel": f"attn.{ours[0]}.weight" for ours in ("query", "key", "value", "out")},
        "mlp/wi_0/kernel": "ffn.gate.0.weight",
        "mlp/wi_1/kernel": "ffn.fc1.weight",
        "mlp/wo/kernel": "ffn.fc2.weight",
        "pre_attention_layer_norm/scale": "norm1.weight",
        "pre_mlp_layer_norm/scale": "norm2.weight",
        "relpos_bias/rel_embedding": "pos_embedding.embedding.weight",
        "encoder_norm/scale": "norm.weight",
    }
    found = {"token_embedding.weight": plain["token_embedder/embedding"]}
    for name, value in plain.items():
        match = re.fullmatch(r"encoder/(?:layers_(\d+)/)?(.*)", name)
        if match is not None:
            found[("" if match[1] is None else f"blocks.{match[1]}.") + theirs[match[2]]] = value.T
    return found


def pix2struct(plain, one):
    """The names of Transformers' Pix2Struct, its decoder alone; None of other models."""
    if one.towers != ("decoder",) or not one.cross:
        return None
    found = {}
    for name, value in plain.items():
        layer, part, *more = name.removeprefix("decoder/").removeprefix("layers_").split("/")
        module = (
            part.removeprefix("pre_")
            .removesuffix("_layer_norm")
            .replace("cross_attention", "encoder_decoder_attention")
        )
        attention = "decoder.layer.{}.self_attention.attention."
        if layer == "relpos_bias":
            new = attention.format(0) + "relative_attention_bias"
        elif not layer.isdecimal():
            new = {"token_embedder": "embed_tokens", "decoder_norm": "final_layer_norm", "logits_dense": "lm_head"}[
                layer
            ]
            new = f"decoder.{new}"
        elif module != part:
            new = f"decoder.layer.{layer}.{module}.layer_norm"
        elif part == "mlp":
            new = f"decoder.layer.{layer}.mlp.DenseReluDense.{more[0]}"
        else:
            new = f"decoder.layer.{layer}.{part}.attention.{more[0].replace('out', 'output')}"
        found[f"{new}.weight"] = value if new.endswith("embed_tokens") else value.T
    return found


def below(prefix, tree):
    return {prefix + name: value for name, value in tree.items()}


NOT_IN_HUGGING_FACE = "Transformers has no such model"
NOT_STACKED = "no model of this layout is known"

# Layout -> the tree of a relative, or why there is none.
LAYOUTS = {
    "Hugging Face": lambda plain, one, n: hugging_face(plain, one) or NOT_IN_HUGGING_FACE,
    "T5X minimal": lambda plain, one, n: plain,
    "T5X unscanned": lambda plain, one, n: split(
        plain if one.attention == "transient-global" or one.experts else bias_per_layer(plain, n), n
    ),
    "T5X scanned": lambda plain, one, n: (
        NOT_STACKED if one.experts or one.attention == "transient-global" else stacked(split(plain, n), n)
    ),
    "Flaxformer, bias per layer": lambda plain, one, n: bias_per_layer(plain, n),
    "Flaxformer scanned": lambda plain, one, n: (
        NOT_STACKED if one.experts or one.attention == "transient-global" else stacked(plain, n)
    ),
    "Flaxformer scanned in subblocks": lambda plain, one, n: (
        stacked(plain, n, n.subblocks) if one.experts else "its layers are alike"
    ),
    "Flaxformer fused": lambda plain, one, n: (
        fused(plain, n) if one.gated and not one.experts and not one.attention else NOT_STACKED
    ),
    "Hugging Face Flax": lambda plain, one, n: hugging_face_flax(plain, one) or NOT_IN_HUGGING_FACE,
    "Mesh TensorFlow": lambda plain, one, n: mesh_tf(plain, one) or "names not known",
    "Wan's text encoder": lambda plain, one, n: wan(plain, one) or "another model",
    "Pix2Struct": lambda plain, one, n: pix2struct(plain, one) or "another model",
}
