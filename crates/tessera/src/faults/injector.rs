//! The fault injector of a rank process. The application crate calls it wherever a drill may
//! interfere; without a drill there is no injector.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::random::philox4x32;
use tessera_device::{Backend, MeshRank, WeightSource};
use tessera_ir::{ExpertTensorNames, Program, Type};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::drill::{ArmedFault, DrillFault, MessageFaultInjector, announcement_text};
use tessera_runtime::driver::{Interceptor, StreamRequest};
use tessera_runtime::wire::Reload;
use tessera_runtime::{Digest, Limits, Parity, Tripwires};

use super::program_changes::{CHANGES, LAST_DENOISE, change_epsilon};
use crate::clock::monotonic_ns;
use crate::communicators::JoinOrder;

/// Size of call metadata that exceeds the maximum of a frame, in bytes.
const OVERSIZED_META_BYTES: usize = 5 << 20;

/// A queue depth that is unbounded in practice.
const UNBOUNDED_DEPTH: u32 = 100_000;

/// The faults that are in place before the hello and that a comparison of all ranks must find.
const PARITY_FAULTS: [DrillFault; 7] = [
    DrillFault::ArmedAlone,
    DrillFault::CapturedOnOne,
    DrillFault::EffectiveBackend,
    DrillFault::LoraOnOne,
    DrillFault::OtherTokenizer,
    DrillFault::ProgramSet,
    DrillFault::UnarmedCheck,
];

/// File in the run directory with the time at which the fault fired.
const FIRED_FILE: &str = "fault_fired";

/// File in the run directory with the name of the weight or cache in which a bit was flipped.
const PLACE_FILE: &str = "fault_place";

/// The drill configuration that every rank receives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrillConfig {
    /// The fault, its rank and its call.
    pub armed: ArmedFault,
    /// Short timeouts for the run. The queue depths and the number of outstanding calls stay the
    /// plan's.
    pub limits: Limits,
    /// Disabled checks; empty except in a self-test.
    pub disabled_tripwires: Tripwires,
    /// Selects the place of a flipped bit.
    pub draw: u32,
}

impl DrillConfig {
    /// Arms a fault such as `flipped-cache@1:7#42` (fault, rank, call, draw of the place) under the
    /// limits of an ordinary run. The draw may be left out.
    ///
    /// # Errors
    /// Returns what is wrong with the text.
    pub fn from_armed_text(text: &str) -> Result<DrillConfig, String> {
        let (fault, draw) = text.split_once('#').unwrap_or((text, "0"));
        let draw = draw.parse().map_err(|_| format!("`{draw}` is no draw from 0 to {}", u32::MAX))?;
        let (limits, disabled_tripwires) = (Limits::default(), Tripwires::default());
        Ok(DrillConfig { armed: fault.parse()?, limits, disabled_tripwires, draw })
    }
}

/// Injects a drill's fault into one rank's programs, weights, messages, engine and media pipeline.
#[derive(Debug, Clone)]
pub(crate) struct FaultInjector {
    config: DrillConfig,
    rank: u32,
    out: PathBuf,
}

impl FaultInjector {
    pub(crate) fn new(config: &DrillConfig, rank: Rank, out: &Path) -> FaultInjector {
        FaultInjector { config: config.clone(), rank: rank.0, out: out.to_path_buf() }
    }

    /// Returns whether the fault is armed in the process of this rank.
    pub(crate) fn is_armed_here(&self) -> bool {
        self.armed_fault().fault != DrillFault::ArmedAlone || self.has_fault(DrillFault::ArmedAlone)
    }

    pub(crate) fn run_limits(&self) -> &Limits {
        &self.config.limits
    }

    pub(crate) fn disabled_tripwires(&self) -> &Tripwires {
        &self.config.disabled_tripwires
    }

