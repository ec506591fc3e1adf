// Elementwise kernels in f32 and bf16, and fallbacks for small shapes that no specialised kernel
// covers.
#define ELEMENT_INDEX(n) \
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; \
    if (i >= (n)) return

template <typename A, typename B> __device__ void cast_element(const A *x, B *out, i64 n) {
    ELEMENT_INDEX(n);
    from_f32(to_f32(x[i]), out[i]);
}
extern "C" __global__ void cast_f32_bf16(const float *x, bf16 *out, i64 n) {
    cast_element(x, out, n);
}
extern "C" __global__ void cast_bf16_f32(const bf16 *x, float *out, i64 n) {
    cast_element(x, out, n);
}
extern "C" __global__ void cast_f32_e4m3(const float *x, e4m3 *out, i64 n) {
    cast_element(x, out, n);
}
extern "C" __global__ void cast_bf16_e4m3(const bf16 *x, e4m3 *out, i64 n) {
    cast_element(x, out, n);
}

// Casts rows of `width` elements by random words. The first one has the index `first` in the whole, unsharded tensor, whose
// rows begin `pitch` elements apart.
template <typename A, typename B>
__device__ void cast_by_word(const A *x, B *out, u32 seed, u32 seed_high, u32 draw, i64 first, i64 width, i64 pitch, i64 n) {
    ELEMENT_INDEX(n);
    u64 element = (u64)(first + i / width * pitch + i % width);
    round_by_word(to_f32(x[i]), rounding_word(element, seed, seed_high, draw), out[i]);
}
extern "C" __global__ void cast_by_word_f32_bf16(const float *x, bf16 *out, u32 seed, u32 seed_high, u32 draw, i64 first,
                                                 i64 width, i64 pitch, i64 n) {
    cast_by_word(x, out, seed, seed_high, draw, first, width, pitch, n);
}
extern "C" __global__ void cast_by_word_f32_e4m3(const float *x, e4m3 *out, u32 seed, u32 seed_high, u32 draw, i64 first,
                                                 i64 width, i64 pitch, i64 n) {
    cast_by_word(x, out, seed, seed_high, draw, first, width, pitch, n);
}
extern "C" __global__ void cast_by_word_bf16_e4m3(const bf16 *x, e4m3 *out, u32 seed, u32 seed_high, u32 draw, i64 first,
                                                  i64 width, i64 pitch, i64 n) {
    cast_by_word(x, out, seed, seed_high, draw, first, width, pitch, n);
}

// `act` selects the function of each element: 0 is the identity, 1 is SiLU, 2 is GELU, 3 is ReLU. A new number
// is the argument of PointwiseFunction where the op is dispatched.
__device__ __forceinline__ float activate(float x, int act) {
    switch (act) {
    case 1: return silu(x);
    case 2: return gelu_tanh(x);
    case 3: return x < 0.0f ? 0.0f : x;
    default: return x;
    }
}
template <typename T> __device__ void bias_act_element(const T *x, const T *b, T *out, int columns, int act, i64 n) {
    ELEMENT_INDEX(n);
    float v = to_f32(x[i]);
    if (b) v += to_f32(b[i % columns]);
    from_f32(activate(v, act), out[i]);
}
extern "C" __global__ void bias_act_f32(const float *x, const float *b, float *out, int columns, int act, i64 n) {
    bias_act_element(x, b, out, columns, act, n);
}
extern "C" __global__ void bias_act_bf16(const bf16 *x, const bf16 *b, bf16 *out, int columns, int act, i64 n) {
    bias_act_element(x, b, out, columns, act, n);
}

template <typename T> __device__ void add_element(const T *x, const T *y, T *out, i64 n) {
    ELEMENT_INDEX(n);
    from_f32(to_f32(x[i]) + to_f32(y[i]), out[i]);
}
extern "C" __global__ void add_f32(const float *x, const float *y, float *out, i64 n) {
    add_element(x, y, out, n);
}
extern "C" __global__ void add_bf16(const bf16 *x, const bf16 *y, bf16 *out, i64 n) {
    add_element(x, y, out, n);
}

