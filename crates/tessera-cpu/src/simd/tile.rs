//! The inner loop of every matmul: a few rows of A times a panel of B, 32 columns wide.
//!
//! An element of a tile is Σₖ a·b as fused multiply-adds in the order of k, in blocks of [`BLOCK`]
//! whose sums are added in order. No element depends on another element's row or column, so tiles
//! of any height give the same bits.

use super::{Level, level};

/// Width of a panel, in columns of the right operand B.
pub(crate) const PANEL: usize = 32;
/// Maximum number of rows of one tile.
pub(crate) const TILE_ROWS: usize = 12;
/// Number of k-steps that share one running sum, which bounds the growth of rounding errors.
pub(crate) const BLOCK: usize = 256;

/// Sums of one tile, row-major: [`TILE_ROWS`] rows of [`PANEL`] columns.
pub(crate) type AccumulatorTile = [f32; TILE_ROWS * PANEL];

/// The A operand: element (row, k) is at `row * row_stride + k * k_stride`.
#[derive(Clone, Copy)]
pub(crate) struct LhsOperand<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) k_stride: usize,
}

/// The B operand: element (k, column) is at `k * k_stride + column`.
#[derive(Clone, Copy)]
pub(crate) struct RhsPanel<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) k_stride: usize,
}

/// The destination of a tile: element (row, column) is at `row * row_stride + column`.
pub(crate) struct OutputTile<'a> {
    pub(crate) data: &'a mut [f32],
    pub(crate) row_stride: usize,
    /// Whether to accumulate onto the existing values, for at most [`BLOCK`] k-steps.
    pub(crate) accumulate: bool,
    /// Bias that is added to every finished row.
    pub(crate) bias: Option<&'a [f32; PANEL]>,
}

/// Multiplies `rows` (1 to 12) rows of `a` with 32 columns of `b` over `k` steps, and writes the
/// tile to `out`.
///
/// # Panics
/// Panics if a slice is too short for the elements that would be read or written.
// Inlined, because operands passed in memory would be reloaded before their stores complete.
#[inline(always)]
// On other processors nothing follows the first return.
#[cfg_attr(not(target_arch = "x86_64"), allow(clippy::needless_return))]
pub(crate) fn multiply_tile(rows: usize, a: LhsOperand<'_>, b: RhsPanel<'_>, k: usize, out: OutputTile<'_>) {
    assert!((1..=TILE_ROWS).contains(&rows) && k > 0 && (!out.accumulate || k <= BLOCK));
    assert!((rows - 1) * a.row_stride + (k - 1) * a.k_stride < a.data.len());
    assert!((k - 1) * b.k_stride + PANEL <= b.data.len());
    assert!((rows - 1) * out.row_stride + PANEL <= out.data.len());
    let level = level();
    if level == Level::Portable {
        return tile_portable(rows, a, b, k, out);
    }
    #[cfg(target_arch = "x86_64")]
    {
        let (mut r, bias) = (0, out.bias.map_or(std::ptr::null(), |b| b.as_ptr()));
        while r < rows {
            let kernel = match (level, rows - r) {
                (Level::Avx512, 12..) => x86::tile512::<12>,
                (Level::Avx512, 8..) => x86::tile512::<8>,
                (Level::Avx512, 6..) => x86::tile512::<6>,
                (Level::Avx512, 4..) => x86::tile512::<4>,
                (Level::Avx512, 3) => x86::tile512::<3>,
                (Level::Avx512, 2) => x86::tile512::<2>,
                (Level::Avx512, _) => x86::tile512::<1>,
                (_, 3..) => x86::tile256::<3>,
                (_, 2) => x86::tile256::<2>,
                _ => x86::tile256::<1>,
            };
            let (ap, op) = (&a.data[r * a.row_stride], &mut out.data[r * out.row_stride]);
            let (bp, add) = (b.data.as_ptr(), out.accumulate);
            // SAFETY: the asserts above bound every access of rows r..rows, `bias` is null or 32
            // elements, and `level` detected the features.
            r += unsafe {
                kernel(ap, a.row_stride, a.k_stride, bp, b.k_stride, k, op, out.row_stride, add, bias)
            };
        }
    }
}

