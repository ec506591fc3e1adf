//! Programs: buffers, values and an ordered list of ops, each on a named stream.

use tessera_base::Span;
use tessera_mesh::Mesh;

use crate::Type;
use crate::attr::{Attr, Attrs};
use crate::ids::{BufferId, StreamId, ValueId};
use crate::op_table::Opcode;

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
    /// Buffer that the op accesses; `None` unless [`Opcode::takes_buffer`].
    pub buffer: Option<BufferId>,
    /// Values identified by position, in the order of the op table.
    pub operands: Vec<ValueId>,
    /// Keyed operands, in the order of the op table.
    pub keyed: Vec<(&'static str, ValueId)>,
    /// Compile-time attributes, such as the axis of a collective.
    pub attrs: Attrs,
    /// Values that the op defines; an issued collective defines only its ticket.
    pub results: Vec<ValueId>,
    /// Stream of the op; ops of one stream run in program order.
    pub stream: StreamId,
    /// Events that the op waits for before it starts.
    pub after: Vec<ValueId>,
    /// Position in the text that the op was parsed from. Not part of the program's identity.
    pub span: Option<Span>,
}

impl Op {
    /// Iterates over all values that the op reads, including tokens, in text order.
    pub fn used_values(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.operands
            .iter()
            .copied()
            .chain(self.keyed.iter().map(|(_, v)| *v))
            .chain(self.after.iter().copied())
    }
}

/// Kind of a program, which also determines the prefix of its compute ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `toperator`: logical, global shapes, no collectives.
    Logical,
    /// `ttile`: one role, local shapes, explicit collectives.
    Role,
}

/// A graph into which a whole program is captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapturedGraph {
    /// Name of the graph, which is equal on all members of its collectives.
    pub name: String,
    /// Number of captured ops: every op of the program except its sources.
    pub ops: usize,
}

impl std::fmt::Display for CapturedGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "graph {} of {} ops", self.name, self.ops)
    }
}

/// The program of one phase: either logical or for one role.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Phase with variant, such as `denoise.fill3`, without the `@`.
    pub name: String,
    /// Whether the program is logical, with global shapes, or of one role, with local shapes.
    pub dialect: Dialect,
    /// Name of the role, such as `stage0`; empty for a logical program.
    pub role: String,
    /// Device mesh; a single rank for a logical program.
    pub mesh: Mesh,
    /// Names of the streams, indexed by [`StreamId`]; an op without a stream in the text is on the
    /// first.
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

    /// Marks every op as captured into one graph. Sources (inputs, call scalars, weights) belong to
    /// no graph, because they exist before the program starts.
    pub fn capture_into(&mut self, graph: &str) {
        for op in self.ops.iter_mut().filter(|o| !o.is_source()) {
            op.attrs.insert("graph".to_string(), Attr::Str(graph.to_string()));
        }
    }

    /// Returns the graph into which the whole program is captured; `None` if every op is launched by
    /// itself.
    ///
    /// # Errors
    /// Returns the reason if only a part of the program is captured, or several graphs are.
    pub fn captured_graph(&self) -> Result<Option<CapturedGraph>, String> {
        let mut graphs = self.ops.iter().filter(|o| !o.is_source()).map(Op::graph_name);
        let Some(first) = graphs.next() else { return Ok(None) };
        match graphs.find(|g| *g != first) {
            Some(other) => Err(format!(
                "one op is captured into {} and another into {}",
                first.unwrap_or("no graph"),
                other.unwrap_or("no graph")
            )),
            None => Ok(first.map(|name| CapturedGraph {
                name: name.to_string(),
                ops: self.ops.iter().filter(|o| !o.is_source()).count(),
            })),
        }
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
