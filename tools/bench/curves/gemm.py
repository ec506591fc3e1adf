"""Checks and times the Hopper GEMM kernel of gemm_sm90.cu, and compares it with cuBLASLt through PyTorch.

python gemm.py [--shapes ROWSxCOLUMNSxINNER,...] [--tile-rows 184,168,...]

The program needs one H100 or H200 and PyTorch, and compiles the kernel as attention.py does. First it checks some tile sizes: it
compares results with float64, and bit by bit with PyTorch. Each check has its own process, because a trap destroys the CUDA
context. Then it times each shape and PyTorch's GEMM by graph replays: a few calls on an idle device (cold), and calls without a
pause until the power limit determines the clock (sustained). --epilogue selects what the timed kernels do after the main loop:
add a bias (plain), add a bias and apply GELU (gelu), or add a residual (residual).
"""
import argparse, ctypes, itertools, os, subprocess, sys, time

import attention
from attention import check_cu, compile_kernel, init_device, nvml_sampler, read_source, tensor_map, watchdog

T0 = time.time()
TILE_COLUMNS, CLUSTER, TILE_INNER = 256, 2, 64
BANDS, RELEASE_SLICES, TILE_OVERHEAD_CYCLES, MAX_STAGES, MAX_SHARED_BYTES, EPILOGUE_BYTES = (13, 7), 1, 5400, 5, 232448, 2 * 2 * 32 * 128
TILE_ROW_CHOICES = [*range(200, 95, -8), 48]
EPILOGUES = ("plain", "gelu", "residual")


def wgmma_step(tile_rows):
    """Returns the function that crates/tessera-cuda/src/gemm/sm90.rs puts before the kernel; the wgmma instruction names every
    register."""
    n = tile_rows // 2
    names = ", ".join(f"%{i}" for i in range(n))
    accumulators = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return (f"__device__ __forceinline__ void wgmma_step(float (&d)[{n}], u64 w, u64 x, int more) {{\n"
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n'
            f'wgmma.mma_async.sync.aligned.m64n{tile_rows}k16.f32.bf16.bf16 {{{names}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;\\n}}"'
            f' : {accumulators} : "l"(w), "l"(x), "r"(more));\n}}\n')


def shared_bytes(tile_rows, stages):
    return stages * ((TILE_COLUMNS + tile_rows) * 128 + 16) + EPILOGUE_BYTES


def pytorch_gemm(epilogue):
    """Returns PyTorch's GEMM with this epilogue, as a function of x, w, bias and residual."""
    linear = attention.torch.nn.functional.linear
    return {"plain": lambda x, w, bias, residual: linear(x, w, bias),
            "gelu": lambda x, w, bias, residual: attention.torch._addmm_activation(bias, x, w.T, use_gelu=True),
            "residual": lambda x, w, bias, residual: attention.torch.addmm(residual, x, w.T)}[epilogue]


