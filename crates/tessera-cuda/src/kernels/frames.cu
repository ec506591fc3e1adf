// Kernels of frames [t, h, w, c], channels last: the convolution for what the sm90 kernel does not
// support, norms of cells, and movements of cells.

// Convolves any shape. A warp computes 8 cells of 32 channels, and a block of 8 warps shares weights in
// shared memory: those of as many taps as fit, or of a part of one tap's channels.
constexpr int CELLS_PER_WARP = 8, CONV_CHANNELS = 32, CONV_STEP = 64;

// A cell, or the place of a tap in the kernel.
struct CellPlace {
    int frame, row, column;
};

// Moves to the next tap. A division per tap and cell would take longer than the multiply-adds of few channels.
__device__ __forceinline__ void advance_tap(CellPlace &tap, const ConvShape &s) {
    if (++tap.column < s.kernel_columns) return;
    tap.column = 0;
    if (++tap.row < s.kernel_rows) return;
    tap.row = 0, tap.frame++;
}
// Returns the cell that a tap reads for a cell of the result; null outside of the frames.
template <typename T> __device__ __forceinline__ const T *find_cell(const T *x, const T *history, const T *halo, const ConvShape &s, CellPlace at, CellPlace tap) {
    int column = at.column + tap.column, row = at.row + tap.row, frame = at.frame + tap.frame;
    if (column < 0 || column >= s.in_width || row < -1 || row > s.in_height || frame >= s.in_frames || frame < -s.history) return nullptr;
    if (row < 0 || row == s.in_height) return halo ? halo + (((i64)(frame + s.history) * 2 + (row > 0)) * s.in_width + column) * s.in_channels : nullptr;
    const T *frames = frame < 0 ? history : x;
    return frames + (((i64)(frame < 0 ? frame + s.history : frame) * s.in_height + row) * s.in_width + column) * s.in_channels;
}
template <typename T> __device__ void conv_cells(const T *x, const T *history, const T *halo, const T *w, const T *bias, const T *residual, T *out, const ConvShape &s) {
    __shared__ float tile[CONV_STEP][CONV_CHANNELS + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, taps = s.kernel_frames * s.kernel_rows * s.kernel_columns;
    int channel_tiles = div_up(s.channels, CONV_CHANNELS), first_channel = blockIdx.x % channel_tiles * CONV_CHANNELS, channel = first_channel + lane;
    i64 first = ((i64)(blockIdx.x / channel_tiles) * (blockDim.x / 32) + warp) * CELLS_PER_WARP, cells = (i64)s.frames * s.height * s.width;
    float sum[CELLS_PER_WARP];
    CellPlace places[CELLS_PER_WARP];
#pragma unroll
    for (int j = 0; j < CELLS_PER_WARP; j++) {
        i64 i = first + j;
        sum[j] = 0.0f;
        places[j].column = (int)(i % s.width) * s.column_step - s.pad;
        places[j].row = (int)(i / s.width % s.height) * s.row_step - s.pad;
        // A frame that no tap reaches stands for a cell past the end.
        places[j].frame = i < cells ? (int)(i / s.width / s.height) * s.frame_step - s.past : s.in_frames;
    }
    int stage_taps = max(1, CONV_STEP / s.in_channels);
    // Of the block's cells, the last ones lie in the frame with the most taps.
    i64 end = ((i64)(blockIdx.x / channel_tiles) + 1) * (blockDim.x / 32) * CELLS_PER_WARP;
    CellPlace first_place = {first_kernel_frame(s, (int)((min(end, cells) - 1) / s.width / s.height)), 0, 0};
    int skipped_taps = first_place.frame * s.kernel_rows * s.kernel_columns;
    for (int first_tap = skipped_taps; first_tap < taps; first_tap += stage_taps) {
        int tap_count = min(stage_taps, taps - first_tap);
        for (int step = 0; step < s.in_channels; step += CONV_STEP) {
            int count = min(CONV_STEP, s.in_channels - step), total = tap_count * count;
            __syncthreads();
            for (int i = threadIdx.x; i < CONV_CHANNELS * total; i += blockDim.x) {
                int out_channel = first_channel + i / total, k = i % total, tap = first_tap + k / count;
                tile[k][i / total] = out_channel < s.channels ? to_f32(w[((i64)out_channel * taps + tap) * s.in_channels + step + k % count]) : 0.0f;
            }
            __syncthreads();
            CellPlace place = first_place;
            for (int tap = 0; tap < tap_count; tap++, advance_tap(place, s)) {
                const float (*weights)[CONV_CHANNELS + 1] = tile + tap * count;
#pragma unroll
                for (int j = 0; j < CELLS_PER_WARP; j++) {
                    const T *cell = find_cell(x, history, halo, s, places[j], place);
                    if (!cell) continue;
                    for (int c = 0; c < count; c++) sum[j] = fmaf(to_f32(cell[step + c]), weights[c][lane], sum[j]);
                }
            }
        }
        for (int tap = 0; tap < tap_count; tap++) advance_tap(first_place, s);
    }
    if (channel >= s.channels) return;
#pragma unroll
    for (int j = 0; j < CELLS_PER_WARP; j++) {
        i64 i = first + j;
        if (i >= cells) continue;
        float y = sum[j] + (bias ? to_f32(bias[channel]) : 0.0f);
        // The residual is added after rounding, as by an op of its own. It may be the result.
        if (residual) y = rounded<T>(y) + to_f32(residual[i * s.channels + channel]);
        from_f32(y, out[i * s.channels + channel]);
    }
}
extern "C" __global__ void conv_f32(const float *x, const float *history, const float *halo, const float *w, const float *bias, const float *residual, float *out, const ConvShape shape) {
    conv_cells(x, history, halo, w, bias, residual, out, shape);
}
extern "C" __global__ void conv_bf16(const bf16 *x, const bf16 *history, const bf16 *halo, const bf16 *w, const bf16 *bias, const bf16 *residual, bf16 *out, const ConvShape shape) {
    conv_cells(x, history, halo, w, bias, residual, out, shape);
}

// Normalises the channels of each cell, and applies SiLU to the rounded norm if `is_silu`. `LANES`
// threads share a cell and load vectors of N channels, so that 96 channels keep 12 of 16 threads busy.
// The channels are read twice; the second time they come from L1. A result of another type U is rounded to
// T before, as by a cast of its own.
template <typename T, int N, int LANES, typename U>
__device__ void normalise_cells(const T *x, const float *w, U *out, int channels, float eps, int is_silu, i64 cells) {
    i64 cell = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    int lane = threadIdx.x % LANES;
    bool is_inside = cell < cells;
    const T *row = x + (is_inside ? cell : 0) * channels;
    float sum = 0.0f;
    for (int c = lane * N; c < channels; c += LANES * N) {
        Vec<T, N> v = *(const Vec<T, N> *)(row + c);
        for (int i = 0; i < N; i++) sum = fmaf(to_f32(v.e[i]), to_f32(v.e[i]), sum);
    }
    for (int o = LANES / 2; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    float scale = rsqrtf(sum / channels + eps);
    if (!is_inside) return;
    for (int c = lane * N; c < channels; c += LANES * N) {
        Vec<T, N> v = *(const Vec<T, N> *)(row + c);
        Vec<U, N> y;
        for (int i = 0; i < N; i++) {
            float normal = rounded<T>(to_f32(v.e[i]) * scale * w[c + i]);
            // The division of `silu` takes as long as the memory accesses of a cell.
            from_f32(rounded<T>(is_silu ? __fdividef(normal, 1.0f + __expf(-normal)) : normal), y.e[i]);
        }
        *(Vec<U, N> *)(out + cell * channels + c) = y;
    }
}
// The name states the dtype, the channels of a vector, and the threads per cell.
extern "C" __global__ void normalise_cells_bf16_8x16(const bf16 *x, const float *w, bf16 *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<bf16, 8, 16>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_bf16_8x32(const bf16 *x, const float *w, bf16 *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<bf16, 8, 32>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_bf16_1x32(const bf16 *x, const float *w, bf16 *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<bf16, 1, 32>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_e4m3_8x16(const bf16 *x, const float *w, e4m3 *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<bf16, 8, 16>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_e4m3_8x32(const bf16 *x, const float *w, e4m3 *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<bf16, 8, 32>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_f32_4x32(const float *x, const float *w, float *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<float, 4, 32>(x, w, out, channels, eps, is_silu, cells);
}
extern "C" __global__ void normalise_cells_f32_1x32(const float *x, const float *w, float *out, int channels, float eps, int is_silu, i64 cells) {
    normalise_cells<float, 1, 32>(x, w, out, channels, eps, is_silu, cells);
}

// Repeats each row of a frame `row_scale` times and each column `column_scale` times. A cell has
// `words` words, and `width` is that of the result.
template <typename W> __device__ void repeat_cells(const W *x, W *out, int height, int width, int row_scale, int column_scale, int words, i64 n) {
    ELEMENT_INDEX(n);
    int word = (int)(i % words), column = (int)(i / words % width), row = (int)(i / words / width % height);
    i64 frame = i / words / width / height;
    out[i] = x[((frame * (height / row_scale) + row / row_scale) * (width / column_scale) + column / column_scale) * words + word];
}
extern "C" __global__ void repeat_cells_16(const uint4 *x, uint4 *out, int height, int width, int row_scale, int column_scale, int words, i64 n) {
    repeat_cells(x, out, height, width, row_scale, column_scale, words, n);
}
extern "C" __global__ void repeat_cells_4(const u32 *x, u32 *out, int height, int width, int row_scale, int column_scale, int words, i64 n) {
    repeat_cells(x, out, height, width, row_scale, column_scale, words, n);
}
extern "C" __global__ void repeat_cells_2(const u16 *x, u16 *out, int height, int width, int row_scale, int column_scale, int words, i64 n) {
    repeat_cells(x, out, height, width, row_scale, column_scale, words, n);
}

// Splits the channels of each frame into `parts` frames of `words` words per cell.
template <typename W> __device__ void split_channels(const W *x, W *out, int parts, int cells, int words, i64 n) {
    ELEMENT_INDEX(n);
    int word = (int)(i % words), cell = (int)(i / words % cells), frame = (int)(i / words / cells);
    out[i] = x[(((i64)(frame / parts) * cells + cell) * parts + frame % parts) * words + word];
}
extern "C" __global__ void split_channels_16(const uint4 *x, uint4 *out, int parts, int cells, int words, i64 n) {
    split_channels(x, out, parts, cells, words, n);
}
extern "C" __global__ void split_channels_4(const u32 *x, u32 *out, int parts, int cells, int words, i64 n) {
    split_channels(x, out, parts, cells, words, n);
}
extern "C" __global__ void split_channels_2(const u16 *x, u16 *out, int parts, int cells, int words, i64 n) {
    split_channels(x, out, parts, cells, words, n);
}

// Converts between a grid [t, height, width, c] and tokens of patches; `inverse` makes the grid.
template <typename W> __device__ void patch_cells(const W *x, W *out, int height, int width, int channels, int ph, int pw, int inverse, i64 n) {
    ELEMENT_INDEX(n);
    int element = (int)(i % (ph * pw * channels)), channel = element % channels, column = element / channels % pw, row = element / channels / pw;
    i64 token = i / (ph * pw * channels);
    int patch_columns = width / pw, patch_rows = height / ph;
    row += (int)(token / patch_columns % patch_rows) * ph, column += (int)(token % patch_columns) * pw;
    i64 cell = ((token / patch_columns / patch_rows) * height + row) * width + column;
    if (inverse) out[cell * channels + channel] = x[i];
    else out[i] = x[cell * channels + channel];
}
extern "C" __global__ void patch_cells_4(const u32 *x, u32 *out, int height, int width, int channels, int ph, int pw, int inverse, i64 n) {
    patch_cells(x, out, height, width, channels, ph, pw, inverse, n);
}
extern "C" __global__ void patch_cells_2(const u16 *x, u16 *out, int height, int width, int channels, int ph, int pw, int inverse, i64 n) {
    patch_cells(x, out, height, width, channels, ph, pw, inverse, n);
}

template <typename T> __device__ void scale_shift_element(const T *x, const float *scale, const float *shift, T *out, int channels, int inverse, i64 n) {
    ELEMENT_INDEX(n);
    int c = (int)(i % channels);
    float v = to_f32(x[i]);
    from_f32(inverse ? (v - shift[c]) / scale[c] : fmaf(v, scale[c], shift[c]), out[i]);
}
extern "C" __global__ void scale_shift_f32(const float *x, const float *scale, const float *shift, float *out, int channels, int inverse, i64 n) {
    scale_shift_element(x, scale, shift, out, channels, inverse, n);
}
extern "C" __global__ void scale_shift_bf16(const bf16 *x, const float *scale, const float *shift, bf16 *out, int channels, int inverse, i64 n) {
    scale_shift_element(x, scale, shift, out, channels, inverse, n);
}

// Limits each element to ±limit, by tanh if `is_soft`. A NaN stays NaN.
template <typename T> __device__ void clamp_element(const T *x, T *out, float limit, int is_soft, i64 n) {
    ELEMENT_INDEX(n);
    float v = to_f32(x[i]);
    if (is_soft) v = limit * tanhf(v / limit);
    else v = v > limit ? limit : (v < -limit ? -limit : v);
    from_f32(v, out[i]);
}
extern "C" __global__ void clamp_f32(const float *x, float *out, float limit, int is_soft, i64 n) {
    clamp_element(x, out, limit, is_soft, n);
}
extern "C" __global__ void clamp_bf16(const bf16 *x, bf16 *out, float limit, int is_soft, i64 n) {
    clamp_element(x, out, limit, is_soft, n);
}
