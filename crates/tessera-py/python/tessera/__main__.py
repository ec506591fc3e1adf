"""The command line: ``python -m tessera``, the script ``tessera``, and this file, which is how ranks are started."""

import importlib.util
import os
import sys

if not __package__:
    # Python ran this file by its path, so no package is loaded. This loads the package around the file, because a search by name
    # could find another one or none: the session may have extended its sys.path, and several versions may be installed. The folder
    # around the package comes last in the path, for numpy; Python itself has put the folder of the package there, which is no use.
    _folder = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if os.path.abspath(path) != _folder]
    if os.path.dirname(_folder) not in sys.path:
        sys.path.append(os.path.dirname(_folder))
    _spec = importlib.util.spec_from_file_location(
        "tessera", os.path.join(_folder, "__init__.py"), submodule_search_locations=[_folder]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules["tessera"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["tessera"])

from tessera._native import run_command_line


def main() -> None:
    """Runs the command line and exits with its status."""
    script = os.path.abspath(sys.argv[0])
    # Ranks are started as this program was.
    if os.path.isfile(script) and os.access(script, os.X_OK):
        executable, leading = script, []
    else:
        executable, leading = sys.executable, [os.path.abspath(__file__)]
    status = run_command_line(["tessera", *sys.argv[1:]], executable, leading)
    # Threads of a GPU library may outlive the run, and the interpreter would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
