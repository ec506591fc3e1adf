//! One collective of one rank before lowering, and the choices that the IR has for it.

use tessera_ir::{DType, HINT_ATTRS, Opcode};
use tessera_mesh::{Axis, Group, Mesh};

/// One collective of one rank before lowering, which chooses its operand and its stream.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedCall {
    /// Identifies the operation: open choices are drawn from it, independently of the rest of the
    /// set.
    pub(crate) salt: u32,
    pub(crate) group: Group,
    pub(crate) collective: CollectiveSpec,
    /// Sharding of the value that a broadcast, send or receive moves.
    pub(crate) sharding: ValueSharding,
    /// Tensor shape, as an index into [`SHAPES`].
    pub(crate) shape: usize,
    pub(crate) dtype: DType,
    pub(crate) batch: Option<u32>,
    pub(crate) graph: Option<u32>,
}

/// A kind of collective with its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the attributes of the op table")]
pub enum CollectiveSpec {
    AllReduce { tree: bool },
    AllGather { dim: usize },
    ReduceScatter { dim: usize, tree: bool },
    AllToAll { concat: usize, cut: UnevenDim },
    Broadcast { root: usize },
    Send { to: usize },
    Recv { from: usize },
}

/// The way in which ranks hold a value that a broadcast, send or receive moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueSharding {
    /// Every rank holds the complete value.
    Whole,
    /// Ranks hold shards of a dim over an axis or over each of its subgroups.
    Shards {
        /// Mesh axis whose ranks hold the shards.
        axis: Axis,
        /// Number of ranks per subgroup; `None` shards over the whole axis.
        subgroup_size: Option<u32>,
        /// Index of the tensor dim that is cut into shards.
        dim: usize,
        /// Whether the shards along `dim` are uneven: the first ranks then hold one element more.
        uneven: bool,
    },
}

/// The dim of an all-to-all that is sharded unevenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnevenDim {
    /// Neither dim: all shards have equal size.
    Even,
    /// The dim along which received pieces are concatenated.
    Concat,
    /// The dim that is cut into the pieces sent.
    Split,
}

/// Matrix shapes that every axis divides: first three with 576 elements, then others.
pub(crate) const SHAPES: [[u64; 2]; 5] = [[12, 48], [24, 24], [48, 12], [12, 12], [12, 24]];
/// Number of leading [`SHAPES`] with equal element counts.
pub(crate) const EQUAL_COUNT_SHAPES: usize = 3;

/// Returns whether the op table has this attribute for an op.
pub(crate) fn has_attribute(opcode: Opcode, constant: &str) -> bool {
    opcode.table_row().find_attr(constant).is_some() || HINT_ATTRS.contains(&constant)
}

/// Returns every group with more than one member: the axes, their subgroups, and the world.
pub(crate) fn group_kinds(mesh: &Mesh) -> Vec<Group> {
    let blocks = |axis| {
        mesh.subgroup_sizes(axis).into_iter().map(move |w| Group::Axis { axis, subgroup_size: Some(w) })
    };
    let of_axes = mesh.active_axes().flat_map(|a| std::iter::once(Group::whole_axis(a)).chain(blocks(a)));
    of_axes.chain([Group::World]).collect()
}

/// Returns whether the IR has a layout for this collective over this group.
pub(crate) fn has_layout(mesh: &Mesh, what: CollectiveSpec, group: Group) -> bool {
    match (what, group) {
        (_, Group::Axis { .. })
        | (CollectiveSpec::Broadcast { .. } | CollectiveSpec::Send { .. } | CollectiveSpec::Recv { .. }, _) => {
            true
        }
        // No op produces terms over two axes at once, and outside ranks hold none.
        (CollectiveSpec::AllReduce { .. }, Group::World) => {
            mesh.outside_count() == 0 && mesh.active_axes().count() == 1
        }
        (_, Group::World) => false,
    }
}

/// Returns the possible shardings of a value that is moved over a group.
pub(crate) fn possible_shardings(mesh: &Mesh, what: CollectiveSpec, group: Group) -> Vec<ValueSharding> {
    let mut out = vec![ValueSharding::Whole];
    let Group::Axis { axis: own, .. } = group else { return out };
    for kind in group_kinds(mesh) {
        let Group::Axis { axis, subgroup_size } = kind else { continue };
        if axis == own && matches!(what, CollectiveSpec::Broadcast { .. }) {
            continue;
        }
        for (dim, uneven) in [(0, false), (1, false), (0, true), (1, true)] {
            out.push(ValueSharding::Shards { axis, subgroup_size, dim, uneven });
        }
    }
    out
}
