//! Fingerprints of a rank's weights: of the shards that it holds, of its neighbor's shards as this
//! rank's own files contain them, and a rolling check of memory within a share of each call's time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::{
    AuditResult, Backend, Fingerprint, FingerprintHasher, MeshRank, WeightSource, describe_slice,
};
use tessera_ir::{Opcode, Program, Type};
use tessera_mesh::Rank;
use tessera_runtime::engine::{RehashResult, ReloadedWeights, T0737};
use tessera_runtime::wire::{CallAction, ShardFingerprint};
use tessera_runtime::{Digest, T0754, T0770};
use tessera_verify::SealedPlan;

use crate::model::{Model, Weights};
use crate::plan::{Plan, is_leader_phase};
use crate::rank_weights::RankWeights;
use crate::weights_origin::WeightChange;

/// Maximum bytes of a rank's fingerprints in a message; half of them are for its own shards.
const MAX_FINGERPRINT_BYTES: usize = 512 << 10;

/// Divisor of a call's time: 1/160 of it may be spent on digests.
const DIGEST_TIME_DIVISOR: u64 = 160;

/// Divisor of the digest share: weights always get a quarter of it, however long other digests
/// take.
const WEIGHT_TIME_DIVISOR: u64 = 4;

/// Hash rate in bytes per nanosecond until one has been measured.
const INITIAL_HASH_RATE: f64 = 0.5;

/// Opens the weights at the location that a RELOAD names, and returns them with their digest.
pub type WeightOpener = Box<dyn FnMut(&str) -> Result<(Box<dyn WeightSource>, Digest), Diagnostic>>;

/// A shard of a weight that a rank's programs read.
struct WeightShard {
    tensor: String,
    ty: Type,
    load: Option<String>,
    /// Whether the shard lies in host memory and is read expert by expert.
    has_tiers: bool,
}

/// The weight fingerprints of one rank, and the state of their rolling check.
pub(crate) struct WeightFingerprints {
    /// Tensor and slice of every shard of this rank's programs, as the plan describes them.
    own_slices: BTreeSet<(String, String)>,
    /// Placement of the next rank, and its shards that this rank lacks.
    neighbor_shards: (MeshRank, Vec<WeightShard>),
    fingerprints: Vec<ShardFingerprint>,
    /// Rank that loads the weights.
    rank: Rank,
    /// The first element of a loaded shard that is not finite.
    nonfinite: Option<Diagnostic>,
    /// Bytes of one full round over the weights.
    round_bytes: u64,
    /// CPU time that may be spent, in nanoseconds; negative after overspending.
    credit_ns: i64,
    /// Hash rate in bytes per nanosecond, as last measured.
    hash_rate: f64,
    /// Clock of this thread's CPU time, in nanoseconds.
    cpu_clock: fn() -> u64,
    opener: Option<WeightOpener>,
    /// Whether weights may change now: true during a RELOAD.
    reload_expected: bool,
    /// Whether a weight change outside a RELOAD is rejected.
    reload_guard_armed: bool,
}

impl WeightFingerprints {
    /// Collects the shards that the plan assigns to a rank and to its neighbor.
    pub(crate) fn new(plan: &SealedPlan, rank: Rank) -> WeightFingerprints {
        let mesh = *plan.mesh();
        let mesh_rank = |rank| MeshRank { mesh, rank };
        let words = |pieces: &[WeightShard], mesh_rank: MeshRank| -> BTreeSet<(String, String)> {
            pieces.iter().map(|p| (p.tensor.clone(), p.slice_text(&mesh_rank))).collect()
        };
        let own_slices = words(&weight_shards(plan, rank), mesh_rank(rank));
        // The previous rank reads each rank's shards a second time, so a damaged copy is detected
        // even if no other rank holds the shard. Shards that several ranks hold by plan need no
        // second reader.
        let ranks: Vec<Rank> = mesh.inner_ranks().collect();
        let at = ranks.iter().position(|r| *r == rank).unwrap_or(0);
        let next = ranks.get((at + 1) % ranks.len().max(1)).copied().unwrap_or(rank);
        let mut seen = own_slices.clone();
        let mut theirs = weight_shards(plan, next);
        theirs.retain(|p| seen.insert((p.tensor.clone(), p.slice_text(&mesh_rank(next)))));
        WeightFingerprints {
            own_slices,
            neighbor_shards: (mesh_rank(next), theirs),
            fingerprints: Vec::new(),
            rank,
            nonfinite: None,
            round_bytes: 0,
            credit_ns: 0,
            hash_rate: INITIAL_HASH_RATE,
            cpu_clock: thread_cpu_ns,
            opener: None,
            reload_expected: false,
            reload_guard_armed: true,
        }
    }

