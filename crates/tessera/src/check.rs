//! Verifies the programs of a `.tir` file: each program by itself, then all ranks of each phase if
//! every rank has a program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tessera_base::{Counterexample, Diagnostic, Diagnostics, RankCollective};
use tessera_ir::{Phase, Program, RoleRanks, Slots, is_fragment, parse_all, parse_fragment, program_digest};
use tessera_mesh::{Mesh, Rank};
pub use tessera_verify::DeviceLimits;
use tessera_verify::{check_graph_mixing, check_phase, check_program};

use crate::codes::{T0025, T0026};
use crate::files::read_text;

/// The diagnostics of one program file, with the text that they refer to and a digest.
#[derive(Debug, Clone, Default)]
pub struct FileCheck {
    /// Diagnostics of the parser and the verifier. The file is verified if there is no error.
    pub diagnostics: Diagnostics,
    /// The file's text, to which the spans refer.
    pub source: String,
    /// Number of programs in the file; 0 for fragments and for a file that cannot be parsed.
    pub programs: usize,
    /// 64 hex digits of a hash over the canonical text of all programs; `None` if the file cannot
    /// be parsed.
    pub digest: Option<String>,
}

impl FileCheck {
    /// Returns whether the verifier accepts everything in the file.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        !self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// Reads and verifies a file. Of `limits`, only the graph mixing flag applies. All problems are
/// reported in the result.
#[must_use]
pub fn check_file(path: &Path, limits: &DeviceLimits) -> FileCheck {
    let name = path.display().to_string();
    match read_text(path, &T0025) {
        Ok(text) => match path.parent().and_then(Path::parent).filter(|p| p.join("seal.json").exists()) {
            // The plan determines which ranks run its programs, so a single program of it cannot be
            // compared with others.
            Some(plan) => check_source(text, &name, Some(plan), limits),
            None => check_text(text, &name, limits),
        },
        Err(d) => FileCheck { diagnostics: vec![d], ..FileCheck::default() },
    }
}

/// Verifies a text; diagnostics refer to it as `name`.
#[must_use]
pub fn check_text(source: String, name: &str, limits: &DeviceLimits) -> FileCheck {
    check_source(source, name, None, limits)
}

fn check_source(source: String, name: &str, plan: Option<&Path>, limits: &DeviceLimits) -> FileCheck {
    if is_fragment(&source) {
        let diagnostics = parse_fragment(&source, name).map_or_else(|ds| ds, |f| f.review(name));
        return FileCheck { diagnostics, source, ..FileCheck::default() };
    }
    let programs = match parse_all(&source, name) {
        Ok(programs) => programs,
        Err(diagnostics) => return FileCheck { diagnostics, source, ..FileCheck::default() },
    };
    if programs.is_empty() {
        let d = Diagnostic::error(&T0025, format!("{name} contains no program"));
        let d = d
            .with_label(name, format!("{} bytes", source.len()))
            .with_hint("a program begins with `program @name`");
        return FileCheck { diagnostics: vec![d], source, ..FileCheck::default() };
    }
    let mut diagnostics = check_programs(&programs, limits);
    match plan {
        Some(plan) if diagnostics.is_empty() => {
            let message = format!("ranks were not compared: {name} belongs to the plan {}", plan.display());
            let d = Diagnostic::warning(&T0026, message).with_label(name, "one program of the plan");
            diagnostics.push(d.with_hint(format!("tessera check {}", plan.display())));
        }
        None if diagnostics.is_empty() => diagnostics = check_phases(&programs, &parse_role_ranks(&source)),
        _ => {}
    }
    // The verifier locates an op by program and index; its span refers to this file.
    map_places_to_files(&mut diagnostics, &|_| Some(name.to_string()));
    let mut hash = blake3::Hasher::new();
    programs.iter().for_each(|p| {
        hash.update(&program_digest(p));
    });
    let digest = Some(hash.finalize().to_hex().to_string());
    FileCheck { diagnostics, source, programs: programs.len(), digest }
}

/// Replaces op locations in diagnostics, as the verifier names them, by file names. `file_of` maps
/// a location that contains `@phase role(r) op 3` to the file of that program. Counterexamples are
/// converted too.
pub(crate) fn map_places_to_files(diagnostics: &mut [Diagnostic], file_of: &dyn Fn(&str) -> Option<String>) {
    for d in diagnostics {
        for place in d.labels.iter_mut().filter(|p| p.span.is_some()) {
            if let Some(file) = file_of(&place.location).filter(|f| *f != place.location) {
                place.message = format!("{}: {}", place.location, place.message);
                place.location = file;
            }
        }
        let steps: Vec<&mut RankCollective> = match d.counterexample.as_deref_mut() {
            None => Vec::new(),
            Some(Counterexample::WaitCycle(links)) => {
                links.iter_mut().flat_map(|l| [&mut l.blocked_in, &mut l.not_reached]).collect()
            }
            Some(Counterexample::Mismatch(m)) => m.sides.iter_mut().filter_map(|s| s.1.as_mut()).collect(),
        };
        for (at, _) in steps.into_iter().filter_map(|s| s.source.as_mut()) {
            if let Some(file) = file_of(at) {
                *at = file;
            }
        }
    }
}

/// Verifies each program by itself.
fn check_programs(programs: &[Program], limits: &DeviceLimits) -> Diagnostics {
    let mut out: Diagnostics = programs.iter().flat_map(check_program).collect();
    if out.is_empty() && limits.graph_mixing_off {
        out.extend(programs.iter().flat_map(check_graph_mixing));
    }
    out
}

/// Verifies all ranks of each phase in which every rank has a program.
fn check_phases(programs: &[Program], listed_ranks: &BTreeMap<String, Vec<Rank>>) -> Diagnostics {
    let mut out = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for p in programs.iter().filter(|p| !p.role.is_empty()) {
        if !names.contains(&p.name.as_str()) {
            names.push(&p.name);
        }
    }
    for name in names {
        let phase: Vec<&Program> = programs.iter().filter(|p| !p.role.is_empty() && p.name == name).collect();
        let mesh = phase[0].mesh;
        match assign_ranks(&mesh, &phase, listed_ranks) {
            Ok(roles) => {
                let phase = Phase {
                    name: name.to_string(),
                    slots: vec![Slots::default(); phase.len()],
                    programs: phase.into_iter().cloned().collect(),
                };
                out.extend(check_phase(&mesh, &roles, &phase));
            }
            Err(why) => out.push(
                Diagnostic::warning(&T0026, format!("ranks of @{name} were not compared: {why}"))
                    .with_label("mesh", mesh.to_string())
                    .with_hint("put the programs of all roles into one file, or check the plan's folder"),
            ),
        }
    }
    out
}

/// Parses the comments at the head of a file that list the ranks of a role, for example `// ranks
/// b: 1 2`.
fn parse_role_ranks(source: &str) -> BTreeMap<String, Vec<Rank>> {
    let head = source.lines().map_while(|l| l.strip_prefix("//"));
    let ranks = head.filter_map(|l| l.trim().strip_prefix("ranks ")?.split_once(':'));
    ranks
        .filter_map(|(role, list)| {
            let list: Option<Vec<Rank>> = list.split_whitespace().map(|r| r.parse().ok().map(Rank)).collect();
            Some((role.trim().to_string(), list?))
        })
        .collect()
}

/// Determines the ranks of each program of a phase, or returns the reason why they are undefined.
fn assign_ranks(
    mesh: &Mesh,
    phase: &[&Program],
    listed_ranks: &BTreeMap<String, Vec<Rank>>,
) -> Result<Vec<RoleRanks>, String> {
    let names: Vec<&str> = phase.iter().map(|p| p.role.as_str()).collect();
    let roles = RoleRanks::assign_ranks(mesh, &names, listed_ranks);
    let assigned: BTreeSet<_> = roles.iter().flat_map(|r| &r.ranks).collect();
    if let Some(rank) = mesh.iter().find(|r| !assigned.contains(r)) {
        return Err(format!("no program for rank {rank}"));
    }
    match roles.iter().find(|r| r.ranks.is_empty()) {
        Some(idle) => Err(format!("no rank for role {}", idle.role)),
        None => Ok(roles),
    }
}

#[cfg(test)]
mod tests {
    use tessera_base::{Mismatch, Span, WaitEdge};

