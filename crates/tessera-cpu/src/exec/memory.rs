//! Memory of the values of all loaded programs.

use std::ops::Range;

use tessera_device::{CallData, Fault, Scalar};

use crate::kernels::PackedWeight;

/// Memory that holds the values of all loaded programs: weights, buffers and slots.
#[derive(Debug, Default)]
pub(super) struct BackendMemory {
    pub(super) weights: Vec<WeightData>,
    pub(super) buffers: Vec<Vec<f32>>,
    /// One set of slots for all programs, because only one program runs at a time.
    pub(super) slots: Vec<Vec<f32>>,
}

#[derive(Debug)]
pub(super) enum WeightData {
    Plain(Vec<f32>),
    Packed(PackedWeight),
}

/// Where a value's elements are stored: a slot by index with its length in elements, a buffer by
/// index with a range of elements, a weight by index, or the call data by name.
#[derive(Debug, Clone)]
pub(super) enum ValueLocation {
    Unallocated,
    Slot(usize, usize),
    Buffer(usize, Range<usize>),
    Weight(usize),
    Input(String),
    Scalar(String),
}

impl BackendMemory {
    /// Returns the elements of a value. A packed weight, a token and an absent input are faults.
    pub(super) fn view_value<'a>(
        &'a self,
        place: &ValueLocation,
        call: &'a CallData<'_>,
    ) -> Result<&'a [f32], Fault> {
        Ok(match place {
            ValueLocation::Slot(s, len) => &self.slots[*s][..*len],
            ValueLocation::Buffer(b, range) => &self.buffers[*b][range.clone()],
            ValueLocation::Weight(w) => match &self.weights[*w] {
                WeightData::Plain(v) => v,
                WeightData::Packed(_) => {
                    return Err(Fault::Failed("a packed weight is used outside a matmul".into()));
                }
            },
            ValueLocation::Input(name) => call
                .inputs
                .get(name.as_str())
                .copied()
                .ok_or_else(|| Fault::Failed(format!("the call has no input `{name}`")))?,
            ValueLocation::Scalar(name) => match call.scalars.get(name.as_str()) {
                Some(Scalar::F32s(v)) => v,
                Some(Scalar::F32(v)) => std::slice::from_ref(v),
                _ => return Err(Fault::Failed(format!("the call has no float scalar `{name}`"))),
            },
            ValueLocation::Unallocated => return Err(Fault::Failed("a token is read as data".into())),
        })
    }
}

impl ValueLocation {
    /// Returns the integer scalar of the call that this value stands for; any other value is a
    /// fault.
    pub(super) fn integer_scalar(&self, call: &CallData<'_>) -> Result<i64, Fault> {
        match self {
            ValueLocation::Scalar(name) => match call.scalars.get(name.as_str()) {
                Some(Scalar::I64(i)) => Ok(*i),
                other => Err(Fault::Failed(format!("call scalar `{name}` must be an integer, is {other:?}"))),
            },
            _ => Err(Fault::Failed("an integer attribute does not refer to a call scalar".into())),
        }
    }
}
