"""Compares the denoise forwards of Tessera and PyTorch on the same GPUs in one run.

All sides stay loaded on the GPUs; one side replays its forwards while the others wait. The program prints a table and writes a
dated folder in bench/runs.

A side loads once and serves all sizes. For each size there are several rounds. In a round every side runs in turn: first steps
that are not counted, until the GPU has settled under its power limit, then the counted steps. The order of the sides rotates from
round to round. The ratio compares medians over all counted steps: the fastest PyTorch side's median divided by ours.
"""

import argparse
import collections
import ctypes
import datetime
import json
import math
import os
import platform
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FRAMES = 12
OURS_ARGS = "bench dit --device cuda --mesh tp={gpus} --size {sizes} --dtype {dtype} --strategy {strategy} --serve"


class SideFailed(Exception):
    """A side ended or did not answer in time."""

    def __init__(self, side, why):
        super().__init__(f"{side.name}: {why}")
        self.side = side


class GpuSampler:
    """Samples power and clock of the GPUs with nvidia-smi; without nvidia-smi there are no samples."""

    QUERY = "index,power.draw,clocks.sm"

    def __init__(self, gpus):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.gpus = (visible.split(",") if visible else [str(i) for i in range(gpus)])[:gpus]
        self.samples = collections.deque(maxlen=4000)
        try:
            command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits", "-lms", "100"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
            threading.Thread(target=self.read, daemon=True).start()
        except OSError:
            self.process = None

    def read(self):
        for line in self.process.stdout:
            try:
                gpu, power_w, clock_mhz = line.split(", ")
                self.samples.append((time.monotonic(), gpu, float(power_w), float(clock_mhz)))
            except ValueError:
                continue

    def medians_since(self, begin):
        """Returns the medians by GPU of the samples since `begin`, under the key `seen`."""
        medians = {}
        for name, column in (("power_w", 2), ("clock_mhz", 3)):
            by_gpu = [[x[column] for x in list(self.samples) if x[0] >= begin and x[1] == gpu] for gpu in self.gpus]
            if all(by_gpu):
                medians[name] = [round(statistics.median(values)) for values in by_gpu]
        return {"seen": medians} if medians else {}

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()


