//! What a program's collectives look like to the other members of their groups.

use std::fmt::Write;

use tessera_base::Code;
use tessera_ir::{Attr, DType, Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout, Group, Layout, Reduction};

use crate::{sequence, structure};

/// What a rank's collectives come to in one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census {
    /// Collectives issued, sends and receives included.
    pub collectives: u64,
    /// BLAKE3 over [`collective_line`] of each collective in program order, each followed by a newline. A
    /// runtime that folds the lines of what it issues arrives at the same digest or has left the plan.
    pub trace_digest: [u8; 32],
}

impl Census {
    /// Of a program that was judged well-formed.
    pub(crate) fn of(p: &Program) -> Census {
        let mut hash = blake3::Hasher::new();
        let mut collectives = 0;
        for item in trace(p) {
            hash.update(item.signature.to_string().as_bytes());
            hash.update(b"\n");
            collectives += 1;
        }
        Census { collectives, trace_digest: *hash.finalize().as_bytes() }
    }
}

/// The line of a collective in a trace: axis, op, dtype, extents and layout, reduction, root, dims, graph, carrier, peer.
/// `None` if the op at this index is no collective or its type cannot be known. Members of a group have equal
/// lines for a symmetric op. Costs one pass over the program: ask once, not per call.
#[must_use]
pub fn collective_line(p: &Program, op: usize) -> Option<String> {
    if !structure::check(p).is_empty() {
        return None;
    }
    trace(p).find(|i| i.op == op).map(|i| i.signature.to_string())
}

/// The lines of all collectives of a program in program order, each with the index of its op: [`collective_line`] in
/// one pass. Empty for a program that is not well-formed.
#[must_use]
pub fn collective_lines(p: &Program) -> Vec<(usize, String)> {
    if !structure::check(p).is_empty() {
        return Vec::new();
    }
    trace(p).map(|i| (i.op, i.signature.to_string())).collect()
}

/// One collective of a program.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) op: usize,
    pub(crate) signature: Signature,
    /// Number of the sends and receives that it is issued as one with.
    pub(crate) batch: Option<i64>,
}

/// Everything that the members of a group must agree on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Signature {
    pub(crate) group: Group,
    pub(crate) opcode: Opcode,
    pub(crate) dtype: DType,
    /// Local extents, except that in what a whole group calls a dim sharded over its own axis has its global one:
    /// pieces may differ there, and with one global extent and unit every per-peer count follows.
    pub(crate) extents: Vec<u64>,
    pub(crate) layout: Layout,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) root: Option<i64>,
    /// Tensor dims and units, by name.
    pub(crate) dims: Vec<(&'static str, i64)>,
    /// Name of the graph that it is captured into.
    pub(crate) graph: Option<String>,
    /// By what it is carried, where the program says.
    pub(crate) via: Option<String>,
    /// Position of the other side of a send or receive.
    pub(crate) peer: Option<u32>,
}

impl Signature {
    /// What both sides of a meeting have in common.
    pub(crate) fn common(&self) -> Signature {
        match self.peer {
            None => self.clone(),
            Some(_) => Signature { opcode: Opcode::Send, peer: None, ..self.clone() },
        }
    }

    /// Elements moved, whatever their shape.
    pub(crate) fn count(&self) -> u64 {
        self.extents.iter().product()
    }

    /// The op with what a person needs to tell it from its neighbours.
    pub(crate) fn short(&self) -> String {
        let reduction = self.reduction.map_or(String::new(), |r| format!("({})", r.name()));
        match (self.opcode, self.peer) {
            (Opcode::Send, Some(k)) => format!("send to {} {k} of {}", self.group, self.shape()),
            (Opcode::Recv, Some(k)) => format!("recv from {} {k} of {}", self.group, self.shape()),
            _ => format!("{}{reduction} over {} of {}", self.opcode.name(), self.group, self.shape()),
        }
    }

    /// A signature with all its fields, for comparing two by eye.
    pub(crate) fn full(&self) -> String {
        let mut out = format!("{} {{{}}}", self.short(), self.layout());
        if let Some(r) = self.root {
            out += &format!(" root {r}");
        }
        for (name, at) in &self.dims {
            out += &format!(" {name} {at}");
        }
        if let Some(g) = &self.graph {
            out += &format!(" captured in graph {g}");
        }
        match &self.via {
            Some(v) => out + &format!(" via {v}"),
            None => out,
        }
    }

    fn shape(&self) -> String {
        format!("{}{}", self.dtype, self.extents())
    }

    /// `[4, 8]`.
    pub(crate) fn extents(&self) -> String {
        let dims: Vec<String> = self.extents.iter().map(u64::to_string).collect();
        format!("[{}]", dims.join(", "))
    }

