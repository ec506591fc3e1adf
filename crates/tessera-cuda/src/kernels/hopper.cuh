// What kernels for Hopper share: barriers in shared memory, maps for the copy engine, products of a warpgroup. HANG_CHECK traps where
// a barrier is not passed for 2 s.

// A CUtensorMap.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void *p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(u64 *bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ bool passed(u64 *bar, u32 parity) {
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
__device__ __forceinline__ void await(u64 *bar, u32 parity) {
    if (passed(bar, parity)) return;
#if HANG_CHECK
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    while (!passed(bar, parity)) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > 2000000000ull) asm volatile("trap;");
    }
#else
    while (!passed(bar, parity)) {}
#endif
}

// Which tile of a ring, and in which round.
struct Place {
    u32 stage, round;
    __device__ __forceinline__ Place next() const {
        return stage + 1 == STAGES ? Place{0, round ^ 1} : Place{stage + 1, round};
    }
    __device__ __forceinline__ Place last() const {
        return stage == 0 ? Place{STAGES - 1, round ^ 1} : Place{stage - 1, round};
    }
};

// Operands of a product in shared memory, swizzled by 128 bytes. `leading` and `stride` in bytes: for rows along the sum's dim stride is
// from eight rows to the next; where rows are the sum's dim, leading is from half to half.
__device__ __forceinline__ u64 operand(const void *p, u32 leading, u32 stride) {
    return (u64)((shared_address(p) & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `LEFT` groups of products are under way.
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Nothing that reads or writes these registers moves across.
template <int N> __device__ __forceinline__ void hold(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
