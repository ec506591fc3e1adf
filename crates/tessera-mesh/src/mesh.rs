//! The device mesh: four axes, the ranks they span, and the groups of ranks along each axis.

use std::fmt;
use std::str::FromStr;

use tessera_base::{Code, Diagnostic, closest_name, format_choices, named_enum};

use crate::codes::{T0101, T0102, T0103, T0104};

/// Maximum number of ranks of a mesh, including the ranks outside it.
pub const MAX_RANKS: u32 = 65_536;

named_enum! {
    /// A mesh axis. In rank order the first variant varies fastest.
    pub enum Axis {
        /// Tensor parallelism: shards weights and heads, or tokens and heads.
        Tp = "tp",
        /// Expert parallelism: shards the experts.
        Ep = "ep",
        /// Pipeline parallelism: layer blocks as stages.
        Pp = "pp",
        /// Data parallelism: replicas of the weights that process different data.
        Dp = "dp",
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Axis {
    type Err = MeshError;
    fn from_str(s: &str) -> Result<Axis, MeshError> {
        let names = Axis::ALL.map(Axis::name);
        Axis::from_name(s).ok_or_else(|| unknown_name(&T0101, "mesh axis", "axes", s, &names))
    }
}

/// Returns the diagnostic of a name that is none of `names`.
pub(crate) fn unknown_name(
    code: &'static Code,
    kind: &str,
    plural: &str,
    name: &str,
    names: &[&str],
) -> MeshError {
    let d = Diagnostic::error(code, format!("unknown {kind} `{name}`"))
        .with_hint(format!("the {plural} are {}", format_choices(names)));
    Box::new(match closest_name(name, names.iter().copied()) {
        Some(n) => d.with_note(format!("closest: `{n}`")),
        None => d,
    })
}

/// The diagnostic of an invalid mesh, axis name, dim name or device list.
pub type MeshError = Box<Diagnostic>;

/// A rank: the index of a process in the world. Ranks outside the mesh come first, followed by the
/// ranks of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The position of a rank on each axis, in the order of [`Axis::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Coord(pub [u32; 4]);

impl Coord {
    /// Returns the position on an axis, from 0.
    #[must_use]
    pub fn on_axis(self, axis: Axis) -> u32 {
        self.0[axis as usize]
    }

    /// Returns the same coordinate with position `at` on one axis.
    #[must_use]
    pub fn with_axis(mut self, axis: Axis, at: u32) -> Coord {
        self.0[axis as usize] = at;
        self
    }
}

/// A device mesh: the sizes of the four axes (each at least 1) and the number of ranks outside the
/// mesh. All these ranks together are the *world*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    sizes: [u32; 4],
    outside: u32,
}

impl Default for Mesh {
    fn default() -> Mesh {
        Mesh { sizes: [1; 4], outside: 0 }
    }
}

impl Mesh {
    /// Creates a mesh from sizes in the order of [`Axis::ALL`], without ranks outside it.
    ///
    /// # Errors
    /// T0102 if a size is 0, T0104 if there are more than [`MAX_RANKS`] ranks.
    pub fn new(sizes: [u32; 4]) -> Result<Mesh, MeshError> {
        if let Some(i) = sizes.iter().position(|s| *s == 0) {
            let name = Axis::ALL[i];
            return Err(Box::new(
                Diagnostic::error(&T0102, format!("axis {name} has size 0"))
                    .with_hint("omit an unused axis or give it size 1"),
            ));
        }
        let ranks = sizes.iter().try_fold(1u32, |n, s| n.checked_mul(*s)).filter(|n| *n <= MAX_RANKS);
        match ranks {
            Some(_) => Ok(Mesh { sizes, outside: 0 }),
            None => Err(Box::new(Diagnostic::error(
                &T0104,
                format!("a mesh of {sizes:?} (tp, ep, pp, dp) has more than {MAX_RANKS} ranks"),
            ))),
        }
    }

    /// Returns the same mesh with this many ranks outside it.
    ///
    /// # Errors
    /// T0104 if there would be more than [`MAX_RANKS`] ranks in total.
    pub fn with_outside(self, outside: u32) -> Result<Mesh, MeshError> {
        match self.mesh_size().checked_add(outside).filter(|n| *n <= MAX_RANKS) {
            Some(_) => Ok(Mesh { outside, ..self }),
            None => Err(Box::new(Diagnostic::error(
                &T0104,
                format!(
                    "{} ranks in the mesh plus {outside} outside it exceed the limit of {MAX_RANKS}",
                    self.mesh_size()
                ),
            ))),
        }
    }

    /// Returns the size of an axis; 1 for an axis that the mesh does not use.
    #[must_use]
    pub fn axis_size(&self, axis: Axis) -> u32 {
        self.sizes[axis as usize]
    }

    /// Returns the number of ranks in the world: in the mesh and outside it.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.outside + self.mesh_size()
    }

    /// Returns the number of ranks in the mesh, to which its axis sizes multiply.
    #[must_use]
    pub fn mesh_size(&self) -> u32 {
        self.sizes.iter().product()
    }

    /// Returns the number of ranks outside the mesh. They are ranks 0 and up.
    #[must_use]
    pub fn outside_count(&self) -> u32 {
        self.outside
    }

    /// Returns whether a rank is in the mesh: neither outside it nor beyond the world.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        (self.outside..self.world_size()).contains(&rank.0)
    }

    /// Iterates over the axes with more than one position, fastest first.
    pub fn active_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::ALL.into_iter().filter(|a| self.axis_size(*a) > 1)
    }

    /// Returns the rank at a coordinate: tp + TP·(ep + EP·(pp + PP·dp)), after the ranks outside
    /// the mesh.
    #[must_use]
    pub fn rank_at(&self, c: Coord) -> Rank {
        Rank(self.outside + Axis::ALL.iter().rev().fold(0, |r, a| r * self.axis_size(*a) + c.on_axis(*a)))
    }

    /// Returns the coordinate of a rank. A rank outside the mesh has no coordinate and gets the
    /// origin, where a fully replicated layout yields the whole tensor. [`Mesh::contains`]
    /// distinguishes the two cases.
    #[must_use]
    pub fn coord_of(&self, rank: Rank) -> Coord {
        let mut rest = rank.0.saturating_sub(self.outside);
        Coord(self.sizes.map(|s| {
            let at = rest % s;
            rest /= s;
            at
        }))
    }

    /// Iterates over the ranks in the mesh in order, without those outside it.
    pub fn inner_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.outside..self.world_size()).map(Rank)
    }

    /// Iterates over all ranks of the world in order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world_size()).map(Rank)
    }
}

