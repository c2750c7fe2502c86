"""Bring a model into the cache."""

import shutil
from pathlib import Path

from services.gpu_worker.weights import hub
from services.gpu_worker.weights.convert import convert_gguf
from services.gpu_worker.weights.default_model import download_gguf
from services.gpu_worker.weights.install import exclusive, new_folder
from services.gpu_worker.weights.progress import Progress, Report
from shared.model_store import ModelSource, ResolvedModel, resolve


def pull(name: str, home: Path, report: Report) -> Path:
    """Make the folder of model `name` under `home` if it is not there, and return it.

    Concurrent pulls of one model wait for the first; an interrupted pull leaves no half folder behind.

    Raises:
        ConfigError: the name is no model, or it cannot be fetched or converted.
    """
    model = resolve(name, home)
    if model.folder is None:
        with exclusive(model.target, report):
            if resolve(name, home).folder is None:
                with new_folder(model.target) as folder:
                    _fill(model, folder, report)
    report(Progress("ready", 1, 1, str(model.target)))
    return model.target


def _fill(model: ResolvedModel, folder: Path, report: Report) -> None:
    match model.source:
        case ModelSource.DEFAULT:
            work = folder / ".download"
            work.mkdir()
            convert_gguf(download_gguf(work, report), folder, report)
            shutil.rmtree(work)
        case ModelSource.GGUF:
            convert_gguf(Path(model.name).expanduser().resolve(), folder, report)
        case ModelSource.HUB:
            hub.download(model.name, folder, report)
            shutil.rmtree(folder / ".cache", ignore_errors=True)
        case ModelSource.FOLDER:
            raise AssertionError("a folder is never pulled")
