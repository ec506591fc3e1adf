// Causal attention of token sequences over KV caches in pages, for heads of HEAD elements.
//
// A block computes QUERIES queries of one KV head for one part of the positions, 64 positions at a time, and a
// second kernel adds the parts. The parts, and the steps within them, begin at fixed positions, so the bits of a
// query depend neither on other queries nor on the length of the sequence's later rows.
constexpr int PAGED_THREADS = 256, STEP = 64;
// Elements that a thread loads at once.
template <typename T> struct HeadVector {
    static constexpr int MOST = 16 / sizeof(T);
    static constexpr int N = HEAD % MOST == 0 ? MOST : HEAD % 4 == 0 ? 4 : HEAD % 2 == 0 ? 2 : 1;
};

// What all blocks of a launch know.
struct PagedShape {
    int rows_per_sequence, heads, kv_heads, page_count, page_rows, pool_pages;
    int window, sink;  // `window` is larger than any position if there is none
    int parts, part_positions, tiles;
    float scale;
};

__device__ __forceinline__ int page_row(const float *pages, const PagedShape &s, int position) {
    int page = position / s.page_rows;
    if (page >= s.page_count) return -1;
    float at = pages[page];
    return at >= 0.0f && at < (float)s.pool_pages ? (int)at * s.page_rows + position % s.page_rows : -1;
}
__device__ __forceinline__ bool is_attended(const PagedShape &s, int query, int position) {
    return position <= query && (position < s.sink || query - position < s.window);
}

template <typename T, int QUERIES> __device__ void attend_part(const T *q, const T *k, const T *v, const float *pages, const float *start, T *out, float *sums, const PagedShape &s) {
    constexpr int N = HeadVector<T>::N, LANES = HEAD / N, GROUPS = PAGED_THREADS / LANES;
    let_successor_begin();
    wait_for_predecessor();
    __shared__ float queries[QUERIES][HEAD], weights[QUERIES][STEP], top[QUERIES], total[QUERIES], shrink[QUERIES];
    __shared__ int rows[STEP];
    __shared__ float partial[PAGED_THREADS * N];
    int part = blockIdx.x % s.parts, tile = blockIdx.x / s.parts % s.tiles;
    int kv_head = blockIdx.x / s.parts / s.tiles % s.kv_heads, sequence = blockIdx.x / s.parts / s.tiles / s.kv_heads;
    int group = s.heads / s.kv_heads, count = min(QUERIES, s.rows_per_sequence * group - tile * QUERIES);
    // The row of a query within the sequence, and the index of its head in the result.
    auto row_of = [&](int i) { return (tile * QUERIES + i) / group; };
    auto head_of = [&](int i) { return ((i64)sequence * s.rows_per_sequence + row_of(i)) * s.heads + kv_head * group + (tile * QUERIES + i) % group; };
    bool is_absent = !(start[sequence] >= 0.0f);
    int first = is_absent ? 0 : (int)start[sequence], begin = part * s.part_positions;
    int lowest = first + row_of(0), highest = is_absent ? -1 : first + row_of(count - 1), end = min(begin + s.part_positions, highest + 1);
    // The second kernel reads no part that begins behind a query. Without it, this one writes the result.
    if (s.parts > 1 && begin > highest) return;
    pages += (i64)sequence * s.page_count;
    for (int i = threadIdx.x; i < QUERIES * HEAD; i += PAGED_THREADS) queries[i / HEAD][i % HEAD] = i / HEAD < count ? to_f32(q[head_of(i / HEAD) * HEAD + i % HEAD]) : 0.0f;
    if (threadIdx.x < QUERIES) top[threadIdx.x] = -INFINITY, total[threadIdx.x] = 0.0f;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_group = threadIdx.x / LANES, own_lane = threadIdx.x % LANES;
    i64 kv_width = (i64)s.kv_heads * HEAD, column = (i64)kv_head * HEAD;
    float sum[QUERIES][N];
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
        for (int e = 0; e < N; e++) sum[i][e] = 0.0f;
    for (int step = begin; step < end; step += STEP) {
        // No query of the block attends to positions between the sink and all windows.
        if (step >= s.sink && lowest - (step + STEP - 1) >= s.window) continue;
        __syncthreads();
        // Scores: four threads share a position.
        {
            int at = threadIdx.x / 4, position = step + at;
            int row = position < end ? page_row(pages, s, position) : -1;
            if (threadIdx.x % 4 == 0) rows[at] = row;
            float score[QUERIES];
#pragma unroll
            for (int i = 0; i < QUERIES; i++) score[i] = 0.0f;
            if (row >= 0) {
                const T *key = k + row * kv_width + column;
                for (int j = threadIdx.x % 4; j < LANES; j += 4) {
                    Vec<T, N> x = *(const Vec<T, N> *)(key + j * N);
#pragma unroll
                    for (int i = 0; i < QUERIES; i++)
#pragma unroll
                        for (int e = 0; e < N; e++) score[i] = fmaf(queries[i][j * N + e], to_f32(x.e[e]), score[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < QUERIES; i++) {
                score[i] += __shfl_xor_sync(0xffffffffu, score[i], 1);
                score[i] += __shfl_xor_sync(0xffffffffu, score[i], 2);
                bool counts = row >= 0 && i < count && is_attended(s, first + row_of(i), position);
                if (threadIdx.x % 4 == 0) weights[i][at] = counts ? score[i] * s.scale : -INFINITY;
            }
        }
        __syncthreads();
        // Softmax so far: a warp per query. A NaN stays one: only the weight of −∞ is 0 by rule.
        if (warp < QUERIES) {
            float a = weights[warp][lane], b = weights[warp][lane + 32];
            float before = top[warp], now = fmaxf(before, warp_max(fmaxf(a, b)));
            a = a == -INFINITY ? 0.0f : expf(a - now), b = b == -INFINITY ? 0.0f : expf(b - now);
            float more = warp_sum(a + b), less = before == -INFINITY ? 0.0f : expf(before - now);
            weights[warp][lane] = a, weights[warp][lane + 32] = b;
            __syncwarp();
            if (lane == 0) top[warp] = now, shrink[warp] = less, total[warp] = total[warp] * less + more;
        }
        __syncthreads();
        // Values: each group of threads adds every GROUPS-th position.
        if (own_group < GROUPS) {
#pragma unroll
            for (int i = 0; i < QUERIES; i++)
#pragma unroll
                for (int e = 0; e < N; e++) sum[i][e] *= shrink[i];
            for (int at = own_group; at < STEP; at += GROUPS) {
                if (rows[at] < 0) continue;
                Vec<T, N> x = *(const Vec<T, N> *)(v + rows[at] * kv_width + column + own_lane * N);
#pragma unroll
                for (int i = 0; i < QUERIES; i++) {
                    float weight = weights[i][at];
                    // Rows that a query does not attend to may hold anything, also NaN.
                    if (weight == 0.0f) continue;
#pragma unroll
                    for (int e = 0; e < N; e++) sum[i][e] = fmaf(weight, to_f32(x.e[e]), sum[i][e]);
                }
            }
        }
    }
    // Adds the groups in order.
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < N; e++) partial[threadIdx.x * N + e] = sum[i][e];
        __syncthreads();
        if (i >= count) continue;
        for (int c = threadIdx.x; c < HEAD; c += PAGED_THREADS) {
            float y = 0.0f;
            for (int g = 0; g < GROUPS; g++) y += partial[g * HEAD + c];
            i64 head = head_of(i);
            if (s.parts == 1) {
                from_f32(total[i] == 0.0f ? 0.0f : y / total[i], out[head * HEAD + c]);
            } else {
                // For each head and part: the sums of values, the largest score and the sum of weights.
                float *own = sums + (head * s.parts + part) * (HEAD + 2);
                own[c] = y;
                if (c == 0) own[HEAD] = top[i], own[HEAD + 1] = total[i];
            }
        }
    }
}

template <typename T> __device__ __forceinline__ void attend_queries(const T *q, const T *k, const T *v, const float *pages, const float *start, T *out, float *sums, int queries, const PagedShape &s) {
    switch (queries) {
    case 1: return attend_part<T, 1>(q, k, v, pages, start, out, sums, s);
    case 4: return attend_part<T, 4>(q, k, v, pages, start, out, sums, s);
    default: return attend_part<T, 8>(q, k, v, pages, start, out, sums, s);
    }
}
extern "C" __global__ void __launch_bounds__(PAGED_THREADS) paged_attention_f32(const float *q, const float *k, const float *v, const float *pages, const float *start, float *out, float *sums, int queries, const PagedShape shape) {
    attend_queries(q, k, v, pages, start, out, sums, queries, shape);
}
extern "C" __global__ void __launch_bounds__(PAGED_THREADS) paged_attention_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const float *pages, const float *start, bf16 *out, float *sums, int queries, const PagedShape shape) {
    attend_queries(q, k, v, pages, start, out, sums, queries, shape);
}

