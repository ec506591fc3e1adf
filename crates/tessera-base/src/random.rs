//! Counter-based random numbers: a draw is a pure function of (seed, chunk, draw, element).
//!
//! Philox4x32-10 (Salmon et al., 2011) feeds a Box–Muller transform built from additions, multiplications and
//! one square root, so every rank, mesh, thread count and machine gets the same bits. The platform's `ln` and
//! `cos` are not used: libraries disagree about their last bit.

/// What names one draw of a tensor of normals. The element index is the position in the global tensor, so a
/// rank that owns a shard computes exactly its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawKey {
    /// The user's seed.
    pub seed: u64,
    /// Chunk of the stream.
    pub chunk: u32,
    /// Number of the draw inside the chunk.
    pub draw: u32,
}

/// Fills `out` with the standard normals of elements `first..first + out.len()` of a draw.
pub fn normals(key: DrawKey, first: u64, out: &mut [f32]) {
    normals_inline(key, first, out);
}

/// [`normals`] as part of its caller, which may compile it for a wider vector unit. The bits are the same on
/// every unit: each element is one fixed chain of operations, and none of them is fused with another.
#[inline(always)]
pub fn normals_inline(key: DrawKey, first: u64, out: &mut [f32]) {
    let mut at = 0;
    while at < out.len() {
        let next = first + at as u64;
        let group = normal_group(key, next / 4);
        // Blocks have four elements; a shard may begin inside one.
        let from = &group.as_flattened()[(next % 4) as usize..];
        let n = from.len().min(out.len() - at);
        out[at..at + n].copy_from_slice(&from[..n]);
        at += n;
    }
}

/// Philox4x32-10: one block of four words for a counter and a key.
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

/// Blocks made at once: a whole number of vectors on every unit, and few enough to stay in its nearest cache.
const GROUP: usize = 64;

/// The normals of blocks `first..first + 64`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn normal_group(key: DrawKey, first: u64) -> [[f32; 4]; GROUP] {
    // Three loops, each over independent lanes of one width: what a compiler turns into vectors.
    let mut words = [[0u32; GROUP]; 4];
    for l in 0..GROUP {
        // The block index takes the low words of the counter; 2^34 elements a draw are enough for any latent,
        // and its high bits are folded into the draw word so that nothing is silently dropped.
        let block = first + l as u64;
        let counter = [block as u32, (block >> 32) as u32, key.draw, key.chunk];
        let w = philox4x32(counter, [key.seed as u32, (key.seed >> 32) as u32]);
        words[0][l] = w[0];
        words[1][l] = w[1];
        words[2][l] = w[2];
        words[3][l] = w[3];
    }
    let mut normal = [[0.0f32; GROUP]; 4];
    for l in 0..GROUP {
        (normal[0][l], normal[1][l]) = box_muller(words[0][l], words[1][l]);
        (normal[2][l], normal[3][l]) = box_muller(words[2][l], words[3][l]);
    }
    let mut out = [[0.0; 4]; GROUP];
    for l in 0..GROUP {
        out[l] = [normal[0][l], normal[1][l], normal[2][l], normal[3][l]];
    }
    out
}

/// Two words to two independent standard normals.
#[inline(always)]
fn box_muller(u: u32, v: u32) -> (f32, f32) {
    // (0, 1]: the logarithm never sees zero, and the largest normal is sqrt(2 ln 2^24) = 5.77.
    let radius = (-2.0 * ln_unit((u >> 8) + 1)).sqrt();
    let (sin, cos) = sin_cos_turn(v);
    (radius * cos, radius * sin)
}

/// ln(m / 2^24) for 1 ≤ m ≤ 2^24, in f32 arithmetic; absolute error below 1e-6.
#[inline(always)]
fn ln_unit(m: u32) -> f32 {
    // Signed, since not every vector unit converts unsigned words.
    let x = m as i32 as f32;
    let bits = x.to_bits();
    // Split into mantissa in [sqrt(1/2), sqrt(2)) and exponent.
    let shifted = bits.wrapping_sub(0x3f35_04f3);
    let exponent = (shifted as i32) >> 23;
    let f = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
    // ln(1+f) = 2 atanh(s), s = f / (2 + f).
    let s = f / (2.0 + f);
    let z = s * s;
    let tail = z * (0.666_666_7 + z * (0.4 + z * (0.285_714_3 + z * 0.222_222_22)));
    (exponent - 24) as f32 * std::f32::consts::LN_2 + (2.0 * s + s * tail)
}

