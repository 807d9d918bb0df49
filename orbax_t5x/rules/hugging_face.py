r"""Between Hugging Face's T5 names and T5X's minimal T5, only parameters.

Kernels and relative biases are transposed (a Linear's weight is (out, in)), embeddings and norms are not. Only
block 0 of a tower has a relative bias, which is the tower's; where every block has one (umT5) each is its
layer's. The output projection may be left out of a file, because it is the embedding: see `_TiedHead`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.rules.embeddings import EMBEDDING, HEAD, OF_TOWERS, SHARED, EmbeddingsOfTorch, TowerEmbeddings
from orbax_t5x.rules.leaf_table import BIAS, SUBLAYERS, Dimensions, LeafTable, dimensions_of, layer_names
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.relatives import from_hugging_face, relatives_of_t5x, relatives_table, to_hugging_face
from orbax_t5x.rules.scaled_fp8 import NoScalesWanted, TimesScales, with_scales
from orbax_t5x.rules.steps import (
    FirstName,
    MergeWhereWanted,
    PrefixAsTarget,
    RepeatPerLayer,
    WithoutPrefix,
    target_prefix,
)
from orbax_t5x.rules.t5x import bias_per_tower
from orbax_t5x.transforms.arrays import Transpose
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, view_of
from orbax_t5x.transforms.names import Drop, Rename
from orbax_t5x.transforms.prefix import rename_leaves
from orbax_t5x.trees.flat import FlatState

# Prefixes of T5X's names on the way back.
ROOT = r"(?:(?:params/)?params/|target/)?"
_MODEL = r"(?:token_embedder|encoder|decoder)/.*"

FIXED_NAMES = (
    ("shared.weight", EMBEDDING),
    ("encoder.final_layer_norm.weight", "encoder/encoder_norm/scale"),
    ("decoder.final_layer_norm.weight", "decoder/decoder_norm/scale"),
    ("lm_head.weight", HEAD),
)


def our_pattern(name: str) -> str:
    """Makes a regex with a group for the layer's number."""
    return ROOT + name.replace("*", r"(\d+)")


def _to_t5x() -> tuple[tuple[str, str], ...]:
    pairs = [*layer_names(), *FIXED_NAMES]
    layer_bias = r"(encoder|decoder)\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.weight"
    return (
        *((theirs.replace(".", r"\.").replace("*", r"(\d+)"), ours.replace("*", r"\1")) for theirs, ours in pairs),
        (layer_bias, rf"\1/layers_\2/{BIAS}"),
    )


def _from_t5x() -> tuple[tuple[str, str], ...]:
    pairs = [*layer_names(), *FIXED_NAMES]
    theirs = "block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        *((our_pattern(ours), theirs_.replace("*", r"\1")) for theirs_, ours in pairs),
        (rf"{ROOT}(encoder|decoder)/{BIAS}", r"\1." + theirs.format("0")),
        (rf"{ROOT}(encoder|decoder)/layers_(\d+)/{BIAS}", r"\1." + theirs.format(r"\2")),
    )


# Below which Transformers keeps the T5 of a token or sequence classifier, and a T5's names.
_HEAD_OF_CLASSIFIER = re.compile(r"classifier\.(?:weight|bias)|classification_head\..*")
_OF_T5 = re.compile(r"(?:shared|encoder|decoder)\.")
_TRANSPOSED = rf"(?:encoder|decoder)/(?:.*/kernel|(?:layers_\d+/)?{BIAS})"


def _their_leaves() -> LeafTable:
    """Makes the table of Hugging Face's names."""
    found: dict[str, Dimensions] = dict.fromkeys(OF_TOWERS, ("VE",))
    # Linear weights are transposed.
    for theirs, ours in (*layer_names(), *FIXED_NAMES):
        found[theirs] = (dimensions_of(ours)[:: -1 if ours.endswith("/kernel") else 1],)
    bias = "block.{}.layer.{}.{}.relative_attention_bias.weight"
    found.update({f"{tower}.{bias.format('*', 0, 'SelfAttention')}": ("*H",) for tower in SUBLAYERS})
    found[f"decoder.{bias.format('*', 1, 'EncDecAttention')}"] = ()
    return LeafTable("Hugging Face's T5", with_scales({**found, **relatives_table(found)}), has_dots=True)


def _our_leaves(is_flax: bool) -> LeafTable:
    """Makes the table of T5X's names known to Hugging Face."""
    names = [ours for _, ours in (*layer_names(), *FIXED_NAMES)]
    names += [f"{tower}/{layers}{BIAS}" for tower in SUBLAYERS for layers in ("", "layers_*/")]
    names += [] if is_flax else [f"{tower}/{EMBEDDING}" for tower in SUBLAYERS]
    found: dict[str, Dimensions] = {name: (dimensions_of(name),) for name in names}
    return LeafTable("T5X's minimal T5 with a name in Hugging Face's", {**found, **relatives_of_t5x(is_flax=is_flax)})


