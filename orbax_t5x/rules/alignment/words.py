"""Words of names, and their usual meanings in many projects.

A path has no separators: `decoder.layers_3.wi_0` and `decoder/layers/3/wi/0` have one. Words count only where shapes
and structure leave several readings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

Key = str | int
Path = tuple[Key, ...]
"""A name without separators; numbers are parts of their own."""

_PARTS = re.compile(r"[/.:]+|__")
_NUMBER = re.compile(r"[_-]?(?<!\d)(\d{1,18})(?=[_-]|$)[_-]?")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_JOINED = ((re.compile(r"(?:layer|rms)_norm"), "norm"), (re.compile(r"feed_forward|dense_relu_dense"), "mlp"))
_BESIDE = frozenset({"pre", "post", "before", "after"})
_ARRAYS = frozenset({"kernel", "scale", "embedding"})
ROOTS = frozenset({"params", "target", "model", "module"})
"""Parts that hold a whole model."""
_OF_ANY_MODEL = ROOTS | {"module:layers", "kind:bias"}
INPUTS = frozenset({"query", "key", "value"})
"""Projections into an attention."""
OF_ATTENTION = frozenset({"attention", "mha"})
OF_MLP = frozenset({"mlp", "moe", "expert", "experts", "router"})
# Deeper names are no model's; their last parts count as one.
_MOST_KEYS = 64

# Category -> words of one meaning each. Two words of one category that share no meaning contradict each other.
_MEANINGS: dict[str, tuple[str, ...]] = {
    "tower": ("encoder enc", "decoder dec"),
    "sublayer": ("attention self_attention mha", "encoder_decoder_attention cross_attention encoder_attention", "mlp"),
    "projection": (
        "query q wq w_q b_q attention_q",
        "key k wk w_k b_k attention_k",
        "value v wv w_v b_v attention_v",
        "out o attention_out wo w_o b_o output_proj output_projector attention_output attention_vec c_proj proj",
        "wi_0 gate wi_gate w_gate mlp_gate mlp_gate_dense",
        "wi_1 up wi_up w_up mlp_up w_in input_projector mlp_intermediate_dense",
        "wi up fc_in c_fc intermediate mlp_up w_in input_projector mlp_intermediate_dense",
        "wo down w_down fc_out c_proj mlp_down w_out output_projector mlp_output_dense",
    ),
    # Of queries, keys and values in one array: in turn, by heads, or in turn here and by heads there. Other names of
    # such arrays mean themselves.
    "fused": ("qkv c_attn in_proj attention_qkv", "query_key_value linear_qkv", "wqkv w_qkv"),
    "embedding": (
        "token_embedder shared embed_tokens wte tok_embeddings word_embeddings token_embd shared_embedding "
        "input_embedding",
        "position_embedding position_embeddings wpe pos_embedding embed_positions pos_embed",
        "logits_dense lm_head unembed unembedder logits logitdense reverse_embedding output head classifier "
        "generator proj_out output_layer predictions",
    ),
    "norm": (
        "pre_attention_layer_norm pre_self_attention_layer_norm attention_norm self_attention_norm input_norm",
        "pre_cross_attention_layer_norm cross_attention_norm",
        "pre_mlp_layer_norm mlp_norm",
    ),
    "head norm": ("query_norm q_norm attention_q_norm", "key_norm k_norm attention_k_norm"),
    "end": ("encoder_norm decoder_norm final_layer_norm norm_f output_norm encoder_output_norm decoder_output_norm",),
    "module": (
        "relpos_bias relative_attention_bias rel_pos_bias relative_position_bias rel_attention_bias position_bias",
        "layers layer blocks block h",
    ),
    "kind": (
        "kernel weight w",
        "scale weight gamma g kernel w",
        "bias beta b offset",
        "embedding embed emb embeddings weight w",
    ),
    "pool": ("pooler pool pooled pooled_dense",),
    "statistic": ("mean running_mean", "var running_var"),
}
_SHORT = {
    "attn": "attention",
    "enc": "encoder",
    "dec": "decoder",
    "ffn": "mlp",
    "ff": "mlp",
    "ffw": "mlp",
    "feedforward": "mlp",
    "ln": "norm",
}
_SHORT |= {
    "layernorm": "norm",
    "rmsnorm": "norm",
    "emb": "embedding",
    "embed": "embedding",
    "embedder": "embedding",
    "embd": "embedding",
    "embeddings": "embedding",
    "layers": "layer",
    "blocks": "block",
    "queries": "query",
    "keys": "key",
    "values": "value",
}
# Words that do not change what a part means: `linear_q` and `q_proj` are `q`.
_FILLERS = frozenset({"proj", "projection", "projector", "linear", "lin", "einsum", "to"})


@functools.cache
def _known_words() -> dict[str, dict[str, frozenset[str]]]:
    known: dict[str, dict[str, frozenset[str]]] = {}
    for category, meanings in _MEANINGS.items():
        for meaning in meanings:
            first, *others = meaning.split()
            for word in (first, *others):
                of_word = known.setdefault(_written_out(word), {})
                of_word[category] = of_word.get(category, frozenset()) | {first}
    return known


def path_of(name: str, *, is_flat: bool = False) -> Path:
    """Returns the path of a name.

    With `is_flat`, words that `_` joins are parts of their own.
    """
    keys: list[Key] = []
    for part in _PARTS.split(name):
        for at, text in enumerate(_NUMBER.split(part)):
            if at % 2:
                keys.append(int(text))
            elif text:
                keys.extend(text.split("_") if is_flat else [text])
    if len(keys) > _MOST_KEYS:
        keys[_MOST_KEYS - 1 :] = ["/".join(map(str, keys[_MOST_KEYS - 1 :]))]
    return tuple(keys)


def is_flat(names: Iterable[str]) -> bool:
    """Reports whether names have no separators but `_`."""
    return not any(_PARTS.search(name) for name in names)


@functools.lru_cache(maxsize=4096)
def words_of(part: str) -> tuple[str, ...]:
    """Returns a part's words in small letters, written out."""
    text = "_".join([_SHORT.get(word, word) for word in map(str.lower, _WORD.findall(part))])
    for words, word in _JOINED:
        text = words.sub(word, text)
    return tuple(text.split("_"))


