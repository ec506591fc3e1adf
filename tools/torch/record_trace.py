#!/usr/bin/env python3
"""Records TORCH_TRACE folders of compiled two-rank runs, equal ones and ones that differ on a rank.

    tools/torch/record_trace.py OUT [CASE ...]

Each case leaves the logs of both ranks in OUT/CASE, beside case.json, which says what was planted.
Collectives are functional ones in compiled code. Ranks compile on the GPU, and share one where there
is one (see record_flight.py). Needs torch with NCCL, and nothing else.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import time

from record_flight import free_port

LIMIT_S = int(os.environ.get("LIMIT_S", "45"))

# name: what a reader must say
CASES = {
    "equal": "nothing",
    "break_on_one": "break on rank 1 that leaves the collectives equal",
    "breaks_on_both": "two breaks on each rank",
    "recompile_on_one": "recompiles on rank 1",
    "recompile_on_both": "one recompile on each rank",
    "cache_hit_on_one": "rank 0 hits the cache, rank 1 misses",
    "rerecord_on_one": "CUDA graphs recorded again on rank 1",
    "other_op": "another collective on rank 1",
    "other_reduction": "another reduction on rank 1",
    "other_shape": "another shape on rank 1",
    "other_dtype": "another dtype on rank 1",
    "other_order": "two collectives in another order on rank 1",
    "extra": "an extra collective on rank 1",
    "two_groups": "nothing",
    "layers": "a break for each layer, on both ranks",
    "backward": "nothing; the gradients have collectives too",
    "eager_on_one": "rank 1 runs without compilation",
}


def build_step(case, rank, torch, dist, funcol, group):
    """Returns the function to compile and the inputs of its calls."""
    odd = rank == 1

    def reduce(x, op="sum", g=group):
        return funcol.wait_tensor(funcol.all_reduce(x, op, g))

    def step(x, w):
        h = torch.relu(x @ w)
        if case == "other_shape" and odd:
            h = h[: h.shape[0] // 2]
        if case == "other_dtype" and odd:
            h = h.to(torch.bfloat16)
        if case == "other_op" and odd:
            h = funcol.wait_tensor(funcol.all_gather_tensor(h, 0, group))[: h.shape[0]]
        elif case == "other_reduction" and odd:
            h = reduce(h, "max")
        else:
            h = reduce(h)
        if case == "break_on_one" and odd or case == "breaks_on_both":
            torch._dynamo.graph_break()
        h = (h.float() @ w).sin()
        if case == "extra" and odd:
            h = reduce(h)
        if case == "breaks_on_both":
            torch._dynamo.graph_break()
        gathered = lambda h: funcol.wait_tensor(funcol.all_gather_tensor(h, 0, group))
        if case == "other_order" and odd:
            h = gathered(h)[: h.shape[0]]
            return reduce(h).sum()
        h = reduce(h)
        return gathered(h).sum()

    def layers(x, w):
        for _ in range(4):
            x = reduce(torch.relu(x @ w))
            torch._dynamo.graph_break()
        return x.sum()

    return layers if case == "layers" else step


def run_rank(case, rank):
    import datetime

    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))
    group = dist.group.WORLD
    mode = "reduce-overhead" if case == "rerecord_on_one" else None
    step = build_step(case, rank, torch, dist, funcol, group)
    if case == "two_groups":
        pair = dist.new_group([0, 1])

        def step(x, w):
            a = funcol.wait_tensor(funcol.all_reduce(x @ w, "sum", group))
            return funcol.wait_tensor(funcol.all_reduce(a.sin(), "max", pair)).sum()

    if case == "rerecord_on_one":

        def step(x, w):
            return torch.relu(x @ w).sin().sum()

    if case == "backward":

        def step(x, w):
            y = funcol.all_gather_tensor_autograd(torch.relu(x @ w), 0, group)
            return funcol.reduce_scatter_tensor_autograd(y.sin(), "sum", 0, group).sum()

    compiled = torch.compile(step, mode=mode, dynamic=False)
    if case == "eager_on_one" and rank == 1:
        compiled = step
    w = torch.ones(64, 64, device=device)
    sizes = [32, 32, 32, 32]
    if case == "recompile_on_both" or case == "recompile_on_one" and rank == 1:
        # The collectives of the extra graphs have peers only if both ranks recompile.
        sizes = [32, 48, 32, 32]
    if case == "recompile_on_one":
        # A new guard on a constant recompiles without another collective signature.
        def step(x, w, scale):
            return funcol.wait_tensor(funcol.all_reduce((x @ w) * scale, "sum", group)).sum()

        compiled = torch.compile(step, dynamic=False)
        for i in range(4):
            compiled(torch.ones(32, 64, device=device), w, 1.5 if rank == 0 else 1.5 + i)
    elif case == "rerecord_on_one":
        weights = [torch.ones(64, 64, device=device) for _ in range(3)]
        for w in weights:
            torch._dynamo.mark_static_address(w)
        for i in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            w = weights[i % 3 if rank == 1 and i > 3 else 0]
            compiled(torch.ones(32, 64, device=device), w)
    else:
        for n in sizes:
            x = torch.ones(n, 64, device=device, requires_grad=case == "backward")
            y = compiled(x, w)
            if case == "backward":
                y.backward()
    torch.cuda.synchronize()
    print(f"rank {rank} of {case} ends", flush=True)
    os._exit(0)


def run_case(case, out):
    folder = os.path.join(out, case)
    caches = os.path.join("/tmp", f"caches-{os.getpid()}", case)
    os.makedirs(folder, exist_ok=True)
    if case == "cache_hit_on_one":
        # A first run fills the cache of rank 0.
        run_ranks(case, os.path.join(caches, "first"), caches)
        subprocess.run(["rm", "-rf", os.path.join(caches, "1")], check=True)
    codes, seconds = run_ranks(case, folder, caches)
    logs = sorted(f for f in os.listdir(folder) if f.startswith("dedicated_log"))
    with open(os.path.join(folder, "case.json"), "w") as f:
        json.dump({"case": case, "expected": CASES[case], "logs": logs}, f, indent=1)
        f.write("\n")
    print(f"{case}: {seconds:.1f} s, exit codes {codes}, {[(f, os.path.getsize(os.path.join(folder, f))) for f in logs]}", flush=True)


def run_ranks(case, folder, caches):
    os.makedirs(folder, exist_ok=True)
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "TORCH_TRACE": folder,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    started, ranks = time.time(), []
    for rank in range(2):
        env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
        env["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(caches, str(rank))
        env["TRITON_CACHE_DIR"] = os.path.join(caches, str(rank), "triton")
        log = open(os.path.join(folder, f"log_{rank}.txt"), "wb")
        args = [sys.executable, os.path.abspath(__file__), "--rank", str(rank), case]
        ranks.append(subprocess.Popen(args, env=env, stdout=log, stderr=log))
    while time.time() - started < LIMIT_S and any(p.poll() is None for p in ranks):
        time.sleep(0.2)
    for p in ranks:
        if p.poll() is None:
            p.kill()
        p.wait()
    return [p.returncode for p in ranks], time.time() - started


def main():
    if sys.argv[1] == "--rank":
        run_rank(sys.argv[3], int(sys.argv[2]))
    out, cases = sys.argv[1], sys.argv[2:] or list(CASES)
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "4"))) as pool:
        list(pool.map(lambda case: run_case(case, out), cases))


if __name__ == "__main__":
    main()
