//! The extents of a convolution of frames, as both of its kernels read them.

use tessera_ir::{Program, ValueId, views};

use crate::kernel_params::{KernelParam, ParamType};

/// The extents of a convolution, with the layout of `ConvShape` in conv.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ConvShape {
    pub(crate) frames: i32,
    pub(crate) height: i32,
    pub(crate) width: i32,
    pub(crate) channels: i32,
    pub(crate) in_frames: i32,
    pub(crate) in_height: i32,
    pub(crate) in_width: i32,
    pub(crate) in_channels: i32,
    pub(crate) kernel_frames: i32,
    pub(crate) kernel_rows: i32,
    pub(crate) kernel_columns: i32,
    pub(crate) frame_step: i32,
    pub(crate) row_step: i32,
    pub(crate) column_step: i32,
    pub(crate) pad: i32,
    pub(crate) past: i32,
    pub(crate) history: i32,
    pub(crate) halo_frames: i32,
}

impl KernelParam for ConvShape {
    const TYPE: ParamType = ParamType::Value("ConvShape");
}

impl ConvShape {
    /// Reads the extents of an op, whose result is `out`.
    pub(crate) fn from_op(p: &Program, v: &views::Conv3d, out: ValueId) -> ConvShape {
        let extent = |v: ValueId, dim: usize| p.type_of(v).shape.get(dim).map_or(1, |n| *n as i32);
        let [kernel_frames, kernel_rows, kernel_columns] = v.kernel.map(|n| n as i32);
        let [frame_step, row_step, column_step] = v.stride.unwrap_or([1; 3]).map(|n| n as i32);
        let history = v.history.map_or(0, |h| extent(h, 0));
        ConvShape {
            frames: extent(out, 0),
            height: extent(out, 1),
            width: extent(out, 2),
            channels: extent(out, 3),
            in_frames: extent(v.x, 0),
            in_height: extent(v.x, 1),
            in_width: extent(v.x, 2),
            in_channels: extent(v.x, 3),
            kernel_frames,
            kernel_rows,
            kernel_columns,
            frame_step,
            row_step,
            column_step,
            pad: v.pad_before as i32,
            past: v.history.map_or(v.pad_frames as i32, |_| history),
            history,
            halo_frames: v.halo.map_or(0, |h| extent(h, 0)),
        }
    }

    /// Returns the cells of the result, over all frames.
    pub(crate) fn cell_count(&self) -> u64 {
        [self.frames, self.height, self.width].into_iter().map(|n| n as u64).product()
    }

    pub(crate) fn out_channels(&self) -> u64 {
        self.channels as u64
    }

    pub(crate) fn count_taps(&self) -> u64 {
        [self.kernel_frames, self.kernel_rows, self.kernel_columns].into_iter().map(|n| n as u64).product()
    }

    /// Whether the taps of a frame can read one patch, which has a border of one cell.
    pub(crate) fn shares_patch(&self) -> bool {
        let kernel = (self.kernel_rows, self.kernel_columns, self.pad);
        kernel == (3, 3, 1) && (self.row_step, self.column_step) == (1, 1)
    }
}
