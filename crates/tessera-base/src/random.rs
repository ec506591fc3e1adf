//! Counter-based random numbers: a draw is a pure function of (seed, chunk, draw, element).
//! [`fill_normals`] gives noise, and [`fill_words`] the bits by which values are rounded.
//!
//! Philox4x32-10 (Salmon et al., 2011) feeds a Box–Muller transform that uses only additions,
//! multiplications and one square root, so every rank, mesh, thread count and machine gets the same
//! bits. The transform does not use the platform's `ln` and `cos`, because libraries disagree about
//! their last bit.

/// Key of one draw of a normally distributed tensor. Elements are indexed by their position in the
/// global tensor, so a rank that owns a shard computes exactly its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawKey {
    /// Seed that the user gives; equal keys give the same bits on every machine and mesh.
    pub seed: u64,
    /// Index of the chunk in the stream, from 0.
    pub chunk: u32,
    /// Number of the tensor among those that the chunk draws, such as the noise of each denoise
    /// step.
    pub draw: u32,
}

/// Fills `out` with the standard normals of elements `first..first + out.len()` of a draw.
pub fn fill_normals(key: DrawKey, first: u64, out: &mut [f32]) {
    fill_normals_inline(key, first, out);
}

/// Inlined version of [`fill_normals`], so that a caller can compile it for a wider vector unit.
/// The bits are the same on every unit: each element is a fixed chain of operations without fused
/// multiply-adds.
#[inline(always)]
pub fn fill_normals_inline(key: DrawKey, first: u64, out: &mut [f32]) {
    let mut at = 0;
    while at < out.len() {
        let next = first + at as u64;
        let group = normal_blocks(key, next / 4);
        // A Philox block has four elements, and a shard may begin inside a block.
        let from = &group.as_flattened()[(next % 4) as usize..];
        let n = from.len().min(out.len() - at);
        out[at..at + n].copy_from_slice(&from[..n]);
        at += n;
    }
}

/// The `chunk` of draws that belong to no chunk of a stream: those by which an op rounds. No stream is so long.
pub const ROUNDING_CHUNK: u32 = u32::MAX;

/// Fills `out` with the uniform 32-bit words of elements `first..first + out.len()` of a draw.
pub fn fill_words(key: DrawKey, first: u64, out: &mut [u32]) {
    fill_words_inline(key, first, out);
}

/// Inlined version of [`fill_words`], so that a caller can compile it for a wider vector unit.
#[inline(always)]
pub fn fill_words_inline(key: DrawKey, first: u64, out: &mut [u32]) {
    let mut at = 0;
    while at < out.len() {
        let next = first + at as u64;
        let words = random_words(key, next / 4);
        // A Philox block has four elements, and a shard may begin inside a block.
        for (word, to) in words_in_order(&words, (next % 4) as usize).zip(&mut out[at..]) {
            *to = word;
        }
        at += (4 * BLOCKS_PER_GROUP - (next % 4) as usize).min(out.len() - at);
    }
}

/// Computes one Philox4x32-10 block: four 32-bit words for a counter and a key.
#[must_use]
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    for _ in 0..10 {
        let p0 = M0 * u64::from(counter[0]);
        let p1 = M1 * u64::from(counter[2]);
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// Number of Philox blocks, of four elements each, that one loop computes. It is a multiple of the
/// lanes of every vector unit, and small enough that the arrays of a loop stay in the L1 cache.
const BLOCKS_PER_GROUP: usize = 64;

/// Computes the words of the Philox blocks from `first` to `first + 63`: the first word of every block, then the second
/// ones, and so on.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn random_words(key: DrawKey, first: u64) -> [[u32; BLOCKS_PER_GROUP]; 4] {
    let mut words = [[0u32; BLOCKS_PER_GROUP]; 4];
    for l in 0..BLOCKS_PER_GROUP {
        // The block index occupies the two low words of the counter. Its high bits get a word of
        // their own, so no block index is truncated.
        let block = first + l as u64;
        let counter = [block as u32, (block >> 32) as u32, key.draw, key.chunk];
        let w = philox4x32(counter, [key.seed as u32, (key.seed >> 32) as u32]);
        words[0][l] = w[0];
        words[1][l] = w[1];
        words[2][l] = w[2];
        words[3][l] = w[3];
    }
    words
}

