// Fused residual and norm kernels, and the quantisation of rows to e4m3.

// The shift and scale that give a row zero mean and unit variance.
struct Moments {
    float mean, scale;
};

__device__ __forceinline__ Moments moments(const Row &r, float eps) {
    float mean = 0.0f, squares = 0.0f;
    for_each_element(r, [&](float x) { mean += x; });
    mean = block_sum<THREADS>(mean) * (1.0f / WIDTH);
    for_each_element(r, [&](float x) { squares = fmaf(x - mean, x - mean, squares); });
    return {mean, rsqrtf(block_sum<THREADS>(squares) * (1.0f / WIDTH) + eps)};
}

// Quantises a row to e4m3 with its own scale, which maps the row's largest magnitude to 448. `round` takes a number, its
// column and the place of the result.
template <typename Round>
__device__ __forceinline__ void quantize_row_by(const Row &r, e4m3 *out, float *scales, i64 row, Round round) {
    float largest = 0.0f;
    for_each_element(r, [&](float x) { largest = fmaxf(largest, fabsf(x)); });
    largest = block_max<THREADS>(largest);
    float scale = largest > 0.0f ? largest / 448.0f : 1.0f;
    if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
    for (int p = 0; p < VECTORS_PER_THREAD; p++) {
        if (!in_row(p)) continue;
        Vec<e4m3, V> q;
#pragma unroll
        for (int i = 0; i < V; i++) round(to_f32(r.e[p].e[i]) / scale, vector_index(p) * V + i, q.e[i]);
        ((Vec<e4m3, V> *)(out + row * WIDTH))[vector_index(p)] = q;
    }
}
__device__ __forceinline__ void quantize_row(const Row &r, e4m3 *out, float *scales, i64 row) {
    quantize_row_by(r, out, scales, row, [](float x, int, e4m3 &to) { from_f32(x, to); });
}

// Writes x (+ y (· gate)) to `total` and its norm to `out`, or to `quantized` in e4m3 with one
// scale per row. The norm is affine with w and b, or modulated with columns of m. Absent tensors
// are null. The tables of gates and m have one row per frame; `gate_columns` and `m_columns` are
// their widths.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(int rows, const T *x, const T *y, const float *gates, int gate_columns, int gate, const float *m, int m_columns,
                  int shift, int scale, const float *w, const float *b, T *total, T *out, e4m3 *quantized,
                  float *scales, int first_row, int frame_rows, float eps) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r, o;
        load_row(r, x, row);
        i64 frame = (first_row + row) / frame_rows;
        if (y) {
            load_row(o, y, row);
            const float *g = gates ? gates + frame * gate_columns + gate * WIDTH : 0;
#pragma unroll
            for (int p = 0; p < VECTORS_PER_THREAD; p++) {
                if (!in_row(p)) continue;
                Vec<float, V> c;
                if (g) c = load_columns(g, p);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float addend = to_f32(o.e[p].e[i]);
                    from_f32(to_f32(r.e[p].e[i]) + (g ? addend * c.e[i] : addend), r.e[p].e[i]);
                }
                if (total) store_vector(total, row, p, r.e[p]);
            }
        }
        if (!out && !quantized) continue;
        Moments stats = moments(r, eps);
        const float *frame_m = m + frame * m_columns;
        const float *c = w ? w : frame_m + scale * WIDTH, *d = w ? b : frame_m + shift * WIDTH;
        float scale_offset = w ? 0.0f : 1.0f;
#pragma unroll
        for (int p = 0; p < VECTORS_PER_THREAD; p++) {
            if (!in_row(p)) continue;
            Vec<float, V> scales_here = load_columns(c, p), shifts_here = load_columns(d, p);
#pragma unroll
            for (int i = 0; i < V; i++) {
                from_f32((to_f32(r.e[p].e[i]) - stats.mean) * stats.scale * (scales_here.e[i] + scale_offset) + shifts_here.e[i], r.e[p].e[i]);
            }
            if (out) store_vector(out, row, p, r.e[p]);
        }
        if (quantized) quantize_row(r, quantized, scales, row);
    }
}

// Computes the sum of squares of each row of x and, if y is not null, of y: [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    row_square_sum(int rows, const T *x, const T *y, float *out, int columns) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load_row(r, x, row);
        float s = square_sum(r);
        if (threadIdx.x == 0) out[row * columns] = s;
        if (y) {
            load_row(r, y, row);
            float t = square_sum(r);
            if (threadIdx.x == 0) out[row * columns + 1] = t;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(int rows, const T *x, e4m3 *out, float *scales) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load_row(r, x, row);
        quantize_row(r, out, scales, row);
    }
}

// As `quantize`, by random words. The first row has the number `first_row` in the whole, unsharded tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_by_word(int rows, const T *x, e4m3 *out, float *scales, u32 seed, u32 seed_high, u32 draw, i64 first_row) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load_row(r, x, row);
        i64 first = (first_row + row) * WIDTH;
        quantize_row_by(r, out, scales, row, [&](float x, int column, e4m3 &to) {
            round_by_word(x, rounding_word((u64)(first + column), seed, seed_high, draw), to);
        });
    }
}

// Writes the sum x + y to `total` and the RMS norm of the sum to `out`. An addend in bf16 is `narrow_y`, and a norm
// that is rounded to bf16 is `narrow_out`. Without an addend, x itself is normalised.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_rms(int rows, const T *x, const T *y, const bf16 *narrow_y, const float *w, T *total, T *out, bf16 *narrow_out, float eps) {
    let_successor_begin();
    wait_for_predecessor();
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load_row(r, x, row);
        if (y || narrow_y) {
#pragma unroll
            for (int p = 0; p < VECTORS_PER_THREAD; p++) {
                if (!in_row(p)) continue;
                float addend[V];
                if (y) {
                    RowVector a = ((const RowVector *)(y + row * WIDTH))[vector_index(p)];
#pragma unroll
                    for (int i = 0; i < V; i++) addend[i] = to_f32(a.e[i]);
                } else {
                    Vec<bf16, V> a = ((const Vec<bf16, V> *)(narrow_y + row * WIDTH))[vector_index(p)];
#pragma unroll
                    for (int i = 0; i < V; i++) addend[i] = to_f32(a.e[i]);
                }
#pragma unroll
                for (int i = 0; i < V; i++) from_f32(to_f32(r.e[p].e[i]) + addend[i], r.e[p].e[i]);
                store_vector(total, row, p, r.e[p]);
            }
        }
        float scale = rsqrtf(square_sum(r) / WIDTH + eps);
#pragma unroll
        for (int p = 0; p < VECTORS_PER_THREAD; p++) {
            if (!in_row(p)) continue;
            Vec<float, V> c = load_columns(w, p);
            Vec<bf16, V> narrow;
#pragma unroll
            for (int i = 0; i < V; i++) {
                from_f32(to_f32(r.e[p].e[i]) * scale * c.e[i], r.e[p].e[i]);
                from_f32(to_f32(r.e[p].e[i]), narrow.e[i]);
            }
            if (out) store_vector(out, row, p, r.e[p]);
            else ((Vec<bf16, V> *)(narrow_out + row * WIDTH))[vector_index(p)] = narrow;
        }
    }
}
