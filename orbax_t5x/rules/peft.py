r"""PEFT's LoRA adapters merged into base leaves, or put beside them.

In PyTorch's layout a Linear's weight is [out, in] and gets `scale * B @ A`, with A [rank, in] and B [out, rank]; an
Embedding's [V, E] gets `scale * (B @ A).T`. Where the base is T5X's, Linear weights and relative biases are transposed
kernels whose heads may be apart and whose layers may be stacked; the factors get the same dimensions.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.lazy.several import add_low_rank, stack
from orbax_t5x.rules.leaf_table import BIAS, SUBLAYERS, layer_names
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.rules.peft_config import LoraConfig, lora_config
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves, view_of
from orbax_t5x.transforms.prefix import is_no_parameter, model_prefix
from orbax_t5x.trees.flat import FlatState

_PREFIX = "base_model.model."
# Files have the adapter's name, such as `default`, where PEFT did not take it out.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])(?:\.(?!weight$)[^.]+)?(?:\.weight)?")
_SAVED = re.compile(
    r"(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.(?!weight$|bias$)[^.]+)?)?\.(?P<leaf>weight|bias)"
)
_OF_LORA = re.compile(r".*\.(?:lora_\w+|ia3_\w+|original_module)(?:\..*)?")
_LAYER = re.compile(r"(?P<tower>encoder|decoder)\.block\.(?P<layer>\d+)\.(?P<rest>.*)")
_OF_SHARED = re.compile(r"(?:.*[./])?shared[./](?:lora_|modules_to_save[./]|weight$).*")
_SHOWN_NAMES = 5
_ADVICE = "check that adapter_config.json, the adapters and the base model belong together"

# T5X's name of each weight of Hugging Face's T5, with `*` for the layer's number.
_OURS = {
    **dict(layer_names()),
    "shared.weight": "token_embedder/embedding",
    "lm_head.weight": "decoder/logits_dense/kernel",
    **{f"{tower}.final_layer_norm.weight": f"{tower}/{tower}_norm/scale" for tower in SUBLAYERS},
    **{f"{tower}.embed_tokens.weight": f"{tower}/token_embedder/embedding" for tower in SUBLAYERS},
    **{
        f"{tower}.block.*.layer.0.SelfAttention.relative_attention_bias.weight": f"{tower}/layers_*/{BIAS}"
        for tower in SUBLAYERS
    },
}


class _Place(NamedTuple):
    """Place of a PyTorch weight in the base model."""

    name: str
    is_transposed: bool = False
    tower: str = ""
    layer: int = 0


@dataclasses.dataclass
class _Update:
    """Changes of a base leaf or layer."""

    saved: View | None = None
    a: View | None = None
    b: View | None = None
    is_reversed: bool = False
    scale: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)

    def factors(self, shape: tuple[int, ...]) -> tuple[View, View] | None:
        """Returns both factors in the leaf's dimensions."""
        if self.a is None or self.b is None:
            return None
        down, up = (self.a.T, self.b.T) if self.is_reversed else (self.b, self.a)
        rank, sizes = down.shape[1], (down.shape[0], up.shape[1])
        for at in range(1, len(shape)):
            if (math.prod(shape[:at]), math.prod(shape[at:])) == sizes:
                return down.reshape((*shape[:at], rank)), up.reshape((rank, *shape[at:]))
        raise ValueError(f"the product of {' and '.join(self.names[-2:])} has the shape {sizes}, and the leaf {shape}")


_Updates = dict[str, dict[_Place, _Update]]
"""Base leaf -> place -> what becomes of it; a leaf of stacked layers has several places."""


