"""What an engine is built for."""

from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the persistent batch."""

    max_num_seqs: int
    """Rows of the batch."""
    max_model_len: int
    """Most tokens of a row, prompt and output together."""
    max_num_batched_tokens: int = 512
    """Most tokens of a step, for warm-up; a larger plan still runs."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
