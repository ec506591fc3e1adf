//! Chooses the layouts in which an op reads its operands.
//!
//! The sharding rules of the IR decide which layouts an op accepts; nothing here knows an op. An op
//! whose rule accepts the operands as they are runs so. Otherwise the axes are taken one after the
//! other: on each, every operand stays as it is, is replicated, or is sharded over a dim that no
//! axis before shards, and the accepted combination that moves the fewest bytes is chosen. That all
//! operands are replicated is among them, and every rule accepts it.

use std::collections::BTreeSet;

use tessera_ir::rules::{RuleError, check_type, infer_types};
use tessera_ir::{Builder, DType, Op, Program, StreamKind, Type, Value, ValueId};
use tessera_mesh::{Axis, AxisLayout, Coord, Layout, Mesh, Shard};

use super::coordinates::role_at;
use super::redistribution::{local_elements, moved_bytes, plan_moves, sharded_dim};
use super::segments::{are_invariant, set_local_segments};
use crate::codes::T0615;
use crate::mapping::Numerics;

/// Maximum number of combinations of operand layouts that are compared on one axis. An op with more
/// operands than that allows replicates those that cannot stay as they are.
const MAX_COMBINATIONS: usize = 4096;

/// How much more a byte of a weight counts on tp and ep than a byte of another value. A program shards weights over these axes so
/// that they stay there: activations move to them, also where moving the weight would take fewer bytes. Weights that are
/// sharded over dp save memory, and are gathered where that takes fewer bytes.
const WEIGHT_RELUCTANCE: u64 = 1 << 20;

/// A value of an array program, and the layouts that it has at a place in the program.
#[derive(Debug, Clone)]
pub(super) struct PlannedValue {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Global shape.
    pub(super) shape: Vec<u64>,
    /// Whether the value is a weight: it lies where the program states, and is moved in no call if that can be helped.
    pub(super) is_weight: bool,
    /// The layout that ops read, if the program states one.
    pub(super) stated: Option<Layout>,
    /// The layout in which the value is produced, followed by those to which it was converted.
    pub(super) layouts: Vec<Layout>,
}

impl PlannedValue {
    /// Returns the layout in which an op reads the value if nothing moves: the stated one, or one without terms of a
    /// sum, if the sum was already computed for another op.
    fn settled_layout(&self) -> Layout {
        if let Some(stated) = self.stated {
            return stated;
        }
        let whole = self.layouts.iter().find(|l| l.partial_axis().is_none());
        whole.or(self.layouts.first()).copied().unwrap_or(Layout::REPLICATED)
    }

    /// Returns the layout from which the value gets to another with the fewest bytes, and these
    /// bytes. `None` if it cannot.
    pub(super) fn cheapest_source(&self, mesh: &Mesh, to: Layout) -> Option<(Layout, u64)> {
        let bytes_from = |from: &Layout| {
            let moves = plan_moves(mesh, &self.shape, *from, to)?;
            Some((*from, moved_bytes(mesh, &self.shape, *from, &moves, self.dtype.element_bytes())))
        };
        self.layouts.iter().filter_map(bytes_from).min_by_key(|(from, bytes)| (*bytes, *from != to))
    }

    /// Returns the bytes that a rank receives when the terms of a sum in this layout are added.
    fn reduction_bytes(&self, mesh: &Mesh, layout: &Layout) -> u64 {
        let reduced = mesh.active_axes().fold(*layout, |l, axis| match l.on_axis(axis) {
            AxisLayout::Partial { .. } => l.with_axis(axis, AxisLayout::Replicated),
            AxisLayout::Replicated | AxisLayout::Shard(_) => l,
        });
        let moves = plan_moves(mesh, &self.shape, *layout, reduced).unwrap_or_default();
        moved_bytes(mesh, &self.shape, *layout, &moves, self.dtype.element_bytes())
    }
}

/// The layouts in which an op reads its operands and returns its results.
#[derive(Debug, Clone)]
pub(super) struct LayoutChoice {
    pub(super) operands: Vec<Layout>,
    pub(super) results: Vec<Layout>,
    /// Bytes that a rank receives for the operands, and for the sums of which the op makes terms.
    pub(super) bytes: u64,
}

