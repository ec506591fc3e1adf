//! A judge's answer against what was played, and the smallest set on which they part.

use tessera_ir::{Program, print};
use tessera_mesh::Mesh;

use crate::outcome::{Field, Outcome};
use crate::run::explore;
use crate::set::Case;

/// A judge: the codes with which it refuses programs, one per rank in order; none where it accepts.
pub type Judge<'a> = &'a dyn Fn(&Mesh, &[Program]) -> Vec<&'static str>;

/// Codes that say how a run ends, so that a run that completes must never get one.
pub const EXACT: &[&str] =
    &["T0301", "T0302", "T0303", "T0304", "T0305", "T0307", "T0308", "T0311", "T0312", "T0334"];

/// Codes that refuse what may complete, and why the judge is right to refuse. A code in neither table may refuse
/// nothing that completes.
pub const CONSERVATIVE: &[(&str, &str)] = &[
    ("T0203", "form: the op table does not have it, whatever a device would do with it"),
    ("T0210", "types: bytes arrive, but not the tensor that the text says"),
    ("T0211", "types: the run ends, with one rank's term taken for the sum"),
    ("T0212", "types: the run ends, but the collective does not mean what the layout says"),
    ("T0213", "types: the run ends, with each rank's piece normalised by itself"),
    ("T0214", "types: the run ends, with pieces combined that do not belong together"),
    ("T0215", "types: a constant that the op cannot take"),
    ("T0306", "bytes agree, tensor dims do not: the run ends, with elements in other places"),
    ("T0309", "a send to the rank itself meets a receive in the same launch, and nowhere else"),
    ("T0310", "a group of one: the run ends, with nobody to talk to"),
    ("T0313", "nothing waits: this run ends, but the next program may overwrite what is still in flight"),
    ("T0314", "a second wait finds a finished collective here; a backend may have freed it"),
    ("T0315", "a token where data belongs"),
    (
        "T0316",
        "the order holds by a launch queue, another rank or the end of a collective, and no event or wait states it",
    ),
    ("T0317", "the run ends, with one rank's term handed out as the sum"),
    (
        "T0318",
        "every order writes before the view's last use: the run ends, and reads the new bytes each time",
    ),
    ("T0319", "a value stands before its definition: there is no program to speak of"),
    ("T0320", "a value has two definitions: there is no program to speak of"),
    ("T0321", "types: a written type that the op does not give"),
    ("T0322", "form: the text form cannot carry it"),
    ("T0323", "data where a call scalar belongs: the run ends, and other data may end it otherwise"),
    ("T0332", "roles read one input differently: the run ends, with bytes taken for another tensor"),
    ("T0333", "bytes agree, shapes or layouts do not: the run ends, with elements in other places"),
    ("T0335", "the device would run these ops so; capture loses what crosses the edge of a graph"),
    ("T0337", "a role on the wrong side of the mesh's edge: its collectives meet, over the world alone"),
    ("T0339", "a batch that is torn or numbered twice: launched in parts, which this time get through"),
    (
        "T0343",
        "every call meets: the run ends, with ranks that computed different things where one was meant",
    ),
];

/// Codes that answer another question than whether a run gets through: a set that they alone refuse counts as accepted, so
/// that they hide nothing.
pub const BESIDE: &[&str] = &["T0343"];

/// Why a code may refuse what completes; `None` for one that may not.
#[must_use]
pub fn reason(code: &str) -> Option<&'static str> {
    CONSERVATIVE.iter().find(|(c, _)| *c == code).map(|(_, why)| *why)
}

/// One set, judged and played.
#[derive(Debug, Clone)]
pub struct Compared {
    /// What the judge said, each code once, in order.
    pub codes: Vec<&'static str>,
    /// What happened.
    pub outcome: Outcome,
}

/// A judge and a run that part where they must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Violation {
    /// The judge accepted what fails.
    AcceptedFails,
    /// The judge refused what completes, by a code that says it cannot.
    RefusedCompletes(&'static str),
}

