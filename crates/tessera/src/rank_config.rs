//! The configuration that the launcher sends to every rank.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::director::SceneCut;
use tessera_runtime::driver::StreamRequest;
use tessera_runtime::tripwire::T0765;
use tessera_runtime::wire::{F32Bits, Reload};

use crate::admitted_settings::AdmittedSettings;
use crate::codes::T0010;
use crate::cuda::GpuRankConfig;
use crate::faults::DrillConfig;
use crate::files::write_error;
use crate::leader_placement::LeaderPlaces;
use crate::model::Model;
use crate::plan::Plan;
use crate::record::ChunkSettings;
use crate::shards::preflight_reload;
use crate::stream_options::{OutputOptions, StreamOptions};
use crate::synthetic_delays::SyntheticDelays;
use crate::video_input::{VideoInput, VideoOrigin};
use crate::weights_origin::{LoraFile, WeightsOrigin};

/// The configuration that the launcher sends to every rank. The leader decides about the stream;
/// workers only read paths and digests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankConfig {
    /// Folder of the sealed plan: `plan` in the run directory.
    pub(crate) plan: PathBuf,
    /// Digest of the sealed plan as hex digits; a rank that reads another plan fails with T0012.
    pub(crate) digest: String,
    /// Absolute path of the model folder, from which every rank reads weights.
    pub(crate) model: PathBuf,
    /// Where the weights come from.
    pub(crate) weights_origin: WeightsOrigin,
    /// Directory to which the run writes its output.
    pub(crate) out: PathBuf,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// Number of chunks to stream.
    pub(crate) chunks: u32,
    /// Prompts, each with the chunk from which it holds; the first holds from chunk 0.
    pub(crate) prompts: Vec<(u32, String)>,
    /// Seeds, in the same form as `prompts`.
    pub(crate) seeds: Vec<(u32, u64)>,
    /// Names of the plan's lists of denoise steps, in its order.
    pub(crate) admitted_step_lists: Vec<String>,
    /// Indices of lists of denoise steps, in the form of `prompts`; that of the model until the first.
    pub(crate) step_lists: Vec<(u32, u32)>,
    /// Attention biases, in the same form; that of the plan until the first.
    pub(crate) biases: Vec<(u32, f32)>,
    /// Chunks before which the scene is cut.
    pub(crate) cuts: Vec<u32>,
    /// Chunks before which the scene is cut at once, which discards undelivered requests.
    pub(crate) flushes: Vec<u32>,
    /// Weights to load before a chunk.
    pub(crate) weights: Vec<(u32, Reload)>,
    /// File with the noise of each chunk's first step; only the leader reads it.
    pub(crate) noise: Option<PathBuf>,
    /// Input video; only the leader reads it.
    pub(crate) video: Option<VideoInput>,
    /// Outputs beside those that every run writes.
    pub(crate) outputs: OutputOptions,
    /// Whether the launching process passes a socket on which changes arrive; only the leader reads it.
    pub(crate) is_steered: bool,
    /// Whether each rank writes the messages that it sends to a file.
    pub(crate) wire_dump: bool,
    /// Whether each rank poisons temporaries that hold no value.
    pub(crate) poison: bool,
    /// Where the leader runs its own programs, and whether that of a text encoder stays loaded.
    pub(crate) leader: LeaderPlaces,
    /// Synthetic times of decode, encode and generator; a stage without one takes its real time.
    pub(crate) delays: SyntheticDelays,
    /// GPU configuration of the mesh ranks; `None` if all ranks run on CPUs.
    pub(crate) gpus: Option<GpuRankConfig>,
    /// Fault, limits and disabled tripwires of a drill; `None` in every other run.
    pub(crate) drill: Option<DrillConfig>,
}

/// The settings of a rank that do not depend on the kind of its model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankSettings<'a> {
    /// Directory to which the run writes.
    pub(crate) out: &'a Path,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// Whether each rank writes the messages that it sends to a file.
    pub(crate) wire_dump: bool,
    /// Whether each rank poisons temporaries that hold no value.
    pub(crate) poison: bool,
    /// Whether each rank reports the times of single ops.
    pub(crate) times_single_ops: bool,
    /// GPU configuration of the mesh ranks; `None` if all ranks run on CPUs.
    pub(crate) gpus: Option<&'a GpuRankConfig>,
    /// Fault, limits and disabled tripwires of a drill; `None` in every other run.
    pub(crate) drill: Option<&'a DrillConfig>,
}

