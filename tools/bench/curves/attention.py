"""Attention on Hopper: attention.cu against torch, exact and fast.

python attention.py [variant ...], on a machine with one H100 or H200 and torch. The kernel is compiled by the NVRTC of torch's
wheel, from the sources beside this file, from $KERNELS, or from where the repository keeps them. First every variant is compared
with a softmax in f64, each in a process of its own, for a trap ends a context; what agrees is then timed beside cuDNN: a few runs
on an idle device (cold), and without a pause until the power limit rules the clock (sustained).
"""
import ctypes, glob, math, os, subprocess, sys, threading, time

T0 = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = [os.environ.get("KERNELS", HERE), HERE, os.path.join(HERE, "../../../crates/tessera-cuda/src/kernels")]
# By name: keys a tile, tiles in flight of K and of V, sixteens of Q's columns in registers.
V = {
    "by80": dict(KEYS=80, STAGES=3, HELD=2),
    "by64": dict(KEYS=64, STAGES=4, HELD=4),
}
GROUPS, ROWS = 3, 192

def source(name):
    for d in KERNELS:
        if os.path.exists(os.path.join(d, name)):
            return open(os.path.join(d, name)).read()
    raise SystemExit(f"no {name} in {KERNELS}; set KERNELS to the folder that holds it")

