"""Hugging Face's names of LongT5's attention and Switch's experts.

They run beside a pack's own transforms, which know T5: before them on the way to T5X's names, after them on the way
back. Between these, arrays have T5X's names and Hugging Face's orientation.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.rules.leaf_table import EXPERT, ROUTER, SUBLAYERS, TRANSIENT_GLOBAL, Dimensions
from orbax_t5x.transforms.arrays import Transpose
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.layers import StackLayers, UnstackLayers
from orbax_t5x.transforms.names import Rename
from orbax_t5x.transforms.prefix import rename_leaves
from orbax_t5x.trees.flat import FlatState

# What config.json calls encoder_attention_type, and the module of the encoder's attention.
_ATTENTION = {"local": "LocalSelfAttention", "transient-global": "TransientGlobalSelfAttention"}
_ROOT = r"(?:(?:params/)?params/|target/)?"
_GLOBAL_NORM, _GLOBAL_BIAS = TRANSIENT_GLOBAL
_MODULE = re.compile(r"(?:^|[./])encoder[./]block[./]\d+[./]layer[./]0[./](\w*SelfAttention)[./]")
_FEED_FORWARD = re.compile(r"(?:^|[./])(?:encoder|decoder)\.block\.\d+\.layer\.\d\.mlp\.")
# T5's feed-forward layer, that relatives with experts call `mlp`.
_DENSE = r"((?:encoder|decoder)\.block\.\d+\.layer\.\d\.){}(\.w[io]\.weight)"
_MLP_LAYERS = {tower: len(sublayers) - 1 for tower, sublayers in SUBLAYERS.items()}


def relatives_table(t5: dict[str, Dimensions]) -> dict[str, Dimensions]:
    """Returns relatives' leaves by Hugging Face's names, with dimensions."""
    is_flax = any("/" in name for name in t5)
    found = {
        name.replace("SelfAttention", module): dimensions
        for name, dimensions in t5.items()
        if name.startswith("encoder") and "SelfAttention" in name
        for module in _ATTENTION.values()
    }
    norm, bias = _global_names(is_flax)
    found |= {norm.format("*"): ("E",), bias.format("*"): ("*H",)}
    for tower, layer in () if is_flax else _MLP_LAYERS.items():
        mlp = f"{tower}.block.*.layer.{layer}.mlp"
        for name in ("wi", "wo"):
            # Without the experts' dimension, and a Linear's weight is transposed.
            found[f"{mlp}.experts.expert_*.{name}.weight"] = (EXPERT[name][:0:-1],)
            found[f"{mlp}.{name}.weight"] = t5[f"{tower}.block.*.layer.{layer}.DenseReluDense.{name}.weight"]
        found[f"{mlp}.router.classifier.weight"] = ("XE",)
    return found


def relatives_of_t5x(*, is_flax: bool) -> dict[str, Dimensions]:
    """Returns T5X's leaves with a relative in Hugging Face."""
    experts: dict[str, Dimensions] = {}
    for tower in () if is_flax else SUBLAYERS:
        experts |= {f"{tower}/layers_*/mlp/expert/{name}/kernel": (EXPERT[name],) for name in ("wi", "wo")}
        experts[f"{tower}/layers_*/{ROUTER}"] = ("EX",)
    return {**TRANSIENT_GLOBAL, **experts}


def _global_names(is_flax: bool) -> tuple[str, str]:
    """Returns the names of transient-global norm and bias."""
    module = f"encoder.block.{{}}.layer.0.{_ATTENTION['transient-global']}"
    norm, bias = f"{module}.global_input_layer_norm.weight", f"{module}.global_relative_attention_bias.weight"
    if is_flax:
        return norm.replace(".", "/"), bias.replace(".", "/").removesuffix("weight") + "embedding"
    return norm, bias


