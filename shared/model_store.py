"""From the name that a user gives to the folder that processes read. Imports no torch and touches no network.

A name is, in this order: the default model, a folder with `config.json` and safetensors, a `.gguf` file or a folder
with one but no `config.json`, or a hub name `org/model`. All but the second have a finished folder in the cache once
`pagewire pull` made it; a folder in the cache is complete, because it is renamed into place only when every file in it
is written.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HOME = Path("~/.cache/pagewire")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WEIGHTS_INDEX = "model.safetensors.index.json"


class ModelSource(StrEnum):
    """What a name turned out to be."""

    DEFAULT = "default"
    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model and where it is."""

    name: str
    """As the user gave it."""
    source: ModelSource
    target: Path
    """The folder with the model, now or after a pull."""
    folder: Path | None
    """`target` if it is there, else None: pull first."""
    served_name: str
    """What clients call it unless they are told otherwise."""
    gguf: Path | None = None
    """The file that the folder is made from, if the source is GGUF."""

    def require_folder(self) -> Path:
        """The folder.

        Raises:
            ConfigError: the model was not pulled yet.
        """
        if self.folder is None:
            raise ConfigError(f"model {self.name!r} is not in the cache: run `pagewire pull {self.name}` first")
        return self.folder


def models_folder(home: Path) -> Path:
    """The folder of finished model folders under `home`."""
    return home.expanduser() / "models"


def resolve(name: str, home: Path) -> ResolvedModel:
    """Find the model that `name` stands for; an empty name is the default model. Reads only local file names.

    Raises:
        ConfigError: `name` is no model; the message says what was tried.
    """
    if name in ("", DEFAULT_MODEL):
        return _cached(DEFAULT_MODEL, ModelSource.DEFAULT, models_folder(home) / DEFAULT_MODEL, DEFAULT_MODEL)
    path = Path(name).expanduser()
    if path.is_dir():
        return _local_folder(name, path, home)
    if path.suffix.lower() == ".gguf":
        return _gguf(name, path, home)
    if _HUB_NAME.fullmatch(name):
        return _cached(name, ModelSource.HUB, models_folder(home) / "hub" / name.replace("/", "--"), name)
    raise ConfigError(
        f"model {name!r}: not the default model ({DEFAULT_MODEL}), no folder {path}, no .gguf file, "
        "and no hub name of the form org/model"
    )


def missing_files(folder: Path) -> list[str]:
    """What keeps `folder` from being a model folder: names of absent files, empty if it is complete."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / _WEIGHTS_INDEX
    if index.is_file():
        return missing + [shard for shard in _shards(index) if not (folder / shard).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: no index of weights ({error})") from error


def is_complete(model: ResolvedModel, *, with_gguf: bool) -> bool:
    """Whether there is nothing to pull; `with_gguf`: not even the GGUF file."""
    return model.folder is not None and (not with_gguf or bool(gguf_files(model.folder)))


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files in a folder, sorted."""
    return sorted(path for path in folder.glob("*.gguf") if path.is_file())


def _local_folder(name: str, path: Path, home: Path) -> ResolvedModel:
    found = gguf_files(path)
    if len(found) == 1 and not (path / "config.json").is_file():
        return _gguf(name, found[0], home)
    missing = missing_files(path)
    if missing:
        raise ConfigError(f"model folder {path}: {', '.join(missing)} missing")
    folder = path.resolve()
    return ResolvedModel(name, ModelSource.FOLDER, folder, folder, folder.name)


def _gguf(name: str, path: Path, home: Path) -> ResolvedModel:
    if not path.is_file():
        raise ConfigError(f"model {name!r}: no such file")
    target = models_folder(home) / "gguf" / f"{path.stem}-{_file_key(path)}"
    return _cached(name, ModelSource.GGUF, target, path.stem, path.resolve())


def _file_key(path: Path) -> str:
    """Stands for the content of a file that may be too large to hash at every start: name, size and time of change."""
    stat = path.stat()
    return hashlib.sha256(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]


def _cached(name: str, source: ModelSource, target: Path, served_name: str, gguf: Path | None = None) -> ResolvedModel:
    complete = target.is_dir() and not missing_files(target)
    return ResolvedModel(name, source, target, target if complete else None, served_name, gguf)
