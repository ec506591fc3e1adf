"""In which order cuBLASLt's epilogue takes the tanh form of GELU, by its bits.

python gelu.py [--near N], on a machine with one H100 or H200 and torch. Products whose sums are known to the bit go through the library's epilogue
with GELU and a bias; each order of operations that it might use is then taken of the same sums, with the hardware's tanh, and values that
differ are counted. One without any is the library's. With --near, constants are moved by up to so many units in the last place too.
"""
import argparse, ctypes, itertools, os, re, struct

import attention
from attention import check, compiled, device, source

# The argument of the tanh of x, with K0 = sqrt(2 / pi), K1 = 0.044715 and K01 their product: what is rounded when. `*` and `+` are never fused here.
ARGUMENTS = [
    "(K0 * x) * fmaf(K1 * x, x, 1.0f)", "(K0 * x) * fmaf(K1, x * x, 1.0f)", "(K0 * x) * (1.0f + K1 * x * x)", "(K0 * x) * (1.0f + K1 * (x * x))",
    "K0 * (x * fmaf(K1 * x, x, 1.0f))", "K0 * (x * fmaf(K1, x * x, 1.0f))", "K0 * (x * (1.0f + K1 * x * x))", "K0 * (x * (1.0f + K1 * (x * x)))",
    "x * (K0 * fmaf(K1 * x, x, 1.0f))", "x * (K0 * fmaf(K1, x * x, 1.0f))", "x * (K0 * (1.0f + K1 * (x * x)))",
    "K0 * fmaf(K1 * x * x, x, x)", "K0 * fmaf(K1 * (x * x), x, x)", "K0 * fmaf(K1, x * x * x, x)", "K0 * fmaf(K1, x * (x * x), x)", "K0 * fmaf(K1 * x, x * x, x)",
    "K0 * (x + K1 * x * x * x)", "K0 * (x + K1 * (x * x * x))", "K0 * (x + (K1 * x) * (x * x))",
    "x * fmaf(x * x, K01, K0)", "x * fmaf(K01 * x, x, K0)", "x * (K0 + K01 * (x * x))", "x * (K0 + K01 * x * x)",
    "fmaf(K01 * x * x, x, K0 * x)", "fmaf(K01 * (x * x), x, K0 * x)", "fmaf(K01, x * x * x, K0 * x)", "fmaf(K01, x * (x * x), K0 * x)", "fmaf(K01 * x, x * x, K0 * x)",
    "fmaf(K0, x, K01 * x * x * x)", "fmaf(K0, x, K01 * (x * x * x))", "K0 * x + K01 * (x * x * x)",
    "fmaf(K0 * x, K1 * (x * x), K0 * x)", "fmaf(K0 * x, K1 * x * x, K0 * x)", "fmaf((K0 * x) * (x * x), K1, K0 * x)", "fmaf(K0 * K1 * x * x, x, K0 * x)",
]
CONSTANTS = {"K0": 0.7978845608028654, "K1": 0.044715, "K01": 0.044715 * 0.7978845608028654}
ENDS = ["(0.5f * x) * (1.0f + t)", "fmaf(0.5f * x, t, 0.5f * x)", "x * fmaf(0.5f, t, 0.5f)", "fmaf(x * t, 0.5f, 0.5f * x)", "0.5f * (x + x * t)", "0.5f * fmaf(x, t, x)"]


def beside(value, units):
    """A number in f32 and those up to so many units in the last place from it."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return [struct.unpack("<f", struct.pack("<i", bits + i))[0] for i in range(-units, units + 1)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--near", type=int, default=0, help="units in the last place by which constants may be off")
    near = p.parse_args().near
    device()
    torch = attention.torch
    # Sums of two products each: one of 16 bits and a power of two that is far smaller, so that many of a sum's bits are in play and none is
    # lost on the way.
    rows, columns, inner = 4096, 512, 64
    g = torch.Generator(device="cuda").manual_seed(1)
    f = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.float32)
    x, w = torch.zeros(rows, inner, device="cuda"), torch.zeros(columns, inner, device="cuda")
    x[:, 0], x[:, 1] = f(rows) * 2, torch.sign(f(rows)) * 2.0 ** -torch.randint(8, 15, (rows,), generator=g, device="cuda").float()
    w[:, 0], w[:, 1] = f(columns), 1.0
    x, w = x.bfloat16(), w.bfloat16()
    exact = x.double() @ w.double().T
    sums = exact.float()
    known = (sums.double() == exact) & (sums.abs() > 2 ** -7) & (sums.abs() < 16)
    bias = torch.zeros(columns, device="cuda", dtype=torch.bfloat16)
    want = torch._addmm_activation(bias, x, w.T, use_gelu=True)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    print(f"{known.sum().item()} of {known.numel()} sums are exact", flush=True)
    forms = list(itertools.product(ARGUMENTS, ENDS))
    cases = "\n".join(f"    case {i}: t = tanh_of({a}); y = {e}; break;" for i, (a, e) in enumerate(forms))
    text = ("__device__ float tanh_of(float x) { float y; asm(\"tanh.approx.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x)); return y; }\n"
            "extern \"C\" __global__ void gelu(const float *sums, bf16 *out, int n, int form, float K0, float K1, float K01) {\n"
            "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n  float x = sums[i], t, y = 0.0f;\n"
            f"  switch (form) {{\n{cases}\n  }}\n  down(y, out[i]);\n}}\n")
    image = compiled("gelu.cu", {}, source("common.cuh"), text)
    mod, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    check(attention.cu.cuModuleLoadData(ctypes.byref(mod), image), "load")
    check(attention.cu.cuModuleGetFunction(ctypes.byref(kernel), mod, b"gelu"), "function")
    found = []
    for i, (argument, end) in enumerate(forms):
        choices = [beside(v, near if re.search(rf"\b{k}\b", argument) else 0) for k, v in CONSTANTS.items()]
        for constants in itertools.product(*choices):
            args = [ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int(sums.numel()), ctypes.c_int(i)]
            args += [ctypes.c_float(c) for c in constants]
            ptrs = (ctypes.c_void_p * 7)(*[ctypes.addressof(a) for a in args])
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(attention.cu.cuLaunchKernel(kernel, -(-sums.numel() // 256), 1, 1, 256, 1, 1, 0, stream, ptrs, None), "launch")
            torch.cuda.synchronize()
            found.append((((out != want) & known).sum().item(), argument, end, constants))
    found.sort(key=lambda x: x[0])
    for others, argument, end, constants in found[:12]:
        print(f"  {others:8d} differ: t = tanh({argument}); {end}; " + ", ".join(f"{k} = {c:.9g}" for k, c in zip(CONSTANTS, constants)))
    os._exit(0)


if __name__ == "__main__":
    main()
