//! Products by a kernel of this crate, in bf16 on Hopper: out = act(x · wᵀ + bias) + residual, in tiles that are chosen for the shape.
//! Measured against cuBLASLt in docs/design/0014. Which of the two makes a shape, [`tuning`](crate::tuning) says; one that ends in GELU
//! or adds a residual is always made here, since its last bits are not the library's.

use std::collections::BTreeMap;

use tessera_ir::DType;

use crate::compile::Compiler;
use crate::driver::{Args, Done, Failed, Function, Module, Stream};
use crate::kernels::{COMMON, HOPPER};
use crate::maps::{BOX_COLUMNS, map};
use crate::products::{At, Shape};

const SOURCE: &str = include_str!("kernels/products.cu");

/// Columns of out that a block makes at once, blocks that share rows or columns, threads of one, and the bytes of rows that its
/// warpgroups turn: as the kernel says.
const COLUMNS: u64 = 256;
const CLUSTER: u64 = 2;
const THREADS: u32 = 384;
const TURNED_BYTES: u64 = 2 * 2 * 32 * 128;
/// Columns of a row that are stored at once.
pub(crate) const COLUMN_STEP: u64 = 8;
/// Rows of a tile at most: with more there are not registers enough for the loop over the inner dim.
const WIDEST: u64 = 200;
/// And those of one for few: three pairs of them hold 270.
const NARROWEST: u64 = 48;
/// Of a step's four parts, how many are under way when the last step's tiles are given back; in a tile's last step twice as many, of
/// one product.
const EARLY: u64 = 1;
/// Products of a multiprocessor in a cycle, and what a tile takes beside them, in cycles, as counted on an H200 where no half leaves
/// ahead.
const PRODUCTS_A_CYCLE: u64 = 2048;
const TILE_CYCLES: u64 = 5400;
/// Thousandths of the time that a row or column loaded costs, for each of a tile's rows: blocks that share columns load a tenth
/// less and take 0.4 to 0.8 % less, and narrow tiles take longer than their products do.
const LOADED_PER_MILLE: u64 = 37;
/// Tiles in flight at most, and the shared memory that a block may have.
const MOST_STAGES: u64 = 5;
const SHARED_BYTES: u64 = 232_448;

/// How a product is cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cut {
    /// Rows of a block's tile.
    pub(crate) width: u64,
    /// Whether the blocks of a cluster take the same columns and neighbouring rows; else the other way around.
    pub(crate) same_columns: bool,
    pub(crate) ending: Ending,
}

/// What happens to sums on their way out, after a bias. A residual is added to the product as it would be stored: it has the bits of
/// both done one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
    Plain,
    Gelu,
    Residual,
}

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Warpgroups {
    clusters: u64,
    made: BTreeMap<Cut, Kernel>,
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

    /// The tiles of a shape; none for what the kernel does not do.
    pub(crate) fn cut(&self, s: &Shape) -> Option<Cut> {
        let ending = match (s.gelu, s.residual) {
            (false, false) => Ending::Plain,
            (true, false) => Ending::Gelu,
            (false, true) => Ending::Residual,
            (true, true) => return None,
        };
        let fits =
            s.dtype == DType::Bf16 && s.columns.is_multiple_of(COLUMN_STEP) && s.inner.is_multiple_of(8);
        let cost = |cut: &Cut| {
            let tile = COLUMNS * cut.width.max(cut.read()) * s.inner / PRODUCTS_A_CYCLE + TILE_CYCLES;
            let per_mille = 1000 + LOADED_PER_MILLE * cut.loaded() / cut.width;
            cut.tiles(s).div_ceil(self.clusters) * tile * per_mille
        };
        // Of two alike the wider: a byte that is loaded is multiplied more often.
        fits.then(|| cuts(ending).min_by_key(cost)).flatten()
    }

    /// Compiles the kernel of a cut.
    pub(crate) fn prepare(&mut self, compiler: &mut Compiler, cut: Cut) -> Done<()> {
        if self.made.contains_key(&cut) {
            return Ok(());
        }
        let (defines, shared_bytes) = cut.defines();
        let module = compiler.module("products", &cut.source(), &defines)?;
        let function = module.function("products")?;
        function.allow_shared(shared_bytes)?;
        self.made.insert(cut, Kernel { function, shared_bytes, _module: module });
        Ok(())
    }

    pub(crate) fn run(&self, cut: Cut, s: Shape, at: At, stream: &Stream) -> Done<()> {
        let Some(kernel) = self.made.get(&cut) else {
            return Err(Failed(format!("no kernel was compiled for {cut:?}")));
        };
        let (row_bytes, box_columns) = (2 * s.inner, BOX_COLUMNS as u32);
        let rows = |box_rows: u64| map(at.x, [s.inner, s.rows], &[row_bytes], [box_columns, box_rows as u32]);
        // What a block loads: of the tile that both use, its part.
        let (first, rest, columns) = if cut.same_columns {
            (cut.width, cut.width, COLUMNS / CLUSTER)
        } else {
            let first = cut.first_rows();
            (first, cut.width - first, COLUMNS)
        };
        let columns = map(at.w, [s.inner, s.columns], &[row_bytes], [box_columns, columns as u32])?;
        let args = Args::new().map(columns).map(rows(first)?).map(rows(rest)?);
        let args = args.at(if s.bias { at.bias } else { 0 }).at(at.residual).at(at.out);
        let args = args.int(s.rows as i64).int(s.columns as i64).int(s.inner as i64);
        let away = at.away.map_or([0; 4], |a| [a.to, a.row, a.columns.0, a.columns.1]);
        let args = args.words(away.to_vec());
        let blocks = CLUSTER * cut.tiles(&s).min(self.clusters);
        stream.launch(kernel.function, [blocks as u32, 1, 1], THREADS, kernel.shared_bytes, args)
    }
}

