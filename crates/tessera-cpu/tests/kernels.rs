//! Compares every kernel with a naive f64 version at odd sizes, and checks bit by bit the
//! invariances that sharding relies on.

#![allow(clippy::unwrap_used)]

use tessera_base::random::{DrawKey, fill_normals, philox4x32};
use tessera_cpu::Pool;
use tessera_cpu::kernels::*;

fn random_values(n: usize, seed: u64) -> Vec<f32> {
    let mut out = vec![0.0; n];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut out);
    out
}

/// Returns the `i`-th of a fixed sequence of numbers in `low..=high`.
fn pick_size(i: u32, what: u32, low: usize, high: usize) -> usize {
    low + philox4x32([i, what, 0, 0], [1, 2])[0] as usize % (high - low + 1)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*g) - w).abs() <= tolerance * w.abs().max(1.0), "{what}[{i}]: {g} for {w}");
    }
}

fn run_matmul(pool: &Pool, x: &[f32], w: &[f32], mnk: (usize, usize, usize), segments: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; mnk.0 * mnk.1];
    matmul(pool, &mut Scratch::new(), &mut out, x, MatmulWeight::Plain(w), mnk, None, None, segments);
    out
}

#[test]
fn matmul_agrees_with_double_precision() {
    let pool = Pool::new(2).unwrap();
    let mut scratch = Scratch::new();
    for (m, n, k) in [(1, 1, 1), (2, 33, 7), (13, 31, 100), (50, 70, 513), (3, 200, 96), (97, 5, 1024)] {
        let (x, w, b) = (random_values(m * k, 1), random_values(n * k, 2), random_values(n, 3));
        for act in [None, Some(Activation::Silu), Some(Activation::GeluTanh)] {
            let mut want = vec![0.0f64; m * n];
            for (i, o) in want.iter_mut().enumerate() {
                let (r, c) = (i / n, i % n);
                let y = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[c * k + i])).sum::<f64>();
                let y = y + f64::from(b[c]);
                *o = match act {
                    None => y,
                    Some(Activation::Silu) => y / (1.0 + (-y).exp()),
                    Some(Activation::GeluTanh) => {
                        let u = (2.0 / std::f64::consts::PI).sqrt() * (y + 0.044_715 * y.powi(3));
                        0.5 * y * (1.0 + u.tanh())
                    }
                };
            }
            let mut out = vec![0.0; m * n];
            matmul(&pool, &mut scratch, &mut out, &x, MatmulWeight::Plain(&w), (m, n, k), Some(&b), act, 1);
            assert_close(&out, &want, 3e-6 * (k as f64).sqrt(), "matmul");
            let packed = PackedWeight::new(&pool, &w, n, k);
            let mut again = vec![0.0; m * n];
            matmul(
                &pool,
                &mut scratch,
                &mut again,
                &x,
                MatmulWeight::Packed(&packed),
                (m, n, k),
                Some(&b),
                act,
                1,
            );
            assert_eq!(bits(&out), bits(&again));
        }
    }
}

// proves: D-09
#[test]
fn matmul_is_invariant_to_rows_columns_and_threads() {
    let pools = [Pool::single_thread(), Pool::new(2).unwrap(), Pool::new(3).unwrap()];
    for i in 0..40 {
        let m = pick_size(i, 0, 1, 150);
        let n = pick_size(i, 1, 1, 200);
        let k = if i % 8 == 0 { pick_size(i, 2, 3000, 14_000) } else { pick_size(i, 2, 1, 700) };
        let (x, w) = (random_values(m * k, 10), random_values(n * k, 11));
        let whole = run_matmul(&pools[0], &x, &w, (m, n, k), 1);
        for pool in &pools[1..] {
            assert_eq!(bits(&run_matmul(pool, &x, &w, (m, n, k), 1)), bits(&whole));
        }
        for j in 0..6 {
            let row = pick_size(i, 10 + j, 0, m - 1);
            let rows = if j == 0 { 1 } else { pick_size(i, 20 + j, 1, m - row) };
            let column = pick_size(i, 30 + j, 0, n - 1);
            let columns = if j == 1 { 1 } else { pick_size(i, 40 + j, 1, n - column) };
            let pool = &pools[j as usize % 3];
            let part = run_matmul(
                pool,
                &x[row * k..][..rows * k],
                &w[column * k..][..columns * k],
                (rows, columns, k),
                1,
            );
            for r in 0..rows {
                let want = &whole[(row + r) * n + column..][..columns];
                assert_eq!(bits(&part[r * columns..][..columns]), bits(want), "{m} {n} {k}: {row} {column}");
            }
        }
    }
}

