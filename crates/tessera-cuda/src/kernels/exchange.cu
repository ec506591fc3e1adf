// Collectives over memory of peers: one launch each.
//
// Every member owns flags that the others write. A member that begins its n-th collective writes (n, fingerprint) to
// each peer and moves nothing until it has the same from all; when all of its blocks have moved what is theirs it writes n to
// each peer and ends when it has n from all. So no member reads an operand that is not ready or writes into a result that
// is still read, and an operand may be overwritten once the kernel has ended.
//
// What is moved by others than these kernels stands between two launches, one for each meeting. Copy engines do not look for
// faults: after a failed meeting they still copy, and no member takes what came for a result.
//
// n is counted on the device, for launches are replayed. Whoever waits watches an abort word on the host, a deadline and
// the group's own fault: after the first fault no launch of the group waits or moves anything.
//
// Defined from outside: MEMBERS of the group, and ME, which of them this is: the order of accesses is then known when
// this is compiled.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 MOST = 16;
static_assert(MEMBERS >= 1 && MEMBERS <= MOST && ME < MEMBERS, "members");
constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
static_assert(WARPS >= MOST, "a block has a warp for every member");
constexpr u32 EVERYONE = 0xffffffffu;

// What peers write into a member's memory, and what it keeps beside that for itself.
struct Flags {
    u64 arrived[MOST];   // by member: (n, fingerprint)
    u64 done[MOST];      // by member: (n, 0)
    u32 sequence;        // collectives that have ended
    u32 finished;        // blocks of this one that have moved all that is theirs
    u32 fault;           // kind of the first one
    u32 going;           // number of the collective that was opened, 0 where the group has failed
};
// The host knows that `going` is the last word.
static_assert(sizeof(Flags) == 272, "as the host says");

// Words in the host's memory.
struct Host {
    u32 abort;           // written by the host
    u32 apart[31];
    u32 arrived;         // op that was begun last
    u32 done;            // op that ended last
    u32 fault;           // written after what follows
    u32 op, awaited, peers, peer, mine, theirs, sequence;
};

enum Fault : u32 { MISMATCH = 1, TIMEOUT = 2, ABORTED = 3 };
enum Awaited : u32 { ARRIVAL = 0, END = 1 };

struct Head {
    Flags* flags[MOST];  // of each member, as this device sees them
    Host* host;
    u64 patience_ns;
    u32 op, fingerprint;
};

// Rows of equal length at two places. Lengths count units of `width` bytes, pitches bytes.
struct Rect {
    u64 from, to, from_pitch, to_pitch;
    u32 per_row, rows, width;
    u32 multiplier, shift;  // quotient by per_row: (high(i * multiplier) + i) >> shift
    u32 pad;
};

struct CopyArgs {
    Head head;
    Rect rects[MOST];    // by member that it goes to
};

struct ReduceArgs {
    Head head;
    Rect rect;           // its places are offsets that are added to each of these:
    u64 from[MOST];      // every member's operand
    u64 to[MOST];        // every member's result
    u64 all;             // whether all of them get what is reduced here, or this member alone
};

// Memory that others write.

__device__ u64 acquire(const u64* at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ void release(u64* at, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(v) : "memory");
}

__device__ u32 look(const u32* at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ void tell(u32* at, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(v) : "memory");
}

__device__ u64 now_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) : : "memory");
    return v;
}

// The first fault of the group stays; called by one thread.
__device__ void fail(const Head& h, u32 fault, u32 awaited, u32 n, u32 peers, u32 peer, u32 theirs) {
    if (atomicCAS(&h.flags[ME]->fault, 0u, fault) != 0) return;
    Host* to = h.host;
    tell(&to->op, h.op);
    tell(&to->awaited, awaited);
    tell(&to->peers, peers);
    tell(&to->peer, peer);
    tell(&to->mine, h.fingerprint);
    tell(&to->theirs, theirs);
    tell(&to->sequence, n);
    __threadfence_system();
    tell(&to->fault, fault);
}

