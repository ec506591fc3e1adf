//! The KV cache of a long context: how much of it device memory holds as the context grows, and the
//! hit rates that follow.

use tessera_base::Bytes;
use tessera_base::GateStatus;
use tessera_cost::params::KvCacheStorage;
use tessera_cost::tiers::{KvResidency, SegmentReads, spill_bytes};
use tessera_mesh::MemoryTier;
use tessera_plan::search::MemoryUse;
use tessera_plan::search::advice::advise_residency;
use tessera_report::html::AdviceTable;

use super::MappingContext;
use crate::format::{format_ns, format_percent, owned_columns};

/// Context length, in tokens, from which the table is shown even if the cache fits in device
/// memory.
const LONG_CONTEXT_TOKENS: u64 = 16_384;

/// Number of segments that a context is divided into.
const SEGMENTS: usize = 64;

/// Older segments that sparse attention reads per step, in addition to the newest eighth.
const SELECTED_SEGMENTS: usize = 4;

pub(super) fn context_advice(seen: &MappingContext) -> Option<AdviceTable> {
    let space = CacheSpace::from_context(seen)?;
    let mut rows = Vec::new();
    let mut first_miss = None;
    for growth in [1.0, 2.0, 4.0, 8.0] {
        let (cells, miss) = grown_context_row(seen, &space, growth)?;
        first_miss = first_miss.or(miss);
        rows.push(cells);
    }
    let capacity_note = format!(
        "Device memory holds {:.1} times the planned context.",
        space.device_bytes / space.cache_bytes
    );
    let note = match first_miss {
        Some(miss) => format!("{capacity_note} {}", miss.to_sentence()),
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

/// The size of the KV cache of one rank, and the memory that it may take, in bytes.
struct CacheSpace {
    cache_bytes: f64,
    /// Device memory that the cache may take.
    device_bytes: f64,
    /// Memory of other devices that the cache may take.
    peer_bytes: f64,
}

impl CacheSpace {
    /// Returns `None` if the plan has no KV cache, or one of a short context in device memory.
    fn from_context(seen: &MappingContext) -> Option<CacheSpace> {
        let bytes = &seen.best.estimate.budget.bytes;
        let tier_bytes = |tier, what| bytes.get(&(tier, what)).map_or(0.0, |b| b.0 as f64);
        let cache: f64 = MemoryTier::ALL.iter().map(|t| tier_bytes(*t, MemoryUse::Cache)).sum();
        let is_short = seen.question.job.context_tokens() < LONG_CONTEXT_TOKENS;
        if seen.is_training()
            || cache <= 0.0
            || (is_short && cache <= tier_bytes(MemoryTier::Hbm, MemoryUse::Cache))
        {
            return None;
        }
        let device = seen.machine.cluster.device.memory_bytes.value;
        let others: f64 = bytes
            .iter()
            .filter(|((tier, what), _)| *tier == MemoryTier::Hbm && *what != MemoryUse::Cache)
            .map(|(_, b)| b.0 as f64)
            .sum();
        // Peer memory is as full as this rank's own, except on devices that the plan leaves idle.
        let idle = f64::from(seen.idle_devices) * device / f64::from(seen.candidate.rank_count().max(1));
        let reachable_idle = if seen.machine.cluster.domain_count() == 1 { idle } else { 0.0 };
        Some(CacheSpace {
            cache_bytes: cache,
            device_bytes: (device - others).max(0.0),
            peer_bytes: reachable_idle.max(tier_bytes(MemoryTier::Peer, MemoryUse::Cache)),
        })
    }
}

/// The shortest context of the table whose hit rate with dense attention misses the limit.
struct HitRateMiss {
    tokens: f64,
    hit_rate: f64,
    limit: f64,
}

impl HitRateMiss {
    fn to_sentence(&self) -> String {
        format!(
            "At {:.0} tokens the hit rate is {}, below the limit of {}: dense attention then waits for remote keys \
             and values under every policy. Sparse attention over {SELECTED_SEGMENTS} older segments of {SEGMENTS} has the hit rates in the \
             last columns (simulated).",
            self.tokens,
            format_percent(self.hit_rate),
            format_percent(self.limit)
        )
    }
}

/// Returns the cells of a context that is `growth` times as long as the planned one, and the miss
/// of its hit rate, if any.
fn grown_context_row(
    seen: &MappingContext,
    space: &CacheSpace,
    growth: f64,
) -> Option<(Vec<String>, Option<HitRateMiss>)> {
    let context = seen.question.job.context_tokens();
    let tokens = context as f64 * growth;
    let cache_bytes = space.cache_bytes * growth;
    let tiers = spill_bytes(cache_bytes, space.device_bytes, space.peer_bytes);
    let peer = seen.candidate.cache_at == KvCacheStorage::Peer;
    let segments = |tier: usize| (tiers[tier] / cache_bytes * SEGMENTS as f64) as usize;
    let replay_reads = |older| {
        let reads = SegmentReads {
            seed: 7,
            segments: SEGMENTS,
            steps: 64,
            steps_per_segment: (context as usize / SEGMENTS).max(1),
            recent: SEGMENTS / 8,
            older,
        };
        advise_residency(&reads, segments(0), segments(1), peer, &seen.question.space.thresholds)
    };
    let dense = replay_reads(None);
    let sparse = replay_reads(Some(SELECTED_SEGMENTS));
    let (_, hits, gate) = dense.iter().find(|(p, ..)| *p == KvResidency::Window)?;
    let miss = (gate.status != GateStatus::Pass).then(|| HitRateMiss {
        tokens,
        hit_rate: hits.hot_share(peer),
        limit: gate.threshold,
    });
    let fetch_ns = seen.machine.tier_fetch_ns(MemoryTier::Peer, tiers[1])
        + seen.machine.tier_fetch_ns(MemoryTier::Host, tiers[2]);
    let mut row = vec![format!("{tokens:.0}")];
    row.extend(tiers.iter().map(|b| Bytes(*b as u64).to_string()));
    row.push(format_ns(fetch_ns));
    row.push(hits.by_tier.iter().map(|h| format!("{:.0}", h * 100.0)).collect::<Vec<_>>().join(" / "));
    row.extend(sparse.iter().map(|(_, hits, gate)| {
        let missed = if gate.status == GateStatus::Pass { "" } else { ", fails" };
        format!("{}{missed}", format_percent(hits.hot_share(peer)))
    }));
    Some((row, miss))
}
