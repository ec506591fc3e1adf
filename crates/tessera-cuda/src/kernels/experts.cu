// Kernels that route tokens to experts. Experts, slots and counts are whole numbers in f32. A number that names no
// expert or no slot is skipped, so that it cannot become an address.

// Chooses the experts with the largest logits, one warp per token.
extern "C" __global__ void top_k_experts(const float *logits, float *out, int experts, int k, int tokens) {
    let_successor_begin();
    wait_for_predecessor();
    int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (i64)token * experts;
    u64 last = ~0ull;
    for (int choice = 0; choice < k; choice++) {
        u64 best = 0;
        for (int e = lane; e < experts; e += 32) {
            u64 order = (u64)float_order(logits[e]) << 32 | (u32)~e;
            if (order < last && order > best) best = order;
        }
        for (int o = 16; o > 0; o >>= 1) {
            u64 other = __shfl_xor_sync(0xffffffffu, best, o);
            best = other > best ? other : best;
        }
        last = best;
        if (lane == 0) out[token * k + choice] = (float)(int)~(u32)best;
    }
}

// Returns the weights of the chosen experts, one warp per token, in f64.
extern "C" __global__ void expert_weights(const float *logits, const float *chosen, float *out, int experts, int k, int renormalise, int tokens) {
    let_successor_begin();
    wait_for_predecessor();
    int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (i64)token * experts, chosen += (i64)token * k, out += (i64)token * k;
    float largest = -INFINITY;
    for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    largest = warp_max(largest);
    double total = 0.0;
    for (int j = lane; j < (renormalise ? k : experts); j += 32) {
        int e = renormalise ? (int)chosen[j] : j;
        if (e >= 0 && e < experts) total += exp((double)logits[e] - (double)largest);
    }
    for (int o = 16; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    for (int j = lane; j < k; j += 32) {
        int e = (int)chosen[j];
        out[j] = e >= 0 && e < experts ? (float)(exp((double)logits[e] - (double)largest) / total) : __int_as_float(0x7fffffff);
    }
}

// Gives each choice the next slot of its expert: the number of earlier choices of the same one.
extern "C" __global__ void expert_slots(const float *chosen, float *out, int capacity, int n) {
    let_successor_begin();
    wait_for_predecessor();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float expert = chosen[i];
    int before = 0;
    for (int j = 0; j < i; j++) before += chosen[j] == expert;
    out[i] = before < capacity ? (float)before : -1.0f;
}

// Counts the slots that an expert has given away, one warp per expert.
extern "C" __global__ void expert_counts(const float *chosen, const float *slots, float *out, int choices, int groups) {
    let_successor_begin();
    wait_for_predecessor();
    int group = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (group >= groups) return;
    int count = 0;
    for (int i = lane; i < choices; i += 32) count += chosen[i] == (float)group && slots[i] >= 0.0f;
    for (int o = 16; o > 0; o >>= 1) count += __shfl_xor_sync(0xffffffffu, count, o);
    if (lane == 0) out[group] = (float)count;
}

// Fills words with zeros.
extern "C" __global__ void zero_words(u32 *out, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    out[i] = 0;
}
// Copies the row of each choice's token to the slot of its expert, one block per choice.
template <typename T> __device__ void pack_rows(const T *x, const float *chosen, const float *slots, T *out, int width, int k, int capacity, int groups) {
    let_successor_begin();
    wait_for_predecessor();
    float expert = chosen[blockIdx.x], slot = slots[blockIdx.x];
    if (!(slot >= 0.0f && slot < (float)capacity && expert >= 0.0f && expert < (float)groups)) return;
    x += (i64)(blockIdx.x / k) * width, out += ((i64)(int)expert * capacity + (int)slot) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[c] = x[c];
}
extern "C" __global__ void expert_pack_f32(const float *x, const float *chosen, const float *slots, float *out, int width, int k, int capacity, int groups) {
    pack_rows(x, chosen, slots, out, width, k, capacity, groups);
}
extern "C" __global__ void expert_pack_bf16(const bf16 *x, const float *chosen, const float *slots, bf16 *out, int width, int k, int capacity, int groups) {
    pack_rows(x, chosen, slots, out, width, k, capacity, groups);
}

// Multiplies ROWS rows with one row of weights.
template <typename T, int ROWS> __device__ __forceinline__ void multiply_and_store(const T *x, const T *w, T *out, int k, int m, int act) {
    float sum[ROWS];
    multiply_rows<T, ROWS>(x, w, k, sum);
    for (int r = 0; r < ROWS; r++)
        if (threadIdx.x % 32 == 0) from_f32(activate(sum[r], act), out[(i64)r * m]);
}
// Returns the group that has `n` filled groups before it, or −1. All lanes of a warp take part.
__device__ __forceinline__ int find_filled_group(const float *counts, int groups, int n) {
    for (int first = 0; first < groups; first += 32) {
        int group = first + threadIdx.x % 32;
        u32 filled = __ballot_sync(0xffffffffu, group < groups && counts[group] > 0.0f);
        if (n >= __popc(filled)) {
            n -= __popc(filled);
            continue;
        }
        for (; n > 0; n--) filled &= filled - 1;
        return first + __ffs(filled) - 1;
    }
    return -1;
}
// Multiplies the filled slots of a group with the group's weights; the other slots are zeros. A warp computes a
// column of one group, 8 rows at a time: of one expert, few slots are filled. A launch has blocks for as many groups as
// can have filled slots at once; in a decoding step, most groups have none.
template <typename T> __device__ void multiply_group(const T *x, const T *w, const float *counts, T *out, int groups, int slots, int k, int m, int act) {
    let_successor_begin();
    wait_for_predecessor();
    i64 of_group = (i64)slots * m;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < groups * of_group; i += (i64)gridDim.x * blockDim.x)
        if (!(counts[i / of_group] > 0.0f)) from_f32(0.0f, out[i]);
    int blocks = div_up(m, (int)blockDim.x / 32), group = find_filled_group(counts, groups, blockIdx.x / blocks);
    int column = blockIdx.x % blocks * (blockDim.x / 32) + threadIdx.x / 32;
    if (group < 0 || column >= m) return;
    int count = min(slots, (int)counts[group]), row = 0;
    x += (i64)group * slots * k, w += ((i64)group * m + column) * k, out += (i64)group * of_group + column;
    for (; row + 8 <= count; row += 8) multiply_and_store<T, 8>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    if (row + 4 <= count) multiply_and_store<T, 4>(x + (i64)row * k, w, out + (i64)row * m, k, m, act), row += 4;
    for (; row < count; row++) multiply_and_store<T, 1>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    for (row = count + threadIdx.x % 32; row < slots; row += 32) from_f32(0.0f, out[(i64)row * m]);
}
extern "C" __global__ void grouped_matmul_f32(const float *x, const float *w, const float *counts, float *out, int groups, int slots, int k, int m, int act) {
    multiply_group(x, w, counts, out, groups, slots, k, m, act);
}
extern "C" __global__ void grouped_matmul_bf16(const bf16 *x, const bf16 *w, const float *counts, bf16 *out, int groups, int slots, int k, int m, int act) {
    multiply_group(x, w, counts, out, groups, slots, k, m, act);
}

