"""Runs a command that the kernel kills when the parent dies. Arguments: the parent's process id, then the command.

A program of its own because running Python between fork and exec (`preexec_fn`) may deadlock where threads exist; the
wish to die with the parent survives exec. Only the standard library, and little of it: this runs before every service.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel, then becomes the command. Outside Linux it only becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was asked for
            sys.exit("the parent process is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