/// (sin, cos) of 2π · v / 2^32, in f32 arithmetic; absolute error below 3e-7.
#[inline(always)]
fn sin_cos_turn(v: u32) -> (f32, f32) {
    // The quarter turn nearest to the angle, and the rest in [-π/4, π/4].
    let quarter = v.wrapping_add(0x2000_0000) >> 30;
    let rest = v.wrapping_sub(quarter << 30) as i32;
    let x = rest as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let z = x * x;
    let s = x + x * z * (-0.166_666_67 + z * (8.333_334e-3 + z * (-1.984_127e-4 + z * 2.755_732e-6)));
    let c = 1.0 + z * (-0.5 + z * (4.166_666_6e-2 + z * (-1.388_888_9e-3 + z * 2.480_158_8e-5)));
    let (a, b) = if quarter & 1 == 0 { (s, c) } else { (c, -s) };
    if quarter & 2 == 0 { (a, b) } else { (-a, -b) }
}

/// A row of draws named by a seed and two words.
#[derive(Debug, Clone)]
pub struct Dice {
    key: [u32; 2],
    name: [u32; 2],
    at: u32,
    words: [u32; 4],
}

impl Dice {
    /// The draws of a name under a seed.
    #[must_use]
    pub fn new(seed: u64, name: [u32; 2]) -> Dice {
        Dice { key: [seed as u32, (seed >> 32) as u32], name, at: 0, words: [0; 4] }
    }

    /// The next 32 bits.
    pub fn word(&mut self) -> u32 {
        let (block, lane) = (self.at / 4, self.at % 4);
        if lane == 0 {
            self.words = philox4x32([block, self.name[0], self.name[1], 0], self.key);
        }
        self.at += 1;
        self.words[lane as usize]
    }

    /// A number below `n`; 0 where `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    /// True `a` times out of `b`.
    pub fn chance(&mut self, a: usize, b: usize) -> bool {
        self.below(b) < a
    }

    /// One of a list.
    ///
    /// # Panics
    /// On an empty list.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
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

    #[test]
    fn a_shard_draws_its_part_of_the_whole() {
        let key = DrawKey { seed: 7, chunk: 3, draw: 1 };
        let mut whole = vec![0.0; 103];
        normals(key, 0, &mut whole);
        for (start, len) in [(0, 1), (1, 2), (3, 9), (50, 53), (102, 1), (5, 0)] {
            let mut part = vec![0.0; len];
            normals(key, start as u64, &mut part);
            assert_eq!(part, whole[start..start + len]);
        }
    }

    #[test]
    fn draws_keep_their_bits() {
        // Runs are compared across versions by the bits of their output.
        let mut x = vec![0.0; 1001];
        normals(DrawKey { seed: 0x0123_4567_89ab_cdef, chunk: 5, draw: 2 }, (1 << 34) - 403, &mut x);
        let fold = x.iter().fold(0u64, |h, v| {
            (h.rotate_left(5) ^ u64::from(v.to_bits())).wrapping_mul(0x517c_c1b7_2722_0a95)
        });
        assert_eq!(fold, 0x2298_1223_f0f2_2497);
    }

    #[test]
    fn moments_are_those_of_a_normal() {
        let mut x = vec![0.0f32; 400_000];
        normals(DrawKey { seed: 1, chunk: 0, draw: 0 }, 0, &mut x);
        let n = x.len() as f64;
        let moment = |p: i32| x.iter().map(|v| f64::from(*v).powi(p)).sum::<f64>() / n;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.01);
        assert!(moment(3).abs() < 0.03 && (moment(4) - 3.0).abs() < 0.06);
    }
}
