//! The table that a run writes for a layer whose experts lie in two tiers: the matrices to copy, and where each expert lies.
//! The kernel that copies and the one that multiplies read it.

use tessera_device::{AheadRequest, ExpertPools, LayerTransfers, PooledExpert};

/// Words of a copy: the address of the matrix, that of its slot, and its units of [`UNIT_BYTES`].
const COPY_WORDS: usize = 3;

/// Bytes that a thread copies at once.
const UNIT_BYTES: u64 = 16;

/// Where the experts of a weight lie: all in host memory, and some in the slots of a pool, each `stride` bytes behind the
/// one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BankAddresses {
    pub(super) host: u64,
    pub(super) pool: u64,
    pub(super) stride: u64,
}

impl BankAddresses {
    fn of_expert(&self, expert: usize) -> u64 {
        self.host + expert as u64 * self.stride
    }

    fn of_slot(&self, slot: usize) -> u64 {
        self.pool + slot as u64 * self.stride
    }
}

/// The places in a layer's table, in words of 8 bytes: the copies that the layer waits for, those that it requests ahead,
/// each with their number in front, and the addresses of the experts of each weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableLayout {
    /// The most copies of each kind.
    pub(super) fetches: usize,
    pub(super) ahead: usize,
    pub(super) weights: usize,
    /// Experts of the rank.
    pub(super) experts: usize,
}

impl TableLayout {
    pub(super) fn ahead_word(&self) -> usize {
        1 + COPY_WORDS * self.fetches
    }

    /// Returns the first word of the addresses of a weight of the layer.
    pub(super) fn address_word(&self, weight: usize) -> usize {
        self.ahead_word() + 1 + COPY_WORDS * self.ahead + weight * self.experts
    }

    pub(super) fn word_count(&self) -> usize {
        self.address_word(self.weights)
    }
}

/// What a run of a layer did. Experts count from the first of the rank.
#[derive(Debug)]
pub(super) struct DecidedRun {
    pub(super) layer: usize,
    pub(super) counts: LayerTransfers,
    /// The experts that the layer waited for.
    pub(super) fetched: Vec<usize>,
    /// The experts that it requested for others.
    pub(super) ahead: Vec<AheadRequest>,
}

/// The decisions of a rank. Host functions of its streams change them during a run, and its own thread between runs.
#[derive(Debug, Default)]
pub(super) struct TierDecisions {
    pub(super) pools: ExpertPools,
    /// The weights of each layer.
    pub(super) banks: Vec<Vec<BankAddresses>>,
    /// What the current run has decided so far.
    pub(super) runs: Vec<DecidedRun>,
}

impl TierDecisions {
    /// Decides a run of a layer that uses the experts `needed`, ascending, and returns its table.
    ///
    /// A layer that uses more experts than its pools have slots evicts some of them again. Such an expert never enters its
    /// slot: the kernel reads it in host memory, once for every 8 rows. Several passes over the experts would need a
    /// launch for each, whether the run has that many experts or not.
    pub(super) fn decide_run(&mut self, layer: usize, needed: &[usize], layout: &TableLayout) -> Vec<u64> {
        let start = self.pools.start_layer(layer, needed);
        let mut words = vec![0; layout.word_count()];
        let stays = |expert: usize, slot: usize| self.pools.holders(layer)[slot] == Some(expert);
        let fetched = start.fetched.into_iter().filter(|p| stays(p.expert, p.slot)).collect::<Vec<_>>();
        push_copies(&mut words, &self.banks[layer], &fetched);
        for (weight, bank) in self.banks[layer].iter().enumerate() {
            for expert in 0..layout.experts {
                let slot = self.pools.find_slot(layer, expert);
                words[layout.address_word(weight) + expert] =
                    slot.map_or_else(|| bank.of_expert(expert), |slot| bank.of_slot(slot));
            }
        }
        let mut ahead = self.pools.request_ahead(layer, false);
        let counts = self.pools.end_layer(layer);
        ahead.extend(self.pools.request_ahead(layer, true));
        for request in &ahead {
            push_copies(&mut words[layout.ahead_word()..], &self.banks[request.layer], &request.fetched);
        }
        let fetched = fetched.into_iter().map(|pooled| pooled.expert).collect();
        self.runs.push(DecidedRun { layer, counts, fetched, ahead });
        words
    }
}

