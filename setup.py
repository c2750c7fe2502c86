"""Compiles the C++ kernels while the package is installed; without a compiler the installation goes on without them."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernels.native import build as kernels


class BuildWithKernels(build_py):
    """Compiles in place; then the libraries are package data like any other."""

    def run(self) -> None:
        if kernels.main([]):
            print("the C++ kernels were not built: workers will compute with torch alone", file=sys.stderr)
        super().run()


class BinaryDistribution(Distribution):
    """A wheel holds code for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=BinaryDistribution)
