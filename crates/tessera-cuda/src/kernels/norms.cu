// Residuals, norms, and rows to e4m3.

// What brings a row to zero mean and unit variance.
struct Moments {
    float mean, scale;
};

__device__ __forceinline__ Moments moments(const Row &r, float eps) {
    float mean = 0.0f, squares = 0.0f;
    each(r, [&](float x) { mean += x; });
    mean = block_sum<THREADS>(mean) * (1.0f / WIDTH);
    each(r, [&](float x) { squares = fmaf(x - mean, x - mean, squares); });
    return {mean, rsqrtf(block_sum<THREADS>(squares) * (1.0f / WIDTH) + eps)};
}

// A row to e4m3 by a scale of its own: the largest magnitude becomes 448.
__device__ __forceinline__ void quantize_row(const Row &r, e4m3 *out, float *scales, i64 row) {
    float top = 0.0f;
    each(r, [&](float x) { top = fmaxf(top, fabsf(x)); });
    top = block_max<THREADS>(top);
    float scale = top > 0.0f ? top / 448.0f : 1.0f;
    if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        if (!here(p)) continue;
        Vec<e4m3, V> q;
#pragma unroll
        for (int i = 0; i < V; i++) down(up(r.e[p].e[i]) / scale, q.e[i]);
        ((Vec<e4m3, V> *)(out + row * WIDTH))[vector_of(p)] = q;
    }
}

// x (+ y (· gate)) to `total`, and its norm (affine by w and b, or modulated by columns of m) to `out`, or to e4m3 with a scale a
// row. What is absent is null. Tables of gates and of m have a row of so many columns a frame.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(int rows, const T *x, const T *y, const float *gates, int gate_columns, int gate, const float *m, int columns_of_m,
                  int shift, int scale, const float *w, const float *b, T *total, T *out, e4m3 *narrow,
                  float *scales, int first_row, int frame_rows, float eps) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r, o;
        fetch(r, x, row);
        i64 frame = (first_row + row) / frame_rows;
        if (y) {
            fetch(o, y, row);
            const float *g = gates ? gates + frame * gate_columns + gate * WIDTH : 0;
#pragma unroll
            for (int p = 0; p < PER; p++) {
                if (!here(p)) continue;
                Vec<float, V> c;
                if (g) c = columns(g, p);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float add = up(o.e[p].e[i]);
                    down(up(r.e[p].e[i]) + (g ? add * c.e[i] : add), r.e[p].e[i]);
                }
                if (total) store(total, row, p, r.e[p]);
            }
        }
        if (!out && !narrow) continue;
        Moments of = moments(r, eps);
        const float *here_m = m + frame * columns_of_m;
        const float *c = w ? w : here_m + scale * WIDTH, *d = w ? b : here_m + shift * WIDTH;
        float more = w ? 0.0f : 1.0f;
#pragma unroll
        for (int p = 0; p < PER; p++) {
            if (!here(p)) continue;
            Vec<float, V> times = columns(c, p), plus = columns(d, p);
#pragma unroll
            for (int i = 0; i < V; i++) {
                down((up(r.e[p].e[i]) - of.mean) * of.scale * (times.e[i] + more) + plus.e[i], r.e[p].e[i]);
            }
            if (out) store(out, row, p, r.e[p]);
        }
        if (narrow) quantize_row(r, narrow, scales, row);
    }
}

// Sums of squares of rows of one operand or two: [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_square_sum(int rows, const T *x, const T *y, float *out, int columns) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        fetch(r, x, row);
        float s = square_sum(r);
        if (threadIdx.x == 0) out[row * columns] = s;
        if (y) {
            fetch(r, y, row);
            float t = square_sum(r);
            if (threadIdx.x == 0) out[row * columns + 1] = t;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(int rows, const T *x, e4m3 *out, float *scales) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        fetch(r, x, row);
        quantize_row(r, out, scales, row);
    }
}
