// Kernels of routers: rankings by scores, the weights of choices, and what a mapping changes of a router's preference.
// Scores are computed in f64, as on the host.

// The scores of one row of logits: their softmax or their logistic function, or the logits themselves.
enum ScoreKind { LOGIT_SCORE, SOFTMAX_SCORE, SIGMOID_SCORE };
struct Scores {
    int kind;
    double largest, total;

    __device__ __forceinline__ double of_logit(float logit) const {
        switch (kind) {
        case SOFTMAX_SCORE: return exp((double)logit - largest) / total;
        case SIGMOID_SCORE: return 1.0 / (1.0 + exp(-(double)logit));
        default: return (double)logit;
        }
    }
};
__device__ __forceinline__ double warp_sum_f64(double x) {
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}
// Prepares the scores of a row. All lanes of a warp take part, and each gets the same bits.
__device__ __forceinline__ Scores prepare_scores(const float *logits, int experts, int kind) {
    Scores scores = {kind, 0.0, 1.0};
    if (kind != SOFTMAX_SCORE) return scores;
    int lane = threadIdx.x % 32;
    float largest = -INFINITY;
    for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    scores.largest = (double)warp_max(largest);
    double total = 0.0;
    for (int e = lane; e < experts; e += 32) total += exp((double)logits[e] - scores.largest);
    scores.total = warp_sum_f64(total);
    return scores;
}

// Returns a number that orders scores as integers, as float_order does.
__device__ __forceinline__ u64 score_order(double x) {
    u64 bits = (u64)__double_as_longlong(x);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ double score_of_order(u64 order) {
    return __longlong_as_double((long long)(order >> 63 ? order & ~(1ull << 63) : ~order));
}
// Writes how good each group of consecutive experts is: the order of the sum of its two largest scores, or of its only
// score. A warp reads a group.
__device__ void rate_groups(const u64 *orders, u64 *ratings, int group_experts, int groups) {
    for (int group = threadIdx.x / 32; group < groups; group += blockDim.x / 32) {
        u64 first = score_order(-(double)INFINITY), second = first;
        for (int e = threadIdx.x % 32; e < group_experts; e += 32) {
            u64 order = orders[group * group_experts + e], smaller = min(order, first);
            first = max(first, order), second = max(second, smaller);
        }
        for (int o = 16; o > 0; o >>= 1) {
            u64 other = __shfl_xor_sync(0xffffffffu, first, o), other_second = __shfl_xor_sync(0xffffffffu, second, o);
            second = max(min(first, other), max(second, other_second)), first = max(first, other);
        }
        if (threadIdx.x % 32 == 0) ratings[group] = group_experts == 1 ? first : score_order(score_of_order(first) + score_of_order(second));
    }
}
// Returns whether fewer than `keep` groups are better than a group; of equal groups the lower one is better.
__device__ bool is_kept(const u64 *ratings, int group, int groups, int keep) {
    int better = 0;
    for (int other = 0; other < groups; other++) better += ratings[other] > ratings[group] || (ratings[other] == ratings[group] && other < group);
    return better < keep;
}
// Sorts experts by falling order, of equal ones by rising number, in a bitonic network over a power of two.
__device__ void sort_experts(u64 *orders, u16 *experts, int count) {
    for (int size = 2; size <= count; size *= 2)
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (int t = threadIdx.x; t < count / 2; t += blockDim.x) {
                int i = 2 * t - (t & (stride - 1)), j = i + stride;
                u64 a = orders[i], b = orders[j];
                u16 e = experts[i], f = experts[j];
                bool in_order = a > b || (a == b && e < f);
                if (in_order == !(i & size)) continue;
                orders[i] = b, orders[j] = a, experts[i] = f, experts[j] = e;
            }
        }
    __syncthreads();
}
// Ranks the experts of one token per block and returns the first k. `count` is the number of experts, rounded up to a
// power of two. Of several groups, the experts of those that are not kept come last.
extern "C" __global__ void rank_experts(const float *logits, const float *correction, float *out, const __grid_constant__ TokenRows rows, int experts, int count, int k, int groups, int keep, int score) {
    extern __shared__ u64 orders[];
    u64 *ratings = orders + count;
    u16 *ranking = (u16 *)(ratings + groups);
    let_successor_begin();
    wait_for_predecessor();
    logits += (i64)blockIdx.x * experts, out += (i64)blockIdx.x * k;
    if (!rows.brings_token(blockIdx.x)) {
        for (int j = threadIdx.x; j < k; j += blockDim.x) out[j] = -1.0f;
        return;
    }
    // Every warp adds the total of a softmax for itself, which takes no longer than one warp alone.
    Scores scores = prepare_scores(logits, experts, score);
    for (int e = threadIdx.x; e < count; e += blockDim.x) {
        orders[e] = e < experts ? score_order(scores.of_logit(logits[e]) + (correction ? (double)correction[e] : 0.0)) : 0;
        ranking[e] = (u16)e;
    }
    if (groups > 1) {
        int group_experts = experts / groups;
        __syncthreads();
        rate_groups(orders, ratings, group_experts, groups);
        __syncthreads();
        for (int e = threadIdx.x; e < experts; e += blockDim.x)
            if (!is_kept(ratings, e / group_experts, groups, keep)) orders[e] = 0;
    }
    sort_experts(orders, ranking, count);
    for (int j = threadIdx.x; j < k; j += blockDim.x) out[j] = (float)ranking[j];
}

