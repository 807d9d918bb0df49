"""Suites find mistakes: each of their tests fails for something wrong, and none for what is right."""

import dataclasses
import inspect
import itertools
import threading

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy import as_view
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.testing.leaf_reads import leaf_of
from orbax_t5x.testing.leaf_suite import BrokenLeafSuite, LeafSuite
from orbax_t5x.testing.reader_suite import ReaderSuite, sample_arrays
from orbax_t5x.testing.transform_suite import KINDS, Case, TransformSuite
from orbax_t5x.transforms.by_rules import InPlace
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf


def names_of(suite):
    return {name for name in dir(suite) if name.startswith("test_")}


def failing(suite, but="", **fixtures):
    """The names of the tests of a suite that fail with these fixtures."""
    failed = set()
    for name in names_of(type(suite)) - {but}:
        test = getattr(suite, name)
        names = inspect.signature(test).parameters
        try:
            for kind in KINDS if "kind" in names else [None]:
                test(**{each: kind if each == "kind" else fixtures[each] for each in names})
        except (Exception, pytest.fail.Exception):
            failed.add(name)
    return failed


# Leaves.

ARRAY = np.arange(12, dtype=np.int32).reshape(3, 4)


class Sound(AwaitedLeaf):
    def __init__(self):
        super().__init__("w", ARRAY)


class OtherValues(Sound):
    def _fill(self, requests, stats):
        super()._fill(requests, stats)
        for _, out in requests:
            out += 1


class OtherPlaces(Sound):
    """Only whole reads are right."""

    def _fill(self, requests, stats):
        for box, out in requests:
            out[...] = self.array[tuple(slice(0, stop - start) for start, stop in box)]
        stats.count(self.bytes_of(tuple(box for box, _ in requests)))


class CountsTwice(Sound):
    def _fill(self, requests, stats):
        for request in requests:
            super()._fill([request], stats)


class CountsTheWhole(Sound):
    def _fill(self, requests, stats):
        super()._fill(requests, stats)
        stats.count(1)


class OtherDtype(Sound):
    def __init__(self):
        super().__init__()
        self.dtype = np.dtype(np.uint32)


class ListAsShape(Sound):
    def __init__(self):
        super().__init__()
        self.shape = list(ARRAY.shape)


class EqualByName(Sound):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class LongText(Sound):
    def __repr__(self):
        return "w" * 1000


class OneReadAtATime(Sound):
    busy = False

    async def read_into(self, requests, stats):
        assert not self.busy
        self.busy = True
        await super().read_into(requests, stats)
        self.busy = False


class OneThread(Sound):
    """Only the thread that read first may read."""

    async def read_into(self, requests, stats):
        self.in_flight = self.in_flight or threading.get_ident()
        assert self.in_flight == threading.get_ident()
        await super().read_into(requests, stats)


class OtherBlockingReads(BlockedLeaf):
    def __init__(self):
        super().__init__("w", ARRAY)

    def read_blocking(self, requests, stats):
        for _, out in requests:
            out[...] = 0


class Unannounced(Sound):
    def read_blocking(self, requests, stats):
        self._fill(requests, stats)


class Verifies(Sound):
    """Reports checksums of which there are none."""

    def __init__(self, verified):
        super().__init__()
        self.verified = verified

    async def verify_checksum(self, stats, ranges):
        return self.verified


LEAVES = {
    OtherValues: {"test_the_whole_of_it"},
    OtherPlaces: {"test_random_boxes_into_random_buffers"},
    CountsTwice: {"test_two_boxes_count_no_byte_twice"},
    CountsTheWhole: {"test_bytes_of_boxes_is_what_reading_them_counts", "test_nothing_is_asked"},
    OtherDtype: {"test_it_is_what_it_says"},
    ListAsShape: {"test_shape_and_dtype_are_plain"},
    EqualByName: {"test_leaves_are_keys_by_identity"},
    LongText: {"test_it_has_a_short_text"},
    OneReadAtATime: {"test_event_loops_read_at_once"},
    OneThread: {"test_threads_read_at_once"},
    OtherBlockingReads: {"test_blocking_reads_give_the_same"},
    Unannounced: {"test_blocking_reads_give_the_same"},
    (lambda: Verifies(True)): {"test_checksums_are_verified_when_all_was_read", "test_a_part_is_unverified"},
    (lambda: Verifies(False)): {"test_nothing_is_summed_where_nothing_is_verified"},
}


