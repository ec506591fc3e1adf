//! Builds the schedules of many meshes from a few cached lowerings.
//!
//! A stage's program depends on how tp shards a block, on whether the stage is the first, the last,
//! both or neither, and on its number of blocks; the position of its neighbours affects only the
//! peers of its sends and receives. So the cache lowers five-stage pipelines with few blocks and
//! reuses their stages for every pipeline. A stage with many blocks is one with
//! [`StagePosition::min_repeatable_blocks`] blocks whose steps of a block repeat; a lowering with
//! one more block verifies this. If it fails, or the blocks are not equivalent, the cache has no
//! schedule and the search lowers the whole model for the mesh.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use tessera_base::Bytes;
use tessera_cost::MachineModel;
use tessera_ir::Bundle;
use tessera_mesh::{Axis, Group, Mesh, Rank};

use super::block_equivalence::{EquivalentBlocks, MIN_BLOCKS};
use super::memory::{RankMemory, memory_by_role};
use super::schedule::{
    CallSchedule, CommDirection, PeerPosition, PhaseSchedule, RoleSteps, ScheduledStep, StepEffect,
    schedule_steps,
};
use crate::memory::{LiveRanges, RepeatedRange, live_ranges};
use crate::{DtypePolicy, LogicalModel, Mapping, Strategy, lower};

/// Number of stages of the lowered pipeline: the fewest with which no neighbour of the middle stage
/// is the first or the last stage.
const STAGES: u32 = 5;

/// Lowered stages of one model on one machine, reused for the schedules of all meshes.
pub(super) struct LoweringCache<'a> {
    machine: &'a MachineModel,
    equivalent_blocks: Option<EquivalentBlocks<'a>>,
    logical: &'a LogicalModel,
    dtype: DtypePolicy,
    shortened: BTreeMap<u64, LogicalModel>,
    lowered: BTreeMap<(TpSplit, u32, bool, u64), LoweredStages>,
    extended: BTreeMap<(TpSplit, u32, StagePosition, u64), Cached<StageRoles>>,
    growable: BTreeMap<(TpSplit, u32, StagePosition), Cached<Vec<GrowableRole>>>,
}

/// How tp shards a block, and the number of row chunks.
pub(super) type TpSplit = (Strategy, u32);

/// A cached result; `None` if the value cannot be derived from cached lowerings.
type Cached<T> = Option<Rc<T>>;

/// The schedule of a mesh, without its programs.
pub(super) struct MeshSchedule {
    pub schedule: CallSchedule,
    /// Memory of one rank of each role, in the order of the schedule's roles.
    pub role_memory: Vec<RankMemory>,
}

/// The position of a stage in its pipeline. All middle stages with equally many blocks share one
/// cached schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StagePosition {
    Only,
    First,
    Middle,
    Last,
}

/// The representative stages of a shortened model. Their programs are dropped, because they are
/// large.
type LoweredStages = BTreeMap<StagePosition, Cached<StageRoles>>;

type StageRoles = Vec<StageRole>;

struct StageRole {
    /// Coordinates of the role's ranks over tp.
    coordinates: Vec<u32>,
    /// Scheduled steps of the role, one entry per phase.
    phases: Vec<RoleSteps>,
    memory: RankMemory,
    /// Live ranges of each phase's temporaries, and the op index of each step; empty for a stage
    /// that was extended.
    temporaries: Vec<(Rc<LiveRanges>, Vec<usize>)>,
}

/// A role of a stage with one block more than [`StagePosition::min_repeatable_blocks`], ready to be
/// extended.
struct GrowableRole {
    role: StageRole,
    /// Memory with one block fewer.
    fewer: RankMemory,
    /// For each phase, the live ranges of temporaries and the ops that each further block repeats.
    temporaries: Vec<RepeatedRange>,
}

