"""Time of a call of two GPUs with one all-reduce: as threads with arrays on the GPUs or on the host, and as processes.

    python crates/tessera-py/benchmarks/gpu_threads.py
"""

import statistics
import time

import numpy as np
import torch
from tessera import dist, graph, op
from tessera import runtime as rt

# Tokens, their width, the inner width of the layer, and calls.
SIZES = [(64, 256, 512, 300), (4096, 4096, 4096, 30)]


def plan_layer(tokens: int, width: int, inner: int) -> graph.Plan:
    """Plans a layer whose ranks add their terms in an all-reduce."""
    mesh = dist.Mesh(axes=["tp"], shape={"tp": 2})
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 64 for shape in ((inner, width), (width, inner))]
    wide = dist.distribute(weights[0], mesh, dist.ShardSpec(("col",), ("tp",)))
    narrow = dist.distribute(weights[1], mesh, dist.ShardSpec(("row",), ("tp",)))
    opened, closed = op.linear(activation="silu"), op.linear()
    spec = graph.ArraySpec((tokens, width), mesh, dims=("token", "hidden"))
    return graph.trace(lambda x: closed(opened(x, wide), narrow), spec).compile()


def main() -> None:
    for tokens, width, inner, calls in SIZES:
        plan = plan_layer(tokens, width, inner)
        x = np.random.default_rng(1).standard_normal((tokens, width), dtype=np.float32)
        on_gpus = dist.distribute(torch.from_numpy(x).cuda(0), plan.mesh, dist.ReplicateSpec())
        with (
            rt.open_session(plan, ranks="threads", device="gpu") as threads,
            rt.open_session(plan, ranks="processes", device="gpu") as processes,
        ):
            kinds = {"threads, on GPUs": (threads, on_gpus), "threads, on host": (threads, x), "processes": (processes, x)}
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(calls):
                for kind, (run, value) in kinds.items():
                    begun = time.perf_counter()
                    run(value)
                    times[kind].append((time.perf_counter() - begun) * 1e6)
        medians = {kind: f"{statistics.median(of_kind):.0f} µs" for kind, of_kind in times.items()}
        print(f"{tokens} tokens of {width}, inner {inner}: {medians}")


if __name__ == "__main__":
    main()
