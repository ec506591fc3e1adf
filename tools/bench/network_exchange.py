"""Times the exchanges of a model between two GPUs as between two hosts: over NCCL's network transport, beside NCCL alone.

Both sides run with peer access and shared memory disabled, so that NCCL takes its network transport over the loopback device. NCCL alone is `all_to_all_single` of PyTorch with the same bytes per call,
back to back on one stream, before and after; ours are the all-to-alls of a traced forward, each of which waits for its operands.
The program prints the gigabytes per second that each rank sends, as medians, and their ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
NETWORK_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
CALLS, ROUNDS = 20, 5


def main():
    args = parse_args()
    if args.rank is not None:
        return time_all_to_all(args.rank, args.bytes)
    env = {**os.environ, **NETWORK_ONLY}
    before = run_nccl(env, args.bytes)
    ours = run_tessera(env, args)
    after = run_nccl(env, args.bytes)
    alone = statistics.median(before + after)
    found = {
        "bytes_per_call": args.bytes,
        "nccl_gb_per_s": alone,
        "nccl_rounds_gb_per_s": before + after,
        "tessera": ours,
        "ratio": ours["gb_per_s"] / alone,
    }
    print(json.dumps(found, indent=2))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", default=str(REPO / "target/release/tessera"), help="the program to time")
    parser.add_argument("--model", default=str(REPO / "models/wan2.1-14b"), help="folder of the model")
    parser.add_argument(
        "--bytes",
        type=int,
        default=2340 * 2560 * 2,
        help="bytes that a rank sends to the other in one all-to-all: for 14B at 480x832, half of 2340 tokens of 5120 bf16",
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_nccl(env, bytes_per_call):
    """Starts two processes and returns the GB/s that rank 0 measured in each round."""
    command = [sys.executable, __file__, "--bytes", str(bytes_per_call), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], env={**env, "NCCL_HOSTID": f"host{rank}"}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"a rank of NCCL alone ended with {[rank.returncode for rank in ranks]}")
    return json.loads(texts[0])


def time_all_to_all(rank, bytes_per_call):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29611", rank=rank, world_size=2)
    # As many elements of two bytes: a rank keeps one half and sends the other.
    source = torch.ones(bytes_per_call, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    rounds = []
    for round_index in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            dist.all_to_all_single(target, source)
        end.record()
        torch.cuda.synchronize()
        if round_index > 0:
            rounds.append(bytes_per_call * CALLS / (begin.elapsed_time(end) * 1e-3) / 1e9)
    dist.destroy_process_group()
    print(json.dumps(rounds))


def run_tessera(env, args):
    """Traces forwards over NCCL, and returns the GB/s of their all-to-alls."""
    command = [args.tessera, "bench", "dit", args.model, "--mesh", "tp=2", "--transport", "nccl", "--steps", "3", "--warm", "1"]
    command += ["--trace", "--format", "json"]
    # The ranks of one launch share an environment, so NCCL needs no host ids to take the network: the other variables suffice.
    text = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return read_all_to_alls(json.loads(text), args.bytes)


def read_all_to_alls(report, bytes_per_call):
    """Returns the number, the milliseconds and the GB/s of the all-to-alls in a traced forward, as means over the ranks."""
    rows = [row for rank in find_ranks(report) for row in rank["classes"] if row["name"].startswith("all_to_all")]
    if not rows:
        sys.exit("the traced forward has no all-to-all: is --mesh tp=2 of strategy ulysses?")
    count, ms = rows[0]["count"], statistics.mean(row["measured_ms"] for row in rows)
    return {"all_to_alls": count, "ms": ms, "gb_per_s": count * bytes_per_call / (ms * 1e-3) / 1e9}


def find_ranks(report):
    """Returns the traced ranks, which stand below the sizes of the report."""
    if isinstance(report, dict) and report.get("ranks") and "classes" in report["ranks"][0]:
        return report["ranks"]
    children = report.values() if isinstance(report, dict) else report if isinstance(report, list) else []
    return next((ranks for child in children if (ranks := find_ranks(child))), [])


if __name__ == "__main__":
    main()
