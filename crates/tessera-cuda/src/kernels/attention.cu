// softmax(Q Kᵀ / sqrt(128)) V without a mask, for Hopper: tiles arrive by the copy engine, products by warpgroup instructions.
//
// q and out are [rows, heads * 128], k and v [keys, heads * 128], bf16; rows of out may go to members of a group instead. In a block one
// warpgroup loads and GROUPS compute, 64 rows each. It takes tiles of ROWS rows of one head until none is left; blocks next to each other
// take tiles next to each other, so that a head's K and V are read from L2. Heads from `long_heads` on are cut into tiles of one
// warpgroup's rows less, where the last tiles of all would leave blocks idle. Keys go by KEYS at once, from the last tile, the one with a
// ragged end, to the first: the order is a matter of `keys` alone, and a row's bits depend on neither the other rows nor the heads.
//
// A warpgroup issues the next tile's scores and this tile's P V together, and does the next softmax while P V runs; what remains idle
// of the tensor cores the others fill. What they wait for is shared memory, which each product reads anew: so the first columns of Q stay
// in registers, HELD times 16, as many as there is room for beside O, one tile's scores and another's P.
constexpr int HEAD = 128, HALF = 64, GROUPS = 3;
constexpr int ROWS = 64 * GROUPS, SHORT_ROWS = ROWS - 64;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int COMPUTE_REGS = 160, LOAD_REGS = 32;  // a thread's, of the 64 Ki of a multiprocessor
// Of Q's tile a half of the columns, and of a tile of keys.
constexpr u32 Q_HALF = ROWS * HALF * 2, Q_BYTES = 2 * Q_HALF, TILE_HALF = KEYS * HALF * 2, TILE_BYTES = 2 * TILE_HALF;
constexpr int PER_THREAD = KEYS / 2;  // scores of a thread: of two rows, of each eight keys two
// Powers of two of scaled scores, and back: 1 / sqrt(128) * log2(e), log(2).
constexpr float SCALE_LOG2 = 0.12751743f, LOG_2 = 0.6931472f;
// Powers are taken of a tile's scores before it is known which is the highest. Where a thread's come to more than HIGH, they, those before
// them and O are divided by a power of two, and the quotient is the same; from LOST on a float may not have held them, and the warp makes
// these scores once more.
constexpr float HIGH = 0x1p20f, LOST = 0x1p100f;

// Where tiles lie: of `long_heads` heads so many longer ones each, of the others so many shorter ones.
struct Tiles {
    int longer, shorter, long_heads;

    // Whether it is a shorter one.
    __device__ __forceinline__ bool place(int tile, int &head, int &row) const {
        int rest = tile - longer * long_heads;
        if (rest < 0) {
            head = tile / longer, row = tile % longer * ROWS;
            return false;
        }
        head = long_heads + rest / shorter, row = rest % shorter * SHORT_ROWS;
        return true;
    }
};