impl Cut {
    /// Tiles of a shape, a cluster's as one.
    fn tiles(self, s: &Shape) -> u64 {
        let (rows, columns) =
            if self.same_columns { (CLUSTER * self.width, COLUMNS) } else { (self.width, CLUSTER * COLUMNS) };
        s.rows.div_ceil(rows) * s.columns.div_ceil(columns)
    }

    /// Rows and columns of a step's tiles that a block loads.
    fn loaded(self) -> u64 {
        if self.same_columns { COLUMNS / CLUSTER + self.width } else { COLUMNS + self.width / CLUSTER }
    }

    /// As how many rows its products take at least, for what they read of shared memory: each of them 64 columns and the rows.
    fn read(self) -> u64 {
        (self.width + 64) / 2
    }

    /// Rows of a tile that the first block of a cluster loads where both take the same rows.
    fn first_rows(self) -> u64 {
        (self.width / 2).next_multiple_of(8)
    }

    /// What its kernel is compiled with, and its shared memory.
    pub(crate) fn defines(self) -> ([(&'static str, String); 7], u32) {
        let bytes = |stages: u64| stages * ((COLUMNS + self.width) * 2 * BOX_COLUMNS + 16) + TURNED_BYTES;
        let stages = (2..=MOST_STAGES).rev().find(|s| bytes(*s) <= SHARED_BYTES).unwrap_or(2);
        // Clusters' tiles of rows in a band: with these the tiles of one round read as little as they can.
        let band = if self.same_columns { 7 } else { 13 };
        let defines = [
            ("WIDTH", self.width),
            ("SAME_COLUMNS", self.same_columns.into()),
            ("GELU", (self.ending == Ending::Gelu).into()),
            ("RESIDUAL", (self.ending == Ending::Residual).into()),
            ("STAGES", stages),
            ("BAND", band),
            ("EARLY", EARLY),
        ];
        (defines.map(|(k, v)| (k, v.to_string())), bytes(stages) as u32)
    }

    /// Its kernel's source: the instruction of a step names every register it adds to, which no macro counts.
    pub(crate) fn source(self) -> String {
        let (width, n) = (self.width, self.width / 2);
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
}

#[cfg(test)]
pub(crate) const ENDINGS: [Ending; 3] = [Ending::Plain, Ending::Gelu, Ending::Residual];

/// All cuts there are, the widest first.
pub(crate) fn cuts(ending: Ending) -> impl Iterator<Item = Cut> {
    let widths = (96..=WIDEST).rev().step_by(8).chain([NARROWEST]);
    widths.flat_map(move |width| [true, false].map(|same_columns| Cut { width, same_columns, ending }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products::SQUARE;

    #[test]
    fn tiles_are_as_wide_as_leaves_least_idle() {
        let own = Warpgroups::new((9, 0), 132).unwrap();
        let cut = |rows, columns| {
            let cut = own.cut(&Shape { rows, columns, ..SQUARE });
            cut.map(|c| (c.width, c.same_columns))
        };
        // 13 by 20 tiles: four rounds of 66 clusters, with four left over.
        assert_eq!(cut(4680, 5120), Some((184, true)));
        assert_eq!(cut(4680, 15360), Some((200, true)));
        assert_eq!(cut(2340, 5120), Some((184, false)));
        assert_eq!(cut(2160, 5120), Some((168, false)));
        assert_eq!(cut(2160, 15360), Some((200, false)));
        assert_eq!(cut(1170, 5120), Some((200, true)));
        assert_eq!(cut(1170, 15360), Some((200, true)));
        // Narrow ones where wider ones would leave half of the device idle.
        assert_eq!(cut(540, 5120), Some((96, true)));
        assert_eq!(cut(270, 5120), Some((48, true)));
        // Five rounds of narrower tiles would take as long, and more from L2.
        let long = Shape { inner: 13824, ..SQUARE };
        assert_eq!(own.cut(&long).map(|c| (c.width, c.same_columns)), Some((184, true)));
        assert_eq!(cut(4680, 5140), None);
        assert_eq!(own.cut(&Shape { gelu: true, residual: true, ..SQUARE }), None);
        assert!(Warpgroups::new((10, 0), 148).is_none());
    }

    #[test]
    fn every_cut_fits_a_block() {
        for cut in ENDINGS.into_iter().flat_map(cuts) {
            let (_, bytes) = cut.defines();
            assert!(u64::from(bytes) <= SHARED_BYTES, "{cut:?}: {bytes} bytes");
            assert!(cut.first_rows() < cut.width);
        }
    }
}
