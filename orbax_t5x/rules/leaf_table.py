"""Tables of a layout's leaves, by name and dimensions.

A rule pack checks its source by such a table. Names have `*` for a layer's number. Dimensions are letters: E embed, H
heads, D head_dim, J = H*D, F mlp, L layers, V vocab, X experts, G an expert's mlp, K another mlp, and `*` for any size.
E has one size in a model, the others (but V) one in each tower.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.names import Keep
from orbax_t5x.transforms.prefix import is_no_parameter
from orbax_t5x.trees.flat import FlatState

Dimensions = tuple[str, ...]
"""The dimensions that a leaf may have, one text for each rank; none: any shape."""

# Hugging Face's module, T5X's and T5X's norm before it, for each tower's sublayers in order.
SUBLAYERS = {
    "encoder": (
        ("SelfAttention", "attention", "pre_attention_layer_norm"),
        ("DenseReluDense", "mlp", "pre_mlp_layer_norm"),
    ),
    "decoder": (
        ("SelfAttention", "self_attention", "pre_self_attention_layer_norm"),
        ("EncDecAttention", "encoder_decoder_attention", "pre_cross_attention_layer_norm"),
        ("DenseReluDense", "mlp", "pre_mlp_layer_norm"),
    ),
}
BIAS = "relpos_bias/rel_embedding"
_MLP = ("wi", "wi_0", "wi_1", "wo")
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_BY_PARENT = {"out": "JE", "logits_dense": "EV", **dict.fromkeys(_MLP, "EF"), "wo": "FE"}
_SPLIT = {"EJ": "EHD", "JE": "HDE"}
# What relatives of T5 have beside the layers, under one name in all of T5X's layouts.
_RELATIVES: dict[str, Dimensions] = {
    "projection_layer/kernel": ("E*",),
    "encoder/prompt/prompt/prompt": ("*E",),
    "decoder/meta_cls/kernel": ("E*",),
    "decoder/meta_cls/bias": ("*",),
}
_OUTSIDE_LAYERS: dict[str, Dimensions] = {
    **{f"{tower}token_embedder/embedding": ("VE",) for tower in ("", "encoder/", "decoder/")},
    **{f"{tower}/{tower}_norm/scale": ("E",) for tower in SUBLAYERS},
    "decoder/logits_dense/kernel": ("EV",),
    **_RELATIVES,
}
# What relatives have in the encoder where attention is transient-global (LongT5).
TRANSIENT_GLOBAL: dict[str, Dimensions] = {
    "encoder/layers_*/attention/T5LayerNorm_0/scale": ("E",),
    "encoder/side_relpos_bias/rel_embedding": ("H*",),
}
EXPERT = {"wi": "XEG", "wi_0": "XEG", "wi_1": "XEG", "wo": "XGE"}
ROUTER = "mlp/router/router_weights/w/kernel"
# What relatives have in layers (Switch, ST-MoE).
_IN_LAYERS = {
    **{f"mlp/expert/{name}/kernel": letters for name, letters in EXPERT.items()},
    **{f"extra_mlp/{name}/kernel": _BY_PARENT[name].replace("F", "K") for name in _MLP},
    ROUTER: "EX",
    "pre_extra_mlp_layer_norm/scale": "E",
}
_SHARED_SIZES = "E"
_FREE_SIZES = "V*"

_LAYER_NUMBER = re.compile(r"\b(layers_|subblock_|expert_|blocks?[._/]|decoder\.layer\.)\d+")
_CUT = re.compile(r"[./]")
_ADAPTER = re.compile(r".*[./]lora_(?:embedding_)?[AB](?:\..*)?")
# Prefixes of models in a problem.
_SHOWN = 4


@functools.lru_cache(maxsize=1 << 14)
def _without_numbers(name: str) -> str:
    """Replaces the numbers of layers, blocks and experts by `*`."""
    return _LAYER_NUMBER.sub(r"\1*", name)


def dimensions_of(name: str) -> str:
    """Returns the dimensions of a leaf of T5X's minimal T5."""
    *_, parent, kind = name.split("/")
    return {"scale": "E", "rel_embedding": "H*", "embedding": "VE"}.get(kind) or _BY_PARENT.get(parent, "EJ")


