"""All options. Flags win over PAGEWIRE_… variables, these over the config file, it over defaults."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.capacity import MAX_BLOCKS
from shared.durability import Durability
from shared.errors import ConfigError
from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL


def option(
    default: Any, text: str, *, shown: str | None = None, forward: bool = False, flag: bool | None = True, **limits: Any
) -> Any:
    """A field of `Settings`. `shown` is the default as people read it, `forward` hands the value to every service under
    the same name, and without `flag` no command takes it by itself."""
    extra: dict[str, JsonValue] = {"shown": shown or str(default), "forward": forward, "flag": bool(flag)}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def extra_of(name: str) -> dict[str, Any]:
    """What `option` was told of a field beyond its type and limits."""
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


class Settings(BaseSettings):
    """Options of `pagewire`. The names are those of the flags, of the config file and (in capitals, after PAGEWIRE_) of
    the environment. None means: not given, the service's own default holds, unless said otherwise.

    A field added here is a flag of `up` and `serve`, and with `forward` the variable that the services read."""

    model_config = SettingsConfigDict(env_prefix="PAGEWIRE_", extra="ignore", protected_namespaces=())

    home: Path = option(DEFAULT_HOME, "Model cache (PAGEWIRE_HOME).", shown="~/.cache/pagewire")
    state_dir: Path = option(
        Path("~/.local/state/pagewire"), "State, logs, own Redis (PAGEWIRE_STATE).", shown="~/.local/state/pagewire"
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", ge=0, le=65535)
    model: str = option(DEFAULT_MODEL, "Folder with safetensors, .gguf file or hub name.")
    served_model_name: str | None = option(None, "What clients call the model.", shown="from its folder or file")
    workers: int = option(1, "Workers on this machine; cores or GPUs are divided among them.", ge=1, le=256)
    schedulers: int = option(1, "One leads, the others follow and take over when it dies.", ge=1, le=8)
    gateways: int = option(
        1, "Gateways on this machine, behind one port; each has a port of its own as well.", ge=1, le=64
    )
    redis_url: str | None = option(
        None, "Redis >= 6.2 (REDIS_URL).", shown="its own, or that of the `pagewire up` here"
    )
    durability: Durability = option(
        "everysec",
        "What its own Redis keeps through a crash: always (all), everysec (all but the last second) or none.",
    )
    pool: str = option("default", "Pool name: one model, one scheduler leader, its workers.", forward=True)
    # Scheduler and workers must agree on these four: so they have a value here.
    block_size: int = option(16, "Tokens per KV block.", forward=True, ge=1, le=1024)
    max_num_seqs: int = option(64, "Most requests that a worker runs at once.", forward=True, ge=1, le=4096)
    max_num_batched_tokens: int = option(512, "Token budget of one step.", forward=True, ge=1)
    max_model_len: int | None = option(None, "Longest prompt plus output, in tokens.", shown="the model's", ge=2)
    num_blocks: int | None = option(
        None, "KV blocks per worker.", shown="from memory", forward=True, ge=1, le=MAX_BLOCKS
    )
    num_cpu_blocks: int | None = option(
        None,
        "KV blocks per worker in main memory, for swap and demotion; this or --swap-space.",
        shown="0",
        forward=True,
        ge=0,
        le=MAX_BLOCKS,
    )
    swap_space: float | None = option(
        None,
        "GiB of such blocks per worker, instead of their number.",
        shown="0",
        forward=True,
        ge=0,
        allow_inf_nan=False,
    )
    cpu_cache_dtype: Literal["auto", "int8"] | None = option(
        None,
        "What they are stored as: auto (exactly) or int8 (smaller; text may depend on what was swapped).",
        shown="auto",
        forward=True,
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] | None = option(
        None,
        "KV: auto (as the model computes), int8, or on GPUs fp8 (half of bfloat16's memory, text changes).",
        shown="auto",
        forward=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = option(
        None, "float32, bfloat16, float16, or auto: as the hardware computes best.", shown="auto", forward=True
    )
    quantization: Literal["none", "int8", "gguf"] | None = option(
        None,
        "Weights on a CPU: none, int8 (half the memory to read, text changes), or gguf (the blocks of the model's GGUF "
        "file as they are).",
        shown="none",
        forward=True,
    )
    plan_ahead: int | None = option(None, "Plans in flight per worker: 1 or 2.", shown="2", forward=True, ge=1, le=2)
    admission_room: int | None = option(
        None, "Tokens per running request for which an admission leaves KV blocks.", shown="4", forward=True, ge=0
    )
    itl_target_s: float | None = option(
        None,
        "Prefill beside running streams makes no step longer than this (seconds).",
        shown="0.05; 0: off",
        forward=True,
        ge=0,
        allow_inf_nan=False,
    )
    policy: Literal["fcfs", "priority", "fair"] | None = option(
        None,
        "Which request goes next: fcfs (by arrival), priority (smaller is sooner) or fair (least served tenant).",
        shown="fcfs",
        forward=True,
    )
    priority_ageing_s: float | None = option(
        None,
        "Having come this many seconds earlier outweighs a priority that is worse by 1.",
        shown="60",
        forward=True,
        gt=0,
        allow_inf_nan=False,
    )
    tenant_weights: str | None = option(
        None,
        "Shares of tenants under the policy fair, as in a=2,b=1.",
        shown="1 each",
        forward=True,
    )
    max_bypasses: int | None = option(
        None, "How many later requests may pass one that lacks KV blocks.", shown="16", forward=True, ge=0
    )
    max_worker_deaths: int | None = option(
        None,
        "Workers in a row that may die of one request before it ends; 0: any number.",
        shown="5",
        forward=True,
        ge=0,
    )
    enable_prefix_caching: bool | None = option(None, "Share the KV of common prefixes.", shown="on", forward=True)
    eviction: Literal["lru", "lfu", "fifo"] | None = option(
        None, "Which cached KV block goes first: lru, lfu or fifo.", shown="lru", forward=True
    )
    reclaim: Literal["lazy", "immediate"] | None = option(
        None, "Unused KV blocks stay cached (lazy) or not (immediate).", shown="lazy", forward=True
    )
    fit: Literal["first", "best", "worst"] | None = option(
        None, "Which run of free KV blocks is taken: first, best or worst.", shown="first", forward=True
    )
    preemption: Literal["recompute", "swap", "auto"] | None = option(
        None, "KV of preempted requests: recompute, swap to host memory, or auto.", shown="auto", forward=True
    )
    demotion: bool | None = option(None, "Evicted KV blocks go on in host memory.", shown="on", forward=True)
    device: str | None = option(None, "auto, cpu, cuda or cuda:N.", shown="auto", forward=True)
    cors_origin: list[str] | None = option(None, "Origin that browsers may call from; repeat for more.", shown="none")
    tenant_header: str | None = option(
        None,
        "Header in which a trusted proxy names a request's tenant.",
        shown="none",
        forward=True,
        pattern=r"^[A-Za-z0-9-]*$",
    )
    api_key: SecretStr | None = option(
        None, "Key that clients must send (PAGEWIRE_API_KEY: flags are seen by others).", shown="none"
    )
    api_key_file: Path | None = option(
        None, "TOML file with keys of several clients, as digests, with tenants and limits.", shown="none"
    )
    insecure: bool = option(False, "Serve an address that others reach without any key.")
    record: Path | None = option(
        None,
        "Record all that the scheduler is told and decides into this folder, for `pagewire replay`; prompts included.",
        shown="off",
    )
    metrics_prefix: str | None = option(
        None,
        "What the names of metrics begin with; vllm: makes dashboards for vLLM work.",
        shown="pagewire:",
        forward=True,
        pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "debug, info, warning or error.", forward=True
    )
    verbose: bool = option(False, "Show what the processes log.", flag=None)
    start_timeout_s: float = option(900.0, "Longest wait for the stack to become ready.", flag=None, gt=0)

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, value: str | None) -> str | None:
        if value:
            from services.scheduler.settings import checked_weights

            checked_weights(value)
        return value

    @field_validator("swap_space")
    @classmethod
    def _check_host_pool(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value and info.data.get("num_cpu_blocks"):
            raise ValueError(f"num-cpu-blocks gives {info.data['num_cpu_blocks']} blocks already: use one of the two")
        return value


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
