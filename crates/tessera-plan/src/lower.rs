//! From logical programs to one program per role: layouts, collectives, local shapes, stages.
//!
//! All stages of one tp coordinate are lowered in a single walk over the logical program, so that both ends of
//! a send see the same type at the same position. Coordinates whose programs come out equal are one role. Where the
//! leader stands outside the mesh, it is a role of its own: it has the phases that encode and decode, the mesh has the
//! others, and each has an empty program where the other works.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{Attr, Builder, Bundle, Kind, Op, Opcode, Phase, Program, RoleRanks, Slots, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard, Uneven};

use crate::mapping::Extents;
use crate::roles::{Kinds, group_roles, uneven_pieces};
use crate::source::{Owner, Source};
use crate::stages::Weights;
use crate::strategy::{Cut, reads_self_cache, unknown_parts, without_strategy};
use crate::{DtypePolicy, Mapping, Numerics, Strategy, Via, memory, order, pieces, precision};

/// Lowering made a program that its rules refuse.
pub static T0606: Code = Code {
    id: "T0606",
    title: "strategy has no rule for this op",
    page: "The strategy met an op with operands in layouts that no rule covers, so no correct program could be made. \
The message names the op and the layouts. A hint `part` that no strategy knows is refused with this code too: taken for \
`whole`, it would run right and waste the ranks. Another strategy, or tp=1, may do; the refusal itself is a gap in the planner.",
};

/// The role of the leader outside the mesh.
const LEADER: &str = "leader@out0";

/// Segments of a split contraction under the mesh-invariant policy.
const SEGMENTS: i64 = 8;

