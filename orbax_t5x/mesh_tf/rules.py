"""Table of rules from Mesh TensorFlow's names to T5X's.

`Translate` and `checkpoint_importer` use it.

Names only: no array is transposed, reshaped or read. N is a block number, written without zero padding in T5X. A
tower is `encoder`, `decoder`, or `transformer` (a decoder-only model), which T5X calls `decoder`. Parameters go under
`target/`, Adafactor's slots under `state/param_states/`. What a single name cannot decide (whether a relative bias is
a tower's or a layer's; which slots T5X's Adafactor has and Mesh TensorFlow does not store) is decided afterwards, from
the names that the target has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from orbax_t5x.mesh_tf.translator import CheckpointTranslator
from orbax_t5x.optim.optimizer_names import SLOT_MAP

TOWER_MAP: dict[str, str] = {"transformer": "decoder"}
"""The towers that T5X calls otherwise."""

_SLOT = r"(_slot_vr|_slot_vc|_slot_v)?"
_TOWER = r"(encoder|decoder|transformer)"
_BLOCK = rf"{_TOWER}/block_([0-9]+)"
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_ATTENTION = {
    ("encoder", "SelfAttention"): "attention",
    ("decoder", "SelfAttention"): "self_attention",
    ("decoder", "EncDecAttention"): "encoder_decoder_attention",
    ("transformer", "SelfAttention"): "self_attention",
}
# The norm before sublayer i of a block, by tower.
_LAYER_NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"),
    "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}

_NOT_FIRST_SUBLAYER = re.compile(r"/layer_(?!000/)")

t5_importer: CheckpointTranslator = CheckpointTranslator()


def _tower(mesh_tf_tower: str) -> str:
    return TOWER_MAP.get(mesh_tf_tower, mesh_tf_tower)


def _layer(mesh_tf_tower: str, block: str) -> str:
    return f"{_tower(mesh_tf_tower)}/layers_{int(block)}"


def _t5x_name(name: str, slot: str | None) -> str:
    """Returns the location of a parameter or slot in T5X's state."""
    return f"state/param_states/{name}/{SLOT_MAP[slot]}" if slot else f"target/{name}"


@t5_importer.add(r"global_step")
def global_step(opts: Mapping[str, Any], key: str, val: Any) -> tuple[str, Any]:
    """Translates the step from int64 to int32.

    A step that does not fit is an error when it is read.
    """
    if hasattr(val, "cast_checked"):  # a view of a stored leaf
        return "state/step", val.cast_checked(np.int32)
    if not hasattr(val, "astype"):
        return "state/step", val
    step = val.astype(np.int32)
    if isinstance(val, np.ndarray | np.generic) and not np.array_equal(step, val):
        raise ValueError(f"step {val} does not fit into int32")
    return "state/step", step


@t5_importer.add(rf"shared/embedding{_SLOT}")
def shared_embeddings(opts: Mapping[str, Any], key: str, val: Any, slot: str | None = None) -> tuple[str, Any]:
    """Translates an embedding (V,E) of all towers."""
    return _t5x_name("token_embedder/embedding", slot), val


