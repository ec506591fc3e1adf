// out = act(x wᵀ + bias) + residual for Hopper: tiles arrive by the copy engine, products by warpgroup instructions. By GELU act is its
// tanh form; by RESIDUAL there is something to add, which may be out itself.
//
// x is [rows, inner], w [columns, inner], out and residual [rows, columns], bf16; columns a multiple of 32, inner of 8. The product is
// taken as its transpose: columns of out lie along the tensor cores' rows, 256 a block, and rows of out along their columns, which may be
// any multiple of eight: WIDTH is chosen for the rows there are, so that the last round of tiles leaves few blocks idle. What belongs
// to a column, its bias, is then a register of a thread.
//
// Two blocks next to each other, a cluster, take the same rows and neighbouring columns, and each loads half of the rows' tile for
// both; or, by SAME_COLUMNS, the same columns and neighbouring rows, and each loads half of the columns' tile, which is the
// larger. Clusters stay and take tile after tile, neighbours those near each other, so that rows and columns come from L2. In a
// block one warpgroup loads and two compute, each 128 columns by two products of 64: with as much of out in registers as there is,
// a byte from L2 or from shared memory is multiplied more often than in smaller tiles, which is what counts under a power limit.
// The sum over `inner` is one chain, in order: a row's bits depend on neither the other rows nor the tiles. EARLY times 16 of it
// are under way when the last step's tiles are given back.
constexpr int COLUMNS = 256, INNER = 64;  // of a block's tile; elements of 128 bytes
constexpr int GROUPS = 2, CLUSTER = 2;
constexpr int THREADS = 128 * (GROUPS + 1);
// A cluster's tile, and how many rows of one its first block loads, the second the rest.
constexpr int ROWS = SAME_COLUMNS ? CLUSTER * WIDTH : WIDTH, ACROSS = SAME_COLUMNS ? COLUMNS : CLUSTER * COLUMNS;
constexpr int FIRST = SAME_COLUMNS ? WIDTH : (WIDTH / 2 + 7) / 8 * 8;
constexpr int COMPUTE_REGS = 240, LOAD_REGS = 24;  // a thread's, of the 64 Ki of a multiprocessor
constexpr int PER_THREAD = WIDTH / 2;
constexpr u32 W_BYTES = COLUMNS * INNER * 2, X_BYTES = WIDTH * INNER * 2;
// Where columns of a tile of w lie in shared memory: of each 32 the first 16 in the first half, the others in the second, so that the
// two products of a warp end with 32 columns side by side.
constexpr u32 HALF_BYTES = W_BYTES / 2, GROUP_BYTES = 64 * INNER * 2;
// Rows of out that a warp turns at once, on their way out: 64 bytes of each are its own.
constexpr int PART = 32, ROW_BYTES = 64, PARTS = (WIDTH + PART - 1) / PART;
// What is added is brought this many parts ahead, each to where it will be turned.
constexpr int TURNED = RESIDUAL ? 2 : 1;
static_assert(WIDTH % 8 == 0 && WIDTH >= PART && EARLY >= 1 && EARLY <= INNER / 16, "no such tile");

// Columns [first, last) that lie elsewhere than in out: rows of their own behind one another, from row `*row` of `to` on.
struct Away {
    u64 to;
    const i64 *row;
    u64 first, last;
};

struct Barriers {
    u64 full[STAGES], empty[STAGES];
};

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// At the barrier of a block of the cluster. It tells that tiles were read, and orders nothing that was written: a release by name would
// wait for all memory, at every step.
__device__ __forceinline__ void arrive_at(u64 *bar, u32 block) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(bar)),
                 "r"(block)
                 : "memory");
}

#if SAME_COLUMNS
#define COLUMNS_TO ".multicast::cluster"
#define COLUMNS_MASK ", %6"
#define ROWS_TO ""
#define ROWS_MASK ""
#else
#define COLUMNS_TO ""
#define COLUMNS_MASK ""
#define ROWS_TO ".multicast::cluster"
#define ROWS_MASK ", %5"
#endif
// Columns from `column`, in the order that HALF_BYTES tells of, all or one half, which goes to both blocks; those beyond the end are zeros.
__device__ __forceinline__ void load_columns(void *to, const TensorMap *map, u64 *bar, int inner, int column, int half) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" COLUMNS_TO
                 " [%0], [%1, {%2, 0, %3, %4}], [%5]" COLUMNS_MASK ";" ::"r"(shared_address(to)),
                 "l"(map), "r"(inner), "r"(column / 32), "r"(half), "r"(shared_address(bar)), "h"((u16)3)
                 : "memory");
}
// Rows from `row`, all of a tile or the part that goes to both blocks; those beyond the end are zeros.
__device__ __forceinline__ void load_rows(void *to, const TensorMap *map, u64 *bar, int inner, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" ROWS_TO
                 " [%0], [%1, {%2, %3}], [%4]" ROWS_MASK ";" ::"r"(shared_address(to)),
                 "l"(map), "r"(inner), "r"(row), "r"(shared_address(bar)), "h"((u16)3)
                 : "memory");
}

