"""The command line: ``python -m tessera`` and the script ``tessera``."""

import os
import sys
import sysconfig

from ._native import run_command_line


def main() -> None:
    """Runs the command line and exits with its status."""
    script = sys.argv[0]
    if not os.access(script, os.X_OK):
        script = os.path.join(sysconfig.get_path("scripts"), "tessera")
    status = run_command_line(["tessera", *sys.argv[1:]], script)
    # Threads of a GPU library may outlive the run, and the interpreter would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
