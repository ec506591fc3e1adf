//! Traces made of choices, and what devices would make of them.

use tessera_base::Span;
use tessera_verify::{Call, Traces};

use super::choices::Choices;

/// Most launches of all ranks together.
const LAUNCHES_MAX: usize = 400;

/// Traces and what went into them.
#[derive(Debug, Default)]
pub(super) struct Watched {
    pub(super) traces: Traces,
    groups: Vec<Vec<u32>>,
    ranks: Vec<Rank>,
}

#[derive(Debug)]
struct Rank {
    rank: u32,
    /// Group and batch of each launch.
    launches: Vec<(usize, Call, u32)>,
}

impl Watched {
    pub(super) fn of(c: &mut Choices<'_>) -> Watched {
        let mut w = Watched::default();
        let mut ids = Vec::new();
        let ranks = 1 + c.below(5);
        for r in 0..ranks {
            let rank = if c.byte() > 250 { c.number() as u32 } else { r as u32 };
            w.traces.rank(rank, &format!("rank{rank}.jsonl"));
            w.ranks.push(Rank { rank, launches: Vec::new() });
        }
        for g in 0..1 + c.below(5) {
            let all: Vec<u32> = match c.byte() {
                0..=80 => (0..ranks as u32).collect(),
                b @ 81..=245 => (0..ranks as u32).filter(|r| b >> (r % 5) & 1 == 1).collect(),
                _ => (0..c.below(4)).map(|_| c.number() as u32).collect(),
            };
            let name = ["tp", "ep", "pp", "dp", "world"][g];
            ids.push(w.traces.group(name, &all));
            w.groups.push(all);
        }
        let mut left = LAUNCHES_MAX;
        while c.more() && left > 0 {
            left -= 1;
            let g = c.below(ids.len());
            let stream = ["a", "b", ""][c.below(3)];
            let batch = [0, 0, 0, 1, 2, u32::MAX][c.below(6)];
            // Everyone of a group, a sender with its receiver, or one rank alone.
            let how = c.below(8);
            let call = call(c, ranks);
            for at in 0..w.ranks.len() {
                let mut call = call.clone();
                let rank = w.ranks[at].rank;
                match how {
                    0..=3 if !w.groups[g].contains(&rank) => continue,
                    0..=3 => (call.peer, call.op) = (None, "all_reduce".to_string()),
                    4..=6 => {
                        let peer = call.peer.unwrap_or(1);
                        call.op = if rank == 0 { "send" } else { "recv" }.to_string();
                        call.peer = Some(if rank == 0 { peer } else { 0 });
                        if rank != 0 && rank != peer {
                            continue;
                        }
                    }
                    _ if call.count as usize % w.ranks.len() != at => continue,
                    _ => {}
                }
                w.traces.push(at, ids[g], call.clone(), stream, batch, Span { start: left, end: left });
                w.ranks[at].launches.push((g, call, batch));
            }
        }
        // A place that is not there takes nothing.
        if let Some(g) = ids.first() {
            w.traces.push(usize::MAX, *g, Call::default(), "", 0, Span::default());
        }
        w
    }

    /// Whether every rank gets to its end where each runs one launch at a time, in host order.
    pub(super) fn completes(&self) -> bool {
        let mut at = vec![0; self.ranks.len()];
        let mut open: Vec<Vec<usize>> = vec![Vec::new(); at.len()];
        loop {
            let mut moved = false;
            for (i, r) in self.ranks.iter().enumerate() {
                if open[i].is_empty() && at[i] < r.launches.len() {
                    open[i] = r.launch(at[i]);
                    at[i] += open[i].len();
                    moved = true;
                }
            }
            for (g, members) in self.groups.iter().enumerate() {
                let here = |m: &u32| {
                    let i = self.ranks.iter().position(|r| r.rank == *m)?;
                    let part = |k: &&usize| self.ranks[i].on(**k, g, |c| c.peer.is_none());
                    Some((i, *open[i].iter().find(part)?))
                };
                if let Some(all) = members.iter().map(here).collect::<Option<Vec<_>>>()
                    && !all.is_empty()
                {
                    all.into_iter().for_each(|(i, k)| open[i].retain(|o| *o != k));
                    moved = true;
                }
            }
            for i in 0..self.ranks.len() {
                for k in open[i].clone() {
                    let (g, call, _) = &self.ranks[i].launches[k];
                    let (Some(peer), "send") = (call.peer, call.op.as_str()) else { continue };
                    let from = self.ranks[i].rank;
                    let Some(j) = self.ranks.iter().position(|r| r.rank == peer) else { continue };
                    let takes =
                        |k: &&usize| self.ranks[j].on(**k, *g, |c| c.peer == Some(from) && c.op != "send");
                    if let Some(taken) = open[j].iter().find(takes).copied() {
                        open[i].retain(|o| *o != k);
                        open[j].retain(|o| *o != taken);
                        moved = true;
                    }
                }
            }
            if !moved {
                return open.iter().all(Vec::is_empty)
                    && at.iter().zip(&self.ranks).all(|(a, r)| *a == r.launches.len());
            }
        }
    }
}

impl Rank {
    /// Launches that are issued as one from `at` on.
    fn launch(&self, at: usize) -> Vec<usize> {
        let Some((_, _, batch)) = self.launches.get(at) else { return Vec::new() };
        let same = self.launches[at..].iter().take_while(|l| *batch != 0 && l.2 == *batch).count();
        (at..at + same.max(1)).collect()
    }

    fn on(&self, k: usize, group: usize, is: impl Fn(&Call) -> bool) -> bool {
        self.launches[k].0 == group && is(&self.launches[k].1)
    }
}

fn call(c: &mut Choices<'_>, ranks: usize) -> Call {
    let mut call = Call {
        op: ["all_reduce", "all_gather", "send", "recv", "barrier", ""][c.below(6)].to_string(),
        dtype: ["bf16", "f32"][c.below(2)].to_string(),
        count: c.number(),
        ..Call::default()
    };
    let odd = c.byte();
    call.peer = (odd & 1 == 1).then(|| c.below(ranks + 1) as u32);
    if odd & 6 == 6 {
        call.root = Some(c.below(ranks + 1) as u32);
    }
    if odd & 24 == 24 {
        call.reduction = Some("sum".to_string());
        call.shape = vec![c.number(), c.number()];
    }
    if odd & 96 == 96 {
        call.graph = Some(["", "g"][c.below(2)].to_string());
    }
    if odd & 192 == 192 {
        let mut counts = || (0..c.below(5)).map(|_| c.number() % 3).collect();
        call.per_peer = Some((counts(), counts()));
    }
    call
}
