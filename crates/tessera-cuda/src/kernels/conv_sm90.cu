// A convolution of frames for Hopper, as an implicit GEMM: out = x ∗ w + bias, plus a residual with
// `RESIDUAL`, which is added after rounding to bf16 and may alias out. With `E4M3`, x, the history, the
// halo and w are e4m3, and the sum of a channel is multiplied by its scale before the bias is added.
//
// x is [frames, height, width, channels], the history has the same cells and holds the frames
// before, w is [out channels, taps, channels] with the taps of a frame last; the channels of a cell
// have a multiple of 16 bytes. Cells outside of a frame are zeros, which TMA fills in.
//
// A frame may be some rows of a picture. Then the halo [frames, 2, width, channels] has the row above
// and the row below each frame, and patches that cross them are loaded row by row.
//
// A block computes TILE_WIDTH × TILE_HEIGHT cells times OUT_TILE output channels. Cells are the M
// dimension of wgmma: an 8 × 8 square of cells is one instruction's 64 rows. With SHARED_TAPS the
// 9 taps of a frame read one patch of cells with a border of one, each from its own first cell.
// This works because the swizzle of shared memory is a function of the address: a row of 128 bytes
// may begin a group of eight rows at any multiple of 128. So a cell crosses L2 1.2 times instead of
// 9 times, which alone would exceed its bandwidth. Without SHARED_TAPS each tap has a patch of its
// own: for other kernels and for steps of two cells.
//
// One warpgroup loads and two compute. Blocks are persistent, and the loads run ahead across tiles.
// The order of the sum is frames, then channels in steps of 128 bytes, then taps: a cell's bits depend
// neither on its place in a tile nor on the extents of the frame.
constexpr int GROUPS = 2, THREADS = 128 * (GROUPS + 1);
constexpr int CHANNEL_STEP = E4M3 ? 128 : 64;  // one 128-byte swizzle row
constexpr int SLICE = CHANNEL_STEP / 4;        // channels that one instruction multiplies
constexpr int BORDER = SHARED_TAPS ? 2 : 0;
constexpr int PATCH_WIDTH = TILE_WIDTH + BORDER, PATCH_HEIGHT = TILE_HEIGHT + BORDER;
constexpr u32 PATCH_BYTES = PATCH_WIDTH * PATCH_HEIGHT * 128, PATCH_PITCH = (PATCH_BYTES + 1023) / 1024 * 1024;
constexpr u32 W_BYTES = OUT_TILE * 128;
// Squares of cells that a warpgroup computes.
constexpr int SQUARES = TILE_WIDTH * TILE_HEIGHT / 64 / GROUPS;
constexpr int COMPUTE_REGS = 240, LOAD_REGS = 24;
constexpr int TAPS = SHARED_TAPS ? 9 : 1;  // per patch
static_assert(TILE_WIDTH % 8 == 0 && TILE_HEIGHT % 8 == 0 && SQUARES * 64 * GROUPS == TILE_WIDTH * TILE_HEIGHT, "unsupported tile shape");

struct Barriers {
    u64 patch_full[PATCH_STAGES], patch_empty[PATCH_STAGES], w_full[STAGES], w_empty[STAGES];
};

// A position in a ring of `N` stages.
template <int N> struct Ring {
    u32 stage, phase;
    __device__ __forceinline__ void advance() {
        if (++stage == N) stage = 0, phase ^= 1;
    }
};

struct Tile {
    int channel, column, row, frame;
};

// Neighbouring tiles share a patch, then a row of patches, so that their borders are read from L2.
__device__ __forceinline__ Tile locate_tile(const ConvShape &s, int tile) {
    int channels = div_up(s.channels, OUT_TILE), columns = div_up(s.width, TILE_WIDTH), rows = div_up(s.height, TILE_HEIGHT);
    Tile t;
    t.channel = tile % channels * OUT_TILE, tile /= channels;
    t.column = tile % columns * TILE_WIDTH, tile /= columns;
    t.row = tile % rows * TILE_HEIGHT, t.frame = tile / rows;
    return t;
}

