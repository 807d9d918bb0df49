"""Views made of several refuse what does not fit."""

import pytest

from orbax_t5x import lazy
from orbax_t5x.lazy import several
from tests.support.lazy_views import view_of


def test_shapes_that_do_not_fit_are_errors_that_name_both():
    with pytest.raises(ValueError, match=r"stack of different shapes: .*\(2, 3\).*'a'.*\(3, 2\).*'b'"):
        several.stack([view_of((2, 3), name="a"), view_of((3, 2), name="b")])
    with pytest.raises(
        ValueError, match=r"concatenate on axis 0 of shapes that differ elsewhere: .*\(2, 3\).*\(2, 2\)"
    ):
        several.concatenate([view_of((2, 3)), view_of((2, 2))])
    with pytest.raises(ValueError, match=r"shapes that differ elsewhere"):
        several.concatenate([view_of((2, 3)), view_of((2, 3, 1))])
    with pytest.raises(ValueError, match=r"stack of different dtypes: .*float32.*int32.*cast them first"):
        several.stack([view_of((2,)), view_of((2,), "int32")])
    with pytest.raises(ValueError, match="rank 0"):
        several.concatenate([view_of(())])
    for empty in (several.stack, several.concatenate):
        with pytest.raises(ValueError, match="at least one"):
            empty([])
    with pytest.raises(ValueError, match=r"cannot reshape .*\(2, 3\).*\(4, 2\)"):
        view_of((2, 3)).reshape(4, 2)
    for shape in [(-1, -1), (4, -1), (-2, -3), (0, -1)]:
        with pytest.raises(ValueError, match="cannot reshape"):
            view_of((2, 3)).reshape(shape)
    with pytest.raises(ValueError, match=r"cannot broadcast an array of shape \(2, 3\) to shape \(3, 2\)"):
        lazy.broadcast_to(view_of((2, 3)), (3, 2))
    with pytest.raises(ValueError, match="cannot broadcast"):
        lazy.broadcast_to(view_of((2, 3)), (3,))
    with pytest.raises(ValueError, match="no permutation"):
        view_of((2, 3)).transpose(0, 0)
    with pytest.raises(ValueError, match="no permutation"):
        view_of((2, 3)).transpose(0)
    for call in (
        lambda v: several.stack([v], 3),
        lambda v: lazy.repeat(v, 2, -4),
        lambda v: several.concatenate([v], 2),
    ):
        with pytest.raises(ValueError, match="out of bounds"):
            call(view_of((2, 3)))
    with pytest.raises(ValueError, match="negative"):
        lazy.repeat(view_of((2, 3)), -1, 0)
