//! The flags of a mapping, which `plan` and `stream` share, and the values that `bench` shares too.

use std::path::{Path, PathBuf};

use tessera::checkpoint::Preset;
use tessera::files::read_text_file;
use tessera::generate::{EXPERTS_FILE, read_expert_choices};
use tessera::plan::plan_model;
use tessera::{
    DecoderQuality, DtypePolicy, Mapping, MediaPlacement, Mesh, Model, Numerics, Overrides, Plan, Strategy,
    Topology, Transport,
};
use tessera_base::Diagnostic;
use tessera_estimate::{choose_media, usual_machine};
use tessera_tools::launch::{assign_ranks, parse_host_count_or_list};

use super::named_values;
use crate::codes::{T0030, T0031};
use crate::output::CliError;
use crate::parse::{invalid_argument, merge_pins};

/// How a flag changes what is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingUse {
    /// The mesh itself, which a search takes as pins
    Mesh,
    /// A field of the mapping that a search chooses, so that it takes the flag as a pin
    Searched,
    /// A field of the mapping that no search chooses
    Fixed,
    /// The hosts of the ranks, which a search takes from its cluster
    Hosts,
    /// A setting of the model instead of the mapping
    OfModel,
}

impl MappingUse {
    /// All uses: every flag of the set.
    pub const ALL: [MappingUse; 5] =
        [MappingUse::Mesh, MappingUse::Searched, MappingUse::Fixed, MappingUse::Hosts, MappingUse::OfModel];
    /// The uses that language models do not have; their mapping is searched for the mesh alone.
    pub const OF_STREAMS: [MappingUse; 4] =
        [MappingUse::Searched, MappingUse::Fixed, MappingUse::Hosts, MappingUse::OfModel];
}