impl<'a> LoweringCache<'a> {
    /// Creates an empty cache for a model in a dtype.
    pub fn new(
        logical: &'a LogicalModel,
        dtype: DtypePolicy,
        machine: &'a MachineModel,
    ) -> LoweringCache<'a> {
        LoweringCache {
            machine,
            equivalent_blocks: EquivalentBlocks::from_model(logical),
            logical,
            dtype,
            shortened: BTreeMap::new(),
            lowered: BTreeMap::new(),
            extended: BTreeMap::new(),
            growable: BTreeMap::new(),
        }
    }

    /// Returns the schedule of a mesh of tp and pp alone under the standard numerics, with these blocks per
    /// stage, if a few lowerings determine it.
    pub fn mesh_schedule(&mut self, mesh: Mesh, cut: TpSplit, blocks: &[u64]) -> Option<MeshSchedule> {
        let pp = mesh.axis_size(Axis::Pp);
        let names = self.logical.phases.iter().map(|p| p.name.clone());
        let mut phases: Vec<PhaseSchedule> =
            names.map(|name| PhaseSchedule { name, roles: Vec::new() }).collect();
        let (mut roles, mut bytes) = (Vec::new(), Vec::new());
        for (at, n) in (0..pp).zip(blocks) {
            let place = match (at == 0, at + 1 == pp) {
                (true, true) => StagePosition::Only,
                (true, false) => StagePosition::First,
                (false, false) => StagePosition::Middle,
                (false, true) => StagePosition::Last,
            };
            let stage = self.get_stage(cut, mesh.axis_size(Axis::Tp), place, *n)?;
            let origin = mesh.coord_of(Rank(0)).with_axis(Axis::Pp, at);
            for role in stage.iter() {
                let ranks = role.coordinates.iter().map(|tp| mesh.rank_at(origin.with_axis(Axis::Tp, *tp)));
                roles.push(ranks.collect());
                bytes.push(role.memory);
                for (phase, part) in phases.iter_mut().zip(&role.phases) {
                    phase.roles.push(part.clone());
                }
            }
        }
        Some(MeshSchedule { schedule: CallSchedule { mesh, roles, phases }, role_memory: bytes })
    }

    fn get_stage(&mut self, cut: TpSplit, tp: u32, place: StagePosition, blocks: u64) -> Cached<StageRoles> {
        if blocks <= place.min_repeatable_blocks(cut) + 1 {
            return self.lowered_stage(cut, tp, place, blocks);
        }
        let key = (cut, tp, place, blocks);
        if let Some(known) = self.extended.get(&key) {
            return known.clone();
        }
        let made = self.extend_stage(cut, tp, place, blocks).map(Rc::new);
        self.extended.insert(key, made.clone());
        made
    }

    fn extend_stage(
        &mut self,
        cut: TpSplit,
        tp: u32,
        place: StagePosition,
        blocks: u64,
    ) -> Option<StageRoles> {
        let more = blocks - place.min_repeatable_blocks(cut) - 1;
        let many = |g: &GrowableRole| StageRole {
            coordinates: g.role.coordinates.clone(),
            phases: g.role.phases.iter().map(|p| RoleSteps { extra_repeats: more, ..p.clone() }).collect(),
            memory: extended_memory(g, more),
            temporaries: Vec::new(),
        };
        Some(self.growable_roles(cut, tp, place)?.iter().map(many).collect())
    }

    fn growable_roles(&mut self, cut: TpSplit, tp: u32, place: StagePosition) -> Cached<Vec<GrowableRole>> {
        let key = (cut, tp, place);
        if let Some(known) = self.growable.get(&key) {
            return known.clone();
        }
        let several = self.lowered_stage(cut, tp, place, place.min_repeatable_blocks(cut));
        let one_more = self.lowered_stage(cut, tp, place, place.min_repeatable_blocks(cut) + 1);
        let made = several.zip(one_more).and_then(|(a, b)| derive_growth(&a, &b)).map(Rc::new);
        self.growable.insert(key, made.clone());
        made
    }

    /// Returns the stage at a position with few blocks; lowers a pipeline for it on the first
    /// request.
    fn lowered_stage(
        &mut self,
        cut: TpSplit,
        tp: u32,
        place: StagePosition,
        blocks: u64,
    ) -> Cached<StageRoles> {
        let only = place == StagePosition::Only;
        let key = (cut, tp, only, blocks);
        if !self.lowered.contains_key(&key) {
            let made = self.lower_shortened(cut, tp, only, blocks).unwrap_or_default();
            self.lowered.insert(key, made);
        }
        self.lowered.get(&key).and_then(|l| l.get(&place).cloned().flatten())
    }

    fn lower_shortened(&mut self, cut: TpSplit, tp: u32, only: bool, blocks: u64) -> Option<LoweredStages> {
        let per_stage = if only { vec![blocks] } else { vec![blocks, 1, blocks, 1, blocks] };
        let all: u64 = per_stage.iter().sum();
        let alike = self.equivalent_blocks.as_ref()?;
        if all < MIN_BLOCKS || all > self.logical.blocks {
            return None;
        }
        let short = self.shortened.entry(all).or_insert_with(|| alike.shorten_to(all));
        let mesh = Mesh::new([tp, 1, if only { 1 } else { STAGES }, 1]).ok()?;
        let (strategy, pieces) = cut;
        let (dtype, blocks) = (self.dtype, per_stage);
        let mut mapping =
            Mapping { mesh, strategy, overlap_chunks: pieces, dtype, blocks, ..Mapping::default() };
        // A failure recurs, with the positions in the whole model, when the search lowers the whole
        // model.
        let bundle = lower(short, &mut mapping).ok()?;
        let bytes = memory_by_role(&bundle);
        let places: &[StagePosition] = if only {
            &[StagePosition::Only]
        } else {
            &[StagePosition::First, StagePosition::Middle, StagePosition::Last]
        };
        let stage =
            |place: &StagePosition| (*place, place.extract_roles(&bundle, &bytes, self.machine).map(Rc::new));
        Some(places.iter().map(stage).collect())
    }
}

