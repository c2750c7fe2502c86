"""The flags of commands that take all options: one for each field of `Settings`, so none is written twice."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import typer
from pydantic import SecretStr

from services.cli.settings import Settings, extra_of
from services.scheduler.core.config import SchedulerConfig

P = ParamSpec("P")
R = TypeVar("R")


def takes_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Give a command, which takes `**options`, a flag per setting. Flags that are not given are None."""
    return _takes(function, [name for name in Settings.model_fields if extra_of(name)["flag"]])


def takes_scheduler_settings(function: Callable[P, R]) -> Callable[P, R]:
    """As `takes_settings`, but only what the scheduler's core is told, and how many workers and blocks there are."""
    told = {field.name for field in fields(SchedulerConfig)} | {"workers", "num_blocks", "num_cpu_blocks"}
    return _takes(function, [name for name in Settings.model_fields if name in told])


def _takes(function: Callable[P, R], settings: list[str]) -> Callable[P, R]:
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    assert own[-1].kind is inspect.Parameter.VAR_KEYWORD, "the command takes **options"
    names = {parameter.name for parameter in own}
    flags = [_flag(name) for name in settings if name not in names]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own[:-1]] + flags
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _flag(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    type_ = _command_line_type(field.annotation)
    dashed = name.replace("_", "-")
    spellings = (f"--{dashed}/--no-{dashed}",) if type_ is bool else (f"--{dashed}",)
    option = typer.Option(*spellings, help=field.description, show_default=extra_of(name)["shown"])
    annotation: Any = Annotated[type_ | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _command_line_type(annotation: Any) -> Any:
    """What the command line parses; `Settings` checks the rest."""
    kinds = [kind for kind in _members(annotation) if kind is not type(None)]
    if any(get_origin(kind) is Literal for kind in kinds):
        return str
    if SecretStr in kinds:
        return str
    return next(kind for kind in kinds if kind in (bool, int, float, str, Path, list[str]))


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, type(int | str))
    return get_args(annotation) if is_union else (annotation,)
