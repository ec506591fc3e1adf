// softmax(Q Kᵀ + bias) V per head over the first `length` keys, without a scale: the attention of T5.
// The bias of a query and a key is a number of the head's column of a table [buckets, heads]; the
// distance of the two selects its row.
//
// Rows of q, k and v hold all heads side by side and lie `pitch` elements apart, because one GEMM may
// have produced the three. With HEAD = 0 the source holds the plain kernels, which support every head
// size; otherwise the bf16 kernel for heads of HEAD elements, a multiple of 16.

// The smallest distance of each bucket of one direction. The host computes them: a logarithm here
// might differ in the last bit and select the neighbouring bucket.
struct BucketStarts {
    int first[128];
};

// Returns the row of the table for a key `ahead` positions behind its query; negative before it. The
// first half of the table serves the keys up to the query.
__device__ __forceinline__ int bucket_of(int ahead, const BucketStarts &starts, int buckets) {
    int distance = ahead < 0 ? -ahead : ahead, low = 0, high = buckets / 2;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (distance < starts.first[middle]) high = middle;
        else low = middle;
    }
    return ahead > 0 ? buckets / 2 + low : low;
}
// The host checks the length of a call; this protects the memory behind the keys.
__device__ __forceinline__ int checked_length(const i64 *length, int keys) {
    return (int)max(1ll, min(*length, (i64)keys));
}

#if HEAD == 0

// One warp handles one query of one head and iterates over the keys with an online softmax.
template <typename T> __device__ void relative_rows(const T *q, const T *k, const T *v, const float *table, const i64 *length, T *out,
                                                    int queries, int keys, int heads, int head, int q_pitch, int k_pitch, int v_pitch,
                                                    int buckets, const BucketStarts &starts) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, valid = checked_length(length, keys);
    i64 item = (i64)blockIdx.x * warps + warp;
    if (item >= (i64)queries * heads) return;
    int row = (int)(item / heads), h = (int)(item % heads);
    float *query = shared + warp * head;
    for (int d = lane; d < head; d += 32) query[d] = to_f32(q[(i64)row * q_pitch + h * head + d]);
    __syncwarp();
    float running_max = -INFINITY, sum = 0.0f, acc[16];
    for (int c = 0; c < 16; c++) acc[c] = 0.0f;
    for (int base = 0; base < valid; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key < valid) {
            const T *own = k + (i64)key * k_pitch + h * head;
            s = 0.0f;
            for (int d = 0; d < head; d++) s = fmaf(query[d], to_f32(own[d]), s);
            s += table[bucket_of(key - row, starts, buckets) * heads + h];
        }
        float new_max = fmaxf(running_max, warp_max(s)), rescale = expf(running_max - new_max), p = key < valid ? expf(s - new_max) : 0.0f;
        sum = sum * rescale + warp_sum(p);
        running_max = new_max;
        for (int c = 0; c * 32 < head; c++) acc[c] *= rescale;
        int count = min(32, valid - base);
        for (int j = 0; j < count; j++) {
            float pj = __shfl_sync(0xffffffffu, p, j);
            const T *own = v + (i64)(base + j) * v_pitch + h * head;
            for (int c = 0; c * 32 < head; c++) {
                int d = c * 32 + lane;
                if (d < head) acc[c] = fmaf(pj, to_f32(own[d]), acc[c]);
            }
        }
    }
    for (int c = 0; c * 32 < head; c++) {
        int d = c * 32 + lane;
        if (d < head) from_f32(acc[c] / sum, out[((i64)row * heads + h) * head + d]);
    }
}
extern "C" __global__ void relative_attention_f32(const float *q, const float *k, const float *v, const float *table, const i64 *length,
                                                  float *out, int queries, int keys, int heads, int head, int q_pitch, int k_pitch,
                                                  int v_pitch, int buckets, const __grid_constant__ BucketStarts starts) {
    relative_rows(q, k, v, table, length, out, queries, keys, heads, head, q_pitch, k_pitch, v_pitch, buckets, starts);
}
extern "C" __global__ void relative_attention_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const float *table, const i64 *length,
                                                   bf16 *out, int queries, int keys, int heads, int head, int q_pitch, int k_pitch,
                                                   int v_pitch, int buckets, const __grid_constant__ BucketStarts starts) {
    relative_rows(q, k, v, table, length, out, queries, keys, heads, head, q_pitch, k_pitch, v_pitch, buckets, starts);
}

#else

// A block computes TILE queries of one head, 16 per warp, and iterates over tiles of as many keys. The
// copies of the next tile run while mma.sync multiplies this one. Scores and output stay in registers,
// in the layout in which mma.sync returns them: lane l holds rows l / 4 and l / 4 + 8 of its warp's 16,
// and columns 2 (l % 4) and the next one of every eight.
constexpr int TILE = 64, THREADS = 128, STAGES = 2;
// Elements between two rows in shared memory. A row is an odd number of 16-byte units, so that the
// eight rows of an ldmatrix lie in different banks.
constexpr int ROW = HEAD + 8, TILE_ELEMENTS = TILE * ROW;
constexpr float LOG2_E = 1.4426950408889634f;

// Begins to copy the rows of one head from `first` on. Rows from `end` on become zeros: the products
// of their probabilities, which are 0, must not be NaN.
__device__ __forceinline__ void copy_tile(bf16 *to, const bf16 *from, int pitch, int first, int end) {
    constexpr int CHUNKS = HEAD / 8;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int row = first + i / CHUNKS, column = i % CHUNKS * 8, bytes = row < end ? 16 : 0;
        const bf16 *source = from + (i64)(row < end ? row : 0) * pitch + column;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to + i / CHUNKS * ROW + column)), "l"(source), "r"(bytes)
                     : "memory");
    }
}
// Waits until all copies are complete but those of the last commit.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}
// The online softmax of a thread's two rows, to base 2.
struct Softmax {
    float largest[2], sum[2];