impl StagePosition {
    /// Returns the number of blocks from which on each further block repeats the previous one: one
    /// more if row chunks interleave across the border of blocks.
    fn min_repeatable_blocks(self, (_, pieces): TpSplit) -> u64 {
        let whole = if self == StagePosition::Only { MIN_BLOCKS } else { 2 };
        whole + u64::from(pieces > 1)
    }

    /// Returns the stage of the lowered pipeline that represents this position.
    fn pipeline_stage(self) -> u32 {
        match self {
            StagePosition::Only | StagePosition::First => 0,
            StagePosition::Middle => 2,
            StagePosition::Last => STAGES - 1,
        }
    }

    fn extract_roles(
        self,
        bundle: &Bundle,
        bytes: &[RankMemory],
        machine: &MachineModel,
    ) -> Option<StageRoles> {
        let on = |rank: &Rank| bundle.mesh.coord_of(*rank).on_axis(Axis::Pp) == self.pipeline_stage();
        let mut out = Vec::new();
        for (i, role) in bundle.roles.iter().enumerate().filter(|(_, r)| r.ranks.first().is_some_and(on)) {
            let (mut parts, mut temporaries) = (Vec::new(), Vec::new());
            for program in bundle.phases.iter().map(|p| &p.programs[i]) {
                let (mut steps, at) = schedule_steps(program, machine);
                steps.iter_mut().try_for_each(|s| self.make_peer_relative(s))?;
                parts.push(RoleSteps { steps: steps.into(), repeat: 0..0, extra_repeats: 0, labels: None });
                temporaries.push((Rc::new(live_ranges(program)), at));
            }
            out.push(StageRole {
                coordinates: role.ranks.iter().map(|r| bundle.mesh.coord_of(*r).on_axis(Axis::Tp)).collect(),
                phases: parts,
                memory: bytes[i],
                temporaries,
            });
        }
        Some(out)
    }

    /// Returns the position of a stage of the lowered pipeline relative to a stage at this
    /// position; `None` if it has no counterpart in other pipelines.
    fn peer_position(self, at: usize) -> Option<PeerPosition> {
        match (self, at) {
            (StagePosition::First, 1) | (StagePosition::Middle, 3) => Some(PeerPosition::Next),
            (StagePosition::First | StagePosition::Middle, 4) => Some(PeerPosition::Last),
            (StagePosition::Middle | StagePosition::Last, 0) => Some(PeerPosition::First),
            (StagePosition::Middle, 1) | (StagePosition::Last, 3) => Some(PeerPosition::Previous),
            _ => None,
        }
    }

