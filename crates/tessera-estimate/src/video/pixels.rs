//! Where the phases of pixels that are programs of the plan run: their prices in every place, the choice, and the sentence
//! that gives its reason.

use tessera::{DtypePolicy, Mapping, MediaPlacement, Model};
use tessera_base::Diagnostics;
use tessera_cost::program_cost::ProgramEstimate;
use tessera_cost::{MachineModel, Profile};
use tessera_ir::Program;
use tessera_mesh::{Axis, Figure, Precision};
use tessera_plan::LogicalModel;
use tessera_plan::video::{
    DecodePlacement, LeaderPixels, MediaCosts, MediaTimes, PixelModel, RankedMapping, compare_places,
    estimate_device_times,
};

use tessera::plan::logical_model;

use super::{QueryModels, VideoPins, VideoQuery};
use crate::defaults::{CPU_HOST, DEFAULT_HOST};
use crate::format::format_ns;
use crate::machine::load_machine;

/// Profile of this project's backends, of which the CPU backend computes what the leader runs on its cores.
const OWN_PROFILE: &str = "tessera";
/// Assumed f32 peak of a host whose cluster file states none: 24 cores at 2 GHz with two fused multiply-adds
/// of 16 lanes.
const USUAL_HOST_FLOPS_PER_S: f64 = 3e12;
/// Family of devices that are cores of a host.
const CPU_FAMILY: &str = "cpu";

/// Returns the model with the phases of pixels in its calls, if they are programs of the plan.
pub(super) fn pixels_in_calls(model: &Model) -> Option<LogicalModel> {
    model.video.stream.decoder.is_causal().then(|| logical_model(&model.video, MediaPlacement::Mesh))
}

/// Returns the costs of the phases of pixels that are programs of the plan. `beside` is the model with
/// these phases beside its calls.
///
/// # Errors
/// Why the phases cannot be lowered or estimated.
pub(super) fn estimate_program_costs(
    query: &VideoQuery<'_>,
    beside: &LogicalModel,
    pixels: PixelModel<'_>,
) -> Result<MediaCosts, Diagnostics> {
    let device = estimate_device_times(pixels, &query.machine, query.sealed_dtype())?;
    let host = host_machine(&query.machine);
    let on_host = |name: &str| {
        let program: Option<&Program> = beside.phases.iter().find(|p| p.name == name);
        program.map_or(0.0, |p| ProgramEstimate::new(&host, p, 1.0).standalone_ns())
    };
    let times = MediaTimes {
        first_ns: on_host("decode.first"),
        rest_ns: on_host("decode.rest"),
        encode_ns: on_host("encode"),
    };
    let shares_cores = query.machine.cluster.device.family == CPU_FAMILY;
    Ok(MediaCosts {
        device,
        coupled: query.model.video.stream.recompute,
        shardable: (!query.whole_decode).then_some(1.0),
        leader: Some(LeaderPixels { times, shares_cores }),
    })
}

/// Returns a machine whose only device is all cores of a host.
fn host_machine(machine: &MachineModel) -> MachineModel {
    let mut cluster = machine.cluster.clone();
    let devices = f64::from(cluster.devices_per_host);
    let is_cpu = cluster.device.family == CPU_FAMILY;
    let own = cluster.flops_per_s(Precision::F32).filter(|_| is_cpu).map(|peak| peak * devices);
    let peak = cluster.host_flops_per_s.as_ref().map(|f| f.value).or(own).unwrap_or(USUAL_HOST_FLOPS_PER_S);
    cluster.device.name = "the cores of a host".to_string();
    cluster.device.family = CPU_FAMILY.to_string();
    cluster.device.memory_bytes_per_s.value = cluster.host_bytes_per_s.value * devices;
    cluster.device.flops_per_s = Precision::ALL.map(|p| {
        (p == Precision::F32).then(|| Figure { value: peak, source: "all cores of a host".to_string() })
    });
    let cpu_backend = Profile::builtin(OWN_PROFILE).filter(|_| !is_cpu);
    MachineModel::new(cluster, cpu_backend.unwrap_or_else(|| machine.profile.clone()))
}

/// The estimated places of a mapping's phases of pixels, and the shortest period among them.
#[derive(Debug, Clone)]
pub struct MediaDecision {
    /// The place with the shortest period; with equal periods, the ranks that share rows.
    pub best: MediaPlacement,
    /// Every place that the mapping admits, by period.
    places: Vec<RankedMapping>,
}

