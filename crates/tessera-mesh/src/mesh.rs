//! Four axes, the ranks they span, and the groups they cut the ranks into.

use std::fmt;
use std::str::FromStr;

use tessera_base::{Code, Diagnostic, choices, nearest};

/// Unknown axis name.
pub static T0101: Code = Code {
    id: "T0101",
    title: "unknown mesh axis",
    page: "A mesh has at most four axes: tp (shards weights, heads or tokens), ep (shards experts), pp (layer \
blocks as stages) and dp (replicas). Sequence parallelism is not a fifth axis: it is a strategy over tp.\n\n\
Write the mesh as name=size pairs, for example `--mesh tp=2,pp=2`.",
};

/// Malformed mesh text.
pub static T0102: Code = Code {
    id: "T0102",
    title: "mesh text cannot be read",
    page: "A mesh is a comma-separated list of axis=size, each axis at most once, each size a whole number of at \
least 1: `tp=2`, `tp=2,pp=3`. Axes that are not named have size 1.\n\n\
`outside=1` beside the axes counts ranks that stand outside the mesh, such as a leader that encodes and decodes while \
the mesh generates. They come first: with `tp=2,outside=1`, rank 0 is outside and ranks 1 and 2 are tp 0 and 1.",
};

/// Devices do not fit the mesh.
pub static T0103: Code = Code {
    id: "T0103",
    title: "device list does not fit the mesh",
    page: "The rank map gives every rank one device, in rank order: rank = tp + TP·(ep + EP·(pp + PP·dp)), so tp \
varies fastest, after the ranks outside the mesh, if it has any. The list must have exactly as many entries as there \
are ranks, and no device twice.",
};

/// A mesh larger than can be addressed.
pub static T0104: Code = Code {
    id: "T0104",
    title: "mesh is too large",
    page: "The product of the axis sizes, and the ranks outside the mesh, are the number of ranks. Tessera plans for \
at most 65,536 of them; a larger number is taken for a slip.",
};

/// Largest number of ranks of a mesh, those outside it included.
pub const RANKS_MAX: u32 = 65_536;

/// An axis of a mesh. In rank order the first listed varies fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Tensor parallelism: weights and heads, or tokens and heads.
    Tp,
    /// Expert parallelism.
    Ep,
    /// Pipeline stages.
    Pp,
    /// Data parallelism.
    Dp,
}

impl Axis {
    /// All axes, fastest first.
    pub const ALL: [Axis; 4] = [Axis::Tp, Axis::Ep, Axis::Pp, Axis::Dp];

    /// The one spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["tp", "ep", "pp", "dp"][self as usize]
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
        Axis::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| {
            let names = Axis::ALL.map(Axis::name);
            let mut d = Diagnostic::error(&T0101, format!("unknown mesh axis `{s}`"))
                .hint(format!("the axes are {}", choices(&names)));
            if let Some(n) = nearest(s, names) {
                d = d.note(format!("closest: `{n}`"));
            }
            Box::new(d)
        })
    }
}

/// Why a mesh was refused.
pub type MeshError = Box<Diagnostic>;

/// A rank: the number of a process in the world. Ranks outside the mesh come first, those of the mesh follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A rank's position on each axis, in the order of [`Axis::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Coord(pub [u32; 4]);

impl Coord {
    /// Position on an axis.
    #[must_use]
    pub fn on(self, axis: Axis) -> u32 {
        self.0[axis as usize]
    }

    /// The same coordinate moved to another position on one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, at: u32) -> Coord {
        self.0[axis as usize] = at;
        self
    }
}