template <typename T> __device__ void mul_elements(const T *x, const T *y, T *out, i64 n) {
    constexpr int VECTOR = 8;
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (i + VECTOR <= n && ((u64)x | (u64)y | (u64)out) % (VECTOR * sizeof(T)) == 0) {
        Vec<T, VECTOR> a = *(const Vec<T, VECTOR> *)(x + i), b = *(const Vec<T, VECTOR> *)(y + i);
        for (int j = 0; j < VECTOR; j++) from_f32(to_f32(a.e[j]) * to_f32(b.e[j]), a.e[j]);
        *(Vec<T, VECTOR> *)(out + i) = a;
        return;
    }
    for (i64 j = i; j < i + VECTOR && j < n; j++) from_f32(to_f32(x[j]) * to_f32(y[j]), out[j]);
}
extern "C" __global__ void mul_f32(const float *x, const float *y, float *out, i64 n) {
    mul_elements(x, y, out, n);
}
extern "C" __global__ void mul_bf16(const bf16 *x, const bf16 *y, bf16 *out, i64 n) {
    mul_elements(x, y, out, n);
}

// Copies the row of the table that each id names. A rank may hold `rows` of all `table_rows` rows, from `first_row` on;
// ids of other ranks give zeros. An id that names no row yields NaN; the host refuses such ids where they are an
// input.
template <typename T> __device__ void embed_element(const float *ids, const T *table, float *out, int rows, int first_row, int table_rows, int width, i64 n) {
    ELEMENT_INDEX(n);
    float id = ids[i / width];
    if (!(id >= 0.0f && id < (float)table_rows && id == truncf(id))) {
        out[i] = __int_as_float(0x7fffffff);
        return;
    }
    int row = (int)id - first_row;
    out[i] = row >= 0 && row < rows ? to_f32(table[(i64)row * width + i % width]) : 0.0f;
}
extern "C" __global__ void embed_f32(const float *ids, const float *table, float *out, int rows, int first_row, int table_rows, int width, i64 n) {
    embed_element(ids, table, out, rows, first_row, table_rows, width, n);
}
extern "C" __global__ void embed_bf16(const float *ids, const bf16 *table, float *out, int rows, int first_row, int table_rows, int width, i64 n) {
    embed_element(ids, table, out, rows, first_row, table_rows, width, n);
}

// Adds the embedding [frames, width] to consecutive modulation tables of `table_columns` columns
// each. The embedding repeats along the columns if it is narrower than a table; `table_elements` is
// the number of output elements per table.
extern "C" __global__ void modulation(const float *tables, const float *embedding, float *out, int table_columns, int width, int table_elements, i64 n) {
    ELEMENT_INDEX(n);
    int table = (int)(i / table_elements), element = (int)(i % table_elements), column = element % table_columns;
    out[i] = tables[(i64)table * table_columns + column] + embedding[(i64)(element / table_columns) * width + column % width];
}

// A GEMM of at most 8 rows in f32: one warp computes one output column, so that weights are read
// once. A block computes as many columns as it has warps.
template <int ROWS> __device__ void small_gemm_rows(const float *x, const float *w, const float *b, float *out, int k, int m, int act) {
    int column = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (column >= m) return;
    const float *row = w + (i64)column * k;
    float s[ROWS];
    for (int r = 0; r < ROWS; r++) s[r] = 0.0f;
    if (k % 4 == 0) {
        for (int j = lane * 4; j < k; j += 128) {
            float4 v = *(const float4 *)(row + j);
            for (int r = 0; r < ROWS; r++) {
                float4 a = *(const float4 *)(x + (i64)r * k + j);
                s[r] = fmaf(a.x, v.x, fmaf(a.y, v.y, fmaf(a.z, v.z, fmaf(a.w, v.w, s[r]))));
            }
        }
    } else {
        for (int j = lane; j < k; j += 32)
            for (int r = 0; r < ROWS; r++) s[r] = fmaf(x[(i64)r * k + j], row[j], s[r]);
    }
    for (int r = 0; r < ROWS; r++) {
        float v = warp_sum(s[r]);
        if (lane == 0) out[(i64)r * m + column] = activate(b ? v + b[column] : v, act);
    }
}
extern "C" __global__ void small_gemm(const float *x, const float *w, const float *b, float *out, int rows, int k, int m, int act) {
    switch (rows) {
    case 1: return small_gemm_rows<1>(x, w, b, out, k, m, act);
    case 2: return small_gemm_rows<2>(x, w, b, out, k, m, act);
    case 3: return small_gemm_rows<3>(x, w, b, out, k, m, act);
    case 4: return small_gemm_rows<4>(x, w, b, out, k, m, act);
    case 5: return small_gemm_rows<5>(x, w, b, out, k, m, act);
    case 6: return small_gemm_rows<6>(x, w, b, out, k, m, act);
    case 7: return small_gemm_rows<7>(x, w, b, out, k, m, act);
    default: return small_gemm_rows<8>(x, w, b, out, k, m, act);
    }
}

