//! One wording that pages and sources keep: operations of NCCL are launched on a CUDA stream and are stream-ordered
//! locally; besides that there is an ordering contract across ranks.

use super::Problem;
use crate::tree::{File, Tree};

const LIBRARY: &str = "nccl";
/// What nobody says of the library, right behind its name.
const BEHIND: &[&str] = &[" stream", " streams", "'s stream", "'s streams", "'s stream's"];
/// What nobody says of it in the same sentence.
const OWN: &[&str] = &["own stream", "own cuda stream", "own internal stream", "own private stream"];
/// Words that the right sentence may have behind the name.
const RIGHT: &str = " stream-ordered";
const SAYS: &str = "it has no streams: operations are launched on a CUDA stream and are stream-ordered locally, and \
across ranks there is an ordering contract";

pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let texts = tree.files.iter().filter(|f| f.path.ends_with(".md") || f.path.ends_with(".rs"));
    for f in texts {
        found.extend(slips(f).into_iter().map(|line| Problem::new(&f.path, line, SAYS)));
    }
}

/// Lines on which the wording slips.
fn slips(f: &File) -> Vec<usize> {
    let (mut flat, mut begins) = (String::new(), Vec::new());
    for line in f.text.lines() {
        begins.push(flat.len());
        let line = line.trim_start().trim_start_matches(['/', '!', '>', '-', '*']).trim();
        flat.extend(line.chars().filter(|c| !matches!(c, '*' | '`' | '_')).map(|c| match c {
            '’' => '\'',
            c => c.to_ascii_lowercase(),
        }));
        // A paragraph's end is a sentence's end.
        flat.push_str(if line.is_empty() { ". " } else { " " });
    }
    let mut out = Vec::new();
    for (at, _) in flat.match_indices(LIBRARY) {
        let rest = &flat[at + LIBRARY.len()..];
        let sentence = rest.split(['.', ';', '|', '"']).next().unwrap_or_default();
        let behind = BEHIND.iter().any(|b| rest.starts_with(b)) && !rest.starts_with(RIGHT);
        if behind || OWN.iter().any(|o| sentence.contains(o)) {
            out.push(begins.partition_point(|b| *b <= at));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        slips(&File { path: "a.md".into(), text: text.into() })
    }

    #[test]
    fn streams_are_not_the_librarys() {
        let name = concat!("NC", "CL");
        for wrong in [
            "runs on its own streams",
            "ops run on their\n/// own **stream**",
            "has its own CUDA streams",
            "streams overlap",
            "'s streams overlap",
            "’s stream waits",
        ] {
            let gap = if wrong.starts_with(['\'', '’']) { "" } else { " " };
            assert_eq!(lines(&format!("First.\n/// {name}{gap}{wrong}.\n")), [2], "{wrong}");
        }
    }

    #[test]
    fn the_right_wording_and_other_streams_pass() {
        for right in [
            "NCCL operations are launched on a CUDA stream and are stream-ordered locally.",
            "NCCL stream-ordered operations.",
            "NCCL is a library. Every op names its own stream.",
            "Each program has its own streams.",
            "| NCCL | a |\n| other | its own stream |",
        ] {
            assert_eq!(lines(right), Vec::<usize>::new(), "{right}");
        }
    }
}
