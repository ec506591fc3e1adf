//! What a rank's process does with an armed fault: one object that the door asks at each place where a drill may
//! interfere. Without a drill there is none.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tessera_device::{Seat, WeightSource};
use tessera_ir::{Program, Type};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::census::Census;
use tessera_runtime::drill::{Armed, Fault, Meddler, announced};
use tessera_runtime::driver::{StreamRequest, Tap};
use tessera_runtime::engine::{Engine, Studio};
use tessera_runtime::wire::Reload;
use tessera_runtime::{Digest, Limits, Parity, Tripwires};

use super::engine::DrillEngine;
use super::programs;
use super::studio::DrillStudio;
use crate::engine::MeshEngine;

/// Meta bytes of a call that no frame carries.
const TOO_MUCH_META: usize = 5 << 20;

/// A queue that would hold a night of chunks.
const NO_BOUND: u32 = 100_000;

/// File in a run's folder that holds the instant of the fault.
const STRUCK: &str = "struck";

/// What a drill tells every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arming {
    /// The fault, where and when.
    pub armed: Armed,
    /// Waits of the run.
    pub limits: Limits,
    /// Checks that are switched off; none but in a self-test.
    pub off: Tripwires,
}

/// A drill as one rank sees it.
#[derive(Debug, Clone)]
pub(crate) struct Hand {
    arming: Arming,
    rank: u32,
    out: PathBuf,
}

impl Hand {
    pub(crate) fn new(arming: &Arming, rank: Rank, out: &Path) -> Hand {
        Hand { arming: arming.clone(), rank: rank.0, out: out.to_path_buf() }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.arming.limits
    }

    pub(crate) fn off(&self) -> &Tripwires {
        &self.arming.off
    }

    /// Whether this rank has the fault.
    pub(super) fn has(&self, fault: Fault) -> bool {
        self.arming.armed.is(fault, self.rank)
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn armed(&self) -> &Armed {
        &self.arming.armed
    }

    /// Writes down when the fault struck, once per run.
    pub(super) fn strike(&self) {
        let made = OpenOptions::new().write(true).create_new(true).open(self.out.join(STRUCK));
        // Without the file the run is timed from its start.
        let _ = made.and_then(|mut file| file.write_all(now_ns().to_string().as_bytes()));
    }

    /// Limits of the leader's machine.
    pub(crate) fn leader_limits(&self, limits: Limits) -> Limits {
        if !self.has(Fault::UnboundedOutput) {
            return limits;
        }
        self.strike();
        Limits { d_out: NO_BOUND, ..limits }
    }

    /// The plan that this rank says to hold.
    pub(crate) fn plan(&self, plan: Digest) -> Digest {
        if !self.has(Fault::OtherPlanAtInit) {
            return plan;
        }
        self.strike();
        Digest::of(b"another plan")
    }

    /// What this rank shows at the hello.
    pub(crate) fn shows(&self, parity: Parity) -> Parity {
        let alone = self.armed().fault == Fault::ArmedAlone && !self.has(Fault::ArmedAlone);
        let drill = if alone { "none".to_string() } else { announced(self.armed(), &self.arming.limits) };
        let value = |key: &str| {
            parity.keys().iter().find(|k| k.key == key).map_or(String::new(), |k| k.value.clone())
        };
        let other = [
            (Fault::ArmedAlone, None),
            (Fault::ProgramSet, Some(("program set", format!("{}, less one", value("program set"))))),
            (Fault::CapturedOnOne, Some(("captured regions", "denoise.fill3".to_string()))),
            (Fault::EffectiveBackend, Some(("backend", "cpu, reference kernels".to_string()))),
            (Fault::GroupOrder, Some(("groups", format!("{}, made in reverse", value("groups"))))),
        ];
        let parity = parity.set("drill", drill);
        match other.into_iter().find(|(fault, _)| self.has(*fault)) {
            None => parity,
            Some((_, change)) => {
                self.strike();
                change.into_iter().fold(parity, |p, (key, value)| p.set(key, value))
            }
        }
    }

    /// Breaks this rank's messages, if that is the fault.
    pub(crate) fn tap(&self) -> Option<Tap> {
        let mut meddler = Meddler::new(*self.armed(), self.rank)?;
        let hand = self.clone();
        Some(Box::new(move |way, peer, message| {
            // At the leader only what passes between it and its own place in the mesh.
            if hand.rank == 0 && peer != 0 {
                return Ok(vec![message]);
            }
            let before = meddler.struck();
            let passed = meddler.pass(way, message);
            if meddler.struck() && !before {
                hand.strike();
            }
            passed
        }))
    }

    /// This rank's copy of a program, changed if that is the fault.
    pub(crate) fn program(&self, program: &mut Program) {
        for (fault, change) in programs::CHANGES {
            if self.has(*fault) {
                change(program);
            }
        }
    }

    /// Where this rank reads its weights.
    pub(crate) fn source<'a>(
        &self,
        weights: &'a mut dyn WeightSource,
        mesh: Mesh,
    ) -> Box<dyn WeightSource + 'a> {
        if self.has(Fault::WrongShard) {
            self.strike();
            let ranks: Vec<Rank> = mesh.iter().collect();
            let at = ranks.iter().position(|r| r.0 == self.rank).unwrap_or(0);
            let other = ranks[(at + 1) % ranks.len().max(1)];
            return Box::new(WrongSeat { weights, own: Rank(self.rank), other });
        }
        Box::new(WrongSeat { weights, own: Rank(self.rank), other: Rank(self.rank) })
    }

    /// The engine that breaks as it is told.
    pub(crate) fn engine(&self, engine: MeshEngine, census: &Arc<Census>) -> Box<dyn Engine> {
        Box::new(DrillEngine::new(engine, self.clone(), Arc::clone(census)))
    }

    /// The studio likewise.
    pub(crate) fn studio(&self, studio: Box<dyn Studio>) -> Box<dyn Studio> {
        Box::new(DrillStudio::new(studio, self.clone()))
    }

    /// What is asked of a chunk.
    pub(crate) fn request(&self, chunk: u32, request: StreamRequest) -> StreamRequest {
        // The warm-up has the first id, the first chunk the one after it.
        let at = self.armed().call == u64::from(chunk) + 2;
        if !at || !self.has(Fault::UnserialisableMeta) {
            return request;
        }
        self.strike();
        let source = "x".repeat(TOO_MUCH_META);
        StreamRequest { reload: Some(Reload { source, weights: Digest::default() }), ..request }
    }
}

/// When the fault of a run struck, in nanoseconds of the system's monotonic clock.
pub(super) fn struck_ns(out: &Path) -> Option<u64> {
    std::fs::read_to_string(out.join(STRUCK)).ok()?.parse().ok()
}

/// The monotonic clock, which all processes of a host share, in nanoseconds.
pub(super) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Reads another rank's pieces for this one.
struct WrongSeat<'a> {
    weights: &'a mut dyn WeightSource,
    own: Rank,
    other: Rank,
}

impl WeightSource for WrongSeat<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, tessera_base::Diagnostic> {
        let rank = if seat.rank == self.own { self.other } else { seat.rank };
        self.weights.read(name, ty, load, &Seat { rank, ..*seat })
    }
}