// Waits, as one whole warp, until every peer has written n. False where the wait ended otherwise.
__device__ bool await(const Head& h, u32 awaited, u32 n) {
    Flags* own = h.flags[ME];
    const u32 lane = threadIdx.x % 32;
    const bool peer = lane < MEMBERS && lane != ME;
    const u64* word = (awaited == ARRIVAL ? own->arrived : own->done) + (peer ? lane : 0);
    u64 began = 0;
    for (u32 turn = 1;; ++turn) {
        const u64 seen = peer ? acquire(word) : 0;
        const bool here = !peer || u32(seen >> 32) == n;
        const bool differs = peer && here && awaited == ARRIVAL && u32(seen) != h.fingerprint;
        const u32 missing = __ballot_sync(EVERYONE, !here);
        const u32 other = __ballot_sync(EVERYONE, differs);
        if (other != 0) {
            const u32 first = u32(__ffs(int(other))) - 1;
            const u32 theirs = __shfl_sync(EVERYONE, u32(seen), int(first));
            if (lane == 0) fail(h, MISMATCH, awaited, n, other, first, theirs);
            return false;
        }
        if (missing == 0) return true;
        if (turn % 64 != 0) continue;
        u32 stop = 0;
        if (lane == 0) {
            const u64 now = now_ns();
            if (began == 0) began = now;
            if (look(&own->fault) != 0) {
                stop = 1;
            } else if (look(&h.host->abort) != 0) {
                fail(h, ABORTED, awaited, n, missing, 0, 0);
                stop = 1;
            } else if (now - began > h.patience_ns) {
                fail(h, TIMEOUT, awaited, n, missing, 0, 0);
                stop = 1;
            }
        }
        if (__shfl_sync(EVERYONE, stop, 0) != 0) return false;
    }
}

// Number of this collective once every peer has begun it too; 0 where the group has failed. All threads of a block.
__device__ u32 begin(const Head& h) {
    __shared__ u32 number;
    if (threadIdx.x < 32) {
        Flags* own = h.flags[ME];
        const u32 lane = threadIdx.x;
        u32 n = look(&own->sequence) + 1;
        if (n == 0) n = 1;
        bool going = __all_sync(EVERYONE, look(&own->fault) == 0);
        const bool peer = lane < MEMBERS && lane != ME;
        const u64 arrival = u64(n) << 32 | h.fingerprint;
        if (going && blockIdx.x == 0) {
            if (peer) release(&h.flags[lane]->arrived[ME], arrival);
            if (lane == 0) tell(&h.host->arrived, h.op);
        }
        if (going && !await(h, ARRIVAL, n)) {
            // The first block may not have come that far; a peer that waits for this member is to learn what it brought.
            if (peer) release(&h.flags[lane]->arrived[ME], arrival);
            going = false;
        }
        if (lane == 0) number = going ? n : 0;
    }
    __syncthreads();
    return number;
}

// Tells peers that this member is through, and waits for them, in whichever block is the last. All threads of a block.
__device__ void end(const Head& h, u32 n) {
    __syncthreads();
    if (threadIdx.x >= 32) return;
    Flags* own = h.flags[ME];
    const u32 lane = threadIdx.x;
    u32 last = 1;
    if (lane == 0) {
        __threadfence_system();
        if (gridDim.x > 1) {
            last = atomicAdd(&own->finished, 1u) == gridDim.x - 1;
            __threadfence_system();
        }
    }
    if (__shfl_sync(EVERYONE, last, 0) == 0) return;
    __syncwarp();
    if (lane < MEMBERS && lane != ME) release(&h.flags[lane]->done[ME], u64(n) << 32);
    const bool whole = await(h, END, n);
    if (lane == 0 && whole) {
        own->finished = 0;
        tell(&own->sequence, n);
        tell(&h.host->done, h.op);
    }
}

// Moving.

struct Way {
    u64 from, to;
};

__device__ Way at(const Rect& r, u32 i, u32 unit) {
    u32 row = 0;
    if (r.rows > 1) row = (__umulhi(i, r.multiplier) + i) >> r.shift;
    const u64 column = u64(i - row * r.per_row) * unit;
    return {u64(row) * r.from_pitch + column, u64(row) * r.to_pitch + column};
}

template <class V>
__device__ void move(const Rect& r, u32 thread, u32 threads) {
    constexpr u32 DEPTH = 8;
    const u32 total = r.per_row * r.rows;
    u32 i = thread;
    for (; i + (DEPTH - 1) * threads < total; i += DEPTH * threads) {
        V v[DEPTH];
        u64 to[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            const Way w = at(r, i + k * threads, sizeof(V));
            v[k] = *reinterpret_cast<const V*>(r.from + w.from);
            to[k] = r.to + w.to;
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) *reinterpret_cast<V*>(to[k]) = v[k];
    }
    for (; i < total; i += threads) {
        const Way w = at(r, i, sizeof(V));
        *reinterpret_cast<V*>(r.to + w.to) = *reinterpret_cast<const V*>(r.from + w.from);
    }
}

__device__ void move_rect(const Rect& r, u32 thread, u32 threads) {
    switch (r.width) {
        case 16: return move<uint4>(r, thread, threads);
        case 8: return move<uint2>(r, thread, threads);
        case 4: return move<u32>(r, thread, threads);
        case 2: return move<u16>(r, thread, threads);
        default: return move<u8>(r, thread, threads);
    }
}

