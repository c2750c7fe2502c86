"""Runs a command that dies with its parent: `python leash.py PARENT_PID COMMAND…`.

On Linux the kernel is asked to send SIGKILL when the thread that spawned this process ends, and the request survives
`exec`. The parent may have died before the request was made: then it is no longer our parent, and we leave at once.
Stands alone (standard library only, run by path) so that it starts in milliseconds. It runs as its own program and not
as a `preexec_fn` because code between fork and exec of a threaded parent is not safe.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9
ORPHANED = 125
CANNOT_EXEC = 127


def die_with_parent(parent: int) -> None:
    """From here on the death of `parent` kills this process (Linux; elsewhere only the check that it still lives).

    Raises:
        OSError: the kernel refused the request.
    """
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(ORPHANED)


def main(argv: list[str]) -> None:
    """Put this process on the leash of `argv[0]`, then become the command `argv[1:]`."""
    die_with_parent(int(argv[0]))
    command = argv[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_EXEC)


if __name__ == "__main__":
    main(sys.argv[1:])