__device__ __forceinline__ void load_patch(void *to, const TensorMap *map, u64 *bar, int channel, int column, int row, int frame) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(channel), "r"(column), "r"(row), "r"(frame), "r"(shared_address(bar))
                 : "memory");
}
__device__ __forceinline__ void load_w(void *to, const TensorMap *map, u64 *bar, int channel, int tap, int row) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(channel), "r"(tap), "r"(row), "r"(shared_address(bar))
                 : "memory");
}

// The frames that a convolution reads, as boxes of patches and as boxes of single rows.
struct CellMaps {
    const TensorMap *x, *history, *x_row, *history_row, *halo;
};

// Loads the patch that begins at a column, a row and a frame, all of which may lie outside.
__device__ __forceinline__ void load_cells(unsigned char *to, const CellMaps &maps, const ConvShape &s, u64 *bar, int channel, int column, int row, int frame) {
    bool is_past = frame < 0 && s.history;
    int own_frame = is_past ? frame + s.history : frame;
    bool is_inside = row >= 0 && row + (PATCH_HEIGHT - 1) * s.row_step < s.in_height;
    if (s.halo_frames == 0 || is_inside) return load_patch(to, is_past ? maps.history : maps.x, bar, channel, column, row, own_frame);
    const TensorMap *own = is_past ? maps.history_row : maps.x_row;
    for (int i = 0; i < PATCH_HEIGHT; i++, row += s.row_step, to += PATCH_WIDTH * 128) {
        bool is_beside = row == -1 || row == s.in_height;
        load_patch(to, is_beside ? maps.halo : own, bar, channel, column, is_beside ? row > 0 : row, is_beside ? frame + s.history : own_frame);
    }
}

// Loads what `compute_tiles` reads, in the same order.
__device__ __forceinline__ void load_tiles(const ConvShape &s, const CellMaps &maps, const TensorMap *w_map, unsigned char *patches, unsigned char *w_tiles,
                                           Barriers &bars, int tiles) {
    Ring<PATCH_STAGES> patch = {0, 0};
    Ring<STAGES> w = {0, 0};
    int frame_taps = s.kernel_rows * s.kernel_columns;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Tile t = locate_tile(s, tile);
        for (int kernel_frame = first_kernel_frame(s, t.frame); kernel_frame < s.kernel_frames; kernel_frame++) {
            int frame = t.frame * s.frame_step + kernel_frame - s.past;
            for (int channel = 0; channel < s.in_channels; channel += CHANNEL_STEP) {
                for (int tap = 0; tap < frame_taps; tap++) {
                    if (tap % TAPS == 0) {
                        int row = SHARED_TAPS ? 0 : tap / s.kernel_columns, column = SHARED_TAPS ? 0 : tap % s.kernel_columns;
                        u64 *full = &bars.patch_full[patch.stage];
                        mbarrier_wait(&bars.patch_empty[patch.stage], patch.phase ^ 1);
                        mbarrier_expect_tx(full, PATCH_BYTES);
                        load_cells(patches + patch.stage * PATCH_PITCH, maps, s, full, channel, t.column * s.column_step + column - s.pad,
                                   t.row * s.row_step + row - s.pad, frame);
                        patch.advance();
                    }
                    u64 *full = &bars.w_full[w.stage];
                    mbarrier_wait(&bars.w_empty[w.stage], w.phase ^ 1);
                    mbarrier_expect_tx(full, W_BYTES);
                    load_w(w_tiles + w.stage * W_BYTES, w_map, full, channel, kernel_frame * frame_taps + tap, t.channel);
                    w.advance();
                }
            }
        }
    }
}

