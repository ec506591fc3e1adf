//! The shape of this host: what a measured time depends on besides the build and the plan.

use tessera_report::record::RunDevice;

use crate::gpus::GpuDiscovery;
use crate::host_identity::text_or_unknown;
use crate::system;

/// Describes the processors that a run on `device` uses, such as `2 cores of AMD EPYC 7B13` or
/// `8 x NVIDIA H200`. Hosts of equal shape have equal texts.
#[must_use]
pub fn describe_machine(device: RunDevice) -> String {
    match device {
        RunDevice::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            format!("{cores} cores of {}", cpu_model())
        }
        RunDevice::Sim => "a simulated machine".to_string(),
        RunDevice::Cuda => {
            let names: Vec<String> = match GpuDiscovery::discover().devices {
                Ok(found) => found.gpus.into_iter().map(|gpu| gpu.name).collect(),
                Err(_) => Vec::new(),
            };
            describe_gpus(&names)
        }
    }
}

/// Counts neighbours of equal name: the order of the GPUs is part of the shape.
fn describe_gpus(names: &[String]) -> String {
    let runs = names.chunk_by(|a, b| a == b).map(|run| format!("{} x {}", run.len(), run[0]));
    runs.collect::<Vec<_>>().join(", ")
}

/// Returns the model name of the first CPU; `unknown` if the operating system does not report it.
pub(crate) fn cpu_model() -> String {
    text_or_unknown(system::cpu_model())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_gpus_are_counted_in_their_order() {
        let names = ["H200", "H200", "L4", "H200"].map(String::from);
        assert_eq!(describe_gpus(&names), "2 x H200, 1 x L4, 1 x H200");
        assert_eq!(describe_gpus(&[]), "");
    }
}
