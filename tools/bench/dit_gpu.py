"""Times the fastest PyTorch implementation that we know of one denoise forward of a 14B video generator on 1 to 8 GPUs.

torch.compile compiles the elementwise and norm functions, or whole transformer blocks. Attention is cuDNN's, collectives are
NCCL's, and a CUDA graph replays the whole forward. Weights are synthetic, and each GPU has one process.

A step is the 5 forwards of a chunk of 12 frames. The time of a step is that of the slowest rank, measured by device events around
the five replays; the ranks synchronise on the device before each step. FPS = 12 / median step.

With --serve the program writes one JSON object per line to standard output. The first is {"ready": true, "points": {SIZE: {...}},
...}, as soon as every size is built and the device is warm. The program then answers each line "run SIZE STEPS" of standard input
with {"steps_ms": [...], ...}, and ends at "quit" or at the end of input. All sizes share one process per GPU and its weights;
each size has its own caches and graphs. --check compares the result with tools/pytorch/wan.py in float64 and times nothing;
--dump writes such a reference case for other implementations.
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
    """Samples clock, power and temperature of a device inside a `with` block."""

    def __init__(self, index):
        self.samples, self.nvml_device, self.limit_w, self.driver = [], None, None, None
        try:
            import pynvml
            import torch
            pynvml.nvmlInit()
            self.nvml = pynvml
            # CUDA and NVML may number the devices differently.
            self.nvml_device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode())
            self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self.nvml_device) / 1e3
            driver = pynvml.nvmlSystemGetDriverVersion()
            self.driver = driver.decode() if isinstance(driver, bytes) else driver
        except Exception as e:
            print(f"clock and power are not sampled: {type(e).__name__} {e}", file=sys.stderr)

    def __enter__(self):
        self.samples, self.stopped = [], threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        if self.nvml_device is not None:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        if self.nvml_device is not None:
            self.thread.join()

    def sample(self):
        n = self.nvml
        while not self.stopped.wait(0.1):
            try:
                self.samples.append((n.nvmlDeviceGetClockInfo(self.nvml_device, n.NVML_CLOCK_SM),
                                     n.nvmlDeviceGetPowerUsage(self.nvml_device) / 1e3,
                                     n.nvmlDeviceGetTemperature(self.nvml_device, n.NVML_TEMPERATURE_GPU)))
            except Exception:
                return

    def medians(self):
        if not self.samples:
            return None
        return dict(zip(("clock_mhz", "power_w", "temperature_c"), (round(statistics.median(x)) for x in zip(*self.samples))))

    def used_gib(self):
        """Returns the memory in use on the whole device, by all processes."""
        return None if self.nvml_device is None else round(self.nvml.nvmlDeviceGetMemoryInfo(self.nvml_device).used / 2**30, 2)


class Rank:
    """Builds, captures and replays the forward on one GPU."""

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
            device_option = dict(device_id=self.device) if self.cuda else {}
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo", rank=rank, world_size=args.gpus,
                                                 init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(minutes=15), **device_option)
        self.sampler = Sampler(rank) if self.cuda else None
        self.forward = None

    def build(self):
        torch, args = self.torch, self.args
        if args.blas != "default":
            torch.backends.cuda.preferred_blas_library(args.blas)
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]
        if self.cuda:
            # Select the backend before the first compilation, so that compiled blocks use it too.
            self.backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
            if dtype == torch.bfloat16:
                self.backend.__enter__()
        sizes = args.size.split(",")
        if len(sizes) > 1 and not args.eager:
            # Each size has its own compiled versions of the same functions.
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
        start_time = time.time()
        sizes = self.model.Sizes.for_picture(size, args.layers, args.tiny)
        self.source, self.graph = self.model.Source(sizes, args.seed, self.device, dtype), None
        self.forward = self.model.Forward(sizes, self.source, args.strategy, self.rank, args.gpus, args.cut,
                                          not args.eager, args.fp8, args.autotune, self.forward)
        weights_time = time.time()
        if self.cuda:
            # Memory cached while the weights were drawn would count as the model's.
            torch.cuda.empty_cache()
            if not args.no_tune and not args.fp8 and args.cut == "split":
                self.forward.tune(self.time_gemm_us)
            self.capture()
        else:
            self.forward.run()
        finite = bool(self.forward.x0.isfinite().all())
        assert finite, "the result is not finite"
        facts = {"tokens": sizes.tokens, "place_s": round(weights_time - start_time, 1), "compile_s": round(time.time() - weights_time, 1)}
        if self.cuda:
            facts |= {"gemms": self.forward.gemms.choice, "gemms_us": self.forward.gemms.times}
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
        # NCCL's watchdog thread queries events during the capture.
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
        assert torch.allclose(eager, self.forward.x0, rtol=1e-2, atol=1e-2), "a replay differs from the eager forward"

    def time_gemm_us(self, fn):
        """Returns the median time per call of fn(0), ..., fn(15), replayed from a CUDA graph under load."""
        torch = self.torch

        def call_all():
            for i in range(16):
                fn(i)

        graph = self.record(call_all, 1)
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
        barrier = torch.zeros(1, device=self.device)
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(steps)]
        with self.sampler:
            for begin, end in events:
                if self.args.gpus > 1:
                    torch.distributed.all_reduce(barrier)
                begin.record()
                for _ in range(FORWARDS):
                    self.replay()
                end.record()
            torch.cuda.synchronize()
        return {"steps_ms": [a.elapsed_time(b) for a, b in events], "device": self.sampler.medians()} | self.memory()

    def check(self):
        self.replay()
        return self.model.relative_errors(self.forward, self.source)

    def dump(self):
        self.replay()
        self.model.dump(self.args.dump, self.forward, self.source)
        return {"dump": str(self.args.dump)}

    def profile(self):
        """Returns a table of the time per kernel, for a person to read."""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(2):
                self.replay()
            self.torch.cuda.synchronize()
        return {"profile": p.key_averages().table(sort_by="device_time_total", row_limit=30, max_name_column_width=90)}


def run_rank(rank, args, port, pipe, parent):
    # Linux kills this process when its parent ends, however the parent ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output is reserved for the protocol; send prints to standard error.
    os.dup2(2, 1)
    try:
        import torch
        with torch.no_grad():
            worker = Rank(rank, args, port)
            while True:
                method, *arguments = pipe.recv()
                pipe.send(getattr(worker, method)(*arguments))
    except EOFError:
        os._exit(0)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


class Ranks:
    """All rank processes of one configuration. If one ends, all are killed."""

    def __init__(self, args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        os.environ.setdefault("OMP_NUM_THREADS", "4")
        # Ranks end by _exit, because NCCL's teardown may hang; the resource tracker would warn about that.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(args.gpus):
            parent_end, child_end = context.Pipe()
            p = context.Process(target=run_rank, args=(rank, args, port, child_end, os.getpid()))
            p.start()
            child_end.close()
            self.pipes.append(parent_end)
            self.processes.append(p)

    def request(self, *call, timeout_s=900):
        """Calls a method of `Rank` on all ranks and returns their answers in rank order."""
        for pipe in self.pipes:
            try:
                pipe.send(call)
            except OSError:
                self.fail(call)
        answers, end = {}, time.time() + timeout_s
        while len(answers) < len(self.pipes):
            pending = {p: r for r, p in enumerate(self.pipes) if r not in answers}
            ready = connection.wait([*pending, *(p.sentinel for p in self.processes)], max(0, end - time.time()))
            if not ready:
                self.fail(call, f"no answer within {timeout_s} s")
            for pipe in (p for p in ready if p in pending):
                try:
                    answers[pending[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    self.fail(call)
            if all(p not in pending for p in ready):
                self.fail(call)
        return [answers[r] for r in range(len(self.pipes))]

    def fail(self, call, why=None):
        time.sleep(0.5)
        dead = {r: p.exitcode for r, p in enumerate(self.processes) if p.exitcode is not None}
        self.kill()
        sys.exit(f"dit_gpu: {why or f'ranks ended (rank: exit status): {dead}'} during {' '.join(map(str, call))}")

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
        answers = self.request("run", size, steps)
        steps_ms = [round(max(x), 3) for x in zip(*(a["steps_ms"] for a in answers))]
        result = {"steps_ms": steps_ms}
        if answers[0].get("device"):
            for name in answers[0]["device"]:
                result[name] = [a["device"][name] for a in answers if a["device"]]
        for name in ("peak_allocated_gib", "peak_reserved_gib", "device_used_gib"):
            if answers[0].get(name) is not None:
                result[name] = max(a[name] for a in answers)
        return result


def stdin_lines(ranks):
    """Yields the lines of standard input until it ends; exits if a rank ends."""
    unfinished = b""
    while True:
        ready = connection.wait([0, *(p.sentinel for p in ranks.processes)])
        if any(r != 0 for r in ready):
            ranks.fail(("idle",))
        received = os.read(0, 65536)
        if not received:
            return
        *complete, unfinished = (unfinished + received).split(b"\n")
        yield from (line.decode().strip() for line in complete)


def emit(result, path=None):
    """Prints a result as one JSON line, and appends it to the file at `path` if there is one."""
    line = json.dumps(result)
    print(line, flush=True)
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")


def run_configuration(args):
    facts = {"side": "pytorch", "strategy": args.strategy if args.gpus > 1 else "one", "gpus": args.gpus, "size": args.size,
             "dtype": "fp8" if args.fp8 else args.dtype, "cut": args.cut, "graph": not args.no_graph}
    ranks = Ranks(args)
    try:
        facts |= ranks.request("build")[0]
        sizes = args.size.split(",")
        if not args.serve:
            facts |= facts.pop("points")[args.size]
        if args.dump:
            return emit(facts | ranks.request("dump")[0], args.out)
        if args.check:
            errors = ranks.request("check")
            worst = {name: [float(f"{max(e[name][j] for e in errors):.2e}") for j in (0, 1)] for name in errors[0]}
            emit(facts | {"relative_error_max_and_rms": worst}, args.out)
            bound = args.bound or (0.12 if args.fp8 else 2e-2 if args.dtype == "bf16" else 1e-5)
            if any(e[1] > bound for e in worst.values()):
                sys.exit(f"dit_gpu: the error relative to float64 exceeds {bound}")
            return
        if args.profile:
            print(ranks.request("profile")[0]["profile"])
            return
        # A cool H200 starts at a high clock; after a second or two its power limit lowers the clock.
        first = ranks.run(sizes[0], 2)["steps_ms"][-1]
        ranks.run(sizes[0], max(1, round(args.warm_s * 1e3 / first)))
        if args.serve:
            emit({"ready": True} | facts | {"forwards": FORWARDS, "frames": FRAMES})
            for line in stdin_lines(ranks):
                match line.split():
                    case ["run", size, steps] if size in sizes and steps.isdigit() and 0 < int(steps) <= 100_000:
                        emit(ranks.run(size, int(steps)))
                    case ["quit"]:
                        return
                    case []:
                        pass
                    case _:
                        sys.exit(f"dit_gpu: unknown request: {line!r}")
            return
        result = ranks.run(args.size, args.steps)
        spans = sorted(result.pop("steps_ms"))
        quantile = lambda q: round(spans[min(len(spans) - 1, int(q * len(spans)))], 3)
        median = statistics.median(spans)
        emit(facts | {"median_ms": round(median, 3), "p10_ms": quantile(0.1), "p90_ms": quantile(0.9), "fps": round(FRAMES * 1e3 / median, 3),
                     "steps": len(spans)} | result, args.out)
    finally:
        ranks.quit()


def main():
    # Exit by SystemExit, so that the `finally` of run_configuration also ends the rank processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    p.add_argument("--size", default="480x832", help="HxW in pixels; separate several sizes by commas")
    p.add_argument("--strategy", default="ulysses", help="ulysses, megatron, or both separated by a comma")
    p.add_argument("--cut", choices=["split", "block"], default="split",
                   help="scope of torch.compile: each elementwise or norm function by itself, with GEMMs and attention as library "
                        "calls between them (split), or a whole transformer block (block)")
    p.add_argument("--layers", type=int, help="number of transformer blocks (default: 40)")
    p.add_argument("--steps", type=int, default=30, help="number of steps to measure")
    p.add_argument("--warm-s", type=float, default=5.0, help="warm-up in seconds")
    p.add_argument("--dtype", choices=["bf16", "f32"], help="default: bf16 on GPUs, f32 on the CPU")
    p.add_argument("--fp8", action="store_true", help="GEMMs in e4m3 with one scale per row")
    p.add_argument("--autotune", action="store_true", help="let Inductor autotune GEMMs too (takes minutes)")
    p.add_argument("--no-tune", action="store_true", help="do not time the alternatives for each eager GEMM")
    p.add_argument("--blas", choices=["default", "cublas", "cublaslt"], default="default", help="BLAS library that PyTorch prefers")
    p.add_argument("--no-graph", action="store_true", help="run forwards without a CUDA graph")
    p.add_argument("--eager", action="store_true", help="compile nothing")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--tiny", action="store_true", help="a small model with the same structure")
    p.add_argument("--seed", type=int, default=1, help="seed of the synthetic weights and inputs")
    p.add_argument("--serve", action="store_true", help="answer requests on standard input, as described above")
    p.add_argument("--check", action="store_true", help="compare the result with float64 instead of timing")
    p.add_argument("--bound", type=float, help="maximum relative rms error that --check accepts")
    p.add_argument("--dump", type=Path, help="folder to write a reference case to")
    p.add_argument("--profile", action="store_true", help="print the time per kernel of two forwards")
    p.add_argument("--out", type=Path, help="also append the results to this file")
    args = p.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "f32")
    if args.dump and args.gpus > 1:
        p.error("--dump needs one GPU")
    if args.serve and "," in args.strategy:
        p.error("--serve accepts one strategy")
    for size in [args.size] if args.serve else args.size.split(","):
        for strategy in args.strategy.split(",") if args.gpus > 1 else ["ulysses"]:
            run_configuration(argparse.Namespace(**vars(args) | {"size": size, "strategy": strategy}))


if __name__ == "__main__":
    main()
