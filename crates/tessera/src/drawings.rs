//! Counterexamples as files: one drawing for each diagnostic that has one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, Span};
use tessera_report::counterexample_with_lines;

use crate::files::{unwritable, write_file};

/// A folder that drawings go to. One of an earlier check with the same name is replaced.
#[derive(Debug)]
pub struct Drawings {
    folder: PathBuf,
    /// Drawings so far of each code.
    drawn: BTreeMap<&'static str, usize>,
}

impl Drawings {
    /// Makes the folder if it is not there.
    ///
    /// # Errors
    /// T0014.
    pub fn create(folder: &Path) -> Result<Drawings, Diagnostic> {
        std::fs::create_dir_all(folder).map_err(|e| other_folder(unwritable(folder, &e)))?;
        Ok(Drawings { folder: folder.to_path_buf(), drawn: BTreeMap::new() })
    }

    /// Writes `T0311-1.svg` and so on for those diagnostics that have a counterexample, and gives the files. `source`
    /// gives the text of a file where it is at hand.
    ///
    /// # Errors
    /// T0014.
    pub fn add(
        &mut self,
        diagnostics: &[Diagnostic],
        source: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Vec<PathBuf>, Diagnostic> {
        let line = |file: &str, span: Span| {
            let text = source(file)?;
            Some(text.get(..span.start)?.matches('\n').count() + 1)
        };
        let mut written = Vec::new();
        for d in diagnostics {
            let Some(proof) = &d.counterexample else { continue };
            let n = self.drawn.entry(d.code.id).or_default();
            *n += 1;
            let path = self.folder.join(format!("{}-{n}.svg", d.code.id));
            let svg = counterexample_with_lines(proof, &format!("{}: {}", d.code.id, d.message), &line);
            write_file(&path, svg.as_bytes()).map_err(other_folder)?;
            written.push(path);
        }
        Ok(written)
    }
}

fn other_folder(mut d: Diagnostic) -> Diagnostic {
    d.hint = d.hint.map(|h| h.replace("--out", "--svg"));
    d
}

#[cfg(test)]
mod tests {
    use tessera_base::{Code, Counterexample, Link, Mismatch, Step};

    use super::*;

    static C: Code = Code { id: "T0399", title: "t", page: "p" };

    #[test]
    fn each_counterexample_becomes_a_file_that_names_lines() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let step = |start| Step {
            what: "send over pp".into(),
            op: "send".into(),
            dtype: "f32".into(),
            shape: "[3]".into(),
            ranks: vec![0, 1],
            stream: "s".into(),
            index: 7,
            source: Some(("x.tir".into(), Span { start, end: start + 1 })),
        };
        let link = |rank| Link { rank, holds: step(0), wants: step(4) };
        let circle =
            Diagnostic::error(&C, "a <circle>").proof(Counterexample::Circle(vec![link(0), link(1)]));
        let m = Mismatch {
            group: "pp".into(),
            position: 0,
            field: "op".into(),
            sides: [(0, Some(step(2))), (1, None)],
        };
        let mismatch = Diagnostic::error(&C, "m").proof(Counterexample::Mismatch(m));
        let mut drawings = Drawings::create(&folder).unwrap();
        let text = |f: &str| (f == "x.tir").then(|| "a\nb\nc\n".to_string());
        let first = drawings.add(&[Diagnostic::error(&C, "none"), circle], &text).unwrap();
        let second = drawings.add(&[mismatch], &text).unwrap();
        assert_eq!((first, second), (vec![folder.join("T0399-1.svg")], vec![folder.join("T0399-2.svg")]));
        let svg = std::fs::read_to_string(folder.join("T0399-1.svg")).unwrap();
        assert!(svg.contains("op 7, line 3") && svg.contains("T0399: a &lt;circle&gt;"), "{svg}");
        assert!(std::fs::read_to_string(folder.join("T0399-2.svg")).unwrap().contains("x.tir:2"));
    }

    #[test]
    fn a_place_that_takes_no_folder_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(Drawings::create(&file.join("x")).unwrap_err().code.id, "T0014");
    }
}
