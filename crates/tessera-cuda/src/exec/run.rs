//! Runs a loaded program: stages the data of the call, launches the program's graph or its steps, and
//! waits for the device.

#![allow(unsafe_code, reason = "launches of captured graphs")]

use std::sync::Arc;
use std::time::Instant;

use tessera_device::{CallData, Fault, Observer, Scalar, check_input};
use tessera_ir::{OpView, Opcode, Program, StreamKind};

use super::call_checks::check_numbers;
use super::{CudaBackend, PreparedProgram, ValueLocation};
use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::kernel_table::{SPIN, Spin};
use crate::kernels::KernelLaunch;

impl CudaBackend {
    pub(super) fn run_program(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let to_fault = |e: CudaError| Fault::Failed(e.0);
        self.prepare_run(program, call, observer)?;
        self.copy_call_inputs(program, call)?;
        let p = Arc::clone(&self.programs[program].program);
        if self.hang_injected {
            let streams = std::mem::take(&mut self.streams);
            let launch = KernelLaunch::blocks(SPIN, (1, 1, 0), Spin {});
            let spin_launch = streams.get(first_stream_name(&p)).map(|s| self.enqueue_launch(&launch, s));
            self.streams = streams;
            spin_launch.unwrap_or(Ok(())).map_err(to_fault)?;
        }
        let first = self.programs[program].graph.is_none();
        let captures = self.programs[program].declared_graph.is_some();
        let eager = !captures || self.connects_lazily(program);
        if !eager && first {
            self.capture_run_graph(program).map_err(to_fault)?;
        }
        if !self.programs[program].has_run {
            let (main, graph) =
                (self.main_stream(&p).map_err(to_fault)?, self.programs[program].graph.as_ref());
            self.wait_before_first_launch(main, graph.filter(|_| !eager))?;
        }
        if eager {
            self.enqueue_program(program, &mut |_, _, _| Ok(())).map_err(to_fault)?;
        } else {
            let (main, graph) =
                (self.main_stream(&p).map_err(to_fault)?, self.programs[program].graph.as_ref());
            // SAFETY: `place_slots` drops a captured graph when its addresses change, and the groups
            // keep what its collectives use.
            graph.map_or(Ok(()), |g| unsafe { main.launch_graph(g) }).map_err(to_fault)?;
        }
        self.programs[program].has_run = true;
        self.finish_run(program, observer)?;
        self.wait_after_run()?;
        self.keep_call_outputs(program).map_err(to_fault)?;
        if eager && captures {
            // All connections exist now. Capturing here keeps the next run free of captures.
            self.groups.reset_progress();
            self.capture_run_graph(program).map_err(to_fault)?;
        }
        Ok(())
    }

    /// Returns whether the next run of a program connects NCCL, which must not happen inside a capture.
    pub(super) fn connects_lazily(&self, program: usize) -> bool {
        let own = &self.programs[program];
        let has_graph = own.graph.is_some() || own.traced_graph.is_some();
        !has_graph && !own.has_run && self.groups.has_lazy_connections()
    }

    /// Does all host work that precedes the launch of a program.
    pub(super) fn prepare_run(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let broken = |e: CudaError| Fault::Failed(e.0);
        self.context.make_current().map_err(broken)?;
        self.stage_call_data(program, call)?;
        self.check_cache_rows(program, call)?;
        check_numbers(&self.programs[program], call)?;
        for (i, _) in self.programs[program].program.collective_ops() {
            observer.on_issuing(i).map_err(Fault::Refused)?;
        }
        observer.on_all_issuing().map_err(Fault::Refused)?;
        let graph = self.programs[program].declared_graph.as_ref();
        observer.on_launching(graph).map_err(Fault::Refused)?;
        self.begin_unfinished_run()?;
        self.place_slots().map_err(broken)?;
        if self.is_poisoned {
            self.fill_slots_with_poison(program).map_err(broken)?;
        }
        self.exchange_offsets(program).map_err(broken)?;
        self.groups.reset_progress();
        if !self.programs[program].tiered_layers.is_empty() {
            self.weights.tiers().forget_failed_run();
        }
        Ok(())
    }

