"""What the generations of one gateway share."""

from concurrent.futures import Executor
from dataclasses import dataclass, field

from services.gateway.background import Background
from services.gateway.metrics import Metrics
from services.gateway.streams.custody import Custody
from services.gateway.streams.intake import Intake
from services.gateway.streams.open_streams import OpenStreams
from services.gateway.streams.reader import StepLogReader
from services.gateway.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """One of each."""

    reader: StepLogReader
    intake: Intake
    metrics: Metrics
    custody: Custody
    background: Background
    tokenizer: TextTokenizer
    text_pool: Executor
    """For text work that is too long for the event loop."""
    open_streams: OpenStreams = field(default_factory=OpenStreams)
