// Kernels that work on whole rows of the residual stream: blocks stay and take row after row, the row in registers, one read and one
// write. The next row is under way while this one is worked on. Rows go from the last to the first: what a product wrote last is still
// in the near cache, and so is then what the next one reads first.
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

// A row as it lies in memory, and as it is worked on.
struct Raw {
    Vec<T, V> e[PER];
};
struct Row {
    float e[PER][V];
};

__device__ __forceinline__ void fetch(Raw &r, const T *from, i64 row) {
    const Vec<T, V> *vectors = (const Vec<T, V> *)(from + row * WIDTH);
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) r.e[p] = vectors[v];
    }
}

__device__ __forceinline__ void open(Row &r, const Raw &raw) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        bool here = p * THREADS + threadIdx.x < VECTORS;
#pragma unroll
        for (int i = 0; i < V; i++) r.e[p][i] = here ? up(raw.e[p].e[i]) : 0.0f;
    }
}

__device__ __forceinline__ void load(Row &r, const T *from, i64 row) {
    Raw raw;
    fetch(raw, from, row);
    open(r, raw);
}

__device__ __forceinline__ Vec<T, V> closed(const Row &r, int p) {
    Vec<T, V> x;
#pragma unroll
    for (int i = 0; i < V; i++) down(r.e[p][i], x.e[i]);
    return x;
}

__device__ __forceinline__ void store(T *to, i64 row, const Row &r) {
    Vec<T, V> *vectors = (Vec<T, V> *)(to + row * WIDTH);
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) vectors[v] = closed(r, p);
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

// A row to e4m3 by a scale of its own: the largest magnitude becomes 448.
__device__ __forceinline__ void quantize_row(Row &r, e4m3 *out, float *scales, i64 row) {
    float top = 0.0f;
    each(r, [&](float &v, int) { top = fmaxf(top, fabsf(v)); });
    top = block_max<THREADS>(top);
    float scale = top > 0.0f ? top / 448.0f : 1.0f;
    if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v < VECTORS) {
            Vec<e4m3, V> q;
#pragma unroll
            for (int i = 0; i < V; i++) down(r.e[p][i] / scale, q.e[i]);
            ((Vec<e4m3, V> *)(out + row * WIDTH))[v] = q;
        }
    }
}

// x (+ y (· gate)) to `total`, and its norm (affine by w and b, or modulated by columns of m) to `out`, or to e4m3 with a scale a
// row. What is absent is null. Tables of gates and of m have a row of so many columns a frame.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(int rows, const T *x, const T *y, const float *gates, int gate_columns, int gate, const float *m, int columns_of_m,
                  int shift, int scale, const float *w, const float *b, T *total, T *out, e4m3 *narrow,
                  float *scales, int first_row, int frame_rows, float eps) {
    Raw next_x, next_y;
    int row = rows - 1 - blockIdx.x;
    fetch(next_x, x, row);
    if (y) fetch(next_y, y, row);
    for (; row >= 0; row -= gridDim.x) {
        int next = row - gridDim.x;
        i64 frame = (first_row + row) / frame_rows;
        Row r;
        open(r, next_x);
        if (next >= 0) fetch(next_x, x, next);
        if (y) {
            Row o;
            open(o, next_y);
            if (next >= 0) fetch(next_y, y, next);
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
            if (total) store(total, row, r);
        }
        if (!out && !narrow) continue;
        normalize(r, eps);
        if (w) {
            each_with(r, w, b, [&](float &v, float c, float d) { v = v * c + d; });
        } else {
            const float *columns_here = m + frame * columns_of_m;
            each_with(r, columns_here + scale * WIDTH, columns_here + shift * WIDTH,
                      [&](float &v, float c, float d) { v = v * (1.0f + c) + d; });
        }
        if (narrow) {
            each(r, [&](float &v, int) { v = rounded<T>(v); });
            quantize_row(r, narrow, scales, row);
        } else {
            store(out, row, r);
        }
    }
}

