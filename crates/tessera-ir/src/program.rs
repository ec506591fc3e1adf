//! Programs: buffers, values and an ordered list of ops, each on a named stream.

use std::collections::BTreeMap;

use tessera_base::Span;
use tessera_mesh::{Axis, Group, Mesh, Reduction};

use crate::{Opcode, Type};

/// Index of a value in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// Index of a buffer in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

/// Index of a stream in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

/// Value of an op's attribute.
#[derive(Debug, Clone)]
pub enum Attr {
    /// An integer.
    Int(i64),
    /// A floating-point number, compared by its bits.
    Float(f64),
    /// A string.
    Str(String),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A boolean.
    Bool(bool),
}

impl PartialEq for Attr {
    fn eq(&self, other: &Attr) -> bool {
        match (self, other) {
            (Attr::Int(a), Attr::Int(b)) => a == b,
            (Attr::Float(a), Attr::Float(b)) => a.to_bits() == b.to_bits(),
            (Attr::Str(a), Attr::Str(b)) => a == b,
            (Attr::Ints(a), Attr::Ints(b)) => a == b,
            (Attr::Bool(a), Attr::Bool(b)) => a == b,
            _ => false,
        }
    }
}
impl Eq for Attr {}

/// Attributes of an op, sorted by name.
pub type Attrs = BTreeMap<String, Attr>;

/// A value: its name in the text and its type on this role.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Name without the `%`.
    pub name: String,
    /// Dtype, local shape and layout.
    pub ty: Type,
}

/// Memory that outlives a program: KV caches and the latent. The plan owns it, and all programs of
/// a role declare it identically.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Name without the `@`.
    pub name: String,
    /// Dtype, local shape and layout.
    pub ty: Type,
}

/// One op of a program, with operands as indices into the program's values.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// Operation, which selects the row of the op table.
    pub opcode: Opcode,
    /// For a collective: `true` if the op only issues it and a later `wait` returns the result.
    pub issue: bool,
    /// Name of the input, call scalar, weight or output.
    pub name: Option<String>,
    /// Buffer that the op accesses.
    pub buffer: Option<BufferId>,
    /// Values identified by position, in the order of the op table.
    pub operands: Vec<ValueId>,
    /// Keyed operands, in the order of the op table.
    pub keyed: Vec<(&'static str, ValueId)>,
    /// Compile-time attributes, such as the axis of a collective.
    pub attrs: Attrs,
    /// Values that the op defines.
    pub results: Vec<ValueId>,
    /// Stream that the op runs on.
    pub stream: StreamId,
    /// Events that the op waits for before it starts.
    pub after: Vec<ValueId>,
    /// Position in the text that the op was parsed from. Not part of the program's identity.
    pub span: Option<Span>,
}

impl Op {
    /// Returns an integer attribute.
    #[must_use]
    pub fn int_attr(&self, name: &str) -> Option<i64> {
        match self.attrs.get(name) {
            Some(Attr::Int(i)) => Some(*i),
            _ => None,
        }
    }

    /// Returns a float attribute; an integer is converted.
    #[must_use]
    pub fn float_attr(&self, name: &str) -> Option<f64> {
        match self.attrs.get(name) {
            Some(Attr::Float(x)) => Some(*x),
            Some(Attr::Int(i)) => Some(*i as f64),
            _ => None,
        }
    }

    /// Returns a string attribute.
    #[must_use]
    pub fn str_attr(&self, name: &str) -> Option<&str> {
        match self.attrs.get(name) {
            Some(Attr::Str(s)) => Some(s),
            _ => None,
        }
    }

    /// Returns an integer list attribute.
    #[must_use]
    pub fn ints_attr(&self, name: &str) -> Option<&[i64]> {
        match self.attrs.get(name) {
            Some(Attr::Ints(v)) => Some(v),
            _ => None,
        }
    }

    /// Returns the keyed operand with this name.
    #[must_use]
    pub fn keyed_operand(&self, name: &str) -> Option<ValueId> {
        self.keyed.iter().find(|(k, _)| *k == name).map(|(_, v)| *v)
    }

    /// Returns the mesh axis of a collective; `None` for a collective over the world. The group may
    /// be a subgroup of the axis: see [`Op::comm_group`].
    #[must_use]
    pub fn mesh_axis(&self) -> Option<Axis> {
        self.str_attr("axis")?.parse().ok()
    }

