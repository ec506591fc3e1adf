//! What makes a large product that this crate's kernel does not always make: each algorithm that the library lists, in both orders of
//! tiles, is timed on this device when a program is loaded. The fastest is taken if it is 2 % faster than the first and gives the same
//! bits. Then the kernel of this crate runs against it, turn by turn and long enough for the device's power limit to have its say, and is
//! taken if it gives the same bits, unless it is 1 % slower: between other kernels it does better than by itself (docs/design/0014).
//! A choice by time may differ between ranks, and results do not. It is kept beside compiled kernels, and later loads of the same
//! shape on the same device with the same library and kernels take it as it is.

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use tessera_ir::DType;

use crate::choices::Choice;
use crate::driver::{Done, Event, Memory, Stream, download, upload};
use crate::products::{At, By, Plan, Products, Shape};
use crate::warpgroups::Cut;

/// Multiplications from which a choice is worth its time.
const LARGE: u64 = 5_000_000_000;
/// Rounds in which all candidates take turns, and calls of one in a round.
const ROUNDS: usize = 3;
const CALLS: usize = 3;
/// How much shorter than the first a candidate must take.
const WORTH: f32 = 0.98;
/// Turns of each of two that run against each other, how long one is, half of which counts, and how long the second may take of the
/// first one's time.
const TURNS: usize = 3;
const TURN_MS: f32 = 120.0;
const WINS: f32 = 1.01;
/// How the choice is made, for whoever keeps one.
pub(crate) const RULE: (usize, f32, usize, f32, f32, [u64; 6]) =
    (CALLS, WORTH, TURNS, TURN_MS, WINS, OPERANDS);
/// All that operands may be, of bits that are all zeros or all ones.
const OPERANDS: [u64; 6] =
    [half_words(0), half_words(!0), tiny_words(0), tiny_words(!0), scale_words(0), scale_words(!0)];
/// Boundaries of operands, in bytes.
const ALIGNMENT: u64 = 256;

/// The kernel of this crate for a shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rival {
    pub(crate) cut: Cut,
    /// What it writes where it belongs, and the library's result is copied from.
    pub(crate) spared_bytes: u64,
}

/// Whether a choice is worth its time.
pub(crate) fn is_large(s: &Shape) -> bool {
    s.rows * s.columns * s.inner >= LARGE && s.dtype != DType::F32
}

/// Exchanges the plan's algorithm for a faster one among those listed, of which the plan has the first, or for its rival. Whether any
/// time was taken for it: what was chosen before is chosen again.
pub(crate) fn tune(
    products: &Products,
    s: Shape,
    plan: &mut Plan,
    listed: &[cublasLtMatmulAlgo_t],
    rival: Option<Rival>,
) -> Done<bool> {
    if !is_large(&s) {
        return Ok(false);
    }
    let mut candidates: Vec<By> = listed.iter().map(|a| By::Library(*a)).collect();
    candidates.extend(listed.iter().filter_map(|a| products.reordered(plan, a)).map(By::Library));
    let key = products.choices.key(&s, listed, rival.as_ref());
    let kept = products.choices.find(&key).and_then(|c| c.by(&candidates, rival.as_ref()));
    if let Some(by) = kept {
        plan.by = by;
        return Ok(false);
    }
    // Where memory is short the first will do.
    let Ok(trial) = Trial::new(s) else { return Ok(false) };
    let mut best = vec![f32::INFINITY; candidates.len()];
    for round in 0..=ROUNDS {
        for (by, best) in candidates.iter().zip(&mut best) {
            plan.by = *by;
            // One that is listed and refuses to run is none.
            let took = trial.calls_ms(products, plan, CALLS, 0).unwrap_or(f32::INFINITY);
            // The first round loads kernels.
            if round > 0 {
                *best = best.min(took);
            }
        }
    }
    let mut order: Vec<usize> = (1..candidates.len()).filter(|i| best[*i] < WORTH * best[0]).collect();
    order.sort_by(|a, b| best[*a].total_cmp(&best[*b]));
    // Not before: calls that are timed write where the first's result lies.
    plan.by = candidates[0];
    let first = trial.result(products, plan, 0)?;
    let same = |plan: &Plan| {
        // What is not written must not look like what the last one wrote.
        fill(trial.results[1], trial.result_bytes, |_| u64::MAX, &trial.stream)?;
        trial.same(first, trial.result(products, plan, 1)?)
    };
    let mut chosen = 0;
    for i in order {
        plan.by = candidates[i];
        if same(plan)? {
            chosen = i;
            break;
        }
    }
    let library = candidates[chosen];
    plan.by = library;
    let Some(rival) = rival else {
        products.choices.keep(&key, Choice::Library(chosen));
        return Ok(true);
    };
    let own = By::Own(rival.cut);
    plan.by = own;
    let mut wins = || -> Done<bool> {
        if !same(plan)? {
            return Ok(false);
        }
        let [library_ms, own_ms] =
            trial.against(products, plan, [(library, rival.spared_bytes), (own, 0)])?;
        Ok(own_ms < WINS * library_ms)
    };
    // One that refuses to run is none, as among those that are listed; and nothing is kept of it.
    let won = wins();
    let choice = if matches!(won, Ok(true)) { Choice::Own } else { Choice::Library(chosen) };
    plan.by = if choice == Choice::Own { own } else { library };
    if won.is_ok() {
        products.choices.keep(&key, choice);
    }
    Ok(true)
}

