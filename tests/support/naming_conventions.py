"""Names that real projects have for the same models, as data: the truth of an alignment is known.

A convention in the text beside names modules; `@` stands for a layer, `{}` for its number. Frameworks name the arrays.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np

# Of matrices, their biases, scales of norms, biases of norms, tables; and whether matrices are [out, in].
FRAMEWORKS = {
    "torch": ("weight", "bias", "weight", "bias", "weight", True),
    "torch gamma": ("weight", "bias", "gamma", "beta", "weight", True),
    "torchtune": ("weight", "bias", "scale", "bias", "weight", True),
    "flax": ("kernel", "bias", "scale", "bias", "embedding", False),
    "nnx": ("kernel/value", "bias/value", "scale/value", "bias/value", "embedding/value", False),
    "easylm": ("kernel", "bias", "kernel", "bias", "embedding", False),
    "haiku": ("w", "b", "scale", "offset", "embeddings", False),
    "keras": ("kernel", "bias", "gamma", "beta", "embeddings", False),
    "conv1d": ("weight", "bias", "weight", "bias", "weight", False),
    "praxis": ("w", "b", "scale", "bias", "emb_var", False),
    "w": ("w", "b", "w", "b", "w", False),
}
# Decoders are gated and have no biases, encoders have, and the third family has two towers.
FAMILIES: dict[str, dict[str, tuple[str, dict[str, str], str]]] = {}
for _block in re.split(r"\n(?=\w)", (pathlib.Path(__file__).with_suffix(".txt")).read_text()):
    _head, _, _names = _block.partition("\n")
    _family, _convention, _framework, _prefixes = _head.split(" | ")
    _by_tower = dict(one.split("=") for one in _prefixes.split())
    FAMILIES.setdefault(_family, {})[_convention] = _framework, _by_tower, _names
_NORMS = re.compile(r"[ed]?(?:ln\d?|norm)|xln|enorm")


def leaves(family, convention, rng):
    """Returns canonical leaf -> (name, value) of a model; one `rng.seed` gives the same model in all conventions."""
    framework, prefixes, text = FAMILIES[family][convention]
    kernel, bias, scale, offset, table, is_turned = FRAMEWORKS[framework]
    embed, inner, hidden, vocabulary = 4, rng.choice([4, 6]), rng.choice([9, 10]), rng.choice([11, 13])
    heads = inner if rng.random() < 0.5 else 2
    depth = rng.choice([2, 3])
    separator = "/" if framework != "equinox" and "/" in text else "."
    found = {}

    def add(key, at, name, part, shape, turns=False):
        value = np.random.default_rng([sum(map(ord, key + part)), len(key), at]).normal(size=shape).astype(np.float32)
        value += np.float32(sum(ord(letter) * 7**place for place, letter in enumerate(key)) % 997)
        found[key, part, at] = f"{name}{separator}{part_names[part]}", value.T if turns and is_turned else value

    part_names = {"kernel": kernel, "bias": bias, "scale": scale, "offset": offset, "table": table}
    for key, name in (item.split("=") for item in text.split()):
        layered = name.startswith("@")
        tower = re.match(r"@([ed]?)", name)[1] if layered and "" not in prefixes else ""
        name = re.sub(r"@[ed]?" if "" not in prefixes else "@", prefixes.get(tower, ""), name) if layered else name
        for at in range(depth if layered else 1):
            its = name.replace("{}", str(at))
            last = key if key in ("emb", "pos", "head") else key.lstrip("edx") if family == "towers" else key
            has_biases = family == "encoder"
            if last in ("emb", "pos"):
                add(key, at, its, "table", (vocabulary if last == "emb" else 7, embed))
            elif _NORMS.fullmatch(key):
                add(key, at, its, "scale", (embed,))
                if has_biases:
                    add(key, at, its, "offset", (embed,))
            else:
                shape = {
                    "q": (embed, inner), "k": (embed, heads), "v": (embed, heads), "o": (inner, embed),
                    "gate": (embed, hidden), "up": (embed, hidden), "down": (hidden, embed),
                    "wi": (embed, hidden), "wo": (hidden, embed), "head": (embed, vocabulary),
                }[last]  # fmt: skip
                add(key, at, its, "kernel", shape, turns=True)
                if has_biases:
                    add(key, at, its, "bias", shape[1:])
    return found
