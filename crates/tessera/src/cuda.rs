//! Ranks on GPUs: their communicators and communicator ids, the assignment of devices to ranks, and
//! the start of a rank's CUDA backend.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{
    CommunicatorMember, CudaBackend, CudaOptions, GpuCallArrays, Library, T1304, ThreadRank, ThreadRanks,
    UniqueId, unique_id,
};
use tessera_device::{MeshRank, T0801};
use tessera_mesh::Rank;
use tessera_verify::SealedPlan;

use crate::communicators::{self, JoinOrder};
use crate::gpu_placement::find_gpu;
use crate::gpus::{GpuDiscovery, masked_features, open_kernel_cache};
use crate::host_identity::host_number;

/// Maximum wait for the other ranks of a communicator before the first collective. The ranks load
/// weights during this time.
const SETUP_TIMEOUT: Duration = Duration::from_secs(300);

/// Default environment of a rank process on GPUs. NVLS sums over NVSwitch multicast depend on
/// earlier allocations, so they are off.
const DEFAULT_ENV: [(&str, &str); 1] = [("NCCL_NVLS_ENABLE", "0")];

/// Returns the default environment of a rank process on GPUs, without the variables that are
/// already set.
pub fn missing_env() -> Vec<(&'static str, &'static str)> {
    DEFAULT_ENV.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect()
}

/// What a rank needs besides the plan to open its CUDA backend: NCCL ids and its host's first rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuRankConfig {
    /// Ids of all communicators of the plan, in plan order.
    pub(crate) communicator_ids: Vec<String>,
    /// First rank of this rank's host. It uses the first device of the host.
    pub(crate) first_rank_of_host: u32,
}

/// What ranks on GPUs share if they are threads of this process.
#[derive(Debug, Clone)]
pub(crate) struct GpuThreadRanks {
    /// Where each rank finds inputs in GPU memory and leaves its outputs.
    pub(crate) arrays: BTreeMap<Rank, Arc<GpuCallArrays>>,
    ranks: Arc<ThreadRanks>,
}

impl GpuThreadRanks {
    pub(crate) fn new(ranks: &[Rank]) -> GpuThreadRanks {
        let arrays = ranks.iter().map(|rank| (*rank, Arc::default())).collect();
        GpuThreadRanks { arrays, ranks: ThreadRanks::new(ranks.len()) }
    }

    /// Ends all waits of the ranks for each other on the host.
    pub(crate) fn abort(&self) {
        self.ranks.abort();
    }

    /// Returns the place of a rank among the threads; `None` if there is no other one.
    pub(crate) fn place_of(&self, rank: Rank) -> Option<ThreadRank> {
        if self.arrays.len() < 2 {
            return None;
        }
        let index = self.arrays.keys().position(|known| *known == rank)?;
        Some(ThreadRank { ranks: Arc::clone(&self.ranks), index })
    }
}

impl GpuRankConfig {
    /// Opens the backend of a rank of the mesh, which joins its communicators in an order. Unless the
    /// check is disabled, an order other than the plan's is refused before the rank joins the first
    /// one. A rank that is a thread has a place among those of its process.
    ///
    /// # Errors
    /// T0757 for another order, and the errors of [`open_cuda`].
    pub(crate) fn open_backend(
        &self,
        sealed: &SealedPlan,
        (rank, thread_rank): (Rank, Option<ThreadRank>),
        collective_timeout: Duration,
        (order, checks_order): (JoinOrder, bool),
    ) -> Result<CudaBackend, Diagnostic> {
        let gpus = GpuDiscovery::discover();
        let device = self.find_device(&gpus, sealed, rank)?;
        let mut members = communicator_members(sealed, rank, &self.communicator_ids)?;
        if order == JoinOrder::Reversed {
            members.reverse();
        }
        if checks_order {
            communicators::check_join_order(sealed, rank, members.iter().map(|m| m.route))?;
        }
        let seat = MeshRank { mesh: *sealed.mesh(), rank };
        let options = CudaOptions { thread_rank, ..backend_options(device, collective_timeout)? };
        CudaBackend::open(&gpus.libraries, seat, members, options)
    }

    /// Opens a backend without communicators on the device of a rank, which runs each program once.
    ///
    /// # Errors
    /// The errors of [`open_cuda`].
    pub(crate) fn open_probe_backend(
        &self,
        sealed: &SealedPlan,
        rank: Rank,
        placement: MeshRank,
        timeout: Duration,
    ) -> Result<CudaBackend, Diagnostic> {
        let gpus = GpuDiscovery::discover();
        let device = self.find_device(&gpus, sealed, rank)?;
        CudaBackend::open(&gpus.libraries, placement, Vec::new(), backend_options(device, timeout)?)
    }