@functools.lru_cache(maxsize=4096)
def _single_words(part: str) -> tuple[str, ...]:
    found: list[str] = []
    for word in words_of(part):
        if found and found[-1] in _BESIDE:
            found[-1] += f"_{word}"
        elif word and not word.isdecimal():
            found.append(word)
    return tuple(found)


def _written_out(part: str) -> str:
    return "_".join(words_of(part))


@functools.lru_cache(maxsize=4096)
def meanings(part: str) -> Mapping[str, frozenset[str]]:
    """Returns the meanings of a part by category, if any."""
    words = words_of(part)
    known = _known_words().get("_".join(words))
    if known is None and not _FILLERS.isdisjoint(words):
        known = _known_words().get("_".join(word for word in words if word not in _FILLERS))
    if known is None and ("qkv" in words or len(INPUTS.intersection(words)) > 1):
        return {"fused": frozenset({"_".join(words)})}
    return known or {}


def meaning_of(part: str) -> str:
    """Returns a part's meaning, or the part in small letters."""
    known = [f"{category}:{'|'.join(sorted(words))}" for category, words in meanings(part).items()]
    return " ".join(known) or _written_out(part)


def says_little(part: str) -> bool:
    """Tests for usual names of a module's only array."""
    return not _ARRAYS.isdisjoint(meanings(part).get("kind", ()))


def is_of_module(part: str) -> bool:
    """Tests if a part may name a module."""
    return not says_little(part) and meaning_of(part) not in _OF_ANY_MODEL and part not in _OF_ANY_MODEL


def is_of_attention(path: Path) -> bool | None:
    """Tests for words of an attention in a path; None if unknown."""
    parts = [key for key in path if isinstance(key, str)]
    words = {word for part in parts for word in words_of(part)}
    projections = {word for part in parts for word in meanings(part).get("projection", ())}
    return False if words & OF_MLP else bool(words & OF_ATTENTION or projections & {*INPUTS, "out"}) or None


def is_position_bias(part: str) -> bool:
    """Tests for a table of biases by the distance of positions."""
    return "relpos_bias" in meanings(part).get("module", ())


def contradict(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Tests if two parts name modules known to be different."""
    one, other = _by_category(ours), _by_category(theirs)
    fused = [its.get("fused", frozenset()) for its in (one, other)]
    # Another arrangement of heads has the same shape: only names show which it is.
    if fused[0] != fused[1]:
        return True
    return any(one[category].isdisjoint(other[category]) for category in one.keys() & other.keys())


def _by_category(parts: Iterable[str]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for part in parts:
        for category, words in meanings(part).items():
            found[category] = found.get(category, frozenset()) | words
    return found


def features(parts: Iterable[str], tier: int) -> frozenset[str]:
    """Returns parts, meanings or words that modules may share."""
    parts = frozenset(part for part in parts if words_of(part) != ("",))
    if tier == 0:
        return parts
    if tier == 1:
        # What may be a kernel or a scale has neither in common with another.
        known = {
            f"{category}:{word}"
            for part in parts
            for category, found in meanings(part).items()
            for word in (found if category != "kind" or len(found) == 1 else ())
        }
        return frozenset(known | set(map(_written_out, parts)))
    return frozenset(word for part in parts for word in _single_words(part))
