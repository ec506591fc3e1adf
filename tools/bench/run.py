"""Times the same DiT chunk in Rust and in PyTorch and prints the ratio.

The two sides run alternately, so that changes of the machine's load and temperature affect both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def run_json(command):
    """Runs a command and returns the JSON object on its last line."""
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}: {' '.join(map(str, command))}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="model folder")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; each runs every side once")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--chunks", type=int, default=40, help="chunks that PyTorch times per round")
    parser.add_argument("--python", default=sys.executable, help="a Python interpreter with PyTorch")
    parser.add_argument("--compile", action="store_true", help="add a third side: PyTorch with torch.compile")
    args = parser.parse_args()

    rust = ["cargo", "run", "--release", "--quiet", "-p", "tessera-bench", "--", "dit", "--model", args.model, "--json"]
    torch = [args.python, "tools/bench/dit_cpu.py", "--model", args.model, "--threads", str(args.threads),
             "--chunks", str(args.chunks)]
    sides = {"rust": rust, "pytorch": torch}
    if args.compile:
        sides["pytorch-compile"] = [*torch, "--compile"]

    # Build first: a build between rounds would heat the machine for one side only.
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tessera-bench"], cwd=REPO, check=True)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load average is {load:.1f} before the start, so the results are less reliable", file=sys.stderr)

    medians = {name: [] for name in sides}
    for i in range(args.rounds):
        for name, command in sides.items():
            medians[name].append(run_json(command)["median_ms"])
        print(f"round {i + 1}: " + ", ".join(f"{n} {m[-1]:.2f} ms" for n, m in medians.items()), file=sys.stderr)
    result = {name: round(statistics.median(m), 3) for name, m in medians.items()}
    ratios = {f"{name}/rust": round(result[name] / result["rust"], 3) for name in result if name != "rust"}
    print(json.dumps({"median_ms": result, "rounds": medians, "ratio": ratios, "threads": args.threads}))


if __name__ == "__main__":
    main()
