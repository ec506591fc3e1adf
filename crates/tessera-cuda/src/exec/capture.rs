//! Captures what a program enqueues as a CUDA graph.

use std::sync::Arc;

use super::CudaBackend;
use crate::driver::{CudaResult, GraphExec};

impl CudaBackend {
    /// Captures the graph that runs of a program replay.
    pub(super) fn capture_run_graph(&mut self, program: usize) -> CudaResult<()> {
        let graph = self.capture_graph(program, |own| own.enqueue_program(program, &mut |_, _, _| Ok(())))?;
        self.one_time_counts.graphs_captured += 1;
        self.programs[program].graph = Some(graph);
        Ok(())
    }

    /// Captures what `launch` enqueues as a graph.
    pub(super) fn capture_graph(
        &mut self,
        program: usize,
        launch: impl FnOnce(&mut CudaBackend) -> CudaResult<()>,
    ) -> CudaResult<GraphExec> {
        let p = Arc::clone(&self.programs[program].program);
        self.main_stream(&p)?.begin_capture()?;
        let launched = launch(self);
        // The capture must end even after an error: the stream is unusable until then.
        let graph = self.main_stream(&p)?.end_capture();
        launched?;
        graph
    }
}
