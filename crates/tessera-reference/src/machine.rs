//! All ranks of a mesh, each running its program in order, meeting in collectives.

use std::collections::BTreeMap;

use tessera_ir::{DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{AxisLayout, Coord, Group, Mesh, Rank};

use crate::compute::{self, Place};
use crate::exchange::{Fabric, State, Ticket, piece};
use crate::{Fault, Tensor, tile};

/// A scalar of a call, or one number per frame.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// An `i64`.
    Int(i64),
    /// A float scalar or a row of them.
    Float(Tensor),
}

/// How a tensor of the call reaches the ranks.
#[derive(Debug, Clone, PartialEq)]
pub enum Feed {
    /// One global tensor; each rank takes the piece that its input's layout names.
    Whole(Tensor),
    /// One local tensor per rank, as it is. The way to give ranks different terms of a partial value.
    PerRank(Vec<Tensor>),
}

/// What a call brings.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// Call scalars by name.
    pub scalars: BTreeMap<String, Arg>,
    /// Tensors by name.
    pub inputs: BTreeMap<String, Feed>,
}

impl Call {
    /// Adds an `i64` scalar.
    #[must_use]
    pub fn int(mut self, name: &str, x: i64) -> Call {
        self.scalars.insert(name.to_string(), Arg::Int(x));
        self
    }

    /// Adds a float scalar.
    #[must_use]
    pub fn float(mut self, name: &str, x: f64) -> Call {
        self.scalars.insert(name.to_string(), Arg::Float(Tensor::scalar(x)));
        self
    }

    /// Adds one number per frame.
    #[must_use]
    pub fn floats(mut self, name: &str, x: &[f64]) -> Call {
        self.scalars.insert(name.to_string(), Arg::Float(Tensor::new(&[x.len()], x.to_vec())));
        self
    }

    /// Adds a tensor, whole.
    #[must_use]
    pub fn input(mut self, name: &str, x: Tensor) -> Call {
        self.inputs.insert(name.to_string(), Feed::Whole(x));
        self
    }
}

/// Ranks with their weights and buffers. Buffers last from one run to the next and begin as zeros.
#[derive(Debug)]
pub struct Machine {
    mesh: Mesh,
    weights: BTreeMap<String, Tensor>,
    buffers: Vec<BTreeMap<String, Tensor>>,
}

/// Outputs of one rank by name.
pub type Outputs = BTreeMap<String, Tensor>;

enum Slot {
    Empty,
    Tensor(Tensor),
    Int(i64),
    Ticket(Ticket),
    Event,
}

struct Runner<'a> {
    rank: Rank,
    program: &'a Program,
    next: usize,
    slots: Vec<Slot>,
    /// A collective called without issue, until it completes.
    inside: Option<Ticket>,
    outputs: Outputs,
}

impl Machine {
    /// A machine without weights, all buffers zero.
    #[must_use]
    pub fn new(mesh: Mesh) -> Machine {
        Machine { mesh, weights: BTreeMap::new(), buffers: vec![BTreeMap::new(); mesh.ranks() as usize] }
    }

    /// Sets global weights by name; each rank cuts its piece by the layout that its program names.
    pub fn load_weights(&mut self, weights: impl IntoIterator<Item = (String, Tensor)>) {
        self.weights.extend(weights);
    }

    /// What an input of this type is on a rank. A rank outside the mesh takes whole ones.
    ///
    /// # Errors
    /// A sentence: the call does not bring it, or it cannot be cut so.
    pub fn input(&self, name: &str, ty: &Type, rank: Rank, call: &Call) -> Result<Tensor, String> {
        match call.inputs.get(name) {
            None => Err(format!("the call brings no tensor \"{name}\"")),
            Some(Feed::Whole(t)) => self.cut(t, ty, self.mesh.coord_of(rank)),
            Some(Feed::PerRank(all)) => {
                let own = all.get(rank.0 as usize);
                own.cloned().ok_or_else(|| format!("the call brings no \"{name}\" for this rank"))
            }
        }
    }

    /// What a weight of this type is at a coordinate, `load` being the op's reordering.
    ///
    /// # Errors
    /// A sentence: there is no such weight, or it cannot be reordered or cut so.
    pub fn weight(&self, name: &str, ty: &Type, load: Option<&str>, coord: Coord) -> Result<Tensor, String> {
        let whole = self.weights.get(name).ok_or_else(|| format!("there is no weight \"{name}\""))?;
        match load {
            None => self.cut(whole, ty, coord),
            Some("patch") => self.cut(&compute::patch_rows(whole)?, ty, coord),
            Some("e4m3") => self.cut(&compute::quantized(whole)?.0, ty, coord),
            Some("e4m3.scale") => self.cut(&compute::quantized(whole)?.1, ty, coord),
            Some(other) => Err(format!("load = \"{other}\" has no meaning")),
        }
    }

