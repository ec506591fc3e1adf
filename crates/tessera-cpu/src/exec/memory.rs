//! Memory of the values of all loaded programs.

use std::ops::Range;

use tessera_device::{CallData, Fault, Scalar};
use tessera_ir::{DType, Type};

use crate::kernels::PackedWeight;

const ELEMENT_BYTES: usize = size_of::<f32>();

/// Memory that holds the values of all loaded programs: weights, buffers and temporaries.
#[derive(Debug, Default)]
pub(super) struct BackendMemory {
    pub(super) weights: Vec<WeightData>,
    pub(super) buffers: Vec<Vec<f32>>,
    /// One region for the slots of all programs, because only one program runs at a time. It has the
    /// size of the program with the most temporaries; each program places its own slots in it.
    pub(super) temporaries: Vec<f32>,
    /// Elements of the largest value that the current or last run wrote to each slot.
    written: Vec<usize>,
    /// Results that were written to a slot that an earlier result of the same run had occupied.
    pub(super) slot_reuses: u64,
}

#[derive(Debug)]
pub(super) enum WeightData {
    Plain(Vec<f32>),
    /// The matrix of matmuls, or one matrix for each group of a grouped matmul.
    Packed(Vec<PackedWeight>),
    /// Rows that only `embed` reads, each number exact in bf16.
    Bf16(Vec<u16>),
    /// Experts in two tiers, by index of the weight among them; their pools are counted there.
    Tiered(usize),
}

impl WeightData {
    /// Returns the bytes in memory, with spare capacity.
    pub(super) fn allocated_bytes(&self) -> usize {
        match self {
            WeightData::Plain(v) => v.capacity() * ELEMENT_BYTES,
            WeightData::Packed(p) => p.iter().map(PackedWeight::allocated_bytes).sum(),
            WeightData::Bf16(v) => v.capacity() * size_of::<u16>(),
            WeightData::Tiered(_) => 0,
        }
    }
}

/// The elements of the temporaries that a value occupies in its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotPlace {
    pub(super) slot: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl SlotPlace {
    pub(super) fn to_range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Where a value's elements are stored: a place in a slot, a buffer by index with a range of elements,
/// a weight by index, or the call data by name.
#[derive(Debug, Clone)]
pub(super) enum ValueLocation {
    Unallocated,
    Slot(SlotPlace),
    Buffer(usize, Range<usize>),
    Weight(usize),
    Input(String),
    Scalar(String),
}

impl BackendMemory {
    /// Returns the bytes allocated for weights, buffers and temporaries, with spare capacity.
    pub(super) fn allocated_bytes(&self) -> [u64; 3] {
        let weights = self.weights.iter().map(WeightData::allocated_bytes);
        let buffers = self.buffers.iter().map(|b| b.capacity() * ELEMENT_BYTES);
        [weights.sum::<usize>(), buffers.sum(), self.temporaries.capacity() * ELEMENT_BYTES].map(|n| n as u64)
    }

    /// Begins to count the slots that a run writes.
    pub(super) fn begin_run(&mut self) {
        self.written.clear();
    }

    /// Counts a result that was written to its place.
    pub(super) fn count_result(&mut self, place: &ValueLocation) {
        let ValueLocation::Slot(place) = place else { return };
        self.written.resize(self.written.len().max(place.slot + 1), 0);
        let written = &mut self.written[place.slot];
        self.slot_reuses += u64::from(*written > 0);
        *written = (*written).max(place.len);
    }

    /// Returns the bytes of slots that the current or last run wrote.
    pub(super) fn run_temporary_bytes(&self) -> u64 {
        (self.written.iter().sum::<usize>() * ELEMENT_BYTES) as u64
    }

    /// Returns a view of all values.
    pub(super) fn view_all(&self) -> MemoryView<'_> {
        let (weights, buffers) = (self.weights.as_slice(), self.buffers.as_slice());
        MemoryView { weights, buffers, before: &self.temporaries, after: (self.temporaries.len(), &[]) }
    }

    /// Returns the elements at a place for writing, and a view of all other values.
    pub(super) fn split_at_place(&mut self, place: SlotPlace) -> (MemoryView<'_>, &mut [f32]) {
        let (before, rest) = self.temporaries.split_at_mut(place.start);
        let (out, after) = rest.split_at_mut(place.len);
        let after = (place.start + place.len, &*after);
        (MemoryView { weights: &self.weights, buffers: &self.buffers, before, after }, out)
    }
}

/// Values for reading: all of them, or all but those in a place that is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryView<'a> {
    pub(super) weights: &'a [WeightData],
    buffers: &'a [Vec<f32>],
    /// Temporaries in front of the place that is written.
    before: &'a [f32],
    /// First element of the temporaries behind that place, and these temporaries.
    after: (usize, &'a [f32]),
}

impl<'a> MemoryView<'a> {
    /// Returns the elements of a value. A packed weight, a token, an absent input and a value that
    /// shares memory with the result are faults.
    pub(super) fn view_value(
        self,
        place: &ValueLocation,
        call: &'a CallData<'_>,
    ) -> Result<&'a [f32], Fault> {
        Ok(match place {
            ValueLocation::Slot(place) => self.view_temporary(*place)?,
            ValueLocation::Buffer(b, range) => &self.buffers[*b][range.clone()],
            ValueLocation::Weight(w) => match &self.weights[*w] {
                WeightData::Plain(v) => v,
                WeightData::Packed(_) => {
                    return Err(Fault::Failed("a packed weight is used outside a matmul".into()));
                }
                WeightData::Bf16(_) => {
                    return Err(Fault::Failed("a weight in bf16 is used outside an embed".into()));
                }
                WeightData::Tiered(_) => {
                    return Err(Fault::Failed(
                        "experts in two tiers are used outside a grouped matmul".into(),
                    ));
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

    fn view_temporary(self, place: SlotPlace) -> Result<&'a [f32], Fault> {
        let (after_start, after) = self.after;
        let behind =
            place.start.checked_sub(after_start).and_then(|start| after.get(start..start + place.len));
        let shared =
            || Fault::Failed(format!("slot {} holds an operand and the result of one op", place.slot));
        self.before.get(place.to_range()).or(behind).ok_or_else(shared)
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

/// Returns whether bf16 represents every number of a type's dtype.
pub(super) fn is_narrow(ty: &Type) -> bool {
    matches!(ty.dtype, DType::Bf16 | DType::E4m3)
}