@dataclasses.dataclass(frozen=True)
class LeafTable:
    """Names and dimensions of a layout's leaves."""

    layout: str
    leaves: Mapping[str, Dimensions] = dataclasses.field(hash=False)
    has_dots: bool = False
    is_whole: bool = True

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """Lists the prefixes of this layout's names, preferably of layers."""
        found: dict[str, bool] = {}
        for name in names:
            canonical = _without_numbers(name)
            cuts = (cut.end() for cut in _CUT.finditer(canonical) if self.has_dots or cut[0] == "/")
            at = next((cut for cut in itertools.chain((0,), cuts) if canonical[cut:] in self.leaves), None)
            if at is not None and not is_no_parameter(name):
                prefix = name[: _cut_in(name, at)]
                found[prefix] = found.get(prefix, False) or "*" in canonical[at:]
        in_layers = [prefix for prefix, has_layer in found.items() if has_layer]
        result: list[str] = []
        for prefix in sorted(in_layers or found, key=len):
            if not any(self._is_below(prefix, other) for other in result):
                result.append(prefix)
        return result

    def _is_below(self, name: str, prefix: str) -> bool:
        """Tests if a name belongs to the model at a prefix."""
        if prefix or not name:
            return name.startswith(prefix)
        if self.has_dots:
            return "." in name and "/" not in name
        return name.partition("/")[0] in self._first_parts

    @functools.cached_property
    def _first_parts(self) -> frozenset[str]:
        return frozenset(known.partition("/")[0] for known in self.leaves)

    def model(self, names: Iterable[str]) -> dict[str, str]:
        """Maps the model's names to their names in the table."""
        names = [name for name in names if not is_no_parameter(name)]
        prefixes = self.prefixes(names)
        below = ((name, prefix) for name in names for prefix in prefixes if self._is_below(name, prefix))
        return {name: _without_numbers(name.removeprefix(prefix)) for name, prefix in below}

    def renames_below(self, names: Iterable[str], target: Iterable[str]) -> dict[str, str]:
        """Maps the model's names to the target's prefix."""
        wanted = self.prefixes(target)
        if len(wanted) != 1:
            return {}
        names = list(names)
        found = self.prefixes(names)
        if len(found) != 1 or found == wanted:
            return {}
        return {name: wanted[0] + name.removeprefix(found[0]) for name in self.model(names)}

    def beside(self, names: Iterable[str]) -> tuple[str, list[str]]:
        """Lists the only model's prefix, and dotted names beside it."""
        names = list(names)
        prefix, *others = self.prefixes(names) or [""]
        if not self.has_dots or others or not prefix:
            return "", []
        near = [name for name in names if "." in name.rpartition("/")[2] and not is_no_parameter(name)]
        return prefix, [name for name in near if not name.startswith(prefix)]

    def refusal(self, state: FlatState, chain: Sequence[Transform], *, allows_adapters: bool) -> Problem | None:
        """Returns the problem of several models, or of adapters."""
        prefixes = self.prefixes(state) if self.has_dots else []
        if len(prefixes) < 2:
            return None if allows_adapters else refusal_of_adapters(state)
        found = f"{len(prefixes)} models, below {listed(map(repr, prefixes), _SHOWN)}"
        ways = [
            Fix.setting(f"keep {prefix!r}: pass {{}}", transforms=(Keep((f"{re.escape(prefix)}.*",)), *chain))
            for prefix in prefixes[:_SHOWN]
        ]
        message = f"the checkpoint has {found}, and each would get the same names"
        return Problem("rule", None, message, Fix.any_of(*ways))

    def unfit(self, state: FlatState) -> dict[str, str]:
        """Finds leaves of the model with unknown names or shapes."""
        unfit: dict[str, str] = {}
        sizes: dict[tuple[str, str], dict[str, int]] = {}
        for name, known in self.model(state).items():
            if known not in self.leaves:
                if self.is_whole:
                    unfit[name] = ""
                continue
            shape, dimensions = getattr(state[name], "shape", None), self.leaves[known]
            if shape is None or not dimensions:
                continue
            letters = next((letters for letters in dimensions if len(letters) == len(shape)), None)
            if letters is None:
                unfit[name] = " or ".join(map(_dimensions_text, dimensions))
                continue
            tower = known.partition("/")[0].partition(".")[0]
            for letter, size in zip(letters, shape, strict=True):
                if letter not in _FREE_SIZES:
                    sizes.setdefault(("" if letter in _SHARED_SIZES else tower, letter), {})[name] = size
        for (_, letter), found in sizes.items():
            (usual, _), *others = collections.Counter(found.values()).most_common()
            for name, size in found.items() if others else ():
                if size != usual:
                    unfit.setdefault(name, f"{letter} of {usual}, as other leaves have, and not of {size}")
        return unfit


