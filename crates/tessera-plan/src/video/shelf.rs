//! The scores of many meshes from few lowerings.
//!
//! A stage's program depends on how tp cuts a block, on whether the stage is the first, the last, both or neither, and on
//! how many blocks it has; where its neighbours stand shows in nothing but whom it sends to. So stages are lowered in a
//! pipeline of five, with few blocks, and stand for those of every pipeline. A stage with many blocks is one with
//! [`Place::several`] whose steps of a block are played again: that this is so is seen by lowering it with one block more, and
//! where it is not, or blocks are not alike, the shelf has no score and the mesh is lowered whole.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use tessera_base::Bytes;
use tessera_cost::Machine;
use tessera_ir::Bundle;
use tessera_mesh::{Axis, Group, Mesh, Precision, Rank};

use super::alike::{Alike, FEWEST};
use super::memory::{RankBytes, at_precision, bytes_of_roles, kept_at};
use super::score::{Does, Movement, Part, Peer, Score, Step, Way, steps};
use crate::memory::{Lives, Repeated, lives};
use crate::stages::Weights;
use crate::{DtypePolicy, Logical, Mapping, Strategy, lower};

/// Stages of the pipeline that stands for all.
const STAGES: u32 = 5;

/// What has been lowered so far.
pub(super) struct Shelf<'a> {
    machine: &'a Machine,
    alike: Option<Alike<'a>>,
    logical: &'a Logical,
    dtype: DtypePolicy,
    weights: Weights,
    short: BTreeMap<u64, Logical>,
    lowered: BTreeMap<(Cut, u32, bool, u64), Lowered>,
    stages: BTreeMap<(Cut, u32, Place, u64), Found<Stage>>,
    growing: BTreeMap<(Cut, u32, Place), Found<Vec<Growing>>>,
}

/// How tp cuts a block, and into how many pieces its rows are cut.
pub(super) type Cut = (Strategy, u32);

/// None for what cannot be had this way.
type Found<T> = Option<Rc<T>>;

/// A mesh without its programs.
pub(super) struct Scored {
    pub score: Score,
    /// Blocks per stage.
    pub blocks: Vec<u64>,
    /// What a rank of each role keeps.
    pub bytes: Vec<RankBytes>,
}

/// Where a stage stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Only,
    First,
    Middle,
    Last,
}

/// The stages of a shortened model that stand for others. Its programs are not kept: they are large.
type Lowered = BTreeMap<Place, Found<Stage>>;

/// What the roles of a stage do, and keep.
type Stage = Vec<Role>;

struct Role {
    /// Coordinates on tp of its ranks.
    coordinates: Vec<u32>,
    /// By phase.
    parts: Vec<Part>,
    bytes: RankBytes,
    /// Temporaries of each phase, and the op that each step is; none of a stage that was extended.
    temporaries: Vec<(Rc<Lives>, Vec<usize>)>,
}

/// A stage of one block more than [`Place::several`], ready to be extended.
struct Growing {
    role: Role,
    /// Bytes with one block less.
    fewer: RankBytes,
    /// By phase.
    temporaries: Vec<Repeated>,
}

