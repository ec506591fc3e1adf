//! The parity facts that a rank reports before the first call. A rank reads them back from the engine
//! that will run the calls: what it has loaded, joined, chosen and armed, not what was requested.

use std::path::Path;

use tessera_base::record_keys::TRANSPORT_KEY;
use tessera_base::{Code, Diagnostic};
use tessera_device::{CacheChecks, Communicator, JoinedCommunicator, LoadedProgram};
use tessera_ir::Op;
use tessera_mesh::{Mesh, Rank};
use tessera_plan::Mapping;
use tessera_runtime::parity::HOST_KEY;
use tessera_runtime::{Digest, Parity, Tripwires};
use tessera_verify::SealedPlan;

use crate::codes::T0010;
use crate::communicators::communicator_specs;
use crate::engine::{ENGINE_CHECKS, MeshEngine, mesh_phases};
use crate::host_identity::{host_identity, text_or_unknown};
use crate::kernel_probe::shorten_digest;
use crate::machine_shape::cpu_model;
use crate::model::{Model, Weights};
use crate::stated_transports::{TransportUse, list_transports};
use crate::synthetic_delays::SyntheticDelays;
use crate::system;
use crate::text_encoder::PromptEncoder;

/// Value of a fact that does not apply to a rank.
const NOT_APPLICABLE: &str = "none";

/// What a rank runs with. A leader states what the run requests, which is compared with what every
/// rank holds.
pub(crate) struct ExecutorState {
    programs: Vec<LoadedProgram>,
    /// The rank and the communicators that it has joined; `None` for all that the plan names.
    joined: Option<(Rank, Vec<JoinedCommunicator>)>,
    /// Parity keys with the values of the backend.
    backend_values: Vec<(String, String)>,
    unarmed_checks: Vec<&'static Code>,
    /// The checks of caches that the backend offers; `None` if the rank has no backend.
    cache_checks: Option<CacheChecks>,
}

impl ExecutorState {
    /// Returns what a run requests: the programs and communicators of its plan, the backend, and the
    /// checks.
    pub(crate) fn from_request(plan: &SealedPlan, uses_gpus: bool, tripwires: &Tripwires) -> ExecutorState {
        let backend = if uses_gpus { "cuda" } else { "cpu" };
        ExecutorState {
            programs: declared_programs(plan),
            joined: None,
            backend_values: vec![("backend".to_string(), backend.to_string())],
            unarmed_checks: ENGINE_CHECKS.into_iter().filter(|code| !tripwires.is_armed(code)).collect(),
            cache_checks: None,
        }
    }

    /// Returns the transports of the communicators that the rank has joined.
    pub(crate) fn transports(&self, plan: &SealedPlan) -> Vec<TransportUse> {
        self.joined.iter().flat_map(|(rank, joined)| list_transports(plan, *rank, joined)).collect()
    }

    /// Reads back what the engine of a rank holds.
    pub(crate) fn from_engine(plan: &SealedPlan, rank: Rank, engine: &MeshEngine) -> ExecutorState {
        let backend = engine.backend();
        ExecutorState {
            programs: count_idle_programs(plan, rank, backend.loaded_programs()),
            joined: Some((rank, backend.joined_communicators())),
            backend_values: backend.effective_values(),
            unarmed_checks: engine.unarmed_checks(),
            cache_checks: Some(backend.cache_checks()),
        }
    }
}

/// What a rank read from the files of its model.
pub(crate) struct ModelFacts {
    /// Digest of the generator's weights with their LoRAs.
    weights: [u8; 32],
    /// File, strength and digest of every LoRA.
    loras: String,
    /// Name and digest of the tokenizer's file, if the rank's folder has one.
    tokenizer: Option<String>,
}

