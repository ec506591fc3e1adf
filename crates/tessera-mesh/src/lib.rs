//! Axes, meshes, coordinates, groups, layouts, local shapes and cluster descriptions: the
//! arithmetic that determines which rank holds which part of a tensor.
//!
//! This library crate has no notion of ops or processes. Everything in it is a pure function of
//! small inputs.

pub mod catalog;
mod cluster;
mod group;
mod layout;
mod mesh;
mod shard;
mod shard_spec;

pub use cluster::{Cluster, DeviceSpec, Figure, LinkClass, LinkSpec, MemoryTier, Precision, RankPlacement};
pub use group::Group;
pub use layout::{AxisLayout, Layout, Reduction};
pub use mesh::{Axis, Coord, Mesh, MeshError, Rank, RankMap};
pub use shard::{Shard, Uneven, split_units};
pub use shard_spec::{DimName, ShardSpec};

use tessera_base::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[
    &mesh::T0101,
    &mesh::T0102,
    &mesh::T0103,
    &mesh::T0104,
    &shard_spec::T0105,
    &shard_spec::T0106,
    &cluster::validate::T1101,
    &cluster::validate::T1102,
    &cluster::validate::T1103,
    &catalog::T1104,
];
