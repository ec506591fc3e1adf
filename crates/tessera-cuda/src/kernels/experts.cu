// Kernels that route tokens to experts. Experts, slots and counts are whole numbers in f32. A number that names no
// expert or no slot is skipped, so that it cannot become an address.

// Chooses the experts with the largest logits, one warp per token.
extern "C" __global__ void top_k_experts(const float *logits, float *out, int experts, int k, int tokens) {
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
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float expert = chosen[i];
    int before = 0;
    for (int j = 0; j < i; j++) before += chosen[j] == expert;
    out[i] = before < capacity ? (float)before : -1.0f;
}

// Counts the slots that an expert has given away, one warp per expert.
extern "C" __global__ void expert_counts(const float *chosen, const float *slots, float *out, int choices, int groups) {
    int group = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (group >= groups) return;
    int count = 0;
    for (int i = lane; i < choices; i += 32) count += chosen[i] == (float)group && slots[i] >= 0.0f;
    for (int o = 16; o > 0; o >>= 1) count += __shfl_xor_sync(0xffffffffu, count, o);
    if (lane == 0) out[group] = (float)count;
}

// Fills words with zeros.
extern "C" __global__ void zero_words(u32 *out, i64 n) {
    ELEMENT_INDEX(n);
    out[i] = 0;
}
// Copies the row of each choice's token to the slot of its expert, one block per choice.
template <typename T> __device__ void pack_rows(const T *x, const float *chosen, const float *slots, T *out, int width, int k, int capacity, int groups) {
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
// Multiplies the filled slots of a group with the group's weights; the other slots are zeros. A warp computes a
// column of one group, 8 rows at a time: of one expert, few slots are filled.
template <typename T> __device__ void multiply_group(const T *x, const T *w, const float *counts, T *out, int slots, int k, int m, int act) {
    int blocks = div_up(m, (int)blockDim.x / 32), group = blockIdx.x / blocks;
    int column = blockIdx.x % blocks * (blockDim.x / 32) + threadIdx.x / 32;
    if (column >= m) return;
    int count = min(slots, (int)fmaxf(counts[group], 0.0f)), row = 0;
    x += (i64)group * slots * k, w += ((i64)group * m + column) * k, out += (i64)group * slots * m + column;
    for (; row + 8 <= count; row += 8) multiply_and_store<T, 8>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    if (row + 4 <= count) multiply_and_store<T, 4>(x + (i64)row * k, w, out + (i64)row * m, k, m, act), row += 4;
    for (; row < count; row++) multiply_and_store<T, 1>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    for (row = count + threadIdx.x % 32; row < slots; row += 32) from_f32(0.0f, out[(i64)row * m]);
}
extern "C" __global__ void grouped_matmul_f32(const float *x, const float *w, const float *counts, float *out, int slots, int k, int m, int act) {
    multiply_group(x, w, counts, out, slots, k, m, act);
}
extern "C" __global__ void grouped_matmul_bf16(const bf16 *x, const bf16 *w, const float *counts, bf16 *out, int slots, int k, int m, int act) {
    multiply_group(x, w, counts, out, slots, k, m, act);
}

// Adds the weighted results of a token's experts by ascending expert, one block per token.
template <typename T> __device__ void combine_experts(const T *y, const float *chosen, const float *slots, const float *weights, T *out, int width, int k, int capacity, int groups) {
    // The choices in the order in which they are added.
    extern __shared__ int order[];
    chosen += (i64)blockIdx.x * k, slots += (i64)blockIdx.x * k, weights += (i64)blockIdx.x * k;
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        int before = 0;
        for (int i = 0; i < k; i++) before += chosen[i] < chosen[j] || (chosen[i] == chosen[j] && i < j);
        order[before] = j;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < k; i++) {
            int j = order[i];
            float expert = chosen[j], slot = slots[j];
            if (!(slot >= 0.0f && slot < (float)capacity && expert >= 0.0f && expert < (float)groups)) continue;
            sum = fmaf(weights[j], to_f32(y[((i64)(int)expert * capacity + (int)slot) * width + c]), sum);
        }
        from_f32(sum, out[(i64)blockIdx.x * width + c]);
    }
}
extern "C" __global__ void expert_combine_f32(const float *y, const float *chosen, const float *slots, const float *weights, float *out, int width, int k, int capacity, int groups) {
    combine_experts(y, chosen, slots, weights, out, width, k, capacity, groups);
}
extern "C" __global__ void expert_combine_bf16(const bf16 *y, const float *chosen, const float *slots, const float *weights, bf16 *out, int width, int k, int capacity, int groups) {
    combine_experts(y, chosen, slots, weights, out, width, k, capacity, groups);
}