def from_hugging_face(*, is_flax: bool) -> tuple[Transform, ...]:
    """Makes the transforms before T5's own, to T5X."""
    modules = "|".join(_ATTENTION.values())
    cut = "/" if is_flax else r"\."
    attention = (rf"(encoder{cut}block{cut}\d+{cut}layer{cut}0{cut})(?:{modules})({cut}.*)", r"\1SelfAttention\2")
    norm, bias = (name.replace(".", r"\.") for name in _global_names(is_flax))
    # Two blocks' biases would have one name, which is a problem: LongT5 has one.
    named = ((norm.format(r"(\d+)"), _GLOBAL_NORM.replace("*", r"\1")), (bias.format(r"\d+"), _GLOBAL_BIAS))
    steps: list[Transform] = [Rename((*named, attention), require_match=False)]
    steps.append(Transpose(_GLOBAL_BIAS, require_match=False))
    if not is_flax:
        mlp = r"(encoder|decoder)\.block\.(\d+)\.layer\.\d\.mlp"
        experts = rf"{mlp}\.experts\.expert_(?P<i>\d+)\.(w[io])\.weight"
        router = (rf"{mlp}\.router\.classifier\.weight", rf"\1/layers_\2/{ROUTER}")
        # T5's own transforms reverse all dimensions of a kernel.
        steps.append(StackLayers(experts, r"\1/layers_\2/mlp/expert/\4/kernel", -1, require_match=False))
        steps.append(Rename((router, (_DENSE.format("mlp"), r"\1DenseReluDense\2")), require_match=False))
        steps.append(RoutedExperts())
    return tuple(steps)


def to_hugging_face(encoder_attention_type: str | None, *, is_flax: bool) -> tuple[Transform, ...]:
    """Makes the transforms after T5's own, from T5X."""
    if encoder_attention_type is not None and encoder_attention_type not in _ATTENTION:
        raise ValueError(f"encoder_attention_type is one of {list(_ATTENTION)}, not {encoder_attention_type!r}")
    norm, bias = _global_names(is_flax)
    named = (
        (_ROOT + _GLOBAL_NORM.replace("*", r"(\d+)"), norm.format(r"\1")),
        (_ROOT + _GLOBAL_BIAS, bias.format("0")),
    )
    steps: list[Transform] = [Transpose(_ROOT + _GLOBAL_BIAS, require_match=False), Rename(named, require_match=False)]
    for tower, layer in () if is_flax else _MLP_LAYERS.items():
        ours, theirs = rf"{_ROOT}{tower}/layers_(\d+)/mlp", rf"{tower}.block.\1.layer.{layer}.mlp"
        steps += [
            UnstackLayers(
                rf"{ours}/expert/(w[io])/kernel", rf"{theirs}.experts.expert_{{i}}.\2.weight", -1, require_match=False
            ),
            Rename(
                ((f"{_ROOT}{tower}/layers_(\\d+)/{ROUTER}", f"{theirs}.router.classifier.weight"),), require_match=False
            ),
        ]
    return (*steps, ModulesOfModel(encoder_attention_type))


@dataclasses.dataclass(frozen=True)
class RoutedExperts(Transform):
    """Check that each router knows as many experts."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        for name, router in state.items():
            if not name.endswith(f"/{ROUTER}"):
                continue
            layer = name.removesuffix(f"/{ROUTER}")
            experts = [state.get(f"{layer}/mlp/expert/{kernel}/kernel") for kernel in ("wi", "wo")]
            counts = {shape[-1] for expert in experts if (shape := getattr(expert, "shape", ()))}
            known = set(getattr(router, "shape", ())[:1])
            if known and counts - known:
                message = f"{layer} has {max(counts)} experts, and its router chooses among {max(known)}"
                diagnostics.problem("missing", name, message, Fix("use a file, or all the files, of the whole model"))
        return dict(state)


@dataclasses.dataclass(frozen=True)
class ModulesOfModel(Transform):
    """Gives relatives' modules their names in Hugging Face.

    Feed-forward layers are `mlp` where the model has experts, or the target such names. The encoder's attention is the
    given one, the target's, or transient-global where the model has its leaves.
    """

    encoder_attention_type: str | None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        found, wanted = (
            {match[1] for name in names if (match := _MODULE.search(name)) is not None} & {*_ATTENTION.values()}
            for names in (state, target)
        )
        module = next(iter(sorted(wanted or found)), None)
        if self.encoder_attention_type is not None:
            module = _ATTENTION[self.encoder_attention_type]
        if not found <= {module}:
            message = f"the model has the leaves of {' and '.join(found)} in its encoder, which {module} has not"
            diagnostics.problem("rule", None, message, Fix("give encoder_attention_type as config.json has it"))
        renames: dict[str, str] = {}
        has_experts = any(_FEED_FORWARD.search(name) for names in (state, target) for name in names)
        for name in state:
            plain = _MODULE.search(name)
            if module is not None and plain is not None and plain[1] == "SelfAttention":
                renames[name] = f"{name[: plain.start(1)]}{module}{name[plain.end(1) :]}"
            elif has_experts and (dense := re.fullmatch(_DENSE.format("DenseReluDense"), name)) is not None:
                renames[name] = f"{dense[1]}mlp{dense[2]}"
        return rename_leaves(state, renames, "as the model calls its modules", diagnostics)
