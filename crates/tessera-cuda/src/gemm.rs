//! GEMMs through cuBLASLt or this crate's sm90 kernel: out = act(x · wᵀ + bias) + residual, with
//! row-major x, w and out.
//!
//! The default algorithm is the top of cuBLASLt's heuristic list without split-K, so that a row's
//! bits depend on the row alone. The [autotuner](autotune) may replace it by a faster one with the
//! same bits. A GEMM with a GELU or residual epilogue always uses the sm90 kernel if the kernel
//! supports it. Once frozen, [`Gemms`] refuses new shapes.

#![allow(unsafe_code, reason = "launches of GEMMs on raw addresses")]

pub(crate) mod autotune;
pub(crate) mod autotune_cache;
pub(crate) mod cublaslt;
pub(crate) mod plan;
pub(crate) mod shape;
pub(crate) mod sm90;

use std::collections::BTreeMap;

use crate::capabilities::Capabilities;
use crate::compile::Compiler;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::dylib::CublasLt;
use crate::kernel_choice::{GemmRoute, choose_gemm};

use autotune::{Autotuner, GemmTrial};
use autotune_cache::AutotuneCache;
use cublaslt::CublasLtGemms;
use plan::{GemmLauncher, GemmPlan};
use shape::{GemmEpilogue, GemmKernel, GemmOperands, GemmShape, Sm90Candidate};
use sm90::{COLUMN_STEP, GemmSm90};

/// The GEMM plans of one device, one per shape, and the implementations and autotuning results that
/// they share.
#[derive(Debug)]
pub(crate) struct Gemms {
    capabilities: Capabilities,
    // The plans hold objects of the launcher's library, so they drop first.
    plans: BTreeMap<GemmShape, GemmPlan>,
    launcher: GemmLauncher,
    autotune_cache: AutotuneCache,
    /// Shapes that are executed in place of shapes that cuBLASLt has no algorithm for, with a
    /// smaller epilogue.
    executed_shapes: BTreeMap<GemmShape, GemmShape>,
    frozen: bool,
    /// Whether shapes get another implementation than usual (for drills).
    avoids_first_choice: bool,
}

impl Gemms {
    pub(crate) fn new(
        lt: CublasLt,
        capabilities: Capabilities,
        autotune_cache: AutotuneCache,
    ) -> CudaResult<Gemms> {
        let launcher = GemmLauncher { cublaslt: CublasLtGemms::new(lt)?, sm90: GemmSm90::new(&capabilities) };
        Ok(Gemms {
            capabilities,
            plans: BTreeMap::new(),
            launcher,
            autotune_cache,
            executed_shapes: BTreeMap::new(),
            frozen: false,
            avoids_first_choice: false,
        })
    }

    /// Makes shapes that are planned from now on take another implementation where there is one.
    pub(crate) fn avoid_first_choice(&mut self, capabilities: Capabilities) {
        self.capabilities = capabilities;
        self.avoids_first_choice = true;
    }

    /// Returns the implementation of each planned shape. Implementations among which the time decides
    /// give the same bits and are one value.
    pub(crate) fn describe_routes(&self) -> Vec<(String, String)> {
        let planned = self.plans.iter().map(|(s, plan)| {
            let route = match (plan.kernel, choose_gemm(&self.capabilities, s)) {
                (_, GemmRoute::Tuned) => "sm90 or cuBLASLt, whichever is faster".to_string(),
                (GemmKernel::Sm90(_), _) => "sm90".to_string(),
                _ => format!("cuBLASLt, algorithm {}", plan.choice),
            };
            (format!("route: {s}"), route)
        });
        let replaced = self.executed_shapes.iter().map(|(s, run)| (format!("route: {s}"), run.to_string()));
        planned.chain(replaced).collect()
    }

    /// Plans a shape: chooses its implementation unless it is planned already.
    pub(crate) fn plan_shape(&mut self, shape: GemmShape, compiler: &mut Compiler) -> CudaResult<()> {
        self.plan_with_redirect(shape, 0, compiler)
    }

