//! The KV cache of a long context: how much of it device memory holds as the context grows, and the
//! hit rates that follow.

use tessera_base::Bytes;
use tessera_cost::params::KvCacheStorage;
use tessera_cost::tiers::{KvResidency, SegmentReads, spill_bytes};
use tessera_mesh::MemoryTier;
use tessera_plan::search::MemoryUse;
use tessera_plan::search::advice::advise_residency;
use tessera_plan::search::gates::GateStatus;
use tessera_report::html::AdviceTable;

use super::super::language::format_ns;
use super::{MappingContext, format_percent, owned_columns};

/// Context length, in tokens, from which the table is shown even if the cache fits in device
/// memory.
const LONG_CONTEXT_TOKENS: u64 = 16_384;

/// Number of segments that a context is divided into.
const SEGMENTS: usize = 64;

/// Older segments that sparse attention reads per step, in addition to the newest eighth.
const SELECTED_SEGMENTS: usize = 4;

pub(super) fn context_advice(seen: &MappingContext) -> Option<AdviceTable> {
    let context = seen.question.job.context_tokens();
    let bytes = &seen.best.estimate.budget.bytes;
    let tier_bytes = |tier, what| bytes.get(&(tier, what)).map_or(0.0, |b| b.0 as f64);
    let cache: f64 = MemoryTier::ALL.iter().map(|t| tier_bytes(*t, MemoryUse::Cache)).sum();
    if seen.is_training()
        || cache <= 0.0
        || (context < LONG_CONTEXT_TOKENS && cache <= tier_bytes(MemoryTier::Hbm, MemoryUse::Cache))
    {
        return None;
    }
    let device = seen.machine.cluster.device.memory_bytes.value;
    let others: f64 = bytes
        .iter()
        .filter(|((tier, what), _)| *tier == MemoryTier::Hbm && *what != MemoryUse::Cache)
        .map(|(_, b)| b.0 as f64)
        .sum();
    let cache_room = (device - others).max(0.0);
    // Peer memory is as full as this rank's own, except on devices that the plan leaves idle.
    let idle = f64::from(seen.idle_devices) * device / f64::from(seen.candidate.rank_count().max(1));
    let peers = if seen.machine.cluster.domain_count() == 1 { idle } else { 0.0 }
        .max(tier_bytes(MemoryTier::Peer, MemoryUse::Cache));
    let peer = seen.candidate.cache_at == KvCacheStorage::Peer;

    let mut rows = Vec::new();
    let mut first_miss = None;
    for grown in [1.0, 2.0, 4.0, 8.0] {
        let tiers = spill_bytes(cache * grown, cache_room, peers);
        let share = tiers.map(|b| b / (cache * grown));
        let segments = |share: f64| (share * SEGMENTS as f64) as usize;
        let replay_reads = |older| {
            let reads = SegmentReads {
                seed: 7,
                segments: SEGMENTS,
                steps: 64,
                steps_per_segment: (context as usize / SEGMENTS).max(1),
                recent: SEGMENTS / 8,
                older,
            };
            advise_residency(
                &reads,
                segments(share[0]),
                segments(share[1]),
                peer,
                &seen.question.space.thresholds,
            )
        };
        let dense = replay_reads(None);
        let sparse = replay_reads(Some(SELECTED_SEGMENTS));
        let (_, hits, gate) = dense.iter().find(|(p, ..)| *p == KvResidency::Window)?;
        if gate.status != GateStatus::Pass && first_miss.is_none() {
            first_miss = Some((context as f64 * grown, hits.hot_share(peer), gate.threshold));
        }
        let fetch_ns = seen.machine.tier_fetch_ns(MemoryTier::Peer, tiers[1])
            + seen.machine.tier_fetch_ns(MemoryTier::Host, tiers[2]);
        let mut row = vec![format!("{:.0}", context as f64 * grown)];
        row.extend(tiers.iter().map(|b| Bytes(*b as u64).to_string()));
        row.push(format_ns(fetch_ns));
        row.push(hits.by_tier.iter().map(|h| format!("{:.0}", h * 100.0)).collect::<Vec<_>>().join(" / "));
        row.extend(sparse.iter().map(|(_, hits, gate)| {
            let missed = if gate.status == GateStatus::Pass { "" } else { ", fails" };
            format!("{}{missed}", format_percent(hits.hot_share(peer)))
        }));
        rows.push(row);
    }
    let capacity_note = format!("Device memory holds {:.1} times the planned context.", cache_room / cache);
    let note = match first_miss {
        Some((tokens, hits, limit)) => format!(
            "{capacity_note} At {tokens:.0} tokens the hit rate is {}, below the limit of {}: dense attention then waits for remote keys \
             and values under every policy. Sparse attention over {SELECTED_SEGMENTS} older segments of {SEGMENTS} has the hit rates in the \
             last columns (simulated).",
            format_percent(hits),
            format_percent(limit)
        ),
        None => format!("{capacity_note} The hit rate stays above the limit up to eight times the context."),
    };
    let mut names =
        vec!["context", "device", "peers", "host", "fetch per step", "dense reads: device / peers / host %"];
    names.extend(KvResidency::ALL.iter().map(|p| p.name()));
    Some(AdviceTable {
        id: "context",
        title: "KV cache as the context grows".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}