/// Declares [`MappingArgs`]. A flag of a mapping's field has the name of the field.
macro_rules! mapping_flags {
    ($([$use:ident] $(#[$attr:meta])* $flag:ident: $ty:ty,)*) => {
        flag_set! {
            /// The mapping that the command line requests.
            #[command(next_help_heading = "Mapping")]
            MappingArgs by MappingUse {
                $([$use] $(#[$attr])* $flag: Option<$ty>,)*
            }
        }

        impl MappingArgs {
            /// Sets the fields of a mapping that have these uses and whose flag is given.
            fn set_fields(&self, mapping: &mut Mapping, uses: &[MappingUse]) {
                $(mapping_flags!(@set $use, self.$flag, mapping.$flag, uses);)*
            }

            /// Returns the pins that the given flags imply, as `knob=value`.
            fn list_pins(&self) -> Vec<String> {
                let mut pins = Vec::new();
                $(mapping_flags!(@pin $use, $flag, self.$flag, pins);)*
                pins
            }
        }
    };
    (@set Mesh, $flag:expr, $field:expr, $uses:ident) => {};
    (@set Hosts, $flag:expr, $field:expr, $uses:ident) => {};
    (@set OfModel, $flag:expr, $field:expr, $uses:ident) => {};
    (@set $use:ident, $flag:expr, $field:expr, $uses:ident) => {
        if $uses.contains(&MappingUse::$use) {
            $field = $flag.unwrap_or($field);
        }
    };
    (@pin Searched, $knob:ident, $flag:expr, $pins:ident) => {
        $pins.extend($flag.map(|value| format!("{}={}", stringify!($knob), value.pin_text())));
    };
    (@pin $use:ident, $knob:ident, $flag:expr, $pins:ident) => {};
}

mapping_flags! {
    [Mesh]
    /// Mesh axes and their sizes: tp shards each transformer block, pp splits the blocks into
    /// stages; for example tp=2,pp=2 [default: tp=1]
    ///
    /// The sizes multiply to the number of ranks in the mesh. `tessera stream`, and `tessera plan`
    /// without a mapping search, use exactly this mesh. A mapping search of `tessera plan` keeps
    /// the axes given here and chooses the others.
    #[arg(long, value_name = "MESH", value_parser = require_axes)]
    mesh: String,

    [Searched]
    /// Placement of the leader, the process that runs the text encoder and the decoder: in the mesh
    /// or outside it [default: mesh]
    ///
    /// The topologies pp0 and pp1 add one rank in front of the mesh of --mesh. That rank decodes a
    /// chunk while the mesh generates the next one. Use pp0 if the mesh has one rank, pp1 if it has
    /// more.
    #[arg(long, value_parser = named_values(TOPOLOGIES))]
    topology: Topology,

    [Searched]
    /// Where a chunk is decoded to pixels, and the anchor of the next one encoded [default: where the estimated
    /// time from chunk to chunk is shortest]
    ///
    /// Only a Wan VAE and a tiny decoder have such programs; other decoders run on the leader. A plan
    /// in f32 without `--device cuda` is estimated for ranks on CPUs.
    #[arg(long, value_parser = named_values(MEDIA))]
    media: MediaPlacement,

    [Searched]
    /// How tp shards a transformer block: tokens (ulysses) or weights (megatron) [default: ulysses]
    #[arg(long, value_parser = named_values(STRATEGIES))]
    strategy: Strategy,

    [Fixed]
    /// Order of sums across ranks, which decides whether results depend on the mesh [default:
    /// standard]
    #[arg(long, value_parser = named_values(NUMERICS))]
    numerics: Numerics,

    [Fixed]
    /// Compute dtype of matmuls and of the activations that they produce [default: f32]
    ///
    /// A mapping search of `tessera plan` estimates and seals the precision of the executor profile
    /// by default.
    #[arg(long, value_parser = named_values(DTYPES))]
    dtype: DtypePolicy,

    [Fixed]
    /// Transport of collectives between GPUs [default: best]
    #[arg(long, value_parser = named_values(TRANSPORTS))]
    transport: Transport,

    [Hosts]
    /// Hosts of the ranks: a number of equal hosts, or a list with the ranks of each, such as a:4,b:4
    /// [default: the plan states none]
    ///
    /// The plan then states which ranks share a host and the path of each group, and the verifier, the
    /// launch and the run check it. Names stand for any host. Ranks outside of the mesh are on the first
    /// host.
    #[arg(long, value_name = "N|HOST:N,...")]
    hosts: String,

    [Searched]
    /// Split the rows (tokens) of a block into N row chunks, so that the all-reduce of one overlaps
    /// the compute of another; megatron only [default: 1]
    #[arg(long, value_name = "N")]
    overlap_chunks: u32,

    [OfModel]
    /// How the context of past frames is kept between chunks [default: the model's]
    #[arg(long, value_parser = named_values(CACHES))]
    cache: bool,

    [OfModel]
    /// Safetensors file with the rows of each prompt, instead of the model's own text encoder
    ///
    /// The name of a tensor is a prompt, letter by letter. The tensor holds at most text_len rows of
    /// text_dim columns.
    #[arg(long, value_name = "FILE")]
    text_embeddings: PathBuf,

    [OfModel]
    /// Decode with the tiny decoder (TAEHV) of this file, such as taew2_1.pth, instead of the model's
    /// own decoder
    ///
    /// The recompute regime and an input video also need the VAE, which encodes pixels.
    #[arg(long, value_name = "FILE")]
    decoder: PathBuf,

    [OfModel]
    /// How exactly the VAE decodes [default: the model's, which is exact]
    ///
    /// A fast decoder needs GPUs of sm_90 and --dtype bf16 or fp8.
    #[arg(long, value_parser = named_values(QUALITIES))]
    quality: DecoderQuality,

    [OfModel]
    /// Classifier-free guidance: move each prediction away from that of a negative prompt, by this
    /// factor of their difference [default: the model's]
    ///
    /// Each forward then runs twice, with two KV caches. Published scales lie between 3 and 7. Distilled
    /// models need none.
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true)]
    guidance: f64,

    [OfModel]
    /// Negative prompt of --guidance, or of the guidance that the model's stream.toml sets [default: the
    /// model's, or an empty one]
    #[arg(long, value_name = "TEXT")]
    negative_prompt: String,

    [OfModel]
    /// Denoising timesteps in descending order, for example 1000,750,500,250 [default: the model's]
    #[arg(long, value_name = "LIST")]
    steps: String,

    [OfModel]
    /// Stream settings of a published model, for a checkpoint without a stream.toml
    #[arg(long, value_parser = named_values(PRESETS))]
    preset: Preset,

    [OfModel]
    /// Stream settings from this file instead of the folder's stream.toml
    ///
    /// Keys that the file leaves out have the values of --preset, or of the preset that its own key
    /// `preset` names, if there is one.
    #[arg(long, value_name = "FILE")]
    stream: PathBuf,

    [OfModel]
    /// Where the noise of each chunk's first denoising step comes from [default: the model's]
    #[arg(long, value_parser = named_values(NOISE_SOURCES))]
    noise_source: bool,

    [OfModel]
    /// Whether chunks may begin with an input video [default: the model's]
    #[arg(long, value_parser = named_values(VIDEO_INPUTS))]
    video_input: bool,

    [Fixed]
    /// Requested chunks that may wait at the leader, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = QUEUE_HEADING)]
    d_in: u32,

    [Fixed]
    /// Finished chunks that may queue for decoding and writing, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = QUEUE_HEADING)]
    d_out: u32,

    [Searched]
    /// Chunks that may be in flight on the mesh, 1 to 64 [default: 2]
    ///
    /// The leader starts each chunk by one message to the ranks, a call. This option limits the
    /// calls that are sent and not yet done. With 1, the leader prepares a call only when the mesh
    /// is idle.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = QUEUE_HEADING)]
    max_outstanding: u32,
}

const QUEUE_HEADING: &str = "Queue depths";

/// Values of `--topology`, each with its help text.
pub const TOPOLOGIES: &[(&str, Topology, &str)] = &[
    ("mesh", Topology::Mesh, "Rank 0 of the mesh is the leader and computes too"),
    ("pp0", Topology::Pp0, "A leader outside the mesh, and a mesh of exactly one rank"),
    ("pp1", Topology::Pp1, "A leader outside the mesh, and a mesh of two or more ranks"),
];

/// Values of `--media`, each with its help text.
pub const MEDIA: &[(&str, MediaPlacement, &str)] = &[
    ("leader", MediaPlacement::Leader, "The leader, on its CPU, beside the calls of the ranks"),
    (
        "mesh",
        MediaPlacement::Mesh,
        "The ranks of the first stage, at the end of each chunk's call; each computes some rows of the picture",
    ),
    (
        "replicas",
        MediaPlacement::Replicas,
        "Like mesh, but each rank computes the whole picture, which needs no communication",
    ),
    (
        "outside",
        MediaPlacement::Outside,
        "The leader, on a GPU of its host that no rank has, beside the calls of the ranks",
    ),
];

/// Values of `--strategy`, each with its help text.
pub const STRATEGIES: &[(&str, Strategy, &str)] = &[
    (
        "ulysses",
        Strategy::Ulysses,
        "Shard tokens; all-to-alls switch to sharded heads around attention. Exact: the \
         result equals that of one rank",
    ),
    (
        "megatron",
        Strategy::Megatron,
        "Shard weights by column, then by row; all-reduces add the partial sums",
    ),
];

/// Values of `--numerics`, each with its help text.
pub const NUMERICS: &[(&str, Numerics, &str)] = &[
    ("standard", Numerics::Standard, "Add the partial sums of ranks in rank order"),
    (
        "mesh-invariant",
        Numerics::MeshInvariant,
        "Add in one fixed tree, so that no result depends on the mesh",
    ),
];

/// Values of `--dtype`, each with its help text.
pub const DTYPES: &[(&str, DtypePolicy, &str)] = &[
    ("f32", DtypePolicy::F32, "f32 throughout"),
    ("bf16", DtypePolicy::Bf16, "bf16, except for conditioning, latents and norm vectors"),
    ("fp8", DtypePolicy::Fp8, "As bf16, with the matmuls of transformer blocks in e4m3"),
];

/// Values of `--transport`, each with its help text.
pub const TRANSPORTS: &[(&str, Transport, &str)] = &[
    (
        "best",
        Transport::Best,
        "The fastest one available: peer-to-peer over device memory, or NCCL where ranks \
         cannot access each other's memory",
    ),
    ("p2p", Transport::P2p, "Peer-to-peer only, with a separate kernel for each collective"),
    ("nccl", Transport::Nccl, "NCCL for every collective"),
];

/// Values of `--noise-source`: whether calls carry the noise, each with its help text.
const NOISE_SOURCES: &[(&str, bool, &str)] = &[
    ("seed", false, "Every rank draws it from the seed"),
    ("call", true, "The leader sends it, from the file of `tessera stream --noise`"),
];

/// Values of `--video-input`: whether calls may begin with a video, each with its help text.
const VIDEO_INPUTS: &[(&str, bool, &str)] = &[
    ("none", false, "Every chunk begins with noise"),
    ("frames", true, "The leader encodes and sends the frames of `tessera stream --video`"),
];

/// Values of `--cache`: whether keys and values are recomputed, each with its help text.
const CACHES: &[(&str, bool, &str)] = &[
    ("resident", false, "Keep the KV cache of past frames in device memory"),
    ("recompute", true, "Recompute keys and values from past frames before each chunk"),
];

/// Values of `--quality`, each with its help text.
const QUALITIES: &[(&str, DecoderQuality, &str)] = &[
    ("exact", DecoderQuality::Exact, "The reference's values, within the rounding of the dtype"),
    (
        "fast",
        DecoderQuality::Fast,
        "Large convolutions in fp8, compared with the exact decode at every scene",
    ),
];

/// Values of `--preset`, each with its help text.
pub const PRESETS: &[(&str, Preset, &str)] = &[
    ("self-forcing", Preset::SelfForcing, "Self-Forcing 1.3B: chunks of 3, a window of 21"),
    ("longlive", Preset::LongLive, "LongLive 1.3B: chunks of 3, a window of 12 with a sink of 3"),
    (
        "stream-diffusion-v2",
        Preset::StreamDiffusionV2,
        "StreamDiffusionV2 1.3B: chunks of 1, a window of 6 with a sink of 3; needs an input video (--video)",
    ),
    ("krea-realtime", Preset::KreaRealtime, "Krea Realtime 14B as its own server runs it"),
    ("krea-realtime-scope", Preset::KreaRealtimeScope, "Krea Realtime 14B as Scope runs it: no warp"),
];

/// A field that a search chooses, as the value of a pin.
trait PinText {
    fn pin_text(self) -> String;
}

impl PinText for u32 {
    fn pin_text(self) -> String {
        self.to_string()
    }
}

impl PinText for Strategy {
    fn pin_text(self) -> String {
        self.name().to_string()
    }
}

impl PinText for MediaPlacement {
    fn pin_text(self) -> String {
        self.name().to_string()
    }
}

impl PinText for Topology {
    fn pin_text(self) -> String {
        self.name().to_string()
    }
}

impl MappingArgs {
    /// Returns the pins of a video model: those in `list`, and those that other options imply.
    ///
    /// # Errors
    /// T0030 if two of them set one knob to different values.
    pub fn merge_video_pins(&self, list: &str) -> Result<String, CliError> {
        let parts: Vec<Option<String>> =
            std::iter::once(list.to_string()).chain(self.list_pins()).map(Some).collect();
        merge_pins(&parts).map_err(CliError::usage)
    }

    /// Applies the options with these uses to a mapping; a mesh is applied by whoever parses it.
    pub fn apply_options(&self, mapping: &mut Mapping, uses: &[MappingUse]) {
        self.set_fields(mapping, uses);
    }

    /// Divides the ranks of a mapping among the hosts of the command line, if it names any.
    ///
    /// # Errors
    /// T0065 or T0066.
    pub fn apply_hosts(&self, mapping: &mut Mapping) -> Result<(), CliError> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let world = mapping.world_mesh().map_err(|d| CliError::usage(*d))?;
        let divided = parse_host_count_or_list(hosts).and_then(|hosts| assign_ranks(&hosts, &world));
        mapping.hosts = divided.map_err(CliError::usage)?.iter().map(|host| host.count).collect();
        mapping.host_domains.clear();
        Ok(())
    }

    /// Returns the settings that replace the model's own.
    ///
    /// # Errors
    /// T0030 for steps that are no numbers.
    pub fn parse_overrides(&self) -> Result<Overrides, Diagnostic> {
        Ok(Overrides {
            recompute: self.cache,
            steps: self.steps.as_deref().map(parse_steps).transpose()?,
            preset: self.preset,
            stream_file: self.stream.clone(),
            given_noise: self.noise_source,
            takes_video: self.video_input,
            guidance: self.guidance,
            negative_prompt: self.negative_prompt.clone(),
            text_embeddings: self.text_embeddings.clone(),
            decoder_file: self.decoder.clone(),
            decoder_quality: self.quality,
        })
    }

    /// Opens the model and plans it under these options, which override the mapping file, if there
    /// is one. Where neither names a place for the phases of pixels, their estimated period decides.
    pub fn open_and_plan(
        &self,
        model_dir: Option<&Path>,
        mapping_path: Option<&Path>,
        on_gpus: bool,
    ) -> Result<Planned, CliError> {
        let model_dir = model_dir.ok_or_else(no_model_error)?;
        // Collects all errors of the command line before reporting any.
        let mesh = self.mesh.as_deref().map(parse_mesh).transpose();
        let (mesh, overrides) = match (mesh, self.parse_overrides()) {
            (Ok(mesh), Ok(overrides)) => (mesh, overrides),
            (mesh, overrides) => {
                let errors = [mesh.err(), overrides.err()].into_iter().flatten();
                return Err(CliError::from_usage_errors(errors));
            }
        };
        let mut mapping = match mapping_path {
            Some(file) => read_mapping(file)?,
            None => Mapping::default(),
        };
        mapping.mesh = mesh.unwrap_or(mapping.mesh);
        self.set_fields(&mut mapping, &[MappingUse::Searched, MappingUse::Fixed]);
        self.apply_hosts(&mut mapping)?;
        let model = Model::open(model_dir, &overrides)?;
        let decision = match mapping.check_consistency().is_empty() {
            true => choose_media(&model, &mapping, &usual_machine(&mapping, on_gpus)?)?,
            false => None,
        };
        if let Some(decision) = decision.as_ref().filter(|_| self.media.is_none() && mapping_path.is_none()) {
            mapping.media = decision.best;
        }
        let plan = plan_model(&model.video, &model.name, &model_dir.display().to_string(), &mapping)?;
        let pixels = decision.map(|d| d.explain(plan.mapping.media));
        Ok(Planned { model, plan, pixels })
    }
}

/// A model with its plan.
pub struct Planned {
    /// The model, with the settings of the command line.
    pub model: Model,
    pub plan: Plan,
    /// Where the phases of pixels run, with the estimates of every place; `None` if they are no programs of
    /// the plan.
    pub pixels: Option<String>,
}

/// Rejects a mesh without axes, which would be a mesh of one rank, for example because a variable of
/// a script is empty.
pub fn require_axes(text: &str) -> Result<String, &'static str> {
    if text.split([',', ' ']).all(str::is_empty) {
        return Err("a mesh has at least one axis, such as tp=2");
    }
    Ok(text.to_string())
}

