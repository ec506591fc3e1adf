"""Measures GEMMs, attention, compiled elementwise and norm kernels, copies, launch gaps, and NCCL collectives on 2 and 4 GPUs.

CUDA graphs replay the collectives and the kernels. The program times single ops only, no transformer block and no model. It needs
4 GPUs and takes about a minute.
"""
import os, sys, time, subprocess, traceback
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn.functional as F

def log(*a):
    print(*a, flush=True)

def capture_graph(fn, n):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): fn()
    torch.cuda.current_stream().wait_stream(s)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, capture_error_mode="thread_local"):
        for _ in range(n): fn()
    return g

def time_graph(fn, n=8, reps=12, burst=True):
    """Returns the median time per call of fn in us, n calls in one graph; with a pause before each replay (burst) or without."""
    g = capture_graph(fn, n)
    g.replay(); torch.cuda.synchronize()
    ts = []
    for _ in range(reps):
        if burst: time.sleep(0.003)
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / n)
    ts.sort()
    return ts[len(ts) // 2]

def sustained(fn, n, seconds):
    """Returns the time per call in us over the first and the last third of `seconds` of back-to-back replays, and clock, power
    and temperature from the second half."""
    g = capture_graph(fn, n)
    torch.cuda.synchronize()
    spans = []
    t0, q = time.time(), None
    while time.time() - t0 < seconds:
        if q is None and time.time() - t0 > seconds * 0.5:
            q = subprocess.Popen(["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"],
                                 stdout=subprocess.PIPE, text=True)
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(10): g.replay()
        b.record(); torch.cuda.synchronize()
        spans.append(a.elapsed_time(b) * 1e3 / (10 * n))
    k = max(1, len(spans) // 3)
    try: smi = q.communicate(timeout=10)[0].strip()
    except Exception as e: smi = str(e)
    return sum(spans[:k]) / k, sum(spans[-k:]) / k, smi

def gemm(M, N, K):
    """Returns a function that runs a GEMM with bias and cycles through four weights."""
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    ws = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(4)]
    b = torch.zeros(N, device="cuda", dtype=torch.bfloat16)
    it = [0]
    def f():
        it[0] += 1
        return F.linear(x, ws[it[0] % 4], b)
    return f

def gemms():
    log("## GEMMs, bf16, F.linear with bias: M N K  burst us TFLOP/s")
    shapes = []
    for M in (4680, 2340, 1170, 585, 2160, 1080, 540, 270):
        shapes += [(M, 15360, 5120), (M, 5120, 5120), (M, 13824, 5120), (M, 5120, 13824)]
    for M in (4680, 2160):
        for P in (2, 4, 8):
            shapes += [(M, 15360 // P, 5120), (M, 5120 // P, 5120), (M, 5120, 5120 // P), (M, 13824 // P, 5120), (M, 5120, 13824 // P)]
    # A few shapes that show the form of the curve.
    shapes += [(8192, 8192, 8192), (256, 5120, 5120), (128, 5120, 5120), (64, 5120, 5120), (16, 5120, 5120), (512, 5120, 4096)]
    for M, N, K in shapes:
        us = time_graph(gemm(M, N, K), n=8, reps=8)
        log(f"mm {M} {N} {K} {us:.1f} {2*M*N*K/us/1e6:.0f}")

def sustained_gemms():
    log("## GEMMs sustained for 2.5 s: M N K  first third us, last third us, TFLOP/s of the last third | clock, power, temperature")
    for M, N, K in ((4680, 15360, 5120), (4680, 5120, 5120), (4680, 13824, 5120), (4680, 5120, 13824), (2160, 13824, 5120), (1170, 13824, 5120), (585, 13824, 5120)):
        u0, u1, smi = sustained(gemm(M, N, K), 8, 2.5)
        log(f"smm {M} {N} {K} {u0:.1f} {u1:.1f} {2*M*N*K/u1/1e6:.0f} | {smi}")

def attention():
    from torch.nn.attention import sdpa_kernel, SDPBackend
    log("## attention cuDNN, bf16, [1, heads, n, 128] from [n, heads, 128] views: heads queries keys  burst us TFLOP/s")
    def measure(h, n, m, sus=False):
        q = torch.randn(n, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]
        k = torch.randn(m, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]
        v = torch.randn(m, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]
        def f():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v)
        fl = 4 * h * n * m * 128
        us = time_graph(f, n=4, reps=6)
        log(f"att {h} {n} {m} {us:.1f} {fl/us/1e6:.0f}")
        if sus:
            u0, u1, smi = sustained(f, 4, 2.5)
            log(f"satt {h} {n} {m} {u0:.1f} {u1:.1f} {fl/u1/1e6:.0f} | {smi}")
    for h in (40, 20, 10, 5): measure(h, 4680, 9360, h == 40)
    for h in (40, 20, 10, 5): measure(h, 2160, 4320)
    for h in (40, 20, 10, 5): measure(h, 4680, 512); measure(h, 2160, 512)
    for n in (2340, 1170, 585, 1080, 540, 270): measure(40, n, 512)

def elementwise_kernels():
    log("## elementwise and norm kernels by torch.compile, d = 5120, bf16: name rows us GB/s (each byte counted once)")
    d = 5120
    def ln_mod(x, m):       # layer norm, modulated by per-frame columns
        y = F.layer_norm(x.float(), (x.shape[-1],), eps=1e-6)
        y = y.view(3, -1, x.shape[-1]) * (1 + m[:, None, 1]) + m[:, None, 0]
        return y.view_as(x).to(x.dtype)
    def gate_ln(x, o, m, w, b):
        x = (x.view(3, -1, x.shape[-1]).float() + o.view(3, -1, x.shape[-1]) * m[:, None, 2]).view_as(x).to(x.dtype)
        return x, F.layer_norm(x.float(), (x.shape[-1],), w, b, 1e-6).to(x.dtype)
    def rms(x, w):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w
    def rms_rope(x, w, f):
        y = ((x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w)
        y = y.float().view(x.shape[0], -1, 64, 2)
        c, s = f[:, None, :, 0], f[:, None, :, 1]
        return torch.stack((y[..., 0] * c - y[..., 1] * s, y[..., 0] * s + y[..., 1] * c), -1).flatten(1).to(x.dtype)
    def gelu(x): return F.gelu(x, approximate="tanh")
    def cat(a, b): return torch.cat([a, b], 0)
    def pack(x): # [n, P*w] -> [P, n, w] contiguous, the send buffer of an all-to-all
        return x.view(x.shape[0], 4, -1).transpose(0, 1).contiguous()
    for rows in (4680, 2340, 1170, 585, 2160, 1080, 540, 270):
        x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16); o = torch.randn_like(x)
        r3 = rows // 3 * 3
        x, o = x[:r3].contiguous(), o[:r3].contiguous()
        m = torch.randn(3, 6, d, device="cuda", dtype=torch.float32)
        w = torch.randn(d, device="cuda", dtype=torch.bfloat16)
        f = torch.randn(r3, 64, 2, device="cuda"); up = torch.randn(r3, 13824, device="cuda", dtype=torch.bfloat16)
        u = r3 * d * 2
        for name, fn, args, nbytes in (
            ("ln_mod", ln_mod, (x, m), 2 * u), ("gate_ln", gate_ln, (x, o, m, w.float(), w.float()), 4 * u), ("rms", rms, (x, w), 2 * u),
            ("rms_rope", rms_rope, (x, w, f), 2 * u + f.numel() * 4), ("gelu", gelu, (up,), 2 * up.numel() * 2),
            ("cat2", cat, (x, o), 4 * u), ("pack4", pack, (x,), 2 * u), ("copy", lambda a: a.clone(), (x,), 2 * u)):
            c = torch.compile(fn, dynamic=True) if rows == 4680 else COMPILED.get(name)
            if name == "copy": c = fn
            if rows == 4680: COMPILED[name] = c
            us = time_graph(lambda: c(*args), n=6, reps=6)
            log(f"elementwise {name} {r3} {us:.1f} {nbytes/us/1e3:.0f}")
COMPILED = {}

def gaps():
    log("## gaps: between kernels of a graph, and between the host's launches")
    x = torch.zeros(1024, device="cuda")
    g = capture_graph(lambda: x.add_(1), 1000)
    g.replay(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    a.record(); g.replay(); b.record(); torch.cuda.synchronize()
    log(f"gap graph_kernel_us {a.elapsed_time(b):.3f}")
    t = time.time()
    for _ in range(5000): x.add_(1)
    host = (time.time() - t) / 5000 * 1e6; torch.cuda.synchronize()
    log(f"gap eager_launch_us {host:.2f}")
    M = 64; xx = torch.randn(M, 512, device="cuda", dtype=torch.bfloat16); w = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(10): F.linear(xx, w)
    t = time.time()
    for _ in range(3000): F.linear(xx, w)
    host = (time.time() - t) / 3000 * 1e6; torch.cuda.synchronize()
    log(f"gap eager_linear_us {host:.2f}")
    # A large GEMM and a small elementwise kernel alternate in a graph: the excess time is the cost of the GEMM's tail and of the
    # gaps.
    x = torch.randn(1170, 5120, device="cuda", dtype=torch.bfloat16); w = torch.randn(5120, 5120, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(270, 5120, device="cuda", dtype=torch.bfloat16)
    mm = time_graph(lambda: F.linear(x, w), n=20); sm = time_graph(lambda: y.mul(2), n=20)
    def both(): F.linear(x, w); y.mul(2)
    bo = time_graph(both, n=20)
    log(f"gap gemm {mm:.1f} small {sm:.1f} alternating {bo:.1f} us")

def collectives(rank):
    if rank == 0: log("## NCCL in a CUDA graph, bf16: P op full_bytes us per op (8 ops in sequence)")
    for P in (2, 4):
        grp = dist.new_group(list(range(P)))
        if rank < P:
            for nbytes in (37440, 74880, 1105920, 2211840, 3 << 20, 5529600, 5990400, 11059200, 11980800, 22118400, 23961600, 47923200):
                for op in ("all_reduce", "all_to_all", "all_gather"):
                    try:
                        n = nbytes // 2 // (8 * P) * (8 * P)
                        x = torch.zeros(n, device="cuda", dtype=torch.bfloat16); y = torch.zeros_like(x)
                        shard = x[: n // P]
                        if op == "all_reduce": f = lambda: dist.all_reduce(x, group=grp)
                        elif op == "all_to_all": f = lambda: dist.all_to_all_single(y, x, group=grp)
                        else: f = lambda: dist.all_gather_into_tensor(y, shard, group=grp)
                        for _ in range(3): f()
                        torch.cuda.synchronize()
                        us = time_graph(f, n=8, reps=8, burst=False)
                        if rank == 0: log(f"coll {P} {op} {nbytes} {us:.1f}")
                    except Exception as e:
                        if rank == 0: log(f"coll {P} {op} {nbytes} failed {e}")
        torch.cuda.synchronize(); dist.barrier()

def main(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank)
    import datetime
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank), timeout=datetime.timedelta(seconds=400))
    def run_part(fn, *a):
        t = time.time()
        try: fn(*a)
        except Exception: log(f"{fn.__name__} failed on {rank}"); traceback.print_exc()
        if rank == 0: log(f"# {fn.__name__} took {time.time()-t:.1f} s")
    run_part(collectives, rank)
    dist.barrier()
    if rank == 0:
        for fn in (gemms, attention, gaps, elementwise_kernels, sustained_gemms): run_part(fn)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)

if __name__ == "__main__":
    world = min(4, torch.cuda.device_count())
    log("torch", torch.__version__, "devices", torch.cuda.device_count(), torch.cuda.get_device_name(0))
    log(subprocess.run(["nvidia-smi", "--query-gpu=index,clocks.max.sm,power.limit,persistence_mode", "--format=csv,noheader"], capture_output=True, text=True).stdout)
    mp.spawn(main, args=(world,), nprocs=world, join=True)
