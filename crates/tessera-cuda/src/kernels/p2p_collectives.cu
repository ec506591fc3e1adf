// Collectives over peer memory, with one kernel launch each.
//
// Every member owns flags that its peers write. A member that begins its n-th collective writes (n,
// fingerprint) to each peer and copies nothing until it has received the same from all. When all of
// its blocks have copied their share it writes n to each peer and ends when it has received n from
// all. So no member reads an operand that is not ready or writes a result that is still being read,
// and an operand may be overwritten once the kernel has ended.
//
// A collective whose data other kernels or DMA copy engines transfer is bracketed by two launches,
// one per rendezvous. Copy engines do not check for faults: after a failed rendezvous they still
// copy, but no member uses the data as a result.
//
// The device counts n, because launches are replayed from graphs. A waiting warp polls an abort
// word in host memory, a deadline and the group's fault word: after the first fault no launch of
// the group waits or copies.
//
// Compile options define MEMBERS, the size of the group, and ME, this member's index, so
// that the order of accesses is known at compile time.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 MAX_MEMBERS = 16;
static_assert(MEMBERS >= 1 && MEMBERS <= MAX_MEMBERS && ME < MEMBERS, "members");
constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
static_assert(WARPS >= MAX_MEMBERS, "a block has a warp for every member");
constexpr u32 FULL_WARP = 0xffffffffu;

// Words that peers write into a member's memory, followed by the member's own state.
struct Flags {
    u64 arrived[MAX_MEMBERS];   // by member: (n, fingerprint)
    u64 done[MAX_MEMBERS];      // by member: (n, 0)
    u32 sequence;        // number of completed collectives
    u32 blocks_done;        // blocks of the current collective that have copied their share
    u32 fault;           // kind of the first fault
    u32 opened;           // number of the open collective, 0 if the group has failed
};
// The host relies on `opened` being the last word.
static_assert(sizeof(Flags) == 272, "the host uses the same layout");

// Signals in host memory.
struct Host {
    u32 abort;           // written by the host
    u32 padding[31];
    u32 arrived;         // op that began last
    u32 done;            // op that ended last
    u32 fault;           // written after the fields below
    u32 op, awaited, peers, peer, mine, theirs, sequence;
};

enum Fault : u32 { MISMATCH = 1, TIMEOUT = 2, ABORTED = 3 };
enum Awaited : u32 { ARRIVAL = 0, END = 1 };

struct Head {
    Flags* flags[MAX_MEMBERS];  // each member's flags, at addresses valid on this device
    Host* host;
    u64 timeout_ns;
    u32 op, fingerprint;
};

// Rows of equal length to copy from one place to another, or to fill with zeros if `from` is 0. Lengths
// are in units of `width` bytes, pitches in bytes.
struct Rect {
    u64 from, to, from_pitch, to_pitch;
    u32 per_row, rows, width;
    u32 multiplier, shift;  // quotient by per_row: (high(i * multiplier) + i) >> shift
    u32 pad;
};

struct CopyArgs {
    Head head;
    Rect rects[MAX_MEMBERS];    // by receiving member
};

struct ReduceArgs {
    Head head;
    Rect rect;           // its addresses are offsets from each of these:
    u64 from[MAX_MEMBERS];      // every member's operand
    u64 to[MAX_MEMBERS];        // every member's result
    u64 to_all;             // non-zero if all members get the result of this reduction, 0 if only this member does
};

// Accesses to memory that peers or the host write.

__device__ u64 load_acquire(const u64* at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ void store_release(u64* at, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(v) : "memory");
}

__device__ u32 load_relaxed(const u32* at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ void store_relaxed(u32* at, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(v) : "memory");
}

__device__ u64 now_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) : : "memory");
    return v;
}

// Records the group's first fault; later faults are ignored. Called by one thread.
__device__ void report_fault(const Head& h, u32 fault, u32 awaited, u32 n, u32 peers, u32 peer, u32 theirs) {
    if (atomicCAS(&h.flags[ME]->fault, 0u, fault) != 0) return;
    Host* to = h.host;
    store_relaxed(&to->op, h.op);
    store_relaxed(&to->awaited, awaited);
    store_relaxed(&to->peers, peers);
    store_relaxed(&to->peer, peer);
    store_relaxed(&to->mine, h.fingerprint);
    store_relaxed(&to->theirs, theirs);
    store_relaxed(&to->sequence, n);
    __threadfence_system();
    store_relaxed(&to->fault, fault);
}