// Returns the weights of the chosen experts, one warp per token.
extern "C" __global__ void expert_weights(const float *logits, const float *chosen, float *out, int experts, int k, int score, int renormalise, double scale, int tokens) {
    let_successor_begin();
    wait_for_predecessor();
    int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    logits += (i64)token * experts, chosen += (i64)token * k, out += (i64)token * k;
    Scores scores = prepare_scores(logits, experts, score);
    double total = 0.0;
    for (int j = lane; renormalise && j < k; j += 32)
        if (chosen[j] >= 0.0f && chosen[j] < (float)experts) total += scores.of_logit(logits[(int)chosen[j]]);
    // Scores of a sigmoid may all be 0.
    total = renormalise ? warp_sum_f64(total) + 1e-20 : 1.0;
    for (int j = lane; j < k; j += 32) {
        float expert = chosen[j], weight = expert < 0.0f ? 0.0f : __int_as_float(0x7fffffff);
        if (expert >= 0.0f && expert < (float)experts) weight = (float)(scale * scores.of_logit(logits[(int)expert]) / total);
        out[j] = weight;
    }
}

// Returns the gate of each choice.
template <typename T> __device__ void take_gate(const T *gates, const float *chosen, float *out, int experts, int k, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    float expert = chosen[i];
    out[i] = expert >= 0.0f && expert < (float)experts ? to_f32(gates[i / k * experts + (int)expert]) : __int_as_float(0x7fffffff);
}
extern "C" __global__ void expert_gates_f32(const float *gates, const float *chosen, float *out, int experts, int k, i64 n) {
    take_gate(gates, chosen, out, experts, k, n);
}
extern "C" __global__ void expert_gates_bf16(const bf16 *gates, const float *chosen, float *out, int experts, int k, i64 n) {
    take_gate(gates, chosen, out, experts, k, n);
}

// Subtracts a weight from the logits of experts outside of the token's locality group. A home has `home_rows` rows of
// the whole tensor, in which the first row of this rank is `first_row`.
extern "C" __global__ void expert_locality(const float *logits, const u64 *home_groups, const u64 *expert_groups, float *out, int experts, int first_row, int home_rows, float weight, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    u64 own = home_groups[(first_row + i / experts) / home_rows];
    out[i] = expert_groups[i % experts] == own ? logits[i] : logits[i] - weight;
}

// The distances of experts: a number for each pair of homes, and the home of each expert.
struct ExpertDistances {
    const u64 *distances, *expert_homes;
    int experts, homes, first_row, home_rows;

    // Returns the distances of the home of a row of this rank.
    __device__ __forceinline__ const u64 *from_row(int row) const {
        return distances + (i64)((first_row + row) / home_rows) * homes;
    }
};
// Returns the mean distance of a row to the experts of its softmax, in every lane of a warp.
__device__ __forceinline__ double mean_distance(const float *logits, const ExpertDistances &d, const Scores &scores, int row) {
    const u64 *from = d.from_row(row);
    double sum = 0.0;
    for (int e = threadIdx.x % 32; e < d.experts; e += 32) sum += scores.of_logit(logits[e]) * (double)from[d.expert_homes[e]];
    return warp_sum_f64(sum);
}
// Writes the mean distance of each row, one warp per row.
extern "C" __global__ void mean_distances(const float *logits, double *means, const __grid_constant__ ExpertDistances d, int rows) {
    let_successor_begin();
    wait_for_predecessor();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    logits += (i64)row * d.experts;
    double mean = mean_distance(logits, d, prepare_scores(logits, d.experts, SOFTMAX_SCORE), row);
    if (threadIdx.x % 32 == 0) means[row] = mean;
}
// Adds mean distances, in one block and so in an order that the number of rows alone determines.
constexpr int DISTANCE_THREADS = 1024;
extern "C" __global__ void __launch_bounds__(DISTANCE_THREADS) sum_distances(const double *means, float *out, double factor, int rows) {
    __shared__ double by_warp[DISTANCE_THREADS / 32];
    let_successor_begin();
    wait_for_predecessor();
    double sum = 0.0;
    for (int row = threadIdx.x; row < rows; row += DISTANCE_THREADS) sum += means[row];
    sum = warp_sum_f64(sum);
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum_f64(by_warp[threadIdx.x]);
    if (threadIdx.x == 0) out[0] = (float)(factor * sum);
}
// Computes the gradient of the mean distance of `real_rows` of the rows with respect to logits, one warp per row.
extern "C" __global__ void distance_gradient(const float *logits, float *out, const __grid_constant__ ExpertDistances d, double factor, int real_rows, int rows) {
    let_successor_begin();
    wait_for_predecessor();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    logits += (i64)row * d.experts, out += (i64)row * d.experts;
    if (row >= real_rows) {
        for (int e = lane; e < d.experts; e += 32) out[e] = 0.0f;
        return;
    }
    Scores scores = prepare_scores(logits, d.experts, SOFTMAX_SCORE);
    double mean = mean_distance(logits, d, scores, row);
    const u64 *from = d.from_row(row);
    for (int e = lane; e < d.experts; e += 32) out[e] = (float)(factor * scores.of_logit(logits[e]) * ((double)from[d.expert_homes[e]] - mean));
}

// Copies choices, and replaces the last one of a token by −1 unless the random number drawn for its position is below
// `keep`. Padding keeps its choices.
extern "C" __global__ void expert_draw(const float *choices, float *out, const __grid_constant__ TokenRows rows, int k, i64 layer, u32 seed, u32 ep_seed, double keep, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    float choice = choices[i];
    int row = rows.first_row + (int)(i / k);
    if (i % k == k - 1 && row < rows.tokens) {
        u64 at = rows.start ? rows.begin_of(row) + row % rows.rows_of_sequence() : row;
        u32 drawn = philox((u32)at, (u32)(at >> 32), (u32)layer, (u32)(layer >> 32), seed, ep_seed).x;
        if (!((double)drawn / 4294967296.0 < keep)) choice = -1.0f;
    }
    out[i] = choice;
}
