//! Plans: from a model and a mapping to a sealed plan, and between a sealed plan and its folder.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_ir::{Bundle, Phase, Program, RoleRanks, Slots, parse, print};
use tessera_mesh::{Rank, RankMap};
use tessera_models::{
    DecoderQuality, EXACT_DECODE_PHASE, MediaPhases, TEXT_DEVICE_PHASE, TEXT_PHASE, TextEncoder, Umt5Config,
    VIDEO_DEVICE_PHASES, VIDEO_PHASES, VideoModel, build_phases, list_calls,
};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, MediaPlacement, lower};
use tessera_runtime::driver::ControlTopology;
use tessera_verify::{DeviceLimits, SealedPlan, seal};

use crate::check::map_places_to_files;
use crate::codes::{T0011, T0012};
use crate::files::{StagedFolder, read_text};

/// Phases that the leader runs outside the lockstep, unless calls contain them. The plan holds those that
/// encode text or an input video twice, and the leader loads one: that for its CPU or that for a GPU.
const LEADER_PHASES: [&str; 12] = [
    "decode",
    EXACT_DECODE_PHASE,
    "decode.open",
    "decode.first",
    "decode.rest",
    "encode",
    VIDEO_PHASES[0],
    VIDEO_PHASES[1],
    VIDEO_DEVICE_PHASES[0],
    VIDEO_DEVICE_PHASES[1],
    TEXT_PHASE,
    TEXT_DEVICE_PHASE,
];

/// What the leader computes with a backend of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LeaderPart {
    /// The rows of prompts.
    Text,
    /// The latents of an input video.
    Video,
    /// Pixels, and the anchors that are encoded from them.
    Pixels,
}

impl LeaderPart {
    /// Returns the part that one of the leader's phases belongs to.
    pub(crate) fn from_phase(phase: &str) -> LeaderPart {
        match phase {
            TEXT_PHASE | TEXT_DEVICE_PHASE => LeaderPart::Text,
            _ if VIDEO_PHASES.contains(&phase) || VIDEO_DEVICE_PHASES.contains(&phase) => LeaderPart::Video,
            _ => LeaderPart::Pixels,
        }
    }
}

/// Returns whether a phase is for a GPU of the leader's host, and the plan holds the same phase for its CPU.
pub(crate) fn has_cpu_variant(phase: &str) -> bool {
    phase == TEXT_DEVICE_PHASE || VIDEO_DEVICE_PHASES.contains(&phase)
}

/// Returns whether the leader runs a phase of a plan outside the lockstep.
pub(crate) fn is_leader_phase(plan: &SealedPlan, phase: &str) -> bool {
    LEADER_PHASES.contains(&phase) && !is_phase_of_calls(plan, phase)
}

/// Returns whether the calls of a plan contain a phase.
pub(crate) fn is_phase_of_calls(plan: &SealedPlan, phase: &str) -> bool {
    plan.calls().iter().any(|(_, phases)| phases.iter().any(|p| p == phase))
}

/// Iterates over the phases of a plan that the leader runs outside the lockstep.
pub(crate) fn leader_phases(plan: &SealedPlan) -> impl Iterator<Item = &'static str> {
    LEADER_PHASES.into_iter().filter(|phase| !is_phase_of_calls(plan, phase))
}

/// File of a plan folder with the dimensions of a UMT5 text encoder.
const TEXT_ENCODER_CONFIG: &str = "text_encoder.json";

/// A sealed plan and its sources.
#[derive(Debug)]
pub struct Plan {
    /// Model configs, as sealed.
    pub video: VideoModel,
    /// Name of the model, for display. It is not part of the seal.
    pub model: String,
    /// Model folder, where weights are looked up. It is not part of the seal.
    pub model_dir: String,
    /// Mapping as sealed, with the blocks of each stage that lowering fills in.
    pub mapping: Mapping,
    /// The verified programs of all phases and roles, with their digest.
    pub sealed: SealedPlan,
}

/// Plans a model under a mapping and seals the result.
///
/// # Errors
/// Returns why the mapping does not fit the model, or what the verifier rejects.
pub fn plan_model(
    video: &VideoModel,
    model: &str,
    model_dir: &str,
    mapping: &Mapping,
) -> Result<Plan, Diagnostics> {
    let mut mapping = mapping.clone();
    let mut bundle = lower(&logical_model(video, mapping.media), &mut mapping)?;
    bundle.mapping = sealed_text(&mapping, video);
    let sealed = seal(bundle, &DeviceLimits::default())?;
    Ok(Plan {
        video: video.clone(),
        model: model.to_string(),
        model_dir: model_dir.to_string(),
        mapping,
        sealed,
    })
}

