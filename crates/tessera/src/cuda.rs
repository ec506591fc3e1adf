//! Ranks on GPUs: which lanes they meet in, by which names, which device is whose, and how a rank's backend is opened.

use std::hash::Hasher as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{Cuda, End, Library, Options, T1304, UniqueId, unique_id};
use tessera_device::{Seat, T0801};
use tessera_mesh::{Mesh, Rank};
use tessera_verify::SealedPlan;

use crate::comm;
use crate::gpus::{Gpus, kernels};

/// Longest wait for the other ranks of a lane before the first collective: they load weights meanwhile.
const SETUP: Duration = Duration::from_secs(300);

/// What a rank's process on GPUs runs under, where its user says nothing else: sums by multicast over NVSwitch depend on
/// what was allocated before.
pub(crate) const ENVIRONMENT: [(&str, &str); 1] = [("NCCL_NVLS_ENABLE", "0")];

/// Those of [`ENVIRONMENT`] that the environment does not set already.
pub(crate) fn environment() -> Vec<(&'static str, &'static str)> {
    ENVIRONMENT.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect()
}

/// Keys of the parity table and their values.
pub(crate) type Shown = Vec<(&'static str, String)>;

/// What ranks are told that run on GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OnGpus {
    /// Names of all lanes of the plan, in order.
    pub(crate) lanes: Vec<String>,
    /// First rank of this rank's host, which has the host's first device.
    pub(crate) first: u32,
}

impl OnGpus {
    /// Opens the backend of a rank of the mesh, and what it shows of its device and libraries.
    ///
    /// # Errors
    /// As [`open`].
    pub(crate) fn open(
        &self,
        sealed: &SealedPlan,
        rank: Rank,
        patience: Duration,
    ) -> Result<(Cuda, Shown), Diagnostic> {
        let gpus = Gpus::look();
        let device = device(sealed.mesh(), self.first, rank);
        let cuda = open(&gpus, sealed, rank, device, &self.lanes, patience)?;
        Ok((cuda, shown(&gpus, device)))
    }
}

/// The visible device of a rank of the mesh: its place among the ranks of its host that compute. A leader outside the mesh
/// needs none.
#[must_use]
pub fn device(mesh: &Mesh, first: u32, rank: Rank) -> u32 {
    (first..rank.0).filter(|r| mesh.contains(Rank(*r))).count() as u32
}

/// Names of all lanes of a plan, in order, for whoever starts its ranks: made once, told to all. A lane of one rank has none.
///
/// # Errors
/// T1301 where NCCL is not here, T1303 where it fails.
pub fn lane_ids(gpus: &Gpus, sealed: &SealedPlan) -> Result<Vec<String>, Diagnostic> {
    let hex = |id: UniqueId| id.0.iter().map(|b| format!("{b:02x}")).collect();
    let name = |spec: &comm::GroupSpec| match spec.lane.members.len() {
        0 | 1 => Ok(String::new()),
        _ => unique_id(&gpus.libraries).map(hex),
    };
    comm::groups(sealed).iter().map(name).collect()
}

/// Opens a rank's backend on a visible device.
///
/// # Errors
/// A missing library or device, ranks that do not meet, ids that are not this plan's.
pub fn open(
    gpus: &Gpus,
    sealed: &SealedPlan,
    rank: Rank,
    device: u32,
    ids: &[String],
    patience: Duration,
) -> Result<Cuda, Diagnostic> {
    let seat = Seat { mesh: *sealed.mesh(), rank };
    let options = Options { device, kernels: kernels(), patience, setup: SETUP, host: host(), graphs: true };
    Cuda::open(&gpus.libraries, seat, ends(sealed, rank, ids)?, options)
}

fn ends(sealed: &SealedPlan, rank: Rank, ids: &[String]) -> Result<Vec<End>, Diagnostic> {
    let specs = comm::groups(sealed);
    if specs.len() != ids.len() {
        let what = format!("{} names for {} lanes: another plan's", ids.len(), specs.len());
        return Err(Diagnostic::error(&T1304, what));
    }
    let mine = specs.iter().zip(ids).filter(|(s, _)| s.lane.members.contains(&rank));
    mine.filter_map(|(spec, id)| {
        let me = spec.lane.members.iter().position(|r| *r == rank)?;
        let route = spec.lane.route(sealed.mesh(), me)?;
        let members = spec.lane.members.len();
        let unread =
            || Diagnostic::error(&T1304, format!("the name of lane {route} is not 128 bytes in hex"));
        let id = if members == 1 && id.is_empty() { Ok([0; 128]) } else { bytes(id).ok_or_else(unread) };
        Some(id.map(|id| End { route, id: UniqueId(id), me, members }))
    })
    .collect()
}