    /// Returns whether the fault is armed on this rank.
    pub(super) fn has_fault(&self, fault: DrillFault) -> bool {
        self.config.armed.is_armed_for(fault, self.rank)
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn run_dir(&self) -> &Path {
        &self.out
    }

    /// Returns random words that select the place of a flipped bit.
    pub(super) fn draw_place(&self) -> [u32; 3] {
        let [name, element, bit, _] = philox4x32([self.config.draw, self.rank, 0, 0], [0, 0]);
        [name, element, bit]
    }

    pub(super) fn armed_fault(&self) -> &ArmedFault {
        &self.config.armed
    }

    /// Records the time at which the fault fired, once per run.
    pub(super) fn mark_fired(&self) {
        let made = OpenOptions::new().write(true).create_new(true).open(self.out.join(FIRED_FILE));
        // If the file cannot be written, the run is timed from its start.
        let _ = made.and_then(|mut file| file.write_all(monotonic_ns().to_string().as_bytes()));
    }

    /// Records the name of the weight or cache in which the fault flipped a bit.
    pub(super) fn record_place(&self, name: &str) {
        // Without the file, the place counts as unknown.
        let _ = std::fs::write(self.out.join(PLACE_FILE), name);
    }

    /// Removes the run directory at the delivery of the armed call if that is the fault.
    pub(super) fn remove_output_folder(&self, chunk: u32) {
        let is_armed_call = self.armed_fault().call == u64::from(chunk) + 2;
        if is_armed_call && self.has_fault(DrillFault::OutputFolderRemoved) {
            // An empty folder takes its place, because the time of the fault is written there. If
            // either step fails, the drill finds that no fault fired.
            let _ = std::fs::remove_dir_all(&self.out).and_then(|()| std::fs::create_dir(&self.out));
            self.mark_fired();
        }
    }

    /// Returns the leader's limits, with an unbounded queue if that is the fault.
    pub(crate) fn leader_limits(&self, limits: Limits) -> Limits {
        if !self.has_fault(DrillFault::UnboundedOutput) {
            return limits;
        }
        self.mark_fired();
        Limits { d_out: UNBOUNDED_DEPTH, ..limits }
    }

    /// Returns the plan digest that this rank announces.
    pub(crate) fn announced_plan(&self, plan: Digest) -> Digest {
        if !self.has_fault(DrillFault::OtherPlanAtInit) {
            return plan;
        }
        self.mark_fired();
        Digest::hash_bytes(b"another plan")
    }

    /// Announces the armed fault in the parity table of this process. No other value is announced: a
    /// fault changes the thing from which the table reads a value.
    pub(crate) fn announced_parity(&self, parity: Parity) -> Parity {
        // The other ranks may take long to load, so the time counts from here.
        if PARITY_FAULTS.iter().any(|fault| self.has_fault(*fault)) {
            self.mark_fired();
        }
        parity.with_known_key("drill", announcement_text(self.armed_fault(), &self.config.limits))
    }

    /// Returns the order in which this rank joins its communicators.
    pub(crate) fn join_order(&self) -> JoinOrder {
        if !self.has_fault(DrillFault::GroupOrder) {
            return JoinOrder::OfPlan;
        }
        self.mark_fired();
        JoinOrder::Reversed
    }

    /// Makes the backend choose other implementations if that is the fault.
    pub(crate) fn modify_backend(&self, backend: &mut dyn Backend) {
        if self.has_fault(DrillFault::EffectiveBackend) {
            backend.choose_other_routes();
        }
    }

    /// Returns whether this rank's engine makes the check of its collectives.
    pub(crate) fn arms_collective_guard(&self) -> bool {
        !self.has_fault(DrillFault::UnarmedCheck)
    }

    /// Builds the interceptor that breaks this rank's messages, if the fault is in the messages.
    pub(crate) fn build_interceptor(&self) -> Option<Interceptor> {
        let mut injector = MessageFaultInjector::new(*self.armed_fault(), self.rank)?;
        let rank_injector = self.clone();
        Some(Box::new(move |way, peer, message| {
            // On the leader, only messages between it and its own mesh rank are intercepted.
            if rank_injector.rank == 0 && peer != 0 {
                return Ok(vec![message]);
            }
            let before = injector.has_fired();
            let passed = injector.inject_message(way, message);
            if injector.has_fired() && !before {
                rank_injector.mark_fired();
            }
            passed
        }))
    }

    /// Returns whether the fault is armed on this rank and changes its programs.
    pub(super) fn changes_programs(&self) -> bool {
        CHANGES.iter().any(|(fault, _)| self.has_fault(*fault))
    }

    /// Modifies this rank's copy of a program if that is the fault. Returns whether the rank loads the
    /// program.
    pub(crate) fn modify_program(&self, program: &mut Program) -> bool {
        for (fault, change) in CHANGES {
            if self.has_fault(*fault) {
                change(program);
            }
        }
        program.name != LAST_DENOISE || !self.has_fault(DrillFault::ProgramSet)
    }

    /// Modifies the program that probes one kernel if that is the fault.
    pub(crate) fn modify_probe(&self, program: &mut Program) {
        if self.has_fault(DrillFault::OtherKernel) {
            self.mark_fired();
            change_epsilon(program);
        }
    }

    /// Returns the weight source, which reads another rank's shards or a NaN if that is the fault.
    pub(crate) fn weight_source<'a>(
        &self,
        weights: &'a mut dyn WeightSource,
        mesh: Mesh,
    ) -> Box<dyn WeightSource + 'a> {
        let own = Rank(self.rank);
        let mut other = own;
        if self.has_fault(DrillFault::WrongShard) {
            self.mark_fired();
            let ranks: Vec<Rank> = mesh.iter().collect();
            let at = ranks.iter().position(|r| *r == own).unwrap_or(0);
            other = ranks[(at + 1) % ranks.len().max(1)];
        }
        if self.has_fault(DrillFault::OtherGate) || self.has_fault(DrillFault::SwappedExperts) {
            self.mark_fired();
            let swaps = self.has_fault(DrillFault::SwappedExperts);
            return Box::new(ChangedExpertsSource { weights, swaps });
        }
        if self.has_fault(DrillFault::NanWeight) {
            self.mark_fired();
            return Box::new(NanWeightSource(weights));
        }
        Box::new(WrongShardSource { weights, own, other })
    }

    /// Modifies the request of a chunk if that is the fault.
    pub(crate) fn modify_request(&self, chunk: u32, request: StreamRequest) -> StreamRequest {
        // The warm-up has call id 1, so chunk 0 has call id 2.
        let is_armed_call = self.armed_fault().call == u64::from(chunk) + 2;
        if !is_armed_call || !self.has_fault(DrillFault::UnserialisableMeta) {
            return request;
        }
        self.mark_fired();
        let source = "x".repeat(OVERSIZED_META_BYTES);
        StreamRequest { reload: Some(Reload { source, weights: Digest::default() }), ..request }
    }
}