fn tile_portable(rows: usize, a: LhsOperand<'_>, b: RhsPanel<'_>, k: usize, out: OutputTile<'_>) {
    for r in 0..rows {
        let o = &mut out.data[r * out.row_stride..][..PANEL];
        for k0 in (0..k).step_by(BLOCK) {
            let mut acc = [0.0f32; PANEL];
            for i in k0..(k0 + BLOCK).min(k) {
                let v = a.data[r * a.row_stride + i * a.k_stride];
                for (s, w) in acc.iter_mut().zip(&b.data[i * b.k_stride..][..PANEL]) {
                    *s = v.mul_add(*w, *s);
                }
            }
            for (o, s) in o.iter_mut().zip(&acc) {
                *o = if k0 == 0 && !out.accumulate { *s } else { *o + *s };
            }
        }
        for (o, b) in o.iter_mut().zip(out.bias.into_iter().flatten()) {
            *o += b;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, PANEL};
    use std::arch::x86_64::*;

    macro_rules! tile_kernel {
        ($name:ident, $features:literal, $lanes:literal, $zero:ident, $load:ident, $splat:ident, $fma:ident,
         $add:ident, $store:ident) => {
            /// Computes `R` rows; returns `R`.
            ///
            /// # Safety
            /// The machine has the features, the bounds that [`super::multiply_tile`] asserts hold
            /// for `R` rows from `a` and `out`, and `bias` is null or points to 32 elements.
            #[target_feature(enable = $features)]
            #[allow(clippy::too_many_arguments)]
            pub(super) unsafe fn $name<const R: usize>(
                a: *const f32,
                a_row: usize,
                a_k: usize,
                b: *const f32,
                b_k: usize,
                k: usize,
                out: *mut f32,
                out_row: usize,
                add: bool,
                bias: *const f32,
            ) -> usize {
                const V: usize = PANEL / $lanes;
                let mut k0 = 0;
                while k0 < k {
                    let end = (k0 + BLOCK).min(k);
                    let mut acc = [[$zero(); V]; R];
                    for i in k0..end {
                        let w: [_; V] = std::array::from_fn(|v| {
                            // SAFETY: i < k, so all 32 columns of step i lie inside `b`.
                            unsafe { $load(b.add(i * b_k + v * $lanes)) }
                        });
                        for (r, row) in acc.iter_mut().enumerate() {
                            // SAFETY: r < R and i < k lie inside `a`.
                            let x = $splat(unsafe { *a.add(r * a_row + i * a_k) });
                            for v in 0..V {
                                row[v] = $fma(x, w[v], row[v]);
                            }
                        }
                    }
                    for (r, row) in acc.iter().enumerate() {
                        for v in 0..V {
                            // SAFETY: r < R, so 32 columns from r * out_row lie inside `out`;
                            // `bias` has 32 elements.
                            unsafe {
                                let o = out.add(r * out_row + v * $lanes);
                                let y = if k0 == 0 && !add { row[v] } else { $add($load(o), row[v]) };
                                let last = end == k && !bias.is_null();
                                $store(o, if last { $add(y, $load(bias.add(v * $lanes))) } else { y });
                            }
                        }
                    }
                    k0 = end;
                }
                R
            }
        };
    }

    tile_kernel!(
        tile512,
        "avx512f",
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps,
        _mm512_storeu_ps
    );
    tile_kernel!(
        tile256,
        "avx2,fma",
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps,
        _mm256_storeu_ps
    );

    /// Transposes a 16 × 16 block: `out[c * out_step + r] = w[r * w_step + c]`.
    ///
    /// # Safety
    /// The machine has AVX-512F; 16 rows of 16 elements lie inside both pointers' allocations.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose16(w: *const f32, w_step: usize, out: *mut f32, out_step: usize) {
        // SAFETY: the caller guarantees that rows 0..16 of `w` are readable.
        let a: [__m512; 16] = std::array::from_fn(|r| unsafe { _mm512_loadu_ps(w.add(r * w_step)) });
        let mut t = [_mm512_setzero_ps(); 16];
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        let pd = |lo: bool, x: __m512, y: __m512| {
            let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
            _mm512_castpd_ps(if lo { _mm512_unpacklo_pd(x, y) } else { _mm512_unpackhi_pd(x, y) })
        };
        // u[4g + j]: within each 128-bit lane l, column 4l + j of rows 4g..4g + 4.
        let mut u = [_mm512_setzero_ps(); 16];
        for g in 0..4 {
            u[4 * g] = pd(true, t[4 * g], t[4 * g + 2]);
            u[4 * g + 1] = pd(false, t[4 * g], t[4 * g + 2]);
            u[4 * g + 2] = pd(true, t[4 * g + 1], t[4 * g + 3]);
            u[4 * g + 3] = pd(false, t[4 * g + 1], t[4 * g + 3]);
        }
        for j in 0..4 {
            let lo01 = _mm512_shuffle_f32x4::<0x88>(u[j], u[4 + j]);
            let lo23 = _mm512_shuffle_f32x4::<0x88>(u[8 + j], u[12 + j]);
            let hi01 = _mm512_shuffle_f32x4::<0xdd>(u[j], u[4 + j]);
            let hi23 = _mm512_shuffle_f32x4::<0xdd>(u[8 + j], u[12 + j]);
            // SAFETY: the caller guarantees that rows 0..16 of `out`, which receive the columns,
            // are writable.
            unsafe {
                _mm512_storeu_ps(out.add(j * out_step), _mm512_shuffle_f32x4::<0x88>(lo01, lo23));
                _mm512_storeu_ps(out.add((4 + j) * out_step), _mm512_shuffle_f32x4::<0x88>(hi01, hi23));
                _mm512_storeu_ps(out.add((8 + j) * out_step), _mm512_shuffle_f32x4::<0xdd>(lo01, lo23));
                _mm512_storeu_ps(out.add((12 + j) * out_step), _mm512_shuffle_f32x4::<0xdd>(hi01, hi23));
            }
        }
    }
}

