//! Attention by a kernel of this crate, for heads of 128 in bf16 on Hopper: tiles arrive by the copy engine, products by
//! warpgroup instructions. Measured against cuDNN in docs/design/0011.

use cudarc::driver::sys::CUtensorMap;

use crate::attention::{At, Shape};
use crate::compile::Compiler;
use crate::driver::{Args, Done, Function, Module, Stream};
use crate::exchange::Targets;
use crate::kernels::{COMMON, HOPPER};
use crate::maps::{BOX_COLUMNS, map};

const SOURCE: &str = include_str!("kernels/attention.cu");

/// Elements of a head.
const HEAD: u64 = 128;

/// How the kernel is cut: warpgroups that compute, keys of a tile, tiles in flight, whether warpgroups take turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    warpgroups: u64,
    keys: u64,
    stages: u64,
    in_turns: bool,
}

/// For long rows of keys: three warpgroups keep the tensor cores busy by themselves.
pub(crate) const LONG: Cut = Cut { warpgroups: 3, keys: 80, stages: 3, in_turns: false };
/// For few keys, where a smaller tile of rows leaves less of the device idle.
pub(crate) const SHORT: Cut = Cut { warpgroups: 2, keys: 128, stages: 3, in_turns: true };

/// Keys up to which the short cut is at least as fast. Rows and heads have no say: a row's bits depend on the cut, and are
/// the same on one GPU and on several.
const SHORT_KEYS: u64 = 1024;

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Flash {
    long: Variant,
    short: Variant,
    multiprocessors: u64,
}

#[derive(Debug)]
struct Variant {
    cut: Cut,
    kernel: Function,
    shared_bytes: u32,
    _module: Module,
}

impl Flash {
    /// Compiles the kernels; none where the device has not the instructions.
    pub(crate) fn new(
        compiler: &mut Compiler,
        (major, minor): (i32, i32),
        multiprocessors: i32,
    ) -> Done<Option<Flash>> {
        if (major, minor) != (9, 0) {
            return Ok(None);
        }
        let (long, short) = (Variant::new(compiler, LONG)?, Variant::new(compiler, SHORT)?);
        Ok(Some(Flash { long, short, multiprocessors: multiprocessors.max(1) as u64 }))
    }

    /// Whether it does attention of this shape.
    pub(crate) fn fits(shape: &Shape) -> bool {
        shape.head == HEAD
    }

    /// Attention, with rows to `targets` instead of `at.out` where there are any.
    pub(crate) fn run(&self, s: Shape, at: At, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        let v = if s.keys <= SHORT_KEYS { &self.short } else { &self.long };
        let rows = 64 * v.cut.warpgroups;
        let long_heads = if v.cut.in_turns { s.heads } else { self.long_heads(s.queries, s.heads) };
        let args = Args::new()
            .map(rows_of_heads(at.q, s.queries, s.heads, rows)?)
            .map(rows_of_heads(at.k, s.keys, s.heads, v.cut.keys)?)
            .map(rows_of_heads(at.v, s.keys, s.heads, v.cut.keys)?)
            .at(at.out)
            .at(at.sums)
            .int(s.queries as i64)
            .int(s.keys as i64)
            .int(s.heads as i64)
            .int(long_heads as i64)
            .words(targets.copied().unwrap_or_default().words());
        let tiles = tiles_of(s.queries, s.heads, long_heads, v.cut.warpgroups).len() as u64;
        let blocks = tiles.min(self.multiprocessors) as u32;
        let threads = 128 * (v.cut.warpgroups as u32 + 1);
        stream.launch(v.kernel, [blocks, 1, 1], threads, v.shared_bytes, args)
    }

    /// How many heads are cut into the longer tiles, so that the last block ends soonest: blocks take tiles in turn.
    fn long_heads(&self, queries: u64, heads: u64) -> u64 {
        let last_end = |long_heads: &u64| {
            let mut busy = vec![0; self.multiprocessors as usize];
            for (i, warpgroups) in tiles_of(queries, heads, *long_heads, LONG.warpgroups).iter().enumerate() {
                busy[i % self.multiprocessors as usize] += TILE_TIME[*warpgroups as usize];
            }
            busy.into_iter().max().unwrap_or(0)
        };
        (0..=heads).rev().min_by_key(last_end).unwrap_or(heads)
    }
}

/// What a tile takes in which so many warpgroups have rows, in hundredths of one of all three: they share the tensor cores.
const TILE_TIME: [u32; 4] = [0, 60, 80, 100];

/// Of each tile, in order, how many warpgroups have rows.
fn tiles_of(queries: u64, heads: u64, long_heads: u64, warpgroups: u64) -> Vec<u64> {
    let of_head = |most: u64| {
        let rows = 64 * most;
        (0..queries.div_ceil(rows)).map(move |i| (queries - i * rows).div_ceil(64).min(most))
    };
    let longer = (0..long_heads).flat_map(|_| of_head(warpgroups));
    longer.chain((long_heads..heads).flat_map(|_| of_head(warpgroups - 1))).collect()
}

impl Variant {
    fn new(compiler: &mut Compiler, cut: Cut) -> Done<Variant> {
        let module = compiler.module("attention", &source(), &cut.defines())?;
        let kernel = module.function("attention")?;
        // Q, as many tiles of K and of V as are in flight, and their barriers.
        let row_bytes = 2 * HEAD;
        let bytes =
            64 * cut.warpgroups * row_bytes + 2 * cut.stages * cut.keys * row_bytes + 16 + 32 * cut.stages;
        kernel.allow_shared(bytes as u32)?;
        Ok(Variant { cut, kernel, shared_bytes: bytes as u32, _module: module })
    }
}

impl Cut {
    /// What the kernel is compiled with.
    pub(crate) fn defines(self) -> [(&'static str, String); 4] {
        let in_turns = u64::from(self.in_turns);
        [("WGS", self.warpgroups), ("KEYS", self.keys), ("STAGES", self.stages), ("ORDERED", in_turns)]
            .map(|(k, v)| (k, v.to_string()))
    }
}

/// The kernel's source.
pub(crate) fn source() -> String {
    format!("{COMMON}{HOPPER}{SOURCE}")
}

/// Rows of all heads side by side, for boxes of one head's rows, each in two halves.
fn rows_of_heads(at: u64, rows: u64, heads: u64, box_rows: u64) -> Done<CUtensorMap> {
    let halves = [BOX_COLUMNS, rows, 2 * heads];
    map(at, halves, &[heads * HEAD * 2, HEAD], [BOX_COLUMNS as u32, box_rows as u32, 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_every_row_once() {
        for (queries, heads, long_heads) in [(1, 1, 1), (72, 3, 1), (4680, 40, 37), (2160, 5, 0)] {
            let tiles = tiles_of(queries, heads, long_heads, 3);
            assert!(tiles.iter().all(|warpgroups| (1..=3).contains(warpgroups)));
            assert_eq!(tiles.iter().sum::<u64>(), queries.div_ceil(64) * heads);
        }
    }
}