/// Returns the time at which the fault of a run fired, in nanoseconds of the system's monotonic
/// clock.
pub fn fired_at_ns(out: &Path) -> Option<u64> {
    std::fs::read_to_string(out.join(FIRED_FILE)).ok()?.parse().ok()
}

/// Returns the weight or cache in which the fault of a run flipped a bit.
pub fn flipped_place(out: &Path) -> Option<String> {
    std::fs::read_to_string(out.join(PLACE_FILE)).ok()
}

/// A weight source that gives one rank the shards of another.
struct WrongShardSource<'a> {
    weights: &'a mut dyn WeightSource,
    own: Rank,
    other: Rank,
}

impl WeightSource for WrongShardSource<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &MeshRank,
    ) -> Result<Vec<f32>, tessera_base::Diagnostic> {
        let rank = if seat.rank == self.own { self.other } else { seat.rank };
        self.weights.read(name, ty, load, &MeshRank { rank, ..*seat })
    }
}

/// End of the name of a router of experts.
const ROUTER: &str = "gate.weight";

/// Returns the index of the first place of a shard that has another expert than its first place.
fn find_other_expert(name: &str, ty: &Type, seat: &MeshRank) -> Option<usize> {
    let names = ExpertTensorNames::parse(name)?;
    let (start, count) = *ty.layout.global_ranges(&ty.shape, &seat.mesh, seat.coord()).first()?;
    let first = names.name_tensor(start);
    (1..count).find(|place| names.name_tensor(start + place) != first).map(|place| place as usize)
}

/// A weight source with other routers, or in which the first two experts of every shard are exchanged.
struct ChangedExpertsSource<'a> {
    weights: &'a mut dyn WeightSource,
    swaps: bool,
}

impl WeightSource for ChangedExpertsSource<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &MeshRank,
    ) -> Result<Vec<f32>, tessera_base::Diagnostic> {
        let mut values = self.weights.read(name, ty, load, seat)?;
        let expert = ty.shape.iter().skip(1).product::<u64>() as usize;
        let other = self.swaps.then(|| find_other_expert(name, ty, seat)).flatten();
        if let Some(other) = other.filter(|other| values.len() >= (other + 1) * expert) {
            let (first, rest) = values.split_at_mut(other * expert);
            first[..expert].swap_with_slice(&mut rest[..expert]);
        } else if !self.swaps && name.ends_with(ROUTER) {
            values.iter_mut().take(1).for_each(|x| *x += 1.0);
        }
        Ok(values)
    }
}

/// A weight source in which the first element of every shard is NaN.
struct NanWeightSource<'a>(&'a mut dyn WeightSource);

impl WeightSource for NanWeightSource<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &MeshRank,
    ) -> Result<Vec<f32>, tessera_base::Diagnostic> {
        let mut values = self.0.read(name, ty, load, seat)?;
        values.iter_mut().take(1).for_each(|x| *x = f32::NAN);
        Ok(values)
    }

    fn check_finite(&mut self, name: &str) -> Result<(), tessera_base::Diagnostic> {
        self.0.check_finite(name)
    }
}