/// Key of the ranks outside the mesh in the text of a mesh.
const OUTSIDE_KEY: &str = "outside";

impl fmt::Display for Mesh {
    /// Writes `tp=2, pp=3`, followed by `outside=1` if there are ranks outside the mesh. A mesh of
    /// one rank is written as `tp=1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.active_axes().map(|a| format!("{a}={}", self.axis_size(a))).collect();
        f.write_str(&if parts.is_empty() { "tp=1".to_string() } else { parts.join(", ") })?;
        if self.outside > 0 { write!(f, ", {OUTSIDE_KEY}={}", self.outside) } else { Ok(()) }
    }
}

impl FromStr for Mesh {
    type Err = MeshError;
    fn from_str(s: &str) -> Result<Mesh, MeshError> {
        let mut sizes = [0u32; 4];
        let mut outside = None;
        for part in s.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let refuse = |why: &str| -> MeshError {
                Box::new(
                    Diagnostic::error(&T0102, format!("`{part}` in mesh `{s}`: {why}"))
                        .with_hint("write axis=size pairs, for example tp=2,pp=2"),
                )
            };
            let (name, size) = part.split_once('=').ok_or_else(|| refuse("no `=`"))?;
            if name.trim() == OUTSIDE_KEY {
                let ranks = size.trim().parse().map_err(|_| refuse("not a number of ranks"))?;
                if outside.replace(ranks).is_some() {
                    return Err(refuse("given twice"));
                }
                continue;
            }
            let axis: Axis = name.trim().parse()?;
            let size: u32 = size.trim().parse().map_err(|_| refuse("the size is not an integer"))?;
            if sizes[axis as usize] != 0 {
                return Err(refuse("the axis is named twice"));
            }
            if size == 0 {
                return Err(refuse("the size is 0"));
            }
            sizes[axis as usize] = size;
        }
        Mesh::new(sizes.map(|s| s.max(1)))?.with_outside(outside.unwrap_or(0))
    }
}

/// Device of each rank. It is part of the plan, so that it does not depend on the order in which an
/// operating system lists devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankMap {
    devices: Vec<String>,
}

impl RankMap {
    /// Creates a rank map from devices in rank order.
    ///
    /// # Errors
    /// T0103 if the number of devices differs from the number of ranks, or if a device appears
    /// twice.
    pub fn new(mesh: &Mesh, devices: Vec<String>) -> Result<RankMap, MeshError> {
        if devices.len() != mesh.world_size() as usize {
            return Err(Box::new(
                Diagnostic::error(
                    &T0103,
                    format!("{} devices for a mesh of {} ranks", devices.len(), mesh.world_size()),
                )
                .with_label("mesh", mesh.to_string())
                .with_hint("list one device per rank, in rank order"),
            ));
        }
        let mut seen = std::collections::BTreeMap::new();
        for (i, d) in devices.iter().enumerate() {
            if let Some(first) = seen.insert(d.as_str(), i) {
                return Err(Box::new(
                    Diagnostic::error(&T0103, format!("device {d} is assigned to two ranks"))
                        .with_label(format!("rank {first}"), d.clone())
                        .with_label(format!("rank {i}"), d.clone()),
                ));
            }
        }
        Ok(RankMap { devices })
    }

