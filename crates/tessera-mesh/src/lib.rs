//! Axes, meshes, coordinates, groups, layouts and local shapes: the arithmetic of who holds what.
//!
//! This room knows no tensor's meaning, no op, no device and no process. Everything here is a pure function
//! of a few small integers.

mod cluster;
pub mod clusters;
mod group;
mod layout;
mod mesh;
mod shard;
mod spec;

pub use cluster::{Cluster, Device, Figure, Link, LinkClass, Precision, Seat, Tier};
pub use group::Group;
pub use layout::{AxisLayout, Layout, Reduction};
pub use mesh::{Axis, Coord, Mesh, MeshError, Rank, RankMap};
pub use shard::{Shard, Uneven, split};
pub use spec::{DimName, ShardSpec};

use tessera_base::Code;

/// Codes this room raises.
pub const CODES: &[&Code] = &[
    &mesh::T0101,
    &mesh::T0102,
    &mesh::T0103,
    &mesh::T0104,
    &spec::T0105,
    &spec::T0106,
    &cluster::check::T1101,
    &cluster::check::T1102,
    &cluster::check::T1103,
    &clusters::T1104,
];
