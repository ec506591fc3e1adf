//! The load of experts that the steps of a run counted, beside what chance alone would give.

use super::divide_std_by_mean;

/// Rows of the experts of one layer over some steps.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CountedLoad {
    /// Choices of each expert, before capacities.
    pub chosen: Vec<f64>,
    /// Rows that each place of an expert computes: choices that it kept, and choices that moved to it.
    pub computed: Vec<f64>,
    /// Mean number of experts that a token chooses.
    pub top_k: f64,
}

/// A place of an expert on a rank. Without copies, an expert has one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CountedPlace {
    /// The rank that computes the rows of this place.
    pub rank: u64,
    /// Its share of the expert: 1 over the number of the expert's places.
    pub share: f64,
}

/// How far loads vary.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoadSpread {
    /// Standard deviation of the loads, divided by their mean; 0 without any load.
    pub std_over_mean: f64,
    /// The expected value of a router that chooses every expert equally often, at random.
    pub by_chance: f64,
}

impl CountedLoad {
    /// Returns the spread of choices over experts.
    #[must_use]
    pub fn expert_spread(&self) -> LoadSpread {
        let each = vec![1.0; self.chosen.len()];
        LoadSpread { std_over_mean: measure_spread(&self.chosen), by_chance: self.spread_by_chance(&each) }
    }

    /// Returns the spread of computed rows over ranks.
    #[must_use]
    pub fn rank_spread(&self, places: &[CountedPlace]) -> LoadSpread {
        let experts = sum_by_rank(places.iter().map(|place| place.share), places);
        let rows = sum_by_rank(self.computed.iter().copied(), places);
        LoadSpread { std_over_mean: measure_spread(&rows), by_chance: self.spread_by_chance(&experts) }
    }

    /// Returns the rows that the busiest rank computes, divided by the mean of ranks; 1 without any row.
    #[must_use]
    pub fn busiest_over_mean(&self, places: &[CountedPlace]) -> f64 {
        let rows = sum_by_rank(self.computed.iter().copied(), places);
        let mean = mean_of(&rows);
        if mean > 0.0 { rows.iter().fold(0.0, |m: f64, x| m.max(*x)) / mean } else { 1.0 }
    }

    /// Returns the expected spread over groups of so many experts each, if a token chooses `top_k` different experts
    /// at random: the rows of a group are then a sum of hypergeometric numbers, one per token.
    fn spread_by_chance(&self, group_sizes: &[f64]) -> f64 {
        let (experts, choices): (f64, f64) = (self.chosen.len() as f64, self.chosen.iter().sum());
        if choices <= 0.0 || experts < 2.0 {
            return 0.0;
        }
        let mean = choices / group_sizes.len() as f64;
        let rest = ((experts - self.top_k) / (experts - 1.0)).max(0.0);
        let square = |size: &f64| {
            let share = size / experts;
            choices * share * (1.0 - share) * rest + (choices * share - mean).powi(2)
        };
        (group_sizes.iter().map(square).sum::<f64>() / group_sizes.len() as f64).sqrt() / mean
    }
}

/// Returns the sum of the numbers of each rank's places.
fn sum_by_rank(of_places: impl Iterator<Item = f64>, places: &[CountedPlace]) -> Vec<f64> {
    let ranks = places.iter().map(|place| place.rank).max().map_or(0, |last| last as usize + 1);
    let mut sums = vec![0.0; ranks];
    for (x, place) in of_places.zip(places) {
        sums[place.rank as usize] += x;
    }
    sums
}

/// Returns the standard deviation of some loads, divided by their mean; 0 without any load.
fn measure_spread(loads: &[f64]) -> f64 {
    let mean = mean_of(loads);
    if mean > 0.0 { divide_std_by_mean(loads, mean) } else { 0.0 }
}

