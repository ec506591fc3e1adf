// softmax(Q Kᵀ / sqrt(128)) V without a mask, for Hopper: a FlashAttention kernel that loads tiles
// with TMA and multiplies with wgmma.
//
// q and out are [rows, heads * 128], k and v [keys, heads * 128], bf16; rows of out may go to
// members of a group instead. One warpgroup of a block loads and GROUPS compute, 64 rows each. A
// block processes tiles of TILE_ROWS rows of one head until none is left; neighbouring blocks
// process neighbouring tiles, so that a head's K and V are read from L2. Heads from `long_heads` on
// are split into tiles with one warpgroup fewer, where the last wave of longer tiles would leave
// blocks idle. Keys are processed KEYS at a time, from the last tile, which has the ragged end, to
// the first. This order depends on `keys` alone, so a row's bits depend on neither the other rows
// nor the number of heads.
//
// A warpgroup issues the next tile's Q Kᵀ together with this tile's P V, and computes the next
// softmax while P V runs; the other warpgroups fill the tensor cores' remaining idle time. The
// bottleneck is shared memory, which every wgmma reads again: so the first 16 * Q_REG_SLICES
// columns of Q stay in registers, as many as fit beside O, one tile's scores and another tile's P.
constexpr int HEAD = 128, HALF = 64, GROUPS = 3;
constexpr int TILE_ROWS = 64 * GROUPS, SHORT_TILE_ROWS = TILE_ROWS - 64;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COMPUTE_REGS = 160, LOAD_REGS = 32;  // per thread; a multiprocessor has 64 Ki registers
// Bytes of half the columns of Q's tile, and of half the columns of a K or V tile.
constexpr u32 Q_HALF = TILE_ROWS * HALF * 2, Q_BYTES = 2 * Q_HALF, TILE_HALF = KEYS * HALF * 2, TILE_BYTES = 2 * TILE_HALF;
constexpr int SCORES_PER_THREAD = KEYS / 2;  // scores per thread: two rows, two of every eight keys
// Converts scores to base-2 exponents and back: 1 / sqrt(128) * log2(e), and log(2).
constexpr float SCALE_LOG2 = 0.12751743f, LOG_2 = 0.6931472f;
// Lazy rescaling: a tile's scores are exponentiated before its row maximum is known. If a thread's
// sum exceeds RESCALE_ABOVE, the tile's exponentials, the sum so far and O are divided by a power
// of two, which leaves their quotient unchanged. From RECOMPUTE_ABOVE on, a float may have
// overflowed, and the warp recomputes these scores.
constexpr float RESCALE_ABOVE = 0x1p20f, RECOMPUTE_ABOVE = 0x1p100f;

// The tile schedule: `long_tiles` tiles for each of the first `long_heads` heads, `short_tiles`
// tiles for each of the others.
struct TileSchedule {
    int long_tiles, short_tiles, long_heads;

    // Returns whether the tile is a short one.
    __device__ __forceinline__ bool locate(int tile, int &head, int &row) const {
        int rest = tile - long_tiles * long_heads;
        if (rest < 0) {
            head = tile / long_tiles, row = tile % long_tiles * TILE_ROWS;
            return false;
        }
        head = long_heads + rest / short_tiles, row = rest % short_tiles * SHORT_TILE_ROWS;
        return true;
    }
};

struct Barriers {
    u64 q_full, q_empty;
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// Signals that this warp has finished reading a tile.
__device__ __forceinline__ void release_stage(u64 *bar) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

// Loads a box of [2 halves][box rows][64 columns] of one head, each half with 128-byte swizzle;
// rows past the end are zero.
__device__ __forceinline__ void load_box(void *to, const TensorMap *map, u64 *bar, int row, int head) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(0), "r"(row), "r"(head * 2), "r"(shared_address(bar))
                 : "memory");
}

#define R8(a, i) \
    "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), "+f"(a[i + 6]), "+f"(a[i + 7])
