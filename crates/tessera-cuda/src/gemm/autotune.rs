//! The autotuner of large GEMMs. When a program is loaded, it times each cuBLASLt candidate, with
//! both CTA swizzlings, on this device. The fastest replaces the heuristic's top if it is at least
//! 2 % faster and gives the same bits. Then this crate's sm90 kernel runs alternately with it, long
//! enough to reach the power limit. The sm90 kernel wins if it gives the same bits, unless it is
//! more than 1 % slower: between other kernels it performs better than in isolation
//! (docs/design/0014).
//!
//! Ranks may choose differently, but results do not differ. Choices are cached beside compiled
//! kernels, and later loads of the same shape on the same device with the same library and kernels
//! reuse them.

#![allow(unsafe_code, reason = "launches of GEMMs on the memory of a trial")]

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use tessera_device::FingerprintHasher;
use tessera_ir::DType;

use super::autotune_cache::{AutotuneCache, GemmChoice};
use super::plan::{GemmLauncher, GemmPlan};
use super::shape::{GemmKernel, GemmOperands, GemmShape, Sm90Candidate, is_worth_tuning};
use crate::device_memory::{ALIGNMENT, DeviceMemory, DeviceSlice, copy_to_device, copy_to_host};
use crate::driver::{CudaEvent, CudaResult, CudaStream};

/// The numbers on which a choice depends.
#[derive(Debug)]
struct TuningPolicy {
    /// Rounds over all candidates, and calls per candidate and round.
    rounds: usize,
    calls_per_round: usize,
    /// Only a candidate below this share of the time of the heuristic's first choice replaces it.
    max_time_ratio: f32,
    /// The comparison of the best cuBLASLt algorithm with the sm90 kernel: number of alternations,
    /// milliseconds per alternation (the second half counts), and maximum time of the sm90 kernel
    /// relative to cuBLASLt.
    alternations: usize,
    alternation_ms: f32,
    max_sm90_time_ratio: f32,
}

/// The policy. Its text is part of the cache key, so that another policy does not reuse a choice.
const POLICY: TuningPolicy = TuningPolicy {
    rounds: 3,
    calls_per_round: 3,
    max_time_ratio: 0.98,
    alternations: 3,
    alternation_ms: 120.0,
    max_sm90_time_ratio: 1.01,
};

/// The bit patterns that define the operands' value ranges: each generator applied to all zeros and
/// to all ones.
const OPERAND_BITS: [u64; 6] =
    [bf16_word(0), bf16_word(!0), e4m3_word(0), e4m3_word(!0), f32_scale_word(0), f32_scale_word(!0)];

/// Chooses implementations of GEMMs on one device by their times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Autotuner<'a> {
    pub(crate) launcher: &'a GemmLauncher,
    pub(crate) cache: &'a AutotuneCache,
}

