//! Compares the output at the end of a file with the actual output.

use crate::EXPECT_HEADING;
use crate::header::Header;

/// Lists the lines in which a file's expected block and `found` differ. Numbers may differ by the
/// file's tolerance.
pub(crate) fn compare_output(text: &str, found: &str) -> Vec<String> {
    let tolerance = Header::read(text).map_or(0.0, |h| h.tolerance);
    let Some((_, written)) = text.split_once(EXPECT_HEADING) else {
        return vec![format!("the file has no `{EXPECT_HEADING}` block; the actual output is:\n{found}")];
    };
    let written: Vec<&str> = written.lines().skip(1).map(|l| l.strip_prefix("// ").unwrap_or("")).collect();
    let found: Vec<&str> = found.lines().collect();
    let mut differences = Vec::new();
    for i in 0..written.len().max(found.len()) {
        let (w, f) = (written.get(i).copied().unwrap_or(""), found.get(i).copied().unwrap_or(""));
        if !lines_match(w, f, tolerance) {
            differences.push(format!("expected: {w}\n   found: {f}"));
        }
    }
    differences
}

fn lines_match(written: &str, found: &str, tolerance: f64) -> bool {
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
