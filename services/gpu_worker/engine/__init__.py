"""The engine: plans in, tokens out."""

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
