//! The experts of a weight of array programs in host memory: the array of the calling process, or the file that a rank
//! has mapped. A rank copies single experts out of it.

use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::ExpertBank;
use tessera_weights::WeightSet;

use super::host_array::HostArray;
use crate::codes::T0091;
use crate::shard_copy::ArrayShard;

/// The experts of a weight, as far as they are a rank's.
#[derive(Debug)]
pub(super) struct ArrayExperts {
    pub(super) name: String,
    pub(super) place: ExpertsPlace,
    /// The rank's shard: experts, rows and columns.
    pub(super) shard: ArrayShard,
}

/// Where the whole weight lies.
#[derive(Debug)]
pub(super) enum ExpertsPlace {
    Memory(HostArray),
    File(Arc<WeightSet>),
}

impl ExpertBank for ArrayExperts {
    fn read_rows(&self, expert: u64, first_row: u64, rows: &mut [f32]) -> Result<(), Diagnostic> {
        let ArrayShard { whole, ranges } = &self.shard;
        let wrong = || {
            let message = format!("{} elements from row {first_row} of expert {expert}", rows.len());
            Diagnostic::error(&T0091, message)
                .with_label(format!("`{}`", self.name), format!("has the shard {ranges:?}"))
        };
        let [experts, height, width] = ranges[..] else { return Err(wrong()) };
        let count = (rows.len() as u64).checked_div(width.1).unwrap_or(0);
        if expert >= experts.1 || first_row + count > height.1 || count * width.1 != rows.len() as u64 {
            return Err(wrong());
        }
        let ranges = vec![(experts.0 + expert, 1), (height.0 + first_row, count), width];
        let values = match &self.place {
            ExpertsPlace::Memory(array) => {
                ArrayShard { whole: whole.clone(), ranges }.copy_from(array.values())
            }
            ExpertsPlace::File(set) => {
                let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| start..start + len).collect();
                let values = set.read_f32(&self.name, &ranges)?;
                // The pages would otherwise stay until the process holds the whole weight beside its slots.
                set.release_slice(&self.name, &ranges)?;
                values
            }
        };
        rows.copy_from_slice(&values);
        Ok(())
    }
}
