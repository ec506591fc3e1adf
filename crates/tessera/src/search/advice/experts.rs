//! Routed experts: how much their routing matters, what a capacity costs, who travels far, what can lie on the host.

use tessera_base::Bytes;
use tessera_base::random::Dice;
use tessera_cost::CollectiveOp;
use tessera_cost::knobs::ExpertsAt;
use tessera_cost::moe::{
    self, Item, Rounds, Routing, buffer_bytes, cold, dispatch_bytes, popularity, remote_share,
};
use tessera_cost::tiers::{Keep, LayerTimes, choose_window, hit_rate, hot_experts, prefetch, routing_trace};
use tessera_ir::work::RowOp;
use tessera_mesh::Tier;
use tessera_plan::search::advice::{ExpertsAsked, advise_experts};
use tessera_plan::search::{Question, Use, estimate};
use tessera_report::html::Advice;

use super::super::rows::ns_text;
use super::{Seen, Shape, columns, percent};

/// Seed of what is drawn.
const SEED: u64 = 7;

pub(super) fn advice(seen: &Seen) -> Vec<Advice> {
    let Some(shape) = seen.shape else { return Vec::new() };
    let mut out = vec![routings(seen, &shape), capacities(seen, &shape)];
    out.extend(locality(seen, &shape));
    out.extend(lengths(seen, &shape));
    out.extend(tiers(seen, &shape));
    out
}

/// Every named distribution, and the one that was asked for.
fn routings(seen: &Seen, s: &Shape) -> Advice {
    let l = &seen.c.layout;
    let mut all = vec![Routing::Balanced, Routing::Random, Routing::PowerLaw(1.2)];
    all.extend((0..8).map(Routing::W));
    if !all.contains(&seen.q.routing) {
        all.push(seen.q.routing);
    }
    let mut q: Question = seen.q.clone();
    let own = seen.best.estimate.step_ns;
    let mut worst = (1.0, seen.q.routing);
    let rows = all
        .into_iter()
        .map(|routing| {
            q.routing = routing;
            let load = moe::experts(s.experts, s.top_k, l.ep, seen.group, routing, l.capacity_pct);
            let step = estimate(&q, seen.c).map(|r| r.estimate.step_ns);
            if let Ok(ns) = step
                && ns / own > worst.0
            {
                worst = (ns / own, routing);
            }
            let here = if routing == seen.q.routing { " (planned)" } else { "" };
            vec![
                format!("{}{here}", routing.name()),
                format!("{:.2}", load.slowest),
                format!("{:.2}", load.std_over_mean),
                percent(load.dropped),
                step.map_or("does not fit".to_string(), |ns| format!("× {:.2}", ns / own)),
            ]
        })
        .collect();
    let note = if worst.0 > 1.005 {
        format!(
            "The step is planned for {}; under {} it takes {:.2} times as long.",
            seen.q.routing.name(),
            worst.1.name(),
            worst.0
        )
    } else {
        format!("No routing takes longer than {}, for which the step is planned.", seen.q.routing.name())
    };
    let names = ["routing", "slowest rank / mean", "spread over experts", "dropped", "step"];
    Advice {
        id: "routing",
        title: "If tokens choose experts otherwise".into(),
        note,
        columns: columns(&names),
        rows,
    }
}

fn capacities(seen: &Seen, s: &Shape) -> Advice {
    let l = &seen.c.layout;
    let asked = ExpertsAsked {
        experts: s.experts,
        top_k: s.top_k,
        ep: l.ep,
        tokens: seen.group,
        width: s.width,
        wire: l.wire,
        routing: seen.q.routing,
        expert_bytes: s.numbers * l.precision.bytes(),
    };
    let found = advise_experts(&asked, &seen.q.space.limits);
    let rows = found
        .capacity
        .sweep
        .iter()
        .filter(|p| p.pct <= 150 && (p.pct % 10 == 0 || p.pct == found.capacity.chosen.pct))
        .map(|p| {
            let mark = if p.pct == found.capacity.chosen.pct { " (advised)" } else { "" };
            vec![
                format!("{:.2}{mark}", f64::from(p.pct) / 100.0),
                percent(p.dropped),
                Bytes(p.peak_bytes as u64).to_string(),
                format!("{:.2}", p.slowest),
            ]
        })
        .collect();
    let has = match l.capacity_pct {
        0 => "The plan keeps every token".to_string(),
        pct => format!("The plan has a capacity of {:.2}", f64::from(pct) / 100.0),
    };
    let mut says = found.says();
    says.truncate(if l.ep > 1 { 2 } else { 0 });
    let note = format!("{has}. {}", says.iter().map(|s| sentence(s)).collect::<Vec<_>>().join(" "));
    let names = ["capacity factor", "dropped", "buffers of a dispatch", "slowest rank / mean"];
    Advice {
        id: "capacity",
        title: "Capacity of experts".into(),
        note: note.trim_end().to_string(),
        columns: columns(&names),
        rows,
    }
}

