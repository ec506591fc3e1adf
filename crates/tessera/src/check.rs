//! Judges the programs of a `.tir` file: each alone, then all ranks of each phase where every rank has one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Step};
use tessera_ir::{Phase, Program, RoleRanks, Slots, digest, is_fragment, parse_all, parse_fragment};
use tessera_mesh::{Mesh, Rank};
pub use tessera_verify::Limits;
use tessera_verify::{check_graph_mixing, check_phase, check_program};

use crate::files::read_text;

/// A program file that cannot be read.
pub static T0025: Code = Code {
    id: "T0025",
    title: "program file cannot be read",
    page: "A program file is UTF-8 text, usually named .tir, with one program or more. The operating system refused to \
open it, or it holds something else or nothing. To check a whole plan, name the plan's folder instead.",
};
/// Ranks that nobody plays, so that ranks cannot be compared.
pub static T0026: Code = Code {
    id: "T0026",
    title: "ranks of a phase were not compared",
    page: "A file's programs can be judged across ranks only when every rank of their mesh plays one of them. The name of a \
role says which ranks play it: `role(a@tp1)` begins at position 1 of tp and goes on to the next role that names tp; a name \
without coordinates means every rank of the mesh. Where ranks stand outside the mesh, `role(a@out0)` begins at the first \
of them likewise, and they play no other role. A comment at the head of the file says it outright: `// ranks a: 0 3`. Here a rank has no role, or a role has no rank, so each program was judged by \
itself only: whether the ranks would wait for each other is not known. Put the programs of all roles into one file, or \
check a plan's folder, which lists the ranks of each role: a single program of a plan is judged by itself.",
};

/// What was found in a file.
#[derive(Debug, Clone, Default)]
pub struct Checked {
    /// What the parser and the judge say. No error means verified.
    pub diagnostics: Diagnostics,
    /// The file's text, for positions.
    pub source: String,
    /// Programs in the file.
    pub programs: usize,
    /// 64 hex digits over the canonical text of all programs; none when the file cannot be parsed.
    pub digest: Option<String>,
}

impl Checked {
    /// Whether the judge accepts everything in the file.
    #[must_use]
    pub fn verified(&self) -> bool {
        !self.diagnostics.iter().any(Diagnostic::is_error)
    }
}

/// Reads and judges a file; of `limits` only the mixing of graphs applies to it. Whatever is wrong is in the result.
#[must_use]
pub fn check_file(path: &Path, limits: &Limits) -> Checked {
    let name = path.display().to_string();
    match read_text(path, &T0025) {
        Ok(text) => match path.parent().and_then(Path::parent).filter(|p| p.join("seal.json").exists()) {
            // The plan says which ranks play its roles; a single program of it cannot be compared with others.
            Some(plan) => check(text, &name, Some(plan), limits),
            None => check_text(text, &name, limits),
        },
        Err(d) => Checked { diagnostics: vec![d], ..Checked::default() },
    }
}

/// Judges a text; `name` stands in diagnostics.
#[must_use]
pub fn check_text(source: String, name: &str, limits: &Limits) -> Checked {
    check(source, name, None, limits)
}

fn check(source: String, name: &str, plan: Option<&Path>, limits: &Limits) -> Checked {
    if is_fragment(&source) {
        let diagnostics = parse_fragment(&source, name).map_or_else(|ds| ds, |f| f.review(name));
        return Checked { diagnostics, source, ..Checked::default() };
    }
    let programs = match parse_all(&source, name) {
        Ok(programs) => programs,
        Err(diagnostics) => return Checked { diagnostics, source, ..Checked::default() },
    };
    if programs.is_empty() {
        let d = Diagnostic::error(&T0025, format!("{name} holds no program"));
        let d = d.at(name, format!("{} bytes", source.len())).hint("a program begins with `program @name`");
        return Checked { diagnostics: vec![d], source, ..Checked::default() };
    }
    let mut diagnostics = alone(&programs, limits);
    match plan {
        Some(plan) if diagnostics.is_empty() => {
            let message = format!("ranks were not compared: {name} belongs to the plan {}", plan.display());
            let d = Diagnostic::warning(&T0026, message).at(name, "one program of the plan");
            diagnostics.push(d.hint(format!("tessera check {}", plan.display())));
        }
        None if diagnostics.is_empty() => diagnostics = together(&programs, &written_ranks(&source)),
        _ => {}
    }
    // The judge names an op; its span is of this file.
    name_files(&mut diagnostics, &|_| Some(name.to_string()));
    let mut hash = blake3::Hasher::new();
    programs.iter().for_each(|p| {
        hash.update(&digest(p));
    });
    let digest = Some(hash.finalize().to_hex().to_string());
    Checked { diagnostics, source, programs: programs.len(), digest }
}

