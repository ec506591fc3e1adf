//! Options that say what to plan: a model's folder, a mapping, and what changes it.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use tessera::sim::T0040;
use tessera::stream::Device;
use tessera::{DtypePolicy, Mapping, Model, Numerics, Overrides, Plan, Strategy, Topology, Via, plan};
use tessera_base::{Code, Diagnostic};

use crate::say::Refusal;
use crate::values;

/// What runs a plan.
#[derive(Debug, Clone, clap::Args)]
pub struct On {
    /// What runs the plan: this machine's processors, its GPUs, or a modelled machine, where time passes and nothing is computed
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceName,

    /// Modelled machine: a cluster of the catalog or its file [default: hgx-h200 for up to 8 ranks, else gb200-nvl72]
    #[arg(long, value_name = "NAME|FILE", help_heading = MODELLED)]
    pub cluster: Option<String>,

    /// How well ops and collectives use the modelled machine: an executor's profile [default: the cluster's]
    #[arg(long, value_name = "NAME|FILE", help_heading = MODELLED)]
    pub profile: Option<String>,
}

const MODELLED: &str = "With --device sim";

impl On {
    /// Refuses a machine where none is modelled.
    pub fn check(&self) -> Result<(), Refusal> {
        let given = [("--cluster", self.cluster.is_some()), ("--profile", self.profile.is_some())];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if self.device != DeviceName::Sim => Err(Refusal::usage(vec![
                Diagnostic::error(&T0040, format!("{option} names a machine to model, and none is modelled"))
                    .at("--device", format!("{}: ops take the time that they take here", self.device.name()))
                    .hint(format!("add --device sim, or leave {option} out")),
            ])),
            _ => Ok(()),
        }
    }
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum DeviceName {
    /// Processors of this machine
    #[default]
    Cpu,
    /// A modelled machine; no weights are needed
    Sim,
    /// NVIDIA GPUs of this machine, one a rank; `tessera doctor` says what is here
    Cuda,
}

impl DeviceName {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DeviceName::Cpu => "cpu",
            DeviceName::Sim => "sim",
            DeviceName::Cuda => "cuda",
        }
    }

    /// What ranks that are processes compute on.
    pub fn of_ranks(self) -> Device {
        match self {
            DeviceName::Cuda => Device::Cuda,
            DeviceName::Cpu | DeviceName::Sim => Device::Cpu,
        }
    }
}

/// Nothing to plan.
pub static T0031: Code = Code {
    id: "T0031",
    title: "no model named",
    page: "A plan is of a model: one of the zoo by --model, one of the guide's recipes by --recipe, a config.json, or the folder of a \
video model with config.json, stream.toml and, to stream it, weights as safetensors. The one that comes with the project is \
models/demo. Where a plan is given with --plan, the model is the one that the plan names.",
};

/// What to plan and how.
#[derive(Debug, Clone, clap::Args)]
pub struct Planning {
    /// Axes and their sizes: tp (heads or tokens), pp (blocks), for example tp=2,pp=1 [default: tp=1]
    #[arg(long, value_name = "MESH")]
    pub mesh: Option<String>,

    /// Where the leader stands, that encodes and decodes: in the mesh, or outside it [default: mesh]
    #[arg(long)]
    pub topology: Option<TopologyName>,

    /// How tp cuts a block: tokens (ulysses, exact) or weights (megatron) [default: ulysses]
    #[arg(long)]
    pub strategy: Option<StrategyName>,

    /// Whether sums may depend on the mesh [default: standard]
    #[arg(long)]
    pub numerics: Option<NumericsName>,

    /// What products and what works on their results compute in [default: f32]
    #[arg(long)]
    pub dtype: Option<DtypeName>,

    /// By what GPUs move collectives [default: best]
    #[arg(long)]
    pub via: Option<ViaName>,

    /// Pieces that rows are cut into under megatron: sums of one travel while another computes [default: 1]
    #[arg(long, value_name = "N")]
    pub pieces: Option<u32>,

    /// How past frames are kept: in caches, or recomputed before each chunk [default: what the model says]
    #[arg(long)]
    pub cache: Option<CacheName>,

    /// Denoising timesteps, falling, for example 1000,750,500,250 [default: what the model says]
    #[arg(long, value_name = "LIST")]
    pub steps: Option<String>,