// Multiplies ROWS rows, `pitch` elements apart, with one row of weights per warp, so that weights are read once. Sums are f32.
// The pitch is a multiple of k.
template <typename T, int ROWS> __device__ __forceinline__ void multiply_pitched_rows(const T *x, i64 pitch, const T *w, int k, float (&sum)[ROWS]) {
    constexpr int N = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
    if (k % N == 0) {
#pragma unroll 4
        for (int j = lane * N; j < k; j += 32 * N) {
            Vec<T, N> v = *(const Vec<T, N> *)(w + j);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Vec<T, N> a = *(const Vec<T, N> *)(x + r * pitch + j);
#pragma unroll
                for (int i = 0; i < N; i++) sum[r] = fmaf(to_f32(a.e[i]), to_f32(v.e[i]), sum[r]);
            }
        }
    } else {
        for (int j = lane; j < k; j += 32)
            for (int r = 0; r < ROWS; r++) sum[r] = fmaf(to_f32(x[r * pitch + j]), to_f32(w[j]), sum[r]);
    }
    for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}
template <typename T, int ROWS> __device__ __forceinline__ void multiply_rows(const T *x, const T *w, int k, float (&sum)[ROWS]) {
    multiply_pitched_rows<T, ROWS>(x, k, w, k, sum);
}
// Loads weights that no other thread reads, past the L1 cache.
__device__ __forceinline__ uint4 load_once(const void *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

constexpr int ROW_COLUMNS = 2, ROW_BLOCK = 256;

// Multiplies one row with ROW_COLUMNS rows of weights, by all ROW_BLOCK threads of a block; a null row gives 0.
// Every thread gets the sums. A block for few columns keeps more loads in flight than a warp for each, and the last
// blocks of a launch end sooner. The order of the sum depends on k alone.
__device__ void multiply_row(const bf16 *x, const bf16 *const (&w)[ROW_COLUMNS], int k, float (&sum)[ROW_COLUMNS]) {
    constexpr int N = 8, WARPS = ROW_BLOCK / 32;
    __shared__ float by_warp[WARPS][ROW_COLUMNS];
#pragma unroll
    for (int c = 0; c < ROW_COLUMNS; c++) sum[c] = 0.0f;
    if (k % N == 0) {
#pragma unroll 2
        for (int j = threadIdx.x * N; j < k; j += ROW_BLOCK * N) {
            union {
                uint4 word;
                Vec<bf16, N> v;
            } weights[ROW_COLUMNS];
#pragma unroll
            for (int c = 0; c < ROW_COLUMNS; c++) weights[c].word = w[c] ? load_once(w[c] + j) : make_uint4(0, 0, 0, 0);
            Vec<bf16, N> a = *(const Vec<bf16, N> *)(x + j);
#pragma unroll
            for (int c = 0; c < ROW_COLUMNS; c++)
#pragma unroll
                for (int i = 0; i < N; i++) sum[c] = fmaf(to_f32(a.e[i]), to_f32(weights[c].v.e[i]), sum[c]);
        }
    } else {
        for (int j = threadIdx.x; j < k; j += ROW_BLOCK)
#pragma unroll
            for (int c = 0; c < ROW_COLUMNS; c++) sum[c] = fmaf(to_f32(x[j]), w[c] ? to_f32(w[c][j]) : 0.0f, sum[c]);
    }
#pragma unroll
    for (int c = 0; c < ROW_COLUMNS; c++) {
        float part = warp_sum(sum[c]);
        if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32][c] = part;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < ROW_COLUMNS; c++) {
        sum[c] = by_warp[0][c];
        for (int i = 1; i < WARPS; i++) sum[c] += by_warp[i][c];
    }
}