def test_each_test_of_leaves_finds_a_mistake():
    assert failing(LeafSuite(), leaf=Sound(), expected=ARRAY) == set()
    found = {make: failing(LeafSuite(), leaf=make(), expected=ARRAY) for make in LEAVES}
    assert {make: tests for make, tests in LEAVES.items() if not tests <= found[make]} == {}
    assert set().union(*LEAVES.values()) == names_of(LeafSuite)


ERROR = CorruptCheckpointError("gone", path="/p", leaf="w")


class WithoutError(BrokenLeaf):
    def __init__(self):
        super().__init__("w", ERROR, is_refused=False)


class SameError(BrokenLeaf):
    async def read_into(self, requests, stats):
        raise ERROR


BROKEN = {
    WithoutError: {"test_it_has_an_error_that_names_it"},
    (lambda: SameError("w", ERROR)): {"test_reading_raises_a_new_exception_each_time"},
}


def test_tests_of_broken_leaves_find_mistakes():
    assert failing(BrokenLeafSuite(), leaf=BrokenLeaf("w", ERROR)) == set()
    for make, tests in BROKEN.items():
        assert tests <= failing(BrokenLeafSuite(), leaf=make())
    assert failing(BrokenLeafSuite(), leaf=Sound()) >= {
        "test_an_empty_box_raises_too",
        "test_composing_raises_no_other_error",
    }


# Readers.

DTYPES = (np.dtype(np.float32), np.dtype(np.int16))


def changed(path, change):
    """A checkpoint of the leaves that are left of those of a sound one."""
    sound = ot.open_checkpoint(path)
    leaves = change({name: leaf_of(sound, name) for name in sound.leaves})
    return ot.Checkpoint(
        path=sound.path, format="x", step=None, leaves=leaves, close=sound.close, index_bytes=sound.index_bytes
    )


class Wrapped(AwaitedLeaf):
    """A leaf over another one, which it reads when it is made."""

    def __init__(self, leaf):
        super().__init__(leaf.name, as_view(leaf).get())


class Cut(Wrapped):
    def __init__(self, leaf):
        super().__init__(leaf)
        self.array = self.array + 1


class Aligned(Wrapped):
    def _fill(self, requests, stats):
        assert all(out.flags.aligned for _, out in requests)
        super()._fill(requests, stats)


class Counted(Wrapped):
    def _fill(self, requests, stats):
        for request in requests:
            super()._fill([request], stats)


class Transposed(Wrapped):
    def __init__(self, leaf):
        super().__init__(leaf)
        self.shape = self.shape[::-1]
        self.array = self.array.T


def each(kind):
    return lambda leaves: {name: kind(leaf) for name, leaf in leaves.items()}


def without_the_first(leaves):
    return dict(itertools.islice(leaves.items(), 1, None))


READERS = {
    without_the_first: {"test_names_are_sorted_and_complete", "test_threads_open_at_once"},
    each(Transposed): {"test_shapes_and_dtypes_are_known"},
    each(Wrapped): {"test_opening_reads_no_array", "test_reading_after_close_is_a_value_error"},
    each(Cut): {"test_whole_leaves", "test_random_boxes_into_random_buffers", "test_threads_read_at_once"},
    each(Aligned): {"test_an_unaligned_buffer"},
    each(Counted): {"test_bytes_are_counted_and_few"},
}


def failing_of_reader(path, arrays, opener):
    class Suite(ReaderSuite):
        def open(self, path):
            return opener(path)

    with opener(path) as opened:
        return failing(Suite(), written=(path, arrays), opened=opened, arrays=arrays)


