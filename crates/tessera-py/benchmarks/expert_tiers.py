"""Experts in two tiers of memory: what ranks hold and how long a call takes with and without them, and the stalls of a routing by window.

    python crates/tessera-py/benchmarks/expert_tiers.py
    python crates/tessera-py/benchmarks/expert_tiers.py --device gpu --ranks 1 --inner 8192
"""

import argparse
import functools
import gc
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tessera import dist, graph, op
from tessera import runtime as rt

EXPERTS = 64
TOKENS = 8
LAYERS = 4
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


@functools.cache
def draw_banks(inner: int) -> list[list[NDArray[np.float32]]]:
    """Returns the gate, up and down matrices of all experts, by layer."""
    width = EXPERTS * LAYERS
    rng = np.random.default_rng(0)
    shapes = ((inner, width), (inner, width), (width, inner))
    return [[rng.standard_normal((EXPERTS, *shape), dtype=np.float32) for shape in shapes] for _ in range(LAYERS)]


def make_plan(setting: argparse.Namespace, resident: int | None, window: int = 2) -> graph.Plan:
    """Plans the layers. Columns 64 l to 64 l + 63 of a token state its expert in layer l."""
    mesh = dist.Mesh(axes=["ep"], shape={"ep": setting.ranks})
    width = EXPERTS * LAYERS
    by_expert = dist.ShardSpec(partition=("experts",), mesh_axes=("ep",))
    layers = []
    for layer, banks in enumerate(draw_banks(setting.inner)):
        router = np.eye(width, dtype=np.float32)[EXPERTS * layer : EXPERTS * (layer + 1)]
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


def read_gpu_memory() -> str:
    """Returns what the driver says is in use on each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return ", ".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")).strip(", ")


def print_transfers(report: rt.PrefetchReport, inner: int) -> None:
    """Prints the rate of the copies of rank 0. Matrices that one kernel copies share its begin and its end."""
    matrix = inner * EXPERTS * LAYERS * 4
    for kind in ("fetch", "prefetch"):
        bytes_by_span: dict[tuple[int, int], int] = {}
        for event in report.events:
            if event.rank == 0 and event.call > 1 and event.op.split()[0] == kind:
                span = (event.start_ns, event.end_ns)
                bytes_by_span[span] = bytes_by_span.get(span, 0) + matrix
        if bytes_by_span:
            rates = [moved / (end - start) for (start, end), moved in bytes_by_span.items()]
            moved = sum(bytes_by_span.values()) / 2**20
            print(f"  {kind}: {len(rates)} launches, {moved:.0f} MiB, {statistics.median(rates):.1f} GB/s in the median")


def measure(setting: argparse.Namespace, plan: graph.Plan, routing: NDArray[np.int64]) -> None:
    """Runs the routing and prints what the last rank holds, the time of a call, and the counts of all ranks."""
    times = []
    with rt.open_session(plan, ranks="processes", device=setting.device, oversubscribe=True) as run:
        for chosen in routing:
            x = np.concatenate([np.eye(EXPERTS, dtype=np.float32)[layer] for layer in chosen], axis=1)
            begun = time.perf_counter()
            run(x)
            times.append((time.perf_counter() - begun) * 1e3)
        memory = read_memory(run.process_ids[-1])
        if setting.device == "gpu":
            print(f"  GPU memory in use: {read_gpu_memory()}")
        report = run.prefetch_report()
    layers = report.layers
    used_ahead = sum(layer.prefetches_used for layer in layers)
    waited = sum(layer.waited_ns for layer in layers) / 1e6
    moved = sum(layer.moved_bytes for layer in layers) / 2**20
    print(f"  last rank in MiB: {memory}, plan: {plan.memory()[-1][0] >> 20} of weights")
    print(f"  call: {statistics.median(times):.1f} ms, all calls: {sum(times):.0f} ms")
    print(f"  {report.hits} hits, {report.stalls} stalls, {used_ahead} of {sum(x.prefetches for x in layers)} prefetches used")
    print(f"  {moved:.0f} MiB moved, {waited:.0f} ms waited", flush=True)
    print_transfers(report, setting.inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--inner", type=int, default=2048, help="columns of an expert's gate and up")
    parser.add_argument("--resident", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--window", type=int, nargs="*", default=[1, 2, 3])
    setting = parser.parse_args()
    routing = record_routing(3)
    print("one tier")
    measure(setting, make_plan(setting, None), routing)
    for resident in setting.resident:
        for window in setting.window:
            gc.collect()
            print(f"resident = {resident}, window = {window}")
            measure(setting, make_plan(setting, resident, window), routing)


if __name__ == "__main__":
    main()