// Writes the cosines first, then the sines.
extern "C" __global__ void time_embed(const float *t, float *out, int width, i64 n) {
    ELEMENT_INDEX(n);
    int half = width / 2, j = (int)(i % width);
    double angle = (double)t[i / width] * pow(10000.0, -(double)(j % half) / half);
    out[i] = (float)(j < half ? cos(angle) : sin(angle));
}

// Writes this call's RoPE table of frames: (cos, sin) of (start + stride · frame) at `pairs`
// frequencies.
extern "C" __global__ void rope_frame_table(const i64 *start, int stride, int pairs, float2 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double position = (double)*start + (double)stride * (i / pairs);
    double angle = position * pow(10000.0, -(double)(i % pairs) / pairs);
    out[i] = make_float2((float)cos(angle), (float)sin(angle));
}

// The logarithm of m / 2^24, and the sine and cosine of a fraction of a full turn. They use f32
// additions and multiplications only, so that the bits equal the host's.
__device__ float ln_unit(u32 m) {
    u32 bits = __float_as_uint((float)(int)m);
    int exponent = (int)(bits - 0x3f3504f3u) >> 23;
    float f = __uint_as_float(bits - ((u32)exponent << 23)) - 1.0f;
    float s = f / (2.0f + f), z = s * s;
    float tail = z * (0.6666667f + z * (0.4f + z * (0.2857143f + z * 0.22222222f)));
    return (float)(exponent - 24) * 0.6931472f + (2.0f * s + s * tail);
}
__device__ void box_muller(u32 u, u32 v, float &first, float &second) {
    float radius = sqrtf(-2.0f * ln_unit((u >> 8) + 1));
    u32 quarter = (v + 0x20000000u) >> 30;
    float x = (float)(int)(v - (quarter << 30)) * (6.2831855f / 4294967296.0f);
    float z = x * x;
    float s = x + x * z * (-0.16666667f + z * (8.333334e-3f + z * (-1.984127e-4f + z * 2.755732e-6f)));
    float c = 1.0f + z * (-0.5f + z * (4.1666666e-2f + z * (-1.3888889e-3f + z * 2.4801588e-5f)));
    float a = quarter & 1 ? c : s, b = quarter & 1 ? -s : c;
    if (quarter & 2) {
        a = -a;
        b = -b;
    }
    first = radius * b;
    second = radius * a;
}
// Computes (1 − sigma) · x + sigma · normal. The normal is drawn for the element's index in the
// whole, unsharded tensor.
extern "C" __global__ void renoise(const float *x, const float *sigma, const i64 *seed, const i64 *chunk, const i64 *draw,
                                   i64 first, float *out, i64 n) {
    ELEMENT_INDEX(n);
    u64 element = (u64)(first + i), block = element / 4;
    uint4 w = philox((u32)block, (u32)(block >> 32), (u32)*draw, (u32)*chunk, (u32)(u64)*seed, (u32)((u64)*seed >> 32));
    float lane[4];
    box_muller(w.x, w.y, lane[0], lane[1]);
    box_muller(w.z, w.w, lane[2], lane[3]);
    float s = *sigma;
    out[i] = (1.0f - s) * x[i] + s * lane[element % 4];
}
extern "C" __global__ void to_x0(const float *x, const float *flow, const float *sigma, float *out, i64 n) {
    ELEMENT_INDEX(n);
    out[i] = (float)((double)x[i] - (double)*sigma * (double)flow[i]);
}
extern "C" __global__ void guide(const float *x, const float *y, double scale, float *out, i64 n) {
    ELEMENT_INDEX(n);
    double from = y[i];
    out[i] = (float)(from + scale * ((double)x[i] - from));
}