/// Sizes of the four axes, every size at least 1, and how many ranks stand outside the mesh. Those of the mesh
/// and those outside it are the *world*.
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
    /// A mesh from sizes in the order of [`Axis::ALL`], with no rank outside it.
    ///
    /// # Errors
    /// T0102 for a size of 0, T0104 for more than [`RANKS_MAX`] ranks.
    pub fn new(sizes: [u32; 4]) -> Result<Mesh, MeshError> {
        if let Some(i) = sizes.iter().position(|s| *s == 0) {
            let name = Axis::ALL[i];
            return Err(Box::new(
                Diagnostic::error(&T0102, format!("axis {name} has size 0"))
                    .hint("leave an axis out, or give it size 1, to not use it"),
            ));
        }
        let ranks = sizes.iter().try_fold(1u32, |n, s| n.checked_mul(*s)).filter(|n| *n <= RANKS_MAX);
        match ranks {
            Some(_) => Ok(Mesh { sizes, outside: 0 }),
            None => Err(Box::new(Diagnostic::error(
                &T0104,
                format!("a mesh of {sizes:?} (tp, ep, pp, dp) has more than {RANKS_MAX} ranks"),
            ))),
        }
    }

    /// The same mesh with this many ranks outside it.
    ///
    /// # Errors
    /// T0104 for more than [`RANKS_MAX`] ranks in all.
    pub fn with_outside(self, outside: u32) -> Result<Mesh, MeshError> {
        match self.inside().checked_add(outside).filter(|n| *n <= RANKS_MAX) {
            Some(_) => Ok(Mesh { outside, ..self }),
            None => Err(Box::new(Diagnostic::error(
                &T0104,
                format!(
                    "{} ranks of a mesh and {outside} outside it are more than {RANKS_MAX}",
                    self.inside()
                ),
            ))),
        }
    }

    /// Size of an axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> u32 {
        self.sizes[axis as usize]
    }

    /// Number of ranks of the world: those of the mesh and those outside it.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.outside + self.inside()
    }

    /// Number of ranks of the mesh: the product of its sizes.
    #[must_use]
    pub fn inside(&self) -> u32 {
        self.sizes.iter().product()
    }

    /// Number of ranks outside the mesh; they are ranks 0 and up.
    #[must_use]
    pub fn outside(&self) -> u32 {
        self.outside
    }

    /// Whether a rank has a place in the mesh: neither outside it nor beyond the world.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        (self.outside..self.ranks()).contains(&rank.0)
    }

    /// Axes with more than one position, fastest first.
    pub fn axes(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::ALL.into_iter().filter(|a| self.size(*a) > 1)
    }

    /// The rank at a coordinate: tp + TP·(ep + EP·(pp + PP·dp)), after the ranks outside the mesh.
    #[must_use]
    pub fn rank_at(&self, c: Coord) -> Rank {
        Rank(self.outside + Axis::ALL.iter().rev().fold(0, |r, a| r * self.size(*a) + c.on(*a)))
    }

    /// The coordinate of a rank. A rank outside the mesh holds whole values and has none: it is given the origin,
    /// where a layout that is replicated on every axis says just that. [`Mesh::contains`] tells the two apart.
    #[must_use]
    pub fn coord_of(&self, rank: Rank) -> Coord {
        let mut rest = rank.0.saturating_sub(self.outside);
        Coord(self.sizes.map(|s| {
            let at = rest % s;
            rest /= s;
            at
        }))
    }

    /// All ranks of the world in order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.ranks()).map(Rank)
    }

    /// The ranks that differ from `rank` on `axis` alone, itself included, in order of their position. Empty for a
    /// rank that is not in the mesh.
    #[must_use]
    pub fn group_of(&self, rank: Rank, axis: Axis) -> Vec<Rank> {
        if !self.contains(rank) {
            return Vec::new();
        }
        let c = self.coord_of(rank);
        (0..self.size(axis)).map(|i| self.rank_at(c.with(axis, i))).collect()
    }

    /// Every group of an axis; together they partition the ranks of the mesh.
    #[must_use]
    pub fn groups(&self, axis: Axis) -> Vec<Vec<Rank>> {
        let first = |r: &Rank| self.contains(*r) && self.coord_of(*r).on(axis) == 0;
        self.iter().filter(first).map(|r| self.group_of(r, axis)).collect()
    }
}

/// What stands for the ranks outside the mesh in its text.
const OUTSIDE: &str = "outside";

impl fmt::Display for Mesh {
    /// `tp=2, pp=3`, with `outside=1` behind where ranks stand outside; the mesh of one rank prints as `tp=1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.axes().map(|a| format!("{a}={}", self.size(a))).collect();
        f.write_str(&if parts.is_empty() { "tp=1".to_string() } else { parts.join(", ") })?;
        if self.outside > 0 { write!(f, ", {OUTSIDE}={}", self.outside) } else { Ok(()) }
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
                        .hint("write axis=size pairs, for example tp=2,pp=2"),
                )
            };
            let (name, size) = part.split_once('=').ok_or_else(|| refuse("no `=`"))?;
            if name.trim() == OUTSIDE {
                let ranks = size.trim().parse().map_err(|_| refuse("not a number of ranks"))?;
                if outside.replace(ranks).is_some() {
                    return Err(refuse("given twice"));
                }
                continue;
            }
            let axis: Axis = name.trim().parse()?;
            let size: u32 = size.trim().parse().map_err(|_| refuse("the size is not a whole number"))?;
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

