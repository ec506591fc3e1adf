//! The signatures of a program's collectives: the fields that other members of their groups can
//! observe.

use std::fmt::Write;

use tessera_base::Code;
use tessera_ir::{Attr, DType, Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout, Group, Layout, Reduction};

use crate::codes::{T0301, T0302, T0303, T0304, T0305, T0306, T0333, T0334, T0344, T0349};
use crate::structure;

/// The number and digest of a rank's collectives in one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveDigest {
    /// Number of collectives issued, including sends and receives.
    pub collectives: u64,
    /// BLAKE3 over the [`collective_lines`] in program order, each followed by a
    /// newline. A runtime that folds the lines of the collectives that it issues reaches the same
    /// digest, unless it has left the plan.
    pub trace_digest: [u8; 32],
}

impl CollectiveDigest {
    /// Summarises a program that is known to be well-formed.
    pub(crate) fn from_program(p: &Program) -> CollectiveDigest {
        let mut hash = blake3::Hasher::new();
        let mut collectives = 0;
        for item in trace_collectives(p) {
            hash.update(item.signature.to_string().as_bytes());
            hash.update(b"\n");
            collectives += 1;
        }
        CollectiveDigest { collectives, trace_digest: *hash.finalize().as_bytes() }
    }
}

/// Returns the trace lines of all collectives of a program in program order, each with the index of
/// its op: axis, op, dtype, extents and layout, reduction, root, dims, graph, transport, algorithm, peer.
/// Members of a group have equal lines for a symmetric op. Returns an empty list for a program that
/// is not well-formed.
#[must_use]
pub fn collective_lines(p: &Program) -> Vec<(usize, String)> {
    if !structure::check(p).is_empty() {
        return Vec::new();
    }
    trace_collectives(p).map(|i| (i.op, i.signature.to_string())).collect()
}

/// A collective as a trace lists it: its op index, its compared fields and its batch.
#[derive(Debug, Clone)]
pub(crate) struct TracedCollective {
    pub(crate) op: usize,
    pub(crate) signature: CollectiveSignature,
    /// Batch number of a send or receive.
    pub(crate) batch: Option<i64>,
}

/// The fields of a collective on which the members of its group must agree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CollectiveSignature {
    pub(crate) group: Group,
    pub(crate) opcode: Opcode,
    pub(crate) dtype: DType,
    /// Local extents, except that a dim that is sharded over the group's own axis has its global
    /// extent in a group collective: local shards may differ in size, and the global extent and the
    /// unit determine every per-peer count.
    pub(crate) extents: Vec<u64>,
    pub(crate) layout: Layout,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) root: Option<i64>,
    /// Values of the attributes `concat`, `dim`, `split` and, unless it is 1, `unit`, with their
    /// names.
    pub(crate) dims: Vec<(&'static str, i64)>,
    /// Name of the graph that the collective is captured into.
    pub(crate) graph: Option<String>,
    /// Transport, if the program names one.
    pub(crate) transport: Option<String>,
    /// Algorithm, if the program tags the collective with one.
    pub(crate) algorithm: Option<String>,
    /// Form in which elements travel, if the program names one.
    pub(crate) wire: Option<String>,
    /// Position of the peer of a send or receive.
    pub(crate) peer: Option<u32>,
}

impl CollectiveSignature {
    /// Returns the signature without the fields that differ between sender and receiver.
    pub(crate) fn without_side(&self) -> CollectiveSignature {
        match self.peer {
            None => self.clone(),
            Some(_) => CollectiveSignature { opcode: Opcode::Send, peer: None, ..self.clone() },
        }
    }

    /// Returns the number of elements moved, regardless of their shape.
    pub(crate) fn element_count(&self) -> u64 {
        self.extents.iter().product()
    }