// Four matrices of eight by eight from a thread's pairs to shared memory, where they lie as their transposes.
__device__ __forceinline__ void put(u32 at, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ __forceinline__ uint4 get(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}

// And back: what lies there as rows, to the threads that hold its columns.
__device__ __forceinline__ void take(u32 at, u32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at)
                 : "memory");
}
// Brings 16 bytes, or zeros; the wait is for all but the last group.
__device__ __forceinline__ void bring_if(bool wanted, u32 at, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void brought() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_brought() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// Without a branch, which would wait for one store after another.
__device__ __forceinline__ void store_if(bool wanted, void *to, uint4 x) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %5, 0;\n"
                 "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
                 "}" ::"l"(to),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((int)wanted)
                 : "memory");
}

// Where tiles lie: by bands of BAND clusters' tiles of rows, in a band by columns first.
struct Tiles {
    int along, across;  // clusters' tiles of rows and of columns
    int rank;           // the block in its cluster
    __device__ __forceinline__ void place(int tile, int &row, int &column) const {
        int band = tile / (BAND * across), rest = tile - band * BAND * across;
        int wide = min(BAND, along - band * BAND);
        row = (band * BAND + rest % wide) * ROWS + (SAME_COLUMNS ? rank * WIDTH : 0);
        column = rest / wide * ACROSS + (SAME_COLUMNS ? 0 : rank * COLUMNS);
    }
};

// Where a piece of 16 bytes of a row lies among those that a warp turns; moved so that neither eight rows nor a row's four pieces meet
// in a bank.
__device__ __forceinline__ u32 piece(int row, int i) {
    return row * ROW_BYTES + (i ^ row / 2 % 4) * 16;
}

// By the hardware's tanh.
__device__ __forceinline__ float act(float x) {
#if GELU
    float argument = x * fmaf(0.044715f * 0.7978845608028654f * x, x, 0.7978845608028654f), t, half = 0.5f * x;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(argument));
    return fmaf(half, t, half);
#else
    return x;
#endif
}

// Sixteen rows of out of sixteen columns, from the accumulators `d`; what is added to them lies where they will.
__device__ __forceinline__ void turn(const float *d, u32 at, const float *bias) {
    u32 x[4];
#if RESIDUAL
    u32 added[4];
    take(at, added);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = act(d[2 * i] + bias[i % 2]), high = act(d[2 * i + 1] + bias[i % 2]);
#if RESIDUAL
        low += __uint_as_float(added[i] << 16);
        high += __uint_as_float(added[i] & 0xffff0000u);
#endif
        x[i] = pair(low, high);
    }
    put(at, x);
}