/// Asks the rules of the IR which layouts an op accepts.
pub(super) struct RuleTrials {
    mesh: Mesh,
    /// A coordinate with the largest and one with the smallest uneven shards, each with an empty
    /// program.
    corners: [(Coord, Program); 2],
    numerics: Numerics,
}

impl RuleTrials {
    pub(super) fn new(mesh: &Mesh, numerics: Numerics) -> RuleTrials {
        let program = |at: Coord| {
            let b = Builder::new_role("trial", &role_at(mesh, at), *mesh, &[StreamKind::Compute]);
            (at, b.program().clone())
        };
        let last = Coord(Axis::ALL.map(|a| mesh.axis_size(a) - 1));
        RuleTrials { mesh: *mesh, corners: [program(Coord::default()), program(last)], numerics }
    }

    /// Chooses the layouts of an op. `results` are its global result types.
    ///
    /// # Errors
    /// The rule's reason, if it rejects replicated operands too.
    pub(super) fn choose_layouts(
        &self,
        op: &Op,
        operands: &[&PlannedValue],
        results: &[PlannedValue],
    ) -> Result<LayoutChoice, RuleError> {
        let own: Vec<Layout> = operands.iter().map(|v| v.settled_layout()).collect();
        if let Ok(made) = self.infer_layouts(op, operands, &own, results) {
            let bytes = self.bytes_of_new_sums(&own, &made, results);
            return Ok(LayoutChoice { operands: own, results: made, bytes });
        }
        let whole = vec![Layout::REPLICATED; operands.len()];
        let made = self.infer_layouts(op, operands, &whole, results)?;
        let mut choice = LayoutChoice { operands: whole, results: made, bytes: 0 };
        for axis in self.mesh.active_axes() {
            choice = self.choose_on_axis(op, operands, results, &choice, axis);
        }
        Ok(choice)
    }

    /// Checks that a source may have this layout.
    ///
    /// # Errors
    /// The broken rule.
    pub(super) fn check_source(
        &self,
        op: &Op,
        value: &PlannedValue,
        layout: Layout,
    ) -> Result<(), RuleError> {
        for (at, program) in &self.corners {
            let ty = self.local_type(value, layout, *at);
            check_type(program, &ty)?;
            infer_types(program, &strip_hints(op), std::slice::from_ref(&ty), &[])?;
        }
        Ok(())
    }

    /// Extends layouts that are replicated on `axis` and on the axes after it to the best layouts
    /// on `axis`.
    fn choose_on_axis(
        &self,
        op: &Op,
        operands: &[&PlannedValue],
        results: &[PlannedValue],
        so_far: &LayoutChoice,
        axis: Axis,
    ) -> LayoutChoice {
        let mut candidates: Vec<Vec<Candidate>> = operands
            .iter()
            .zip(&so_far.operands)
            .map(|(v, l)| self.candidates(v, *l, axis, operands))
            .collect();
        if candidates
            .iter()
            .map(Vec::len)
            .try_fold(1usize, |n, c| n.checked_mul(c))
            .is_none_or(|n| n > MAX_COMBINATIONS)
        {
            candidates.iter_mut().for_each(|c| c.retain(|one| one.on == AxisLayout::Replicated));
        }
        // Sorted by what is known before the rule is asked; among equals the first stays.
        let mut combinations = combine(&candidates);
        combinations.sort_by_key(|c| (c.bytes, c.changed));
        let mut best: Option<((u64, usize, u64), LayoutChoice)> = None;
        for c in combinations {
            if best.as_ref().is_some_and(|(score, _)| c.bytes > score.0) {
                break;
            }
            let layouts: Vec<Layout> = so_far
                .operands
                .iter()
                .zip(c.picks.iter().zip(&candidates))
                .map(|(l, (pick, of))| l.with_axis(axis, of[*pick].on))
                .collect();
            let Ok(made) = self.infer_layouts(op, operands, &layouts, results) else { continue };
            let bytes = c.bytes.saturating_add(self.bytes_of_new_sums(&layouts, &made, results));
            let size = results.iter().zip(&made).map(|(v, l)| local_elements(&self.mesh, &v.shape, l)).sum();
            let score = (bytes, c.changed, size);
            if best.as_ref().is_none_or(|(known, _)| score < *known) {
                best = Some((score, LayoutChoice { operands: layouts, results: made, bytes }));
            }
        }
        best.map_or_else(|| so_far.clone(), |(_, choice)| choice)
    }