    /// Plans a shape of which `columns` columns will be redirected; cuBLASLt needs an extra copy
    /// for them.
    pub(crate) fn plan_with_redirect(
        &mut self,
        shape: GemmShape,
        redirected_columns: u64,
        compiler: &mut Compiler,
    ) -> CudaResult<()> {
        if self.plans.contains_key(&self.executed_shape(shape)) {
            return Ok(());
        }
        if self.frozen {
            return cuda_failure(format!("a GEMM with the new shape {shape:?} after warm-up"));
        }
        // cuBLASLt does not have every epilogue for every dtype: a separate kernel does the rest.
        let epilogues =
            [shape, GemmShape { gelu: false, ..shape }, GemmShape { gelu: false, bias: false, ..shape }];
        let mut first_error = None;
        for candidate in epilogues {
            let route = choose_gemm(&self.capabilities, &candidate);
            let sm90 = match route {
                GemmRoute::Sm90 | GemmRoute::Tuned => self.launcher.sm90.as_mut(),
                GemmRoute::CublasLt => None,
                GemmRoute::Unsupported => {
                    let (major, minor) = self.capabilities.compute;
                    return cuda_failure(format!(
                        "no e4m3 GEMMs on sm_{major}{minor}: plan with --dtype bf16"
                    ));
                }
            };
            let tile = sm90.and_then(|o| {
                o.choose_tile(&candidate).map(|tile| o.prepare_kernel(compiler, tile).map(|()| tile))
            });
            let is_required = route == GemmRoute::Sm90 && tile.is_some();
            let planned = match tile.transpose() {
                Err(e) if is_required => Err(e),
                // Otherwise cuBLASLt is the fallback if the kernel does not compile.
                tile => {
                    let to_candidate = |tile| Sm90Candidate {
                        tile,
                        saved_copy_bytes: 2 * candidate.rows * redirected_columns,
                    };
                    self.build_plan(candidate, tile.unwrap_or(None).map(to_candidate))
                }
            };
            match planned {
                Err(e) if is_required => return Err(e),
                Ok(plan) => {
                    self.plans.insert(candidate, plan);
                    if candidate != shape {
                        self.executed_shapes.insert(shape, candidate);
                    }
                    return Ok(());
                }
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Returns the shape that is executed for a requested one; its epilogue may be smaller.
    pub(crate) fn executed_shape(&self, shape: GemmShape) -> GemmShape {
        self.executed_shapes.get(&shape).copied().unwrap_or(shape)
    }

    /// Returns whether this many columns of a planned shape, and multiples of them, can be
    /// redirected.
    pub(crate) fn can_redirect(&self, shape: GemmShape, columns: u64) -> bool {
        let own = self.plans.get(&shape).is_some_and(|plan| matches!(plan.kernel, GemmKernel::Sm90(_)));
        own && columns.is_multiple_of(COLUMN_STEP)
    }

    /// Returns the number of shapes whose candidates this process timed; the others were cached or
    /// too small.
    pub(crate) fn timed_count(&self) -> u32 {
        self.plans.values().filter(|p| p.was_timed).count() as u32
    }

    /// Sets whether planning refuses shapes without a plan, as it does after warm-up.
    pub(crate) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Launches a planned shape.
    ///
    /// # Safety
    /// As [`launch_plan`](GemmLauncher::launch_plan).
    pub(crate) unsafe fn run_gemm(
        &mut self,
        shape: GemmShape,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        match self.plans.get(&shape) {
            // SAFETY: the plan is of this shape; the caller guarantees the operands.
            Some(plan) => unsafe { self.launcher.launch_plan(shape, plan, operands, stream) },
            None => cuda_failure(format!("no algorithm was chosen for a GEMM with {shape:?}")),
        }
    }

    /// Launches every planned shape on fixed operands, and returns its name with a digest of its
    /// result. A shape without memory for its operands is missing.
    pub(crate) fn probe_plans(&self) -> CudaResult<Vec<(String, [u8; 32])>> {
        let mut digests = Vec::new();
        for (shape, plan) in &self.plans {
            if let Ok(trial) = GemmTrial::new(*shape) {
                digests.push((shape.to_string(), trial.digest_result(&self.launcher, plan)?));
            }
        }
        Ok(digests)
    }

    fn build_plan(&self, s: GemmShape, sm90: Option<Sm90Candidate>) -> CudaResult<GemmPlan> {
        let (mut plan, listed) = self.launcher.build_plan(s, self.avoids_first_choice)?;
        match sm90 {
            Some(sm90) if sm90.tile.epilogue != GemmEpilogue::Plain => {
                plan.kernel = GemmKernel::Sm90(sm90.tile);
            }
            _ => {
                let tuner = Autotuner { launcher: &self.launcher, cache: &self.autotune_cache };
                plan.was_timed = tuner.tune_plan(s, &mut plan, &listed, sm90)?;
            }
        }
        Ok(plan)
    }
}
