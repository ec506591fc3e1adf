// Kernels that work on elements, in f32 and bf16: everything small, and everything that no other kernel took along.
#define AT(n) \
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; \
    if (i >= (n)) return

template <typename A, typename B> __device__ void cast_one(const A *x, B *out, i64 n) {
    AT(n);
    down(up(x[i]), out[i]);
}
extern "C" __global__ void cast_f32_bf16(const float *x, bf16 *out, i64 n) {
    cast_one(x, out, n);
}
extern "C" __global__ void cast_bf16_f32(const bf16 *x, float *out, i64 n) {
    cast_one(x, out, n);
}
extern "C" __global__ void cast_f32_e4m3(const float *x, e4m3 *out, i64 n) {
    cast_one(x, out, n);
}

// act: 0 none, 1 silu, 2 gelu.
__device__ __forceinline__ float act_of(float x, int act) {
    return act == 1 ? silu_of(x) : (act == 2 ? gelu_of(x) : x);
}
template <typename T> __device__ void bias_act_one(const T *x, const T *b, T *out, int columns, int act, i64 n) {
    AT(n);
    float v = up(x[i]);
    if (b) v += up(b[i % columns]);
    down(act_of(v, act), out[i]);
}
extern "C" __global__ void bias_act_f32(const float *x, const float *b, float *out, int columns, int act, i64 n) {
    bias_act_one(x, b, out, columns, act, n);
}
extern "C" __global__ void bias_act_bf16(const bf16 *x, const bf16 *b, bf16 *out, int columns, int act, i64 n) {
    bias_act_one(x, b, out, columns, act, n);
}

template <typename T> __device__ void add_one(const T *x, const T *y, T *out, i64 n) {
    AT(n);
    down(up(x[i]) + up(y[i]), out[i]);
}
extern "C" __global__ void add_f32(const float *x, const float *y, float *out, i64 n) {
    add_one(x, y, out, n);
}
extern "C" __global__ void add_bf16(const bf16 *x, const bf16 *y, bf16 *out, i64 n) {
    add_one(x, y, out, n);
}

// Tables [wide] one after another, each plus embedding [frames, width], repeated where it is narrower than a table; `each` elements of
// out a table.
extern "C" __global__ void modulation(const float *tables, const float *e, float *out, int wide, int width, int each, i64 n) {
    AT(n);
    int table = (int)(i / each), at = (int)(i % each), column = at % wide;
    out[i] = tables[(i64)table * wide + column] + e[(i64)(at / wide) * width + column % width];
}

// A product of few rows, f32: one warp an output column, weights read once. Columns by the block's warps.
template <int ROWS> __device__ void few_rows_of(const float *x, const float *w, const float *b, float *out, int k, int m, int act) {
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
        if (lane == 0) out[(i64)r * m + column] = act_of(b ? v + b[column] : v, act);
    }
}
extern "C" __global__ void few_rows(const float *x, const float *w, const float *b, float *out, int rows, int k, int m, int act) {
    switch (rows) {
    case 1: return few_rows_of<1>(x, w, b, out, k, m, act);
    case 2: return few_rows_of<2>(x, w, b, out, k, m, act);
    case 3: return few_rows_of<3>(x, w, b, out, k, m, act);
    case 4: return few_rows_of<4>(x, w, b, out, k, m, act);
    case 5: return few_rows_of<5>(x, w, b, out, k, m, act);
    case 6: return few_rows_of<6>(x, w, b, out, k, m, act);
    case 7: return few_rows_of<7>(x, w, b, out, k, m, act);
    default: return few_rows_of<8>(x, w, b, out, k, m, act);
    }
}

// Cosines, then sines.
extern "C" __global__ void time_embed(const float *t, float *out, int width, i64 n) {
    AT(n);
    int half = width / 2, j = (int)(i % width);
    double angle = (double)t[i / width] * pow(10000.0, -(double)(j % half) / half);
    out[i] = (float)(j < half ? cos(angle) : sin(angle));
}

// Turns of frames for this call: (cos, sin) of (start + stride · frame) over `pairs` frequencies.
extern "C" __global__ void turns(const i64 *start, int stride, int pairs, float2 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double position = (double)*start + (double)stride * (i / pairs);
    double angle = position * pow(10000.0, -(double)(i % pairs) / pairs);
    out[i] = make_float2((float)cos(angle), (float)sin(angle));
}