    /// Requests that may wait at the leader, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = QUEUES)]
    pub d_in: Option<u32>,

    /// Finished chunks that may wait for decode and write, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = QUEUES)]
    pub d_out: Option<u32>,

    /// Calls that may be sent and not done, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = QUEUES)]
    pub max_outstanding: Option<u32>,
}

const QUEUES: &str = "Queues of the plan";

impl Planning {
    /// The first option that was given, for a message.
    pub fn given(&self) -> Option<&'static str> {
        [("--mesh", self.mesh.is_some())]
            .into_iter()
            .chain(self.for_streams())
            .find_map(|(name, given)| given.then_some(name))
    }

    /// Options that shape a stream, and whether they were given: a language model has no use for them.
    pub fn for_streams(&self) -> [(&'static str, bool); 11] {
        [
            ("--topology", self.topology.is_some()),
            ("--strategy", self.strategy.is_some()),
            ("--numerics", self.numerics.is_some()),
            ("--dtype", self.dtype.is_some()),
            ("--via", self.via.is_some()),
            ("--pieces", self.pieces.is_some()),
            ("--cache", self.cache.is_some()),
            ("--steps", self.steps.is_some()),
            ("--d-in", self.d_in.is_some()),
            ("--d-out", self.d_out.is_some()),
            ("--max-outstanding", self.max_outstanding.is_some()),
        ]
    }

    /// Pins of a video model: a list, and the options that pin too.
    pub fn pins(&self, list: &str) -> Result<String, Refusal> {
        let strategy = self.strategy.map(|s| format!("strategy={}", Strategy::from(s).name()));
        let topology = self.topology.map(|t| format!("topology={}", Topology::from(t).name()));
        let pieces = self.pieces.map(|n| format!("pieces={n}"));
        let ahead = self.max_outstanding.map(|n| format!("max_outstanding={n}"));
        crate::estimate::joined(&[Some(list.to_string()), strategy, pieces, topology, ahead])
    }

    /// Puts into a mapping what a search does not choose.
    pub fn shape(&self, mapping: &mut Mapping) {
        mapping.numerics = self.numerics.map_or(mapping.numerics, Into::into);
        mapping.dtype = self.dtype.map_or(mapping.dtype, Into::into);
        mapping.via = self.via.map_or(mapping.via, Into::into);
        mapping.d_in = self.d_in.unwrap_or(mapping.d_in);
        mapping.d_out = self.d_out.unwrap_or(mapping.d_out);
    }

    /// Opens the model and plans it under a mapping file, if any, and these options.
    pub fn plan(&self, dir: Option<&Path>, mapping: Option<&Path>) -> Result<(Model, Plan), Refusal> {
        let dir = dir.ok_or_else(no_model)?;
        // Every slip of the command line at once.
        let (mesh, steps) =
            (self.mesh.as_deref().map(values::mesh), self.steps.as_deref().map(values::steps));
        let (mesh, steps) = match (mesh.transpose(), steps.transpose()) {
            (Ok(mesh), Ok(steps)) => (mesh, steps),
            (mesh, steps) => {
                return Err(Refusal::usage(
                    [mesh.err(), steps.err()].into_iter().flatten().collect::<Vec<_>>(),
                ));
            }
        };
        let mut map = match mapping {
            Some(file) => mapping_file(file)?,
            None => Mapping::default(),
        };
        map.mesh = mesh.unwrap_or(map.mesh);
        map.topology = self.topology.map_or(map.topology, Into::into);
        map.strategy = self.strategy.map_or(map.strategy, Into::into);
        map.numerics = self.numerics.map_or(map.numerics, Into::into);
        map.dtype = self.dtype.map_or(map.dtype, Into::into);
        map.via = self.via.map_or(map.via, Into::into);
        map.pieces = self.pieces.unwrap_or(map.pieces);
        map.d_in = self.d_in.unwrap_or(map.d_in);
        map.d_out = self.d_out.unwrap_or(map.d_out);
        map.max_outstanding = self.max_outstanding.unwrap_or(map.max_outstanding);
        let recompute = self.cache.map(|c| c == CacheName::Recompute);
        let model = Model::open(dir, &Overrides { recompute, steps })?;
        let plan = plan::make(&model.video, &model.name, &dir.display().to_string(), &map)?;
        Ok((model, plan))
    }
}