/// Returns the mean of some loads; 0 of none.
fn mean_of(loads: &[f64]) -> f64 {
    loads.iter().sum::<f64>() / loads.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use tessera_base::random::Rng;

    use super::*;

    fn count_choices(chosen: &[f64], top_k: f64) -> CountedLoad {
        CountedLoad { chosen: chosen.to_vec(), computed: chosen.to_vec(), top_k }
    }

    fn whole_experts(ranks: &[u64]) -> Vec<CountedPlace> {
        ranks.iter().map(|rank| CountedPlace { rank: *rank, share: 1.0 }).collect()
    }

    #[test]
    fn even_loads_have_no_spread_and_one_full_expert_has_the_largest() {
        assert_eq!(count_choices(&[3.0; 8], 1.0).expert_spread().std_over_mean, 0.0);
        let one = count_choices(&[12.0, 0.0, 0.0, 0.0], 1.0);
        // The deviations are 9 and three times −3 around a mean of 3.
        assert!((one.expert_spread().std_over_mean - 3.0_f64.sqrt()).abs() < 1e-12);
        assert_eq!(one.rank_spread(&whole_experts(&[0, 0, 1, 1])).std_over_mean, 1.0);
        assert_eq!(one.busiest_over_mean(&whole_experts(&[0, 0, 1, 1])), 2.0);
        let none = CountedLoad::default();
        assert_eq!((none.expert_spread(), none.busiest_over_mean(&[])), (LoadSpread::default(), 1.0));
    }

    #[test]
    fn copies_of_an_expert_share_it() {
        // The first expert has a place on each rank, so each rank has one and a half experts, and chance evens out.
        let place = |rank, share| CountedPlace { rank, share };
        let places = [place(0, 0.5), place(0, 1.0), place(1, 0.5), place(1, 1.0)];
        let load =
            CountedLoad { computed: vec![6.0, 2.0, 6.0, 2.0], ..count_choices(&[12.0, 2.0, 2.0], 1.0) };
        let spread = load.rank_spread(&places);
        assert_eq!((spread.std_over_mean, load.busiest_over_mean(&places)), (0.0, 1.0));
        // 16 choices that fall on either rank with equal probability: a variance of 4 around a mean of 8.
        assert!((spread.by_chance - 0.25).abs() < 1e-12, "{spread:?}");
    }

    // Capacities act on what experts compute and not on what tokens choose.
    #[test]
    fn ranks_vary_by_the_rows_that_they_compute() {
        let load =
            CountedLoad { computed: vec![4.0, 4.0, 2.0, 2.0], ..count_choices(&[9.0, 1.0, 1.0, 1.0], 1.0) };
        assert!((load.rank_spread(&whole_experts(&[0, 0, 1, 1])).std_over_mean - 1.0 / 3.0).abs() < 1e-12);
        assert!((load.busiest_over_mean(&whole_experts(&[0, 0, 1, 1])) - 4.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn the_spread_by_chance_is_that_of_random_choices() {
        // Experts, choices per token, tokens, and uneven ranks.
        for (experts, k, tokens, ranks) in [(8_usize, 2_usize, 200, 2_u64), (32, 4, 64, 3), (5, 1, 1000, 5)] {
            let expert_ranks: Vec<u64> = (0..experts as u64).map(|e| e * ranks / experts as u64).collect();
            let mut d = Rng::new(7, [experts as u32, 0]);
            let (mut of_experts, mut of_ranks, mut expected) = (0.0, 0.0, (0.0, 0.0));
            let runs = 200;
            for _ in 0..runs {
                let mut chosen = vec![0.0; experts];
                for _ in 0..tokens {
                    let mut order: Vec<usize> = (0..experts).collect();
                    for i in 0..k {
                        order.swap(i, i + d.next_below(experts - i));
                        chosen[order[i]] += 1.0;
                    }
                }
                let load = count_choices(&chosen, k as f64);
                let (e, r) = (load.expert_spread(), load.rank_spread(&whole_experts(&expert_ranks)));
                // Variances add up, so their mean is compared.
                of_experts += e.std_over_mean.powi(2) / f64::from(runs);
                of_ranks += r.std_over_mean.powi(2) / f64::from(runs);
                expected = (e.by_chance, r.by_chance);
            }
            let near = |found: f64, want: f64| (found.sqrt() / want - 1.0).abs() < 0.08;
            assert!(
                near(of_experts, expected.0),
                "{experts}: {} by chance {}",
                of_experts.sqrt(),
                expected.0
            );
            assert!(near(of_ranks, expected.1), "{experts}: {} by chance {}", of_ranks.sqrt(), expected.1);
        }
    }
}
