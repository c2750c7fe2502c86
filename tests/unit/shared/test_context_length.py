import pytest

from shared.context_length import context_length

LONGROPE = {"short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 77}, 77),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 99}}, 99),
        ({"text_config": None, "max_position_embeddings": 12}, 12),
        ({"max_position_embeddings": None, "seq_length": 5}, 5),
        ({"max_position_embeddings": 0}, None),
        ({}, None),
    ],
)
def test_names_of_the_longest_row(config: dict, length: int | None) -> None:
    assert context_length(config) == length


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"type": "su", **LONGROPE}},
        {"rope_scaling": {"type": "yarn", **LONGROPE}},
        {"rope_parameters": {"rope_type": "longrope", **LONGROPE}},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONGROPE}},
    ],
)
def test_longrope_ends_at_the_original_length(scaling: dict) -> None:
    config = {"model_type": "phi3", "max_position_embeddings": 512, "original_max_position_embeddings": 64, **scaling}
    assert context_length(config) == 64


def test_yarn_of_others_is_not_longrope() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert context_length({"model_type": "qwen3", "max_position_embeddings": 256, "rope_scaling": scaling}) == 256
