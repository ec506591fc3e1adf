//! Options shared by several subcommands: the device that runs a plan, and the model and mapping to
//! plan.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use tessera::sim::T0040;
use tessera::stream::RunDevice;
use tessera::{DtypePolicy, Mapping, Model, Numerics, Overrides, Plan, Strategy, Topology, Transport, plan};
use tessera_base::{Code, Diagnostic};

use crate::output::CliError;
use crate::parse;

/// The device that runs a plan.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// Device that runs the plan
    #[arg(long, value_enum, default_value_t)]
    pub device: StreamDevice,

    /// Cluster to simulate: a catalog name, or a TOML file in the format that `tessera measure`
    /// writes [default: hgx-h200 for up to 8 ranks, else gb200-nvl72]
    #[arg(long, value_name = "NAME|FILE", help_heading = SIM_HEADING)]
    pub cluster: Option<String>,

    /// Executor profile: a runtime's efficiency curves, which set the time of each simulated op and
    /// collective; a name or a TOML file [default: the cluster's own]
    #[arg(long, value_name = "NAME|FILE", help_heading = SIM_HEADING)]
    pub profile: Option<String>,
}

const SIM_HEADING: &str = "Simulated cluster (with --device sim)";

impl TargetArgs {
    /// Rejects options of a simulated cluster without `--device sim`.
    ///
    /// # Errors
    /// T0040.
    pub fn check_sim_options(&self) -> Result<(), CliError> {
        let given = [("--cluster", self.cluster.is_some()), ("--profile", self.profile.is_some())];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if self.device != StreamDevice::Sim => Err(CliError::usage(vec![
                Diagnostic::error(&T0040, format!("{option} requires --device sim"))
                    .with_label(
                        "--device",
                        format!(
                            "{}: runs on this machine, so there is no cluster to simulate",
                            self.device.name()
                        ),
                    )
                    .with_hint(format!("add --device sim, or leave out {option}")),
            ])),
            _ => Ok(()),
        }
    }
}

/// The values of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum StreamDevice {
    /// CPU cores of this machine
    #[default]
    Cpu,
    /// Simulated cluster: keeps simulated time and computes no values, so it needs no weights
    Sim,
    /// NVIDIA GPUs of this machine, one per rank; `tessera doctor` lists them
    Cuda,
}

impl StreamDevice {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StreamDevice::Cpu => "cpu",
            StreamDevice::Sim => "sim",
            StreamDevice::Cuda => "cuda",
        }
    }

    /// Returns the device of the rank processes.
    pub fn to_rank_device(self) -> RunDevice {
        match self {
            StreamDevice::Cuda => RunDevice::Cuda,
            StreamDevice::Cpu | StreamDevice::Sim => RunDevice::Cpu,
        }
    }
}

/// No model was given.
pub static T0031: Code = Code {
    id: "T0031",
    title: "no model given",
    page: "A plan needs a model: a model of the zoo (--model), a recipe of the 72-GPU guide (--recipe), a config.json, or the folder of a \
video model with config.json, stream.toml and, for streaming, weights as safetensors. The project includes the demo model \
models/demo. With --plan, the model is the one that the plan names.",
};

/// The mapping that the command line requests.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Mapping")]
pub struct MappingArgs {
    /// Mesh axes and their sizes: tp shards heads or tokens, pp splits blocks into stages; for
    /// example tp=2,pp=2 [default: tp=1]
    ///
    /// The sizes multiply to the number of ranks in the mesh. In a mapping search (`tessera plan
    /// --cluster`) the axes given here stay fixed and the search chooses the others.
    #[arg(long, value_name = "MESH")]
    pub mesh: Option<String>,

    /// Placement of the leader, the process that runs the text encoder and the decoder: in the mesh
    /// or outside it [default: mesh]
    ///
    /// The topologies pp0 and pp1 add one rank in front of the mesh of --mesh. That rank decodes a
    /// chunk while the mesh generates the next one. Use pp0 if the mesh has one rank, pp1 if it has
    /// more.
    #[arg(long)]
    pub topology: Option<TopologyArg>,

    /// How tp shards a transformer block: tokens (ulysses) or weights (megatron) [default: ulysses]
    #[arg(long)]
    pub strategy: Option<StrategyArg>,

    /// Order of sums across ranks, which decides whether results depend on the mesh [default:
    /// standard]
    #[arg(long)]
    pub numerics: Option<NumericsArg>,

    /// Compute dtype of matmuls and of the activations that they produce [default: f32]
    #[arg(long)]
    pub dtype: Option<DtypeArg>,

    /// Transport of collectives between GPUs [default: best]
    #[arg(long)]
    pub transport: Option<TransportArg>,

    /// Split the rows of a block into N row chunks, so that the all-reduce of one overlaps the
    /// compute of another; megatron only [default: 1]
    #[arg(long, value_name = "N")]
    pub overlap_chunks: Option<u32>,

    /// How the context of past frames is kept between chunks [default: the model's]
    #[arg(long)]
    pub cache: Option<CacheArg>,

