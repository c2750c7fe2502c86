"""Models: configuration, weights and the forward pass."""

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.llama import ForwardInputs, LlamaModel
from services.gpu_worker.models.loading import load_config, load_model

__all__ = ["ForwardInputs", "LlamaModel", "ModelConfig", "load_config", "load_model"]
