//! Checks of the outputs that a rank leaves in GPU memory.

use tessera_cuda::GpuCallArrays;
use tessera_runtime::engine::EngineFault;
use tessera_runtime::{T0754, T0771};

use super::MeshEngine;

impl MeshEngine {
    /// Checks that the outputs of a phase in GPU memory are finite, as a call checks those in host memory. After a
    /// failure the weights are hashed again, because a changed weight is the likeliest cause.
    pub(super) fn check_device_outputs(&mut self, phase: &str) -> Result<(), EngineFault> {
        let Some(found) = self.call_arrays.as_ref().and_then(|arrays| describe_nonfinite(arrays, phase))
        else {
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
