"""All options. Flags win over PAGEWIRE_… variables, these over the config file, it over defaults."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.errors import ConfigError
from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL


class Settings(BaseSettings):
    """Options of `pagewire`. The names are those of the flags, of the config file and (in capitals, after PAGEWIRE_) of
    the environment. None means: not given, the service's own default holds, unless said otherwise."""

    model_config = SettingsConfigDict(env_prefix="PAGEWIRE_", extra="ignore", protected_namespaces=())

    home: Path = DEFAULT_HOME
    """Model cache."""
    state_dir: Path = Path("~/.local/state/pagewire")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    model: str = DEFAULT_MODEL
    served_model_name: str | None = None
    workers: int = Field(1, ge=1, le=256)
    redis_url: str | None = None
    pool: str = "default"
    # Scheduler and workers must agree on these four: so they have a value here.
    block_size: int = Field(16, ge=1, le=1024)
    max_num_seqs: int = Field(64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(512, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    """None: what the model's configuration says."""
    num_blocks: int | None = Field(None, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    plan_ahead: int | None = Field(None, ge=1, le=2)
    enable_prefix_caching: bool | None = None
    eviction: Literal["lru", "lfu", "fifo"] | None = None
    reclaim: Literal["lazy", "immediate"] | None = None
    fit: Literal["first", "best", "worst"] | None = None
    device: str | None = None
    cors_origin: list[str] | None = None
    tenant_header: str | None = Field(None, pattern=r"^[A-Za-z0-9-]*$")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    verbose: bool = False
    start_timeout_s: float = Field(900.0, gt=0)
    """Longest wait for the stack to become ready."""


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings from all layers. Flags that are None were not given. REDIS_URL and PAGEWIRE_STATE are understood too.

    Raises:
        ConfigError: a value is wrong, or the config file holds a name that is no option; names the option.
    """
    given = {"redis_url": os.environ.get("REDIS_URL"), "state_dir": os.environ.get("PAGEWIRE_STATE")}
    lower_layers = {**_read_config(config), **{name: value for name, value in given.items() if value}}

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=lower_layers))

    try:
        return Layered(**{name: value for name, value in flags.items() if value is not None})
    except (ValidationError, SettingsError) as error:
        raise ConfigError(_explain(error)) from error


def _explain(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    first = error.errors()[0]
    option = str(first["loc"][0]).replace("_", "-") if first["loc"] else "?"
    return f"option {option}: {first['msg']} (got {first.get('input')!r})"


def _read_config(path: Path | None) -> dict[str, Any]:
    """Options of a TOML or YAML file; dashes and underscores in names are the same."""
    if path is None:
        return {}
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    values = _parse_yaml(path, text) if path.suffix in (".yaml", ".yml") else _parse_toml(path, text)
    options = {str(name).replace("-", "_"): value for name, value in values.items()}
    if unknown := sorted(options.keys() - Settings.model_fields.keys()):
        raise ConfigError(f"config file {path}: unknown option {unknown[0]}; `pagewire up --help` lists them")
    return options


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: {error}") from error


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: a table of options is expected")
    return values