/// Packs `columns` (at most 32) rows of `w[columns, k]`, `w_step` apart, as a panel `out[k, 32]`;
/// missing columns become zeros.
pub(crate) fn pack_panel(w: &[f32], w_step: usize, columns: usize, k: usize, out: &mut [f32]) {
    assert!(columns <= PANEL && out.len() == k * PANEL);
    assert!(columns == 0 || (columns - 1) * w_step + k <= w.len());
    #[cfg(target_arch = "x86_64")]
    if columns == PANEL && level() == Level::Avx512 {
        let whole = k / 16 * 16;
        for k0 in (0..whole).step_by(16) {
            for half in [0, 16] {
                // SAFETY: `level` detected AVX-512F; rows half..half + 16 and steps k0..k0 + 16 are
                // inside both slices by the asserts above.
                unsafe {
                    let from = w.as_ptr().add(half * w_step + k0);
                    x86::transpose16(from, w_step, out.as_mut_ptr().add(k0 * PANEL + half), PANEL);
                }
            }
        }
        pack_plain(w, w_step, columns, whole..k, out);
        return;
    }
    pack_plain(w, w_step, columns, 0..k, out);
}

fn pack_plain(w: &[f32], w_step: usize, columns: usize, ks: std::ops::Range<usize>, out: &mut [f32]) {
    for k in ks {
        let row = &mut out[k * PANEL..][..PANEL];
        for (c, o) in row.iter_mut().enumerate() {
            *o = if c < columns { w[c * w_step + k] } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_values(n: usize, seed: u32) -> Vec<f32> {
        let mut out = vec![0.0; n];
        tessera_base::random::fill_normals(
            tessera_base::random::DrawKey { seed: u64::from(seed), chunk: 0, draw: 0 },
            0,
            &mut out,
        );
        out
    }

    #[test]
    fn tiles_are_bit_identical_on_all_simd_levels() {
        for (rows, k) in [(12, 96), (7, 300), (1, 1), (11, 513), (5, 256)] {
            let (a, w) = (random_values(rows * k, 1), random_values(PANEL * k, 2));
            let mut b = vec![0.0; k * PANEL];
            pack_panel(&w, k, PANEL, k, &mut b);
            let bias = [0.25; PANEL];
            let run = |level: Level, height: usize| {
                let mut out = [0.0; TILE_ROWS * PANEL];
                super::super::with_level(level, || {
                    for r in (0..rows).step_by(height) {
                        let left = LhsOperand { data: &a[r * k..], row_stride: k, k_stride: 1 };
                        let right = RhsPanel { data: &b, k_stride: PANEL };
                        let data = &mut out[r * PANEL..];
                        let to = OutputTile { data, row_stride: PANEL, accumulate: false, bias: Some(&bias) };
                        multiply_tile(height.min(rows - r), left, right, k, to);
                    }
                });
                out
            };
            let plain = run(Level::Portable, TILE_ROWS);
            for level in super::super::levels() {
                for height in [1, 5, TILE_ROWS] {
                    assert_eq!(run(level, height), plain, "{level:?}");
                }
            }
        }
    }

    #[test]
    fn packing_transposes_and_pads() {
        for (columns, k) in [(32, 96), (32, 37), (5, 20), (31, 16)] {
            let w = random_values(columns * k, 3);
            let mut b = vec![f32::NAN; k * PANEL];
            pack_panel(&w, k, columns, k, &mut b);
            for i in 0..k {
                for c in 0..PANEL {
                    assert_eq!(b[i * PANEL + c], if c < columns { w[c * k + i] } else { 0.0 });
                }
            }
        }
    }
}
