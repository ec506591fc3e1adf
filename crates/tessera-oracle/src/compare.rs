//! Compares a verifier's verdict with the simulated outcome, and shrinks a set on which they
//! disagree.

use tessera_ir::{Program, print};
use tessera_mesh::Mesh;

use crate::one_order::explore_one_order;
use crate::outcome::{ExecutionOutcome, MismatchField};
use crate::programs::ProgramSet;

/// A verifier: takes programs, one per rank in order, and returns the codes with which it rejects
/// them; an empty list means it accepts.
pub type Verifier<'a> = &'a dyn Fn(&Mesh, &[Program]) -> Vec<&'static str>;

/// Codes that predict how a run ends: the verifier must never raise one for a run that completes.
pub const EXACT: &[&str] =
    &["T0301", "T0302", "T0303", "T0304", "T0305", "T0307", "T0308", "T0311", "T0312", "T0334"];

/// Codes that may reject a run that completes, each with the reason. No other code, in [`EXACT`] or
/// not, may reject such a run.
pub const CONSERVATIVE: &[(&str, &str)] = &[
    ("T0203", "form: the op table does not contain it, although a device might run it"),
    ("T0210", "types: bytes arrive, but not as the tensor that the program declares"),
    ("T0211", "types: the run ends, but one rank's term is taken for the sum"),
    ("T0212", "types: the run ends, but the collective contradicts the layout"),
    ("T0213", "types: the run ends, but each rank normalises its shard by itself"),
    ("T0214", "types: the run ends, but it combines shards that do not belong together"),
    ("T0215", "types: an attribute that the op does not accept"),
    ("T0306", "bytes agree, tensor dims do not: the run ends, with elements in the wrong places"),
    ("T0309", "a send to the rank itself matches a receive in the same batch, and never otherwise"),
    ("T0310", "a group of one: the run ends without any communication"),
    ("T0313", "no wait: this run ends, but the next program may overwrite buffers still in flight"),
    ("T0314", "a second wait finds a finished collective here; a backend may have freed it"),
    ("T0315", "a token in place of data"),
    (
        "T0316",
        "a launch queue, another rank or the end of a collective happens to give the order, but no event or wait guarantees it",
    ),
    ("T0317", "the run ends, but outputs one rank's term as the sum"),
    ("T0318", "every order writes before the view's last use: the run ends, and always reads the new bytes"),
    ("T0319", "a value is used before its definition: the program has no meaning"),
    ("T0320", "a value has two definitions: the program has no meaning"),
    ("T0321", "types: an annotated type that the op does not return"),
    ("T0322", "form: the text form cannot represent it"),
    ("T0323", "data in place of a call scalar: the run ends, but other data may end it otherwise"),
    ("T0332", "roles declare one input differently: the run ends, with bytes read as another tensor"),
    ("T0333", "bytes agree, shapes or layouts do not: the run ends, with elements in the wrong places"),
    ("T0335", "the device would run these ops; capture loses synchronisation across the graph's boundary"),
    (
        "T0337",
        "a role on the wrong side of the mesh boundary: its collectives match, but only over the world",
    ),
    ("T0339", "a batch that is split or numbered twice: launched in parts, which happen to complete here"),
    ("T0343", "every call matches: the run ends, but ranks computed different values where one is required"),
];

/// Codes that do not predict whether a run completes: a set that only these codes reject counts as
/// accepted, so that they mask no disagreement.
pub const NOT_ABOUT_COMPLETION: &[&str] = &["T0343"];

/// Returns the reason why a code may reject a completing run; `None` if it must not.
#[must_use]
pub fn conservative_reason(code: &str) -> Option<&'static str> {
    CONSERVATIVE.iter().find(|(c, _)| *c == code).map(|(_, why)| *why)
}

/// The verdict and the simulated outcome of one set.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// Codes raised by the verifier, without duplicates, in order.
    pub codes: Vec<&'static str>,
    /// What the simulated ranks do: complete, hang, mismatch or race.
    pub outcome: ExecutionOutcome,
}

/// A forbidden disagreement between the verifier and the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disagreement {
    /// The verifier accepted a set that hangs, mismatches or races in the simulation.
    AcceptedFails,
    /// The verifier rejected a completing set with a code that predicts failure.
    RejectedCompletes(&'static str),
}

