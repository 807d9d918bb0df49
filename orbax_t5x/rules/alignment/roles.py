"""Roles of modules in a transformer, by the modules around them.

Projects name the same parts of a layer in many ways, and one name means different parts: `final_layer_norm` is the last
norm of a layer or of the model. The layer shows the role: the norm in or beside an attention is the attention's, two
norms in order are those of attention and MLP, and of a gated MLP's two inputs one is the gate. A role needs the whole
of a known structure; otherwise names stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orbax_t5x.rules.alignment.layers import LAYER, Shape
from orbax_t5x.rules.alignment.words import INPUTS, OF_ATTENTION, OF_MLP, is_position_bias, meanings, words_of

ATTENTION, CROSS, MLP = "attention", "cross_attention", "mlp"
_NORM_OF = {ATTENTION: "pre_attention_layer_norm", CROSS: "pre_cross_attention_layer_norm", MLP: "pre_mlp_layer_norm"}
_OF_ANOTHER_TOWER = frozenset({"cross", "encoder", "src", "source", "memory", "context"})
_AFTER = frozenset({"post", "after"})
_FIRST, _LAST = frozenset({"input", "before", "self", "sa"}), frozenset({"final", "output"})
_TOWERS = frozenset({"encoder", "decoder"})
# In gated MLPs the lower of two such numbers is the gate's.
_NUMBERED_INPUTS = frozenset({"w", "wi", "fc"})
_OF_TABLES = frozenset({"embedding", "wte", "shared", "tok", "token"})
_OF_POSITIONS = frozenset({"pos", "position", "positions", "positional", "wpe"})
# A single module of such a name, of the shape of the embedding's table, is its inverse.
_GENERIC = frozenset({"dense", "linear", "lin", "fc", "proj", "out", "projection"})

Template = tuple[str, ...]
Roles = dict[Template, str]


def roles_of(leaves: Iterable[tuple[Template, Shape]]) -> dict[str, Roles]:
    """Returns the usual words for modules, by kinds of roles."""
    layers: dict[Template, dict[Template, Shape]] = {}
    for template, shape in leaves:
        size = len(template) - template[::-1].index(LAYER) if LAYER in template else 0
        layers.setdefault(template[:size], {})[template] = shape
    found: dict[str, Roles] = {"attention": {}, "norm": {}, "mlp": {}, "table": {}, "end": {}}
    outside = layers.pop((), {})
    for at, its in layers.items():
        layer = _Layer(len(at), its)
        found["attention"] |= layer.attentions()
        found["norm"] |= layer.norms()
        found["mlp"] |= layer.inputs()
    if layers:
        found["table"], found["end"] = _tables(outside), _last_norms(outside)
    return found


@dataclasses.dataclass
class _Layer:
    """Leaves of a layer, with their sublayers.

    Attributes:
      at: size of the path before its parts.
      leaves: shapes by names.
      sublayers: of matrices; None for an unknown one.
      nodes: modules of sublayers that are attentions.
    """

    at: int
    leaves: Mapping[Template, Shape]

    def __post_init__(self) -> None:
        self.sublayers: dict[Template, str | None] = {}
        self.nodes: dict[Template, str] = {}
        for template, shape in self.leaves.items():
            if len(shape) > 1:
                self.sublayers[template] = self._by_words(template)
        if len(self.nodes) == 2 and CROSS not in self.nodes.values():
            others = [node for node in self.nodes if "self" not in words_of(node[-1])]
            if len(others) == 1:
                self.nodes[others[0]] = CROSS
                self.sublayers |= {name: CROSS for name in self.sublayers if name[: len(others[0])] == others[0]}

    def _by_words(self, template: Template) -> str | None:
        module = _module(template)
        for size in range(self.at + 1, len(template) + 1):
            found = _sublayer(template[size - 1])
            if found is not None:
                if found != MLP and size < len(module):
                    self.nodes[template[:size]] = found
                return found
        return ATTENTION if _projections(module) & INPUTS else None

    @property
    def order(self) -> list[str]:
        """The sublayers in the order of their use; empty if unknown."""
        found = list(self.sublayers.values())
        if None in found and not self._has_unnamed_mlp():
            return []
        heads = {word for name, its in self.sublayers.items() if its == ATTENTION for word in _projections(name)}
        if len(heads & INPUTS) < 2 or sum(its == ATTENTION for its in self.nodes.values()) > 1:
            return []
        return [one for one in (ATTENTION, CROSS, MLP) if one in found or (one == MLP and self._has_unnamed_mlp())]

    def _has_unnamed_mlp(self) -> bool:
        """Tests if matrices of no sublayer are an MLP's."""
        shapes = [self.leaves[name] for name, its in self.sublayers.items() if its is None]
        if len(shapes) == 3 and len(set(shapes)) != 2:
            return False
        return len(shapes) in (2, 3) and len({tuple(sorted(shape)) for shape in shapes}) == 1

    def attentions(self) -> Roles:
        """Names attentions and their outputs."""
        if not self.order:
            return {}
        found = {node: "encoder_decoder_attention" if its == CROSS else ATTENTION for node, its in self.nodes.items()}
        for node in self.nodes:
            its = {_module(name) for name in self.sublayers if name[: len(node)] == node}
            unknown = [module for module in its if not _projections(module) & INPUTS]
            if len(unknown) == 1 and INPUTS <= frozenset().union(*map(_projections, its)):
                found[unknown[0]] = "out"
        return found

    def inputs(self) -> Roles:
        """Names the gate, the other input and the output of an MLP."""
        its = MLP if MLP in self.sublayers.values() else None if self._has_unnamed_mlp() else ""
        shapes = {name: self.leaves[name] for name, sublayer in self.sublayers.items() if sublayer == its}
        if len({tuple(sorted(shape)) for shape in shapes.values()}) != 1:
            return {}
        gates = [name for name in shapes if any("gate" in words_of(part) for part in name[self.at :])]
        if len(shapes) == 2:
            first, second = shapes.values()
            if gates or first != second[::-1]:
                return {}
            known = [name for name in shapes if self._is_input(name)]
            numbers = {_numbered(_module(name)[-1]): name for name in shapes}
            if len(known) != 1 and len(numbers) - len({stem for stem, _ in numbers}) == 1 < len(set(shapes.values())):
                known = [numbers[min(numbers)]]
            return {_module(name): "wi" if name in known else "wo" for name in shapes} if len(known) == 1 else {}
        outputs = [name for name, shape in shapes.items() if list(shapes.values()).count(shape) == 1]
        if len(shapes) != 3 or len(outputs) != 1:
            return {}
        inputs = [name for name in shapes if name != outputs[0]]
        gates = [name for name in inputs if name in gates]
        ups = [name for name in inputs if "up" in words_of(_module(name)[-1])]
        numbers = {_numbered(_module(name)[-1]): name for name in inputs}
        stems = {stem for stem, _ in numbers}
        if len(gates) != 1 and len(numbers) == 2 and len(stems) == 1 and stems <= _NUMBERED_INPUTS:
            gates = [numbers[min(numbers)]]
        if len(gates) != 1 and len(ups) == 1:
            gates = [name for name in inputs if name not in ups]
        if len(gates) != 1:
            return {}
        return {_module(name): "wo" if name in outputs else "wi_0" if name in gates else "wi_1" for name in shapes}

    def _is_input(self, name: Template) -> bool:
        return any("wi" in _projections(name[:size]) for size in range(self.at + 1, len(name) + 1))

    def norms(self) -> Roles:
        """Names the norms of a layer with as many norms as sublayers."""
        order = self.order
        nodes = [node for node in _norms(self.leaves) if len(node) > self.at]
        if not order or len(nodes) != len(order):
            return {}
        owners = {node: self._owner(node, order) for node in nodes}
        left = [node for node, owner in owners.items() if owner is None]
        free = [one for one in order if one not in owners.values()]
        if len(left) > 1:
            owners |= self._numbered_owners(left, free) or {node: _sublayer(node[-1]) for node in left}
        elif left and free:
            owners[left[0]] = free[0]
        if set(owners.values()) != set(order):
            return {}
        return {node: _NORM_OF[owner] for node, owner in owners.items() if owner is not None}

    @staticmethod
    def _numbered_owners(nodes: Sequence[Template], free: Sequence[str]) -> dict[Template, str | None]:
        """Returns sublayers in the order of the norms' numbers."""
        numbers = {_numbered(node[-1]): node for node in nodes}
        found = sorted(numbers)
        lists = [[-1, *range(1, len(nodes))], [*range(len(nodes))], [*range(1, len(nodes) + 1)]]
        if len({stem for stem, _ in found}) > 1 or [at for _, at in found] not in lists or len(nodes) != len(free):
            return {}
        return {numbers[number]: one for number, one in zip(found, free, strict=True)}

    def _owner(self, node: Template, order: Sequence[str]) -> str | None:
        """Finds a norm's sublayer by its place or its words."""
        for size in range(self.at + 1, len(node)):
            if node[:size] in self.nodes or _sublayer(node[size - 1]):
                return self.nodes.get(node[:size]) or _sublayer(node[size - 1])
        for size in range(len(node) - 1, self.at, -1):
            inside = {its for name, its in self.sublayers.items() if name[:size] == node[:size]}
            if len(inside) == 1:
                return inside.pop() or MLP
        words = frozenset(words_of(node[-1]))
        if words & _AFTER:
            return None
        if found := _sublayer(node[-1]):
            return found
        if "cross" in words:
            return CROSS
        if words & _FIRST:
            return order[0]
        return order[-1] if words & _LAST else None


