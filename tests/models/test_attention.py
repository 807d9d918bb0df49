"""What both models compute with, beside NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from orbax_t5x.models import T5Config
from orbax_t5x.models.attention import attend, causal_mask, empty_cache, extended, padding_mask, position_buckets


def bucket(distance, bidirectional, buckets, max_distance):
    """One relative position, by the text of arXiv 1910.10683."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
    elif distance > 0:
        distance = 0
    distance, exact = abs(distance), buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (buckets - exact) + 1e-6), buckets - 1)


@pytest.mark.slow
def test_buckets_are_those_of_the_paper():
    config = T5Config(buckets=32, max_distance=128)
    queries, keys = np.arange(200)[::19], np.arange(200)
    for bidirectional in (True, False):
        found = position_buckets(config, jnp.asarray(queries), jnp.asarray(keys), bidirectional=bidirectional)
        expected = [[bucket(int(k) - int(q), bidirectional, 32, 128) for k in keys] for q in queries]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_attention_is_a_weighted_mean():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, 4, 5)).astype(np.float32) for _ in range(3))
    bias = np.asarray(causal_mask(jnp.arange(3), jnp.arange(3)) + padding_mask(jnp.array([[1, 2, 3], [4, 0, 0]])))
    found = attend(query, key, value, bias)
    for row in range(2):
        for head in range(4):
            weights = np.exp(query[row, :, head] @ key[row, :, head].T + bias[row, 0])
            expected = weights / weights.sum(axis=-1, keepdims=True) @ value[row, :, head]
            np.testing.assert_allclose(found[row, :, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_cache_holds_what_was_put_in():
    cache = empty_cache(T5Config(decoder_layers=2), batch=1, length=4)
    assert len(cache["layers"]) == 2 and cache["index"] == 0
    assert empty_cache(T5Config(scan_layers=True), 1, 4)["layers"]["key"].shape == (2, 1, 4, 4, 4)
    new = jnp.ones((1, 2, 4, 4))
    keys, values, layer = extended(cache["layers"][0], new, 2 * new, jnp.asarray(1))
    np.testing.assert_array_equal(keys[0, :, 0, 0], [0, 1, 1, 0])
    np.testing.assert_array_equal(layer["value"], values)
    assert extended(None, new, new, jnp.asarray(0))[2] is None


def test_a_largest_distance_within_the_exact_buckets_ends_in_the_last():
    config = T5Config(buckets=8, max_distance=4)
    found = position_buckets(config, jnp.asarray([20]), jnp.arange(21), bidirectional=False)
    np.testing.assert_array_equal(found[0], [7] * 17 + [3, 2, 1, 0])
