//! Placement of experts by popularity: the hottest experts are replicated, and the copies are
//! packed onto ranks so that loads are even.

use super::{ExpertLoad, divide_std_by_mean};

/// Which rank holds which experts, when popular experts have several copies.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertPlacement {
    /// Expert numbers of each rank; the numbers of copies per rank differ by at most one.
    pub ranks: Vec<Vec<usize>>,
    /// Number of copies of each expert; tokens are distributed evenly over them.
    pub copies: Vec<usize>,
}

impl ExpertPlacement {
    /// Returns the load of each rank: the sum of the token shares of its copies.
    #[must_use]
    pub fn rank_loads(&self, popularity: &[f64]) -> Vec<f64> {
        let copy_load = |e: &usize| popularity[*e] / self.copies[*e] as f64;
        self.ranks.iter().map(|experts| experts.iter().map(copy_load).sum()).collect()
    }
}

/// Places `slots` copies of experts (at least one of each) over `ranks` ranks of `nodes` nodes,
/// which must divide the ranks.
///
/// The placement takes three greedy steps. First, whole experts are packed onto nodes, heaviest
/// first, each onto the lightest node with room. Second, every further slot of a node copies the
/// expert with the most loaded copies. Third, the copies of a node are packed onto its ranks in the
/// same way. Ties go to the lower number. With one node the first step does nothing. Fewer slots
/// than experts count as one slot per expert.
#[must_use]
pub fn rebalance_experts(popularity: &[f64], slots: usize, ranks: usize, nodes: usize) -> ExpertPlacement {
    let (experts, ranks) = (popularity.len(), ranks.max(1));
    let nodes = if nodes > 0 && ranks.is_multiple_of(nodes) { nodes } else { 1 };
    let slots = slots.max(experts);
    let all: Vec<(usize, f64)> = popularity.iter().copied().enumerate().collect();
    let mut placement = ExpertPlacement { ranks: vec![Vec::new(); ranks], copies: vec![1; experts] };
    for (node, own) in pack_bins(&all, nodes).into_iter().enumerate() {
        let per_node = slots / nodes + usize::from(node < slots % nodes);
        for _ in own.len()..per_node {
            let load = |e: usize| popularity[e] / placement.copies[e] as f64;
            let heaviest = own.iter().copied().reduce(|a, b| if load(b) > load(a) { b } else { a });
            if let Some(e) = heaviest {
                placement.copies[e] += 1;
            }
        }
        let copies: Vec<(usize, f64)> = own
            .iter()
            .flat_map(|e| {
                let n = placement.copies[*e];
                std::iter::repeat_n((*e, popularity[*e] / n as f64), n)
            })
            .collect();
        for (i, bin) in pack_bins(&copies, ranks / nodes).into_iter().enumerate() {
            placement.ranks[node * (ranks / nodes) + i] = bin;
        }
    }
    placement
}

/// Packs items, heaviest first, each into the lightest bin with room; bins differ by at most one
/// item.
fn pack_bins(items: &[(usize, f64)], bins: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|a, b| items[*b].1.total_cmp(&items[*a].1).then(a.cmp(b)));
    let (room, mut spare) = (items.len() / bins, items.len() % bins);
    let mut loads = vec![0.0; bins];
    let mut contents = vec![Vec::new(); bins];
    for i in order {
        let open = |b: &usize| contents[*b].len() < room || (contents[*b].len() == room && spare > 0);
        let lightest = (0..bins).filter(open).reduce(|a, b| if loads[b] < loads[a] { b } else { a });
        if let Some(b) = lightest {
            spare -= usize::from(contents[b].len() == room);
            loads[b] += items[i].1;
            contents[b].push(items[i].0);
        }
    }
    contents
}