    /// Replaces the absolute peer of a step by its relative position.
    fn make_peer_relative(self, step: &mut ScheduledStep) -> Option<()> {
        if let StepEffect::Communicate { peers: whom, .. } = &mut step.effect {
            if let CommDirection::SendTo(peer) | CommDirection::RecvFrom(peer) = &mut whom.direction {
                let Some(PeerPosition::Index(at)) = *peer else { return None };
                *peer =
                    Some(self.peer_position(at).filter(|_| whom.group == Some(Group::whole_axis(Axis::Pp)))?);
            } else if whom.group != Some(Group::whole_axis(Axis::Tp)) {
                return None;
            }
        }
        Some(())
    }
}

/// Returns how the roles of a stage grow, if one more block adds exactly the steps of the block
/// before it.
fn derive_growth(several: &StageRoles, one_more: &StageRoles) -> Option<Vec<GrowableRole>> {
    let role = |(a, b): (&StageRole, &StageRole)| {
        let (mut parts, mut temporaries) = (Vec::new(), Vec::new());
        for ((a, b), (lives, at)) in a.phases.iter().zip(&b.phases).zip(&b.temporaries) {
            let op = |step: usize| at.get(step).copied().unwrap_or(lives.len());
            let again = settle_range(find_repeated_range(&a.steps, &b.steps)?, &b.steps, lives, op)?;
            temporaries.push(RepeatedRange::new(lives.clone(), op(again.start)..op(again.end)));
            parts.push(RoleSteps { repeat: again, ..b.clone() });
        }
        let role = StageRole {
            coordinates: b.coordinates.clone(),
            phases: parts,
            memory: b.memory,
            temporaries: Vec::new(),
        };
        (a.coordinates == b.coordinates).then_some(GrowableRole { role, fewer: a.memory, temporaries })
    };
    let roles = several.iter().zip(one_more).map(role);
    if several.len() == one_more.len() { roles.collect() } else { None }
}

/// Returns the range of steps of `long` that repeats once more than in `short`: `long` is `short`
/// with an insertion that equals the steps before it.
fn find_repeated_range(short: &[ScheduledStep], long: &[ScheduledStep]) -> Option<Range<usize>> {
    let inserted = long.len().checked_sub(short.len())?;
    let at = short.iter().zip(long).take_while(|(a, b)| a == b).count();
    let again = at.checked_sub(inserted)?..at;
    let is_insertion = long[at + inserted..] == short[at..] && long[at..at + inserted] == long[again.clone()];
    is_insertion.then_some(again)
}

/// Moves a repeated range back until every value produced in it has its last reader within the
/// repetition: the steps after the repetition may differ.
fn settle_range(
    again: Range<usize>,
    steps: &[ScheduledStep],
    lives: &LiveRanges,
    op: impl Fn(usize) -> usize,
) -> Option<Range<usize>> {
    let end = op(again.end + again.len());
    let ends = |range: &Range<usize>| {
        let made = lives.get(op(range.start)..op(range.end)).unwrap_or_default();
        made.iter().flatten().all(|life| life.last_use < end)
    };
    (0..=again.start)
        .take_while(|back| *back == 0 || steps[again.start - back] == steps[again.end - back])
        .map(|back| again.start - back..again.end - back)
        .find(ends)
}

/// Returns the memory of a rank with `more` blocks beyond those of the growable role.
fn extended_memory(g: &GrowableRole, more: u64) -> RankMemory {
    let plus = |a: Bytes, b: Bytes| Bytes(b.0 + more * b.0.saturating_sub(a.0));
    let (few, one_more) = (&g.fewer, &g.role.memory);
    RankMemory {
        weights: plus(few.weights, one_more.weights),
        buffers: plus(few.buffers, one_more.buffers),
        inputs: plus(few.inputs, one_more.inputs),
        temporaries: g.temporaries.iter().map(|t| t.slot_bytes(more)).max().unwrap_or_default(),
    }
}