/// Parses a mesh, such as `tp=2,pp=1`.
pub fn parse_mesh(text: &str) -> Result<Mesh, Diagnostic> {
    text.parse().map_err(|d: Box<Diagnostic>| *d)
}

/// Parses timesteps, such as `1000,750,500,250`.
pub fn parse_steps(text: &str) -> Result<Vec<f64>, Diagnostic> {
    text.split(',')
        .map(|word| word.trim().parse::<f64>().map_err(|_| word))
        .collect::<Result<_, _>>()
        .map_err(|word| {
            invalid_argument(
                "--steps",
                text,
                &format!("`{word}` is not a number"),
                "--steps 1000,750,500,250",
            )
        })
}

/// Reads the file of `--mapping`.
///
/// # Errors
/// T0030 for a file that cannot be read, or what is wrong with its text.
pub fn read_mapping(file: &Path) -> Result<Mapping, CliError> {
    let name = file.display().to_string();
    match read_text_file(file) {
        Ok(text) => with_expert_choices(file, with_router_bias(file, Mapping::parse(&name, &text)?)?),
        Err(e) => Err(CliError::usage(
            Diagnostic::error(&T0030, format!("--mapping {name} cannot be read: {e}"))
                .with_hint("name a TOML file, such as the mapping.toml of a plan folder"),
        )),
    }
}