    use super::*;

    const STAGE0: &str = "program @p role(a@pp0) mesh(pp=2) {\n  %x = input : f32[3]\n  ttile.collective.send %x {axis = \"pp\", to = 1}\n}\n";
    const STAGE1: &str = "program @p role(a@pp1) mesh(pp=2) {\n  %x = ttile.collective.recv {axis = \"pp\", from = 0} : f32[3]\n  output \"x\", %x\n}\n";

    fn check_str(text: &str) -> FileCheck {
        check_text(text.to_string(), "x.tir", &DeviceLimits::default())
    }

    #[test]
    fn ranks_are_compared_where_every_rank_has_a_program() {
        let both = check_str(&format!("{STAGE0}{STAGE1}"));
        assert!(both.diagnostics.is_empty(), "{:#?}", both.diagnostics);
        assert_eq!((both.programs, both.digest.map(|d| d.len())), (2, Some(64)));
        let half = check_str(STAGE1);
        assert!(half.is_verified());
        assert_eq!(half.diagnostics[0].code, &T0026);
    }

    #[test]
    fn ranks_outside_the_mesh_need_a_role_of_their_own() {
        let program = |role: &str| {
            format!(
                "program @p role({role}) mesh(tp=2, outside=1) {{\n  %x = input : f32[3]\n  output \"x\", %x\n}}\n"
            )
        };
        let both = check_str(&format!("{}{}", program("r"), program("leader@out0")));
        assert!(both.diagnostics.is_empty(), "{:#?}", both.diagnostics);
        let mesh_alone = check_str(&program("r"));
        assert_eq!(mesh_alone.diagnostics[0].code, &T0026);
        assert!(mesh_alone.diagnostics[0].message.ends_with("no program for rank 0"));
        // The role name refers to a rank that does not exist.
        assert!(!check_str(&program("leader@out1")).is_verified());
    }

