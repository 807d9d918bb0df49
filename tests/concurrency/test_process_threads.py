"""Jobs that are divided between the threads of the process."""

import threading

import pytest

from orbax_t5x.concurrency.process_threads import function_pool, reader_pool, run_jobs, run_on_read_thread


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_each_job_is_done_once_and_its_result_returned(count):
    assert sorted(run_jobs(lambda n=n: n * n for n in range(count))) == [n * n for n in range(count)]


def test_the_first_error_stops_the_jobs_that_have_not_begun():
    begun = []

    def job(number):
        begun.append(number)
        if number == 3:
            raise ValueError("third")

    with pytest.raises(ValueError, match="third"):
        run_jobs(lambda n=n: job(n) for n in range(100_000))
    assert len(begun) < 100_000


def test_jobs_within_jobs_do_not_wait_for_each_other_for_ever():
    def outer(n):
        return sum(run_jobs(lambda m=m: n * m for m in range(5)))

    assert sorted(run_jobs(lambda n=n: outer(n) for n in range(20))) == [10 * n for n in range(20)]


def test_a_read_within_a_read_runs_on_another_thread():
    seen = []

    async def inner():
        seen.append(threading.current_thread())

    async def outer():
        seen.append(threading.current_thread())
        run_on_read_thread(inner())

    run_on_read_thread(outer())
    assert len(set(seen)) == 2 and threading.current_thread() not in seen


def test_pools_are_made_once():
    assert reader_pool() is reader_pool() and reader_pool() is not function_pool()
