//! Cutting blocks into stages: contiguous, complete, and balanced by cost.

use tessera_ir::{Program, cost};

use crate::Logical;

/// Blocks per stage so that the costliest stage is as cheap as can be. `before` and `after` are the costs of
/// what the first and last stage do besides blocks, in the unit of `block`, the cost of one block.
#[must_use]
pub fn balance(blocks: u64, stages: u64, block: u64, before: u64, after: u64) -> Vec<u64> {
    let extra = |s: u64| u64::from(s == 0) * before + u64::from(s + 1 == stages) * after;
    // Give each block to the stage that is cheapest with it; ties go to the earlier stage. Blocks are equal, so
    // counts are all that matters, and the greedy choice is optimal for the maximum.
    let mut counts = vec![1; stages as usize];
    for _ in stages..blocks {
        let cheapest = (0..stages).min_by_key(|s| (counts[*s as usize] + 1) * block + extra(*s));
        if let Some(s) = cheapest {
            counts[s as usize] += 1;
        }
    }
    counts
}

/// What stages are balanced by: flops of the costliest phase.
pub(crate) struct Weights {
    blocks: u64,
    block: u64,
    first: u64,
    last: u64,
}

impl Weights {
    pub(crate) fn of(logical: &Logical) -> Weights {
        let of = |p: &Program, at: &str| -> u64 {
            p.ops.iter().filter(|o| o.str("at") == Some(at)).map(|o| cost(p, o).flops.0).sum()
        };
        let heaviest =
            logical.phases.iter().max_by_key(|p| p.ops.iter().map(|o| cost(p, o).flops.0).sum::<u64>());
        let [block, first, last] = ["block.0", "first", "last"].map(|at| heaviest.map_or(0, |p| of(p, at)));
        Weights { blocks: logical.blocks, block: block.max(1), first, last }
    }

    /// Blocks per stage.
    pub(crate) fn cut(&self, stages: u64) -> Vec<u64> {
        balance(self.blocks, stages, self.block, self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_and_balanced() {
        assert_eq!(balance(40, 2, 10, 0, 0), [20, 20]);
        assert_eq!(balance(3, 2, 10, 1, 2), [2, 1]);
        assert_eq!(balance(30, 3, 10, 25, 0), [8, 11, 11]);
        for (blocks, stages) in [(5, 5), (7, 3), (30, 4)] {
            assert_eq!(balance(blocks, stages, 7, 3, 2).iter().sum::<u64>(), blocks);
        }
    }
}
