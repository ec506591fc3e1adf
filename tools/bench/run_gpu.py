"""Times the denoise forwards of a chunk on GPUs, ours and PyTorch's in one run: both are built and stay on the same GPUs,
and one replays while the others wait. Prints a table and writes a dated folder of bench/runs.

A side loads once and holds all sizes. For one size after another, a round asks each side in turn, first for steps that are
not counted, until the GPU has settled under its power limit, then for those that are; the order turns with each round. The
ratio is of medians over all counted steps, ours against the fastest PyTorch side.
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
OURS = "bench dit --device cuda --mesh tp={gpus} --size {sizes} --dtype {dtype} --strategy {strategy} --serve"


class Dead(Exception):
    def __init__(self, side, why):
        super().__init__(f"{side.name}: {why}")
        self.side = side


class Watch:
    """What the GPUs draw and at which clock they run, whoever runs on them; nothing without nvidia-smi."""

    ASKED = "index,power.draw,clocks.sm"

    def __init__(self, gpus):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.gpus = (visible.split(",") if visible else [str(i) for i in range(gpus)])[:gpus]
        self.seen = collections.deque(maxlen=4000)
        try:
            command = ["nvidia-smi", f"--query-gpu={self.ASKED}", "--format=csv,noheader,nounits", "-lms", "100"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
            threading.Thread(target=self.read, daemon=True).start()
        except OSError:
            self.process = None

    def read(self):
        for line in self.process.stdout:
            try:
                gpu, power_w, clock_mhz = line.split(", ")
                self.seen.append((time.monotonic(), gpu, float(power_w), float(clock_mhz)))
            except ValueError:
                continue

    def since(self, begin):
        """Medians over what was seen since, by GPU."""
        medians = {}
        for name, at in (("power_w", 2), ("clock_mhz", 3)):
            of = [[x[at] for x in list(self.seen) if x[0] >= begin and x[1] == gpu] for gpu in self.gpus]
            if all(of):
                medians[name] = [round(statistics.median(values)) for values in of]
        return {"seen": medians} if medians else {}

    def end(self):
        if self.process:
            self.process.kill()
            self.process.wait()


class Side:
    """A server of the protocol of dit_gpu.py --serve."""

    def __init__(self, name, command, all_):
        self.name, self.command, self.all = name, [str(c) for c in command], all_
        self.lines, self.tail = queue.Queue(), collections.deque(maxlen=60)
        # A session of its own, so that all it starts can be ended with it; and it ends with this process.
        self.process = subprocess.Popen(self.command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
        for stream, take in ((self.process.stdout, self.lines.put), (self.process.stderr, self.tail.append)):
            threading.Thread(target=self.read, args=(stream, take), daemon=True).start()

    def read(self, stream, take):
        for line in stream:
            take(line.decode(errors="replace").rstrip("\n"))

    def answer(self, timeout_s, wanted):
        """The next line that is an object with the key `wanted`. Whoever ends meanwhile, ends the run."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                # What it started may hold its output open, so that its end is not the output's.
                for side in self.all.values():
                    if side.process.poll() is not None:
                        raise Dead(side, f"ended, status {side.process.returncode}") from None
                if time.monotonic() > end:
                    raise Dead(self, f"no answer within {timeout_s:.0f} s") from None
                continue
            self.tail.append(line)
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and wanted in value:
                return value

    def run(self, size, steps, timeout_s):
        try:
            self.process.stdin.write(f"run {size} {steps}\n".encode())
            self.process.stdin.flush()
        except OSError:
            pass
        got = self.answer(timeout_s, "steps_ms")
        if len(got["steps_ms"]) != steps:
            raise Dead(self, f"{len(got['steps_ms'])} times for {steps} steps")
        return got

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


def sides_of(args, gpus):
    """Name -> command of all that share the GPUs."""
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


def chooses_by_time(name, command):
    """Whether a side times ways to do things while it starts, and must have the GPUs to itself; the others start beside one another."""
    words = [str(c) for c in command]
    return name.startswith("ours") or "--autotune" in words or not {"--fp8", "block"} & set(words)


