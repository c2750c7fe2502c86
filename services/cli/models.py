"""Fetches and converts a model in a process of its own: conversion needs torch, which this process does not load."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from services.cli.screen import Screen
from services.cli.signals import SignalInbox, StopRequested
from services.cli.supervisor import kill_group, start_on_leash
from shared.errors import ConfigError
from shared.model_store import ResolvedModel, is_complete, resolve

_VERBS = {"wait": "waiting for another pull of", "download": "downloading", "convert": "converting"}


def ensure_model(
    name: str,
    home: Path,
    environment: Mapping[str, str],
    inbox: SignalInbox,
    screen: Screen,
    *,
    with_gguf: bool = False,
) -> ResolvedModel:
    """The model with its folder, after pulling it if need be; `with_gguf`: and with its GGUF file in there.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched, or has no GGUF file.
        StopRequested: a stop signal came meanwhile; the pull was ended.
    """
    model = resolve(name, home)
    if is_complete(model, with_gguf=with_gguf):
        return model
    pull(name, home, environment, inbox, screen, with_gguf=with_gguf)
    return resolve(name, home)


def pull(
    name: str,
    home: Path,
    environment: Mapping[str, str],
    inbox: SignalInbox,
    screen: Screen,
    *,
    with_gguf: bool = False,
) -> None:
    """Run one pull to its end, showing its progress."""
    plain = (sys.executable, "-m", "services.gpu_worker.weights", "pull", name, "--home", str(home.expanduser()))
    command = (*plain, "--gguf") if with_gguf else plain
    process = start_on_leash(command, environment, output=subprocess.PIPE, error=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    readers = [
        threading.Thread(target=_show, args=(process.stdout, name, screen), daemon=True),
        threading.Thread(target=_collect, args=(process.stderr, errors), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        _wait(process, inbox)
    finally:
        kill_group(process.pid, 9)
        process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
    if process.returncode != 0:
        reason = errors[-1].removeprefix("error: ") if errors else f"exit code {process.returncode}"
        raise ConfigError(f"cannot get model {name!r}: {reason}")


def _wait(process: "subprocess.Popen[bytes]", inbox: SignalInbox) -> None:
    while process.poll() is None:
        if inbox.wait(0.5):
            raise StopRequested


def _collect(stream: IO[bytes], lines: list[str]) -> None:
    lines.extend(line for raw in stream if (line := raw.decode(errors="replace").strip()))


def _show(stream: IO[bytes], name: str, screen: Screen) -> None:
    """Turn the pull's JSON lines into progress; one bar per stage."""
    label = ""
    for raw in stream:
        update = _parse(raw)
        verb = _VERBS.get(update.get("stage", ""))
        if label and (verb is None or not label.startswith(verb)):
            screen.finish(label)
            label = ""
        if verb is not None:
            label = f"{verb} {name}"
            total = update.get("total") or 0
            screen.progress(label, update.get("done", 0) / total if total else None, update.get("detail", ""))
    if label:
        screen.finish(label)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        update = json.loads(raw)
    except ValueError:
        return {}
    return update if isinstance(update, dict) else {}
