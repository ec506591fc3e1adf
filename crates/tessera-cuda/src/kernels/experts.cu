// Kernels that route tokens to experts. Experts, slots and counts are whole numbers in f32. A number that names no
// expert or no slot is skipped, so that it cannot become an address.

// The most experts that `rank_experts` and `expert_reroute` hold in shared memory.
constexpr int MAX_RANKED_EXPERTS = 4096;

// Where the rows of this rank lie among those of sequences. Rows of the whole tensor from `tokens` on are padding, and each
// sequence has an equal part of the others. `start` is the position at which each sequence begins, −1 for an absent one,
// and `last` its last row; without them, rows are positions and every row brings a token.
struct TokenRows {
    const float *start, *last;
    int first_row, tokens, sequences;

    __device__ __forceinline__ int rows_of_sequence() const { return max(tokens / sequences, 1); }
    // Returns the position at which the sequence of a row of the whole tensor begins.
    __device__ __forceinline__ u64 begin_of(int row) const {
        int sequence = row / rows_of_sequence();
        return start && sequence < sequences ? (u64)fmaxf(start[sequence], 0.0f) : 0;
    }
    // Returns whether a row of this rank brings a token.
    __device__ __forceinline__ bool brings_token(int row) const {
        if (!start) return true;
        row += first_row;
        int sequence = row / rows_of_sequence();
        return row < tokens && sequence < sequences && start[sequence] >= 0.0f && (float)row <= last[sequence];
    }
};