    /// Layout in words, leaving out axes on which it is replicated.
    pub(crate) fn layout(&self) -> String {
        let parts: Vec<String> = Axis::ALL
            .into_iter()
            .filter(|a| self.layout.on(*a) != AxisLayout::Replicated)
            .map(|a| format!("{a}: {}", self.layout.on(a)))
            .collect();
        if parts.is_empty() { "replicated".to_string() } else { parts.join(", ") }
    }

    /// The first field that differs and its code.
    pub(crate) fn difference(&self, b: &Signature) -> (&'static Code, &'static str) {
        if self.peer.is_none() && self.opcode != b.opcode {
            (&sequence::T0301, "op")
        } else if self.dtype != b.dtype {
            (&sequence::T0303, "dtype")
        } else if self.reduction != b.reduction {
            (&sequence::T0304, "reduction")
        } else if self.root != b.root {
            (&sequence::T0305, "root")
        } else if self.count() != b.count() {
            (&sequence::T0302, "count")
        } else if self.graph != b.graph {
            (&sequence::T0334, "graph")
        } else if self.via != b.via {
            (&sequence::T0344, "means that carry it")
        } else if self.dims != b.dims {
            (&sequence::T0306, "tensor dim")
        } else if self.extents != b.extents {
            (&sequence::T0333, "shape")
        } else {
            (&sequence::T0333, "layout")
        }
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} {{{}}}", self.group, self.opcode.name(), self.shape(), self.layout())?;
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
        if let Some(v) = &self.via {
            write!(f, " via={v}")?;
        }
        self.peer.map_or(Ok(()), |k| write!(f, " peer={k}"))
    }
}

/// A program's collectives in program order. Ops without a group or a type are left out: the judge of the
/// program refuses those.
pub(crate) fn trace(p: &Program) -> impl Iterator<Item = Item> {
    // A receive's type is written where it is waited for.
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
        Some(p.ty(v))
    };
    p.collectives().filter_map(move |(i, op)| {
        let (signature, batch) = signature(p, op, op.group()?, moved(op)?);
        Some(Item { op: i, signature, batch })
    })
}

/// A collective's signature, and its `batch`.
fn signature(p: &Program, op: &Op, group: Group, moved: &Type) -> (Signature, Option<i64>) {
    let key = match op.opcode {
        Opcode::Send => "to",
        Opcode::Recv => "from",
        _ => "",
    };
    let mut extents = moved.shape.clone();
    // A pair moves what the sender holds, wherever it belongs.
    if let (Group::Axis { axis, .. }, "") = (group, key)
        && let AxisLayout::Shard(s) = moved.layout.on(axis)
        && let Some(n) = extents.get_mut(s.dim)
    {
        *n = s.extent(*n, p.mesh.size(axis));
    }
    let mut layout = Layout::REPLICATED;
    for a in p.mesh.axes() {
        layout = layout.with(a, moved.layout.on(a));
    }
    let mut out = Signature {
        group,
        opcode: op.opcode,
        dtype: moved.dtype,
        extents,
        layout,
        reduction: None,
        root: None,
        dims: Vec::new(),
        graph: None,
        via: None,
        // A position that does not exist is refused with the program; it must still read as a pair here.
        peer: (!key.is_empty()).then_some(u32::MAX),
    };
    let mut batch = None;
    // One walk: plans have many collectives, and each look-up goes through the names again.
    for (name, value) in &op.attrs {
        match (name.as_str(), value) {
            ("reduction", Attr::Str(r)) => out.reduction = Reduction::parse(r),
            ("root", Attr::Int(i)) => out.root = Some(*i),
            ("graph", Attr::Str(g)) => out.graph = Some(g.clone()),
            ("via", Attr::Str(v)) => out.via = Some(v.clone()),
            ("batch", Attr::Int(i)) => batch = Some(*i),
            ("concat", Attr::Int(i)) => out.dims.push(("concat", *i)),
            ("dim", Attr::Int(i)) => out.dims.push(("dim", *i)),
            ("split", Attr::Int(i)) => out.dims.push(("split", *i)),
            // A unit of 1 is none.
            ("unit", Attr::Int(i)) if *i != 1 => out.dims.push(("unit", *i)),
            (n, Attr::Int(i)) if n == key => out.peer = u32::try_from(*i).ok().or(out.peer),
            _ => {}
        }
    }
    (out, batch)
}

/// Bytes as hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut s, b| {
        // Writing to a string cannot fail.
        let _ = write!(s, "{b:02x}");
        s
    })
}
