//! When a device ran the steps of a program.

use std::time::Instant;

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

/// When the steps of one run were on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// When the host learned that the device had completed the run.
    pub finished: Instant,
    /// The steps in the order of their launch.
    pub spans: Vec<StepSpan>,
}

impl StepTimes {
    /// Returns the nanoseconds from the begin of the program on the device to the end of its last step.
    #[must_use]
    pub fn length_ns(&self) -> f64 {
        self.spans.iter().map(|span| span.end_ns).fold(0.0, f64::max)
    }
}