def count_cluster_tiles(rows, columns, tile_rows, same_columns):
    """Returns the number of cluster tiles. The blocks of a cluster share rows or, with `same_columns`, share columns."""
    return -(-rows // (tile_rows * (CLUSTER if same_columns else 1))) * -(-columns // (TILE_COLUMNS * (1 if same_columns else CLUSTER)))


def count_waves(rows, columns, tile_rows, same_columns):
    return -(-count_cluster_tiles(rows, columns, tile_rows, same_columns) // (attention.SMS // CLUSTER))


def fastest_tiles(rows, columns, inner, n):
    """Returns the n tiles with the lowest estimated time; gemm/sm90.rs chooses the first."""
    loaded = lambda tile_rows, same_columns: TILE_COLUMNS // CLUSTER + tile_rows if same_columns else TILE_COLUMNS + tile_rows // CLUSTER
    cost = lambda c: count_waves(rows, columns, *c) * (max(c[0], (c[0] + 64) // 2) * inner // 8 + TILE_OVERHEAD_CYCLES) * (1000 + 37 * loaded(*c) // c[0])
    return sorted(itertools.product(TILE_ROW_CHOICES, (1, 0)), key=cost)[:n]


class Kernel:
    def __init__(self, tile_rows, same_columns, band=None, stages=None, release_slices=RELEASE_SLICES, check_hang=False, epilogue="plain"):
        self.tile_rows, self.same_columns = tile_rows, same_columns
        self.stages = stages or max(s for s in range(2, MAX_STAGES + 1) if shared_bytes(tile_rows, s) <= MAX_SHARED_BYTES)
        defines = dict(TILE_ROWS=tile_rows, SAME_COLUMNS=same_columns, STAGES=self.stages, BAND=band or BANDS[same_columns], RELEASE_SLICES=release_slices, HANG_CHECK=int(check_hang),
                       GELU=int(epilogue == "gelu"), RESIDUAL=int(epilogue == "residual"))
        sources = [read_source("common.cuh"), read_source("hopper.cuh"), wgmma_step(tile_rows), read_source("gemm_sm90.cu")]
        image = compile_kernel("gemm_sm90.cu", defines, *sources)
        self.mod, self.f, self.shared = ctypes.c_void_p(), ctypes.c_void_p(), shared_bytes(tile_rows, self.stages)
        check_cu(attention.cu.cuModuleLoadData(ctypes.byref(self.mod), image), "load")
        check_cu(attention.cu.cuModuleGetFunction(ctypes.byref(self.f), self.mod, b"gemm"), "function")
        check_cu(attention.cu.cuFuncSetAttribute(self.f, 8, self.shared), f"shared {self.shared}")

    def prepare(self, x, w, out, bias=None, residual=None):
        (rows, inner), columns = x.shape, w.shape[0]
        first = self.tile_rows if self.same_columns else (self.tile_rows // 2 + 7) // 8 * 8
        maps = [tensor_map(w, (inner, columns), (2 * inner,), (TILE_INNER, TILE_COLUMNS // 2 if self.same_columns else TILE_COLUMNS))]
        maps += [tensor_map(x, (inner, rows), (2 * inner,), (TILE_INNER, n)) for n in (first, self.tile_rows - first or first)]
        grid = CLUSTER * min(count_cluster_tiles(rows, columns, self.tile_rows, self.same_columns), attention.SMS // CLUSTER)
        arguments = [ctypes.c_void_p(t.data_ptr() if t is not None else 0) for t in (bias, residual, out)]
        arguments += [ctypes.c_int(n) for n in (rows, columns, inner)] + [(ctypes.c_uint64 * 4)()]  # no columns go to another buffer
        ptrs = (ctypes.c_void_p * 10)(*[m.addr for m in maps], *[ctypes.addressof(n) for n in arguments])

        def go(keep=(maps, arguments)):
            stream = ctypes.c_void_p(attention.torch.cuda.current_stream().cuda_stream)
            check_cu(attention.cu.cuLaunchKernel(self.f, grid, 1, 1, 384, 1, 1, self.shared, stream, ptrs, None), "launch")
        return go


def operands(rows, columns, inner, seed=0):
    torch = attention.torch
    g = torch.Generator(device="cuda").manual_seed(seed)
    f = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.float32)
    return f(rows, inner).bfloat16(), (f(columns, inner) * 0.02).bfloat16(), f(columns).bfloat16()


def check_tile(tile_rows, same_columns, epilogue):
    init_device()
    torch, bad, worst, equal, compared = attention.torch, 0, 0.0, 0, 0
    epilogue = EPILOGUES[epilogue]
    kernel, gelu = Kernel(tile_rows, same_columns, check_hang=True, epilogue=epilogue), lambda y: torch.nn.functional.gelu(y, approximate="tanh")
    for rows, columns, inner in ((64, 512, 64), (37, 136, 128), (tile_rows, 256, 640), (300, 544, 200), (1170, 5120, 1024), (4680, 1536, 5120)):
        for with_bias in (False, True):
            x, w, b = operands(rows, columns, inner, rows)
            b = b if with_bias else None
            out = torch.full((rows + 64, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
            # The residual aliases out.
            residual = torch.randn(rows, columns, device="cuda").bfloat16() if epilogue == "residual" else None
            if residual is not None: out[:rows] = residual
            kernel.prepare(x, w, out, b, out)()
            torch.cuda.synchronize()
            clean = torch.isnan(out[rows:]).all().item()
            y = x.double() @ w.double().T + (b.double() if with_bias else 0)
            # The kernel rounds the sum to bf16 before it adds the residual.
            rounding = y.abs() / 256 if residual is not None else 0
            y = gelu(y) if epilogue == "gelu" else y + residual if residual is not None else y
            e = (out[:rows].double() - y).abs()
            tol = y.abs() / 256 + 1e-3 * y.abs().max() + rounding
            worst = max(worst, (e / tol).max().item())
            if not clean or not (e <= tol).all():
                bad += 1
                print(f"  {tile_rows}, bias {with_bias}, {rows} x {columns} x {inner}: {(~(e <= tol)).sum().item()} of {e.numel()} values are wrong; rows beyond the end were {'left alone' if clean else 'overwritten'}")
                for i in range(0, min(rows, 128), 16): print("    " + " ".join(f"{e[i:i + 16, j:j + 16].max().item():8.3f}" for j in range(0, min(columns, 256), 16)))
                if bad > 2: break
            # PyTorch's GELU epilogue always adds a bias, and its residual form never does; the latter rounds the sum before it
            # adds.
            if epilogue == "plain" or with_bias == (epilogue == "gelu"):
                different = (out[:rows] != pytorch_gemm(epilogue)(x, w, b, residual)).sum().item()
                equal += different == 0
                compared += 1
                if different: print(f"  {tile_rows}, {epilogue}, {rows} x {columns} x {inner}: {different} of {e.numel()} values differ from PyTorch's")
            # The same rows in a smaller GEMM, three times.
            few = torch.empty(rows // 2 + 1, columns, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                if residual is not None: few[:] = residual[: few.shape[0]]
                kernel.prepare(x[:few.shape[0]], w, few, b, few)()
                torch.cuda.synchronize()
                if not torch.equal(few, out[: few.shape[0]]):
                    bad += 1
                    print(f"  {tile_rows}, {rows} x {columns} x {inner}: the bits differ in a GEMM of fewer rows")
    print(f"{'BAD ' if bad else 'good'} {tile_rows} tile rows, {epilogue}, clusters share {'columns' if same_columns else 'rows'}, {kernel.stages} stages: largest error {worst:.2f} of the tolerance; {equal} of {compared} results bit-equal to PyTorch's", flush=True)
    os._exit(1 if bad else 0)


def time_shapes(a):
    init_device()
    torch, sample, kernels = attention.torch, nvml_sampler(), {}

    def graph_replay(gos, n):
        """Captures n calls in a graph, so that Python delays no side, and returns a function that times one replay."""
        for go in gos: go()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(n): gos[i % len(gos)]()

        def go():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            return lambda: end.synchronize() or begin.elapsed_time(end) / n
        return go

    def burst(gos):
        torch.cuda.synchronize()
        go, times = graph_replay(gos, 4), []
        for _ in range(3):
            time.sleep(0.05)
            go()
            times.append(go()())
        return min(times)

    def sustained(gos, ms):
        go = graph_replay(gos, max(1, int(30 / ms)))
        late, power, clock, t, last = [], [], [], time.time(), None
        while time.time() - t < a.seconds:
            current = go()
            if last: last()
            last = current
            if time.time() - t > a.seconds / 2:
                late.append(current)
                p, c = sample()
                power.append(p), clock.append(c)
        return sorted(x() for x in late)[len(late) // 2], sum(power) / len(power), sum(clock) / len(clock)

    for rows, columns, inner in [tuple(int(n) for n in s.split("x")) for s in a.shapes.split(",")]:
        # Enough weights that they do not fit in L2.
        x, _, bias = operands(rows, columns, inner)
        ws = [operands(8, columns, inner, i)[1] for i in range(max(1, int(300e6 / (columns * inner * 2))))]
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        flop = 2 * rows * columns * inner
        residual = torch.randn(rows, columns, device="cuda").bfloat16()
        if a.epilogue == "residual": bias = None
        library = ("torch", [lambda w=w: pytorch_gemm(a.epilogue)(x, w, bias, residual) for w in ws])
        sides = []
        best = itertools.product(a.tile_rows, (1, 0)) if a.tile_rows else fastest_tiles(rows, columns, inner, a.best)
        for (tile_rows, same_columns), *options in itertools.product(best, a.bands, a.stages, a.release_slices):
            config = (tile_rows, same_columns, *options)
            kernel = kernels[config] = kernels.get(config) or Kernel(*config, epilogue=a.epilogue)
            name = f"{tile_rows} rows, shared {'columns' if same_columns else 'rows'}, {kernel.stages} stages, band {options[0] or BANDS[same_columns]}, release {options[2]}, {count_waves(rows, columns, tile_rows, same_columns)} waves"
            sides.append((name, [kernel.prepare(x, w, out, bias, residual) for w in ws]))
        print(f"{rows} x {columns} x {inner}, {a.epilogue}", flush=True)
        # PyTorch runs first and last, because the device gets warmer during the run.
        base = None
        for name, gos in [library, *sides, library]:
            if time.time() - T0 > a.budget: return print("  stopped: the time budget is spent")
            cold = burst(gos)
            ms, w, mhz = sustained(gos, cold)
            base = base or (cold, ms)
            # Tensor throughput as a share of 4096 FLOP per multiprocessor and cycle at the sampled clock.
            use = flop / (ms * 1e-3) / (attention.SMS * 4096 * mhz * 1e6) if mhz else 0
            print(f"  {name:68s} cold {cold * 1e3:7.1f} us {flop / cold / 1e9:6.1f} x{base[0] / cold:5.3f}  sustained {ms * 1e3:7.1f} us {flop / ms / 1e9:6.1f} TFLOP/s x{base[1] / ms:5.3f}  {w:4.0f} W {mhz:5.0f} MHz {use:.3f} of peak/clk", flush=True)


def parse_numbers(s):
    return [int(n) for n in s.split(",")]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--correct", type=parse_numbers, help=argparse.SUPPRESS)
    p.add_argument("--check", type=parse_numbers, default=[200, 184, 168, 104], help="tile rows to check, each with clusters that share rows and with clusters that share columns")
    p.add_argument("--shapes", default="4680x5120x5120,4680x15360x5120,4680x5120x13824,2340x5120x5120,2340x5120x13824,2160x5120x5120,2160x15360x5120,2160x5120x13824,1080x5120x5120,1170x5120x5120")
    p.add_argument("--epilogue", choices=EPILOGUES, default="plain", help="epilogue of the timed GEMMs; all epilogues are checked")
    p.add_argument("--tile-rows", type=parse_numbers, help="rows of a tile (default: the --best tiles by estimated time)")
    p.add_argument("--best", type=int, default=1, help="number of tiles to time per shape")
    p.add_argument("--bands", type=parse_numbers, default=[None], help="cluster tiles of rows per band (default: as gemm/sm90.rs chooses)")
    p.add_argument("--stages", type=parse_numbers, default=[None], help="pipeline stages (default: as many as fit)")
    p.add_argument("--release-slices", type=parse_numbers, default=[RELEASE_SLICES], help="k-slices in flight when a stage's buffers are released")
    p.add_argument("--seconds", type=float, default=0.5, help="seconds of each side without a pause")
    p.add_argument("--budget", type=float, default=100, help="seconds after which no further side is timed")
    a = p.parse_args()
    if a.correct:
        watchdog(60)
        check_tile(*a.correct)
    watchdog(a.budget + 60)
    children = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--correct", f"{n},{same_columns},{epilogue}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for n in a.check for same_columns in (0, 1) for epilogue in range(len(EPILOGUES))]
    good = True
    for c in children:
        print(c.communicate()[0][-3500:], end="", flush=True)
        good &= c.returncode == 0
    print(f"the checks took {time.time() - T0:.1f} s", flush=True)
    if good: time_shapes(a)
    print(f"total time {time.time() - T0:.1f} s", flush=True)
    os._exit(0 if good else 1)
