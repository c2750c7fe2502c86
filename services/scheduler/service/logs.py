"""Structured one-line logs: an event name and fields, never the text or the tokens of a request."""

import logging
import sys
from typing import Any

import msgspec

_logger = logging.getLogger("pagewire.scheduler")


class _OneLine(logging.Formatter):
    """`{"time": …, "level": …, "service": "scheduler", "event": …, …}` per record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": "scheduler",
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(level: str) -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    _logger.handlers = [handler]
    _logger.setLevel(level.upper())
    _logger.propagate = False


def info(event: str, /, **fields: Any) -> None:
    _logger.info(event, extra={"fields": fields})


def warning(event: str, /, **fields: Any) -> None:
    _logger.warning(event, extra={"fields": fields})
