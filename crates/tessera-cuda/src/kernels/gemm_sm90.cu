// A GEMM for Hopper that loads tiles with TMA and multiplies with wgmma: out = act(x wᵀ + bias) +
// residual. `GELU` selects the tanh approximation of GELU as act. `RESIDUAL` adds a tensor, which
// may alias out, to the result after rounding to bf16.
//
// x is [rows, inner], w [columns, inner], out and residual [rows, columns], bf16; columns and inner
// are multiples of 8. The kernel computes the transpose: columns of out are the M dimension of
// wgmma, 256 per block, and rows of out are its N dimension, which may be any multiple of eight.
// TILE_ROWS is chosen for the number of rows, so that the last wave of tiles leaves few blocks
// idle. A per-column value such as the bias is then one register per thread.
//
// Two neighbouring blocks form a cluster. They share the same rows and take neighbouring columns,
// and each multicasts half of the row tile to both; or, with SAME_COLUMNS, they share the same
// columns and take neighbouring rows, and each multicasts half of the column tile, which is the
// larger one. Clusters are persistent and process nearby tiles at the same time, so that rows and
// columns are read from L2. One warpgroup of a block loads and two compute, each 128 columns as two
// accumulators of 64. With as much of out in registers as possible, a byte read from L2 or shared
// memory is multiplied more often than with smaller tiles, which matters most under a power limit.
//
// The sum over `inner` is one sequential chain, so a row's bits depend on neither the other rows
// nor the tile shape. RELEASE_SLICES is the number of k-slices of 16 in flight when the previous
// stage's buffers are released. In a tile's last k-step the first accumulator runs ahead of the
// second, twice as far up to that point, and its epilogue runs while the second is still
// multiplied.
constexpr int TILE_COLUMNS = 256, TILE_INNER = 64;  // of a block's tile; 64 elements are one 128-byte swizzle row
constexpr int GROUPS = 2, CLUSTER = 2;
constexpr int THREADS = 128 * (GROUPS + 1);
// Extents of a cluster's tile, and how many of a shared row tile's rows the first block loads; the
// second loads the rest.
constexpr int CLUSTER_ROWS = SAME_COLUMNS ? CLUSTER * TILE_ROWS : TILE_ROWS, CLUSTER_COLUMNS = SAME_COLUMNS ? TILE_COLUMNS : CLUSTER * TILE_COLUMNS;
constexpr int FIRST_BLOCK_ROWS = SAME_COLUMNS ? TILE_ROWS : (TILE_ROWS / 2 + 7) / 8 * 8;
constexpr int COMPUTE_REGS = 240, LOAD_REGS = 24;  // per thread; a multiprocessor has 64 Ki registers
constexpr int ACCUMULATORS = TILE_ROWS / 2;
constexpr u32 W_BYTES = TILE_COLUMNS * TILE_INNER * 2, X_BYTES = TILE_ROWS * TILE_INNER * 2;
// Columns of out that one accumulator covers.
constexpr int WGMMA_COLUMNS = 64;
constexpr u32 WGMMA_BYTES = WGMMA_COLUMNS * TILE_INNER * 2;
// The epilogue stages EPILOGUE_ROWS rows of out at a time in shared memory, alternating between two
// buffers: each holds one accumulator's columns in chunks of 16 bytes. Residuals are prefetched two
// steps ahead.
constexpr int EPILOGUE_ROWS = 32, EPILOGUE_STEPS = (TILE_ROWS + EPILOGUE_ROWS - 1) / EPILOGUE_ROWS, EPILOGUE_BUFFERS = 2;
constexpr u32 ROW_BYTES = WGMMA_COLUMNS * 2, BUFFER_BYTES = EPILOGUE_ROWS * ROW_BYTES;
static_assert(TILE_ROWS % 8 == 0 && TILE_ROWS >= EPILOGUE_ROWS && RELEASE_SLICES >= 1 && RELEASE_SLICES <= TILE_INNER / 32, "unsupported tile shape");

// Columns [first, last) that are stored elsewhere than in out: as contiguous rows of their own,
// from row `*row` of `to` on.
struct RedirectedColumns {
    u64 to;
    const i64 *row;
    u64 first, last;
};