// Exchanges words among the four threads of a quad: thread i gets word i of each.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4], int lane) {
    bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 sent = odd ? x[i] : x[i + 1], got = __shfl_xor_sync(0xffffffffu, sent, 1);
        if (odd) x[i] = got;
        else x[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 sent = high ? x[i] : x[i + 2], got = __shfl_xor_sync(0xffffffffu, sent, 2);
        if (high) x[i] = got;
        else x[i + 2] = got;
    }
}

// What becomes of the sum of a channel.
struct Epilogue {
    const float *scale;
    const bf16 *bias;

    __device__ __forceinline__ float apply(float sum, const ConvShape &s, int channel) const {
        if (channel >= s.channels) return 0.0f;
        if (E4M3) sum *= scale[channel];
        return bias ? sum + to_f32(bias[channel]) : sum;
    }
};

// Stores one square of cells. A thread holds pairs of channels of two cells, which are in
// neighbouring rows of the square.
__device__ __forceinline__ void store_square(const float (&d)[OUT_TILE / 2], const ConvShape &s, const Tile &t, int column, int row, Epilogue epilogue,
                                             const bf16 *residual, bf16 *out) {
    int lane = threadIdx.x % 32, pair = lane % 4;
    column += lane / 4, row += threadIdx.x % 128 / 32 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool is_inside = column < s.width && row + half < s.height;
        i64 cell = (((i64)t.frame * s.height + row + half) * s.width + column) * s.channels;
#if OUT_TILE % 32 == 0
#pragma unroll
        for (int i = 0; i < OUT_TILE / 32; i++) {
            u32 x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int block = 4 * i + j, channel = t.channel + 8 * block + 2 * pair;
                int sum = 4 * block + 2 * half;
                x[j] = pack_bf16(epilogue.apply(d[sum], s, channel), epilogue.apply(d[sum + 1], s, channel + 1));
            }
            transpose_quad(x, lane);
            int channel = t.channel + 32 * i + 8 * pair;
            if (is_inside && channel < s.channels) {
#if RESIDUAL
                uint4 r = *(const uint4 *)(residual + cell + channel);
                u32 residuals[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
                for (int j = 0; j < 4; j++) asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(x[j]) : "r"(residuals[j]));
#endif
                *(uint4 *)(out + cell + channel) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
#else
#pragma unroll
        for (int block = 0; block < OUT_TILE / 8; block++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int channel = t.channel + 8 * block + 2 * pair + j;
                if (!is_inside || channel >= s.channels) continue;
                float y = epilogue.apply(d[4 * block + 2 * half + j], s, channel);
#if RESIDUAL
                y = rounded<bf16>(y) + to_f32(residual[cell + channel]);
#endif
                from_f32(y, out[cell + channel]);
            }
        }
#endif
    }
}

