//! What a collective in flight shows to the other members of its group.

use tessera_ir::{Attr, DType, Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout, split};

use crate::outcome::Field;

/// One collective of one rank, as far as others can see it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) opcode: Opcode,
    /// Group by number; `None` meets nobody.
    pub(crate) group: Option<usize>,
    /// Position in the group.
    pub(crate) position: usize,
    /// Rank at the other end of a send or receive.
    pub(crate) peer: Option<usize>,
    graph: Option<Attr>,
    dtype: Option<DType>,
    reduction: Option<String>,
    root: Option<i64>,
    counts: Counts,
}

/// Elements that go over the wire.
#[derive(Debug, Clone)]
enum Counts {
    /// A receive that nothing waits for says nowhere how much it takes.
    Unknown,
    /// One number for all.
    Same(u64),
    /// To and from each position.
    PerPeer { sends: Vec<u64>, takes: Vec<u64> },
}

impl Call {
    /// The call of a collective op; `group` is its number and `members` its ranks.
    pub(crate) fn of(p: &Program, op: &Op, rank: usize, group: Option<(usize, &[usize])>) -> Call {
        let members = group.map_or(&[][..], |g| g.1);
        let moved = moved(p, op);
        let position = members.iter().position(|m| *m == rank).unwrap_or(0);
        let key = if op.opcode == Opcode::Send { "to" } else { "from" };
        let peer = op.int(key).and_then(|i| members.get(usize::try_from(i).ok()?).copied());
        Call {
            opcode: op.opcode,
            group: group.map(|g| g.0),
            position,
            peer,
            graph: op.attrs.get("graph").cloned(),
            dtype: moved.map(|t| t.dtype),
            reduction: op.str("reduction").map(str::to_string),
            root: op.int("root"),
            counts: moved.map_or(Counts::Unknown, |t| counts(op, t, members.len(), position)),
        }
    }

    /// Whether it meets one other rank rather than its whole group.
    pub(crate) fn is_pair(&self) -> bool {
        matches!(self.opcode, Opcode::Send | Opcode::Recv)
    }

    /// What two calls that are to be one operation differ in.
    pub(crate) fn differs(&self, other: &Call) -> Option<Field> {
        let of_pair = self.is_pair() && other.is_pair();
        if self.opcode != other.opcode && !of_pair {
            return Some(Field::Op);
        }
        if self.graph != other.graph {
            return Some(Field::Graph);
        }
        if let (Some(a), Some(b)) = (self.dtype, other.dtype)
            && a != b
        {
            return Some(Field::Dtype);
        }
        if self.reduction != other.reduction {
            return Some(Field::Reduction);
        }
        if self.root != other.root {
            return Some(Field::Root);
        }
        let same = match (&self.counts, &other.counts) {
            (Counts::Same(a), Counts::Same(b)) => a == b,
            (Counts::PerPeer { sends, takes }, Counts::PerPeer { sends: theirs, takes: back }) => {
                sends.get(other.position) == back.get(self.position)
                    && takes.get(other.position) == theirs.get(self.position)
            }
            _ => true,
        };
        (!same).then_some(Field::Count)
    }
}

/// The type whose elements travel. A receive's stands at its result, or where it is waited for.
fn moved<'a>(p: &'a Program, op: &Op) -> Option<&'a Type> {
    let v = match (op.opcode, op.issue) {
        (Opcode::Recv, true) => {
            let wait = p.ops.iter().find(|w| w.opcode == Opcode::Wait && w.operands == op.results)?;
            wait.results.first()?
        }
        (Opcode::Recv, false) => op.results.first()?,
        _ => op.operands.first()?,
    };
    Some(p.ty(*v))
}

fn counts(op: &Op, t: &Type, parts: usize, position: usize) -> Counts {
    if op.opcode != Opcode::AllToAll {
        return Counts::Same(t.elements());
    }
    let dim = |name| op.int(name).and_then(|i| usize::try_from(i).ok()).filter(|d| *d < t.shape.len());
    let (Some(cat), Some(cut)) = (dim("concat"), dim("split")) else { return Counts::Unknown };
    let unit = op.int("unit").and_then(|u| u64::try_from(u).ok()).filter(|u| *u > 0).unwrap_or(1);
    let axis = Axis::ALL.into_iter().find(|a| op.str("axis") == Some(a.name()));
    // Rows that each position holds, and columns that each position is to get.
    let rows: Vec<u64> = match axis.map(|a| t.layout.on(a)) {
        Some(AxisLayout::Shard(s)) if s.dim == cat && s.uneven.is_some() => {
            let (extent, unit) = s.uneven.map_or((0, 1), |u| (u.extent, u.unit.max(1)));
            (0..parts).map(|at| split(extent / unit, parts as u32, at as u32).1 * unit).collect()
        }
        _ => vec![t.shape[cat]; parts],
    };
    let columns: Vec<u64> =
        (0..parts).map(|at| split(t.shape[cut] / unit, parts as u32, at as u32).1 * unit).collect();
    let rest = t.elements() / (t.shape[cat] * t.shape[cut]).max(1);
    let mine = columns.get(position).copied().unwrap_or(0);
    Counts::PerPeer {
        sends: columns.iter().map(|c| t.shape[cat] * c * rest).collect(),
        takes: rows.iter().map(|r| r * mine * rest).collect(),
    }
}
