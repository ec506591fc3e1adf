//! Keys and values of a long context: what of them device memory holds as the context grows, and what a read then finds.

use tessera_base::Bytes;
use tessera_cost::knobs::CacheAt;
use tessera_cost::tiers::{Reads, Residency, spill};
use tessera_mesh::Tier;
use tessera_plan::search::Use;
use tessera_plan::search::advice::advise_residency;
use tessera_plan::search::gates::Verdict;
use tessera_report::html::Advice;

use super::super::rows::ns_text;
use super::{Seen, columns, percent};

/// Tokens of a context from which its growth is of interest.
const LONG: u64 = 16_384;

/// Segments that a context is cut into.
const SEGMENTS: usize = 64;

/// Older segments that a step reads where attention chooses, besides the newest eighth.
const CHOSEN: usize = 4;

pub(super) fn advice(seen: &Seen) -> Option<Advice> {
    let context = seen.q.job.context();
    let bytes = &seen.best.estimate.budget.bytes;
    let held = |tier, what| bytes.get(&(tier, what)).map_or(0.0, |b| b.0 as f64);
    let cache: f64 = Tier::ALL.iter().map(|t| held(*t, Use::Cache)).sum();
    if seen.training() || cache <= 0.0 || (context < LONG && cache <= held(Tier::Hbm, Use::Cache)) {
        return None;
    }
    let device = seen.m.cluster.device.memory_bytes.value;
    let others: f64 = bytes
        .iter()
        .filter(|((tier, what), _)| *tier == Tier::Hbm && *what != Use::Cache)
        .map(|(_, b)| b.0 as f64)
        .sum();
    let room = (device - others).max(0.0);
    // Peers are as full as this rank, but for devices that the plan leaves idle.
    let idle = f64::from(seen.idle) * device / f64::from(seen.c.ranks().max(1));
    let peers = if seen.m.cluster.domains() == 1 { idle } else { 0.0 }.max(held(Tier::Peer, Use::Cache));
    let peer = seen.c.cache_at == CacheAt::Peer;

    let mut rows = Vec::new();
    let mut first_miss = None;
    for grown in [1.0, 2.0, 4.0, 8.0] {
        let tiers = spill(cache * grown, room, peers);
        let share = tiers.map(|b| b / (cache * grown));
        let segments = |share: f64| (share * SEGMENTS as f64) as usize;
        let replayed = |older| {
            let reads = Reads {
                seed: 7,
                segments: SEGMENTS,
                steps: 64,
                steps_per_segment: (context as usize / SEGMENTS).max(1),
                recent: SEGMENTS / 8,
                older,
            };
            advise_residency(&reads, segments(share[0]), segments(share[1]), peer, &seen.q.space.limits)
        };
        let all = replayed(None);
        let chosen = replayed(Some(CHOSEN));
        let (_, hits, gate) = all.iter().find(|(p, ..)| *p == Residency::Window)?;
        if gate.verdict != Verdict::Pass && first_miss.is_none() {
            first_miss = Some((context as f64 * grown, hits.hot(peer), gate.limit));
        }
        let fetch_ns = seen.m.tier_ns(Tier::Peer, tiers[1]) + seen.m.tier_ns(Tier::Host, tiers[2]);
        let mut row = vec![format!("{:.0}", context as f64 * grown)];
        row.extend(tiers.iter().map(|b| Bytes(*b as u64).to_string()));
        row.push(ns_text(fetch_ns));
        row.push(hits.by_tier.iter().map(|h| format!("{:.0}", h * 100.0)).collect::<Vec<_>>().join(" / "));
        row.extend(chosen.iter().map(|(_, hits, gate)| {
            let missed = if gate.verdict == Verdict::Pass { "" } else { ", fails" };
            format!("{}{missed}", percent(hits.hot(peer)))
        }));
        rows.push(row);
    }
    let kept = format!("The rank has room for {:.1} times the context that is planned.", room / cache);
    let note = match first_miss {
        Some((tokens, hits, limit)) => format!(
            "{kept} At {tokens:.0} tokens {} of reads are near, below the limit of {}: attention that reads every key then \
             waits for what lies elsewhere, whatever the policy. Attention that chooses {CHOSEN} older segments of {SEGMENTS} does \
             better by the policy named (drawn).",
            percent(hits),
            percent(limit)
        ),
        None => format!("{kept} Reads stay near up to eight times the context."),
    };
    let mut names =
        vec!["context", "device", "peers", "host", "fetch a step", "every key read: near / peers / host %"];
    names.extend(Residency::ALL.iter().map(|p| p.name()));
    Some(Advice {
        id: "context",
        title: "Keys and values as the context grows".into(),
        note,
        columns: columns(&names),
        rows,
    })
}
