"""Times the same DiT chunk in Rust and in PyTorch, alternately so that both see the same machine, and prints the ratio."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def last_json(command):
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has torch")
    parser.add_argument("--compile", action="store_true", help="a third side: PyTorch through torch.compile")
    args = parser.parse_args()

    rust = ["cargo", "run", "--release", "--quiet", "-p", "tessera-bench", "--", "dit", "--model", args.model, "--json"]
    torch = [args.python, "tools/bench/dit_cpu.py", "--model", args.model, "--threads", str(args.threads),
             "--chunks", str(args.chunks)]
    sides = {"rust": rust, "pytorch": torch}
    if args.compile:
        sides["pytorch-compile"] = [*torch, "--compile"]

    # Building between rounds would heat the machine for one side only.
    subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "tessera-bench"], cwd=REPO, check=True)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: load is {load:.1f} before the start; the numbers are worth less", file=sys.stderr)

    medians = {name: [] for name in sides}
    for i in range(args.rounds):
        for name, command in sides.items():
            medians[name].append(last_json(command)["median_ms"])
        print(f"round {i + 1}: " + ", ".join(f"{n} {m[-1]:.2f} ms" for n, m in medians.items()), file=sys.stderr)
    result = {name: round(statistics.median(m), 3) for name, m in medians.items()}
    ratios = {f"{name}/rust": round(result[name] / result["rust"], 3) for name in result if name != "rust"}
    print(json.dumps({"median_ms": result, "rounds": medians, "ratio": ratios, "threads": args.threads}))


if __name__ == "__main__":
    main()