    /// A rank's piece of a buffer, if the rank has run a program that declares it.
    #[must_use]
    pub fn buffer(&self, rank: Rank, name: &str) -> Option<&Tensor> {
        self.buffers.get(rank.0 as usize)?.get(name)
    }

    /// Sets all buffers back to zeros.
    pub fn clear_buffers(&mut self) {
        self.buffers.iter_mut().for_each(BTreeMap::clear);
    }

    /// Runs one program per rank, in rank order, to the end. Outputs per rank.
    ///
    /// # Errors
    /// The first fault: an op that cannot be evaluated or whose written type is not what it gave, members of a
    /// group that issue different collectives, or ranks that wait for one another. Buffers are then undefined.
    pub fn run(&mut self, programs: &[&Program], call: &Call) -> Result<Vec<Outputs>, Fault> {
        if programs.len() != self.mesh.ranks() as usize {
            return Err(Fault::Setup(format!("{} programs for {} ranks", programs.len(), self.mesh.ranks())));
        }
        if let Some(p) = programs.iter().find(|p| p.mesh != self.mesh) {
            return Err(Fault::Setup(format!(
                "@{} is for mesh({}), the machine is ({})",
                p.name, p.mesh, self.mesh
            )));
        }
        let mut fabric = Fabric::default();
        let mut runners: Vec<Runner<'_>> = self
            .mesh
            .iter()
            .map(|rank| {
                let program = programs[rank.0 as usize];
                Runner {
                    rank,
                    program,
                    next: 0,
                    slots: program.values.iter().map(|_| Slot::Empty).collect(),
                    inside: None,
                    outputs: Outputs::new(),
                }
            })
            .collect();
        loop {
            let mut moved = false;
            for r in &mut runners {
                while r.next < r.program.ops.len() && self.step(r, &mut fabric, call)? {
                    moved = true;
                }
            }
            if runners.iter().all(|r| r.next == r.program.ops.len()) {
                break;
            }
            if !moved {
                return Err(Fault::Deadlock(
                    runners.iter().filter_map(|r| Some((r.rank, fabric.describe(&r.blocked()?)))).collect(),
                ));
            }
        }
        if let Some(t) = fabric.unfinished() {
            return Err(Fault::Deadlock(vec![(t.rank(), fabric.describe(&t))]));
        }
        Ok(runners.into_iter().map(|r| r.outputs).collect())
    }

    /// One op of one rank; `false` when it must wait for another rank.
    fn step(&mut self, r: &mut Runner<'_>, fabric: &mut Fabric, call: &Call) -> Result<bool, Fault> {
        let (at, rank) = (r.next, r.rank);
        let op = &r.program.ops[at];
        let fault =
            |message: String| Fault::Op { rank, op: at, message: format!("{}: {message}", op.opcode.name()) };
        let whole = |v: &ValueId| r.program.ty(*v).layout.is_replicated();
        if !self.mesh.contains(r.rank) && !op.results.iter().all(whole) {
            return Err(fault("gives a piece or a term to a rank outside the mesh".to_string()));
        }
        let done = if op.opcode.is_collective() {
            self.collective(r, op, fabric).map_err(|e| e.unwrap_or_else(&fault))?
        } else if op.opcode == Opcode::Wait {
            match fabric.state(&r.ticket(op.operands.first()).map_err(&fault)?) {
                State::Open => None,
                State::Done(result) => Some(result.map(Slot::Tensor).into_iter().collect()),
            }
        } else {
            Some(self.local(r, op, call).map_err(&fault)?)
        };
        let Some(made) = done else { return Ok(false) };
        if made.len() != op.results.len() {
            return Err(fault(format!("{} results written, the op gives {}", op.results.len(), made.len())));
        }
        for (slot, v) in made.into_iter().zip(&op.results) {
            slot.check(r.program.ty(*v)).map_err(fault)?;
            r.slots[v.0 as usize] = slot;
        }
        r.next += 1;
        Ok(true)
    }

    #[allow(clippy::type_complexity, reason = "a fault of the group, or a message of this rank")]
    fn collective(
        &self,
        r: &mut Runner<'_>,
        op: &Op,
        fabric: &mut Fabric,
    ) -> Result<Option<Vec<Slot>>, Result<Fault, String>> {
        let ticket = match r.inside.clone() {
            Some(t) => t,
            None => {
                let group = op.group().ok_or_else(|| Err("names no group".to_string()))?;
                let members = self.mesh.members(r.rank, group);
                if members.is_empty() {
                    return Err(Err(format!("is in no group of {group} in mesh({})", self.mesh)));
                }
                let tensor = match op.operands.first() {
                    Some(v) => Some(r.tensor(*v).map_err(Err)?.clone()),
                    None => None,
                };
                fabric.issue(r.rank, members, group, op, tensor)?
            }
        };
        if op.issue {
            return Ok(Some(vec![Slot::Ticket(ticket)]));
        }
        let done = match fabric.state(&ticket) {
            State::Open => {
                r.inside = Some(ticket);
                None
            }
            State::Done(result) => {
                r.inside = None;
                Some(result.map(Slot::Tensor).into_iter().collect())
            }
        };
        Ok(done)
    }