#define R32(a) R8(a, 0), R8(a, 8), R8(a, 16), R8(a, 24)
#define R40(a) R32(a), R8(a, 32)
#define R64(a) R40(a), R8(a, 40), R8(a, 48), R8(a, 56)
#define T32                                                                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31"
#define T40 T32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define T64                                                                                                                     \
    T40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QK_WGMMA(n, list, regs, q, y, z, which, ...)                                                                       \
    asm volatile("{\n"                                                                                                        \
                 ".reg .pred p;\n"                                                                                            \
                 "setp.ne.b32 p, " z ", 0;\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" list "}, " q ", " y ", p, 1, 1, " which ";\n"    \
                 "}"                                                                                                          \
                 : regs(s)                                                                                                    \
                 : __VA_ARGS__, "l"(k), "r"(more))
#define QK_FROM_SHARED(n, list, regs, x, y, z) QK_WGMMA(n, list, regs, x, y, z, "0, 0", "l"(q))
#define QK_FROM_REGISTERS(n, list, regs, x, y, z) QK_WGMMA(n, list, regs, x, y, z, "0", "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]))

// S (+)= Q Kᵀ over 16 columns, with Q in shared memory or in registers.
__device__ __forceinline__ void qk_wgmma(float (&s)[SCORES_PER_THREAD], u64 q, u64 k, int more) {
#if KEYS == 64
    QK_FROM_SHARED("64", T32, R32, "%32", "%33", "%34");
#elif KEYS == 80
    QK_FROM_SHARED("80", T40, R40, "%40", "%41", "%42");
#else
#error no wgmma for this number of keys
#endif
}
__device__ __forceinline__ void qk_wgmma(float (&s)[SCORES_PER_THREAD], const u32 *q, u64 k, int more) {
#if KEYS == 64
    QK_FROM_REGISTERS("64", T32, R32, "{%32, %33, %34, %35}", "%36", "%37");
#elif KEYS == 80
    QK_FROM_REGISTERS("80", T40, R40, "{%40, %41, %42, %43}", "%44", "%45");
#endif
}
// O += P V over 16 keys.
__device__ __forceinline__ void pv_wgmma(float (&o)[64], const u32 *p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" T64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(o)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// Returns the address of 16-byte chunk `i` of a row in a tile with 128-byte swizzle; `i` counts
// over both halves.
__device__ __forceinline__ u32 swizzled_address(u32 tile, u32 half, int row, int i) {
    return tile + i / 8 * half + row * 128 + (i % 8 ^ row % 8) * 16;
}

// One warpgroup's rows of Q.
struct QueryRows {
    u32 address;     // in shared memory
    u64 descriptor;  // wgmma descriptor of the same tile
    u32 cached[4 * Q_REG_SLICES];

    // Loads this thread's A fragment of the columns from `16 * i` on.
    __device__ __forceinline__ void load_fragment(u32 (&x)[4], int i) const {
        int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(swizzled_address(address, Q_HALF, row, 2 * i + lane / 16))
                     : "memory");
    }
    __device__ __forceinline__ void cache_fragments() {
#pragma unroll
        for (int i = 0; i < Q_REG_SLICES; i++) {
            u32 x[4];
            load_fragment(x, i);
#pragma unroll
            for (int j = 0; j < 4; j++) cached[4 * i + j] = x[j];
        }
    }
};