// The first row of a part; the last part ends with the tile.
__device__ __forceinline__ constexpr int start_of(int part) {
    return part * PART < WIDTH - PART ? part * PART : WIDTH - PART;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    products(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_rest_map,
             const bf16 *bias, const bf16 *residual, bf16 *out, int rows, int columns, int inner, const __grid_constant__ Away away) {
    // As the swizzle wants it: on 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *w_tiles = shared, *x_tiles = w_tiles + STAGES * W_BYTES, *turned = x_tiles + STAGES * X_BYTES;
    Barriers &bars = *(Barriers *)(turned + TURNED * GROUPS * 4 * PART * ROW_BYTES);
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int rank = rank_in_cluster();
    Tiles of = {(rows + ROWS - 1) / ROWS, (columns + ACROSS - 1) / ACROSS, rank};
    int tiles = of.along * of.across, steps = (inner + INNER - 1) / INNER;
    int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bars.full[i], 1);
            // Every warp that computes, of both blocks: what one of them still reads, the other's half must not be written over.
            barrier_init(&bars.empty[i], CLUSTER * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    cluster_wait();

    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
        if (threadIdx.x == GROUPS * 128) {
            Place at = {0, 0};
            // Of the tile that both use, what this block loads begins here.
            int half = SAME_COLUMNS ? rank : 0, skip = SAME_COLUMNS ? 0 : rank * FIRST;
            const TensorMap *own = skip ? &x_rest_map : &x_map;
            for (int tile = first; tile < tiles; tile += stride) {
                int row, column;
                of.place(tile, row, column);
                for (int j = 0; j < steps; j++, at = at.next()) {
                    u64 *full = &bars.full[at.stage];
                    await(&bars.empty[at.stage], at.round ^ 1);
                    expect(full, W_BYTES + X_BYTES);
                    load_columns(w_tiles + at.stage * W_BYTES + half * HALF_BYTES, &w_map, full, j * INNER, column, half);
                    load_rows(x_tiles + at.stage * X_BYTES + skip * INNER * 2, own, full, j * INNER, row + skip);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        int lane = threadIdx.x % 32, warp = group * 4 + threadIdx.x % 128 / 32;
        u64 w = operand(w_tiles + group * GROUP_BYTES, 16, 1024), x = operand(x_tiles, 16, 1024);
        u32 turned_by_warp = shared_address(turned) + warp * TURNED * PART * ROW_BYTES;
        Place at = {0, 0};
        for (int tile = first; tile < tiles; tile += stride) {
            int row, column;
            of.place(tile, row, column);
            column += warp * 32;
            bool here = column < columns;
            // This lane's piece of a row, and how many rows are left from there.
            bool goes = column >= away.first && column < away.last;
            i64 pitch = (goes ? (i64)(away.last - away.first) : (i64)columns) * sizeof(bf16);
            i64 to_row = row + lane / 4 + (goes && away.row ? *away.row : 0);
            unsigned char *to = goes ? (unsigned char *)away.to : (unsigned char *)out;
            to += to_row * pitch + (column - (goes ? (int)away.first : 0) + lane % 4 * 8) * sizeof(bf16);
            int left = here ? rows - row - lane / 4 : 0;
            // Brings what is added to a part, to where the part is turned.
            i64 lane_at = (i64)(row + lane / 4) * columns + column + lane % 4 * 8;
            auto bring = [&](int part) {
#pragma unroll
                for (int i = 0; RESIDUAL && part < PARTS && i < PART / 8; i++) {
                    int further = start_of(part) + 8 * i;
                    bool wanted = further < left;
                    const bf16 *from = residual + (wanted ? lane_at + (i64)further * columns : 0);
                    bring_if(wanted, turned_by_warp + part % TURNED * PART * ROW_BYTES + piece(8 * i + lane / 4, lane % 4), from);
                }
                if (RESIDUAL) brought();
            };
            bring(0);
            bring(1);
            // Of columns lane / 4, and of those 8, 16 and 24 further.
            float by_column[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (bias && here) by_column[i] = up(bias[column + lane / 4 + 8 * i]);
            }
            float a[PER_THREAD], b[PER_THREAD];
            hold(a);
            hold(b);
            for (int j = 0; j < steps; j++) {
                await(&bars.full[at.stage], at.round);
                u64 a_at = w + at.stage * (W_BYTES >> 4), b_at = a_at + (HALF_BYTES >> 4), x_at = x + at.stage * (X_BYTES >> 4);
                products_begin();
#pragma unroll
                for (int i = 0; i < INNER / 16; i++) {
                    product_step(a, a_at + 2 * i, x_at + 2 * i, j + i > 0);
                    product_step(b, b_at + 2 * i, x_at + 2 * i, j + i > 0);
                    if (i + 1 != EARLY) continue;
                    // All of the last step is done: its tiles are given back while this step's are multiplied.
                    products_end();
                    products_wait<1>();
                    if (j > 0 && lane < CLUSTER) arrive_at(&bars.empty[at.last().stage], lane);
                }
                products_end();
                at = at.next();
            }
            products_wait<0>();
            hold(a);
            hold(b);
            if (lane < CLUSTER) arrive_at(&bars.empty[at.last().stage], lane);

#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int start = start_of(p);
                u32 turned_at = turned_by_warp + p % TURNED * PART * ROW_BYTES;
                if (RESIDUAL) {
                    await_brought();
                    __syncwarp();
                }
#pragma unroll
                for (int i = 0; i < PART; i += 16) {
                    int to = i + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
                    turn(a + (start + i) / 2, turned_at + piece(to, half), by_column);
                    turn(b + (start + i) / 2, turned_at + piece(to, 2 + half), by_column + 2);
                }
                __syncwarp();
                uint4 pieces[PART / 8];
#pragma unroll
                for (int i = 0; i < PART / 8; i++) pieces[i] = get(turned_at + piece(8 * i + lane / 4, lane % 4));
#pragma unroll
                for (int i = 0; i < PART / 8; i++) {
                    // What the last part shares with the one before has the sum already where that lies in out.
                    if (RESIDUAL && start + 8 * i < p * PART) continue;
                    store_if(start + 8 * i < left, to + (start + 8 * i) * pitch, pieces[i]);
                }
                __syncwarp();
                bring(p + TURNED);
            }
        }
    }
    // No block ends before the other has told it all it has to tell.
    cluster_wait();
}