    /// An op that concerns one rank: its results.
    fn local(&mut self, r: &mut Runner<'_>, op: &Op, call: &Call) -> Result<Vec<Slot>, String> {
        let coord = self.mesh.coord_of(r.rank);
        let name = || op.name.clone().ok_or_else(|| "has no name".to_string());
        let ty =
            |i: usize| op.results.get(i).map(|v| r.program.ty(*v)).ok_or_else(|| "has no result".to_string());
        let tensor = |t: Tensor| Ok(vec![Slot::Tensor(t)]);
        match op.opcode {
            Opcode::Input => tensor(self.input(&name()?, ty(0)?, r.rank, call)?),
            Opcode::Call => match call.scalars.get(&name()?) {
                None => Err(format!("the call brings no scalar \"{}\"", name()?)),
                Some(Arg::Int(i)) => Ok(vec![Slot::Int(*i)]),
                Some(Arg::Float(t)) => tensor(t.clone()),
            },
            Opcode::Weight => tensor(self.weight(&name()?, ty(0)?, op.str("load"), coord)?),
            Opcode::Output => {
                let value = r.tensor(*op.operands.first().ok_or("has no operand")?)?.clone();
                match r.outputs.insert(name()?, value) {
                    None => Ok(vec![]),
                    Some(_) => Err(format!("output \"{}\" is given twice", name()?)),
                }
            }
            Opcode::CacheRead => {
                let b = self.buffer_of(r, op)?;
                let whole = |name: &str| {
                    op.int(name).map(|i| usize::try_from(i).map_err(|_| format!("`{name}` < 0")))
                };
                let row = whole("row").transpose()?.unwrap_or(0);
                let have = b.shape().first().copied().unwrap_or(0);
                let rows = whole("rows").transpose()?.unwrap_or(have);
                match b.slice(0, row, rows) {
                    Some(t) => tensor(t),
                    None => Err(format!("{rows} rows from {row} of {have}")),
                }
            }
            Opcode::CacheWrite => {
                let value = r.tensor(*op.operands.first().ok_or("has no operand")?)?.clone();
                let row = match op.key("row") {
                    None => 0,
                    Some(v) => r.int(v)?,
                };
                let row = row.checked_add(op.int("first").unwrap_or(0)).map(usize::try_from);
                let Some(Ok(row)) = row else { return Err("a negative row".to_string()) };
                let b = self.buffer_of(r, op)?;
                let (have, rows) = (b.shape().to_vec(), value.shape().to_vec());
                let fits = have.len() == rows.len()
                    && !have.is_empty()
                    && have[1..] == rows[1..]
                    && row.checked_add(rows[0]).is_some_and(|end| end <= have[0]);
                if !fits {
                    return Err(format!("{rows:?} from row {row} over a buffer {have:?}"));
                }
                let width: usize = have[1..].iter().product();
                b.data_mut()[row * width..][..value.data().len()].copy_from_slice(value.data());
                Ok(vec![])
            }
            Opcode::MoeRoute => {
                let x = op.operands.iter().map(|v| r.tensor(*v).cloned()).collect::<Result<Vec<_>, _>>()?;
                let [x, g] = &x[..] else { return Err(format!("{} operands", x.len())) };
                tensor(tile::moe_route(op, x, g, self.buffer_of(r, op)?)?)
            }
            Opcode::EventRecord => Ok(vec![Slot::Event]),
            Opcode::Quantize => {
                let (rows, scales) =
                    compute::quantized(r.tensor(*op.operands.first().ok_or("has no operand")?)?)?;
                Ok(vec![Slot::Tensor(rows), Slot::Tensor(scales)])
            }
            Opcode::TakeShard => {
                let group = op.group().filter(|g| *g != Group::World).ok_or("names no mesh axis")?;
                let at = self.mesh.position(r.rank, group);
                let at = at.ok_or_else(|| format!("is in no group of {group} in mesh({})", self.mesh))?;
                let parts = self.mesh.group_size(group);
                let x = r.tensor(*op.operands.first().ok_or("has no operand")?)?;
                let dim = op.int("dim").and_then(|d| usize::try_from(d).ok()).ok_or("names no dim")?;
                let unit = op.int("unit").and_then(|d| usize::try_from(d).ok()).unwrap_or(1);
                match piece(x, dim, unit, parts as usize, at as usize) {
                    Some(t) => tensor(t),
                    None => Err(format!("dim {dim} of {:?} in units of {unit}", x.shape())),
                }
            }
            _ => {
                let operands = op.operands.iter().map(|v| r.tensor(*v)).collect::<Result<Vec<_>, _>>()?;
                let key = |name: &str| op.key(name).map(|v| &r.slots[v.0 as usize]);
                let float = |name: &str| match key(name) {
                    Some(Slot::Tensor(t)) => Some(t),
                    _ => None,
                };
                let int = |name: &str| match key(name) {
                    Some(Slot::Int(i)) => Some(*i),
                    _ => None,
                };
                let first = op.operands.first().map(|v| r.program.ty(*v));
                let place = first.map_or(Place::default(), |t| Place::of(t, &self.mesh, coord));
                tensor(compute::evaluate(op, &operands, &float, &int, &place)?)
            }
        }
    }