/// Iterates over words in the order of elements, without the first `skip`.
#[inline(always)]
fn words_in_order(words: &[[u32; BLOCKS_PER_GROUP]; 4], skip: usize) -> impl Iterator<Item = u32> + '_ {
    (skip..4 * BLOCKS_PER_GROUP).map(|i| words[i % 4][i / 4])
}

/// Computes the four normals of each Philox block from `first` to `first + 63`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn normal_blocks(key: DrawKey, first: u64) -> [[f32; 4]; BLOCKS_PER_GROUP] {
    // Separate loops over independent elements of one width, so that the compiler vectorizes each of them.
    let words = random_words(key, first);
    let mut normal = [[0.0f32; BLOCKS_PER_GROUP]; 4];
    for l in 0..BLOCKS_PER_GROUP {
        (normal[0][l], normal[1][l]) = box_muller(words[0][l], words[1][l]);
        (normal[2][l], normal[3][l]) = box_muller(words[2][l], words[3][l]);
    }
    let mut out = [[0.0; 4]; BLOCKS_PER_GROUP];
    for l in 0..BLOCKS_PER_GROUP {
        out[l] = [normal[0][l], normal[1][l], normal[2][l], normal[3][l]];
    }
    out
}

/// Transforms two random words into two independent standard normals.
#[inline(always)]
fn box_muller(u: u32, v: u32) -> (f32, f32) {
    // The argument lies in (0, 1]: the logarithm never sees zero, and the largest normal is sqrt(2
    // ln 2^24) = 5.77.
    let radius = (-2.0 * ln_unit((u >> 8) + 1)).sqrt();
    let (sin, cos) = sin_cos_turn(v);
    (radius * cos, radius * sin)
}

/// Computes ln(m / 2^24) for 1 ≤ m ≤ 2^24 in f32 arithmetic, with an absolute error below 1e-6.
#[inline(always)]
fn ln_unit(m: u32) -> f32 {
    // Converted through i32 because not every vector unit converts unsigned words.
    let x = m as i32 as f32;
    let bits = x.to_bits();
    // Split into a mantissa in [sqrt(1/2), sqrt(2)) and an exponent.
    let shifted = bits.wrapping_sub(0x3f35_04f3);
    let exponent = (shifted as i32) >> 23;
    let f = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
    // ln(1+f) = 2 atanh(s), s = f / (2 + f).
    let s = f / (2.0 + f);
    let z = s * s;
    let tail = z * (0.666_666_7 + z * (0.4 + z * (0.285_714_3 + z * 0.222_222_22)));
    (exponent - 24) as f32 * std::f32::consts::LN_2 + (2.0 * s + s * tail)
}

/// Computes (sin, cos) of 2π · v / 2^32 in f32 arithmetic, with an absolute error below 3e-7.
#[inline(always)]
fn sin_cos_turn(v: u32) -> (f32, f32) {
    // Reduce to the nearest quarter turn and a remainder in [-π/4, π/4].
    let quarter = v.wrapping_add(0x2000_0000) >> 30;
    let rest = v.wrapping_sub(quarter << 30) as i32;
    let x = rest as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let z = x * x;
    let s = x + x * z * (-0.166_666_67 + z * (8.333_334e-3 + z * (-1.984_127e-4 + z * 2.755_732e-6)));
    let c = 1.0 + z * (-0.5 + z * (4.166_666_6e-2 + z * (-1.388_888_9e-3 + z * 2.480_158_8e-5)));
    let (a, b) = if quarter & 1 == 0 { (s, c) } else { (c, -s) };
    if quarter & 2 == 0 { (a, b) } else { (-a, -b) }
}

/// A sequential random number generator, identified by a seed and a two-word stream id.
#[derive(Debug, Clone)]
pub struct Rng {
    key: [u32; 2],
    stream: [u32; 2],
    position: u32,
    words: [u32; 4],
}

impl Rng {
    /// Creates the generator of a stream under a seed.
    #[must_use]
    pub fn new(seed: u64, stream: [u32; 2]) -> Rng {
        Rng { key: [seed as u32, (seed >> 32) as u32], stream, position: 0, words: [0; 4] }
    }

