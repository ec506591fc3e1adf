// Kernels that work on whole rows of the residual stream: one block a row, the row in registers, one read and one write.
//
// Compiled for a width: WIDTH elements of T = BF16 ? bf16 : float, by vectors of ROW_VECTOR, by ROW_THREADS threads a row. A row's bits
// depend on the row alone.
#if BF16
typedef bf16 T;
#else
typedef float T;
#endif
constexpr int V = ROW_VECTOR, THREADS = ROW_THREADS;
constexpr int VECTORS = WIDTH / V;
constexpr int PER = (VECTORS + THREADS - 1) / THREADS;

struct Row {
    float e[PER][V];
};

__device__ __forceinline__ void load(Row &r, const T *from) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) {
            Vec<T, V> x = ((const Vec<T, V> *)from)[v];
#pragma unroll
            for (int i = 0; i < V; i++) r.e[p][i] = up(x.e[i]);
        } else {
#pragma unroll
            for (int i = 0; i < V; i++) r.e[p][i] = 0.0f;
        }
    }
}

__device__ __forceinline__ void store(T *to, const Row &r) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) {
            Vec<T, V> x;
#pragma unroll
            for (int i = 0; i < V; i++) down(r.e[p][i], x.e[i]);
            ((Vec<T, V> *)to)[v] = x;
        }
    }
}

// Columns of a vector of f32, as the row's elements lie in this thread: read once a row, from the nearest cache.
__device__ __forceinline__ Vec<float, V> columns(const float *from, int p) {
    return ((const Vec<float, V> *)from)[p * THREADS + threadIdx.x];
}

// For every element of this thread and its columns of two vectors: f(value, a, b).
template <typename F> __device__ __forceinline__ void each_with(Row &r, const float *a, const float *b, F f) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        if (p * THREADS + threadIdx.x < VECTORS) {
            Vec<float, V> x = columns(a, p), y = columns(b, p);
#pragma unroll
            for (int i = 0; i < V; i++) f(r.e[p][i], x.e[i], y.e[i]);
        }
    }
}

// For every element of this thread: f(value, index in the row).
template <typename F> __device__ __forceinline__ void each(Row &r, F f) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) {
#pragma unroll
            for (int i = 0; i < V; i++) f(r.e[p][i], v * V + i);
        }
    }
}

__device__ __forceinline__ float sum(Row &r) {
    float s = 0.0f;
    each(r, [&](float &x, int) { s += x; });
    return block_sum<THREADS>(s);
}

__device__ __forceinline__ float square_sum(Row &r) {
    float s = 0.0f;
    each(r, [&](float &x, int) { s = fmaf(x, x, s); });
    return block_sum<THREADS>(s);
}

// To zero mean and unit variance.
__device__ __forceinline__ void normalize(Row &r, float eps) {
    float mean = sum(r) * (1.0f / WIDTH);
    each(r, [&](float &x, int) { x -= mean; });
    float scale = rsqrtf(square_sum(r) * (1.0f / WIDTH) + eps);
    each(r, [&](float &x, int) { x *= scale; });
}

// x (+ y (· gate)) to `total`, and its norm (affine by w and b, or modulated by columns of m) to `out`. What is absent is
// null. Tables of gates and of m have a row of so many columns a frame.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(const T *x, const T *y, const float *gates, int gate_columns, int gate, const float *m, int columns_of_m,
                  int shift, int scale, const float *w, const float *b, T *total, T *out, int first_row, int frame_rows,
                  float eps) {
    i64 at = (i64)blockIdx.x * WIDTH;
    i64 frame = (first_row + (int)blockIdx.x) / frame_rows;
    Row r;
    load(r, x + at);
    if (y) {
        Row o;
        load(o, y + at);
        if (gates) {
            const float *g = gates + frame * gate_columns + gate * WIDTH;
#pragma unroll
            for (int p = 0; p < PER; p++) {
                if (p * THREADS + threadIdx.x < VECTORS) {
                    Vec<float, V> c = columns(g, p);
#pragma unroll
                    for (int i = 0; i < V; i++) o.e[p][i] *= c.e[i];
                }
            }
        }
#pragma unroll
        for (int p = 0; p < PER; p++) {
#pragma unroll
            for (int i = 0; i < V; i++) r.e[p][i] = rounded<T>(r.e[p][i] + o.e[p][i]);
        }
        if (total) store(total + at, r);
    }
    if (!out) return;
    normalize(r, eps);
    if (w) {
        each_with(r, w, b, [&](float &v, float c, float d) { v = v * c + d; });
    } else {
        const float *columns_here = m + frame * columns_of_m;
        each_with(r, columns_here + scale * WIDTH, columns_here + shift * WIDTH,
                  [&](float &v, float c, float d) { v = v * (1.0f + c) + d; });
    }
    store(out + at, r);
}

