//! Times the steps of a program on the device: runs it with timing events around every step, in a second graph where
//! it has one.

#![allow(unsafe_code, reason = "launch of a captured graph")]

use std::sync::Arc;
use std::time::Instant;

use tessera_device::{CallData, Fault, Observer, ProgramHandle, StepSpan, StepTimes};

use super::CudaBackend;
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream, GraphExec};

/// A CUDA graph of a program with a timing event before and after each step.
#[derive(Debug)]
pub(super) struct TracedGraph {
    graph: GraphExec,
    events: StepEvents,
}

/// The timing events of a program.
#[derive(Debug)]
struct StepEvents {
    /// Begin of the program.
    start: CudaEvent,
    /// Launch op of each step, with its start and end events.
    steps: Vec<(usize, CudaEvent, CudaEvent)>,
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
        let ProgramHandle(program) = program;
        // A normal run places the memory and connects the libraries.
        if self.slot_memory.is_none() || !self.programs[program].has_run {
            self.run_program(program, call, observer)?;
        }
        self.run_with_events(program, call, observer).map(|times| times.spans)
    }

    /// Runs a program with timing events around every step, in a graph. A run that connects NCCL is eager and has events,
    /// too; it then captures the graph of the later ones.
    pub(super) fn run_with_events(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<StepTimes, Fault> {
        let broken = |e: CudaError| Fault::Failed(e.0);
        self.prepare_run(program, call, observer)?;
        self.copy_call_inputs(program, call)?;
        if self.connects_lazily(program) {
            let events = self.enqueue_with_events(program, CudaStream::record_event).map_err(broken)?;
            let times = self.finish_timed_run(program, &events, observer)?;
            self.groups.reset_progress();
            let traced = self.capture_with_events(program).map_err(broken)?;
            self.programs[program].traced_graph = Some(traced);
            return Ok(times);
        }
        let traced = match self.programs[program].traced_graph.take() {
            Some(traced) => traced,
            None => {
                let traced = self.capture_with_events(program).map_err(broken)?;
                let p = Arc::clone(&self.programs[program].program);
                let main = self.main_stream(&p).map_err(broken)?;
                self.wait_before_first_launch(main, Some(&traced.graph))?;
                traced
            }
        };
        let p = Arc::clone(&self.programs[program].program);
        // SAFETY: `place_slots` drops a captured graph when its addresses change.
        let replayed = self.main_stream(&p).and_then(|s| unsafe { s.launch_graph(&traced.graph) });
        let times =
            replayed.map_err(broken).and_then(|()| self.finish_timed_run(program, &traced.events, observer));
        self.programs[program].traced_graph = Some(traced);
        times
    }

    /// Waits for a launched program to complete, and reads its events.
    fn finish_timed_run(
        &mut self,
        program: usize,
        events: &StepEvents,
        observer: &mut dyn Observer,
    ) -> Result<StepTimes, Fault> {
        let broken = |e: CudaError| Fault::Failed(e.0);
        self.programs[program].has_run = true;
        self.finish_run(program, observer)?;
        let finished = Instant::now();
        self.wait_after_run()?;
        self.keep_call_outputs(program).map_err(broken)?;
        let own = &self.programs[program];
        let span = |(at, begin, end): &(usize, CudaEvent, CudaEvent)| -> CudaResult<StepSpan> {
            let (p, ops) = (&own.program, own.ops_of_step(*at));
            let ns = |e: &CudaEvent| events.start.elapsed_ms_to(e).map(|ms| f64::from(ms) * 1e6);
            let stream = p.streams.get(p.ops[*at].stream.0 as usize).cloned().unwrap_or_default();
            Ok(StepSpan { ops, stream, begin_ns: ns(begin)?, end_ns: ns(end)? })
        };
        let spans = events.steps.iter().map(span).collect::<CudaResult<_>>().map_err(broken)?;
        Ok(StepTimes { finished, spans })
    }

    fn capture_with_events(&mut self, program: usize) -> CudaResult<TracedGraph> {
        let mut events = None;
        let graph = self.capture_graph(program, |own| {
            events = Some(own.enqueue_with_events(program, CudaStream::capture_event_node)?);
            Ok(())
        })?;
        let events = events.ok_or_else(|| CudaError("the capture enqueued nothing".to_string()))?;
        Ok(TracedGraph { graph, events })
    }

    /// Enqueues a program with an event before and after each step, which `record` puts on a stream.
    fn enqueue_with_events(
        &mut self,
        program: usize,
        record: fn(&CudaStream, &CudaEvent) -> CudaResult<()>,
    ) -> CudaResult<StepEvents> {
        let p = Arc::clone(&self.programs[program].program);
        let start = CudaEvent::with_timing()?;
        record(self.main_stream(&p)?, &start)?;
        let (mut steps, mut begun) = (Vec::new(), None);
        self.enqueue_program(program, &mut |at: usize, stream: &CudaStream, ends: bool| {
            let event = CudaEvent::with_timing()?;
            record(stream, &event)?;
            match begun.take() {
                Some(begin) if ends => steps.push((at, begin, event)),
                _ => begun = Some(event),
            }
            Ok(())
        })?;
        Ok(StepEvents { start, steps })
    }
}

impl super::PreparedProgram {
    /// Returns the ops of the step whose launch op is `at`.
    fn ops_of_step(&self, at: usize) -> Vec<usize> {
        self.steps.iter().find(|s| s.launch_op() == at).map_or_else(|| vec![at], |s| s.all_ops())
    }
}
