"""Models of the Hugging Face hub: weights, configuration and tokenizer, never code."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from services.gpu_worker.weights.progress import Progress, Report
from shared.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "LICENSE*")
TIMEOUT_S = 5.0
_POLL_S = 0.5


def download(name: str, target: Path, report: Report) -> None:
    """Fetch the files of hub model `name` that serving needs into the folder `target`.

    Raises:
        ConfigError: no connection, no such model, no right to it, or no safetensors in it.
    """
    from huggingface_hub import snapshot_download

    info = _ask(name)
    files = _wanted_files(info)
    if not any(path.endswith(".safetensors") for path in files):
        raise ConfigError(f"hub model {name!r} has no safetensors weights")
    with _reporting(target, sum(files.values()), report):
        try:
            snapshot_download(
                name, revision=info.sha, local_dir=target, allow_patterns=list(files), etag_timeout=TIMEOUT_S
            )
        except Exception as error:
            raise ConfigError(f"the download of hub model {name!r} failed: {_one_line(error)}") from error


def _ask(name: str) -> "ModelInfo":
    """One question with a short timeout, so that a machine without a network hears it at once."""
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(name, timeout=TIMEOUT_S, files_metadata=True)
    except Exception as error:  # the client library's errors share no root: connection, offline mode, 401, 404
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError(
            f"model {name!r} is not in the cache and the hub cannot give it ({reason}). "
            "Give a folder with safetensors or a .gguf file, or pull it on a machine with a network."
        ) from error


def _wanted_files(info: "ModelInfo") -> dict[str, int]:
    """Path → bytes of the files to fetch. Files in subfolders (other formats) are not wanted."""
    names = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    return {name: size for name, size in names.items() if "/" not in name and _matches(name)}


def _matches(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in PATTERNS)


@contextmanager
def _reporting(folder: Path, total: int, report: Report) -> Iterator[None]:
    """Report how many bytes lie under `folder` while the block runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            report(Progress("download", min(_size(folder), total), total))

    watcher = threading.Thread(target=watch, name="pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
