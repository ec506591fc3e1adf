// Rows of numbers as e4m3 with one scale per block of WIRE_BLOCK elements, as an exchange sends them: words of four
// numbers, followed by the scales of the row's blocks.
constexpr int WIRE_BLOCK = 128;
static_assert(WIRE_BLOCK == 4 * 32, "a lane encodes one word of a block");

// Returns the value of an e4m3 number. The shifted bits are those of an f32 with another exponent bias, subnormal
// numbers included.
__device__ __forceinline__ float to_f32(e4m3 x) {
    float size = __uint_as_float((u32)(x.bits & 0x7f) << 20) * 1.329227995784916e36f;
    if ((x.bits & 0x7f) == 0x7f) size = __int_as_float(0x7fffffff);
    return x.bits & 0x80 ? -size : size;
}
// Encodes rows, one warp per block of a row. A scale is the largest magnitude of its block divided by 448, or 1 for a
// block of zeros.
extern "C" __global__ void encode_rows(const float *x, u32 *words, int width, i64 blocks) {
    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32, numbers = div_up(width, 4), row_blocks = div_up(width, WIRE_BLOCK);
    if (at >= blocks) return;
    i64 row = at / row_blocks;
    int block = (int)(at % row_blocks), first = block * WIRE_BLOCK + 4 * lane;
    x += row * width, words += row * (numbers + row_blocks);
    float v[4], largest = 0.0f;
    for (int j = 0; j < 4; j++) {
        v[j] = first + j < width ? x[first + j] : 0.0f;
        largest = fmaxf(largest, fabsf(v[j]));
    }
    float scale = warp_max(largest) / 448.0f;
    if (scale == 0.0f) scale = 1.0f;
    u32 word = 0;
    for (int j = 0; j < 4; j++) {
        e4m3 number;
        from_f32(v[j] / scale, number);
        word |= (u32)number.bits << 8 * j;
    }
    if (first < width) words[first / 4] = word;
    if (lane == 0) words[numbers + block] = __float_as_uint(scale);
}
// Decodes rows, one thread per word of numbers.
extern "C" __global__ void decode_rows(const u32 *words, float *out, int width, i64 n) {
    ELEMENT_INDEX(n);
    int numbers = div_up(width, 4), word = (int)(i % numbers), first = 4 * word;
    i64 row = i / numbers;
    words += row * (numbers + div_up(width, WIRE_BLOCK)), out += row * width;
    float scale = __uint_as_float(words[numbers + first / WIRE_BLOCK]);
    for (int j = 0; j < 4 && first + j < width; j++) {
        e4m3 number = {(unsigned char)(words[word] >> 8 * j)};
        out[first + j] = to_f32(number) * scale;
    }
}