# Its name is part of the digests of packs, which checkpoints record: it cannot change.
@dataclasses.dataclass(frozen=True)
class _SettleBias(Transform):
    """Moves a single bias to its tower, or repeats it."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        renamed = {
            f"{tower}/layers_0/{BIAS}": f"{tower}/{BIAS}"
            for tower in SUBLAYERS
            if f"{tower}/layers_0/{BIAS}" in state and f"{tower}/layers_1/{BIAS}" not in state
        }
        result = {renamed.get(name, name): value for name, value in state.items()}
        prefix = target_prefix(target, "")
        for tower in SUBLAYERS:
            if f"{prefix}{tower}/layers_0/{BIAS}" in target:
                layers = rf"{tower}/layers_(\d+)/.*"
                step = RepeatPerLayer(f"{tower}/{BIAS}", layers, f"{tower}/layers_{{i}}/{BIAS}", None)
                result = step.apply(result, target, diagnostics)
        return result


@dataclasses.dataclass(frozen=True)
class _TiedHead(Transform):
    """Fills the output projection of a tied file.

    It is the embedding, transposed, if the model does not scale the decoder's output. If it does (T5.1.0) T5X's
    model has no projection, and a target with it is a mistake.
    """

    tie_word_embeddings: bool | None
    scale_decoder_outputs: bool | None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        wanted = target_prefix(target, "") + HEAD in target
        is_tied = (self.tie_word_embeddings and target) or (self.tie_word_embeddings is None and _is_embedding(state))
        if HEAD in state and is_tied and not wanted:
            return {name: value for name, value in state.items() if name != HEAD}
        if HEAD in state or not wanted or EMBEDDING not in state:
            return dict(state)
        if self._is_scaled(state, diagnostics):
            diagnostics.problem(
                "missing",
                target_prefix(target, "") + HEAD,
                "the checkpoint has no lm_head, because the model uses its embedding for the logits and scales the "
                "decoder's output (T5.1.0); T5X's model for it has no logits_dense",
                Fix(
                    "build the T5X model with logits_via_embedding=True; or, if config.json has "
                    "scale_decoder_outputs: false, pass scale_decoder_outputs=False to the rule pack"
                ),
            )
            return dict(state)
        view = view_of(EMBEDDING, state[EMBEDDING], diagnostics)
        if view is None:
            return dict(state)
        diagnostics.record_origins({HEAD: (EMBEDDING, "tied: the transpose of the embedding")})
        return {**state, HEAD: view.T}

    def _is_scaled(self, state: FlatState, diagnostics: Diagnostics) -> bool:
        if self.scale_decoder_outputs is not None:
            return self.scale_decoder_outputs
        if self.tie_word_embeddings is False:
            diagnostics.problem(
                "missing",
                HEAD,
                "the checkpoint has no lm_head, although tie_word_embeddings=False means that it is not the embedding",
                Fix("pass tie_word_embeddings=None to the rule pack, or use a file that has it"),
            )
        gated = any("/mlp/wi_0/" in name for name in state)
        if gated:
            diagnostics.warnings.append(
                "hf_t5_to_t5x: no lm_head; taken as the transposed embedding, as scale_decoder_outputs: false in "
                "config.json means; pass scale_decoder_outputs= to be sure"
            )
        return not gated


def _is_embedding(state: FlatState) -> bool:
    """Tests if the projection and the embedding share storage."""
    head, embedding = state.get(HEAD), state.get(EMBEDDING)
    if not isinstance(head, LazyArray) or not isinstance(embedding, LazyArray):
        return False
    leaves = {leaf for value in (head, embedding) for leaf in as_view(value).leaves()}
    stored = {leaf.storage for leaf in leaves}
    is_whole = {leaf.shape for leaf in leaves} == {embedding.shape} == {head.shape[::-1]}
    return len(stored) == 1 and None not in stored and is_whole


def hf_t5_to_t5x(
    *,
    tie_word_embeddings: bool | None = None,
    scale_decoder_outputs: bool | None = None,
    encoder_attention_type: str | None = None,
    prefix: str = "target/",
) -> RulePack:
    """Maps Hugging Face's T5 and its relatives to T5X minimal T5.

    The result gets the prefix of the target's `encoder/…` and `decoder/…`. The copies of the embedding that old files
    hold, `encoder.embed_tokens` and `decoder.embed_tokens`, must be equal to it, which is checked when it is read; a
    target with an embedding per tower gets the tower's own. Names may be below a prefix, such as `text_encoder_2.`.
    A float8 weight with a scale beside it (`scale_weight`) is multiplied by it, into float32.

    Args:
      tie_word_embeddings: as config.json has it; None: a file without `lm_head.weight` is tied.
      scale_decoder_outputs: as config.json has it, for a tied file and a target with `logits_dense`: False takes
        the transposed embedding, True is an error. None: True for T5.1.0 (`wi`), False for gated models, with a
        warning.
      encoder_attention_type: as LongT5's config.json has it, "local" or "transient-global", for the inverse: nothing in
        T5X's tree tells local attention. None: as the target has it, else "transient-global" where the model has the
        leaves of it, else T5's.
      prefix: of the names where there is no target.

    Example:
      >>> state = {"encoder.block.0.layer.0.SelfAttention.q.weight": np.ones((32, 16))}
      >>> jax.tree.map(np.shape, ot.rules.hf_t5_to_t5x()(state, {}))
      {'target': {'encoder': {'layers_0': {'attention': {'query': {'kernel': (16, 32)}}}}}}
    """
    # Written by old versions, read by none.
    unused_bias = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    forwards = (
        FirstName((SHARED, *OF_TOWERS), SHARED),
        Drop((unused_bias,), require_match=False),
        Rename(_to_t5x(), require_match=False),
        Transpose(_TRANSPOSED, require_match=False),
    )
    back = (Transpose(ROOT + _TRANSPOSED, require_match=False), Rename(_from_t5x(), require_match=False))
    arguments = {
        "tie_word_embeddings": tie_word_embeddings,
        "scale_decoder_outputs": scale_decoder_outputs,
        "encoder_attention_type": encoder_attention_type,
        "prefix": prefix,
    }
    example = "encoder.block.0.layer.0.SelfAttention.q.weight"
    return pack_of_hugging_face(
        "hf_t5_to_t5x", _their_leaves(), (TimesScales(), TowerEmbeddings()), forwards, back, example, arguments
    )


@dataclasses.dataclass(frozen=True)
class _PrefixOfHead(Transform):
    """Puts a classifier's T5 below `transformer.`, as Transformers does."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        if target or not any(map(_HEAD_OF_CLASSIFIER.fullmatch, state)):
            return dict(state)
        renames = {name: f"transformer.{name}" for name in state if _OF_T5.match(name)}
        return rename_leaves(state, renames, "as a model with a classifier has it", diagnostics)


