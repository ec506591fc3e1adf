#!/usr/bin/env python3
"""Records Flight Recorder dumps of NCCL runs, healthy ones and ones with a planted fault.

    tools/torch/record_flight.py OUT [CASE ...]

Each case runs two to four processes and leaves OUT/CASE/rank_0, rank_1, ... as PyTorch writes them,
beside case.json, which says what was planted. On a machine with fewer GPUs than ranks, several ranks
share a GPU: NCCL then takes each rank for a host of its own and sends over loopback sockets. Dumps have
the same form either way. Needs torch with NCCL, and nothing else.
"""

import concurrent.futures
import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time

# Seconds after which NCCL's watchdog gives a collective up and writes its dump. Healthy runs set up their
# connections within one, which takes longer where ranks share a GPU.
TIMEOUT_S = 6
HEALTHY_TIMEOUT_S = 60
# Seconds after which the recorder kills what is left of a case.
LIMIT_S = int(os.environ.get("LIMIT_S", "45"))

# name: (ranks, kind of fault, rank at fault). A fault without a rank is a wait cycle or is invisible.
FAULTS = {
    "skip": (2, "skipped", 1),
    "skip4": (4, "skipped", 2),
    "extra": (2, "extra", 1),
    "other_op": (2, "other op", 1),
    "other_op4": (4, "other op", 3),
    "shape": (2, "shape", 1),
    "shape4": (4, "shape", 0),
    "dtype": (2, "dtype", 1),
    "reduction": (2, "invisible", None),
    "order": (2, "wait cycle", None),
    "order_host": (2, "wait cycle", None),
    "order4": (4, "wait cycle", None),
    "cycle3": (3, "wait cycle", None),
    "host_silent": (2, "host silent", 1),
    "host_silent4": (4, "host silent", 2),
    "device_behind": (2, "device behind", 1),
    "stopped": (2, "stopped", 1),
    "killed": (2, "killed", 1),
    "killed4": (4, "killed", 3),
    "skip_subgroup": (4, "skipped", 3),
    "skip_wrapped": (2, "skipped", 1),
    "skip_same": (4, "skipped", 2),
    "extra_same": (4, "extra", 1),
    "extra_group": (4, "extra", 2),
    # Rank 0 sends once more than rank 1 receives; rank 1 waits in the next collective for rank 0.
    "missing_recv": (2, "wait cycle", None),
    # Programs of real trainings.
    "data_ended": (4, "other op", 3),
    "ddp_skipped_backward": (4, "skipped", 2),
    "saved_on_one": (4, "extra", 0),
    "raised": (4, "killed", 1),
    "slow_loader": (4, "host silent", 1),
    "both_receive": (2, "wait cycle", None),
    "tensor_parallel_skip": (4, "skipped", 3),
    "fsdp_extra_forward": (4, "extra", 1),
}
HEALTHY = {
    "plain": 2,
    "json": 2,
    "subgroups": 4,
    "pipeline": 4,
    "wrapped": 2,
    "moments": 2,
    "coalesced": 2,
    "all_to_all": 4,
    "same_count": 2,
    "sharded": 2,
    "roots": 4,
    "timed": 2,
    "members": 4,
    "wrapped_pipeline": 4,
    "moments4": 4,
    "fsdp": 4,
    "one_forward_one_backward": 4,
    "objects": 4,
    "left_early": 4,
    "ddp": 4,
    "hybrid_sharded": 4,
    "schedule_1f1b": 4,
    "tensor_parallel": 4,
}
BUFFERS = {"wrapped": 12, "wrapped_pipeline": 10, "skip_wrapped": 12}


