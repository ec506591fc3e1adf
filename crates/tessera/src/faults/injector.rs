//! The fault injector of a rank process. The application crate calls it wherever a drill may
//! interfere; without a drill there is no injector.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::random::philox4x32;
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::{Program, Type};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::drill::{ArmedFault, DrillFault, MessageFaultInjector, announcement_text};
use tessera_runtime::driver::{Interceptor, StreamRequest};
use tessera_runtime::wire::Reload;
use tessera_runtime::{Digest, Limits, Parity, Tripwires};

use super::program_changes::{CHANGES, change_epsilon};
use crate::clock::monotonic_ns;

/// Size of call metadata that exceeds the maximum of a frame, in bytes.
const OVERSIZED_META_BYTES: usize = 5 << 20;

/// A queue depth that is unbounded in practice.
const UNBOUNDED_DEPTH: u32 = 100_000;

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

    /// Returns the parity values that this rank announces in its hello message.
    pub(crate) fn announced_parity(&self, parity: Parity) -> Parity {
        let hides_fault =
            self.armed_fault().fault == DrillFault::ArmedAlone && !self.has_fault(DrillFault::ArmedAlone);
        let drill = if hides_fault {
            "none".to_string()
        } else {
            announcement_text(self.armed_fault(), &self.config.limits)
        };
        let value = |key: &str| {
            parity.keys().iter().find(|k| k.key == key).map_or(String::new(), |k| k.value.clone())
        };
        let changes = [
            (DrillFault::ArmedAlone, None),
            // The changed program is what the backend reports.
            (DrillFault::CapturedOnOne, None),
            (DrillFault::ProgramSet, Some(("program set", format!("{}, less one", value("program set"))))),
            (DrillFault::EffectiveBackend, Some(("backend", "cpu, reference kernels".to_string()))),
            (DrillFault::GroupOrder, Some(("groups", format!("{}, made in reverse", value("groups"))))),
        ];
        let parity = parity.with_known_key("drill", drill);
        match changes.into_iter().find(|(fault, _)| self.has_fault(*fault)) {
            None => parity,
            Some((_, change)) => {
                self.mark_fired();
                change.into_iter().fold(parity, |p, (key, value)| p.with_known_key(key, value))
            }
        }
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

    /// Modifies this rank's copy of a program if that is the fault.
    pub(crate) fn modify_program(&self, program: &mut Program) {
        for (fault, change) in CHANGES {
            if self.has_fault(*fault) {
                change(program);
            }
        }
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
