//! The steps of a program whose values have layouts: each op, with the layouts in which it reads its
//! operands.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::rules::RuleError;
use tessera_ir::{Attrs, DType, Op, OpKind, OpView, Opcode, Program, ValueId, WeightLoad, views};
use tessera_mesh::{AxisLayout, Layout, Mesh};

use super::choice::{LayoutChoice, PlannedValue, RuleTrials, strip_hints};
use super::segments::{divide_sum, set_local_segments};
use super::{LaidOutProgram, rule_diagnostic};
use crate::codes::T0615;
use crate::mapping::Numerics;

/// A program whose values have layouts. Its values are those of the logical program, followed by
/// the partial results of ops that were split.
pub(super) struct LayoutPlan {
    pub(super) name: String,
    pub(super) values: Vec<PlannedValue>,
    pub(super) steps: Vec<Step>,
}

/// An op, without the hints of a logical program, and what it reads.
pub(super) struct Step {
    pub(super) op: Op,
    /// Positional operands, followed by keyed ones.
    pub(super) reads: Vec<Reading>,
}

/// A value that an op reads in a layout.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) value: ValueId,
    /// The layout that the value has.
    pub(super) from: Layout,
    /// The layout that the op reads.
    pub(super) to: Layout,
}

impl LayoutPlan {
    /// Returns the layout in which a value is produced.
    pub(super) fn first_layout(&self, v: ValueId) -> Layout {
        self.values[v.0 as usize].layouts.first().copied().unwrap_or_default()
    }
}

/// Chooses the layouts of a program. `sources` and `outputs` were checked against its names.
///
/// # Errors
/// T0615, or the broken rule, for each op that no layouts suit.
pub(super) fn plan_steps(
    laid_out: &LaidOutProgram,
    mesh: &Mesh,
    numerics: Numerics,
) -> Result<LayoutPlan, Diagnostics> {
    let p = &laid_out.program;
    let value = |(v, id): (&tessera_ir::Value, u32)| PlannedValue {
        name: v.name.clone(),
        dtype: v.ty.dtype,
        shape: v.ty.shape.clone(),
        is_weight: false,
        stated: laid_out.values.get(&ValueId(id)).map(|layout| on_active_axes(mesh, *layout)),
        layouts: Vec::new(),
    };
    let values = p.values.iter().zip(0..).map(value).collect();
    let plan = LayoutPlan { name: p.name.clone(), values, steps: vec![] };
    let mut planner = StepPlanner { laid_out, mesh, trials: RuleTrials::new(mesh, numerics), numerics, plan };
    let mut ds = Vec::new();
    for op in &p.ops {
        if let Err(e) = planner.plan_op(&strip_hints(op)) {
            ds.push(rule_diagnostic(&p.name, &e));
            // Later ops are planned as if this one were right, so that every error is found.
            op.results
                .iter()
                .for_each(|r| planner.plan.values[r.0 as usize].layouts = vec![Layout::REPLICATED]);
        }
    }
    if ds.is_empty() { Ok(planner.plan) } else { Err(ds) }
}

struct StepPlanner<'a> {
    laid_out: &'a LaidOutProgram,
    mesh: &'a Mesh,
    trials: RuleTrials,
    numerics: Numerics,
    plan: LayoutPlan,
}