// One block of Philox4x32-10.
__device__ uint4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    for (int r = 0; r < 10; r++) {
        u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c1 = (u32)p1;
        c3 = (u32)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
// The logarithm of m / 2^24 and the sine and cosine of a turn in f32 sums and products alone: the host's bits.
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
// (1 − sigma) · x + sigma · normal, the normal of an element of the whole tensor.
extern "C" __global__ void renoise(const float *x, const float *sigma, const i64 *seed, const i64 *chunk, const i64 *draw,
                                   i64 first, float *out, i64 n) {
    AT(n);
    u64 element = (u64)(first + i), block = element / 4;
    uint4 w = philox((u32)block, (u32)(block >> 32), (u32)*draw, (u32)*chunk, (u32)(u64)*seed, (u32)((u64)*seed >> 32));
    float lane[4];
    box_muller(w.x, w.y, lane[0], lane[1]);
    box_muller(w.z, w.w, lane[2], lane[3]);
    float s = *sigma;
    out[i] = (1.0f - s) * x[i] + s * lane[element % 4];
}
extern "C" __global__ void to_x0(const float *x, const float *flow, const float *sigma, float *out, i64 n) {
    AT(n);
    out[i] = (float)((double)x[i] - (double)*sigma * (double)flow[i]);
}

// Rows to a place whose row the call says, by words of W; each thread moves PUT of them.
constexpr int PUT = 4;
template <typename W> __device__ void put_rows_of(const W *from, W *to, const i64 *row, i64 words_a_row, i64 n) {
    i64 first = (i64)blockIdx.x * blockDim.x * PUT + threadIdx.x;
    W word[PUT];
#pragma unroll
    for (int k = 0; k < PUT; k++) {
        i64 i = first + k * blockDim.x;
        if (i < n) word[k] = from[i];
    }
    to += (row ? *row : 0) * words_a_row;
#pragma unroll
    for (int k = 0; k < PUT; k++) {
        i64 i = first + k * blockDim.x;
        if (i < n) to[i] = word[k];
    }
}
extern "C" __global__ void put_rows_16(const uint4 *from, uint4 *to, const i64 *row, i64 words, i64 n) {
    put_rows_of(from, to, row, words, n);
}
extern "C" __global__ void put_rows_4(const u32 *from, u32 *to, const i64 *row, i64 words, i64 n) {
    put_rows_of(from, to, row, words, n);
}
extern "C" __global__ void put_rows_2(const u16 *from, u16 *to, const i64 *row, i64 words, i64 n) {
    put_rows_of(from, to, row, words, n);
}

// Pixels [t, h, w, 3] and latent tokens, by runs of `run` = stride · 3 elements; `back` is the decoder, which clamps.
extern "C" __global__ void pixels(const float *x, float *out, int high, int wide, int st, int sh, int sw, int back, i64 n) {
    AT(n);
    // i is the element in token order: (frame, h, w, ph, pw, dt, dy, run).
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
    int w = (int)(q % (wide / 2));
    q /= wide / 2;
    int h = (int)(q % (high / 2));
    q /= high / 2;
    i64 row = (q * st + dt) * (i64)(high * sh) + (2 * h + ph) * sh + dy;
    i64 p = row * ((i64)wide * sw * 3) + (2 * w + pw) * sw * 3 + e;
    if (back) out[p] = fminf(fmaxf(x[i], -1.0f), 1.0f);
    else out[i] = x[p];
}

// Merges attention over pieces of the keys: outputs of `pieces` runs and the logarithms of their sums, a weight in
// logarithms added to one of them.
template <typename T> __device__ void merge_one(const T *o, const float *lse, const float *bias, int biased, int pieces,
                                                int heads, int head, i64 rows, T *out) {
    AT(rows * heads * head);
    i64 row = i / (heads * head);
    int h = (int)(i / head % heads);
    float top = -INFINITY, sum = 0.0f, acc = 0.0f;
    for (int p = 0; p < pieces; p++) {
        float l = lse[((i64)p * heads + h) * rows + row] + (p == biased ? *bias : 0.0f);
        top = fmaxf(top, l);
    }
    for (int p = 0; p < pieces; p++) {
        float l = lse[((i64)p * heads + h) * rows + row] + (p == biased ? *bias : 0.0f);
        float e = expf(l - top);
        sum += e;
        acc = fmaf(e, up(o[(i64)p * rows * heads * head + i]), acc);
    }
    down(acc / sum, out[i]);
}
extern "C" __global__ void merge_bf16(const bf16 *o, const float *lse, const float *bias, int biased, int pieces,
                                      int heads, int head, i64 rows, bf16 *out) {
    merge_one(o, lse, bias, biased, pieces, heads, head, rows, out);
}

// Attention for shapes that no library takes: one warp a query and head, keys in turn with a running maximum.
template <typename T> __device__ void attention_of(const T *q, const T *k, const T *v, const float *bias, int from, int to,
                                                   T *out, int queries, int keys, int heads, int head, float scale) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    i64 job = (i64)blockIdx.x * warps + warp;
    if (job >= (i64)queries * heads) return;
    i64 row = job / heads;
    int h = (int)(job % heads), width = heads * head;
    float *query = shared + warp * head;
    for (int d = lane; d < head; d += 32) query[d] = up(q[row * width + h * head + d]) * scale;
    __syncwarp();
    float top = -INFINITY, sum = 0.0f, acc[16];
    for (int d = 0; d < 16; d++) acc[d] = 0.0f;
    for (int base = 0; base < keys; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key < keys) {
            const T *kk = k + (i64)key * width + h * head;
            s = 0.0f;
            for (int d = 0; d < head; d++) s = fmaf(query[d], up(kk[d]), s);
            if (bias && key >= from && key < to) s += *bias;
        }
        float next = fmaxf(top, warp_max(s)), fade = expf(top - next), p = key < keys ? expf(s - next) : 0.0f;
        sum = sum * fade + warp_sum(p);
        top = next;
        for (int c = 0; c * 32 < head; c++) acc[c] *= fade;
        int count = min(32, keys - base);
        for (int j = 0; j < count; j++) {
            float pj = __shfl_sync(0xffffffffu, p, j);
            const T *vv = v + (i64)(base + j) * width + h * head;
            for (int c = 0; c * 32 < head; c++) {
                int d = c * 32 + lane;
                if (d < head) acc[c] = fmaf(pj, up(vv[d]), acc[c]);
            }
        }
    }
    for (int c = 0; c * 32 < head; c++) {
        int d = c * 32 + lane;
        if (d < head) down(acc[c] / sum, out[row * width + h * head + d]);
    }
}
extern "C" __global__ void attention_f32(const float *q, const float *k, const float *v, const float *bias, int from, int to,
                                         float *out, int queries, int keys, int heads, int head, float scale) {
    attention_of(q, k, v, bias, from, to, out, queries, keys, heads, head, scale);
}
extern "C" __global__ void attention_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const float *bias, int from, int to,
                                          bf16 *out, int queries, int keys, int heads, int head, float scale) {
    attention_of(q, k, v, bias, from, to, out, queries, keys, heads, head, scale);
}