/// Operands of one product, and two results.
struct Trial {
    shape: Shape,
    at: At,
    results: [u64; 2],
    result_bytes: u64,
    stream: Stream,
    _memory: Memory,
}

impl Trial {
    fn new(s: Shape) -> Done<Trial> {
        let narrow = s.dtype == DType::E4m3;
        let result_bytes = s.rows * s.columns * 2;
        let extents = [
            s.rows * s.inner * s.dtype.bytes(),
            s.columns * s.inner * s.dtype.bytes(),
            s.columns * 2,
            if s.residual { result_bytes } else { 0 },
            if narrow { 4 * s.rows.max(s.columns) } else { 0 },
            result_bytes,
            result_bytes,
        ];
        let mut places = [0; 7];
        let mut end = 0;
        for (place, bytes) in places.iter_mut().zip(extents) {
            *place = end;
            end += bytes.next_multiple_of(ALIGNMENT);
        }
        let memory = Memory::new(end as usize)?;
        let [x, w, bias, residual, scales, one, two] = places.map(|p| memory.at() + p);
        let stream = Stream::new(false)?;
        for (at, bytes) in [(x, extents[0]), (w, extents[1])] {
            fill(at, bytes, if narrow { tiny_words } else { half_words }, &stream)?;
        }
        for (at, bytes) in [(bias, extents[2]), (residual, extents[3])] {
            fill(at, bytes, half_words, &stream)?;
        }
        fill(scales, extents[4], scale_words, &stream)?;
        let at = At { x, w, bias, residual, out: one, scales: (scales, scales), away: None };
        Ok(Trial { shape: s, at, results: [one, two], result_bytes, stream, _memory: memory })
    }

    /// Milliseconds of so many calls, each with a copy of so many bytes of its result.
    fn calls_ms(&self, products: &Products, plan: &Plan, calls: usize, copied_bytes: u64) -> Done<f32> {
        let (begin, end) = (Event::timed()?, Event::timed()?);
        self.stream.record(&begin)?;
        for _ in 0..calls {
            products.launch(self.shape, plan, self.at, &self.stream)?;
            if copied_bytes > 0 {
                self.stream.copy(self.results[1], self.results[0], copied_bytes as usize)?;
            }
        }
        self.stream.finish(&end)?;
        begin.until_ms(&end)
    }

    /// Milliseconds of as many calls of each of two, with what each leaves to a copy, in turns; the first half of each turn does not
    /// count.
    fn against(&self, products: &Products, plan: &mut Plan, both: [(By, u64); 2]) -> Done<[f32; 2]> {
        let each_ms = self.calls_ms(products, plan, CALLS, 0)? / CALLS as f32;
        let calls = ((TURN_MS / 2.0 / each_ms.max(0.001)) as usize).max(1);
        let mut took = [0.0; 2];
        for _ in 0..TURNS {
            for ((by, copied_bytes), took) in both.iter().zip(&mut took) {
                plan.by = *by;
                self.calls_ms(products, plan, calls, *copied_bytes)?;
                *took += self.calls_ms(products, plan, calls, *copied_bytes)?;
            }
        }
        Ok(took)
    }

    /// Runs once into one of the results, and waits for it.
    fn result(&self, products: &Products, plan: &Plan, which: usize) -> Done<u64> {
        let out = self.results[which];
        products.launch(self.shape, plan, At { out, ..self.at }, &self.stream)?;
        self.stream.finish(&Event::new()?)?;
        Ok(out)
    }

