// out = act(x wᵀ + bias) + residual for Hopper: tiles arrive by the copy engine, products by warpgroup instructions. By GELU act is its
// tanh form; by RESIDUAL there is something to add, which may be out itself, to the product as it would be stored.
//
// x is [rows, inner], w [columns, inner], out and residual [rows, columns], bf16; columns and inner multiples of 8. The product is
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
// are under way when the last step's tiles are given back. In a tile's last step the first product goes ahead of the second, twice as far
// until then, and leaves while that one is still multiplied.
constexpr int COLUMNS = 256, INNER = 64;  // of a block's tile; elements of 128 bytes
constexpr int GROUPS = 2, CLUSTER = 2;
constexpr int THREADS = 128 * (GROUPS + 1);
// A cluster's tile, and how many rows of one its first block loads, the second the rest.
constexpr int ROWS = SAME_COLUMNS ? CLUSTER * WIDTH : WIDTH, ACROSS = SAME_COLUMNS ? COLUMNS : CLUSTER * COLUMNS;
constexpr int FIRST = SAME_COLUMNS ? WIDTH : (WIDTH / 2 + 7) / 8 * 8;
constexpr int COMPUTE_REGS = 240, LOAD_REGS = 24;  // a thread's, of the 64 Ki of a multiprocessor
constexpr int PER_THREAD = WIDTH / 2;
constexpr u32 W_BYTES = COLUMNS * INNER * 2, X_BYTES = WIDTH * INNER * 2;
// The columns of one product.
constexpr int MADE = 64;
constexpr u32 MADE_BYTES = MADE * INNER * 2;
// Rows of out that a warpgroup turns at once, on their way out, in one of two places: of each the columns of a product, in pieces of 16
// bytes. What is added to them is brought two parts ahead.
constexpr int PART = 32, PARTS = (WIDTH + PART - 1) / PART, PLACES = 2;
constexpr u32 ROW_BYTES = MADE * 2, PART_BYTES = PART * ROW_BYTES;
static_assert(WIDTH % 8 == 0 && WIDTH >= PART && EARLY >= 1 && EARLY <= INNER / 32, "no such tile");

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

// Rows of x or of w from `row`, to this block or to both; those beyond the end are zeros.
template <bool BOTH> __device__ __forceinline__ void load(void *to, const TensorMap *map, u64 *bar, int inner, int row) {
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
// Brings 16 bytes, or zeros; the wait is for the group that the next turn needs, with one for each other place behind it.
__device__ __forceinline__ void bring_if(bool wanted, u32 at, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void brought() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_brought() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PLACES - 1) : "memory");
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

// Where a piece of 16 bytes of a row lies in a part; moved so that pieces of eight rows do not meet in a bank.
__device__ __forceinline__ u32 piece(int row, int i) {
    return row * ROW_BYTES + (i ^ row % 8) * 16;
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
        x[i] = pair(act(d[2 * i] + bias[i % 2]), act(d[2 * i + 1] + bias[i % 2]));
#if RESIDUAL
        asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(added[i]));
#endif
    }
    put(at, x);
}

// The first row of a part; the last part ends with the tile.
__device__ __forceinline__ constexpr int start_of(int part) {
    return part * PART < WIDTH - PART ? part * PART : WIDTH - PART;
}

// How a warpgroup's sums leave: the first product's rows by parts, then the second's. A warp turns its 16 columns of a part, then stores
// eight of its rows.
struct Leaving {
    const bf16 *residual;
    bf16 *out;
    const Away &away;
    int rows, columns;
    u32 at;  // the warpgroup's places in shared memory
    int group, warp, lane;
    int away_row;
    int row, column;  // where its part of a tile begins

    __device__ __forceinline__ u32 place(int part) const { return at + part % PLACES * PART_BYTES; }
    // This lane's row of four that a warp stores at once, and the column of its piece.
    __device__ __forceinline__ int row_of(int i) const { return 8 * warp + 4 * i + lane / 8; }
    __device__ __forceinline__ int column_of(int product) const { return column + product * MADE + lane % 8 * 8; }
    __device__ __forceinline__ void together() const { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

    // Brings what is added to a part, counted over both products: each lane what it will store.
    __device__ __forceinline__ void bring(int part) const {
        if (!RESIDUAL) return;
        if (part < 2 * PARTS) {
            int c = column_of(part / PARTS), first = row + start_of(part % PARTS);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = row_of(i);
                bool wanted = c < columns && first + r < rows;
                bring_if(wanted, place(part) + piece(r, lane % 8), residual + (wanted ? (i64)(first + r) * columns + c : 0));
            }
        }
        brought();
    }

