//! Fetches of experts that lie in the second tier of memory: how many of them a call is expected to miss, and how long
//! their layer waits for them.

use std::collections::BTreeMap;

use tessera_ir::{ExpertTier, OpView, Opcode, Program, ValueId, views};
use tessera_mesh::MemoryTier;

use crate::MachineModel;
use crate::moe::{Routing, count_cold_experts};

/// The expected fetch of a layer whose experts lie in two tiers of memory, on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertFetch {
    /// Index of the first op that reads experts of the layer, which waits for the fetch.
    pub reader: usize,
    /// Expected number of different experts that a call uses and the rank does not hold.
    pub experts: f64,
    /// Bytes of these experts over all weights of the layer.
    pub bytes: f64,
    /// Time of the transfer from the second tier, in nanoseconds.
    pub ns: f64,
}

/// Returns the fetch of each layer that misses an expert in a call, in the order of their readers. There is none for a
/// layer whose experts are all resident.
///
/// The price of a grouped matmul assumes no routing, only the largest number of rows that a call can have. The price of
/// a fetch assumes these rows too, and that every expert is equally likely ([`Routing::Random`]). Earlier calls then say
/// nothing about the next one: under any policy a rank holds experts that the call uses no more often than others, and no
/// window hides a fetch. It begins when the routing of the call is known, and brings all weights of the layer at once.
#[must_use]
pub fn price_expert_fetches(machine: &MachineModel, program: &Program) -> Vec<ExpertFetch> {
    let defs = program.defining_ops();
    let maker = |v: ValueId| defs.get(v.0 as usize).copied().flatten().map(|at| &program.ops[at]);
    let mut layers: BTreeMap<u64, ExpertFetch> = BTreeMap::new();
    for (reader, op) in program.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::GroupedMatmul) {
        let Ok(OpView::GroupedMatmul(v)) = op.view() else { continue };
        let Some(tier) = maker(v.w).and_then(tessera_ir::Op::expert_tier) else { continue };
        let fetch = layers.entry(tier.layer).or_insert_with(|| ExpertFetch {
            reader,
            experts: count_missed_experts(program, &defs, &v, tier),
            bytes: 0.0,
            ns: 0.0,
        });
        let bank = program.type_of(v.w);
        let local = bank.shape.first().copied().unwrap_or(0).max(1);
        fetch.bytes += fetch.experts * bank.byte_size().0 as f64 / local as f64;
    }
    let mut fetches: Vec<ExpertFetch> = layers.into_values().filter(|fetch| fetch.bytes > 0.0).collect();
    for fetch in &mut fetches {
        fetch.ns = machine.tier_fetch_ns(MemoryTier::Host, fetch.bytes);
    }
    fetches.sort_by_key(|fetch| fetch.reader);
    fetches
}

/// Returns the expected number of different experts of a rank that a call uses and that lie in the second tier only.
fn count_missed_experts(
    p: &Program,
    defs: &[Option<usize>],
    v: &views::GroupedMatmul,
    tier: ExpertTier,
) -> f64 {
    let bank = p.type_of(v.w);
    let local = bank.shape.first().copied().unwrap_or(0);
    let experts = bank.layout.global_shape(&bank.shape, &p.mesh).first().copied().unwrap_or(0).max(1);
    // Where groups of tokens are sharded beside the experts, as over dp, a rank has the rows of its own groups.
    let counts = p.type_of(v.counts);
    let groups = |shape: &[u64]| shape.get(1).copied().unwrap_or(1).max(1) as f64;
    let share = groups(&counts.shape) / groups(&counts.layout.global_shape(&counts.shape, &p.mesh));
    let top_k = experts_per_token(p, defs, v.counts);
    let tokens = v.rows as f64 * share / top_k as f64;
    // Experts of other ranks count as resident: under even routing it does not matter where the cold experts lie.
    let cold = local - tier.pool_size(local);
    let resident_share = 1.0 - cold as f64 / experts as f64;
    count_cold_experts(experts, top_k, 1, tokens, Routing::Random, resident_share).selected
}

