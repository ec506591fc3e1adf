// Attention with one wide head in bf16, in which every cell of a frame attends to all cells: out =
// softmax(q kᵀ / √HEAD) v. q, k, v and out are [cells, HEAD]; HEAD is a multiple of 32 up to 384. No
// library supports such heads.
//
// A block handles 64 queries: 4 groups of 16, each by two warps, of which each accumulates half of
// the head. Both compute the scores, which costs half again as many multiply-adds and saves an exchange
// through shared memory; the op is less than one percent of a decoder. While scores are computed,
// the values of the same keys are loaded, and then the next keys.
constexpr int QUERIES = 64, KEYS = 64, THREADS = 256, HALF = HEAD / 2;
constexpr int PITCH = HEAD + 8;  // elements; an odd number of 16-byte chunks avoids bank conflicts
static_assert(HEAD % 32 == 0 && HEAD <= 384, "unsupported head");

// Copies 64 rows from `first` on asynchronously; rows past the end are zeros.
__device__ __forceinline__ void copy_rows(bf16 *to, const bf16 *from, int first, int rows) {
    for (int i = threadIdx.x; i < 64 * HEAD / 8; i += THREADS) {
        int row = i / (HEAD / 8), chunk = i % (HEAD / 8);
        bool is_inside = first + row < rows;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to + row * PITCH + chunk * 8)),
                     "l"(from + (is_inside ? (i64)(first + row) * HEAD + chunk * 8 : 0)), "r"(is_inside ? 16 : 0)
                     : "memory");
    }
    commit_copies();
}
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) frame_attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, int cells) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *queries = (bf16 *)shared, *keys = queries + QUERIES * PITCH, *values = keys + KEYS * PITCH;
    int lane = threadIdx.x % 32, group = threadIdx.x / 32 % 4, half = threadIdx.x / 128;
    int first_query = blockIdx.x * QUERIES;
    copy_rows(queries, q, first_query, cells);
    copy_rows(keys, k, 0, cells);
    // exp2f takes an exponent to base 2.
    const float scale = 1.4426950408889634f * rsqrtf((float)HEAD);
    float o[HALF / 8][4], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < HALF / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[i][j] = 0.0f;
    const bf16 *query_rows = queries + (group * 16 + lane % 16) * PITCH + lane / 16 * 8;
    // Two squares of 8 keys × 8 elements per load, for two steps of k.
    const bf16 *key_rows = keys + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
    const bf16 *value_rows = values + (lane % 16) * PITCH + lane / 16 * 8 + half * HALF;
    for (int first = 0; first < cells; first += KEYS) {
        copy_rows(values, v, first, cells);
        wait_for_copies<1>();
        float s[KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
#pragma unroll 4
        for (int d = 0; d < HEAD; d += 16) {
            u32 a[4];
            load_matrices(a, query_rows + d);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                u32 b[4];
                load_matrices(b, key_rows + i * 16 * PITCH + d);
                multiply_add(s[2 * i], a, b[0], b[1]);
                multiply_add(s[2 * i + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
        if (first + KEYS < cells) copy_rows(keys, k, first + KEYS, cells);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = largest[r];
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float &x = s[i][2 * r + j];
                    x = first + i * 8 + lane % 4 * 2 + j < cells ? x * scale : -INFINITY;
                    top = fmaxf(top, x);
                }
            top = quad_reduce_max(top);
            float rescale = exp2f(largest[r] - top), part = 0.0f;
            largest[r] = top;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) part += s[i][2 * r + j] = exp2f(s[i][2 * r + j] - top);
            sum[r] = sum[r] * rescale + part;
#pragma unroll
            for (int i = 0; i < HALF / 8; i++) o[i][2 * r] *= rescale, o[i][2 * r + 1] *= rescale;
        }
        if (first + KEYS < cells) wait_for_copies<1>();
        else wait_for_copies<0>();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            u32 a[4] = {pack_bf16(s[2 * i][0], s[2 * i][1]), pack_bf16(s[2 * i][2], s[2 * i][3]), pack_bf16(s[2 * i + 1][0], s[2 * i + 1][1]),
                        pack_bf16(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
            for (int d = 0; d < HALF; d += 16) {
                u32 b[4];
                load_transposed(b, value_rows + i * 16 * PITCH + d);
                multiply_add(o[d / 8], a, b[0], b[1]);
                multiply_add(o[d / 8 + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = quad_reduce_sum(sum[r]);
        int query = first_query + group * 16 + lane / 4 + 8 * r;
        if (query >= cells) continue;
#pragma unroll
        for (int i = 0; i < HALF / 8; i++)
            *(u32 *)(out + (i64)query * HEAD + half * HALF + i * 8 + lane % 4 * 2) = pack_bf16(o[i][2 * r] / total, o[i][2 * r + 1] / total);
    }
}
