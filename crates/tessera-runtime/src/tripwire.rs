//! Tripwires: every check that ends a run, by its code and the places that make it.
//!
//! A place is where the check runs, not whose fault it finds. Each check asks [`Tripwires::armed`] first, so that
//! a self-test can show that nothing else would have caught the fault.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostics};

use crate::{cache, census, check, decide, drift, engine, leader, limits, mesh_leader, parity, wire, worker};

/// A collective that the plan does not hold.
pub static T0751: Code = Code {
    id: "T0751",
    title: "a rank was about to issue a collective that its plan does not hold there",
    page: "Each rank compares every collective with the sealed program before a byte leaves it: op, group, dtype and \
shape, in program order. This one was extra, missing, on another group or of another shape, so no peer would have joined \
it, or the wrong ones would have. The rank stopped before it communicated, and its peers were released.\n\nThe message \
gives the phase, the place in it, what the plan holds and what was about to be issued. Look at the code path of \
that rank alone: a flag that only it has, a call outside the plan, a group made by hand.",
};
/// A peer without proof.
pub static T0756: Code = Code {
    id: "T0756",
    title: "a peer did not prove that it belongs to this run",
    page: "Every process of a run shows that it holds the run's secret, or a certificate of the run's authority, \
before anything else is read from it. This one did not: it was started with another secret file, its certificate is not \
signed by the authority that was given, or it is a stranger that found the port.\n\nNothing that it sent was looked at. \
Give every rank the same secret file and check the clocks of the hosts if certificates are in use.",
};
/// Tables of groups or peers differ.
pub static T0757: Code = Code {
    id: "T0757",
    title: "the ranks' tables of peers or groups differ",
    page: "Groups are made in one order on every rank, from the mesh alone, and the rendezvous hands every rank the same \
list of peers and addresses. A digest of both is compared before the first collective. One rank holds another table: it \
made its groups in another order, counts another number of ranks, or joined with addresses of another run.\n\nThe \
message shows each value with the ranks that hold it. Two groups made in different orders would pair up members that \
mean different things, and hang or mix data; that is why the run ends here.",
};

/// Where a check runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// What the leader checks before it sends, before it commits, and while it waits.
    Leader,
    /// What the mesh leader checks before a member sees a message.
    MeshLeader,
    /// What a rank checks before it answers, while it runs, and while it waits.
    Worker,
    /// What is compared over all ranks before the first call.
    Init,
}

impl Place {
    /// A few words for a person.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Place::Leader => "leader preflight",
            Place::MeshLeader => "mesh-leader preflight",
            Place::Worker => "worker check",
            Place::Init => "init parity",
        }
    }
}

/// A check that ends a run.
#[derive(Debug, Clone, Copy)]
pub struct Tripwire {
    /// What it raises.
    pub code: &'static Code,
    /// Where it is checked; the first is the usual one.
    pub places: &'static [Place],
    /// Stem of the page under docs/manual/ that describes it.
    pub page: &'static str,
}

const fn wire(code: &'static Code, places: &'static [Place], page: &'static str) -> Tripwire {
    Tripwire { code, places, page }
}

const CONTROL: &str = "control-plane";
const GROUPS: &str = "groups";
const OVERLAP: &str = "overlap";
const CACHES: &str = "kv";
const SHUTDOWN: &str = "shutdown";
const DETERMINISM: &str = "determinism";
const REPLAY: &str = "replay";

