"""What each transform means, written as slowly and as plainly as possible, on NumPy arrays in memory.

Nothing here is shared with the package: rules are tried one by one with `re.fullmatch`, arrays are computed at once.
"""

import itertools
import re

import jax
import numpy as np


class Wrong(Exception):
    """The transform must find a problem of this kind."""


def _matches(pattern, name):
    return re.fullmatch(pattern, name)


def _expand(match, template):
    try:
        return match.expand(template)
    except (re.error, IndexError):
        raise Wrong("rule") from None


def _new_name(match, template):
    name = _expand(match, template)
    if "" in name.split("/"):
        raise Wrong("rule")
    return name


def _collect(pairs):
    result = {}
    for name, value in pairs:
        if name in result:
            raise Wrong("duplicate")
        result[name] = value
    return result


def _all_used(patterns, names):
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            raise Wrong("unused_rule")


def assignment_map(source, target, rules, require_all_rules_match=True):
    result, taken, left_out, deciding = {}, set(), set(), set()
    for name in target:
        for pattern, replacement in rules:
            match = _matches(pattern, name)
            if match:
                deciding.add(pattern)
                if replacement is None:
                    left_out.add(name)
                else:
                    wanted = _expand(match, replacement)
                    if wanted not in source:
                        raise Wrong("missing")
                    result[name] = source[wanted]
                    taken.add(wanted)
                break
        else:
            if name in source:
                result[name] = source[name]
    if require_all_rules_match and deciding != {pattern for pattern, _ in rules}:
        raise Wrong("unused_rule")
    for name in source:
        if name not in result and name not in taken and name not in left_out:
            result[name] = source[name]
    return result


def rename(source, rules):
    pairs = []
    for name, value in source.items():
        for pattern, replacement in rules:
            match = _matches(pattern, name)
            if match:
                if replacement is not None:
                    pairs.append((_new_name(match, replacement), value))
                break
        else:
            pairs.append((name, value))
    result = _collect(pairs)
    _all_used([pattern for pattern, _ in rules], source)
    return result


def drop(source, patterns):
    _all_used(patterns, source)
    return {name: value for name, value in source.items() if not any(_matches(p, name) for p in patterns)}


def keep(source, patterns):
    _all_used(patterns, source)
    return {name: value for name, value in source.items() if any(_matches(p, name) for p in patterns)}


def intersect(source, target):
    return {name: value for name, value in source.items() if name in target}


def merge(source, other, overwrite=False):
    result = {**source, **other} if overwrite else {**other, **source}
    for left, right in itertools.permutations(result, 2):
        if right.startswith(left + "/"):
            raise Wrong("duplicate")
    return result