#[test]
fn a_subtree_of_segments_is_bit_identical() {
    let pool = Pool::single_thread();
    for (m, n, k) in [(13, 40, 96), (5, 33, 8 * 301), (49, 32, 64)] {
        let (x, w) = (random_values(m * k, 1), random_values(n * k, 2));
        for segments in [2usize, 4, 8] {
            let whole = run_matmul(&pool, &x, &w, (m, n, k), segments);
            for ranks in [2usize, 4, 8].into_iter().filter(|r| *r <= segments) {
                let part = k / ranks;
                let cut = |t: &[f32], rank: usize| -> Vec<f32> {
                    t.chunks(k).flat_map(|row| row[rank * part..][..part].iter().copied()).collect()
                };
                let mut sums: Vec<Vec<f32>> = (0..ranks)
                    .map(|r| run_matmul(&pool, &cut(&x, r), &cut(&w, r), (m, n, part), segments / ranks))
                    .collect();
                while sums.len() > 1 {
                    sums = sums
                        .chunks(2)
                        .map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect())
                        .collect();
                }
                assert_eq!(bits(&sums[0]), bits(&whole), "{segments} segments on {ranks} ranks");
            }
        }
    }
}

#[test]
fn norms_agree_with_double_precision_and_are_row_invariant() {
    let pools = [Pool::single_thread(), Pool::new(2).unwrap()];
    let eps = 1e-6f32;
    for (n, d, frames) in [(1usize, 7usize, 1), (37, 96, 3), (50, 1536, 4), (600, 130, 3)] {
        let per = n.div_ceil(frames).max(1);
        let x: Vec<f32> = random_values(n * d, 1).iter().map(|v| v * 3.0 + 40.0).collect();
        let (w, b, y) = (random_values(d, 2), random_values(d, 3), random_values(n * d, 4));
        let (parts, first_row) = (6, 2 * per);
        let m = random_values((frames + 2) * parts * d, 5);
        let place = FrameIndexing { first_row, rows_per_frame: per };
        let unit = |r: usize, c: usize| {
            let row = &x[r * d..][..d];
            let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / d as f64;
            let var = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / d as f64;
            (f64::from(row[c]) - mean) / (var + f64::from(eps)).sqrt()
        };
        let at =
            |r: usize, part: usize, c: usize| f64::from(m[((first_row + r) / per * parts + part) * d + c]);
        let each =
            |f: &dyn Fn(usize, usize) -> f64| -> Vec<f64> { (0..n * d).map(|i| f(i / d, i % d)).collect() };
        type Kernel<'a> = dyn Fn(&Pool, &mut [f32], &[f32], &[f32], FrameIndexing) + 'a;
        let cases: [(&str, &Kernel<'_>, Vec<f64>); 4] = [
            (
                "layer_norm",
                &|p, o, x, _, _| layer_norm(p, o, x, &w, &b, eps),
                each(&|r, c| unit(r, c) * f64::from(w[c]) + f64::from(b[c])),
            ),
            (
                "norm_modulate",
                &|p, o, x, _, f| norm_modulate(p, o, x, d, &m, parts, (3, 4), f, eps),
                each(&|r, c| unit(r, c) * (1.0 + at(r, 4, c)) + at(r, 3, c)),
            ),
            (
                "gate_residual",
                &|p, o, x, y, f| gate_residual(p, o, x, y, d, &m, parts, 5, f),
                each(&|r, c| f64::from(x[r * d + c]) + f64::from(y[r * d + c]) * at(r, 5, c)),
            ),
            (
                "rms_norm",
                &|p, o, x, _, _| rms_norm(p, o, x, &w, 1, eps),
                each(&|r, c| {
                    let ss: f64 = x[r * d..][..d].iter().map(|v| f64::from(*v).powi(2)).sum();
                    f64::from(x[r * d + c]) / (ss / d as f64 + f64::from(eps)).sqrt() * f64::from(w[c])
                }),
            ),
        ];
        for (name, kernel, want) in cases {
            let mut whole = vec![f32::NAN; n * d];
            kernel(&pools[0], &mut whole, &x, &y, place);
            assert_close(&whole, &want, 2e-5, name);
            let mut shared = vec![f32::NAN; n * d];
            kernel(&pools[1], &mut shared, &x, &y, place);
            assert_eq!(bits(&shared), bits(&whole), "{name}");
            for row in [0, n / 2, n - 1] {
                let mut one = vec![f32::NAN; d];
                let here = FrameIndexing { first_row: first_row + row, ..place };
                kernel(&pools[0], &mut one, &x[row * d..][..d], &y[row * d..][..d], here);
                assert_eq!(bits(&one), bits(&whole[row * d..][..d]), "{name} row {row}");
            }
        }
    }
}

#[test]
fn sharded_rms_norm_is_bit_identical() {
    let pool = Pool::single_thread();
    let (n, d) = (19, 96);
    let (q, k, w) = (random_values(n * d, 1), random_values(n * d, 2), random_values(d, 3));
    let mut want = vec![0.0; n * d];
    rms_norm(&pool, &mut want, &k, &w, 8, 1e-6);
    for ranks in [1usize, 2, 4, 8] {
        let part = d / ranks;
        let cut = |t: &[f32], rank: usize| -> Vec<f32> {
            t.chunks(d).flat_map(|row| row[rank * part..][..part].iter().copied()).collect()
        };
        let mut sums: Vec<Vec<f32>> = (0..ranks)
            .map(|r| {
                let mut ss = vec![0.0; n * 2];
                row_square_sum(&pool, &mut ss, &[&cut(&q, r), &cut(&k, r)], part, 8 / ranks);
                ss
            })
            .collect();
        while sums.len() > 1 {
            sums = sums.chunks(2).map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()).collect();
        }
        for rank in 0..ranks {
            let mut out = vec![0.0; n * part];
            let w = &w[rank * part..][..part];
            rms_scale(&pool, &mut out, &cut(&k, rank), &sums[0], (1, 2), w, d, 1e-6);
            assert_eq!(bits(&out), bits(&cut(&want, rank)));
        }
    }
}