def points_of(args, gpus):
    """The points of every size, one after another: all sides are started once and ended with the last."""
    sides, facts, watch = {}, {}, Watch(gpus)
    try:
        ready = lambda name: facts.update({name: sides[name].answer(args.start_timeout, "ready")})
        for name, command in sides_of(args, gpus).items():
            print(f"{gpus} GPUs: starting {name}", file=sys.stderr, flush=True)
            sides[name] = Side(name, command, sides)
            if chooses_by_time(name, command):
                ready(name)
        for name in sides:
            if name not in facts:
                ready(name)
        for size in args.sizes.split(","):
            rounds = rounds_of(args, size, gpus, sides, watch)
            of_size = {name: {k: v for k, v in f.items() if k != "points"} | f["points"][size] for name, f in facts.items()}
            yield point(size, gpus, sides, of_size, rounds)
        for side in sides.values():
            side.quit()
    except Dead as e:
        # All of them, before anything is said: nobody must be left on the GPUs.
        for side in sides.values():
            side.kill()
        tail = "\n".join(f"  | {line}" for line in e.side.tail)
        sys.exit(f"run_gpu: {e}\n  command: {shlex.join(e.side.command)}\n{tail}")
    finally:
        watch.end()
        for side in sides.values():
            side.kill()


def rounds_of(args, size, gpus, sides, watch):
    """Name -> answers, one a round."""
    step_ms = {name: statistics.median(side.run(size, 3, args.run_timeout)["steps_ms"]) for name, side in sides.items()}
    rounds = {name: [] for name in sides}
    for i in range(args.rounds):
        order = list(sides)[i % len(sides):] + list(sides)[: i % len(sides)]
        for name in order:
            settle = math.ceil(args.settle_s * 1e3 / step_ms[name])
            if settle:
                sides[name].run(size, settle, args.run_timeout)
            begin = time.monotonic()
            rounds[name].append(sides[name].run(size, args.steps, args.run_timeout) | watch.since(begin))
        medians = ", ".join(f"{n} {statistics.median(rounds[n][-1]['steps_ms']):.1f}" for n in sides)
        print(f"{size} {gpus} GPUs, round {i + 1}: {medians} ms", file=sys.stderr, flush=True)
    return rounds


def point(size, gpus, sides, facts, rounds):
    results = {}
    for name, answers in rounds.items():
        steps = sorted(x for a in answers for x in a["steps_ms"])
        at = lambda q: round(steps[min(len(steps) - 1, int(q * len(steps)))], 3)
        median = statistics.median(steps)
        results[name] = {"median_ms": round(median, 3), "p10_ms": at(0.1), "p90_ms": at(0.9), "fps": round(FRAMES * 1e3 / median, 3),
                         "steps": len(steps), "rounds_ms": [round(statistics.median(a["steps_ms"]), 3) for a in answers],
                         "rest": {k: v for k, v in answers[-1].items() if k != "steps_ms"},
                         "command": shlex.join(sides[name].command), "facts": facts[name]}
    # Without PyTorch builds of ours are compared, with the first.
    best = min((n for n in results if n.startswith("pytorch") and not n.endswith("fp8")), key=lambda n: results[n]["median_ms"],
               default=next(iter(results)))
    ratios = {n: round(results[best]["median_ms"] / r["median_ms"], 4) for n, r in results.items() if n.startswith("ours")}
    return {"size": size, "gpus": gpus, "best_pytorch": best, "speed_over_best_pytorch": ratios, "sides": results}