def _sublayer(part: str) -> str | None:
    words = frozenset(words_of(part))
    if words & OF_ATTENTION:
        return CROSS if words & _OF_ANOTHER_TOWER else ATTENTION
    return MLP if words & OF_MLP else None


def _module(template: Template) -> Template:
    """Returns the path of a leaf's module; some arrays are modules."""
    is_array = bool(meanings(template[-1]).get("kind")) or {"embedding"} < set(words_of(template[-1])) <= {
        "embedding",
        "var",
        "input",
    }
    return template[:-1] if is_array and len(template) > 1 else template


def _projections(template: Template) -> frozenset[str]:
    found = meanings(_module(template)[-1])
    return INPUTS if "fused" in found else found.get("projection", frozenset())


def _numbered(part: str) -> tuple[str, int]:
    """Splits a part at its number, or returns -1."""
    match = re.fullmatch(r"(.+)_(\d+)", part)
    return (match[1], int(match[2])) if match else (part, -1)


def _norms(leaves: Mapping[Template, Shape]) -> Iterator[Template]:
    """Yields modules that are norms, but those of queries and keys."""
    found = {_module(template): None for template, shape in leaves.items() if len(shape) == 1}
    for node in found:
        words = set(words_of(node[-1]))
        if "norm" in words and words.isdisjoint({"query", "key", "q", "k"}):
            yield node