    /// Waits for a launched program to complete.
    pub(super) fn finish_run(&mut self, program: usize, observer: &mut dyn Observer) -> Result<(), Fault> {
        let p = Arc::clone(&self.programs[program].program);
        self.main_stream(&p)
            .and_then(|s| s.record_event(&self.done_event))
            .map_err(|e| Fault::Failed(e.0))?;
        // A graph launches all its collectives at once, in program order.
        for (i, _) in p.collective_ops() {
            observer.on_issued(i);
        }
        self.wait_for_device(&p, observer)?;
        if !self.programs[program].tiered_layers.is_empty() {
            self.weights.tiers_mut().report_run(Instant::now()).map_err(|e| Fault::Failed(e.0))?;
        }
        self.check_chosen_ids(program)?;
        for o in self.outputs.values_mut() {
            o.is_current = o.program == program;
        }
        self.end_unfinished_run();
        self.last_program = Some(program);
        self.slot_reuses += self.used_slots(program).values().map(|(_, _, values)| values - 1).sum::<u64>();
        Ok(())
    }

    /// Checks that every chosen id is one. The device has completed the run.
    fn check_chosen_ids(&mut self, program: usize) -> Result<(), Fault> {
        for at in 0..self.programs[program].chosen_ids.len() {
            let own = &self.programs[program];
            let ids = own.chosen_ids[at];
            // SAFETY: the device has completed the run that writes the ids, and no other is in flight.
            let chosen: &[f32] = unsafe { own.host_outputs.as_slice(ids.offset, ids.rows) };
            if let Some(row) = chosen.iter().position(|id| id.is_nan()) {
                self.end_unfinished_run();
                return Err(Fault::Failed(format!("the logits of row {row} contain NaN")));
            }
        }
        Ok(())
    }

    /// Returns the stream on which a program begins and ends.
    pub(super) fn main_stream(&self, p: &Program) -> CudaResult<&CudaStream> {
        let name = first_stream_name(p);
        self.streams.get(name).ok_or_else(|| CudaError(format!("no stream {name}")))
    }

    /// Checks that every row index of the call lies within its buffer. Kernels do not check bounds.
    fn check_cache_rows(&self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let PreparedProgram { program: p, views, .. } = &self.programs[program];
        for (op, view) in p.ops.iter().zip(&**views) {
            let OpView::CacheWrite(v) = view else { continue };
            let (Some(row), Some(b)) = (v.row, op.buffer) else { continue };
            let named =
                p.ops.iter().find(|o| o.results.first() == Some(&row)).and_then(|o| o.name.as_deref());
            let Some(Scalar::I64(row)) = named.and_then(|n| call.scalars.get(n)) else { continue };
            let (rows, all) = (v.first_row + p.type_of(v.x).shape[0], p.buffer(b).ty.shape[0]);
            if u64::try_from(*row).map_or(true, |r| r.saturating_add(rows) > all) {
                return Err(Fault::Failed(format!(
                    "@{}: row {row} + {rows} exceeds a cache of {all} rows",
                    p.name
                )));
            }
        }
        Ok(())
    }

    /// Copies a call's inputs and scalars into the pinned memory that the graph reads.
    fn stage_call_data(&mut self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let prepared = &mut self.programs[program];
        let p = Arc::clone(&prepared.program);
        let copies_inputs = self.call_arrays.is_some();
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            // `copy_call_inputs` brings the inputs that no graph copies.
            if copies_inputs && op.opcode == Opcode::Input {
                continue;
            }
            check_input(&p, op, call)?;
            let ValueLocation::CallArea(at) = prepared.locations[op.results[0].0 as usize] else { continue };
            let (at, name) = (at as usize, op.name.as_deref().unwrap_or_default());
            match (call.inputs.get(name), call.scalars.get(name)) {
                (Some(x), _) if op.opcode == Opcode::Input => {
                    prepared.staged.write(at, x);
                }
                (_, Some(Scalar::I64(v))) => prepared.staged.write(at, &[*v]),
                (_, Some(Scalar::F32(v))) => prepared.staged.write(at, &[*v]),
                (_, Some(Scalar::F32s(v))) => prepared.staged.write(at, v),
                _ => {}
            }
        }
        Ok(())
    }
}

pub(super) fn first_stream_name(p: &Program) -> &str {
    p.streams.first().map_or(StreamKind::Compute.name(), String::as_str)
}
