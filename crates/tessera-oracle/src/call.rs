//! The properties of a collective in flight that the other members of its group can observe.

use tessera_ir::{Attr, DType, Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout, split_units};

use crate::outcome::MismatchField;

/// One collective of one rank, with the fields visible to others.
#[derive(Debug, Clone)]
pub(crate) struct WireCall {
    pub(crate) opcode: Opcode,
    /// Index of the group; `None` if the attributes name no group, so that the call never
    /// completes.
    pub(crate) group: Option<usize>,
    /// Position in the group.
    pub(crate) position: usize,
    /// Peer rank of a send or receive.
    pub(crate) peer: Option<usize>,
    graph: Option<Attr>,
    dtype: Option<DType>,
    reduction: Option<String>,
    root: Option<i64>,
    counts: TransferCounts,
}

/// Numbers of elements transferred.
#[derive(Debug, Clone)]
enum TransferCounts {
    /// The size of a receive without a wait is unknown.
    Unknown,
    /// One count for all members.
    Same(u64),
    /// Counts sent to and received from each position.
    PerPeer { sends: Vec<u64>, receives: Vec<u64> },
}

impl WireCall {
    /// Builds the call of a collective op; `group` holds the group's index and its ranks.
    pub(crate) fn from_op(p: &Program, op: &Op, rank: usize, group: Option<(usize, &[usize])>) -> WireCall {
        let members = group.map_or(&[][..], |g| g.1);
        let moved = transferred_type(p, op);
        let position = members.iter().position(|m| *m == rank).unwrap_or(0);
        let key = if op.opcode == Opcode::Send { "to" } else { "from" };
        let peer = op.int_attr(key).and_then(|i| members.get(usize::try_from(i).ok()?).copied());
        WireCall {
            opcode: op.opcode,
            group: group.map(|g| g.0),
            position,
            peer,
            graph: op.attrs.get("graph").cloned(),
            dtype: moved.map(|t| t.dtype),
            reduction: op.str_attr("reduction").map(str::to_string),
            root: op.int_attr("root"),
            counts: moved
                .map_or(TransferCounts::Unknown, |t| transfer_counts(op, t, members.len(), position)),
        }
    }

    /// Returns whether the call matches one other rank rather than its whole group.
    pub(crate) fn is_pair(&self) -> bool {
        matches!(self.opcode, Opcode::Send | Opcode::Recv)
    }

    /// Returns the field in which two calls of one operation differ.
    pub(crate) fn first_difference(&self, other: &WireCall) -> Option<MismatchField> {
        let of_pair = self.is_pair() && other.is_pair();
        if self.opcode != other.opcode && !of_pair {
            return Some(MismatchField::Op);
        }
        if self.graph != other.graph {
            return Some(MismatchField::Graph);
        }
        if let (Some(a), Some(b)) = (self.dtype, other.dtype)
            && a != b
        {
            return Some(MismatchField::Dtype);
        }
        if self.reduction != other.reduction {
            return Some(MismatchField::Reduction);
        }
        if self.root != other.root {
            return Some(MismatchField::Root);
        }
        let same = match (&self.counts, &other.counts) {
            (TransferCounts::Same(a), TransferCounts::Same(b)) => a == b,
            (
                TransferCounts::PerPeer { sends, receives: takes },
                TransferCounts::PerPeer { sends: theirs, receives: back },
            ) => {
                sends.get(other.position) == back.get(self.position)
                    && takes.get(other.position) == theirs.get(self.position)
            }
            _ => true,
        };
        (!same).then_some(MismatchField::Count)
    }
}

/// Returns the type of the tensor that is transferred. A receive's type is annotated on its result,
/// or on the result of its wait.
fn transferred_type<'a>(p: &'a Program, op: &Op) -> Option<&'a Type> {
    let v = match (op.opcode, op.issue) {
        (Opcode::Recv, true) => {
            let wait = p.ops.iter().find(|w| w.opcode == Opcode::Wait && w.operands == op.results)?;
            wait.results.first()?
        }
        (Opcode::Recv, false) => op.results.first()?,
        _ => op.operands.first()?,
    };
    Some(p.type_of(*v))
}

fn transfer_counts(op: &Op, t: &Type, parts: usize, position: usize) -> TransferCounts {
    if op.opcode != Opcode::AllToAll {
        return TransferCounts::Same(t.element_count());
    }
    let dim = |name| op.int_attr(name).and_then(|i| usize::try_from(i).ok()).filter(|d| *d < t.shape.len());
    let (Some(cat), Some(cut)) = (dim("concat"), dim("split")) else { return TransferCounts::Unknown };
    let unit = op.int_attr("unit").and_then(|u| u64::try_from(u).ok()).filter(|u| *u > 0).unwrap_or(1);
    let axis = Axis::ALL.into_iter().find(|a| op.str_attr("axis") == Some(a.name()));
    // Rows that each position holds, and columns that each position will receive.
    let rows: Vec<u64> = match axis.map(|a| t.layout.on_axis(a)) {
        Some(AxisLayout::Shard(s)) if s.dim == cat && s.uneven.is_some() => {
            let (extent, unit) = s.uneven.map_or((0, 1), |u| (u.extent, u.unit.max(1)));
            (0..parts).map(|at| split_units(extent / unit, parts as u32, at as u32).1 * unit).collect()
        }
        _ => vec![t.shape[cat]; parts],
    };
    let columns: Vec<u64> =
        (0..parts).map(|at| split_units(t.shape[cut] / unit, parts as u32, at as u32).1 * unit).collect();
    let rest = t.element_count() / (t.shape[cat] * t.shape[cut]).max(1);
    let mine = columns.get(position).copied().unwrap_or(0);
    TransferCounts::PerPeer {
        sends: columns.iter().map(|c| t.shape[cat] * c * rest).collect(),
        receives: rows.iter().map(|r| r * mine * rest).collect(),
    }
}