    #[test]
    fn counterexamples_point_into_the_file_too() {
        let step = |at: &str| RankCollective {
            description: String::new(),
            op: String::new(),
            dtype: String::new(),
            shape: String::new(),
            ranks: vec![0],
            stream: String::new(),
            index: 0,
            source: Some((at.to_string(), Span { start: 3, end: 4 })),
        };
        let link =
            WaitEdge { rank: 0, blocked_in: step("@p role(a) op 1"), not_reached: step("@p role(b) op 2") };
        let sides = [(0, Some(step("@p role(b) op 3"))), (1, None)];
        let m = Mismatch { group: String::new(), position: 0, field: String::new(), sides };
        let d = || {
            Diagnostic::error(&T0026, "").with_span_label(
                "rank 0, @p role(a) op 1, stream s",
                "x",
                Span::default(),
            )
        };
        let mut ds = [
            d().with_label("@p role(a) op 1", "no span")
                .with_counterexample(Counterexample::WaitCycle(vec![link])),
            d().with_counterexample(Counterexample::Mismatch(m)),
        ];
        map_places_to_files(&mut ds, &|at| at.contains("@p role(a)").then(|| "a.tir".to_string()));
        assert_eq!((&*ds[0].labels[0].location, &*ds[0].labels[1].location), ("a.tir", "@p role(a) op 1"));
        assert_eq!(ds[0].labels[0].message, "rank 0, @p role(a) op 1, stream s: x");
        let Some(Counterexample::WaitCycle(links)) = ds[0].counterexample.as_deref() else { panic!() };
        let at = |s: &RankCollective| s.source.as_ref().map(|s| s.0.clone());
        assert_eq!(
            (at(&links[0].blocked_in), at(&links[0].not_reached)),
            (Some("a.tir".into()), Some("@p role(b) op 2".into()))
        );
        map_places_to_files(&mut ds, &|_| Some("b.tir".to_string()));
        let Some(Counterexample::Mismatch(m)) = ds[1].counterexample.as_deref() else { panic!() };
        assert_eq!(m.sides[0].1.as_ref().and_then(at), Some("b.tir".into()));
    }

    #[test]
    fn verifier_diagnostics_point_into_the_file() {
        let swapped = STAGE1.replace("f32[3]", "f32[5]");
        let found = check_str(&format!("{STAGE0}{swapped}"));
        assert!(!found.is_verified());
        let places: Vec<_> =
            found.diagnostics.iter().flat_map(|d| &d.labels).filter(|p| p.span.is_some()).collect();
        assert!(!places.is_empty() && places.iter().all(|p| p.location == "x.tir"), "{places:#?}");
    }
}
