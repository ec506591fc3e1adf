"""PyTorch's best at one denoise forward of a 14B video generator on 1 to 8 GPUs: compiled passes or blocks, cuDNN
attention, NCCL, the whole forward replayed from a CUDA graph. Synthetic weights, one process per GPU.

A step is the 5 forwards of a chunk of 12 frames. Its time is the slowest rank's, by events on the device around the five
replays; before each step the ranks meet on the device. FPS = 12 / median step.

--serve answers on standard output, one JSON object to a line: first {"ready": true, "points": {SIZE: {...}}, ...} when every
size is built and the device is warm, then for each line "run SIZE STEPS" of standard input {"steps_ms": [...], ...}; "quit"
or the end of input ends it. All sizes share one process per GPU and its weights; caches and graphs are each size's own.
--check compares with float64 by tools/pytorch/wan.py and times nothing; --dump writes such a case for others.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

FORWARDS, FRAMES = 5, 12


class Sampler:
    """Clock, power and temperature of a device, while something runs."""

    def __init__(self, index):
        self.samples, self.handle, self.limit_w, self.driver = [], None, None, None
        try:
            import pynvml
            import torch
            pynvml.nvmlInit()
            self.nvml = pynvml
            # Its own number here need not be NVML's.
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode())
            self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3
            driver = pynvml.nvmlSystemGetDriverVersion()
            self.driver = driver.decode() if isinstance(driver, bytes) else driver
        except Exception as e:
            print(f"no clocks or power: {type(e).__name__} {e}", file=sys.stderr)

    def __enter__(self):
        self.samples, self.over = [], threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        if self.handle is not None:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        if self.handle is not None:
            self.thread.join()

    def sample(self):
        n = self.nvml
        while not self.over.wait(0.1):
            try:
                self.samples.append((n.nvmlDeviceGetClockInfo(self.handle, n.NVML_CLOCK_SM),
                                     n.nvmlDeviceGetPowerUsage(self.handle) / 1e3,
                                     n.nvmlDeviceGetTemperature(self.handle, n.NVML_TEMPERATURE_GPU)))
            except Exception:
                return

    def medians(self):
        if not self.samples:
            return None
        return dict(zip(("clock_mhz", "power_w", "temperature_c"), (round(statistics.median(x)) for x in zip(*self.samples))))

    def used_gib(self):
        """Of the whole device, whoever uses it."""
        return None if self.handle is None else round(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / 2**30, 2)


class Rank:
    """One GPU's side: builds, captures and replays."""

    def __init__(self, rank, args, port):
        import torch
        import dit_model
        self.torch, self.model, self.rank, self.args = torch, dit_model, rank, args
        self.cuda = args.device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        if args.gpus > 1:
            more = dict(device_id=self.device) if self.cuda else {}
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo", rank=rank, world_size=args.gpus,
                                                 init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(minutes=15), **more)
        self.sampler = Sampler(rank) if self.cuda else None
        self.forward = None

    def build(self):
        torch, args = self.torch, self.args
        if args.blas != "default":
            torch.backends.cuda.preferred_blas_library(args.blas)
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]
        if self.cuda:
            # Called before anything is compiled, so that attention is the same inside compiled blocks.
            self.backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
            if dtype == torch.bfloat16:
                self.backend.__enter__()
        sizes = args.size.split(",")
        if len(sizes) > 1 and not args.eager:
            # Each size has compiled forms of its own of the same functions.
            from torch._dynamo import config
            config.recompile_limit *= len(sizes)
        self.built, points = {}, {}
        for size in sizes:
            points[size] = self.build_size(size, dtype)
            self.built[size] = self.source, self.forward, self.graph
        facts = {"layers": self.forward.sizes.layers, "points": points}
        if self.cuda:
            facts |= {
                "gpu": torch.cuda.get_device_name(self.device), "torch": torch.__version__,
                "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": self.sampler.driver,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "power_limit_w": self.sampler.limit_w,
            } | self.memory()
        return facts

    def build_size(self, size, dtype):
        torch, args = self.torch, self.args
        began = time.time()
        sizes = self.model.Sizes.of(size, args.layers, args.tiny)
        self.source, self.graph = self.model.Source(sizes, args.seed, self.device, dtype), None
        self.forward = self.model.Forward(sizes, self.source, args.strategy, self.rank, args.gpus, args.cut,
                                          not args.eager, args.fp8, args.autotune, self.forward)
        placed = time.time()
        if self.cuda:
            # What drawing the weights left cached would count as the model's.
            torch.cuda.empty_cache()
            if not args.no_tune and not args.fp8 and args.cut == "pieces":
                self.forward.tune(self.time_us)
            self.capture()
        else:
            self.forward.run()
        finite = bool(self.forward.x0.isfinite().all())
        assert finite, "the result is not finite"
        facts = {"tokens": sizes.tokens, "place_s": round(placed - began, 1), "compile_s": round(time.time() - placed, 1)}
        if self.cuda:
            facts |= {"products": self.forward.products.choice, "products_us": self.forward.products.times}
        return facts

    def memory(self):
        c = self.torch.cuda
        return {"peak_allocated_gib": round(c.max_memory_allocated() / 2**30, 2),
                "peak_reserved_gib": round(c.max_memory_reserved() / 2**30, 2), "device_used_gib": self.sampler.used_gib()}

    def record(self, fn, warm):
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            fn()
        torch.cuda.synchronize()
        return graph

    def capture(self):
        torch = self.torch
        if self.args.no_graph:
            for _ in range(3):
                self.forward.run()
            torch.cuda.synchronize()
            return
        self.graph = self.record(self.forward.run, 3)
        eager = self.forward.x0.clone()
        self.forward.x0.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(eager, self.forward.x0, rtol=1e-2, atol=1e-2), "a replay gives something else"

    def time_us(self, fn):
        """Of fn(0), ..., fn(15) in a graph, per call, under load."""
        torch = self.torch

        def all_():
            for i in range(16):
                fn(i)

        graph = self.record(all_, 1)
        a, b, spans = torch.cuda.Event(True), torch.cuda.Event(True), []
        end = time.time() + 0.4
        while time.time() < end or len(spans) < 3:
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            spans.append(a.elapsed_time(b) * 1e3 / 16)
        return round(statistics.median(spans[len(spans) // 2:]), 1)

    def replay(self):
        if self.graph is None:
            self.forward.run()
        else:
            self.graph.replay()

    def run(self, size, steps):
        torch = self.torch
        self.source, self.forward, self.graph = self.built[size]
        if not self.cuda:
            spans = []
            for _ in range(steps):
                begin = time.perf_counter()
                for _ in range(FORWARDS):
                    self.forward.run()
                spans.append((time.perf_counter() - begin) * 1e3)
            return {"steps_ms": spans}
        meet = torch.zeros(1, device=self.device)
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(steps)]
        with self.sampler:
            for begin, end in events:
                if self.args.gpus > 1:
                    torch.distributed.all_reduce(meet)
                begin.record()
                for _ in range(FORWARDS):
                    self.replay()
                end.record()
            torch.cuda.synchronize()
        return {"steps_ms": [a.elapsed_time(b) for a, b in events], "device": self.sampler.medians()} | self.memory()

    def check(self):
        self.replay()
        return self.model.errors(self.forward, self.source)

    def dump(self):
        self.replay()
        self.model.dump(self.args.dump, self.forward, self.source)
        return {"dump": str(self.args.dump)}

    def profile(self):
        """Time by kernel of one forward, for reading."""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(2):
                self.replay()
            self.torch.cuda.synchronize()
        return {"profile": p.key_averages().table(sort_by="device_time_total", row_limit=30, max_name_column_width=90)}


def rank_main(rank, args, port, pipe, parent):
    # Dies with its parent, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output is the protocol's.
    os.dup2(2, 1)
    try:
        import torch
        with torch.no_grad():
            side = Rank(rank, args, port)
            while True:
                what, *more = pipe.recv()
                pipe.send(getattr(side, what)(*more))
    except EOFError:
        os._exit(0)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


class Ranks:
    """All processes of one configuration. Any that dies ends them all."""

    def __init__(self, args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        os.environ.setdefault("OMP_NUM_THREADS", "4")
        # Ranks end by _exit, since NCCL's own end may wait for ever.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(args.gpus):
            mine, its = context.Pipe()
            p = context.Process(target=rank_main, args=(rank, args, port, its, os.getpid()))
            p.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(p)

    def ask(self, *what, timeout_s=900):
        for pipe in self.pipes:
            try:
                pipe.send(what)
            except OSError:
                self.fail(what)
        answers, end = {}, time.time() + timeout_s
        while len(answers) < len(self.pipes):
            waiting = {p: r for r, p in enumerate(self.pipes) if r not in answers}
            ready = connection.wait([*waiting, *(p.sentinel for p in self.processes)], max(0, end - time.time()))
            if not ready:
                self.fail(what, f"no answer within {timeout_s} s")
            for pipe in (p for p in ready if p in waiting):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    self.fail(what)
            if all(p not in waiting for p in ready):
                self.fail(what)
        return [answers[r] for r in range(len(self.pipes))]

    def fail(self, what, why=None):
        time.sleep(0.5)
        dead = {r: p.exitcode for r, p in enumerate(self.processes) if p.exitcode is not None}
        self.kill()
        sys.exit(f"dit_gpu: {why or f'ranks ended (rank: status): {dead}'} at {' '.join(map(str, what))}")

    def kill(self):
        for p in self.processes:
            p.kill()
        for p in self.processes:
            p.join()

    def quit(self):
        for pipe in self.pipes:
            pipe.close()
        for p in self.processes:
            p.join(20)
        self.kill()

    def run(self, size, steps):
        answers = self.ask("run", size, steps)
        steps_ms = [round(max(x), 3) for x in zip(*(a["steps_ms"] for a in answers))]
        result = {"steps_ms": steps_ms}
        if answers[0].get("device"):
            for name in answers[0]["device"]:
                result[name] = [a["device"][name] for a in answers if a["device"]]
        for name in ("peak_allocated_gib", "peak_reserved_gib", "device_used_gib"):
            if answers[0].get(name) is not None:
                result[name] = max(a[name] for a in answers)
        return result


def lines(ranks):
    """Lines of standard input; ends with it, or with a rank."""
    rest = b""
    while True:
        ready = connection.wait([0, *(p.sentinel for p in ranks.processes)])
        if any(r != 0 for r in ready):
            ranks.fail(("idle",))
        more = os.read(0, 65536)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        yield from (line.decode().strip() for line in whole)


def say(result, path=None):
    line = json.dumps(result)
    print(line, flush=True)
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")


def one(args):
    facts = {"side": "pytorch", "strategy": args.strategy if args.gpus > 1 else "one", "gpus": args.gpus, "size": args.size,
             "dtype": "fp8" if args.fp8 else args.dtype, "cut": args.cut, "graph": not args.no_graph}
    ranks = Ranks(args)
    try:
        facts |= ranks.ask("build")[0]
        sizes = args.size.split(",")
        if not args.serve:
            facts |= facts.pop("points")[args.size]
        if args.dump:
            return say(facts | ranks.ask("dump")[0], args.out)
        if args.check:
            each = ranks.ask("check")
            worst = {name: [float(f"{max(e[name][j] for e in each):.2e}") for j in (0, 1)] for name in each[0]}
            say(facts | {"relative_error_max_and_rms": worst}, args.out)
            bound = args.bound or (0.12 if args.fp8 else 2e-2 if args.dtype == "bf16" else 1e-5)
            if any(e[1] > bound for e in worst.values()):
                sys.exit(f"dit_gpu: further from float64 than {bound}")
            return
        if args.profile:
            print(ranks.ask("profile")[0]["profile"])
            return
        # H200s begin cool and fast, and are slowed by their power limit after a second or two.
        first = ranks.run(sizes[0], 2)["steps_ms"][-1]
        ranks.run(sizes[0], max(1, round(args.warm_s * 1e3 / first)))
        if args.serve:
            say({"ready": True} | facts | {"forwards": FORWARDS, "frames": FRAMES})
            for line in lines(ranks):
                match line.split():
                    case ["run", size, steps] if size in sizes and steps.isdigit() and 0 < int(steps) <= 100_000:
                        say(ranks.run(size, int(steps)))
                    case ["quit"]:
                        return
                    case []:
                        pass
                    case _:
                        sys.exit(f"dit_gpu: not understood: {line!r}")
            return
        result = ranks.run(args.size, args.steps)
        spans = sorted(result.pop("steps_ms"))
        at = lambda q: round(spans[min(len(spans) - 1, int(q * len(spans)))], 3)
        median = statistics.median(spans)
        say(facts | {"median_ms": round(median, 3), "p10_ms": at(0.1), "p90_ms": at(0.9), "fps": round(FRAMES * 1e3 / median, 3),
                     "steps": len(spans)} | result, args.out)
    finally:
        ranks.quit()


def main():
    # Once for itself and the processes it starts: a kill must not leave them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--size", default="480x832", help="HxW in pixels, or several by commas")
    p.add_argument("--strategy", default="ulysses", help="ulysses or megatron, or both by a comma")
    p.add_argument("--cut", choices=["pieces", "block"], default="pieces", help="what torch.compile sees at once")
    p.add_argument("--layers", type=int, help="blocks, instead of 40")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--warm-s", type=float, default=5.0)
    p.add_argument("--dtype", choices=["bf16", "f32"], help="default: bf16, f32 on the CPU")
    p.add_argument("--fp8", action="store_true", help="products in e4m3, scaled by rows")
    p.add_argument("--autotune", action="store_true", help="let inductor search products too (minutes)")
    p.add_argument("--no-tune", action="store_true", help="do not choose among eager ways to make a product")
    p.add_argument("--blas", choices=["default", "cublas", "cublaslt"], default="default")
    p.add_argument("--no-graph", action="store_true")
    p.add_argument("--eager", action="store_true", help="nothing compiled")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--tiny", action="store_true", help="a small model of the same form")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--serve", action="store_true")
    p.add_argument("--check", action="store_true")
    p.add_argument("--bound", type=float, help="of --check")
    p.add_argument("--dump", type=Path, help="a folder")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--out", type=Path, help="also append results here")
    args = p.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "f32")
    if args.dump and args.gpus > 1:
        p.error("--dump is for one GPU")
    if args.serve and "," in args.strategy:
        p.error("--serve is for one strategy")
    for size in [args.size] if args.serve else args.size.split(","):
        for strategy in args.strategy.split(",") if args.gpus > 1 else ["ulysses"]:
            one(argparse.Namespace(**vars(args) | {"size": size, "strategy": strategy}))


if __name__ == "__main__":
    main()
