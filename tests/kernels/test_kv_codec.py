import pytest
import torch

from kernels.kv_codec.api import bytes_per_vector, decode, encode

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of a number that is stored in this type."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("head_dim", [1, 24, 63, 64, 111])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 40.0, 3e4])
def test_error_is_at_most_half_a_scale(size: float, head_dim: int, dtype: torch.dtype) -> None:
    kv = (random(5, 2, 3, head_dim) * size * random(5, 2, 3, 1, seed=1).exp()).clamp(-6e4, 6e4).to(dtype)
    codes, scales = encode(kv)
    assert (codes.shape, scales.shape) == (kv.shape, kv.shape[:-1])
    back = decode(codes, scales, dtype)
    assert back.dtype == dtype
    # in float32 a quotient near a half may round to the other side
    allowed = scales.float()[..., None] * (0.5 + 1e-4) + 4e-6 + kv.float().abs() * ROUNDING[dtype]
    assert bool(((back.float() - kv.float()).abs() <= allowed).all())
    # and the scale is no larger than it must be
    wanted = kv.float().abs().amax(-1) / 127
    torch.testing.assert_close(scales.float(), wanted, rtol=2.0**-11, atol=3e-8)


def test_an_outlier_spoils_only_its_own_vector() -> None:
    kv = random(4, 8)
    codes, scales = encode(kv)
    kv[2, 3] = 1e4
    other_codes, other_scales = encode(kv)
    keep = [0, 1, 3]
    assert codes[keep].equal(other_codes[keep]) and scales[keep].equal(other_scales[keep])
    assert not codes[2].equal(other_codes[2])


def test_zeros_stay_zeros_and_nan_stays_in_its_vector() -> None:
    kv = random(3, 8)
    kv[0] = 0
    kv[1, 5] = float("nan")
    back = decode(*encode(kv), torch.float32)
    assert not back[0].any()
    assert back[1].isnan().all() and not back[2].isnan().any()


def test_what_lies_beyond_float16_scales_is_clamped_not_infinite() -> None:
    kv = torch.full((1, 4), 1e9)
    assert bool(decode(*encode(kv), torch.float32).isfinite().all())


def test_ratio() -> None:
    codes, scales = encode(random(7, 64))
    assert codes.nbytes + scales.nbytes == 7 * bytes_per_vector(64)
    assert 2 * 64 / bytes_per_vector(64) == pytest.approx(1.94, abs=0.01)


def test_wrong_arguments_are_refused() -> None:
    codes, scales = encode(random(3, 8))
    for wrong in (torch.zeros(3, 8, dtype=torch.int32), torch.zeros(8), torch.zeros(3, 0)):
        with pytest.raises(ValueError, match="encode"):
            encode(wrong)
    for arguments in ((codes.int(), scales), (codes, scales.float()), (codes, scales[:2])):
        with pytest.raises(ValueError, match="decode"):
            decode(*arguments, torch.float32)
