//! What a rank says of its weights: fingerprints of what it holds, of a neighbour's shards as its own files have them, and
//! a rolling look at memory within a share of each call's time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::{Backend, Fingerprint, Hasher, Seat, WeightSource, slice_words};
use tessera_ir::{Opcode, Program, Type};
use tessera_mesh::Rank;
use tessera_runtime::engine::{Rehash, Reloaded, T0737};
use tessera_runtime::wire::{CallAction, ShardPrint};
use tessera_runtime::{Digest, T0754};
use tessera_verify::SealedPlan;

use crate::engine::LEADER_PHASES;
use crate::{Model, Plan, Weights};

/// Bytes that a rank's fingerprints may take in a message, half of them for what it holds.
const MAX_PRINT_BYTES: usize = 512 << 10;

/// One part in this many of a call's time may go into digests.
const DIGEST_SHARE: u64 = 160;

/// One part in this many of that share belongs to weights, whatever other digests take.
const LEAST: u64 = 4;

/// Bytes hashed per nanosecond, until a rate has been measured.
const FIRST_RATE: f64 = 0.5;

/// Opens weights at a place, in the words of a RELOAD, with the digest of what is found there.
pub type OpenWeights = Box<dyn FnMut(&str) -> Result<(Box<dyn WeightSource>, Digest), Diagnostic>>;

/// A piece of a weight that a rank's programs read.
struct Piece {
    tensor: String,
    ty: Type,
    load: Option<String>,
}

/// The weights of one rank as told to others, and the look at them that goes on.
pub(crate) struct Shards {
    /// Every piece of this rank's programs, in the plan's words.
    own: BTreeSet<(String, String)>,
    /// Pieces of the next rank that this one lacks, and its seat.
    next: (Seat, Vec<Piece>),
    prints: Vec<ShardPrint>,
    /// Bytes of one round.
    bytes: u64,
    /// CPU time that may be spent, below zero where too much was.
    credit_ns: i64,
    /// Bytes per nanosecond, as measured last.
    rate: f64,
    /// CPU time of this thread in nanoseconds.
    clock: fn() -> u64,
    open: Option<OpenWeights>,
    /// Whether weights may change now: during a RELOAD.
    due: bool,
    /// Whether it is refused that they change otherwise.
    armed: bool,
}

impl Shards {
    /// What the plan has a rank hold.
    pub(crate) fn new(plan: &SealedPlan, rank: Rank) -> Shards {
        let mesh = *plan.mesh();
        let seat = |rank| Seat { mesh, rank };
        let words = |pieces: &[Piece], seat: Seat| -> BTreeSet<(String, String)> {
            pieces.iter().map(|p| (p.tensor.clone(), p.words(&seat))).collect()
        };
        let own = words(&pieces(plan, rank), seat(rank));
        // Each rank's shards are read a second time, by the rank before it: a damaged copy shows though no other
        // rank holds the shard. What several ranks hold by plan needs no second reader.
        let ranks: Vec<Rank> = mesh.iter().filter(|r| mesh.contains(*r)).collect();
        let at = ranks.iter().position(|r| *r == rank).unwrap_or(0);
        let next = ranks.get((at + 1) % ranks.len().max(1)).copied().unwrap_or(rank);
        let mut seen = own.clone();
        let mut theirs = pieces(plan, next);
        theirs.retain(|p| seen.insert((p.tensor.clone(), p.words(&seat(next)))));
        Shards {
            own,
            next: (seat(next), theirs),
            prints: Vec::new(),
            bytes: 0,
            credit_ns: 0,
            rate: FIRST_RATE,
            clock: thread_ns,
            open: None,
            due: false,
            armed: true,
        }
    }