/// Reads the file of `--mapping`, or returns the default mapping over the mesh of `--mesh`.
pub fn read_mapping_or_mesh(file: Option<&Path>, mesh: &str) -> Result<Mapping, CliError> {
    match file {
        Some(file) => read_mapping(file),
        None => Ok(Mapping { mesh: parse_mesh(mesh).map_err(CliError::usage)?, ..Mapping::default() }),
    }
}

/// Reads the biases of routers from the file that a mapping names, relative to the mapping.
fn with_router_bias(file: &Path, mut mapping: Mapping) -> Result<Mapping, CliError> {
    let router = &mut mapping.experts.router;
    let Some(name) = router.bias_file.take() else { return Ok(mapping) };
    let path = file.parent().unwrap_or_else(|| Path::new("")).join(name);
    let refuse = |why: String| {
        CliError::usage(
            Diagnostic::error(&T0030, format!("experts.bias_file {} cannot be read: {why}", path.display()))
                .with_hint("name a JSON file with one number per expert, such as [0.5, 0, -0.25]"),
        )
    };
    let text = read_text_file(&path).map_err(|e| refuse(e.to_string()))?;
    router.bias = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
    Ok(mapping)
}

/// Reads the choices of experts from the file that a mapping names, relative to the mapping.
fn with_expert_choices(file: &Path, mut mapping: Mapping) -> Result<Mapping, CliError> {
    let copies = &mut mapping.experts.copies;
    let Some(name) = copies.choices_file.take() else { return Ok(mapping) };
    let path = file.parent().unwrap_or_else(|| Path::new("")).join(name);
    copies.choices =
        read_expert_choices(&path).map_err(|why| {
            let message = format!("experts.choices_file {} cannot be read: {why}", path.display());
            CliError::usage(Diagnostic::error(&T0030, message).with_hint(format!(
                "name the {EXPERTS_FILE} of a run with experts.statistics = true and --out"
            )))
        })?;
    Ok(mapping)
}