    /// Returns the layouts on one axis in which an operand can be read, given its layout on the axes
    /// before. The first is its own, if there is no other reason against it.
    fn candidates(
        &self,
        value: &PlannedValue,
        so_far: Layout,
        axis: Axis,
        operands: &[&PlannedValue],
    ) -> Vec<Candidate> {
        let own = value.settled_layout();
        let parts = self.mesh.axis_size(axis);
        let mut wanted: Vec<AxisLayout> = vec![own.on_axis(axis)];
        wanted.extend(value.layouts.iter().map(|l| l.on_axis(axis)));
        wanted.push(AxisLayout::Replicated);
        for (dim, extent) in value.shape.iter().enumerate() {
            // Operands of one op often need shards of the same units, such as whole heads.
            let of_others = operands.iter().flat_map(|v| &v.layouts).filter_map(|l| match l.on_axis(axis) {
                AxisLayout::Shard(Shard { uneven: Some(u), .. }) if u.extent == *extent => Some(u.unit),
                _ => None,
            });
            let units: BTreeSet<u64> = of_others.chain([1]).collect();
            let shards = units.into_iter().filter_map(|unit| Shard::new(dim, *extent, unit, parts));
            wanted.extend(shards.map(AxisLayout::Shard));
        }
        let is_taken = |on: AxisLayout| {
            sharded_dim(on)
                .is_some_and(|d| Axis::ALL.iter().any(|a| sharded_dim(so_far.on_axis(*a)) == Some(d)))
        };
        let mut out: Vec<Candidate> = Vec::new();
        for on in wanted {
            if is_taken(on) || out.iter().any(|c| c.on == on) {
                continue;
            }
            let to = self.with_later_axes(so_far.with_axis(axis, on), own, axis);
            if let Some((_, bytes)) = value.cheapest_source(&self.mesh, to) {
                let stays = value.is_weight && matches!(axis, Axis::Tp | Axis::Ep);
                let bytes = if stays { bytes.saturating_mul(WEIGHT_RELUCTANCE) } else { bytes };
                out.push(Candidate { on, bytes, is_changed: on != own.on_axis(axis) });
            }
        }
        out
    }

    /// Gives a layout on the axes after `axis` what the value has there, where no axis before shards
    /// the same dim.
    fn with_later_axes(&self, mut layout: Layout, own: Layout, axis: Axis) -> Layout {
        for later in self.mesh.active_axes().filter(|a| *a > axis) {
            let on = own.on_axis(later);
            let taken = |d: usize| self.mesh.active_axes().any(|a| sharded_dim(layout.on_axis(a)) == Some(d));
            if !sharded_dim(on).is_some_and(taken) {
                layout = layout.with_axis(later, on);
            }
        }
        layout
    }

    /// Returns the layouts of an op's results for operands in these layouts.
    fn infer_layouts(
        &self,
        op: &Op,
        operands: &[&PlannedValue],
        layouts: &[Layout],
        results: &[PlannedValue],
    ) -> Result<Vec<Layout>, RuleError> {
        let mut local = strip_hints(op);
        let ids = (0u32..).map(ValueId);
        local
            .operands
            .iter_mut()
            .chain(local.keyed.iter_mut().map(|(_, v)| v))
            .zip(ids)
            .for_each(|(v, id)| *v = id);
        local.results.clear();
        if self.numerics == Numerics::MeshInvariant
            && let (Some(x), Some(layout)) = (operands.first(), layouts.first())
            && !set_local_segments(&mut local, (x.shape.len(), layout), &self.mesh)
        {
            return Err(not_invariant(op));
        }
        let mut made: Option<Vec<Layout>> = None;
        for (at, empty) in &self.corners {
            let value = |(v, l): (&&PlannedValue, &Layout)| Value {
                name: String::new(),
                ty: self.local_type(v, *l, *at),
            };
            let program =
                Program { values: operands.iter().zip(layouts).map(value).collect(), ..empty.clone() };
            let types = infer_types(&program, &local, &[], &[])?;
            self.check_results(op, &types, results)?;
            made.get_or_insert_with(|| types.iter().map(|t| t.layout).collect());
        }
        let made = made.unwrap_or_default();
        match self.numerics {
            Numerics::MeshInvariant if !are_invariant(layouts, &made, &self.mesh) => Err(not_invariant(op)),
            Numerics::MeshInvariant | Numerics::Standard => Ok(made),
        }
    }

