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

/// Elements of a head, warpgroups that compute and rows of each: as the kernel says.
const HEAD: u64 = 128;
const GROUPS: u64 = 3;
const GROUP_ROWS: u64 = 64;

/// How the kernel is cut by keys: keys of a tile, tiles in flight, sixteens of Q's columns that stay in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    keys: u64,
    stages: u64,
    held: u64,
    /// What a key takes, those beyond the end of the last tile too, in hundredths of the first cut's.
    key_time: u64,
}

pub(crate) const CUTS: [Cut; 2] = [
    Cut { keys: 80, stages: 3, held: 2, key_time: 100 },
    // More tiles for as many keys, and fewer of them beyond the end.
    Cut { keys: 64, stages: 4, held: 4, key_time: 102 },
];

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Flash {
    variants: [Variant; 2],
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
        let [one, other] = CUTS.map(|cut| Variant::new(compiler, cut));
        let variants = [one?, other?];
        Ok(Some(Flash { variants, multiprocessors: multiprocessors.max(1) as u64 }))
    }

    /// Whether it does attention of this shape.
    pub(crate) fn fits(shape: &Shape) -> bool {
        shape.head == HEAD
    }

    /// Attention, with rows to `targets` instead of `at.out` where there are any.
    pub(crate) fn run(&self, s: Shape, at: At, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        let v = &self.variants[cut_for(s.keys)];
        let rows = GROUPS * GROUP_ROWS;
        let long_heads = self.long_heads(s.queries, s.heads);
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
        let tiles = tiles_of(s.queries, s.heads, long_heads).len() as u64;
        let blocks = tiles.min(self.multiprocessors) as u32;
        let threads = 128 * (GROUPS as u32 + 1);
        stream.launch(v.kernel, [blocks, 1, 1], threads, v.shared_bytes, args)
    }

    /// How many heads are cut into the longer tiles, so that the last block ends soonest: blocks take tiles in turn.
    fn long_heads(&self, queries: u64, heads: u64) -> u64 {
        let last_end = |long_heads: &u64| {
            let mut busy = vec![0; self.multiprocessors as usize];
            for (i, warpgroups) in tiles_of(queries, heads, *long_heads).iter().enumerate() {
                busy[i % self.multiprocessors as usize] += TILE_TIME[*warpgroups as usize];
            }
            busy.into_iter().max().unwrap_or(0)
        };
        (0..=heads).rev().min_by_key(last_end).unwrap_or(heads)
    }
}

/// Which of the cuts takes least time. By keys alone: a row's bits depend on the cut, and are the same on one GPU and on several.
fn cut_for(keys: u64) -> usize {
    usize::from(CUTS[1].time(keys) < CUTS[0].time(keys))
}

/// What a tile takes in which so many warpgroups have rows, in hundredths of one of all three: they share the tensor cores.
const TILE_TIME: [u32; 4] = [0, 60, 80, 100];

/// Of each tile, in order, how many warpgroups have rows.
fn tiles_of(queries: u64, heads: u64, long_heads: u64) -> Vec<u64> {
    let of_head = |most: u64| {
        let rows = GROUP_ROWS * most;
        (0..queries.div_ceil(rows)).map(move |i| (queries - i * rows).div_ceil(GROUP_ROWS).min(most))
    };
    let longer = (0..long_heads).flat_map(|_| of_head(GROUPS));
    longer.chain((long_heads..heads).flat_map(|_| of_head(GROUPS - 1))).collect()
}

impl Variant {
    fn new(compiler: &mut Compiler, cut: Cut) -> Done<Variant> {
        let module = compiler.module("attention", &source(), &cut.defines())?;
        let kernel = module.function("attention")?;
        // Q, as many tiles of K and of V as are in flight, and their barriers.
        let row_bytes = 2 * HEAD;
        let bytes =
            GROUPS * GROUP_ROWS * row_bytes + 2 * cut.stages * cut.keys * row_bytes + 16 + 32 * cut.stages;
        kernel.allow_shared(bytes as u32)?;
        Ok(Variant { cut, kernel, shared_bytes: bytes as u32, _module: module })
    }
}