/// Every tripwire, in ascending order of code.
pub static TRIPWIRES: &[Tripwire] = {
    use Place::{Init, Leader, MeshLeader, Worker};
    const ENVELOPE: &[Place] = &[Worker, Leader, MeshLeader];
    /// Whoever reads the bytes. Nothing can be done with bytes that do not read: switched off, they are dropped.
    const READ: &[Place] = &[Worker, Leader, MeshLeader];
    &[
        wire(&wire::T0701, ENVELOPE, CONTROL),
        wire(&wire::T0702, READ, CONTROL),
        wire(&wire::T0703, &[Leader, Worker, MeshLeader], CONTROL),
        wire(&wire::T0704, READ, CONTROL),
        wire(&wire::T0705, READ, CONTROL),
        wire(&wire::T0706, READ, CONTROL),
        wire(&worker::T0707, &[Leader, Worker, MeshLeader], CONTROL),
        wire(&cache::T0710, ENVELOPE, CACHES),
        wire(&cache::T0712, ENVELOPE, CACHES),
        wire(&decide::T0721, &[Leader], CONTROL),
        wire(&census::T0722, ENVELOPE, CONTROL),
        wire(&census::T0723, ENVELOPE, CONTROL),
        wire(&check::T0730, ENVELOPE, REPLAY),
        wire(&check::T0731, ENVELOPE, CONTROL),
        wire(&check::T0732, ENVELOPE, CONTROL),
        wire(&check::T0733, ENVELOPE, CONTROL),
        wire(&check::T0734, ENVELOPE, GROUPS),
        wire(&check::T0735, ENVELOPE, CACHES),
        wire(&leader::T0736, &[Leader], OVERLAP),
        wire(&engine::T0737, &[Worker, Leader], DETERMINISM),
        wire(&parity::T0740, &[Init], DETERMINISM),
        wire(&limits::T0741, &[Leader, Init], OVERLAP),
        wire(&worker::T0742, &[Leader, Worker, MeshLeader], SHUTDOWN),
        wire(&leader::T0743, &[Leader, Worker, MeshLeader], SHUTDOWN),
        wire(&drift::T0744, &[Leader], DETERMINISM),
        wire(&worker::T0746, &[Worker], REPLAY),
        wire(&engine::T0747, &[Worker], GROUPS),
        wire(&worker::T0749, &[Worker, Leader, MeshLeader], SHUTDOWN),
        wire(&T0751, &[Worker], GROUPS),
        wire(&engine::T0752, &[Leader], DETERMINISM),
        wire(&engine::T0753, &[Leader], DETERMINISM),
        wire(&drift::T0754, &[Init, Worker, Leader], DETERMINISM),
        wire(&mesh_leader::T0755, &[MeshLeader], GROUPS),
        wire(&T0756, &[Init], CONTROL),
        wire(&T0757, &[Init], GROUPS),
        wire(&drift::T0759, &[Leader], DETERMINISM),
    ]
};

/// The place where a code is usually raised; the leader for a code that is no tripwire.
pub(crate) fn first_place(code: &Code) -> Place {
    TRIPWIRES.iter().find(|t| t.code == code).map_or(Place::Leader, |t| t.places[0])
}

/// The tripwires that are switched off: none, except in a self-test. A parity key of every rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tripwires(BTreeSet<String>);

impl Tripwires {
    /// Switches off the tripwires of these codes; the others stay armed.
    #[must_use]
    pub fn off<S: Into<String>>(codes: impl IntoIterator<Item = S>) -> Tripwires {
        Tripwires(codes.into_iter().map(Into::into).collect())
    }

    /// Whether the checks of this code run.
    #[must_use]
    pub fn armed(&self, code: &Code) -> bool {
        self.armed_id(code.id)
    }

    /// The same, by the code's id.
    #[must_use]
    pub fn armed_id(&self, id: &str) -> bool {
        !self.0.contains(id)
    }

    /// Codes that no tripwire has.
    #[must_use]
    pub fn unknown(&self) -> Vec<&str> {
        let known = |id: &str| TRIPWIRES.iter().any(|t| t.code.id == id);
        self.0.iter().map(String::as_str).filter(|id| !known(id)).collect()
    }

    /// Drops findings whose tripwire is off.
    pub(crate) fn filter(&self, found: &mut Diagnostics) {
        found.retain(|d| self.armed(d.code));
    }
}

impl std::fmt::Display for Tripwires {
    /// The codes that are off, or `none`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        f.write_str(&self.0.iter().map(String::as_str).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tripwire_is_listed_once_in_order_and_has_a_place_and_a_code_of_this_room() {
        assert!(TRIPWIRES.is_sorted_by(|a, b| a.code.id < b.code.id));
        for t in TRIPWIRES {
            assert!(!t.places.is_empty() && !t.page.is_empty(), "{}", t.code.id);
            assert!(crate::CODES.contains(&t.code), "{}", t.code.id);
        }
    }

    #[test]
    fn what_is_off_is_named_and_nothing_else_is_off() {
        let off = Tripwires::off(["T0744", "T0712", "T999"]);
        assert_eq!(
            (off.to_string().as_str(), Tripwires::default().to_string().as_str()),
            ("T0712, T0744, T999", "none")
        );
        assert!(!off.armed(&drift::T0744) && off.armed(&T0751) && Tripwires::default().armed(&drift::T0744));
        assert_eq!(off.unknown(), ["T999"]);
    }
}
