"""Errors of TensorStore, JAX and obstore, parsed from their texts.

The status of absl or of HTTP is in no attribute, so that it is parsed here, and in no other module.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_STATUS = re.compile(r"([A-Z_]+): ")
# What follows the reason: the whole spec, the body of an answer, the request's id and the like.
_PAYLOADS = re.compile(
    r" \[(tensorstore_spec|source locations|os_error_code|http_response_body|x-amzn-requestid)=.*", re.DOTALL
)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_UNSAFE_KEY = re.compile(r"Invalid key: |Invalid file path: ")
# In the details below the first line.
_CAUSE = re.compile(r'^ *(?:error|message): "([^"\n]*)"', re.MULTILINE)
_BAD_RANGE = re.compile(r"416 Range Not Satisfiable|InvalidRange")


class NativeError(NamedTuple):
    """Parts of an error's text.

    Attributes:
      status: of absl, or "".
      reason: what follows it, without payloads.
      errno: the number of an operating system's error, or None.
    """

    status: str
    reason: str
    errno: int | None

    @property
    def is_unsafe_key(self) -> bool:
        """True if a key would leave its directory."""
        return _UNSAFE_KEY.search(self.reason) is not None


def parse_error(error: BaseException) -> NativeError:
    """Parses an error of TensorStore or JAX."""
    text = str(error)
    plain = _PAYLOADS.sub("", text)
    status, number = _STATUS.match(plain), _OS_ERROR.search(text)
    return NativeError(
        status[1] if status else "", plain[status.end() if status else 0 :], int(number[1]) if number else None
    )


def is_bad_range(error: BaseException) -> bool:
    """Returns True if obstore's error is the answer to a range behind the end of a file."""
    return _BAD_RANGE.search(str(error)) is not None


def is_denied(error: BaseException) -> bool:
    """Returns True if obstore's error is a status 403, for which it has no type where it retried."""
    return "403 Forbidden" in str(error)


def store_reason(error: BaseException) -> str:
    """Returns the first line of obstore's text, with the cause of a failed connection."""
    line, _, details = str(error).partition("\n")
    causes = _CAUSE.findall(details)
    return line.rstrip(" :") + (f": {causes[-1]}" if causes else "")
