//! Evaluates the programs of all ranks of a mesh, each in program order, with collectives between
//! them.

use std::collections::BTreeMap;

use tessera_ir::{
    ComputeOp, Op, OpByKind, OpView, OrderOp, Program, SinkOp, SourceOp, Type, ValueId, WeightLoad, views,
};
use tessera_mesh::{AxisLayout, Coord, Group, Mesh, Rank};

use crate::collectives::{CollectiveFabric, CollectiveTicket, TicketState, no_group_error, take_shard};
use crate::compute::{self, OpContext};
use crate::error::OpError;
use crate::rank_values::{EvalValue, RankValues};
use crate::{EvalError, Tensor};

/// A call scalar, or a vector with one number per frame.
#[derive(Debug, Clone, PartialEq)]
pub enum CallScalar {
    /// An integer scalar, kept exact as `i64` instead of as a tensor of f64.
    Int(i64),
    /// A floating-point scalar or vector.
    Float(Tensor),
}

/// The way in which a tensor of the call is distributed to the ranks.
#[derive(Debug, Clone, PartialEq)]
pub enum InputTensor {
    /// One global tensor; each rank takes the shard that its input's layout describes.
    Global(Tensor),
    /// One local tensor per rank, used unchanged. Tests use this to give ranks different terms of a
    /// partial value.
    PerRank(Vec<Tensor>),
}

/// The scalars and tensors of a call.
#[derive(Debug, Clone, Default)]
pub struct CallInputs {
    /// Values that the programs' `call` ops return, by the op's name, such as `sigma`.
    pub scalars: BTreeMap<String, CallScalar>,
    /// Tensors that the programs' `input` ops return, by the op's name.
    pub inputs: BTreeMap<String, InputTensor>,
}

impl CallInputs {
    /// Adds an integer scalar, or replaces the scalar of that name.
    #[must_use]
    pub fn with_int(mut self, name: &str, x: i64) -> CallInputs {
        self.scalars.insert(name.to_string(), CallScalar::Int(x));
        self
    }

    /// Adds a float scalar, or replaces the scalar of that name.
    #[must_use]
    pub fn with_float(mut self, name: &str, x: f64) -> CallInputs {
        self.scalars.insert(name.to_string(), CallScalar::Float(Tensor::scalar(x)));
        self
    }

    /// Adds a global tensor, of which each rank reads its shard, or replaces the input of that
    /// name.
    #[must_use]
    pub fn with_input(mut self, name: &str, x: Tensor) -> CallInputs {
        self.inputs.insert(name.to_string(), InputTensor::Global(x));
        self
    }
}

/// An evaluator for one mesh, with its weights and buffers. Buffers start as zeros and persist from
/// one run to the next.
#[derive(Debug)]
pub struct Evaluator {
    mesh: Mesh,
    weights: BTreeMap<String, Tensor>,
    buffers: Vec<BTreeMap<String, Tensor>>,
}

/// The outputs of one rank by name.
pub type Outputs = BTreeMap<String, Tensor>;

struct RankEvaluator<'a> {
    rank: Rank,
    program: &'a Program,
    next: usize,
    values: RankValues<'a>,
    /// The blocking collective that the op at `next` issued and that some member has not joined
    /// yet.
    blocking_collective: Option<CollectiveTicket>,
    outputs: Outputs,
}

impl Evaluator {
    /// Creates an evaluator without weights, with all buffers zero.
    #[must_use]
    pub fn new(mesh: Mesh) -> Evaluator {
        Evaluator {
            mesh,
            weights: BTreeMap::new(),
            buffers: vec![BTreeMap::new(); mesh.world_size() as usize],
        }
    }

    /// Adds global weights by name; each rank takes its shard by the layout in its program.
    pub fn load_weights(&mut self, weights: impl IntoIterator<Item = (String, Tensor)>) {
        self.weights.extend(weights);
    }

    /// Returns the value of an input of this type on a rank. A rank outside the mesh takes complete
    /// values.
    ///
    /// # Errors
    /// A message if the call lacks the input or the layout does not divide it.
    pub fn input_value(
        &self,
        name: &str,
        ty: &Type,
        rank: Rank,
        call: &CallInputs,
    ) -> Result<Tensor, String> {
        match call.inputs.get(name) {
            None => Err(format!("the call has no tensor \"{name}\"")),
            Some(InputTensor::Global(t)) => self.shard_tensor(t, ty, self.mesh.coord_of(rank)),
            Some(InputTensor::PerRank(all)) => {
                let own = all.get(rank.0 as usize);
                own.cloned().ok_or_else(|| format!("the call has no tensor \"{name}\" for this rank"))
            }
        }
    }