#[test]
fn rope_multiplies_in_double_precision_and_rounds_once() {
    let mut cache = RopeCache::new();
    for (head_dim, heads, grid, start, frame_stride) in [
        (128, 2, [3, 4, 5], 3, 1),
        (16, 3, [2, 3, 1], -7, 2),
        (10, 1, [4, 2, 3], 1000, 1),
        (24, 2, [3, 2, 2], -3, 0),
        (4, 1, [2, 1, 1], 5, 1),
    ] {
        let spec = RopeSpec { head_dim, grid, start, frame_stride };
        let tokens: usize = grid.iter().product();
        let dl = heads * head_dim;
        let x = random_values(tokens * dl, 1);
        let mut out = vec![0.0; x.len()];
        rope(&Pool::new(2).unwrap(), &mut out, &x, dl, 0, cache.get(spec));
        let side = head_dim / 6;
        let time = head_dim / 2 - 2 * side;
        for (i, pair) in x.chunks(2).enumerate() {
            let (row, j) = (i * 2 / dl, i % (head_dim / 2));
            let [f, h, w] = [row / (grid[1] * grid[2]), row / grid[2] % grid[1], row % grid[2]];
            let still = frame_stride == 0;
            let (position, j, width) = if j < time {
                ((start + frame_stride * f as i64) as f64, j, time)
            } else if j < time + side {
                (if still { 0.0 } else { h as f64 }, j - time, side)
            } else {
                (if still { 0.0 } else { w as f64 }, j - time - side, side)
            };
            let (sin, cos) = (position * 10_000f64.powf(-(j as f64) / width as f64)).sin_cos();
            let (a, b) = (f64::from(pair[0]), f64::from(pair[1]));
            assert_eq!(out[2 * i], (a * cos - b * sin) as f32);
            assert_eq!(out[2 * i + 1], (a * sin + b * cos) as f32);
        }
        // A later part of the tokens, and one head of many.
        let first = tokens / 2;
        let mut part = vec![0.0; (tokens - first) * dl];
        rope(&Pool::single_thread(), &mut part, &x[first * dl..], dl, first, cache.get(spec));
        assert_eq!(bits(&part), bits(&out[first * dl..]));
    }
    // Rotating further by a uniform shift equals rotating to the later position.
    let x = random_values(6 * 24, 2);
    let turn = |x: &[f32], start, stride| {
        let mut out = vec![0.0; x.len()];
        let spec = RopeSpec { head_dim: 24, grid: [3, 2, 1], start, frame_stride: stride };
        rope(&Pool::single_thread(), &mut out, x, 24, 0, &RopeTables::new(spec));
        out
    };
    let (far, moved) = (turn(&x, 9, 1), turn(&turn(&x, 4, 1), 5, 0));
    assert!(far.iter().zip(&moved).all(|(a, b)| (a - b).abs() < 1e-5));
}