def refusal_of_adapters(state: FlatState) -> Problem | None:
    """Returns why adapters alone are no model, if there are any."""
    adapters = [name for name in state if _ADAPTER.fullmatch(name)]
    if not adapters:
        return None
    message = (
        f"{counted(len(adapters), 'leaf is', 'leaves are')} of LoRA adapters ({listed(adapters, 1)}), which change the "
        "weights of a base model"
    )
    fix = (
        "restore both, with the adapters' pack first: ot.restore({'base': …, 'adapter': …}, target, "
        "[ot.rules.peft_lora('adapter_config.json'), …])"
    )
    return Problem("rule", None, message, Fix.in_program(fix))


def _cut_in(name: str, at: int) -> int:
    """Converts a position in a name with `*` to the name's own."""
    for number in _LAYER_NUMBER.finditer(name):
        if number.start() >= at:
            break
        at += len(number[0]) - len(number[1]) - 1
    return at


def _dimensions_text(letters: str) -> str:
    return f"({', '.join(letters)}{',' if len(letters) == 1 else ''})"


def t5x_table(
    layout: str,
    *,
    heads: Sequence[str] = ("joined",),
    scan_axis: int | None = None,
    subblocks: bool = False,
    biases: Sequence[str] = ("tower", "layer"),
    transient_global: bool = False,
    experts: bool = True,
) -> LeafTable:
    """Makes the table of a layout of T5X."""
    leaves: dict[str, Dimensions] = dict(_OUTSIDE_LAYERS)
    in_layers = {ours: dimensions_of(ours) for _, ours in layer_names()}
    for tower in SUBLAYERS:
        if "layer" in biases:
            in_layers[f"{tower}/layers_*/{BIAS}"] = "H*"
        if "tower" in biases:
            leaves[f"{tower}/{BIAS}"] = ("H*",)
        if experts:
            in_layers.update({f"{tower}/layers_*/{name}": letters for name, letters in _IN_LAYERS.items()})
    for name, joined in in_layers.items():
        forms = [joined] if joined not in _SPLIT else [{"joined": joined}.get(one, _SPLIT[joined]) for one in heads]
        if scan_axis is None:
            leaves[name] = tuple(forms)
            continue
        tower, _, rest = name.replace("/layers_*", "/subblock_*" if subblocks else "").partition("/")
        leaves[f"{tower}/{tower}/{rest}"] = tuple(_with_layers(form, scan_axis) for form in forms)
    if transient_global:
        leaves.update(TRANSIENT_GLOBAL)
    return LeafTable(layout, leaves)


def fused_leaves() -> dict[str, Dimensions]:
    """Returns Flaxformer's fused kernels and their dimensions."""
    kernels = {"mlp": ("wi_fused", "E*F")}
    return {
        f"{tower}/layers_*/{ours}/{name}/kernel": (letters,)
        for tower, sublayers in SUBLAYERS.items()
        for _, ours, _ in sublayers
        for name, letters in (kernels.get(ours, ("kv_fused", "E*HD")),)
    }