impl Autotuner<'_> {
    /// Replaces the plan's implementation, initially the first of `listed`, by a faster one. Returns
    /// whether candidates were timed; a cached choice is reused without timing.
    pub(crate) fn tune_plan(
        self,
        s: GemmShape,
        plan: &mut GemmPlan,
        listed: &[cublasLtMatmulAlgo_t],
        sm90: Option<Sm90Candidate>,
    ) -> CudaResult<bool> {
        if !is_worth_tuning(&s) {
            return Ok(false);
        }
        let mut candidates: Vec<GemmKernel> = listed.iter().map(|a| GemmKernel::CublasLt(*a)).collect();
        let swizzled =
            listed.iter().filter_map(|a| self.launcher.cublaslt.with_other_cta_swizzle(&plan.described, a));
        candidates.extend(swizzled.map(GemmKernel::CublasLt));
        let key = self.cache.cache_key(&s, &format!("{POLICY:?} {OPERAND_BITS:?}"), listed, sm90.as_ref());
        let cached = self.cache.load_choice(&key).and_then(|c| c.to_kernel(&candidates, sm90.as_ref()));
        if let Some(by) = cached {
            plan.kernel = by;
            return Ok(false);
        }
        // If memory is short, the heuristic's top is used.
        let Ok(trial) = GemmTrial::new(s) else { return Ok(false) };
        let chosen = self.fastest_with_same_bits(&trial, plan, &candidates)?;
        plan.kernel = candidates[chosen];
        let Some(sm90) = sm90 else {
            self.cache.save_choice(&key, GemmChoice::CublasLt(chosen));
            return Ok(true);
        };
        // A kernel that fails to run loses, as among the listed algorithms, and nothing is cached.
        let outcome = self.sm90_wins(&trial, plan, candidates[chosen], sm90);
        let choice =
            if matches!(outcome, Ok(true)) { GemmChoice::Sm90 } else { GemmChoice::CublasLt(chosen) };
        plan.kernel = match choice {
            GemmChoice::Sm90 => GemmKernel::Sm90(sm90.tile),
            GemmChoice::CublasLt(_) => candidates[chosen],
        };
        if outcome.is_ok() {
            self.cache.save_choice(&key, choice);
        }
        Ok(true)
    }

    /// Returns the index of the fastest candidate that gives the bits of the first one, if it is
    /// faster by enough; otherwise 0. Leaves the result of the first in the trial.
    fn fastest_with_same_bits(
        self,
        trial: &GemmTrial,
        plan: &mut GemmPlan,
        candidates: &[GemmKernel],
    ) -> CudaResult<usize> {
        let mut best_ms = vec![f32::INFINITY; candidates.len()];
        for round in 0..=POLICY.rounds {
            for (by, best_ms) in candidates.iter().zip(&mut best_ms) {
                plan.kernel = *by;
                // A listed algorithm that fails to run is excluded.
                let time_ms = trial
                    .time_calls_ms(self.launcher, plan, POLICY.calls_per_round, 0)
                    .unwrap_or(f32::INFINITY);
                // The first round is a warm-up: it loads kernels.
                if round > 0 {
                    *best_ms = best_ms.min(time_ms);
                }
            }
        }
        let mut order: Vec<usize> =
            (1..candidates.len()).filter(|i| best_ms[*i] < POLICY.max_time_ratio * best_ms[0]).collect();
        order.sort_by(|a, b| best_ms[*a].total_cmp(&best_ms[*b]));
        // The reference result is computed only now, because timed calls overwrite its buffer.
        plan.kernel = candidates[0];
        trial.compute_result(self.launcher, plan, 0)?;
        for i in order {
            plan.kernel = candidates[i];
            if trial.matches_reference(self.launcher, plan)? {
                return Ok(i);
            }
        }
        Ok(0)
    }

    /// Returns whether the sm90 kernel gives the reference's bits and is not slower than cuBLASLt by
    /// more than the policy allows.
    fn sm90_wins(
        self,
        trial: &GemmTrial,
        plan: &mut GemmPlan,
        best_cublaslt: GemmKernel,
        sm90: Sm90Candidate,
    ) -> CudaResult<bool> {
        let sm90_kernel = GemmKernel::Sm90(sm90.tile);
        plan.kernel = sm90_kernel;
        if !trial.matches_reference(self.launcher, plan)? {
            return Ok(false);
        }
        let rivals = [(best_cublaslt, sm90.saved_copy_bytes), (sm90_kernel, 0)];
        let [cublaslt_ms, sm90_ms] = trial.time_alternately_ms(self.launcher, plan, rivals)?;
        Ok(sm90_ms < POLICY.max_sm90_time_ratio * cublaslt_ms)
    }
}

/// Number of parts of a large result that a probe copies to the host and hashes, and the bytes of
/// each: together less than a millisecond, and yet a part of nearly every block of the grid.
const PROBED_PARTS: usize = 64;
const PROBED_PART_BYTES: usize = 64 << 10;

/// Random operands of one GEMM, and two result buffers.
pub(crate) struct GemmTrial {
    shape: GemmShape,
    operands: GemmOperands,
    results: [u64; 2],
    result_bytes: u64,
    stream: CudaStream,
    memory: DeviceMemory,
}