/// What a model hands to the planner.
#[derive(Debug, Clone)]
pub struct Logical {
    /// Logical programs, one per phase.
    pub phases: Vec<Program>,
    /// Calls that may be made: a name and its phases in order.
    pub calls: Vec<(String, Vec<String>)>,
    /// Attention heads.
    pub heads: u64,
    /// Width of the residual stream.
    pub dim: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Tokens of a chunk.
    pub tokens: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Logical {
    pub(crate) fn extents(&self) -> Extents {
        Extents { heads: self.heads, dim: self.dim, ffn: self.ffn, tokens: self.tokens, blocks: self.blocks }
    }
}

/// Lowers every phase under a mapping. The mapping's stages are filled in if it left them open.
///
/// # Errors
/// Every reason why the mapping does not fit, or T0606.
pub fn lower(logical: &Logical, mapping: &mut Mapping) -> Result<Bundle, Diagnostics> {
    let mut ds = mapping.misfits(&logical.extents());
    ds.extend(unknown_parts(&logical.phases));
    ds.extend(without_strategy(&logical.phases));
    if !ds.is_empty() {
        return Err(ds);
    }
    let rounded;
    let logical = match mapping.dtype {
        DtypePolicy::F32 => logical,
        dtype => {
            let phases = logical
                .phases
                .iter()
                .map(|p| precision::apply(p, dtype, mapping.strategy))
                .collect::<Result<_, _>>()?;
            rounded = Logical { phases, ..logical.clone() };
            &rounded
        }
    };
    let mesh = mapping.mesh;
    let stages = u64::from(mesh.size(Axis::Pp));
    if mapping.blocks.is_empty() {
        mapping.blocks = Weights::of(logical).cut(stages);
    }
    let in_pieces;
    let logical = match mapping.pieces {
        1 => logical,
        n => {
            let phases = logical.phases.iter().map(|p| pieces::apply(p, n)).collect::<Result<_, _>>()?;
            in_pieces = Logical { phases, ..logical.clone() };
            &in_pieces
        }
    };
    let rank_map = mapping.rank_map().map_err(|d| vec![*d])?;
    let world = mapping.world().map_err(|d| vec![*d])?;

    // Where ranks hold parts of a row, the sums of squares of queries and keys travel together: both are made first.
    let together = mapping.strategy == Strategy::Megatron && mesh.size(Axis::Tp) > 1;
    let ordered: Vec<Cow<'_, Program>> =
        logical.phases.iter().map(|p| if together { Cow::Borrowed(p) } else { order::chained(p) }).collect();
    let sources: Vec<Source<'_>> = ordered.iter().map(|p| Source::of(p)).collect();
    // A coordinate tells in nothing but the sizes of uneven pieces: where those agree, one is lowered for all.
    let tp = mesh.size(Axis::Tp);
    let mut kinds: Vec<Kinds> = Vec::new();
    let mut uneven: BTreeSet<(Uneven, Option<u32>)> = BTreeSet::new();
    for at in 0..tp {
        let size = |(u, ways): &(Uneven, Option<u32>)| {
            Shard { dim: 0, uneven: Some(*u), ways: *ways }.range(0, tp, at).1
        };
        let sizes: Vec<u64> = uneven.iter().map(size).collect();
        if at > 0
            && let Some(kind) = kinds.iter_mut().find(|k| k.sizes == sizes)
        {
            kind.coordinates.push(at);
            continue;
        }
        let mut per_stage: Vec<Vec<Program>> = vec![Vec::new(); stages as usize];
        for phase in &sources {
            let lowered = Lower::new(logical, mapping, world, phase, Place::Mesh { tp: at }).run()?;
            for (stage, p) in lowered.into_iter().enumerate() {
                per_stage[stage].push(p);
            }
        }
        uneven.extend(per_stage.iter().flatten().flat_map(uneven_pieces));
        let sizes = uneven.iter().map(size).collect();
        kinds.push(Kinds { sizes, coordinates: vec![at], per_stage });
    }
    let (mut roles, mut of_role) = group_roles(&world, kinds);
    if world.outside() > 0 {
        let mut own = Vec::new();
        for phase in &sources {
            own.extend(Lower::new(logical, mapping, world, phase, Place::Outside).run()?);
        }
        roles.insert(
            0,
            RoleRanks { role: LEADER.to_string(), ranks: (0..world.outside()).map(Rank).collect() },
        );
        of_role.insert(0, own);
    }
    let mut of_role: Vec<std::vec::IntoIter<Program>> = of_role.into_iter().map(Vec::into_iter).collect();
    let phases = logical
        .phases
        .iter()
        .map(|l| {
            let mut programs: Vec<Program> = of_role.iter_mut().filter_map(Iterator::next).collect();
            programs.iter_mut().for_each(|p| move_by(p, mapping.via));
            let memory: Vec<Slots> = programs.iter().map(memory::place).collect();
            Phase { name: l.name.clone(), programs, memory }
        })
        .collect();
    Ok(Bundle { mesh: world, rank_map, roles, phases, calls: logical.calls.clone(), mapping: mapping.text() })
}

/// Writes into every collective by what it is moved, where that is not left open.
fn move_by(p: &mut Program, via: Via) {
    if via == Via::Best {
        return;
    }
    for op in p.ops.iter_mut().filter(|op| op.opcode.is_collective()) {
        op.attrs.insert("via".into(), Attr::Str(via.name().into()));
    }
}

/// A logical value on one stage.
#[derive(Clone, Copy)]
enum Held {
    /// Here.
    Ready(ValueId),
    /// Its exchange was issued; whoever needs it first waits.
    Pending(ValueId),
}

/// Whose programs are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// All stages at this position of tp.
    Mesh { tp: u32 },
    /// The leader outside the mesh.
    Outside,
}

struct Lower<'a> {
    source: &'a Program,
    facts: &'a Source<'a>,
    /// Whether the phase runs here at all.
    runs: bool,
    cut: Cut,
    invariant: bool,
    /// First block of each stage, and one past the last block.
    bounds: Vec<u64>,
    stages: Vec<Stage>,
    mesh: Mesh,
}