    /// Returns the group of a collective, or the group whose positions determine the shards of an
    /// op. `None` if the attributes name no group.
    #[must_use]
    pub fn comm_group(&self) -> Option<Group> {
        let (axis, subgroup_size) = (self.str_attr("axis")?, self.attrs.get("group_size"));
        if axis == "world" {
            return subgroup_size.is_none().then_some(Group::World);
        }
        let axis = axis.parse().ok()?;
        match subgroup_size {
            None => Some(Group::whole_axis(axis)),
            Some(_) => Some(Group::Axis {
                axis,
                subgroup_size: Some(u32::try_from(self.int_attr("group_size")?).ok()?),
            }),
        }
    }

    /// Returns the reduction of a collective.
    #[must_use]
    pub fn reduction(&self) -> Option<Reduction> {
        Reduction::parse(self.str_attr("reduction")?)
    }

    /// Iterates over all values that the op reads, including tokens, in text order.
    pub fn used_values(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.operands
            .iter()
            .copied()
            .chain(self.keyed.iter().map(|(_, v)| *v))
            .chain(self.after.iter().copied())
    }
}

/// Dialect of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `toperator`: logical, global shapes, no collectives.
    Logical,
    /// `ttile`: one role, local shapes, explicit collectives.
    Role,
}

/// The program of one phase: either logical or for one role.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Phase with variant, such as `denoise.fill3`, without the `@`.
    pub name: String,
    /// Dialect of the program.
    pub dialect: Dialect,
    /// Name of the role, such as `stage0`; empty for a logical program.
    pub role: String,
    /// Device mesh; a single rank for a logical program.
    pub mesh: Mesh,
    /// Names of the streams.
    pub streams: Vec<String>,
    /// Buffers in order of declaration.
    pub buffers: Vec<Buffer>,
    /// Values in order of definition.
    pub values: Vec<Value>,
    /// Ops in program order.
    pub ops: Vec<Op>,
}

impl Program {
    /// Returns the value with this index. Panics if the id is of another, larger program.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Returns the type of a value.
    #[must_use]
    pub fn type_of(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }

    /// Returns the buffer with this index. Panics if the id is of another, larger program.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// Returns the same program with all source positions cleared.
    #[must_use]
    pub fn without_spans(mut self) -> Program {
        self.ops.iter_mut().for_each(|op| op.span = None);
        self
    }

    /// Returns the index of the op that defines each value.
    #[must_use]
    pub fn defining_ops(&self) -> Vec<Option<usize>> {
        let mut defs = vec![None; self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for r in &op.results {
                defs[r.0 as usize] = Some(i);
            }
        }
        defs
    }

    /// Returns the indices of the ops that read each value, in program order.
    #[must_use]
    pub fn value_readers(&self) -> Vec<Vec<usize>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.used_values() {
                readers[v.0 as usize].push(i);
            }
        }
        readers
    }

    /// Returns the index of the op that waits for an issued collective.
    #[must_use]
    pub fn find_wait(&self, op: &Op) -> Option<usize> {
        let ticket = op.results.first().filter(|_| op.issue)?;
        self.ops.iter().position(|o| o.opcode == Opcode::Wait && o.operands.first() == Some(ticket))
    }

    /// Returns the result of a collective, which an issued collective delivers at its wait.
    #[must_use]
    pub fn collective_result(&self, op: &Op) -> Option<ValueId> {
        let last = if op.issue { &self.ops[self.find_wait(op)?] } else { op };
        last.results.first().copied()
    }

    /// Returns the last op that reads each value. The operand of a collective counts as read until
    /// its wait.
    #[must_use]
    pub fn last_uses(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.values.len()];
        let defs = self.defining_ops();
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.used_values() {
                last[v.0 as usize] = Some(i);
            }
            if op.opcode == Opcode::Wait
                && let Some(issue) = op.operands.first().and_then(|t| defs[t.0 as usize])
            {
                for v in &self.ops[issue].operands {
                    last[v.0 as usize] = Some(i);
                }
            }
        }
        last
    }

    /// Iterates over the ops that start a collective, in program order.
    pub fn collective_ops(&self) -> impl Iterator<Item = (usize, &Op)> {
        self.ops.iter().enumerate().filter(|(_, op)| op.opcode.is_collective())
    }
}