impl<'a> Shelf<'a> {
    /// An empty shelf for a model in a dtype.
    pub fn new(logical: &'a Logical, dtype: DtypePolicy, machine: &'a Machine) -> Shelf<'a> {
        Shelf {
            machine,
            alike: Alike::of(logical),
            logical,
            dtype,
            weights: Weights::of(logical),
            short: BTreeMap::new(),
            lowered: BTreeMap::new(),
            stages: BTreeMap::new(),
            growing: BTreeMap::new(),
        }
    }

    /// The score of a mesh of tp and pp alone under the standard numerics, if it follows from few lowerings.
    pub fn score(&mut self, mesh: Mesh, cut: Cut) -> Option<Scored> {
        let pp = mesh.size(Axis::Pp);
        let blocks = self.weights.cut(u64::from(pp));
        let names = self.logical.phases.iter().map(|p| p.name.clone());
        let mut phases: Vec<Movement> = names.map(|name| Movement { name, parts: Vec::new() }).collect();
        let (mut roles, mut bytes) = (Vec::new(), Vec::new());
        for (at, n) in (0..pp).zip(&blocks) {
            let place = match (at == 0, at + 1 == pp) {
                (true, true) => Place::Only,
                (true, false) => Place::First,
                (false, false) => Place::Middle,
                (false, true) => Place::Last,
            };
            let stage = self.stage(cut, mesh.size(Axis::Tp), place, *n)?;
            let origin = mesh.coord_of(Rank(0)).with(Axis::Pp, at);
            for role in stage.iter() {
                let ranks = role.coordinates.iter().map(|tp| mesh.rank_at(origin.with(Axis::Tp, *tp)));
                roles.push(ranks.collect());
                bytes.push(role.bytes);
                for (phase, part) in phases.iter_mut().zip(&role.parts) {
                    phase.parts.push(part.clone());
                }
            }
        }
        Some(Scored { score: Score { mesh, roles, phases }, blocks, bytes })
    }

    fn stage(&mut self, cut: Cut, tp: u32, place: Place, blocks: u64) -> Found<Stage> {
        if blocks <= place.several(cut) + 1 {
            return self.lowered(cut, tp, place, blocks);
        }
        let key = (cut, tp, place, blocks);
        if let Some(known) = self.stages.get(&key) {
            return known.clone();
        }
        let made = self.stage_of_many(cut, tp, place, blocks).map(Rc::new);
        self.stages.insert(key, made.clone());
        made
    }

    fn stage_of_many(&mut self, cut: Cut, tp: u32, place: Place, blocks: u64) -> Option<Stage> {
        let more = blocks - place.several(cut) - 1;
        let precision = kept_at(self.dtype, self.machine.profile.habits.precision);
        let many = |g: &Growing| Role {
            coordinates: g.role.coordinates.clone(),
            parts: g.role.parts.iter().map(|p| Part { times: more, ..p.clone() }).collect(),
            bytes: extended(g, more, precision),
            temporaries: Vec::new(),
        };
        Some(self.growing(cut, tp, place)?.iter().map(many).collect())
    }

    fn growing(&mut self, cut: Cut, tp: u32, place: Place) -> Found<Vec<Growing>> {
        let key = (cut, tp, place);
        if let Some(known) = self.growing.get(&key) {
            return known.clone();
        }
        let several = self.lowered(cut, tp, place, place.several(cut));
        let one_more = self.lowered(cut, tp, place, place.several(cut) + 1);
        let made = several.zip(one_more).and_then(|(a, b)| grown(&a, &b)).map(Rc::new);
        self.growing.insert(key, made.clone());
        made
    }

    /// A stage of few blocks.
    fn lowered(&mut self, cut: Cut, tp: u32, place: Place, blocks: u64) -> Found<Stage> {
        let only = place == Place::Only;
        let key = (cut, tp, only, blocks);
        if !self.lowered.contains_key(&key) {
            let made = self.lower(cut, tp, only, blocks).unwrap_or_default();
            self.lowered.insert(key, made);
        }
        self.lowered.get(&key).and_then(|l| l.get(&place).cloned().flatten())
    }

    fn lower(&mut self, cut: Cut, tp: u32, only: bool, blocks: u64) -> Option<Lowered> {
        let per_stage = if only { vec![blocks] } else { vec![blocks, 1, blocks, 1, blocks] };
        let all: u64 = per_stage.iter().sum();
        let alike = self.alike.as_ref()?;
        if all < FEWEST || all > self.logical.blocks {
            return None;
        }
        let short = self.short.entry(all).or_insert_with(|| alike.shortened(all));
        let mesh = Mesh::new([tp, 1, if only { 1 } else { STAGES }, 1]).ok()?;
        let (strategy, pieces) = cut;
        let (dtype, blocks) = (self.dtype, per_stage);
        let mut mapping = Mapping { mesh, strategy, pieces, dtype, blocks, ..Mapping::default() };
        // A refusal comes again, with the whole model's places, where that is lowered.
        let bundle = lower(short, &mut mapping).ok()?;
        let bytes = bytes_of_roles(&bundle, self.dtype, self.machine.profile.habits.precision);
        let places: &[Place] =
            if only { &[Place::Only] } else { &[Place::First, Place::Middle, Place::Last] };
        let stage = |place: &Place| (*place, place.stage_of(&bundle, &bytes, self.machine).map(Rc::new));
        Some(places.iter().map(stage).collect())
    }
}

impl Place {
    /// Blocks from which on more of them are more of the same: one more where pieces of rows take turns across their border.
    fn several(self, (_, pieces): Cut) -> u64 {
        let whole = if self == Place::Only { FEWEST } else { 2 };
        whole + u64::from(pieces > 1)
    }

    /// Which stage of the lowered pipeline stands for it.
    fn stage(self) -> u32 {
        match self {
            Place::Only | Place::First => 0,
            Place::Middle => 2,
            Place::Last => STAGES - 1,
        }
    }

