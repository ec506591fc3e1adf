//! Lints Python files and the Python files of folders.

use std::path::{Path, PathBuf};

use tessera::files::read_file;
use tessera_base::{Diagnostic, Diagnostics};
use tessera_torch::codes::T1430;
use tessera_torch::lint::{FILE_LIMIT_BYTES, lint_python, too_large};

/// What was found in a set of files.
#[derive(Debug, Default)]
pub struct LintSummary {
    /// Files that were read.
    pub files: usize,
    /// The findings, by file in the order of paths.
    pub findings: Diagnostics,
    /// Findings that comments suppress.
    pub suppressed: usize,
    /// Findings beyond the first of a file, which are only counted.
    pub omitted: usize,
}

/// Lints files, and in folders all files that end in `.py`. Hidden folders and links are skipped.
///
/// # Errors
/// T1430 if a path names nothing, or a folder without Python files.
pub fn lint_paths(paths: &[PathBuf]) -> Result<LintSummary, Diagnostic> {
    let mut files = Vec::new();
    for path in paths {
        let before = files.len();
        if path.is_dir() {
            collect_sources(path, &mut files);
        } else if path.exists() {
            files.push(path.clone());
        }
        if files.len() == before {
            let what = if path.is_dir() { "holds no file that ends in .py" } else { "does not exist" };
            return Err(Diagnostic::error(&T1430, format!("{} {what}", path.display())));
        }
    }
    files.sort();
    files.dedup();
    let mut summary = LintSummary { files: files.len(), ..LintSummary::default() };
    for file in files {
        let name = file.display().to_string();
        match read_source(&file) {
            Ok(text) => {
                let report = lint_python(&name, &text);
                summary.findings.extend(report.findings);
                summary.suppressed += report.suppressed;
                summary.omitted += report.omitted;
            }
            Err(finding) => summary.findings.push(finding),
        }
    }
    Ok(summary)
}

/// Reads a Python file.
///
/// # Errors
/// T1430 if it cannot be read, is too large, or is not UTF-8.
pub fn read_source(path: &Path) -> Result<String, Diagnostic> {
    let name = path.display().to_string();
    let length = std::fs::metadata(path).map_or(0, |m| m.len());
    if length > FILE_LIMIT_BYTES {
        return Err(too_large(&name, length));
    }
    let refuse = |why: String| Diagnostic::error(&T1430, format!("{name} cannot be read: {why}"));
    let bytes = read_file(path, FILE_LIMIT_BYTES).map_err(|e| refuse(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| refuse(e.utf8_error().to_string()))
}

/// Adds the Python files of a folder. What cannot be listed is skipped, as it holds nothing that can be read.
fn collect_sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && !is_hidden => collect_sources(&path, out),
            Ok(kind) if kind.is_file() && path.extension().is_some_and(|e| e == "py") => out.push(path),
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_walked_and_unreadable_files_are_findings() {
        let dir = tempfile::tempdir().unwrap();
        assert!(lint_paths(&[dir.path().to_path_buf()]).unwrap_err().message.contains("no file"));
        std::fs::create_dir_all(dir.path().join("a/.hidden")).unwrap();
        let bad = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier()\n";
        for name in ["a/one.py", "a/.hidden/two.py", "a/three.txt"] {
            std::fs::write(dir.path().join(name), bad).unwrap();
        }
        std::fs::write(dir.path().join("latin.py"), b"x = '\xe9'\n").unwrap();
        std::fs::write(dir.path().join("big.py"), vec![b'#'; (1 << 20) + 1]).unwrap();
        let summary = lint_paths(&[dir.path().to_path_buf()]).unwrap();
        let codes: Vec<&str> = summary.findings.iter().map(|d| d.code.id).collect();
        assert_eq!((summary.files, codes), (3, vec!["T1435", "T1430", "T1430"]));
        assert!(lint_paths(&[dir.path().join("none.py")]).is_err());
    }
}
