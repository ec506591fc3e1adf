//! Products by a kernel of this crate, in bf16 on Hopper: out = x · wᵀ + bias, in tiles whose width is chosen for the rows. Measured
//! against cuBLASLt in docs/design/0014. Which of the two makes a shape, [`tuning`](crate::tuning) says.

use std::collections::BTreeMap;

use tessera_ir::DType;

use crate::compile::Compiler;
use crate::driver::{Args, Done, Failed, Function, Module, Stream};
use crate::kernels::{COMMON, HOPPER};
use crate::maps::{BOX_COLUMNS, map};
use crate::products::{At, Shape};

const SOURCE: &str = include_str!("kernels/products.cu");

/// Columns of out that a block makes at once, blocks that share rows, threads of one, and the bytes of rows that its warps turn at
/// once: as the kernel says.
const COLUMNS: u64 = 256;
const CLUSTER: u64 = 2;
const THREADS: u32 = 384;
const TURNED_BYTES: u64 = 8 * 32 * 64;
/// Columns that a warp makes of a row, of which 16 go one way and 16 another.
pub(crate) const COLUMN_STEP: u64 = 32;
/// Tiles of rows in a band: with it the tiles of one round read as little as they can.
const BAND: u64 = 13;
/// Rows of a tile at most: more need more registers than there are.
const WIDEST: u64 = 192;
/// Of a step's four parts, how many are under way when the last step's tiles are given back.
const EARLY: u64 = 1;
/// What a tile takes beside its products, in rows.
const TILE_ROWS: u64 = 24;
/// Tiles in flight at most, and the shared memory that a block may have.
const MOST_STAGES: u64 = 5;
const SHARED_BYTES: u64 = 232_448;

/// The kernels of one device, by width.
#[derive(Debug)]
pub(crate) struct Warpgroups {
    clusters: u64,
    made: BTreeMap<u64, Kernel>,
}

#[derive(Debug)]
struct Kernel {
    function: Function,
    shared_bytes: u32,
    _module: Module,
}

impl Warpgroups {
    /// None where the device has not the instructions.
    pub(crate) fn new((major, minor): (i32, i32), multiprocessors: i32) -> Option<Warpgroups> {
        let clusters = u64::from(multiprocessors.max(0) as u32) / CLUSTER;
        ((major, minor) == (9, 0) && clusters > 0).then(|| Warpgroups { clusters, made: BTreeMap::new() })
    }

    /// The width of tiles for a shape; none for what the kernel does not do.
    pub(crate) fn width(&self, s: &Shape) -> Option<u64> {
        // What ends in GELU stays with the library, whose own has other bits in three values of 100,000.
        let fits = s.dtype == DType::Bf16
            && !s.gelu
            && !s.residual
            && s.columns.is_multiple_of(COLUMN_STEP)
            && s.inner.is_multiple_of(8);
        let rounds = |width: u64| tiles(s, width).div_ceil(self.clusters);
        fits.then(|| {
            // Of two alike the wider: a byte that is loaded is multiplied more often.
            widths().min_by_key(|w| rounds(*w) * (w + TILE_ROWS)).unwrap_or(WIDEST)
        })
    }

    /// Compiles the kernel of a width.
    pub(crate) fn prepare(&mut self, compiler: &mut Compiler, width: u64) -> Done<()> {
        if self.made.contains_key(&width) {
            return Ok(());
        }
        let (defines, shared_bytes) = cut(width);
        let module = compiler.module("products", &source(width), &defines)?;
        let function = module.function("products")?;
        function.allow_shared(shared_bytes)?;
        self.made.insert(width, Kernel { function, shared_bytes, _module: module });
        Ok(())
    }

