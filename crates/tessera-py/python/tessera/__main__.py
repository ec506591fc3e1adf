"""The command line: ``python -m tessera`` and the script ``tessera``."""

import os
import sys

from ._native import run_command_line


def main() -> None:
    """Runs the command line and exits with its status."""
    script = os.path.abspath(sys.argv[0])
    # Ranks are started as this program was: the script may lie where no search path leads, and may not be installed.
    if os.path.isfile(script) and os.access(script, os.X_OK):
        executable, leading = script, []
    else:
        executable, leading = sys.executable, ["-m", "tessera"]
    status = run_command_line(["tessera", *sys.argv[1:]], executable, leading)
    # Threads of a GPU library may outlive the run, and the interpreter would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