// Chooses the experts with the largest logits, one warp per token, and −1 for a row without a token.
extern "C" __global__ void top_k_experts(const float *logits, float *out, const __grid_constant__ TokenRows rows, int experts, int k, int tokens) {
    let_successor_begin();
    wait_for_predecessor();
    int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    if (!rows.brings_token(token)) {
        for (int j = lane; j < k; j += 32) out[token * k + j] = -1.0f;
        return;
    }
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

// Returns the expert that a choice names, or −1 if it names none of `experts`.
__device__ __forceinline__ int expert_of_choice(float choice, int experts) {
    return choice >= 0.0f && choice < (float)experts ? (int)choice : -1;
}

// Returns the place of each choice, one warp per choice. The places of an expert are used round robin, by the row of the
// token plus the position at which its sequence begins.
extern "C" __global__ void expert_places(const float *chosen, const u64 *residents, float *out, const __grid_constant__ TokenRows rows, int k, int places, int n) {
    let_successor_begin();
    wait_for_predecessor();
    int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (i >= n) return;
    int expert = expert_of_choice(chosen[i], places), count = 0, row = rows.first_row + i / k;
    for (int p = lane; p < places; p += 32) count += residents[p] == (u64)(i64)expert;
    for (int o = 16; o > 0; o >>= 1) count += __shfl_xor_sync(0xffffffffu, count, o);
    int before = count > 0 ? (int)((row + rows.begin_of(row)) % (u64)count) : 0, place = -1;
    for (int first = 0; first < places && place < 0 && count > 0; first += 32) {
        int p = first + lane;
        u32 own = __ballot_sync(0xffffffffu, p < places && residents[p] == (u64)(i64)expert);
        if (before >= __popc(own)) {
            before -= __popc(own);
            continue;
        }
        for (; before > 0; before--) own &= own - 1;
        place = first + __ffs(own) - 1;
    }
    if (lane == 0) out[i] = (float)place;
}

// Gives each choice the next slot of its expert among those of its group of tokens: one block per group, of which each
// warp walks an equal part of the choices. Of SLOT_EXPERTS experts at once, the warps count their choices; the slots of a
// warp begin behind those of the warps before it. Other experts follow in further passes.
constexpr int SLOT_EXPERTS = 256, MAX_SLOT_WARPS = 32, MAX_EXPERTS = 1 << 24;
extern "C" __global__ void __launch_bounds__(32 * MAX_SLOT_WARPS) expert_slots(const float *chosen, float *out, int capacity, int group_choices, int real_choices, int choices) {
    __shared__ int counts[MAX_SLOT_WARPS][SLOT_EXPERTS];
    __shared__ int next_expert;
    let_successor_begin();
    wait_for_predecessor();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int part = div_up(div_up(group_choices, 32), warps) * 32, group = blockIdx.x * group_choices;
    int begin = group + warp * part, end = min(min(begin + part, group + group_choices), choices);
    for (int i = begin + lane; i < end; i += 32) out[i] = -1.0f;
    // Padding is at the end and has no slots.
    end = min(end, real_choices);
    for (int first = 0; first < MAX_EXPERTS; first = next_expert) {
        __syncthreads();
        for (int e = threadIdx.x; e < warps * SLOT_EXPERTS; e += blockDim.x) counts[0][e] = 0;
        if (threadIdx.x == 0) next_expert = MAX_EXPERTS;
        __syncthreads();
        for (int i = begin + lane; i < end; i += 32) {
            int expert = expert_of_choice(chosen[i], MAX_EXPERTS);
            if (expert >= first + SLOT_EXPERTS) atomicMin(&next_expert, expert);
            else if (expert >= first) atomicAdd(&counts[warp][expert - first], 1);
        }
        __syncthreads();
        for (int e = threadIdx.x; e < SLOT_EXPERTS; e += blockDim.x)
            for (int w = 0, before = 0; w < warps; w++) {
                int count = counts[w][e];
                counts[w][e] = before;
                before += count;
            }
        __syncthreads();
        for (int i0 = begin; i0 < end; i0 += 32) {
            int i = i0 + lane, expert = i < end ? expert_of_choice(chosen[i], MAX_EXPERTS) - first : -1;
            if (expert < 0 || expert >= SLOT_EXPERTS) expert = -1;
            u32 same = __match_any_sync(0xffffffffu, expert), earlier = same & ((1u << lane) - 1);
            int slot = expert >= 0 ? counts[warp][expert] + __popc(earlier) : capacity;
            if (slot < capacity) out[i] = (float)slot;
            __syncwarp();
            if (expert >= 0 && !earlier) counts[warp][expert] += __popc(same);
            __syncwarp();
        }
    }
}

// Moves a choice of a token to the first expert behind its own choices that has a free slot. Returns whether there was
// one. All lanes of a warp take part.
__device__ __forceinline__ bool move_choice(const float *ranking, float *own, int *taken, int choice, int ranked, int k, int capacity) {
    for (int first = k; first < ranked; first += 32) {
        int j = first + threadIdx.x % 32;
        float to = j < ranked ? ranking[j] : -1.0f;
        int expert = expert_of_choice(to, MAX_RANKED_EXPERTS);
        bool is_free = expert >= 0 && taken[expert] < capacity;
        for (int c = 0; is_free && c < k; c++) is_free = own[c] != to;
        u32 found = __ballot_sync(0xffffffffu, is_free);
        if (!found) continue;
        if (threadIdx.x % 32 == __ffs(found) - 1) own[choice] = to, taken[expert]++;
        __syncwarp();
        return true;
    }
    return false;
}
// Takes the first k experts of each token's ranking and moves those beyond the capacity, one block per group of tokens.
// Each move depends on those before it, so one warp makes them.
extern "C" __global__ void expert_reroute(const float *ranking, float *out, int ranked, int k, int capacity, int reroutes, int group_tokens, int real_tokens, int tokens) {
    // The slots that each expert has given away, and the choices of it that the moving warp has passed.
    __shared__ int taken[MAX_RANKED_EXPERTS], passed[MAX_RANKED_EXPERTS];
    let_successor_begin();
    wait_for_predecessor();
    int first = blockIdx.x * group_tokens, end = min(first + group_tokens, tokens), real = min(end, real_tokens), lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < MAX_RANKED_EXPERTS; e += blockDim.x) taken[e] = passed[e] = 0;
    __syncthreads();
    for (int i = first * k + threadIdx.x; i < end * k; i += blockDim.x) {
        float choice = ranking[(i64)(i / k) * ranked + i % k];
        int expert = expert_of_choice(choice, MAX_RANKED_EXPERTS);
        out[i] = choice;
        if (i < real * k && expert >= 0) atomicAdd(&taken[expert], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < MAX_RANKED_EXPERTS; e += blockDim.x) taken[e] = min(taken[e], capacity);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    for (int i0 = first * k; i0 < real * k && reroutes > 0; i0 += 32) {
        int i = i0 + lane;
        int expert = i < real * k ? expert_of_choice(ranking[(i64)(i / k) * ranked + i % k], MAX_RANKED_EXPERTS) : -1;
        u32 same = __match_any_sync(0xffffffffu, expert), earlier = same & ((1u << lane) - 1);
        bool waits = expert >= 0 && passed[expert] + __popc(earlier) >= capacity;
        __syncwarp();
        if (expert >= 0 && !earlier) passed[expert] += __popc(same);
        __syncwarp();
        for (u32 waiting = __ballot_sync(0xffffffffu, waits); waiting && reroutes > 0; waiting &= waiting - 1) {
            int at = i0 + __ffs(waiting) - 1, token = at / k;
            if (move_choice(ranking + (i64)token * ranked, out + (i64)token * k, taken, at % k, ranked, k, capacity)) reroutes--;
        }
    }
}

// Counts the slots that an expert has given to a group of tokens, one warp per expert and group.
extern "C" __global__ void expert_counts(const float *chosen, const float *slots, float *out, int group_choices, int choices, int token_groups, int experts) {
    let_successor_begin();
    wait_for_predecessor();
    int part = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (part >= experts * token_groups) return;
    float expert = (float)(part / token_groups);
    int begin = part % token_groups * group_choices, end = min(begin + group_choices, choices), count = 0;
    for (int i = begin + lane; i < end; i += 32) count += chosen[i] == expert && slots[i] >= 0.0f;
    for (int o = 16; o > 0; o >>= 1) count += __shfl_xor_sync(0xffffffffu, count, o);
    if (lane == 0) out[part] = (float)count;
}

// Counts the choices of an expert, those that kept it, those that moved to it, and those without a slot: one warp per
// expert.
extern "C" __global__ void expert_statistics(const float *choices, const float *chosen, const float *slots, float *out, int real_choices, int experts) {
    let_successor_begin();
    wait_for_predecessor();
    int e = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (e >= experts) return;
    float expert = (float)e;
    int counts[4] = {0, 0, 0, 0};
    for (int i = lane; i < real_choices; i += 32) {
        bool chose = choices[i] == expert, has_slot = slots[i] >= 0.0f, kept = chosen[i] == choices[i];
        counts[0] += chose;
        counts[1] += chose && has_slot && kept;
        counts[2] += choices[i] >= 0.0f && chosen[i] == expert && has_slot && !kept;
        counts[3] += chose && !has_slot;
    }
    for (int c = 0; c < 4; c++) {
        for (int o = 16; o > 0; o >>= 1) counts[c] += __shfl_xor_sync(0xffffffffu, counts[c], o);
        if (lane == 0) out[4 * e + c] = (float)counts[c];
    }
}

// Fills words with zeros.
extern "C" __global__ void zero_words(u32 *out, i64 n) {
    let_successor_begin();
    wait_for_predecessor();
    ELEMENT_INDEX(n);
    out[i] = 0;
}

// Copies the row of each choice's token to the slot of its expert, one block per choice.
template <typename T> __device__ void pack_rows(const T *x, const float *chosen, const float *slots, T *out, int width, int k, int capacity, int group_tokens, int token_groups, int experts) {
    let_successor_begin();
    wait_for_predecessor();
    float expert = chosen[blockIdx.x], slot = slots[blockIdx.x];
    if (!(slot >= 0.0f && slot < (float)capacity && expert >= 0.0f && expert < (float)experts)) return;
    int token = blockIdx.x / k, part = (int)expert * token_groups + token / group_tokens;
    x += (i64)token * width, out += ((i64)part * capacity + (int)slot) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[c] = x[c];
}
extern "C" __global__ void expert_pack_f32(const float *x, const float *chosen, const float *slots, float *out, int width, int k, int capacity, int group_tokens, int token_groups, int experts) {
    pack_rows(x, chosen, slots, out, width, k, capacity, group_tokens, token_groups, experts);
}
extern "C" __global__ void expert_pack_bf16(const bf16 *x, const float *chosen, const float *slots, bf16 *out, int width, int k, int capacity, int group_tokens, int token_groups, int experts) {
    pack_rows(x, chosen, slots, out, width, k, capacity, group_tokens, token_groups, experts);
}

// Multiplies ROWS rows with one row of weights.
template <typename T, int ROWS> __device__ __forceinline__ void multiply_and_store(const T *x, const T *w, T *out, int k, int m, int act) {
    float sum[ROWS];
    multiply_rows<T, ROWS>(x, w, k, sum);
    for (int r = 0; r < ROWS; r++)
        if (threadIdx.x % 32 == 0) from_f32(activate(sum[r], act), out[(i64)r * m]);
}
// Returns the part that has `n` filled parts before it, or −1. All lanes of a warp take part.
__device__ __forceinline__ int find_filled_part(const float *counts, int parts, int n) {
    for (int first = 0; first < parts; first += 32) {
        int part = first + threadIdx.x % 32;
        u32 filled = __ballot_sync(0xffffffffu, part < parts && counts[part] > 0.0f);
        if (n >= __popc(filled)) {
            n -= __popc(filled);
            continue;
        }
        for (; n > 0; n--) filled &= filled - 1;
        return first + __ffs(filled) - 1;
    }
    return -1;
}
// Multiplies the filled slots of each part, which are those of one group and one group of tokens, with the weights of the
// group; the other slots are zeros. A warp computes a column of one part, 8 rows at a time: of one expert, few slots are
// filled. A launch has blocks for as many parts as can have filled slots at once; in a decoding step, most have none.
// `experts` holds the address of each group's weights; without it, they lie one behind the other from `w` on.
template <typename T> __device__ void multiply_parts(const T *x, const T *w, const u64 *experts, const float *counts, T *out, int parts, int token_groups, int slots, int k, int m, int act) {
    let_successor_begin();
    wait_for_predecessor();
    i64 of_part = (i64)slots * m;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < parts * of_part; i += (i64)gridDim.x * blockDim.x)
        if (!(counts[i / of_part] > 0.0f)) from_f32(0.0f, out[i]);
    int blocks = div_up(m, (int)blockDim.x / 32), part = find_filled_part(counts, parts, blockIdx.x / blocks);
    int column = blockIdx.x % blocks * (blockDim.x / 32) + threadIdx.x / 32;
    if (part < 0 || column >= m) return;
    int count = min(slots, (int)counts[part]), row = 0;
    int group = part / token_groups;
    w = (experts ? (const T *)experts[group] : w + (i64)group * m * k) + (i64)column * k;
    x += (i64)part * slots * k, out += (i64)part * of_part + column;
    for (; row + 8 <= count; row += 8) multiply_and_store<T, 8>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    if (row + 4 <= count) multiply_and_store<T, 4>(x + (i64)row * k, w, out + (i64)row * m, k, m, act), row += 4;
    for (; row < count; row++) multiply_and_store<T, 1>(x + (i64)row * k, w, out + (i64)row * m, k, m, act);
    for (row = count + threadIdx.x % 32; row < slots; row += 32) from_f32(0.0f, out[(i64)row * m]);
}
extern "C" __global__ void grouped_matmul_f32(const float *x, const float *w, const u64 *experts, const float *counts, float *out, int parts, int token_groups, int slots, int k, int m, int act) {
    multiply_parts(x, w, experts, counts, out, parts, token_groups, slots, k, m, act);
}
extern "C" __global__ void grouped_matmul_bf16(const bf16 *x, const bf16 *w, const u64 *experts, const float *counts, bf16 *out, int parts, int token_groups, int slots, int k, int m, int act) {
    multiply_parts(x, w, experts, counts, out, parts, token_groups, slots, k, m, act);
}