    pub(crate) fn run(&self, width: u64, s: Shape, at: At, stream: &Stream) -> Done<()> {
        let Some(kernel) = self.made.get(&width) else {
            return Err(Failed(format!("no kernel was compiled for tiles of {width} rows")));
        };
        let (row_bytes, box_columns) = (2 * s.inner, BOX_COLUMNS as u32);
        let first = first_rows(width);
        let rows = |box_rows: u64| map(at.x, [s.inner, s.rows], &[row_bytes], [box_columns, box_rows as u32]);
        // Of every 32 columns first those that go one way, then the others: a warp's two products end side by side.
        let half = COLUMN_STEP / 2;
        let columns = map(
            at.w,
            [s.inner, half, s.columns / COLUMN_STEP, 2],
            &[row_bytes, COLUMN_STEP * row_bytes, half * row_bytes],
            [box_columns, half as u32, (COLUMNS / COLUMN_STEP) as u32, 2],
        )?;
        let args = Args::new().map(columns).map(rows(first)?).map(rows(width - first)?);
        let args = args.at(if s.bias { at.bias } else { 0 }).at(at.out);
        let args = args.int(s.rows as i64).int(s.columns as i64).int(s.inner as i64);
        let away = at.away.map_or([0; 4], |a| [a.to, a.row, a.columns.0, a.columns.1]);
        let args = args.words(away.to_vec());
        let blocks = CLUSTER * tiles(&s, width).min(self.clusters);
        stream.launch(kernel.function, [blocks as u32, 1, 1], THREADS, kernel.shared_bytes, args)
    }
}

/// Rows that a tile may have, the most first.
fn widths() -> impl Iterator<Item = u64> {
    (96..=WIDEST).rev().step_by(8)
}

/// Tiles of a shape, a cluster's as one.
fn tiles(s: &Shape, width: u64) -> u64 {
    s.rows.div_ceil(width) * s.columns.div_ceil(CLUSTER * COLUMNS)
}

/// Rows of a tile that the first block of a cluster loads.
fn first_rows(width: u64) -> u64 {
    (width / 2).next_multiple_of(8)
}

/// What the kernel of a width is compiled with, and its shared memory.
pub(crate) fn cut(width: u64) -> ([(&'static str, String); 4], u32) {
    let bytes = |stages: u64| stages * ((COLUMNS + width) * 2 * BOX_COLUMNS + 16) + TURNED_BYTES;
    let stages = (2..=MOST_STAGES).rev().find(|s| bytes(*s) <= SHARED_BYTES).unwrap_or(2);
    let defines = [("WIDTH", width), ("STAGES", stages), ("BAND", BAND), ("EARLY", EARLY)];
    (defines.map(|(k, v)| (k, v.to_string())), bytes(stages) as u32)
}

/// The kernel's source for a width: the instruction of a step names every register it adds to, which no macro counts.
pub(crate) fn source(width: u64) -> String {
    let n = width / 2;
    let list = |each: &dyn Fn(u64) -> String| (0..n).map(each).collect::<Vec<String>>().join(", ");
    let (names, held) = (list(&|i| format!("%{i}")), list(&|i| format!("\"+f\"(d[{i}])")));
    let (w, x, more) = (n, n + 1, n + 2);
    let step = format!(
        "// D (+)= W Xᵀ over 16 of the inner dim.\n\
         __device__ __forceinline__ void product_step(float (&d)[{n}], u64 w, u64 x, int more) {{\n\
         asm volatile(\"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{more}, 0;\\n\
         wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{names}}}, %{w}, %{x}, p, 1, 1, 0, 0;\\n}}\" \
         : {held} : \"l\"(w), \"l\"(x), \"r\"(more));\n}}\n"
    );
    format!("{COMMON}{HOPPER}{step}{SOURCE}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products::SQUARE;

    #[test]
    fn tiles_are_as_wide_as_leaves_least_idle() {
        let own = Warpgroups::new((9, 0), 132).unwrap();
        let width = |rows, columns| own.width(&Shape { rows, columns, ..SQUARE });
        // 26 by 10 tiles: four rounds of 66 clusters, with four left over.
        assert_eq!(width(4680, 5120), Some(184));
        assert_eq!(width(2340, 5120), Some(184));
        assert_eq!(width(2160, 5120), Some(168));
        assert_eq!(width(2160, 15360), Some(168));
        assert_eq!(width(4680, 5136), None);
        assert_eq!(own.width(&Shape { gelu: true, ..SQUARE }), None);
        assert!(Warpgroups::new((10, 0), 148).is_none());
    }

    #[test]
    fn every_width_fits_a_block() {
        for width in widths() {
            let (_, bytes) = cut(width);
            assert!(u64::from(bytes) <= SHARED_BYTES, "{width} rows: {bytes} bytes");
            assert!(first_rows(width) < width);
        }
    }
}
