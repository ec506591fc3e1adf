"""Searches for the order of operations in which cuBLASLt's epilogue computes the tanh form of GELU, by comparing bits.

python gelu.py [--near N]

The program needs one H100 or H200 and PyTorch. GEMMs whose sums are known to the bit pass through cuBLASLt's epilogue with GELU
and a bias. The program then evaluates each candidate order of operations on the same sums, with the hardware's tanh, and counts
the values that differ. A candidate without a difference is the library's order. With --near, the program also varies the
constants by up to N units in the last place.
"""
import argparse, ctypes, itertools, os, re, struct

import attention
from attention import check_cu, compile_kernel, init_device, read_source

# Candidates for the argument of the tanh, with K0 = sqrt(2 / pi), K1 = 0.044715 and K01 = K0 * K1. They differ in their rounding;
# the compiler does not fuse `*` and `+`.
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
FINAL_FORMS = ["(0.5f * x) * (1.0f + t)", "fmaf(0.5f * x, t, 0.5f * x)", "x * fmaf(0.5f, t, 0.5f)", "fmaf(x * t, 0.5f, 0.5f * x)", "0.5f * (x + x * t)", "0.5f * fmaf(x, t, x)"]


def neighbours(value, units):
    """Returns the float32 numbers up to `units` units in the last place from a value, in order."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return [struct.unpack("<f", struct.pack("<i", bits + i))[0] for i in range(-units, units + 1)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--near", type=int, default=0, help="also try constants up to N units in the last place away")
    max_ulps = p.parse_args().near
    init_device()
    torch = attention.torch
    # Each sum has two terms: one of 16 bits, and a much smaller power of two. So a sum uses many of its bits, and its computation
    # rounds none of them.
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
    expected = torch._addmm_activation(bias, x, w.T, use_gelu=True)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    print(f"{known.sum().item()} of {known.numel()} sums are exact", flush=True)
    forms = list(itertools.product(ARGUMENTS, FINAL_FORMS))
    cases = "\n".join(f"    case {i}: t = tanh_of({a}); y = {e}; break;" for i, (a, e) in enumerate(forms))
    text = ("__device__ float tanh_of(float x) { float y; asm(\"tanh.approx.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x)); return y; }\n"
            "extern \"C\" __global__ void gelu(const float *sums, bf16 *out, int n, int form, float K0, float K1, float K01) {\n"
            "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n  float x = sums[i], t, y = 0.0f;\n"
            f"  switch (form) {{\n{cases}\n  }}\n  from_f32(y, out[i]);\n}}\n")
    image = compile_kernel("gelu.cu", {}, read_source("common.cuh"), text)
    mod, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    check_cu(attention.cu.cuModuleLoadData(ctypes.byref(mod), image), "load")
    check_cu(attention.cu.cuModuleGetFunction(ctypes.byref(kernel), mod, b"gelu"), "function")
    results = []
    for i, (argument, final) in enumerate(forms):
        choices = [neighbours(v, max_ulps if re.search(rf"\b{k}\b", argument) else 0) for k, v in CONSTANTS.items()]
        for constants in itertools.product(*choices):
            args = [ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int(sums.numel()), ctypes.c_int(i)]
            args += [ctypes.c_float(c) for c in constants]
            ptrs = (ctypes.c_void_p * 7)(*[ctypes.addressof(a) for a in args])
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check_cu(attention.cu.cuLaunchKernel(kernel, -(-sums.numel() // 256), 1, 1, 256, 1, 1, 0, stream, ptrs, None), "launch")
            torch.cuda.synchronize()
            results.append((((out != expected) & known).sum().item(), argument, final, constants))
    results.sort(key=lambda x: x[0])
    for differences, argument, final, constants in results[:12]:
        print(f"  {differences:8d} values differ: t = tanh({argument}); {final}; " + ", ".join(f"{k} = {c:.9g}" for k, c in zip(CONSTANTS, constants)))
    os._exit(0)


if __name__ == "__main__":
    main()