fn sentence(s: &str) -> String {
    let mut letters = s.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).chain(['.']).collect())
}

/// What a router that prefers near experts keeps near.
fn locality(seen: &Seen, s: &Shape) -> Option<Advice> {
    let (l, cluster) = (&seen.c.layout, &seen.m.cluster);
    let domains = seen.spans().ep.domains;
    let (place, devices) =
        if domains > 1 { ("domain of switches", cluster.domain) } else { ("host", cluster.devices_per_host) };
    let near = (devices / l.expert_tp.max(1)).clamp(1, l.ep);
    if near == l.ep {
        return None;
    }
    let local = s.experts * u64::from(near) / u64::from(l.ep);
    let share = |penalty: f64| remote_share(s.experts, s.top_k, local, penalty, 1.0);
    let rows = [0.0, 0.5, 1.0, 2.0, 4.0]
        .into_iter()
        .map(|penalty| {
            let out = share(penalty);
            vec![format!("{penalty}"), percent(out), format!("{:.2} of {}", out * s.top_k as f64, s.top_k)]
        })
        .collect();
    let inside = if domains > 1 {
        String::new()
    } else {
        " Inside one domain no expert is farther than another, so that this is worth it only for traffic between hosts.".to_string()
    };
    Some(Advice {
        id: "router-penalty",
        title: format!("A router that prefers experts of its own {place}"),
        note: format!(
            "{} of a token's experts lie outside of its {place}; a penalty of 1 on their logits (of unit scale) leaves {}.{inside}",
            percent(share(0.0)),
            percent(share(1.0))
        ),
        columns: columns(&["penalty", "outside", "experts a token"]),
        rows,
    })
}

/// Sequences of mixed lengths, in exchanges as they come and with their like.
fn lengths(seen: &Seen, s: &Shape) -> Option<Advice> {
    let l = &seen.c.layout;
    let longest = seen.q.job.queries();
    let ranks = (l.ep * l.expert_tp / l.tp.max(1)) as usize;
    if l.ep == 1 || ranks < 2 || longest < 64 {
        return None;
    }
    let mut dice = Dice::new(SEED, [0x6c65_6e67, 0]);
    let least = longest / 16;
    let draw = |_| Item { tokens: least + dice.below((longest - least + 1) as usize) as u64, kind: 0 };
    let items: Vec<Item> = (0..(8 * ranks).min(512)).map(draw).collect();
    let own = seen.group / f64::from(l.ep * l.expert_tp);
    let bytes = dispatch_bytes(own, s.width, seen.routed().copies, l.wire);
    let op = CollectiveOp::AllToAll;
    let ns = seen.m.collective(op, buffer_bytes(bytes, l.ep), seen.spans().ep).ns / own.max(1.0);
    // A rank sends its piece of a sequence.
    let ns = ns / f64::from(l.tp.max(1));
    let classes = [longest / 8, longest / 4, longest / 2, longest * 3 / 4];
    let both = [
        ("as they come", Rounds::in_order(&items, ranks)),
        ("by length", Rounds::bucketed(&items, ranks, &classes)),
    ];
    let wait = |r: &Rounds| r.longest_wait_ns(&items, ns);
    let note = format!(
        "If lengths were spread evenly from {least} to {longest} tokens, buckets of length would cut the longest wait for an \
         exchange from {} to {}, over {} sequences on {ranks} replicas (drawn).",
        ns_text(wait(&both[0].1)),
        ns_text(wait(&both[1].1)),
        items.len()
    );
    let rows = both
        .iter()
        .map(|(name, r)| {
            let total = ns_text(r.total_ns(&items, ns));
            vec![(*name).to_string(), r.rounds.len().to_string(), ns_text(wait(r)), total]
        })
        .collect();
    let names = ["sequences", "exchanges", "longest wait", "all dispatches of a layer"];
    Some(Advice {
        id: "lengths",
        title: "Sequences of different lengths".into(),
        note,
        columns: columns(&names),
        rows,
    })
}

