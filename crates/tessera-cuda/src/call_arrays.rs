//! The arrays in GPU memory that the caller and the backend of a rank pass each other beside the data
//! of a call, which lies in host memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::gpu_array::GpuArray;

/// The arrays of one rank. A backend that has them leaves every output in GPU memory.
#[derive(Debug, Default)]
pub struct GpuCallArrays(Mutex<CallArrays>);

#[derive(Debug, Default)]
struct CallArrays {
    inputs: BTreeMap<String, GpuArray>,
    outputs: BTreeMap<String, GpuOutput>,
}

/// An output of a run in GPU memory of its own.
#[derive(Debug, Clone)]
pub struct GpuOutput {
    /// The values.
    pub array: GpuArray,
    /// The values that are NaN or infinite; `None` if all are finite.
    pub nonfinite: Option<NonFinite>,
    /// Digest of the values, equal on all ranks that have equal bits.
    pub digest: u64,
}

/// Values that are not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NonFinite {
    /// How many there are.
    pub count: u64,
    /// Index of the first one.
    pub first: u64,
    /// The first one.
    pub value: f32,
}

impl GpuCallArrays {
    /// Sets the inputs that the next runs read from GPU memory, by their names in the program.
    pub fn set_inputs(&self, inputs: BTreeMap<String, GpuArray>) {
        self.lock().inputs = inputs;
    }

    /// Returns whether runs read an input from GPU memory.
    #[must_use]
    pub fn has_input(&self, name: &str) -> bool {
        self.lock().inputs.contains_key(name)
    }

    /// Returns the outputs of the last run by their names in the program.
    #[must_use]
    pub fn outputs(&self) -> BTreeMap<String, GpuOutput> {
        self.lock().outputs.clone()
    }

    /// Forgets the inputs, and the outputs of the last run.
    pub fn clear(&self) {
        *self.lock() = CallArrays::default();
    }

    pub(crate) fn inputs(&self) -> BTreeMap<String, GpuArray> {
        self.lock().inputs.clone()
    }

    pub(crate) fn set_outputs(&self, outputs: BTreeMap<String, GpuOutput>) {
        self.lock().outputs = outputs;
    }

    fn lock(&self) -> MutexGuard<'_, CallArrays> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
