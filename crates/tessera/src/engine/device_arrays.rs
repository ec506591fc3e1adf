//! Checks and digests of the outputs that a rank leaves in GPU memory.

use tessera_base::Diagnostic;
use tessera_cuda::{GpuCallArrays, GpuOutput};
use tessera_runtime::engine::EngineFault;
use tessera_runtime::wire::{Dtype, Tensor};
use tessera_runtime::{T0754, T0771};

use super::MeshEngine;

impl MeshEngine {
    /// Checks that the outputs of a phase in GPU memory are finite, as a call checks those in host memory, and adds
    /// their digests to the outputs of the call. After a failure the weights are hashed again, because a changed weight
    /// is the likeliest cause.
    pub(super) fn summarize_device_outputs(&mut self, phase: &str) -> Result<(), EngineFault> {
        let Some(arrays) = &self.call_arrays else { return Ok(()) };
        let Some(found) = describe_nonfinite(arrays, phase) else {
            let digests = digest_outputs(arrays).map_err(|d| EngineFault::local_failure(d.message))?;
            self.outputs.extend(digests);
            return Ok(());
        };
        if let Some(part) = self.weight_fingerprints.audit(&mut *self.backend)
            && part.digest_now != part.digest_at_load
        {
            let (label, then, now) = (part.label, part.digest_at_load, part.digest_now);
            let text = format!("{label} changed after loading: digest {then} then, {now} now");
            return Err(EngineFault::from_tripwire(&T0754, text));
        }
        Err(EngineFault::from_tripwire(&T0771, found))
    }
}

/// Returns a tensor with the digest of each output in GPU memory, which stands for the output where ranks are compared.
fn digest_outputs(arrays: &GpuCallArrays) -> Result<Vec<Tensor>, Diagnostic> {
    let outputs = arrays.outputs();
    let digest = |(name, output): (&String, &GpuOutput)| {
        Tensor::new(&format!("digest of {name}"), Dtype::U8, &[8], output.digest.to_le_bytes())
    };
    outputs.iter().map(digest).collect()
}

fn describe_nonfinite(arrays: &GpuCallArrays, phase: &str) -> Option<String> {
    let outputs = arrays.outputs();
    let (name, all, wrong) = outputs.iter().find_map(|(name, output)| {
        let wrong = output.nonfinite?;
        Some((name, output.array.len(), wrong))
    })?;
    let (count, first, value) = (wrong.count, wrong.first, wrong.value);
    Some(format!(
        "{count} of {all} {name} of @{phase} are not finite, the first is element {first} with {value}"
    ))
}