constexpr int MOST_PAIRS = 256;

__device__ __forceinline__ void turn_one(float *pair, float cosine, float sine) {
    float a = pair[0], b = pair[1];
    pair[0] = a * cosine - b * sine;
    pair[1] = a * sine + b * cosine;
}
__device__ __forceinline__ void turn_two(float *pairs, float4 turns) {
    turn_one(pairs, turns.x, turns.y);
    turn_one(pairs + 2, turns.z, turns.w);
}

// RMS norm (w not null: over this row, or with sums of squares that ranks brought together), then rotary embedding
// (head > 0), to row `*to_row` + own of out. Turns are (cos, sin): those of frames were made for this call.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_rope(const T *x, const float *w, const float *sums, int sum_columns, int sum_column, float whole, float eps,
             T *out, const i64 *to_row, int head, const float2 *by_frame, const float2 *by_row,
             const float2 *by_column, int first_row, int high, int wide, int moves) {
    // As float4 where two pairs are read at once.
    __shared__ __align__(16) float2 turn[MOST_PAIRS];
    Row r;
    load(r, x + (i64)blockIdx.x * WIDTH);
    if (head > 0) {
        int token = moves ? first_row + (int)blockIdx.x : 0;
        int side = head / 6, first = head / 2 - 2 * side;
        for (int pair = threadIdx.x; pair < head / 2; pair += THREADS) {
            const float2 *from = by_frame + token / (high * wide) * first + pair;
            if (pair >= first) from = by_row + token / wide % high * side + pair - first;
            if (pair >= first + side) from = by_column + token % wide * side + pair - first - side;
            turn[pair] = *from;
        }
        __syncthreads();
    }
    if (w) {
        float ss = sums ? sums[(i64)blockIdx.x * sum_columns + sum_column] : square_sum(r);
        float scale = rsqrtf(ss / whole + eps);
        each_with(r, w, w, [&](float &v, float c, float) { v = v * scale * c; });
    }
    if (head > 0) {
        if (w) each(r, [&](float &v, int) { v = rounded<T>(v); });
#if WIDTH % 2 == 0
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int v = p * THREADS + threadIdx.x;
            if (v < VECTORS) {
                int pair = v * V % head / 2;
#if ROW_VECTOR % 4 == 0
                // A vector lies in one head, if heads are whole vectors.
                if (head % V == 0) {
#pragma unroll
                    for (int i = 0; i < V; i += 4) turn_two(r.e[p] + i, ((const float4 *)(turn + pair))[i / 4]);
                    continue;
                }
#endif
#pragma unroll
                for (int i = 0; i + 1 < V; i += 2) {
                    if (pair == head / 2) pair = 0;
                    float2 t = turn[pair++];
                    turn_one(r.e[p] + i, t.x, t.y);
                }
            }
        }
#endif
    }
    i64 row = (i64)blockIdx.x + (to_row ? *to_row : 0);
    store(out + row * WIDTH, r);
}

// Sums of squares of rows of one operand or two: [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_square_sum(const T *x, const T *y, float *out, int columns) {
    Row r;
    load(r, x + (i64)blockIdx.x * WIDTH);
    float s = square_sum(r);
    if (threadIdx.x == 0) out[(i64)blockIdx.x * columns] = s;
    if (y) {
        load(r, y + (i64)blockIdx.x * WIDTH);
        float t = square_sum(r);
        if (threadIdx.x == 0) out[(i64)blockIdx.x * columns + 1] = t;
    }
}

// Rows to e4m3 by a scale of their own: the largest magnitude becomes 448.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(const T *x, e4m3 *out, float *scales) {
    Row r;
    load(r, x + (i64)blockIdx.x * WIDTH);
    float top = 0.0f;
    each(r, [&](float &v, int) { top = fmaxf(top, fabsf(v)); });
    top = block_max<THREADS>(top);
    float scale = top > 0.0f ? top / 448.0f : 1.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) {
            Vec<e4m3, V> q;
#pragma unroll
            for (int i = 0; i < V; i++) down(r.e[p][i] / scale, q.e[i]);
            ((Vec<e4m3, V> *)(out + (i64)blockIdx.x * WIDTH))[v] = q;
        }
    }
}
