//! Waits for the device, reports progress meanwhile, and ends the wait when a collective fails or the
//! device stalls.

use std::time::{Duration, Instant};

use tessera_device::{Fault, Observer};
use tessera_ir::Program;

use super::CudaBackend;
use super::comm_groups::ProgressReporter;

/// Time that the device may spend between two collectives, in addition to the peer timeout.
const DEVICE_STALL_GRACE: Duration = Duration::from_secs(2);

impl CudaBackend {
    /// Waits until the device completes the program. Spins at first because a phase may be short,
    /// then audits weights and sleeps between polls. Reports progress to the observer. Fails if a
    /// collective fails, or if the device makes no progress for longer than the peer timeout.
    pub(super) fn wait_for_device(&mut self, p: &Program, observer: &mut dyn Observer) -> Result<(), Fault> {
        let mut reporter = ProgressReporter::new(p);
        let mut last_progress = Instant::now();
        let started = last_progress;
        loop {
            match self.done_event.is_complete() {
                Ok(true) => break,
                Ok(false) => {}
                Err(e) => return Err(Fault::Failed(format!("@{}: {e}", p.name))),
            }
            if reporter.report_progress(&self.groups, observer) {
                last_progress = Instant::now();
            }
            if let Some(fault) = self.groups.find_fault(p) {
                return Err(fault);
            }
            if self.is_aborted_by_rank_threads() {
                return Err(Fault::Aborted(format!("@{}: another rank of this process has ended", p.name)));
            }
            // P2P kernels enforce the timeout themselves. This check covers NCCL and kernels that
            // never end.
            if last_progress.elapsed() > self.options.peer_timeout + DEVICE_STALL_GRACE {
                return Err(Fault::Stalled(format!(
                    "@{}: no progress on the GPU for {:?}",
                    p.name,
                    last_progress.elapsed()
                )));
            }
            if started.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            } else if !self.waiting_audit.run_step(&mut self.weights) {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // A kernel whose wait for a peer failed ends early, so the program may complete with a
        // fault.
        if let Some(fault) = self.groups.find_fault(p) {
            return Err(fault);
        }
        reporter.report_completion(observer);
        Ok(())
    }
}
