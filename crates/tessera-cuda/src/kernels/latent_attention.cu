// Attention over KV caches in pages for many query heads that read the same rows, such as latents: HEAD columns of a
// row are its key, and its first columns, or those of a row of another cache, are its value.
//
// A block computes QUERIES queries of one KV head for one part of the positions. It reads each row once: a warp loads
// the keys of its positions to registers, lanes over columns, and multiplies them with every query; the values stay in
// shared memory, where each thread adds two columns of them for every query. The parts, and the steps within them,
// begin at fixed positions, as in paged_attention.cu.
constexpr int LATENT_THREADS = 256, WARPS = LATENT_THREADS / 32;
// Columns that a lane loads at once, and how often a lane loads of a row.
constexpr int PAIR = HEAD % 2 == 0 ? 2 : 1, PAIRS = HEAD / PAIR, LOADS = (PAIRS + 31) / 32;

// Sums each of N values over the lanes of a warp: a lane gets the sum of value lane / (32 / N). It takes fewer exchanges
// than N sums one by one.
template <int N> __device__ __forceinline__ float sum_values(float (&x)[N]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 16, n = N / 2; n > 0; o /= 2, n /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            float kept = lane & o ? x[i + n] : x[i], given = lane & o ? x[i] : x[i + n];
            x[i] = kept + __shfl_xor_sync(0xffffffffu, given, o);
        }
#pragma unroll
    for (int o = 16 / N; o > 0; o /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], o);
    return x[0];
}

// Adds the weighted values of some positions to two columns of each query. Rows that a query does not attend to may hold
// anything, also NaN; CHECKED leaves them out.
template <typename T, int QUERIES, bool CHECKED> __device__ __forceinline__ void add_values(const T *tile, const float (*weights)[QUERIES + 4], const int *rows, int positions, int column, float (&sum)[QUERIES][2]) {
    for (int at = 0; at < positions; at++) {
        if (rows[at] < 0) continue;
        float x[2];
        if (PAIR == 2) {
            Vec<T, 2> both = *(const Vec<T, 2> *)(tile + at * HEAD + column);
            x[0] = to_f32(both.e[0]), x[1] = to_f32(both.e[1]);
        } else {
            x[0] = to_f32(tile[at * HEAD + column]), x[1] = column + 1 < HEAD ? to_f32(tile[at * HEAD + column + 1]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < QUERIES; i += 4) {
            Vec<float, 4> four = *(const Vec<float, 4> *)(weights[at] + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (CHECKED && four.e[j] == 0.0f) continue;
                sum[i + j][0] = fmaf(four.e[j], x[0], sum[i + j][0]), sum[i + j][1] = fmaf(four.e[j], x[1], sum[i + j][1]);
            }
        }
    }
}

template <typename T, int QUERIES> __device__ void attend_latents(const T *q, const T *k, const T *v, const float *pages, const float *start, T *out, float *sums, const PagedShape &s) {
    // Positions of a step and of a warp in it, and the queries whose scores a warp sums up together.
    constexpr int STEP = 64 / sizeof(T), KEYS = STEP / WARPS, TOGETHER = 8 / KEYS;
    extern __shared__ Vec<float, 4> shared_rows[];
    float *queries = (float *)shared_rows;
    T *tile = (T *)(queries + QUERIES * HEAD);
    alignas(16) __shared__ float weights[STEP][QUERIES + 4];
    __shared__ float top[QUERIES], total[QUERIES], shrink[QUERIES];
    __shared__ int rows[STEP];
    let_successor_begin();
    wait_for_predecessor();
    PagedBlock<QUERIES> block(s, start);
    if (block.is_unread()) return;
    pages += (i64)block.sequence * s.page_count;
    for (int i = threadIdx.x; i < QUERIES * HEAD; i += LATENT_THREADS) queries[i] = i / HEAD < block.count ? to_f32(q[block.head_of(i / HEAD) * HEAD + i % HEAD]) : 0.0f;
    if (threadIdx.x < QUERIES) top[threadIdx.x] = -INFINITY, total[threadIdx.x] = 0.0f;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_column = 2 * threadIdx.x;
    i64 kv_width = (i64)s.kv_heads * HEAD, column = (i64)block.kv_head() * HEAD;
    float sum[QUERIES][2];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) sum[i][0] = sum[i][1] = 0.0f;
    for (int step = block.begin; step < block.end; step += STEP) {
        if (block.attends_to_none(step, STEP)) continue;
        __syncthreads();
        float keys[KEYS][LOADS * PAIR];
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            int at = warp * KEYS + n, position = step + at, row = position < block.end ? page_row(pages, s, position) : -1;
            if (lane == 0) rows[at] = row;
            const T *key = k + row * kv_width + column, *value = v + row * kv_width + column;
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                int pair = lane + 32 * j;
                bool is_there = row >= 0 && (PAIRS % 32 == 0 || pair < PAIRS);
                Vec<T, PAIR> x;
                if (is_there) {
                    x = *(const Vec<T, PAIR> *)(key + pair * PAIR);
                    *(Vec<T, PAIR> *)(tile + at * HEAD + pair * PAIR) = k == v ? x : *(const Vec<T, PAIR> *)(value + pair * PAIR);
                }
#pragma unroll
                for (int e = 0; e < PAIR; e++) keys[n][j * PAIR + e] = is_there ? to_f32(x.e[e]) : 0.0f;
            }
        }
        __syncwarp();
        // Scores: a lane adds some columns, and the lanes exchange their sums.