struct Barriers {
    u64 q_full, q_empty;
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// A warp is done with a tile.
__device__ __forceinline__ void free_tile(u64 *bar) {
    if (threadIdx.x % 32 == 0) arrive(bar);
}

// A box of [2 halves][box rows][64 columns] of one head, each half swizzled by 128 bytes; rows beyond the end are zeros.
__device__ __forceinline__ void load(void *to, const TensorMap *map, u64 *bar, int row, int head) {
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
#define SCORES_STEP(n, list, regs, q, y, z, which, ...)                                                                       \
    asm volatile("{\n"                                                                                                        \
                 ".reg .pred p;\n"                                                                                            \
                 "setp.ne.b32 p, " z ", 0;\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" list "}, " q ", " y ", p, 1, 1, " which ";\n"    \
                 "}"                                                                                                          \
                 : regs(s)                                                                                                    \
                 : __VA_ARGS__, "l"(k), "r"(more))
#define FROM_SHARED(n, list, regs, x, y, z) SCORES_STEP(n, list, regs, x, y, z, "0, 0", "l"(q))
#define FROM_REGISTERS(n, list, regs, x, y, z) SCORES_STEP(n, list, regs, x, y, z, "0", "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]))

// S (+)= Q Kᵀ over 16 columns, of Q in shared memory or in registers.
__device__ __forceinline__ void scores_step(float (&s)[PER_THREAD], u64 q, u64 k, int more) {
#if KEYS == 64
    FROM_SHARED("64", T32, R32, "%32", "%33", "%34");
#elif KEYS == 80
    FROM_SHARED("80", T40, R40, "%40", "%41", "%42");
#else
#error no products of so many keys
#endif
}
__device__ __forceinline__ void scores_step(float (&s)[PER_THREAD], const u32 *q, u64 k, int more) {
#if KEYS == 64
    FROM_REGISTERS("64", T32, R32, "{%32, %33, %34, %35}", "%36", "%37");
#elif KEYS == 80
    FROM_REGISTERS("80", T40, R40, "{%40, %41, %42, %43}", "%44", "%45");
#endif
}
// O += P V over 16 keys.
__device__ __forceinline__ void values_step(float (&o)[64], const u32 *p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" T64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R64(o)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// Where 16 bytes lie in a tile that is swizzled by 128 bytes: of a row the piece `i`, counted over both halves.
__device__ __forceinline__ u32 piece(u32 tile, u32 half, int row, int i) {
    return tile + i / 8 * half + row * 128 + (i % 8 ^ row % 8) * 16;
}

// A warpgroup's rows of Q.
struct Rows {
    u32 at;   // in shared memory
    u64 all;  // the same as an operand
    u32 held[4 * HELD];

    // What a thread gives to products over 16 columns, from `16 * i` on.
    __device__ __forceinline__ void take(u32 (&x)[4], int i) const {
        int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(piece(at, Q_HALF, row, 2 * i + lane / 16))
                     : "memory");
    }
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            u32 x[4];
            take(x, i);
#pragma unroll
            for (int j = 0; j < 4; j++) held[4 * i + j] = x[j];
        }
    }
};

__device__ __forceinline__ void scores(float (&s)[PER_THREAD], const Rows &q, u64 k) {
    products_begin();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
        // Sixteen columns are 32 bytes within a half.
        u64 of_k = k + i / 4 * (TILE_HALF >> 4) + i % 4 * 2;
        if (i < HELD) scores_step(s, q.held + 4 * i, of_k, i > 0);
        else scores_step(s, q.all + i / 4 * (Q_HALF >> 4) + i % 4 * 2, of_k, i > 0);
    }
    products_end();
}
__device__ __forceinline__ void values(float (&o)[64], const u32 (&p)[KEYS / 4], u64 v) {
    products_begin();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) values_step(o, p + 4 * i, v + i * (16 * HALF * 2 >> 4));
    products_end();
}

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void pack(u32 (&p)[KEYS / 4], const float (&s)[PER_THREAD]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pair(s[2 * i], s[2 * i + 1]);
}

// What a thread knows of its two rows, 8 apart.
struct Softmax {
    // Of a score: two to the SCALE_LOG2 times it plus the row's offset.
    float offset[2], sum[2], by[2];

