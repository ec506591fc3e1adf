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

template <typename T, int QUERIES> __device__ void attend_part(const T *q, const T *k, const T *v, const float *pages, const float *start, T *out, float *sums, const PagedShape &s) {
    constexpr int N = HeadVector<T>::N, LANES = HEAD / N, GROUPS = PAGED_THREADS / LANES;
    let_successor_begin();
    wait_for_predecessor();
    __shared__ float queries[QUERIES][HEAD], weights[QUERIES][STEP], top[QUERIES], total[QUERIES], shrink[QUERIES];
    __shared__ int rows[STEP];
    __shared__ float partial[PAGED_THREADS * N];
    PagedBlock<QUERIES> block(s, start);
    if (block.is_unread()) return;
    int count = block.count, first = block.first, end = block.end;
    pages += (i64)block.sequence * s.page_count;
    for (int i = threadIdx.x; i < QUERIES * HEAD; i += PAGED_THREADS) queries[i / HEAD][i % HEAD] = i / HEAD < count ? to_f32(q[block.head_of(i / HEAD) * HEAD + i % HEAD]) : 0.0f;
    if (threadIdx.x < QUERIES) top[threadIdx.x] = -INFINITY, total[threadIdx.x] = 0.0f;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_group = threadIdx.x / LANES, own_lane = threadIdx.x % LANES;
    i64 kv_width = (i64)s.kv_heads * HEAD, column = (i64)block.kv_head() * HEAD;
    float sum[QUERIES][N];
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
        for (int e = 0; e < N; e++) sum[i][e] = 0.0f;
    for (int step = block.begin; step < end; step += STEP) {
        if (block.attends_to_none(step, STEP)) continue;
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
                bool counts = row >= 0 && i < count && is_attended(s, first + block.row_of(i), position);
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
        for (int c = threadIdx.x; c < s.value_dim; c += PAGED_THREADS) {
            float y = 0.0f;
            for (int g = 0; g < GROUPS; g++) y += partial[g * HEAD + c];
            block.store(i, c, y, top[i], total[i], out, sums);
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