def table(points):
    base = "PyTorch's best bf16" if any(p["best_pytorch"].startswith("pytorch") for p in points) else "the first"
    rows = [("size", "GPUs", "side", "median ms", "p10", "p90", "FPS", "steps", f"over {base}")]
    for p in points:
        for name, r in p["sides"].items():
            over = p["sides"][p["best_pytorch"]]["median_ms"] / r["median_ms"]
            rows.append((p["size"], str(p["gpus"]), name, f"{r['median_ms']:.2f}", f"{r['p10_ms']:.2f}", f"{r['p90_ms']:.2f}",
                         f"{r['fps']:.2f}", str(r["steps"]), f"{over:.3f}"))
    rows.insert(1, ("---",) * len(rows[0]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def smi():
    """The GPUs, as nvidia-smi sees them; nothing without it."""
    asked = "name,driver_version,power.limit,clocks.max.sm,memory.total"
    try:
        text = subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
        return text.stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def commit():
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def save(folder, args, points):
    facts = next((r["facts"] for p in points for n, r in p["sides"].items() if n.startswith("pytorch")), {})
    host = {"gpus": smi(), "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(), "commit": commit()}
    host |= {k: facts[k] for k in ("gpu", "driver", "power_limit_w", "torch", "cuda", "cudnn", "nccl") if k in facts}
    what = ("denoise forwards of a 14B video generator, synthetic weights, KV window of 6 frames; a step is 5 forwards of a "
            "chunk of 12 frames, its time the slowest rank's by device events; all sides on the same GPUs in turn, "
            f"{args.rounds} rounds of {args.steps} steps after {args.settle_s} s that are not counted; a side holds all sizes at once")
    lines = table(points)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"bench": "dit", "commands": [shlex.join(["python3", "tools/bench/run_gpu.py", *sys.argv[1:]])], "host": host,
              "date": folder.name[:10], "what": what, "table": lines, "points": points}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    words = ", ".join(f"{k} {v}" for k, v in host.items() if k != "gpus" and v is not None)
    (folder / "README.md").write_text(f"# {folder.name}\n\n{what[0].upper() + what[1:]}.\n\n" + "\n".join(lines)
                                      + f"\n\n{words}\n\n```sh\n{result['commands'][0]}\n```\n")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", default="480x832,320x576")
    p.add_argument("--gpus", default="1,2,4")
    p.add_argument("--strategies", default="ulysses,megatron", help="PyTorch's")
    p.add_argument("--cuts", default="pieces", help="PyTorch's: pieces or block, or both by a comma")
    p.add_argument("--ours", type=Path, default=REPO / "target/release/tessera", help="our binary")
    p.add_argument("--ours-args", default=OURS, help="its arguments (default: %(default)s)")
    p.add_argument("--ours-strategies", default="ulysses")
    p.add_argument("--beside", type=Path, action="append", default=[], help="another build of ours, by its file's name; may be repeated")
    p.add_argument("--skip-ours", action="store_true")
    p.add_argument("--skip-pytorch", action="store_true", help="builds of ours alone, against the first")
    p.add_argument("--fp8", action="store_true", help="ours in fp8 against PyTorch's bf16, and PyTorch's fp8 beside it")
    p.add_argument("--python", default=sys.executable, help="an interpreter that has torch")
    p.add_argument("--pytorch-args", default="", help="more arguments for dit_gpu.py")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=8, help="counted, per side and round")
    p.add_argument("--settle-s", type=float, default=1.5)
    p.add_argument("--start-timeout", type=float, default=600)
    p.add_argument("--run-timeout", type=float, default=180)
    p.add_argument("--runs", type=Path, default=REPO / "bench/runs", help="where the dated folder goes")
    args = p.parse_args()
    if not args.skip_ours and not args.ours.is_file():
        p.error(f"no binary at {args.ours}: --ours PATH or --skip-ours")
    if args.skip_ours and (args.skip_pytorch or args.beside):
        p.error("--skip-ours runs nothing but PyTorch: neither --skip-pytorch nor --beside goes with it")
    if missing := [str(b) for b in args.beside if not b.is_file()]:
        p.error(f"no binary at {', '.join(missing)}")
    if len({b.name for b in args.beside}) < len(args.beside):
        p.error("two builds of --beside have one name, which is all that tells them apart")

    date, n = datetime.date.today().isoformat(), 1
    while (args.runs / f"{date}-h200-dit-{n}").exists():
        n += 1
    folder, points = args.runs / f"{date}-h200-dit-{n}", []
    sizes = args.sizes.split(",")
    for gpus in map(int, args.gpus.split(",")):
        for one in points_of(args, gpus):
            points.append(one)
            points.sort(key=lambda p: (sizes.index(p["size"]), p["gpus"]))
            # After each, so that a run that is cut short keeps what it has.
            save(folder, args, points)
    print("\n".join(table(points)))
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
