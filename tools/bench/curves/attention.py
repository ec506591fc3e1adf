"""Checks and times the Hopper attention kernel of attention_sm90.cu, and compares it with cuDNN through PyTorch.

python attention.py [VARIANT ...]

The program needs one H100 or H200 and PyTorch. It compiles the kernel with the NVRTC of PyTorch's wheel, from the sources in
$KERNELS, beside this file, or in the repository. First it compares every variant with a softmax in float64. Each check has its
own process, because a trap destroys the CUDA context. Then it times the correct variants and cuDNN: a few runs on an idle device
(cold), and runs without a pause until the power limit determines the clock (sustained).
"""
import ctypes, glob, math, os, subprocess, sys, threading, time

T0 = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = [os.environ.get("KERNELS", HERE), HERE, os.path.join(HERE, "../../../crates/tessera-cuda/src/kernels")]
# Compile options by variant: keys per tile, pipeline stages of K and of V, and k-slices of 16 columns of Q that stay in
# registers.
VARIANTS = {
    "by80": dict(KEYS=80, STAGES=3, Q_REG_SLICES=2),
    "by64": dict(KEYS=64, STAGES=4, Q_REG_SLICES=4),
}
GROUPS, ROWS = 3, 192

def read_source(name):
    for d in KERNELS:
        if os.path.exists(os.path.join(d, name)):
            return open(os.path.join(d, name)).read()
    raise SystemExit(f"no {name} in {KERNELS}; set KERNELS to the folder that contains it")

