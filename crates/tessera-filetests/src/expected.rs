//! The output written at the end of a file against what came out.

use crate::EXPECT;
use crate::header::Header;

/// Differences between a file's expected block and `found`, line by line; numbers may differ by the file's tolerance.
pub(crate) fn compare(text: &str, found: &str) -> Vec<String> {
    let tolerance = Header::read(text).map_or(0.0, |h| h.tolerance);
    let Some((_, written)) = text.split_once(EXPECT) else {
        return vec![format!("no `{EXPECT}` block; what came out:\n{found}")];
    };
    let written: Vec<&str> = written.lines().skip(1).map(|l| l.strip_prefix("// ").unwrap_or("")).collect();
    let found: Vec<&str> = found.lines().collect();
    let mut wrong = Vec::new();
    for i in 0..written.len().max(found.len()) {
        let (w, f) = (written.get(i).copied().unwrap_or(""), found.get(i).copied().unwrap_or(""));
        if !same(w, f, tolerance) {
            wrong.push(format!("expected: {w}\n   found: {f}"));
        }
    }
    wrong
}

fn same(written: &str, found: &str, tolerance: f64) -> bool {
    let (w, f): (Vec<&str>, Vec<&str>) = (written.split(' ').collect(), found.split(' ').collect());
    w.len() == f.len()
        && w.iter().zip(&f).all(|(w, f)| {
            w == f
                || match (w.parse::<f64>(), f.parse::<f64>()) {
                    (Ok(w), Ok(f)) => (w - f).abs() <= tolerance * w.abs().max(1.0),
                    _ => false,
                }
        })
}