__device__ __forceinline__ void turn_one(float *pair, float2 turn) {
    float a = pair[0], b = pair[1];
    pair[0] = a * turn.x - b * turn.y;
    pair[1] = a * turn.y + b * turn.x;
}

// RMS norm (w not null: over this row, or with sums of squares that ranks brought together), then rotary embedding
// (head > 0), to row `*to_row` + own of out, or column by column to where members of a group want it. Turns are (cos, sin): those of
// frames were made for this call.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_rope(int rows, const T *x, const float *w, const float *sums, int sum_columns, int sum_column, float whole, float eps,
             T *out, const i64 *to_row, int head, const float2 *by_frame, const float2 *by_row,
             const float2 *by_column, int first_row, int high, int wide, int moves, const __grid_constant__ Targets targets) {
    if (targets.closed()) return;
    Raw next_x;
    int row = rows - 1 - blockIdx.x;
    fetch(next_x, x, row);
    Vec<float, V> by[PER];
    u64 to[PER], pitch[PER];
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int v = p * THREADS + threadIdx.x;
        if (v >= VECTORS) continue;
        if (w) by[p] = columns(w, p);
        if (targets.members) {
            const Target &t = targets.with(v * V);
            to[p] = t.to + (v * V - t.first) * sizeof(T);
            pitch[p] = t.pitch;
        } else {
            to[p] = (u64)(out + (to_row ? *to_row : 0) * WIDTH + v * V);
            pitch[p] = WIDTH * sizeof(T);
        }
    }
    for (; row >= 0; row -= gridDim.x) {
        Row r;
        open(r, next_x);
        int next = row - gridDim.x;
        if (next >= 0) fetch(next_x, x, next);
        if (w) {
            float ss = sums ? sums[(i64)row * sum_columns + sum_column] : square_sum(r);
            float scale = rsqrtf(ss / whole + eps);
#pragma unroll
            for (int p = 0; p < PER; p++) {
#pragma unroll
                for (int i = 0; i < V; i++) r.e[p][i] = r.e[p][i] * scale * by[p].e[i];
            }
        }
#if WIDTH % 2 == 0
        if (head > 0) {
            if (w) each(r, [&](float &v, int) { v = rounded<T>(v); });
            int token = moves ? first_row + row : 0;
            int side = head / 6, first = head / 2 - 2 * side;
            // Of a pair's index, where its turn lies for this row.
            const float2 *of_frame = by_frame + token / (high * wide) * first;
            const float2 *of_row = by_row + token / wide % high * side - first;
            const float2 *of_column = by_column + token % wide * side - first - side;
#pragma unroll
            for (int p = 0; p < PER; p++) {
                int v = p * THREADS + threadIdx.x;
                if (v >= VECTORS) continue;
                int pair = v * V % head / 2;
#pragma unroll
                for (int i = 0; i + 1 < V; i += 2) {
                    if (pair == head / 2) pair = 0;
                    const float2 *of = pair < first ? of_frame : pair < first + side ? of_row : of_column;
                    turn_one(r.e[p] + i, of[pair++]);
                }
            }
        }
#endif
#pragma unroll
        for (int p = 0; p < PER; p++) {
            if (p * THREADS + threadIdx.x < VECTORS) *(Vec<T, V> *)(to[p] + row * pitch[p]) = closed(r, p);
        }
    }
}

// Sums of squares of rows of one operand or two: [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_square_sum(int rows, const T *x, const T *y, float *out, int columns) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load(r, x, row);
        float s = square_sum(r);
        if (threadIdx.x == 0) out[row * columns] = s;
        if (y) {
            load(r, y, row);
            float t = square_sum(r);
            if (threadIdx.x == 0) out[row * columns + 1] = t;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(int rows, const T *x, e4m3 *out, float *scales) {
    Raw next_x;
    int row = rows - 1 - blockIdx.x;
    fetch(next_x, x, row);
    for (; row >= 0; row -= gridDim.x) {
        Row r;
        open(r, next_x);
        int next = row - gridDim.x;
        if (next >= 0) fetch(next_x, x, next);
        quantize_row(r, out, scales, row);
    }
}
