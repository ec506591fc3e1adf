//! Checks that every `Cargo.toml` inherits its package fields, lints and dependency versions from
//! the workspace, and that its library is built for unit tests exactly if it has some.

use super::Problem;
use crate::tree::Tree;

/// Package fields that every crate inherits.
const INHERITED_FIELDS: &[&str] = &["version", "edition", "rust-version", "license", "publish"];
/// Tables of a manifest whose entries must inherit their version from the workspace.
const DEPENDENCY_TABLES: &[&str] = &["dependencies", "dev-dependencies", "build-dependencies"];

/// Reports each package field, lint table and dependency version that a crate does not inherit.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    for member in &tree.members {
        let path = format!("crates/{}/Cargo.toml", member.name);
        let Some(text) = tree.file_text(&path) else { continue };
        let Ok(manifest) = text.parse::<toml::Table>() else {
            found.push(Problem::new(&path, 0, "the file is not valid TOML: correct it"));
            continue;
        };
        let inherits = |v: Option<&toml::Value>| {
            v.and_then(|v| v.get("workspace")).and_then(toml::Value::as_bool) == Some(true)
        };
        for field in INHERITED_FIELDS {
            if !inherits(manifest.get("package").and_then(|p| p.get(*field))) {
                found.push(Problem::new(&path, 0, format!("write `{field}.workspace = true` in [package]")));
            }
        }
        if !inherits(manifest.get("lints")) {
            found.push(Problem::new(&path, 0, "write `workspace = true` in [lints]"));
        }
        check_test_build(tree, &path, &manifest, found);
        let per_target = manifest.get("target").and_then(toml::Value::as_table);
        let tables = std::iter::once(&manifest)
            .chain(per_target.into_iter().flat_map(|t| t.values()).filter_map(toml::Value::as_table));
        for (name, dependency) in tables
            .flat_map(|t| DEPENDENCY_TABLES.iter().filter_map(|k| t.get(*k)))
            .filter_map(toml::Value::as_table)
            .flatten()
        {
            if !inherits(Some(dependency)) {
                let message = format!(
                    "`{name}`: state the version in the root's [workspace.dependencies] only, and write `workspace = true` here"
                );
                found.push(Problem::new(&path, 0, message));
            }
        }
    }
}

/// Reports a library that skips unit tests which it has, and one without unit tests that cargo builds
/// once more as a test binary.
fn check_test_build(tree: &Tree, path: &str, manifest: &toml::Table, found: &mut Vec<Problem>) {
    let folder = path.replace("Cargo.toml", "src/");
    let has_test = |text: &str| text.lines().any(|line| line.trim_start().starts_with("#[test]"));
    let has_tests = tree.rust_files().any(|f| f.path.starts_with(&folder) && has_test(&f.text));
    let is_built = manifest.get("lib").and_then(|lib| lib.get("test")?.as_bool()) != Some(false);
    let message = match (is_built, has_tests) {
        (true, false) if tree.contains(&format!("{folder}lib.rs")) => {
            "write `test = false` in [lib]: the library has no unit tests"
        }
        (false, true) => "remove `test = false` from [lib]: the library has unit tests",
        _ => return,
    };
    found.push(Problem::new(path, 0, message));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_are_not_inherited_are_reported() {
        let text = "[package]\nname = \"a\"\nversion.workspace = true\nedition = \"2021\"\n\
rust-version.workspace = true\nlicense.workspace = true\npublish.workspace = true\n\
[dependencies]\nserde = \"1\"\ntoml = { workspace = true }\n";
        let tree = Tree::from_files(&[("crates/a/Cargo.toml", text)]).with_crate("a", &[]);
        let mut found = Vec::new();
        check(&tree, &mut found);
        let messages: Vec<&str> = found.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages.len(), 3, "{messages:?}");
        assert!(
            messages[0].contains("edition")
                && messages[1].contains("[lints]")
                && messages[2].contains("serde")
        );
    }

    #[test]
    fn a_library_is_built_for_unit_tests_exactly_if_it_has_some() {
        let problems = |manifest: &str, source: &str| {
            let tree =
                Tree::from_files(&[("crates/a/Cargo.toml", manifest), ("crates/a/src/lib.rs", source)]);
            let mut found = Vec::new();
            check_test_build(&tree, "crates/a/Cargo.toml", &manifest.parse().unwrap(), &mut found);
            found.into_iter().map(|p| p.message).collect::<Vec<_>>()
        };
        let (code, test, off) = ("fn a() {}\n", "#[test]\nfn b() {}\n", "[lib]\ntest = false\n");
        assert_eq!(problems(off, code), Vec::<String>::new());
        assert_eq!(problems("", test), Vec::<String>::new());
        assert_eq!(problems("", code), ["write `test = false` in [lib]: the library has no unit tests"]);
        assert_eq!(problems(off, test), ["remove `test = false` from [lib]: the library has unit tests"]);
    }
}