impl RankConfig {
    /// Converts the options to the configuration of the ranks, with absolute paths and without GPUs.
    pub(crate) fn from_options(
        plan: &Plan,
        model: &Model,
        options: &StreamOptions,
        threads: usize,
    ) -> Result<RankConfig, Diagnostic> {
        let mut prompts = vec![(0, options.prompt.clone())];
        prompts.extend(options.prompts_at.iter().cloned());
        let mut seeds = vec![(0, options.seed)];
        seeds.extend(options.seeds_at.iter().copied());
        let admitted = AdmittedSettings::from_plan(plan);
        let step_lists =
            options.step_lists_at.iter().map(|(c, name)| Ok((*c, admitted.find_step_list(name)?)));
        let step_lists = step_lists.collect::<Result<Vec<_>, Diagnostic>>()?;
        let absolute = |p: &Path| std::path::absolute(p).map_err(|e| write_error(p, &e));
        let out = absolute(&options.out)?;
        let weights = options.weights_at.iter().map(|(chunk, change)| {
            let digest = preflight_reload(plan, model, change).map_err(first_diagnostic)?;
            let change = change.to_absolute().map_err(|e| write_error(&model.dir, &e))?;
            Ok((*chunk, Reload { source: change.to_string(), weights: digest }))
        });
        let weights = weights.collect::<Result<Vec<_>, Diagnostic>>()?;
        Ok(RankConfig {
            plan: out.join("plan"),
            digest: plan.sealed.digest_hex(),
            model: absolute(&model.dir)?,
            weights_origin: WeightsOrigin {
                base: model.weights.base,
                loras: (model.weights.loras.iter().map(LoraFile::to_absolute))
                    .collect::<Result<_, _>>()
                    .map_err(|e| write_error(&model.dir, &e))?,
            },
            out,
            threads,
            chunks: options.chunks,
            prompts,
            seeds,
            admitted_step_lists: admitted.step_lists().to_vec(),
            step_lists,
            biases: options.biases_at.clone(),
            cuts: options.cuts_at.clone(),
            flushes: options.flushes_at.clone(),
            weights,
            noise: options.noise.as_deref().map(absolute).transpose()?,
            video: options.video.as_ref().map(with_absolute_path).transpose()?,
            outputs: options.outputs.clone(),
            is_steered: false,
            wire_dump: options.wire_dump,
            poison: options.poison,
            leader: LeaderPlaces::on_cpu(options),
            delays: options.delays,
            gpus: None,
            drill: options.drill.clone(),
        })
    }

    /// Returns whether the launching process passes a socket on which the frames of the input video arrive.
    pub(crate) fn is_fed(&self) -> bool {
        self.video.as_ref().is_some_and(|video| video.from == VideoOrigin::Feed)
    }

    /// Returns where a rank finds the weights.
    pub(crate) fn weights_place(&self) -> (PathBuf, WeightsOrigin) {
        (self.model.clone(), self.weights_origin.clone())
    }

    /// Returns the settings that do not depend on the kind of the model.
    pub(crate) fn settings(&self) -> RankSettings<'_> {
        RankSettings {
            out: &self.out,
            threads: self.threads,
            wire_dump: self.wire_dump,
            poison: self.poison,
            times_single_ops: false,
            gpus: self.gpus.as_ref(),
            drill: self.drill.as_ref(),
        }
    }

    /// Opens the model of the run, whose settings the plan has.
    ///
    /// # Errors
    /// T0010 if its folder does not exist.
    pub(crate) fn open_model(&self, plan: &Plan) -> Result<Model, Diagnostic> {
        Ok(Model::open_for_plan(&self.model, plan)?.with_weights(self.weights_origin.clone()))
    }

    /// Returns whether this run checks that its output files stay in place; only a self-test does
    /// not.
    pub(crate) fn checks_output(&self) -> bool {
        checks_output(self.drill.as_ref())
    }

    /// Returns the settings of a request. Requests count from 0, like the chunks on the command
    /// line.
    pub(crate) fn chunk_settings(&self, request: u64) -> ChunkSettings {
        let chunk = u32::try_from(request).unwrap_or(u32::MAX);
        ChunkSettings {
            prompt: in_force(&self.prompts, chunk).cloned().unwrap_or_default(),
            seed: in_force(&self.seeds, chunk).copied().unwrap_or(0),
            cut: self.cut_at(chunk).is_cut() || self.reload_at(chunk).is_some(),
            step_list: in_force(&self.step_lists, chunk).and_then(|at| self.step_list_name(*at)),
            bias: in_force(&self.biases, chunk).copied(),
            weights: in_force(&self.weights, chunk).map(|reload| reload.source.clone()),
        }
    }

    /// Returns the name of a list of denoise steps; `None` for that of the model.
    pub(crate) fn step_list_name(&self, at: u32) -> Option<String> {
        self.admitted_step_lists.get(at as usize).filter(|_| at > 0).cloned()
    }

    pub(crate) fn stream_request(&self, chunk: u32) -> StreamRequest {
        let seed = self.chunk_settings(u64::from(chunk)).seed;
        StreamRequest {
            prompt: change_at(&self.prompts, chunk).cloned(),
            seed,
            cut: self.cut_at(chunk),
            step_list: in_force(&self.step_lists, chunk).copied().unwrap_or(0),
            bias: in_force(&self.biases, chunk).map(|bias| F32Bits::new(*bias)),
            reload: self.reload_at(chunk),
            ..StreamRequest::default()
        }
    }

    /// Returns the seed that was scheduled for exactly this chunk.
    pub(crate) fn seed_at(&self, chunk: u32) -> Option<u64> {
        change_at(&self.seeds, chunk).copied()
    }

    /// Returns the list of denoise steps that was scheduled for exactly this chunk.
    pub(crate) fn step_list_at(&self, chunk: u32) -> Option<u32> {
        change_at(&self.step_lists, chunk).copied()
    }

    /// Returns the attention bias that was scheduled for exactly this chunk.
    pub(crate) fn bias_at(&self, chunk: u32) -> Option<f32> {
        change_at(&self.biases, chunk).copied()
    }

    pub(crate) fn cut_at(&self, chunk: u32) -> SceneCut {
        match (self.flushes.contains(&chunk), self.cuts.contains(&chunk)) {
            (true, _) => SceneCut::Flush,
            (_, true) => SceneCut::Ordered,
            _ => SceneCut::None,
        }
    }

    pub(crate) fn reload_at(&self, chunk: u32) -> Option<Reload> {
        change_at(&self.weights, chunk).cloned()
    }
}