    /// Returns the index among the visible GPUs of the one that the plan's rank map gives a rank.
    ///
    /// # Errors
    /// T0776 for a GPU that this host does not show, or why it shows none.
    pub(crate) fn find_device(
        &self,
        gpus: &GpuDiscovery,
        sealed: &SealedPlan,
        rank: Rank,
    ) -> Result<u32, Diagnostic> {
        let visible = &gpus.devices.as_ref().map_err(Clone::clone)?.gpus;
        find_gpu(visible, (sealed.mesh(), sealed.rank_map()), self.first_rank_of_host, rank)
    }
}

/// Creates an id for each communicator of a plan, in plan order. Whoever starts the ranks calls
/// this once and sends the ids to all of them. A communicator of one rank has an empty id.
///
/// # Errors
/// T1301 if NCCL is not installed, T1303 if NCCL fails.
pub fn create_communicator_ids(gpus: &GpuDiscovery, sealed: &SealedPlan) -> Result<Vec<String>, Diagnostic> {
    let hex = |id: UniqueId| id.0.iter().map(|b| format!("{b:02x}")).collect();
    let name = |spec: &communicators::CommunicatorSpec| match spec.communicator.members.len() {
        0 | 1 => Ok(String::new()),
        _ => unique_id(&gpus.libraries).map(hex),
    };
    communicators::communicator_specs(sealed).iter().map(name).collect()
}

/// Returns an id for each communicator of a plan whose ranks are threads of one process, in plan order.
pub(crate) fn name_thread_communicators(sealed: &SealedPlan) -> Vec<String> {
    (0..communicators::communicator_specs(sealed).len())
        .map(|number| format!("{:0256x}", number + 1))
        .collect()
}

/// Opens a rank's backend on a visible device.
///
/// # Errors
/// A diagnostic for a missing library or device, a timeout while ranks connect, T1304 for ids of
/// another plan, or T1305 for a masked feature that does not exist.
pub fn open_cuda(
    gpus: &GpuDiscovery,
    sealed: &SealedPlan,
    rank: Rank,
    device: u32,
    ids: &[String],
    collective_timeout: Duration,
) -> Result<CudaBackend, Diagnostic> {
    let seat = MeshRank { mesh: *sealed.mesh(), rank };
    let options = backend_options(device, collective_timeout)?;
    CudaBackend::open(&gpus.libraries, seat, communicator_members(sealed, rank, ids)?, options)
}

/// Opens a backend without communicators for the leader's own programs, on a visible device.
///
/// # Errors
/// The errors of [`open_cuda`].
pub(crate) fn open_leader_backend(seat: MeshRank, device: u32) -> Result<CudaBackend, Diagnostic> {
    let libraries = GpuDiscovery::discover().libraries;
    CudaBackend::open(&libraries, seat, Vec::new(), backend_options(device, SETUP_TIMEOUT)?)
}

fn backend_options(device: u32, collective_timeout: Duration) -> Result<CudaOptions, Diagnostic> {
    Ok(CudaOptions {
        device_index: device,
        kernel_cache: open_kernel_cache(),
        peer_timeout: collective_timeout,
        setup_timeout: SETUP_TIMEOUT,
        host_id: host_number(),
        masked_features: masked_features()?,
        thread_rank: None,
    })
}

fn communicator_members(
    sealed: &SealedPlan,
    rank: Rank,
    ids: &[String],
) -> Result<Vec<CommunicatorMember>, Diagnostic> {
    let specs = communicators::communicator_specs(sealed);
    if specs.len() != ids.len() {
        let what =
            format!("{} ids for {} communicators: the ids are of another plan", ids.len(), specs.len());
        return Err(Diagnostic::error(&T1304, what));
    }
    let mine = specs.iter().zip(ids).filter(|(s, _)| s.communicator.members.contains(&rank));
    mine.filter_map(|(spec, id)| {
        let member = spec.communicator.members.iter().position(|r| *r == rank)?;
        let route = spec.communicator.member_route(sealed.mesh(), member)?;
        let members = spec.communicator.members.len();
        let malformed_id =
            || Diagnostic::error(&T1304, format!("the id of communicator {route} is not 128 bytes in hex"));
        let id =
            if members == 1 && id.is_empty() { Ok([0; 128]) } else { decode_id(id).ok_or_else(malformed_id) };
        Some(id.map(|id| CommunicatorMember { route, id: UniqueId(id), member, member_count: members }))
    })
    .collect()
}

fn decode_id(hex: &str) -> Option<[u8; 128]> {
    let mut out = [0; 128];
    if hex.len() != 256 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, o) in out.iter_mut().enumerate() {
        *o = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(out)
}

