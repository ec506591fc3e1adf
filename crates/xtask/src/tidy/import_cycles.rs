//! Checks that the files of a crate import one another without cycles.
//!
//! Files of a cycle can be understood, tested and moved only together. A module and the modules
//! below it count as one place: their imports of one another are no cycle.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::tarjan_scc;
use petgraph::graph::DiGraph;

use super::Problem;
use super::module_tree::ModuleTree;
use super::source::Source;

/// The first import of each file from each other file: line and path.
type Imports<'s> = BTreeMap<(&'s str, &'s str), (usize, String)>;

/// Checks the files below `src` of every crate.
pub(super) fn check(sources: &[Source<'_>], found: &mut Vec<Problem>) {
    let imports = collect_imports(sources);
    found.extend(find_cycles(&imports).iter().map(|cycle| describe_cycle(cycle, &imports)));
}

/// Returns the largest sets of files that reach one another by imports.
fn find_cycles<'s>(imports: &Imports<'s>) -> Vec<BTreeSet<&'s str>> {
    let mut graph: DiGraph<&str, ()> = DiGraph::new();
    let files: BTreeSet<&str> = imports.keys().flat_map(|(from, to)| [*from, *to]).collect();
    let nodes: BTreeMap<&str, _> = files.into_iter().map(|file| (file, graph.add_node(file))).collect();
    for (from, to) in imports.keys() {
        graph.add_edge(nodes[from], nodes[to], ());
    }
    let groups = tarjan_scc(&graph).into_iter().filter(|group| group.len() > 1);
    groups.map(|group| group.into_iter().map(|node| graph[node]).collect()).collect()
}

/// Lists which file imports from which, except between a module and its descendants.
fn collect_imports<'s>(sources: &'s [Source<'_>]) -> Imports<'s> {
    let mut imports: Imports<'s> = BTreeMap::new();
    let is_root = |s: &&Source<'_>| s.path.ends_with("/src/lib.rs") || s.path.ends_with("/src/main.rs");
    for root in sources.iter().filter(is_root) {
        // The files of a crate lie side by side, because the sources are sorted by path.
        let first = sources.partition_point(|s| s.path < root.module_folder());
        let count = sources[first..].iter().take_while(|s| s.path.starts_with(root.module_folder())).count();
        let tree = ModuleTree::new(&sources[first..first + count], root);
        let ancestors = tree.ancestor_files();
        for reference in &tree.references {
            let from = tree.file(reference.module);
            let Some(to) = tree.defining_file(reference) else { continue };
            if from == to || ancestors[from].contains(to) || ancestors[to].contains(from) {
                continue;
            }
            imports.entry((from, to)).or_insert_with(|| (reference.line, reference.path.join("::")));
        }
    }
    imports
}

/// Names the files of a cycle and the first import of each from each other.
fn describe_cycle(cycle: &BTreeSet<&str>, imports: &Imports<'_>) -> Problem {
    let name = |path: &str| path.split_once("/src/").map_or(path, |(_, rest)| rest).to_string();
    let inside = imports.iter().filter(|((from, to), _)| cycle.contains(from) && cycle.contains(to));
    let edges: Vec<String> = inside
        .map(|((from, to), (line, path))| format!("{}:{line} imports {path} from {}", name(from), name(to)))
        .collect();
    let message = format!(
        "an import cycle of {} files: move what they share into a file that imports none of them ({})",
        cycle.len(),
        edges.join("; ")
    );
    Problem::new(cycle.first().copied().unwrap_or_default(), 0, message)
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;
    use crate::tree::Tree;

    fn problems(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<(String, &str)> =
            files.iter().map(|(p, t)| (format!("crates/a/src/{p}.rs"), *t)).collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        let tree = Tree::from_files(&files);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&sources, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    const LIB: (&str, &str) = ("lib", "mod x; mod y; pub use y::Y; pub use x::X as Renamed;");

    fn assert_cycle(x: &str, y: &str) {
        let found = problems(&[LIB, ("x", x), ("y", y)]);
        assert!(found.len() == 1 && found[0].contains("an import cycle of 2 files"), "{x} | {y}: {found:?}");
    }

    fn assert_none(files: &[(&str, &str)]) {
        assert_eq!(problems(files), Vec::<String>::new());
    }

    #[test]
    fn a_cycle_is_reported_with_its_imports() {
        let x = ("x", "use crate::y::Y;\npub struct X(Y);");
        let y = ("y", "pub struct Y;\nimpl Y { fn f() { super::x::X::g() } }");
        assert_eq!(
            problems(&[LIB, x, y]),
            [
                "crates/a/src/x.rs: an import cycle of 2 files: move what they share into a file that imports none of \
them (x.rs:1 imports crate::y::Y from y.rs; y.rs:2 imports super::x::X::g from x.rs)"
            ]
        );
    }

    #[test]
    fn paths_lead_through_reexports_renames_globs_modules_and_macros() {
        let y = "pub struct Y;\nuse crate::x::X;";
        for x in [
            "pub struct X; fn f(_: crate::Y) {}",
            "pub struct X; use super::*; fn f(_: Y) {}",
            "pub struct X; use crate::y::*; fn f(_: Y) {}",
            "pub struct X; use crate::y; fn f(_: y::Y) {}",
            "pub struct X; use crate::{y::{self as z}}; fn f(_: z::Y) {}",
            "pub struct X; fn f() { use crate::y; y::made_by_a_macro() }",
            "pub struct X; fn f() { println!(\"{}\", crate::y::Y) }",
            "pub struct X; macro_rules! m { () => { $crate::y::Y } }",
            "pub struct X; impl crate::y::T for X {}",
            "pub struct X; mod inner { use super::super::y::Y; }",
        ] {
            assert_cycle(x, y);
        }
        assert_cycle("pub struct X; use crate::y::Y;", "pub struct Y; fn f(_: crate::Renamed) {}");
    }

    #[test]
    fn imports_in_one_direction_of_modules_and_in_tests_are_no_cycle() {
        let y = ("y", "pub struct Y;\nuse crate::x::X;");
        for x in [
            "pub struct X;",
            "pub struct X; #[cfg(test)] mod tests { use crate::y::Y; }",
            "pub struct X; use crate::y;",
            "pub struct X; use y::Y; mod y { pub struct Y; }",
            "pub struct X; use std::collections::Y;",
            "pub struct X; // crate::y::Y",
        ] {
            assert_none(&[LIB, ("x", x), y]);
        }
    }

    #[test]
    fn a_module_and_its_descendants_may_import_each_other() {
        let x = ("x", "mod z; use z::Z; pub struct X;");
        assert_none(&[("lib", "mod x;"), x, ("x/z", "pub struct Z; use super::X;")]);
        let siblings = ("x", "mod z; mod w;");
        let found = problems(&[
            ("lib", "mod x;"),
            siblings,
            ("x/z", "pub struct Z; use super::w::W;"),
            ("x/w", "pub struct W; use crate::x::z::Z;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
