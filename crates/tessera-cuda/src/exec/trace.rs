//! When and where each step of a program ran: its graph once more, with a mark before and after every step.

use std::sync::Arc;

use tessera_device::{CallData, Fault, Loaded, Observer};

use super::Cuda;
use crate::driver::{Done, Event, Failed, Graph, Stream};

/// A step as it ran on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Indices of its ops in the program, in order: several where one launch does them.
    pub ops: Vec<usize>,
    /// Its stream.
    pub stream: String,
    /// When it began, in nanoseconds from where the program begins on this device. The driver's clock of events ticks about twice
    /// a microsecond.
    pub begin_ns: f64,
    /// When it ended, same clock.
    pub end_ns: f64,
}

/// A graph with marks.
#[derive(Debug)]
pub(super) struct Traced {
    graph: Graph,
    began: Event,
    /// The op at whose place a step runs, where it begins and where it ends.
    marks: Vec<(usize, Event, Event)>,
}

impl Cuda {
    /// Runs a loaded program once and tells when each of its steps ran, in the order in which they were enqueued: kernels, copies
    /// and collectives, an issued one from the begin of its kernel to its end. What only orders streams is left out.
    ///
    /// The first call for a program captures it a second time, with marks. The marks cost time, so the whole takes longer than
    /// a run. Ranks of a group trace together or not at all: their collectives meet.
    ///
    /// # Errors
    /// As for [`run`](tessera_device::Backend::run).
    pub fn traced(
        &mut self,
        program: Loaded,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Span>, Fault> {
        let broken = |e: Failed| Fault::Failed(e.0);
        let Loaded(program) = program;
        // Memory is placed and libraries are connected by a run.
        if self.slots.is_none() || !self.programs[program].ran {
            self.run_program(program, call, observer)?;
        }
        self.ready(program, call, observer)?;
        let traced = match self.programs[program].traced.take() {
            Some(traced) => traced,
            None => self.capture_marked(program).map_err(broken)?,
        };
        let p = Arc::clone(&self.programs[program].program);
        let replayed = self.main(&p).and_then(|s| s.replay(&traced.graph));
        let spans = replayed.map_err(broken).and_then(|()| {
            self.finish(program, observer)?;
            let span = |(at, begin, end): &(usize, Event, Event)| -> Done<Span> {
                let ops = self.programs[program].ops_at(*at);
                let ns = |e: &Event| traced.began.until_ms(e).map(|ms| f64::from(ms) * 1e6);
                let stream = p.streams.get(p.ops[*at].stream.0 as usize).cloned().unwrap_or_default();
                Ok(Span { ops, stream, begin_ns: ns(begin)?, end_ns: ns(end)? })
            };
            traced.marks.iter().map(span).collect::<Done<_>>().map_err(broken)
        });
        self.programs[program].traced = Some(traced);
        spans
    }

    fn capture_marked(&mut self, program: usize) -> Done<Traced> {
        let p = Arc::clone(&self.programs[program].program);
        let began = Event::timed()?;
        let mut marks: Vec<(usize, Event)> = Vec::new();
        let graph = self.capture(program, |own| {
            own.main(&p)?.mark(&began)?;
            own.enqueue(program, &mut |at: usize, stream: &Stream, _: bool| {
                let e = Event::timed()?;
                stream.mark(&e)?;
                marks.push((at, e));
                Ok(())
            })
        })?;
        let mut pairs = Vec::new();
        let mut marks = marks.into_iter();
        while let (Some((at, begin)), Some((_, end))) = (marks.next(), marks.next()) {
            pairs.push((at, begin, end));
        }
        Ok(Traced { graph, began, marks: pairs })
    }
}

impl super::Prepared {
    /// The ops of the step that runs at an op's place.
    fn ops_at(&self, at: usize) -> Vec<usize> {
        self.steps.iter().find(|s| s.at() == at).map_or_else(|| vec![at], |s| s.ops())
    }
}