def compiled(kernel, defines, *parts):
    """A cubin of parts of a source, by the options that crates/tessera-cuda/src/compile.rs uses."""
    libs = [l for p in sys.path for l in glob.glob(os.path.join(p, "nvidia/*/lib/libnvrtc.so.1?"))]
    if not libs: raise SystemExit("no libnvrtc in torch's wheels")
    for b in glob.glob(os.path.join(os.path.dirname(libs[0]), "libnvrtc-builtins.so*")): ctypes.CDLL(b, mode=ctypes.RTLD_GLOBAL)
    n = ctypes.CDLL(libs[0])
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--device-as-default-execution-space", "--fmad=false"]
    options += [f"-D{k}={v}" for k, v in defines.items()]
    text = "".join(parts).encode()
    prog, size = ctypes.c_void_p(), ctypes.c_size_t()
    n.nvrtcCreateProgram(ctypes.byref(prog), text, kernel.encode(), 0, None, None)
    rc = n.nvrtcCompileProgram(prog, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    n.nvrtcGetProgramLogSize(prog, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    n.nvrtcGetProgramLog(prog, log)
    if rc or b"C75" in log.raw: print(log.value.decode(), flush=True)
    if rc: raise SystemExit(f"NVRTC: {rc}")
    n.nvrtcGetCUBINSize(prog, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    n.nvrtcGetCUBIN(prog, image)
    n.nvrtcDestroyProgram(ctypes.byref(prog))
    return image.raw

def watchdog(s):
    def f():
        time.sleep(s)
        print("WATCHDOG", sys.argv, flush=True)
        os._exit(3)
    threading.Thread(target=f, daemon=True).start()

def device():
    global torch, cu, SMS
    import torch
    cu = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")
    SMS = torch.cuda.get_device_properties(0).multi_processor_count

def check(rc, what):
    if rc:
        p = ctypes.c_char_p()
        cu.cuGetErrorString(rc, ctypes.byref(p))
        raise RuntimeError(f"{what}: {rc} {p.value}")

def tensor_map(t, extents, strides, box):
    """A map of bf16, as crates/tessera-cuda/src/maps.rs makes it."""
    raw, n = (ctypes.c_uint8 * 256)(), len(extents)
    addr = (ctypes.addressof(raw) + 63) // 64 * 64
    words = lambda of, v: (of * len(v))(*v)
    # BFLOAT16 = 9, interleave none = 0, swizzle 128B = 3, L2 promotion 256B = 3, no NaN fill = 0
    check(cu.cuTensorMapEncodeTiled(ctypes.c_void_p(addr), 9, n, ctypes.c_void_p(t.data_ptr()), words(ctypes.c_uint64, extents),
                                    words(ctypes.c_uint64, strides), words(ctypes.c_uint32, box), words(ctypes.c_uint32, [1] * n), 0, 3, 3, 0), "map")
    raw.addr = addr
    return raw

def rows_of_heads(t, rows, heads, box_rows):
    """[2 * heads][rows][64] of a row-major [rows, heads * 128]."""
    return tensor_map(t, (64, rows, 2 * heads), (heads * 256, 128), (64, box_rows, 2))

def tiles_of(rows, heads, long_heads):
    """Of each tile how many warpgroups have rows, as crates/tessera-cuda/src/flash.rs has them."""
    of_head = lambda most: [min(most, -(-(rows - i) // 64)) for i in range(0, rows, 64 * most)]
    return of_head(GROUPS) * long_heads + of_head(GROUPS - 1) * (heads - long_heads)

def best_long_heads(rows, heads):
    def last_end(long_heads):
        busy = [0] * SMS
        for i, groups in enumerate(tiles_of(rows, heads, long_heads)): busy[i % SMS] += (0, 60, 80, 100)[groups]
        return max(busy)
    return min(range(heads, -1, -1), key=last_end)

class Kernel:
    def __init__(self, name):
        self.name, v = name, V[name]
        self.v = v
        sources = [source(n) for n in ("common.cuh", "hopper.cuh", "attention.cu")]
        image = compiled("attention.cu", dict(v, HANG_CHECK=int("--correct" in sys.argv)), *sources)
        self.mod, self.f = ctypes.c_void_p(), ctypes.c_void_p()
        check(cu.cuModuleLoadData(ctypes.byref(self.mod), image), "load")
        check(cu.cuModuleGetFunction(ctypes.byref(self.f), self.mod, b"attention"), "function")
        self.shared = ROWS * 256 + 2 * v["STAGES"] * v["KEYS"] * 256 + 16 + 32 * v["STAGES"]
        self.threads = 128 * (GROUPS + 1)
        check(cu.cuFuncSetAttribute(self.f, 8, self.shared), f"shared {self.shared}")

    def prepare(self, q, k, v, out, lse, heads, long_heads=None):
        n, r = q.shape[0], k.shape[0]
        long_heads = best_long_heads(n, heads) if long_heads is None else long_heads
        maps = [rows_of_heads(q, n, heads, ROWS)] + [rows_of_heads(x, r, heads, self.v["KEYS"]) for x in (k, v)]
        grid = min(len(tiles_of(n, heads, long_heads)), SMS)
        scal = [ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr() if lse is not None else 0), ctypes.c_int(n), ctypes.c_int(r), ctypes.c_int(heads),
                ctypes.c_int(long_heads),
                (ctypes.c_uint64 * 50)()]  # no members to send rows to
        ptrs = (ctypes.c_void_p * 10)(*[m.addr for m in maps], *[ctypes.addressof(s) for s in scal])
        keep = (maps, scal)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        def go(keep=keep):
            check(cu.cuLaunchKernel(self.f, grid, 1, 1, self.threads, 1, 1, self.shared, stream, ptrs, None), "launch")
        return go

def make(n, r, h, seed=0, spread=1.0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    f = lambda m: torch.randn(m, h * 128, generator=g, device="cuda", dtype=torch.float32)
    return (f(n) * spread).bfloat16(), f(r).bfloat16(), f(r).bfloat16()

def truth(q, k, v, h):
    o, l = [], []
    for i in range(h):
        a, b, c = (x[:, i * 128:(i + 1) * 128].double() for x in (q, k, v))
        s = a @ b.T / math.sqrt(128)
        l.append(torch.logsumexp(s, 1))
        o.append(torch.softmax(s, 1) @ c)
    return torch.cat(o, 1), torch.stack(l)

def run(kern, q, k, v, h, with_lse=True, long_heads=None):
    n = q.shape[0]
    out = torch.full((n + 64, h * 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    lse = torch.full((h, n), float("nan"), device="cuda") if with_lse else None
    kern.prepare(q, k, v, out, lse, h, long_heads)()
    torch.cuda.synchronize()
    assert torch.isnan(out[n:]).all(), "wrote beyond the rows"
    return out[:n], lse

def report(kern, e, tol):
    n, c = e.shape
    bad = (e > tol) | e.isnan()
    first = bad.nonzero()[0].tolist()
    print(f"    bad {bad.sum().item()}/{e.numel()} first {first} nan {e.isnan().sum().item()}; rows bad {bad.any(1).nonzero().flatten()[:24].tolist()} cols {bad.any(0).nonzero().flatten()[:24].tolist()}")
    for r in range(0, min(n, 256), 16):
        print("    " + " ".join(f"{e[r:r + 16, x:x + 16].max().item():6.3f}" for x in range(0, min(c, 128), 16)))

def correct(name):
    device()
    kern = Kernel(name)
    bad = 0
    sizes = [(64, 64, 1), (64, 128, 1), (128, 176, 1), (192, 160, 1), (256, 528, 1), (1, 1, 2), (5, 7, 3), (300, 500, 3), (129, 177, 5), (700, 2340, 4), (4680, 512, 8), (4680, 937, 20)]
    worst = worst_l = 0
    for n, r, h in sizes:
        for spread in (1.0, 6.0, 30.0, 200.0):
            q, k, v = make(n, r, h, n + r, spread)
            o, l = run(kern, q, k, v, h)
            to, tl = truth(q, k, v, h)
            e, el = (o.double() - to).abs(), (l.double() - tl).abs()
            base = torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, h, 128).transpose(0, 1)[None] for x in (q, k, v)])[0].transpose(0, 1).reshape(n, -1)
            eb = (base.double() - to).abs().max().item()
            # Twice the error of the library's, or what rounding of an output of size one costs.
            tol = max(2 * eb, 0.01 * to.abs().max().item(), 1e-3)
            m, ml = e.max().item(), el.max().item()
            worst, worst_l = max(worst, m / max(eb, 1e-9)), max(worst_l, ml)
            if not (m <= tol and ml < 2e-4 + 1e-6 * tl.abs().max().item()):
                bad += 1
                print(f"  {name} N={n} R={r} H={h} spread={spread}: max error {m:.3e} (torch {eb:.3e}) lse {ml:.3e}")
                if not m <= tol: report(kern, e, tol)
                if bad == 1:
                    # q = 0: the mean of v, whatever K's layout. k = 0 likewise.
                    o2, l2 = run(kern, q * 0, k, v, h)
                    e2 = (o2.double() - v.double().mean(0)).abs().max().item()
                    o3, _ = run(kern, q, k, torch.ones_like(v), h)
                    o4, _ = run(kern, q * 0, k, torch.arange(h * 128, device="cuda").expand(r, -1).bfloat16(), h)
                    o5, _ = run(kern, q * 0, k, torch.arange(r, device="cuda")[:, None].expand(-1, h * 128).bfloat16(), h)
                    print(f"    q=0: error of mean(v) {e2:.3e}, lse {(l2 - math.log(r)).abs().max().item():.3e}; v=1: {(o3.double() - 1).abs().max().item():.3e}")
                    print(f"    v[.,c]=c row0: {o4[0, :128:8].tolist()}  v[r,.]=r row0: {o5[0, :128:8].tolist()} want {(r - 1) / 2}")
                if bad > 2: break
        if bad > 2: break
    if not bad:
        # A row's bits depend on neither the number of rows nor the heads, nor on where it is.
        for spread in (3.0, 40.0):
            q, k, v = make(700, 2340, 4, 7, spread)
            o, l = run(kern, q, k, v, 4)
            for cut in (1, 37, 192):
                o2, l2 = run(kern, q[cut:].contiguous(), k, v, 4)
                if not (torch.equal(o[cut:], o2) and torch.equal(l[:, cut:], l2)): bad += 1; print(f"  {name}: rows differ when cut by {cut}: {(o[cut:] != o2).any(1).sum().item()} rows")
            one = [x[:, 128:256].contiguous() for x in (q, k, v)]
            o2, l2 = run(kern, *one, 1)
            if not (torch.equal(o[:, 128:256], o2) and torch.equal(l[1:2], l2)): bad += 1; print(f"  {name}: differs by heads")
            for _ in range(20):
                o2, l2 = run(kern, q, k, v, 4)
                if not (torch.equal(o, o2) and torch.equal(l, l2)): bad += 1; print(f"  {name}: differs between runs"); break
            # Nor on how long its tile is.
            for long_heads in (1, 3, 4):
                o2, l2 = run(kern, q, k, v, 4, long_heads=long_heads)
                if not (torch.equal(o, o2) and torch.equal(l, l2)): bad += 1; print(f"  {name}: differs when {long_heads} of 4 heads have longer tiles")
            o2, _ = run(kern, q, k, v, 4, False)
            if not torch.equal(o, o2): bad += 1; print(f"  {name}: differs without lse")
    print(f"{'BAD ' if bad else 'good'} {name}: worst error {worst:.2f} of torch's, lse {worst_l:.1e}", flush=True)
    os._exit(1 if bad else 0)

def nvml():
    try:
        n = ctypes.CDLL("libnvidia-ml.so.1")
        n.nvmlInit_v2()
        h = ctypes.c_void_p()
        n.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(h))
        def sample():
            p, c = ctypes.c_uint(), ctypes.c_uint()
            n.nvmlDeviceGetPowerUsage(h, ctypes.byref(p))
            n.nvmlDeviceGetClockInfo(h, 1, ctypes.byref(c))
            return p.value / 1000, c.value
        sample()
        return sample
    except Exception as e:
        return lambda: (0, 0)

def timing(names, budget):
    device()
    from torch.nn.attention import sdpa_kernel, SDPBackend
    sample = nvml()
    kernels = [Kernel(n) for n in names]

    def cudnn(q, k, v, h):
        a = [x.view(-1, h, 128).transpose(0, 1)[None] for x in (q, k, v)]
        def go():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*a)
        return go

    def burst(go, reps=3):
        torch.cuda.synchronize()
        time.sleep(0.25)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        go()
        a.record()
        for _ in range(reps): go()
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b) / reps

    def sustained(go, seconds, est):
        chunk = max(1, int(0.1e3 / est))
        power, clock, total, n = [], [], 0.0, 0
        t = time.time()
        ev = []
        pend = None
        while time.time() - t < seconds:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(chunk): go()
            b.record()
            ev.append((a, b))
            if pend: pend.synchronize()
            pend = b
            if time.time() - t > seconds * 0.4:
                p, c = sample()
                power.append(p); clock.append(c)
        torch.cuda.synchronize()
        late = ev[int(len(ev) * 0.4):]
        ms = sum(x.elapsed_time(y) for x, y in late) / len(late) / chunk
        return ms, sum(power) / max(1, len(power)), sum(clock) / max(1, len(clock))

    plan = [((4680, 9360, 40), 1.6, True)] + [(shape, 0.3, False) for shape in (
        (4680, 9360, 20), (4680, 9360, 10), (4680, 9360, 5), (2160, 4320, 40), (2160, 4320, 10),
        (4680, 512, 40), (2340, 512, 40), (1170, 512, 40), (540, 512, 40))]
    for (n, r, h), seconds, cold in plan:
        q, k, v = make(n, r, h)
        out = torch.empty(n, h * 128, device="cuda", dtype=torch.bfloat16)
        flop = 4 * n * r * 128 * h
        gos = [("cudnn", cudnn(q, k, v, h))] + [(x.name, x.prepare(q, k, v, out, None, h)) for x in kernels]
        gos.append(("cudnn2", gos[0][1]))
        print(f"N={n} R={r} H={h}", flush=True)
        base = None
        for name, go in gos:
            if time.time() - T0 > budget:
                print("  out of time"); return
            go(); torch.cuda.synchronize()
            c = burst(go, 3 if cold else 10)
            ms, w, mhz = sustained(go, seconds, c)
            base = base or ms
            # Tensor throughput as a share of 4096 FLOP per SM and cycle at the clock seen.
            use = flop / (ms * 1e-3) / (SMS * 4096 * mhz * 1e6) if mhz else 0
            print(f"  {name:10s} cold {c:7.4f} ms {flop / c / 1e9:6.1f}  sustained {ms:7.4f} ms {flop / ms / 1e9:6.1f} TFLOP/s  x{base / ms:5.3f}  {w:4.0f} W {mhz:5.0f} MHz  {use:.3f} of peak/clk", flush=True)

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--correct":
        watchdog(60)
        correct(sys.argv[2])
    watchdog(90)
    names = [x for x in sys.argv[1:] if x in V] or list(V)
    # Each variant in a process of its own: a trap ends a context.
    children = [(n, subprocess.Popen([sys.executable, os.path.abspath(__file__), "--correct", n], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)) for n in names]
    passed = []
    for n, c in children:
        text = c.communicate()[0]
        print(text[-3500:], end="", flush=True)
        if c.returncode == 0: passed.append(n)
        else: print(f"  {n}: exit {c.returncode}", flush=True)
    print(f"correctness took {time.time() - T0:.1f} s; timing {passed}", flush=True)
    timing(passed, 60)
    print(f"all took {time.time() - T0:.1f} s", flush=True)
    os._exit(0)