struct Barriers {
    u64 full[STAGES], empty[STAGES];
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the mbarrier of another block of the cluster. It signals that a stage was read and
// orders no writes: an explicit release would wait for all memory accesses at every k-step.
__device__ __forceinline__ void mbarrier_arrive_remote(u64 *bar, u32 block) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(bar)),
                 "r"(block)
                 : "memory");
}

// Loads rows of x or w from `row` on, into this block or both; rows past the end are zero.
template <bool BOTH> __device__ __forceinline__ void load_tile(void *to, const TensorMap *map, u64 *bar, int inner, int row) {
    if (BOTH) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
                     "l"(map), "r"(inner), "r"(row), "r"(shared_address(bar)), "h"((u16)3)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                         shared_address(to)),
                     "l"(map), "r"(inner), "r"(row), "r"(shared_address(bar))
                     : "memory");
    }
}

// Stores four 8 × 8 matrices from a thread's pairs to shared memory, transposed.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// Loads four 8 × 8 matrices from rows in shared memory into the threads that hold their columns.
__device__ __forceinline__ void load_transposed(u32 address, u32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address)
                 : "memory");
}
// Copies 16 bytes asynchronously, or zero-fills them. The wait below leaves one group in flight per
// other buffer.
__device__ __forceinline__ void copy_async_if(bool wanted, u32 address, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(EPILOGUE_BUFFERS - 1) : "memory");
}

// Predicated, because a branch would serialise the stores.
__device__ __forceinline__ void store_if(bool wanted, void *to, uint4 x) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %5, 0;\n"
                 "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
                 "}" ::"l"(to),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((int)wanted)
                 : "memory");
}

// The tile schedule: bands of BAND cluster tiles of rows; within a band, tiles of one column come
// first.
struct TileSchedule {
    int row_tiles, column_tiles;  // number of cluster tiles along the rows and the columns
    int rank;           // this block's rank in its cluster
    __device__ __forceinline__ void locate(int tile, int &row, int &column) const {
        int band = tile / (BAND * column_tiles), rest = tile - band * BAND * column_tiles;
        int wide = min(BAND, row_tiles - band * BAND);
        row = (band * BAND + rest % wide) * CLUSTER_ROWS + (SAME_COLUMNS ? rank * TILE_ROWS : 0);
        column = rest / wide * CLUSTER_COLUMNS + (SAME_COLUMNS ? 0 : rank * TILE_COLUMNS);
    }
};

// Returns the offset of 16-byte chunk `i` of a row in an epilogue buffer; swizzled, so that eight
// rows' chunks hit different banks.
__device__ __forceinline__ u32 swizzled_offset(int row, int i) {
    return row * ROW_BYTES + (i ^ row % 8) * 16;
}

// Uses the hardware's tanh approximation.
__device__ __forceinline__ float activate(float x) {
#if GELU
    float argument = x * fmaf(0.044715f * 0.7978845608028654f * x, x, 0.7978845608028654f), t, half = 0.5f * x;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(argument));
    return fmaf(half, t, half);
#else
    return x;
#endif
}

// Writes 16 rows by 16 columns of out from the accumulators `d` to shared memory. Residuals are
// read from the same place.
__device__ __forceinline__ void store_fragment(const float *d, u32 address, const float *bias) {
    u32 x[4];
#if RESIDUAL
    u32 residuals[4];
    load_transposed(address, residuals);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = pack_bf16(activate(d[2 * i] + bias[i % 2]), activate(d[2 * i + 1] + bias[i % 2]));
#if RESIDUAL
        asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(residuals[i]));
#endif
    }
    store_transposed(address, x);
}

// Returns the first row of an epilogue step; the last step ends at the tile's last row.
__device__ __forceinline__ constexpr int first_row_of(int step) {
    return step * EPILOGUE_ROWS < TILE_ROWS - EPILOGUE_ROWS ? step * EPILOGUE_ROWS : TILE_ROWS - EPILOGUE_ROWS;
}

// The epilogue of one warpgroup: it stores the first accumulator step by step, then the second. A
// warp transposes its 16 columns of a step, then stores eight of the step's rows.
struct Epilogue {
    const bf16 *residual;
    bf16 *out;
    const RedirectedColumns &redirected;
    int rows, columns;
    u32 buffers;  // the warpgroup's buffers in shared memory
    int group, warp, lane;
    int redirected_row;
    int row, column;  // first row and column of the warpgroup's part of a tile