impl ModelFacts {
    /// Reads back the facts of opened weights and of the folder that they come from.
    ///
    /// # Errors
    /// T0010 if the tokenizer exists and cannot be read.
    pub(crate) fn read(model: &Model, weights: &Weights) -> Result<ModelFacts, Diagnostic> {
        let short = |digest: &[u8; 32]| shorten_digest(*digest);
        let name = |path: &Path| path.file_name().unwrap_or_default().display().to_string();
        let loras: Vec<String> = (model.weights.loras.iter().zip(weights.lora_digests()))
            .map(|(l, digest)| format!("{} at strength {} {}", name(&l.path), l.strength, short(&digest)))
            .collect();
        let tokenizer = PromptEncoder::find_tokenizer(&model.dir, &model.video, model.weights.base)
            .map(|path| describe_file(&path))
            .transpose()?;
        let loras = if loras.is_empty() { NOT_APPLICABLE.to_string() } else { loras.join(", ") };
        Ok(ModelFacts { weights: weights.sample_digest(), loras, tokenizer })
    }

    /// Creates the facts of array programs from a digest of their weights.
    pub(crate) fn of_arrays(weights: [u8; 32]) -> ModelFacts {
        ModelFacts { weights, loras: NOT_APPLICABLE.to_string(), tokenizer: None }
    }

    /// Creates the facts of a language model, from a digest of its weights and the file of its tokenizer.
    ///
    /// # Errors
    /// T0010 if the tokenizer exists and cannot be read.
    pub(crate) fn of_language_model(weights: [u8; 32], tokenizer: &Path) -> Result<ModelFacts, Diagnostic> {
        let tokenizer = tokenizer.is_file().then(|| describe_file(tokenizer)).transpose()?;
        Ok(ModelFacts { weights, loras: NOT_APPLICABLE.to_string(), tokenizer })
    }
}

/// Returns the name of a file and a short digest of its bytes.
fn describe_file(path: &Path) -> Result<String, Diagnostic> {
    let bytes = std::fs::read(path)
        .map_err(|e| Diagnostic::error(&T0010, format!("{} cannot be read: {e}", path.display())))?;
    let name = path.file_name().unwrap_or_default().display();
    Ok(format!("{name} {}", shorten_digest(*blake3::hash(&bytes).as_bytes())))
}

/// Returns all facts except those that the lockstep state machines add themselves. `peers` is the
/// digest of the peers of ranks that found each other by rendezvous.
pub(crate) fn rank_parity(
    (plan, mapping): (&SealedPlan, &Mapping),
    files: &ModelFacts,
    delays: &SyntheticDelays,
    state: &ExecutorState,
    peers: Option<Digest>,
) -> Parity {
    let peers = peers.map_or(String::new(), |peers| format!(", peers {peers}"));
    let groups = describe_communicators(plan, state.joined.as_ref());
    let off: Vec<&str> = state.unarmed_checks.iter().map(|code| code.id).collect();
    let off = if off.is_empty() { NOT_APPLICABLE.to_string() } else { off.join(", ") };
    let parity = Parity::default()
        .with_known_key("LoRAs", files.loras.as_str())
        .with_known_key("captured programs", describe_captures(&state.programs))
        .with_known_key("drill", NOT_APPLICABLE)
        .with_known_key("engine checks off", off)
        .with_known_key("groups", format!("{groups}{peers}"))
        .with_known_key(
            "numerics",
            format!("{} in {}, sums in f32", mapping.numerics.name(), mapping.dtype.name()),
        )
        .with_known_key("program set", describe_program_set(state.programs.iter().map(|p| p.name.as_str())))
        .with_known_key("synthetic delays", delays.announced_text())
        .with_known_key("topology", mapping.topology.name())
        .with_known_key("weights", Digest(files.weights).to_string())
        .with_known_key("cpu model", cpu_model())
        .with_known_key(HOST_KEY, host_identity())
        .with_known_key("kernel version", text_or_unknown(system::kernel_release()));
    let parity = state
        .cache_checks
        .iter()
        .fold(parity, |p, checks| p.with_known_key("cache checks", checks.to_string()));
    let parity = files.tokenizer.iter().fold(parity, |p, text| p.with_known_key("tokenizer", text.as_str()));
    let shared = state.joined.iter().flat_map(|(rank, joined)| shared_ids(plan.mesh(), *rank, joined));
    let transports = state.transports(plan).into_iter();
    let transports = transports.map(|t| (format!("{TRANSPORT_KEY} {}", t.communicator_name()), t.summary()));
    let values = state.backend_values.iter().cloned().chain(shared).chain(transports);
    values.fold(parity, |parity, (key, value)| parity.with_known_key(&key, value))
}