    /// Denoising timesteps in descending order, for example 1000,750,500,250 [default: the model's]
    #[arg(long, value_name = "LIST")]
    pub steps: Option<String>,

    /// Requests that may queue at the leader, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = QUEUE_HEADING)]
    pub d_in: Option<u32>,

    /// Finished chunks that may queue for decoding and writing, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = QUEUE_HEADING)]
    pub d_out: Option<u32>,

    /// Chunks that may be in flight on the mesh, 1 to 64 [default: 2]
    ///
    /// The leader starts each chunk by one message to the ranks, a call. This option limits the
    /// calls that are sent and not yet done. With 1, the leader prepares a call only when the mesh
    /// is idle.
    #[arg(long, value_name = "N", help_heading = QUEUE_HEADING)]
    pub max_outstanding: Option<u32>,
}

const QUEUE_HEADING: &str = "Queue depths";

impl MappingArgs {
    /// Returns the first mapping option that was given, for a message.
    pub fn first_given(&self) -> Option<&'static str> {
        [("--mesh", self.mesh.is_some())]
            .into_iter()
            .chain(self.stream_options())
            .find_map(|(name, given)| given.then_some(name))
    }

    /// Returns the options that apply to streams only, and whether each was given. Language models
    /// do not use them.
    pub fn stream_options(&self) -> [(&'static str, bool); 11] {
        [
            ("--topology", self.topology.is_some()),
            ("--strategy", self.strategy.is_some()),
            ("--numerics", self.numerics.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--transport", self.transport.is_some()),
            ("--overlap-chunks", self.overlap_chunks.is_some()),
            ("--cache", self.cache.is_some()),
            ("--steps", self.steps.is_some()),
            ("--d-in", self.d_in.is_some()),
            ("--d-out", self.d_out.is_some()),
            ("--max-outstanding", self.max_outstanding.is_some()),
        ]
    }

    /// Returns the pins of a video model: those in `list`, and those that other options imply.
    ///
    /// # Errors
    /// T0030 if two of them set one knob to different values.
    pub fn merge_video_pins(&self, list: &str) -> Result<String, CliError> {
        let strategy = self.strategy.map(|s| format!("strategy={}", Strategy::from(s).name()));
        let topology = self.topology.map(|t| format!("topology={}", Topology::from(t).name()));
        let overlap_chunks = self.overlap_chunks.map(|n| format!("overlap_chunks={n}"));
        let max_outstanding = self.max_outstanding.map(|n| format!("max_outstanding={n}"));
        crate::estimate::merge_pins(&[
            Some(list.to_string()),
            strategy,
            overlap_chunks,
            topology,
            max_outstanding,
        ])
    }

    /// Applies the options that no search chooses to a mapping.
    pub fn apply_fixed_options(&self, mapping: &mut Mapping) {
        mapping.numerics = self.numerics.map_or(mapping.numerics, Into::into);
        mapping.dtype = self.dtype.map_or(mapping.dtype, Into::into);
        mapping.transport = self.transport.map_or(mapping.transport, Into::into);
        mapping.d_in = self.d_in.unwrap_or(mapping.d_in);
        mapping.d_out = self.d_out.unwrap_or(mapping.d_out);
    }

    /// Opens the model and plans it under these options, which override the mapping file, if there
    /// is one.
    pub fn open_and_plan(
        &self,
        model_dir: Option<&Path>,
        mapping_path: Option<&Path>,
    ) -> Result<(Model, Plan), CliError> {
        let model_dir = model_dir.ok_or_else(no_model_error)?;
        // Collects all errors of the command line before reporting any.
        let (mesh, steps) =
            (self.mesh.as_deref().map(parse::parse_mesh), self.steps.as_deref().map(parse::parse_steps));
        let (mesh, steps) = match (mesh.transpose(), steps.transpose()) {
            (Ok(mesh), Ok(steps)) => (mesh, steps),
            (mesh, steps) => {
                return Err(CliError::usage(
                    [mesh.err(), steps.err()].into_iter().flatten().collect::<Vec<_>>(),
                ));
            }
        };
        let mut map = match mapping_path {
            Some(file) => read_mapping(file)?,
            None => Mapping::default(),
        };
        map.mesh = mesh.unwrap_or(map.mesh);
        map.topology = self.topology.map_or(map.topology, Into::into);
        map.strategy = self.strategy.map_or(map.strategy, Into::into);
        map.numerics = self.numerics.map_or(map.numerics, Into::into);
        map.dtype = self.dtype.map_or(map.dtype, Into::into);
        map.transport = self.transport.map_or(map.transport, Into::into);
        map.overlap_chunks = self.overlap_chunks.unwrap_or(map.overlap_chunks);
        map.d_in = self.d_in.unwrap_or(map.d_in);
        map.d_out = self.d_out.unwrap_or(map.d_out);
        map.max_outstanding = self.max_outstanding.unwrap_or(map.max_outstanding);
        let recompute = self.cache.map(|c| c == CacheArg::Recompute);
        let model = Model::open(model_dir, &Overrides { recompute, steps })?;
        let plan = plan::plan_model(&model.video, &model.name, &model_dir.display().to_string(), &map)?;
        Ok((model, plan))
    }
}

fn read_mapping(file: &Path) -> Result<Mapping, CliError> {
    let name = file.display().to_string();
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Mapping::parse(&name, &text)?),
        Err(e) => Err(CliError::usage(vec![
            Diagnostic::error(&parse::T0030, format!("--mapping {name} cannot be read: {e}"))
                .with_hint("name a TOML file, such as the mapping.toml of a plan folder"),
        ])),
    }
}

