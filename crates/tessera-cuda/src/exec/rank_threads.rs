//! Waits of a rank for the other ranks of its process, if they are threads: see [`crate::thread_ranks`].

use std::time::Duration;

use tessera_device::Fault;

use super::CudaBackend;
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream, GraphExec};
use crate::thread_ranks::WaitFailure;

/// Longest wait for a rank whose work is on its device: none, because each rank limits its own.
const UNLIMITED: Duration = Duration::from_secs(24 * 3600);

/// Time between two looks at work that was aborted.
const POLL_PERIOD: Duration = Duration::from_millis(1);

impl CudaBackend {
    /// Waits until all ranks of this process have completed the run. What follows may allocate, which no rank does while another has
    /// work on its device. A call has one program: a second one would need this wait as well before its first launch.
    pub(super) fn wait_after_run(&self) -> Result<(), Fault> {
        let Some(own) = &self.options.thread_rank else { return Ok(()) };
        own.wait_for_all(UNLIMITED).map_err(to_fault)
    }

    /// Returns whether another rank of this process has ended the run.
    pub(super) fn is_aborted_by_rank_threads(&self) -> bool {
        self.options.thread_rank.as_ref().is_some_and(|own| own.ranks.is_aborted())
    }

    /// Waits until every rank has allocated what the first run of a program needs, including the memory of its graph.
    pub(super) fn wait_before_first_launch(
        &self,
        main: &CudaStream,
        graph: Option<&GraphExec>,
    ) -> Result<(), Fault> {
        let Some(own) = &self.options.thread_rank else { return Ok(()) };
        let upload = |graph: &GraphExec| {
            main.upload_graph(graph)?;
            main.spin_until_done(&self.done_event)
        };
        graph.map_or(Ok(()), upload).map_err(|e| Fault::Failed(e.0))?;
        own.wait_for_all(self.options.peer_timeout).map_err(to_fault)
    }

    /// States that a run may have work on the device from now on.
    ///
    /// # Errors
    /// Refused if another rank has ended: its memory may be gone.
    pub(super) fn begin_unfinished_run(&mut self) -> Result<(), Fault> {
        if let Some(own) = &self.options.thread_rank {
            own.begin_run().map_err(to_fault)?;
        }
        self.has_unfinished_run = true;
        Ok(())
    }

    /// States that the run has no work on the device any more.
    pub(super) fn end_unfinished_run(&mut self) {
        self.has_unfinished_run = false;
        if let Some(own) = &self.options.thread_rank {
            own.end_run();
        }
    }

    /// Waits until no kernel of another rank accesses the memory of this one, so that it may be freed. The caller has aborted
    /// an unfinished run, which leaves kernels that compute. If a device does not stop, this thread never returns, and the memory
    /// stays until the process ends: a late write would change memory that has a new owner.
    pub(super) fn leave_rank_threads(&mut self, is_usable: bool) {
        let Some(own) = self.options.thread_rank.clone() else { return };
        own.ranks.abort();
        if !is_usable {
            // Nothing can be said about a device that is lost.
            std::mem::forget(self.slot_memory.take());
            self.groups.leak_groups();
        } else if self.has_unfinished_run {
            self.wait_for_own_streams();
        }
        own.end_run();
        own.wait_until_idle();
    }

    /// Waits until all streams have completed their work or failed.
    fn wait_for_own_streams(&self) {
        let wait = |stream: &CudaStream| -> CudaResult<()> {
            let event = CudaEvent::new()?;
            stream.record_event(&event)?;
            while !event.is_complete()? {
                std::thread::sleep(POLL_PERIOD);
            }
            Ok(())
        };
        for stream in self.streams.values() {
            // The work of a stream that has failed is over.
            let _ = wait(stream);
        }
    }
}

fn to_fault(why: WaitFailure) -> Fault {
    let is_abort = why == WaitFailure::Aborted;
    let text = CudaError::from(why).0;
    match is_abort {
        true => Fault::Aborted(text),
        false => Fault::Stalled(text),
    }
}
