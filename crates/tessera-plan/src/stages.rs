//! Splits blocks into pipeline stages: contiguous, complete and balanced by cost.

use tessera_ir::{Program, op_workload};

use crate::ownership::is_media_phase;
use crate::{LogicalModel, MediaPlacement};

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

/// The costs that balance stages: FLOPs of the most expensive phase with blocks.
#[derive(Clone, Copy)]
pub(crate) struct StageCosts {
    blocks: u64,
    block_flops: u64,
    first_flops: u64,
    last_flops: u64,
}

impl StageCosts {
    pub(crate) fn from_model(logical: &LogicalModel) -> StageCosts {
        // Phases of pixels or text have more FLOPs than some generators, and no blocks.
        let with_blocks = logical.phases.iter().filter(|p| flops_at(p, BLOCK) > 0);
        let heaviest = with_blocks.max_by_key(|p| total_flops(p));
        let [block, first_flops, last_flops] =
            [BLOCK, "first", "last"].map(|at| heaviest.map_or(0, |p| flops_at(p, at)));
        StageCosts { blocks: logical.blocks, block_flops: block.max(1), first_flops, last_flops }
    }

    /// Adds the phases of pixels that the first stage runs in each call, as FLOPs per pass through the
    /// blocks ([`pixel_flops_per_pass`]).
    pub(crate) fn with_pixels(self, flops: u64) -> StageCosts {
        StageCosts { first_flops: self.first_flops.saturating_add(flops), ..self }
    }

    /// Returns the number of blocks of each stage, in stage order, balanced by FLOPs.
    pub(crate) fn split_blocks(&self, stages: u64) -> Vec<u64> {
        balance_stages(self.blocks, stages, self.block_flops, self.first_flops, self.last_flops)
    }
}

/// Returns the FLOPs of the phases of pixels in the call with the most of them, divided by the call's
/// passes through the blocks; 0 if no call has any. tp divides the FLOPs of a block. It divides those of
/// pixels unless every rank computes whole pictures, which then count once for each.
pub(crate) fn pixel_flops_per_pass(logical: &LogicalModel, media: MediaPlacement, tp: u32) -> u64 {
    let copies = match media {
        MediaPlacement::Mesh => 1,
        MediaPlacement::Replicas => u64::from(tp),
        MediaPlacement::Leader | MediaPlacement::Outside => return 0,
    };
    let heaviest = logical.phases.iter().map(|p| flops_at(p, BLOCK)).max().unwrap_or(0).max(1);
    let of_call = |(_, names): &(String, Vec<String>)| {
        let phases =
            || logical.phases.iter().flat_map(|p| names.iter().filter(|n| **n == p.name).map(move |_| p));
        let pixels: u64 = phases().filter(|p| is_media_phase(p)).map(total_flops).sum();
        let blocks: u64 = phases().map(|p| flops_at(p, BLOCK)).sum();
        (pixels, (blocks as f64 / heaviest as f64).max(1.0))
    };
    let (pixels, passes) = logical.calls.iter().map(of_call).max_by_key(|(p, _)| *p).unwrap_or((0, 1.0));
    (pixels as f64 / passes) as u64 * copies
}

/// Place of the ops of the first block, which costs as much as the others.
const BLOCK: &str = "block.0";

fn flops_at(p: &Program, at: &str) -> u64 {
    p.ops.iter().filter(|o| o.placement_hint() == Some(at)).map(|o| op_workload(p, o).flops.0).sum()
}

fn total_flops(p: &Program) -> u64 {
    p.ops.iter().map(|o| op_workload(p, o).flops.0).sum()
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