__device__ __forceinline__ void compute_tiles(const ConvShape &s, Epilogue epilogue, const bf16 *residual, bf16 *out, unsigned char *patches,
                                              unsigned char *w_tiles, Barriers &bars, int tiles, int group) {
    int lane = threadIdx.x % 32;
    Ring<PATCH_STAGES> patch = {0, 0};
    Ring<STAGES> w = {0, 0};
    // Every square begins at a multiple of eight cells in its patch.
    u64 first_cell[SQUARES];
    int columns[SQUARES], rows[SQUARES];
#pragma unroll
    for (int i = 0; i < SQUARES; i++) {
        int square = group * SQUARES + i;
        columns[i] = square % (TILE_WIDTH / 8) * 8, rows[i] = square / (TILE_WIDTH / 8) * 8;
        first_cell[i] = matrix_descriptor(patches, 16, PATCH_WIDTH * 128) + (rows[i] * PATCH_WIDTH + columns[i]) * 8;
    }
    u64 first_w = matrix_descriptor(w_tiles, 16, 1024);
    int patches_per_step = s.kernel_rows * s.kernel_columns / TAPS;
    int patches_per_frame = div_up(s.in_channels, CHANNEL_STEP) * patches_per_step;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Tile t = locate_tile(s, tile);
        float d[SQUARES][OUT_TILE / 2];
#pragma unroll
        for (int i = 0; i < SQUARES; i++) fence_registers(d[i]);
        // Stages of the tap before, which are released once its multiply-adds are complete.
        int last_w = -1, last_patch = -1;
        int channel = 0, step_patch = 0, more = 0;
        int patch_count = (s.kernel_frames - first_kernel_frame(s, t.frame)) * patches_per_frame;
        for (int p = 0; p < patch_count; p++) {
            mbarrier_wait(&bars.patch_full[patch.stage], patch.phase);
            int slices = min(CHANNEL_STEP, s.in_channels - channel + SLICE - 1) / SLICE;
            u32 cell = patch.stage * (PATCH_PITCH >> 4);
#pragma unroll 1
            for (int tap = 0; tap < TAPS; tap++) {
                mbarrier_wait(&bars.w_full[w.stage], w.phase);
                u64 b = first_w + w.stage * (W_BYTES >> 4);
                u32 tap_cell = cell + (tap / 3 * PATCH_WIDTH + tap % 3) * 8;
                wgmma_fence();
#pragma unroll 1
                for (int k = 0; k < slices; k++) {
#pragma unroll
                    for (int i = 0; i < SQUARES; i++) wgmma_step(d[i], first_cell[i] + tap_cell + 2 * k, b + 2 * k, more);
                    more = 1;
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (lane == 0) {
                    if (last_w >= 0) mbarrier_arrive(&bars.w_empty[last_w]);
                    if (last_patch >= 0) mbarrier_arrive(&bars.patch_empty[last_patch]);
                }
                last_w = w.stage, last_patch = tap == TAPS - 1 ? (int)patch.stage : -1;
                w.advance();
            }
            patch.advance();
            if (++step_patch == patches_per_step) {
                step_patch = 0;
                channel += CHANNEL_STEP;
                if (channel >= s.in_channels) channel = 0;
            }
        }
        wgmma_wait<0>();
        if (lane == 0) {
            mbarrier_arrive(&bars.w_empty[last_w]);
            mbarrier_arrive(&bars.patch_empty[last_patch]);
        }
#pragma unroll
        for (int i = 0; i < SQUARES; i++) {
            fence_registers(d[i]);
            store_square(d[i], s, t, t.column + columns[i], t.row + rows[i], epilogue, residual, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap history_map, const __grid_constant__ TensorMap x_row_map,
              const __grid_constant__ TensorMap history_row_map, const __grid_constant__ TensorMap halo_map, const __grid_constant__ TensorMap w_map,
              const float *scale, const bf16 *bias, const bf16 *residual, bf16 *out, const __grid_constant__ ConvShape shape) {
    // The swizzle requires an alignment of 1024 bytes.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *patches = shared, *w_tiles = patches + PATCH_STAGES * PATCH_PITCH;
    Barriers &bars = *(Barriers *)(w_tiles + STAGES * W_BYTES);
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int tiles = div_up(shape.channels, OUT_TILE) * div_up(shape.width, TILE_WIDTH) * div_up(shape.height, TILE_HEIGHT) * shape.frames;
    if (threadIdx.x == 0) {
        // One thread of every computing warp arrives.
        for (int i = 0; i < PATCH_STAGES; i++) mbarrier_init(&bars.patch_full[i], 1), mbarrier_init(&bars.patch_empty[i], GROUPS * 4);
        for (int i = 0; i < STAGES; i++) mbarrier_init(&bars.w_full[i], 1), mbarrier_init(&bars.w_empty[i], GROUPS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGS));
        CellMaps maps = {&x_map, &history_map, &x_row_map, &history_row_map, &halo_map};
        if (threadIdx.x == GROUPS * 128) load_tiles(shape, maps, &w_map, patches, w_tiles, bars, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGS));
        compute_tiles(shape, Epilogue{scale, bias}, residual, out, patches, w_tiles, bars, tiles, group);
    }
}