    /// Fingerprints what a backend loaded, and reads the next rank's shards from the same source.
    ///
    /// # Errors
    /// Returns T0754 if the backend holds other shards than the plan assigns, or the error of the
    /// source.
    pub(crate) fn fingerprint_loaded(
        &mut self,
        backend: &dyn Backend,
        source: &mut dyn WeightSource,
    ) -> Result<(), Diagnostic> {
        let loaded = backend.fingerprints();
        let loaded_slices: BTreeSet<(String, String)> =
            loaded.iter().map(|f| (f.tensor.clone(), f.slice.clone())).collect();
        if let Some((tensor, slice)) = self.own_slices.iter().find(|piece| !loaded_slices.contains(*piece)) {
            let instead = loaded.iter().find(|f| f.tensor == *tensor).map_or("nothing", |f| &f.slice);
            return Err(Diagnostic::error(&T0754, format!("the backend holds another shard of `{tensor}`"))
                .with_label("plan", slice)
                .with_label("backend", instead)
                .with_hint("the backend uses another rank's placement"));
        }
        self.round_bytes = loaded.iter().map(|f| f.bytes).sum();
        self.nonfinite = loaded.iter().find_map(|f| find_nonfinite(self.rank, f, source));
        let mut prints = fold_fingerprints(
            loaded.into_iter().map(to_shard_fingerprint).collect(),
            MAX_FINGERPRINT_BYTES / 2,
        );
        let (neighbor, pieces) = &self.neighbor_shards;
        let mut next = Vec::new();
        for p in pieces {
            let print = p.fingerprint_of(neighbor, source)?;
            if self.nonfinite.is_none() {
                self.nonfinite = find_nonfinite(self.rank, &print, source);
            }
            next.push(to_shard_fingerprint(print));
        }
        next.sort_by(|a, b| (&a.tensor, &a.slice).cmp(&(&b.tensor, &b.slice)));
        prints.extend(fold_fingerprints(next, MAX_FINGERPRINT_BYTES / 2));
        prints.sort_by(|a, b| (&a.tensor, &a.slice).cmp(&(&b.tensor, &b.slice)));
        self.fingerprints = prints;
        Ok(())
    }

