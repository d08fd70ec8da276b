"""Models of the Hugging Face Hub, and other files by their URL and checksum."""

from __future__ import annotations

import http.client
import shutil
import time
import urllib.request
from pathlib import Path

from tqdm import tqdm

from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing, sha256

ATTEMPTS = 3

# What a model's folder on the Hub may have besides safetensors, tokenizer and settings. Folders that belong
# to the model are numbered, as 1_Pooling of sentence encoders is, or called additional_chat_templates.
_FORMATS = "bin ckpt gguf h5 msgpack onnx ot pt pth tflite".split()
_NOT_READ = [f"[!0-9]*.{ending}" for ending in _FORMATS] + ["[!0-9a]*/*", "a[!d]*/*"]


class DownloadError(UserError):
    """A file that cannot be downloaded or has a wrong checksum; the message has one line with a remedy."""


def hub_model(name: str) -> Path:
    """Return the folder of a model in the Hugging Face Hub's cache, after a download if it is not there.

    Raises:
        DownloadError: there is no such model, or no connection, or it needs a login.
    """
    try:
        return Path(require("huggingface_hub").snapshot_download(name, ignore_patterns=_NOT_READ))
    except (OSError, ValueError) as error:
        raise DownloadError(
            f"model {name}: no such file, and it cannot be downloaded from the Hugging Face Hub "
            f"({first_line(error)}); check the name and the connection, log in with `hf auth login`, or name "
            "a folder"
        ) from error


def verify(path: Path, checksum: str | None, name: str = "", advice: str = "replace the file") -> None:
    """Check the SHA-256 of a file, which has a name in the message, unless `checksum` is None."""
    if checksum and (actual := sha256(path)) != checksum:
        raise DownloadError(f"{name or path}: SHA-256 is {actual}, expected {checksum}; {advice}")


def download(url: str, path: Path, checksum: str | None, advice: str, wait_seconds: float = 2.0) -> None:
    """Download `url` to `path` with a progress bar and retries; failures leave no partial file.

    Args:
        checksum: SHA-256 in hexadecimal; ``None`` if unknown.
        advice: the end of the error message: what to do instead.
        wait_seconds: pause before the second attempt, doubled before each further one.

    Raises:
        DownloadError: the download failed or has a wrong checksum.
    """
    # Some servers reject urllib's default agent.
    request = urllib.request.Request(url, headers={"User-Agent": "shared-embeddings"})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with replacing(path) as temporary:
                with urllib.request.urlopen(request, timeout=30) as answer, temporary.open("wb") as file:
                    size = int(answer.headers.get("Content-Length") or 0)
                    with tqdm.wrapattr(file, "write", total=size or None, desc=path.name) as output:
                        shutil.copyfileobj(answer, output)
                if size and temporary.stat().st_size != size:
                    raise OSError(f"the connection closed after {temporary.stat().st_size} of {size} bytes")
                verify(temporary, checksum, url, advice)
            return
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                reason = first_line(error)
                raise DownloadError(
                    f"{url}: cannot be downloaded ({reason}) after {ATTEMPTS} attempts; {advice}"
                ) from error
            time.sleep(wait_seconds * 2 ** (attempt - 1))