/// Builds the logical programs of a model, with global shapes and without ranks. `media` tells which ranks
/// run the phases of pixels.
#[must_use]
pub fn logical_model(m: &VideoModel, media: MediaPlacement) -> LogicalModel {
    let media = match media {
        MediaPlacement::Leader => MediaPhases::BesideCalls,
        MediaPlacement::Outside => MediaPhases::BesideCallsOnDevice,
        MediaPlacement::Mesh | MediaPlacement::Replicas => MediaPhases::InCalls,
    };
    LogicalModel {
        phases: build_phases(m, media),
        calls: list_calls(m, media),
        heads: m.wan.heads,
        head_dim: m.wan.head_dim(),
        hidden_size: m.wan.dim,
        ffn_size: m.wan.ffn_dim,
        tokens: m.chunk_tokens(),
        blocks: m.wan.layers,
        experts: 0,
        decoder: match m.stream.decoder_quality {
            DecoderQuality::Exact => DecoderPrecision::Exact,
            DecoderQuality::Fast => DecoderPrecision::Fast,
        },
    }
}

/// Returns the canonical text that the seal covers besides the programs: mapping, config and stream
/// settings.
fn sealed_text(mapping: &Mapping, video: &VideoModel) -> String {
    let text_encoder = video.text_encoder.as_ref().map_or(String::new(), |e| format!("\n{}", e.to_json()));
    format!("{}\n{}\n{}{text_encoder}", mapping.to_toml(), video.wan.to_json(), video.stream.to_toml())
}

/// The contents of `seal.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealFile {
    tessera_plan: u32,
    digest: String,
    model: String,
    model_dir: String,
    roles: Vec<(String, Vec<u32>)>,
    devices: Vec<String>,
    phases: Vec<String>,
    calls: Vec<(String, Vec<String>)>,
}

impl SealFile {
    /// Finds the program file of an op from the location text of a verifier diagnostic.
    fn find_program_file(&self, location: &str) -> Option<String> {
        let pairs = self.phases.iter().flat_map(|p| self.roles.iter().map(move |(r, _)| (p, r)));
        pairs
            .filter(|(phase, role)| location.contains(&format!("@{phase} role({role})")))
            .map(|(phase, role)| program_file(phase, role))
            .next()
    }
}

/// The memory plan of one program in `memory.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SlotsFile {
    phase: String,
    role: String,
    bytes: Vec<u64>,
    slot_of_value: Vec<Option<u32>>,
}

/// Version of the plan folder. Version 2 renamed keys of the programs and of `memory.json`.
const PLAN_VERSION: u32 = 2;

/// The keys of plan version 1 that have other names now.
const PLAN_1_KEYS: &str = "plan version 2 has new names for keys of version 1: `of` of memory.json is `slot_of_value`, and the \
programs and mapping.toml have new names, too";

fn program_file(phase: &str, role: &str) -> String {
    format!("programs/{phase}.{role}.tir")
}