def compile_kernel(kernel, defines, *parts):
    """Compiles the concatenated sources to a cubin, with the options of crates/tessera-cuda/src/compile.rs."""
    libs = [l for p in sys.path for l in glob.glob(os.path.join(p, "nvidia/*/lib/libnvrtc.so.1?"))]
    if not libs: raise SystemExit("no libnvrtc in PyTorch's wheels")
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
    if rc: raise SystemExit(f"NVRTC status {rc}")
    n.nvrtcGetCUBINSize(prog, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    n.nvrtcGetCUBIN(prog, image)
    n.nvrtcDestroyProgram(ctypes.byref(prog))
    return image.raw

def watchdog(s):
    """Ends the process with status 3 after s seconds."""
    def f():
        time.sleep(s)
        print("stopped by the watchdog:", sys.argv, flush=True)
        os._exit(3)
    threading.Thread(target=f, daemon=True).start()

def init_device():
    global torch, cu, SMS
    import torch
    cu = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")
    SMS = torch.cuda.get_device_properties(0).multi_processor_count

def check_cu(rc, what):
    if rc:
        p = ctypes.c_char_p()
        cu.cuGetErrorString(rc, ctypes.byref(p))
        raise RuntimeError(f"{what}: {rc} {p.value}")

def tensor_map(t, extents, strides, box):
    """Encodes a TMA tensor map of bf16, as crates/tessera-cuda/src/tensor_map.rs does."""
    raw, n = (ctypes.c_uint8 * 256)(), len(extents)
    addr = (ctypes.addressof(raw) + 63) // 64 * 64
    array = lambda ctype, v: (ctype * len(v))(*v)
    # BFLOAT16 = 9, interleave none = 0, swizzle 128B = 3, L2 promotion 256B = 3, no NaN fill = 0
    check_cu(cu.cuTensorMapEncodeTiled(ctypes.c_void_p(addr), 9, n, ctypes.c_void_p(t.data_ptr()), array(ctypes.c_uint64, extents),
                                    array(ctypes.c_uint64, strides), array(ctypes.c_uint32, box), array(ctypes.c_uint32, [1] * n), 0, 3, 3, 0),
          "cuTensorMapEncodeTiled")
    raw.addr = addr
    return raw

def head_rows_map(t, rows, heads, box_rows):
    """Encodes a map with extents [2 * heads][rows][64] over a row-major tensor [rows, heads * 128]."""
    return tensor_map(t, (64, rows, 2 * heads), (heads * 256, 128), (64, box_rows, 2))

def active_warpgroups(rows, heads, long_heads):
    """Returns the number of warpgroups with rows for each tile, as crates/tessera-cuda/src/attention_sm90.rs computes it."""
    head_tiles = lambda max_groups: [min(max_groups, -(-(rows - i) // 64)) for i in range(0, rows, 64 * max_groups)]
    return head_tiles(GROUPS) * long_heads + head_tiles(GROUPS - 1) * (heads - long_heads)

def best_long_heads(rows, heads):
    def finish_time(long_heads):
        busy = [0] * SMS
        for i, groups in enumerate(active_warpgroups(rows, heads, long_heads)): busy[i % SMS] += (0, 60, 80, 100)[groups]
        return max(busy)
    return min(range(heads, -1, -1), key=finish_time)

class Kernel:
    def __init__(self, name):
        self.name, v = name, VARIANTS[name]
        self.v = v
        sources = [read_source(n) for n in ("common.cuh", "hopper.cuh", "attention_sm90.cu")]
        image = compile_kernel("attention_sm90.cu", dict(v, HANG_CHECK=int("--correct" in sys.argv)), *sources)
        self.mod, self.f = ctypes.c_void_p(), ctypes.c_void_p()
        check_cu(cu.cuModuleLoadData(ctypes.byref(self.mod), image), "load")
        check_cu(cu.cuModuleGetFunction(ctypes.byref(self.f), self.mod, b"attention"), "function")
        self.shared = ROWS * 256 + 2 * v["STAGES"] * v["KEYS"] * 256 + 16 + 32 * v["STAGES"]
        self.threads = 128 * (GROUPS + 1)
        check_cu(cu.cuFuncSetAttribute(self.f, 8, self.shared), f"shared {self.shared}")

    def prepare(self, q, k, v, out, lse, heads, long_heads=None):
        n, r = q.shape[0], k.shape[0]
        long_heads = best_long_heads(n, heads) if long_heads is None else long_heads
        maps = [head_rows_map(q, n, heads, ROWS)] + [head_rows_map(x, r, heads, self.v["KEYS"]) for x in (k, v)]
        grid = min(len(active_warpgroups(n, heads, long_heads)), SMS)
        scal = [ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr() if lse is not None else 0), ctypes.c_int(n), ctypes.c_int(r), ctypes.c_int(heads),
                ctypes.c_int(long_heads),
                (ctypes.c_uint64 * 50)()]  # no group members to store rows to
        ptrs = (ctypes.c_void_p * 10)(*[m.addr for m in maps], *[ctypes.addressof(s) for s in scal])
        keep = (maps, scal)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        def go(keep=keep):
            check_cu(cu.cuLaunchKernel(self.f, grid, 1, 1, self.threads, 1, 1, self.shared, stream, ptrs, None), "launch")
        return go

def random_qkv(n, r, h, seed=0, spread=1.0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    f = lambda m: torch.randn(m, h * 128, generator=g, device="cuda", dtype=torch.float32)
    return (f(n) * spread).bfloat16(), f(r).bfloat16(), f(r).bfloat16()

def reference_attention(q, k, v, h):
    o, l = [], []
    for i in range(h):
        a, b, c = (x[:, i * 128:(i + 1) * 128].double() for x in (q, k, v))
        s = a @ b.T / math.sqrt(128)
        l.append(torch.logsumexp(s, 1))
        o.append(torch.softmax(s, 1) @ c)
    return torch.cat(o, 1), torch.stack(l)

def run_kernel(kern, q, k, v, h, with_lse=True, long_heads=None):
    n = q.shape[0]
    out = torch.full((n + 64, h * 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    lse = torch.full((h, n), float("nan"), device="cuda") if with_lse else None
    kern.prepare(q, k, v, out, lse, h, long_heads)()
    torch.cuda.synchronize()
    assert torch.isnan(out[n:]).all(), "the kernel wrote beyond the last row"
    return out[:n], lse

def print_errors(kern, e, tol):
    n, c = e.shape
    bad = (e > tol) | e.isnan()
    first = bad.nonzero()[0].tolist()
    print(f"    wrong {bad.sum().item()}/{e.numel()}, first {first}, NaN {e.isnan().sum().item()}; wrong rows {bad.any(1).nonzero().flatten()[:24].tolist()}, columns {bad.any(0).nonzero().flatten()[:24].tolist()}")
    for r in range(0, min(n, 256), 16):
        print("    " + " ".join(f"{e[r:r + 16, x:x + 16].max().item():6.3f}" for x in range(0, min(c, 128), 16)))

def check_variant(name):
    init_device()
    kern = Kernel(name)
    bad = 0
    sizes = [(64, 64, 1), (64, 128, 1), (128, 176, 1), (192, 160, 1), (256, 528, 1), (1, 1, 2), (5, 7, 3), (300, 500, 3), (129, 177, 5), (700, 2340, 4), (4680, 512, 8), (4680, 937, 20)]
    worst = worst_l = 0
    for n, r, h in sizes:
        for spread in (1.0, 6.0, 30.0, 200.0):
            q, k, v = random_qkv(n, r, h, n + r, spread)
            o, l = run_kernel(kern, q, k, v, h)
            to, tl = reference_attention(q, k, v, h)
            e, el = (o.double() - to).abs(), (l.double() - tl).abs()
            base = torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, h, 128).transpose(0, 1)[None] for x in (q, k, v)])[0].transpose(0, 1).reshape(n, -1)
            eb = (base.double() - to).abs().max().item()
            # Allow twice cuDNN's error, or the rounding error of an output of magnitude one.
            tol = max(2 * eb, 0.01 * to.abs().max().item(), 1e-3)
            m, ml = e.max().item(), el.max().item()
            worst, worst_l = max(worst, m / max(eb, 1e-9)), max(worst_l, ml)
            if not (m <= tol and ml < 2e-4 + 1e-6 * tl.abs().max().item()):
                bad += 1
                print(f"  {name} N={n} R={r} H={h} spread={spread}: max error {m:.3e} (PyTorch {eb:.3e}), of the log-sum-exp {ml:.3e}")
                if not m <= tol: print_errors(kern, e, tol)
                if bad == 1:
                    # With q = 0 the result is the mean of v, whatever the layout of K.
                    o2, l2 = run_kernel(kern, q * 0, k, v, h)
                    e2 = (o2.double() - v.double().mean(0)).abs().max().item()
                    o3, _ = run_kernel(kern, q, k, torch.ones_like(v), h)
                    o4, _ = run_kernel(kern, q * 0, k, torch.arange(h * 128, device="cuda").expand(r, -1).bfloat16(), h)
                    o5, _ = run_kernel(kern, q * 0, k, torch.arange(r, device="cuda")[:, None].expand(-1, h * 128).bfloat16(), h)
                    print(f"    q=0: error of mean(v) {e2:.3e}, of the log-sum-exp {(l2 - math.log(r)).abs().max().item():.3e}; v=1: {(o3.double() - 1).abs().max().item():.3e}")
                    print(f"    v[.,c]=c row 0: {o4[0, :128:8].tolist()}  v[r,.]=r row 0: {o5[0, :128:8].tolist()}, expected {(r - 1) / 2}")
                if bad > 2: break
        if bad > 2: break
    if not bad:
        # A row's bits must depend on neither the number of rows, nor the number of heads, nor the row's position.
        for spread in (3.0, 40.0):
            q, k, v = random_qkv(700, 2340, 4, 7, spread)
            o, l = run_kernel(kern, q, k, v, 4)
            for cut in (1, 37, 192):
                o2, l2 = run_kernel(kern, q[cut:].contiguous(), k, v, 4)
                if not (torch.equal(o[cut:], o2) and torch.equal(l[:, cut:], l2)): bad += 1; print(f"  {name}: {(o[cut:] != o2).any(1).sum().item()} rows differ without the first {cut} rows")
            one = [x[:, 128:256].contiguous() for x in (q, k, v)]
            o2, l2 = run_kernel(kern, *one, 1)
            if not (torch.equal(o[:, 128:256], o2) and torch.equal(l[1:2], l2)): bad += 1; print(f"  {name}: a head differs when it runs alone")
            for _ in range(20):
                o2, l2 = run_kernel(kern, q, k, v, 4)
                if not (torch.equal(o, o2) and torch.equal(l, l2)): bad += 1; print(f"  {name}: the bits differ between runs"); break
            # Nor on the length of its tile.
            for long_heads in (1, 3, 4):
                o2, l2 = run_kernel(kern, q, k, v, 4, long_heads=long_heads)
                if not (torch.equal(o, o2) and torch.equal(l, l2)): bad += 1; print(f"  {name}: the bits differ when {long_heads} of 4 heads have longer tiles")
            o2, _ = run_kernel(kern, q, k, v, 4, False)
            if not torch.equal(o, o2): bad += 1; print(f"  {name}: the bits differ without the log-sum-exp output")
    print(f"{'BAD ' if bad else 'good'} {name}: largest error {worst:.2f} times PyTorch's, of the log-sum-exp {worst_l:.1e}", flush=True)
    os._exit(1 if bad else 0)

def nvml_sampler():
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

def time_variants(names, budget):
    init_device()
    from torch.nn.attention import sdpa_kernel, SDPBackend
    sample = nvml_sampler()
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
        q, k, v = random_qkv(n, r, h)
        out = torch.empty(n, h * 128, device="cuda", dtype=torch.bfloat16)
        flop = 4 * n * r * 128 * h
        gos = [("cudnn", cudnn(q, k, v, h))] + [(x.name, x.prepare(q, k, v, out, None, h)) for x in kernels]
        gos.append(("cudnn2", gos[0][1]))
        print(f"N={n} R={r} H={h}", flush=True)
        base = None
        for name, go in gos:
            if time.time() - T0 > budget:
                print("  stopped: the time budget is spent"); return
            go(); torch.cuda.synchronize()
            c = burst(go, 3 if cold else 10)
            ms, w, mhz = sustained(go, seconds, c)
            base = base or ms
            # Tensor throughput as a share of 4096 FLOP per multiprocessor and cycle at the sampled clock.
            use = flop / (ms * 1e-3) / (SMS * 4096 * mhz * 1e6) if mhz else 0
            print(f"  {name:10s} cold {c:7.4f} ms {flop / c / 1e9:6.1f}  sustained {ms:7.4f} ms {flop / ms / 1e9:6.1f} TFLOP/s  x{base / ms:5.3f}  {w:4.0f} W {mhz:5.0f} MHz  {use:.3f} of peak/clk", flush=True)

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--correct":
        watchdog(60)
        check_variant(sys.argv[2])
    watchdog(90)
    names = [x for x in sys.argv[1:] if x in VARIANTS] or list(VARIANTS)
    # Each variant has its own process, because a trap destroys the CUDA context.
    children = [(n, subprocess.Popen([sys.executable, os.path.abspath(__file__), "--correct", n], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)) for n in names]
    passed = []
    for n, c in children:
        text = c.communicate()[0]
        print(text[-3500:], end="", flush=True)
        if c.returncode == 0: passed.append(n)
        else: print(f"  {n}: exit status {c.returncode}", flush=True)
    print(f"the checks took {time.time() - T0:.1f} s; timing {passed}", flush=True)
    time_variants(passed, 60)
    print(f"total time {time.time() - T0:.1f} s", flush=True)
    os._exit(0)