/// Checks that this host has the libraries and GPUs for `ranks` ranks.
///
/// # Errors
/// One diagnostic that names the first missing part.
pub fn check_gpus(gpus: &GpuDiscovery, ranks: usize) -> Result<(), Diagnostics> {
    check_gpu_libraries(gpus, ranks, ranks > 1)
}

/// Checks that this host has GPUs for `ranks` ranks and the libraries, NCCL only if the ranks need it.
///
/// # Errors
/// One diagnostic that names the first missing part.
pub(crate) fn check_gpu_libraries(
    gpus: &GpuDiscovery,
    ranks: usize,
    needs_nccl: bool,
) -> Result<(), Diagnostics> {
    for library in Library::ALL {
        let needed = library != Library::Nvml && (library != Library::Nccl || needs_nccl);
        if let Some(lost) = gpus.libraries.missing.iter().find(|l| needed && l.library == library) {
            return Err(vec![lost.to_diagnostic()]);
        }
    }
    match &gpus.devices {
        Err(d) => Err(vec![d.clone()]),
        Ok(d) if d.gpus.len() < ranks => {
            let what = format!("{ranks} ranks need one GPU each, but this host has {}", d.gpus.len());
            Err(vec![
                Diagnostic::error(&T1304, what)
                    .with_hint("use a smaller --mesh, or list more GPUs in CUDA_VISIBLE_DEVICES"),
            ])
        }
        Ok(_) => Ok(()),
    }
}

/// Checks a plan of which `ranks` ranks need a GPU on this host; further ranks may run on other
/// hosts.
///
/// # Errors
/// One diagnostic that names the first missing part, or a communicator between CPU and GPU ranks.
pub(crate) fn check_plan(gpus: &GpuDiscovery, sealed: &SealedPlan, ranks: usize) -> Result<(), Diagnostics> {
    if ranks > 0 {
        check_gpus(gpus, ranks)?;
    }
    let has_groups =
        communicators::communicator_specs(sealed).iter().any(|s| s.communicator.members.len() > 1);
    match gpus.libraries.missing.iter().find(|l| has_groups && l.library == Library::Nccl) {
        Some(lost) => Err(vec![lost.to_diagnostic()]),
        None => find_mixed_communicator(sealed).map_or(Ok(()), |d| Err(vec![d])),
    }
}

/// Finds the first communicator that joins a CPU rank outside the mesh with a GPU rank. No
/// transport connects them.
fn find_mixed_communicator(sealed: &SealedPlan) -> Option<Diagnostic> {
    let mesh = sealed.mesh();
    let specs = communicators::communicator_specs(sealed);
    let mixed = specs.iter().find(|s| {
        let inside = s.communicator.members.iter().filter(|r| mesh.contains(**r)).count();
        inside > 0 && inside < s.communicator.members.len()
    })?;
    let ranks: Vec<String> = mixed.communicator.members.iter().map(ToString::to_string).collect();
    let what = format!(
        "collectives over {} include ranks {}, which are not all on GPUs",
        mixed.communicator.group,
        ranks.join(", ")
    );
    Some(
        Diagnostic::error(&T0801, what)
            .with_label("backend", "cuda")
            .with_hint("use --topology mesh, which puts every rank on a GPU"),
    )
}

/// Returns one line for `tessera doctor` that states whether ranks on GPUs can run on this host.
#[must_use]
pub fn readiness_line(gpus: &GpuDiscovery) -> String {
    let refusal = |ranks| check_gpus(gpus, ranks).err().and_then(|ds| ds.into_iter().next());
    let gpu_count = gpus.devices.as_ref().map_or(0, |d| d.gpus.len());
    match (refusal(1), refusal(2)) {
        (Some(d), _) => format!("would not run: {} ({})", d.message, d.code.id),
        (None, Some(d)) if gpu_count > 1 => {
            format!("would run on one of {gpu_count} GPUs, not on several: {} ({})", d.message, d.code.id)
        }
        _ => format!("would run, on up to {gpu_count} GPU{}", if gpu_count == 1 { "" } else { "s" }),
    }
}

#[cfg(test)]
mod tests {
    use tessera_cuda::Libraries;

    use super::*;
    use crate::gpu_placement::position_on_host;
    use crate::{DtypePolicy, Mapping, Model, Overrides, Plan, Strategy, Topology, plan};

    fn plan_demo(mesh: &str, topology: Topology, strategy: Strategy) -> Plan {
        let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        let mesh = mesh.parse().unwrap();
        let map = Mapping { mesh, topology, strategy, ..Mapping::default() };
        plan::plan_model(&model.video, &model.name, "", &map).unwrap()
    }

    fn no_gpus() -> GpuDiscovery {
        let libraries = Libraries::load(&[]);
        let devices = tessera_cuda::list_devices(&libraries);
        GpuDiscovery { searched: Vec::new(), libraries, devices }
    }

