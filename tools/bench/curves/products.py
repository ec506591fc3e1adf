"""Products on Hopper: products.cu against cuBLASLt through torch, exact and fast.

python products.py [--shapes ROWSxCOLUMNSxINNER,...] [--widths 184,168,...], on a machine with one H100 or H200 and torch. The kernel
is compiled as attention.py does it. First some widths are compared with a product in f64, each in a process of its own, for a trap
ends a context, and with torch's to the bit; then each shape is timed beside torch, by graphs: a few calls on an idle device (cold), and
without a pause until the power limit rules the clock (sustained). --ending says what happens to sums on their way out: a bias alone
(plain), a bias and GELU, or something added (residual).
"""
import argparse, ctypes, itertools, os, subprocess, sys, time

import attention
from attention import check, compiled, device, nvml, source, tensor_map, watchdog

T0 = time.time()
COLUMNS, CLUSTER, INNER = 256, 2, 64
BANDS, EARLY, TILE_CYCLES, MOST_STAGES, SHARED, TURNED = (13, 7), 1, 5400, 5, 232448, 2 * 2 * 32 * 128
WIDTHS = [*range(200, 95, -8), 48]
ENDINGS = ("plain", "gelu", "residual")


def product_step(width):
    """What crates/tessera-cuda/src/warpgroups.rs puts before the kernel: the instruction names every register."""
    n = width // 2
    names = ", ".join(f"%{i}" for i in range(n))
    held = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return (f"__device__ __forceinline__ void product_step(float (&d)[{n}], u64 w, u64 x, int more) {{\n"
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n'
            f'wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{names}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;\\n}}"'
            f' : {held} : "l"(w), "l"(x), "r"(more));\n}}\n')


def shared_of(width, stages):
    return stages * ((COLUMNS + width) * 128 + 16) + TURNED


def by_library(ending):
    """The product as torch has it: of x, w, bias and what is added."""
    linear = attention.torch.nn.functional.linear
    return {"plain": lambda x, w, bias, added: linear(x, w, bias),
            "gelu": lambda x, w, bias, added: attention.torch._addmm_activation(bias, x, w.T, use_gelu=True),
            "residual": lambda x, w, bias, added: attention.torch.addmm(added, x, w.T)}[ending]


