"""`python -m services.gpu_worker.weights pull NAME --home HOME [--gguf]`: JSON lines of progress on stdout, errors on
stderr.

The last line has the stage `ready` and the folder as its detail. Exit code 2: the model cannot be had.
"""

import argparse
import os
import sys
from pathlib import Path

# Stdout and stderr belong to the caller, who shows progress; the libraries read this when they are imported.
os.environ["TQDM_DISABLE"] = "1"

from services.gpu_worker.weights.progress import print_json_line
from services.gpu_worker.weights.pull import pull
from shared.errors import ConfigError
from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL


def main(arguments: list[str]) -> int:
    """Carry out one command line; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.gpu_worker.weights")
    command = parser.add_subparsers(required=True).add_parser("pull")
    command.add_argument("name", nargs="?", default=DEFAULT_MODEL)
    command.add_argument("--home", type=Path, default=DEFAULT_HOME)
    command.add_argument("--gguf", action="store_true", help="also the GGUF file, if an older pull did not keep it")
    options = parser.parse_args(arguments)
    try:
        pull(options.name, options.home, print_json_line, with_gguf=options.gguf)
    except (ConfigError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