def layers_to_take(old, depth, how):
    """For each new layer the old one, by a loop."""
    if how == "append":
        return [i - old * (i // old) for i in range(depth)]
    if how == "interleave":
        return [max(j for j in range(old) if j * depth <= i * old) for i in range(depth)]
    if max(how) >= old:
        raise Wrong("rule")
    return list(how)


def repeat_layers(source, pattern, depth, how="interleave"):
    """Unrolled layers; the pattern's group `i` is the number."""
    towers, result = {}, {}
    for name, value in source.items():
        match = _matches(pattern, name)
        if match:
            before, after = name[: match.start("i")], name[match.end("i") :]
            towers.setdefault(before, {}).setdefault(int(match["i"]), {})[after] = value
        else:
            result[name] = value
    if not towers:
        raise Wrong("unused_rule")
    for before, layers in towers.items():
        if sorted(layers) != list(range(len(layers))):
            raise Wrong("missing")
        taken = layers_to_take(max(layers) + 1, depth, how)
        of_tower = {
            after for after in layers[0] if len(layers) > 1 and not any(after in layers[i] for i in layers if i)
        }
        pairs = [(f"{before}0{after}", layers[0][after]) for after in of_tower]
        for i, old in enumerate(taken):
            pairs += [(f"{before}{i}{after}", value) for after, value in layers[old].items() if after not in of_tower]
        result = _collect([*result.items(), *pairs])
    return result


def repeat_stacked(value, depth, how, axis):
    return np.take(value, layers_to_take(value.shape[axis], depth, how), axis)


def stack_layers(source, pattern, into, axis, group="i"):
    layers = {}
    rest = []
    for name, value in source.items():
        match = _matches(pattern, name)
        if not match:
            rest.append((name, value))
            continue
        key = _new_name(match, into)
        number = int(match[group])
        if number in layers.setdefault(key, {}):
            raise Wrong("duplicate")
        layers[key][number] = (name[: match.start(group)], value)
    if not layers:
        raise Wrong("unused_rule")
    depth = {}
    for found in layers.values():
        tower = next(iter(found.values()))[0]
        depth[tower] = max(depth.get(tower, 0), max(found) + 1)
    for key, found in layers.items():
        if sorted(found) != list(range(depth[next(iter(found.values()))[0]])):
            raise Wrong("missing")
        values = [found[number][1] for number in sorted(found)]
        if len({(value.shape, value.dtype) for value in values}) > 1:
            raise Wrong("shape")
        try:
            rest.append((key, np.stack(values, axis)))
        except ValueError:
            raise Wrong("shape") from None
    return _collect(rest)


def unstack_layers(source, pattern, into, axis):
    pairs = []
    for name, value in source.items():
        match = _matches(pattern, name)
        if not match:
            pairs.append((name, value))
            continue
        if not -value.ndim <= axis < value.ndim:
            raise Wrong("shape")
        for number in range(value.shape[axis]):
            pairs.append(
                (_new_name(match, into.replace("{i}", "<>")).replace("<>", str(number)), value.take(number, axis))
            )
    _all_used([pattern], source)
    return _collect(pairs)


def split(source, pattern, into, axis, sizes=None):
    pairs = []
    for name, value in source.items():
        match = _matches(pattern, name)
        if not match:
            pairs.append((name, value))
            continue
        if not -value.ndim <= axis < value.ndim:
            raise Wrong("shape")
        if sizes is None:
            if value.shape[axis] % len(into):
                raise Wrong("shape")
            parts = np.split(value, len(into), axis)
        else:
            if sum(sizes) != value.shape[axis]:
                raise Wrong("shape")
            parts = np.split(value, np.cumsum(sizes)[:-1], axis)
        pairs += [(_new_name(match, template), part) for template, part in zip(into, parts, strict=True)]
    _all_used([pattern], source)
    return _collect(pairs)


def concat(source, patterns, into, axis):
    groups, pairs = {}, []
    for name, value in source.items():
        for index, pattern in enumerate(patterns):
            match = _matches(pattern, name)
            if match:
                parts = groups.setdefault(_new_name(match, into), {})
                if index in parts:
                    raise Wrong("duplicate")
                parts[index] = value
                break
        else:
            pairs.append((name, value))
    for new, parts in groups.items():
        if len(parts) != len(patterns):
            raise Wrong("missing")
        values = [parts[index] for index in sorted(parts)]
        try:
            if len({value.dtype for value in values}) > 1:
                raise ValueError
            pairs.append((new, np.concatenate(values, axis)))
        except ValueError:
            raise Wrong("shape") from None
    _all_used(patterns, source)
    return _collect(pairs)


def each(source, pattern, function):
    """Reshape, Transpose, Cast and Repeat."""
    _all_used([pattern], source)
    result = {}
    for name, value in source.items():
        if _matches(pattern, name):
            try:
                value = function(value)
            except ValueError:
                raise Wrong("shape") from None
        result[name] = value
    return result


def padded(value, shape, constant):
    """Pad: None keeps a dimension."""
    if len(shape) != value.ndim:
        raise ValueError
    wanted = [size if new is None else new for size, new in zip(value.shape, shape, strict=True)]
    widths = [(0, new - size) for size, new in zip(value.shape, wanted, strict=True)]  # negative: NumPy's ValueError
    return np.pad(value, widths, constant_values=constant) if widths else value


def add_low_rank(source, pattern, down, up, scale):
    result, taken = dict(source), set()
    matched = [(name, match) for name in source if (match := _matches(pattern, name))]
    if not matched:
        raise Wrong("unused_rule")
    for name, match in matched:
        factors = [_expand(match, template) for template in (down, up)]
        present = [factor for factor in factors if factor in source]
        if not present:
            continue
        taken.update(present)
        if len(present) == 1:
            raise Wrong("missing")
        left, right = (source[factor] for factor in factors)
        if {value.dtype.kind for value in (source[name], left, right)} != {"f"}:
            raise Wrong("dtype")
        if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[0]:
            raise Wrong("shape")
        product = np.tensordot(left.astype(np.float64), right.astype(np.float64), 1)
        if product.shape != source[name].shape:
            raise Wrong("shape")
        result[name] = (source[name].astype(np.float64) + scale * product).astype(source[name].dtype)
    if not taken:
        raise Wrong("unused_rule")
    return {name: value for name, value in result.items() if name not in taken}


def average(source, weights, pattern=".*"):
    sources = list(dict.fromkeys(name.split("/")[0] for name in source))
    if not isinstance(weights, dict):
        weights = dict(zip(sources, weights, strict=True))
    result, inside = [], {}
    for name, value in source.items():
        first, _, rest = name.partition("/")
        if first in weights and rest:
            inside.setdefault(rest, {})[first] = value
        else:
            result.append((name, value))
    for rest, values in inside.items():
        if not any(_matches(pattern, f"{first}/{rest}") for first in values) and not _matches(pattern, rest):
            result += [(f"{first}/{rest}", value) for first, value in values.items()]
        elif set(values) != set(weights):
            raise Wrong("missing")
        else:
            mean = np.average(
                np.stack([np.asarray(values[first], np.float64) for first in weights]), 0, list(weights.values())
            )
            with jax.numpy_dtype_promotion("standard"):
                dtype = np.dtype(jax.numpy.result_type(*(values[first].dtype for first in weights)))
            result.append((rest, (np.rint(mean) if dtype.kind in "iu" else mean).astype(dtype)))
    return _collect(result)


def overlay(source, sources):
    result = {name: value for name, value in source.items() if name.split("/")[0] not in sources}
    for first in reversed(sources):
        result.update({name.split("/", 1)[1]: value for name, value in source.items() if name.startswith(first + "/")})
    return result
