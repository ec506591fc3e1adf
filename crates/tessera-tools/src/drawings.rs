//! Writes counterexamples as SVG files, one for each diagnostic that has a counterexample.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, Span};
use tessera_report::draw_counterexample_with_lines;

use tessera::files::{write_error, write_file};

/// A folder for drawings. Drawings of an earlier check with the same name are overwritten.
#[derive(Debug)]
pub struct DrawingDir {
    folder: PathBuf,
    /// Number of drawings so far by diagnostic code.
    counts: BTreeMap<&'static str, usize>,
}

impl DrawingDir {
    /// Creates the folder if it does not exist.
    ///
    /// # Errors
    /// T0014 if the folder cannot be created.
    pub fn create_in(folder: &Path) -> Result<DrawingDir, Diagnostic> {
        std::fs::create_dir_all(folder).map_err(|e| mention_svg_flag(write_error(folder, &e)))?;
        Ok(DrawingDir { folder: folder.to_path_buf(), counts: BTreeMap::new() })
    }

    /// Writes a drawing for each diagnostic that has a counterexample, named `T0311-1.svg` and so
    /// on, and returns the paths. `source` returns the text of a file if it is available.
    ///
    /// # Errors
    /// T0014 if a file cannot be written.
    pub fn write_drawings(
        &mut self,
        diagnostics: &[Diagnostic],
        source: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Vec<PathBuf>, Diagnostic> {
        let line_number = |file: &str, span: Span| {
            let text = source(file)?;
            Some(text.get(..span.start)?.matches('\n').count() + 1)
        };
        let mut written = Vec::new();
        for d in diagnostics {
            let Some(proof) = &d.counterexample else { continue };
            let n = self.counts.entry(d.code.id).or_default();
            *n += 1;
            let path = self.folder.join(format!("{}-{n}.svg", d.code.id));
            let svg =
                draw_counterexample_with_lines(proof, &format!("{}: {}", d.code.id, d.message), &line_number);
            write_file(&path, svg.as_bytes()).map_err(mention_svg_flag)?;
            written.push(path);
        }
        Ok(written)
    }
}

fn mention_svg_flag(mut d: Diagnostic) -> Diagnostic {
    d.hint = d.hint.map(|h| h.replace("--out", "--svg"));
    d
}

#[cfg(test)]
mod tests {
    use tessera_base::{Code, Counterexample, Mismatch, RankCollective, WaitEdge};

    use super::*;

    static C: Code = Code { id: "T0399", title: "t", page: "p" };

    #[test]
    fn each_counterexample_becomes_a_file_with_line_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let step = |start| RankCollective {
            description: "send over pp".into(),
            op: "send".into(),
            dtype: "f32".into(),
            shape: "[3]".into(),
            ranks: vec![0, 1],
            stream: "s".into(),
            index: 7,
            source: Some(("x.tir".into(), Span { start, end: start + 1 })),
        };
        let link = |rank| WaitEdge { rank, blocked_in: step(0), not_reached: step(4) };
        let cycle = Diagnostic::error(&C, "a <cycle>")
            .with_counterexample(Counterexample::WaitCycle(vec![link(0), link(1)]));
        let m = Mismatch {
            group: "pp".into(),
            position: 0,
            field: "op".into(),
            sides: [(0, Some(step(2))), (1, None)],
        };
        let mismatch = Diagnostic::error(&C, "m").with_counterexample(Counterexample::Mismatch(m));
        let mut drawings = DrawingDir::create_in(&folder).unwrap();
        let text = |f: &str| (f == "x.tir").then(|| "a\nb\nc\n".to_string());
        let first = drawings.write_drawings(&[Diagnostic::error(&C, "none"), cycle], &text).unwrap();
        let second = drawings.write_drawings(&[mismatch], &text).unwrap();
        assert_eq!((first, second), (vec![folder.join("T0399-1.svg")], vec![folder.join("T0399-2.svg")]));
        let svg = std::fs::read_to_string(folder.join("T0399-1.svg")).unwrap();
        assert!(svg.contains("op 7, line 3") && svg.contains("T0399: a &lt;cycle&gt;"), "{svg}");
        assert!(std::fs::read_to_string(folder.join("T0399-2.svg")).unwrap().contains("x.tir:2"));
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(DrawingDir::create_in(&file.join("x")).unwrap_err().code.id, "T0014");
    }
}
