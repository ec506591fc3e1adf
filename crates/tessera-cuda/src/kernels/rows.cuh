// Rows of the residual stream, one a block at a time, in registers as they lie in memory: one read and one write.
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
typedef Vec<T, V> Piece;

// This thread's pieces of a row: threadIdx.x, + THREADS, …
struct Row {
    Piece e[PER];
};

__device__ __forceinline__ int vector_of(int p) {
    return p * THREADS + threadIdx.x;
}
__device__ __forceinline__ bool here(int p) {
    return VECTORS % THREADS == 0 || vector_of(p) < VECTORS;
}

// Rows are `pitch` elements apart.
__device__ __forceinline__ void fetch(Row &r, const T *from, i64 row, int pitch = WIDTH) {
    const Piece *pieces = (const Piece *)(from + row * pitch);
#pragma unroll
    for (int p = 0; p < PER; p++) {
        if (here(p)) r.e[p] = pieces[vector_of(p)];
    }
}

__device__ __forceinline__ void store(T *to, i64 row, int p, const Piece &x) {
    ((Piece *)(to + row * WIDTH))[vector_of(p)] = x;
}

// Columns of a vector of f32, as the row's elements lie in this thread.
__device__ __forceinline__ Vec<float, V> columns(const float *from, int p) {
    return ((const Vec<float, V> *)from)[vector_of(p)];
}

// f(element) for every element of this thread.
template <typename F> __device__ __forceinline__ void each(const Row &r, F f) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
        if (!here(p)) continue;
#pragma unroll
        for (int i = 0; i < V; i++) f(up(r.e[p].e[i]));
    }
}

__device__ __forceinline__ float square_sum(const Row &r) {
    float s = 0.0f;
    each(r, [&](float x) { s = fmaf(x, x, s); });
    return block_sum<THREADS>(s);
}