// Waits until every peer has written n; called by one whole warp. Returns false if the wait ended
// with a fault.
__device__ bool wait_for_peers(const Head& h, u32 awaited, u32 n) {
    Flags* own = h.flags[ME];
    const u32 lane = threadIdx.x % 32;
    const bool peer = lane < MEMBERS && lane != ME;
    const u64* word = (awaited == ARRIVAL ? own->arrived : own->done) + (peer ? lane : 0);
    u64 wait_start = 0;
    for (u32 attempt = 1;; ++attempt) {
        const u64 received = peer ? load_acquire(word) : 0;
        const bool has_arrived = !peer || u32(received >> 32) == n;
        const bool is_mismatched = peer && has_arrived && awaited == ARRIVAL && u32(received) != h.fingerprint;
        const u32 missing = __ballot_sync(FULL_WARP, !has_arrived);
        const u32 mismatched = __ballot_sync(FULL_WARP, is_mismatched);
        if (mismatched != 0) {
            const u32 first = u32(__ffs(int(mismatched))) - 1;
            const u32 theirs = __shfl_sync(FULL_WARP, u32(received), int(first));
            if (lane == 0) report_fault(h, MISMATCH, awaited, n, mismatched, first, theirs);
            return false;
        }
        if (missing == 0) return true;
        if (attempt % 64 != 0) continue;
        u32 stop = 0;
        if (lane == 0) {
            const u64 now = now_ns();
            if (wait_start == 0) wait_start = now;
            if (load_relaxed(&own->fault) != 0) {
                stop = 1;
            } else if (load_relaxed(&h.host->abort) != 0) {
                report_fault(h, ABORTED, awaited, n, missing, 0, 0);
                stop = 1;
            } else if (now - wait_start > h.timeout_ns) {
                report_fault(h, TIMEOUT, awaited, n, missing, 0, 0);
                stop = 1;
            }
        }
        if (__shfl_sync(FULL_WARP, stop, 0) != 0) return false;
    }
}

// Begins a collective: returns its number once every peer has begun it too, or 0 if the group has
// failed. Called by all threads of a block.
__device__ u32 begin_collective(const Head& h) {
    __shared__ u32 number;
    if (threadIdx.x < 32) {
        Flags* own = h.flags[ME];
        const u32 lane = threadIdx.x;
        u32 n = load_relaxed(&own->sequence) + 1;
        if (n == 0) n = 1;
        bool healthy = __all_sync(FULL_WARP, load_relaxed(&own->fault) == 0);
        const bool peer = lane < MEMBERS && lane != ME;
        const u64 arrival = u64(n) << 32 | h.fingerprint;
        if (healthy && blockIdx.x == 0) {
            if (peer) store_release(&h.flags[lane]->arrived[ME], arrival);
            if (lane == 0) store_relaxed(&h.host->arrived, h.op);
        }
        if (healthy && !wait_for_peers(h, ARRIVAL, n)) {
            // Block 0 may not have got this far, and a peer that waits for this member must still
            // receive its fingerprint.
            if (peer) store_release(&h.flags[lane]->arrived[ME], arrival);
            healthy = false;
        }
        if (lane == 0) number = healthy ? n : 0;
    }
    __syncthreads();
    return number;
}

// Ends a collective: the last block to finish notifies the peers and waits for them. Called by all
// threads of a block.
__device__ void end_collective(const Head& h, u32 n) {
    __syncthreads();
    if (threadIdx.x >= 32) return;
    Flags* own = h.flags[ME];
    const u32 lane = threadIdx.x;
    u32 last = 1;
    if (lane == 0) {
        __threadfence_system();
        if (gridDim.x > 1) {
            last = atomicAdd(&own->blocks_done, 1u) == gridDim.x - 1;
            __threadfence_system();
        }
    }
    if (__shfl_sync(FULL_WARP, last, 0) == 0) return;
    __syncwarp();
    if (lane < MEMBERS && lane != ME) store_release(&h.flags[lane]->done[ME], u64(n) << 32);
    const bool completed = wait_for_peers(h, END, n);
    if (lane == 0 && completed) {
        own->blocks_done = 0;
        store_relaxed(&own->sequence, n);
        store_relaxed(&h.host->done, h.op);
    }
}

