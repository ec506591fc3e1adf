//! The rank on a GPU that is a thread of this process, and the arrays that its calls pass in GPU memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::GpuCallArrays;
use tessera_mesh::Rank;
use tessera_report::record::RunDevice;

use super::array_plan::ArrayPlan;
use super::array_program::ArrayProgram;
use super::device_array::{ArrayValues, DeviceArray};
use crate::codes::{T0087, T0098, T0099};
use crate::cuda::GpuRankConfig;
use crate::rank_launch::prepare_device;

/// The only rank of a plan, on a GPU.
pub(super) struct GpuThread {
    rank: Rank,
    device: u32,
    pub(super) config: GpuRankConfig,
    pub(super) arrays: Arc<GpuCallArrays>,
}

impl GpuThread {
    /// Finds the GPU of a plan's only rank.
    ///
    /// # Errors
    /// T0098 for a plan of several ranks, T0801 for an op that a GPU does not run, or what this host lacks.
    pub(super) fn prepare(plan: &ArrayPlan) -> Result<GpuThread, Diagnostics> {
        let one = |d: Diagnostic| vec![d];
        let mesh = plan.sealed.mesh();
        let ranks: Vec<Rank> = mesh.iter().filter(|rank| mesh.contains(*rank)).collect();
        let &[rank] = &ranks[..] else {
            let what = format!("a mesh of {} ranks on GPUs, as threads of one process", ranks.len());
            return Err(one(Diagnostic::error(&T0098, what)
                .with_label("mesh", mesh.to_string())
                .with_hint("start the ranks as processes, or use a mesh of one rank")));
        };
        let unprepared = || one(Diagnostic::error(&T0087, "the rank has no configuration of a GPU"));
        let config = prepare_device(&plan.sealed, RunDevice::Cuda, 1)?.ok_or_else(unprepared)?;
        let device = config.find_visible_device(&plan.sealed, rank).map_err(one)?;
        Ok(GpuThread { rank, device, config, arrays: Arc::default() })
    }

    /// Gives the rank the inputs of a call that lie on its GPU.
    ///
    /// # Errors
    /// T0099 for an input that its GPU does not have whole.
    pub(super) fn set_inputs(&self, inputs: &BTreeMap<String, ArrayValues>) -> Result<(), Diagnostics> {
        let (mut own, mut found) = (BTreeMap::new(), Vec::new());
        for (name, values) in inputs {
            let ArrayValues::Device(array) = values else { continue };
            match array.wholes().find(|whole| whole.device() == self.device) {
                Some(whole) => {
                    own.insert(name.clone(), whole.clone());
                }
                None => {
                    let what = format!("GPU {} does not have the whole input `{name}`", self.device);
                    found.push(Diagnostic::error(&T0099, what).with_hint(
                        "distribute it over the mesh of the plan with ReplicateSpec(), or pass gather()",
                    ));
                }
            }
        }
        if !found.is_empty() {
            return Err(found);
        }
        self.arrays.set_inputs(own);
        Ok(())
    }

    /// Returns the outputs of the call that has ended, and forgets its arrays.
    ///
    /// # Errors
    /// T0087 if an output is missing or has another size.
    pub(super) fn take_outputs(
        &self,
        program: &ArrayProgram,
    ) -> Result<BTreeMap<String, ArrayValues>, Diagnostic> {
        let mut outputs = self.arrays.outputs();
        self.arrays.clear();
        let arrays = program.outputs.iter().map(|port| {
            let output = outputs.remove(&port.name).map(|output| output.array);
            match output.filter(|values| values.len() as u64 == port.shape.iter().product::<u64>()) {
                Some(values) => {
                    let array = DeviceArray::from_whole(port.shape.clone(), self.rank.0, values);
                    Ok((port.name.clone(), ArrayValues::Device(array)))
                }
                None => {
                    let what = format!("rank {} did not return `{}`", self.rank, port.name);
                    Err(Diagnostic::error(&T0087, what))
                }
            }
        });
        arrays.collect()
    }
}

/// Refuses inputs in GPU memory, which ranks on CPUs and ranks of other processes do not read.
///
/// # Errors
/// T0099 for every one.
pub(super) fn refuse_device_inputs(inputs: &BTreeMap<String, ArrayValues>) -> Result<(), Diagnostics> {
    let on_device = inputs.iter().filter(|(_, values)| matches!(values, ArrayValues::Device(_)));
    let refused = on_device.map(|(name, _)| {
        let what = format!("the input `{name}` lies in GPU memory, which the ranks of this run do not read");
        Diagnostic::error(&T0099, what).with_hint(
            "pass gather(), or open the session with ranks=\"threads\" and device=\"gpu\" for a plan of one rank",
        )
    });
    let refused: Diagnostics = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(refused) }
}