__device__ __forceinline__ void issue_qk(float (&s)[SCORES_PER_THREAD], const QueryRows &q, u64 k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
        // Sixteen columns are 32 bytes within a half.
        u64 k_slice = k + i / 4 * (TILE_HALF >> 4) + i % 4 * 2;
        if (i < Q_REG_SLICES) qk_wgmma(s, q.cached + 4 * i, k_slice, i > 0);
        else qk_wgmma(s, q.descriptor + i / 4 * (Q_HALF >> 4) + i % 4 * 2, k_slice, i > 0);
    }
    wgmma_commit();
}
__device__ __forceinline__ void issue_pv(float (&o)[64], const u32 (&p)[KEYS / 4], u64 v) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) pv_wgmma(o, p + 4 * i, v + i * (16 * HALF * 2 >> 4));
    wgmma_commit();
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void pack_probabilities(u32 (&p)[KEYS / 4], const float (&s)[SCORES_PER_THREAD]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// The online softmax state of a thread's two rows, which are 8 rows apart.
struct Softmax {
    // A score's exponential is exp2(score * SCALE_LOG2 + offset of its row).
    float offset[2], sum[2], factor[2];

    // Returns the maximum over the four threads that share a row.
    __device__ __forceinline__ static float quad_max(float largest) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    }
    // Returns the offset at which a row's largest score has the exponential 1.
    __device__ __forceinline__ static float offset_of_max(const float (&s)[SCORES_PER_THREAD], int r) {
        float a = fmaxf(s[2 * r], s[2 * r + 1]), b = fmaxf(s[2 * r + 4], s[2 * r + 5]);
#pragma unroll
        for (int i = 8; i < SCORES_PER_THREAD; i += 8) {
            a = fmaxf(a, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            b = fmaxf(b, fmaxf(s[i + 2 * r + 4], s[i + 2 * r + 5]));
        }
        return -quad_max(fmaxf(a, b)) * SCALE_LOG2;
    }

    // Replaces scores by their exponentials and adds them up in `tile`, for both rows or for one.
    __device__ __forceinline__ void exponentiate(float (&s)[SCORES_PER_THREAD], float (&tile)[2], bool first = true, bool second = true) const {
#pragma unroll
        for (int i = 0; i < SCORES_PER_THREAD; i++) {
            int r = i / 2 % 2;
            if (!(r ? second : first)) continue;
            s[i] = exp2_approx(fmaf(s[i], SCALE_LOG2, offset[r]));
            tile[r] = i == 2 * r ? s[i] : tile[r] + s[i];
        }
        // Everything above must finish before the wait for P V.
        asm volatile("" : "+f"(tile[0]), "+f"(tile[1])::"memory");
    }

    __device__ __forceinline__ void begin(float (&s)[SCORES_PER_THREAD]) {
        offset[0] = offset_of_max(s, 0), offset[1] = offset_of_max(s, 1);
        exponentiate(s, sum);
    }

    // Processes the next tile's scores. Returns, uniformly over the warp, whether O must be
    // multiplied by `factor`.
    __device__ __forceinline__ bool update(float (&s)[SCORES_PER_THREAD], const QueryRows &q, u32 k) {
        float tile[2];
        exponentiate(s, tile);
        bool needs_rescale = __any_sync(0xffffffffu, tile[0] > RESCALE_ABOVE || tile[1] > RESCALE_ABOVE);
        if (needs_rescale) {
            factor[0] = factor[1] = 1.0f;
            bool overflowed[2] = {quad_max(tile[0]) >= RECOMPUTE_ABOVE, quad_max(tile[1]) >= RECOMPUTE_ABOVE};
            if (__any_sync(0xffffffffu, overflowed[0] || overflowed[1])) recompute(s, tile, overflowed, q, k);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float largest = quad_max(tile[r]);
                int exponent = largest > RESCALE_ABOVE ? (int)(__float_as_uint(largest) >> 23) - 127 : 0;
                float power_of_two = __uint_as_float((u32)(127 - exponent) << 23);
                offset[r] -= (float)exponent;
                factor[r] *= power_of_two, tile[r] *= power_of_two, sum[r] *= factor[r];
#pragma unroll
                for (int i = 2 * r; i < SCORES_PER_THREAD; i += 4) s[i] *= power_of_two, s[i + 1] *= power_of_two;
            }
        }
        sum[0] += tile[0], sum[1] += tile[1];
        return needs_rescale;
    }

    // Recomputes the scores of overflowed rows with one warp's mma instructions, because wgmma
    // needs all warps of the warpgroup. Other rows keep their values, so that no row's bits depend
    // on another row.
    __device__ __forceinline__ void recompute(float (&s)[SCORES_PER_THREAD], float (&tile)[2], const bool (&overflowed)[2], const QueryRows &q, u32 k) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (int i = 0; i < HEAD / 16; i++) {
                u32 x[4], y[2];
                q.load_fragment(x, i);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                             : "=r"(y[0]), "=r"(y[1])
                             : "r"(swizzled_address(k, TILE_HALF, 8 * j + lane % 8, 2 * i + lane / 8 % 2))
                             : "memory");
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &to = s[4 * j + e];
                to = overflowed[e / 2] ? d[e] : to;
                // Select now: keeping both alternatives alive would take twice the registers.
                asm volatile("" : "+f"(to)::"memory");
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float other = offset_of_max(s, r);
            other = overflowed[r] ? other : offset[r];
            factor[r] = exp2_approx(other - offset[r]);
            offset[r] = other;
        }
        exponentiate(s, tile, overflowed[0], overflowed[1]);
    }

    __device__ __forceinline__ void rescale(float (&o)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] *= factor[i / 2 % 2];
    }
};