struct Stage {
    b: Builder,
    held: BTreeMap<ValueId, Held>,
    /// Sends not yet waited for.
    sends: Vec<ValueId>,
}

impl<'a> Lower<'a> {
    fn new(
        logical: &Logical,
        mapping: &Mapping,
        mesh: Mesh,
        facts: &'a Source<'a>,
        place: Place,
    ) -> Lower<'a> {
        let source = facts.program;
        let mut bounds = vec![0];
        for n in &mapping.blocks {
            bounds.push(bounds[bounds.len() - 1] + n);
        }
        let (tp, pp) = match place {
            Place::Mesh { .. } => (mesh.size(Axis::Tp), mesh.size(Axis::Pp)),
            Place::Outside => (1, 1),
        };
        let streams: &[&str] = match (tp > 1, pp > 1) {
            (false, false) => &["compute"],
            (true, false) => &["compute", "tp_collective"],
            (false, true) => &["compute", "pp"],
            (true, true) => &["compute", "tp_collective", "pp"],
        };
        let role = |s| match place {
            Place::Mesh { tp } => format!("stage{s}@tp{tp}"),
            Place::Outside => LEADER.to_string(),
        };
        let stages = (0..pp)
            .map(|s| Stage {
                b: Builder::role(&source.name, &role(s), mesh, streams),
                held: BTreeMap::new(),
                sends: Vec::new(),
            })
            .collect();
        Lower {
            source,
            facts,
            runs: mesh.outside() == 0 || facts.is_leaders == (place == Place::Outside),
            cut: Cut { strategy: mapping.strategy, tp, head_dim: logical.dim / logical.heads },
            invariant: mapping.numerics == Numerics::MeshInvariant,
            bounds,
            stages,
            mesh,
        }
    }

    fn run(mut self) -> Result<Vec<Program>, Diagnostics> {
        let mut done = vec![!self.runs; self.source.ops.len()];
        for i in 0..self.source.ops.len() {
            let op = &self.source.ops[i];
            if done[i] || op.opcode.row().kind == Kind::Source && op.opcode != Opcode::CacheRead {
                continue;
            }
            for s in self.owners(i) {
                if self.facts.owners[i] == Owner::All && !self.needed(i, s) {
                    continue;
                }
                if let Some(also) = self.lower_op(i, s) {
                    done[also] = true;
                }
            }
        }
        let mut out = Vec::new();
        let mut ds = Vec::new();
        for mut stage in self.stages {
            for t in std::mem::take(&mut stage.sends) {
                stage.b.stream("compute");
                stage.b.wait(t, None);
            }
            match stage.b.finish() {
                Ok(p) => out.push(p),
                Err(es) => {
                    ds.extend(es.into_iter().map(|e| Diagnostic::error(&T0606, e.message).note(e.code.title)))
                }
            }
        }
        if ds.is_empty() { Ok(out) } else { Err(ds) }
    }

    /// Stages that run an op. Ops beside the blocks run on every stage that needs them.
    fn owners(&self, i: usize) -> std::ops::RangeInclusive<usize> {
        let last = self.stages.len() - 1;
        match self.facts.owners[i] {
            Owner::All => 0..=last,
            Owner::Last => last..=last,
            Owner::Block(block) => {
                let stage = self.bounds.iter().rposition(|b| *b <= block).unwrap_or(0).min(last);
                stage..=stage
            }
            Owner::First => 0..=0,
        }
    }

    /// Whether a stage has a use for an `all` op: some op it owns, or an `all` op it needs, reads a result.
    fn needed(&self, i: usize, s: usize) -> bool {
        let readers = self.source.ops[i].results.iter().flat_map(|r| &self.facts.readers[r.0 as usize]);
        let mut owned = readers.filter(|j| self.owners(**j).contains(&s));
        owned.any(|j| self.facts.owners[*j] != Owner::All || self.needed(*j, s))
    }

    /// Lowers one op on one stage; the index of another op that was lowered with it.
    fn lower_op(&mut self, i: usize, s: usize) -> Option<usize> {
        let op = &self.source.ops[i];
        match op.opcode {
            Opcode::Matmul => self.matmul(op, s, self.facts.by_heads[i]),
            Opcode::RmsNorm => return self.rms_norm(i, s),
            Opcode::RowSquareSum => self.row_square_sum(op, s),
            Opcode::CacheWrite => self.cache_write(op, s),
            Opcode::CacheRead => self.cache_read(op, s),
            Opcode::Attention => self.attention(op, s),
            Opcode::Output => self.output(op, s),
            Opcode::Quantize => self.quantize(op, s),
            _ => self.rowwise(op, s, self.facts.by_heads[i]),
        }
        None
    }

    // Values.

    /// The local value of a logical one on stage `s`, whatever its layout.
    fn get(&mut self, v: ValueId, s: usize) -> ValueId {
        match self.stages[s].held.get(&v) {
            Some(Held::Ready(x)) => return *x,
            Some(Held::Pending(ticket)) => {
                let ticket = *ticket;
                let x = self.wait(s, ticket, None);
                self.stages[s].held.insert(v, Held::Ready(x));
                return x;
            }
            None => {}
        }
        let x = match self.facts.defs[v.0 as usize].map(|d| &self.source.ops[d]) {
            Some(op) if op.opcode.row().kind == Kind::Source && op.opcode != Opcode::CacheRead => {
                self.source_op(op, s)
            }
            _ => self.receive(v, s),
        };
        self.stages[s].held.insert(v, Held::Ready(x));
        x
    }

    fn source_op(&mut self, op: &Op, s: usize) -> ValueId {
        let logical = self.source.ty(op.results[0]).clone();
        let layout = match op.opcode {
            Opcode::Weight => self.cut.weight(op, &logical.shape),
            _ => AxisLayout::Replicated,
        };
        let ty = self.local(&logical, layout, s);
        let name = op.name.clone().unwrap_or_default();
        let b = &mut self.stages[s].b;
        if let Some(load) = op.str("load") {
            b.attr("load", load);
        }
        b.label(&self.source.value(op.results[0]).name);
        let x = match op.opcode {
            Opcode::Weight => b.weight(&name, ty),
            Opcode::Call => b.call(&name, ty),
            _ => b.input(&name, ty),
        };
        // An input that holds tokens arrives whole; each rank keeps its own.
        if op.str("part") == Some("tokens") {
            let want = self.cut.tokens(&logical.shape);
            return self.reshard(x, want, s, 1);
        }
        x
    }

    /// Moves a value from the stage that holds it.
    fn receive(&mut self, v: ValueId, s: usize) -> ValueId {
        let from =
            (0..self.stages.len()).find(|t| *t != s && self.stages[*t].held.contains_key(&v)).unwrap_or(0);
        let x = self.get(v, from);
        let ty = self.stages[from].b.ty(x).clone();
        let ticket = self.issue(from, Opcode::Send, &[x], &[("to", s as i64)], "pp", Axis::Pp);
        self.stages[from].sends.push(ticket);
        let b = &mut self.stages[s].b;
        // What the receive writes was last touched on the compute stream.
        b.stream("compute");
        let event = b.op(Opcode::EventRecord, &[]);
        b.attr("axis", "pp").attr("from", from as i64).stream("pp").after(event);
        let ticket = b.recv(ty.clone());
        self.wait(s, ticket, Some(ty))
    }

    fn local(&self, logical: &Type, layout: AxisLayout, s: usize) -> Type {
        let program = self.stages[s].b.program();
        let mut ty = logical.clone().on(Axis::Tp, layout);
        if let AxisLayout::Shard(shard) = layout {
            ty.shape[shard.dim] = match shard.uneven {
                None => ty.shape[shard.dim] / u64::from(shard.parts(self.mesh.size(Axis::Tp))),
                Some(u) => tessera_ir::rules::role_piece(program, Axis::Tp, u, shard.ways),
            };
        }
        ty
    }

    fn set(&mut self, op: &Op, s: usize, x: ValueId) {
        self.stages[s].held.insert(op.results[0], Held::Ready(x));
    }

    fn layout(&self, x: ValueId, s: usize) -> AxisLayout {
        self.stages[s].b.ty(x).layout.on(Axis::Tp)
    }

    // Collectives.

    /// Issues a collective on its stream after everything computed so far; the ticket.
    fn issue(
        &mut self,
        s: usize,
        opcode: Opcode,
        operands: &[ValueId],
        attrs: &[(&str, i64)],
        stream: &str,
        axis: Axis,
    ) -> ValueId {
        let b = &mut self.stages[s].b;
        b.stream("compute");
        let event = b.op(Opcode::EventRecord, &[]);
        b.attr("axis", axis.name());
        for (k, v) in attrs {
            b.attr(k, *v);
        }
        b.stream(stream).after(event);
        b.issue(opcode, operands)
    }

    fn wait(&mut self, s: usize, ticket: ValueId, declared: Option<Type>) -> ValueId {
        let b = &mut self.stages[s].b;
        b.stream("compute");
        b.wait(ticket, declared).unwrap_or(ticket)
    }

    fn all_reduce(&mut self, x: ValueId, s: usize) -> ValueId {
        match self.reducing(x, s) {
            Held::Ready(x) => x,
            Held::Pending(ticket) => self.wait(s, ticket, None),
        }
    }

    /// Issues the reduction of a value, if it is partial.
    fn reducing(&mut self, x: ValueId, s: usize) -> Held {
        let AxisLayout::Partial { reduction: r, .. } = self.layout(x, s) else { return Held::Ready(x) };
        let b = &mut self.stages[s].b;
        b.stream("compute");
        let event = b.op(Opcode::EventRecord, &[]);
        b.attr("axis", "tp").attr("reduction", r.name()).stream("tp_collective").after(event);
        Held::Pending(b.issue(Opcode::AllReduce, &[x]))
    }

    /// Keeps a result whose terms meet on the way to whoever reads it first.
    fn set_reducing(&mut self, op: &Op, s: usize, y: ValueId) {
        let is_read = !self.facts.readers[op.results[0].0 as usize].is_empty();
        let held = match self.reducing(y, s) {
            Held::Pending(ticket) if !is_read => Held::Ready(self.wait(s, ticket, None)),
            held => held,
        };
        self.stages[s].held.insert(op.results[0], held);
    }

    /// Brings a value into a layout over tp. `unit` is what must stay together along the new shard's dim.
    fn reshard(&mut self, x: ValueId, want: AxisLayout, s: usize, unit: u64) -> ValueId {
        use AxisLayout::{Partial, Replicated, Shard as S};
        match (self.layout(x, s), want) {
            (have, want) if have == want => x,
            (Partial { .. }, want) => {
                let y = self.all_reduce(x, s);
                self.reshard(y, want, s, unit)
            }
            (Replicated, S(to)) => {
                let b = &mut self.stages[s].b;
                b.attr("axis", "tp").attr("dim", to.dim as u64).attr("unit", unit);
                b.op(Opcode::TakeShard, &[x])
            }
            (S(from), S(to)) => {
                let ticket = self.exchange(x, from, to, s, unit);
                self.wait(s, ticket, None)
            }
            (S(from), _) => self.gather(x, from, s),
            (_, _) => x,
        }
    }

    fn exchange(&mut self, x: ValueId, from: Shard, to: Shard, s: usize, unit: u64) -> ValueId {
        let attrs = [("concat", from.dim as i64), ("split", to.dim as i64), ("unit", unit as i64)];
        self.issue(s, Opcode::AllToAll, &[x], &attrs, "tp_collective", Axis::Tp)
    }

    /// All pieces on every rank; uneven ones are padded to equal counts first, as NCCL needs.
    fn gather(&mut self, x: ValueId, from: Shard, s: usize) -> ValueId {
        let parts = u64::from(self.cut.tp);
        let mut x = x;
        if let Some(u) = from.uneven {
            let rows = (u.extent / u.unit).div_ceil(parts) * u.unit;
            let b = &mut self.stages[s].b;
            b.attr("axis", "tp").attr("dim", from.dim as u64).attr("rows", rows);
            x = b.op(Opcode::Pad, &[x]);
        }
        let ticket =
            self.issue(s, Opcode::AllGather, &[x], &[("dim", from.dim as i64)], "tp_collective", Axis::Tp);
        let mut y = self.wait(s, ticket, None);
        if let Some(u) = from.uneven {
            let b = &mut self.stages[s].b;
            b.attr("extent", u.extent).attr("parts", parts).attr("unit", u.unit);
            y = b.op(Opcode::Compact, &[y]);
        }
        y
    }

    // Ops.

    fn matmul(&mut self, op: &Op, s: usize, by_heads: bool) {
        use AxisLayout::{Replicated, Shard as S};
        let w = self.get(op.operands[1], s);
        let mut x = self.get(op.operands[0], s);
        let (lx, lw) = (self.layout(x, s), self.layout(w, s));
        // Rows of x may be cut; its columns only where w's are cut alike.
        let split = matches!((lx, lw), (S(a), S(b)) if a.dim == 1 && a == b);
        if let S(a) = lx
            && a.dim == 1
            && !split
        {
            let global = self.stages[s].b.ty(x).shape[0];
            let want = if lw == Replicated { self.cut.tokens(&[global]) } else { Replicated };
            x = self.reshard(x, want, s, 1);
        }
        let bias = op.key("bias").map(|b| self.get(b, s));
        let scales = ["x_scale", "w_scale"].map(|k| op.key(k).map(|v| (k, self.get(v, s))));
        let act = op.str("act").map(str::to_string);
        let segmented = self.invariant && self.part(op.operands[1]) == Some("row");
        let b = &mut self.stages[s].b;
        if segmented {
            b.attr("segments", if split { SEGMENTS / i64::from(self.cut.tp) } else { SEGMENTS });
        }
        let y = if split {
            // A bias or activation inside would apply to each rank's term of the sum.
            let y = b.op(Opcode::Matmul, &[x, w]);
            if bias.is_none() && act.is_none() {
                return self.set_reducing(op, s, y);
            }
            let mut y = self.all_reduce(y, s);
            if let Some(bias) = bias {
                let b = &mut self.stages[s].b;
                if let Some(act) = &act {
                    b.attr("act", act.as_str());
                }
                y = b.op(Opcode::BiasAct, &[y, bias]);
            }
            y
        } else {
            if let Some(act) = &act {
                b.attr("act", act.as_str());
            }
            if let Some(bias) = bias {
                b.key("bias", bias);
            }
            for (k, scale) in scales.into_iter().flatten() {
                b.key(k, scale);
            }
            b.op(Opcode::Matmul, &[x, w])
        };
        self.finish_row_op(op, s, y, by_heads);
    }

    /// Whole rows: where columns are cut, rows are cut instead, as the product would ask that reads them.
    fn quantize(&mut self, op: &Op, s: usize) {
        let mut x = self.get(op.operands[0], s);
        if matches!(self.layout(x, s), AxisLayout::Shard(shard) if shard.dim == 1) {
            let want = self.cut.tokens(&self.source.ty(op.operands[0]).shape);
            x = self.reshard(x, want, s, 1);
        }
        let made = self.stages[s].b.quantize(x);
        for (logical, local) in op.results.iter().zip(made) {
            self.stages[s].held.insert(*logical, Held::Ready(local));
        }
    }

    fn part(&self, weight: ValueId) -> Option<&str> {
        self.facts.defs[weight.0 as usize].and_then(|d| self.source.ops[d].str("part"))
    }

    /// Keeps a result; if every reader wants it by heads and it is cut by tokens, its exchange starts now.
    fn finish_row_op(&mut self, op: &Op, s: usize, y: ValueId, by_heads: bool) {
        if by_heads && let AxisLayout::Shard(from) = self.layout(y, s) {
            let width = self.stages[s].b.ty(y).shape[1];
            if from.dim == 0
                && let AxisLayout::Shard(to) = self.cut.heads(width)
            {
                let unit = self.cut.head_dim;
                let ticket = self.exchange(y, from, to, s, unit);
                self.stages[s].held.insert(op.results[0], Held::Pending(ticket));
                return;
            }
        }
        self.set(op, s, y);
    }

    /// A norm over whole rows, or partial sums that meet in one small all-reduce. A neighbouring norm of the
    /// same shape travels in the same all-reduce.
    fn rms_norm(&mut self, i: usize, s: usize) -> Option<usize> {
        let op = &self.source.ops[i];
        let x = self.get(op.operands[0], s);
        let sharded = matches!(self.layout(x, s), AxisLayout::Shard(shard) if shard.dim == 1);
        let by_heads = self.facts.by_heads[i];
        if !sharded {
            let w = self.get(op.operands[1], s);
            let segmented = self.invariant;
            let b = &mut self.stages[s].b;
            if segmented {
                b.attr("segments", SEGMENTS);
            }
            b.attr("eps", op.float("eps").unwrap_or(1e-6));
            let y = b.op(Opcode::RmsNorm, &[x, w]);
            self.finish_row_op(op, s, y, by_heads);
            return None;
        }
        let mut ops = vec![(op, x)];
        let mut also = None;
        let ahead = (i + 1..self.source.ops.len()).find(|j| self.source.ops[*j].opcode != Opcode::Weight);
        if let Some(j) = ahead
            && self.source.ops[j].opcode == Opcode::RmsNorm
            && self.owners(j) == (s..=s)
        {
            let next = &self.source.ops[j];
            let y = self.get(next.operands[0], s);
            if self.stages[s].b.ty(y) == self.stages[s].b.ty(x) {
                ops.push((next, y));
                also = Some(j);
            }
        }
        let width = self.source.ty(op.results[0]).shape[1];
        let values: Vec<ValueId> = ops.iter().map(|o| o.1).collect();
        let sums = self.squares(&values, s);
        let sums = self.all_reduce(sums, s);
        for (col, (op, x)) in ops.iter().enumerate() {
            let w = self.get(op.operands[1], s);
            let b = &mut self.stages[s].b;
            b.attr("col", col as u64).attr("width", width).attr("eps", op.float("eps").unwrap_or(1e-6));
            let y = b.op(Opcode::RmsScale, &[*x, sums, w]);
            self.set(op, s, y);
        }
        also
    }

    fn row_square_sum(&mut self, op: &Op, s: usize) {
        let values: Vec<ValueId> = op.operands.iter().map(|v| self.get(*v, s)).collect();
        let sums = self.squares(&values, s);
        self.set_reducing(op, s, sums);
    }

    /// Per row the sums of squares of values that are cut alike; partial where their columns are cut.
    fn squares(&mut self, values: &[ValueId], s: usize) -> ValueId {
        let split = matches!(self.layout(values[0], s), AxisLayout::Shard(shard) if shard.dim == 1);
        let b = &mut self.stages[s].b;
        if self.invariant {
            b.attr("segments", if split { SEGMENTS / i64::from(self.cut.tp) } else { SEGMENTS });
        }
        b.op(Opcode::RowSquareSum, values)
    }

    fn buffer(&mut self, op: &Op, s: usize) -> (tessera_ir::BufferId, Type) {
        let logical = op.buffer.map(|b| self.source.buffer(b));
        let (name, ty) = logical.map_or((String::new(), None), |b| (b.name.clone(), Some(b.ty.clone())));
        let ty = ty.unwrap_or_else(|| Type::scalar(tessera_ir::DType::F32));
        let layout = self.cut.buffer(&name, &ty.shape);
        let local = self.local(&ty, layout, s);
        (self.stages[s].b.buffer(&name, local.clone()), local)
    }

    fn cache_write(&mut self, op: &Op, s: usize) {
        let x = self.get(op.operands[0], s);
        let (buffer, ty) = self.buffer(op, s);
        let unit = if op.buffer.is_some_and(|b| self.source.buffer(b).name.contains('.')) {
            self.cut.head_dim
        } else {
            1
        };
        let x = self.reshard(x, ty.layout.on(Axis::Tp), s, unit);
        let row = op.key("row").map(|r| self.get(r, s));
        let b = &mut self.stages[s].b;
        if let Some(first) = op.int("first") {
            b.attr("first", first);
        }
        if let Some(row) = row {
            b.key("row", row);
        }
        b.write(buffer, x);
    }

    fn cache_read(&mut self, op: &Op, s: usize) {
        let (buffer, _) = self.buffer(op, s);
        let b = &mut self.stages[s].b;
        for name in ["row", "rows"] {
            if let Some(n) = op.int(name) {
                b.attr(name, n);
            }
        }
        let x = b.read(buffer);
        self.set(op, s, x);
    }

    fn attention(&mut self, op: &Op, s: usize) {
        let own = reads_self_cache(self.source, self.facts.defs[op.operands[1].0 as usize]);
        let mut q = self.get(op.operands[0], s);
        let (k, v) = (self.get(op.operands[1], s), self.get(op.operands[2], s));
        if own {
            let want = self.layout(k, s);
            let unit = self.cut.head_dim;
            q = self.reshard(q, want, s, unit);
        }
        let bias = op.key("bias").map(|b| self.get(b, s));
        let b = &mut self.stages[s].b;
        b.attr("head_dim", self.cut.head_dim);
        if let Some(rows) = op.ints("bias_rows") {
            b.attr("bias_rows", rows.to_vec());
        }
        if let Some(bias) = bias {
            b.key("bias", bias);
        }
        let y = b.op(Opcode::Attention, &[q, k, v]);
        self.set(op, s, y);
    }

    fn output(&mut self, op: &Op, s: usize) {
        let x = self.get(op.operands[0], s);
        let x = self.reshard(x, AxisLayout::Replicated, s, 1);
        self.stages[s].b.output(op.name.as_deref().unwrap_or("out"), x);
    }

    /// Ops that work row by row: their rows may be cut. Operands after the first follow its layout where they
    /// have as many rows; per-frame and per-column operands stay as they are.
    fn rowwise(&mut self, op: &Op, s: usize, by_heads: bool) {
        let mut operands = Vec::new();
        for v in &op.operands {
            let x = self.get(*v, s);
            operands.push(x);
        }
        if let Some(first) = operands.first().copied() {
            let rows = self.source.ty(op.operands[0]).shape.clone();
            let want = self.layout(first, s);
            for (i, x) in operands.iter_mut().enumerate().skip(1) {
                if self.source.ty(op.operands[i]).shape == rows {
                    *x = self.reshard(*x, want, s, 1);
                }
            }
        }
        let keyed: Vec<(&'static str, ValueId)> =
            op.keyed.iter().map(|(k, v)| (*k, self.get(*v, s))).collect();
        let b = &mut self.stages[s].b;
        let mut attrs = op.attrs.clone();
        for logical_only in ["at", "part", "unit"] {
            attrs.remove(logical_only);
        }
        b.attrs(attrs);
        for (k, v) in keyed {
            b.key(k, v);
        }
        let y = b.op(op.opcode, &operands);
        self.finish_row_op(op, s, y, by_heads);
    }
}
