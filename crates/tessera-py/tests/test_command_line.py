"""The command line starts processes of its own, however it was started itself."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tessera

PROJECT = Path(__file__).resolve().parents[3]
SCRIPT = Path(sysconfig.get_path("scripts"), "tessera")


def run_command(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command that must succeed, and returns what it prints."""
    ended = subprocess.run(
        command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("program", [[str(SCRIPT)], [sys.executable, "-m", "tessera"]])
def test_a_drill_starts_its_launcher_and_its_ranks(program: list[str]) -> None:
    # The first drill has no launcher, and the second one kills a launcher of its own.
    shown = run_command([*program, "drill", "wrong-secret", "orphaned-worker", "conditional-collective"])
    assert "3 drills in" in shown and "all ok" in shown


SESSION = """
import sys
sys.path[:0] = {paths}
import numpy as np
from tessera import dist, graph, op, runtime as rt

mesh = dist.Mesh(axes=["tp"], shape={{"tp": 2}})
columns = dist.ShardSpec(partition=("col",), mesh_axes=("tp",))
layer, weight = op.linear(), dist.distribute(np.ones((4, 4), np.float32), mesh, columns)
x = graph.ArraySpec((2, 4), mesh, dims=("token", "hidden"))
with rt.open_session(graph.trace(lambda x: layer(x, weight), x).compile(), ranks="processes") as run:
    print(run(np.ones((2, 4), np.float32)).gather().sum())
"""


def test_a_package_that_the_program_itself_found_starts_ranks(tmp_path: Path) -> None:
    # The interpreter below that of this environment has neither numpy nor this package. Where a rank starts, another one lies.
    (tmp_path / "tessera.py").write_text("raise ImportError('not this one')\n")
    packages = sysconfig.get_path("platlib")
    python = str(getattr(sys, "_base_executable", sys.executable))
    ended = subprocess.run(
        [python, "-I", "-c", SESSION.format(paths=[packages])], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.stdout == "32.0\n", ended.stdout + ended.stderr


def test_a_package_without_a_script_starts_ranks(tmp_path: Path) -> None:
    # As `pip install --target` leaves it, whose scripts lie beside the package.
    package = Path(tessera.__file__).parent
    shutil.copytree(package, tmp_path / "packages" / "tessera")
    python = str(getattr(sys, "_base_executable", sys.executable))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    out = tmp_path / "out"
    run_command(
        [python, "-m", "tessera", "stream", "models/demo", "--mesh", "tp=2", "--oversubscribe"]
        + ["--chunks", "2", "--out", str(out)],
        environment,
    )
    assert (out / "clip.png").exists()