@pytest.mark.slow
def test_each_test_of_readers_finds_a_mistake(tmp_path):
    arrays = sample_arrays(DTYPES)
    safetensors.numpy.save_file(arrays, path := tmp_path / "a.safetensors")
    assert failing_of_reader(path, arrays, ot.open_checkpoint) == set()
    missed = {}
    for change, tests in READERS.items():
        found = failing_of_reader(path, arrays, lambda path, change=change: changed(path, change))
        missed |= {test: found for test in tests - found}
    assert missed == {}

    class Flat(ot.Checkpoint):
        def tree(self):
            return {}

    def flat(path):
        sound = changed(path, dict)
        sound.__class__ = Flat
        return sound

    assert "test_the_tree_has_the_leaves" in failing_of_reader(path, arrays, flat)
    assert set().union(*READERS.values(), {"test_the_tree_has_the_leaves"}) == names_of(ReaderSuite)


# Transforms.

SOURCE = {"a/w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4)}
FLIPPED = {**SOURCE, "a/w": SOURCE["a/w"][:, ::-1]}


@dataclasses.dataclass(frozen=True)
class Flip(InPlace):
    """A sound transform."""

    pattern: str
    axis: int = -1
    require_match: bool = True

    def __post_init__(self):
        self._set()

    def _compute(self, view):
        index = [slice(None)] * view.ndim
        index[self.axis] = slice(None, None, -1)
        return view[tuple(index)]


class OtherAxis(Flip):
    def _compute(self, view):
        return view[::-1]


class Reads(Flip):
    def _compute(self, view):
        return as_view(np.ascontiguousarray(super()._compute(view).get()))


class ChangesTheSource(Flip):
    def apply(self, source, target, diagnostics):
        result = super().apply(source, target, diagnostics)
        source.pop("b")
        return result


class Resumes(Flip):
    def __call__(self, state, target, *, is_resuming=False, **keywords):
        return super().__call__(state, target, **keywords)


class NotAlone(Flip):
    def __call__(self, state, target, **keywords):
        return {**super().__call__(state, target, **keywords), "more": np.ones(1)}


class TwoLines(Flip):
    def describe(self):
        return "flips\nit"


class DigestOfProcess(Flip):
    def digest(self):
        return f"{id(type(self))}{self.pattern}"


class Unequal(Flip):
    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


class Fails(Flip):
    def apply(self, source, target, diagnostics):
        return super().apply(source, target, diagnostics) if source else {}[0]


class Renames(Flip):
    """Makes a leaf without a rule for it."""

    def apply(self, source, target, diagnostics):
        result = super().apply(source, target, diagnostics)
        return {("c" if name == "b" else name): value for name, value in result.items()}


class EverySecondTime(Flip):
    calls = itertools.count()

    def _compute(self, view):
        return view if next(self.calls) % 2 else super()._compute(view)


TRANSFORMS = {
    OtherAxis: {"test_equals_the_oracle"},
    Reads: {"test_reads_nothing"},
    ChangesTheSource: {"test_changes_no_argument_and_is_deterministic"},
    Resumes: {"test_resuming_leaves_the_state"},
    NotAlone: {"test_nested_is_flat"},
    TwoLines: {"test_describes_itself_in_one_line"},
    Unequal: {"test_is_a_frozen_value"},
    Fails: {"test_an_empty_state_raises_nothing_but_problems"},
    Renames: {"test_records_which_rule_made_a_leaf"},
    EverySecondTime: {"test_composes"},
}
IN_PROCESSES = "test_digests_are_the_same_in_every_process"


def failing_of(transform, result=FLIPPED):
    case = Case(lambda: transform(".*/w"), lambda: transform("a/w"), SOURCE, result)
    return failing(TransformSuite(), but=IN_PROCESSES, case=case)


@pytest.mark.slow
def test_each_test_of_transforms_finds_a_mistake():
    assert failing_of(Flip) == set()
    renamed = {"a/w": FLIPPED["a/w"], "c": SOURCE["b"]}
    found = {kind: failing_of(kind, renamed if kind is Renames else FLIPPED) for kind in TRANSFORMS}
    assert {kind: tests - found[kind] for kind, tests in TRANSFORMS.items() if not tests <= found[kind]} == {}
    assert set().union(*TRANSFORMS.values(), {IN_PROCESSES}) == names_of(TransformSuite)