// Copies rows to a destination whose row index is read from device memory. Rows are copied in words
// of W; each thread copies WORDS_PER_THREAD words.
constexpr int WORDS_PER_THREAD = 4;
template <typename W> __device__ void put_rows(const W *from, W *to, const i64 *row, i64 words_per_row, i64 n) {
    i64 first = (i64)blockIdx.x * blockDim.x * WORDS_PER_THREAD + threadIdx.x;
    W word[WORDS_PER_THREAD];
#pragma unroll
    for (int k = 0; k < WORDS_PER_THREAD; k++) {
        i64 i = first + k * blockDim.x;
        if (i < n) word[k] = from[i];
    }
    to += (row ? *row : 0) * words_per_row;
#pragma unroll
    for (int k = 0; k < WORDS_PER_THREAD; k++) {
        i64 i = first + k * blockDim.x;
        if (i < n) to[i] = word[k];
    }
}
extern "C" __global__ void put_rows_16(const uint4 *from, uint4 *to, const i64 *row, i64 words, i64 n) {
    put_rows(from, to, row, words, n);
}
extern "C" __global__ void put_rows_4(const u32 *from, u32 *to, const i64 *row, i64 words, i64 n) {
    put_rows(from, to, row, words, n);
}
extern "C" __global__ void put_rows_2(const u16 *from, u16 *to, const i64 *row, i64 words, i64 n) {
    put_rows(from, to, row, words, n);
}

// Converts between pixels [t, h, w, 3] and latent tokens in runs of `run` = stride · 3 elements.
// `inverse` selects the decoder's direction, which also clamps.
extern "C" __global__ void space_to_depth(const float *x, float *out, int height, int width, int st, int sh, int sw, int inverse, i64 n) {
    ELEMENT_INDEX(n);
    // i is the element's index in token order: (frame, h, w, ph, pw, dt, dy, run).
    int run = sw * 3;
    i64 q = i;
    int e = (int)(q % run);
    q /= run;
    int dy = (int)(q % sh);
    q /= sh;
    int dt = (int)(q % st);
    q /= st;
    int pw = (int)(q % 2);
    q /= 2;
    int ph = (int)(q % 2);
    q /= 2;
    int w = (int)(q % (width / 2));
    q /= width / 2;
    int h = (int)(q % (height / 2));
    q /= height / 2;
    i64 row = (q * st + dt) * (i64)(height * sh) + (2 * h + ph) * sh + dy;
    i64 p = row * ((i64)width * sw * 3) + (2 * w + pw) * sw * 3 + e;
    if (inverse) out[p] = fminf(fmaxf(x[i], -1.0f), 1.0f);
    else out[i] = x[p];
}

// Combines attention over splits of the keys: `splits` partial outputs are weighted by the
// exponentials of their log-sum-exps. `bias` is added to the log-sum-exp of the split
// `biased_split`.
template <typename T> __device__ void merge_element(const T *o, const float *lse, const float *bias, int biased_split, int splits,
                                                int heads, int head, i64 rows, T *out) {
    ELEMENT_INDEX(rows * heads * head);
    i64 row = i / (heads * head);
    int h = (int)(i / head % heads);
    float largest = -INFINITY, sum = 0.0f, acc = 0.0f;
    for (int p = 0; p < splits; p++) {
        float l = lse[((i64)p * heads + h) * rows + row] + (p == biased_split ? *bias : 0.0f);
        largest = fmaxf(largest, l);
    }
    for (int p = 0; p < splits; p++) {
        float l = lse[((i64)p * heads + h) * rows + row] + (p == biased_split ? *bias : 0.0f);
        float e = expf(l - largest);
        sum += e;
        acc = fmaf(e, to_f32(o[(i64)p * rows * heads * head + i]), acc);
    }
    from_f32(acc / sum, out[i]);
}
extern "C" __global__ void merge_bf16(const bf16 *o, const float *lse, const float *bias, int biased_split, int splits,
                                      int heads, int head, i64 rows, bf16 *out) {
    merge_element(o, lse, bias, biased_split, splits, heads, head, rows, out);
}