def tiles_of(rows, columns, width, same):
    """Tiles of clusters, whose blocks take the same rows or, by `same`, the same columns."""
    return -(-rows // (width * (CLUSTER if same else 1))) * -(-columns // (COLUMNS * (1 if same else CLUSTER)))


def rounds(rows, columns, width, same):
    return -(-tiles_of(rows, columns, width, same) // (attention.SMS // CLUSTER))


def cuts(rows, columns, inner, n):
    """Those of least time, the first as warpgroups.rs takes it."""
    loaded = lambda width, same: COLUMNS // CLUSTER + width if same else COLUMNS + width // CLUSTER
    cost = lambda c: rounds(rows, columns, *c) * (max(c[0], (c[0] + 64) // 2) * inner // 8 + TILE_CYCLES) * (1000 + 37 * loaded(*c) // c[0])
    return sorted(itertools.product(WIDTHS, (1, 0)), key=cost)[:n]


class Kernel:
    def __init__(self, width, same, band=None, stages=None, early=EARLY, hang=False, ending="plain"):
        self.width, self.same = width, same
        self.stages = stages or max(s for s in range(2, MOST_STAGES + 1) if shared_of(width, s) <= SHARED)
        defines = dict(WIDTH=width, SAME_COLUMNS=same, STAGES=self.stages, BAND=band or BANDS[same], EARLY=early, HANG_CHECK=int(hang),
                       GELU=int(ending == "gelu"), RESIDUAL=int(ending == "residual"))
        sources = [source("common.cuh"), source("hopper.cuh"), product_step(width), source("products.cu")]
        image = compiled("products.cu", defines, *sources)
        self.mod, self.f, self.shared = ctypes.c_void_p(), ctypes.c_void_p(), shared_of(width, self.stages)
        check(attention.cu.cuModuleLoadData(ctypes.byref(self.mod), image), "load")
        check(attention.cu.cuModuleGetFunction(ctypes.byref(self.f), self.mod, b"products"), "function")
        check(attention.cu.cuFuncSetAttribute(self.f, 8, self.shared), f"shared {self.shared}")

    def prepare(self, x, w, out, bias=None, added=None):
        (rows, inner), columns = x.shape, w.shape[0]
        first = self.width if self.same else (self.width // 2 + 7) // 8 * 8
        maps = [tensor_map(w, (inner, columns), (2 * inner,), (INNER, COLUMNS // 2 if self.same else COLUMNS))]
        maps += [tensor_map(x, (inner, rows), (2 * inner,), (INNER, n)) for n in (first, self.width - first or first)]
        grid = CLUSTER * min(tiles_of(rows, columns, self.width, self.same), attention.SMS // CLUSTER)
        numbers = [ctypes.c_void_p(t.data_ptr() if t is not None else 0) for t in (bias, added, out)]
        numbers += [ctypes.c_int(n) for n in (rows, columns, inner)] + [(ctypes.c_uint64 * 4)()]  # no columns elsewhere
        ptrs = (ctypes.c_void_p * 10)(*[m.addr for m in maps], *[ctypes.addressof(n) for n in numbers])

        def go(keep=(maps, numbers)):
            stream = ctypes.c_void_p(attention.torch.cuda.current_stream().cuda_stream)
            check(attention.cu.cuLaunchKernel(self.f, grid, 1, 1, 384, 1, 1, self.shared, stream, ptrs, None), "launch")
        return go


def operands(rows, columns, inner, seed=0):
    torch = attention.torch
    g = torch.Generator(device="cuda").manual_seed(seed)
    f = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.float32)
    return f(rows, inner).bfloat16(), (f(columns, inner) * 0.02).bfloat16(), f(columns).bfloat16()


def correct(width, same_columns, ending):
    device()
    torch, bad, worst, same, of = attention.torch, 0, 0.0, 0, 0
    ending = ENDINGS[ending]
    kernel, gelu = Kernel(width, same_columns, hang=True, ending=ending), lambda y: torch.nn.functional.gelu(y, approximate="tanh")
    for rows, columns, inner in ((64, 512, 64), (37, 136, 128), (width, 256, 640), (300, 544, 200), (1170, 5120, 1024), (4680, 1536, 5120)):
        for with_bias in (False, True):
            x, w, b = operands(rows, columns, inner, rows)
            b = b if with_bias else None
            out = torch.full((rows + 64, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
            # Out itself is what is added.
            c = torch.randn(rows, columns, device="cuda").bfloat16() if ending == "residual" else None
            if c is not None: out[:rows] = c
            kernel.prepare(x, w, out, b, out)()
            torch.cuda.synchronize()
            clean = torch.isnan(out[rows:]).all().item()
            y = x.double() @ w.double().T + (b.double() if with_bias else 0)
            # What something is added to was rounded before.
            rounded = y.abs() / 256 if c is not None else 0
            y = gelu(y) if ending == "gelu" else y + c if c is not None else y
            e = (out[:rows].double() - y).abs()
            tol = y.abs() / 256 + 1e-3 * y.abs().max() + rounded
            worst = max(worst, (e / tol).max().item())
            if not clean or not (e <= tol).all():
                bad += 1
                print(f"  {width}, bias {with_bias}, {rows} x {columns} x {inner}: {(~(e <= tol)).sum().item()} of {e.numel()} wrong, beyond the end {'clean' if clean else 'written'}")
                for i in range(0, min(rows, 128), 16): print("    " + " ".join(f"{e[i:i + 16, j:j + 16].max().item():8.3f}" for j in range(0, min(columns, 256), 16)))
                if bad > 2: break
            # Torch's has always a bias with GELU, and never one with something added, to a product that was rounded before.
            if ending == "plain" or with_bias == (ending == "gelu"):
                others = (out[:rows] != by_library(ending)(x, w, b, c)).sum().item()
                same += others == 0
                of += 1
                if others: print(f"  {width}, {ending}, {rows} x {columns} x {inner}: {others} of {e.numel()} values are not torch's")
            # The same row among fewer, and again.
            few = torch.empty(rows // 2 + 1, columns, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                if c is not None: few[:] = c[: few.shape[0]]
                kernel.prepare(x[:few.shape[0]], w, few, b, few)()
                torch.cuda.synchronize()
                if not torch.equal(few, out[: few.shape[0]]):
                    bad += 1
                    print(f"  {width}, {rows} x {columns} x {inner}: other bits among fewer rows")
    print(f"{'BAD ' if bad else 'good'} {width} rows, {ending}, same {'columns' if same_columns else 'rows'}, {kernel.stages} stages: worst {worst:.2f} of what is allowed; torch's bits {same} of {of} times", flush=True)
    os._exit(1 if bad else 0)


def timing(a):
    device()
    torch, sample, made = attention.torch, nvml(), {}

    def replayed(gos, n):
        """A graph of n calls, so that no side waits for Python."""
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
        go, took = replayed(gos, 4), []
        for _ in range(3):
            time.sleep(0.05)
            go()
            took.append(go()())
        return min(took)

    def sustained(gos, ms):
        go = replayed(gos, max(1, int(30 / ms)))
        late, power, clock, t, last = [], [], [], time.time(), None
        while time.time() - t < a.seconds:
            this = go()
            if last: last()
            last = this
            if time.time() - t > a.seconds / 2:
                late.append(this)
                p, c = sample()
                power.append(p), clock.append(c)
        return sorted(x() for x in late)[len(late) // 2], sum(power) / len(power), sum(clock) / len(clock)

    for rows, columns, inner in [tuple(int(n) for n in s.split("x")) for s in a.shapes.split(",")]:
        # As many weights as no cache holds.
        x, _, bias = operands(rows, columns, inner)
        ws = [operands(8, columns, inner, i)[1] for i in range(max(1, int(300e6 / (columns * inner * 2))))]
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        flop = 2 * rows * columns * inner
        added = torch.randn(rows, columns, device="cuda").bfloat16()
        if a.ending == "residual": bias = None
        library = ("torch", [lambda w=w: by_library(a.ending)(x, w, bias, added) for w in ws])
        sides = []
        best = itertools.product(a.widths, (1, 0)) if a.widths else cuts(rows, columns, inner, a.best)
        for (width, same), *other in itertools.product(best, a.bands, a.stages, a.early):
            cut = (width, same, *other)
            kernel = made[cut] = made.get(cut) or Kernel(*cut, ending=a.ending)
            name = f"{width} rows, same {'columns' if same else 'rows'}, {kernel.stages} stages, band {other[0] or BANDS[same]}, early {other[2]}, {rounds(rows, columns, width, same)} rounds"
            sides.append((name, [kernel.prepare(x, w, out, bias, added) for w in ws]))
        print(f"{rows} x {columns} x {inner}, {a.ending}", flush=True)
        # Torch first and last: the device grows warm meanwhile.
        base = None
        for name, gos in [library, *sides, library]:
            if time.time() - T0 > a.budget: return print("  out of time")
            cold = burst(gos)
            ms, w, mhz = sustained(gos, cold)
            base = base or (cold, ms)
            # Tensor throughput as a share of 4096 FLOP per SM and cycle at the clock seen.
            use = flop / (ms * 1e-3) / (attention.SMS * 4096 * mhz * 1e6) if mhz else 0
            print(f"  {name:68s} cold {cold * 1e3:7.1f} us {flop / cold / 1e9:6.1f} x{base[0] / cold:5.3f}  sustained {ms * 1e3:7.1f} us {flop / ms / 1e9:6.1f} TFLOP/s x{base[1] / ms:5.3f}  {w:4.0f} W {mhz:5.0f} MHz {use:.3f} of peak/clk", flush=True)


def numbers(s):
    return [int(n) for n in s.split(",")]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--correct", type=numbers, help=argparse.SUPPRESS)
    p.add_argument("--check", type=numbers, default=[200, 184, 168, 104], help="widths to compare with f64, each with blocks that share rows and with blocks that share columns")
    p.add_argument("--shapes", default="4680x5120x5120,4680x15360x5120,4680x5120x13824,2340x5120x5120,2340x5120x13824,2160x5120x5120,2160x15360x5120,2160x5120x13824,1080x5120x5120,1170x5120x5120")
    p.add_argument("--ending", choices=ENDINGS, default="plain", help="of products that are timed; all are compared")
    p.add_argument("--widths", type=numbers, help="rows of a tile (default: the --best ones)")
    p.add_argument("--best", type=int, default=1)
    p.add_argument("--bands", type=numbers, default=[None])
    p.add_argument("--stages", type=numbers, default=[None])
    p.add_argument("--early", type=numbers, default=[EARLY])
    p.add_argument("--seconds", type=float, default=0.5, help="of each side without a pause")
    p.add_argument("--budget", type=float, default=100)
    a = p.parse_args()
    if a.correct:
        watchdog(60)
        correct(*a.correct)
    watchdog(a.budget + 60)
    children = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--correct", f"{n},{same},{ending}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for n in a.check for same in (0, 1) for ending in range(len(ENDINGS))]
    good = True
    for c in children:
        print(c.communicate()[0][-3500:], end="", flush=True)
        good &= c.returncode == 0
    print(f"correctness took {time.time() - T0:.1f} s", flush=True)
    if good: timing(a)
    print(f"all took {time.time() - T0:.1f} s", flush=True)
    os._exit(0 if good else 1)
