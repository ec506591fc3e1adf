// What every kernel shares. NVRTC has no headers of the toolkit at hand, so conversions are spelled out.
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

__device__ __forceinline__ float up(float x) {
    return x;
}
__device__ __forceinline__ float up(bf16 x) {
    return __uint_as_float((u32)x.bits << 16);
}
__device__ __forceinline__ void down(float x, float &out) {
    out = x;
}
__device__ __forceinline__ void down(float x, bf16 &out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
}
// To the nearest e4m3, the largest for what lies beyond.
__device__ __forceinline__ void down(float x, e4m3 &out) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    out.bits = (unsigned char)pair;
#else
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    float size = fminf(fabsf(x), 448.0f);
    u32 normal = __float_as_uint(size);
    normal += 0x7ffff + (normal >> 20 & 1);
    // Below 2^-6 in steps of 2^-9.
    u32 e4m3_bits = size < 0.015625f ? (u32)rintf(size * 512.0f) : (normal >> 20) - (120 << 3);
    out.bits = (unsigned char)(x != x ? 0x7f : sign | e4m3_bits);
#endif
}
// A number as it is once stored in T.
template <typename T> __device__ __forceinline__ float rounded(float x) {
    T t;
    down(x, t);
    return up(t);
}

template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
    T e[N];
};

struct Plus {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename F> __device__ __forceinline__ float over_warp(float x, F f) {
    for (int o = 16; o > 0; o >>= 1) x = f(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
    return over_warp(x, Plus());
}
__device__ __forceinline__ float warp_max(float x) {
    return over_warp(x, Larger());
}

// Over a block of whole warps, the same bits in every thread.
template <int THREADS, typename F> __device__ __forceinline__ float over_block(float x, F f) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float part[WARPS];
    x = over_warp(x, f);
    if (WARPS == 1) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float s = part[0];
    for (int i = 1; i < WARPS; i++) s = f(s, part[i]);
    return s;
}
template <int THREADS> __device__ __forceinline__ float block_sum(float x) {
    return over_block<THREADS>(x, Plus());
}
template <int THREADS> __device__ __forceinline__ float block_max(float x) {
    return over_block<THREADS>(x, Larger());
}

// Both as one expression each, of f32 alone.
__device__ __forceinline__ float silu_of(float x) {
    return x / (1.0f + expf(-x));
}
__device__ __forceinline__ float gelu_of(float x) {
    float t = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(t));
}

// Where members of a group want a piece of a matrix that is made here: its columns, or its rows, [first, first + count).
struct Target {
    u64 to, pitch;  // of its first row; bytes from a row to the next
    int first, count;
};
// Of all members; none where the matrix stays here.
struct Targets {
    Target of[16];
    const u32 *going;  // whether the members have met, and the pieces may be written
    u64 members;

    __device__ __forceinline__ bool closed() const {
        return members && *(const volatile u32 *)going == 0;
    }
    // The one that wants this row or column.
    __device__ __forceinline__ const Target &with(int at) const {
        int m = 0;
        while (m + 1 < (int)members && (at < of[m].first || at >= of[m].first + of[m].count)) m++;
        return of[m];
    }
};