    /// Returns the value of a weight of this type at a coordinate; `load` names the op's
    /// transformation.
    ///
    /// # Errors
    /// A message if the weight is missing, or cannot be transformed or sharded as declared.
    pub fn weight_value(
        &self,
        name: &str,
        ty: &Type,
        load: Option<WeightLoad>,
        coord: Coord,
    ) -> Result<Tensor, String> {
        let global = self.weights.get(name).ok_or_else(|| format!("there is no weight \"{name}\""))?;
        match load {
            None => self.shard_tensor(global, ty, coord),
            Some(WeightLoad::Patch) => self.shard_tensor(&compute::flatten_patches(global)?, ty, coord),
            Some(WeightLoad::Conv) => self.shard_tensor(&compute::flatten_convolution(global)?, ty, coord),
            Some(WeightLoad::ConvPast) => {
                self.shard_tensor(&compute::flatten_past_convolution(global)?, ty, coord)
            }
            Some(WeightLoad::ConvE4m3) => {
                let rows = compute::quantize_rows(&compute::flatten_convolution(global)?)?.0;
                self.shard_tensor(&rows, ty, coord)
            }
            Some(WeightLoad::ConvE4m3Scale) => {
                let scales = compute::quantize_rows(&compute::flatten_convolution(global)?)?.1;
                self.shard_tensor(&scales, ty, coord)
            }
            Some(WeightLoad::E4m3) => self.shard_tensor(&compute::quantize_rows(global)?.0, ty, coord),
            Some(WeightLoad::E4m3Scale) => self.shard_tensor(&compute::quantize_rows(global)?.1, ty, coord),
        }
    }

    /// Returns a rank's shard of a buffer, if the rank has run a program that declares it.
    #[must_use]
    pub fn buffer(&self, rank: Rank, name: &str) -> Option<&Tensor> {
        self.buffers.get(rank.0 as usize)?.get(name)
    }

    /// Runs one program per rank, in rank order, to the end, and returns the outputs per rank.
    ///
    /// # Errors
    /// The first error: an op that cannot be evaluated or whose annotated type differs from its
    /// result, members of a group that issue different collectives, or ranks that wait for each
    /// other. Buffers are then undefined.
    pub fn run(&mut self, programs: &[&Program], call: &CallInputs) -> Result<Vec<Outputs>, EvalError> {
        if programs.len() != self.mesh.world_size() as usize {
            return Err(EvalError::Setup(format!(
                "{} programs for {} ranks",
                programs.len(),
                self.mesh.world_size()
            )));
        }
        if let Some(p) = programs.iter().find(|p| p.mesh != self.mesh) {
            return Err(EvalError::Setup(format!(
                "@{} is written for mesh({}), but the evaluator has mesh({})",
                p.name, p.mesh, self.mesh
            )));
        }
        let mut fabric = CollectiveFabric::default();
        let mut runners: Vec<RankEvaluator<'_>> = self
            .mesh
            .iter()
            .map(|rank| {
                let program = programs[rank.0 as usize];
                RankEvaluator {
                    rank,
                    program,
                    next: 0,
                    values: RankValues::new(program),
                    blocking_collective: None,
                    outputs: Outputs::new(),
                }
            })
            .collect();
        loop {
            let mut moved = false;
            for r in &mut runners {
                while r.next < r.program.ops.len() && self.step_rank(r, &mut fabric, call)? {
                    moved = true;
                }
            }
            if runners.iter().all(|r| r.next == r.program.ops.len()) {
                break;
            }
            if !moved {
                return Err(EvalError::Deadlock(
                    runners
                        .iter()
                        .filter_map(|r| Some((r.rank, fabric.describe_ticket(&r.blocking_ticket()?))))
                        .collect(),
                ));
            }
        }
        if let Some(t) = fabric.find_unfinished() {
            return Err(EvalError::Deadlock(vec![(t.issuing_rank(), fabric.describe_ticket(&t))]));
        }
        Ok(runners.into_iter().map(|r| r.outputs).collect())
    }

    /// Evaluates one op of one rank. Returns `false` if the op must wait for another rank.
    fn step_rank(
        &mut self,
        r: &mut RankEvaluator<'_>,
        fabric: &mut CollectiveFabric,
        call: &CallInputs,
    ) -> Result<bool, EvalError> {
        let (at, rank) = (r.next, r.rank);
        let op = &r.program.ops[at];
        let fault = |message: String| EvalError::Op {
            rank,
            op: at,
            message: format!("{}: {message}", op.opcode.name()),
        };
        let is_replicated = |v: &ValueId| r.program.type_of(*v).layout.is_replicated();
        if !self.mesh.contains(r.rank) && !op.results.iter().all(is_replicated) {
            return Err(fault("returns a sharded or partial value on a rank outside the mesh".to_string()));
        }
        let view = op.view().map_err(|e| fault(e.message))?;
        let done = self.evaluate_op(r, op, &view, fabric, call).map_err(|e| match e {
            OpError::Group(e) => e,
            OpError::Rank(why) => fault(why),
        })?;
        let Some(made) = done else { return Ok(false) };
        if made.len() != op.results.len() {
            return Err(fault(format!(
                "{} results annotated, but the op returns {}",
                op.results.len(),
                made.len()
            )));
        }
        for (value, v) in made.into_iter().zip(&op.results) {
            r.values.define(*v, value).map_err(fault)?;
        }
        r.next += 1;
        Ok(true)
    }

