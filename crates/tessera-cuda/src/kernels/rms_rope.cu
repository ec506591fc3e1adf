// RMS norm and rotary embedding (RoPE) of rows.

// Addresses of the RoPE tables (cos, sin) by frame, row and column of a token. The frame table is
// computed for each call.
struct RopeTables {
    const float2 *by_frame, *by_row, *by_column;
    int head, first_row, height, width, has_positions;

    // Loads the rotations of one vector, whose first pair is number `pair` of its head.
    __device__ __forceinline__ void load_rotations(int row, int pair, float2 (&rotations)[V / 2 + 1]) const {
        int token = has_positions ? first_row + row : 0;
        int side = head / 6, first = head / 2 - 2 * side;
        const float2 *frame_table = by_frame + token / (height * width) * first;
        const float2 *row_table = by_row + token / width % height * side - first;
        const float2 *column_table = by_column + token % width * side - first - side;
#pragma unroll
        for (int i = 0; i < V / 2; i++) {
            if (pair == head / 2) pair = 0;
            const float2 *from = pair < first ? frame_table : pair < first + side ? row_table : column_table;
            rotations[i] = from[pair++];
        }
    }
};

__device__ __forceinline__ void rotate(RowVector &x, const float2 (&rotations)[V / 2 + 1]) {
#pragma unroll
    for (int i = 0; i + 1 < V; i += 2) {
        float a = to_f32(x.e[i]), b = to_f32(x.e[i + 1]);
        float2 t = rotations[i / 2];
        from_f32(a * t.x - b * t.y, x.e[i]);
        from_f32(a * t.y + b * t.x, x.e[i + 1]);
    }
}

// Applies an RMS norm and then the rotary embedding to rows that are `pitch` elements apart. The
// norm is skipped if w is null; its sum of squares is the row's own, or comes from `sums`, which
// ranks have reduced. RoPE is skipped if `head` is 0. Rows go to `out` from row `*to_row` on, or
// column by column to the members of a group.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_rope(int rows, const T *x, int pitch, const float *w, const float *sums, int sum_columns, int sum_column, float norm_columns, float eps,
             T *out, const i64 *to_row, int head, const float2 *by_frame, const float2 *by_row,
             const float2 *by_column, int first_row, int height, int width, int has_positions, const __grid_constant__ Targets targets) {
    if (targets.is_closed()) return;
    if (to_row) out += *to_row * WIDTH;
    RopeTables tables = {by_frame, by_row, by_column, head, first_row, height, width, has_positions};
    // If all vectors of a thread have the same position in their heads, one set of rotations serves
    // the whole row.
    bool same_positions = head > 0 && THREADS * V % head == 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        load_row(r, x, row, pitch);
        float2 rotations[V / 2 + 1];
        if (same_positions) tables.load_rotations(row, threadIdx.x * V % head / 2, rotations);
        float scale = 1.0f;
        if (w) scale = rsqrtf((sums ? sums[(i64)row * sum_columns + sum_column] : square_sum(r)) / norm_columns + eps);
#pragma unroll
        for (int p = 0; p < VECTORS_PER_THREAD; p++) {
            if (!in_row(p)) continue;
            int column = vector_index(p) * V;
            if (w) {
                Vec<float, V> c = load_columns(w, p);
#pragma unroll
                for (int i = 0; i < V; i++) from_f32(to_f32(r.e[p].e[i]) * scale * c.e[i], r.e[p].e[i]);
            }
            if (head > 0) {
                if (!same_positions) tables.load_rotations(row, column % head / 2, rotations);
                rotate(r.e[p], rotations);
            }
            if (targets.members) {
                const Target &t = targets.target_of(column);
                *(RowVector *)(t.to + row * t.pitch + (column - t.first) * sizeof(T)) = r.e[p];
            } else {
                store_vector(out, row, p, r.e[p]);
            }
        }
    }
}