    __device__ __forceinline__ void leave(const float (&d)[PER_THREAD], const float *bias, int product) const {
        int c = column_of(product);
        bool goes = c >= away.first && c < away.last;
        i64 pitch = (goes ? (i64)(away.last - away.first) : (i64)columns) * sizeof(bf16);
        i64 to_row = row + row_of(0) + (goes ? away_row : 0);
        unsigned char *to = goes ? (unsigned char *)away.to : (unsigned char *)out;
        to += to_row * pitch + (c - (goes ? (int)away.first : 0)) * sizeof(bf16);
        int left = c < columns ? rows - row - row_of(0) : 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int start = start_of(p), part = product * PARTS + p;
            u32 turned = place(part);
            if (RESIDUAL) {
                await_brought();
                together();
            }
#pragma unroll
            for (int i = 0; i < PART; i += 16) {
                turn(d + (start + i) / 2, turned + piece(i + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), bias);
            }
            // Once for a part: by the time its place is turned in again, all have been together at the other.
            together();
            uint4 pieces[2];
#pragma unroll
            for (int i = 0; i < 2; i++) pieces[i] = get(turned + piece(row_of(i), lane % 8));
            // What the last part shares with the one before is stored already, and what was added may have been there.
            bool other = start + 8 * warp >= p * PART;
#pragma unroll
            for (int i = 0; i < 2; i++) store_if(other && start + 4 * i < left, to + (start + 4 * i) * pitch, pieces[i]);
            bring(part + PLACES);
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    products(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_rest_map,
             const bf16 *bias, const bf16 *residual, bf16 *out, int rows, int columns, int inner, const __grid_constant__ Away away) {
    // As the swizzle wants it: on 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *w_tiles = shared, *x_tiles = w_tiles + STAGES * W_BYTES, *turned = x_tiles + STAGES * X_BYTES;
    Barriers &bars = *(Barriers *)(turned + GROUPS * PLACES * PART_BYTES);
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
            int beyond = SAME_COLUMNS ? rank * COLUMNS / 2 : 0, skip = SAME_COLUMNS ? 0 : rank * FIRST;
            const TensorMap *own = skip ? &x_rest_map : &x_map;
            for (int tile = first; tile < tiles; tile += stride) {
                int row, column;
                of.place(tile, row, column);
                for (int j = 0; j < steps; j++, at = at.next()) {
                    u64 *full = &bars.full[at.stage];
                    await(&bars.empty[at.stage], at.round ^ 1);
                    expect(full, W_BYTES + X_BYTES);
                    load<SAME_COLUMNS>(w_tiles + at.stage * W_BYTES + beyond * INNER * 2, &w_map, full, j * INNER, column + beyond);
                    load<!SAME_COLUMNS>(x_tiles + at.stage * X_BYTES + skip * INNER * 2, own, full, j * INNER, row + skip);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        u64 w = operand(w_tiles + group * 2 * MADE_BYTES, 16, 1024), x = operand(x_tiles, 16, 1024);
        u32 turned_at = shared_address(turned) + group * PLACES * PART_BYTES;
        int away_row = away.row ? (int)*away.row : 0;
        Leaving of_group = {residual, out, away, rows, columns, turned_at, group, warp, lane, away_row, 0, 0};
        Place at = {0, 0};
        for (int tile = first; tile < tiles; tile += stride) {
            of.place(tile, of_group.row, of_group.column);
            of_group.column += group * 2 * MADE;
#pragma unroll
            for (int part = 0; part < PLACES; part++) of_group.bring(part);
            // Of two columns of each product.
            float by_column[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int c = of_group.column + i / 2 * MADE + 16 * warp + i % 2 * 8 + lane / 4;
                if (bias && c < columns) by_column[i] = up(bias[c]);
            }
            float a[PER_THREAD], b[PER_THREAD];
            hold(a);
            hold(b);
            // All of the step before is done: its tiles are given back while this step's are multiplied.
            auto give_back = [&](int j) {
                products_end();
                products_wait<1>();
                if (j > 0 && lane < CLUSTER) arrive_at(&bars.empty[at.last().stage], lane);
            };
            u64 a_at, b_at, x_at;
            auto begin = [&] {
                await(&bars.full[at.stage], at.round);
                a_at = w + at.stage * (W_BYTES >> 4), b_at = a_at + (MADE_BYTES >> 4), x_at = x + at.stage * (X_BYTES >> 4);
                products_begin();
            };
            for (int j = 0; j + 1 < steps; j++, at = at.next()) {
                begin();
#pragma unroll
                for (int i = 0; i < INNER / 16; i++) {
                    product_step(a, a_at + 2 * i, x_at + 2 * i, j + i > 0);
                    product_step(b, b_at + 2 * i, x_at + 2 * i, j + i > 0);
                    if (i + 1 == EARLY) give_back(j);
                }
                products_end();
            }
            begin();
#pragma unroll
            for (int i = 0; i < INNER / 16; i++) {
                product_step(a, a_at + 2 * i, x_at + 2 * i, steps + i > 1);
                if (i + 1 != 2 * EARLY) continue;
                give_back(steps - 1);
                products_begin();
            }
            products_end();
            products_begin();
#pragma unroll
            for (int i = 0; i < INNER / 16; i++) product_step(b, b_at + 2 * i, x_at + 2 * i, steps + i > 1);
            products_end();
            products_wait<1>();
            hold(a);
            of_group.leave(a, by_column, 0);
            products_wait<0>();
            hold(b);
            if (lane < CLUSTER) arrive_at(&bars.empty[at.stage], lane);
            at = at.next();
            of_group.leave(b, by_column + 2, 1);
        }
    }
    // No block ends before the other has told it all it has to tell.
    cluster_wait();
}