    /// Evaluates an op and returns its results; `None` if it must wait for another rank.
    fn evaluate_op(
        &mut self,
        r: &mut RankEvaluator<'_>,
        op: &Op,
        view: &OpView,
        fabric: &mut CollectiveFabric,
        call: &CallInputs,
    ) -> Result<Option<Vec<EvalValue>>, OpError> {
        let tensor = |t: Tensor| vec![EvalValue::Tensor(t)];
        let values = match view.by_kind() {
            OpByKind::Collective(_) => return self.run_collective(r, op, view, fabric),
            OpByKind::Order(OrderOp::Wait(v)) => {
                match fabric.collective_state(&r.values.ticket_value(v.ticket)?) {
                    TicketState::Open => return Ok(None),
                    TicketState::Done(result) => result.map(EvalValue::Tensor).into_iter().collect(),
                }
            }
            OpByKind::Order(OrderOp::EventRecord(_)) => vec![EvalValue::Event],
            OpByKind::Source(SourceOp::Input(_)) => {
                tensor(self.input_value(name_of(op)?, r.result_type(op)?, r.rank, call)?)
            }
            OpByKind::Source(SourceOp::Call(_)) => vec![call_value(name_of(op)?, call)?],
            OpByKind::Source(SourceOp::Weight(v)) => {
                let coord = self.mesh.coord_of(r.rank);
                tensor(self.weight_value(name_of(op)?, r.result_type(op)?, v.load, coord)?)
            }
            OpByKind::Source(SourceOp::CacheRead(v)) => tensor(read_rows(self.buffer_mut(r, op)?, v)?),
            OpByKind::Sink(SinkOp::Output(v)) => {
                r.write_output(name_of(op)?, v.x)?;
                vec![]
            }
            OpByKind::Sink(SinkOp::CacheWrite(v)) => {
                self.write_rows(r, op, v)?;
                vec![]
            }
            OpByKind::Compute(view) => self.compute_op(r, op, view)?,
        };
        Ok(Some(values))
    }

    fn compute_op(
        &mut self,
        r: &RankEvaluator<'_>,
        op: &Op,
        view: ComputeOp<'_>,
    ) -> Result<Vec<EvalValue>, String> {
        let buffer = match op.buffer {
            Some(_) => Some(self.buffer_mut(r, op)?.clone()),
            None => None,
        };
        let cx = OpContext { values: &r.values, mesh: &self.mesh, rank: r.rank, op, buffer };
        Ok(compute::evaluate_op(&cx, view)?.into_iter().map(EvalValue::Tensor).collect())
    }

    fn run_collective(
        &self,
        r: &mut RankEvaluator<'_>,
        op: &Op,
        view: &OpView,
        fabric: &mut CollectiveFabric,
    ) -> Result<Option<Vec<EvalValue>>, OpError> {
        let ticket = match r.blocking_collective.clone() {
            Some(t) => t,
            None => {
                let group = op.comm_group().ok_or("names no group")?;
                let members = self.mesh.group_members(r.rank, group);
                if members.is_empty() {
                    return Err(no_group_error(&self.mesh, group).into());
                }
                let tensor = match op.operands.first() {
                    Some(v) => Some(r.values.tensor_value(*v)?.clone()),
                    None => None,
                };
                fabric.issue_collective(r.rank, members, group, op, view, tensor)?
            }
        };
        if op.issue {
            return Ok(Some(vec![EvalValue::Ticket(ticket)]));
        }
        let done = match fabric.collective_state(&ticket) {
            TicketState::Open => {
                r.blocking_collective = Some(ticket);
                None
            }
            TicketState::Done(result) => {
                r.blocking_collective = None;
                Some(result.map(EvalValue::Tensor).into_iter().collect())
            }
        };
        Ok(done)
    }