    /// Creates a rank map with positional device names: `cpu0`, `cpu1`… The number is the rank's
    /// position in the plan and not an enumeration of the machine, so the map is the same wherever
    /// the plan is made.
    #[must_use]
    pub fn from_device_kind(mesh: &Mesh, kind: &str) -> RankMap {
        RankMap { devices: mesh.iter().map(|r| format!("{kind}{r}")).collect() }
    }

    /// Returns the device name of a rank, such as `cpu0`; `None` for a rank beyond the world.
    #[must_use]
    pub fn device_of(&self, rank: Rank) -> Option<&str> {
        self.devices.get(rank.0 as usize).map(String::as_str)
    }

    /// Returns all devices in rank order.
    #[must_use]
    pub fn devices(&self) -> &[String] {
        &self.devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tp_varies_fastest() {
        // Recipe A: 72 ranks. The coordinates of ranks 0, 1, 6 and 12 document the nesting.
        let mesh: Mesh = "tp=12,ep=6".parse().unwrap();
        let at = |r| mesh.coord_of(Rank(r)).0;
        assert_eq!([at(0), at(1), at(6), at(12)], [[0, 0, 0, 0], [1, 0, 0, 0], [6, 0, 0, 0], [0, 1, 0, 0]]);
        for r in mesh.iter() {
            assert_eq!(mesh.rank_at(mesh.coord_of(r)), r);
        }
    }

    #[test]
    fn groups_partition_the_ranks() {
        let mesh = Mesh::new([2, 3, 2, 2]).unwrap();
        for axis in Axis::ALL {
            let mut all: Vec<Rank> = mesh.axis_groups(axis).concat();
            assert!(mesh.axis_groups(axis).iter().all(|g| g.len() == mesh.axis_size(axis) as usize));
            all.sort();
            assert_eq!(all, mesh.iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn invalid_meshes_have_specific_codes() {
        let code = |s: &str| s.parse::<Mesh>().unwrap_err().code.id;
        assert_eq!(code("mp=2"), "T0101");
        assert_eq!(code("tp"), "T0102");
        assert_eq!(code("tp=2,tp=2"), "T0102");
        assert_eq!(code("tp=0"), "T0102");
        assert_eq!(code("tp=-1"), "T0102");
        assert_eq!(code("tp=65536,pp=65536"), "T0104");
        assert_eq!(code("tp=65536,outside=1"), "T0104");
        assert_eq!(code("tp=2,outside=4294967295"), "T0104");
        assert_eq!(code("tp=2,outside=1,outside=1"), "T0102");
        assert_eq!(code("tp=2,outside=-1"), "T0102");
    }

    #[test]
    fn text_round_trips() {
        for s in ["tp=1", "tp=2", "tp=2, pp=3", "ep=9, dp=2", "tp=2, outside=1", "tp=1, outside=3"] {
            assert_eq!(s.parse::<Mesh>().unwrap().to_string(), s);
        }
        assert_eq!("outside=0, tp=2".parse::<Mesh>().unwrap(), "tp=2".parse().unwrap());
    }

    #[test]
    fn ranks_outside_come_first_and_are_in_no_group() {
        let mesh: Mesh = "tp=3, dp=2, outside=2".parse().unwrap();
        assert_eq!((mesh.world_size(), mesh.mesh_size(), mesh.outside_count()), (8, 6, 2));
        let inside: Vec<Rank> = mesh.inner_ranks().collect();
        assert_eq!(inside, (2..8).map(Rank).collect::<Vec<_>>());
        for r in &inside {
            assert_eq!(mesh.rank_at(mesh.coord_of(*r)), *r);
        }
        assert_eq!(mesh.coord_of(Rank(2)), Coord::default());
        assert_eq!(mesh.coord_of(Rank(7)), Coord([2, 0, 0, 1]));
        for outside in [Rank(0), Rank(1)] {
            assert_eq!(mesh.coord_of(outside), Coord::default());
        }
        for axis in Axis::ALL {
            let mut all: Vec<Rank> = mesh.axis_groups(axis).concat();
            all.sort();
            assert_eq!(all, inside);
        }
        assert_eq!(RankMap::from_device_kind(&mesh, "cpu").devices().len(), 8);
    }

    #[test]
    fn a_rank_map_needs_each_device_once() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        assert!(RankMap::new(&mesh, vec!["GPU0".into()]).is_err());
        assert!(RankMap::new(&mesh, vec!["GPU0".into(), "GPU0".into()]).is_err());
        let map = RankMap::new(&mesh, vec!["GPU1".into(), "GPU0".into()]).unwrap();
        assert_eq!(map.device_of(Rank(0)), Some("GPU1"));
    }
}
