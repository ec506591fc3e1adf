//! Tables of rotary embeddings: turns by row and column are made at load, turns of frames by each call.

use tessera_ir::{Opcode, Program};

use super::ALIGNMENT;
use crate::driver::{Done, Memory, upload};

/// Tables of one rotary embedding in the area.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns {
    pub(super) op: usize,
    /// Whether they are those of an earlier op, which turns as this one does.
    pub(super) shared: bool,
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
    let mut out: Vec<Turns> = Vec::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| o.opcode == Opcode::Rope) {
        let grid = op.ints("grid").unwrap_or(&[1, 1, 1]);
        let (head, stride) = (op.int("head_dim").unwrap_or(2) as u64, op.int("frame_stride").unwrap_or(1));
        // Where frames do not move, every row stands at the origin of rows and columns.
        let [frames, high, wide] = match stride {
            0 => [1; 3],
            _ => [grid[0] as u64, grid[1] as u64, grid[2] as u64],
        };
        let alike = |t: &&Turns| {
            p.ops[t.op].key("start") == op.key("start")
                && (t.head, t.grid, t.frames, t.stride) == (head, [high, wide], frames, stride)
        };
        if let Some(same) = out.iter().find(alike).copied() {
            out.push(Turns { op: i, shared: true, ..same });
            continue;
        }
        let mut take = |n: u64| {
            let at = *area;
            *area = (*area + n * 8).next_multiple_of(ALIGNMENT);
            at
        };
        let side = head / 6;
        out.push(Turns {
            op: i,
            shared: false,
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

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn ropes_that_turn_alike_share_their_tables() {
        let text = "program @p { %x = input : f32[3, 12] %s = call : i64 %t = call : i64 \
            %a = toperator.rope %x, start=%s {first = 0, grid = [3, 1, 2], head_dim = 12} \
            %b = toperator.rope %x, start=%s {first = 3, grid = [3, 1, 2], head_dim = 12} \
            %c = toperator.rope %x, start=%t {first = 3, grid = [3, 1, 2], head_dim = 12} \
            output \"a\", %a output \"b\", %b output \"c\", %c }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let mut area = 0;
        let made = turns(&p, &mut area);
        assert_eq!(made.iter().map(|t| t.shared).collect::<Vec<_>>(), [false, true, false]);
        let ops: Vec<Opcode> = made.iter().map(|t| p.ops[t.op].opcode).collect();
        assert_eq!((ops, made[0].op == made[1].op), (vec![Opcode::Rope; 3], false));
        let places = |t: &Turns| [t.by_frame, t.by_row, t.by_column];
        assert_eq!(places(&made[0]), places(&made[1]));
        assert_ne!(places(&made[0]), places(&made[2]));
    }
}
