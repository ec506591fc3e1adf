"""What the package itself costs: import, an empty call, an array of 1 GiB, and calls of a small plan.

    python crates/tessera-py/benchmarks/costs.py
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from tessera import dist, graph, op
from tessera import runtime as rt


def measure(work: Callable[[], object], repeats: int, runs: int = 9) -> float:
    """Returns the median time of one repetition, in microseconds."""
    times: list[float] = []
    for _ in range(runs):
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - begun) / repeats * 1e6)
    return statistics.median(times)


def measure_import() -> float:
    """Returns the median time of the import in a fresh interpreter, in milliseconds, beside an empty program."""

    def run(program: str) -> float:
        return measure(lambda: subprocess.run([sys.executable, "-c", program], check=True), 1) / 1e3

    return run("import tessera") - run("pass")


def main() -> None:
    mesh = dist.Mesh(axes=["tp"], shape={"tp": 2})
    by_row = dist.ShardSpec(partition=("row",), mesh_axes=("tp",))
    array = np.zeros((16384, 16384), np.float32)
    print(f"import: {measure_import():.0f} ms")
    print(f"empty call, len(mesh): {measure(lambda: len(mesh), 100_000):.3f} us")
    print(f"distribute 1 GiB: {measure(lambda: dist.distribute(array, mesh, by_row), 1000):.1f} us")
    w = dist.distribute(np.zeros((8, 8), np.float32), mesh, by_row)
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((8, 8), mesh, dims=("token", "hidden"))).compile()
    x = np.zeros((8, 8), np.float32)
    for ranks in ("threads", "processes"):
        for trace in (False, True):
            with rt.open_session(plan, ranks=ranks, oversubscribe=True, trace=trace) as run:
                label = f"{ranks}, traced" if trace else ranks
                print(f"call of 2 ranks with one all-reduce, {label}: {measure(lambda: run(x), 100):.0f} us")


if __name__ == "__main__":
    main()