@t5_importer.add(rf"{_TOWER}/embedding{_SLOT}")
def separate_embeddings(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates an embedding (V,E) of a tower."""
    return _t5x_name(f"{_tower(encdec)}/token_embedder/embedding", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_[0-9]+/SelfAttention/relative_attention_bias{_SLOT}")
def rel_embeddings(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, blocknum: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates a relative-position bias (H,B).

    Its name is that of a layer of its own: see `place_relative_bias`.
    """
    # The pattern takes every sublayer, and stays so: checkpoints record a digest of the patterns.
    if _NOT_FIRST_SUBLAYER.search(key):
        raise ValueError("T5X has a relative_attention_bias only in layer_000 of a block")
    return _t5x_name(f"{_layer(encdec, blocknum)}/relpos_bias/rel_embedding", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_[0-9]+/(SelfAttention|EncDecAttention)/([qkvo]){_SLOT}")
def attention_layers(
    opts: Mapping[str, Any],
    key: str,
    val: Any,
    encdec: str,
    blocknum: str,
    attntype: str,
    qkvo: str,
    slot: str | None = None,
) -> tuple[str, Any]:
    """Translates attention projections: (E,J), and (J,E) for the output."""
    if (encdec, attntype) not in _ATTENTION:
        raise ValueError(f"T5X's {_tower(encdec)} has no {attntype} where the bundle's tower is {encdec!r}")
    attention = _ATTENTION[encdec, attntype]
    return _t5x_name(f"{_layer(encdec, blocknum)}/{attention}/{_PROJECTIONS[qkvo]}/kernel", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_[0-9]+/DenseReluDense/(wi|wo)(?:_([01]))?/kernel{_SLOT}")
def mlpblock(
    opts: Mapping[str, Any],
    key: str,
    val: Any,
    encdec: str,
    blocknum: str,
    io_name: str,
    io_num: str | None = None,
    slot: str | None = None,
) -> tuple[str, Any]:
    """Translates MLP kernels: wi, perhaps gated (E,F), and wo (F,E)."""
    if io_name == "wo" and io_num is not None:
        raise ValueError(f"there is no gated output projection, so {key!r} has no place in T5X")
    kernel = io_name if io_num is None else f"{io_name}_{io_num}"
    return _t5x_name(f"{_layer(encdec, blocknum)}/mlp/{kernel}/kernel", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_[0-9]+/MoE1D/(wi|wi_[01]|wo)/kernel{_SLOT}")
def experts(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, blocknum: str, kernel: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates kernels of experts: wi (X,E,F), wo (X,F,E).

    wi may be gated.
    """
    return _t5x_name(f"{_layer(encdec, blocknum)}/mlp/expert/{kernel}/kernel", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_[0-9]+/MoE1D/(?:top_2|top_n|switch|switch_max|ntlb)_gating/kernel{_SLOT}")
def router(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, blocknum: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates the router (E,X) of a layer with experts.

    Its form does not depend on the way of choosing by its logits.
    """
    return _t5x_name(f"{_layer(encdec, blocknum)}/mlp/router/router_weights/w/kernel", slot), val


@t5_importer.add(rf"{_BLOCK}/layer_([0-9]+)/(?:layer|rms)_norm/scale{_SLOT}")
def layernorms(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, blocknum: str, lyrnum: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates the norm (E,) before a sublayer, known by its number."""
    norms = _LAYER_NORMS[encdec]
    if int(lyrnum) >= len(norms):
        raise ValueError(f"a block of {encdec!r} has {len(norms)} sublayers, so there is no norm {int(lyrnum)}")
    return _t5x_name(f"{_layer(encdec, blocknum)}/{norms[int(lyrnum)]}/scale", slot), val


@t5_importer.add(rf"{_TOWER}/(?:final_layer|rms)_norm/scale{_SLOT}")
def final_layernorms(
    opts: Mapping[str, Any], key: str, val: Any, encdec: str, slot: str | None = None
) -> tuple[str, Any]:
    """Translates the norm after a tower (E,)."""
    tower = _tower(encdec)
    return _t5x_name(f"{tower}/{tower}_norm/scale", slot), val


@t5_importer.add(rf"(?:decoder|transformer)/logits/kernel{_SLOT}")
def final_logits(opts: Mapping[str, Any], key: str, val: Any, slot: str | None = None) -> tuple[str, Any]:
    """Translates the output projection (E,V)."""
    return _t5x_name("decoder/logits_dense/kernel", slot), val


# --- What a single name does not decide.

_PARAMETERS = "target/"
_STATES = "state/param_states/"
_FACTORS = frozenset({"v_row", "v_col"})
_IN_LAYER = re.compile(r"(?:target|state/param_states)/(?P<tower>encoder|decoder)/layers_(?P<layer>[0-9]+)/.*")
_BIAS_IN_LAYER = re.compile(
    r"(?P<root>target|state/param_states)/(?P<tower>encoder|decoder)/layers_(?P<layer>[0-9]+)"
    r"/relpos_bias/(?P<rest>rel_embedding(?:/.*)?)"
)
_SHARED_BIAS = re.compile(r"(?:target|state/param_states)/(encoder|decoder)/relpos_bias/rel_embedding(?:/.*)?")


def place_relative_bias(names: Iterable[str], target_names: Iterable[str]) -> dict[str, str]:
    """Returns new names for relative biases that a tower shares.

    They are by the name that each replaces. Mesh TensorFlow keeps a shared bias in block 0. A bias that only block 0
    has is taken as the tower's, unless the target has biases in layers and none for the tower, and either they are only
    in layer 0 or the file has a single block. Several biases in the file never become one, and a shared one in the file
    never becomes several.
    """
    names, target_names = list(names), list(target_names)
    blocks = _layers_by_tower(_IN_LAYER, names)
    biased = _layers_by_tower(_BIAS_IN_LAYER, names)
    wanted = _layers_by_tower(_BIAS_IN_LAYER, target_names)
    target_shares = {match[1] for name in target_names if (match := _SHARED_BIAS.fullmatch(name))}
    shared = {
        tower
        for tower, layers in biased.items()
        if layers == {0} and _is_shared(tower in target_shares, wanted.get(tower, set()), len(blocks[tower]))
    }
    matches = ((name, _BIAS_IN_LAYER.fullmatch(name)) for name in names)
    return {
        name: f"{match['root']}/{match['tower']}/relpos_bias/{match['rest']}"
        for name, match in matches
        if match and match["tower"] in shared
    }


def _layers_by_tower(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, set[int]]:
    layers: dict[str, set[int]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            layers.setdefault(match["tower"], set()).add(int(match["layer"]))
    return layers


def _is_shared(target_shares: bool, target_layers: set[int], blocks: int) -> bool:
    """Tests if the bias of block 0 belongs to the whole tower."""
    if target_shares or not target_layers:
        return True
    return blocks > 1 and target_layers != {0}


def adafactor_placeholders(names: Iterable[str], target: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Makes the (1,) zeros of unused slots.

    T5X's Adafactor keeps them, and Mesh TensorFlow does not store them. Only for parameters of the file, and never in
    place of a slot that the file should have. Without a target (None), all, for parameters that have slots in the file.
    Of a parameter that the target has, only those among its leaves. Of one with slots that it does not have, all, if it
    has Adafactor's slots at all, T5X's or Optax's: a later transform gives them the target's names.
    """
    slots: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(_STATES):
            state, _, slot = name.rpartition("/")
            slots.setdefault(state, set()).add(slot)
        elif name.startswith(_PARAMETERS) and target is not None:
            slots.setdefault(_STATES + name.removeprefix(_PARAMETERS), set())
    known = None if target is None else _known_parameters(target)
    placeholders: dict[str, np.ndarray] = {}
    for state, present in slots.items():
        is_renamed_later = known is not None and bool(present) and state not in known
        moments = present - {"m"} or _whole_moments(state, target or {})
        unused = {"m"} | ({"v"} if moments & _FACTORS else set()) | (_FACTORS if "v" in moments else set())
        for name in (f"{state}/{slot}" for slot in sorted(unused - present)):
            if target is None or is_renamed_later:
                placeholders[name] = np.zeros((1,), np.float32)
            elif name in target and _is_placeholder(target[name]):
                placeholders[name] = np.zeros((1,), getattr(target[name], "dtype", np.float32))
    return placeholders


def _whole_moments(state: str, target: Mapping[str, Any]) -> set[str]:
    """Returns a parameter's second moments that the target keeps whole."""
    names = {slot: f"{state}/{slot}" for slot in (*_FACTORS, "v")}
    return {slot for slot, name in names.items() if name in target and not _is_placeholder(target[name])}


def _is_placeholder(leaf: Any) -> bool:
    """Tests if the target's leaf has shape (1,) or takes any."""
    return tuple(getattr(leaf, "shape", (1,))) == (1,)


def _known_parameters(target: Iterable[str]) -> frozenset[str] | None:
    """Returns the parameters with slots of T5X's names, or None.

    None: the target has no slots of Adafactor. None of them in a target with Optax's factored state
    (`…/v_row/<parameter>`), which has other names for all slots.
    """
    names = list(target)
    slots = [name.rpartition("/") for name in names if name.startswith(_STATES)]
    with_slots = {parameter for parameter, _, slot in slots if slot in _FACTORS or slot in ("v", "m")}
    if not with_slots:
        return frozenset() if any("/v_row/" in name for name in names) else None
    parameters = (name.removeprefix(_PARAMETERS) for name in names if name.startswith(_PARAMETERS))
    return frozenset(with_slots | {_STATES + name for name in parameters})