fn mapping_file(file: &Path) -> Result<Mapping, Refusal> {
    let name = file.display().to_string();
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Mapping::parse(&name, &text)?),
        Err(e) => Err(Refusal::usage(vec![
            Diagnostic::error(&values::T0030, format!("--mapping {name} cannot be read: {e}"))
                .hint("name a mapping in TOML, such as the mapping.toml of a plan's folder"),
        ])),
    }
}

/// The refusal of a command line without a model.
fn no_model() -> Refusal {
    Refusal::usage(vec![
        Diagnostic::error(&T0031, "no model named").hint("give the folder of one, for example models/demo"),
    ])
}

/// Reads a plan's folder; with it the model, from `dir` or from where the plan says.
pub fn sealed(folder: &Path, dir: Option<&PathBuf>) -> Result<(Model, Plan), Refusal> {
    let plan = Plan::read(folder)?;
    let place = dir.cloned().unwrap_or_else(|| PathBuf::from(&plan.model_dir));
    let model = Model::under(&place, &plan).map_err(|mut d| {
        if dir.is_none() {
            d.notes.push(format!(
                "{} names this folder; it was planned where that path led to it",
                folder.display()
            ));
            d.hint = Some("give the model's folder too: tessera stream MODEL --plan PLAN".to_string());
        }
        vec![d]
    })?;
    Ok((model, plan))
}

/// Reads a plan's folder for a run that computes nothing: the plan says what there is to know of the model.
pub fn sealed_alone(folder: &Path) -> Result<(Model, Plan), Refusal> {
    let plan = Plan::read(folder)?;
    let (name, dir) = (plan.model.clone(), PathBuf::from(&plan.model_dir));
    Ok((Model { name, dir, video: plan.video.clone() }, plan))
}

/// `--topology`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopologyName {
    /// Rank 0 leads and computes
    Mesh,
    /// A leader outside, and a mesh of one rank
    Pp0,
    /// A leader outside, and a mesh of two ranks or more
    Pp1,
}

impl From<TopologyName> for Topology {
    fn from(name: TopologyName) -> Topology {
        match name {
            TopologyName::Mesh => Topology::Mesh,
            TopologyName::Pp0 => Topology::Pp0,
            TopologyName::Pp1 => Topology::Pp1,
        }
    }
}

/// `--strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StrategyName {
    /// Tokens over ranks; all-to-all into heads around attention
    Ulysses,
    /// Weights over ranks by column, then by row; all-reduce
    Megatron,
}

impl From<StrategyName> for Strategy {
    fn from(name: StrategyName) -> Strategy {
        match name {
            StrategyName::Ulysses => Strategy::Ulysses,
            StrategyName::Megatron => Strategy::Megatron,
        }
    }
}

/// `--numerics`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumericsName {
    /// Ranks add their parts in rank order
    Standard,
    /// Sums in one fixed tree: no result depends on the mesh
    MeshInvariant,
}

impl From<NumericsName> for Numerics {
    fn from(name: NumericsName) -> Numerics {
        match name {
            NumericsName::Standard => Numerics::Standard,
            NumericsName::MeshInvariant => Numerics::MeshInvariant,
        }
    }
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeName {
    /// f32 throughout
    F32,
    /// bf16, but for conditioning, latents and norm vectors
    Bf16,
    /// As bf16, with the products of blocks in e4m3
    Fp8,
}

impl From<DtypeName> for DtypePolicy {
    fn from(name: DtypeName) -> DtypePolicy {
        match name {
            DtypeName::F32 => DtypePolicy::F32,
            DtypeName::Bf16 => DtypePolicy::Bf16,
            DtypeName::Fp8 => DtypePolicy::Fp8,
        }
    }
}

/// `--via`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ViaName {
    /// Over memory of peers by whatever is best, through NCCL where ranks cannot reach it
    Best,
    /// By a kernel of its own for each
    Kernels,
    /// Through NCCL
    Nccl,
}

impl From<ViaName> for Via {
    fn from(name: ViaName) -> Via {
        match name {
            ViaName::Best => Via::Best,
            ViaName::Kernels => Via::Kernels,
            ViaName::Nccl => Via::Nccl,
        }
    }
}

/// `--cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheName {
    /// Keys and values of past frames stay in memory
    Resident,
    /// They are computed anew from past frames before each chunk
    Recompute,
}
