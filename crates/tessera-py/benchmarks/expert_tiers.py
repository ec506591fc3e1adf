"""Experts in two tiers of memory: what ranks hold and how long a call takes with and without them, and the stalls of a routing by window.

    python crates/tessera-py/benchmarks/expert_tiers.py
"""

import gc
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tessera import dist, graph, op
from tessera import runtime as rt

EXPERTS = 64
TOKENS = 8
LAYERS = 4
INNER = 2048
RANKS = 2
CALLS = 60


def record_routing(seed: int) -> NDArray[np.int64]:
    """Returns the expert of each token by call and layer.

    Popularity falls as 1 / rank, and every second call two neighbours of the ranking change places.
    """
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, EXPERTS + 1)
    rankings = [rng.permutation(EXPERTS) for _ in range(LAYERS)]
    calls: list[list[NDArray[np.int64]]] = []
    for call in range(CALLS):
        for ranking in rankings:
            if call % 2:
                at = int(rng.integers(EXPERTS - 1))
                ranking[[at, at + 1]] = ranking[[at + 1, at]]
        chosen = [rng.choice(EXPERTS, TOKENS, p=popularity / popularity.sum()) for _ in rankings]
        calls.append([ranking[rank] for ranking, rank in zip(rankings, chosen, strict=True)])
    return np.array(calls)


def make_plan(resident: int | None, window: int = 2) -> graph.Plan:
    """Plans the layers. Columns 64 l to 64 l + 63 of a token state its expert in layer l."""
    mesh = dist.Mesh(axes=["ep"], shape={"ep": RANKS})
    width = EXPERTS * LAYERS
    by_expert = dist.ShardSpec(partition=("experts",), mesh_axes=("ep",))
    rng = np.random.default_rng(0)
    layers = []
    for layer in range(LAYERS):
        router = np.eye(width, dtype=np.float32)[EXPERTS * layer : EXPERTS * (layer + 1)]
        shapes = ((INNER, width), (INNER, width), (width, INNER))
        banks = [rng.standard_normal((EXPERTS, *shape), dtype=np.float32) for shape in shapes]
        moe = op.moe(EXPERTS, 1, capacity_factor=float(EXPERTS))
        if resident is not None:
            rt.register_prefetch(moe, window=window, resident=resident)
        arrays = [dist.distribute(bank, mesh, by_expert) for bank in banks]
        layers.append((moe, dist.distribute(router, mesh, dist.ReplicateSpec()), arrays))

    def stack(x: graph.Value) -> graph.Value:
        y = x
        for moe, router, banks in layers:
            y = y + 1e-9 * moe(x, router, *banks)
        return y

    return graph.trace(stack, graph.ArraySpec((TOKENS, width), mesh, dims=("token", "hidden"))).compile()


def read_memory(pid: int) -> dict[str, int]:
    """Returns the resident memory of a process in MiB: now, at most, its own now, and of mapped files now."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = ("VmRSS:", "VmHWM:", "RssAnon:", "RssFile:")
    return {line[0].rstrip(":"): int(line[1]) // 1024 for line in lines if line and line[0] in names}


def measure(plan: graph.Plan, routing: NDArray[np.int64]) -> None:
    """Runs the routing and prints what rank 1 holds, the time of a call, and the counts of all ranks."""
    times = []
    with rt.open_session(plan, ranks="processes", oversubscribe=True) as run:
        for chosen in routing:
            x = np.concatenate([np.eye(EXPERTS, dtype=np.float32)[layer] for layer in chosen], axis=1)
            begun = time.perf_counter()
            run(x)
            times.append((time.perf_counter() - begun) * 1e3)
        memory = read_memory(run.process_ids[1])
        report = run.prefetch_report()
    layers = report.layers
    used_ahead = sum(layer.prefetches_used for layer in layers)
    waited = sum(layer.waited_ns for layer in layers) / 1e6
    moved = sum(layer.moved_bytes for layer in layers) / 2**20
    print(f"  rank 1 in MiB: {memory}, plan: {plan.memory()[1][0] >> 20} of weights")
    print(f"  call: {statistics.median(times):.1f} ms, all calls: {sum(times):.0f} ms")
    print(f"  {report.hits} hits, {report.stalls} stalls, {used_ahead} of {sum(x.prefetches for x in layers)} prefetches used")
    print(f"  {moved:.0f} MiB moved, {waited:.0f} ms waited")


def main() -> None:
    routing = record_routing(3)
    print("one tier")
    measure(make_plan(None), routing)
    for resident in (4, 8):
        for window in (1, 2, 3):
            gc.collect()
            print(f"resident = {resident}, window = {window}")
            measure(make_plan(resident, window), routing)


if __name__ == "__main__":
    main()
