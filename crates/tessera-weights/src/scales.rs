//! The scales of FP8 tensors: a file stores them beside the tensor, under one of two names.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::dtype::FileDtype;
use crate::stored_tensor::StoredTensor;

/// What the last part of a weight's name becomes in the name of its scales, in the two conventions.
const SCALE_NAMES: [&str; 2] = ["scale_weight", "weight_scale"];

/// Last parts of the names of tensors that only a matmul on FP8 inputs needs: the scale of its input,
/// and the mark that the file is scaled.
const UNUSED_NAMES: [&str; 3] = ["scale_input", "input_scale", "scaled_fp8"];

/// Returns the scales of an FP8 tensor: one, or one per row.
///
/// # Errors
/// What is wrong with the scales, or that there are none.
pub(crate) fn find_scales(
    name: &str,
    t: &StoredTensor,
    found: &BTreeMap<&str, &StoredTensor>,
) -> Result<Arc<[f32]>, String> {
    let names = name_scales(name);
    let Some((scale_name, scale)) = names.iter().find_map(|n| found.get_key_value(n.as_str())) else {
        return Err(format!("F8_E4M3 without a scale: neither {} nor {} exists", names[0], names[1]));
    };
    let Some(dtype) = FileDtype::from_name(&scale.dtype).filter(|d| *d != FileDtype::E4m3) else {
        return Err(format!("the scale {scale_name} is {}; expected F32, F16 or BF16", scale.dtype));
    };
    let rows = t.shape.first().copied().unwrap_or(1);
    let mut values = Vec::new();
    dtype.widen_to_f32(scale.raw_bytes(), &mut values);
    let per_row = scale.shape.first() == Some(&rows) && values.len() as u64 == rows;
    if values.len() != 1 && !per_row {
        return Err(format!(
            "the scale {scale_name} is {:?}; expected 1 element or {rows}, one per row of {:?}",
            scale.shape, t.shape
        ));
    }
    match values.iter().find(|x| !x.is_finite()) {
        Some(x) => Err(format!("the scale {scale_name} holds {x}")),
        None => Ok(values.into()),
    }
}

/// Returns whether a tensor is a scale of another one in the files, or needed by FP8 inputs alone.
pub(crate) fn is_scale_name(name: &str, found: &BTreeMap<&str, &StoredTensor>) -> bool {
    let (stem, last) = name.rsplit_once('.').map_or(("", name), |(stem, last)| (stem, last));
    let weight = format!("{stem}.weight");
    UNUSED_NAMES.contains(&last)
        || SCALE_NAMES.contains(&last)
            && found.get(weight.as_str()).is_some_and(|t| t.dtype == FileDtype::E4m3.name())
}

fn name_scales(name: &str) -> [String; 2] {
    let stem = name.strip_suffix("weight").unwrap_or(name);
    SCALE_NAMES.map(|scale| format!("{stem}{scale}"))
}