// Adds the parts of one head of one row per block, in order. A head without weights attends to nothing.
template <typename T> __device__ void merge_parts(const float *sums, const float *start, T *out, const PagedShape &s) {
    let_successor_begin();
    wait_for_predecessor();
    int row = blockIdx.x / s.heads, sequence = row / s.rows_per_sequence;
    float first = start[sequence];
    int parts = first >= 0.0f ? min(s.parts, ((int)first + row % s.rows_per_sequence) / s.part_positions + 1) : 0;
    sums += (i64)blockIdx.x * s.parts * (HEAD + 2), out += (i64)blockIdx.x * HEAD;
    float top = -INFINITY;
    for (int i = 0; i < parts; i++) top = fmaxf(top, sums[(i64)i * (HEAD + 2) + HEAD]);
    for (int c = threadIdx.x; c < HEAD; c += blockDim.x) {
        float y = 0.0f, total = 0.0f;
        for (int i = 0; i < parts; i++) {
            const float *own = sums + (i64)i * (HEAD + 2);
            float weight = own[HEAD + 1] == 0.0f ? 0.0f : expf(own[HEAD] - top);
            if (weight == 0.0f) continue;
            y = fmaf(weight, own[c], y), total = fmaf(weight, own[HEAD + 1], total);
        }
        from_f32(total == 0.0f ? 0.0f : y / total, out[c]);
    }
}
extern "C" __global__ void merge_parts_f32(const float *sums, const float *start, float *out, const PagedShape shape) {
    merge_parts(sums, start, out, shape);
}
extern "C" __global__ void merge_parts_bf16(const float *sums, const float *start, bf16 *out, const PagedShape shape) {
    merge_parts(sums, start, out, shape);
}