    __device__ __forceinline__ u32 buffer(int step) const { return buffers + step % EPILOGUE_BUFFERS * BUFFER_BYTES; }
    // This lane's row among the four that a warp stores at once, and the column of its chunk.
    __device__ __forceinline__ int lane_row(int i) const { return 8 * warp + 4 * i + lane / 8; }
    __device__ __forceinline__ int lane_column(int accumulator) const { return column + accumulator * WGMMA_COLUMNS + lane % 8 * 8; }
    __device__ __forceinline__ void warpgroup_sync() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

    // Prefetches the residuals of a step (counted over both accumulators): each lane loads the
    // elements that it will store.
    __device__ __forceinline__ void prefetch_residual(int step) const {
        if (!RESIDUAL) return;
        if (step < 2 * EPILOGUE_STEPS) {
            int c = lane_column(step / EPILOGUE_STEPS), first = row + first_row_of(step % EPILOGUE_STEPS);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = lane_row(i);
                bool wanted = c < columns && first + r < rows;
                copy_async_if(wanted, buffer(step) + swizzled_offset(r, lane % 8), residual + (wanted ? (i64)(first + r) * columns + c : 0));
            }
        }
        commit_copies();
    }

    __device__ __forceinline__ void store(const float (&d)[ACCUMULATORS], const float *bias, int accumulator) const {
        int c = lane_column(accumulator);
        bool is_redirected = c >= redirected.first && c < redirected.last;
        i64 pitch = (is_redirected ? (i64)(redirected.last - redirected.first) : (i64)columns) * sizeof(bf16);
        i64 to_row = row + lane_row(0) + (is_redirected ? redirected_row : 0);
        unsigned char *to = is_redirected ? (unsigned char *)redirected.to : (unsigned char *)out;
        to += to_row * pitch + (c - (is_redirected ? (int)redirected.first : 0)) * sizeof(bf16);
        int left = c < columns ? rows - row - lane_row(0) : 0;
#pragma unroll
        for (int p = 0; p < EPILOGUE_STEPS; p++) {
            const int start = first_row_of(p), step = accumulator * EPILOGUE_STEPS + p;
            u32 staging = buffer(step);
            if (RESIDUAL) {
                wait_for_copies();
                warpgroup_sync();
            }
#pragma unroll
            for (int i = 0; i < EPILOGUE_ROWS; i += 16) {
                store_fragment(d + (start + i) / 2, staging + swizzled_offset(i + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), bias);
            }
            // One barrier per step is enough: before a buffer is written again, all warps have met
            // at the barrier of the other one.
            warpgroup_sync();
            uint4 chunks[2];
#pragma unroll
            for (int i = 0; i < 2; i++) chunks[i] = load_shared(staging + swizzled_offset(lane_row(i), lane % 8));
            // The rows that the last step shares with the previous one are stored already, and
            // their residuals may have been overwritten.
            bool is_new = start + 8 * warp >= p * EPILOGUE_ROWS;
#pragma unroll
            for (int i = 0; i < 2; i++) store_if(is_new && start + 4 * i < left, to + (start + 4 * i) * pitch, chunks[i]);
            prefetch_residual(step + EPILOGUE_BUFFERS);
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_rest_map,
             const bf16 *bias, const bf16 *residual, bf16 *out, int rows, int columns, int inner, const __grid_constant__ RedirectedColumns redirected) {
    // The swizzle requires an alignment of 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *w_tiles = shared, *x_tiles = w_tiles + STAGES * W_BYTES, *staging = x_tiles + STAGES * X_BYTES;
    Barriers &bars = *(Barriers *)(staging + GROUPS * EPILOGUE_BUFFERS * BUFFER_BYTES);
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int rank = cluster_rank();
    TileSchedule schedule = {(rows + CLUSTER_ROWS - 1) / CLUSTER_ROWS, (columns + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS, rank};
    int tiles = schedule.row_tiles * schedule.column_tiles, steps = (inner + TILE_INNER - 1) / TILE_INNER;
    int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(&bars.full[i], 1);
            // Every computing warp of both blocks arrives: the other block's half must not
            // overwrite a stage that is still being read.
            mbarrier_init(&bars.empty[i], CLUSTER * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();

    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
        if (threadIdx.x == GROUPS * 128) {
            PipelineState state = {0, 0};
            // This block's part of the shared tile starts at these offsets.
            int w_skip = SAME_COLUMNS ? rank * TILE_COLUMNS / 2 : 0, x_skip = SAME_COLUMNS ? 0 : rank * FIRST_BLOCK_ROWS;
            const TensorMap *own = x_skip ? &x_rest_map : &x_map;
            for (int tile = first; tile < tiles; tile += stride) {
                int row, column;
                schedule.locate(tile, row, column);
                for (int j = 0; j < steps; j++, state = state.next()) {
                    u64 *full = &bars.full[state.stage];
                    mbarrier_wait(&bars.empty[state.stage], state.phase ^ 1);
                    mbarrier_expect_tx(full, W_BYTES + X_BYTES);
                    load_tile<SAME_COLUMNS>(w_tiles + state.stage * W_BYTES + w_skip * TILE_INNER * 2, &w_map, full, j * TILE_INNER, column + w_skip);
                    load_tile<!SAME_COLUMNS>(x_tiles + state.stage * X_BYTES + x_skip * TILE_INNER * 2, own, full, j * TILE_INNER, row + x_skip);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        u64 w = matrix_descriptor(w_tiles + group * 2 * WGMMA_BYTES, 16, 1024), x = matrix_descriptor(x_tiles, 16, 1024);
        u32 staging_address = shared_address(staging) + group * EPILOGUE_BUFFERS * BUFFER_BYTES;
        int redirected_row = redirected.row ? (int)*redirected.row : 0;
        Epilogue epilogue = {residual, out, redirected, rows, columns, staging_address, group, warp, lane, redirected_row, 0, 0};
        PipelineState state = {0, 0};
        for (int tile = first; tile < tiles; tile += stride) {
            schedule.locate(tile, epilogue.row, epilogue.column);
            epilogue.column += group * 2 * WGMMA_COLUMNS;
#pragma unroll
            for (int step = 0; step < EPILOGUE_BUFFERS; step++) epilogue.prefetch_residual(step);
            // The biases of two columns per accumulator.
            float column_bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int c = epilogue.column + i / 2 * WGMMA_COLUMNS + 16 * warp + i % 2 * 8 + lane / 4;
                if (bias && c < columns) column_bias[i] = to_f32(bias[c]);
            }
            float a[ACCUMULATORS], b[ACCUMULATORS];
            fence_registers(a);
            fence_registers(b);
            // The previous k-step has completed: its stage is released while this k-step is
            // multiplied.
            auto release_previous = [&](int j) {
                wgmma_commit();
                wgmma_wait<1>();
                if (j > 0 && lane < CLUSTER) mbarrier_arrive_remote(&bars.empty[state.previous().stage], lane);
            };
            u64 a_slice, b_slice, x_slice;
            auto begin_stage = [&] {
                mbarrier_wait(&bars.full[state.stage], state.phase);
                a_slice = w + state.stage * (W_BYTES >> 4), b_slice = a_slice + (WGMMA_BYTES >> 4), x_slice = x + state.stage * (X_BYTES >> 4);
                wgmma_fence();
            };
            for (int j = 0; j + 1 < steps; j++, state = state.next()) {
                begin_stage();
#pragma unroll
                for (int i = 0; i < TILE_INNER / 16; i++) {
                    wgmma_step(a, a_slice + 2 * i, x_slice + 2 * i, j + i > 0);
                    wgmma_step(b, b_slice + 2 * i, x_slice + 2 * i, j + i > 0);
                    if (i + 1 == RELEASE_SLICES) release_previous(j);
                }
                wgmma_commit();
            }
            begin_stage();
#pragma unroll
            for (int i = 0; i < TILE_INNER / 16; i++) {
                wgmma_step(a, a_slice + 2 * i, x_slice + 2 * i, steps + i > 1);
                if (i + 1 != 2 * RELEASE_SLICES) continue;
                release_previous(steps - 1);
                wgmma_fence();
            }
            wgmma_commit();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TILE_INNER / 16; i++) wgmma_step(b, b_slice + 2 * i, x_slice + 2 * i, steps + i > 1);
            wgmma_commit();
            wgmma_wait<1>();
            fence_registers(a);
            epilogue.store(a, column_bias, 0);
            wgmma_wait<0>();
            fence_registers(b);
            if (lane < CLUSTER) mbarrier_arrive_remote(&bars.empty[state.stage], lane);
            state = state.next();
            epilogue.store(b, column_bias + 2, 1);
        }
    }
    // No block may exit before its peer has sent its last arrivals.
    cluster_sync();
}