fn bytes(hex: &str) -> Option<[u8; 128]> {
    let mut out = [0; 128];
    if hex.len() != 256 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, o) in out.iter_mut().enumerate() {
        *o = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(out)
}

/// The same number for all processes of this host since it was started, another on another host; 0 where that cannot be told.
fn host() -> u64 {
    let read = |path: &str| std::fs::read(path).ok();
    let Some(boot) = read("/proc/sys/kernel/random/boot_id") else { return 0 };
    let name = read("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut hash = std::hash::DefaultHasher::new();
    hash.write(&boot);
    hash.write(&name);
    hash.finish().max(1)
}

/// Parity keys of a rank's device and of the libraries that choose its kernels.
fn shown(gpus: &Gpus, device: u32) -> Shown {
    let gpu = gpus.devices.as_ref().ok().and_then(|d| d.gpus.get(device as usize));
    let gpu = gpu.map_or("unknown".to_string(), |g| {
        let (major, minor) = g.capability;
        format!("{}, sm_{major}{minor}", g.name)
    });
    let choosing = gpus.libraries.found.iter().filter(|f| f.library != Library::Nvml);
    let versions =
        choosing.map(|f| format!("{} {}", f.library.name(), f.version.as_deref().unwrap_or("of no version")));
    vec![("GPU", gpu), ("GPU libraries", versions.collect::<Vec<_>>().join(", "))]
}

/// What is said where somebody wants GPUs and there are none, or too few.
///
/// # Errors
/// One diagnostic that says what is missing.
pub fn check(gpus: &Gpus, ranks: usize) -> Result<(), Diagnostics> {
    for library in Library::ALL {
        let needed = library != Library::Nvml && (library != Library::Nccl || ranks > 1);
        if let Some(lost) = gpus.libraries.lost.iter().find(|l| needed && l.library == library) {
            return Err(vec![lost.diagnostic()]);
        }
    }
    match &gpus.devices {
        Err(d) => Err(vec![d.clone()]),
        Ok(d) if d.gpus.len() < ranks => {
            let what = format!("{ranks} ranks want a GPU each, {} are here", d.gpus.len());
            Err(vec![
                Diagnostic::error(&T1304, what)
                    .hint("a smaller --mesh, or CUDA_VISIBLE_DEVICES with more of them"),
            ])
        }
        Ok(_) => Ok(()),
    }
}

/// The same for a plan of which so many ranks want a GPU here, and others may elsewhere.
///
/// # Errors
/// One diagnostic.
pub(crate) fn check_plan(gpus: &Gpus, sealed: &SealedPlan, ranks: usize) -> Result<(), Diagnostics> {
    if ranks > 0 {
        check(gpus, ranks)?;
    }
    let meets = comm::groups(sealed).iter().any(|s| s.lane.members.len() > 1);
    match gpus.libraries.lost.iter().find(|l| meets && l.library == Library::Nccl) {
        Some(lost) => Err(vec![lost.diagnostic()]),
        None => between_devices(sealed).map_or(Ok(()), |d| Err(vec![d])),
    }
}

/// The first lane that a rank outside the mesh, on processors, shares with one on a GPU: there is no way between them.
fn between_devices(sealed: &SealedPlan) -> Option<Diagnostic> {
    let mesh = sealed.mesh();
    let specs = comm::groups(sealed);
    let mixed = specs.iter().find(|s| {
        let inside = s.lane.members.iter().filter(|r| mesh.contains(**r)).count();
        inside > 0 && inside < s.lane.members.len()
    })?;
    let ranks: Vec<String> = mixed.lane.members.iter().map(ToString::to_string).collect();
    let what =
        format!("collectives over {} join ranks {}, not all on GPUs", mixed.lane.over, ranks.join(", "));
    Some(
        Diagnostic::error(&T0801, what)
            .at("backend", "cuda")
            .hint("--topology mesh, where every rank is on a GPU"),
    )
}

/// One line for the doctor: whether ranks on GPUs would run here.
#[must_use]
pub fn verdict(gpus: &Gpus) -> String {
    let refusal = |ranks| check(gpus, ranks).err().and_then(|ds| ds.into_iter().next());
    let here = gpus.devices.as_ref().map_or(0, |d| d.gpus.len());
    match (refusal(1), refusal(2)) {
        (Some(d), _) => format!("would not run: {} ({})", d.message, d.code.id),
        (None, Some(d)) if here > 1 => {
            format!("would run on one of {here} GPUs, not on several: {} ({})", d.message, d.code.id)
        }
        _ => format!("would run, on up to {here} GPU{}", if here == 1 { "" } else { "s" }),
    }
}

#[cfg(test)]
mod tests {
    use tessera_cuda::Libraries;

    use super::*;
    use crate::{DtypePolicy, Mapping, Model, Overrides, Plan, Strategy, Topology, plan};

    fn planned(mesh: &str, topology: Topology, strategy: Strategy) -> Plan {
        let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        let mesh = mesh.parse().unwrap();
        let map = Mapping { mesh, topology, strategy, ..Mapping::default() };
        plan::make(&model.video, &model.name, "", &map).unwrap()
    }

    fn nothing() -> Gpus {
        let libraries = Libraries::load(&[]);
        let devices = tessera_cuda::devices(&libraries);
        Gpus { folders: Vec::new(), libraries, devices }
    }

    #[test]
    fn ranks_of_a_host_take_its_devices_in_order_and_a_leader_outside_takes_none() {
        let devices = |plan: &Plan, first| {
            let mesh = plan.sealed.mesh();
            plan.mesh_ranks().filter(|r| r.0 >= first).map(|r| device(mesh, first, r)).collect::<Vec<_>>()
        };
        let inside = planned("tp=2,pp=2", Topology::Mesh, Strategy::Ulysses);
        assert_eq!((devices(&inside, 0), devices(&inside, 2)), (vec![0, 1, 2, 3], vec![0, 1]));
        let outside = planned("tp=2", Topology::Pp1, Strategy::Ulysses);
        assert_eq!(outside.mesh_ranks().collect::<Vec<_>>(), [Rank(1), Rank(2)]);
        assert_eq!((devices(&outside, 0), devices(&outside, 1)), (vec![0, 1], vec![0, 1]));
    }

    #[test]
    fn no_lane_of_a_streams_plan_joins_processors_and_gpus() {
        for topology in [Topology::Mesh, Topology::Pp1] {
            for strategy in [Strategy::Ulysses, Strategy::Megatron] {
                let found = between_devices(&planned("tp=2,pp=2", topology, strategy).sealed);
                assert!(found.is_none(), "{found:?}");
            }
        }
        assert!(between_devices(&planned("tp=1", Topology::Pp0, Strategy::Ulysses).sealed).is_none());
    }

    #[test]
    fn gpus_have_a_kernel_for_every_op_of_the_demo_and_of_both_fixtures() {
        for (dir, meshes) in [
            ("models/demo", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"][..]),
            ("fixtures/wan-even", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"]),
            ("fixtures/wan-odd", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"]),
        ] {
            let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
            let model = Model::open(&dir, &Overrides::default()).unwrap();
            for (mesh, strategy, dtype) in meshes.iter().flat_map(|m| {
                let dtypes = [DtypePolicy::F32, DtypePolicy::Bf16];
                let both = [Strategy::Ulysses, Strategy::Megatron];
                both.into_iter().flat_map(move |s| dtypes.map(|d| (m, s, d)))
            }) {
                let map = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
                let plan = plan::make(&model.video, &model.name, "", &map).unwrap();
                for rank in plan.mesh_ranks() {
                    for phase in crate::engine::mesh_phases(&plan.sealed) {
                        let Some(program) = plan.sealed.program(phase, rank) else { continue };
                        let refused = Cuda::refusal(program);
                        assert!(
                            refused.is_none(),
                            "{mesh} {strategy:?} {dtype:?} {}: {refused:?}",
                            model.name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn names_of_lanes_are_read_as_they_were_written_or_refused() {
        let plan = planned("tp=2", Topology::Mesh, Strategy::Ulysses);
        let lanes = comm::groups(&plan.sealed).len();
        let name: String = (0..128_u8).map(|b| format!("{b:02x}")).collect();
        let read = ends(&plan.sealed, Rank(1), &vec![name.clone(); lanes]).unwrap();
        let id: [u8; 128] = std::array::from_fn(|i| i as u8);
        assert!(read.iter().all(|e| (e.id, e.me, e.members) == (UniqueId(id), 1, 2)), "{read:?}");
        for wrong in [name[1..].to_string(), name.replace("7f", "+f"), String::new()] {
            let refused = ends(&plan.sealed, Rank(1), &vec![wrong; lanes]).unwrap_err();
            assert!(refused.message.contains("128 bytes in hex"), "{refused:?}");
        }
        let refused = ends(&plan.sealed, Rank(0), &[]).unwrap_err();
        assert!(refused.message.contains("0 names for"), "{refused:?}");
        let one = planned("tp=1", Topology::Mesh, Strategy::Ulysses);
        assert_eq!(comm::groups(&one.sealed).len(), 0);
    }

    #[test]
    fn the_verdict_and_the_refusal_name_the_same_thing() {
        let gpus = nothing();
        // A machine with a driver of its own finds it wherever it looks.
        let Err(refused) = check(&gpus, 1) else { return };
        assert_eq!(refused.len(), 1);
        let verdict = verdict(&gpus);
        assert!(verdict.starts_with("would not run: ") && verdict.contains(refused[0].code.id), "{verdict}");
    }
}
