"""A Transformers model's tensors as a GGUF file holds them, with the library of the format."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel

Kind = gguf.GGMLQuantizationType


def write_gguf(path: Path, model: PreTrainedModel, architecture: str, kind_of: Callable[[str], Kind]) -> None:
    """Write the weights of `model`; `kind_of` names the type of each matrix by its name in the file.

    As converters do: the two dimensions of a rotation side by side in Llama's heads, Gemma's norms as they are applied.
    """
    config = model.config
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for full_name, parameter in model.state_dict().items():
        if full_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(full_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, full_name
        numbers = parameter.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if architecture == "llama" and (count := heads.get(full_name.split(".")[-2])):
            numbers = numbers.reshape(count, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        if architecture.startswith("gemma") and "norm" in name:
            numbers = numbers + 1
        if numbers.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
        else:
            kind = kind_of(name)
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(numbers), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_rounded(model: PreTrainedModel, kind_of: Callable[[str], Kind], architecture: str) -> None:
    """Give `model` the numbers that such a file holds."""
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for full_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            kind = kind_of(names.get_name(full_name, try_suffixes=(".weight",)) or "")
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(parameter.new_tensor(rounded))
