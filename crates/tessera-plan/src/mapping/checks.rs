//! Checks of a mapping: whether it is consistent, and whether it fits a model.

use tessera_base::{Diagnostic, Diagnostics, format_choices};
use tessera_mesh::Axis;

use super::{DtypePolicy, Mapping, ModelExtents, Numerics, Strategy, Topology};
use crate::codes::{T0601, T0602, T0603, T0604, T0605};

impl Mapping {
    /// Returns every inconsistency of the mapping itself, independent of a model.
    #[must_use]
    pub fn check_consistency(&self) -> Diagnostics {
        let mut ds = Vec::new();
        for (name, n) in
            [("d_in", self.d_in), ("d_out", self.d_out), ("max_outstanding", self.max_outstanding)]
        {
            if !(1..=64).contains(&n) {
                ds.push(Diagnostic::error(&T0605, format!("queues.{name} = {n} is out of range: 1 to 64")));
            }
        }
        if self.mesh.outside_count() > 0 {
            ds.push(
                Diagnostic::error(
                    &T0605,
                    format!(
                        "{} ranks outside the mesh, which a mapping cannot express",
                        self.mesh.outside_count()
                    ),
                )
                .with_label("mesh", self.mesh.to_string())
                .with_hint("remove `outside`; topology pp0 or pp1 puts the leader outside the mesh"),
            );
        }
        let tp = self.mesh.axis_size(Axis::Tp);
        if self.overlap_chunks == 0 {
            ds.push(Diagnostic::error(&T0605, "overlap.chunks = 0 leaves no rows"));
        } else if self.overlap_chunks > 1 && (self.strategy != Strategy::Megatron || tp < 2) {
            let message = format!("overlap.chunks = {} without an all-reduce over tp", self.overlap_chunks);
            ds.push(
                Diagnostic::error(&T0605, message)
                    .with_label("mapping", format!("{} over tp = {tp}", self.strategy.name()))
                    .with_hint("remove `chunks`, or use strategy megatron with tp=2 or more; ulysses overlaps its all-to-alls without it"),
            );
        }
        let inside = self.mesh.mesh_size();
        let topology_hint = match self.topology {
            Topology::Pp0 if inside != 1 => {
                Some("topology pp1 needs a mesh of two ranks or more; pp0 needs tp=1; mesh accepts any")
            }
            Topology::Pp1 if inside < 2 => Some(
                "topology pp0 is a leader and one rank; pp1 needs tp=2 or more, or pp=2 or more; mesh accepts any",
            ),
            _ => None,
        };
        if let Some(hint) = topology_hint {
            let ranks = if inside == 1 { "1 rank".to_string() } else { format!("{inside} ranks") };
            ds.push(
                Diagnostic::error(
                    &T0605,
                    format!("topology {} with a mesh of {ranks}", self.topology.name()),
                )
                .with_label("mesh", self.mesh.to_string())
                .with_hint(hint),
            );
        }
        let stages = self.mesh.axis_size(Axis::Pp) as usize;
        if !self.blocks.is_empty() && self.blocks.len() != stages {
            ds.push(Diagnostic::error(
                &T0605,
                format!("{} entries of blocks for pp = {stages}", self.blocks.len()),
            ));
        }
        for (i, name) in self.devices.iter().enumerate() {
            if name.contains(|c: char| c == '"' || c == '\\' || c.is_control()) {
                ds.push(
                    Diagnostic::error(&T0605, format!("a mapping cannot contain the device name {name:?}"))
                        .with_label(format!("rank {i}"), format!("{name:?}"))
                        .with_hint("use a name without quotes, backslashes and control characters"),
                );
            }
        }
        ds.extend(self.check_expert_table());
        ds.extend(self.check_expert_copies());
        ds.extend(self.check_router());
        ds.extend(self.check_hosts());
        if let Err(d) = self.rank_map() {
            ds.push(*d);
        }
        ds
    }

    /// Checks that the hosts hold every rank of the world, and that each has a switch domain or none.
    fn check_hosts(&self) -> Option<Diagnostic> {
        let (hosts, domains) = (self.hosts.len(), self.host_domains.len());
        let sum: u64 = self.hosts.iter().map(|n| u64::from(*n)).sum();
        let world = self.world_mesh().ok()?.world_size();
        let message = if hosts == 0 && domains > 0 {
            "hosts.domains without hosts.ranks".to_string()
        } else if domains > 0 && domains != hosts {
            format!("{domains} switch domains for {hosts} hosts")
        } else if self.hosts.contains(&0) {
            "a host without ranks".to_string()
        } else if hosts > 0 && sum != u64::from(world) {
            format!("the hosts hold {sum} ranks and the mapping has {world}")
        } else {
            return None;
        };
        Some(
            Diagnostic::error(&T0605, message)
                .with_label("hosts.ranks", format!("{:?}", self.hosts))
                .with_label("mesh", self.mesh.to_string())
                .with_hint("list the ranks of each host, such as ranks = [4, 4], or remove [hosts]"),
        )
    }