impl StepPlanner<'_> {
    fn plan_op(&mut self, op: &Op) -> Result<(), RuleError> {
        match op.opcode.table_row().kind {
            OpKind::Source if op.opcode != Opcode::CacheRead => self.plan_source(op),
            OpKind::Sink if op.opcode == Opcode::Output => self.plan_output(op),
            OpKind::Compute => self.plan_compute(op),
            OpKind::Source | OpKind::Sink | OpKind::Collective | OpKind::Order => {
                let message = format!("{} does not belong to an array program", op.opcode.name());
                Err(RuleError { code: &T0615, message })
            }
        }
    }

    fn plan_source(&mut self, op: &Op) -> Result<(), RuleError> {
        let stated = op.name.as_ref().filter(|_| op.opcode != Opcode::Call);
        let layout = stated.and_then(|n| self.laid_out.sources.get(n)).copied().unwrap_or_default();
        let mut layout = on_active_axes(self.mesh, layout);
        if is_scale_of_rows(op) {
            // A shard of columns has the scales of all rows.
            layout = self.mesh.active_axes().fold(layout, |l, axis| match l.on_axis(axis) {
                AxisLayout::Shard(shard) if shard.dim > 0 => l.with_axis(axis, AxisLayout::Replicated),
                _ => l,
            });
        }
        let Some(result) = op.results.first() else { return Ok(()) };
        self.plan.values[result.0 as usize].is_weight = op.opcode == Opcode::Weight;
        self.trials.check_source(op, &self.plan.values[result.0 as usize], layout)?;
        self.push_step(op.clone(), &[], &[layout])
    }

    fn plan_output(&mut self, op: &Op) -> Result<(), RuleError> {
        let Some(v) = op.operands.first() else { return Ok(()) };
        let own = self.plan.first_layout(*v);
        let settled = self.mesh.active_axes().fold(own, |l, axis| match l.on_axis(axis) {
            AxisLayout::Partial { .. } => l.with_axis(axis, AxisLayout::Replicated),
            AxisLayout::Replicated | AxisLayout::Shard(_) => l,
        });
        let stated = op.name.as_ref().and_then(|n| self.laid_out.outputs.get(n));
        let layout = stated.map_or(settled, |l| on_active_axes(self.mesh, *l));
        self.push_step(op.clone(), &[layout], &[])
    }

    fn plan_compute(&mut self, op: &Op) -> Result<(), RuleError> {
        let mut op = op.clone();
        if self.numerics == Numerics::MeshInvariant {
            let operands = read_values(&op).map(|v| &self.plan.values[v.0 as usize]);
            let operands: Vec<(DType, &[u64])> = operands.map(|v| (v.dtype, v.shape.as_slice())).collect();
            divide_sum(&mut op, &operands);
        }
        let op = &op;
        let choice = self.choose(op)?;
        match self.split_bias(op, &choice)? {
            Some((sum, rest)) => {
                self.plan_op(&sum)?;
                self.plan_op(&rest)
            }
            None => {
                let mut local = op.clone();
                if self.numerics == Numerics::MeshInvariant
                    && let (Some(x), Some(layout)) = (op.operands.first(), choice.operands.first())
                {
                    let dim_count = self.plan.values[x.0 as usize].shape.len();
                    set_local_segments(&mut local, (dim_count, layout), self.mesh);
                }
                self.push_step(local, &choice.operands, &choice.results)
            }
        }
    }

    fn choose(&self, op: &Op) -> Result<LayoutChoice, RuleError> {
        let value = |v: &ValueId| &self.plan.values[v.0 as usize];
        let operands: Vec<&PlannedValue> = read_values(op).map(|v| value(&v)).collect();
        let results: Vec<PlannedValue> = op.results.iter().map(value).cloned().collect();
        self.trials.choose_layouts(op, &operands, &results)
    }

    /// Splits a matmul with a bias into the sum and the bias, if the terms of the sum stay where they
    /// are and fewer bytes travel: a bias inside of the matmul would be added to every term.
    fn split_bias(&mut self, op: &Op, whole: &LayoutChoice) -> Result<Option<(Op, Op)>, RuleError> {
        let Ok(OpView::Matmul(views::Matmul { bias: Some(bias), .. })) = op.view() else {
            return Ok(None);
        };
        let Some(result) = op.results.first().copied() else { return Ok(None) };
        let mut sum = op.clone();
        // The scales of e4m3 belong to the terms of the sum.
        sum.keyed.retain(|(name, _)| *name != "bias");
        sum.attrs.remove("act");
        if self.choose(&sum)?.bytes >= whole.bytes {
            return Ok(None);
        }
        let mut value = self.plan.values[result.0 as usize].clone();
        value.name += ".sum";
        value.stated = None;
        value.is_weight = false;
        let id = ValueId(self.plan.values.len() as u32);
        self.plan.values.push(value);
        sum.results = vec![id];
        let attrs: Attrs = op.attrs.clone().into_iter().filter(|(name, _)| name == "act").collect();
        let rest = Op {
            opcode: Opcode::BiasAct,
            operands: vec![id, bias],
            keyed: Vec::new(),
            attrs,
            results: vec![result],
            ..op.clone()
        };
        Ok(Some((sum, rest)))
    }

    /// Adds a step, and the layouts to which it converts its operands.
    fn push_step(&mut self, op: Op, operands: &[Layout], results: &[Layout]) -> Result<(), RuleError> {
        let mut reads = Vec::new();
        for (v, to) in read_values(&op).zip(operands) {
            let value = &mut self.plan.values[v.0 as usize];
            let Some((from, _)) = value.cheapest_source(self.mesh, *to) else {
                let message = format!("%{} does not get to the layout that is wanted", value.name);
                return Err(RuleError { code: &T0615, message });
            };
            if !value.layouts.contains(to) {
                value.layouts.push(*to);
            }
            reads.push(Reading { value: v, from, to: *to });
        }
        for (v, layout) in op.results.iter().zip(results) {
            self.plan.values[v.0 as usize].layouts = vec![*layout];
        }
        self.plan.steps.push(Step { op, reads });
        Ok(())
    }
}

/// Returns whether an op loads the scales of a weight's rows, which has the name of the weight.
pub(super) fn is_scale_of_rows(op: &Op) -> bool {
    op.weight_load() == Some(WeightLoad::E4m3Scale)
}

/// Returns the values that an op reads: positional operands, followed by keyed ones.
fn read_values(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    op.operands.iter().copied().chain(op.keyed.iter().map(|(_, v)| *v))
}

/// Returns a layout with nothing to shard on the axes that have one rank.
pub(super) fn on_active_axes(mesh: &Mesh, layout: Layout) -> Layout {
    mesh.active_axes().fold(Layout::REPLICATED, |l, axis| l.with_axis(axis, layout.on_axis(axis)))
}

/// Returns, for each value, the conversions from the layout in which it is produced, in the order of
/// their first readers.
pub(super) fn conversions_by_value(plan: &LayoutPlan) -> BTreeMap<ValueId, Vec<Reading>> {
    let mut out: BTreeMap<ValueId, Vec<Reading>> = BTreeMap::new();
    for r in plan.steps.iter().flat_map(|s| &s.reads) {
        let of_value = out.entry(r.value).or_default();
        if r.from != r.to && r.from == plan.first_layout(r.value) && of_value.iter().all(|o| o.to != r.to) {
            of_value.push(*r);
        }
    }
    out
}

/// Returns the ops of a program that a layout can name: sources or outputs.
pub(super) fn named_ops(p: &Program, opcodes: &[Opcode]) -> Vec<(String, ValueId)> {
    let named = |op: &Op| {
        let v = op.results.first().or(op.operands.first())?;
        Some((op.name.clone()?, *v))
    };
    p.ops.iter().filter(|op| opcodes.contains(&op.opcode)).filter_map(named).collect()
}

/// Returns a diagnostic about a program.
pub(super) fn program_diagnostic(p: &Program, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0615, message).with_label(format!("@{}", p.name), "this program")
}
