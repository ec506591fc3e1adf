//! Axes, meshes, coordinates, groups, layouts, local shapes and cluster descriptions: the
//! arithmetic that determines which rank holds which part of a tensor.
//!
//! This library crate has no notion of ops or processes. Everything in it is a pure function of
//! small inputs.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod catalog;
mod cluster;
mod codes;
mod dim_name;
mod dim_shards;
mod group;
mod group_path;
mod host_map;
mod layout;
mod mesh;
mod shard;
mod spec;

pub use cluster::{Cluster, DevicePlacement, DeviceSpec, Figure, LinkClass, LinkSpec, MemoryTier, Precision};
pub use codes::CODES;
pub use dim_name::DimName;
pub use dim_shards::{DimShard, DimShards};
pub use group::Group;
pub use group_path::GroupPath;
pub use host_map::{HostMap, MisplacedRank, PlanHost};
pub use layout::{AxisLayout, Layout, Reduction};
pub use mesh::{Axis, Coord, Mesh, MeshError, Rank, RankMap};
pub use shard::{Shard, Uneven, split_units};
pub use spec::ShardSpec;
