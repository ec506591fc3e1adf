// Kernels of a language model: rotary embedding, norms of heads, writes to pages of a cache, and the choice of
// the next id. Numbers of the call are whole numbers in f32.

// Rotates the heads of one row per block: pairs of channels that lie `pairs` apart or, `interleaved`, side by side. The
// angles are computed once per row in f64, as on the host.
template <typename T> __device__ void rotary_row(const T *x, const float *frequencies, const float *start, T *out, int width, int head, int pairs, int interleaved, int rows_per_sequence, float scale) {
    extern __shared__ float2 rotations[];
    int row = blockIdx.x;
    double position = (double)start[row / rows_per_sequence] + row % rows_per_sequence;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        double s, c;
        sincos(position * (double)frequencies[i], &s, &c);
        rotations[i] = make_float2((float)(c * scale), (float)(s * scale));
    }
    __syncthreads();
    x += (i64)row * width, out += (i64)row * width;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        int channel = column % head;
        float y = to_f32(x[column]);
        if (channel < 2 * pairs) {
            int apart = interleaved ? 1 : pairs;
            bool is_first = interleaved ? channel % 2 == 0 : channel < pairs;
            float2 turn = rotations[interleaved ? channel / 2 : channel % pairs];
            y = is_first ? y * turn.x - to_f32(x[column + apart]) * turn.y : y * turn.x + to_f32(x[column - apart]) * turn.y;
        }
        from_f32(y, out[column]);
    }
}
extern "C" __global__ void rotary_f32(const float *x, const float *frequencies, const float *start, float *out, int width, int head, int pairs, int interleaved, int rows_per_sequence, float scale) {
    rotary_row(x, frequencies, start, out, width, head, pairs, interleaved, rows_per_sequence, scale);
}
extern "C" __global__ void rotary_bf16(const bf16 *x, const float *frequencies, const float *start, bf16 *out, int width, int head, int pairs, int interleaved, int rows_per_sequence, float scale) {
    rotary_row(x, frequencies, start, out, width, head, pairs, interleaved, rows_per_sequence, scale);
}

// Divides each head by its root mean square. A warp computes a head.
template <typename T> __device__ void norm_head(const T *x, const float *w, T *out, int head, float eps, i64 heads) {
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= heads) return;
    x += i * head, out += i * head;
    float sum = 0.0f;
    for (int c = lane; c < head; c += 32) sum = fmaf(to_f32(x[c]), to_f32(x[c]), sum);
    float root = sqrtf(warp_sum(sum) / head + eps);
    for (int c = lane; c < head; c += 32) from_f32(to_f32(x[c]) / root * w[c], out[c]);
}
extern "C" __global__ void head_norm_f32(const float *x, const float *w, float *out, int head, float eps, i64 heads) {
    norm_head(x, w, out, head, eps, heads);
}
extern "C" __global__ void head_norm_bf16(const bf16 *x, const float *w, bf16 *out, int head, float eps, i64 heads) {
    norm_head(x, w, out, head, eps, heads);
}

// Returns the row of a pool of pages that holds a position of a sequence with these pages; −1 if none does.
// The host refuses pages outside of the pool; the comparison keeps any number from becoming an address.
__device__ __forceinline__ int row_of_position(const float *pages, int page_count, int page_rows, int pool_pages, int position) {
    int page = position / page_rows;
    if (page >= page_count) return -1;
    float at = pages[page];
    return at >= 0.0f && at < (float)pool_pages ? (int)at * page_rows + position % page_rows : -1;
}

// Copies rows to the rows of a pool in which their positions lie.
template <typename W> __device__ void put_pages(const W *from, W *to, const float *pages, const float *start, int page_count, int page_rows, int pool_pages, int rows_per_sequence, int words, i64 n) {
    ELEMENT_INDEX(n);
    int row = (int)(i / words), sequence = row / rows_per_sequence;
    float first = start[sequence];
    if (!(first >= 0.0f)) return;
    int there = row_of_position(pages + (i64)sequence * page_count, page_count, page_rows, pool_pages, (int)first + row % rows_per_sequence);
    if (there >= 0) to[(i64)there * words + i % words] = from[i];
}
extern "C" __global__ void put_pages_16(const uint4 *from, uint4 *to, const float *pages, const float *start, int page_count, int page_rows, int pool_pages, int rows_per_sequence, int words, i64 n) {
    put_pages(from, to, pages, start, page_count, page_rows, pool_pages, rows_per_sequence, words, n);
}
extern "C" __global__ void put_pages_4(const u32 *from, u32 *to, const float *pages, const float *start, int page_count, int page_rows, int pool_pages, int rows_per_sequence, int words, i64 n) {
    put_pages(from, to, pages, start, page_count, page_rows, pool_pages, rows_per_sequence, words, n);
}
extern "C" __global__ void put_pages_2(const u16 *from, u16 *to, const float *pages, const float *start, int page_count, int page_rows, int pool_pages, int rows_per_sequence, int words, i64 n) {
    put_pages(from, to, pages, start, page_count, page_rows, pool_pages, rows_per_sequence, words, n);
}