/// Returns whether the tripwire of lost output files is armed under a drill.
pub(crate) fn checks_output(drill: Option<&DrillConfig>) -> bool {
    drill.is_none_or(|d| d.disabled_tripwires.is_armed(&T0765))
}

/// Returns a video whose path holds in every folder: a rank may have another one.
fn with_absolute_path(video: &VideoInput) -> Result<VideoInput, Diagnostic> {
    let from = match &video.from {
        VideoOrigin::Path(path) => {
            VideoOrigin::Path(std::path::absolute(path).map_err(|e| write_error(path, &e))?)
        }
        VideoOrigin::Feed => VideoOrigin::Feed,
    };
    Ok(VideoInput { from, ..video.clone() })
}

/// Returns the value in force at a chunk: the last one set at or before it.
fn in_force<T>(changes: &[(u32, T)], chunk: u32) -> Option<&T> {
    changes.iter().filter(|(c, _)| *c <= chunk).max_by_key(|(c, _)| *c).map(|(_, v)| v)
}

/// Returns the value set at exactly this chunk: the last one, if there are several.
fn change_at<T>(changes: &[(u32, T)], chunk: u32) -> Option<&T> {
    changes.iter().rev().find(|(c, _)| *c == chunk).map(|(_, v)| v)
}

/// Returns the first of several diagnostics, because an engine thread reports only one.
pub(crate) fn first_diagnostic(ds: Diagnostics) -> Diagnostic {
    ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0010, "no diagnostic was given"))
}

#[cfg(test)]
mod tests {
    use tessera_plan::Mapping;

    use super::*;
    use crate::model::Overrides;
    use crate::plan::plan_model;

    #[test]
    fn rank_config_survives_serialisation() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        let plan = plan_model(&model.video, &model.name, "", &Mapping::default()).unwrap();
        let options = StreamOptions { chunks: 3, seed: 7, out: "run".into(), ..StreamOptions::default() };
        let orders = RankConfig::from_options(&plan, &model, &options, 2).unwrap();
        let on =
            GpuRankConfig { communicator_ids: vec!["ab".repeat(128), String::new()], first_rank_of_host: 0 };
        let orders = RankConfig { gpus: Some(on.clone()), ..orders };
        let payload = serde_json::to_vec(&orders).unwrap();
        let read: RankConfig = serde_json::from_slice(&payload).unwrap();
        assert_eq!((read.gpus.as_ref(), read.threads), (Some(&on), 2));
        assert_eq!(serde_json::to_vec(&read).unwrap(), payload);
    }

    #[test]
    fn changes_hold_from_their_chunk_on() {
        let changes = [(0, "a"), (4, "b"), (2, "c")];
        let at = |c| in_force(&changes, c).copied();
        assert_eq!(
            [at(0), at(1), at(2), at(3), at(4), at(99)].map(Option::unwrap),
            ["a", "a", "c", "c", "b", "b"]
        );
    }
}
