//! The input of tidy, read once: the project's text files and the crates that `cargo metadata`
//! lists.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A text file of the workspace with its contents.
#[derive(Debug)]
pub(crate) struct File {
    /// Path relative to the workspace root, with `/` as separator.
    pub(crate) path: String,
    /// The whole file, decoded as UTF-8.
    pub(crate) text: String,
}

/// The part of a crate that needs a dependency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DependencyKind {
    /// The crate itself or its build script needs the dependency.
    Normal,
    /// Only tests, examples and benches need the dependency.
    Dev,
}

/// A crate of the workspace, as `cargo metadata` lists it.
#[derive(Debug)]
pub(crate) struct Member {
    /// Name, which is also the name of the crate's folder.
    pub(crate) name: String,
    /// Names and kinds of all dependencies, inside and outside of the workspace.
    pub(crate) dependencies: Vec<(String, DependencyKind)>,
}

/// The files and crates of the project.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Text files, sorted by path.
    pub(crate) files: Vec<File>,
    /// Paths of all files, including binary files.
    pub(crate) paths: BTreeSet<String>,
    /// Crates, sorted by name.
    pub(crate) members: Vec<Member>,
}

impl Tree {
    /// Reads the files below `root` that git does not ignore, and the crates of the workspace.
    pub(crate) fn read(root: &Path) -> Result<Tree> {
        let mut tree = Tree { members: read_members(root)?, ..Tree::default() };
        for path in list_paths(root)? {
            let full_path = root.join(&path);
            // Git still lists a file that was deleted but not committed.
            if !full_path.is_file() {
                continue;
            }
            if is_text_file(&path) {
                let text =
                    std::fs::read_to_string(&full_path).with_context(|| format!("cannot read {path}"))?;
                tree.files.push(File { path: path.clone(), text });
            }
            tree.paths.insert(path);
        }
        Ok(tree)
    }

    /// Returns the contents of the text file with this path, or `None` if the tree has no such
    /// file.
    pub(crate) fn file_text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|f| f.path == path).map(|f| f.text.as_str())
    }

    /// Returns whether a file or folder exists.
    pub(crate) fn contains(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        path.is_empty()
            || self.paths.contains(path)
            || self.paths.range(folder.clone()..).next().is_some_and(|p| p.starts_with(&folder))
    }

    /// Iterates over the files with the extension `rs`, tests and examples included.
    pub(crate) fn rust_files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|f| f.path.ends_with(".rs"))
    }
}

/// Returns the name of the crate that contains `path`.
pub(crate) fn owning_crate(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.split('/').next()
}

/// Extensions of the files whose contents are read. Other files, except `.ci/run`, are known by
/// path only.
const TEXT_EXTENSIONS: &[&str] = &["rs", "md", "toml", "tir", "py", "sh", "css", "html", "js", "yml", "yaml"];
/// Folders of generated files, skipped where git is not available to list the tracked ones.
const GENERATED_FOLDERS: &[&str] = &["target", "out", "plan", "__pycache__", ".git"];

/// The generated data of `tessera explain`, the only JSON file that is read.
pub(crate) const LIBRARY_DATA: &str = "docs/library/library.json";

fn is_text_file(path: &str) -> bool {
    path == ".ci/run"
        || path == LIBRARY_DATA
        || path.rsplit_once('.').is_some_and(|(_, extension)| TEXT_EXTENSIONS.contains(&extension))
}

/// Lists every path that git does not ignore or, without git, every path outside of
/// [`GENERATED_FOLDERS`].
fn list_paths(root: &Path) -> Result<Vec<String>> {
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
            walk_folder(root, "", &mut found)?;
            found
        }
    };
    found.sort();
    found.dedup();
    Ok(found)
}

/// Appends the paths of all files below `folder`.
fn walk_folder(root: &Path, folder: &str, found: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder}"))? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() && !GENERATED_FOLDERS.contains(&name.as_str()) {
            walk_folder(root, &path, found)?;
        } else if kind.is_file() {
            found.push(path);
        }
    }
    Ok(())
}

/// Reads the workspace's crates and their dependencies from `cargo metadata`.
fn read_members(root: &Path) -> Result<Vec<Member>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cannot start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    let metadata: Value =
        serde_json::from_slice(&out.stdout).context("cargo metadata printed invalid JSON")?;
    let mut members: Vec<Member> = as_list(&metadata["packages"])
        .iter()
        .map(|p| Member {
            name: as_string(&p["name"]),
            dependencies: as_list(&p["dependencies"])
                .iter()
                .map(|d| {
                    let dev = d["kind"].as_str() == Some("dev");
                    (as_string(&d["name"]), if dev { DependencyKind::Dev } else { DependencyKind::Normal })
                })
                .collect(),
        })
        .collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(members)
}

fn as_list(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

fn as_string(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_string()
}

#[cfg(test)]
impl Tree {
    /// Builds a synthetic project for tests.
    pub(crate) fn from_files(files: &[(&str, &str)]) -> Tree {
        Tree {
            files: files.iter().map(|(p, t)| File { path: p.to_string(), text: t.to_string() }).collect(),
            paths: files.iter().map(|(p, _)| p.to_string()).collect(),
            members: Vec::new(),
        }
    }

    /// Adds a crate with its dependencies to the members, but no files of the crate.
    pub(crate) fn with_crate(mut self, name: &str, dependencies: &[(&str, DependencyKind)]) -> Tree {
        let dependencies = dependencies.iter().map(|(n, k)| (n.to_string(), *k)).collect();
        self.members.push(Member { name: name.to_string(), dependencies });
        self
    }
}