// Transposes a 4 × 4 matrix of words over four lanes: lane i gets word i of every lane.
__device__ __forceinline__ void transpose(u32 (&x)[4]) {
    bool b1 = threadIdx.x & 2, b0 = threadIdx.x & 1;
    u32 y0 = __shfl_xor_sync(0xffffffffu, b1 ? x[0] : x[2], 2);
    u32 y1 = __shfl_xor_sync(0xffffffffu, b1 ? x[1] : x[3], 2);
    if (b1) x[0] = y0, x[1] = y1;
    else x[2] = y0, x[3] = y1;
    y0 = __shfl_xor_sync(0xffffffffu, b0 ? x[0] : x[1], 1);
    y1 = __shfl_xor_sync(0xffffffffu, b0 ? x[2] : x[3], 1);
    if (b0) x[0] = y0, x[2] = y1;
    else x[1] = y0, x[3] = y1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
              bf16 *out, float *lse, int rows, int keys, int heads, int long_heads, const __grid_constant__ Targets targets) {
    if (targets.is_closed()) return;
    // The swizzle requires an alignment of 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *q_tile = shared, *k_tiles = shared + Q_BYTES, *v_tiles = k_tiles + STAGES * TILE_BYTES;
    Barriers &bars = *(Barriers *)(v_tiles + STAGES * TILE_BYTES);
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    TileSchedule schedule = {(rows + TILE_ROWS - 1) / TILE_ROWS, (rows + SHORT_TILE_ROWS - 1) / SHORT_TILE_ROWS, long_heads};
    int tiles = schedule.long_tiles * long_heads + schedule.short_tiles * (heads - long_heads);
    int steps = (keys + KEYS - 1) / KEYS;
    if (threadIdx.x == 0) {
        mbarrier_init(&bars.q_full, 1);
        mbarrier_init(&bars.q_empty, GROUPS * 4);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(&bars.k_full[i], 1);
            mbarrier_init(&bars.v_full[i], 1);
            mbarrier_init(&bars.k_empty[i], GROUPS * 4);
            mbarrier_init(&bars.v_empty[i], GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
        if (threadIdx.x == GROUPS * 128) {
            PipelineState state = {0, 0};
            u32 q_phase = 0;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                int head, row;
                schedule.locate(tile, head, row);
                for (int j = 0; j < steps; j++) {
                    int key = (steps - 1 - j) * KEYS;
                    mbarrier_wait(&bars.k_empty[state.stage], state.phase ^ 1);
                    mbarrier_expect_tx(&bars.k_full[state.stage], TILE_BYTES);
                    load_box(k_tiles + state.stage * TILE_BYTES, &k_map, &bars.k_full[state.stage], key, head);
                    if (j == 0) {
                        mbarrier_wait(&bars.q_empty, q_phase ^ 1);
                        mbarrier_expect_tx(&bars.q_full, Q_BYTES);
                        load_box(q_tile, &q_map, &bars.q_full, row, head);
                        q_phase ^= 1;
                    }
                    mbarrier_wait(&bars.v_empty[state.stage], state.phase ^ 1);
                    mbarrier_expect_tx(&bars.v_full[state.stage], TILE_BYTES);
                    load_box(v_tiles + state.stage * TILE_BYTES, &v_map, &bars.v_full[state.stage], key, head);
                    state = state.next();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        unsigned char *q_rows = q_tile + group * 64 * HALF * 2;
        QueryRows q = {shared_address(q_rows), matrix_descriptor(q_rows, 16, 1024)};
        u64 k = matrix_descriptor(k_tiles, 16, 1024), v = matrix_descriptor(v_tiles, TILE_HALF, 1024);
        bool is_warp_leader = threadIdx.x % 32 == 0;
        PipelineState state = {0, 0};
        u32 q_phase = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, q_phase ^= 1) {
            int head, row;
            bool idle = schedule.locate(tile, head, row) && group == GROUPS - 1;
            row += group * 64;
            if (idle || row >= rows) {
                // This warpgroup has no rows in the tile: it only releases the stages along with
                // the others.
                mbarrier_wait(&bars.q_full, q_phase);
                if (is_warp_leader) mbarrier_arrive(&bars.q_empty);
                for (int j = 0; j < steps; j++, state = state.next()) {
                    mbarrier_wait(&bars.k_full[state.stage], state.phase);
                    release_stage(&bars.k_empty[state.stage]);
                    mbarrier_wait(&bars.v_full[state.stage], state.phase);
                    release_stage(&bars.v_empty[state.stage]);
                }
                continue;
            }
            float s[SCORES_PER_THREAD], o[64];
            u32 p[KEYS / 4];
            Softmax softmax;

            mbarrier_wait(&bars.q_full, q_phase);
            q.cache_fragments();
            mbarrier_wait(&bars.k_full[state.stage], state.phase);
            fence_registers(s);
            issue_qk(s, q, k + state.stage * (TILE_BYTES >> 4));
            wgmma_wait<0>();
            fence_registers(s);
            release_stage(&bars.k_empty[state.stage]);
            // The first tile processed holds the last keys: mask those past the end.
            int left = keys - (steps - 1) * KEYS - threadIdx.x % 4 * 2;
            if (keys % KEYS != 0) {
#pragma unroll
                for (int i = 0; i < SCORES_PER_THREAD; i++) {
                    if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
                }
            }
            softmax.begin(s);
            fence_registers(s);
            pack_probabilities(p, s);
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] = 0.0f;
            state = state.next();
            if (steps > 1) mbarrier_wait(&bars.k_full[state.stage], state.phase);
            for (int j = 1; j < steps; j++) {
                fence_registers(s);
                issue_qk(s, q, k + state.stage * (TILE_BYTES >> 4));
                mbarrier_wait(&bars.v_full[state.previous().stage], state.previous().phase);
                fence_registers(o);
                issue_pv(o, p, v + state.previous().stage * (TILE_BYTES >> 4));
                wgmma_wait<1>();
                fence_registers(s);
                bool needs_rescale = softmax.update(s, q, shared_address(k_tiles) + state.stage * TILE_BYTES);
                fence_registers(s);
                release_stage(&bars.k_empty[state.stage]);
                // The wait is placed here to separate the softmax from the wait for P V: the
                // compiler moves neither across it.
                PipelineState next = state.next();
                if (j + 1 < steps) mbarrier_wait(&bars.k_full[next.stage], next.phase);
                wgmma_wait<0>();
                fence_registers(o);
                release_stage(&bars.v_empty[state.previous().stage]);
                pack_probabilities(p, s);
                if (needs_rescale) softmax.rescale(o);
                state = state.next();
            }
            if (is_warp_leader) mbarrier_arrive(&bars.q_empty);
            mbarrier_wait(&bars.v_full[state.previous().stage], state.previous().phase);
            fence_registers(o);
            issue_pv(o, p, v + state.previous().stage * (TILE_BYTES >> 4));
            wgmma_wait<0>();
            fence_registers(o);
            release_stage(&bars.v_empty[state.previous().stage]);

            int lane = threadIdx.x % 32;
            row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = softmax.sum[r];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                float inverse_sum = __fdividef(1.0f, sum);
                int row_here = row + 8 * r;
                u64 to = (u64)(out + (i64)row_here * heads * HEAD);
                if (targets.members) {
                    const Target &t = targets.target_of(row_here);
                    to = t.to + (row_here - t.first) * t.pitch;
                }
                to += (head * HEAD + lane % 4 * 8) * sizeof(bf16);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 x[4];
#pragma unroll
                    for (int c = 0; c < 4; c++) x[c] = pack_bf16(o[16 * i + 4 * c + 2 * r] * inverse_sum, o[16 * i + 4 * c + 2 * r + 1] * inverse_sum);
                    transpose(x);
                    if (row_here < rows) *(uint4 *)(to + 64 * i) = make_uint4(x[0], x[1], x[2], x[3]);
                }
                if (lse && row_here < rows && lane % 4 == 0) {
                    lse[(i64)head * rows + row_here] = fmaf(-softmax.offset[r], LOG_2, __logf(sum));
                }
            }
        }
    }
}
