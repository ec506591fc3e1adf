//! RoPE cos/sin tables. Row and column tables are computed on the host at load; each call computes
//! the frame tables on the device.

use tessera_ir::{OpView, ValueId};

use crate::device_memory::{ALIGNMENT, DeviceMemory, copy_to_device};
use crate::driver::CudaResult;

/// Tables of one RoPE op, as offsets into the call area.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeTables {
    pub(super) op: usize,
    /// Scalar with the position of the first frame.
    pub(super) start: ValueId,
    /// Whether the tables belong to an earlier op with the same parameters.
    pub(super) is_shared: bool,
    pub(super) head_dim: u64,
    /// Rows and columns of a frame.
    pub(super) grid: [u64; 2],
    pub(super) frames: u64,
    pub(super) frame_stride: i64,
    pub(super) frame_table: u64,
    pub(super) row_table: u64,
    pub(super) column_table: u64,
}

/// Plans the tables that the RoPE ops of a program need and appends them to the call area, whose
/// size is `area`. The program is given by the views of its ops.
pub(super) fn plan_rope_tables(views: &[OpView], area: &mut u64) -> Vec<RopeTables> {
    let mut out: Vec<RopeTables> = Vec::new();
    for (i, view) in views.iter().enumerate() {
        let OpView::Rope(v) = view else { continue };
        let (head, stride) = (v.head_dim, v.frame_stride);
        // A frame stride of 0 fixes the frame, and every token is at row 0 and column 0.
        let [frames, high, wide] = if stride == 0 { [1; 3] } else { v.grid };
        let parameters = (v.start, head, [high, wide], frames, stride);
        let has_same_tables =
            |t: &&RopeTables| (t.start, t.head_dim, t.grid, t.frames, t.frame_stride) == parameters;
        if let Some(same) = out.iter().find(has_same_tables).copied() {
            out.push(RopeTables { op: i, is_shared: true, ..same });
            continue;
        }
        let mut allocate = |n: u64| {
            let at = *area;
            *area = (*area + n * 8).next_multiple_of(ALIGNMENT);
            at
        };
        let axis_pairs = head / 6;
        out.push(RopeTables {
            op: i,
            start: v.start,
            is_shared: false,
            head_dim: head,
            grid: [high, wide],
            frames,
            frame_stride: stride,
            frame_table: allocate(frames * (head / 2 - 2 * axis_pairs)),
            row_table: allocate(high * axis_pairs),
            column_table: allocate(wide * axis_pairs),
        });
    }
    out
}

impl RopeTables {
    /// Returns the number of pairs of a head that rotate by frame: a third, rounded up. The other
    /// pairs rotate by row and by column.
    pub(super) fn frame_pairs(&self) -> u64 {
        self.head_dim / 2 - 2 * (self.head_dim / 6)
    }

    /// Computes and uploads the row and column tables, which do not depend on the call.
    pub(super) fn upload_static_tables(&self, area: &DeviceMemory) -> CudaResult<()> {
        let side = self.head_dim / 6;
        for (at, extent) in [(self.row_table, self.grid[0]), (self.column_table, self.grid[1])] {
            let table: Vec<[f32; 2]> = (0..extent)
                .flat_map(|i| (0..side).map(move |j| (i, j)))
                .map(|(i, j)| {
                    let angle = i as f64 * 10_000_f64.powf(-(j as f64) / side as f64);
                    [angle.cos() as f32, angle.sin() as f32]
                })
                .collect();
            copy_to_device(area.slice(at, table.len())?, &table)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{Opcode, parse_all};

    #[test]
    fn ropes_with_equal_parameters_share_their_tables() {
        let text = "program @p { %x = input : f32[3, 12] %s = call : i64 %t = call : i64 \
            %a = toperator.rope %x, start=%s {first_row = 0, grid = [3, 1, 2], head_dim = 12} \
            %b = toperator.rope %x, start=%s {first_row = 3, grid = [3, 1, 2], head_dim = 12} \
            %c = toperator.rope %x, start=%t {first_row = 3, grid = [3, 1, 2], head_dim = 12} \
            output \"a\", %a output \"b\", %b output \"c\", %c }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let views: Vec<OpView> = p.ops.iter().map(|op| op.view().expect("a view")).collect();
        let mut area = 0;
        let made = plan_rope_tables(&views, &mut area);
        assert_eq!(made.iter().map(|t| t.is_shared).collect::<Vec<_>>(), [false, true, false]);
        let ops: Vec<Opcode> = made.iter().map(|t| p.ops[t.op].opcode).collect();
        assert_eq!((ops, made[0].op == made[1].op), (vec![Opcode::Rope; 3], false));
        let places = |t: &RopeTables| [t.frame_table, t.row_table, t.column_table];
        assert_eq!(places(&made[0]), places(&made[1]));
        assert_ne!(places(&made[0]), places(&made[2]));
    }
}