impl Comparison {
    /// Returns whether the verifier expects the set to complete.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        self.codes.iter().all(|c| NOT_ABOUT_COMPLETION.contains(c))
    }

    /// Returns how verdict and outcome contradict each other; `None` if they agree, or if every
    /// code may reject a completing run.
    #[must_use]
    pub fn disagreement(&self) -> Option<Disagreement> {
        if self.outcome.is_failure() {
            return self.is_accepted().then_some(Disagreement::AcceptedFails);
        }
        let wrong = self.codes.iter().find(|c| conservative_reason(c).is_none());
        wrong.map(|c| Disagreement::RejectedCompletes(c))
    }
}

/// Returns the verifier's codes for a set of programs, one program per rank, and the outcome of a
/// simulated run of the set.
#[must_use]
pub fn compare_set(mesh: &Mesh, programs: &[Program], verifier: Verifier<'_>) -> Comparison {
    let mut codes = verifier(mesh, programs);
    codes.sort_unstable();
    codes.dedup();
    let all: Vec<&Program> = programs.iter().collect();
    Comparison { codes, outcome: explore_one_order(mesh, &all) }
}

/// Returns the smallest set found that still shows the same disagreement: removes collectives,
/// mutations and rewrites one by one.
#[must_use]
pub fn shrink_set(set: &ProgramSet, verifier: Verifier<'_>) -> ProgramSet {
    let violation = |c: &ProgramSet| {
        let programs = c.lower_programs().ok()?;
        compare_set(&c.mesh, &programs, verifier).disagreement()
    };
    let Some(wanted) = violation(set) else { return set.clone() };
    let mut best = set.clone();
    'again: loop {
        for smaller in smaller_sets(&best) {
            if violation(&smaller) == Some(wanted) {
                best = smaller;
                continue 'again;
            }
        }
        return best;
    }
}

/// Positions at which a change is retried after a collective was removed.
const RETRY_POSITIONS: usize = 12;

fn smaller_sets(set: &ProgramSet) -> Vec<ProgramSet> {
    let mut out = Vec::new();
    let mut without = |change: &dyn Fn(&mut ProgramSet)| {
        let mut c = set.clone();
        change(&mut c);
        out.push(c);
    };
    for i in 0..set.mutations.len() {
        without(&|c| {
            c.mutations.remove(i);
        });
    }
    for i in 0..set.rewrites.len() {
        without(&|c| {
            c.rewrites.remove(i);
        });
    }
    for i in 0..set.operations.len() {
        without(&|c| {
            c.operations.remove(i);
        });
        // The remaining set may need its change at another position.
        for aim in 0..RETRY_POSITIONS {
            (0..set.mutations.len()).for_each(|m| {
                without(&|c| {
                    c.operations.remove(i);
                    c.mutations[m].move_to(aim);
                });
            });
            (0..set.rewrites.len()).for_each(|e| {
                without(&|c| {
                    c.operations.remove(i);
                    c.rewrites[e].move_to(aim);
                });
            });
        }
    }
    if set.streams > 1 {
        without(&|c| c.streams -= 1);
    }
    out
}

/// Renders a set as a file for the data-driven tests, with the expected error on the failing op.
#[must_use]
pub fn to_filetest(programs: &[Program], comparison: &Comparison, note: &str) -> String {
    let mut out = format!("// test: check\n// note: {note}\n");
    for line in comparison.outcome.to_string().lines() {
        out += &format!("// note: {line}\n");
    }
    for (rank, p) in programs.iter().enumerate() {
        let mark = comparison
            .outcome
            .failing_op()
            .filter(|(r, _)| *r == rank)
            .map(|(_, op)| 1 + p.buffers.len() + op);
        for (i, line) in print(p).lines().enumerate() {
            out += line;
            if Some(i) == mark {
                out += &format!(" // error: {}", expected_code(&comparison.outcome));
            }
            out += "\n";
        }
    }
    out
}

/// Returns the code with which the verifier usually rejects a set with this outcome.
fn expected_code(outcome: &ExecutionOutcome) -> &'static str {
    match outcome {
        ExecutionOutcome::Mismatch { field, .. } => match field {
            MismatchField::Op => "T0301",
            MismatchField::Graph => "T0334",
            MismatchField::Dtype => "T0303",
            MismatchField::Reduction => "T0304",
            MismatchField::Root => "T0305",
            MismatchField::Count => "T0302",
        },
        ExecutionOutcome::Race { .. } => "T0316",
        _ => "T0311",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_is_listed_once() {
        let mut all: Vec<&str> = EXACT.iter().copied().chain(CONSERVATIVE.iter().map(|c| c.0)).collect();
        let codes = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), codes);
    }
}
