"""Tiny Shakespeare: downloaded, and used only if it is the known file."""

import hashlib

from harness.configurator import UserError
from harness.download import DOWNLOAD_SECONDS, within

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
N_BYTES = 1_115_394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STALL_SECONDS = 10  # the longest silence of a server
CHUNK_BYTES = 1 << 14


def text() -> str:
    """Tiny Shakespeare; UserError when it cannot be downloaded, or when something else arrives."""
    try:
        content = within(DOWNLOAD_SECONDS, download)
    except (ImportError, OSError, ValueError) as error:  # requests' errors are OSErrors
        raise UserError(
            f"shakespeare: the download of {URL} failed and nothing is stored "
            f"({type(error).__name__}: {error}); use the embedded corpus, python prepare.py "
            "pydocs, or download that file yourself and run: "
            "python prepare.py --input=FILE --name=shakespeare"
        ) from None
    return content.decode()


def download() -> bytes:
    """The file at URL; ValueError when it is not the known one, or one of requests' errors."""
    import requests

    content = bytearray()
    with requests.get(URL, stream=True, timeout=STALL_SECONDS) as response:
        response.raise_for_status()
        for chunk in response.iter_content(CHUNK_BYTES):
            content += chunk
            if len(content) > N_BYTES:  # it may never end
                break
    if len(content) != N_BYTES or hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{len(content)} bytes arrived, not the {N_BYTES} with the known sha256")
    return bytes(content)
