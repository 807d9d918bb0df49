"""Files that a killed writer left in a database are removed."""

import pytest
import tensorstore as ts

from tests.support.killed_blocks import ARRAYS, assert_holds, convert, leave

TOTAL = sum(array.nbytes for array in ARRAYS.values())


def read_by_tensorstore(out):
    for name in ARRAYS:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{out}/"}, "path": f"{name}/"}
        ts.open({"driver": "zarr", "kvstore": kvstore}, context=ts.Context()).result().read().result()


@pytest.mark.slow
def test_no_file_of_a_kill_stays_in_the_item(source, out):
    """What nobody refers to is no larger than the nodes of a database; values and locks of killed writers are gone."""
    for _ in range(3):
        leave(source, out, blocks=3)
    convert(source, out)
    assert not list(out.rglob("*.__lock"))
    files = list(out.rglob("d/*"))
    is_needed = []
    for path in files:
        away = path.rename(out.parent / "away")
        try:
            read_by_tensorstore(out)
            is_needed.append(False)
        except ValueError:
            is_needed.append(True)
        away.rename(path)
    values = [path for path, needed in zip(files, is_needed, strict=True) if needed]
    assert sum(path.stat().st_size for path in values) >= TOTAL * 0.9
    for path in set(files) - set(values):
        assert path.stat().st_size < 1024, path
    assert_holds(out, "orbax", ARRAYS)
