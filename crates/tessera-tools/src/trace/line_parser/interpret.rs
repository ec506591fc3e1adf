//! Interprets the keys of a line: as the rank of its file, as a group, or as a launch.

use std::borrow::Cow;

use tessera_verify::ObservedCall;

use super::{CowText, LineFault, LineFields, TraceEntry, TraceLaunch, key_range};
use crate::codes::T0022;
use crate::trace::MAX_RANKS;

/// Stream of a launch that names none.
pub(super) const DEFAULT_STREAM: &str = "0";

/// Interprets the keys of a line, or returns all faults that it finds.
pub(super) fn interpret_fields<'a>(
    mut f: LineFields<'a>,
    line: &[u8],
) -> Result<TraceEntry<'a>, Vec<LineFault>> {
    // The list of keys is needed only if the line is not a complete launch.
    let is_incomplete = f.rank.is_some() || f.world_size.is_some() || f.group.is_none() || f.op.is_none();
    let keys = if is_incomplete { f.present_keys() } else { Vec::new() };
    let mut faults = FaultList { line, found: Vec::new() };
    if let Some(rank) = f.rank {
        faults.check_rank_line(rank, f.world_size, &keys);
        return faults.into_result().map(|()| TraceEntry::Rank(rank, f.world_size));
    }
    if f.world_size.is_some() {
        let hint = "world_size belongs beside rank on the first line: {\"rank\": 0, \"world_size\": 4}";
        return Err(vec![faults.build("world_size", "world_size without rank", hint)]);
    }
    let Some(group) = f.group.take() else {
        let message = if keys.is_empty() { "the line is empty" } else { "no group" };
        let hint = "a launch has op and group, a declaration has group and ranks";
        return Err(vec![faults.build("", message, hint)]);
    };
    if let Some(ranks) = &f.ranks {
        faults.check_members(&group.0, ranks);
    }
    match f.op.take() {
        Some(op) => interpret_launch(group, op, f, faults),
        None => {
            faults.check_group_line(f.ranks.is_some(), &keys);
            faults.into_result().map(|()| TraceEntry::Group(group.0, f.ranks.unwrap_or_default()))
        }
    }
}

fn interpret_launch<'a>(
    group: CowText<'a>,
    op: CowText<'a>,
    f: LineFields<'a>,
    mut faults: FaultList<'_>,
) -> Result<TraceEntry<'a>, Vec<LineFault>> {
    if op.0.is_empty() {
        faults.add("op", "op is empty", "");
    }
    for (key, rank) in [("root", f.root), ("peer", f.peer)] {
        faults.check_range(key, rank);
    }
    let peer = faults.resolve_peer(f.peer, f.peers.as_deref());
    if f.batch == Some(0) {
        faults.add("batch", "batch is 0", "number batches from 1");
    }
    let per_peer = faults.pair_counts(f.send_counts, f.recv_counts);
    let sent = per_peer.as_ref().map(|(sent, _)| sent.as_slice());
    let count = faults.count_elements(&op.0, f.count, f.shape.as_deref(), sent);
    if f.dtype.is_none() && op.0 != "barrier" {
        faults.add("op", format!("{} without dtype", op.0), "");
    }
    faults.into_result()?;
    let to_owned = |t: Option<CowText<'_>>| t.map(|t| t.0.into_owned());
    Ok(TraceEntry::Launch(Box::new(TraceLaunch {
        group: group.0,
        ranks: f.ranks,
        call: ObservedCall {
            op: op.0.into_owned(),
            dtype: to_owned(f.dtype).unwrap_or_default(),
            count,
            shape: f.shape.unwrap_or_default(),
            reduction: to_owned(f.reduction),
            root: f.root,
            peer,
            per_peer,
            graph: to_owned(f.graph),
        },
        stream: f.stream.map_or(Cow::Borrowed(DEFAULT_STREAM), |t| t.0),
        batch: f.batch.unwrap_or(0),
    })))
}

/// The faults of a line, in the order in which they were found.
struct FaultList<'l> {
    line: &'l [u8],
    found: Vec<LineFault>,
}