    fn same(&self, a: u64, b: u64) -> Done<bool> {
        const PIECE: u64 = 16 << 20;
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < self.result_bytes {
            let n = PIECE.min(self.result_bytes - at) as usize;
            of_a.resize(n, 0_u8);
            of_b.resize(n, 0_u8);
            download(&mut of_a, a + at)?;
            download(&mut of_b, b + at)?;
            if of_a != of_b {
                return Ok(false);
            }
            at += n as u64;
        }
        Ok(true)
    }
}

/// Words of numbers that repeat after a length which no row has: a mebibyte written from here, and copied on.
fn fill(at: u64, bytes: u64, word: fn(u64) -> u64, stream: &Stream) -> Done<()> {
    const WORDS: u64 = (1 << 17) + 1;
    let words: Vec<u64> = random_bits().map(word).take(WORDS.min(bytes / 8) as usize).collect();
    upload(at, &words)?;
    let mut written = words.len() as u64 * 8;
    while 0 < written && written < bytes {
        let n = written.min(bytes - written);
        stream.copy(at + written, at, n as usize)?;
        written += n;
    }
    Ok(())
}

fn random_bits() -> impl Iterator<Item = u64> {
    let step = |x: &u64| {
        let mut x = *x;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        Some(x)
    };
    // By xorshift.
    std::iter::successors(Some(0x9e37_79b9_7f4a_7c15_u64), step).skip(1)
}

/// Four bf16 of magnitudes from 2^-7 to two: their products' sums must be rounded, or every order of them would give the same bits.
const fn half_words(bits: u64) -> u64 {
    bits & 0x83ff_83ff_83ff_83ff | 0x3c00_3c00_3c00_3c00
}

/// Eight e4m3 of magnitudes from an eighth to two.
const fn tiny_words(bits: u64) -> u64 {
    bits & 0x9f9f_9f9f_9f9f_9f9f | 0x2020_2020_2020_2020
}