// Returns a number that orders floats as integers: the larger float has the larger number, a NaN with the
// sign bit clear the largest.
__device__ __forceinline__ u32 float_order(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_order(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
// Returns a number that orders logits as they are chosen: of equal ones, −0 and 0 among them, the lower id has
// the larger number.
__device__ __forceinline__ u64 logit_order(float logit, int id) {
    return (u64)float_order(logit + 0.0f) << 32 | (u32)~id;
}

constexpr int SAMPLE_PARTS = 32, SAMPLE_THREADS = 512;

// Finds the largest logit of each of SAMPLE_PARTS parts of a row, one block each. A part with NaN has the
// largest number of all.
extern "C" __global__ void sample_largest(const float *logits, u64 *largest, int vocabulary) {
    __shared__ u64 by_warp[SAMPLE_THREADS / 32];
    int row = blockIdx.x / SAMPLE_PARTS, part = blockIdx.x % SAMPLE_PARTS, lane = threadIdx.x % 32;
    logits += (i64)row * vocabulary;
    u64 best = 0;
    for (int id = part * SAMPLE_THREADS + threadIdx.x; id < vocabulary; id += SAMPLE_PARTS * SAMPLE_THREADS) {
        float x = logits[id];
        u64 order = x != x ? ~0ull : logit_order(x, id);
        best = order > best ? order : best;
    }
    for (int o = 16; o > 0; o >>= 1) {
        u64 other = __shfl_xor_sync(0xffffffffu, best, o);
        best = other > best ? other : best;
    }
    if (lane == 0) by_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < SAMPLE_THREADS / 32; i++) best = by_warp[i] > best ? by_warp[i] : best;
    largest[blockIdx.x] = best;
}
__device__ __forceinline__ u64 largest_of_row(const u64 *largest, int row) {
    u64 best = 0;
    for (int i = 0; i < SAMPLE_PARTS; i++) {
        u64 part = largest[row * SAMPLE_PARTS + i];
        best = part > best ? part : best;
    }
    return best;
}

// Probabilities relative to the largest one are whole numbers of units of 2^-44: their sums do not depend on the
// order, and those of MAX_IDS ids fit 64 bits. A probability below half a unit counts as 0.
constexpr double UNITS_OF_ONE = 17592186044416.0;
constexpr int MAX_IDS = 1 << 19;

extern "C" __global__ void sample_units(const float *logits, const u64 *largest, const float *temperature, u64 *units, int vocabulary, i64 n) {
    ELEMENT_INDEX(n);
    int row = (int)(i / vocabulary);
    if (temperature[row] <= 0.0f) return;
    float best = float_of_order((u32)(largest_of_row(largest, row) >> 32)), x = logits[i];
    // Equal infinities have no difference.
    units[i] = x == best ? (u64)UNITS_OF_ONE : __double2ull_rn(exp(((double)x - (double)best) / (double)temperature[row]) * UNITS_OF_ONE);
}

// An id among the sorted ones: by falling logit, ties by rising id.
struct SortedPlace {
    u32 order;
    int id;
};
// A row of logits with the units of its ids.
struct SampledRow {
    const float *logits;
    const u64 *units;
    int vocabulary;
};
constexpr int DIGIT_BITS = 4, DIGITS = 1 << DIGIT_BITS, CHOICE_THREADS = 1024, LOADS = 8;

// Calls f(id, order of its logit) for each id, from all threads. Several loads are in flight at once: a row is read
// by one multiprocessor, so their latency would otherwise take most of the time.
template <typename F> __device__ __forceinline__ void for_each_logit(const SampledRow &row, F f) {
    for (int first = threadIdx.x; first < row.vocabulary; first += LOADS * CHOICE_THREADS) {
        float x[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            int id = first + j * CHOICE_THREADS;
            x[j] = id < row.vocabulary ? row.logits[id] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            int id = first + j * CHOICE_THREADS;
            if (id < row.vocabulary) f(id, float_order(x[j] + 0.0f));
        }
    }
}
__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// Finds a number of 4 · `digits` bits, from its first digit on: the largest one that the items from it on have a
// weight of at least `wanted`. `visit` calls its argument with the number and the weight of each item of this
// thread that begins with the digits found so far. `before` becomes the weight of the items above the result, and
// `equal` that of the items that have it. Every thread returns the same.
template <typename V> __device__ u32 find_number(int digits, u64 wanted, u64 &before, u64 &equal, V visit) {
    __shared__ u64 by_warp[DIGITS][CHOICE_THREADS / 32];
    __shared__ u64 from_digit[DIGITS + 1];
    u32 prefix = 0;
    before = 0;
    for (int shift = (digits - 1) * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        // The weight of the items with this digit or a larger one.
        u64 sums[DIGITS];
#pragma unroll
        for (int d = 0; d < DIGITS; d++) sums[d] = 0;
        visit([&](u32 number, auto weigh) {
            if (((u64)number >> (shift + DIGIT_BITS)) != prefix) return;
            int digit = (int)(number >> shift) & (DIGITS - 1);
            u64 weight = weigh();
#pragma unroll
            for (int d = 0; d < DIGITS; d++) sums[d] += digit >= d ? weight : 0;
        });
#pragma unroll
        for (int d = 0; d < DIGITS; d++) {
            sums[d] = warp_sum_u64(sums[d]);
            if (threadIdx.x % 32 == 0) by_warp[d][threadIdx.x / 32] = sums[d];
        }
        __syncthreads();
        // A warp adds what the warps have found for one digit.
        if (threadIdx.x / 32 < DIGITS) {
            u64 sum = warp_sum_u64(by_warp[threadIdx.x / 32][threadIdx.x % 32]);
            if (threadIdx.x % 32 == 0) from_digit[threadIdx.x / 32] = sum;
        }
        if (threadIdx.x == CHOICE_THREADS - 1) from_digit[DIGITS] = 0;
        __syncthreads();
        int digit = DIGITS - 1;
        while (digit > 0 && before + from_digit[digit] < wanted) digit--;
        equal = from_digit[digit] - from_digit[digit + 1];
        before += from_digit[digit + 1];
        prefix = prefix << DIGIT_BITS | (u32)digit;
        __syncthreads();
    }
    return prefix;
}

// Returns the last of the first sorted ids that weigh at least `wanted` together: an id weighs its units, or 1 if
// `by_count`.
__device__ SortedPlace find_prefix(const SampledRow &row, u64 wanted, bool by_count) {
    u64 before, equal;
    u32 order = find_number(8, wanted, before, equal, [&](auto item) {
        for_each_logit(row, [&](int id, u32 order) { item(order, [&] { return by_count ? 1 : row.units[id]; }); });
    });
    // Ids of equal logits weigh the same; most often there is one.
    __shared__ u64 weight;
    __shared__ int some_id;
    for_each_logit(row, [&](int id, u32 other) {
        if (other == order) weight = by_count ? 1 : row.units[id], some_id = id;
    });
    __syncthreads();
    if (equal == weight) return {order, some_id};
    u64 rank = (wanted - before + weight - 1) / weight;
    // Of the equal ones, the id that `rank` ids, itself and lower ones, belong to: as inverted numbers.
    u32 inverted = find_number(5, rank, before, equal, [&](auto item) {
        for_each_logit(row, [&](int id, u32 other) {
            if (other == order) item((u32)(MAX_IDS - 1 - id), [] { return (u64)1; });
        });
    });
    return {order, (int)(MAX_IDS - 1 - inverted)};
}
// Returns what the sorted ids up to a place weigh, in every thread.
__device__ u64 units_up_to(const SampledRow &row, SortedPlace last) {
    __shared__ u64 by_warp[CHOICE_THREADS / 32];
    u64 sum = 0;
    for_each_logit(row, [&](int id, u32 order) {
        if (order > last.order || (order == last.order && id <= last.id)) sum += row.units[id];
    });
    sum = warp_sum_u64(sum);
    __syncthreads();
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    return warp_sum_u64(by_warp[threadIdx.x % 32]);
}

// Chooses the id of one row per block. A row with NaN has no id: its result is NaN, here and in the host's copy
// of the results, where it ends the run.
extern "C" __global__ void __launch_bounds__(CHOICE_THREADS) sample_choose(const float *logits, const u64 *largest, const u64 *units, const float *temperature, const float *top_k, const float *top_p, const float *seed, const float *draw, float *out, float *host_copy, int vocabulary) {
    int i = blockIdx.x;
    u64 best = largest_of_row(largest, i);
    float id;
    if (best == ~0ull) {
        id = __int_as_float(0x7fffffff);
    } else if (temperature[i] <= 0.0f) {
        id = (float)(int)~(u32)best;
    } else {
        SampledRow row = {logits + (i64)i * vocabulary, units + (i64)i * vocabulary, vocabulary};
        SortedPlace last = {0, vocabulary};
        if (top_k[i] > 0.0f && top_k[i] < (float)vocabulary) last = find_prefix(row, (u64)top_k[i], true);
        u64 kept = units_up_to(row, last);
        if (top_p[i] < 1.0f) {
            double wanted = ceil((double)top_p[i] * (double)kept);
            kept = units_up_to(row, find_prefix(row, min(kept, wanted > 1.0 ? (u64)wanted : 1), false));
        }
        uint4 w = philox((u32)draw[i], 0, 0, 0x73616d70u, (u32)seed[i], 0);
        double uniform = (double)(((u64)w.y << 32 | w.x) >> 11) * (1.0 / 9007199254740992.0);
        // The first sum above the uniform part of all.
        u64 wanted = min(kept, (u64)(uniform * (double)kept) + 1);
        id = (float)find_prefix(row, wanted, false).id;
    }
    if (threadIdx.x == 0) {
        out[i] = id;
        host_copy[i] = id;
    }
}
