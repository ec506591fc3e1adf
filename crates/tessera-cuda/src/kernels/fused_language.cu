// Fused kernels of a language model's decoding step, in which every op has one row or few: matmuls of one row,
// and what happens to the heads of queries, keys and values before attention. Each computes the bits of the ops
// that it replaces.

// A matmul of the row that a launch multiplies: the addresses of weights [columns, k], bias and result.
struct RowMatrix {
    u64 w, b, out;
    int columns, act;
};
struct RowMatrices {
    RowMatrix of[3];
};

// Multiplies one row with several matrices. A block computes ROW_COLUMNS columns of their results.
extern "C" __global__ void __launch_bounds__(ROW_BLOCK) row_matmuls_bf16(const bf16 *x, int k, const __grid_constant__ RowMatrices matrices) {
    let_successor_begin();
    int columns[ROW_COLUMNS], of[ROW_COLUMNS];
    const bf16 *w[ROW_COLUMNS];
#pragma unroll
    for (int c = 0; c < ROW_COLUMNS; c++) {
        int column = blockIdx.x * ROW_COLUMNS + c, at = 0;
        while (at < 3 && column >= matrices.of[at].columns) column -= matrices.of[at++].columns;
        columns[c] = column, of[c] = at;
        w[c] = at < 3 ? (const bf16 *)matrices.of[at].w + (i64)column * k : 0;
    }
    wait_for_predecessor();
    float sum[ROW_COLUMNS];
    multiply_row(x, w, k, sum);
#pragma unroll
    for (int c = 0; c < ROW_COLUMNS; c++) {
        if (threadIdx.x != c || !w[c]) continue;
        const RowMatrix &m = matrices.of[of[c]];
        from_f32(activate(m.b ? sum[c] + to_f32(((const bf16 *)m.b)[columns[c]]) : sum[c], m.act), ((bf16 *)m.out)[columns[c]]);
    }
}

// Multiplies one row with two matrices and the results with each other: out = act(x · gateᵀ) · (x · upᵀ), with one
// block per column.
extern "C" __global__ void __launch_bounds__(ROW_BLOCK) gated_row_bf16(const bf16 *x, const bf16 *gate, const bf16 *up, bf16 *out, int k, int act) {
    let_successor_begin();
    i64 column = blockIdx.x;
    const bf16 *w[ROW_COLUMNS] = {gate + column * k, up + column * k};
    wait_for_predecessor();
    float sum[ROW_COLUMNS];
    multiply_row(x, w, k, sum);
    if (threadIdx.x == 0) from_f32(rounded<bf16>(activate(sum[0], act)) * rounded<bf16>(sum[1]), out[column]);
}

// The heads of queries, keys or values: x and out, or the pool of pages at `out`, and the weight of their norm,
// null without one.
struct HeadPart {
    u64 x, w, out;
    int heads, rotates, in_pages;
    float eps;
};
struct HeadParts {
    HeadPart of[3];
    int heads, head;  // of all parts, and elements of one
    int pairs, rows_per_sequence;
    int page_count, page_rows, pool_pages;
    float scale;
};

// Normalises and rotates heads and writes them to their rows or pages. A warp computes a head, which it reads
// whole before it writes.
template <typename T> __device__ void put_head(const float *frequencies, const float *start, const float *pages, i64 n, const HeadParts &s) {
    extern __shared__ float heads[];
    let_successor_begin();
    wait_for_predecessor();
    i64 item = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= n) return;
    int lane = threadIdx.x % 32, row = (int)(item / s.heads), h = (int)(item % s.heads), at = 0;
    while (h >= s.of[at].heads) h -= s.of[at++].heads;
    const HeadPart &part = s.of[at];
    int sequence = row / s.rows_per_sequence;
    float first = start[sequence];
    i64 to = row;
    if (part.in_pages) {
        if (!(first >= 0.0f)) return;
        to = row_of_position(pages + (i64)sequence * s.page_count, s.page_count, s.page_rows, s.pool_pages, (int)first + row % s.rows_per_sequence);
        if (to < 0) return;
    }
    const T *x = (const T *)part.x + ((i64)row * part.heads + h) * s.head;
    T *out = (T *)part.out + (to * part.heads + h) * s.head;
    const float *w = (const float *)part.w;
    float *own = heads + threadIdx.x / 32 * s.head, root = 1.0f;
    if (w) {
        float sum = 0.0f;
        for (int c = lane; c < s.head; c += 32) sum = fmaf(to_f32(x[c]), to_f32(x[c]), sum);
        root = sqrtf(warp_sum(sum) / s.head + part.eps);
    }
    for (int c = lane; c < s.head; c += 32) own[c] = w ? rounded<T>(to_f32(x[c]) / root * w[c]) : to_f32(x[c]);
    __syncwarp();
    int rotated = part.rotates ? s.pairs : 0;
    double position = (double)first + row % s.rows_per_sequence;
    for (int i = lane; i < rotated; i += 32) {
        double sine, cosine;
        sincos(position * (double)frequencies[i], &sine, &cosine);
        float c = (float)(cosine * s.scale), d = (float)(sine * s.scale), a = own[i], b = own[i + rotated];
        from_f32(a * c - b * d, out[i]);
        from_f32(b * c + a * d, out[i + rotated]);
    }
    for (int c = 2 * rotated + lane; c < s.head; c += 32) from_f32(own[c], out[c]);
}
extern "C" __global__ void put_heads_f32(const float *frequencies, const float *start, const float *pages, i64 n, const __grid_constant__ HeadParts parts) {
    put_head<float>(frequencies, start, pages, n, parts);
}
extern "C" __global__ void put_heads_bf16(const float *frequencies, const float *start, const float *pages, i64 n, const __grid_constant__ HeadParts parts) {
    put_head<bf16>(frequencies, start, pages, n, parts);
}
