"""How long a forward pass takes, by what it computes."""

from dataclasses import dataclass, fields

from shared.errors import ConfigError


@dataclass(slots=True)
class StepLoad:
    """What one plan asks of a worker."""

    decode_rows: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    """Tokens whose KV is read: per decode row its context, per chunk token the context before it."""
    copied_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Linear in the load.

    The defaults are a 135M model on two shared cores without bf16 instructions: single steps of the worker's engine as
    `benchmarks/engine_step.py` drives it (1 to 64 decode rows, chunks of 30 to 512 tokens, contexts up to 1,900),
    the fastest of each size, and lines through them by eye, because other work ran on the machine. Least squares
    over 70 steps of a recorded `pagewire up` there gave 0.093, 0.0039 and 0.0024. Other hardware needs its own.

    Raises:
        ConfigError: a duration is negative, or a rate not positive.
    """

    base_s: float = 0.08
    """Of every pass."""
    decode_row_s: float = 0.0036
    """Per decode row."""
    prefill_token_s: float = 0.0027
    """Per prefill token."""
    context_token_s: float = 5e-7
    """Per token whose KV is read."""
    copy_bytes_per_s: float = 4e9
    """Of copies of blocks before the pass."""
    hop_s: float = 0.00016
    """From one process to another over Redis: half of the round trip that design.md measured."""
    leader_s: float = 0.0003
    """The leader's work per plan; its plans are made one after the other."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name} must not be negative, but is {value}")
        if not self.copy_bytes_per_s:
            raise ConfigError("copy_bytes_per_s must be more than 0")

    def step_s(self, load: StepLoad, block_bytes: int) -> float:
        """Seconds of one pass."""
        return (
            self.base_s
            + self.decode_row_s * load.decode_rows
            + self.prefill_token_s * load.prefill_tokens
            + self.context_token_s * load.context_tokens
            + load.copied_blocks * block_bytes / self.copy_bytes_per_s
        )

    @property
    def rates(self) -> tuple[float, float, float, float, float]:
        """As a worker measures them: prefill tokens/s, seconds of a decode step and of each row, copy bytes/s, seconds
        of prefill per token and context token."""
        prefill = _inverse(self.prefill_token_s)
        return prefill, self.base_s, self.decode_row_s, self.copy_bytes_per_s, self.context_token_s


def _inverse(duration_s: float) -> float:
    return 1 / duration_s if duration_s else 0.0