// Fallback attention for shapes that neither cuDNN nor the sm90 kernel supports: one warp handles
// one query of one head and iterates over the keys with an online softmax.
template <typename T> __device__ void attention_rows(const T *q, const T *k, const T *v, const float *bias, int bias_begin, int bias_end,
                                                   T *out, int queries, int keys, int heads, int head, float scale) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    i64 item = (i64)blockIdx.x * warps + warp;
    if (item >= (i64)queries * heads) return;
    i64 row = item / heads;
    int h = (int)(item % heads), width = heads * head;
    float *query = shared + warp * head;
    for (int d = lane; d < head; d += 32) query[d] = to_f32(q[row * width + h * head + d]) * scale;
    __syncwarp();
    float running_max = -INFINITY, sum = 0.0f, acc[16];
    for (int d = 0; d < 16; d++) acc[d] = 0.0f;
    for (int base = 0; base < keys; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key < keys) {
            const T *kk = k + (i64)key * width + h * head;
            s = 0.0f;
            for (int d = 0; d < head; d++) s = fmaf(query[d], to_f32(kk[d]), s);
            if (bias && key >= bias_begin && key < bias_end) s += *bias;
        }
        float new_max = fmaxf(running_max, warp_max(s)), rescale = expf(running_max - new_max), p = key < keys ? expf(s - new_max) : 0.0f;
        sum = sum * rescale + warp_sum(p);
        running_max = new_max;
        for (int c = 0; c * 32 < head; c++) acc[c] *= rescale;
        int count = min(32, keys - base);
        for (int j = 0; j < count; j++) {
            float pj = __shfl_sync(0xffffffffu, p, j);
            const T *vv = v + (i64)(base + j) * width + h * head;
            for (int c = 0; c * 32 < head; c++) {
                int d = c * 32 + lane;
                if (d < head) acc[c] = fmaf(pj, to_f32(vv[d]), acc[c]);
            }
        }
    }
    for (int c = 0; c * 32 < head; c++) {
        int d = c * 32 + lane;
        if (d < head) from_f32(acc[c] / sum, out[row * width + h * head + d]);
    }
}
extern "C" __global__ void attention_f32(const float *q, const float *k, const float *v, const float *bias, int bias_begin, int bias_end,
                                         float *out, int queries, int keys, int heads, int head, float scale) {
    attention_rows(q, k, v, bias, bias_begin, bias_end, out, queries, keys, heads, head, scale);
}
extern "C" __global__ void attention_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const float *bias, int bias_begin, int bias_end,
                                          bf16 *out, int queries, int keys, int heads, int head, float scale) {
    attention_rows(q, k, v, bias, bias_begin, bias_end, out, queries, keys, heads, head, scale);
}

// Computes the softmax of each row of a matrix.
template <typename T> __device__ void softmax_row(const T *x, T *out, int width) {
    const T *row = x + (i64)blockIdx.x * width;
    float largest = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += 256) largest = fmaxf(largest, to_f32(row[i]));
    largest = block_max<256>(largest);
    for (int i = threadIdx.x; i < width; i += 256) sum += expf(to_f32(row[i]) - largest);
    sum = block_sum<256>(sum);
    for (int i = threadIdx.x; i < width; i += 256) from_f32(expf(to_f32(row[i]) - largest) / sum, out[(i64)blockIdx.x * width + i]);
}
extern "C" __global__ void softmax_f32(const float *x, float *out, int width) {
    softmax_row(x, out, width);
}
extern "C" __global__ void softmax_bf16(const bf16 *x, bf16 *out, int width) {
    softmax_row(x, out, width);
}

// Computes scale · x · y for each matrix of a batch: x is [.., n, k], y is [.., k, m] or, if
// transposed, [.., m, k].
extern "C" __global__ void bmm(const float *x, const float *y, float *out, int n, int k, int m, int transposed, float scale,
                               i64 count) {
    ELEMENT_INDEX(count);
    i64 batch = i / ((i64)n * m);
    int row = (int)(i / m % n), column = (int)(i % m);
    const float *a = x + (batch * n + row) * k, *b = y + batch * k * m;
    float s = 0.0f;
    for (int j = 0; j < k; j++) s = fmaf(a[j], transposed ? b[(i64)column * k + j] : b[(i64)j * m + column], s);
    out[i] = scale * s;
}

// Never terminates: a drill launches it before a program to make a rank hang.
extern "C" __global__ void spin() {
    for (;;) __nanosleep(1000);
}