    /// Takes the fingerprints of what a backend loaded, and reads the next rank's pieces from the same source.
    ///
    /// # Errors
    /// T0754 when the backend holds other pieces than the plan gives it, or what the source refuses.
    pub(crate) fn take(
        &mut self,
        backend: &dyn Backend,
        source: &mut dyn WeightSource,
    ) -> Result<(), Diagnostic> {
        let held = backend.fingerprints();
        let says: BTreeSet<(String, String)> =
            held.iter().map(|f| (f.tensor.clone(), f.slice.clone())).collect();
        if let Some((tensor, slice)) = self.own.iter().find(|piece| !says.contains(*piece)) {
            let instead = held.iter().find(|f| f.tensor == *tensor).map_or("nothing", |f| &f.slice);
            return Err(Diagnostic::error(&T0754, format!("the backend holds another piece of `{tensor}`"))
                .at("plan", slice)
                .at("backend", instead)
                .hint("the backend took another rank's seat"));
        }
        self.bytes = held.iter().map(|f| f.bytes).sum();
        let mut prints = fold(held.into_iter().map(print).collect(), MAX_PRINT_BYTES / 2);
        let (seat, pieces) = &self.next;
        let mut next = Vec::new();
        for p in pieces {
            let mut hash = Hasher::default();
            let rows = source.read(&p.tensor, &p.ty, p.load.as_deref(), seat)?;
            hash.update_as(&rows, p.ty.dtype);
            next.push(print(hash.finish(&p.tensor, p.words(seat))));
        }
        next.sort_by(|a, b| (&a.tensor, &a.slice).cmp(&(&b.tensor, &b.slice)));
        prints.extend(fold(next, MAX_PRINT_BYTES / 2));
        prints.sort_by(|a, b| (&a.tensor, &a.slice).cmp(&(&b.tensor, &b.slice)));
        self.prints = prints;
        Ok(())
    }

    pub(crate) fn prints(&self) -> &[ShardPrint] {
        &self.prints
    }

    pub(crate) fn opens(&mut self, open: OpenWeights) {
        self.open = Some(open);
    }

    /// A call begins.
    pub(crate) fn begin(&mut self, action: CallAction) {
        self.due = action == CallAction::Reload;
    }

    /// Arms or disarms the refusal of a reload that no call asked for.
    pub(crate) fn guard(&mut self, armed: bool) {
        self.armed = armed;
    }

    /// Hashes what the time of a call allows and compares it with what was loaded. `call_ns` is the time of the call's
    /// phases, `digest_ns` what other digests of it took. Something comes back where a piece changed, and at the end
    /// of a round.
    pub(crate) fn rehash(
        &mut self,
        backend: &mut dyn Backend,
        call_ns: u64,
        digest_ns: u64,
    ) -> Option<Rehash> {
        let share = call_ns / DIGEST_SHARE;
        let budget = signed(share.saturating_sub(digest_ns).max(share / LEAST));
        // A round is done once per call at most, so more than its price is never needed.
        let round_ns = (self.bytes as f64 / self.rate) as i64 + 1;
        self.credit_ns = self.credit_ns.saturating_add(budget).min(round_ns.saturating_mul(2));
        if self.credit_ns <= 0 {
            return None;
        }
        let before = (self.clock)();
        let seen = backend.audit((self.credit_ns as f64 * self.rate) as u64);
        let ns = (self.clock)().saturating_sub(before);
        self.credit_ns = self.credit_ns.saturating_sub(signed(ns));
        if seen.bytes > 0 && ns > 0 {
            self.rate = (self.rate + seen.bytes as f64 / ns as f64) / 2.0;
        }
        if let Some((print, now)) = seen.changed {
            let what = format!("`{}` {} in memory", print.tensor, print.slice);
            return Some(Rehash { what, loaded: Digest(print.digest), now: Digest(now) });
        }
        if seen.rounds == 0 {
            return None;
        }
        let all = Digest::of_value("weights", &self.prints);
        Some(Rehash { what: "all weights".to_string(), loaded: all, now: all })
    }

    /// Exchanges the backend's weights for those of `source`; where that is refused, the old ones are still there.
    pub(crate) fn reload(&mut self, backend: &mut dyn Backend, source: &str) -> Result<Reloaded, Diagnostic> {
        if !std::mem::take(&mut self.due) && self.armed {
            return Err(Diagnostic::error(&T0737, format!("weights of {source} outside of a RELOAD"))
                .at("this rank", "was told to replace its weights while no RELOAD runs")
                .hint("ask the leader for a RELOAD, which every rank runs between the same two calls"));
        }
        let Some(open) = self.open.as_mut() else {
            return Err(Diagnostic::error(&T0737, format!("this rank cannot open weights at {source}")));
        };
        let (mut weights, found) = open(source)?;
        let (seat, next) = &self.next;
        for p in next {
            weights.check(&p.tensor, &p.ty, p.load.as_deref(), seat)?;
        }
        backend.reload(&mut *weights)?;
        self.credit_ns = 0;
        self.take(backend, &mut *weights)?;
        Ok(Reloaded { weights: found, fingerprints: self.prints.clone() })
    }
}

