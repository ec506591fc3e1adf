// Definitions shared by all kernels. NVRTC does not see the toolkit's headers, so conversions
// between dtypes are written out here.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define INFINITY __int_as_float(0x7f800000)

struct bf16 {
    u16 bits;
};
struct e4m3 {
    unsigned char bits;
};

__device__ __forceinline__ float to_f32(float x) {
    return x;
}
__device__ __forceinline__ float to_f32(bf16 x) {
    return __uint_as_float((u32)x.bits << 16);
}
__device__ __forceinline__ void from_f32(float x, float &out) {
    out = x;
}
__device__ __forceinline__ void from_f32(float x, bf16 &out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
}
// Rounds to the nearest e4m3 and saturates at the largest finite value.
__device__ __forceinline__ void from_f32(float x, e4m3 &out) {
#if __CUDA_ARCH__ >= 890
    u16 two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    out.bits = (unsigned char)two;
#else
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    float size = fminf(fabsf(x), 448.0f);
    u32 normal = __float_as_uint(size);
    normal += 0x7ffff + (normal >> 20 & 1);
    // Values below 2^-6 are subnormal: they lie 2^-9 apart.
    u32 e4m3_bits = size < 0.015625f ? (u32)rintf(size * 512.0f) : (normal >> 20) - (120 << 3);
    out.bits = (unsigned char)(x != x ? 0x7f : sign | e4m3_bits);
#endif
}
// Computes one block of Philox4x32-10.
__device__ __forceinline__ uint4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    for (int r = 0; r < 10; r++) {
        u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c1 = (u32)p1;
        c3 = (u32)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
// The word by which an element of the whole, unsharded tensor is rounded.
__device__ __forceinline__ u32 rounding_word(u64 element, u32 seed, u32 seed_high, u32 draw) {
    u64 block = element / 4;
    uint4 w = philox((u32)block, (u32)(block >> 32), draw, 0xffffffffu, seed, seed_high);
    u32 lane[4] = {w.x, w.y, w.z, w.w};
    return lane[element % 4];
}
// Rounds to one of the two neighbours of x: to the one farther from 0 if the word is below the fraction of their distance at
// which x lies, as 32 bits. Numbers that the dtype cannot hold are rounded to nearest.
__device__ __forceinline__ void round_by_word(float x, u32 word, bf16 &out) {
    u32 bits = __float_as_uint(x);
    if (fabsf(x) <= __uint_as_float(0x7f7f0000u)) x = __uint_as_float((bits & 0xffff0000u) + (word < bits << 16 ? 0x10000u : 0u));
    from_f32(x, out);
}
__device__ __forceinline__ void round_by_word(float x, u32 word, e4m3 &out) {
    float size = fabsf(x);
    if (size < 0.015625f) {
        // Values below 2^-6 are subnormal: they lie 2^-9 apart.
        float steps = size * 512.0f, lower = truncf(steps);
        size = (lower + (word < (u32)((steps - lower) * 4294967296.0f) ? 1.0f : 0.0f)) / 512.0f;
    } else if (size <= 448.0f) {
        u32 bits = __float_as_uint(size);
        size = __uint_as_float((bits & 0xfff00000u) + (word < bits << 12 ? 0x100000u : 0u));
    }
    from_f32(copysignf(size, x), out);
}
// Returns the value that x has after a round trip through T.
template <typename T> __device__ __forceinline__ float rounded(float x) {
    T t;
    from_f32(x, t);
    return to_f32(t);
}

// A launch may begin while the one before it on its stream still runs, if it is a dependent launch. It must call
// `wait_for_predecessor` before it reads what another launch writes, and before it writes. A launch calls
// `let_successor_begin` once its successor may take multiprocessors that it does not need. Before Hopper, launches
// never overlap.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
    T e[N];
};

struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename F> __device__ __forceinline__ float warp_reduce(float x, F f) {
    for (int o = 16; o > 0; o >>= 1) x = f(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
    return warp_reduce(x, Add());
}
__device__ __forceinline__ float warp_max(float x) {
    return warp_reduce(x, Maximum());
}

// Reduces over a block of whole warps. Every thread gets the same bits.
template <int THREADS, typename F> __device__ __forceinline__ float block_reduce(float x, F f) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float partials[WARPS];
    x = warp_reduce(x, f);
    if (WARPS == 1) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = x;
    __syncthreads();
    float s = partials[0];
    for (int i = 1; i < WARPS; i++) s = f(s, partials[i]);
    return s;
}
template <int THREADS> __device__ __forceinline__ float block_sum(float x) {
    return block_reduce<THREADS>(x, Add());
}
template <int THREADS> __device__ __forceinline__ float block_max(float x) {
    return block_reduce<THREADS>(x, Maximum());
}

// Each activation is one expression in f32.
__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}
__device__ __forceinline__ float gelu_tanh(float x) {
    float t = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(t));
}

// One member's destination for a shard of a matrix that this kernel produces: the columns, or the
// rows, [first, first + count).
struct Target {
    u64 to, pitch;  // address of the shard's first row; bytes between rows
    int first, count;
};
// The destinations of all members of a group. `members` is 0 if the matrix stays on this device.
struct Targets {
    Target by_member[16];
    const u32 *opened;  // non-zero once all members have arrived, so that their memory may be written
    u64 members;

    __device__ __forceinline__ bool is_closed() const {
        return members && *(const volatile u32 *)opened == 0;
    }
    // Returns the destination of the member that owns this row or column.
    __device__ __forceinline__ const Target &target_of(int index) const {
        int m = 0;
        while (m + 1 < (int)members && (index < by_member[m].first || index >= by_member[m].first + by_member[m].count)) m++;
        return by_member[m];
    }
};