impl Compared {
    /// Whether the judge expects the set to get through.
    #[must_use]
    pub fn accepted(&self) -> bool {
        self.codes.iter().all(|c| BESIDE.contains(c))
    }

    /// What is wrong, if anything.
    #[must_use]
    pub fn violation(&self) -> Option<Violation> {
        if self.outcome.fails() {
            return self.accepted().then_some(Violation::AcceptedFails);
        }
        let wrong = self.codes.iter().find(|c| reason(c).is_none());
        wrong.map(|c| Violation::RefusedCompletes(c))
    }
}

/// Judges and plays one set.
#[must_use]
pub fn compare(mesh: &Mesh, programs: &[Program], judge: Judge<'_>) -> Compared {
    let mut codes = judge(mesh, programs);
    codes.sort_unstable();
    codes.dedup();
    let all: Vec<&Program> = programs.iter().collect();
    Compared { codes, outcome: explore(mesh, &all) }
}

/// The smallest set found on which judge and run still part in the same way: meetings, single calls, mutations and
/// edits are left out one by one while they do.
#[must_use]
pub fn shrink(case: &Case, judge: Judge<'_>) -> Case {
    let violation = |c: &Case| {
        let programs = c.programs().ok()?;
        compare(&c.mesh, &programs, judge).violation()
    };
    let Some(wanted) = violation(case) else { return case.clone() };
    let mut best = case.clone();
    'again: loop {
        for smaller in smaller(&best) {
            if violation(&smaller) == Some(wanted) {
                best = smaller;
                continue 'again;
            }
        }
        return best;
    }
}

/// Places at which a change is tried when a meeting is left out.
const AIMS: usize = 12;

fn smaller(case: &Case) -> Vec<Case> {
    let mut out = Vec::new();
    let mut without = |change: &dyn Fn(&mut Case)| {
        let mut c = case.clone();
        change(&mut c);
        out.push(c);
    };
    for i in 0..case.mutations.len() {
        without(&|c| {
            c.mutations.remove(i);
        });
    }
    for i in 0..case.edits.len() {
        without(&|c| {
            c.edits.remove(i);
        });
    }
    for i in 0..case.meetings.len() {
        without(&|c| {
            c.meetings.remove(i);
        });
        // What is left may need its change at another place.
        for aim in 0..AIMS {
            (0..case.mutations.len()).for_each(|m| {
                without(&|c| {
                    c.meetings.remove(i);
                    c.mutations[m].aim(aim);
                });
            });
            (0..case.edits.len()).for_each(|e| {
                without(&|c| {
                    c.meetings.remove(i);
                    c.edits[e].aim(aim);
                });
            });
        }
    }
    if case.streams > 1 {
        without(&|c| c.streams -= 1);
    }
    out
}

/// A set as a file for the data-driven tests, with the mark that a failing run asks for.
#[must_use]
pub fn filetest(programs: &[Program], found: &Compared, note: &str) -> String {
    let mut out = format!("// test: check\n// note: {note}\n");
    for line in found.outcome.to_string().lines() {
        out += &format!("// note: {line}\n");
    }
    for (rank, p) in programs.iter().enumerate() {
        let mark = found.outcome.at().filter(|(r, _)| *r == rank).map(|(_, op)| 1 + p.buffers.len() + op);
        for (i, line) in print(p).lines().enumerate() {
            out += line;
            if Some(i) == mark {
                out += &format!(" // error: {}", expected(&found.outcome));
            }
            out += "\n";
        }
    }
    out
}

/// The code that a failure is usually refused by.
fn expected(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Mismatch { field, .. } => match field {
            Field::Op => "T0301",
            Field::Graph => "T0334",
            Field::Dtype => "T0303",
            Field::Reduction => "T0304",
            Field::Root => "T0305",
            Field::Count => "T0302",
        },
        Outcome::Race { .. } => "T0316",
        _ => "T0311",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_stands_in_one_table_once() {
        let mut all: Vec<&str> = EXACT.iter().copied().chain(CONSERVATIVE.iter().map(|c| c.0)).collect();
        let codes = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), codes);
    }
}