impl Cut {
    /// What the kernel is compiled with.
    pub(crate) fn defines(self) -> [(&'static str, String); 3] {
        [("KEYS", self.keys), ("STAGES", self.stages), ("HELD", self.held)].map(|(k, v)| (k, v.to_string()))
    }

    fn time(self, keys: u64) -> u64 {
        keys.next_multiple_of(self.keys) * self.key_time
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
    use tessera_device::numbers::bf16;

    use super::*;
    use crate::driver::{Event, Memory, download, upload};
    use crate::exec::widened;
    use crate::first_gpu::first_gpu;

    #[test]
    fn the_cut_that_takes_least_time_is_taken() {
        // The model's own, at both sizes; text; images; one tile of each.
        for (keys, of_tile) in [(9360, 80), (4320, 80), (512, 64), (257, 80), (64, 64), (80, 80), (1, 64)] {
            assert_eq!(CUTS[cut_for(keys)].keys, of_tile, "{keys} keys");
        }
    }

    #[test]
    fn tiles_hold_every_row_once() {
        for (queries, heads, long_heads) in [(1, 1, 1), (72, 3, 1), (4680, 40, 37), (2160, 5, 0)] {
            let tiles = tiles_of(queries, heads, long_heads);
            assert!(tiles.iter().all(|warpgroups| (1..=3).contains(warpgroups)));
            assert_eq!(tiles.iter().sum::<u64>(), queries.div_ceil(64) * heads);
        }
    }

    const HEADS: usize = 2;
    const WIDTH: usize = HEADS * HEAD as usize;

    /// Rows of all heads, numbers that swing between a size and its negative.
    fn rows(n: usize, size: f32, seed: f32) -> Vec<f32> {
        (0..n * WIDTH).map(|i| widened(bf16(size * (i as f32 * 0.7331 + seed).sin()))).collect()
    }

    /// Keys that shrink towards the last: the first tile, which has the last of them, knows nothing of the highest scores.
    fn falling(n: usize) -> Vec<f32> {
        let row = |i: usize| 1.0 - (i / WIDTH) as f32 / n as f32;
        rows(n, 2.0, 0.2).iter().enumerate().map(|(i, k)| widened(bf16(k * row(i)))).collect()
    }

    fn scores(q: &[f32], k: &[f32], head: usize) -> Vec<f64> {
        let of = head * 128..(head + 1) * 128;
        let score = |k: &[f32]| {
            let pairs = q[of.clone()].iter().zip(&k[of.clone()]);
            pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / 128_f64.sqrt()
        };
        k.chunks(WIDTH).map(score).collect()
    }

    fn most(scores: &[f64]) -> f64 {
        scores.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Attention in f64, of every head.
    fn by_hand(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; q.len()];
        for (q, out) in q.chunks(WIDTH).zip(out.chunks_mut(WIDTH)) {
            for (head, out) in out.chunks_mut(128).enumerate() {
                let scores = scores(q, k, head);
                let powers: Vec<f64> = scores.iter().map(|s| (s - most(&scores)).exp()).collect();
                let sum: f64 = powers.iter().sum();
                for (c, out) in out.iter_mut().enumerate() {
                    let of_row = |row: &[f32]| f64::from(row[head * 128 + c]);
                    let terms = powers.iter().zip(v.chunks(WIDTH)).map(|(p, row)| p * of_row(row));
                    *out = (terms.sum::<f64>() / sum) as f32;
                }
            }
        }
        out
    }

    const QUERIES: usize = 300;
    /// For both cuts, with a ragged end.
    const KEYS: [usize; 2] = [185, 235];
    /// Of q, and which powers of two the highest scores then have by what the first tile knows: low ones, ones that are divided, ones that
    /// no float holds.
    const SIZES: [(f32, std::ops::Range<f64>); 4] =
        [(1.0, 0.0..20.0), (2.5, 25.0..95.0), (20.0, 101.0..500.0), (300.0, 500.0..9000.0)];

    #[test]
    fn sizes_are_of_every_kind() {
        for (keys, (size, powers)) in KEYS.into_iter().flat_map(|keys| SIZES.map(|of| (keys, of))) {
            let (q, k) = (rows(QUERIES, size, 0.1), falling(keys));
            let tile = CUTS[cut_for(keys as u64)].keys as usize;
            let known = (keys - 1) / tile * tile;
            let beyond = |q: &[f32]| {
                let scores = scores(q, &k, 0);
                (most(&scores) - most(&scores[known..])) * std::f64::consts::LOG2_E
            };
            let highest = q.chunks(WIDTH).map(beyond).fold(0.0, f64::max);
            assert!(powers.contains(&highest), "{keys} keys, q of {size}: two to the {highest}");
        }
    }

    #[test]
    fn scores_far_apart_are_weighed_and_a_row_is_the_same_among_others() {
        let Some(mut gpu) = first_gpu() else { return };
        let Some(mut flash) = Flash::new(&mut gpu.compiler, gpu.capability, gpu.multiprocessors).unwrap()
        else {
            eprintln!("skipped: not a Hopper");
            return;
        };
        let on_device = |x: &[f32]| {
            let memory = Memory::new(2 * x.len()).unwrap();
            upload(memory.at(), &x.iter().map(|x| bf16(*x)).collect::<Vec<u16>>()).unwrap();
            memory
        };
        let stream = Stream::new(false).unwrap();
        for (keys, (size, _)) in KEYS.into_iter().flat_map(|keys| SIZES.map(|of| (keys, of))) {
            let (q, k, v) = (rows(QUERIES, size, 0.1), falling(keys), rows(keys, 1.0, 0.3));
            let [at_q, at_k, at_v] = [&q, &k, &v].map(|x| on_device(x));
            let run = |flash: &Flash, skip: usize| {
                let out = on_device(&vec![f32::NAN; q.len()]);
                let n = QUERIES - skip;
                let (queries, keys) = (n as u64, keys as u64);
                let s = Shape { queries, keys, heads: HEADS as u64, head: HEAD, sums: false };
                let from = at_q.at() + (2 * skip * WIDTH) as u64;
                let at = At { q: from, k: at_k.at(), v: at_v.at(), out: out.at(), sums: 0 };
                flash.run(s, at, None, &stream).unwrap();
                stream.finish(&Event::new().unwrap()).unwrap();
                let mut made = vec![0_u16; n * WIDTH];
                download(&mut made, out.at()).unwrap();
                made
            };
            let told = format!("{keys} keys, q of {size}");
            let all = run(&flash, 0);
            assert!(all.iter().all(|x| widened(*x).is_finite()), "{told}: not all are numbers");
            let error = |(made, want): (&u16, f32)| (widened(*made) - want).abs();
            let worst = all.iter().zip(by_hand(&q, &k, &v)).map(error).fold(0.0, f32::max);
            assert!(worst < 0.02, "{told}: an error of {worst}");
            for skip in [1, 37, 64] {
                assert!(
                    run(&flash, skip) == all[skip * WIDTH..],
                    "{told}: other bits among {skip} rows less"
                );
            }
            // One block takes all tiles, those of three warpgroups.
            let multiprocessors = std::mem::replace(&mut flash.multiprocessors, 1);
            assert!(run(&flash, 0) == all, "{told}: other bits in longer tiles");
            flash.multiprocessors = multiprocessors;
        }
    }
}