/// Experts of which a rank keeps a part in device memory.
fn tiers(seen: &Seen, s: &Shape) -> Option<Advice> {
    let l = &seen.c.layout;
    let stage = seen.fullest()?;
    let mut layers: Vec<LayerTimes> = Vec::new();
    for (stack, n) in seen.q.work.stacks.iter().zip(seen.layers(stage)) {
        let (dense, routed) = seen.priced(stack);
        let has = stack.rows.iter().any(|r| matches!(r.op, RowOp::Experts { .. }));
        let fetch_ns = if has { 1.0 } else { 0.0 };
        let times = LayerTimes { before_ns: dense.forward.ns(), after_ns: routed.forward.ns(), fetch_ns };
        layers.extend(std::iter::repeat_n(times, n as usize));
    }
    let expert_bytes = s.numbers * l.precision.bytes();
    let asked = popularity(s.experts, s.top_k, l.ep, seen.group, seen.q.routing, 0);
    let mut shares = vec![0.25, 0.5, 0.75];
    if seen.c.experts_at == ExpertsAt::Host {
        let held = |tier| {
            let key = (tier, Use::Experts);
            seen.best.estimate.budget.bytes.get(&key).map_or(0.0, |b| b.0 as f64)
        };
        let own = held(Tier::Hbm) / (held(Tier::Hbm) + held(Tier::Host)).max(1.0);
        if own < 1.0 && !shares.contains(&own) {
            shares.insert(0, own);
        }
    }
    let planned = shares.len() > 3;
    let looked: Vec<Looked> = shares
        .iter()
        .map(|share| {
            let hot = hot_experts(&asked, expert_bytes, share * s.experts as f64 * expert_bytes);
            let touched = cold(s.experts, s.top_k, l.ep, seen.group, seen.q.routing, *share).touched;
            let fetch_ns = seen.m.tier_ns(Tier::Host, touched * expert_bytes);
            let layers: Vec<LayerTimes> =
                layers.iter().map(|x| LayerTimes { fetch_ns: x.fetch_ns * fetch_ns, ..*x }).collect();
            Looked {
                share: *share,
                hot: hot.hot.len(),
                cold_share: hot.cold_share,
                fetched: touched * expert_bytes,
                stalls: [1, 2, 3].map(|w| prefetch(&layers, w).stall_ns),
                window: choose_window(&layers, 3).window,
                hits: looked_ahead(seen, s, *share),
            }
        })
        .collect();
    let first = looked.first()?;
    let note = format!(
        "{} With room for {:.0} % of the experts, {} of assignments ask for one on the host; a window of {} layers leaves a wait of {} in a \
         forward pass.{}",
        if planned { "The plan keeps a part of its experts on the host." } else { "All experts fit, so that this is for a smaller device or a larger model." },
        first.share * 100.0,
        percent(first.cold_share),
        first.window,
        ns_text(first.stalls[first.window - 1]),
        match first.hits {
            Some([lru, often, ahead]) => format!(
                " A cache finds {} where it keeps what was used last, {} where it counts how often too, and {} where a forecast that is right in \
                 8 of 10 is fetched ahead (drawn).",
                percent(lru),
                percent(often),
                percent(ahead)
            ),
            None => " A batch asks for more of a rank's experts than there is room for: keeping what was used last would help nobody.".to_string(),
        }
    );
    let rows = looked.iter().map(Looked::row).collect();
    let names = [
        "room for",
        "pinned of a layer",
        "cold assignments",
        "fetched a layer",
        "wait, window 1",
        "2",
        "3",
        "LRU hits",
        "LRU and hotness",
        "with forecast",
    ];
    Some(Advice {
        id: "experts-on-host",
        title: "Experts on the host".into(),
        note,
        columns: columns(&names),
        rows,
    })
}

struct Looked {
    share: f64,
    hot: usize,
    cold_share: f64,
    fetched: f64,
    stalls: [f64; 3],
    window: usize,
    hits: Option<[f64; 3]>,
}

impl Looked {
    fn row(&self) -> Vec<String> {
        let mut row = vec![
            percent(self.share),
            self.hot.to_string(),
            percent(self.cold_share),
            Bytes(self.fetched as u64).to_string(),
        ];
        row.extend(self.stalls.iter().map(|ns| ns_text(*ns)));
        row.extend((0..3).map(|at| self.hits.map_or("–".to_string(), |h| percent(h[at]))));
        row
    }
}

/// Hit rates by recency, by recency and popularity, and by recency with a forecast, on a short trace of one rank's experts; none where one step asks for more than
/// there is room for.
fn looked_ahead(seen: &Seen, s: &Shape, share: f64) -> Option<[f64; 3]> {
    let l = &seen.c.layout;
    let local = s.experts.div_ceil(u64::from(l.ep)) as f64;
    let touched = cold(s.experts, s.top_k, l.ep, seen.group, seen.q.routing, 0.0).touched;
    // Many experts behave like fewer in the same proportion.
    let drawn = local.min(64.0);
    let (per_step, room) = ((touched / local * drawn).ceil() as usize, (drawn * share) as usize);
    if per_step == 0 || per_step > room {
        return None;
    }
    let popular = matches!(seen.q.routing, Routing::PowerLaw(_) | Routing::W(1..=3 | 6 | 7));
    let exponent = if popular { 1.0 } else { 0.0 };
    let trace = routing_trace(SEED, (drawn as usize, per_step), 64, exponent, 16, 0.8);
    let rate = |keep, ahead| hit_rate(&trace, room, keep, ahead);
    Some([rate(Keep::Lru, false), rate(Keep::LruHotness, false), rate(Keep::Lru, true)])
}
