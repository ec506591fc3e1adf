// The sum of the parts of attention over pages, for any head size.

// Adds the parts of one head of one row per block, in order. A head without weights attends to nothing.
template <typename T> __device__ void merge_parts(const float *sums, const float *start, T *out, const PagedShape &s) {
    let_successor_begin();
    wait_for_predecessor();
    int row = blockIdx.x / s.heads, sequence = row / s.rows_per_sequence;
    float first = start[sequence];
    int parts = first >= 0.0f ? min(s.parts, ((int)first + row % s.rows_per_sequence) / s.part_positions + 1) : 0;
    sums += (i64)blockIdx.x * s.parts * (s.value_dim + 2), out += (i64)blockIdx.x * s.value_dim;
    float top = -INFINITY;
    for (int i = 0; i < parts; i++) top = fmaxf(top, sums[(i64)i * (s.value_dim + 2) + s.value_dim]);
    for (int c = threadIdx.x; c < s.value_dim; c += blockDim.x) {
        float y = 0.0f, total = 0.0f;
        for (int i = 0; i < parts; i++) {
            const float *own = sums + (i64)i * (s.value_dim + 2);
            float weight = own[s.value_dim + 1] == 0.0f ? 0.0f : expf(own[s.value_dim] - top);
            if (weight == 0.0f) continue;
            y = fmaf(weight, own[c], y), total = fmaf(weight, own[s.value_dim + 1], total);
        }
        from_f32(total == 0.0f ? 0.0f : y / total, out[c]);
    }
}
extern "C" __global__ void merge_parts_f32(const float *sums, const float *start, float *out, const PagedShape shape) {
    merge_parts(sums, start, out, shape);
}
extern "C" __global__ void merge_parts_bf16(const float *sums, const float *start, bf16 *out, const PagedShape shape) {
    merge_parts(sums, start, out, shape);
}