    /// Returns a short description that distinguishes the collective from its neighbours.
    pub(crate) fn short_text(&self) -> String {
        let reduction = self.reduction.map_or(String::new(), |r| format!("({})", r.name()));
        match (self.opcode, self.peer) {
            (Opcode::Send, Some(k)) => format!("send to {} {k} of {}", self.group, self.shape_text()),
            (Opcode::Recv, Some(k)) => format!("recv from {} {k} of {}", self.group, self.shape_text()),
            _ => format!("{}{reduction} over {} of {}", self.opcode.name(), self.group, self.shape_text()),
        }
    }

    /// Returns a description with all fields, for comparison by a reader.
    pub(crate) fn full_text(&self) -> String {
        let mut out = format!("{} {{{}}}", self.short_text(), self.layout_text());
        if let Some(r) = self.root {
            out += &format!(" root {r}");
        }
        for (name, at) in &self.dims {
            out += &format!(" {name} {at}");
        }
        if let Some(g) = &self.graph {
            out += &format!(" captured in graph {g}");
        }
        if let Some(v) = &self.transport {
            out += &format!(" transport {v}");
        }
        if let Some(v) = &self.algorithm {
            out += &format!(" algorithm {v}");
        }
        match &self.wire {
            Some(v) => out + &format!(" as {v} on the wire"),
            None => out,
        }
    }

    fn shape_text(&self) -> String {
        format!("{}{}", self.dtype, self.extents_text())
    }

    /// Returns the extents as `[4, 8]`.
    pub(crate) fn extents_text(&self) -> String {
        let dims: Vec<String> = self.extents.iter().map(u64::to_string).collect();
        format!("[{}]", dims.join(", "))
    }

    /// Returns the layout as text, omitting axes on which it is replicated.
    pub(crate) fn layout_text(&self) -> String {
        let parts: Vec<String> = Axis::ALL
            .into_iter()
            .filter(|a| self.layout.on_axis(*a) != AxisLayout::Replicated)
            .map(|a| format!("{a}: {}", self.layout.on_axis(a)))
            .collect();
        if parts.is_empty() { "replicated".to_string() } else { parts.join(", ") }
    }

    /// Returns the code and name of the first field that differs.
    pub(crate) fn first_difference(&self, b: &CollectiveSignature) -> (&'static Code, &'static str) {
        let fields = [
            (self.peer.is_none() && self.opcode != b.opcode, &T0301, "op"),
            (self.dtype != b.dtype, &T0303, "dtype"),
            (self.reduction != b.reduction, &T0304, "reduction"),
            (self.root != b.root, &T0305, "root"),
            (self.element_count() != b.element_count(), &T0302, "count"),
            (self.graph != b.graph, &T0334, "graph"),
            (self.transport != b.transport, &T0344, "transport"),
            (self.algorithm != b.algorithm, &T0349, "algorithm"),
            (self.wire != b.wire, &T0303, "dtype on the wire"),
            (self.dims != b.dims, &T0306, "tensor dim"),
            (self.extents != b.extents, &T0333, "shape"),
        ];
        let first = fields.into_iter().find(|(differs, ..)| *differs);
        first.map_or((&T0333, "layout"), |(_, code, field)| (code, field))
    }
}

impl std::fmt::Display for CollectiveSignature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} {{{}}}", self.group, self.opcode.name(), self.shape_text(), self.layout_text())?;
        if let Some(r) = self.reduction {
            write!(f, " reduction={}", r.name())?;
        }
        if let Some(r) = self.root {
            write!(f, " root={r}")?;
        }
        for (name, at) in &self.dims {
            write!(f, " {name}={at}")?;
        }
        if let Some(g) = &self.graph {
            write!(f, " graph={g}")?;
        }
        if let Some(v) = &self.transport {
            write!(f, " transport={v}")?;
        }
        if let Some(v) = &self.algorithm {
            write!(f, " algorithm={v}")?;
        }
        if let Some(v) = &self.wire {
            write!(f, " wire={v}")?;
        }
        self.peer.map_or(Ok(()), |k| write!(f, " peer={k}"))
    }
}