    /// Checks that every element of the loaded shards, and of the neighbor's, is finite.
    ///
    /// # Errors
    /// Returns T0770 with the tensor, and with the file and index if the file holds the element.
    pub(crate) fn check_finite(&self) -> Result<(), Diagnostic> {
        self.nonfinite.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn as_slice(&self) -> &[ShardFingerprint] {
        &self.fingerprints
    }

    pub(crate) fn set_opener(&mut self, open: WeightOpener) {
        self.opener = Some(open);
    }

    /// Starts a call: only a call with the action RELOAD expects a reload of the weights.
    pub(crate) fn begin_call(&mut self, action: CallAction) {
        self.reload_expected = action == CallAction::Reload;
    }

    /// Arms or disarms the rejection of reloads outside a RELOAD.
    pub(crate) fn arm_reload_guard(&mut self, armed: bool) {
        self.reload_guard_armed = armed;
    }

    /// Returns whether a weight change outside a RELOAD is rejected.
    pub(crate) fn is_reload_guard_armed(&self) -> bool {
        self.reload_guard_armed
    }

    /// Hashes as many weights as the time of a call allows and compares them with their
    /// fingerprints; a backend that waits for a device does so during the next call. `call_ns` is the
    /// time of the call's phases and `digest_ns` the time of its other digests. Returns a result if a shard changed, and at the end of a round.
    pub(crate) fn rehash(
        &mut self,
        backend: &mut dyn Backend,
        call_ns: u64,
        digest_ns: u64,
    ) -> Option<RehashResult> {
        let share = call_ns / DIGEST_TIME_DIVISOR;
        let budget = saturating_i64(share.saturating_sub(digest_ns).max(share / WEIGHT_TIME_DIVISOR));
        // A call completes at most one round, so more credit than a round costs is never needed.
        let round_ns = (self.round_bytes as f64 / self.hash_rate) as i64 + 1;
        self.credit_ns = self.credit_ns.saturating_add(budget).min(round_ns.saturating_mul(2));
        if self.credit_ns <= 0 {
            return None;
        }
        let before = (self.cpu_clock)();
        let audited = backend.audit_weights_while_waiting((self.credit_ns as f64 * self.hash_rate) as u64);
        let ns = (self.cpu_clock)().saturating_sub(before) + audited.hidden_ns;
        self.credit_ns = self.credit_ns.saturating_sub(saturating_i64(ns));
        if audited.bytes > 0 && ns > 0 {
            self.hash_rate = (self.hash_rate + audited.bytes as f64 / ns as f64) / 2.0;
        }
        if let Some(changed) = changed_part(&audited) {
            return Some(changed);
        }
        if audited.rounds == 0 {
            return None;
        }
        let all = Digest::hash_value("weights", &self.fingerprints);
        Some(RehashResult { label: "all weights".to_string(), digest_at_load: all, digest_now: all })
    }

    /// Hashes all weights again at once, and returns a part that changed.
    pub(crate) fn audit(&self, backend: &mut dyn Backend) -> Option<RehashResult> {
        // A round is under way: its end and another whole round cover every part.
        (0..2).find_map(|_| changed_part(&backend.audit_weights(self.round_bytes)))
    }

    /// Replaces the backend's weights with those of `source`. On failure the old weights stay
    /// loaded.
    pub(crate) fn reload(
        &mut self,
        backend: &mut dyn Backend,
        source: &str,
    ) -> Result<ReloadedWeights, Diagnostic> {
        if !std::mem::take(&mut self.reload_expected) && self.reload_guard_armed {
            return Err(Diagnostic::error(&T0737, format!("weights of {source} outside of a RELOAD"))
                .with_label("this rank", "was asked to reload its weights while no RELOAD runs")
                .with_hint(
                    "request a RELOAD from the leader; every rank runs it between the same two calls",
                ));
        }
        let Some(open) = self.opener.as_mut() else {
            return Err(Diagnostic::error(&T0737, format!("this rank cannot open weights at {source}")));
        };
        let (mut weights, found) = open(source)?;
        let (neighbor, next) = &self.neighbor_shards;
        for p in next {
            weights.check(&p.tensor, &p.ty, p.load.as_deref(), neighbor)?;
        }
        backend.reload_weights(&mut *weights)?;
        self.credit_ns = 0;
        self.fingerprint_loaded(backend, &mut *weights)?;
        self.check_finite()?;
        Ok(ReloadedWeights { weights: found, fingerprints: self.fingerprints.clone() })
    }
}

/// Checks that a folder can be reloaded: its weights must have the names, dtypes and shapes of
/// those in use. Returns the digest of the new weights, which the RELOAD announces.
///
/// # Errors
/// Returns what is wrong with either folder, T0506 with every difference, or T0041 if the plan pins
/// other weights.
pub fn preflight_reload(plan: &Plan, in_use: &Model, next: &WeightChange) -> Result<Digest, Diagnostics> {
    let next = open_changed_model(plan, in_use, next).map_err(|d| vec![d])?;
    let (old, new) = (in_use.open_weights()?, next.open_weights()?);
    old.check_compatible(&new).map_err(|d| vec![d])?;
    if plan.mapping.weights.is_some() {
        next.digest_weights(plan)?;
    }
    Ok(Digest(new.sample_digest()))
}

fn open_changed_model(plan: &Plan, in_use: &Model, change: &WeightChange) -> Result<Model, Diagnostic> {
    let (folder, origin) = change.apply_to(&in_use.dir, &in_use.weights);
    Ok(Model::open_for_plan(folder, plan)?.with_weights(origin))
}

/// Returns an opener for the sources of a RELOAD that accepts only weights compatible with `in_use`, the
/// weights of `model`.
pub(crate) fn weight_opener(plan: Arc<Plan>, model: Model, in_use: Weights) -> WeightOpener {
    Box::new(move |source| {
        let first = |ds: Diagnostics| {
            ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0737, "no diagnostic was given"))
        };
        let changed = open_changed_model(&plan, &model, &WeightChange::parse(source))?;
        let weights = changed.open_weights().map_err(first)?;
        in_use.check_compatible(&weights)?;
        let digest = Digest(weights.sample_digest());
        let weights = RankWeights::with_generator(weights, &model, &plan).map_err(first)?;
        Ok((Box::new(weights) as Box<dyn WeightSource>, digest))
    })
}

/// Makes a list of fingerprints fit into `max_bytes` of a message. If the list is too long,
/// fingerprints are merged by the parent of their tensors (`blocks.7.ffn.*`), then by the parent's
/// parent. Equal lists still have equal merged fingerprints, a wrong shard of all tensors of a
/// parent is still detected, and the message names the parent instead of the tensor.
fn fold_fingerprints(mut fingerprints: Vec<ShardFingerprint>, max_bytes: usize) -> Vec<ShardFingerprint> {
    while encoded_size(&fingerprints) > max_bytes && fingerprints.len() > 1 {
        let mut parents: BTreeMap<String, Vec<ShardFingerprint>> = BTreeMap::new();
        for p in fingerprints {
            let name = p.tensor.strip_suffix(".*").unwrap_or(&p.tensor);
            let parent = name.rsplit_once('.').map_or("*".to_string(), |(parent, _)| format!("{parent}.*"));
            parents.entry(parent).or_default().push(p);
        }
        // Every name gets shorter, so this ends with a single fingerprint at the latest.
        fingerprints = parents.into_iter().map(|(parent, parts)| merge_fingerprints(parent, parts)).collect();
    }
    fingerprints
}

