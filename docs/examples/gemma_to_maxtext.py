"""Restore a Gemma of Transformers into MaxText's names, and go back.

Gemma stores its norms without their 1, MaxText its embedding times the root of the width.
`Affine` computes both for each shard while it is read, and `inverse` makes the way back.
"""

import math
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy

import orbax_t5x as ot

directory = Path(tempfile.mkdtemp())  # yours
T = ot.transforms
vocabulary, width, heads, head_dim, hidden, depth = 32, 8, 2, 4, 16, 3

# A file of Transformers' names: kernels are (out, in).
rng = np.random.default_rng(0)
shapes = {
    "input_layernorm": (width,),
    "post_attention_layernorm": (width,),
    "self_attn.q_proj": (heads * head_dim, width),
    "self_attn.o_proj": (width, heads * head_dim),
    "mlp.gate_proj": (hidden, width),
    "mlp.down_proj": (width, hidden),
}
gemma = {f"model.layers.{i}.{name}.weight": shape for i in range(depth) for name, shape in shapes.items()}
gemma |= {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
gemma = {name: rng.normal(size=shape).astype(np.float32) for name, shape in gemma.items()}
safetensors.numpy.save_file(gemma, directory / "model.safetensors")

# MaxText's decoder: kernels are (in, layers, out), layers and heads have dimensions of their own.
layer = "params/params/decoder/layers"
rules = [
    T.Transpose(r"model\.layers\.\d+\..*_proj\.weight"),
    T.StackLayers(r"model\.layers\.(?P<i>\d+)\.(.*)\.weight", r"\2", 1),
    T.Reshape("self_attn.q_proj", (width, depth, heads, head_dim)),
    T.Rename(
        [
            (r"input_layernorm", f"{layer}/pre_self_attention_norm/scale"),
            (r"post_attention_layernorm", f"{layer}/pre_ffw_norm/scale"),
            (r"self_attn\.q_proj", f"{layer}/self_attention/query/kernel"),
            (r"self_attn\.o_proj", f"{layer}/self_attention/out/kernel"),
            (r"mlp\.gate_proj", f"{layer}/mlp/wi_0/kernel"),
            (r"mlp\.down_proj", f"{layer}/mlp/wo/kernel"),
            (r"model\.norm\.weight", "params/params/decoder/decoder_norm/scale"),
            (r"model\.embed_tokens\.weight", "params/params/token_embedder/embedding"),
        ]
    ),
    T.Affine(".*norm/scale", offset=1.0),
    T.Affine(".*/token_embedder/embedding", scale=math.sqrt(width)),
]

plan = ot.plan_restore(directory / "model.safetensors", None, rules)
print(plan.explain("params/params/decoder/decoder_norm/scale"))
maxtext = plan.execute()["params"]["params"]
print(
    "query (embed, layers, heads, head_dim):", maxtext["decoder"]["layers"]["self_attention"]["query"]["kernel"].shape
)
scale = maxtext["decoder"]["decoder_norm"]["scale"]
print("norm is Gemma's + 1:", np.array_equal(scale, gemma["model.norm.weight"] + 1))

# An Orbax item with `params/params`, as MaxText's `load_parameters_path` takes it; and back to Transformers' names.
ot.convert(directory / "model.safetensors", directory / "maxtext", rules)
with ot.open_checkpoint(directory / "model.safetensors") as source:
    back = ot.transforms.inverse(rules, source.leaves)
# Its record has a rule of the way back, too: transposing undoes itself. So the call says that all are to be applied.
ot.convert(directory / "maxtext", directory / "back", back, format="safetensors", is_resuming=False)
with ot.open_checkpoint(directory / "back") as again:
    same = {name: bool(np.allclose(again.leaves[name].get(), array, atol=1e-6)) for name, array in gemma.items()}
print("back:", len(same), "leaves, all as they were:", all(same.values()))
