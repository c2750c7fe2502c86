"""Bring a model into the cache."""

import shutil
from pathlib import Path

from services.gpu_worker.weights import hub
from services.gpu_worker.weights.convert import convert_gguf
from services.gpu_worker.weights.default_model import download_gguf
from services.gpu_worker.weights.install import exclusive, new_folder
from services.gpu_worker.weights.progress import Progress, Report
from shared.errors import ConfigError
from shared.model_store import ModelSource, ResolvedModel, is_complete, resolve


def pull(name: str, home: Path, report: Report, *, with_gguf: bool = False) -> Path:
    """Make the folder of model `name` under `home` if it is not there, and return it.

    Concurrent pulls of one model wait for the first; an interrupted pull leaves no half folder behind.

    Args:
        with_gguf: also bring the GGUF file, if an older pull did not keep it.

    Raises:
        ConfigError: the name is no model, it cannot be fetched or converted, or has no GGUF file.
    """
    model = resolve(name, home)
    if not is_complete(model, with_gguf=with_gguf):
        if with_gguf and model.source in (ModelSource.FOLDER, ModelSource.HUB):
            raise ConfigError(f"model {name!r} has no .gguf file")
        with exclusive(model.target, report):
            _complete(resolve(name, home), report, with_gguf)
    report(Progress("ready", 1, 1, str(model.target)))
    return model.target


def _complete(model: ResolvedModel, report: Report, with_gguf: bool) -> None:
    if model.folder is None:
        with new_folder(model.target) as folder:
            _fill(model, folder, report)
    elif not is_complete(model, with_gguf=with_gguf):
        _keep_gguf(model, model.folder, report)


def _fill(model: ResolvedModel, folder: Path, report: Report) -> None:
    if model.source is ModelSource.HUB:
        hub.download(model.name, folder, report)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
    else:
        kept = _keep_gguf(model, folder, report)
        convert_gguf(model.gguf or kept, folder, report)


def _keep_gguf(model: ResolvedModel, folder: Path, report: Report) -> Path:
    """Put the model's GGUF file into its folder, or a link to it if it is the user's; answers where it is."""
    if model.gguf is not None:
        kept = folder / model.gguf.name
        kept.unlink(missing_ok=True)  # a link to a file that is gone
        kept.symlink_to(model.gguf)
        return kept
    work = folder / ".download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    gguf = download_gguf(work, report)
    kept = gguf.rename(folder / gguf.name)
    shutil.rmtree(work)
    return kept