// Copies matrices of experts to their slots. `copies` holds their number, and for each the address of the matrix, that of
// its slot, and their length in units of 16 bytes. Host memory answers late, so each thread has four loads in flight.
extern "C" __global__ void fetch_experts(const u64 *copies) {
    u64 count = copies[0], first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = 0; i < count; i++) {
        const uint4 *from = (const uint4 *)copies[3 * i + 1];
        uint4 *to = (uint4 *)copies[3 * i + 2];
        u64 units = copies[3 * i + 3], at = first;
        for (; at + 3 * step < units; at += 4 * step) {
            uint4 parts[4];
#pragma unroll
            for (int j = 0; j < 4; j++) parts[j] = from[at + j * step];
#pragma unroll
            for (int j = 0; j < 4; j++) to[at + j * step] = parts[j];
        }
        for (; at < units; at += step) to[at] = from[at];
    }
}

// The slots of y: those of `experts` experts from `first_expert` on, for groups of tokens with `capacity` slots each.
struct CombinedSlots {
    int first_expert, experts, token_groups, group_tokens, capacity;
};
// Adds the weighted results of a token's experts, of those that y holds, ascending by `order`. A block adds some columns
// of one token.
template <typename T> __device__ void combine_experts(const T *y, const float *chosen, const float *order, const float *slots, const float *weights, T *out, int width, int k, const CombinedSlots &of) {
    // The rows of the choices in the order in which they are added, and −1 for one without a slot; then their weights.
    extern __shared__ int rows[];
    float *row_weights = (float *)(rows + k);
    let_successor_begin();
    wait_for_predecessor();
    int blocks = div_up(width, (int)blockDim.x), token = blockIdx.x / blocks;
    chosen += (i64)token * k, order += (i64)token * k, slots += (i64)token * k, weights += (i64)token * k;
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        int before = 0;
        float slot = slots[j], held = chosen[j] - (float)of.first_expert;
        // Of numbers as integers, NaN has a place too, so that every row is written.
        u32 own = float_order(order[j]);
        for (int i = 0; i < k; i++) before += float_order(order[i]) < own || (float_order(order[i]) == own && i < j);
        bool has_slot = slot >= 0.0f && slot < (float)of.capacity && held >= 0.0f && held < (float)of.experts;
        rows[before] = has_slot ? ((int)held * of.token_groups + token / of.group_tokens) * of.capacity + (int)slot : -1;
        row_weights[before] = weights[j];
    }
    __syncthreads();
    int c = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    if (c >= width) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < k; i++)
        if (rows[i] >= 0) sum = fmaf(row_weights[i], to_f32(y[(i64)rows[i] * width + c]), sum);
    from_f32(sum, out[(i64)token * width + c]);
}
extern "C" __global__ void expert_combine_f32(const float *y, const float *chosen, const float *order, const float *slots, const float *weights, float *out, int width, int k, const __grid_constant__ CombinedSlots of) {
    combine_experts(y, chosen, order, slots, weights, out, width, k, of);
}
extern "C" __global__ void expert_combine_bf16(const bf16 *y, const float *chosen, const float *order, const float *slots, const float *weights, bf16 *out, int width, int k, const __grid_constant__ CombinedSlots of) {
    combine_experts(y, chosen, order, slots, weights, out, width, k, of);
}