def maxtext_tables(scan_axis: int | None) -> tuple[LeafTable, LeafTable]:
    """Makes the tables of decoder-only models in T5X and MaxText."""
    # Relative biases, encoders and cross-attention have problems of their own.
    known = t5x_table("", experts=False).leaves
    ours: dict[str, Dimensions] = {name: () for name in known if name not in _RELATIVES}
    theirs: dict[str, Dimensions] = {"token_embedder/embedding": ("VE",)}
    for name in ours:
        if name.startswith("encoder") or re.search("relpos|encoder_decoder|pre_cross", name):
            continue
        joined = dimensions_of(name)
        ours[name] = (joined,)
        if "/layers_*/" in name:
            split = _SPLIT.get(joined, joined)
            # MaxText names the norm before the MLP after the sublayer before it.
            renamed = name.replace("pre_mlp_layer_norm", "post_self_attention_layer_norm")
            if scan_axis is None:
                theirs[renamed] = (split,)
            else:
                theirs[renamed.replace("layers_*", "layers")] = (_with_layers(split, scan_axis),)
        elif "token_embedder" not in name:
            theirs[name] = (joined,)
    return LeafTable("T5X's decoder-only model", ours), LeafTable("MaxText's decoder", theirs)


def mesh_tf_table() -> LeafTable:
    """Makes the table of Mesh TensorFlow's names, for shapes."""
    leaves: dict[str, Dimensions] = {"shared/embedding": ("VE",)}
    for tower, like in (("encoder", "encoder"), ("decoder", "decoder"), ("transformer", "decoder")):
        leaves.update({f"{tower}/embedding": ("VE",), f"{tower}/logits/kernel": ("EV",)})
        leaves.update({f"{tower}/{norm}/scale": ("E",) for norm in ("final_layer_norm", "rms_norm")})
        sublayers = [
            theirs for theirs, _, _ in SUBLAYERS[like] if tower != "transformer" or theirs != "EncDecAttention"
        ]
        for number, theirs in enumerate(sublayers):
            layer = f"{tower}/block_*/layer_{number:03}"
            leaves.update({f"{layer}/{norm}/scale": ("E",) for norm in ("layer_norm", "rms_norm")})
            if theirs == "DenseReluDense":
                leaves.update({f"{layer}/{theirs}/{name}/kernel": (_BY_PARENT[name],) for name in _MLP})
                leaves.update({f"{layer}/MoE1D/{name}/kernel": (letters,) for name, letters in EXPERT.items()})
            else:
                leaves.update({f"{layer}/{theirs}/{a}": (_BY_PARENT.get(b, "EJ"),) for a, b in _PROJECTIONS.items()})
                leaves[f"{layer}/{theirs}/relative_attention_bias"] = ("H*",)
    return LeafTable("Mesh TensorFlow's T5", leaves, is_whole=False)


def _with_layers(letters: str, axis: int) -> str:
    # Below zero the axis counts from the end of the stacked shape.
    at = axis if axis >= 0 else axis + len(letters) + 1
    return f"{letters[:at]}L{letters[at:]}"


def layer_names() -> list[tuple[str, str]]:
    """Pairs Hugging Face's and T5X's names in a layer."""
    pairs: list[tuple[str, str]] = []
    for tower, sublayers in SUBLAYERS.items():
        for number, (theirs, ours, norm) in enumerate(sublayers):
            block, layer = f"{tower}.block.*.layer.{number}", f"{tower}/layers_*"
            pairs.append((f"{block}.layer_norm.weight", f"{layer}/{norm}/scale"))
            if ours == "mlp":
                kernels = {name: name for name in _MLP}
            else:
                kernels = _PROJECTIONS
            pairs += [(f"{block}.{theirs}.{a}.weight", f"{layer}/{ours}/{b}/kernel") for a, b in kernels.items()]
    return pairs