def rounds(dist, torch, device, n, group=None, change=None):
    """Runs n rounds of three collectives of different kinds and sizes; `change` plants a fault in the last."""
    world = dist.get_world_size(group)
    ones = lambda k, **o: torch.ones(k, device=device, **o)
    for i in range(n):
        fault = change if i == n - 1 else None
        if fault == "extra":
            dist.broadcast(ones(96), src=0, group=group)
        size = 512 if fault == "shape" else 1024
        dtype = torch.bfloat16 if fault == "dtype" else torch.float32
        if fault == "other_op":
            dist.reduce_scatter_tensor(ones(1024 // world), ones(1024), group=group)
        else:
            dist.all_reduce(ones(size, dtype=dtype), group=group)
        if fault != "skip":
            dist.all_gather_into_tensor(ones(256 * world), ones(256), group=group)
        dist.reduce_scatter_tensor(ones(128), ones(128 * world), group=group)
    if change is None:
        torch.cuda.synchronize()


def run_fault(case, rank, world, dist, torch, device, out):
    at_fault = FAULTS[case][2] == rank
    ones = lambda n, **k: torch.ones(n, device=device, **k)
    kind = case.rstrip("4")
    if case == "skip_subgroup":
        pairs = make_groups(dist, torch, device, [[0, 1], [2, 3]], rank)
        rounds(dist, torch, device, 1)
        rounds(dist, torch, device, 3, pairs[rank // 2], change="skip" if at_fault else "none")
        torch.cuda.synchronize()
    else:
        planted = kind in ("skip", "extra", "other_op", "shape", "dtype", "skip_wrapped")
        change = kind.removesuffix("_wrapped") if planted and at_fault else "none" if planted else None
        rounds(dist, torch, device, 30 if case == "skip_wrapped" else 4, change=change)
    if case == "reduction":
        dist.all_reduce(ones(64), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
        torch.cuda.synchronize()
        write_dump(torch, out, rank)
        time.sleep(3)
        return
    if case in ("order", "order_host"):
        # Every rank enqueues both collectives; the streams of the devices wait for each other.
        groups = make_groups(dist, torch, device, [[0, 1], [0, 1]], rank)
        for g in groups if rank == 0 else reversed(groups):
            dist.all_reduce(ones(512), group=g)
            if case == "order_host":
                wait_for_stream(torch)
    elif case == "order4":
        # Rows and columns of a 2 x 2 mesh: ranks 1 and 2 begin with their columns.
        groups = make_groups(dist, torch, device, [[0, 1], [2, 3], [0, 2], [1, 3]], rank)
        row, column = groups[rank // 2], groups[2 + rank % 2]
        for g in (column, row) if rank in (1, 2) else (row, column):
            dist.all_reduce(ones(512), group=g)
    elif case == "cycle3":
        groups = make_groups(dist, torch, device, [[0, 1], [1, 2], [0, 2]], rank)
        first, second = [(0, 2), (1, 0), (2, 1)][rank]
        for g in (groups[first], groups[second]):
            dist.all_reduce(ones(512), group=g)
            wait_for_stream(torch)
    elif case in ("skip_same", "extra_same"):
        # Collectives of one size, which differ in their lines alone.
        dist.all_reduce(ones(512))
        if at_fault and case == "extra_same":
            dist.all_reduce(ones(512))
        dist.all_reduce(ones(512))
        if not (at_fault and case == "skip_same"):
            dist.all_reduce(ones(512))
        dist.all_reduce(ones(512))
        dist.all_reduce(ones(512))
        dist.all_reduce(ones(512))
        wait_for_stream(torch)
        time.sleep(LIMIT_S)
    elif case == "extra_group":
        experts = make_groups(dist, torch, device, [[0, 1, 2, 3]], rank)[0]
        for _ in range(3):
            dist.all_to_all_single(ones(64), ones(64), group=experts)
            dist.all_reduce(ones(512))
        if at_fault:
            dist.all_to_all_single(ones(64), ones(64), group=experts)
            wait_for_stream(torch)
    elif at_fault and kind == "host_silent":
        time.sleep(LIMIT_S)
    elif at_fault and kind == "device_behind":
        torch.cuda._sleep(int(2e9 * 60))
    elif at_fault and kind in ("stopped", "killed"):
        os.kill(os.getpid(), signal.SIGSTOP if case == "stopped" else signal.SIGKILL)
    elif case == "data_ended":
        # The loader of one rank has a batch less: this rank leaves the loop, and enters the final barrier.
        for _ in range(2 if at_fault else 4):
            dist.all_reduce(ones(512))
            wait_for_stream(torch)
        dist.barrier()
    elif case == "ddp_skipped_backward":
        model, optimizer = build_ddp(torch, device, rank)
        for i in range(5):
            loss = model(torch.ones(8, 64, device=device)).sum()
            if not (at_fault and i == 2):
                loss.backward()
                wait_for_stream(torch)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())
    elif case == "saved_on_one":
        if at_fault:
            dist.all_gather_into_tensor(ones(200 * world), ones(200))
    elif case == "raised":
        if at_fault:
            raise RuntimeError("planted: the loader found no file")
    elif case == "slow_loader":
        if at_fault:
            time.sleep(LIMIT_S)
        dist.all_reduce(ones(512))
    elif case == "both_receive":
        for i in range(3):
            if i == 2 or rank == 1:
                dist.recv(ones(1 << 22), src=1 - rank)
            if i < 2 and rank == 0:
                dist.send(ones(1 << 22), dst=1)
        torch.cuda.synchronize()
    elif case == "tensor_parallel_skip":
        model = build_tensor_parallel(torch, device, world)
        for i in range(4):
            if not (at_fault and i == 2):
                model(torch.ones(8, 256, device=device)).sum().backward()
            dist.all_reduce(ones(16))
            wait_for_stream(torch)
    elif case == "fsdp_extra_forward":
        model, _ = build_fsdp(torch, device)
        for i in range(3):
            model(torch.ones(8, 256, device=device)).sum().backward()
            wait_for_stream(torch)
        if at_fault:
            with torch.no_grad():
                model(torch.ones(8, 256, device=device))
    elif case == "missing_recv":
        for _ in range(3):
            dist.send(ones(1 << 22), dst=1) if rank == 0 else dist.recv(ones(1 << 22), src=0)
        if rank == 0:
            dist.send(ones(1 << 22), dst=1)
        torch.cuda.synchronize()
    # What follows in the program: ranks that a mismatch did not stop wait here.
    rounds(dist, torch, device, 2)
    time.sleep(LIMIT_S)


def build_ddp(torch, device, rank):
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16)).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=0.02)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def build_fsdp(torch, device, mesh=None):
    from torch.distributed.fsdp import fully_shard

    layers = [torch.nn.Linear(256, 256, device=device) for _ in range(4)]
    model = torch.nn.Sequential(*(fully_shard(layer, mesh=mesh) for layer in layers))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def build_tensor_parallel(torch, device, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).to(device)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def wait_for_stream(torch):
    """Waits on the host. A device synchronisation would keep the watchdog from querying its events."""
    while not torch.cuda.current_stream().query():
        time.sleep(0.05)


def make_groups(dist, torch, device, members, rank):
    """Makes groups whose communicators exist and are connected for the sizes of the fault: connecting blocks
    the host inside NCCL, where no watchdog sees it, and would hang in place of the fault."""
    # A group does not inherit the timeout of the default group.
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = [dist.new_group(m, timeout=timeout) for m in members]
    for group, m in zip(groups, members):
        if rank in m:
            dist.all_reduce(torch.ones(512, device=device), group=group)
        torch.cuda.synchronize()
    return groups


def run_healthy(case, rank, world, dist, torch, device, out):
    ones = lambda n, **k: torch.ones(n, device=device, **k)
    if case in ("plain", "timed", "json"):
        rounds(dist, torch, device, 4)
    elif case == "wrapped":
        rounds(dist, torch, device, 20)
    elif case in ("subgroups", "members"):
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        some = dist.new_group([1, 2, 3])
        for _ in range(3):
            rounds(dist, torch, device, 1, rows[rank // 2])
            rounds(dist, torch, device, 1, columns[rank % 2])
            if case == "members" and rank != 0:
                dist.all_reduce(ones(333), group=some)
    elif case in ("pipeline", "wrapped_pipeline"):
        # Ranks have different numbers of sends and receives, so their rings lose different heads.
        for step in range(4 if case == "pipeline" else 12):
            if rank > 0:
                dist.recv(ones(4096), src=rank - 1)
            if rank + 1 < world:
                dist.send(ones(4096), dst=rank + 1)
            if step % 4 == 3:
                dist.all_reduce(ones(8))
    elif case in ("moments", "moments4"):
        # Ranks write their dumps in different rounds of a run that goes on.
        for i in range(8):
            rounds(dist, torch, device, 1)
            if i == 3 + rank:
                write_dump(torch, out, rank)
        time.sleep(3)
        return
    elif case == "coalesced":
        for _ in range(3):
            with dist._coalescing_manager(device=device, async_ops=True) as work:
                for n in (64, 128, 256):
                    dist.all_reduce(ones(n))
            work.wait()
            peer = 1 - rank
            ops = [dist.P2POp(dist.isend, ones(512), peer), dist.P2POp(dist.irecv, ones(512), peer)]
            for w in dist.batch_isend_irecv(ops):
                w.wait()
            with dist._coalescing_manager(device=device, async_ops=True) as work:
                for n in (64, 128):
                    dist.all_gather_into_tensor(torch.empty(n * world, device=device), ones(n))
            work.wait()
    elif case == "all_to_all":
        sends = [16 * (1 + (rank + i) % world) for i in range(world)]
        receives = [16 * (1 + (i + rank) % world) for i in range(world)]
        for _ in range(3):
            dist.all_to_all_single(ones(sum(receives)), ones(sum(sends)), receives, sends)
            dist.all_to_all_single(ones(64 * world), ones(64 * world))
    elif case == "same_count":
        shape = (32, 64) if rank == 0 else (2048,)
        for _ in range(3):
            dist.all_reduce(torch.ones(shape, device=device))
    elif case == "fsdp":
        model, optimizer = build_fsdp(torch, device)
        for _ in range(3):
            model(torch.ones(8, 256, device=device)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    elif case == "ddp":
        model, optimizer = build_ddp(torch, device, rank)
        for i in range(6):
            # Gradients of two steps are accumulated before they are reduced.
            context = model.no_sync() if i % 2 == 0 else contextlib.nullcontext()
            with context:
                model(torch.ones(8, 64, device=device)).sum().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    elif case == "hybrid_sharded":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, optimizer = build_fsdp(torch, device, mesh)
        for _ in range(3):
            model(torch.ones(8, 256, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    elif case == "schedule_1f1b":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        layer = torch.nn.Linear(64, 64, device=device)
        stage = PipelineStage(layer, rank, world, device)
        schedule = Schedule1F1B(stage, n_microbatches=6, loss_fn=lambda y, _: y.sum())
        for _ in range(2):
            if rank == 0:
                schedule.step(torch.ones(12, 64, device=device))
            elif rank == world - 1:
                schedule.step(target=torch.ones(12, 64, device=device))
            else:
                schedule.step()
            dist.all_reduce(ones(8))
    elif case == "tensor_parallel":
        model = build_tensor_parallel(torch, device, world)
        for _ in range(3):
            model(torch.ones(8, 256, device=device)).sum().backward()
    elif case == "one_forward_one_backward":
        # Each stage warms up with another number of forwards, then alternates.
        ahead, total = world - 1 - rank, 6
        forward = lambda: (rank > 0 and dist.recv(ones(1024), src=rank - 1), rank + 1 < world and dist.send(ones(1024), dst=rank + 1))
        backward = lambda: (rank + 1 < world and dist.recv(ones(1024), src=rank + 1), rank > 0 and dist.send(ones(1024), dst=rank - 1))
        for _ in range(ahead):
            forward()
        for _ in range(total - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
    elif case == "objects":
        for i in range(3):
            texts = [f"step {i}" * (1 + rank)]
            dist.broadcast_object_list(texts, src=i % world)
            dist.all_gather_object([None] * world, {"rank": rank, "loss": 0.5 * rank})
            dist.barrier()
    elif case == "left_early":
        # Rank 3 belongs to no later collective, and writes its dump before the others go on.
        rounds(dist, torch, device, 2)
        rest = dist.new_group([0, 1, 2])
        if rank < 3:
            rounds(dist, torch, device, 3, rest)
    elif case == "sharded":
        for _ in range(3):
            works = []
            for n in (256, 512, 1024):
                full = torch.empty(n * world, device=device)
                works.append(dist.all_gather_into_tensor(full, ones(n), async_op=True))
            for n in (1024, 512, 256):
                works.append(dist.reduce_scatter_tensor(ones(n), ones(n * world), async_op=True))
            for w in works:
                w.wait()
    elif case == "roots":
        for root in range(world):
            dist.broadcast(ones(100 + root), src=root)
            dist.reduce(ones(200 + root), dst=root)
            dist.gather(ones(50), [ones(50) for _ in range(world)] if rank == root else None, dst=root)
            dist.scatter(ones(60), [ones(60) for _ in range(world)] if rank == root else None, src=root)
        dist.barrier()
    torch.cuda.synchronize()
    write_dump(torch, out, rank, as_json=case == "json")
    # Rank 0 has the store: nobody may lose it before writing.
    time.sleep(3)


def write_dump(torch, out, rank, as_json=False):
    c10d = torch._C._distributed_c10d
    text = c10d._dump_nccl_trace_json() if as_json else c10d._dump_nccl_trace()
    with open(os.path.join(out, f"rank_{rank}"), "wb") as f:
        f.write(text.encode() if isinstance(text, str) else text)


def run_rank(case, rank, world, out):
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    timeout = TIMEOUT_S if case in FAULTS else HEALTHY_TIMEOUT_S
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=timeout), device_id=None)
    if case in FAULTS:
        run_fault(case, rank, world, dist, torch, device, out)
    else:
        run_healthy(case, rank, world, dist, torch, device, out)
    print(f"rank {rank} of {case} ends", flush=True)
    os._exit(0)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def count_gpus():
    """Counts the GPUs on which ranks run: all of this machine, or as many as GPUS says."""
    if "GPUS" in os.environ:
        return int(os.environ["GPUS"])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def run_case(case, out):
    world = FAULTS[case][0] if case in FAULTS else HEALTHY[case]
    folder = os.path.join(out, case)
    # The dumps of healthy runs are written by hand: the watchdog's, after the end, must not replace them.
    own = os.path.join(folder, "rank_" if case in FAULTS else "watchdog_")
    os.makedirs(folder, exist_ok=True)
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": own,
        "TORCH_FR_DUMP_TEMP_FILE": own,
        "TORCH_FR_BUFFER_SIZE": str(BUFFERS.get(case, 2000)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "4000",
        "TORCH_NCCL_ENABLE_TIMING": "1" if case in ("timed", "device_behind") else "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
    }
    gpus = count_gpus()
    started = time.time()
    ranks = []
    for rank in range(world):
        env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if gpus < world:
            env |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        log = open(os.path.join(folder, f"log_{rank}.txt"), "wb")
        args = [sys.executable, os.path.abspath(__file__), "--rank", str(rank), case, folder]
        ranks.append(subprocess.Popen(args, env=env, stdout=log, stderr=log))
    while time.time() - started < LIMIT_S and any(p.poll() is None for p in ranks):
        alive = [i for i, p in enumerate(ranks) if p.poll() is None]
        # A stopped rank never ends by itself: it is killed once all others are gone.
        if case in FAULTS and alive == [FAULTS[case][2]]:
            time.sleep(8)
            break
        time.sleep(0.2)
    for p in ranks:
        if p.poll() is None:
            p.kill()
        p.wait()
    kind, at_fault = FAULTS[case][1:] if case in FAULTS else ("healthy", None)
    dumps = sorted(f for f in os.listdir(folder) if f.startswith("rank_"))
    for f in os.listdir(folder):
        if f.startswith(("watchdog_", "log_")) and "KEEP_LOGS" not in os.environ:
            os.remove(os.path.join(folder, f))
    about = {"case": case, "ranks": world, "fault": kind, "rank": at_fault, "dumps": dumps, "gpus": gpus}
    with open(os.path.join(folder, "case.json"), "w") as f:
        json.dump(about, f, indent=1)
        f.write("\n")
    sizes = [os.path.getsize(os.path.join(folder, d)) for d in dumps]
    codes = [p.returncode for p in ranks]
    print(f"{case}: {time.time() - started:.1f} s, exit codes {codes}, dumps {list(zip(dumps, sizes))}", flush=True)


def main():
    if sys.argv[1] == "--rank":
        rank, case, folder = int(sys.argv[2]), sys.argv[3], sys.argv[4]
        run_rank(case, rank, int(os.environ["WORLD_SIZE"]), folder)
    out, cases = sys.argv[1], sys.argv[2:] or [*HEALTHY, *FAULTS]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "4"))) as pool:
        list(pool.map(lambda case: run_case(case, out), cases))


if __name__ == "__main__":
    main()
