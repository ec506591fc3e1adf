//! What tidy looks at, read once: the project's text files and what cargo says of its crates.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A text file.
#[derive(Debug)]
pub(crate) struct File {
    /// From the root, with `/`.
    pub(crate) path: String,
    /// Contents.
    pub(crate) text: String,
}

/// When a crate is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// To build it, or by its build script.
    Always,
    /// By its tests, examples and benches alone.
    Dev,
}

/// A crate of the workspace.
#[derive(Debug)]
pub(crate) struct Member {
    /// Name, the same as its folder's.
    pub(crate) name: String,
    /// Crates it depends on, of the workspace or not.
    pub(crate) needs: Vec<(String, When)>,
}

/// The project.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Text files in order of path.
    pub(crate) files: Vec<File>,
    /// Every path, of files that are no text too.
    pub(crate) paths: BTreeSet<String>,
    /// Crates in order of name.
    pub(crate) members: Vec<Member>,
}

impl Tree {
    /// Reads the project at `root`.
    pub(crate) fn read(root: &Path) -> Result<Tree> {
        let mut tree = Tree { members: members(root)?, ..Tree::default() };
        for path in paths(root)? {
            let at = root.join(&path);
            // A file that git still lists but a person has just removed.
            if !at.is_file() {
                continue;
            }
            if is_text(&path) {
                let text = std::fs::read_to_string(&at).with_context(|| format!("cannot read {path}"))?;
                tree.files.push(File { path: path.clone(), text });
            }
            tree.paths.insert(path);
        }
        Ok(tree)
    }

    /// The text of a file.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|f| f.path == path).map(|f| f.text.as_str())
    }

    /// Whether a file or folder is there.
    pub(crate) fn has(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        path.is_empty()
            || self.paths.contains(path)
            || self.paths.range(folder.clone()..).next().is_some_and(|p| p.starts_with(&folder))
    }

    /// Rust sources.
    pub(crate) fn sources(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|f| f.path.ends_with(".rs"))
    }
}

/// The crate that a path belongs to.
pub(crate) fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.split('/').next()
}

/// Endings of files that people write.
const TEXT: &[&str] = &["rs", "md", "toml", "tir", "py", "sh", "css", "html", "js", "yml", "yaml"];
/// Folders that hold what was made, where git is not at hand to say so.
const MADE: &[&str] = &["target", "out", "plan", "__pycache__", ".git"];

fn is_text(path: &str) -> bool {
    path == ".ci/run" || path.rsplit_once('.').is_some_and(|(_, ending)| TEXT.contains(&ending))
}

/// Every path that git does not ignore; without git, every path outside of folders of made things.
fn paths(root: &Path) -> Result<Vec<String>> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output();
    let mut found = match git {
        Ok(out) if out.status.success() && !out.stdout.is_empty() => {
            String::from_utf8(out.stdout)?.split('\0').filter(|p| !p.is_empty()).map(String::from).collect()
        }
        _ => {
            let mut found = Vec::new();
            walk(root, "", &mut found)?;
            found
        }
    };
    found.sort();
    found.dedup();
    Ok(found)
}

fn walk(root: &Path, folder: &str, found: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder}"))? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() && !MADE.contains(&name.as_str()) {
            walk(root, &path, found)?;
        } else if kind.is_file() {
            found.push(path);
        }
    }
    Ok(())
}

fn members(root: &Path) -> Result<Vec<Member>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cannot start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    let told: Value = serde_json::from_slice(&out.stdout).context("cargo metadata printed no JSON")?;
    let mut members: Vec<Member> = list(&told["packages"])
        .iter()
        .map(|p| Member {
            name: word(&p["name"]),
            needs: list(&p["dependencies"])
                .iter()
                .map(|d| {
                    let dev = d["kind"].as_str() == Some("dev");
                    (word(&d["name"]), if dev { When::Dev } else { When::Always })
                })
                .collect(),
        })
        .collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(members)
}

fn list(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

fn word(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_string()
}

#[cfg(test)]
impl Tree {
    /// A made-up project.
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        Tree {
            files: files.iter().map(|(p, t)| File { path: p.to_string(), text: t.to_string() }).collect(),
            paths: files.iter().map(|(p, _)| p.to_string()).collect(),
            members: Vec::new(),
        }
    }

    /// With a crate and what it needs.
    pub(crate) fn with(mut self, name: &str, needs: &[(&str, When)]) -> Tree {
        let needs = needs.iter().map(|(n, w)| (n.to_string(), *w)).collect();
        self.members.push(Member { name: name.to_string(), needs });
        self
    }
}