/// Returns an upper bound of the bytes that the fingerprints take in a message.
fn encoded_size(prints: &[ShardFingerprint]) -> usize {
    prints.iter().map(|p| p.tensor.len() + p.slice.len() + 32 + 7).sum()
}

fn merge_fingerprints(parent: String, mut parts: Vec<ShardFingerprint>) -> ShardFingerprint {
    if let [only] = &mut parts[..] {
        return ShardFingerprint { tensor: parent, slice: std::mem::take(&mut only.slice), ..*only };
    }
    let names: Vec<_> = parts.iter().map(|p| (&p.tensor, &p.slice)).collect();
    let slices = Digest::hash_value("slices", &names);
    let digests: Vec<Digest> = parts.iter().map(|p| p.digest).collect();
    ShardFingerprint {
        tensor: parent,
        slice: format!("{} pieces {}", parts.len(), &slices.to_string()[..8]),
        digest: Digest::hash_value("prints", &digests),
        constant: parts.iter().all(|p| p.constant),
    }
}

/// Returns the diagnostic of a shard's first element that is not finite, if there is one. The files
/// are searched for the element, because a backend knows only its place in the shard.
fn find_nonfinite(rank: Rank, print: &Fingerprint, source: &mut dyn WeightSource) -> Option<Diagnostic> {
    let index = print.first_nonfinite?;
    let (tensor, slice) = (&print.tensor, &print.slice);
    let shard = format!("element {index} of its shard ({slice}) is not finite");
    let stored = source.check_finite(tensor).err();
    let what = stored
        .as_ref()
        .map_or(format!("`{tensor}` is finite in its file, but {shard}"), |d| d.message.clone());
    let d = Diagnostic::error(&T0770, format!("rank {} reads a weight that is not finite: {what}", rank.0))
        .with_label(format!("rank {}", rank.0), shard);
    Some(match stored {
        Some(stored) => stored.labels.into_iter().fold(d, |d, l| d.with_label(l.location, l.message)),
        None => d.with_hint("plan with a wider dtype, or check the memory of this rank"),
    })
}

fn saturating_i64(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// Returns the CPU time of this thread in nanoseconds.
pub(crate) fn thread_cpu_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Collects the weight shards of a rank's programs, without duplicates.
fn weight_shards(plan: &SealedPlan, rank: Rank) -> Vec<WeightShard> {
    let mesh_rank = MeshRank { mesh: *plan.mesh(), rank };
    let mut names = BTreeSet::new();
    let mut all = Vec::new();
    let programs = plan.phase_names().iter().filter(|p| !is_leader_phase(plan, p));
    for program in programs.filter_map(|phase| plan.rank_program(phase, rank)) {
        let program: &Program = program;
        for op in program.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let piece = WeightShard {
                tensor: op.name.clone().unwrap_or_default(),
                ty: program.type_of(op.results[0]).clone(),
                load: op.weight_load().map(|l| l.name().to_string()),
                has_tiers: op.expert_tier().is_some(),
            };
            if names.insert((piece.tensor.clone(), piece.slice_text(&mesh_rank))) {
                all.push(piece);
            }
        }
    }
    all
}

impl WeightShard {
    fn slice_text(&self, mesh_rank: &MeshRank) -> String {
        describe_slice(&self.ty, self.load.as_deref(), mesh_rank)
    }

    /// Fingerprints the shard of another rank from this rank's source.
    fn fingerprint_of(
        &self,
        place: &MeshRank,
        source: &mut dyn WeightSource,
    ) -> Result<Fingerprint, Diagnostic> {
        let mut hash = FingerprintHasher::default();
        if self.has_tiers {
            let experts = source.open_experts(&self.tensor, &self.ty, place)?;
            let mut matrix = vec![0.0; self.ty.shape.iter().skip(1).product::<u64>() as usize];
            for expert in 0..self.ty.shape[0] {
                experts.read_rows(expert, 0, &mut matrix)?;
                hash.update_as(&matrix, self.ty.dtype);
            }
        } else {
            hash.update_as(&source.read(&self.tensor, &self.ty, self.load.as_deref(), place)?, self.ty.dtype);
        }
        Ok(hash.finish(&self.tensor, self.slice_text(place)))
    }
}

pub(crate) fn to_shard_fingerprint(f: Fingerprint) -> ShardFingerprint {
    ShardFingerprint { tensor: f.tensor, slice: f.slice, digest: Digest(f.digest), constant: f.constant }
}

/// Returns the part of the weights that an audit found changed.
fn changed_part(audited: &AuditResult) -> Option<RehashResult> {
    let (print, now) = audited.changed.as_ref()?;
    Some(RehashResult {
        label: format!("`{}` {} in memory", print.tensor, print.slice),
        digest_at_load: Digest(print.digest),
        digest_now: Digest(*now),
    })
}

#[cfg(test)]
mod tests;