    // Replaces scores by their exponentials, adds them up, and multiplies the output so far by the
    // factor by which the maximum changes its exponentials.
    __device__ __forceinline__ void update(float (&s)[TILE / 8][4], float (&o)[HEAD / 8][4]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = largest[r];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            most = quad_reduce_max(most);
            float factor = exp2_approx(largest[r] - most);
            largest[r] = most;
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                s[n][2 * r] = exp2_approx(s[n][2 * r] - most), s[n][2 * r + 1] = exp2_approx(s[n][2 * r + 1] - most);
                sum[r] += s[n][2 * r] + s[n][2 * r + 1];
            }
#pragma unroll
            for (int c = 0; c < HEAD / 8; c++) o[c][2 * r] *= factor, o[c][2 * r + 1] *= factor;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 64 ? 4 : 2)
    relative_attention(const bf16 *q, const bf16 *k, const bf16 *v, const float *table, const i64 *length, bf16 *out, int queries, int keys,
                       int heads, int head, int q_pitch, int k_pitch, int v_pitch, int buckets, const __grid_constant__ BucketStarts starts) {
    extern __shared__ uint4 memory[];
    bf16 *q_tile = (bf16 *)memory, *k_tiles = q_tile + TILE_ELEMENTS, *v_tiles = k_tiles + STAGES * TILE_ELEMENTS;
    float *column = (float *)(v_tiles + STAGES * TILE_ELEMENTS), *bias = column + buckets;
    int tiles = (queries + TILE - 1) / TILE, h = blockIdx.x / tiles, first_query = blockIdx.x % tiles * TILE;
    int valid = checked_length(length, keys), lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16;
    q += h * HEAD, k += h * HEAD, v += h * HEAD;

    copy_tile(q_tile, q, q_pitch, first_query, queries);
    copy_tile(k_tiles, k, k_pitch, 0, valid);
    copy_tile(v_tiles, v, v_pitch, 0, valid);
    commit_copies();
    for (int i = threadIdx.x; i < buckets; i += THREADS) column[i] = table[i * heads + h] * LOG2_E;
    __syncthreads();

    u32 query[HEAD / 16][4];
    float o[HEAD / 8][4];
#pragma unroll
    for (int c = 0; c < HEAD / 8; c++) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0.0f;
    Softmax softmax = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    for (int first_key = 0, stage = 0; first_key < valid; first_key += TILE, stage ^= 1) {
        int next = (stage ^ 1) * TILE_ELEMENTS;
        if (first_key + TILE < valid) {
            copy_tile(k_tiles + next, k, k_pitch, first_key + TILE, valid);
            copy_tile(v_tiles + next, v, v_pitch, first_key + TILE, valid);
        }
        commit_copies();
        // The bias of key j and query i of the tiles stands at j - i + TILE - 1.
        int ahead = first_key - first_query + (int)threadIdx.x - (TILE - 1);
        bias[threadIdx.x] = column[bucket_of(ahead, starts, buckets)];
        wait_for_copies();
        __syncthreads();
        if (first_key == 0) {
#pragma unroll
            for (int i = 0; i < HEAD / 16; i++) load_matrices(query[i], q_tile + (own_row + lane % 16) * ROW + i * 16 + lane / 16 * 8);
        }
        const bf16 *k_tile = k_tiles + stage * TILE_ELEMENTS, *v_tile = v_tiles + stage * TILE_ELEMENTS;
        float s[TILE / 8][4];
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
            s[n + 1][0] = s[n + 1][1] = s[n + 1][2] = s[n + 1][3] = 0.0f;
#pragma unroll
            for (int i = 0; i < HEAD / 16; i++) {
                u32 y[4];
                load_matrices(y, k_tile + (n * 8 + lane / 16 * 8 + lane % 8) * ROW + i * 16 + lane / 8 % 2 * 8);
                multiply_add(s[n], query[i], y[0], y[1]);
                multiply_add(s[n + 1], query[i], y[2], y[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int key = n * 8 + lane % 4 * 2 + e % 2, row = own_row + lane / 4 + e / 2 * 8;
                float score = fmaf(s[n][e], LOG2_E, bias[key - row + TILE - 1]);
                s[n][e] = first_key + key < valid ? score : -INFINITY;
            }
        }
        softmax.update(s, o);
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            u32 p[4] = {pack_bf16(s[2 * j][0], s[2 * j][1]), pack_bf16(s[2 * j][2], s[2 * j][3]), pack_bf16(s[2 * j + 1][0], s[2 * j + 1][1]),
                        pack_bf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
            for (int c = 0; c < HEAD / 8; c += 2) {
                u32 y[4];
                load_transposed(y, v_tile + (j * 16 + lane % 16) * ROW + (c + lane / 16) * 8);
                multiply_add(o[c], p, y[0], y[1]);
                multiply_add(o[c + 1], p, y[2], y[3]);
            }
        }
        // The next copies overwrite these tiles.
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_query + own_row + lane / 4 + r * 8;
        float scale = 1.0f / quad_reduce_sum(softmax.sum[r]);
        if (row >= queries) continue;
        bf16 *to = out + ((i64)row * heads + h) * HEAD + lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < HEAD / 8; c++) *(u32 *)(to + c * 8) = pack_bf16(o[c][2 * r] * scale, o[c][2 * r + 1] * scale);
    }
}

#endif
