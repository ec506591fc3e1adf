// Digests and checks of buffers that stay in device memory.

// Consecutive bytes of one buffer, of which the first lies `first` units of 16 bytes behind the buffer's
// start.
struct BufferPiece {
    u64 address;
    u64 first;
    u32 bytes;
    u32 buffer;
};

// The distance of the numbers that are added to the words of neighbouring positions.
#define POSITION_STEP 0x9e3779b97f4a7c15ull

// Mixes a word with POSITION_STEP times its position. For each position the map is a bijection, so a sum of
// mixed words differs if a single word differs.
__device__ __forceinline__ u64 mix_word(u64 word, u64 offset) {
    u64 x = word + offset;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

// Adds the mixed words of each piece to the sum of its buffer, if that buffer is wanted. A block takes a
// piece. Sums of integers do not depend on the order of the blocks.
extern "C" __global__ void digest_pieces(const BufferPiece *pieces, const u32 *is_wanted, u64 *sums) {
    BufferPiece piece = pieces[blockIdx.x];
    if (!is_wanted[piece.buffer]) return;
    const ulonglong2 *units = (const ulonglong2 *)piece.address;
    u32 whole = piece.bytes / 16;
    u64 sum = 0, offset = 2 * (piece.first + threadIdx.x) * POSITION_STEP, step = 2 * blockDim.x * POSITION_STEP;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < whole; i += blockDim.x, offset += step) {
        ulonglong2 unit = __ldcs(units + i);
        sum += mix_word(unit.x, offset) + mix_word(unit.y, offset + POSITION_STEP);
    }
    // The bytes behind the last whole unit are words of their own.
    if (threadIdx.x < piece.bytes % 16) {
        u64 byte = ((const unsigned char *)(units + whole))[threadIdx.x];
        sum += mix_word(byte, (2 * (piece.first + whole) + threadIdx.x) * POSITION_STEP);
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (threadIdx.x % 32 == 0) atomicAdd(sums + piece.buffer, sum);
}

// Counts the elements that are NaN or infinite, finds the first of them, and digests all elements. `found` holds three zeros
// before the launch; afterwards the count, n minus the index of the first, so that the larger one wins, and the sum of
// the mixed elements, which does not depend on the order of the blocks.
extern "C" __global__ void summarize_output(const float *x, u64 *found, i64 n) {
    u64 sum = 0;
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        u32 bits = __float_as_uint(x[i]);
        sum += mix_word(bits, (u64)i * POSITION_STEP);
        if ((bits & 0x7f800000u) != 0x7f800000u) continue;
        atomicAdd(found, 1ull);
        atomicMax(found + 1, (u64)(n - i));
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (threadIdx.x % 32 == 0) atomicAdd(found + 2, sum);
}