    /// Returns the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        let (block, lane) = (self.position / 4, self.position % 4);
        if lane == 0 {
            self.words = philox4x32([block, self.stream[0], self.stream[1], 0], self.key);
        }
        self.position += 1;
        self.words[lane as usize]
    }

    /// Returns a random integer below `n`, or 0 if `n` is 0.
    pub fn next_below(&mut self, n: usize) -> usize {
        ((u64::from(self.next_u32()) * n as u64) >> 32) as usize
    }

    /// Returns `true` with probability `numerator / denominator`.
    pub fn next_ratio(&mut self, numerator: usize, denominator: usize) -> bool {
        self.next_below(denominator) < numerator
    }

    /// Returns a random element of a list.
    ///
    /// # Panics
    /// Panics if the list is empty.
    pub fn pick_one<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.next_below(list.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123 distribution, kat_vectors: philox4x32 10.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn transforms_agree_with_double_precision() {
        for i in 0..200_000u32 {
            let v = i.wrapping_mul(2_654_435_761);
            let angle = f64::from(v) / 4_294_967_296.0 * std::f64::consts::TAU;
            let (s, c) = sin_cos_turn(v);
            assert!((f64::from(s) - angle.sin()).abs() < 3e-7 && (f64::from(c) - angle.cos()).abs() < 3e-7);
            let m = (v >> 8) + 1;
            let l = (f64::from(m) / 16_777_216.0).ln();
            assert!((f64::from(ln_unit(m)) - l).abs() < 1.5e-6, "{m}: {} {l}", ln_unit(m));
        }
    }

    // proves: D-08, R-07
    #[test]
    fn a_shard_draws_its_part_of_the_global_tensor() {
        let key = DrawKey { seed: 7, chunk: 3, draw: 1 };
        let mut whole = vec![0.0; 103];
        fill_normals(key, 0, &mut whole);
        for (start, len) in [(0, 1), (1, 2), (3, 9), (50, 53), (102, 1), (5, 0)] {
            let mut part = vec![0.0; len];
            fill_normals(key, start as u64, &mut part);
            assert_eq!(part, whole[start..start + len]);
        }
    }

    #[test]
    fn a_shard_draws_its_words_of_the_global_tensor() {
        let key = DrawKey { seed: 7 << 40 | 9, chunk: ROUNDING_CHUNK, draw: 1 };
        let mut whole = vec![0; 901];
        fill_words(key, 0, &mut whole);
        for (start, len) in [(0, 1), (1, 2), (3, 9), (250, 600), (900, 1), (5, 0)] {
            let mut part = vec![0; len];
            fill_words(key, start as u64, &mut part);
            assert_eq!(part, whole[start..start + len]);
        }
        let block = philox4x32([1, 0, 1, u32::MAX], [9, 7 << 8]);
        assert_eq!(whole[4..8], block, "element 4 has the first word of block 1");
    }

    // proves: D-08, R-07
    #[test]
    fn draws_are_bit_stable() {
        // Recorded runs are compared across versions by the bits of their output.
        let mut x = vec![0.0; 1001];
        fill_normals(DrawKey { seed: 0x0123_4567_89ab_cdef, chunk: 5, draw: 2 }, (1 << 34) - 403, &mut x);
        let fold = x.iter().fold(0u64, |h, v| {
            (h.rotate_left(5) ^ u64::from(v.to_bits())).wrapping_mul(0x517c_c1b7_2722_0a95)
        });
        assert_eq!(fold, 0x2298_1223_f0f2_2497);
    }

    #[test]
    fn moments_are_those_of_a_normal() {
        let mut x = vec![0.0f32; 400_000];
        fill_normals(DrawKey { seed: 1, chunk: 0, draw: 0 }, 0, &mut x);
        let n = x.len() as f64;
        let moment = |p: i32| x.iter().map(|v| f64::from(*v).powi(p)).sum::<f64>() / n;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.01);
        assert!(moment(3).abs() < 0.03 && (moment(4) - 3.0).abs() < 0.06);
    }
}
