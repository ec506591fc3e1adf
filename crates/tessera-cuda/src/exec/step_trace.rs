//! Traces when each step of a program ran: captures its graph a second time, with timing events
//! around every step.

#![allow(unsafe_code, reason = "launch of a captured graph")]

use std::sync::Arc;

use tessera_device::{CallData, Fault, Observer, ProgramHandle};

use super::CudaBackend;
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream, GraphExec};

/// When one step ran on the device. A step is a kernel, a copy or a collective, which may run
/// several ops.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSpan {
    /// Indices of the step's ops in the program, in order. A fused step has several.
    pub ops: Vec<usize>,
    /// Name of the stream that the program assigns to the step, such as `compute`.
    pub stream: String,
    /// Start time in nanoseconds since the program began on this device. CUDA events have a
    /// resolution of about 0.5 µs.
    pub begin_ns: f64,
    /// End time on the same clock.
    pub end_ns: f64,
}

/// A CUDA graph of a program with a timing event before and after each step.
#[derive(Debug)]
pub(super) struct TracedGraph {
    graph: GraphExec,
    start_event: CudaEvent,
    /// Launch op of each step, with its start and end events.
    step_events: Vec<(usize, CudaEvent, CudaEvent)>,
}

impl CudaBackend {
    /// Runs a loaded program once and returns the time span of each step (kernel, copy or
    /// collective), in the order of enqueueing. The span of an issued collective covers its kernel.
    /// Steps that only order streams are left out.
    ///
    /// The first call for a program captures a second graph with timing events. The events take
    /// time themselves, so a traced run is slower than a normal one. Either all ranks of a group
    /// trace or none, because their collectives must match.
    pub fn trace_run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<StepSpan>, Fault> {
        let broken = |e: CudaError| Fault::Failed(e.0);
        let ProgramHandle(program) = program;
        // A normal run places the memory and connects the libraries.
        if self.slot_memory.is_none() || !self.programs[program].has_run {
            self.run_program(program, call, observer)?;
        }
        self.prepare_run(program, call, observer)?;
        let traced = match self.programs[program].traced_graph.take() {
            Some(traced) => traced,
            None => self.capture_with_events(program).map_err(broken)?,
        };
        let p = Arc::clone(&self.programs[program].program);
        // SAFETY: `place_slots` drops a captured graph when its addresses change.
        let replayed = self.main_stream(&p).and_then(|s| unsafe { s.launch_graph(&traced.graph) });
        let spans = replayed.map_err(broken).and_then(|()| {
            self.finish_run(program, observer)?;
            let span = |(at, begin, end): &(usize, CudaEvent, CudaEvent)| -> CudaResult<StepSpan> {
                let ops = self.programs[program].ops_of_step(*at);
                let ns = |e: &CudaEvent| traced.start_event.elapsed_ms_to(e).map(|ms| f64::from(ms) * 1e6);
                let stream = p.streams.get(p.ops[*at].stream.0 as usize).cloned().unwrap_or_default();
                Ok(StepSpan { ops, stream, begin_ns: ns(begin)?, end_ns: ns(end)? })
            };
            traced.step_events.iter().map(span).collect::<CudaResult<_>>().map_err(broken)
        });
        self.programs[program].traced_graph = Some(traced);
        spans
    }

    fn capture_with_events(&mut self, program: usize) -> CudaResult<TracedGraph> {
        let p = Arc::clone(&self.programs[program].program);
        let began = CudaEvent::with_timing()?;
        let mut marks: Vec<(usize, CudaEvent)> = Vec::new();
        let graph = self.capture_graph(program, |own| {
            own.main_stream(&p)?.capture_event_node(&began)?;
            own.enqueue_program(program, &mut |at: usize, stream: &CudaStream, _: bool| {
                let e = CudaEvent::with_timing()?;
                stream.capture_event_node(&e)?;
                marks.push((at, e));
                Ok(())
            })
        })?;
        let mut pairs = Vec::new();
        let mut marks = marks.into_iter();
        while let (Some((at, begin)), Some((_, end))) = (marks.next(), marks.next()) {
            pairs.push((at, begin, end));
        }
        Ok(TracedGraph { graph, start_event: began, step_events: pairs })
    }
}

impl super::PreparedProgram {
    /// Returns the ops of the step whose launch op is `at`.
    fn ops_of_step(&self, at: usize) -> Vec<usize> {
        self.steps.iter().find(|s| s.launch_op() == at).map_or_else(|| vec![at], |s| s.all_ops())
    }
}