impl GemmTrial {
    pub(crate) fn new(s: GemmShape) -> CudaResult<GemmTrial> {
        let is_e4m3 = s.dtype == DType::E4m3;
        let result_width = s.result_dtype().element_bytes();
        let result_bytes = s.rows * s.out_columns * result_width;
        let extents = [
            s.rows * s.inner * s.dtype.element_bytes(),
            s.out_columns * s.inner * s.dtype.element_bytes(),
            s.out_columns * result_width,
            if s.residual { result_bytes } else { 0 },
            if is_e4m3 { 4 * s.rows.max(s.out_columns) } else { 0 },
            result_bytes,
            result_bytes,
        ];
        let mut offsets = [0; 7];
        let mut end = 0;
        for (place, bytes) in offsets.iter_mut().zip(extents) {
            *place = end;
            end += bytes.next_multiple_of(ALIGNMENT);
        }
        let memory = DeviceMemory::new(end as usize)?;
        let [x, w, bias, residual, scales, one, two] = offsets.map(|p| memory.device_address() + p);
        let stream = CudaStream::new(false)?;
        let inputs = if is_e4m3 { e4m3_word } else { bf16_word };
        for (i, word) in [inputs, inputs, bf16_word, bf16_word, f32_scale_word].into_iter().enumerate() {
            fill_device(memory.slice(offsets[i], extents[i] as usize)?, word, &stream)?;
        }
        let at = GemmOperands { x, w, bias, residual, out: one, scales: (scales, scales), redirected: None };
        Ok(GemmTrial { shape: s, operands: at, results: [one, two], result_bytes, stream, memory })
    }

    /// Returns the milliseconds of `calls` calls, each followed by a copy of `copied_bytes` bytes
    /// of its result.
    fn time_calls_ms(
        &self,
        launcher: &GemmLauncher,
        plan: &GemmPlan,
        calls: usize,
        copied_bytes: u64,
    ) -> CudaResult<f32> {
        let (begin, end) = (CudaEvent::with_timing()?, CudaEvent::with_timing()?);
        self.stream.record_event(&begin)?;
        for _ in 0..calls {
            // SAFETY: the operands are ranges of the trial's memory, of this shape's extents; only the
            // trial's stream uses them and the launcher, and the trial waits for it before it is dropped.
            unsafe { launcher.launch_plan(self.shape, plan, self.operands, &self.stream) }?;
            if copied_bytes > 0 {
                // SAFETY: both results are ranges of the trial's memory and longer than the copy; only
                // this stream uses them.
                unsafe { self.stream.copy_async(self.results[1], self.results[0], copied_bytes as usize) }?;
            }
        }
        self.stream.spin_until_done(&end)?;
        begin.elapsed_ms_to(&end)
    }

    /// Times two implementations alternately, each with its extra copy, and returns their total
    /// milliseconds. The first half of each alternation is a warm-up.
    fn time_alternately_ms(
        &self,
        launcher: &GemmLauncher,
        plan: &mut GemmPlan,
        kernels: [(GemmKernel, u64); 2],
    ) -> CudaResult<[f32; 2]> {
        let each_ms =
            self.time_calls_ms(launcher, plan, POLICY.calls_per_round, 0)? / POLICY.calls_per_round as f32;
        let calls = ((POLICY.alternation_ms / 2.0 / each_ms.max(0.001)) as usize).max(1);
        let mut total_ms = [0.0; 2];
        for _ in 0..POLICY.alternations {
            for ((by, copied_bytes), total_ms) in kernels.iter().zip(&mut total_ms) {
                plan.kernel = *by;
                self.time_calls_ms(launcher, plan, calls, *copied_bytes)?;
                *total_ms += self.time_calls_ms(launcher, plan, calls, *copied_bytes)?;
            }
        }
        Ok(total_ms)
    }