    fn buffer_of(&mut self, r: &Runner<'_>, op: &Op) -> Result<&mut Tensor, String> {
        let b = r.program.buffer(op.buffer.ok_or("names no buffer")?);
        let shape: Vec<usize> = b.ty.shape.iter().map(|n| *n as usize).collect();
        let held = self.buffers[r.rank.0 as usize]
            .entry(b.name.clone())
            .or_insert_with(|| Tensor::full(&shape, 0.0));
        if held.shape() == shape {
            Ok(held)
        } else {
            Err(format!("buffer @{} is {:?} here and {shape:?} there", b.name, held.shape()))
        }
    }

    /// The piece of a global tensor that a type names.
    fn cut(&self, whole: &Tensor, ty: &Type, coord: Coord) -> Result<Tensor, String> {
        if ty.layout.partial().is_some() {
            return Err("terms of a partial value cannot be cut from a whole".to_string());
        }
        let mut t = whole.clone();
        for axis in self.mesh.axes() {
            let AxisLayout::Shard(s) = ty.layout.on(axis) else { continue };
            // Each block of the axis holds all pieces; without blocks the axis is one.
            let group = Group::Axis { axis, ways: s.ways };
            if s.ways.is_some_and(|w| !self.mesh.cuts(axis, w)) {
                return Err(format!("{group} in mesh({})", self.mesh));
            }
            let parts = self.mesh.group_size(group) as usize;
            let unit = s.uneven.map_or(1, |u| u.unit as usize);
            let extent = t.shape().get(s.dim).copied();
            if s.uneven.is_none() && !extent.is_some_and(|e| e.is_multiple_of(parts)) {
                return Err(format!("{:?} cut evenly at dim {} over {group}", whole.shape(), s.dim));
            }
            t = piece(&t, s.dim, unit, parts, coord.on(axis) as usize % parts)
                .ok_or_else(|| format!("{:?} cut at dim {} over {group}", whole.shape(), s.dim))?;
        }
        Ok(t)
    }
}

impl Runner<'_> {
    fn tensor(&self, v: ValueId) -> Result<&Tensor, String> {
        match self.slots.get(v.0 as usize) {
            Some(Slot::Tensor(t)) => Ok(t),
            _ => Err(format!("%{} holds no tensor", self.program.value(v).name)),
        }
    }

    fn int(&self, v: ValueId) -> Result<i64, String> {
        match self.slots.get(v.0 as usize) {
            Some(Slot::Int(i)) => Ok(*i),
            _ => Err(format!("%{} is no whole number", self.program.value(v).name)),
        }
    }

    fn ticket(&self, v: Option<&ValueId>) -> Result<Ticket, String> {
        match v.and_then(|v| self.slots.get(v.0 as usize)) {
            Some(Slot::Ticket(t)) => Ok(t.clone()),
            _ => Err("waits for nothing that was issued".to_string()),
        }
    }

    /// What this rank waits for, if it is not done.
    fn blocked(&self) -> Option<Ticket> {
        let op = self.program.ops.get(self.next)?;
        self.inside.clone().or_else(|| self.ticket(op.operands.first()).ok())
    }
}

impl Slot {
    fn check(&self, ty: &Type) -> Result<(), String> {
        let fits = match self {
            Slot::Empty => false,
            Slot::Tensor(t) => {
                !ty.is_token()
                    && ty.dtype != DType::I64
                    && t.shape().iter().map(|n| *n as u64).eq(ty.shape.iter().copied())
            }
            Slot::Int(_) => ty.dtype == DType::I64 && ty.shape.is_empty(),
            Slot::Ticket(_) => ty.dtype == DType::Ticket,
            Slot::Event => ty.dtype == DType::Event,
        };
        let have = match self {
            Slot::Tensor(t) => format!("a tensor {:?}", t.shape()),
            Slot::Int(_) => "a whole number".to_string(),
            _ => "a token".to_string(),
        };
        if fits { Ok(()) } else { Err(format!("gives {have}, written is {}{:?}", ty.dtype, ty.shape)) }
    }
}