    #[test]
    fn devices_are_assigned_in_rank_order_and_an_outside_leader_has_none() {
        let devices = |plan: &Plan, first| {
            let mesh = plan.sealed.mesh();
            plan.mesh_ranks()
                .filter(|r| r.0 >= first)
                .map(|r| position_on_host(mesh, first, r))
                .collect::<Vec<_>>()
        };
        let inside = plan_demo("tp=2,pp=2", Topology::Mesh, Strategy::Ulysses);
        assert_eq!((devices(&inside, 0), devices(&inside, 2)), (vec![0, 1, 2, 3], vec![0, 1]));
        let outside = plan_demo("tp=2", Topology::Pp1, Strategy::Ulysses);
        assert_eq!(outside.mesh_ranks().collect::<Vec<_>>(), [Rank(1), Rank(2)]);
        assert_eq!((devices(&outside, 0), devices(&outside, 1)), (vec![0, 1], vec![0, 1]));
    }

    #[test]
    fn no_communicator_of_a_streams_plan_joins_cpus_and_gpus() {
        for topology in [Topology::Mesh, Topology::Pp1] {
            for strategy in [Strategy::Ulysses, Strategy::Megatron] {
                let found = find_mixed_communicator(&plan_demo("tp=2,pp=2", topology, strategy).sealed);
                assert!(found.is_none(), "{found:?}");
            }
        }
        assert!(
            find_mixed_communicator(&plan_demo("tp=1", Topology::Pp0, Strategy::Ulysses).sealed).is_none()
        );
    }

    #[test]
    fn gpus_have_a_kernel_for_every_op_of_the_demo_and_of_both_fixtures() {
        for (dir, meshes) in [
            ("models/demo", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"][..]),
            ("fixtures/wan-even", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"]),
            ("fixtures/wan-odd", &["tp=1", "tp=2", "tp=4", "tp=2,pp=2"]),
        ] {
            let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
            let mut model = Model::open(&dir, &Overrides::default()).unwrap();
            // A sink and a recache add programs, and change that of the rebase.
            let stream = &mut model.video.stream;
            (stream.window_frames, stream.sink_frames, stream.recache) = (12, 3, true);
            for (mesh, strategy, dtype) in meshes.iter().flat_map(|m| {
                let dtypes = [DtypePolicy::F32, DtypePolicy::Bf16];
                let both = [Strategy::Ulysses, Strategy::Megatron];
                both.into_iter().flat_map(move |s| dtypes.map(|d| (m, s, d)))
            }) {
                let map = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
                let plan = plan::plan_model(&model.video, &model.name, "", &map).unwrap();
                for rank in plan.mesh_ranks() {
                    for phase in crate::engine::mesh_phases(&plan.sealed) {
                        let Some(program) = plan.sealed.rank_program(phase, rank) else { continue };
                        let refused = CudaBackend::find_unsupported(program);
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
    fn communicator_ids_round_trip_or_are_rejected() {
        let plan = plan_demo("tp=2", Topology::Mesh, Strategy::Ulysses);
        let lanes = communicators::communicator_specs(&plan.sealed).len();
        let name: String = (0..128_u8).map(|b| format!("{b:02x}")).collect();
        let read = communicator_members(&plan.sealed, Rank(1), &vec![name.clone(); lanes]).unwrap();
        let id: [u8; 128] = std::array::from_fn(|i| i as u8);
        assert!(read.iter().all(|e| (e.id, e.member, e.member_count) == (UniqueId(id), 1, 2)), "{read:?}");
        for wrong in [name[1..].to_string(), name.replace("7f", "+f"), String::new()] {
            let refused = communicator_members(&plan.sealed, Rank(1), &vec![wrong; lanes]).unwrap_err();
            assert!(refused.message.contains("128 bytes in hex"), "{refused:?}");
        }
        let refused = communicator_members(&plan.sealed, Rank(0), &[]).unwrap_err();
        assert!(refused.message.contains("0 ids for"), "{refused:?}");
        let one = plan_demo("tp=1", Topology::Mesh, Strategy::Ulysses);
        assert_eq!(communicators::communicator_specs(&one.sealed).len(), 0);
    }

    #[test]
    fn the_readiness_line_and_the_check_name_the_same_problem() {
        let gpus = no_gpus();
        // On a machine with a CUDA driver the driver is found even without library folders.
        let Err(refused) = check_gpus(&gpus, 1) else { return };
        assert_eq!(refused.len(), 1);
        let verdict = readiness_line(&gpus);
        assert!(verdict.starts_with("would not run: ") && verdict.contains(refused[0].code.id), "{verdict}");
    }
}