// Adds the weighted results of a token's experts by ascending expert. A block adds some columns of one token.
template <typename T> __device__ void combine_experts(const T *y, const float *chosen, const float *slots, const float *weights, T *out, int width, int k, int capacity, int groups) {
    // The rows of the choices in the order in which they are added, and −1 for one without a slot; then their weights.
    extern __shared__ int rows[];
    float *row_weights = (float *)(rows + k);
    let_successor_begin();
    wait_for_predecessor();
    int blocks = div_up(width, (int)blockDim.x);
    i64 token = blockIdx.x / blocks;
    chosen += token * k, slots += token * k, weights += token * k;
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        int before = 0;
        float expert = chosen[j], slot = slots[j];
        for (int i = 0; i < k; i++) before += chosen[i] < expert || (chosen[i] == expert && i < j);
        bool has_slot = slot >= 0.0f && slot < (float)capacity && expert >= 0.0f && expert < (float)groups;
        rows[before] = has_slot ? (int)expert * capacity + (int)slot : -1;
        row_weights[before] = weights[j];
    }
    __syncthreads();
    int c = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    if (c >= width) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < k; i++)
        if (rows[i] >= 0) sum = fmaf(row_weights[i], to_f32(y[(i64)rows[i] * width + c]), sum);
    from_f32(sum, out[token * width + c]);
}
extern "C" __global__ void expert_combine_f32(const float *y, const float *chosen, const float *slots, const float *weights, float *out, int width, int k, int capacity, int groups) {
    combine_experts(y, chosen, slots, weights, out, width, k, capacity, groups);
}
extern "C" __global__ void expert_combine_bf16(const bf16 *y, const float *chosen, const float *slots, const float *weights, bf16 *out, int width, int k, int capacity, int groups) {
    combine_experts(y, chosen, slots, weights, out, width, k, capacity, groups);
}