/// Returns the load of one batch under a placement from popularity alone, without variance of
/// counts and without a capacity. `popularity` adds up to `top_k`.
#[must_use]
pub fn placement_load(placement: &ExpertPlacement, popularity: &[f64], tokens: f64) -> ExpertLoad {
    let loads = placement.rank_loads(popularity);
    let top_k: f64 = popularity.iter().sum();
    let ep = loads.len() as f64;
    let mean = top_k / ep;
    if mean <= 0.0 || tokens.is_nan() || tokens <= 0.0 {
        return ExpertLoad::NONE;
    }
    let slowest = (0..loads.len()).reduce(|a, b| if loads[b] > loads[a] { b } else { a }).unwrap_or(0);
    let touched = |e: &usize| (tokens * popularity[*e] / placement.copies[*e] as f64).min(1.0);
    let missed = |load: &f64| (1.0 - (load / top_k).min(1.0)).powf(top_k);
    let reached: f64 = loads.iter().map(|l| 1.0 - missed(l)).sum();
    let even = top_k / popularity.len() as f64;
    ExpertLoad {
        slowest_over_mean: loads[slowest] / mean,
        dropped: 0.0,
        mean_rows: tokens * mean,
        active_experts: placement.ranks[slowest].iter().map(touched).sum(),
        remote_copies: reached * (ep - 1.0) / ep,
        busiest_over_mean: ((1.0 - missed(&loads[slowest])) * ep / reached).max(1.0),
        std_over_mean: divide_std_by_mean(popularity, even),
        rank_std_over_mean: divide_std_by_mean(&loads, mean),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heaviest_expert_goes_to_the_lightest_rank_with_room() {
        // Expected: 9→0, 8→1, 7→1 (rank 1 with 8 is lighter than rank 0 with 9), 5→0, 4→0 (14 is
        // lighter than 15), which fills rank 0 with three, and 1→1.
        let p = rebalance_experts(&[9.0, 1.0, 8.0, 7.0, 5.0, 4.0], 6, 2, 1);
        assert_eq!(p.ranks, [vec![0, 4, 5], vec![2, 3, 1]]);
        assert_eq!(p.copies, [1; 6]);
    }

    #[test]
    fn extra_slots_copy_the_heaviest_expert() {
        // 12 is halved to 6; 7 is then the heaviest and halved to 3.5; the next would be 6 again.
        // Copies in order of weight: 6, 6, 5, 3.5, 3.5, 2 → 6|6, 5→0 (the lower rank wins a tie),
        // 3.5→1, 3.5→1 (9.5 < 11), 2→0.
        let p = rebalance_experts(&[12.0, 7.0, 5.0, 2.0], 6, 2, 1);
        assert_eq!(p.copies, [2, 2, 1, 1]);
        assert_eq!(p.ranks, [vec![0, 2, 3], vec![0, 1, 1]]);
        assert_eq!(p.rank_loads(&[12.0, 7.0, 5.0, 2.0]), [13.0, 13.0]);
    }

    #[test]
    fn copies_stay_in_the_node_of_their_expert() {
        // Nodes first: 10→0, 9→1, 3→1 (9 < 10), 2→0: 12 and 12. Each node has one further slot: 10
        // and 9 are copied.
        let p = rebalance_experts(&[10.0, 2.0, 9.0, 3.0], 6, 4, 2);
        assert_eq!(p.copies, [2, 1, 2, 1]);
        assert_eq!(p.ranks, [vec![0, 1], vec![0], vec![2, 3], vec![2]]);
    }

    #[test]
    fn copies_even_out_what_order_alone_cannot() {
        let popularity =
            crate::moe::expert_popularity(256, 8, 32, 4096.0, crate::moe::Routing::PowerLaw(1.2), 0);
        let slowest = |p: &ExpertPlacement| placement_load(p, &popularity, 4096.0).slowest_over_mean;
        let ranks = (0..32).map(|r| (8 * r..8 * (r + 1)).collect()).collect();
        let plain = slowest(&ExpertPlacement { ranks, copies: vec![1; 256] });
        let packed = slowest(&rebalance_experts(&popularity, 256, 32, 1));
        let copied = slowest(&rebalance_experts(&popularity, 288, 32, 1));
        assert!(
            plain > 2.0 && packed < plain && copied < 1.1 && copied < packed,
            "{plain} {packed} {copied}"
        );
        let all: Vec<usize> = rebalance_experts(&popularity, 288, 32, 1).ranks.iter().map(Vec::len).collect();
        assert_eq!(all, [9; 32]);
    }
}