    fn write_rows(&mut self, r: &RankEvaluator<'_>, op: &Op, v: &views::CacheWrite) -> Result<(), String> {
        let value = r.values.tensor_value(v.x)?;
        if let (Some(pages), Some(start), Some(page_rows)) = (v.pages, v.start, v.page_rows) {
            let table = (r.values.tensor_value(pages)?, r.values.tensor_value(start)?);
            return compute::write_pages(self.buffer_mut(r, op)?, value, table, page_rows);
        }
        let row = match v.row {
            None => 0,
            Some(row) => r.values.int_value(row)?,
        };
        let row = i64::try_from(v.first_row).ok().and_then(|first| row.checked_add(first));
        let row = row.and_then(|row| usize::try_from(row).ok()).ok_or("a negative row")?;
        let b = self.buffer_mut(r, op)?;
        let (have, rows) = (b.shape().to_vec(), value.shape());
        let fits = have.len() == rows.len()
            && !have.is_empty()
            && have[1..] == rows[1..]
            && row.checked_add(rows[0]).is_some_and(|end| end <= have[0]);
        if !fits {
            return Err(format!("{rows:?} from row {row} does not fit a buffer {have:?}"));
        }
        let width: usize = have[1..].iter().product();
        b.data_mut()[row * width..][..value.data().len()].copy_from_slice(value.data());
        Ok(())
    }

    fn buffer_mut(&mut self, r: &RankEvaluator<'_>, op: &Op) -> Result<&mut Tensor, String> {
        let b = r.program.buffer(op.buffer.ok_or("names no buffer")?);
        let shape: Vec<usize> = b.ty.shape.iter().map(|n| *n as usize).collect();
        let buffer = self.buffers[r.rank.0 as usize]
            .entry(b.name.clone())
            .or_insert_with(|| Tensor::full(&shape, 0.0));
        if buffer.shape() == shape {
            Ok(buffer)
        } else {
            Err(format!(
                "buffer @{} has shape {:?}, but this program declares {shape:?}",
                b.name,
                buffer.shape()
            ))
        }
    }

    /// Returns the shard of a global tensor that a type describes.
    fn shard_tensor(&self, global: &Tensor, ty: &Type, coord: Coord) -> Result<Tensor, String> {
        if ty.layout.partial_axis().is_some() {
            return Err("terms of a partial value cannot be derived from a global tensor".to_string());
        }
        let mut t = global.clone();
        for axis in self.mesh.active_axes() {
            let AxisLayout::Shard(s) = ty.layout.on_axis(axis) else { continue };
            // Each subgroup of the axis holds all shards; without subgroups the whole axis is one
            // group.
            let group = Group::Axis { axis, subgroup_size: s.subgroup_size };
            if s.subgroup_size.is_some_and(|w| !self.mesh.has_subgroups(axis, w)) {
                return Err(format!("invalid subgroup {group} in mesh({})", self.mesh));
            }
            let parts = self.mesh.group_size(group) as usize;
            let unit = s.uneven.map_or(1, |u| u.unit as usize);
            let extent = t.shape().get(s.dim).copied();
            if s.uneven.is_none() && !extent.is_some_and(|e| e.is_multiple_of(parts)) {
                return Err(format!(
                    "{:?} is not evenly divisible at dim {} over {group}",
                    global.shape(),
                    s.dim
                ));
            }
            t = take_shard(&t, s.dim, unit, parts, coord.on_axis(axis) as usize % parts).ok_or_else(
                || format!("{:?} cannot be sharded at dim {} over {group}", global.shape(), s.dim),
            )?;
        }
        Ok(t)
    }
}

impl RankEvaluator<'_> {
    fn result_type(&self, op: &Op) -> Result<&Type, String> {
        op.results.first().map(|v| self.program.type_of(*v)).ok_or_else(|| "has no result".to_string())
    }

    fn write_output(&mut self, name: &str, v: ValueId) -> Result<(), String> {
        let value = self.values.tensor_value(v)?.clone();
        match self.outputs.insert(name.to_string(), value) {
            None => Ok(()),
            Some(_) => Err(format!("output \"{name}\" is written twice")),
        }
    }

    /// Returns the collective that this rank waits for, or `None` if the rank has finished.
    fn blocking_ticket(&self) -> Option<CollectiveTicket> {
        let op = self.program.ops.get(self.next)?;
        let waited = || self.values.ticket_value(*op.operands.first()?).ok();
        self.blocking_collective.clone().or_else(waited)
    }
}

fn name_of(op: &Op) -> Result<&str, String> {
    op.name.as_deref().ok_or_else(|| "has no name".to_string())
}

fn call_value(name: &str, call: &CallInputs) -> Result<EvalValue, String> {
    match call.scalars.get(name) {
        None => Err(format!("the call has no scalar \"{name}\"")),
        Some(CallScalar::Int(i)) => Ok(EvalValue::Int(*i)),
        Some(CallScalar::Float(t)) => Ok(EvalValue::Tensor(t.clone())),
    }
}

fn read_rows(buffer: &Tensor, v: &views::CacheRead) -> Result<Tensor, String> {
    let have = buffer.shape().first().copied().unwrap_or(0);
    let (row, rows) = (v.row as usize, v.rows.map_or(have, |rows| rows as usize));
    buffer.slice(0, row, rows).ok_or_else(|| format!("rows {rows} from {row} exceed a buffer of {have}"))
}
