//! The properties of a collective in flight that the other members of its group can observe.

use tessera_ir::{CommAxis, DType, Op, OpView, Opcode, PeerPosition, Program, Type, views};
use tessera_mesh::{AxisLayout, Reduction, split_units};

use crate::outcome::MismatchField;

/// One collective of one rank, with the fields that the other members of its group can observe.
#[derive(Debug, Clone)]
pub(crate) struct WireCall {
    pub(crate) opcode: Opcode,
    /// Index of the group; `None` if the attributes name no group, so that the call never
    /// completes.
    pub(crate) group: Option<usize>,
    /// Position of the calling rank in the group; 0 without a group.
    pub(crate) position: usize,
    /// Peer rank of a send or receive.
    pub(crate) peer: Option<usize>,
    graph: Option<String>,
    dtype: Option<DType>,
    reduction: Option<Reduction>,
    root: Option<u64>,
    counts: TransferCounts,
}

/// The element counts that one member passes to a call. The counts of all members must agree.
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
        let peer = op.peer_position().and_then(|peer| {
            let (PeerPosition::To(at) | PeerPosition::From(at)) = peer;
            members.get(usize::try_from(at).ok()?).copied()
        });
        let view = op.view().ok();
        let root = match &view {
            Some(OpView::Broadcast(v)) => Some(v.root),
            _ => None,
        };
        WireCall {
            opcode: op.opcode,
            group: group.map(|g| g.0),
            position,
            peer,
            graph: op.graph_name().map(str::to_string),
            dtype: moved.map(|t| t.dtype),
            reduction: op.reduction(),
            root,
            counts: match (moved, &view) {
                (None, _) => TransferCounts::Unknown,
                (Some(t), Some(OpView::AllToAll(v))) => exchange_counts(v, t, members.len(), position),
                // Each neighbour gets one row of each frame, however many rows a shard has.
                (Some(t), Some(OpView::HaloExchange(_))) => {
                    TransferCounts::Same(t.element_count() / t.shape.get(1).map_or(1, |rows| (*rows).max(1)))
                }
                (Some(t), _) => TransferCounts::Same(t.element_count()),
            },
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

fn exchange_counts(v: &views::AllToAll, t: &Type, parts: usize, position: usize) -> TransferCounts {
    let &views::AllToAll { concat: cat, split: cut, unit, .. } = v;
    if cat.max(cut) >= t.shape.len() {
        return TransferCounts::Unknown;
    }
    let layout = match v.axis {
        CommAxis::Axis(axis) => Some(t.layout.on_axis(axis)),
        CommAxis::World => None,
    };
    // Rows that each position holds, and columns that each position will receive.
    let rows: Vec<u64> = match layout {
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