class Side:
    """A process that serves the protocol of `dit_gpu.py --serve`."""

    def __init__(self, name, command, all_sides):
        self.name, self.command, self.all_sides = name, [str(c) for c in command], all_sides
        self.lines, self.tail = queue.Queue(), collections.deque(maxlen=60)
        # The side has its own session, so that its child processes can be killed with it; Linux kills it when this process ends.
        self.process = subprocess.Popen(self.command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
        for stream, add_line in ((self.process.stdout, self.lines.put), (self.process.stderr, self.tail.append)):
            threading.Thread(target=self.read, args=(stream, add_line), daemon=True).start()

    def read(self, stream, add_line):
        for line in stream:
            add_line(line.decode(errors="replace").rstrip("\n"))

    def read_answer(self, timeout_s, key):
        """Returns the next JSON object that has the key `key`. Raises SideFailed if any side ends meanwhile."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                # Child processes of a side may keep its output open after it ends, so end of file does not show the end.
                for side in self.all_sides.values():
                    if side.process.poll() is not None:
                        raise SideFailed(side, f"ended with exit status {side.process.returncode}") from None
                if time.monotonic() > end:
                    raise SideFailed(self, f"no answer within {timeout_s:.0f} s") from None
                continue
            self.tail.append(line)
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and key in value:
                return value

    def run(self, size, steps, timeout_s):
        try:
            self.process.stdin.write(f"run {size} {steps}\n".encode())
            self.process.stdin.flush()
        except OSError:
            pass
        answer = self.read_answer(timeout_s, "steps_ms")
        if len(answer["steps_ms"]) != steps:
            raise SideFailed(self, f"returned {len(answer['steps_ms'])} times for {steps} steps")
        return answer

    def quit(self):
        try:
            self.process.stdin.write(b"quit\n")
            self.process.stdin.close()
            self.process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def side_commands(args, gpus):
    """Returns the commands of all sides that share the GPUs, by the sides' names."""
    sides = {}
    if not args.skip_ours:
        for strategy in args.ours_strategies.split(",") if gpus > 1 else ["ulysses"]:
            words = args.ours_args.format(gpus=gpus, sizes=args.sizes, strategy=strategy, dtype="fp8" if args.fp8 else "bf16")
            for build in [args.ours, *args.beside]:
                name = f"ours {strategy}" if gpus > 1 else "ours"
                name += (" fp8" if args.fp8 else "") + ("" if build is args.ours else f" {build.name}")
                sides[name] = [build.resolve(), *shlex.split(words)]
    if args.skip_pytorch:
        return sides
    base = [args.python, REPO / "tools/bench/dit_gpu.py", "--serve", "--gpus", gpus, "--size", args.sizes, *shlex.split(args.pytorch_args)]
    for strategy in args.strategies.split(",") if gpus > 1 else ["ulysses"]:
        for cut in args.cuts.split(","):
            name = "pytorch" + (f" {strategy}" if gpus > 1 else "") + (f" {cut}" if "," in args.cuts else "")
            command = [*base, "--strategy", strategy, "--cut", cut]
            sides[name] = command
            if args.fp8 and (strategy == "ulysses" or gpus == 1):
                sides[f"{name} fp8"] = [*command, "--fp8"]
    return sides


def autotunes_at_start(name, command):
    """Returns whether a side autotunes while it starts, and so needs the GPUs to itself. The other sides start at the same
    time."""
    words = [str(c) for c in command]
    return name.startswith("ours") or "--autotune" in words or not {"--fp8", "block"} & set(words)


def measure_points(args, gpus):
    """Yields the point of each size. All sides start once, before the first size, and end after the last."""
    sides, facts, sampler = {}, {}, GpuSampler(gpus)
    try:
        wait_until_ready = lambda name: facts.update({name: sides[name].read_answer(args.start_timeout, "ready")})
        for name, command in side_commands(args, gpus).items():
            print(f"{gpus} GPUs: starting {name}", file=sys.stderr, flush=True)
            sides[name] = Side(name, command, sides)
            if autotunes_at_start(name, command):
                wait_until_ready(name)
        for name in sides:
            if name not in facts:
                wait_until_ready(name)
        for size in args.sizes.split(","):
            rounds = measure_rounds(args, size, gpus, sides, sampler)
            size_facts = {name: {k: v for k, v in f.items() if k != "points"} | f["points"][size] for name, f in facts.items()}
            yield summarize_point(size, gpus, sides, size_facts, rounds)
        for side in sides.values():
            side.quit()
    except SideFailed as e:
        # Kill all sides before the message is printed, so that no process stays on the GPUs.
        for side in sides.values():
            side.kill()
        tail = "\n".join(f"  | {line}" for line in e.side.tail)
        sys.exit(f"run_gpu: {e}\n  command: {shlex.join(e.side.command)}\n{tail}")
    finally:
        sampler.stop()
        for side in sides.values():
            side.kill()


def measure_rounds(args, size, gpus, sides, sampler):
    """Returns the answers of each side by its name, one answer per round."""
    step_ms = {name: statistics.median(side.run(size, 3, args.run_timeout)["steps_ms"]) for name, side in sides.items()}
    rounds = {name: [] for name in sides}
    for i in range(args.rounds):
        order = list(sides)[i % len(sides):] + list(sides)[: i % len(sides)]
        for name in order:
            settle = math.ceil(args.settle_s * 1e3 / step_ms[name])
            if settle:
                sides[name].run(size, settle, args.run_timeout)
            begin = time.monotonic()
            rounds[name].append(sides[name].run(size, args.steps, args.run_timeout) | sampler.medians_since(begin))
        medians = ", ".join(f"{n} {statistics.median(rounds[n][-1]['steps_ms']):.1f}" for n in sides)
        print(f"{size} {gpus} GPUs, round {i + 1}: {medians} ms", file=sys.stderr, flush=True)
    return rounds


def summarize_point(size, gpus, sides, facts, rounds):
    results = {}
    for name, answers in rounds.items():
        steps = sorted(x for a in answers for x in a["steps_ms"])
        quantile = lambda q: round(steps[min(len(steps) - 1, int(q * len(steps)))], 3)
        median = statistics.median(steps)
        results[name] = {"median_ms": round(median, 3), "p10_ms": quantile(0.1), "p90_ms": quantile(0.9), "fps": round(FRAMES * 1e3 / median, 3),
                         "steps": len(steps), "rounds_ms": [round(statistics.median(a["steps_ms"]), 3) for a in answers],
                         "rest": {k: v for k, v in answers[-1].items() if k != "steps_ms"},
                         "command": shlex.join(sides[name].command), "facts": facts[name]}
    # Without PyTorch the builds of Tessera are compared with the first build.
    best = min((n for n in results if n.startswith("pytorch") and not n.endswith("fp8")), key=lambda n: results[n]["median_ms"],
               default=next(iter(results)))
    ratios = {n: round(results[best]["median_ms"] / r["median_ms"], 4) for n, r in results.items() if n.startswith("ours")}
    return {"size": size, "gpus": gpus, "best_pytorch": best, "speed_over_best_pytorch": ratios, "sides": results}


def format_table(points):
    base = "PyTorch's best bf16" if any(p["best_pytorch"].startswith("pytorch") for p in points) else "the first"
    rows = [("size", "GPUs", "side", "median ms", "p10", "p90", "FPS", "steps", f"over {base}")]
    for p in points:
        for name, r in p["sides"].items():
            over = p["sides"][p["best_pytorch"]]["median_ms"] / r["median_ms"]
            rows.append((p["size"], str(p["gpus"]), name, f"{r['median_ms']:.2f}", f"{r['p10_ms']:.2f}", f"{r['p90_ms']:.2f}",
                         f"{r['fps']:.2f}", str(r["steps"]), f"{over:.3f}"))
    rows.insert(1, ("---",) * len(rows[0]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def list_gpus():
    """Returns one line per GPU from nvidia-smi, or no line without nvidia-smi."""
    query = "name,driver_version,power.limit,clocks.max.sm,memory.total"
    try:
        text = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
        return text.stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def head_commit():
    """Returns the repository's commit, or None without git."""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def save(folder, args, points):
    facts = next((r["facts"] for p in points for n, r in p["sides"].items() if n.startswith("pytorch")), {})
    host = {"gpus": list_gpus(), "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
            "commit": head_commit()}
    host |= {k: facts[k] for k in ("gpu", "driver", "power_limit_w", "torch", "cuda", "cudnn", "nccl") if k in facts}
    what = ("denoise forwards of a 14B video generator with synthetic weights and a KV window of 6 frames. A step is 5 forwards of a "
            "chunk of 12 frames; its time is the slowest rank's, measured by device events. All sides ran on the same GPUs, one after "
            f"another, in {args.rounds} rounds of {args.steps} steps after {args.settle_s} s that are not counted. Each side kept all "
            "sizes loaded")
    lines = format_table(points)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"bench": "dit", "commands": [shlex.join(["python3", "tools/bench/run_gpu.py", *sys.argv[1:]])], "host": host,
              "date": folder.name[:10], "what": what, "table": lines, "points": points}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    host_line = ", ".join(f"{k} {v}" for k, v in host.items() if k != "gpus" and v is not None)
    (folder / "README.md").write_text(f"# {folder.name}\n\n{what[0].upper() + what[1:]}.\n\n" + "\n".join(lines)
                                      + f"\n\n{host_line}\n\n```sh\n{result['commands'][0]}\n```\n")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", default="480x832,320x576", help="picture sizes HxW in pixels, separated by commas (default: %(default)s)")
    p.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, separated by commas (default: %(default)s)")
    p.add_argument("--strategies", default="ulysses,megatron", help="strategies of PyTorch (default: %(default)s)")
    p.add_argument("--cuts", default="split", help="scope of torch.compile on PyTorch's sides: split, block, or both separated by a "
                                                   "comma; see --cut of dit_gpu.py (default: %(default)s)")
    p.add_argument("--ours", type=Path, default=REPO / "target/release/tessera", help="the tessera binary")
    p.add_argument("--ours-args", default=OURS_ARGS, help="arguments of the tessera binary (default: %(default)s)")
    p.add_argument("--ours-strategies", default="ulysses", help="strategies of Tessera (default: %(default)s)")
    p.add_argument("--beside", type=Path, action="append", default=[],
                   help="another tessera binary to compare, labelled by its file name; may be repeated")
    p.add_argument("--skip-ours", action="store_true", help="run PyTorch alone")
    p.add_argument("--skip-pytorch", action="store_true", help="run builds of Tessera alone and compare them with the first")
    p.add_argument("--fp8", action="store_true", help="run Tessera in fp8, and PyTorch both in bf16 and in fp8")
    p.add_argument("--python", default=sys.executable, help="a Python interpreter with PyTorch")
    p.add_argument("--pytorch-args", default="", help="more arguments for dit_gpu.py")
    p.add_argument("--rounds", type=int, default=6, help="number of rounds per size")
    p.add_argument("--steps", type=int, default=8, help="counted steps per side and round")
    p.add_argument("--settle-s", type=float, default=1.5, help="seconds of uncounted steps before the counted steps")
    p.add_argument("--start-timeout", type=float, default=600, help="seconds within which a side must be ready")
    p.add_argument("--run-timeout", type=float, default=180, help="seconds within which a side must answer a request")
    p.add_argument("--runs", type=Path, default=REPO / "bench/runs", help="parent of the dated folder")
    args = p.parse_args()
    if not args.skip_ours and not args.ours.is_file():
        p.error(f"no binary at {args.ours}: give --ours PATH or --skip-ours")
    if args.skip_ours and (args.skip_pytorch or args.beside):
        p.error("--skip-ours runs PyTorch alone, so it excludes --skip-pytorch and --beside")
    if missing := [str(b) for b in args.beside if not b.is_file()]:
        p.error(f"no binary at {', '.join(missing)}")
    if len({b.name for b in args.beside}) < len(args.beside):
        p.error("two builds of --beside have the same file name, but their results are told apart by it")

    date, n = datetime.date.today().isoformat(), 1
    while (args.runs / f"{date}-h200-dit-{n}").exists():
        n += 1
    folder, points = args.runs / f"{date}-h200-dit-{n}", []
    sizes = args.sizes.split(",")
    for gpus in map(int, args.gpus.split(",")):
        for point in measure_points(args, gpus):
            points.append(point)
            points.sort(key=lambda p: (sizes.index(p["size"]), p["gpus"]))
            # Save after each point, so that an interrupted run keeps its results.
            save(folder, args, points)
    print("\n".join(format_table(points)))
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