    /// Runs the GEMM once into one of the result buffers and waits for it.
    fn compute_result(&self, launcher: &GemmLauncher, plan: &GemmPlan, which: usize) -> CudaResult<()> {
        let out = self.results[which];
        // SAFETY: as in `time_calls_ms`; both result buffers have the result's extent.
        unsafe {
            launcher.launch_plan(self.shape, plan, GemmOperands { out, ..self.operands }, &self.stream)
        }?;
        self.stream.spin_until_done(&CudaEvent::new()?)
    }

    /// Runs the GEMM once and returns the digest of evenly spread parts of its result.
    pub(crate) fn digest_result(self, launcher: &GemmLauncher, plan: &GemmPlan) -> CudaResult<[u8; 32]> {
        self.compute_result(launcher, plan, 0)?;
        let result = self.result(0)?;
        let stride = (result.len() / PROBED_PARTS).next_multiple_of(ALIGNMENT as usize);
        let mut hash = FingerprintHasher::default();
        let mut part = Vec::new();
        for at in (0..result.len()).step_by(stride.max(PROBED_PART_BYTES)) {
            let bytes = PROBED_PART_BYTES.min(result.len() - at);
            part.resize(bytes, 0_u8);
            copy_to_host(&mut part, result.sub_slice(at, bytes)?)?;
            hash.update_raw(&part, self.shape.result_dtype());
        }
        Ok(hash.digest())
    }

    /// Returns whether the plan computes the bits of the first result buffer.
    fn matches_reference(&self, launcher: &GemmLauncher, plan: &GemmPlan) -> CudaResult<bool> {
        // Elements that are not written must not look like the previous result.
        fill_device(self.result(1)?, |_| u64::MAX, &self.stream)?;
        self.compute_result(launcher, plan, 1)?;
        self.results_have_equal_bits()
    }

    /// Returns the bytes of a result buffer.
    fn result(&self, which: usize) -> CudaResult<DeviceSlice<'_, u8>> {
        let offset = self.results[which] - self.memory.device_address();
        self.memory.slice(offset, self.result_bytes as usize)
    }

    fn results_have_equal_bits(&self) -> CudaResult<bool> {
        const PIECE: usize = 16 << 20;
        let (a, b) = (self.result(0)?, self.result(1)?);
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < a.len() {
            let n = PIECE.min(a.len() - at);
            of_a.resize(n, 0_u8);
            of_b.resize(n, 0_u8);
            copy_to_host(&mut of_a, a.sub_slice(at, n)?)?;
            copy_to_host(&mut of_b, b.sub_slice(at, n)?)?;
            if of_a != of_b {
                return Ok(false);
            }
            at += n;
        }
        Ok(true)
    }
}

/// Fills memory with random words whose period no row length has: about a mebibyte is uploaded and
/// then replicated on the device.
fn fill_device(to: DeviceSlice<'_, u8>, word: fn(u64) -> u64, stream: &CudaStream) -> CudaResult<()> {
    const WORDS: usize = (1 << 17) + 1;
    let words: Vec<u64> = random_bits().map(word).take(WORDS.min(to.len() / 8)).collect();
    let mut written = words.len() * 8;
    copy_to_device(to.sub_slice(0, written)?, bytemuck::cast_slice(&words))?;
    while 0 < written && written < to.len() {
        let n = written.min(to.len() - written);
        let (source, copy) = (to.sub_slice(0, n)?, to.sub_slice(written, n)?);
        // SAFETY: the two ranges do not overlap, and only this stream uses them. The driver frees
        // their memory only after the copy.
        unsafe { stream.copy_async(copy.address(), source.address(), n) }?;
        written += n;
    }
    Ok(())
}

fn random_bits() -> impl Iterator<Item = u64> {
    let next_state = |x: &u64| {
        let mut x = *x;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        Some(x)
    };
    // Xorshift.
    std::iter::successors(Some(0x9e37_79b9_7f4a_7c15_u64), next_state).skip(1)
}