struct AttentionCase<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    dl: usize,
    head_dim: usize,
    bias: Option<&'a KeyBias>,
}

impl AttentionCase<'_> {
    fn run(&self, pool: &Pool) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        let shape = (self.dl, self.head_dim);
        attention(pool, &mut Scratch::new(), &mut out, self.q, self.k, self.v, shape, self.bias);
        out
    }

    /// Computes one row of one head in f64.
    fn exact_row(&self, row: usize, head: usize) -> Vec<f64> {
        let (dl, hd) = (self.dl, self.head_dim);
        let keys = self.k.len() / dl;
        let at = |t: &[f32], r: usize, i: usize| f64::from(t[r * dl + head * hd + i]);
        let mut scores: Vec<f64> = (0..keys)
            .map(|r| {
                let dot: f64 = (0..hd).map(|i| at(self.q, row, i) * at(self.k, r, i)).sum();
                let add = self.bias.filter(|b| b.rows.contains(&r)).map_or(0.0, |b| f64::from(b.log_b));
                dot / (hd as f64).sqrt() + add
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        scores.iter_mut().for_each(|s| *s = (*s - top).exp());
        let sum: f64 = scores.iter().sum();
        (0..hd).map(|i| (0..keys).map(|r| scores[r] * at(self.v, r, i)).sum::<f64>() / sum).collect()
    }
}

#[test]
fn attention_agrees_with_double_precision() {
    let pool = Pool::new(2).unwrap();
    for (i, keys) in [1, 2, 3, 31, 65, 193, 511, 1025, 2047, 4097].into_iter().enumerate() {
        let (n, head_dim, heads) = ([1, 5, 33, 40][i % 4], [16, 64, 20, 128][i % 4], 1 + i % 3);
        let dl = heads * head_dim;
        let (q, k, v) = (random_values(n * dl, 1), random_values(keys * dl, 2), random_values(keys * dl, 3));
        let bias = KeyBias { log_b: 0.3f32.ln(), rows: keys / 3..keys / 2 };
        for bias in [None, Some(&bias)] {
            let heads_of = AttentionCase { q: &q, k: &k, v: &v, dl, head_dim, bias };
            let out = heads_of.run(&pool);
            for row in [0, n / 2, n - 1] {
                for head in 0..heads {
                    let got = &out[row * dl + head * head_dim..][..head_dim];
                    assert_close(got, &heads_of.exact_row(row, head), 3e-6, &format!("attention on {keys}"));
                }
            }
        }
    }
}

#[test]
fn attention_survives_huge_logits() {
    let (n, keys, head_dim) = (33, 257, 64);
    let mut q = random_values(n * head_dim, 1);
    let mut k = random_values(keys * head_dim, 2);
    let v = random_values(keys * head_dim, 3);
    // Dot products of up to 8e4 / √64: logits of ±1e4, the largest far from the next.
    for (x, scale) in [(&mut q, 40.0f32), (&mut k, 80.0)] {
        x.iter_mut().for_each(|v| *v = (*v * scale).clamp(-3.0 * scale, 3.0 * scale));
    }
    let case = AttentionCase { q: &q, k: &k, v: &v, dl: head_dim, head_dim, bias: None };
    let out = case.run(&Pool::single_thread());
    assert!(out.iter().all(|v| v.is_finite()));
    for row in 0..n {
        // An f32 logit of 1e4 is known to about 1e-2.
        assert_close(&out[row * head_dim..][..head_dim], &case.exact_row(row, 0), 3e-2, "huge logits");
    }
    // One direction: logits from −1e4 to 1e4 exactly, and all equal at 1e4.
    let q = vec![100.0f32; head_dim];
    for spread in [1.0f32, 0.0] {
        let k: Vec<f32> = (0..keys)
            .flat_map(|r| vec![12.5 * (1.0 - spread * 2.0 * r as f32 / (keys - 1) as f32); head_dim])
            .collect();
        let case = AttentionCase { q: &q, k: &k, v: &v, dl: head_dim, head_dim, bias: None };
        assert_close(&case.run(&Pool::single_thread()), &case.exact_row(0, 0), 1e-5, "logits of ±1e4");
    }
    let poisoned: Vec<f32> = v.iter().enumerate().map(|(i, v)| if i == 5 { f32::NAN } else { *v }).collect();
    assert!(
        AttentionCase { v: &poisoned, ..case }.run(&Pool::single_thread())[5].is_nan(),
        "NaN must propagate"
    );
}

// proves: D-09
#[test]
fn attention_is_invariant_to_rows_heads_and_threads() {
    let pools = [Pool::single_thread(), Pool::new(2).unwrap(), Pool::new(3).unwrap()];
    for i in 0..12 {
        let (n, keys) = (pick_size(i, 0, 1, 120), pick_size(i, 1, 1, 700));
        let head_dim = [16, 32, 48, 64][i as usize % 4];
        let heads = pick_size(i, 2, 1, 5);
        let dl = heads * head_dim;
        let (q, k, v) = (random_values(n * dl, 1), random_values(keys * dl, 2), random_values(keys * dl, 3));
        let bias = KeyBias { log_b: -1.0, rows: 0..keys / 2 };
        let whole = AttentionCase { q: &q, k: &k, v: &v, dl, head_dim, bias: Some(&bias) };
        let out = whole.run(&pools[0]);
        for pool in &pools[1..] {
            assert_eq!(bits(&whole.run(pool)), bits(&out));
        }
        for j in 0..4 {
            let row = pick_size(i, 10 + j, 0, n - 1);
            let rows = if j == 0 { 1 } else { pick_size(i, 20 + j, 1, n - row) };
            let head = pick_size(i, 30 + j, 0, heads - 1);
            let count = pick_size(i, 40 + j, 1, heads - head);
            let cut = |t: &[f32]| -> Vec<f32> {
                t.chunks(dl).flat_map(|r| r[head * head_dim..][..count * head_dim].iter().copied()).collect()
            };
            let (q, k, v) = (cut(&q[row * dl..][..rows * dl]), cut(&k), cut(&v));
            let part = AttentionCase { q: &q, k: &k, v: &v, dl: count * head_dim, ..whole }.run(&pools[1]);
            assert_eq!(bits(&part), bits(&cut(&out[row * dl..][..rows * dl])));
        }
    }
}

#[test]
fn elementwise_kernels_agree_with_double_precision() {
    let pools = [Pool::single_thread(), Pool::new(2).unwrap()];
    let (n, d) = (20_000 / 37, 37);
    let (x, y, b) = (random_values(n * d, 1), random_values(n * d, 2), random_values(d, 3));
    let key = DrawKey { seed: 9, chunk: 2, draw: 1 };
    let first = 4098;
    let mut noise = vec![0.0; first + n * d];
    fill_normals(key, 0, &mut noise);
    for pool in &pools {
        let mut out = vec![0.0; n * d];
        let f = |v: f32| f64::from(v);
        add(pool, &mut out, &x, &y);
        assert_close(&out, &x.iter().zip(&y).map(|(a, b)| f(*a) + f(*b)).collect::<Vec<_>>(), 1e-6, "add");
        map_elements(pool, &mut out, &x, silu);
        assert_close(
            &out,
            &x.iter().map(|v| f(*v) / (1.0 + (-f(*v)).exp())).collect::<Vec<_>>(),
            1e-6,
            "silu",
        );
        bias_act(pool, &mut out, &x, &b, Some(Activation::Silu));
        let sums = x.iter().enumerate().map(|(i, v)| f(*v) + f(b[i % d]));
        assert_close(&out, &sums.map(|v| v / (1.0 + (-v).exp())).collect::<Vec<_>>(), 1e-6, "bias_act");
        renoise(pool, &mut out, &x, 0.3, key, first as u64);
        let want = x.iter().zip(&noise[first..]).map(|(x, z)| (1.0 - 0.3f32) * x + 0.3f32 * z);
        assert_eq!(out, want.collect::<Vec<f32>>());
        guide(pool, &mut out, &x, &y, 5.5);
        let want = x.iter().zip(&y).map(|(x, y)| (f(*y) + 5.5 * (f(*x) - f(*y))) as f32);
        assert_eq!(out, want.collect::<Vec<f32>>());
        guide(pool, &mut out, &x, &y, 1.0);
        assert_eq!(out, x, "a scale of 1 is the prediction with the prompt");
        guide(pool, &mut out, &x, &x, 5.5);
        assert_eq!(out, x, "two equal predictions are the result");
        to_x0(pool, &mut out, &x, &y, 0.9375);
        let want = x.iter().zip(&y).map(|(x, p)| (f(*x) - 0.9375 * f(*p)) as f32);
        assert_eq!(out, want.collect::<Vec<f32>>());
    }
    let mut e = vec![0.0; 2 * 10];
    time_embed(&mut e, &[937.5, 0.0]);
    assert_eq!(e[10..], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let angle = 937.5 * 10_000f64.powf(-0.4);
    assert_eq!([e[2], e[7]], [angle.cos() as f32, angle.sin() as f32]);
}

#[test]
fn pixels_go_to_tokens_and_back() {
    let g = PixelGeometry { frames: 2, height: 4, width: 6, stride: [2, 3, 2] };
    let (rows, length) = g.token_shape();
    let [st, sh, sw] = g.stride;
    let (high, wide) = (g.height * sh, g.width * sw);
    let pixels: Vec<f32> = (0..g.frames * st * high * wide * 3).map(|i| (i as f32).sin()).collect();
    let mut tokens = vec![f32::NAN; rows * length];
    space_time_to_depth(&mut tokens, &pixels, g);
    for (i, p) in pixels.iter().enumerate() {
        let (rgb, x, y, t) = (i % 3, i / 3 % wide, i / 3 / wide % high, i / 3 / wide / high);
        let channel = ((t % st * sh + y % sh) * sw + x % sw) * 3 + rgb;
        let (f, h, w) = (t / st, y / sh, x / sw);
        let row = (f * (g.height / 2) + h / 2) * (g.width / 2) + w / 2;
        let inside = (h % 2 * 2 + w % 2) * g.channel_count() + channel;
        assert_eq!(tokens[row * length + inside], *p);
    }
    let mut back = vec![0.0; pixels.len()];
    depth_to_space_time(&mut back, &tokens, g);
    assert_eq!(back, pixels);
    tokens[0] = 7.0;
    tokens[1] = -7.0;
    tokens[2] = f32::NAN;
    depth_to_space_time(&mut back, &tokens, g);
    assert!(back[0] == 1.0 && back[1] == -1.0 && back[2].is_nan());
}

#[test]
fn softmax_and_bmm_agree_with_double_precision_and_are_row_invariant() {
    let pool = Pool::single_thread();
    let (batch, n, k, m) = (3, 5, 7, 4);
    let (x, y) = (random_values(batch * n * k, 1), random_values(batch * k * m, 2));
    let run = |x: &[f32], y: &[f32], n: usize, transposed: bool| {
        let mut out = vec![0.0; x.len() / k * m];
        bmm(&pool, &mut out, x, y, [n, k, m], transposed, 0.25);
        out
    };
    let got = run(&x, &y, n, false);
    let want: Vec<f64> = (0..batch * n * m)
        .map(|i| {
            let (of, row, c) = (i / (n * m), i / m, i % m);
            (0..k).map(|j| 0.25 * f64::from(x[row * k + j]) * f64::from(y[(of * k + j) * m + c])).sum()
        })
        .collect();
    assert_close(&got, &want, 1e-6, "dot");
    let turned: Vec<f32> = (0..y.len()).map(|i| y[i / (k * m) * (k * m) + i % k * m + i / k % m]).collect();
    assert_eq!(bits(&run(&x, &turned, n, true)), bits(&got));
    // The second batch alone, and its third row alone.
    let (own_x, own_y) = (&x[n * k..2 * n * k], &y[k * m..2 * k * m]);
    assert_eq!(bits(&run(own_x, own_y, n, false)), bits(&got[n * m..2 * n * m]));
    assert_eq!(bits(&run(&own_x[2 * k..3 * k], own_y, 1, false)), bits(&got[(n + 2) * m..(n + 3) * m]));

    let mut soft = vec![0.0; x.len()];
    softmax(&pool, &mut soft, &x, k);
    let want: Vec<f64> = (0..x.len())
        .map(|i| {
            let row = &x[i / k * k..][..k];
            let total: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
            f64::from(x[i]).exp() / total
        })
        .collect();
    assert_close(&soft, &want, 1e-6, "softmax");
    let mut one = vec![0.0; k];
    softmax(&pool, &mut one, &x[4 * k..5 * k], k);
    assert_eq!(bits(&one), bits(&soft[4 * k..5 * k]));
}

#[test]
fn a_weight_in_bf16_keeps_the_bits_of_a_matmul() {
    let pool = Pool::new(2).unwrap();
    for (i, (m, n, k)) in [(1, 33, 7), (13, 64, 96), (101, 45, 260), (50, 130, 31)].into_iter().enumerate() {
        let x = random_values(m * k, 1);
        let w: Vec<f32> =
            random_values(n * k, 2).iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
        let bf16 = PackedWeight::new_bf16(&pool, &w, n, k).unwrap();
        let f32s = PackedWeight::new(&pool, &w, n, k);
        assert!(bf16.is_bf16() && 2 * bf16.allocated_bytes() <= f32s.allocated_bytes(), "{m} {n} {k}");
        let run = |w: &PackedWeight| {
            let mut out = vec![f32::NAN; m * n];
            let act = (i % 2 == 0).then_some(Activation::GeluTanh);
            matmul(
                &pool,
                &mut Scratch::new(),
                &mut out,
                &x,
                MatmulWeight::Packed(w),
                (m, n, k),
                None,
                act,
                1,
            );
            bits(&out)
        };
        assert_eq!(run(&bf16), run(&f32s), "{m} {n} {k}");
        let mut rows = [Vec::new(), Vec::new()];
        for first in (0..n).step_by(UNPACK_ROWS) {
            bf16.unpack_rows(first, &mut rows[0]);
            f32s.unpack_rows(first, &mut rows[1]);
            assert_eq!(bits(&rows[0]), bits(&rows[1]));
        }
        assert_eq!((bf16.get(n * k - 1), bf16.get(n * k)), (Some(w[n * k - 1]), None));
        // One element that bf16 would round keeps the whole weight in f32.
        let mut other = w.clone();
        other[n * k / 2] = 0.1;
        assert!(PackedWeight::new_bf16(&pool, &other, n, k).is_none());
    }
}

#[test]
fn packed_matrices_of_groups_keep_the_bits_of_a_grouped_matmul() {
    let pool = Pool::new(2).unwrap();
    // Columns beside a panel, one row and many, empty groups, and two token groups in the slots of each expert.
    for (groups, slots, m, k, counts) in
        [(3, 4, 37, 20, vec![4.0, 0.0, 1.0]), (2, 102, 64, 300, vec![51.0, 7.0, 0.0, 50.0])]
    {
        let (x, w) = (random_values(groups * slots * k, 1), random_values(groups * m * k, 2));
        let matrices: Vec<PackedWeight> =
            w.chunks_exact(m * k).map(|w| PackedWeight::new(&pool, w, m, k)).collect();
        let run = |w: GroupWeights<'_>| {
            let mut out = vec![f32::NAN; groups * slots * m];
            let (scratch, act) = (&mut Scratch::new(), Some(Activation::Silu));
            grouped_matmul(&pool, scratch, &mut out, [&x, &counts], w, [slots, m, k], act);
            out
        };
        let found = run(GroupWeights::Packed(&matrices));
        assert_eq!(bits(&found), bits(&run(GroupWeights::Plain(&w))));
        let capacity = slots * groups / counts.len();
        for (i, y) in found.iter().enumerate() {
            let (row, column) = (i / m, i % m);
            let want = match (row % capacity) < counts[row / capacity] as usize {
                true => {
                    let w = &w[(row / slots * m + column) * k..][..k];
                    let pairs = x[row * k..][..k].iter().zip(w);
                    let y: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    y / (1.0 + (-y).exp())
                }
                false => 0.0,
            };
            assert!(
                (f64::from(*y) - want).abs() <= 6e-5 * want.abs().max(1.0),
                "{row}, {column}: {y} for {want}"
            );
        }
    }
}

/// Computes in f64, from the definition, the attention of one query of one head over all keys.
fn exact_relative_row(
    [q, k, v]: [&[f32]; 3],
    (dl, head_dim): (usize, usize),
    (row, head): (usize, usize),
    bias: impl Fn(i64) -> f64,
) -> Vec<f64> {
    let keys = k.len() / dl;
    let at = |t: &[f32], r: usize, i: usize| f64::from(t[r * dl + head * head_dim + i]);
    let scores: Vec<f64> = (0..keys)
        .map(|r| {
            (0..head_dim).map(|i| at(q, row, i) * at(k, r, i)).sum::<f64>() + bias(r as i64 - row as i64)
        })
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..head_dim).map(|i| (0..keys).map(|r| weights[r] * at(v, r, i)).sum::<f64>() / sum).collect()
}