impl Plan {
    /// Writes the plan folder. The folder appears complete or not at all.
    ///
    /// # Errors
    /// Returns T0013 if the folder exists, or T0014 if it cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        self.write_into(&mut folder, "")?;
        folder.commit()
    }

    /// Writes the plan's files under `prefix` into a staged folder.
    pub fn write_into(&self, folder: &mut StagedFolder, prefix: &str) -> Result<(), Diagnostic> {
        let mut write = |name: &str, bytes: &[u8]| folder.write(&format!("{prefix}{name}"), bytes);
        let mut slots = Vec::new();
        for phase in self.sealed.phase_names() {
            for role in self.sealed.roles() {
                let rank = role.ranks[0];
                if let (Some(p), Some(s)) =
                    (self.sealed.rank_program(phase, rank), self.sealed.rank_slots(phase, rank))
                {
                    write(&program_file(phase, &role.role), print(p).as_bytes())?;
                    slots.push(SlotsFile {
                        phase: phase.clone(),
                        role: role.role.clone(),
                        bytes: s.slot_bytes.clone(),
                        slot_of_value: s.value_slots.clone(),
                    });
                }
            }
        }
        let seal = SealFile {
            tessera_plan: PLAN_VERSION,
            digest: self.sealed.digest_hex(),
            model: self.model.clone(),
            model_dir: self.model_dir.clone(),
            roles: self
                .sealed
                .roles()
                .iter()
                .map(|r| (r.role.clone(), r.ranks.iter().map(|r| r.0).collect()))
                .collect(),
            devices: self.sealed.rank_map().devices().to_vec(),
            phases: self.sealed.phase_names().to_vec(),
            calls: self.sealed.calls().to_vec(),
        };
        write("mapping.toml", self.mapping.to_toml().as_bytes())?;
        write("config.json", self.video.wan.to_json().as_bytes())?;
        write("stream.toml", self.video.stream.to_toml().as_bytes())?;
        if let Some(encoder) = &self.video.text_encoder {
            write(TEXT_ENCODER_CONFIG, encoder.to_json().as_bytes())?;
        }
        write("memory.json", to_json(&slots).as_bytes())?;
        write("seal.json", to_json(&seal).as_bytes())
    }

    /// Reads a plan folder and verifies it again; its digest must equal the sealed one.
    ///
    /// # Errors
    /// Returns T0011, T0012, or what the verifier rejects.
    pub fn read(dir: &Path) -> Result<Plan, Diagnostics> {
        Plan::read_with_limits(dir, &DeviceLimits::default())
    }

    /// Like [`Plan::read`], with the limits of the machine that will run the plan.
    ///
    /// # Errors
    /// Returns T0011, T0012, or what the verifier rejects.
    pub fn read_with_limits(dir: &Path, limits: &DeviceLimits) -> Result<Plan, Diagnostics> {
        let (bundle, video, mapping, seal_file) = read_bundle(dir)?;
        let sealed = seal(bundle, limits).map_err(|mut ds| {
            map_places_to_files(&mut ds, &|at| {
                seal_file.find_program_file(at).map(|f| dir.join(f).display().to_string())
            });
            ds
        })?;
        if sealed.digest_hex() != seal_file.digest {
            return Err(vec![
                Diagnostic::error(&T0012, "the plan is not the one that was sealed")
                    .with_label(
                        dir.join("seal.json").display().to_string(),
                        format!("digest {}", seal_file.digest),
                    )
                    .with_label(dir.display().to_string(), format!("digest {}", sealed.digest_hex()))
                    .with_hint("make the plan again with `tessera plan`"),
            ]);
        }
        Ok(Plan { video, model: seal_file.model, model_dir: seal_file.model_dir, mapping, sealed })
    }

    /// Returns the topology of the control links between the leader and the ranks.
    #[must_use]
    pub fn control_topology(&self) -> ControlTopology {
        if self.mapping.topology.outside_ranks() == 0 {
            ControlTopology::Mesh
        } else {
            ControlTopology::ExternalLeader
        }
    }

    /// Returns the ranks that compute, ascending: every rank except a leader outside the mesh.
    pub fn mesh_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let mesh = *self.sealed.mesh();
        mesh.iter().filter(move |r| mesh.contains(*r))
    }

    /// Returns the bytes of weights, buffers and temporaries of a rank.
    #[must_use]
    pub fn memory_bytes(&self, rank: Rank) -> [Bytes; 3] {
        self.sealed.rank_memory(rank).map_or([Bytes(0); 3], |m| [m.weights, m.buffers, m.temporaries])
    }
}