#pragma unroll 1
        for (int i = 0; i < QUERIES; i += TOGETHER) {
            float score[TOGETHER * KEYS];
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
                const float *query = queries + (i + t) * HEAD;
#pragma unroll
                for (int n = 0; n < KEYS; n++) score[t * KEYS + n] = 0.0f;
#pragma unroll
                for (int j = 0; j < LOADS; j++) {
                    int pair = lane + 32 * j;
                    if (PAIRS % 32 != 0 && pair >= PAIRS) continue;
                    Vec<float, PAIR> x = *(const Vec<float, PAIR> *)(query + pair * PAIR);
#pragma unroll
                    for (int n = 0; n < KEYS; n++)
#pragma unroll
                        for (int e = 0; e < PAIR; e++) score[t * KEYS + n] = fmaf(x.e[e], keys[n][j * PAIR + e], score[t * KEYS + n]);
                }
            }
            float own = sum_values(score);
            int query = i + lane / 4 / KEYS, at = warp * KEYS + lane / 4 % KEYS;
            bool counts = rows[at] >= 0 && query < block.count && is_attended(s, block.first + block.row_of(query), step + at);
            if (lane % 4 == 0) weights[at][query] = counts ? own * s.scale : -INFINITY;
        }
        __syncthreads();
        // Softmax so far: a warp per query. A NaN stays one: only the weight of −∞ is 0 by rule.
        for (int i = warp; i < QUERIES; i += WARPS) {
            float a = lane < STEP ? weights[lane % STEP][i] : -INFINITY;
            float before = top[i], now = fmaxf(before, warp_max(a));
            a = a == -INFINITY ? 0.0f : expf(a - now);
            float more = warp_sum(a), less = before == -INFINITY ? 0.0f : expf(before - now);
            if (lane < STEP) weights[lane % STEP][i] = a;
            __syncwarp();
            if (lane == 0) top[i] = now, shrink[i] = less, total[i] = total[i] * less + more;
        }
        __syncthreads();
        if (own_column < s.value_dim) {
#pragma unroll
            for (int i = 0; i < QUERIES; i++) sum[i][0] *= shrink[i], sum[i][1] *= shrink[i];
            int last = min(step + STEP, block.end) - 1;
            if (last <= block.lowest && block.highest - step < s.window) add_values<T, QUERIES, false>(tile, weights, rows, last + 1 - step, own_column, sum);
            else add_values<T, QUERIES, true>(tile, weights, rows, last + 1 - step, own_column, sum);
        }
    }
    __syncthreads();
    // The two ways to add differ in the sign of a sum of zeros, so −0 becomes 0.
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (i < block.count && own_column + e < s.value_dim) block.store(i, own_column + e, sum[i][e] + 0.0f, top[i], total[i], out, sums);
}

template <typename T> __device__ __forceinline__ void attend_some_latents(const T *q, const T *k, const T *v, const float *pages, const float *start, T *out, float *sums, int queries, const PagedShape &s) {
    if (queries == 4) attend_latents<T, 4>(q, k, v, pages, start, out, sums, s);
    else attend_latents<T, 16>(q, k, v, pages, start, out, sums, s);
}
extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 2) latent_attention_f32(const float *q, const float *k, const float *v, const float *pages, const float *start, float *out, float *sums, int queries, const PagedShape shape) {
    attend_some_latents(q, k, v, pages, start, out, sums, queries, shape);
}
extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 2) latent_attention_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const float *pages, const float *start, bf16 *out, float *sums, int queries, const PagedShape shape) {
    attend_some_latents(q, k, v, pages, start, out, sums, queries, shape);
}
