"""Some kills of conversions to a bucket; `tests.robustness.killed_uploads` makes as many as one likes."""

import pytest

from tests.robustness.killed_uploads import run
from tests.support.amazon_store import ENVIRONMENT

pytestmark = pytest.mark.slow


def test_a_killed_upload_shows_the_old_checkpoint_the_new_one_or_none_and_starts_again(tmp_path, monkeypatch):
    for name in (*ENVIRONMENT, "AWS_ENDPOINT_URL", "TMPDIR"):
        monkeypatch.setenv(name, "")  # so that what the run sets there ends with the test
    assert sum(kills for _, _, kills, _ in run(tmp_path, 2, seed=4)) >= 2
