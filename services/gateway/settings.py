"""The gateway's settings: environment variables `PAGEWIRE_<NAME>`, read once in `__main__` and passed down."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Names = Annotated[tuple[str, ...], NoDecode]
"""Comma-separated in the environment."""


class Settings(BaseSettings):
    """Times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="PAGEWIRE_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    reuse_port: bool = False
    """Share the port with other gateways on this machine: the kernel divides the connections among them."""
    private_port: int = Field(0, ge=0, le=65535)
    """One more port, of this gateway alone; 0: none."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    pool: str = "default"
    model: Path
    """Folder with tokenizer, chat template and configuration."""
    served_model_name: Names = ()
    """Names that clients may use; the folder's name if none is given. The first one is told in answers."""
    max_model_len: int = Field(0, ge=0)
    """Upper bound of the context in tokens; 0 = what the pool says."""
    name: str = "gateway-0"
    instance: str = ""
    """Unique per process start; drawn if empty."""
    cors_origins: Names = ()
    tenant_header: str = Field("", pattern=r"^[A-Za-z0-9-]*$")
    """Header in which a trusted proxy names the tenant of a request, replacing what the client sent; empty: none does.
    Tenants share no cached prompts, and the policy `fair` divides the pool among them."""
    api_key: SecretStr = SecretStr("")
    """A key that all clients must send; they share the default tenant."""
    api_key_file: Path | None = None
    """Keys of several clients, as digests, each with a tenant and limits: see `access.py`."""
    insecure: bool = False
    """Whether an address that others reach is served without any key."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    max_bodies_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Of all bodies together that are read, or were and are not queued yet."""
    metrics_prefix: str = Field("pagewire:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    resume_window_s: float = Field(60.0, ge=1, le=3600)
    """A request goes on this long without a gateway, or without its client if that asked for it."""
    text_threads: int = Field(2, ge=1)
    """Threads that parse, render and tokenize."""
    ping_interval_s: float = Field(10.0, gt=0)
    """A waiting stream sends a comment this often, so that proxies keep it open."""
    stream_interval_s: float = Field(0.025, ge=0)
    """While steps come faster than this gateway reads them, a stream is written at most this often."""
    write_timeout_s: float = Field(60.0, gt=0)
    """A client that takes next to nothing for so long, while its answer waits for it, has left."""
    admission_grace_s: float = Field(10.0, ge=0)
    """Requests are still accepted this long after the pool was last seen ready."""
    outage_limit_s: float = Field(60.0, gt=0)
    """A stream ends with an error when Redis, leader or workers have been away this long."""
    drain_delay_s: float = Field(0.0, ge=0)
    """Between `not ready` and the end of accepting connections, so that load balancers notice."""
    shutdown_grace_s: float = Field(30.0, ge=0)
    """Streams may finish this long after a SIGTERM."""
    trace_exporter: Literal["none", "console", "otlp"] = "none"
    fault_dir: str = ""
    """Of fault tests only: see `shared/fault_points.py`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("served_model_name", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; never empty."""
        return self.served_model_name or (self.model.name,)
