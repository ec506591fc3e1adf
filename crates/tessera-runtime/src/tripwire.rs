//! Tripwires: every check that ends a run, with its code and the sites that make it.
//!
//! A site is where the check runs, not the origin of the fault. Each check calls
//! [`Tripwires::is_armed`] first, so that a self-test can show that no other check would have
//! caught the fault.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostics};

use crate::codes;
pub use crate::codes::{T0751, T0757, T0765, T0773, T0775, T0777, T0785};

/// The place in the protocol at which a check runs: the process and the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CheckSite {
    /// Checks of the leader before it sends, before it commits, and while it waits.
    Leader,
    /// Checks of the mesh leader before a member receives a message.
    MeshLeader,
    /// Checks of a rank before it answers, while it runs, and while it waits.
    Worker,
    /// Comparisons over all ranks before the first call.
    Init,
}

impl CheckSite {
    /// Returns the name that tables and reports show, such as `leader preflight`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            CheckSite::Leader => "leader preflight",
            CheckSite::MeshLeader => "mesh-leader preflight",
            CheckSite::Worker => "worker check",
            CheckSite::Init => "init parity",
        }
    }
}

/// A check that ends a run.
#[derive(Debug, Clone, Copy)]
pub struct Tripwire {
    /// Code that the check raises; its id also disables the check in a self-test.
    pub code: &'static Code,
    /// The sites that make the check; the first is the usual one.
    pub sites: &'static [CheckSite],
    /// Stem of the page under docs/manual/ that describes the tripwire.
    pub page: &'static str,
}

const fn new_tripwire(code: &'static Code, places: &'static [CheckSite], page: &'static str) -> Tripwire {
    Tripwire { code, sites: places, page }
}

/// Every tripwire, in ascending order of code.
pub static TRIPWIRES: &[Tripwire] = {
    use CheckSite::{Init, Leader, MeshLeader, Worker};
    const ENVELOPE: &[CheckSite] = &[Worker, Leader, MeshLeader];
    /// Every process that decodes frames. Nothing can be done with bytes that do not decode: if the
    /// tripwire is disabled, they are dropped.
    const READ: &[CheckSite] = &[Worker, Leader, MeshLeader];
    &[
        new_tripwire(&codes::T0701, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0702, READ, "control-plane"),
        new_tripwire(&codes::T0703, &[Leader, Worker, MeshLeader], "control-plane"),
        new_tripwire(&codes::T0704, READ, "control-plane"),
        new_tripwire(&codes::T0705, READ, "control-plane"),
        new_tripwire(&codes::T0706, READ, "control-plane"),
        new_tripwire(&codes::T0707, &[Leader, Worker, MeshLeader], "control-plane"),
        new_tripwire(&codes::T0710, ENVELOPE, "kv"),
        new_tripwire(&codes::T0712, ENVELOPE, "kv"),
        new_tripwire(&codes::T0721, &[Leader], "control-plane"),
        new_tripwire(&codes::T0722, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0723, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0730, ENVELOPE, "replay"),
        new_tripwire(&codes::T0731, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0732, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0733, ENVELOPE, "control-plane"),
        new_tripwire(&codes::T0734, ENVELOPE, "groups"),
        new_tripwire(&codes::T0735, ENVELOPE, "kv"),
        new_tripwire(&codes::T0736, &[Leader], "overlap"),
        new_tripwire(&codes::T0737, &[Worker, Leader], "determinism"),
        new_tripwire(&codes::T0740, &[Init], "determinism"),
        new_tripwire(&codes::T0741, &[Leader, Init], "overlap"),
        new_tripwire(&codes::T0742, &[Leader, Worker, MeshLeader], "shutdown"),
        new_tripwire(&codes::T0743, &[Leader, Worker, MeshLeader], "shutdown"),
        new_tripwire(&codes::T0744, &[Leader], "determinism"),
        new_tripwire(&codes::T0746, &[Worker], "replay"),
        new_tripwire(&codes::T0747, &[Worker], "groups"),
        new_tripwire(&codes::T0749, &[Worker, Leader, MeshLeader], "shutdown"),
        new_tripwire(&codes::T0751, &[Worker], "groups"),
        new_tripwire(&codes::T0752, &[Leader], "determinism"),
        new_tripwire(&codes::T0753, &[Leader], "determinism"),
        new_tripwire(&codes::T0754, &[Init, Worker, Leader], "determinism"),
        new_tripwire(&codes::T0755, &[MeshLeader], "groups"),
        new_tripwire(&codes::T0756, &[Init], "control-plane"),
        new_tripwire(&codes::T0757, &[Init], "groups"),
        new_tripwire(&codes::T0759, &[Leader], "determinism"),
        new_tripwire(&codes::T0765, &[Leader], "shutdown"),
        new_tripwire(&codes::T0770, &[Init, Worker], "determinism"),
        new_tripwire(&codes::T0771, &[Worker], "determinism"),
        new_tripwire(&codes::T0772, &[Worker], "kv"),
        new_tripwire(&codes::T0773, &[Worker], "groups"),
        new_tripwire(&codes::T0775, &[Init], "determinism"),
        new_tripwire(&codes::T0777, &[Init], "groups"),
        new_tripwire(&codes::T0785, &[Worker], "determinism"),
    ]
};

/// Returns the usual site of a code; the leader for a code that is not a tripwire.
pub(crate) fn primary_site(code: &Code) -> CheckSite {
    TRIPWIRES.iter().find(|t| t.code == code).map_or(CheckSite::Leader, |t| t.sites[0])
}

/// The disabled tripwires: empty except in a self-test. They are a parity key of every rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tripwires(BTreeSet<String>);

impl Tripwires {
    /// Disables the tripwires of these codes; the others stay armed.
    #[must_use]
    pub fn disabling<S: Into<String>>(codes: impl IntoIterator<Item = S>) -> Tripwires {
        Tripwires(codes.into_iter().map(Into::into).collect())
    }

    /// Whether the checks of this code are enabled.
    #[must_use]
    pub fn is_armed(&self, code: &Code) -> bool {
        self.is_armed_id(code.id)
    }

    /// Whether the checks of the code with this id are enabled.
    #[must_use]
    pub fn is_armed_id(&self, id: &str) -> bool {
        !self.0.contains(id)
    }

    /// Returns the findings whose tripwire is enabled, if there are any, as an error.
    pub(crate) fn check_findings(&self, mut found: Diagnostics) -> Result<(), Diagnostics> {
        found.retain(|d| self.is_armed(d.code));
        if found.is_empty() { Ok(()) } else { Err(found) }
    }
}

impl std::fmt::Display for Tripwires {
    /// Prints the disabled codes, or `none`.
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
    fn every_tripwire_is_listed_once_in_order_with_a_site_and_a_code_of_this_crate() {
        assert!(TRIPWIRES.is_sorted_by(|a, b| a.code.id < b.code.id));
        for t in TRIPWIRES {
            assert!(!t.sites.is_empty() && !t.page.is_empty(), "{}", t.code.id);
            assert!(crate::CODES.contains(&t.code), "{}", t.code.id);
        }
    }

    #[test]
    fn disabled_tripwires_are_listed_and_the_others_stay_armed() {
        let off = Tripwires::disabling(["T0744", "T0712", "T999"]);
        assert_eq!(
            (off.to_string().as_str(), Tripwires::default().to_string().as_str()),
            ("T0712, T0744, T999", "none")
        );
        assert!(
            !off.is_armed(&codes::T0744)
                && off.is_armed(&codes::T0751)
                && Tripwires::default().is_armed(&codes::T0744)
        );
    }
}
