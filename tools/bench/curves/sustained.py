"""Measures compiled elementwise and norm kernels, and GEMMs and attention in long runs at several shares of busy time.

The shapes of the compiled kernels are static. The program times single ops only, no transformer block. It needs 1 GPU and takes
about 1.5 minutes.
"""
import os, sys, time, subprocess, traceback
import torch
import torch.nn.functional as F
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

def log(*a): print(*a, flush=True)

def capture_graph(fn, n):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): fn()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, capture_error_mode="thread_local"):
        for _ in range(n): fn()
    return g

def time_graph(fn, n=8, reps=10):
    g = capture_graph(fn, n); g.replay(); torch.cuda.synchronize(); ts = []
    for _ in range(reps):
        time.sleep(0.003)
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / n)
    ts.sort(); return ts[len(ts) // 2]

def long_run(fn, n, seconds):
    """Returns the time per call in us over the last half of `seconds` of back-to-back replays, and clock and power during the
    run."""
    g = capture_graph(fn, n); torch.cuda.synchronize(); spans = []; t0, q = time.time(), None
    while time.time() - t0 < seconds:
        if q is None and time.time() - t0 > seconds * 0.5:
            q = subprocess.Popen(["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(10): g.replay()
        b.record(); torch.cuda.synchronize()
        spans.append(a.elapsed_time(b) * 1e3 / (10 * n))
    try: smi = q.communicate(timeout=10)[0].strip()
    except Exception as e: smi = str(e)
    k = len(spans) // 2
    return sum(spans[k:]) / len(spans[k:]), smi

def duty():
    from torch.nn.attention import sdpa_kernel, SDPBackend
    log("## long runs: GEMM or attention, then idle; rate of the busy part by share of busy time")
    def gemm(M, N, K):
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        ws = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(4)]; b = torch.zeros(N, device="cuda", dtype=torch.bfloat16)
        it = [0]
        def f(): it[0] += 1; return F.linear(x, ws[it[0] % 4], b)
        return f, 2 * M * N * K
    def attention(h, n, m):
        q = torch.randn(n, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]
        k = torch.randn(m, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]; v = torch.randn_like(k)
        def f():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(q, k, v)
        return f, 4 * h * n * m * 128
    # The clock that the sleep kernel counts.
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda._sleep(1000); torch.cuda.synchronize()
    a.record(); torch.cuda._sleep(2_000_000); b.record(); torch.cuda.synchronize()
    per_us = 2_000_000 / (a.elapsed_time(b) * 1e3); log(f"# cycles of the sleep kernel per us: {per_us:.0f}")
    u = torch.randn(4680, 5120, device="cuda", dtype=torch.bfloat16); o = torch.empty_like(u)
    for name, (f, flops) in (("gemm", gemm(2340, 13824, 5120)), ("gemm", gemm(4680, 5120, 5120)), ("attention", attention(20, 4680, 9360))):
        alone = time_graph(f, n=8)
        log(f"duty {name} burst {alone:.1f} us {flops/alone/1e6:.0f} TFLOP/s")
        for share in (1.0, 0.85, 0.7, 0.5, 0.3):
            idle_us = alone * (1 - share) / share
            def both():
                f()
                if idle_us > 0: torch.cuda._sleep(int(idle_us * per_us))
            us, smi = long_run(both, 8, 1.6)
            busy = us - idle_us
            log(f"duty {name} busy share {share}: {us:.1f} us in total, busy {busy:.1f} us, {flops/busy/1e6:.0f} TFLOP/s if the idle time is as requested | {smi}")
        # Copies in place of idle time.
        cp = time_graph(lambda: o.copy_(u), n=8)
        for share in (0.85, 0.7, 0.5):
            reps = max(1, round(alone * (1 - share) / share / cp))
            def both():
                f()
                for _ in range(reps): o.copy_(u)
            us, smi = long_run(both, 8, 1.6)
            log(f"duty {name} with {reps} copies (busy share {alone/(alone+reps*cp):.2f}): {us:.1f} us, {alone+reps*cp:.1f} us in a burst | {smi}")

def elementwise_kernels():
    log("## elementwise and norm kernels by torch.compile, static shapes, d = 5120, bf16: name rows us GB/s (each byte counted once)")
    d = 5120
    def expand_by_frame(m, i, x): # expands a per-frame column to the rows of x
        return m[:, None, i].expand(3, x.shape[0] // 3, x.shape[1]).reshape(x.shape)
    def ln_mod(x, m): return (F.layer_norm(x.float(), (x.shape[-1],), eps=1e-6) * (1 + expand_by_frame(m, 1, x)) + expand_by_frame(m, 0, x)).to(x.dtype)
    def gate_ln(x, o, m, w, b):
        x = (x.float() + o.float() * expand_by_frame(m, 2, x)).to(x.dtype)
        return x, F.layer_norm(x.float(), (x.shape[-1],), w, b, 1e-6).to(x.dtype)
    def gate_ln_mod(x, o, m):
        x = (x.float() + o.float() * expand_by_frame(m, 2, x)).to(x.dtype)
        return x, ln_mod(x, m)
    def rms(x, w): return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w
    def rms_rope(x, w, f):
        y = rms(x, w).float().view(x.shape[0], -1, 64, 2); c, s = f[:, None, :, 0], f[:, None, :, 1]
        return torch.stack((y[..., 0] * c - y[..., 1] * s, y[..., 0] * s + y[..., 1] * c), -1).flatten(1).to(x.dtype)
    def gelu(x): return F.gelu(x, approximate="tanh")
    def add(x, o): return x + o
    def cat(a, b): return torch.cat([a, b], 0)
    def pack4(x): return x.view(x.shape[0], 4, -1).transpose(0, 1).contiguous()
    for rows in (4680, 2340, 585, 270):
        x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16); o = torch.randn_like(x)
        m = torch.randn(3, 6, d, device="cuda"); w = torch.randn(d, device="cuda", dtype=torch.bfloat16)
        f = torch.randn(rows, 64, 2, device="cuda"); up = torch.randn(rows, 13824, device="cuda", dtype=torch.bfloat16); u = rows * d * 2
        for name, fn, args, nbytes in (("ln_mod", ln_mod, (x, m), 2 * u), ("gate_ln", gate_ln, (x, o, m, w.float(), w.float()), 4 * u), ("gate_ln_mod", gate_ln_mod, (x, o, m), 4 * u),
            ("rms", rms, (x, w), 2 * u), ("rms_rope", rms_rope, (x, w, f), 2 * u + f.numel() * 4), ("gelu", gelu, (up,), 4 * up.numel()),
            ("add", add, (x, o), 3 * u), ("cat2", cat, (x, o), 4 * u), ("pack4", pack4, (x,), 2 * u)):
            torch._dynamo.reset()
            c = torch.compile(fn, dynamic=False)
            us = time_graph(lambda: c(*args), n=6, reps=6)
            log(f"static_elementwise {name} {rows} {us:.1f} {nbytes/us/1e3:.0f}")

if __name__ == "__main__":
    log("torch", torch.__version__, torch.cuda.get_device_name(0))
    for fn in (elementwise_kernels, duty):
        t = time.time()
        try: fn()
        except Exception: log(fn.__name__, "failed"); traceback.print_exc()
        log(f"# {fn.__name__} took {time.time()-t:.1f} s")
