"""Settings of requests to servers and buckets.

How many run at a time, and the waits between retries.
"""

from __future__ import annotations

MAX_RETRIES = 8
FIRST_DELAY_SECS = 0.1
LONGEST_DELAY_SECS = 8.0
# Requests under way at a time. TensorStore's own limit of 32 makes a checkpoint of hundreds of small arrays wait for
# ten round trips where two would do; servers take hundreds.
REQUESTS_AT_ONCE = 128
# TensorStore's own waits between retries begin at one second and grow to half a minute, for half an hour: short
# outages would cost a full initial delay, and long ones would be waited for far too long.
_RETRIES = {"max_retries": MAX_RETRIES, "initial_delay": f"{FIRST_DELAY_SECS}s", "max_delay": f"{LONGEST_DELAY_SECS}s"}
_REQUESTS = {"limit": REQUESTS_AT_ONCE}
REQUEST_SETTINGS = {
    "s3_request_concurrency": _REQUESTS,
    "gcs_request_concurrency": _REQUESTS,
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}
"""For the context of everything that TensorStore reads from buckets."""