/// Returns the error for a command line without a model.
fn no_model_error() -> CliError {
    CliError::usage(vec![
        Diagnostic::error(&T0031, "no model given").with_hint("give a model folder, for example models/demo"),
    ])
}

/// Reads a plan folder, and opens its model from `dir` or from the path that the plan records.
pub fn read_sealed_plan(folder: &Path, dir: Option<&PathBuf>) -> Result<(Model, Plan), CliError> {
    let plan = Plan::read(folder)?;
    let model_dir = dir.cloned().unwrap_or_else(|| PathBuf::from(&plan.model_dir));
    let model = Model::open_for_plan(&model_dir, &plan).map_err(|mut d| {
        if dir.is_none() {
            d.notes.push(format!(
                "{} records this model folder; the path was valid where the plan was made",
                folder.display()
            ));
            d.hint = Some("give the model's folder too: tessera stream MODEL --plan PLAN".to_string());
        }
        vec![d]
    })?;
    Ok((model, plan))
}

/// Reads a plan folder for a simulated run, which takes everything about the model from the plan.
pub fn read_plan_without_model(folder: &Path) -> Result<(Model, Plan), CliError> {
    let plan = Plan::read(folder)?;
    let (name, dir) = (plan.model.clone(), PathBuf::from(&plan.model_dir));
    Ok((Model { name, dir, video: plan.video.clone() }, plan))
}

/// The values of `--topology`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopologyArg {
    /// Rank 0 of the mesh is the leader and computes too
    Mesh,
    /// A leader outside the mesh, and a mesh of exactly one rank
    Pp0,
    /// A leader outside the mesh, and a mesh of two or more ranks
    Pp1,
}

impl From<TopologyArg> for Topology {
    fn from(name: TopologyArg) -> Topology {
        match name {
            TopologyArg::Mesh => Topology::Mesh,
            TopologyArg::Pp0 => Topology::Pp0,
            TopologyArg::Pp1 => Topology::Pp1,
        }
    }
}

/// The values of `--strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StrategyArg {
    /// Shard tokens; all-to-alls switch to sharded heads around attention. Exact: the result equals
    /// that of one rank
    Ulysses,
    /// Shard weights by column, then by row; all-reduces add the partial sums
    Megatron,
}

impl From<StrategyArg> for Strategy {
    fn from(name: StrategyArg) -> Strategy {
        match name {
            StrategyArg::Ulysses => Strategy::Ulysses,
            StrategyArg::Megatron => Strategy::Megatron,
        }
    }
}

/// The values of `--numerics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumericsArg {
    /// Add the partial sums of ranks in rank order
    Standard,
    /// Add in one fixed tree, so that no result depends on the mesh
    MeshInvariant,
}

impl From<NumericsArg> for Numerics {
    fn from(name: NumericsArg) -> Numerics {
        match name {
            NumericsArg::Standard => Numerics::Standard,
            NumericsArg::MeshInvariant => Numerics::MeshInvariant,
        }
    }
}

/// The values of `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// f32 throughout
    F32,
    /// bf16, except for conditioning, latents and norm vectors
    Bf16,
    /// As bf16, with the matmuls of transformer blocks in e4m3
    Fp8,
}

impl From<DtypeArg> for DtypePolicy {
    fn from(name: DtypeArg) -> DtypePolicy {
        match name {
            DtypeArg::F32 => DtypePolicy::F32,
            DtypeArg::Bf16 => DtypePolicy::Bf16,
            DtypeArg::Fp8 => DtypePolicy::Fp8,
        }
    }
}

/// The values of `--transport`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// The fastest one available: peer-to-peer over device memory, or NCCL where ranks cannot
    /// access each other's memory
    Best,
    /// Peer-to-peer only, with a separate kernel for each collective
    P2p,
    /// NCCL for every collective
    Nccl,
}

impl From<TransportArg> for Transport {
    fn from(name: TransportArg) -> Transport {
        match name {
            TransportArg::Best => Transport::Best,
            TransportArg::P2p => Transport::P2p,
            TransportArg::Nccl => Transport::Nccl,
        }
    }
}

/// The values of `--cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheArg {
    /// Keep the KV cache of past frames in device memory
    Resident,
    /// Recompute keys and values from past frames before each chunk
    Recompute,
}