    // The most that a row has, of what its four threads have.
    __device__ __forceinline__ static float of_row(float most) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    }
    // The offset by which the highest of a row's scores has the power one.
    __device__ __forceinline__ static float offset_of_highest(const float (&s)[PER_THREAD], int r) {
        float a = fmaxf(s[2 * r], s[2 * r + 1]), b = fmaxf(s[2 * r + 4], s[2 * r + 5]);
#pragma unroll
        for (int i = 8; i < PER_THREAD; i += 8) {
            a = fmaxf(a, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            b = fmaxf(b, fmaxf(s[i + 2 * r + 4], s[i + 2 * r + 5]));
        }
        return -of_row(fmaxf(a, b)) * SCALE_LOG2;
    }

    // Scores to powers, and what they come to: of both rows, or of one.
    __device__ __forceinline__ void powers(float (&s)[PER_THREAD], float (&tile)[2], bool first = true, bool second = true) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            int r = i / 2 % 2;
            if (!(r ? second : first)) continue;
            s[i] = power(fmaf(s[i], SCALE_LOG2, offset[r]));
            tile[r] = i == 2 * r ? s[i] : tile[r] + s[i];
        }
        // All of it before P V is waited for.
        asm volatile("" : "+f"(tile[0]), "+f"(tile[1])::"memory");
    }

    __device__ __forceinline__ void begin(float (&s)[PER_THREAD]) {
        offset[0] = offset_of_highest(s, 0), offset[1] = offset_of_highest(s, 1);
        powers(s, sum);
    }

    // Returns whether O must be multiplied by `by`, asked of the warp.
    __device__ __forceinline__ bool step(float (&s)[PER_THREAD], const Rows &q, u32 k) {
        float tile[2];
        powers(s, tile);
        bool high = __any_sync(0xffffffffu, tile[0] > HIGH || tile[1] > HIGH);
        if (high) {
            by[0] = by[1] = 1.0f;
            bool lost[2] = {of_row(tile[0]) >= LOST, of_row(tile[1]) >= LOST};
            if (__any_sync(0xffffffffu, lost[0] || lost[1])) again(s, tile, lost, q, k);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = of_row(tile[r]);
                int down = most > HIGH ? (int)(__float_as_uint(most) >> 23) - 127 : 0;
                float factor = __uint_as_float((u32)(127 - down) << 23);
                offset[r] -= (float)down;
                by[r] *= factor, tile[r] *= factor, sum[r] *= by[r];
#pragma unroll
                for (int i = 2 * r; i < PER_THREAD; i += 4) s[i] *= factor, s[i + 1] *= factor;
            }
        }
        sum[0] += tile[0], sum[1] += tile[1];
        return high;
    }

    // Powers of rows that are lost, from scores that the warp makes once more by itself: a warpgroup's products want all its warps. Other
    // rows keep what they have, so that no row's bits depend on another.
    __device__ __forceinline__ void again(float (&s)[PER_THREAD], float (&tile)[2], const bool (&lost)[2], const Rows &q, u32 k) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (int i = 0; i < HEAD / 16; i++) {
                u32 x[4], y[2];
                q.take(x, i);
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                             : "=r"(y[0]), "=r"(y[1])
                             : "r"(piece(k, TILE_HALF, 8 * j + lane % 8, 2 * i + lane / 8 % 2))
                             : "memory");
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &to = s[4 * j + e];
                to = lost[e / 2] ? d[e] : to;
                // Now: what both would be takes twice the registers.
                asm volatile("" : "+f"(to)::"memory");
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float other = offset_of_highest(s, r);
            other = lost[r] ? other : offset[r];
            by[r] = power(other - offset[r]);
            offset[r] = other;
        }
        powers(s, tile, lost[0], lost[1]);
    }

    __device__ __forceinline__ void rescale(float (&o)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] *= by[i / 2 % 2];
    }
};

