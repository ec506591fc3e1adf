//! The contract of a backend on CUDA.

#![allow(unsafe_code, reason = "memory that a device writes")]

use std::sync::Arc;

use super::memory::place_in_order;
use super::rounding::upload_rounded;
use super::weights::WaitingAudit;
use super::{CudaBackend, OneTimeCounts, PreparedProgram, cuda_error};
use crate::allocation_lock::AllocationPermit;
use crate::capabilities::FeatureMask;
use crate::device_memory::{copy_to_host, held_bytes, widen_bf16};
use crate::kernel_table::SPIN;
use tessera_base::Diagnostic;
use tessera_device::dtype::from_e4m3_bits;
use tessera_device::{
    AbortFn, AuditResult, Backend, CacheChecks, CallData, ExpertReport, Fault, Fingerprint,
    FingerprintHasher, JoinedCommunicator, LoadedProgram, MemoryUse, Observer, ProgramHandle, StepTimes,
    WeightSource,
};
use tessera_ir::{CapturedGraph, DType, Program, Slots};

impl Backend for CudaBackend {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<ProgramHandle, Diagnostic> {
        self.context.make_current().map_err(|e| cuda_error("context", &e))?;
        self.gemms.set_frozen(false);
        self.attentions.set_frozen(false);
        let prepared = self.prepare_program(program, slots, weights)?;
        self.slot_bytes = self.slot_bytes.max(place_in_order(&slots.slot_bytes).1);
        self.slot_memory = None;
        self.buffer_digests = None;
        self.programs.push(prepared);
        Ok(ProgramHandle(self.programs.len() - 1))
    }

    fn setup_count(&self) -> u64 {
        let OneTimeCounts {
            kernels_compiled: compiled,
            gemms_autotuned: timed,
            graphs_captured: captured,
            slot_allocations: allocated,
        } = self.one_time_counts();
        [compiled, timed, captured, allocated].map(u64::from).iter().sum()
    }

    fn loaded_programs(&self) -> Vec<LoadedProgram> {
        let describe = |p: &PreparedProgram| LoadedProgram {
            name: p.program.name.clone(),
            graph: p.declared_graph.clone(),
        };
        self.programs.iter().map(describe).collect()
    }

    fn joined_communicators(&self) -> Vec<JoinedCommunicator> {
        self.groups.list_joined()
    }

    fn effective_values(&self) -> Vec<(String, String)> {
        self.describe_effective_values()
    }

    fn choose_other_routes(&mut self) {
        self.capabilities.mask = FeatureMask::all();
        self.gemms.avoid_first_choice(self.capabilities.clone());
    }

    fn rename_graphs(&mut self, name: &str) {
        for p in &mut self.programs {
            let ops = p.declared_graph.as_ref().map_or(0, |g| g.ops);
            p.declared_graph = Some(CapturedGraph { name: name.to_string(), ops });
        }
    }

    fn inject_hang(&mut self) -> bool {
        self.hang_injected =
            self.context.make_current().is_ok() && self.kernels.prepare_elementwise(SPIN.name()).is_ok();
        self.hang_injected
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.weights.list_fingerprints()
    }

    fn audit_weights(&mut self, bytes: u64) -> AuditResult {
        // An unreadable device fails the next run, which reports the error in detail.
        match self.context.make_current() {
            Ok(()) => self.weights.audit_next(bytes, self.has_unfinished_run),
            Err(_) => AuditResult::default(),
        }
    }

    fn audit_weights_while_waiting(&mut self, bytes: u64) -> AuditResult {
        let mut done = self.waiting_audit.replace_request(bytes);
        // A run changes the pools of experts, so they are hashed between runs.
        if done.rounds == 0 && !self.has_unfinished_run && self.context.make_current().is_ok() {
            done.merge(self.weights.audit_next_tiers(bytes));
        }
        done
    }

    fn reload_weights(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.context.make_current().map_err(|e| cuda_error("context", &e))?;
        self.weights.reload_all(&self.placement, weights)?;
        self.waiting_audit = WaitingAudit::default();
        self.reset_buffers();
        Ok(())
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.context.make_current().is_ok() && self.weights.overwrite_element(name, index, value)
    }

    fn cache_checks(&self) -> CacheChecks {
        CacheChecks { contents: true, halos: false }
    }

    fn digest_buffers(&mut self, names: &[&str]) -> Option<Vec<u64>> {
        let indices: Vec<usize> =
            names.iter().map(|n| self.buffer_index.get(*n).copied()).collect::<Option<_>>()?;
        // An unreadable device fails the next run, which reports the error in detail.
        let digests = self.digest_all_buffers(&indices).ok()?;
        Some(indices.iter().map(|i| digests[*i]).collect())
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let values = self.read_buffer(name)?;
        let mut hash = FingerprintHasher::default();
        hash.update(&values);
        Some(hash.finish(name, slice))
    }

    fn probe_gemms(&mut self) -> Result<Vec<(String, [u8; 32])>, Diagnostic> {
        let probed = self.context.make_current().and_then(|()| self.gemms.probe_plans());
        probed.map_err(|e| cuda_error("probe of GEMMs", &e))
    }

