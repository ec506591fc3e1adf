//! Evaluates the programs of all ranks of a mesh, each in program order, with collectives between
//! them.

use std::collections::BTreeMap;

use tessera_ir::{DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{AxisLayout, Coord, Group, Mesh, Rank};

use crate::collectives::{CollectiveFabric, CollectiveTicket, TicketState, take_shard};
use crate::compute::{self, GlobalPosition};
use crate::{EvalError, Tensor, tile_ops};

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
    /// Call scalars by name.
    pub scalars: BTreeMap<String, CallScalar>,
    /// Input tensors of the call, by name.
    pub inputs: BTreeMap<String, InputTensor>,
}

impl CallInputs {
    /// Adds an `i64` scalar.
    #[must_use]
    pub fn with_int(mut self, name: &str, x: i64) -> CallInputs {
        self.scalars.insert(name.to_string(), CallScalar::Int(x));
        self
    }

    /// Adds a float scalar.
    #[must_use]
    pub fn with_float(mut self, name: &str, x: f64) -> CallInputs {
        self.scalars.insert(name.to_string(), CallScalar::Float(Tensor::scalar(x)));
        self
    }

    /// Adds a vector with one number per frame.
    #[must_use]
    pub fn with_floats(mut self, name: &str, x: &[f64]) -> CallInputs {
        self.scalars.insert(name.to_string(), CallScalar::Float(Tensor::new(&[x.len()], x.to_vec())));
        self
    }