// Of four lanes with four words each, lane i gets word i of every lane.
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
    if (targets.closed()) return;
    // As the swizzle wants it: on 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *q_tile = shared, *k_tiles = shared + Q_BYTES, *v_tiles = k_tiles + STAGES * TILE_BYTES;
    Barriers &bars = *(Barriers *)(v_tiles + STAGES * TILE_BYTES);
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    Tiles of = {(rows + ROWS - 1) / ROWS, (rows + SHORT_ROWS - 1) / SHORT_ROWS, long_heads};
    int tiles = of.longer * long_heads + of.shorter * (heads - long_heads);
    int steps = (keys + KEYS - 1) / KEYS;
    if (threadIdx.x == 0) {
        barrier_init(&bars.q_full, 1);
        barrier_init(&bars.q_empty, GROUPS * 4);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&bars.k_full[i], 1);
            barrier_init(&bars.v_full[i], 1);
            barrier_init(&bars.k_empty[i], GROUPS * 4);
            barrier_init(&bars.v_empty[i], GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
        if (threadIdx.x == GROUPS * 128) {
            Place at = {0, 0};
            u32 round = 0;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                int head, row;
                of.place(tile, head, row);
                for (int j = 0; j < steps; j++) {
                    int key = (steps - 1 - j) * KEYS;
                    await(&bars.k_empty[at.stage], at.round ^ 1);
                    expect(&bars.k_full[at.stage], TILE_BYTES);
                    load(k_tiles + at.stage * TILE_BYTES, &k_map, &bars.k_full[at.stage], key, head);
                    if (j == 0) {
                        await(&bars.q_empty, round ^ 1);
                        expect(&bars.q_full, Q_BYTES);
                        load(q_tile, &q_map, &bars.q_full, row, head);
                        round ^= 1;
                    }
                    await(&bars.v_empty[at.stage], at.round ^ 1);
                    expect(&bars.v_full[at.stage], TILE_BYTES);
                    load(v_tiles + at.stage * TILE_BYTES, &v_map, &bars.v_full[at.stage], key, head);
                    at = at.next();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        unsigned char *own_rows = q_tile + group * 64 * HALF * 2;
        Rows q = {shared_address(own_rows), operand(own_rows, 16, 1024)};
        u64 k = operand(k_tiles, 16, 1024), v = operand(v_tiles, TILE_HALF, 1024);
        bool speaks = threadIdx.x % 32 == 0;
        Place at = {0, 0};
        u32 round = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, round ^= 1) {
            int head, row;
            bool idle = of.place(tile, head, row) && group == GROUPS - 1;
            row += group * 64;
            if (idle || row >= rows) {
                // Nothing to compute: what the others use is given back with them.
                await(&bars.q_full, round);
                if (speaks) arrive(&bars.q_empty);
                for (int j = 0; j < steps; j++, at = at.next()) {
                    await(&bars.k_full[at.stage], at.round);
                    free_tile(&bars.k_empty[at.stage]);
                    await(&bars.v_full[at.stage], at.round);
                    free_tile(&bars.v_empty[at.stage]);
                }
                continue;
            }
            float s[PER_THREAD], o[64];
            u32 p[KEYS / 4];
            Softmax softmax;

            await(&bars.q_full, round);
            q.keep();
            await(&bars.k_full[at.stage], at.round);
            hold(s);
            scores(s, q, k + at.stage * (TILE_BYTES >> 4));
            products_wait<0>();
            hold(s);
            free_tile(&bars.k_empty[at.stage]);
            // Of the first tile, the keys' last, what is beyond the end is out.
            int left = keys - (steps - 1) * KEYS - threadIdx.x % 4 * 2;
            if (keys % KEYS != 0) {
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++) {
                    if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
                }
            }
            softmax.begin(s);
            hold(s);
            pack(p, s);
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] = 0.0f;
            at = at.next();
            if (steps > 1) await(&bars.k_full[at.stage], at.round);
            for (int j = 1; j < steps; j++) {
                hold(s);
                scores(s, q, k + at.stage * (TILE_BYTES >> 4));
                await(&bars.v_full[at.last().stage], at.last().round);
                hold(o);
                values(o, p, v + at.last().stage * (TILE_BYTES >> 4));
                products_wait<1>();
                hold(s);
                bool high = softmax.step(s, q, shared_address(k_tiles) + at.stage * TILE_BYTES);
                hold(s);
                free_tile(&bars.k_empty[at.stage]);
                // Here, where it parts the softmax from the wait for P V: the compiler lets neither pass.
                Place next = at.next();
                if (j + 1 < steps) await(&bars.k_full[next.stage], next.round);
                products_wait<0>();
                hold(o);
                free_tile(&bars.v_empty[at.last().stage]);
                pack(p, s);
                if (high) softmax.rescale(o);
                at = at.next();
            }
            if (speaks) arrive(&bars.q_empty);
            await(&bars.v_full[at.last().stage], at.last().round);
            hold(o);
            values(o, p, v + at.last().stage * (TILE_BYTES >> 4));
            products_wait<0>();
            hold(o);
            free_tile(&bars.v_empty[at.last().stage]);

            int lane = threadIdx.x % 32;
            row += threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = softmax.sum[r];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                float by = __fdividef(1.0f, sum);
                int at_row = row + 8 * r;
                u64 to = (u64)(out + (i64)at_row * heads * HEAD);
                if (targets.members) {
                    const Target &t = targets.with(at_row);
                    to = t.to + (at_row - t.first) * t.pitch;
                }
                to += (head * HEAD + lane % 4 * 8) * sizeof(bf16);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 x[4];
#pragma unroll
                    for (int c = 0; c < 4; c++) x[c] = pair(o[16 * i + 4 * c + 2 * r] * by, o[16 * i + 4 * c + 2 * r + 1] * by);
                    transpose(x);
                    if (at_row < rows) *(uint4 *)(to + 64 * i) = make_uint4(x[0], x[1], x[2], x[3]);
                }
                if (lse && at_row < rows && lane % 4 == 0) {
                    lse[(i64)head * rows + at_row] = fmaf(-softmax.offset[r], LOG_2, __logf(sum));
                }
            }
        }
    }
}