// Every warp moves pieces for one member. Of each round of warps every peer has four and this member itself has one, for
// its own memory is that much nearer.
extern "C" __global__ void __launch_bounds__(THREADS, 1) copy(const __grid_constant__ CopyArgs a) {
    const u32 n = begin(a.head);
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
    move_rect(r, mine * 32 + threadIdx.x % 32, all * 32);
    end(a.head, n);
}

// Reducing, in f32.

struct F32 {
    using Bits = u32;
    static __device__ float wide(u32 bits) { return __uint_as_float(bits); }
    static __device__ u32 narrow(float v) { return __float_as_uint(v); }
};

struct Bf16 {
    using Bits = u16;
    static __device__ float wide(u16 bits) { return __uint_as_float(u32(bits) << 16); }
    static __device__ u16 narrow(float v) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
        return bits;
    }
};

// In order of members.
struct Sum {
    static __device__ float of(const float (&t)[MEMBERS]) {
        float s = t[0];
#pragma unroll
        for (u32 m = 1; m < MEMBERS; ++m) s = s + t[m];
        return s;
    }
};

// Neighbours first; a last one without a neighbour goes up as it is.
struct Tree {
    template <u32 BEGIN, u32 LEN>
    static __device__ float part(const float (&t)[MEMBERS]) {
        if constexpr (LEN == 1) {
            return t[BEGIN];
        } else {
            constexpr u32 LEFT = LEN > 8 ? 8 : LEN > 4 ? 4 : LEN > 2 ? 2 : 1;
            return part<BEGIN, LEFT>(t) + part<BEGIN + LEFT, LEN - LEFT>(t);
        }
    }
    static __device__ float of(const float (&t)[MEMBERS]) { return part<0, MEMBERS>(t); }
};

// What is no number counts only where all are none; of two zeros the first stays.
struct Max {
    static __device__ float of(const float (&t)[MEMBERS]) {
        float s = t[0];
#pragma unroll
        for (u32 m = 1; m < MEMBERS; ++m) s = t[m] > s || s != s ? t[m] : s;
        return s;
    }
};

template <class T, class R, class V>
__device__ void reduce_run(const ReduceArgs& a) {
    using Bits = typename T::Bits;
    constexpr u32 EACH = sizeof(V) / sizeof(Bits);
    constexpr u32 DEPTH = MEMBERS <= 2 ? 4 : MEMBERS <= 4 ? 2 : 1;
    union Piece {
        V v;
        Bits bits[EACH];
    };
    const Rect r = a.rect;
    const u32 total = r.per_row * r.rows;
    const u32 threads = gridDim.x * THREADS;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += DEPTH * threads) {
        Piece in[DEPTH][MEMBERS];
        u64 to[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (i + k * threads >= total) continue;
            const Way w = at(r, i + k * threads, sizeof(V));
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
            Piece out;
#pragma unroll
            for (u32 e = 0; e < EACH; ++e) {
                float t[MEMBERS];
#pragma unroll
                for (u32 m = 0; m < MEMBERS; ++m) t[m] = T::wide(in[k][m].bits[e]);
                out.bits[e] = T::narrow(R::of(t));
            }
#pragma unroll
            for (u32 d = 1; d <= MEMBERS; ++d) {
                const u32 m = (ME + d) % MEMBERS;
                if (m == ME || a.all != 0) *reinterpret_cast<V*>(a.to[m] + to[k]) = out.v;
            }
        }
    }
}

template <class T, class R>
__device__ void reduce(const ReduceArgs& a) {
    const u32 n = begin(a.head);
    if (n == 0) return;
    if (a.rect.width == 16) {
        reduce_run<T, R, uint4>(a);
    } else {
        reduce_run<T, R, typename T::Bits>(a);
    }
    end(a.head, n);
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

// A collective whose pieces are moved by others: by copy engines, or by the kernel that makes them. Between these two, members' results
// may be written.
extern "C" __global__ void open(const __grid_constant__ Head h) {
    const u32 n = begin(h);
    if (threadIdx.x == 0) tell(&h.flags[ME]->going, n);
}
extern "C" __global__ void close(const __grid_constant__ Head h) {
    const u32 n = look(&h.flags[ME]->going);
    if (n != 0) end(h, n);
}

// For a group whose members meet elsewhere: rects of this device alone, one per row of the grid.
extern "C" __global__ void __launch_bounds__(THREADS, 1) pack(const __grid_constant__ CopyArgs a) {
    const Rect r = a.rects[blockIdx.y];
    move_rect(r, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
}

// Tells the host which op is begun or done.
extern "C" __global__ void mark(u32* word, u32 op) {
    if (threadIdx.x == 0) tell(word, op);
}