/// Iterates over a program's collectives in program order. Ops without a group or a type are
/// omitted: [`crate::check_program`] rejects them.
pub(crate) fn trace_collectives(p: &Program) -> impl Iterator<Item = TracedCollective> {
    // The type of an issued receive is annotated at its wait.
    let mut waits = vec![None; p.values.len()];
    for op in p.ops.iter().filter(|o| o.opcode == Opcode::Wait) {
        if let (Some(t), Some(r)) = (op.operands.first(), op.results.first()) {
            waits[t.0 as usize] = Some(*r);
        }
    }
    let moved = move |op: &Op| -> Option<&Type> {
        let v = match (op.opcode, op.issue) {
            (Opcode::Recv, true) => waits[op.results.first()?.0 as usize]?,
            (Opcode::Recv, false) => *op.results.first()?,
            _ => *op.operands.first()?,
        };
        Some(p.type_of(v))
    };
    p.collective_ops().filter_map(move |(i, op)| {
        let (signature, batch) = build_signature(p, op, op.comm_group()?, moved(op)?);
        Some(TracedCollective { op: i, signature, batch })
    })
}

/// Returns a collective's signature and its batch number.
fn build_signature(p: &Program, op: &Op, group: Group, moved: &Type) -> (CollectiveSignature, Option<i64>) {
    let key = match op.opcode {
        Opcode::Send => "to",
        Opcode::Recv => "from",
        _ => "",
    };
    let mut extents = moved.shape.clone();
    // A send or receive moves the sender's local value, so extents stay local.
    if let (Group::Axis { axis, .. }, "") = (group, key)
        && let AxisLayout::Shard(s) = moved.layout.on_axis(axis)
        && let Some(n) = extents.get_mut(s.dim)
    {
        *n = s.global_extent(*n, p.mesh.axis_size(axis));
    }
    let mut layout = Layout::REPLICATED;
    for a in p.mesh.active_axes() {
        layout = layout.with_axis(a, moved.layout.on_axis(a));
    }
    let mut out = CollectiveSignature {
        group,
        opcode: op.opcode,
        dtype: moved.dtype,
        extents,
        layout,
        reduction: None,
        root: None,
        dims: Vec::new(),
        graph: None,
        transport: None,
        algorithm: None,
        wire: None,
        // A position that does not exist is rejected with the program; here the op must still count
        // as a pair.
        peer: (!key.is_empty()).then_some(u32::MAX),
    };
    let mut batch = None;
    // One pass over the attributes: plans have many collectives, and each lookup scans the names
    // again.
    for (name, value) in &op.attrs {
        match (name.as_str(), value) {
            ("reduction", Attr::Str(r)) => out.reduction = Reduction::parse(r),
            ("root", Attr::Int(i)) => out.root = Some(*i),
            ("graph", Attr::Str(g)) => out.graph = Some(g.clone()),
            ("transport", Attr::Str(v)) => out.transport = Some(v.clone()),
            ("algorithm", Attr::Str(v)) => out.algorithm = Some(v.clone()),
            ("wire", Attr::Str(v)) => out.wire = Some(v.clone()),
            ("batch", Attr::Int(i)) => batch = Some(*i),
            ("concat", Attr::Int(i)) => out.dims.push(("concat", *i)),
            ("dim", Attr::Int(i)) => out.dims.push(("dim", *i)),
            ("split", Attr::Int(i)) => out.dims.push(("split", *i)),
            // A unit of 1 is the default and is omitted.
            ("unit", Attr::Int(i)) if *i != 1 => out.dims.push(("unit", *i)),
            (n, Attr::Int(i)) if n == key => out.peer = u32::try_from(*i).ok().or(out.peer),
            _ => {}
        }
    }
    (out, batch)
}

/// Formats bytes as lower-case hex digits, two for each byte.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut s, b| {
        // Writing to a string cannot fail.
        let _ = write!(s, "{b:02x}");
        s
    })
}