class _Base:
    """Look-up of PyTorch's weights among the leaves of the base model."""

    def __init__(self, leaves: Mapping[str, Any]):
        self.leaves = leaves
        self._prefix = model_prefix(leaves)
        self.is_t5x = self._prefix is not None

    def find(self, weight: str) -> _Place | None:
        """Finds a weight by its name in PyTorch's model."""
        if weight in self.leaves:
            return _Place(weight)
        if self.is_t5x:
            return self._find_t5x(weight)
        ends = [name for name in self.leaves if name.endswith(f".{weight}") or weight.endswith(f".{name}")]
        if len(ends) == 1:
            return _Place(ends[0])
        module = weight.removesuffix(".weight").replace(".", "/")
        for kind in ("kernel", "embedding", "weight", "scale"):
            ends = [name for name in self.leaves if f"/{name}".endswith(f"/{module}/{kind}")]
            if len(ends) == 1 and weight.endswith(".weight"):
                return _Place(ends[0], kind == "kernel")
        return None

    def _find_t5x(self, weight: str) -> _Place | None:
        parts = weight.split(".")
        for at in range(len(parts)):
            name = ".".join(parts[at:])
            match = _LAYER.fullmatch(name)
            ours = _OURS.get(name if match is None else f"{match['tower']}.block.*.{match['rest']}")
            if ours is None:
                continue
            is_transposed = ours.endswith(("/kernel", "/rel_embedding"))
            root = self._prefix or ""
            if match is None:
                return _Place(root + ours, is_transposed)
            tower, number = match["tower"], match["layer"]
            stacked = ours.replace("/layers_*/", f"/{tower}/")
            if root + stacked in self.leaves:
                return _Place(root + stacked, is_transposed, f"{root}{tower}/{tower}/", int(number))
            of_tower = f"{root}{tower}/{BIAS}"
            if ours.endswith(BIAS) and number == "0" and of_tower in self.leaves:
                return _Place(of_tower, True)
            return _Place(root + ours.replace("*", number), is_transposed)
        return None

    def axis_of(self, place: _Place) -> int:
        """Returns the axis of stacked layers: 1, unless only 0 fits."""
        scales = {name: tuple(leaf.shape) for name, leaf in self.leaves.items() if name.endswith("/scale")}
        widths = {shape[0] for shape in scales.values() if len(shape) == 1}
        stacked = [shape for name, shape in scales.items() if name.startswith(place.tower) and len(shape) == 2]
        return 0 if stacked and all(shape[1] in widths and shape[0] not in widths for shape in stacked) else 1


