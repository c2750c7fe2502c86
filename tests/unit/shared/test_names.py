"""Keys share one slot per pool; the parameter table refuses what is no number."""

import math

import pytest

from shared.errors import ConfigError
from shared.keys import Keys
from shared.sampling import NUMERIC_PARAMS, SamplingParams
from shared.streams import entry_order


def test_all_keys_of_a_pool_share_one_hash_tag() -> None:
    keys = Keys("a")
    names = [keys.intake, keys.steps, keys.plans("w", 1), keys.fence, keys.limits, keys.request("r"), keys.snapshot]
    names.append(keys.cached_blocks("w", 1))
    assert all(name.startswith("pw:{a}:") for name in names) and len(set(names)) == len(names)


@pytest.mark.parametrize("pool", ["", "a}b", "a:b", "x" * 65, "ü"])
def test_a_pool_name_that_would_break_the_hash_tag_is_refused(pool: str) -> None:
    with pytest.raises(ConfigError):
        Keys(pool)


@pytest.mark.parametrize("spec", NUMERIC_PARAMS, ids=lambda s: s.name)
def test_no_parameter_accepts_nan_or_infinity(spec: object) -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert not spec.accepts(value)  # type: ignore[attr-defined]


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(max_tokens=1, seed=0, temperature=1e-9).is_greedy
    assert not SamplingParams(max_tokens=1, seed=0, temperature=1e-3).is_greedy


def test_entry_ids_are_ordered_as_numbers() -> None:
    assert sorted(["10-0", "9-11", "9-2"], key=entry_order) == ["9-2", "9-11", "10-0"]