/// Which device each rank drives: part of the plan, so that it does not depend on the order in which an
/// operating system lists devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankMap {
    devices: Vec<String>,
}

impl RankMap {
    /// Devices in rank order.
    ///
    /// # Errors
    /// T0103 when the count differs from the mesh's ranks or a device is named twice.
    pub fn new(mesh: &Mesh, devices: Vec<String>) -> Result<RankMap, MeshError> {
        if devices.len() != mesh.ranks() as usize {
            return Err(Box::new(
                Diagnostic::error(
                    &T0103,
                    format!("{} devices for a mesh of {} ranks", devices.len(), mesh.ranks()),
                )
                .at("mesh", mesh.to_string())
                .hint("list one device per rank, in rank order"),
            ));
        }
        let mut seen = std::collections::BTreeMap::new();
        for (i, d) in devices.iter().enumerate() {
            if let Some(first) = seen.insert(d.as_str(), i) {
                return Err(Box::new(
                    Diagnostic::error(&T0103, format!("device {d} is given to two ranks"))
                        .at(format!("rank {first}"), d.clone())
                        .at(format!("rank {i}"), d.clone()),
                ));
            }
        }
        Ok(RankMap { devices })
    }

    /// Names by position: `cpu0`, `cpu1`… The name is the rank's place in the plan, not an enumeration of
    /// the machine, so it is the same wherever the plan is made.
    #[must_use]
    pub fn logical(mesh: &Mesh, kind: &str) -> RankMap {
        RankMap { devices: mesh.iter().map(|r| format!("{kind}{r}")).collect() }
    }

    /// The device of a rank.
    #[must_use]
    pub fn device(&self, rank: Rank) -> Option<&str> {
        self.devices.get(rank.0 as usize).map(String::as_str)
    }

    /// All devices in rank order.
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
        // Recipe A: 72 ranks. The coordinates of ranks 0, 1, 6, 12 document the nesting.
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
            let mut all: Vec<Rank> = mesh.groups(axis).concat();
            assert!(mesh.groups(axis).iter().all(|g| g.len() == mesh.size(axis) as usize));
            all.sort();
            assert_eq!(all, mesh.iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn refusals_say_what_is_wrong() {
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
        assert_eq!((mesh.ranks(), mesh.inside(), mesh.outside()), (8, 6, 2));
        let inside: Vec<Rank> = mesh.iter().filter(|r| mesh.contains(*r)).collect();
        assert_eq!(inside, (2..8).map(Rank).collect::<Vec<_>>());
        for r in &inside {
            assert_eq!(mesh.rank_at(mesh.coord_of(*r)), *r);
        }
        assert_eq!(mesh.coord_of(Rank(2)), Coord::default());
        assert_eq!(mesh.coord_of(Rank(7)), Coord([2, 0, 0, 1]));
        for outside in [Rank(0), Rank(1)] {
            assert_eq!(mesh.coord_of(outside), Coord::default());
            assert!(mesh.group_of(outside, Axis::Tp).is_empty());
        }
        assert!(mesh.group_of(Rank(8), Axis::Tp).is_empty());
        for axis in Axis::ALL {
            let mut all: Vec<Rank> = mesh.groups(axis).concat();
            all.sort();
            assert_eq!(all, inside);
        }
        assert_eq!(RankMap::logical(&mesh, "cpu").devices().len(), 8);
    }

    #[test]
    fn a_rank_map_needs_each_device_once() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        assert!(RankMap::new(&mesh, vec!["GPU0".into()]).is_err());
        assert!(RankMap::new(&mesh, vec!["GPU0".into(), "GPU0".into()]).is_err());
        let map = RankMap::new(&mesh, vec!["GPU1".into(), "GPU0".into()]).unwrap();
        assert_eq!(map.device(Rank(0)), Some("GPU1"));
    }
}