def pack_of_hugging_face(
    function: str,
    leaves: LeafTable,
    before: tuple[Transform, ...],
    forwards: tuple[Transform, ...],
    back: tuple[Transform, ...],
    example: str,
    arguments: Mapping[str, Any],
) -> RulePack:
    """Makes the pack of a function with transforms common to both formats."""
    prefix, is_flax = arguments["prefix"], "flax" in function
    given = {**arguments, "prefix": None if prefix == "target/" else prefix}
    ours = _our_leaves(is_flax)
    return pack_of(
        PackCall(function, tuple((name, value) for name, value in given.items() if value is not None)),
        (
            *forwards,
            _SettleBias(),
            _TiedHead(arguments["tie_word_embeddings"], arguments["scale_decoder_outputs"]),
            PrefixAsTarget(_MODEL, prefix),
        ),
        # Hugging Face keeps no optimizer state; here it would only be left over.
        (Drop((r"state/.*", r"opt_state/.*", r"flax_mutables/.*", r"step"), require_match=False), *back),
        example=example,
        back_example="target/encoder/layers_0/attention/query/kernel",
        _before=(WithoutPrefix(leaves), *before, *from_hugging_face(is_flax=is_flax)),
        _before_back=(
            *(WithoutPrefix(ours), bias_per_tower(MergeWhereWanted), NoScalesWanted()),
            *(() if is_flax else (EmbeddingsOfTorch(arguments["tie_word_embeddings"]),)),
        ),
        _after_back=(
            *to_hugging_face(arguments["encoder_attention_type"], is_flax=is_flax),
            *(() if is_flax else (_PrefixOfHead(),)),
        ),
        _leaves=leaves,
        _leaves_back=ours,
    )


def t5x_to_hf_t5(*, tie_word_embeddings: bool | None = None, encoder_attention_type: str | None = None) -> RulePack:
    """Maps T5X minimal T5 to Hugging Face's names.

    Optimizer state, step and mutables are dropped. `logits_dense` becomes `lm_head.weight`, also where it was the
    embedding. A model with experts gets Switch's names.

    Args:
      tie_word_embeddings: as the target's config.json has it, for a target with `lm_head.weight` and a T5X model
        without `logits_dense`, whose logits are the embedding's, scaled: True puts the embedding there, False the
        embedding with that scale. None: such a target is an error.
      encoder_attention_type: see `hf_t5_to_t5x`.

    Example:
      >>> state = {"target": {"token_embedder": {"embedding": 1}, "encoder": {"encoder_norm": {"scale": 2}}}}
      >>> ot.rules.t5x_to_hf_t5()(state, {})
      {'shared.weight': 1, 'encoder.final_layer_norm.weight': 2}
    """
    given = {"tie_word_embeddings": tie_word_embeddings, "encoder_attention_type": encoder_attention_type}
    inverse = hf_t5_to_t5x(**given).inverse()
    call = PackCall("t5x_to_hf_t5", tuple((name, value) for name, value in given.items() if value is not None))
    return dataclasses.replace(inverse, name=call.name, _call=call)
