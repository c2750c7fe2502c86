"""Compiles the C++ kernels, `kernels/*/*.cpp`, once per dispatch level, into one shared library each.

    python -m kernels.native.build [--compiler clang++] [--jobs 2] [--level avx2 …]

Only what changed is compiled. Without a compiler, or at levels that it does not know, nothing is built: such a machine
computes with the torch references, and says so when a worker starts. Runs without torch, so that setup.py can call it.
"""

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kernels.native.levels import Level, machine_levels

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(__file__).resolve().parent / "lib"
OBJECTS = LIBRARIES / "objects"
COMPILERS = ("g++", "clang++", "c++")
NUMERICS = ("-ffp-contract=off", "-fno-math-errno")
# GCC 12 says "maybe uninitialized" of its own AVX-512 headers, thousands of times (its bug 105593).
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", *WARNINGS, *NUMERICS)


class BuildFailed(Exception):
    """The compiler refused a source."""


def sources() -> list[Path]:
    """Every C++ file, sorted."""
    return sorted((ROOT / "kernels").glob("*/*.cpp"))


def headers() -> list[Path]:
    """Every header, sorted."""
    return sorted((ROOT / "kernels").glob("*/*.h"))


@functools.cache
def digest(level: Level) -> str:
    """Of all sources and flags: what a library must have been built from."""
    return _digest((*FLAGS, *level.compiler_flags), *sources(), *headers())


def library_path(level: Level) -> Path:
    """Where the library of `level` lies. Its name holds the digest, so a library from other sources or with other flags
    is never loaded."""
    return LIBRARIES / f"{level.name}-{digest(level)}.so"


def build(compiler: str, levels: Sequence[Level], jobs: int) -> list[Level]:
    """Compile and link; answers the levels that have a library now. A level that fails is said, and costs no other.

    Raises:
        BuildFailed: no level compiles, although the compiler knows the flags of some.
    """
    OBJECTS.mkdir(parents=True, exist_ok=True)
    known = [level for level in levels if library_path(level).exists() or _knows(compiler, level)]
    missing = [level for level in known if not library_path(level).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        made = {level: [pool.submit(_compile, compiler, level, source) for source in sources()] for level in missing}
    failed = {level: error for level in missing if (error := _link(compiler, level, made[level])) is not None}
    for level, error in failed.items():
        print(f"warning: no kernels for {level.name}, which does not compile:\n{error}", file=sys.stderr)
    if failed and len(failed) == len(known):
        raise failed[known[0]]
    _forget_others([one.result() for objects in made.values() for one in objects if one.exception() is None])
    return [level for level in known if level not in failed]


def find_compiler() -> str | None:
    """The first C++ compiler on PATH."""
    return next((name for name in COMPILERS if shutil.which(name)), None)


def _compile(compiler: str, level: Level, source: Path) -> Path:
    digest = _digest((compiler, *FLAGS, *level.compiler_flags), source, *headers())
    made = OBJECTS / f"{level.name}-{source.stem}-{digest}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}")
        _run(compiler, *FLAGS, *level.compiler_flags, f"-I{ROOT}", "-c", str(source), "-o", str(partial))
        partial.replace(made)
    return made


def _link(compiler: str, level: Level, objects: Sequence[Future[Path]]) -> BuildFailed | None:
    """The level's library from its objects, or why there is none."""
    partial = library_path(level).with_suffix(f".{os.getpid()}")
    try:
        _run(compiler, "-shared", "-pthread", *(str(one.result()) for one in objects), "-o", str(partial))
    except BuildFailed as error:
        return error
    partial.replace(library_path(level))
    return None


def _knows(compiler: str, level: Level) -> bool:
    """Whether the compiler takes the level's flags: only then is a failure a fault of the sources."""
    command = (compiler, *level.compiler_flags, "-fsyntax-only", "-x", "c++", os.devnull)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def _digest(words: Sequence[str], *files: Path) -> str:
    content = hashlib.sha256(repr(words).encode())
    for file in files:
        content.update(repr((file.parent.name, file.name)).encode())
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _forget_others(objects: Sequence[Path]) -> None:
    """Delete what older sources made, if this run made anything."""
    if objects:
        built = {library_path(level) for level in machine_levels()}
        for old in {*OBJECTS.glob("*.o"), *LIBRARIES.glob("*.so")} - built - set(objects):
            old.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build for this machine's architecture; answers the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=find_compiler())
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--level", nargs="+", help="only these; by default all of this architecture")
    args = parser.parse_args(arguments)
    if args.compiler is None:
        print(f"no C++ compiler ({', '.join(COMPILERS)}): workers will compute with torch alone", file=sys.stderr)
        return 0
    try:
        wanted = [level for level in machine_levels() if args.level is None or level.name in args.level]
        built = build(args.compiler, wanted, args.jobs)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(f"kernels for {', '.join(level.name for level in built) or 'no level'} in {LIBRARIES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