#[test]
fn relative_attention_agrees_with_double_precision() {
    // The last distances of the buckets 0 to 14 of one direction, of 32 buckets up to distance 128, as
    // transformers computes them.
    const LAST: [i64; 15] = [0, 1, 2, 3, 4, 5, 6, 7, 11, 15, 22, 31, 45, 63, 90];
    let pool = Pool::new(2).unwrap();
    for (n, keys, heads, head_dim) in [(1, 1, 1, 8), (5, 3, 2, 12), (33, 40, 3, 6), (200, 173, 2, 20)] {
        let dl = heads * head_dim;
        let small =
            |seed| random_values(n.max(keys) * dl, seed).iter().map(|x| x * 0.5).collect::<Vec<f32>>();
        let (q, k, v, table) = (small(1), small(2), small(3), random_values(32 * heads, 4));
        let (q, k, v) = (&q[..n * dl], &k[..keys * dl], &v[..keys * dl]);
        let bias = DistanceBias::new(&table, heads, 128, (n, keys));
        let run = |pool: &Pool| {
            let mut out = vec![f32::NAN; n * dl];
            relative_attention(pool, &mut Scratch::new(), &mut out, [q, k, v], (dl, head_dim), &bias);
            out
        };
        let out = run(&pool);
        assert_eq!(bits(&out), bits(&run(&Pool::single_thread())));
        for row in [0, n / 2, n - 1] {
            for head in 0..heads {
                let exact = exact_relative_row([q, k, v], (dl, head_dim), (row, head), |ahead| {
                    let bucket = LAST.iter().take_while(|last| **last < ahead.abs()).count();
                    f64::from(table[(bucket + if ahead > 0 { 16 } else { 0 }) * heads + head])
                });
                let got = &out[row * dl + head * head_dim..][..head_dim];
                assert_close(got, &exact, 3e-6, &format!("row {row} of {n} on {keys}"));
            }
        }
    }
}
