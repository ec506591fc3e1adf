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

// x (+ y (· gate)) to `sum`, and its norm (affine by w and b, or modulated by columns of m) to `out`. What is absent is
// null. m has a row of `columns` numbers a frame.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(const T *x, const T *y, const float *m, int columns, int gate, int shift, int scale, const float *w,
                  const float *b, T *total, T *out, int first_row, int frame_rows, float eps) {
    i64 at = (i64)blockIdx.x * WIDTH;
    const float *frame = m ? m + (i64)((first_row + (int)blockIdx.x) / frame_rows) * columns : nullptr;
    Row r;
    load(r, x + at);
    if (y) {
        Row o;
        load(o, y + at);
        const float *g = frame && gate >= 0 ? frame + gate * WIDTH : nullptr;
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int v = p * THREADS + threadIdx.x;
            if (v < VECTORS) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float add = g ? o.e[p][i] * g[v * V + i] : o.e[p][i];
                    r.e[p][i] = rounded<T>(r.e[p][i] + add);
                }
            }
        }
        if (total) store(total + at, r);
    }
    if (!out) return;
    normalize(r, eps);
    if (w) {
        each(r, [&](float &v, int i) { v = v * w[i] + b[i]; });
    } else {
        const float *sh = frame + shift * WIDTH, *sc = frame + scale * WIDTH;
        each(r, [&](float &v, int i) { v = v * (1.0f + sc[i]) + sh[i]; });
    }
    store(out + at, r);
}

// RMS norm (w not null: over this row, or with sums of squares that ranks brought together), then rotary embedding
// (head > 0), to row `*to_row` + own of out. Turns are (cos, sin): those of frames were made for this call.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_rope(const T *x, const float *w, const float *sums, int sum_columns, int sum_column, float whole, float eps,
             T *out, const i64 *to_row, int head, const float2 *by_frame, const float2 *by_row,
             const float2 *by_column, int first_row, int high, int wide, int moves) {
    Row r;
    load(r, x + (i64)blockIdx.x * WIDTH);
    if (w) {
        float ss = sums ? sums[(i64)blockIdx.x * sum_columns + sum_column] : square_sum(r);
        float scale = rsqrtf(ss / whole + eps);
        each(r, [&](float &v, int i) { v = v * scale * w[i]; });
    }
    if (head > 0) {
        int token = moves ? first_row + (int)blockIdx.x : 0;
        int side = head / 6, first = head / 2 - 2 * side;
        const float2 *f = by_frame + token / (high * wide) * first;
        const float2 *h = by_row + token / wide % high * side;
        const float2 *c = by_column + token % wide * side;
        if (w) each(r, [&](float &v, int) { v = rounded<T>(v); });
#if WIDTH % 2 == 0
#pragma unroll
        for (int p = 0; p < PER; p++) {
            int v = p * THREADS + threadIdx.x;
            if (v < VECTORS) {
#pragma unroll
                for (int i = 0; i < V; i += 2) {
                    int pair = (v * V + i) % head / 2;
                    float2 t = pair < first ? f[pair] : (pair < first + side ? h[pair - first] : c[pair - first - side]);
                    float a = r.e[p][i], b = r.e[p][i + 1];
                    r.e[p][i] = a * t.x - b * t.y;
                    r.e[p][i + 1] = a * t.y + b * t.x;
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