/// Returns the number of experts that a token chooses, for the counts of a layer. Counts that no choice in the program
/// leads to are those of rows with one expert each.
fn experts_per_token(p: &Program, defs: &[Option<usize>], counts: ValueId) -> u64 {
    let mut value = counts;
    while let Some(op) = defs.get(value.0 as usize).copied().flatten().map(|at| &p.ops[at]) {
        if let Ok(OpView::ExpertCounts(v)) = op.view() {
            return p.type_of(v.experts).shape.last().copied().unwrap_or(1).max(1);
        }
        // Counts travel between ranks without a change of their meaning.
        let Some(first) = op.operands.first() else { break };
        value = *first;
    }
    1
}

#[cfg(test)]
mod tests {
    use tessera_ir::parse_all;
    use tessera_mesh::catalog;

    use super::*;
    use crate::Profile;

    /// Two layers of 5 experts, of which tokens choose `top_k`; the first one has two weights.
    fn layers(top_k: u64, resident: u64) -> Program {
        let weight = |name: &str, layer: u64, shape: &str| {
            format!(
                "%{name} = weight \"{name}\" {{tier_layer = {layer}, tier_policy = \"lru\", tier_resident = {resident}, \
                 tier_window = 1}} : f32[{shape}] "
            )
        };
        let rows = 7 * top_k;
        let text = format!(
            "program @p {{ %x = input : f32[7, 4] %logits = input : f32[7, 5] {}{}{} \
             %e = toperator.top_k_experts %logits {{top_k = {top_k}}} %s = toperator.expert_slots %e {{capacity = 7}} \
             %c = toperator.expert_counts %e, %s {{groups = 5}} \
             %p = toperator.expert_pack %x, %e, %s {{capacity = 7, groups = 5}} \
             %h = toperator.grouped_matmul %p, %g, %c {{rows = {rows}}} \
             %y = toperator.grouped_matmul %h, %d, %c {{rows = {rows}}} \
             %z = toperator.grouped_matmul %y, %n, %c {{rows = {rows}}} output \"z\", %z }}",
            weight("g", 0, "5, 3, 4"),
            weight("d", 0, "5, 4, 3"),
            weight("n", 1, "5, 9, 4"),
        );
        parse_all(&text, "test").unwrap_or_else(|ds| panic!("{ds:#?}")).remove(0)
    }

    fn fetches(top_k: u64, resident: u64) -> (MachineModel, Vec<ExpertFetch>) {
        let profile = Profile::builtin("torch-2.11").unwrap();
        let machine = MachineModel::new(catalog::get("gb200-nvl72").unwrap(), profile);
        let found = price_expert_fetches(&machine, &layers(top_k, resident));
        (machine, found)
    }

    #[test]
    fn a_layer_waits_once_for_the_experts_that_even_routing_leads_to() {
        for (top_k, resident) in [(1, 1), (1, 4), (2, 1), (3, 2)] {
            let (machine, found) = fetches(top_k, resident);
            let used = 1.0 - (1.0 - top_k as f64 / 5.0).powi(7);
            let missed = (5 - resident) as f64 * used;
            assert_eq!(found.len(), 2);
            let host = &machine.cluster;
            for (fetch, elements) in found.iter().zip([3.0 * 4.0 + 4.0 * 3.0, 9.0 * 4.0]) {
                assert!((fetch.experts - missed).abs() < 1e-9, "{fetch:?} {missed}");
                assert!((fetch.bytes - missed * elements * 4.0).abs() < 1e-6, "{fetch:?}");
                // 200 GB/s of host memory, below what the link carries, after the latency of the link.
                let ns = host.link_spec(tessera_mesh::LinkClass::Host).latency_ns.value + fetch.bytes / 200.0;
                assert!((fetch.ns - ns).abs() < 1e-6, "{fetch:?} {ns}");
            }
            assert!(found[0].reader < found[1].reader);
        }
    }

    #[test]
    fn resident_experts_and_experts_that_every_token_uses_need_no_chance() {
        assert_eq!(fetches(2, 5).1, []);
        let (_, all) = fetches(5, 1);
        assert!((all[0].experts - 4.0).abs() < 1e-6, "{all:?}");
    }
}
