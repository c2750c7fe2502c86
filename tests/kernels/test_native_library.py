"""The C++ library: threads, dispatch levels, and what happens without it."""

import ctypes
import platform
import shutil
import subprocess
import sys
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


@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_a_source_that_does_not_compile_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(build, "sources", lambda: [broken])
    monkeypatch.setattr(build, "library_path", lambda level: tmp_path / level.name)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "objects")
    with pytest.raises(build.BuildFailed, match=r"broken\.cpp"):
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