    fn run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        self.step_times = None;
        if !self.times_steps {
            return self.run_program(program.0, call, observer);
        }
        self.step_times = Some(self.run_with_events(program.0, call, observer)?);
        Ok(())
    }

    fn time_steps(&mut self, wanted: bool) {
        self.times_steps = wanted;
    }

    fn take_step_times(&mut self) -> Option<StepTimes> {
        self.step_times.take()
    }

    fn take_expert_report(&mut self) -> ExpertReport {
        self.weights.tiers_mut().take_report()
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        // The device may still write the outputs of a run that failed.
        if self.has_unfinished_run || self.call_arrays.is_some() {
            return None;
        }
        let candidates = self
            .outputs
            .iter()
            .filter(|(n, o)| o.is_current && n.split_once('/').is_some_and(|(_, n)| n == name));
        let (_, o) = candidates.max_by_key(|(_, o)| o.program)?;
        // SAFETY: no run is unfinished, and the borrow of the backend prevents another.
        Some(unsafe { self.programs[o.program].host_outputs.as_slice(o.offset, o.len) })
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        let b = &self.buffers[*self.buffer_index.get(name)?];
        self.context.make_current().ok()?;
        let n = b.ty.element_count() as usize;
        match b.ty.dtype {
            DType::Bf16 => {
                let mut bits = vec![0_u16; n];
                copy_to_host(&mut bits, b.memory.slice(0, n).ok()?).ok()?;
                Some(bits.into_iter().map(widen_bf16).collect())
            }
            DType::E4m3 => {
                let mut bits = vec![0_u8; n];
                copy_to_host(&mut bits, b.memory.slice(0, n).ok()?).ok()?;
                Some(bits.into_iter().map(from_e4m3_bits).collect())
            }
            _ => {
                let mut out = vec![0.0_f32; n];
                copy_to_host(&mut out, b.memory.slice(0, n).ok()?).ok()?;
                Some(out)
            }
        }
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        let Some(b) = self.buffer_index.get(name).map(|i| &self.buffers[*i]) else { return false };
        if b.ty.element_count() as usize != data.len() || self.context.make_current().is_err() {
            return false;
        }
        let memory = b.memory.slice(0, b.ty.byte_size().0 as usize);
        memory.and_then(|to| upload_rounded(to, b.ty.dtype, data)).is_ok()
    }

    fn reset_buffers(&mut self) {
        self.reset_count += 1;
        if self.context.make_current().is_ok() {
            for b in &self.buffers {
                // An unreadable device fails the next run.
                let _ = b.memory.zero_fill();
            }
        }
        self.weights.tiers_mut().reset();
    }

    fn reset_count(&self) -> u64 {
        self.reset_count
    }

    fn memory_bytes(&self) -> [u64; 3] {
        [
            self.weights.total_bytes(),
            self.buffers.iter().map(|b| b.memory.byte_len() as u64).sum(),
            self.slot_bytes + self.scratch_bytes() as u64,
        ]
    }

    fn memory_use(&self) -> MemoryUse {
        let [weights, buffers, _] = self.memory_bytes();
        let temporary_bytes = self.slot_memory.as_ref().map_or(0, |s| s.scratch_offset);
        let (held, peak_bytes) = held_bytes(self.options.device_index);
        let allocated_bytes = weights + buffers + temporary_bytes;
        let used = self.last_program.map(|p| self.used_slots(p)).unwrap_or_default();
        MemoryUse {
            allocated_bytes,
            workspace_bytes: held.saturating_sub(allocated_bytes),
            peak_bytes,
            temporary_bytes,
            run_temporary_bytes: used.values().map(|(bytes, ..)| bytes).sum(),
            slot_reuses: self.slot_reuses,
        }
    }

    fn poison_temporaries(&mut self) {
        self.is_poisoned = true;
    }

    fn compensated_sums(&self) -> u64 {
        0
    }

    fn abort_fn(&self) -> AbortFn {
        self.groups.abort_handle()
    }
}

impl Drop for CudaBackend {
    /// Aborts waits of an incomplete run first: freeing memory waits for the work that uses it, and
    /// work that waits for absent peers would never complete.
    fn drop(&mut self) {
        let is_usable = self.context.make_current().is_ok();
        if is_usable && self.has_unfinished_run {
            self.abort_run();
        }
        self.leave_rank_threads(is_usable);
        self.permit = Some(AllocationPermit::acquire_to_drop());
    }
}

impl CudaBackend {
    fn abort_run(&mut self) {
        let abort_threads = self.groups.abort_all();
        for p in &mut self.programs {
            (p.graph, p.traced_graph) = (None, None);
            // The stream may still call the host functions that decide where experts lie.
            std::mem::forget(std::mem::take(&mut p.tiered_layers));
        }
        for thread in abort_threads {
            // These threads do not panic, and their result is of no use here.
            let _ = thread.join();
        }
    }
}
