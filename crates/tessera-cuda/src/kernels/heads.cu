// Kernels that work on the columns of each head: the choice and the joining of columns, and a matmul per head.

// Joins some words of each head of x, from `first` on, with those of the same head of y, which may have none.
template <typename W> __device__ void join_words(const W *x, const W *y, W *out, int x_pitch, int first, int x_words, int y_words, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    int word = (int)(i % (x_words + y_words));
    i64 head = i / (x_words + y_words);
    out[i] = word < x_words ? x[head * x_pitch + first + word] : y[head * y_words + word - x_words];
}
extern "C" __global__ void join_heads_16(const uint4 *x, const uint4 *y, uint4 *out, int x_pitch, int first, int x_words, int y_words, i64 n) {
    join_words(x, y, out, x_pitch, first, x_words, y_words, n);
}
extern "C" __global__ void join_heads_4(const u32 *x, const u32 *y, u32 *out, int x_pitch, int first, int x_words, int y_words, i64 n) {
    join_words(x, y, out, x_pitch, first, x_words, y_words, n);
}
extern "C" __global__ void join_heads_2(const u16 *x, const u16 *y, u16 *out, int x_pitch, int first, int x_words, int y_words, i64 n) {
    join_words(x, y, out, x_pitch, first, x_words, y_words, n);
}

// The rows of x that a block multiplies, and its warps.
constexpr int HEAD_TILE = 8, HEAD_WARPS = 8;

// A head of a block's rows, and the head's rows of weights, w [k or columns, width].
template <typename T> struct HeadTile {
    const T *x, *w;
    T *out;
    i64 x_pitch, out_pitch;
    int count, block;  // rows of the tile, and the block's place among those of the head
    // `k` and `columns` are those of a head of x and of the result.
    __device__ __forceinline__ HeadTile(const T *all_x, const T *all_w, T *all_out, int n, int heads, int head_rows, int first, int width, int k, int columns, int blocks) {
        int head = blockIdx.x / blocks % heads, tile = blockIdx.x / blocks / heads;
        block = blockIdx.x % blocks, count = min(HEAD_TILE, n - tile * HEAD_TILE);
        x_pitch = (i64)heads * k, out_pitch = (i64)heads * columns;
        x = all_x + (i64)tile * HEAD_TILE * x_pitch + (i64)head * k, out = all_out + (i64)tile * HEAD_TILE * out_pitch + (i64)head * columns;
        w = all_w + ((i64)head * head_rows + first) * width;
    }
};

// Multiplies each head of x with its rows of weights: a warp computes a column of a head, so that weights are read once.
template <typename T, int ROWS> __device__ __forceinline__ void multiply_head_rows(const HeadTile<T> &at, const T *w, int row, int column, int k) {
    float sum[ROWS];
    multiply_pitched_rows<T, ROWS>(at.x + row * at.x_pitch, at.x_pitch, w, k, sum);
    for (int r = 0; r < ROWS; r++)
        if (threadIdx.x % 32 == 0) from_f32(sum[r], at.out[(row + r) * at.out_pitch + column]);
}
template <typename T> __device__ void multiply_heads(const T *x, const T *w, T *out, int n, int heads, int head_rows, int first, int rows, int width) {
    let_successor_begin();
    wait_for_predecessor();
    HeadTile<T> at(x, w, out, n, heads, head_rows, first, width, width, rows, div_up(rows, HEAD_WARPS));
    int column = at.block * HEAD_WARPS + threadIdx.x / 32, row = 0;
    if (column >= rows) return;
    w = at.w + (i64)column * width;
    if (at.count == HEAD_TILE) return multiply_head_rows<T, HEAD_TILE>(at, w, 0, column, width);
    if (at.count >= 4) multiply_head_rows<T, 4>(at, w, 0, column, width), row = 4;
    for (; row < at.count; row++) multiply_head_rows<T, 1>(at, w, row, column, width);
}
extern "C" __global__ void head_matmul_f32(const float *x, const float *w, float *out, int n, int heads, int head_rows, int first, int rows, int width) {
    multiply_heads(x, w, out, n, heads, head_rows, first, rows, width);
}
extern "C" __global__ void head_matmul_bf16(const bf16 *x, const bf16 *w, bf16 *out, int n, int heads, int head_rows, int first, int rows, int width) {
    multiply_heads(x, w, out, n, heads, head_rows, first, rows, width);
}

// Multiplies each head of x with the columns of its weights. A warp adds every HEAD_WARPS-th row of weights, N columns
// per lane, and the sums of the warps are added in order.
template <typename T, int N, int ROWS> __device__ __forceinline__ void multiply_head_columns(const HeadTile<T> &at, float *partial, int row, int k, int width) {
    int lane = threadIdx.x % 32, begin = at.block * 32 * N, column = begin + lane * N;
    float sum[ROWS][N];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < N; e++) sum[r][e] = 0.0f;
    if (column < width) {
#pragma unroll 4
        for (int j = threadIdx.x / 32; j < k; j += HEAD_WARPS) {
            Vec<T, N> weights = *(const Vec<T, N> *)(at.w + (i64)j * width + column);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float x = to_f32(at.x[(row + r) * at.x_pitch + j]);
#pragma unroll
                for (int e = 0; e < N; e++) sum[r][e] = fmaf(x, to_f32(weights.e[e]), sum[r][e]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < N; e++) partial[threadIdx.x * N + e] = sum[r][e];
        __syncthreads();
        int own = threadIdx.x;
        if (own >= 32 * N || begin + own >= width) continue;
        float y = 0.0f;
        for (int g = 0; g < HEAD_WARPS; g++) y += partial[g * 32 * N + own];
        from_f32(y, at.out[(row + r) * at.out_pitch + begin + own]);
    }
}
template <typename T, int N> __device__ __forceinline__ void multiply_transposed_tile(const T *x, const T *w, T *out, float *partial, int n, int heads, int head_rows, int first, int rows, int width) {
    HeadTile<T> at(x, w, out, n, heads, head_rows, first, width, rows, width, div_up(width, 32 * N));
    int row = 0;
    if (at.count == HEAD_TILE) return multiply_head_columns<T, N, HEAD_TILE>(at, partial, 0, rows, width);
    if (at.count >= 4) multiply_head_columns<T, N, 4>(at, partial, 0, rows, width), row = 4;
    for (; row < at.count; row++) multiply_head_columns<T, N, 1>(at, partial, row, rows, width);
}
template <typename T> __device__ void multiply_transposed_heads(const T *x, const T *w, T *out, int n, int heads, int head_rows, int first, int rows, int width) {
    constexpr int N = 16 / sizeof(T);
    __shared__ float partial[HEAD_WARPS * 32 * N];
    let_successor_begin();
    wait_for_predecessor();
    if (width % N == 0) multiply_transposed_tile<T, N>(x, w, out, partial, n, heads, head_rows, first, rows, width);
    else multiply_transposed_tile<T, 1>(x, w, out, partial, n, heads, head_rows, first, rows, width);
}
extern "C" __global__ void head_matmul_transposed_f32(const float *x, const float *w, float *out, int n, int heads, int head_rows, int first, int rows, int width) {
    multiply_transposed_heads(x, w, out, n, heads, head_rows, first, rows, width);
}
extern "C" __global__ void head_matmul_transposed_bf16(const bf16 *x, const bf16 *w, bf16 *out, int n, int heads, int head_rows, int first, int rows, int width) {
    multiply_transposed_heads(x, w, out, n, heads, head_rows, first, rows, width);
}