    /// Adds a global tensor.
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

enum EvalValue {
    Empty,
    Tensor(Tensor),
    Int(i64),
    Ticket(CollectiveTicket),
    Event,
}

struct RankEvaluator<'a> {
    rank: Rank,
    program: &'a Program,
    next: usize,
    slots: Vec<EvalValue>,
    /// The blocking collective in progress, if any.
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
        load: Option<&str>,
        coord: Coord,
    ) -> Result<Tensor, String> {
        let global = self.weights.get(name).ok_or_else(|| format!("there is no weight \"{name}\""))?;
        match load {
            None => self.shard_tensor(global, ty, coord),
            Some("patch") => self.shard_tensor(&compute::flatten_patches(global)?, ty, coord),
            Some("e4m3") => self.shard_tensor(&compute::quantize_rows(global)?.0, ty, coord),
            Some("e4m3.scale") => self.shard_tensor(&compute::quantize_rows(global)?.1, ty, coord),
            Some(other) => Err(format!("unknown transformation load = \"{other}\"")),
        }
    }

    /// Returns a rank's shard of a buffer, if the rank has run a program that declares it.
    #[must_use]
    pub fn buffer(&self, rank: Rank, name: &str) -> Option<&Tensor> {
        self.buffers.get(rank.0 as usize)?.get(name)
    }

    /// Sets all buffers back to zeros.
    pub fn clear_buffers(&mut self) {
        self.buffers.iter_mut().for_each(BTreeMap::clear);
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
                    slots: program.values.iter().map(|_| EvalValue::Empty).collect(),
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
        let done = if op.opcode.is_collective() {
            self.run_collective(r, op, fabric).map_err(|e| e.unwrap_or_else(&fault))?
        } else if op.opcode == Opcode::Wait {
            match fabric.collective_state(&r.ticket_value(op.operands.first()).map_err(&fault)?) {
                TicketState::Open => None,
                TicketState::Done(result) => Some(result.map(EvalValue::Tensor).into_iter().collect()),
            }
        } else {
            Some(self.evaluate_local(r, op, call).map_err(&fault)?)
        };
        let Some(made) = done else { return Ok(false) };
        if made.len() != op.results.len() {
            return Err(fault(format!(
                "{} results annotated, but the op returns {}",
                op.results.len(),
                made.len()
            )));
        }
        for (slot, v) in made.into_iter().zip(&op.results) {
            slot.check_type(r.program.type_of(*v)).map_err(fault)?;
            r.slots[v.0 as usize] = slot;
        }
        r.next += 1;
        Ok(true)
    }

    #[allow(clippy::type_complexity, reason = "a fault of the group, or a message of this rank")]
    fn run_collective(
        &self,
        r: &mut RankEvaluator<'_>,
        op: &Op,
        fabric: &mut CollectiveFabric,
    ) -> Result<Option<Vec<EvalValue>>, Result<EvalError, String>> {
        let ticket = match r.blocking_collective.clone() {
            Some(t) => t,
            None => {
                let group = op.comm_group().ok_or_else(|| Err("names no group".to_string()))?;
                let members = self.mesh.group_members(r.rank, group);
                if members.is_empty() {
                    return Err(Err(format!("belongs to no group of {group} in mesh({})", self.mesh)));
                }
                let tensor = match op.operands.first() {
                    Some(v) => Some(r.tensor_value(*v).map_err(Err)?.clone()),
                    None => None,
                };
                fabric.issue_collective(r.rank, members, group, op, tensor)?
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

    /// Evaluates an op that involves only one rank and returns its results.
    fn evaluate_local(
        &mut self,
        r: &mut RankEvaluator<'_>,
        op: &Op,
        call: &CallInputs,
    ) -> Result<Vec<EvalValue>, String> {
        let coord = self.mesh.coord_of(r.rank);
        let name = || op.name.clone().ok_or_else(|| "has no name".to_string());
        let ty = |i: usize| {
            op.results.get(i).map(|v| r.program.type_of(*v)).ok_or_else(|| "has no result".to_string())
        };
        let tensor = |t: Tensor| Ok(vec![EvalValue::Tensor(t)]);
        match op.opcode {
            Opcode::Input => tensor(self.input_value(&name()?, ty(0)?, r.rank, call)?),
            Opcode::Call => match call.scalars.get(&name()?) {
                None => Err(format!("the call has no scalar \"{}\"", name()?)),
                Some(CallScalar::Int(i)) => Ok(vec![EvalValue::Int(*i)]),
                Some(CallScalar::Float(t)) => tensor(t.clone()),
            },
            Opcode::Weight => tensor(self.weight_value(&name()?, ty(0)?, op.str_attr("load"), coord)?),
            Opcode::Output => {
                let value = r.tensor_value(*op.operands.first().ok_or("has no operand")?)?.clone();
                match r.outputs.insert(name()?, value) {
                    None => Ok(vec![]),
                    Some(_) => Err(format!("output \"{}\" is written twice", name()?)),
                }
            }
            Opcode::CacheRead => {
                let b = self.buffer_mut(r, op)?;
                let read_row_count = |name: &str| {
                    op.int_attr(name).map(|i| usize::try_from(i).map_err(|_| format!("`{name}` is negative")))
                };
                let row = read_row_count("row").transpose()?.unwrap_or(0);
                let have = b.shape().first().copied().unwrap_or(0);
                let rows = read_row_count("rows").transpose()?.unwrap_or(have);
                match b.slice(0, row, rows) {
                    Some(t) => tensor(t),
                    None => Err(format!("rows {rows} from {row} exceed a buffer of {have}")),
                }
            }
            Opcode::CacheWrite => {
                let value = r.tensor_value(*op.operands.first().ok_or("has no operand")?)?.clone();
                let row = match op.keyed_operand("row") {
                    None => 0,
                    Some(v) => r.int_value(v)?,
                };
                let row = row.checked_add(op.int_attr("first_row").unwrap_or(0)).map(usize::try_from);
                let Some(Ok(row)) = row else { return Err("a negative row".to_string()) };
                let b = self.buffer_mut(r, op)?;
                let (have, rows) = (b.shape().to_vec(), value.shape().to_vec());
                let fits = have.len() == rows.len()
                    && !have.is_empty()
                    && have[1..] == rows[1..]
                    && row.checked_add(rows[0]).is_some_and(|end| end <= have[0]);
                if !fits {
                    return Err(format!("{rows:?} from row {row} does not fit a buffer {have:?}"));
                }
                let width: usize = have[1..].iter().product();
                b.data_mut()[row * width..][..value.data().len()].copy_from_slice(value.data());
                Ok(vec![])
            }
            Opcode::MoeRoute => {
                let x =
                    op.operands.iter().map(|v| r.tensor_value(*v).cloned()).collect::<Result<Vec<_>, _>>()?;
                let [x, g] = &x[..] else { return Err(format!("expected 2 operands, got {}", x.len())) };
                tensor(tile_ops::moe_route(op, x, g, self.buffer_mut(r, op)?)?)
            }
            Opcode::EventRecord => Ok(vec![EvalValue::Event]),
            Opcode::Quantize => {
                let (rows, scales) =
                    compute::quantize_rows(r.tensor_value(*op.operands.first().ok_or("has no operand")?)?)?;
                Ok(vec![EvalValue::Tensor(rows), EvalValue::Tensor(scales)])
            }
            Opcode::TakeShard => {
                let group = op.comm_group().filter(|g| *g != Group::World).ok_or("names no mesh axis")?;
                let at = self.mesh.group_position(r.rank, group);
                let at =
                    at.ok_or_else(|| format!("belongs to no group of {group} in mesh({})", self.mesh))?;
                let parts = self.mesh.group_size(group);
                let x = r.tensor_value(*op.operands.first().ok_or("has no operand")?)?;
                let dim = op.int_attr("dim").and_then(|d| usize::try_from(d).ok()).ok_or("names no dim")?;
                let unit = op.int_attr("unit").and_then(|d| usize::try_from(d).ok()).unwrap_or(1);
                match take_shard(x, dim, unit, parts as usize, at as usize) {
                    Some(t) => tensor(t),
                    None => Err(format!("dim {dim} of {:?} cannot be sharded in units of {unit}", x.shape())),
                }
            }
            _ => {
                let operands =
                    op.operands.iter().map(|v| r.tensor_value(*v)).collect::<Result<Vec<_>, _>>()?;
                let key = |name: &str| op.keyed_operand(name).map(|v| &r.slots[v.0 as usize]);
                let float = |name: &str| match key(name) {
                    Some(EvalValue::Tensor(t)) => Some(t),
                    _ => None,
                };
                let int = |name: &str| match key(name) {
                    Some(EvalValue::Int(i)) => Some(*i),
                    _ => None,
                };
                let first = op.operands.first().map(|v| r.program.type_of(*v));
                let place = first
                    .map_or(GlobalPosition::default(), |t| GlobalPosition::from_type(t, &self.mesh, coord));
                tensor(compute::evaluate_op(op, &operands, &float, &int, &place)?)
            }
        }
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
    fn tensor_value(&self, v: ValueId) -> Result<&Tensor, String> {
        match self.slots.get(v.0 as usize) {
            Some(EvalValue::Tensor(t)) => Ok(t),
            _ => Err(format!("%{} holds no tensor", self.program.value(v).name)),
        }
    }

    fn int_value(&self, v: ValueId) -> Result<i64, String> {
        match self.slots.get(v.0 as usize) {
            Some(EvalValue::Int(i)) => Ok(*i),
            _ => Err(format!("%{} is not an integer", self.program.value(v).name)),
        }
    }

    fn ticket_value(&self, v: Option<&ValueId>) -> Result<CollectiveTicket, String> {
        match v.and_then(|v| self.slots.get(v.0 as usize)) {
            Some(EvalValue::Ticket(t)) => Ok(t.clone()),
            _ => Err("has no ticket of an issued collective".to_string()),
        }
    }

    /// Returns the collective that this rank waits for, or `None` if the rank has finished.
    fn blocking_ticket(&self) -> Option<CollectiveTicket> {
        let op = self.program.ops.get(self.next)?;
        self.blocking_collective.clone().or_else(|| self.ticket_value(op.operands.first()).ok())
    }
}

impl EvalValue {
    fn check_type(&self, ty: &Type) -> Result<(), String> {
        let fits = match self {
            EvalValue::Empty => false,
            EvalValue::Tensor(t) => {
                !ty.is_token()
                    && ty.dtype != DType::I64
                    && t.shape().iter().map(|n| *n as u64).eq(ty.shape.iter().copied())
            }
            EvalValue::Int(_) => ty.dtype == DType::I64 && ty.shape.is_empty(),
            EvalValue::Ticket(_) => ty.dtype == DType::Ticket,
            EvalValue::Event => ty.dtype == DType::Event,
        };
        let have = match self {
            EvalValue::Tensor(t) => format!("a tensor {:?}", t.shape()),
            EvalValue::Int(_) => "an integer".to_string(),
            _ => "a token".to_string(),
        };
        if fits {
            Ok(())
        } else {
            Err(format!("returns {have}, but the annotation is {}{:?}", ty.dtype, ty.shape))
        }
    }
}
