//! A program: buffers, values and ops in order, each op on a named stream.

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

/// A constant of an op.
#[derive(Debug, Clone)]
pub enum Attr {
    /// A whole number.
    Int(i64),
    /// A number, compared by its bits.
    Float(f64),
    /// A word.
    Str(String),
    /// A list of whole numbers.
    Ints(Vec<i64>),
    /// A flag.
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

/// Constants by name, in order of name.
pub type Attrs = BTreeMap<String, Attr>;

/// A value: its name in the text and its type on this role.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Without the `%`.
    pub name: String,
    /// Dtype, local shape and layout.
    pub ty: Type,
}

/// Memory that outlives a program: caches and the latent. The plan owns it; programs of one role agree on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Without the `@`.
    pub name: String,
    /// Dtype, local shape and layout.
    pub ty: Type,
}

/// One op.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// Which row of the op table.
    pub opcode: Opcode,
    /// For a collective: `true` when it only issues and a later `wait` takes the result.
    pub issue: bool,
    /// Name of the input, call scalar, weight or output.
    pub name: Option<String>,
    /// Buffer read or written.
    pub buffer: Option<BufferId>,
    /// Operands by position.
    pub operands: Vec<ValueId>,
    /// Operands by key, in the order of the op table.
    pub keyed: Vec<(&'static str, ValueId)>,
    /// Constants.
    pub attrs: Attrs,
    /// Results.
    pub results: Vec<ValueId>,
    /// Stream the op runs on.
    pub stream: StreamId,
    /// Events that must have passed before it starts.
    pub after: Vec<ValueId>,
    /// Where the op stands in the text it was parsed from. Not part of the program's identity.
    pub span: Option<Span>,
}

impl Op {
    /// An integer constant.
    #[must_use]
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attrs.get(name) {
            Some(Attr::Int(i)) => Some(*i),
            _ => None,
        }
    }

    /// A float constant; an integer counts.
    #[must_use]
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.attrs.get(name) {
            Some(Attr::Float(x)) => Some(*x),
            Some(Attr::Int(i)) => Some(*i as f64),
            _ => None,
        }
    }

    /// A word.
    #[must_use]
    pub fn str(&self, name: &str) -> Option<&str> {
        match self.attrs.get(name) {
            Some(Attr::Str(s)) => Some(s),
            _ => None,
        }
    }

    /// A list of integers.
    #[must_use]
    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.attrs.get(name) {
            Some(Attr::Ints(v)) => Some(v),
            _ => None,
        }
    }

    /// The keyed operand of a name.
    #[must_use]
    pub fn key(&self, name: &str) -> Option<ValueId> {
        self.keyed.iter().find(|(k, _)| *k == name).map(|(_, v)| *v)
    }

    /// Mesh axis of a collective; none for one over the world. With `ways` the group is not the whole axis:
    /// [`Op::group`] says what it is.
    #[must_use]
    pub fn axis(&self) -> Option<Axis> {
        self.str("axis")?.parse().ok()
    }

    /// The group that a collective is over, or whose positions an op goes by. None where the constants name none.
    #[must_use]
    pub fn group(&self) -> Option<Group> {
        let (axis, ways) = (self.str("axis")?, self.attrs.get("ways"));
        if axis == "world" {
            return ways.is_none().then_some(Group::World);
        }
        let axis = axis.parse().ok()?;
        match ways {
            None => Some(Group::of(axis)),
            Some(_) => Some(Group::Axis { axis, ways: Some(u32::try_from(self.int("ways")?).ok()?) }),
        }
    }

    /// Reduction of a collective.
    #[must_use]
    pub fn reduction(&self) -> Option<Reduction> {
        Reduction::parse(self.str("reduction")?)
    }

    /// Everything the op reads, tokens included, in text order.
    pub fn uses(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.operands
            .iter()
            .copied()
            .chain(self.keyed.iter().map(|(_, v)| *v))
            .chain(self.after.iter().copied())
    }
}

/// Which of the two dialects a program is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `toperator`: logical, global shapes, no collectives.
    Logical,
    /// `ttile`: one role, local shapes, explicit collectives.
    Role,
}

/// The program of one phase: for one role, or logical.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Phase and variant, such as `denoise.fill3`, without the `@`.
    pub name: String,
    /// Logical, or of one role.
    pub dialect: Dialect,
    /// Role, such as `stage0`; empty for a logical program.
    pub role: String,
    /// Mesh; one rank for a logical program.
    pub mesh: Mesh,
    /// Names of streams.
    pub streams: Vec<String>,
    /// Buffers, in order of declaration.
    pub buffers: Vec<Buffer>,
    /// Values, in order of definition.
    pub values: Vec<Value>,
    /// Ops in program order.
    pub ops: Vec<Op>,
}

impl Program {
    /// A value.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Type of a value.
    #[must_use]
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }

    /// A buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The same program with no positions in a text.
    #[must_use]
    pub fn without_spans(mut self) -> Program {
        self.ops.iter_mut().for_each(|op| op.span = None);
        self
    }

    /// The op that defines each value.
    #[must_use]
    pub fn definitions(&self) -> Vec<Option<usize>> {
        let mut defs = vec![None; self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for r in &op.results {
                defs[r.0 as usize] = Some(i);
            }
        }
        defs
    }

    /// The ops that read each value, in program order.
    #[must_use]
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut of = vec![Vec::new(); self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.uses() {
                of[v.0 as usize].push(i);
            }
        }
        of
    }

    /// The op that waits for an issued collective.
    #[must_use]
    pub fn wait_of(&self, op: &Op) -> Option<usize> {
        let ticket = op.results.first().filter(|_| op.issue)?;
        self.ops.iter().position(|o| o.opcode == Opcode::Wait && o.operands.first() == Some(ticket))
    }

    /// The value that a collective gives, at once or at its wait.
    #[must_use]
    pub fn given(&self, op: &Op) -> Option<ValueId> {
        let last = if op.issue { &self.ops[self.wait_of(op)?] } else { op };
        last.results.first().copied()
    }

    /// The last op that reads each value. A collective's operand is read until its wait.
    #[must_use]
    pub fn last_uses(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.values.len()];
        let defs = self.definitions();
        for (i, op) in self.ops.iter().enumerate() {
            for v in op.uses() {
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

    /// Ops that start a collective, in program order.
    pub fn collectives(&self) -> impl Iterator<Item = (usize, &Op)> {
        self.ops.iter().enumerate().filter(|(_, op)| op.opcode.is_collective())
    }
}