impl FaultList<'_> {
    /// Builds a fault at a key of the line, or at the whole line if it lacks the key.
    fn build(&self, key: &str, message: impl Into<String>, hint: &str) -> LineFault {
        let hint = (!hint.is_empty()).then(|| hint.to_string());
        LineFault { code: &T0022, message: message.into(), bytes: key_range(self.line, key), hint }
    }

    fn add(&mut self, key: &str, message: impl Into<String>, hint: &str) {
        self.found.push(self.build(key, message, hint));
    }

    fn into_result(self) -> Result<(), Vec<LineFault>> {
        if self.found.is_empty() { Ok(()) } else { Err(self.found) }
    }

    /// Checks a line with `rank`. The first fault is enough, since the line is short.
    fn check_rank_line(&mut self, rank: u32, world_size: Option<u32>, keys: &[&str]) {
        if let Some(other) = keys.iter().find(|k| !matches!(**k, "rank" | "world_size")) {
            let hint = "a line with rank has no other keys except world_size, and is the first: {\"rank\": 0, \"world_size\": 4}";
            self.add("rank", format!("rank beside {other}"), hint);
        } else if let Some(size) = world_size.filter(|n| *n <= rank || *n > MAX_RANKS) {
            self.add("world_size", format!("rank {rank} in a world of {size}"), "ranks are numbered from 0");
        }
    }

    /// Checks a line without `op`, which declares a group.
    fn check_group_line(&mut self, has_ranks: bool, keys: &[&str]) {
        if let Some(stray) = keys.iter().find(|k| !matches!(**k, "group" | "ranks")) {
            self.add(stray, format!("{stray} without op"), "");
        }
        if !has_ranks {
            self.add("group", "a group without ranks, or a launch without op", "");
        }
    }

    /// Checks the members of a group.
    fn check_members(&mut self, group: &str, ranks: &[u32]) {
        let hint = "list each member once, ascending; per-peer counts are in this order";
        if ranks.is_empty() {
            self.add("ranks", format!("group {group} has no ranks"), hint);
        }
        if let Some(w) = ranks.windows(2).find(|w| w[0] >= w[1]) {
            self.add("ranks", format!("ranks of group {group}: {} comes before {}", w[0], w[1]), hint);
        }
        self.check_range("ranks", ranks.iter().copied().find(|r| *r >= MAX_RANKS));
    }

    fn check_range(&mut self, key: &str, rank: Option<u32>) {
        if let Some(rank) = rank.filter(|r| *r >= MAX_RANKS) {
            self.add(key, format!("{key} names rank {rank}; the maximum is {}", MAX_RANKS - 1), "");
        }
    }

    /// Returns the one peer that `peer` or `peers` names.
    fn resolve_peer(&mut self, peer: Option<u32>, peers: Option<&[u32]>) -> Option<u32> {
        match peers {
            None => peer,
            Some([one]) => {
                if peer.is_some_and(|p| p != *one) {
                    self.add("peers", format!("peers names {one}, but peer names another"), "");
                }
                self.check_range("peers", Some(*one));
                Some(*one)
            }
            Some(many) => {
                let hint = "a send or receive has one peer; write grouped transfers on separate lines with the same batch number";
                self.add("peers", format!("peers names {} ranks", many.len()), hint);
                None
            }
        }
    }

    /// Returns the counts per peer, sent and received. A line has both or none.
    fn pair_counts(
        &mut self,
        send_counts: Option<Vec<u64>>,
        recv_counts: Option<Vec<u64>>,
    ) -> Option<(Vec<u64>, Vec<u64>)> {
        match (send_counts, recv_counts) {
            (Some(sent), Some(received)) => return Some((sent, received)),
            (None, None) => {}
            (Some(_), None) => self.add("send_counts", "send_counts without recv_counts", ""),
            (None, Some(_)) => self.add("recv_counts", "recv_counts without send_counts", ""),
        }
        None
    }

    /// Returns the number of elements that the rank contributes: `count`, or else what `shape`
    /// multiplies to, or else the sum of `sent`.
    fn count_elements(
        &mut self,
        op: &str,
        count: Option<u64>,
        shape: Option<&[u64]>,
        sent: Option<&[u64]>,
    ) -> u64 {
        match (count, shape, sent) {
            (Some(n), _, _) => n,
            (None, Some(dims), _) => {
                dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).unwrap_or_else(|| {
                    self.add("shape", "shape has more than 2^64 - 1 elements", "");
                    0
                })
            }
            (None, None, Some(sent)) => {
                sent.iter().try_fold(0u64, |n, c| n.checked_add(*c)).unwrap_or_else(|| {
                    self.add("send_counts", "send_counts add up to more than 2^64 - 1", "");
                    0
                })
            }
            (None, None, None) => {
                if op != "barrier" {
                    let hint = "give count, shape, or send_counts and recv_counts";
                    self.add("op", format!("{op} without count"), hint);
                }
                0
            }
        }
    }
}
