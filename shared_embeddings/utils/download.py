"""Download files with checksums and retries; failures leave no partial files."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line, replacing, sha256

ATTEMPTS = 3
TIMEOUT_SECONDS = 30
# Some servers reject urllib's default.
USER_AGENT = "shared-embeddings"


class DownloadError(UserError):
    """A file that cannot be downloaded or has a wrong checksum; the message has one line with a remedy."""


# What a model's folder on the Hub may have besides safetensors, tokenizer and settings. Folders that belong
# to the model are numbered, as 1_Pooling of sentence encoders is, or called additional_chat_templates.
_FORMATS = "bin ckpt gguf h5 msgpack onnx ot pt pth tflite".split()
_NOT_READ = [f"[!0-9]*.{ending}" for ending in _FORMATS] + ["[!0-9a]*/*", "a[!d]*/*"]


def hub_model(name: str) -> Path:
    """The folder of a model of the Hugging Face Hub, in the Hub's cache, downloaded if it is not there.

    Raises:
        UserError: there is no such model, or no connection, or it needs a login.
    """
    hub: Any = require("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, ignore_patterns=_NOT_READ))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise DownloadError(
            f"model {name}: no such file, and it cannot be downloaded from the Hugging Face Hub ({reason}); "
            "check the name and the connection, log in with `hf auth login`, or name a folder"
        ) from error


def verify(path: Path, checksum: str | None) -> None:
    """Check the SHA-256 of a file, unless `checksum` is None."""
    if checksum and (found := sha256(path)) != checksum:
        raise DownloadError(f"{path}: SHA-256 is {found}, expected {checksum}; replace the file")


def download(url: str, path: Path, checksum: str | None, advice: str, wait_seconds: float = 2.0) -> None:
    """Download `url` to `path` with a progress bar and retries; failures leave no partial file.

    Args:
        checksum: SHA-256 in hexadecimal; ``None`` if unknown.
        advice: the end of the error message: what to do instead.
        wait_seconds: pause before the second attempt, doubled before each further one.

    Raises:
        DownloadError: the download failed or has a wrong checksum.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(wait_seconds * 2 ** (attempt - 1))
        try:
            with replacing(path) as temporary:
                request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT})
                with (
                    urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer,
                    temporary.open("wb") as file,
                ):
                    size = int(answer.headers.get("Content-Length") or 0)
                    name = url.rsplit("/", 1)[-1]
                    with tqdm(total=size or None, desc=name, unit="B", unit_scale=True) as progress:
                        while block := answer.read(1 << 16):
                            file.write(block)
                            progress.update(len(block))
                if size and temporary.stat().st_size != size:
                    found_size = temporary.stat().st_size
                    raise OSError(f"the connection closed after {found_size} of {size} bytes")
                if checksum and (found := sha256(temporary)) != checksum:
                    raise DownloadError(f"{url}: SHA-256 is {found}, expected {checksum}; {advice}")
            return
        except urllib.error.HTTPError as error:
            reason = f"the server returned {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
    raise DownloadError(f"{url}: cannot be downloaded ({reason}) after {ATTEMPTS} attempts; {advice}")
