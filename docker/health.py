"""Health check of the server image: exit code 0 when onmt_server says that it is well, else 1 and one line.

``SERVER_URL`` is its address with url_root, where it differs from ``http://127.0.0.1:5000/translator``.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

SECONDS = 5


def ask(url: str) -> str:
    """The status that the server at `url` reports; "ok" when it is well.

    Raises:
        OSError: it does not answer.
        ValueError: its answer is not the one of onmt_server.
    """
    with urllib.request.urlopen(f"{url}/health", timeout=SECONDS) as response:
        answer = json.load(response)
    if not isinstance(answer, dict) or "status" not in answer:
        raise ValueError(f"not an answer of onmt_server: {answer!r}")
    return str(answer["status"])


if __name__ == "__main__":
    address = os.environ.get("SERVER_URL", "http://127.0.0.1:5000/translator")
    try:
        status = ask(address)
    except (OSError, ValueError) as error:
        sys.exit(f"{address}: {error}")
    if status != "ok":
        sys.exit(f"{address}: status {status}")