/// Two f32 from one to two.
const fn scale_words(bits: u64) -> u64 {
    bits & 0x007f_ffff_007f_ffff | 0x3f80_0000_3f80_0000
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use tessera_device::numbers::bf16;

    use crate::choices::Choices;
    use crate::compile::{Compiler, Shelf};
    use crate::exec::widened;
    use crate::first_gpu::first_gpu;
    use crate::products::{Away, SQUARE};
    use crate::tables::CublasLt;
    use crate::warpgroups::{ENDINGS, Ending, Warpgroups, cuts};

    /// Products on a GPU, and what compiles for it.
    struct Here {
        products: Products,
        compiler: Compiler,
        own: Option<Warpgroups>,
    }

    /// Products on the first GPU, if there is one.
    fn on_a_gpu(test: impl FnOnce(Here)) {
        with_choices(None, test);
    }

    fn with_choices(kept: Option<Arc<dyn Shelf>>, test: impl FnOnce(Here)) {
        let Some(gpu) = first_gpu() else { return };
        let Ok(lt) = CublasLt::load(&gpu.libraries) else {
            eprintln!("skipped: no cuBLASLt");
            return;
        };
        let own = || Warpgroups::new(gpu.capability, gpu.multiprocessors);
        let choices = Choices::new(kept, &gpu.context, &lt);
        let products = Products::new(lt, own(), choices).unwrap();
        test(Here { products, own: own(), compiler: gpu.compiler });
    }

    /// The library's products and the kernel of this crate by itself, where both are.
    fn on_a_hopper(test: impl FnOnce(Products, Compiler, Warpgroups)) {
        on_a_gpu(|Here { products, compiler, own }| match own {
            Some(own) => test(products, compiler, own),
            None => eprintln!("skipped: not a Hopper"),
        });
    }

    /// The result of a product of operands that repeat from their beginning: fewer rows are the first ones of more.
    fn result(here: &mut Here, s: Shape) -> Vec<u8> {
        here.products.prepare(s, &mut here.compiler).unwrap();
        let trial = Trial::new(here.products.form(s)).unwrap();
        result_of(here, s, &trial, trial.at)
    }

    /// The result of a product of operands in a trial's memory, which may be of more columns.
    fn result_of(here: &mut Here, s: Shape, trial: &Trial, at: At) -> Vec<u8> {
        let Here { products, compiler, .. } = here;
        products.prepare(s, compiler).unwrap();
        products.run(products.form(s), at, &trial.stream).unwrap();
        trial.stream.finish(&Event::new().unwrap()).unwrap();
        read(at.out, s)
    }

    fn read(out: u64, s: Shape) -> Vec<u8> {
        let mut bytes = vec![0_u8; (2 * s.rows * s.columns) as usize];
        download(&mut bytes, out).unwrap();
        bytes
    }

    #[test]
    fn sums_in_another_order_have_other_bits() {
        let bytes: Vec<u8> = random_bits().map(half_words).take(1 << 16).flat_map(u64::to_le_bytes).collect();
        let all = numbers(&bytes);
        let others = all.chunks_exact(2 * 5120).filter(|operands| {
            let terms = || operands[..5120].iter().zip(&operands[5120..]).map(|(x, w)| x * w);
            let (there, back) = (terms().sum::<f32>(), terms().rev().sum::<f32>());
            there != back
        });
        assert!(others.count() >= 20, "what is compared with this would be equal whatever it does");
    }

    #[derive(Debug, Default)]
    struct Memo(Mutex<BTreeMap<String, Vec<u8>>>);

    impl Shelf for Memo {
        fn find(&self, name: &str) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(name).cloned()
        }
        fn keep(&self, name: &str, image: &[u8]) {
            self.0.lock().unwrap().insert(name.into(), image.into());
        }
    }

    #[test]
    fn what_was_chosen_before_is_chosen_again() {
        let kept = Arc::new(Memo::default());
        // How many were timed, and what is kept after it.
        let prepared = || {
            let mut timed = None;
            with_choices(Some(kept.clone()), |mut here| {
                here.products.prepare(SQUARE, &mut here.compiler).unwrap();
                timed = Some(here.products.timed());
            });
            timed.map(|timed| (timed, kept.0.lock().unwrap().clone()))
        };
        let Some((timed, first)) = prepared() else { return };
        assert_eq!((timed, first.len()), (1, 1));
        assert_eq!(prepared(), Some((0, first)));
    }

    #[test]
    fn a_row_is_the_same_however_many_there_are() {
        on_a_gpu(|mut here| {
            let mut bad = Vec::new();
            for dtype in [DType::Bf16, DType::E4m3] {
                for like in [
                    SQUARE,
                    Shape { residual: true, ..SQUARE },
                    Shape { columns: 13824, gelu: true, ..SQUARE },
                    Shape { inner: 13824, ..SQUARE },
                ] {
                    let like = Shape { dtype, ..like };
                    let most = result(&mut here, like);
                    for rows in [2340, 1170, 585, 2160, 1080, 540, 270] {
                        let s = Shape { rows, ..like };
                        let bytes = result(&mut here, s);
                        if most[..bytes.len()] != bytes {
                            bad.push(s);
                        }
                    }
                }
            }
            assert!(bad.is_empty(), "other bits than with 4,680 rows: {bad:#?}");
        });
    }

    #[test]
    fn a_column_is_the_same_however_many_there_are() {
        on_a_gpu(|mut here| {
            for (dtype, rows) in [(DType::Bf16, 4680), (DType::Bf16, 2160), (DType::E4m3, 4680)] {
                let one = Shape { dtype, rows, ..SQUARE };
                let whole = Shape { columns: 3 * one.columns, ..one };
                here.products.prepare(whole, &mut here.compiler).unwrap();
                let trial = Trial::new(here.products.form(whole)).unwrap();
                // Each column with a scale of its own.
                if dtype == DType::E4m3 {
                    let scales: Vec<f32> = (0..whole.columns).map(|i| 1.0 + i as f32 / 1e5).collect();
                    trial.stream.finish(&Event::new().unwrap()).unwrap();
                    upload(trial.at.scales.1, &scales).unwrap();
                }
                let many = result_of(&mut here, whole, &trial, trial.at);
                let row = 2 * one.columns as usize;
                for third in 0..3 {
                    let first = third * one.columns;
                    let At { w, bias, scales: (of_rows, of_columns), .. } = trial.at;
                    let at = At {
                        w: w + first * one.inner * dtype.bytes(),
                        bias: bias + 2 * first,
                        scales: (of_rows, of_columns + 4 * first),
                        out: trial.results[1],
                        ..trial.at
                    };
                    let few = result_of(&mut here, one, &trial, at);
                    let here = third as usize * row;
                    let same = few
                        .chunks(row)
                        .zip(many.chunks(3 * row))
                        .all(|(few, many)| few == &many[here..here + row]);
                    assert!(
                        same,
                        "{one:?}: third {third} has other bits in a product of three times as many columns"
                    );
                }
            }
        });
    }

    /// Numbers of a result in bf16.
    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks(2).map(|b| widened(u16::from_le_bytes([b[0], b[1]]))).collect()
    }

    /// What the library makes of a trial's operands, with what is added after it.
    fn by_library(products: &Products, trial: &Trial) -> Vec<f32> {
        let s = Shape { residual: false, ..trial.shape };
        let plan = products.plan(s, None).unwrap();
        products.launch(s, &plan, trial.at, &trial.stream).unwrap();
        trial.stream.finish(&Event::new().unwrap()).unwrap();
        let made = numbers(&read(trial.at.out, s));
        if !trial.shape.residual {
            return made;
        }
        let sum = |(a, b): (&f32, f32)| widened(bf16(a + b));
        made.iter().zip(numbers(&read(trial.at.residual, s))).map(sum).collect()
    }

    #[test]
    fn the_kernel_of_this_crate_gives_the_librarys_bits() {
        on_a_hopper(|products, mut compiler, mut own| {
            let mut bad = Vec::new();
            for (rows, columns, inner) in
                [(37, 544, 200), (184, 520, 64), (300, 1056, 5120), (2160, 5120, 5120), (4680, 5120, 13824)]
            {
                for (bias, ending) in [false, true].into_iter().flat_map(|b| ENDINGS.map(|e| (b, e))) {
                    let (gelu, residual) = (ending == Ending::Gelu, ending == Ending::Residual);
                    let s = Shape { rows, columns, inner, bias, gelu, residual, ..SQUARE };
                    let trial = Trial::new(s).unwrap();
                    let want = by_library(&products, &trial);
                    // In which order the library takes GELU is not known: beside it a few values are rounded the other way.
                    let most = if gelu { want.len() / 1000 } else { 0 };
                    for cut in cuts(ending).filter(|c| [48, 96, 136, 168, 184, 200].contains(&c.width)) {
                        own.prepare(&mut compiler, cut).unwrap();
                        let at = At { out: trial.results[1], ..trial.at };
                        fill(at.out, trial.result_bytes, |_| u64::MAX, &trial.stream).unwrap();
                        // What is added may be where the result will lie.
                        let inside = residual && cut.same_columns;
                        if inside {
                            trial.stream.copy(at.out, at.residual, trial.result_bytes as usize).unwrap();
                        }
                        let residual = if inside { at.out } else { at.residual };
                        own.run(cut, s, At { residual, ..at }, &trial.stream).unwrap();
                        trial.stream.finish(&Event::new().unwrap()).unwrap();
                        // As numbers: zeros of both signs are one.
                        let here = numbers(&read(at.out, s));
                        let others = want.iter().zip(&here).filter(|(a, b)| a != b).count();
                        if others > most {
                            bad.push((cut, s, others));
                        }
                    }
                }
            }
            assert!(bad.is_empty(), "other bits than the library's: {bad:#?}");
        });
    }

    #[test]
    fn columns_of_their_own_lie_where_they_should() {
        on_a_hopper(|_, mut compiler, mut own| {
            let s = Shape { rows: 300, columns: 1056, ..SQUARE };
            let trial = Trial::new(s).unwrap();
            let (first, last, row) = (512, 1032, 7_u64);
            let apart = Shape { columns: last - first, ..s };
            let elsewhere = Memory::new(((row + s.rows) * apart.columns * 2 + 256) as usize).unwrap();
            upload(elsewhere.at(), &[row]).unwrap();
            let columns = (first, last);
            let away = Some(Away { columns, to: elsewhere.at() + 256, row: elsewhere.at() });
            for cut in cuts(Ending::Plain).filter(|c| [48, 184, 200].contains(&c.width)) {
                own.prepare(&mut compiler, cut).unwrap();
                own.run(cut, s, trial.at, &trial.stream).unwrap();
                own.run(cut, s, At { out: trial.results[1], away, ..trial.at }, &trial.stream).unwrap();
                trial.stream.finish(&Event::new().unwrap()).unwrap();
                let (want, here) = (read(trial.results[0], s), read(trial.results[1], s));
                let there = read(elsewhere.at() + 256 + row * apart.columns * 2, apart);
                let (first, last) = (2 * first as usize, 2 * last as usize);
                let rows = want.chunks(2 * s.columns as usize).zip(here.chunks(2 * s.columns as usize));
                for ((want, here), there) in rows.zip(there.chunks(last - first)) {
                    assert_eq!(want[..first], here[..first], "{cut:?}");
                    assert_eq!(want[first..last], *there, "{cut:?}");
                    assert_eq!(want[last..], here[last..], "{cut:?}");
                }
            }
        });
    }
}
