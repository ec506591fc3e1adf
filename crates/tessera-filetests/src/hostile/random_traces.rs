//! Random traces, and a simulation of the devices that produced them.

use tessera_base::Span;
use tessera_verify::{ObservedCall, Traces};

use super::fuzz_input::FuzzInput;

/// Maximum number of launches of all ranks together.
const MAX_LAUNCHES: usize = 400;

/// Random traces and the launches that they record.
#[derive(Debug, Default)]
pub(super) struct RandomTraces {
    pub(super) traces: Traces,
    groups: Vec<Vec<u32>>,
    ranks: Vec<TracedRank>,
}

#[derive(Debug)]
struct TracedRank {
    rank: u32,
    /// Group, call and batch of each launch.
    launches: Vec<(usize, ObservedCall, u32)>,
}

impl RandomTraces {
    pub(super) fn generate(c: &mut FuzzInput<'_>) -> RandomTraces {
        let mut w = RandomTraces::default();
        let mut ids = Vec::new();
        let ranks = 1 + c.next_below(5);
        for r in 0..ranks {
            let rank = if c.next_byte() > 250 { c.next_number() as u32 } else { r as u32 };
            w.traces.add_rank(rank, &format!("rank{rank}.jsonl"));
            w.ranks.push(TracedRank { rank, launches: Vec::new() });
        }
        for g in 0..1 + c.next_below(5) {
            let all: Vec<u32> = match c.next_byte() {
                0..=80 => (0..ranks as u32).collect(),
                b @ 81..=245 => (0..ranks as u32).filter(|r| b >> (r % 5) & 1 == 1).collect(),
                _ => (0..c.next_below(4)).map(|_| c.next_number() as u32).collect(),
            };
            let name = ["tp", "ep", "pp", "dp", "world"][g];
            ids.push(w.traces.add_group(name, &all));
            w.groups.push(all);
        }
        let mut left = MAX_LAUNCHES;
        while c.has_more() && left > 0 {
            left -= 1;
            let g = c.next_below(ids.len());
            let stream = ["a", "b", ""][c.next_below(3)];
            let batch = [0, 0, 0, 1, 2, u32::MAX][c.next_below(6)];
            // The launch is on all ranks of a group, on a sender and its receiver, or on one rank
            // alone.
            let pattern = c.next_below(8);
            let call = random_call(c, ranks);
            for at in 0..w.ranks.len() {
                let mut call = call.clone();
                let rank = w.ranks[at].rank;
                match pattern {
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
                w.traces.push_launch(
                    at,
                    ids[g],
                    call.clone(),
                    stream,
                    batch,
                    Span { start: left, end: left },
                );
                w.ranks[at].launches.push((g, call, batch));
            }
        }
        // A push to a rank that does not exist must have no effect.
        if let Some(g) = ids.first() {
            w.traces.push_launch(usize::MAX, *g, ObservedCall::default(), "", 0, Span::default());
        }
        w
    }

    /// Returns whether every rank terminates if each runs one launch at a time, in host order.
    pub(super) fn all_ranks_terminate(&self) -> bool {
        let mut next_launch = vec![0; self.ranks.len()];
        let mut pending: Vec<Vec<usize>> = vec![Vec::new(); next_launch.len()];
        loop {
            let mut progressed = false;
            for (i, r) in self.ranks.iter().enumerate() {
                if pending[i].is_empty() && next_launch[i] < r.launches.len() {
                    pending[i] = r.batch_at(next_launch[i]);
                    next_launch[i] += pending[i].len();
                    progressed = true;
                }
            }
            for (g, members) in self.groups.iter().enumerate() {
                let pending_launch = |m: &u32| {
                    let i = self.ranks.iter().position(|r| r.rank == *m)?;
                    let part = |k: &&usize| self.ranks[i].launch_matches(**k, g, |c| c.peer.is_none());
                    Some((i, *pending[i].iter().find(part)?))
                };
                if let Some(all) = members.iter().map(pending_launch).collect::<Option<Vec<_>>>()
                    && !all.is_empty()
                {
                    all.into_iter().for_each(|(i, k)| pending[i].retain(|o| *o != k));
                    progressed = true;
                }
            }
            for i in 0..self.ranks.len() {
                for k in pending[i].clone() {
                    let (g, call, _) = &self.ranks[i].launches[k];
                    let (Some(peer), "send") = (call.peer, call.op.as_str()) else { continue };
                    let from = self.ranks[i].rank;
                    let Some(j) = self.ranks.iter().position(|r| r.rank == peer) else { continue };
                    let is_matching_recv = |k: &&usize| {
                        self.ranks[j].launch_matches(**k, *g, |c| c.peer == Some(from) && c.op != "send")
                    };
                    if let Some(taken) = pending[j].iter().find(is_matching_recv).copied() {
                        pending[i].retain(|o| *o != k);
                        pending[j].retain(|o| *o != taken);
                        progressed = true;
                    }
                }
            }
            if !progressed {
                return pending.iter().all(Vec::is_empty)
                    && next_launch.iter().zip(&self.ranks).all(|(a, r)| *a == r.launches.len());
            }
        }
    }
}

impl TracedRank {
    /// Returns the indices of the launches that are issued as one batch from `at` on.
    fn batch_at(&self, at: usize) -> Vec<usize> {
        let Some((_, _, batch)) = self.launches.get(at) else { return Vec::new() };
        let same = self.launches[at..].iter().take_while(|l| *batch != 0 && l.2 == *batch).count();
        (at..at + same.max(1)).collect()
    }

    fn launch_matches(&self, k: usize, group: usize, is: impl Fn(&ObservedCall) -> bool) -> bool {
        self.launches[k].0 == group && is(&self.launches[k].1)
    }
}

fn random_call(c: &mut FuzzInput<'_>, ranks: usize) -> ObservedCall {
    let mut call = ObservedCall {
        op: ["all_reduce", "all_gather", "send", "recv", "barrier", ""][c.next_below(6)].to_string(),
        dtype: ["bf16", "f32"][c.next_below(2)].to_string(),
        count: c.next_number(),
        ..ObservedCall::default()
    };
    let odd = c.next_byte();
    call.peer = (odd & 1 == 1).then(|| c.next_below(ranks + 1) as u32);
    if odd & 6 == 6 {
        call.root = Some(c.next_below(ranks + 1) as u32);
    }
    if odd & 24 == 24 {
        call.reduction = Some("sum".to_string());
        call.shape = vec![c.next_number(), c.next_number()];
    }
    if odd & 96 == 96 {
        call.graph = Some(["", "g"][c.next_below(2)].to_string());
    }
    if odd & 192 == 192 {
        let mut counts = || (0..c.next_below(5)).map(|_| c.next_number() % 3).collect();
        call.per_peer = Some((counts(), counts()));
    }
    call
}