// Copies.

struct Offsets {
    u64 from, to;
};

__device__ Offsets offsets_at(const Rect& r, u32 i, u32 unit) {
    u32 row = 0;
    if (r.rows > 1) row = (__umulhi(i, r.multiplier) + i) >> r.shift;
    const u64 column = u64(i - row * r.per_row) * unit;
    return {u64(row) * r.from_pitch + column, u64(row) * r.to_pitch + column};
}

template <class V>
__device__ void copy_elements(const Rect& r, u32 thread, u32 threads) {
    constexpr u32 DEPTH = 8;
    const u32 total = r.per_row * r.rows;
    u32 i = thread;
    if (r.from == 0) {
        for (; i < total; i += threads) *reinterpret_cast<V*>(r.to + offsets_at(r, i, sizeof(V)).to) = V{};
        return;
    }
    for (; i + (DEPTH - 1) * threads < total; i += DEPTH * threads) {
        V v[DEPTH];
        u64 to[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            const Offsets w = offsets_at(r, i + k * threads, sizeof(V));
            v[k] = *reinterpret_cast<const V*>(r.from + w.from);
            to[k] = r.to + w.to;
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) *reinterpret_cast<V*>(to[k]) = v[k];
    }
    for (; i < total; i += threads) {
        const Offsets w = offsets_at(r, i, sizeof(V));
        *reinterpret_cast<V*>(r.to + w.to) = *reinterpret_cast<const V*>(r.from + w.from);
    }
}

__device__ void copy_rect(const Rect& r, u32 thread, u32 threads) {
    switch (r.width) {
        case 16: return copy_elements<uint4>(r, thread, threads);
        case 8: return copy_elements<uint2>(r, thread, threads);
        case 4: return copy_elements<u32>(r, thread, threads);
        case 2: return copy_elements<u16>(r, thread, threads);
        default: return copy_elements<u8>(r, thread, threads);
    }
}

// Each warp copies for one receiving member. Each round of warps assigns four warps to every peer
// and one to this member, whose own memory is faster to write.
extern "C" __global__ void __launch_bounds__(THREADS, 1) copy(const __grid_constant__ CopyArgs a) {
    const u32 n = begin_collective(a.head);
    if (n == 0) return;
    constexpr u32 PEERS = MEMBERS - 1;
    constexpr u32 ROUND = 4 * PEERS + 1;
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const u32 warps = gridDim.x * WARPS;
    const u32 round = warp / ROUND, slot = warp % ROUND, rest = warps % ROUND;
    u32 to, mine, all;
    if (slot == PEERS) {
        to = ME;
        mine = round;
        all = warps / ROUND + (rest > PEERS);
    } else {
        const u32 place = slot - (slot > PEERS);
        const u32 peer = place % max(PEERS, 1u);
        to = (ME + 1 + peer) % MEMBERS;
        mine = 4 * round + place / max(PEERS, 1u);
        all = 4 * (warps / ROUND) + (rest > peer);
        for (u32 k = 1; k < 4; ++k) all += rest > 1 + k * PEERS + peer;
    }
    const Rect r = a.rects[to];
    copy_rect(r, mine * 32 + threadIdx.x % 32, all * 32);
    end_collective(a.head, n);
}

// Reductions, accumulated in f32.

struct F32 {
    using Bits = u32;
    static __device__ float to_f32(u32 bits) { return __uint_as_float(bits); }
    static __device__ u32 from_f32(float v) { return __float_as_uint(v); }
};

struct Bf16 {
    using Bits = u16;
    static __device__ float to_f32(u16 bits) { return __uint_as_float(u32(bits) << 16); }
    static __device__ u16 from_f32(float v) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
        return bits;
    }
};

// Adds in order of members.
struct Sum {
    static __device__ float reduce(const float (&t)[MEMBERS]) {
        float s = t[0];
#pragma unroll
        for (u32 m = 1; m < MEMBERS; ++m) s = s + t[m];
        return s;
    }
};

