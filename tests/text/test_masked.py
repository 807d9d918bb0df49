"""No text of an error has a secret of a URL or of a request's header, whatever the scheme and wherever it is."""

import itertools
import pathlib

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.text.masked import masked

SECRET = "S3cr3tV4lue"
SCHEMES = ("http", "https", "HTTP", "hTTps", "ftp", "s3", "S3", "gs", "GS", "hf", "HF", "webdav+http", "file", "x-y.z")
PLACES = (
    "{s}://u:@SECRET@@host/a/b",
    "{s}://@SECRET@:p@host/a",
    "{s}://@SECRET@@host",
    "{s}://u:x/@SECRET@@host/a",
    "{s}://u:x@y@SECRET@@host/a",
    "{s}://u%3A@SECRET@%40host/a",
    "{s}://host/a?token=@SECRET@",
    "{s}://host/a?a=1&X-Amz-Signature=@SECRET@",
    "{s}://host/a%3Ftoken=@SECRET@",
    "{s}://host/a%253Fx=@SECRET@/b",
    "{s}://host/a#@SECRET@",
    "{s}://host/a%23@SECRET@",
    "{s}://host/a;token=@SECRET@/b",
    "{s}:/u:@SECRET@@host/a",
    "{s}:///u:@SECRET@@host/a",
    "{s}://u: @SECRET@@host/a",
    "{s}:/u: @SECRET@@host/a",
    "{s}://bucket?@SECRET@",
    "{s}://bucket?a@@SECRET@",
    "{s}://@SECRET@?x@host/a",
    "{s}://@SECRET@#x@host/a",
)
URLS = [
    place.replace("{s}", scheme).replace("@SECRET@", SECRET) for scheme, place in itertools.product(SCHEMES, PLACES)
]
# These are sent to a server, because nothing of them is refused.
_SENT = ("/a%3F", "/a%253F", "/a%23", "/a;")


@pytest.mark.parametrize("url", URLS)
def test_paths_and_messages_are_masked(url):
    for text in (masked(url, is_path=True), masked(f"{url}/_METADATA", is_path=True), masked(f"reading {url!r}: no")):
        assert SECRET not in text
    said = repr(url) if " " in url else url  # where a bare URL ends, a blank says
    for error in (ot.errors.CheckpointNotFoundError("no", path=url), ot.errors.CheckpointIOError(f"{said}: failed")):
        assert SECRET not in str(error) + repr(error) + str(error.path) + error.message


def _is_refused(url: str) -> bool:
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return not any(sent in url for sent in _SENT)
    return scheme not in ("s3", "gs", "hf") or "@" in url.partition("://")[2].partition("/")[0]


@pytest.mark.parametrize("url", [url for url in URLS if _is_refused(url)])
def test_public_calls_mask(url, tmp_path, capsys):
    calls = [
        lambda: ot.open_checkpoint(url),
        lambda: ot.open_checkpoint(pathlib.PurePosixPath(url)),
        lambda: ot.restore(url, {"a": np.zeros(1)}),
        lambda: ot.restore({"a": url}, {"a": np.zeros(1)}),
    ]
    for call in calls:
        with pytest.raises((ot.errors.CheckpointError, ValueError)) as caught:
            call()
        error = caught.value
        while error is not None:
            assert SECRET not in str(error)
            error = error.__cause__
    assert main(["inspect", url]) != 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize(
    "text",
    [
        f"401: {{'Authorization': 'Bearer {SECRET}'}}",
        f"authorization: Basic {SECRET}",
        f"X-Error-Message: Bearer {SECRET}",
        f"invalid token hf_{SECRET}abcdefgh",
    ],
)
def test_headers_are_masked(text):
    assert SECRET not in str(ot.errors.CheckpointIOError(text))


@pytest.mark.parametrize(
    "text",
    [
        *("/data/run@3/model.ckpt-1", "hf://org/name@main/model.safetensors", "s3://bucket/user@x/step_3"),
        *("http://host:8080/a@b/c", "ot.rules.hf_t5_to_t5x()", "gs://b/k", "what? 'a/b' #3", "https://[::1]:80/x"),
    ],
)
def test_other_texts_stay(text):
    assert masked(text, is_path=True) == text


@pytest.mark.slow
@hypothesis.given(
    scheme=st.from_regex(r"[a-zA-Z][a-zA-Z0-9+.-]{1,8}", fullmatch=True),
    user=st.text("abc:/?#@%;=&", max_size=8),
    host=st.from_regex(r"[a-z]{1,8}(:[0-9]{1,4})?", fullmatch=True),
)
def test_a_password_is_masked_whatever_is_before_it(scheme, user, host):
    assert SECRET not in masked(f"{scheme}://u:{user}{SECRET}@{host}/a", is_path=True)
    assert SECRET not in masked(f"{scheme}://{host}/a?{user}{SECRET}", is_path=True)


def test_html_has_no_control_characters_and_no_marks_of_direction(tmp_path):
    leaf = next(iter(_opened(tmp_path).leaves.values())).leaves()[0]
    name = "a\x1b[31m\u202e\u2028b"
    shown = Checkpoint(path=f"/x/{name}", format="safetensors", step=None, leaves={name: leaf})._repr_html_()
    assert not set("\x1b\u202e\u2028") & set(shown) and "\\u202e" in shown


def _opened(directory):
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, directory / "a.safetensors")
    return ot.open_checkpoint(directory)
