"""States of a few small leaves, and the problems of a transform on one."""

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.trees.flat import unflatten


def arrays(**shapes):
    """Arrays of distinct numbers by name; `__` stands for '/'."""
    result = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        result[name.replace("__", "/")] = (np.arange(np.prod(shape)) + 100 * seed).reshape(shape).astype(np.float32)
    return result


AB = arrays(a=(2,), b=(2,), c=(2,))


LAYERS = arrays(
    enc__layers_0__w=(2, 3),
    enc__layers_1__w=(2, 3),
    enc__layers_2__w=(2, 3),
    dec__layers_0__w=(2, 3),
    dec__layers_1__w=(2, 3),
    enc__layers_0__b=(3,),
    enc__layers_1__b=(3,),
    enc__layers_2__b=(3,),
    norm=(3,),
)


STACK = (r"(enc|dec)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3", 1)


STACKED = arrays(enc__layers__w=(2, 4, 3), dec__layers__w=(2, 2, 3), norm=(3,))


TWO = arrays(x__w=(2, 3), x__b=(2,), y__w=(2, 3), y__b=(2,), z__w=(1,))


MERGED = {"n": np.ones(2, np.float32), "a": np.zeros(2, np.float32)}


ADAPTED = arrays(
    x__kernel=(3, 5),
    x__a=(3, 2),
    x__b=(2, 5),
    y__kernel=(4, 2, 3),
    y__a=(4, 1),
    y__b=(1, 2, 3),
    z__kernel=(2, 2),
    n=(2,),
)


QUANTIZED = {
    "x/kernel": np.arange(-6, 6, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn),
    "x/scale": np.array([0.3], np.float32),
    "y/kernel": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
    "n": np.ones(2, np.float32),
}


FOLLOWED = {
    **{f"target/{n}": v for n, v in arrays(a=(2, 3), b=(3,)).items()},
    **{f"state/param_states/0/mu/{n}": v + 1000 for n, v in arrays(a=(2, 3), b=(3,)).items()},
    "state/param_states/1/a": None,
    "state/step": np.asarray(3, np.int32),
}


def problems(transform, source, target=None):
    return run(transform, source, target)[1].problems


def only_problem(transform, source, target=None):
    (problem,) = problems(transform, source, target)
    with pytest.raises(RestorePlanError) as caught:
        transform(unflatten(source), unflatten(target or {}))
    assert caught.value.problems == (problem,)
    return problem