    /// Returns every reason why this mapping does not fit a model, with the legal alternatives.
    #[must_use]
    pub fn check_fit(&self, e: &ModelExtents) -> Diagnostics {
        let mut ds = self.check_consistency();
        ds.extend(self.check_experts(e));
        for axis in [Axis::Ep, Axis::Dp] {
            let n = self.mesh.axis_size(axis);
            if n > 1 && (axis == Axis::Dp || e.experts == 0) {
                let why =
                    if axis == Axis::Ep { "the model has no experts" } else { "a stream is one sequence" };
                ds.push(
                    Diagnostic::error(&T0601, format!("{axis} = {n}, but {why}"))
                        .with_label("mesh", self.mesh.to_string())
                        .with_hint(format!("use {axis}=1")),
                );
            }
        }
        ds.extend(self.check_tp_units(e));
        if u64::from(self.overlap_chunks) > e.tokens {
            let message = format!(
                "overlap.chunks = {} over {} tokens per chunk of video",
                self.overlap_chunks, e.tokens
            );
            ds.push(
                Diagnostic::error(&T0605, message)
                    .with_hint("each row chunk needs at least one token; 2 chunks hide most of the time"),
            );
        }
        let pp = u64::from(self.mesh.axis_size(Axis::Pp));
        let total = self.blocks.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
        if pp > e.blocks || (!self.blocks.is_empty() && (total != Some(e.blocks) || self.blocks.contains(&0)))
        {
            ds.push(
                Diagnostic::error(&T0603, format!("{} blocks over pp = {pp} stages", e.blocks))
                    .with_label("mapping", format!("blocks = {:?}", self.blocks))
                    .with_hint(format!("pp may be 1 to {}", e.blocks)),
            );
        }
        if self.numerics == Numerics::MeshInvariant {
            ds.extend(self.check_invariant_trees(e));
        }
        ds
    }

    /// Checks that every rank of tp has a head and a unit of what the strategy shards.
    fn check_tp_units(&self, e: &ModelExtents) -> Option<Diagnostic> {
        let tp = u64::from(self.mesh.axis_size(Axis::Tp));
        let (unit_name, units) = match self.strategy {
            Strategy::Megatron => ("columns of the feed-forward layer", e.ffn_size),
            Strategy::Ulysses => ("tokens of a chunk", e.tokens),
        };
        let most = e.heads.min(units);
        if tp <= most {
            return None;
        }
        let scarce_unit = if e.heads <= units { "heads" } else { unit_name };
        let even: Vec<u64> =
            (1..=most).filter(|n| e.heads.is_multiple_of(*n) && units.is_multiple_of(*n)).collect();
        Some(
            Diagnostic::error(
                &T0602,
                format!("tp = {tp} over {most} {scarce_unit} leaves a rank without a unit"),
            )
            .with_label("model", format!("{} heads, {units} {unit_name}", e.heads))
            .with_label("mesh", self.mesh.to_string())
            .with_hint(format!(
                "even shards: tp = {}; uneven shards up to tp = {most}",
                format_choices(&even)
            )),
        )
    }

    /// Checks that the summation trees of the mesh-invariant policy fit the model, tp and the
    /// dtype.
    fn check_invariant_trees(&self, e: &ModelExtents) -> Diagnostics {
        let mut ds = Vec::new();
        let tp = u64::from(self.mesh.axis_size(Axis::Tp));
        let legal: Vec<u64> = [1, 2, 4, 8].into_iter().filter(|n| e.heads.is_multiple_of(*n)).collect();
        let widths = e.hidden_size.is_multiple_of(8) && e.ffn_size.is_multiple_of(8);
        if !widths || !legal.contains(&tp) {
            let message =
                format!("tp = {tp}, {} heads, width {}, feed-forward {}", e.heads, e.hidden_size, e.ffn_size);
            ds.push(Diagnostic::error(&T0604, message).with_hint(if widths {
                format!("use tp = {}, or numerics = \"standard\"", format_choices(&legal))
            } else {
                "8 must divide the model's widths; use numerics = \"standard\"".to_string()
            }));
        }
        if self.dtype != DtypePolicy::F32 {
            let dtype = self.dtype.name();
            let message = format!("numerics mesh-invariant in {dtype}: its summation trees need f32");
            ds.push(Diagnostic::error(&T0604, message).with_hint(format!(
                "use dtype = \"f32\" under mesh-invariant, or numerics = \"standard\" in {dtype}; ulysses in {dtype} is bit-identical on any tp"
            )));
        }
        ds
    }
}
