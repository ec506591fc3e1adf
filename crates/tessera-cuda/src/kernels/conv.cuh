// The extents of a convolution of frames.
struct ConvShape {
    int frames, height, width, channels;           // of the result
    int in_frames, in_height, in_width, in_channels;
    int kernel_frames, kernel_rows, kernel_columns;
    int frame_step, row_step, column_step;
    int pad;      // rows above a frame, and columns before it
    int past;     // frames before the first that the first result reads
    int history;  // frames of the history; 0 if the frames before the first are zeros
    // Frames of the halo, which are those of the history and of x: each has the row above and the row
    // below. 0 if these rows are zeros.
    int halo_frames;
};

__device__ __forceinline__ int div_up(int a, int b) {
    return (a + b - 1) / b;
}

// Returns the first frame of the kernel that lies on a frame of the input, for a frame of the result. Without a
// history, the ones before it would multiply zeros: two thirds of the work for a single frame.
__device__ __forceinline__ int first_kernel_frame(const ConvShape &s, int frame) {
    if (s.history) return 0;
    return min(max(s.past - frame * s.frame_step, 0), s.kernel_frames - 1);
}