/// Describes a set of program names, independent of their order.
fn describe_program_set<'a>(programs: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = programs.into_iter().collect();
    names.sort_unstable();
    format!("{} programs, {}", names.len(), hash_texts(names))
}

/// Returns the programs of the mesh with the graphs that a plan declares for them. All roles of a
/// phase share the name of the graph.
fn declared_programs(plan: &SealedPlan) -> Vec<LoadedProgram> {
    let ranks: Vec<Rank> = plan.mesh().inner_ranks().collect();
    let graph = |phase: &str| {
        let mut programs = ranks.iter().filter_map(|r| plan.rank_program(phase, *r));
        programs.find_map(|p| p.captured_graph().ok().flatten())
    };
    mesh_phases(plan).map(|phase| LoadedProgram { name: phase.to_string(), graph: graph(phase) }).collect()
}

/// Gives each program that launches nothing on this rank the graph that the plan declares for it on
/// other ranks: a stage without work in a phase has nothing to capture and differs from no peer.
fn count_idle_programs(
    plan: &SealedPlan,
    rank: Rank,
    mut programs: Vec<LoadedProgram>,
) -> Vec<LoadedProgram> {
    let is_idle = |name: &str| plan.rank_program(name, rank).is_some_and(|p| p.ops.iter().all(Op::is_source));
    let declared = declared_programs(plan);
    for program in programs.iter_mut().filter(|p| is_idle(&p.name)) {
        program.graph = declared.iter().find(|d| d.name == program.name).and_then(|d| d.graph.clone());
    }
    programs
}

/// Describes which programs are captured into which graphs. The number of ops differs between roles,
/// so every rank compares its own with the plan at each launch, and it is no part of this value.
fn describe_captures(programs: &[LoadedProgram]) -> String {
    let mut pairs: Vec<(&str, &str)> =
        programs.iter().filter_map(|p| Some((p.name.as_str(), p.graph.as_ref()?.name.as_str()))).collect();
    if pairs.is_empty() {
        return NOT_APPLICABLE.to_string();
    }
    pairs.sort_unstable();
    let renamed = pairs.iter().filter(|(name, graph)| name != graph).count();
    let of_others =
        if renamed == 0 { String::new() } else { format!(", {renamed} into graphs of other names") };
    let texts = pairs.iter().flat_map(|(name, graph)| [*name, *graph]).collect();
    format!("{} programs{of_others}, {}", pairs.len(), hash_texts(texts))
}

/// Describes the world, the mesh, and every group and pair that exchanges data, in order. Those of a
/// rank stand in the order in which the rank joined them; those of other ranks in the plan's.
fn describe_communicators(plan: &SealedPlan, joined: Option<&(Rank, Vec<JoinedCommunicator>)>) -> String {
    let mesh = plan.mesh();
    let mut communicators: Vec<Communicator> =
        communicator_specs(plan).into_iter().map(|spec| spec.communicator).collect();
    if let Some((rank, joined)) = joined {
        let mut own = joined.iter().filter_map(|c| c.route.communicator_of(mesh, *rank));
        let is_other = |c: &Communicator| !c.members.contains(rank);
        communicators = communicators
            .into_iter()
            .filter_map(|c| if is_other(&c) { Some(c) } else { own.next() })
            .collect();
        communicators.extend(own);
    }
    let texts: Vec<String> = communicators.iter().map(ToString::to_string).collect();
    let mesh_text = mesh.to_string();
    let parts = [mesh_text.as_str()].into_iter().chain(texts.iter().map(String::as_str)).collect();
    format!(
        "world of {}, mesh of {}, {} communicators, {}",
        mesh.world_size(),
        mesh.mesh_size(),
        communicators.len(),
        hash_texts(parts)
    )
}