def _tables(leaves: Mapping[Template, Shape]) -> Roles:
    """Names the embeddings' tables, and the matrix back to the vocabulary."""
    groups: dict[tuple[int, ...], dict[Template, str]] = {}
    positions: list[Template] = []
    for template, shape in leaves.items():
        if len(shape) < 2 or any(is_position_bias(part) for part in template):
            continue
        module = _module(template)
        words = {word for part in template for word in words_of(part)}
        known = {word for part in module for word in meanings(part).get("embedding", ())}
        if words & _OF_POSITIONS:
            positions.append(module)
            continue
        if "logits_dense" in known:
            role = "logits_dense"
        else:
            role = "token_embedder" if words & _OF_TABLES else "?" if _is_generic(module) else " "
        groups.setdefault(tuple(sorted(shape)), {})[module] = role
    found = dict.fromkeys(positions, "position_embedding") if len(positions) == 1 else {}
    for group in groups.values():
        roles = sorted(group.values())
        if roles == ["?", "token_embedder"]:
            group = {module: "logits_dense" if role == "?" else role for module, role in group.items()}
        elif roles not in (["logits_dense", "token_embedder"], ["token_embedder"]):
            continue
        found |= group
    return found


def _is_generic(module: Template) -> bool:
    return _GENERIC.issuperset(word for word in words_of(module[-1]) if not word.isdecimal())


def _last_norms(leaves: Mapping[Template, Shape]) -> Roles:
    """Names the single norms of towers behind their layers."""
    towers: dict[str, list[Template]] = {}
    for node in _norms(leaves):
        words = [set(words_of(part)) for part in node]
        if "embedding" not in set().union(*words):
            its = [tower for of in words[:-1] for tower in of & _TOWERS]
            towers.setdefault(its[-1] if its else "".join(words[-1] & _TOWERS), []).append(node)
    return {
        nodes[0]: "final_layer_norm"
        for tower, nodes in towers.items()
        if len(nodes) == 1
        and not (
            set(words_of(nodes[0][-1])) & _TOWERS and not any(set(words_of(part)) & _TOWERS for part in nodes[0][:-1])
        )
    }