/// Returns the error for a command line without a model.
fn no_model_error() -> CliError {
    CliError::usage(
        Diagnostic::error(&T0031, "no model given").with_hint("give a model folder, for example models/demo"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_names_that_mappings_spell() {
        assert!(TOPOLOGIES.iter().all(|(name, value, _)| *name == value.name()));
        assert!(MEDIA.iter().all(|(name, value, _)| *name == value.name()));
        assert!(STRATEGIES.iter().all(|(name, value, _)| *name == value.name()));
        assert!(NUMERICS.iter().all(|(name, value, _)| *name == value.name()));
        assert!(DTYPES.iter().all(|(name, value, _)| *name == value.name()));
        assert!(PRESETS.iter().all(|(name, value, _)| *name == value.name()));
        assert!(TRANSPORTS.iter().all(|(name, value, _)| *name == value.name()));
        assert_eq!(
            (TOPOLOGIES.len(), DTYPES.len(), TRANSPORTS.len(), PRESETS.len()),
            (Topology::ALL.len(), DtypePolicy::ALL.len(), Transport::ALL.len(), Preset::ALL.len())
        );
    }

    #[test]
    fn a_mesh_and_steps_are_parsed() {
        assert_eq!(parse_mesh("tp=2, pp=1").unwrap().world_size(), 2);
        assert_eq!(parse_mesh("mp=2").unwrap_err().code.id, "T0101");
        assert_eq!(parse_steps("1000, 750.5").unwrap(), [1000.0, 750.5]);
        for bad in ["1000,,500", ""] {
            let d = parse_steps(bad).unwrap_err();
            assert!(d.code == &T0030 && d.hint.is_some(), "{d:#?}");
        }
    }
}