/// Returns four bf16 of magnitudes from 2^-7 to 2. Sums of what they multiply to must be inexact, or every
/// summation order would give the same bits.
const fn bf16_word(bits: u64) -> u64 {
    bits & 0x83ff_83ff_83ff_83ff | 0x3c00_3c00_3c00_3c00
}

/// Returns eight e4m3 of magnitudes from 1/8 to 2.
const fn e4m3_word(bits: u64) -> u64 {
    bits & 0x9f9f_9f9f_9f9f_9f9f | 0x2020_2020_2020_2020
}

/// Returns two f32 from 1 to 2.
const fn f32_scale_word(bits: u64) -> u64 {
    bits & 0x007f_ffff_007f_ffff | 0x3f80_0000_3f80_0000
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use tessera_device::dtype::to_bf16_bits;

    use crate::compile::{Compiler, KernelCache};
    use crate::device_memory::widen_bf16;
    use crate::dylib::CublasLt;
    use crate::gemm::Gemms;
    use crate::gemm::shape::{GemmEpilogue, RedirectedColumns, VIDEO_GEMM};
    use crate::gemm::sm90::{EPILOGUES, GemmSm90, tile_candidates};
    use crate::test_gpu::open_test_gpu;

    /// The GEMMs of a GPU with a compiler, and the sm90 kernel by itself.
    struct TestGemms {
        gemms: Gemms,
        compiler: Compiler,
        sm90: Option<GemmSm90>,
    }

    /// Runs a test with the first GPU, if there is one.
    fn with_gpu(test: impl FnOnce(TestGemms)) {
        with_cached_choices(None, test);
    }

    fn with_cached_choices(kept: Option<Arc<dyn KernelCache>>, test: impl FnOnce(TestGemms)) {
        let Some(gpu) = open_test_gpu() else { return };
        let Ok(lt) = CublasLt::load(&gpu.libraries) else {
            eprintln!("skipped: no cuBLASLt found");
            return;
        };
        let own = || GemmSm90::new(&gpu.capabilities);
        let choices = AutotuneCache::new(kept, &gpu.context, &lt);
        let gemms = Gemms::new(lt, gpu.capabilities.clone(), choices).unwrap();
        test(TestGemms { gemms, sm90: own(), compiler: gpu.compiler });
    }

    /// Runs a test with cuBLASLt and the sm90 kernel, if both are available.
    fn with_hopper(test: impl FnOnce(Gemms, Compiler, GemmSm90)) {
        with_gpu(|TestGemms { gemms, compiler, sm90: own }| match own {
            Some(own) => test(gemms, compiler, own),
            None => eprintln!("skipped: not a Hopper GPU"),
        });
    }

    /// Returns a GEMM's result. The operands are the same for every number of rows, so that fewer
    /// rows are a prefix of more.
    fn gemm_result(here: &mut TestGemms, s: GemmShape) -> Vec<u8> {
        here.gemms.plan_shape(s, &mut here.compiler).unwrap();
        let trial = GemmTrial::new(here.gemms.executed_shape(s)).unwrap();
        gemm_result_with(here, s, &trial, trial.operands)
    }

    /// Returns a GEMM's result for operands in a trial's memory, which may have more columns.
    fn gemm_result_with(here: &mut TestGemms, s: GemmShape, trial: &GemmTrial, at: GemmOperands) -> Vec<u8> {
        let TestGemms { gemms, compiler, .. } = here;
        gemms.plan_shape(s, compiler).unwrap();
        // SAFETY: the operands lie in the trial's memory, which has at least this shape's extents.
        unsafe { gemms.run_gemm(gemms.executed_shape(s), at, &trial.stream) }.unwrap();
        trial.stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
        download_result(at.out, s)
    }

    fn download_result(out: u64, s: GemmShape) -> Vec<u8> {
        let mut bytes = vec![0_u8; (2 * s.rows * s.out_columns) as usize];
        // SAFETY: the tests pass the result of a GEMM of this shape, which is still allocated.
        let there = unsafe { DeviceSlice::from_raw(out, bytes.len()) };
        copy_to_host(&mut bytes, there).unwrap();
        bytes
    }

    #[test]
    fn bits_depend_on_summation_order() {
        let bytes: Vec<u8> = random_bits().map(bf16_word).take(1 << 16).flat_map(u64::to_le_bytes).collect();
        let all = decode_bf16(&bytes);
        let others = all.chunks_exact(2 * 5120).filter(|operands| {
            let terms = || operands[..5120].iter().zip(&operands[5120..]).map(|(x, w)| x * w);
            let (there, back) = (terms().sum::<f32>(), terms().rev().sum::<f32>());
            there != back
        });
        assert!(others.count() >= 20, "sums of these operands do not depend on the summation order");
    }

    #[test]
    fn the_cache_key_states_every_number_of_the_policy() {
        let text = format!("{POLICY:?}");
        let names = ["rounds", "calls_per_round", "max_time_ratio", "alternations", "alternation_ms"];
        for name in names.into_iter().chain(["max_sm90_time_ratio"]) {
            assert!(text.contains(&format!(" {name}: ")), "{name} is not in {text}");
        }
    }

    #[derive(Debug, Default)]
    struct MemoryCache(Mutex<BTreeMap<String, Vec<u8>>>);

    impl KernelCache for MemoryCache {
        fn load(&self, name: &str) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(name).cloned()
        }
        fn save(&self, name: &str, image: &[u8]) {
            self.0.lock().unwrap().insert(name.into(), image.into());
        }
    }

    #[test]
    fn cached_choices_are_reused() {
        let kept = Arc::new(MemoryCache::default());
        // Returns the number of timed shapes and the cache's contents afterwards.
        let prepared = || {
            let mut timed = None;
            with_cached_choices(Some(kept.clone()), |mut here| {
                here.gemms.plan_shape(VIDEO_GEMM, &mut here.compiler).unwrap();
                timed = Some(here.gemms.timed_count());
            });
            timed.map(|timed| (timed, kept.0.lock().unwrap().clone()))
        };
        let Some((timed, first)) = prepared() else { return };
        assert_eq!((timed, first.len()), (1, 1));
        assert_eq!(prepared(), Some((0, first)));
    }

    #[test]
    fn results_are_row_invariant() {
        with_gpu(|mut here| {
            let mut bad = Vec::new();
            for dtype in [DType::Bf16, DType::E4m3] {
                for like in [
                    VIDEO_GEMM,
                    GemmShape { residual: true, ..VIDEO_GEMM },
                    GemmShape { out_columns: 13824, gelu: true, ..VIDEO_GEMM },
                    GemmShape { inner: 13824, ..VIDEO_GEMM },
                ] {
                    let like = GemmShape { dtype, ..like };
                    let most = gemm_result(&mut here, like);
                    for rows in [2340, 1170, 585, 2160, 1080, 540, 270] {
                        let s = GemmShape { rows, ..like };
                        let bytes = gemm_result(&mut here, s);
                        if most[..bytes.len()] != bytes {
                            bad.push(s);
                        }
                    }
                }
            }
            assert!(bad.is_empty(), "the bits differ from those with 4,680 rows: {bad:#?}");
        });
    }

    #[test]
    fn results_are_column_invariant() {
        with_gpu(|mut here| {
            for (dtype, rows) in [(DType::Bf16, 4680), (DType::Bf16, 2160), (DType::E4m3, 4680)] {
                let one = GemmShape { dtype, rows, ..VIDEO_GEMM };
                let whole = GemmShape { out_columns: 3 * one.out_columns, ..one };
                here.gemms.plan_shape(whole, &mut here.compiler).unwrap();
                let trial = GemmTrial::new(here.gemms.executed_shape(whole)).unwrap();
                // Each column has its own scale.
                if dtype == DType::E4m3 {
                    let scales: Vec<f32> = (0..whole.out_columns).map(|i| 1.0 + i as f32 / 1e5).collect();
                    trial.stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
                    // SAFETY: the trial has at least as many scales as columns.
                    let there = unsafe { DeviceSlice::from_raw(trial.operands.scales.1, scales.len()) };
                    copy_to_device(there, &scales).unwrap();
                }
                let many = gemm_result_with(&mut here, whole, &trial, trial.operands);
                let row = 2 * one.out_columns as usize;
                for third in 0..3 {
                    let first = third * one.out_columns;
                    let GemmOperands { w, bias, scales: (of_rows, of_columns), .. } = trial.operands;
                    let at = GemmOperands {
                        w: w + first * one.inner * dtype.element_bytes(),
                        bias: bias + 2 * first,
                        scales: (of_rows, of_columns + 4 * first),
                        out: trial.results[1],
                        ..trial.operands
                    };
                    let few = gemm_result_with(&mut here, one, &trial, at);
                    let here = third as usize * row;
                    let same = few
                        .chunks(row)
                        .zip(many.chunks(3 * row))
                        .all(|(few, many)| few == &many[here..here + row]);
                    assert!(
                        same,
                        "{one:?}: third {third} has other bits in a GEMM with three times as many columns"
                    );
                }
            }
        });
    }

    fn decode_bf16(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks(2).map(|b| widen_bf16(u16::from_le_bytes([b[0], b[1]]))).collect()
    }

    /// Returns cuBLASLt's result for a trial's operands, with the residual added afterwards.
    fn cublaslt_result(gemms: &Gemms, trial: &GemmTrial) -> Vec<f32> {
        let s = GemmShape { residual: false, ..trial.shape };
        let plan = gemms.build_plan(s, None).unwrap();
        // SAFETY: the operands are those of the trial, whose shape differs in the residual only.
        unsafe { gemms.launcher.launch_plan(s, &plan, trial.operands, &trial.stream) }.unwrap();
        trial.stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
        let made = decode_bf16(&download_result(trial.operands.out, s));
        if !trial.shape.residual {
            return made;
        }
        let sum = |(a, b): (&f32, f32)| widen_bf16(to_bf16_bits(a + b));
        made.iter().zip(decode_bf16(&download_result(trial.operands.residual, s))).map(sum).collect()
    }

    #[test]
    fn a_probe_runs_every_planned_gemm_on_the_same_operands() {
        with_gpu(|mut here| {
            let video = GemmShape { rows: 264, ..VIDEO_GEMM };
            let plain = GemmShape { bias: false, ..video };
            let shapes = [
                video,
                GemmShape { gelu: true, ..video },
                GemmShape { residual: true, ..plain },
                GemmShape { dtype: DType::F32, rows: 37, inner: 96, out_columns: 24, ..plain },
            ];
            for s in shapes {
                here.gemms.plan_shape(s, &mut here.compiler).unwrap();
            }
            let digests = here.gemms.probe_plans().unwrap();
            assert_eq!(digests.len(), shapes.len());
            assert_eq!(digests, here.gemms.probe_plans().unwrap(), "each probe gives the same bits again");
            let distinct: std::collections::BTreeSet<_> = digests.iter().map(|(_, digest)| digest).collect();
            assert_eq!(distinct.len(), shapes.len(), "{digests:?}");
            assert!(
                digests.iter().any(|(name, _)| name == "gemm bf16 [264, 5120] × [5120, 5120]ᵀ, residual")
            );
        });
    }

    #[test]
    fn the_sm90_kernel_matches_cublaslt_bits() {
        with_hopper(|gemms, mut compiler, mut own| {
            let mut bad = Vec::new();
            for (rows, columns, inner) in
                [(37, 544, 200), (184, 520, 64), (300, 1056, 5120), (2160, 5120, 5120), (4680, 5120, 13824)]
            {
                for (bias, ending) in [false, true].into_iter().flat_map(|b| EPILOGUES.map(|e| (b, e))) {
                    let (gelu, residual) = (ending == GemmEpilogue::Gelu, ending == GemmEpilogue::Residual);
                    let s =
                        GemmShape { rows, out_columns: columns, inner, bias, gelu, residual, ..VIDEO_GEMM };
                    let trial = GemmTrial::new(s).unwrap();
                    let want = cublaslt_result(&gemms, &trial);
                    // The rounding of cuBLASLt's GELU is not documented: a few values round
                    // differently.
                    let most = if gelu { want.len() / 1000 } else { 0 };
                    for cut in tile_candidates(ending)
                        .filter(|c| [48, 96, 136, 168, 184, 200].contains(&c.tile_rows))
                    {
                        own.prepare_kernel(&mut compiler, cut).unwrap();
                        let at = GemmOperands { out: trial.results[1], ..trial.operands };
                        fill_device(trial.result(1).unwrap(), |_| u64::MAX, &trial.stream).unwrap();
                        // The residual may alias the result.
                        let inside = residual && cut.shares_columns;
                        if inside {
                            let bytes = trial.result_bytes as usize;
                            // SAFETY: both are ranges of the trial's memory with a result's extent.
                            unsafe { trial.stream.copy_async(at.out, at.residual, bytes) }.unwrap();
                        }
                        let residual = if inside { at.out } else { at.residual };
                        let at = GemmOperands { residual, ..at };
                        // SAFETY: the operands are ranges of the trial's memory, of this shape's extents.
                        unsafe { own.launch_gemm(cut, s, at, &trial.stream) }.unwrap();
                        trial.stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
                        // Compare as numbers: both zeros are equal.
                        let here = decode_bf16(&download_result(at.out, s));
                        let others = want.iter().zip(&here).filter(|(a, b)| a != b).count();
                        if others > most {
                            bad.push((cut, s, others));
                        }
                    }
                }
            }
            assert!(bad.is_empty(), "the bits differ from cuBLASLt's: {bad:#?}");
        });
    }

    #[test]
    fn redirected_columns_reach_their_destination() {
        with_hopper(|_, mut compiler, mut own| {
            let s = GemmShape { rows: 300, out_columns: 1056, ..VIDEO_GEMM };
            let trial = GemmTrial::new(s).unwrap();
            let (first, last, row) = (512, 1032, 7_u64);
            let apart = GemmShape { out_columns: last - first, ..s };
            let elsewhere =
                DeviceMemory::new(((row + s.rows) * apart.out_columns * 2 + 256) as usize).unwrap();
            copy_to_device(elsewhere.slice(0, 1).unwrap(), &[row]).unwrap();
            let columns = (first, last);
            let away = Some(RedirectedColumns {
                columns,
                address: elsewhere.device_address() + 256,
                row_address: elsewhere.device_address(),
            });
            for cut in tile_candidates(GemmEpilogue::Plain).filter(|c| [48, 184, 200].contains(&c.tile_rows))
            {
                own.prepare_kernel(&mut compiler, cut).unwrap();
                // SAFETY: the operands are ranges of the trial's memory, of this shape's extents.
                unsafe { own.launch_gemm(cut, s, trial.operands, &trial.stream) }.unwrap();
                let at = GemmOperands { out: trial.results[1], redirected: away, ..trial.operands };
                // SAFETY: as above; the redirected rows end where their memory does.
                unsafe { own.launch_gemm(cut, s, at, &trial.stream) }.unwrap();
                trial.stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
                let (want, here) =
                    (download_result(trial.results[0], s), download_result(trial.results[1], s));
                let there =
                    download_result(elsewhere.device_address() + 256 + row * apart.out_columns * 2, apart);
                let (first, last) = (2 * first as usize, 2 * last as usize);
                let rows =
                    want.chunks(2 * s.out_columns as usize).zip(here.chunks(2 * s.out_columns as usize));
                for ((want, here), there) in rows.zip(there.chunks(last - first)) {
                    assert_eq!(want[..first], here[..first], "{cut:?}");
                    assert_eq!(want[first..last], *there, "{cut:?}");
                    assert_eq!(want[last..], here[last..], "{cut:?}");
                }
            }
        });
    }
}