/// What a rank may be told to reload: a folder whose weights have the names, dtypes and shapes of those in use. The
/// digest is that of the new weights, to be announced.
///
/// # Errors
/// What is wrong with either folder, or T0506 with everything that differs.
pub fn preflight_reload(plan: &Plan, in_use: &Path, next: &Path) -> Result<Digest, Diagnostics> {
    let open = |dir: &Path| Model::under(dir, plan).map_err(|d| vec![d])?.weights();
    let (old, new) = (open(in_use)?, open(next)?);
    old.may_become(&new).map_err(|d| vec![d])?;
    Ok(Digest(new.digest()))
}

/// Opens folders for a RELOAD, for as long as they hold weights like the ones in use.
pub(crate) fn opener(plan: Arc<Plan>, in_use: Weights) -> OpenWeights {
    Box::new(move |source| {
        let first = |ds: Diagnostics| {
            ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0737, "nothing was said about it"))
        };
        let weights = Model::under(Path::new(source), &plan)?.weights().map_err(first)?;
        in_use.may_become(&weights)?;
        let digest = Digest(weights.digest());
        Ok((Box::new(weights) as Box<dyn WeightSource>, digest))
    })
}

/// Makes a list of prints fit into `max_bytes` of a message. Where it does not, prints are joined by their tensors'
/// parent (`blocks.7.ffn.*`), then by the parent's parent: equal lists still have equal prints, a wrong shard that takes
/// in all tensors of a parent still stands out, and the message names the parent instead of the tensor.
fn fold(mut prints: Vec<ShardPrint>, max_bytes: usize) -> Vec<ShardPrint> {
    while size(&prints) > max_bytes && prints.len() > 1 {
        let mut parents: BTreeMap<String, Vec<ShardPrint>> = BTreeMap::new();
        for p in prints {
            let name = p.tensor.strip_suffix(".*").unwrap_or(&p.tensor);
            let parent = name.rsplit_once('.').map_or("*".to_string(), |(parent, _)| format!("{parent}.*"));
            parents.entry(parent).or_default().push(p);
        }
        // Every name gets shorter, so this ends with a single print at the latest.
        prints = parents.into_iter().map(|(parent, parts)| joined(parent, parts)).collect();
    }
    prints
}

/// Bytes that the prints take in a message, a few too many.
fn size(prints: &[ShardPrint]) -> usize {
    prints.iter().map(|p| p.tensor.len() + p.slice.len() + 32 + 7).sum()
}

fn joined(parent: String, mut parts: Vec<ShardPrint>) -> ShardPrint {
    if let [only] = &mut parts[..] {
        return ShardPrint { tensor: parent, slice: std::mem::take(&mut only.slice), ..*only };
    }
    let names: Vec<_> = parts.iter().map(|p| (&p.tensor, &p.slice)).collect();
    let slices = Digest::of_value("slices", &names);
    let digests: Vec<Digest> = parts.iter().map(|p| p.digest).collect();
    ShardPrint {
        tensor: parent,
        slice: format!("{} pieces {}", parts.len(), &slices.to_string()[..8]),
        digest: Digest::of_value("prints", &digests),
        constant: parts.iter().all(|p| p.constant),
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// CPU time of this thread, in nanoseconds.
pub(crate) fn thread_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The weight pieces of a rank's programs, each once.
fn pieces(plan: &SealedPlan, rank: Rank) -> Vec<Piece> {
    let seat = Seat { mesh: *plan.mesh(), rank };
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    let programs = plan.phases().iter().filter(|p| !LEADER_PHASES.contains(&p.as_str()));
    for program in programs.filter_map(|phase| plan.program(phase, rank)) {
        let program: &Program = program;
        for op in program.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let piece = Piece {
                tensor: op.name.clone().unwrap_or_default(),
                ty: program.ty(op.results[0]).clone(),
                load: op.str("load").map(str::to_string),
            };
            if seen.insert((piece.tensor.clone(), piece.words(&seat))) {
                all.push(piece);
            }
        }
    }
    all
}

impl Piece {
    fn words(&self, seat: &Seat) -> String {
        slice_words(&self.ty, self.load.as_deref(), seat)
    }
}

pub(crate) fn print(f: Fingerprint) -> ShardPrint {
    ShardPrint { tensor: f.tensor, slice: f.slice, digest: Digest(f.digest), constant: f.constant }
}

#[cfg(test)]
mod tests;
