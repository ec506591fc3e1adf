//! Routers that prefer near experts, and batches grouped by sequence length.

/// Returns the share of a token's experts outside its own sub-group when the router subtracts
/// `penalty` from the logits of those experts. Logits are independent Gumbel deviates with the
/// given `scale`, so that without a penalty all selections are equally likely.
///
/// `local` of the `experts` experts lie in the sub-group. The sub-group is a choice (a tray, an ep
/// group): within one switch domain no expert is nearer than another. A penalty in the gate and a
/// penalty in its training loss add up; pass their sum.
#[must_use]
pub fn remote_share(experts: u64, top_k: u64, local: u64, penalty: f64, scale: f64) -> f64 {
    let (local, top_k) = (local.min(experts), top_k.min(experts) as usize);
    if top_k == 0 {
        return 0.0;
    }
    let weight = (-penalty / scale.max(1e-12)).exp();
    // Probabilities of having selected so many local experts: selecting the top k of penalised
    // Gumbel logits equals drawing one after another by weight.
    let mut chosen = vec![0.0; top_k + 1];
    chosen[0] = 1.0;
    for picks in 0..top_k {
        for own in (0..=picks).rev() {
            let near = local.saturating_sub(own as u64) as f64;
            let far = (experts - local).saturating_sub((picks - own) as u64) as f64 * weight;
            let chance = if near + far > 0.0 { near / (near + far) } else { 0.0 };
            chosen[own + 1] += chosen[own] * chance;
            chosen[own] *= 1.0 - chance;
        }
    }
    let own: f64 = chosen.iter().enumerate().map(|(n, p)| n as f64 * p).sum();
    1.0 - own / top_k as f64
}

/// A sequence of a batch; ranks exchange its tokens to reach the selected experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeItem {
    /// Length of the sequence in tokens, before padding.
    pub tokens: u64,
    /// Kind of the sequence, for example prompt or decode. [`ExchangeRounds::by_length_class`]
    /// never mixes kinds in an exchange.
    pub kind: u32,
}

/// Exchanges of at most one sequence per rank each, padded to the longest sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeRounds {
    /// One list per exchange: the positions of its sequences in the batch.
    pub rounds: Vec<Vec<usize>>,
}

impl ExchangeRounds {
    /// Fills each exchange with the next `ranks` sequences of the batch, whatever their kinds and
    /// lengths.
    #[must_use]
    pub fn in_order(items: &[ExchangeItem], ranks: usize) -> ExchangeRounds {
        let all: Vec<usize> = (0..items.len()).collect();
        ExchangeRounds { rounds: all.chunks(ranks.max(1)).map(<[usize]>::to_vec).collect() }
    }

    /// Fills exchanges by kind and length class: class c holds lengths up to `classes[c]`, and a
    /// last class holds the rest. Shorter classes come first; within a class, sequences keep their
    /// order.
    #[must_use]
    pub fn by_length_class(items: &[ExchangeItem], ranks: usize, classes: &[u64]) -> ExchangeRounds {
        let class = |i: usize| classes.iter().filter(|c| items[i].tokens > **c).count();
        let mut all: Vec<usize> = (0..items.len()).collect();
        all.sort_by_key(|i| (class(*i), items[*i].kind, *i));
        let alike = |a: &usize, b: &usize| class(*a) == class(*b) && items[*a].kind == items[*b].kind;
        let rounds =
            all.chunk_by(alike).flat_map(|b| b.chunks(ranks.max(1)).map(<[usize]>::to_vec)).collect();
        ExchangeRounds { rounds }
    }

    /// Returns the longest time that any sequence waits for its exchange beyond its own tokens.
    #[must_use]
    pub fn longest_wait_ns(&self, items: &[ExchangeItem], ns_per_token: f64) -> f64 {
        let wait = |round: &Vec<usize>| {
            let tokens = round.iter().map(|i| items[*i].tokens);
            tokens.clone().max().unwrap_or(0) - tokens.min().unwrap_or(0)
        };
        self.rounds.iter().map(wait).max().unwrap_or(0) as f64 * ns_per_token
    }

    /// Returns the time of all exchanges one after another; each takes as long as its longest
    /// sequence.
    #[must_use]
    pub fn total_ns(&self, items: &[ExchangeItem], ns_per_token: f64) -> f64 {
        let longest = |round: &Vec<usize>| round.iter().map(|i| items[*i].tokens).max().unwrap_or(0);
        self.rounds.iter().map(longest).sum::<u64>() as f64 * ns_per_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_base::random::Rng;

    #[test]
    fn penalty_lowers_the_remote_share() {
        let share = |penalty| remote_share(256, 8, 32, penalty, 1.0);
        assert!((share(0.0) - 7.0 / 8.0).abs() < 1e-12);
        let falling: Vec<f64> = [0.0, 0.05, 0.2, 1.0, 3.0, 10.0].map(share).to_vec();
        assert!(falling.windows(2).all(|w| w[1] < w[0]) && falling[5] < 1e-3, "{falling:?}");
        assert_eq!(remote_share(8, 2, 8, 1.0, 1.0), 0.0);

        // Compares with sampled logits of which the top k are selected.
        let mut dice = Rng::new(3, [9, 0]);
        let (mut remote, tokens) = (0, 4000);
        for _ in 0..tokens {
            let mut logits: Vec<(f64, usize)> = (0..64)
                .map(|e| {
                    let u = (f64::from(dice.next_u32()) + 0.5) / 4_294_967_296.0;
                    (-(-u.ln()).ln() - if e < 16 { 0.0 } else { 1.0 }, e)
                })
                .collect();
            logits.sort_by(|a, b| b.0.total_cmp(&a.0));
            remote += logits[..4].iter().filter(|l| l.1 >= 16).count();
        }
        let drawn = remote as f64 / f64::from(4 * tokens);
        let closed = remote_share(64, 4, 16, 1.0, 1.0);
        assert!((drawn - closed).abs() < 0.01, "{drawn} {closed}");
    }

    #[test]
    fn length_classes_shorten_waits() {
        let mut dice = Rng::new(1, [2, 0]);
        let items: Vec<ExchangeItem> =
            (0..64).map(|i| ExchangeItem { tokens: 1 + dice.next_below(4096) as u64, kind: i % 2 }).collect();
        let (mixed, sorted) = (
            ExchangeRounds::in_order(&items, 8),
            ExchangeRounds::by_length_class(&items, 8, &[512, 1024, 2048]),
        );
        assert!(sorted.longest_wait_ns(&items, 1.0) < mixed.longest_wait_ns(&items, 1.0));
        assert!(sorted.longest_wait_ns(&items, 1.0) <= 2048.0);
        for round in &sorted.rounds {
            assert!(round.len() <= 8 && round.iter().all(|i| items[*i].kind == items[round[0]].kind));
        }
        let mut places: Vec<usize> = sorted.rounds.concat();
        places.sort_unstable();
        assert_eq!(places, (0..64).collect::<Vec<_>>(), "each sequence has one exchange");
    }
}