    fn stage_of(self, bundle: &Bundle, bytes: &[RankBytes], machine: &Machine) -> Option<Stage> {
        let on = |rank: &Rank| bundle.mesh.coord_of(*rank).on(Axis::Pp) == self.stage();
        let mut out = Vec::new();
        for (i, role) in bundle.roles.iter().enumerate().filter(|(_, r)| r.ranks.first().is_some_and(on)) {
            let (mut parts, mut temporaries) = (Vec::new(), Vec::new());
            for program in bundle.phases.iter().map(|p| &p.programs[i]) {
                let (mut steps, at) = steps(program, machine);
                steps.iter_mut().try_for_each(|s| self.relative(s))?;
                parts.push(Part { steps: steps.into(), again: 0..0, times: 0, names: None });
                temporaries.push((Rc::new(lives(program)), at));
            }
            out.push(Role {
                coordinates: role.ranks.iter().map(|r| bundle.mesh.coord_of(*r).on(Axis::Tp)).collect(),
                parts,
                bytes: bytes[i],
                temporaries,
            });
        }
        Some(out)
    }

    /// Whom a stage of the lowered pipeline is to one in this place; none for one that has no counterpart elsewhere.
    fn peer(self, at: usize) -> Option<Peer> {
        match (self, at) {
            (Place::First, 1) | (Place::Middle, 3) => Some(Peer::Next),
            (Place::First | Place::Middle, 4) => Some(Peer::Last),
            (Place::Middle | Place::Last, 0) => Some(Peer::First),
            (Place::Middle, 1) | (Place::Last, 3) => Some(Peer::Previous),
            _ => None,
        }
    }

    /// Says of whom a step meets where that one stands, rather than at which position.
    fn relative(self, step: &mut Step) -> Option<()> {
        if let Does::Exchange { whom, .. } = &mut step.does {
            if let Way::To(peer) | Way::From(peer) = &mut whom.way {
                let Some(Peer::At(at)) = *peer else { return None };
                *peer = Some(self.peer(at).filter(|_| whom.group == Some(Group::of(Axis::Pp)))?);
            } else if whom.group != Some(Group::of(Axis::Tp)) {
                return None;
            }
        }
        Some(())
    }
}

/// How a stage grows, if one block more adds just the steps of the block before it.
fn grown(several: &Stage, one_more: &Stage) -> Option<Vec<Growing>> {
    let role = |(a, b): (&Role, &Role)| {
        let (mut parts, mut temporaries) = (Vec::new(), Vec::new());
        for ((a, b), (lives, at)) in a.parts.iter().zip(&b.parts).zip(&b.temporaries) {
            let op = |step: usize| at.get(step).copied().unwrap_or(lives.len());
            let again = settled(repeated(&a.steps, &b.steps)?, &b.steps, lives, op)?;
            temporaries.push(Repeated::new(lives.clone(), op(again.start)..op(again.end)));
            parts.push(Part { again, ..b.clone() });
        }
        let role =
            Role { coordinates: b.coordinates.clone(), parts, bytes: b.bytes, temporaries: Vec::new() };
        (a.coordinates == b.coordinates).then_some(Growing { role, fewer: a.bytes, temporaries })
    };
    let roles = several.iter().zip(one_more).map(role);
    if several.len() == one_more.len() { roles.collect() } else { None }
}

/// The steps of `long` that stand there once more than in `short`: `long` is `short` with a piece put in that is equal to
/// the piece before it.
fn repeated(short: &[Step], long: &[Step]) -> Option<Range<usize>> {
    let piece = long.len().checked_sub(short.len())?;
    let at = short.iter().zip(long).take_while(|(a, b)| a == b).count();
    let again = at.checked_sub(piece)?..at;
    let put_in = long[at + piece..] == short[at..] && long[at..at + piece] == long[again.clone()];
    put_in.then_some(again)
}

/// A repeated range, moved back to where all that is made in it has had its last reader in what repeats it: what stands
/// behind that is not said to be the same.
fn settled(
    again: Range<usize>,
    steps: &[Step],
    lives: &Lives,
    op: impl Fn(usize) -> usize,
) -> Option<Range<usize>> {
    let end = op(again.end + again.len());
    let ends = |range: &Range<usize>| {
        let made = lives.get(op(range.start)..op(range.end)).unwrap_or_default();
        made.iter().flatten().all(|life| life.end < end)
    };
    (0..=again.start)
        .take_while(|back| *back == 0 || steps[again.start - back] == steps[again.end - back])
        .map(|back| again.start - back..again.end - back)
        .find(ends)
}

/// Bytes with so many blocks more.
fn extended(g: &Growing, more: u64, precision: Precision) -> RankBytes {
    let plus = |a: Bytes, b: Bytes| Bytes(b.0 + more * b.0.saturating_sub(a.0));
    let (few, one_more) = (&g.fewer, &g.role.bytes);
    let temporaries = g.temporaries.iter().map(|t| t.bytes(more)).max().unwrap_or_default();
    RankBytes {
        weights: plus(few.weights, one_more.weights),
        buffers: plus(few.buffers, one_more.buffers),
        inputs: plus(few.inputs, one_more.inputs),
        temporaries: at_precision(temporaries, precision),
    }
}