# Its name is part of the digests of packs, which checkpoints record: it cannot change.
@dataclasses.dataclass(frozen=True)
class _PeftAdapters(Transform):
    """Merges adapters into the base model's leaves.

    Without `merge` the factors are put beside the leaves.
    """

    config: LoraConfig
    base: str
    adapter: str
    merge: bool

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        base, adapters = (_leaves_below(f"{source}/", state) for source in (self.base, self.adapter))
        lacking = [source for source, leaves in ((self.base, base), (self.adapter, adapters)) if not leaves]
        if lacking:
            message = f"peft_lora: there is no leaf of a source {lacking[0]!r}"
            fix = f"name the sources: ot.restore({{{self.base!r}: path, {self.adapter!r}: path}}, …)"
            diagnostics.problem("missing", None, message, Fix.in_program(fix))
            return dict(state)
        found = _Base(base)
        updates, unused = self._updates(found, adapters, diagnostics)
        result = NewState(diagnostics)
        for name, value in state.items():
            if not name.startswith((f"{self.base}/", f"{self.adapter}/")):
                result.put(name, value, name)
        for name in {**base, **updates}:
            self._put(name, updates.get(name, {}), found, result, diagnostics)
        self._put_unused(unused, adapters, result, diagnostics)
        shared = [name for name in adapters if _OF_SHARED.fullmatch(name)]
        if shared and not any(".embed_tokens." in name for name in adapters):
            diagnostics.warnings.append(
                f"peft_lora: {self.adapter}/{shared[0]} changes the embedding; PEFT's own model, until it merges, "
                "computes with the base model's, because T5's towers hold the module that PEFT wraps; Drop it before "
                "the pack to get the values of that model"
            )
        if self.merge and any(map(is_no_parameter, base)):
            diagnostics.warnings.append(
                "peft_lora: the optimizer's state stays that of the base model without adapters"
            )
        return result.finish()

    def _updates(self, base: _Base, adapters: FlatState, diagnostics: Diagnostics) -> tuple[_Updates, dict[str, str]]:
        """Returns changes of base leaves, and unused leaves with reasons."""
        updates: _Updates = {}
        unused: dict[str, str] = {}
        modules: dict[tuple[str, bool], dict[str, tuple[str, View]]] = {}
        for name, value in adapters.items():
            view = view_of(f"{self.adapter}/{name}", value, diagnostics)
            if view is None:
                continue
            dotted = name.replace("/", ".").removeprefix(_PREFIX)
            match = _FACTOR.fullmatch(dotted)
            if match is None:
                reason = self._replace(dotted, name, view, base, updates)
                unused.update({name: reason} if reason else {})
                continue
            factors = modules.setdefault((match["module"], bool(match["kind"])), {})
            first, _ = factors.setdefault(match["factor"], (name, view))
            if first != name:
                unused[name] = f"{first!r} is the same factor of another adapter"
        for (module, is_embedding), factors in modules.items():
            reason = self._add(module, is_embedding, factors, base, updates)
            unused.update({name: reason for name, _ in factors.values()} if reason else {})
        return updates, unused

    def _replace(self, dotted: str, name: str, view: View, base: _Base, updates: _Updates) -> str:
        """Notes a leaf stored whole; returns a reason against it."""
        match = _SAVED.fullmatch(dotted)
        if match is None or _OF_LORA.fullmatch(dotted):
            return "it is no part of LoRA's adapters that is known here"
        weight = f"{match['module']}.{match['leaf']}"
        place = base.find(weight)
        if place is None or place.name not in base.leaves:
            is_new = self.config.is_saved(match["module"]) and (place is not None or not base.is_t5x)
            if not is_new:
                return f"the base model has no leaf for {weight!r}"
            place = place or _Place(weight)
        update = updates.setdefault(place.name, {}).setdefault(place, _Update())
        if update.saved is not None:
            return f"{update.names[0]!r} is the same leaf"
        update.saved = view.T if place.is_transposed and view.ndim == 2 else view
        update.names.append(name)
        return ""

    def _add(
        self, module: str, is_embedding: bool, factors: Mapping[str, tuple[str, View]], base: _Base, updates: _Updates
    ) -> str:
        """Notes a module's product; returns a reason against it."""
        place = base.find(f"{module}.weight")
        if place is None or place.name not in base.leaves:
            return f"the base model has no leaf for {f'{module}.weight'!r}"
        if not self.config.is_target(module):
            return f"target_modules={self.config.targets!r} does not name its module"
        if factors.keys() != {"A", "B"}:
            return f"the module has no lora_{'A' if 'B' in factors else 'B'}"
        (first, a), (second, b) = factors["A"], factors["B"]
        rank = self.config.rank_of(module)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = f"the factors of {module!r} have the shapes {a.shape} and {b.shape}"
            return f"{shapes}, and adapter_config.json has rank {rank}: they would be ({rank}, in) and (out, {rank})"
        update = updates.setdefault(place.name, {}).setdefault(place, _Update())
        if update.a is not None:
            return f"{update.names[-2]!r} is the same factor of another module"
        # An Embedding's product is reversed, and so is that of weights stored as (in, out); a kernel is a transpose.
        is_kernel = place.is_transposed or self.config.is_transposed
        update.is_reversed = not place.is_transposed if is_embedding else is_kernel
        update.a, update.b, update.scale = a, b, self.config.scale_of(module)
        update.names += [first, second]
        return ""

    def _put(
        self, name: str, updates: Mapping[_Place, _Update], base: _Base, result: NewState, diagnostics: Diagnostics
    ) -> None:
        """Puts a base leaf, and its factors if they stay apart."""
        origin = f"{self.base}/{name}"
        if not updates:
            result.put(name, base.leaves[name], origin, f"of the source {self.base!r}")
            return
        place, update = next(iter(updates.items()))
        rule = f"peft_lora: with {listed([one for update in updates.values() for one in update.names], 2)}"
        if name not in base.leaves:
            result.put(name, update.saved, f"{self.adapter}/{update.names[0]}", rule)
            return
        axis = base.axis_of(place) if place.tower else None
        by_layer = {place.layer: update for place, update in updates.items()}
        made: list[tuple[str, View]] = []

        def change(views: list[View]) -> View:
            (leaf,) = views
            layers = [leaf] if axis is None else _cut_layers(leaf, axis)
            if max(by_layer) >= len(layers):
                raise ValueError(f"the adapters have layer {max(by_layer)}, and the leaf {len(layers)} layers")
            changed = [self._changed(one, by_layer.get(number)) for number, one in enumerate(layers)]
            if not self.merge:
                made.extend(
                    _factors_beside(name, [by_layer.get(number) for number in range(len(layers))], layers[0], axis)
                )
            return changed[0] if axis is None else stack(changed, axis)

        leaf = combine_leaves(
            [(origin, base.leaves[name])], change, diagnostics, becomes=name, rule="peft_lora", advice=_ADVICE
        )
        result.put(name, base.leaves[name] if leaf is None else leaf, origin, rule)
        for factor, value in made:
            result.put(factor, value, f"{self.adapter}/{update.names[-1]}", f"peft_lora: beside {name!r}")

    def _changed(self, leaf: View, update: _Update | None) -> View:
        """Returns a leaf or layer with its saved value and product."""
        if update is None:
            return leaf
        if update.saved is not None:
            # Another vocabulary replaces the whole embedding; heads that are apart stay so.
            is_split = leaf.ndim != update.saved.ndim
            leaf = update.saved.reshape(leaf.shape) if is_split else update.saved
        factors = update.factors(leaf.shape)
        return leaf if factors is None or not self.merge else add_low_rank(leaf, *factors, update.scale)

    def _put_unused(
        self, unused: Mapping[str, str], adapters: FlatState, result: NewState, diagnostics: Diagnostics
    ) -> None:
        """Puts unused leaves as they are, with problems or a warning."""
        if unused and diagnostics.allows_unmapped:
            shown = listed(unused, _SHOWN_NAMES)
            diagnostics.warnings.append(f"peft_lora: {len(unused)} leaves of {self.adapter!r} change nothing: {shown}")
        for name, reason in unused.items():
            full = f"{self.adapter}/{name}"
            result.put(full, adapters[name], full)
            if not diagnostics.allows_unmapped:
                diagnostics.problem("unmapped", full, f"peft_lora: {reason}", Fix(_ADVICE))


