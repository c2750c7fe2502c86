"""The C++ library: threads, dispatch levels, and what happens without it."""

import ctypes
import dataclasses
import platform
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from kernels.native import build, levels, library
from kernels.native.library import Library, NativeKernelsMissing


def count_chunks(native: Library, num_chunks: int, work: int = 0) -> tuple[np.ndarray, np.ndarray]:
    counts, threads = np.zeros(num_chunks, np.int32), np.zeros(num_chunks, np.uint64)
    count = native.function("pw_count_chunks", ctypes.c_int, ctypes.c_int, library.Pointer, library.Pointer)
    count(num_chunks, work, counts.ctypes.data, threads.ctypes.data)
    return counts, threads


def test_this_machine_has_a_level_if_it_can_compile_one() -> None:
    if levels.usable_levels() and build.find_compiler():
        assert library.built_levels(), "python -m kernels.native.build"


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_every_chunk_runs_once(native: Library, num_threads: int) -> None:
    native.set_num_threads(num_threads)
    assert native.num_threads == num_threads
    for num_chunks in [0, 1, 2, 3, 63, 1000] * 30:
        counts, _ = count_chunks(native, num_chunks)
        assert (counts == 1).all()


def test_threads_share_the_chunks(native: Library) -> None:
    """The caller and the other thread; a machine that is busy may leave all chunks of one call to one of them."""
    native.set_num_threads(2)
    shares = [np.unique(count_chunks(native, 64, work=200_000)[1]) for _ in range(5)]
    assert max(map(len, shares)) == 2


def test_two_callers_do_not_disturb_each_other(native: Library) -> None:
    results: list[bool] = []

    def call() -> None:
        results.extend((count_chunks(native, 40, work=100)[0] == 1).all() for _ in range(200))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 600 and all(results)


def test_a_level_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels for level 'mmx'"):
        library.open_library("mmx")


def test_innermost_choice_wins() -> None:
    with library.using(None):
        assert library.current() is None and library.level_name() == "torch"
        for level in library.built_levels():
            with library.using(level.name) as chosen:
                assert chosen is library.current() and library.level_name() == level.name
        assert library.current() is None


def test_a_machine_without_kernels_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "built_levels", tuple)
    library._best.cache_clear()
    try:
        with pytest.warns(NativeKernelsMissing, match=r"python -m kernels\.native\.build"):
            assert library.current() is None
        assert library.current() is None
    finally:
        library._best.cache_clear()


def test_a_library_that_cannot_be_loaded_is_told_and_the_next_level_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = library.built_levels()
    torn = dataclasses.replace(whole[0], name="torn")
    (tmp_path / "torn.so").write_text("no library")
    path = build.library_path
    monkeypatch.setattr(library, "library_path", lambda one: tmp_path / "torn.so" if one is torn else path(one))
    for found in ((torn, whole[0]), (torn,)):
        monkeypatch.setattr(library, "built_levels", lambda found=found: found)
        library._best.cache_clear()
        try:
            with pytest.warns(NativeKernelsMissing) as told:
                chosen = library.current()
        finally:
            library._best.cache_clear()
        assert "torn cannot be loaded" in str(told[0].message)
        assert (chosen.level if chosen else None) == (found[1] if len(found) > 1 else None)


def run_python(code: str) -> str:
    """What a new process prints; it must end by itself."""
    command = [sys.executable, "-W", "always", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


COUNT = """
import os, resource, ctypes, numpy as np
from kernels.native import library
native = library.current()
def count():
    counts, threads = np.zeros(64, np.int32), np.zeros(64, np.uint64)
    run = native.function("pw_count_chunks", ctypes.c_int, ctypes.c_int, library.Pointer, library.Pointer)
    run(64, 200_000, counts.ctypes.data, threads.ctypes.data)
    assert (counts == 1).all()
    return len(np.unique(threads))
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    """It inherits none, and would wait for them."""
    code = """
    native.set_num_threads(2)
    assert max(count() for _ in range(20)) == 2
    child = os.fork()
    shares = max(count() for _ in range(20))
    if child == 0:
        os._exit(0 if shares == 2 and native.num_threads == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and shares == 2
    """
    run_python(COUNT + textwrap.dedent(code))


def test_fewer_threads_compute_where_the_system_gives_no_more() -> None:
    code = """
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    resource.setrlimit(resource.RLIMIT_AS, (used + 5 * stack, used + 5 * stack))
    native.set_num_threads(1000)
    assert 1 <= native.num_threads < 1000
    count()
    print(native.num_threads)
    """
    assert "of 1000 threads" in run_python(COUNT + textwrap.dedent(code))


def test_only_levels_of_the_cpu_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "_cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "sse4_2"}))
    assert [level.name for level in levels.usable_levels()] == ["avx2"]
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert [level.name for level in levels.usable_levels()] == ["neon"]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert levels.usable_levels() == ()


def test_changed_sources_need_a_new_library(monkeypatch: pytest.MonkeyPatch) -> None:
    level = levels.LEVELS[0]
    before = build.library_path(level)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    build.digest.cache_clear()
    assert build.library_path(level) != before
    monkeypatch.undo()
    build.digest.cache_clear()
    assert build.library_path(level) == before


def test_a_level_with_other_flags_needs_a_new_library() -> None:
    level = levels.LEVELS[0]
    other = dataclasses.replace(level, compiler_flags=(*level.compiler_flags, "-mtune=native"))
    assert build.library_path(other) != build.library_path(level)


@pytest.fixture
def build_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one source, which is to be written: its path."""
    source = tmp_path / "one.cpp"
    monkeypatch.setattr(build, "sources", lambda: [source])
    monkeypatch.setattr(build, "headers", list)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "library_path", lambda level: tmp_path / f"{level.name}.so")
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "objects")
    return source


@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_a_level_that_does_not_compile_costs_no_other(
    build_elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = levels.machine_levels()[-1]
    bad = dataclasses.replace(good, name="bad", compiler_flags=(*good.compiler_flags, "-DBAD"))
    build_elsewhere.write_text("#ifdef BAD\n#error this level is broken\n#endif\n")
    assert build.build(build.find_compiler() or "", (bad, good), 2) == [good]
    assert build.library_path(good).exists() and not build.library_path(bad).exists()
    message = capsys.readouterr().err
    assert "warning: no kernels for bad" in message and "this level is broken" in message


@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_a_source_that_does_not_compile_fails_the_build(build_elsewhere: Path) -> None:
    build_elsewhere.write_text("int main( {")
    with pytest.raises(build.BuildFailed, match=r"one\.cpp"):
        build.build(build.find_compiler() or "", levels.machine_levels()[:1], 1)


def test_building_needs_no_torch() -> None:
    code = "import sys; import kernels.native.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([shutil.which("python") or sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_compiler_the_build_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.main([]) == 0
    assert "no C++ compiler" in capsys.readouterr().err
