//! Manifests: every crate inherits what the workspace decides.

use super::Problem;
use crate::tree::Tree;

/// Package fields that the workspace decides.
const INHERITED: &[&str] = &["version", "edition", "rust-version", "license", "publish"];
/// Tables of dependencies.
const TABLES: &[&str] = &["dependencies", "dev-dependencies", "build-dependencies"];

pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    for member in &tree.members {
        let path = format!("crates/{}/Cargo.toml", member.name);
        let Some(text) = tree.text(&path) else { continue };
        let Ok(manifest) = text.parse::<toml::Table>() else {
            found.push(Problem::new(&path, 0, "is no TOML"));
            continue;
        };
        let inherits = |v: Option<&toml::Value>| {
            v.and_then(|v| v.get("workspace")).and_then(toml::Value::as_bool) == Some(true)
        };
        for field in INHERITED {
            if !inherits(manifest.get("package").and_then(|p| p.get(*field))) {
                found.push(Problem::new(&path, 0, format!("write `{field}.workspace = true` in [package]")));
            }
        }
        if !inherits(manifest.get("lints")) {
            found.push(Problem::new(&path, 0, "write `workspace = true` in [lints]"));
        }
        let per_target = manifest.get("target").and_then(toml::Value::as_table);
        let tables = std::iter::once(&manifest)
            .chain(per_target.into_iter().flat_map(|t| t.values()).filter_map(toml::Value::as_table));
        for (name, needed) in tables
            .flat_map(|t| TABLES.iter().filter_map(|k| t.get(*k)))
            .filter_map(toml::Value::as_table)
            .flatten()
        {
            if !inherits(Some(needed)) {
                let says = format!("`{name}`: name its version in the root's [workspace.dependencies] alone");
                found.push(Problem::new(&path, 0, says));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_inherited_is_told() {
        let text = "[package]\nname = \"a\"\nversion.workspace = true\nedition = \"2021\"\n\
rust-version.workspace = true\nlicense.workspace = true\npublish.workspace = true\n\
[dependencies]\nserde = \"1\"\ntoml = { workspace = true }\n";
        let tree = Tree::of(&[("crates/a/Cargo.toml", text)]).with("a", &[]);
        let mut found = Vec::new();
        check(&tree, &mut found);
        let said: Vec<&str> = found.iter().map(|p| p.says.as_str()).collect();
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(said[0].contains("edition") && said[1].contains("[lints]") && said[2].contains("serde"));
    }
}