def _leaves_below(prefix: str, state: FlatState) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _cut_layers(leaf: View, axis: int) -> list[View]:
    before = (slice(None),) * axis
    return [leaf[(*before, number)] for number in range(leaf.shape[axis])]


def _factors_beside(
    name: str, updates: Sequence[_Update | None], leaf: View, axis: int | None
) -> list[tuple[str, View]]:
    """Returns the factors beside a leaf, stacked as its layers are."""
    pairs: list[tuple[View, View]] = []
    end = max(name.rfind("/"), name.rfind(".")) + 1
    is_torch = name[end - 1 : end] == "."
    for update in updates:
        if update is not None and update.a is not None and update.b is not None:
            # PyTorch's names keep PyTorch's factors; in other trees `lora_a` is the first of the product.
            factors = (update.a, update.b) if is_torch else update.factors(leaf.shape)
            pairs += [] if factors is None else [factors]
    if pairs and len(pairs) < len(updates):
        raise ValueError(f"{len(updates)} layers are stacked, and only {len(pairs)} have adapters: merge them")
    return [
        (f"{name[:end]}lora_{letter}", parts[0] if axis is None else stack(list(parts), axis))
        for letter, parts in zip("ab", zip(*pairs, strict=True), strict=False)
    ]


def peft_lora(
    config: str | os.PathLike[str] | Mapping[str, Any], base: str = "base", adapter: str = "adapter", merge: bool = True
) -> RulePack:
    r"""Merges PEFT's LoRA adapters into the base model; both are sources.

    The result has the base model's own names, without the source's: Hugging Face's, or T5X's with joined, split or
    scanned kernels. Sums are made in float32 and rounded once. Modules that the adapters' file stores whole
    (`modules_to_save`) replace the base model's. A leaf of the adapters without a place is a problem.

    Args:
      config: PEFT's `adapter_config.json`: its path, or what it holds.
      base: the name of the base model's source.
      adapter: the name of the adapters' source.
      merge: False puts the factors beside their leaves, as `lora_a` and `lora_b`: with T5X's names for
        `AddLowRank(r"(.*)/kernel", r"\1/lora_a", r"\1/lora_b", scale)`, with PyTorch's as they are stored.

    Raises:
      CheckpointNotFoundError: there is no such file.
      CorruptCheckpointError: it is no JSON object, or a setting has a value that it cannot have.
      UnsupportedCheckpointError: the adapters are no LoRA's, or have a setting that is not known here, such as DoRA.

    Example:
      >>> q = "encoder.block.0.layer.0.SelfAttention.q"
      >>> a, b = np.ones((2, 4), np.float32), np.ones((3, 2), np.float32)
      >>> factors = {f"base_model.model.{q}.lora_A.weight": a, f"base_model.model.{q}.lora_B.weight": b}
      >>> state = {"base": {f"{q}.weight": np.zeros((3, 4), np.float32)}, "adapter": factors}
      >>> ot.rules.peft_lora({"r": 2, "lora_alpha": 4})(state, {})[f"{q}.weight"].get()
      array([[4., 4., 4., 4.],
             [4., 4., 4., 4.],
             [4., 4., 4., 4.]], dtype=float32)
    """
    found = lora_config(config)
    given: list[tuple[str, Any]] = [("config", found.arguments())]
    given += [("base", base)] if base != "base" else []
    given += [("adapter", adapter)] if adapter != "adapter" else []
    given += [("merge", merge)] if not merge else []
    call = PackCall("peft_lora", tuple(given))
    return pack_of(call, (_PeftAdapters(found, base, adapter, merge),), (), example=f"{adapter}/{_PREFIX}")