/// Turns places in ops, as the judge names them, into places in files: `file_of` gives the file of an op, named as
/// `@phase role(r) op 3` with or without more around it. Counterexamples follow.
pub(crate) fn name_files(diagnostics: &mut [Diagnostic], file_of: &dyn Fn(&str) -> Option<String>) {
    for d in diagnostics {
        for place in d.places.iter_mut().filter(|p| p.span.is_some()) {
            if let Some(file) = file_of(&place.at).filter(|f| *f != place.at) {
                place.says = format!("{}: {}", place.at, place.says);
                place.at = file;
            }
        }
        let steps: Vec<&mut Step> = match d.counterexample.as_deref_mut() {
            None => Vec::new(),
            Some(Counterexample::Circle(links)) => {
                links.iter_mut().flat_map(|l| [&mut l.holds, &mut l.wants]).collect()
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

/// Each program by itself.
fn alone(programs: &[Program], limits: &Limits) -> Diagnostics {
    let mut out: Diagnostics = programs.iter().flat_map(check_program).collect();
    if out.is_empty() && limits.graph_mixing_off {
        out.extend(programs.iter().flat_map(check_graph_mixing));
    }
    out
}

/// All ranks of each phase, where every rank has a program.
fn together(programs: &[Program], written: &BTreeMap<String, Vec<Rank>>) -> Diagnostics {
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
        match cast(&mesh, &phase, written) {
            Ok(roles) => {
                let phase = Phase {
                    name: name.to_string(),
                    memory: vec![Slots::default(); phase.len()],
                    programs: phase.into_iter().cloned().collect(),
                };
                out.extend(check_phase(&mesh, &roles, &phase));
            }
            Err(why) => out.push(
                Diagnostic::warning(&T0026, format!("ranks of @{name} were not compared: {why}"))
                    .at("mesh", mesh.to_string())
                    .hint("put the programs of all roles into one file, or check the plan's folder"),
            ),
        }
    }
    out
}

/// Ranks of roles as comments at the head of a file say: `// ranks b: 1 2`.
fn written_ranks(source: &str) -> BTreeMap<String, Vec<Rank>> {
    let head = source.lines().map_while(|l| l.strip_prefix("//"));
    let ranks = head.filter_map(|l| l.trim().strip_prefix("ranks ")?.split_once(':'));
    ranks
        .filter_map(|(role, list)| {
            let list: Option<Vec<Rank>> = list.split_whitespace().map(|r| r.parse().ok().map(Rank)).collect();
            Some((role.trim().to_string(), list?))
        })
        .collect()
}

/// Which ranks play each program of a phase, or why that is not clear.
fn cast(
    mesh: &Mesh,
    phase: &[&Program],
    written: &BTreeMap<String, Vec<Rank>>,
) -> Result<Vec<RoleRanks>, String> {
    let names: Vec<&str> = phase.iter().map(|p| p.role.as_str()).collect();
    let roles = RoleRanks::cast(mesh, &names, written);
    let played: BTreeSet<_> = roles.iter().flat_map(|r| &r.ranks).collect();
    if let Some(rank) = mesh.iter().find(|r| !played.contains(r)) {
        return Err(format!("no program for rank {rank}"));
    }
    match roles.iter().find(|r| r.ranks.is_empty()) {
        Some(idle) => Err(format!("no rank for role {}", idle.role)),
        None => Ok(roles),
    }
}

#[cfg(test)]
mod tests {
    use tessera_base::{Link, Mismatch, Span};

    use super::*;

    const STAGE0: &str = "program @p role(a@pp0) mesh(pp=2) {\n  %x = input : f32[3]\n  ttile.collective.send %x {axis = \"pp\", to = 1}\n}\n";
    const STAGE1: &str = "program @p role(a@pp1) mesh(pp=2) {\n  %x = ttile.collective.recv {axis = \"pp\", from = 0} : f32[3]\n  output \"x\", %x\n}\n";

    fn check(text: &str) -> Checked {
        check_text(text.to_string(), "x.tir", &Limits::default())
    }

    #[test]
    fn ranks_are_compared_where_every_rank_has_a_program() {
        let both = check(&format!("{STAGE0}{STAGE1}"));
        assert!(both.diagnostics.is_empty(), "{:#?}", both.diagnostics);
        assert_eq!((both.programs, both.digest.map(|d| d.len())), (2, Some(64)));
        let half = check(STAGE1);
        assert!(half.verified());
        assert_eq!(half.diagnostics[0].code, &T0026);
    }

    #[test]
    fn ranks_outside_the_mesh_need_a_role_of_their_own() {
        let program = |role: &str| {
            format!(
                "program @p role({role}) mesh(tp=2, outside=1) {{\n  %x = input : f32[3]\n  output \"x\", %x\n}}\n"
            )
        };
        let both = check(&format!("{}{}", program("r"), program("leader@out0")));
        assert!(both.diagnostics.is_empty(), "{:#?}", both.diagnostics);
        let mesh_alone = check(&program("r"));
        assert_eq!(mesh_alone.diagnostics[0].code, &T0026);
        assert!(mesh_alone.diagnostics[0].message.ends_with("no program for rank 0"));
        // The name stands for a rank that there is not.
        assert!(!check(&program("leader@out1")).verified());
    }

    #[test]
    fn counterexamples_point_into_the_file_too() {
        let step = |at: &str| Step {
            what: String::new(),
            op: String::new(),
            dtype: String::new(),
            shape: String::new(),
            ranks: vec![0],
            stream: String::new(),
            index: 0,
            source: Some((at.to_string(), Span { start: 3, end: 4 })),
        };
        let link = Link { rank: 0, holds: step("@p role(a) op 1"), wants: step("@p role(b) op 2") };
        let sides = [(0, Some(step("@p role(b) op 3"))), (1, None)];
        let m = Mismatch { group: String::new(), position: 0, field: String::new(), sides };
        let d = || {
            Diagnostic::error(&T0026, "").at_span("rank 0, @p role(a) op 1, stream s", "x", Span::default())
        };
        let mut ds = [
            d().at("@p role(a) op 1", "no span").proof(Counterexample::Circle(vec![link])),
            d().proof(Counterexample::Mismatch(m)),
        ];
        name_files(&mut ds, &|at| at.contains("@p role(a)").then(|| "a.tir".to_string()));
        assert_eq!((&*ds[0].places[0].at, &*ds[0].places[1].at), ("a.tir", "@p role(a) op 1"));
        assert_eq!(ds[0].places[0].says, "rank 0, @p role(a) op 1, stream s: x");
        let Some(Counterexample::Circle(links)) = ds[0].counterexample.as_deref() else { panic!() };
        let at = |s: &Step| s.source.as_ref().map(|s| s.0.clone());
        assert_eq!(
            (at(&links[0].holds), at(&links[0].wants)),
            (Some("a.tir".into()), Some("@p role(b) op 2".into()))
        );
        name_files(&mut ds, &|_| Some("b.tir".to_string()));
        let Some(Counterexample::Mismatch(m)) = ds[1].counterexample.as_deref() else { panic!() };
        assert_eq!(m.sides[0].1.as_ref().and_then(at), Some("b.tir".into()));
    }

    #[test]
    fn the_judge_points_into_the_file() {
        let swapped = STAGE1.replace("f32[3]", "f32[5]");
        let found = check(&format!("{STAGE0}{swapped}"));
        assert!(!found.verified());
        let places: Vec<_> =
            found.diagnostics.iter().flat_map(|d| &d.places).filter(|p| p.span.is_some()).collect();
        assert!(!places.is_empty() && places.iter().all(|p| p.at == "x.tir"), "{places:#?}");
    }
}