// Adds neighbours pairwise; an operand without a neighbour moves up one level unchanged.
struct Tree {
    template <u32 BEGIN, u32 LEN>
    static __device__ float reduce_range(const float (&t)[MEMBERS]) {
        if constexpr (LEN == 1) {
            return t[BEGIN];
        } else {
            constexpr u32 LEFT = LEN > 8 ? 8 : LEN > 4 ? 4 : LEN > 2 ? 2 : 1;
            return reduce_range<BEGIN, LEFT>(t) + reduce_range<BEGIN + LEFT, LEN - LEFT>(t);
        }
    }
    static __device__ float reduce(const float (&t)[MEMBERS]) { return reduce_range<0, MEMBERS>(t); }
};

// Ignores NaNs unless all operands are NaN; of two zeros with different signs the first is kept.
struct Max {
    static __device__ float reduce(const float (&t)[MEMBERS]) {
        float s = t[0];
#pragma unroll
        for (u32 m = 1; m < MEMBERS; ++m) s = t[m] > s || s != s ? t[m] : s;
        return s;
    }
};

template <class T, class R, class V>
__device__ void reduce_rect(const ReduceArgs& a) {
    using Bits = typename T::Bits;
    constexpr u32 LANES = sizeof(V) / sizeof(Bits);
    constexpr u32 DEPTH = MEMBERS <= 2 ? 4 : MEMBERS <= 4 ? 2 : 1;
    union Vector {
        V v;
        Bits bits[LANES];
    };
    const Rect r = a.rect;
    const u32 total = r.per_row * r.rows;
    const u32 threads = gridDim.x * THREADS;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += DEPTH * threads) {
        Vector in[DEPTH][MEMBERS];
        u64 to[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (i + k * threads >= total) continue;
            const Offsets w = offsets_at(r, i + k * threads, sizeof(V));
            to[k] = r.to + w.to;
#pragma unroll
            for (u32 d = 1; d <= MEMBERS; ++d) {
                const u32 m = (ME + d) % MEMBERS;
                in[k][m].v = *reinterpret_cast<const V*>(a.from[m] + r.from + w.from);
            }
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (i + k * threads >= total) continue;
            Vector out;
#pragma unroll
            for (u32 e = 0; e < LANES; ++e) {
                float t[MEMBERS];
#pragma unroll
                for (u32 m = 0; m < MEMBERS; ++m) t[m] = T::to_f32(in[k][m].bits[e]);
                out.bits[e] = T::from_f32(R::reduce(t));
            }
#pragma unroll
            for (u32 d = 1; d <= MEMBERS; ++d) {
                const u32 m = (ME + d) % MEMBERS;
                if (m == ME || a.to_all != 0) *reinterpret_cast<V*>(a.to[m] + to[k]) = out.v;
            }
        }
    }
}

template <class T, class R>
__device__ void reduce(const ReduceArgs& a) {
    const u32 n = begin_collective(a.head);
    if (n == 0) return;
    if (a.rect.width == 16) {
        reduce_rect<T, R, uint4>(a);
    } else {
        reduce_rect<T, R, typename T::Bits>(a);
    }
    end_collective(a.head, n);
}

#define REDUCE(name, T, R)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ ReduceArgs a) {    \
        reduce<T, R>(a);                                                                                     \
    }
REDUCE(sum_f32, F32, Sum)
REDUCE(tree_f32, F32, Tree)
REDUCE(max_f32, F32, Max)
REDUCE(sum_bf16, Bf16, Sum)
REDUCE(tree_bf16, Bf16, Tree)
REDUCE(max_bf16, Bf16, Max)

// `open` and `close` bracket a collective whose data is transferred by DMA copy engines or by the
// kernel that produces it. Between the two, members' results may be written.
extern "C" __global__ void open(const __grid_constant__ Head h) {
    const u32 n = begin_collective(h);
    if (threadIdx.x == 0) store_relaxed(&h.flags[ME]->opened, n);
}
extern "C" __global__ void close(const __grid_constant__ Head h) {
    const u32 n = load_relaxed(&h.flags[ME]->opened);
    if (n != 0) end_collective(h, n);
}

// For a group that another transport synchronises: copies rects within this device, one per row of
// the grid.
extern "C" __global__ void __launch_bounds__(THREADS, 1) pack(const __grid_constant__ CopyArgs a) {
    const Rect r = a.rects[blockIdx.y];
    copy_rect(r, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}

// Reports to the host which op has begun or ended.
extern "C" __global__ void mark(u32* word, u32 op) {
    if (threadIdx.x == 0) store_relaxed(word, op);
}