// Softmax of rows of a matrix.
template <typename T> __device__ void softmax_of(const T *x, T *out, int width) {
    const T *row = x + (i64)blockIdx.x * width;
    float top = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += 256) top = fmaxf(top, up(row[i]));
    top = block_max<256>(top);
    for (int i = threadIdx.x; i < width; i += 256) sum += expf(up(row[i]) - top);
    sum = block_sum<256>(sum);
    for (int i = threadIdx.x; i < width; i += 256) down(expf(up(row[i]) - top) / sum, out[(i64)blockIdx.x * width + i]);
}
extern "C" __global__ void softmax_f32(const float *x, float *out, int width) {
    softmax_of(x, out, width);
}
extern "C" __global__ void softmax_bf16(const bf16 *x, bf16 *out, int width) {
    softmax_of(x, out, width);
}

// scale · x · y, batch by batch: x [.., n, k], y [.., k, m] or [.., m, k].
extern "C" __global__ void dot(const float *x, const float *y, float *out, int n, int k, int m, int transposed, float scale,
                               i64 all) {
    AT(all);
    i64 batch = i / ((i64)n * m);
    int row = (int)(i / m % n), column = (int)(i % m);
    const float *a = x + (batch * n + row) * k, *b = y + batch * k * m;
    float s = 0.0f;
    for (int j = 0; j < k; j++) s = fmaf(a[j], transposed ? b[(i64)column * k + j] : b[(i64)j * m + column], s);
    out[i] = scale * s;
}

// Never ends: what a drill puts before a program.
extern "C" __global__ void spin() {
    for (;;) __nanosleep(1000);
}
