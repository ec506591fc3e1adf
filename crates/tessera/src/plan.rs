//! Plans: from a model and a mapping to a sealed plan, and between a sealed plan and its folder.

use std::path::Path;

use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_models::{
    DecoderQuality, EXACT_DECODE_PHASE, MediaPhases, TEXT_DEVICE_PHASE, TEXT_PHASE, TextEncoder, Umt5Config,
    VIDEO_DEVICE_PHASES, VIDEO_PHASES, VideoModel, build_phases, list_calls,
};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, MediaPlacement, lower};
use tessera_runtime::driver::ControlTopology;
use tessera_verify::{DeviceLimits, SealedPlan, seal};

use crate::codes::T0011;
use crate::files::{StagedFolder, read_text};
use crate::plan_folder::{CONFIG_FILE, ModelNames, SealedFolder, read_sealed, write_sealed};

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
        let names = ModelNames { model: self.model.clone(), model_dir: self.model_dir.clone() };
        write_sealed(folder, prefix, (&self.sealed, &self.mapping), &names)?;
        let mut write = |name: &str, bytes: &[u8]| folder.write(&format!("{prefix}{name}"), bytes);
        write(CONFIG_FILE, self.video.wan.to_json().as_bytes())?;
        write("stream.toml", self.video.stream.to_toml().as_bytes())?;
        if let Some(encoder) = &self.video.text_encoder {
            write(TEXT_ENCODER_CONFIG, encoder.to_json().as_bytes())?;
        }
        Ok(())
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
        let video = read_video(dir)?;
        let read = read_sealed(dir, limits, &|mapping| sealed_text(mapping, &video))?;
        let SealedFolder { sealed, mapping, names: ModelNames { model, model_dir } } = read;
        Ok(Plan { video, model, model_dir, mapping, sealed })
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
        self.sealed.mesh().inner_ranks()
    }

    /// Returns the bytes of weights, buffers and temporaries of a rank.
    #[must_use]
    pub fn memory_bytes(&self, rank: Rank) -> [Bytes; 3] {
        self.sealed.rank_memory(rank).map_or([Bytes(0); 3], |m| [m.weights, m.buffers, m.temporaries])
    }
}

/// Reads the configs of a plan's model.
fn read_video(dir: &Path) -> Result<VideoModel, Diagnostics> {
    let shown = |name: &str| dir.join(name).display().to_string();
    let text = |name: &str| read_text(&dir.join(name), &T0011).map_err(|d| vec![d]);
    let mut video = VideoModel::parse(
        (&shown(CONFIG_FILE), &text(CONFIG_FILE)?),
        (&shown("stream.toml"), &text("stream.toml")?),
    )?;
    if video.stream.text == TextEncoder::Umt5 {
        let file = shown(TEXT_ENCODER_CONFIG);
        video.set_text_encoder(&file, Umt5Config::parse(&file, &text(TEXT_ENCODER_CONFIG)?)?)?;
    }
    Ok(video)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan_folder::to_json;
    use crate::{Model, Overrides};

    #[test]
    fn errors_of_hosts_and_of_other_files_of_a_plan_are_reported_together() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let mapping = Mapping { mesh: "tp=2".parse().unwrap(), hosts: vec![2], ..Mapping::default() };
        let (_, plan) = Model::open_and_plan(&demo, &Overrides::default(), &mapping).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("plan");
        plan.write(&folder).unwrap();
        let change = |file: &str, old: &str, new: &str| {
            let path = folder.join(file);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(old), "{text}");
            std::fs::write(&path, text.replace(old, new)).unwrap();
        };
        change("seal.json", "\"path\": \"peer memory\"", "\"path\": \"a rope\"");
        let phase = &plan.sealed.phase_names()[0];
        change("memory.json", &format!("\"phase\": \"{phase}\""), "\"phase\": \"dream\"");
        std::fs::remove_file(folder.join("mapping.toml")).unwrap();
        let messages: Vec<String> = Plan::read(&folder).unwrap_err().into_iter().map(|d| d.message).collect();
        let no_memory = format!("no memory plan for @{phase} of");
        for part in ["with the path `a rope` is no group", "mapping.toml", &no_memory] {
            assert!(messages.iter().any(|m| m.contains(part)), "no {part} in {messages:?}");
        }
    }

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
