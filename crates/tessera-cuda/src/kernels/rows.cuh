// Whole rows of the residual stream. A block keeps one row at a time in registers, so that the row
// is read and written once.
//
// The source is compiled for one width: WIDTH elements of T = BF16 ? bf16 : float, in vectors of
// ROW_VECTOR elements, with ROW_THREADS threads per row. A row's bits depend on that row alone.
#if BF16
typedef bf16 T;
#else
typedef float T;
#endif
constexpr int V = ROW_VECTOR, THREADS = ROW_THREADS;
constexpr int VECTORS = WIDTH / V;
constexpr int VECTORS_PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
typedef Vec<T, V> RowVector;

// This thread's vectors of a row: numbers threadIdx.x, threadIdx.x + THREADS, …
struct Row {
    RowVector e[VECTORS_PER_THREAD];
};

__device__ __forceinline__ int vector_index(int p) {
    return p * THREADS + threadIdx.x;
}
__device__ __forceinline__ bool in_row(int p) {
    return VECTORS % THREADS == 0 || vector_index(p) < VECTORS;
}

// Loads a row; rows are `pitch` elements apart.
__device__ __forceinline__ void load_row(Row &r, const T *from, i64 row, int pitch = WIDTH) {
    const RowVector *vectors = (const RowVector *)(from + row * pitch);
#pragma unroll
    for (int p = 0; p < VECTORS_PER_THREAD; p++) {
        if (in_row(p)) r.e[p] = vectors[vector_index(p)];
    }
}

__device__ __forceinline__ void store_vector(T *to, i64 row, int p, const RowVector &x) {
    ((RowVector *)(to + row * WIDTH))[vector_index(p)] = x;
}

// Loads the f32 columns that match this thread's vector `p` of a row.
__device__ __forceinline__ Vec<float, V> load_columns(const float *from, int p) {
    return ((const Vec<float, V> *)from)[vector_index(p)];
}

// Calls f(element) for every element of this thread.
template <typename F> __device__ __forceinline__ void for_each_element(const Row &r, F f) {
#pragma unroll
    for (int p = 0; p < VECTORS_PER_THREAD; p++) {
        if (!in_row(p)) continue;
#pragma unroll
        for (int i = 0; i < V; i++) f(to_f32(r.e[p].e[i]));
    }
}

__device__ __forceinline__ float square_sum(const Row &r) {
    float s = 0.0f;
    for_each_element(r, [&](float x) { s = fmaf(x, x, s); });
    return block_sum<THREADS>(s);
}
