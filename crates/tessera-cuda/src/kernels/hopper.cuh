// Building blocks of the kernels for Hopper (sm_90a): mbarriers, TMA descriptors and wgmma. With
// HANG_CHECK, a wait for an mbarrier traps after 2 s.

// The layout of a CUtensorMap.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mbarrier_init(u64 *bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_expect_tx(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(u64 *bar, u32 parity) {
    u32 done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(parity)
                 : "memory");
    return done;
}
__device__ __forceinline__ void mbarrier_wait(u64 *bar, u32 parity) {
    if (mbarrier_try_wait(bar, parity)) return;
#if HANG_CHECK
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    while (!mbarrier_try_wait(bar, parity)) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > 2000000000ull) asm volatile("trap;");
    }
#else
    while (!mbarrier_try_wait(bar, parity)) {}
#endif
}

// A position in the ring of pipeline stages: the stage and its mbarrier phase.
struct PipelineState {
    u32 stage, phase;
    __device__ __forceinline__ PipelineState next() const {
        return stage + 1 == STAGES ? PipelineState{0, phase ^ 1} : PipelineState{stage + 1, phase};
    }
    __device__ __forceinline__ PipelineState previous() const {
        return stage == 0 ? PipelineState{STAGES - 1, phase ^ 1} : PipelineState{stage - 1, phase};
    }
};

// Builds a wgmma matrix descriptor for a tile in shared memory with 128-byte swizzle. `leading` and
// `stride` are in bytes. For a K-major operand, `stride` is the distance between groups of eight
// rows; for an operand whose rows are the K dimension, `leading` is the distance between the two
// halves of 64 columns.
__device__ __forceinline__ u64 matrix_descriptor(const void *p, u32 leading, u32 stride) {
    return (u64)((shared_address(p) & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `PENDING` wgmma groups are in flight.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses to these registers across this point.
template <int N> __device__ __forceinline__ void fence_registers(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
