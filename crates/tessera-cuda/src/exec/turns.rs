//! Tables of rotary embeddings: turns by row and column are made at load, turns of frames by each call.

use tessera_ir::{Opcode, Program};

use super::ALIGNMENT;
use crate::driver::{Done, Memory, upload};

/// Tables of one rotary embedding in the area.
#[derive(Debug)]
pub(super) struct Turns {
    pub(super) op: usize,
    pub(super) head: u64,
    /// Rows and columns of a frame.
    pub(super) grid: [u64; 2],
    pub(super) frames: u64,
    pub(super) stride: i64,
    pub(super) by_frame: u64,
    pub(super) by_row: u64,
    pub(super) by_column: u64,
}

/// The tables that a program's rotary embeddings need, and their places behind what a call brings.
pub(super) fn turns(p: &Program, area: &mut u64) -> Vec<Turns> {
    let mut out = Vec::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| o.opcode == Opcode::Rope) {
        let grid = op.ints("grid").unwrap_or(&[1, 1, 1]);
        let (head, stride) = (op.int("head_dim").unwrap_or(2) as u64, op.int("frame_stride").unwrap_or(1));
        // Where frames do not move, every row stands at the origin of rows and columns.
        let [frames, high, wide] = match stride {
            0 => [1; 3],
            _ => [grid[0] as u64, grid[1] as u64, grid[2] as u64],
        };
        let mut take = |n: u64| {
            let at = *area;
            *area = (*area + n * 8).next_multiple_of(ALIGNMENT);
            at
        };
        let side = head / 6;
        out.push(Turns {
            op: i,
            head,
            grid: [high, wide],
            frames,
            stride,
            by_frame: take(frames * (head / 2 - 2 * side)),
            by_row: take(high * side),
            by_column: take(wide * side),
        });
    }
    out
}

impl Turns {
    /// Pairs of a head that turn by frame; a third of the head, rounded up, and the rest by row and by column.
    pub(super) fn pairs(&self) -> u64 {
        self.head / 2 - 2 * (self.head / 6)
    }

    /// Turns by row and column depend on no call.
    pub(super) fn upload(&self, area: &Memory) -> Done<()> {
        let side = self.head / 6;
        for (at, extent) in [(self.by_row, self.grid[0]), (self.by_column, self.grid[1])] {
            let table: Vec<[f32; 2]> = (0..extent)
                .flat_map(|i| (0..side).map(move |j| (i, j)))
                .map(|(i, j)| {
                    let angle = i as f64 * 10_000_f64.powf(-(j as f64) / side as f64);
                    [angle.cos() as f32, angle.sin() as f32]
                })
                .collect();
            upload(area.at() + at, &table)?;
        }
        Ok(())
    }
}