    /// Checks that the shards of the results make up the results of the logical op.
    fn check_results(&self, op: &Op, types: &[Type], results: &[PlannedValue]) -> Result<(), RuleError> {
        let is_part = |(t, v): (&Type, &PlannedValue)| {
            t.dtype == v.dtype && t.layout.global_shape(&t.shape, &self.mesh) == v.shape
        };
        if types.len() == results.len() && types.iter().zip(results).all(is_part) {
            return Ok(());
        }
        let message = format!("the shards of {} are not those of its result", op.opcode.name());
        Err(RuleError { code: &T0615, message })
    }

    fn local_type(&self, value: &PlannedValue, layout: Layout, at: Coord) -> Type {
        Type { dtype: value.dtype, shape: layout.local_shape(&value.shape, &self.mesh, at), layout }
    }

    /// Returns the bytes of the sums of which an op makes the terms: partial results on axes on
    /// which no operand is partial.
    fn bytes_of_new_sums(&self, operands: &[Layout], made: &[Layout], results: &[PlannedValue]) -> u64 {
        let is_partial = |l: &Layout, a: Axis| matches!(l.on_axis(a), AxisLayout::Partial { .. });
        let bytes = |(layout, value): (&Layout, &PlannedValue)| {
            let new = self.mesh.active_axes().fold(*layout, |l, axis| {
                match is_partial(&l, axis) && operands.iter().any(|o| is_partial(o, axis)) {
                    true => l.with_axis(axis, AxisLayout::Replicated),
                    false => l,
                }
            });
            value.reduction_bytes(&self.mesh, &new)
        };
        made.iter().zip(results).map(bytes).fold(0, u64::saturating_add)
    }
}

fn not_invariant(op: &Op) -> RuleError {
    let message = format!("the bits of this {} would depend on the mesh", op.opcode.name());
    RuleError { code: &T0615, message }
}

/// A layout on one axis in which an operand can be read.
struct Candidate {
    on: AxisLayout,
    bytes: u64,
    is_changed: bool,
}

/// One candidate for each operand.
struct Combination {
    picks: Vec<usize>,
    bytes: u64,
    changed: usize,
}

/// Lists all combinations of candidates; the last operand varies fastest.
fn combine(candidates: &[Vec<Candidate>]) -> Vec<Combination> {
    let mut out = vec![Combination { picks: Vec::new(), bytes: 0, changed: 0 }];
    for of_operand in candidates {
        let extend = |c: &Combination| -> Vec<Combination> {
            let with = |(i, one): (usize, &Candidate)| Combination {
                picks: c.picks.iter().copied().chain([i]).collect(),
                bytes: c.bytes.saturating_add(one.bytes),
                changed: c.changed + usize::from(one.is_changed),
            };
            of_operand.iter().enumerate().map(with).collect()
        };
        out = out.iter().flat_map(extend).collect();
    }
    out
}

/// Returns the op without the attributes that only a logical program has.
pub(super) fn strip_hints(op: &Op) -> Op {
    let mut op = op.clone();
    // Some ops that shard a dim have an attribute `unit` of their own.
    let own_unit = !op.is_source() && op.opcode.table_row().find_attr("unit").is_some();
    let is_hint = |name: &str| matches!(name, "at" | "part") || name == "unit" && !own_unit;
    op.attrs.retain(|name, _| !is_hint(name));
    op
}
