// RMS norms and rotary embedding of rows.

// Where the turns (cos, sin) of a row's pairs lie: those of frames were made for this call.
struct Turns {
    const float2 *by_frame, *by_row, *by_column;
    int head, first_row, high, wide, moves;

    // Those of a piece, the first of whose pairs is a head's `pair`-th.
    __device__ __forceinline__ void of(int row, int pair, float2 (&turns)[V / 2 + 1]) const {
        int token = moves ? first_row + row : 0;
        int side = head / 6, first = head / 2 - 2 * side;
        const float2 *of_frame = by_frame + token / (high * wide) * first;
        const float2 *of_row = by_row + token / wide % high * side - first;
        const float2 *of_column = by_column + token % wide * side - first - side;
#pragma unroll
        for (int i = 0; i < V / 2; i++) {
            if (pair == head / 2) pair = 0;
            const float2 *from = pair < first ? of_frame : pair < first + side ? of_row : of_column;
            turns[i] = from[pair++];
        }
    }
};

__device__ __forceinline__ void turn(Piece &x, const float2 (&turns)[V / 2 + 1]) {
#pragma unroll
    for (int i = 0; i + 1 < V; i += 2) {
        float a = up(x.e[i]), b = up(x.e[i + 1]);
        float2 t = turns[i / 2];
        down(a * t.x - b * t.y, x.e[i]);
        down(a * t.y + b * t.x, x.e[i + 1]);
    }
}

// RMS norm (w not null: over this row, or with sums of squares that ranks brought together), then rotary embedding
// (head > 0), of rows `pitch` elements apart, to row `*to_row` + own of out, or column by column to where members of a group want it.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_rope(int rows, const T *x, int pitch, const float *w, const float *sums, int sum_columns, int sum_column, float whole, float eps,
             T *out, const i64 *to_row, int head, const float2 *by_frame, const float2 *by_row,
             const float2 *by_column, int first_row, int high, int wide, int moves, const __grid_constant__ Targets targets) {
    if (targets.closed()) return;
    if (to_row) out += *to_row * WIDTH;
    Turns turns = {by_frame, by_row, by_column, head, first_row, high, wide, moves};
    // Where a thread's pieces lie alike in their heads, one set of turns is all that a row needs.
    bool alike = head > 0 && THREADS * V % head == 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Row r;
        fetch(r, x, row, pitch);
        float2 here_turns[V / 2 + 1];
        if (alike) turns.of(row, threadIdx.x * V % head / 2, here_turns);
        float by = 1.0f;
        if (w) by = rsqrtf((sums ? sums[(i64)row * sum_columns + sum_column] : square_sum(r)) / whole + eps);
#pragma unroll
        for (int p = 0; p < PER; p++) {
            if (!here(p)) continue;
            int column = vector_of(p) * V;
            if (w) {
                Vec<float, V> c = columns(w, p);
#pragma unroll
                for (int i = 0; i < V; i++) down(up(r.e[p].e[i]) * by * c.e[i], r.e[p].e[i]);
            }
            if (head > 0) {
                if (!alike) turns.of(row, column % head / 2, here_turns);
                turn(r.e[p], here_turns);
            }
            if (targets.members) {
                const Target &t = targets.with(column);
                *(Piece *)(t.to + row * t.pitch + (column - t.first) * sizeof(T)) = r.e[p];
            } else {
                store(out, row, p, r.e[p]);
            }
        }
    }
}