/// Returns the machine for decisions about a mapping whose cluster nobody named: one host of GPUs, or of
/// cores for ranks on CPUs. The choice depends on no property of this host, so that all hosts of a run plan
/// alike.
///
/// # Errors
/// Never for a mapping with a legal number of ranks.
pub fn usual_machine(mapping: &Mapping, on_gpus: bool) -> Result<MachineModel, Diagnostics> {
    let ranks = mapping.mesh.mesh_size() + mapping.topology.outside_ranks();
    // CPUs run bf16 and fp8 as well, but slower than f32: such a mapping is meant for GPUs.
    let cluster = if on_gpus || mapping.dtype != DtypePolicy::F32 { DEFAULT_HOST } else { CPU_HOST };
    load_machine(cluster, Some(OWN_PROFILE), Some(ranks))
}

/// Estimates where the phases of pixels of a model run best under a mapping. A GPU without a rank is an
/// alternative only if the mapping already puts them there. The memory of the machine is no limit, because the
/// start of a run compares what is planned with the devices that it finds. Returns `None` for a model whose
/// phases of pixels are not programs of the plan.
///
/// # Errors
/// Why the mapping does not fit the model.
pub fn choose_media(
    model: &Model,
    mapping: &Mapping,
    machine: &MachineModel,
) -> Result<Option<MediaDecision>, Diagnostics> {
    if !model.video.stream.decoder.is_causal() {
        return Ok(None);
    }
    // Only the user knows whether the leader's host has a GPU without a rank.
    let outside = u32::from(mapping.media == MediaPlacement::Outside);
    let ranks = mapping.mesh.mesh_size() + outside;
    let mut cluster = machine.cluster.clone();
    cluster.device.memory_bytes.value = f64::INFINITY;
    let machine = MachineModel::new(cluster, machine.profile.clone());
    let query = VideoQuery {
        model,
        machine,
        devices: Some(ranks),
        objective: None,
        dtype: Some(mapping.dtype),
        pins: VideoPins::default(),
        decode_ns: None,
        encode_ns: None,
        whole_decode: false,
        command: String::new(),
    };
    let models = QueryModels::new(&query);
    Ok(MediaDecision::new(compare_places(&models.build_question(&query)?, mapping)?))
}

impl MediaDecision {
    /// Returns the decision among places by period; `None` without a place.
    pub(super) fn new(places: Vec<RankedMapping>) -> Option<MediaDecision> {
        let best = places.first()?.mapping.media;
        Some(MediaDecision { best, places })
    }

    /// Says where the phases of pixels run under `chosen`, with the time of the phases and the period in
    /// every place.
    #[must_use]
    pub fn explain(&self, chosen: MediaPlacement) -> String {
        let place = |r: &RankedMapping| {
            let coupled = self.is_coupled();
            format!(
                "{} {}, a chunk every {}",
                describe_place(r),
                format_ns(r.pixels.total_ns(coupled)),
                format_ns(r.period.ns)
            )
        };
        let own = self.places.iter().find(|r| r.mapping.media == chosen);
        let others = self.places.iter().filter(|r| r.mapping.media != chosen);
        let mut parts: Vec<String> = own.map(place).into_iter().collect();
        parts.extend(others.map(place));
        let verdict = match (own, self.places.first()) {
            (Some(own), Some(best)) if own.period.ns > best.period.ns => format!(
                "; {} would save {} per chunk",
                best.mapping.media.name(),
                format_ns(own.period.ns - best.period.ns)
            ),
            (Some(_), _) => String::new(),
            (None, _) => "; no estimate of this place".to_string(),
        };
        format!("{}: {}{verdict}", chosen.name(), parts.join("; "))
    }

    fn is_coupled(&self) -> bool {
        self.places.iter().any(|r| r.pixels.encode_ns > 0.0)
    }
}

/// Names the place of the phases of pixels, without its time.
fn describe_place(r: &RankedMapping) -> String {
    let tp = r.mapping.mesh.axis_size(Axis::Tp);
    match r.mapping.media {
        MediaPlacement::Mesh if tp > 1 => format!("in the calls, rows shared by {tp} ranks:"),
        MediaPlacement::Mesh => "in the calls:".to_string(),
        MediaPlacement::Replicas => "in the calls, whole pictures:".to_string(),
        MediaPlacement::Leader => "on the leader's CPU:".to_string(),
        MediaPlacement::Outside => match r.decode {
            DecodePlacement::Overlapped => "on a GPU without a rank, beside the next call:".to_string(),
            _ => "on a GPU without a rank, the anchor before the next call:".to_string(),
        },
    }
}