fn read_bundle(dir: &Path) -> Result<(Bundle, VideoModel, Mapping, SealFile), Diagnostics> {
    let shown = |name: &str| dir.join(name).display().to_string();
    let text = |name: &str| read_text(&dir.join(name), &T0011).map_err(|d| vec![d]);
    let seal_file: SealFile = from_json(&shown("seal.json"), &text("seal.json")?)?;
    check_model_names(&seal_file, &shown("seal.json")).map_err(|d| vec![d])?;
    if seal_file.tessera_plan != PLAN_VERSION {
        let d = Diagnostic::error(&T0011, "another version of tessera made this plan")
            .with_label(shown("seal.json"), format!("plan version {}", seal_file.tessera_plan))
            .with_label("this build", format!("reads plan version {PLAN_VERSION}"))
            .with_hint("make the plan again with `tessera plan`");
        return Err(vec![if seal_file.tessera_plan == 1 { d.with_note(PLAN_1_KEYS) } else { d }]);
    }
    let slots: Vec<SlotsFile> = from_json(&shown("memory.json"), &text("memory.json")?)?;
    let mut video = VideoModel::parse(
        (&shown("config.json"), &text("config.json")?),
        (&shown("stream.toml"), &text("stream.toml")?),
    )?;
    if video.stream.text == TextEncoder::Umt5 {
        let file = shown(TEXT_ENCODER_CONFIG);
        video.set_text_encoder(&file, Umt5Config::parse(&file, &text(TEXT_ENCODER_CONFIG)?)?)?;
    }
    let mapping = Mapping::parse(&shown("mapping.toml"), &text("mapping.toml")?)?;
    let world = mapping.world_mesh().map_err(|d| vec![*d])?;
    let rank_map = RankMap::new(&world, seal_file.devices.clone()).map_err(|d| vec![*d])?;
    let mut ds = Vec::new();
    let mut phases = Vec::new();
    for name in &seal_file.phases {
        let mut phase = Phase { name: name.clone(), programs: Vec::new(), slots: Vec::new() };
        for (role, _) in &seal_file.roles {
            let file = program_file(name, role);
            let program = text(&file).and_then(|t| parse(&t, &shown(&file)));
            let memory = slots.iter().find(|s| s.phase == *name && s.role == *role);
            match (program, memory) {
                (Ok(p), Some(m)) => {
                    phase
                        .programs
                        .push(check_program_name(p, name, role, &shown(&file)).map_err(|d| vec![d])?);
                    phase
                        .slots
                        .push(Slots { slot_bytes: m.bytes.clone(), value_slots: m.slot_of_value.clone() });
                }
                (Err(e), _) => ds.extend(e),
                (_, None) => {
                    ds.push(Diagnostic::error(&T0011, format!("no memory plan for @{name} of {role}")))
                }
            }
        }
        phases.push(phase);
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let roles = seal_file
        .roles
        .iter()
        .map(|(role, ranks)| RoleRanks {
            role: role.clone(),
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        })
        .collect();
    let bundle = Bundle {
        mesh: world,
        rank_map,
        roles,
        phases,
        calls: seal_file.calls.clone(),
        mapping: sealed_text(&mapping, &video),
    };
    Ok((bundle, video, mapping, seal_file))
}

/// Checks that the model's name, which names output folders, is the name of one folder, and that it
/// is the name of the recorded model folder. The seal covers neither.
fn check_model_names(seal: &SealFile, file: &str) -> Result<(), Diagnostic> {
    let is_folder = Path::new(&seal.model).file_name().is_some_and(|name| *name == *seal.model);
    let names_it = seal.model_dir.is_empty() || folder_name(Path::new(&seal.model_dir)) == seal.model;
    if is_folder && names_it && !seal.model.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Diagnostic::error(&T0011, "the model of the plan is not named after its folder")
        .with_label(file.to_string(), format!("model {:?}, model_dir {:?}", seal.model, seal.model_dir))
        .with_hint(
            "`model` is the last part of the path `model_dir`; make the plan again with `tessera plan`",
        ))
}

/// Returns the name of a model: the last part of its folder's path, or `model` if it has none.
pub(crate) fn folder_name(dir: &Path) -> String {
    dir.file_name().map_or("model".to_string(), |n| n.to_string_lossy().into_owned())
}

/// Checks that a program belongs to the phase and role of its file.
fn check_program_name(p: Program, phase: &str, role: &str, file: &str) -> Result<Program, Diagnostic> {
    if p.name == phase && p.role == role {
        return Ok(p);
    }
    Err(Diagnostic::error(&T0011, format!("the file of @{phase} of {role} holds @{} of {}", p.name, p.role))
        .with_label(file.to_string(), "this file"))
}

fn to_json<T: Serialize>(value: &T) -> String {
    // Plain structs of numbers and strings always serialise.
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

fn from_json<T: for<'a> Deserialize<'a>>(file: &str, text: &str) -> Result<T, Diagnostics> {
    serde_json::from_str(text).map_err(|e| {
        vec![
            Diagnostic::error(&T0011, format!("{file} cannot be read: {e}"))
                .with_label(file.to_string(), "here"),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Overrides};

    #[test]
    fn a_plan_whose_model_has_the_name_of_another_folder_is_refused() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let (_, plan) = Model::open_and_plan(&demo, &Overrides::default(), &Mapping::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("plan");
        plan.write(&folder).unwrap();
        assert_eq!(Plan::read(&folder).unwrap().model, "demo");
        let seal = folder.join("seal.json");
        let sealed = std::fs::read_to_string(&seal).unwrap();
        let demo_dir = to_json(&plan.model_dir);
        for (key, old, new) in [
            ("model", "\"demo\"", "\"../../evil\""),
            ("model", "\"demo\"", "\"..\""),
            ("model", "\"demo\"", "\"\""),
            ("model", "\"demo\"", "\"other\""),
            ("model_dir", demo_dir.trim(), "\"../../evil\""),
        ] {
            let changed = sealed.replace(&format!("\"{key}\": {old}"), &format!("\"{key}\": {new}"));
            assert_ne!(changed, sealed, "{key} {old}");
            std::fs::write(&seal, changed).unwrap();
            let refused = Plan::read(&folder).unwrap_err();
            assert_eq!(refused[0].code.id, "T0011", "{key} = {new}");
        }
    }
}