/// Returns a parity key for each communicator whose members share memory or a connection, with its
/// name.
fn shared_ids<'a>(
    mesh: &'a Mesh,
    rank: Rank,
    joined: &'a [JoinedCommunicator],
) -> impl Iterator<Item = (String, String)> + 'a {
    joined.iter().filter_map(move |c| {
        let communicator = c.route.communicator_of(mesh, rank)?;
        Some((format!("communicator: {communicator}"), c.shared.clone()?))
    })
}

/// Returns the first 16 hex digits of a digest of the texts, in order.
fn hash_texts(texts: Vec<&str>) -> String {
    let mut hash = blake3::Hasher::new();
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize().to_hex()[..16].to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use tessera_cpu::{CpuBackend, Pool};
    use tessera_device::{Backend, MeshRank};
    use tessera_ir::Program;
    use tessera_runtime::parity::compare_tables;

    use super::*;
    use crate::collective_guard::ArmedGuards;
    use crate::communicators::{EndpointSources, JoinOrder, attach_endpoints, create_arenas_of_ranks};
    use crate::{Mapping, Model, Overrides, Plan, plan};

    #[test]
    fn a_program_set_ignores_order_and_separates_names() {
        assert_eq!(describe_program_set(["b", "a"]), describe_program_set(["a", "b"]));
        assert!(describe_program_set(["a", "b"]).starts_with("2 programs, "));
        assert_ne!(describe_program_set(["ab", "c"]), describe_program_set(["a", "bc"]));
    }

    fn plan_demo(mesh: &str) -> (Model, Plan) {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        let map = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        let plan = plan::plan_model(&model.video, &model.name, "", &map).unwrap();
        (model, plan)
    }

    type Arenas = Vec<Vec<OwnedFd>>;

    fn create_arenas(plan: &Plan) -> Arenas {
        let shared = create_arenas_of_ranks(&communicator_specs(&plan.sealed), 2).unwrap();
        let own = |fds: Vec<Arc<OwnedFd>>| fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        shared.into_iter().map(own).collect()
    }

    /// Returns a backend with the communicators of a rank.
    fn join(plan: &Plan, rank: u32, arenas: &mut Arenas, order: JoinOrder) -> CpuBackend {
        let own = std::mem::take(&mut arenas[rank as usize]);
        let ends = attach_endpoints(&plan.sealed, Rank(rank), EndpointSources::Arenas(own), order).unwrap();
        let seat = MeshRank { mesh: *plan.sealed.mesh(), rank: Rank(rank) };
        CpuBackend::new(seat, Pool::single_thread(), ends, Duration::from_secs(1))
    }

    fn no_files() -> ModelFacts {
        ModelFacts { weights: [0; 32], loras: String::new(), tokenizer: None }
    }

    /// Returns the keys, with their codes, in which ranks of these states differ from one another or
    /// from the request of the run.
    fn find_differences(plan: &Plan, states: [ExecutorState; 2]) -> Vec<(String, &'static str)> {
        let table = |state: &ExecutorState| {
            rank_parity((&plan.sealed, &plan.mapping), &no_files(), &SyntheticDelays::default(), state, None)
        };
        let request = table(&ExecutorState::from_request(&plan.sealed, false, &Tripwires::default()));
        let ranks: BTreeMap<u32, Parity> = (0..).zip(states.iter().map(table)).collect();
        let found = compare_tables(&ranks, Some((0, &request)));
        found.into_iter().filter(|d| d.class.ends_run()).map(|d| (d.key, d.code.id)).collect()
    }

    // proves: G-02
    #[test]
    fn another_order_of_joining_and_other_memory_are_found_on_the_endpoints() {
        let (_, plan) = plan_demo("pp=2");
        let differences = |second_has_other_memory: bool, order_of_second: JoinOrder| {
            let mut arenas = create_arenas(&plan);
            if second_has_other_memory {
                arenas[1] = create_arenas(&plan).remove(1);
            }
            let states = [(0, JoinOrder::OfPlan), (1, order_of_second)].map(|(rank, order)| {
                let joined = join(&plan, rank, &mut arenas, order).joined_communicators();
                assert!(joined.len() > 1, "{joined:?}");
                let request = ExecutorState::from_request(&plan.sealed, false, &Tripwires::default());
                ExecutorState { joined: Some((Rank(rank), joined)), ..request }
            });
            find_differences(&plan, states)
        };
        assert_eq!(differences(false, JoinOrder::OfPlan), []);
        assert_eq!(differences(false, JoinOrder::Reversed), [("groups".to_string(), "T0757")]);
        let found = differences(true, JoinOrder::OfPlan);
        assert_eq!(found.len(), communicator_specs(&plan.sealed).len());
        assert!(
            found.iter().all(|(key, code)| key.starts_with("communicator: ") && *code == "T0757"),
            "{found:?}"
        );
    }

    /// Loads an unchanged engine of rank 0 and a changed one of rank 1, and returns their differences.
    fn load_changed(
        change_backend: &dyn Fn(&mut CpuBackend),
        modify: &dyn Fn(&mut Program) -> bool,
        change_engine: &dyn Fn(&mut MeshEngine),
    ) -> Vec<(String, &'static str)> {
        let (model, plan) = plan_demo("tp=2");
        let mut arenas = create_arenas(&plan);
        let mut load = |rank: u32, change: bool| {
            let mut backend = join(&plan, rank, &mut arenas, JoinOrder::OfPlan);
            let mut weights = model.open_weights().unwrap();
            if change {
                change_backend(&mut backend);
            }
            let modify = |p: &mut Program| !change || modify(p);
            let backend = Box::new(backend).into();
            let mut engine =
                MeshEngine::load_modified(&plan.sealed, Rank(rank), backend, &mut weights, &modify).unwrap();
            engine.check_weights_finite().unwrap();
            if change {
                change_engine(&mut engine);
            }
            ExecutorState::from_engine(&plan.sealed, Rank(rank), &engine)
        };
        let states = [load(0, false), load(1, true)];
        find_differences(&plan, states)
    }

    // proves: D-01
    #[test]
    fn programs_routes_and_checks_are_read_back_from_the_engine() {
        assert_eq!(load_changed(&|_| {}, &|_| true, &|_| {}), []);
        let left_out = load_changed(&|_| {}, &|p| p.name != "denoise.fill3", &|_| {});
        let key = |name: &str| (name.to_string(), "T0740");
        assert_eq!(left_out, [key("captured programs"), key("program set")]);
        let routes = load_changed(&CpuBackend::choose_other_routes, &|_| true, &|_| {});
        assert!(
            !routes.is_empty() && routes.iter().all(|(k, c)| k.starts_with("route: matmul") && *c == "T0740")
        );
        let armed = ArmedGuards { collectives: true, captures: true, halos: true };
        for (guards, reload) in [
            (ArmedGuards { collectives: false, ..armed }, true),
            (ArmedGuards { captures: false, ..armed }, true),
            (ArmedGuards { halos: false, ..armed }, true),
            (armed, false),
        ] {
            let off = load_changed(&|_| {}, &|_| true, &|engine| {
                engine.arm_guards(guards);
                engine.arm_reload_guard(reload);
            });
            assert_eq!(off, [key("engine checks off")]);
        }
    }
}