/// Appends the copies of experts, of each weight, to a list that begins with the number of its copies.
fn push_copies(list: &mut [u64], banks: &[BankAddresses], experts: &[PooledExpert]) {
    for (bank, pooled) in banks.iter().flat_map(|bank| experts.iter().map(move |pooled| (bank, pooled))) {
        let at = 1 + COPY_WORDS * list[0] as usize;
        let units = bank.stride / UNIT_BYTES;
        list[at..at + COPY_WORDS].copy_from_slice(&[
            bank.of_expert(pooled.expert),
            bank.of_slot(pooled.slot),
            units,
        ]);
        list[0] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{DType, EvictionPolicy, ExpertTier, Type};

    /// Layers of two weights with 4 experts of 64 and 32 bytes each.
    fn make_decisions(layers: u64, resident: u64, window: u64) -> TierDecisions {
        let mut own = TierDecisions::default();
        for layer in 0..layers {
            let tier = ExpertTier { layer, resident, window, policy: EvictionPolicy::Lru };
            let mut banks = Vec::new();
            for (weight, rows) in [4, 2].into_iter().enumerate() {
                own.pools.add_weight("p", tier, &Type::new(DType::F32, [4, rows, 4]), 0);
                let base = 10_000 * (layer + 1) + 1000 * weight as u64;
                banks.push(BankAddresses { host: base, pool: base + 500, stride: 16 * rows });
            }
            own.banks.push(banks);
        }
        own
    }

    fn read_list(words: &[u64]) -> Vec<(u64, u64, u64)> {
        let copies = words[1..].chunks(COPY_WORDS).take(words[0] as usize);
        copies.map(|copy| (copy[0], copy[1], copy[2])).collect()
    }

    fn read_addresses<'a>(words: &'a [u64], layout: &TableLayout) -> [&'a [u64]; 2] {
        [0, 1].map(|weight| &words[layout.address_word(weight)..][..layout.experts])
    }

    #[test]
    fn missing_experts_are_copied_and_found_in_their_slots() {
        let layout = TableLayout { fetches: 4, ahead: 4, weights: 2, experts: 4 };
        let mut own = make_decisions(1, 2, 1);
        let words = own.decide_run(0, &[1, 3], &layout);
        let expected = [(10_064, 10_500, 4), (10_192, 10_564, 4), (11_032, 11_500, 2), (11_096, 11_532, 2)];
        assert_eq!(read_list(&words), expected);
        let in_host = [10_000, 10_500, 10_128, 10_564];
        assert_eq!(read_addresses(&words, &layout), [&in_host[..], &[11_000, 11_500, 11_064, 11_532]]);
        let again = own.decide_run(0, &[1, 3], &layout);
        assert!(read_list(&again).is_empty());
        assert_eq!(read_addresses(&again, &layout), read_addresses(&words, &layout));
        let [first, second] = &own.runs[..] else { panic!("two runs") };
        assert_eq!((first.fetched.as_slice(), first.counts.stalls), (&[1, 3][..], 2));
        assert_eq!((second.fetched.len(), second.counts.hits), (0, 2));
    }

    #[test]
    fn an_expert_that_its_run_evicts_again_stays_in_host_memory() {
        let layout = TableLayout { fetches: 2, ahead: 2, weights: 2, experts: 4 };
        let mut own = make_decisions(1, 1, 1);
        let words = own.decide_run(0, &[0, 1, 2], &layout);
        assert_eq!(read_list(&words), [(10_128, 10_500, 4), (11_064, 11_500, 2)]);
        assert_eq!(read_addresses(&words, &layout)[0], [10_000, 10_064, 10_500, 10_192]);
        assert_eq!((own.runs[0].fetched.as_slice(), own.runs[0].counts.stalls), (&[2][..], 3));
        // The likeliest expert of the next run takes the slot after this one.
        assert_eq!(read_list(&words[layout.ahead_word()..]), [(10_000, 10_500, 4), (11_000, 11_500, 2)]);
        // The next run uses it, but 3 takes its slot.
        let words = own.decide_run(0, &[0, 3], &layout);
        assert_eq!(read_list(&words), [(10_192, 10_500, 4), (11_096, 11_500, 2)]);
        assert_eq!(read_addresses(&words, &layout)[0], [10_000, 10_064, 10_128, 10_500]);
        assert_eq!((own.runs[1].counts.hits, own.runs[1].counts.stalls), (1, 1));
    }

    #[test]
    fn a_layer_requests_experts_of_the_next_run_of_another() {
        let layout = TableLayout { fetches: 4, ahead: 4, weights: 2, experts: 4 };
        let mut own = make_decisions(2, 2, 1);
        for needed in [&[0, 1][..], &[0, 2], &[0, 1, 2]] {
            own.decide_run(0, needed, &layout);
        }
        // All three were used last. The slots hold 1 and 2, and 0 and 1 are the likeliest, as they have lower numbers.
        assert_eq!(own.pools.holders(0), [Some(1), Some(2)]);
        let words = own.decide_run(1, &[3], &layout);
        assert_eq!(read_list(&words[layout.ahead_word()..]), [(10_000, 10_564, 4), (11_000, 11_532, 2)]);
        let last = own.runs.last().map(|run| (run.layer, run.ahead[0].layer, run.ahead[0].fetched[0].expert));
        assert_eq!(last, Some((1, 0, 0)));
        let words = own.decide_run(0, &[0, 1], &layout);
        assert!(read_list(&words).is_empty());
        assert_eq!(read_addresses(&words, &layout)[0], [10_564, 10_500, 10_128, 10_192]);
    }
}
