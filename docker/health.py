"""Health check of the server image: exits with 0 if onmt_server reports "ok", else with 1 and one line.

``SERVER_URL`` is its address including url_root (default: ``http://127.0.0.1:5000/translator``).
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

SECONDS = 5


def ask(url: str) -> str:
    """Return the status that the server at `url` reports; "ok" means healthy.

    Raises:
        OSError: the server does not answer.
        ValueError: the answer is not from onmt_server.
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
