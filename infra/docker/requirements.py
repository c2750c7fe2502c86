"""Prints what pip must install for the named extras of pyproject.toml, so that an image gets one service's packages.

Reading them here keeps that layer of the image unchanged while only code changes: requirements.py gateway
"""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    print("\n".join([*project["dependencies"], *(line for extra in extras for line in optional[extra])]))


if __name__ == "__main__":
    main(sys.argv[1:])
