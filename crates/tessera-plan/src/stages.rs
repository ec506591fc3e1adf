//! Splits blocks into pipeline stages: contiguous, complete and balanced by cost.

use tessera_ir::{Program, op_workload};

use crate::LogicalModel;

/// Returns the blocks per stage that minimise the cost of the most expensive stage. `before` and
/// `after` are the costs of the first and last stage besides their blocks, in the unit of `block`,
/// the cost of one block.
#[must_use]
pub fn balance_stages(blocks: u64, stages: u64, block: u64, before: u64, after: u64) -> Vec<u64> {
    let extra = |s: u64| u64::from(s == 0) * before + u64::from(s + 1 == stages) * after;
    // Each block goes to the stage that is cheapest with it; ties go to the earlier stage. Blocks
    // have equal costs, so only counts matter, and the greedy choice is optimal for the maximum.
    let mut counts = vec![1; stages as usize];
    for _ in stages..blocks {
        let cheapest = (0..stages).min_by_key(|s| (counts[*s as usize] + 1) * block + extra(*s));
        if let Some(s) = cheapest {
            counts[s as usize] += 1;
        }
    }
    counts
}

/// The costs that balance stages: FLOPs of the most expensive phase.
pub(crate) struct StageCosts {
    blocks: u64,
    block_flops: u64,
    first_flops: u64,
    last_flops: u64,
}

impl StageCosts {
    pub(crate) fn from_model(logical: &LogicalModel) -> StageCosts {
        let flops_at = |p: &Program, at: &str| -> u64 {
            p.ops.iter().filter(|o| o.placement_hint() == Some(at)).map(|o| op_workload(p, o).flops.0).sum()
        };
        let heaviest = logical
            .phases
            .iter()
            .max_by_key(|p| p.ops.iter().map(|o| op_workload(p, o).flops.0).sum::<u64>());
        let [block, first_flops, last_flops] =
            ["block.0", "first", "last"].map(|at| heaviest.map_or(0, |p| flops_at(p, at)));
        StageCosts { blocks: logical.blocks, block_flops: block.max(1), first_flops, last_flops }
    }

    /// Returns the number of blocks of each stage, in stage order, balanced by FLOPs.
    pub(crate) fn split_blocks(&self, stages: u64) -> Vec<u64> {
        balance_stages(self.blocks, stages, self.block_flops, self.first_flops, self.last_flops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: V-08
    #[test]
    fn complete_and_balanced() {
        assert_eq!(balance_stages(40, 2, 10, 0, 0), [20, 20]);
        assert_eq!(balance_stages(3, 2, 10, 1, 2), [2, 1]);
        assert_eq!(balance_stages(30, 3, 10, 25, 0), [8, 11, 11]);
        for (blocks, stages) in [(5, 5), (7, 3), (30, 4)] {
            assert_eq!(balance_stages(blocks, stages, 7, 3, 2).iter().sum::<u64>(), blocks);
        }
    }
}
