"""What the compiler says of GPUs that are not there."""

import pytest
from triton.backends.compiler import GPUTarget

from kernels.launch import compiles_fp8


@pytest.mark.parametrize(
    ("target", "has_fp8"),
    [
        (GPUTarget("cuda", 80, 32), False),
        (GPUTarget("cuda", 86, 32), False),
        (GPUTarget("cuda", 89, 32), True),
        (GPUTarget("cuda", 90, 32), True),
        (GPUTarget("cuda", 100, 32), True),
        (GPUTarget("hip", "gfx942", 64), True),
    ],
    ids=str,
)
def test_which_gpus_have_fp8(target: GPUTarget, has_fp8: bool) -> None:
    """`make kernels-report` compiles the kernels for some of them: `-` stands where there is none."""
    assert compiles_fp8(target) is has_fp8
