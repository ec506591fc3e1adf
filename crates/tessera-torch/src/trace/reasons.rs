//! Reads why PyTorch broke a graph, or compiled a frame again.

use super::graph::is_user_file;
use super::records::quote_line;

/// A graph break.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GraphBreak {
    /// Line of the program, as `FILE:LINE`.
    pub site: Option<String>,
    /// What PyTorch could not trace.
    pub reason: String,
    /// Whether the whole function runs eagerly because of it, as after a break within a loop.
    pub runs_eagerly: bool,
}

/// Why an earlier compile of a frame did not fit a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recompile {
    /// The guard that failed first, such as `scale == 1.5`.
    pub guard: String,
    /// Line of the program that the guard comes from.
    pub site: Option<String>,
}

/// The kind of value that a failed guard names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GuardedValue {
    /// A number, a flag or a text of the program: `scale == 1.5`.
    Scalar,
    /// A size of a tensor.
    Size,
    /// Anything else, such as the identity of an object.
    Other,
}

impl Recompile {
    /// Returns what kind of value the guard names.
    #[must_use]
    pub fn guarded_value(&self) -> GuardedValue {
        if self.guard.contains("size mismatch") || self.guard.contains(".size()[") {
            return GuardedValue::Size;
        }
        let literal = self.guard.split_once(" == ").map_or("", |(_, value)| value.trim());
        let is_scalar = matches!(literal, "True" | "False" | "None")
            || literal.starts_with(['\'', '"'])
            || literal.parse::<f64>().is_ok();
        if is_scalar { GuardedValue::Scalar } else { GuardedValue::Other }
    }
}

/// Reads the payload of `dynamo_graph_break_reason`.
pub(crate) fn read_break(text: &str) -> GraphBreak {
    let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
    let first = lines.next().unwrap_or("");
    let site = first.split_once(" at ").map(|(_, site)| quote_line(site));
    let mut reason = String::new();
    if let Some(line) = lines.clone().find(|l| l.starts_with("Graph Break Reason:")) {
        let given = line.trim_start_matches("Graph Break Reason:").trim();
        let next = lines.skip_while(|l| *l != line).nth(1).unwrap_or("");
        reason = match given.strip_suffix(':') {
            Some(_) if !next.is_empty() => next.to_string(),
            _ => given.to_string(),
        };
    }
    if reason.is_empty() {
        reason = first.to_string();
    }
    let called = text.split_once("User code traceback:").map_or("", |(_, rest)| rest);
    let called = called.split("Traceback (most recent").next().unwrap_or("");
    let site = match site.filter(|s| is_user_file(s)) {
        None => last_user_line(called).or_else(|| first.split_once(" at ").map(|(_, s)| quote_line(s))),
        site => site,
    };
    let runs_eagerly = text.contains("falling back to eager");
    GraphBreak { site, reason: quote_line(&reason), runs_eagerly }
}

/// Reads the payload of `recompile_reasons`: a text, or a JSON list of them, of which the first is the
/// latest compile.
pub(crate) fn read_recompile(text: &str) -> Recompile {
    let list: Option<Vec<String>> = serde_json::from_str(text).ok();
    let text = list.as_ref().and_then(|l| l.first()).map_or(text, String::as_str);
    let first = text.lines().next().unwrap_or("");
    let (guard, _) = first.split_once(" #").unwrap_or((first, ""));
    // The compile that did not fit stands in front: `0/1: scale == 2.5`.
    let guard = guard.split_once(": ").filter(|(id, _)| id.contains('/')).map_or(guard, |(_, rest)| rest);
    Recompile { guard: quote_line(guard), site: last_user_line(text) }
}

/// Returns the last `FILE:LINE` of a Python traceback that is not of PyTorch itself.
fn last_user_line(text: &str) -> Option<String> {
    let frames = text.lines().filter_map(|l| l.trim().strip_prefix("File \""));
    let mut sites = frames.filter_map(|l| {
        let (file, rest) = l.split_once("\", line ")?;
        Some(format!("{file}:{}", rest.split(',').next()?))
    });
    sites.rfind(|s| is_user_file(s)).map(|s| quote_line(&s))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_break_names_its_line_and_the_thing_that_could_not_be_traced() {
        let found = read_break(
            "Graph break in user code at /u/m.py:62\nGraph Break Reason: Encountered graph break when \
             attempting to trace CALL: a function call, e.g. f(x, y):\n\nCall to `print`\n  Hint: none\n",
        );
        assert_eq!(found.site.as_deref(), Some("/u/m.py:62"));
        assert_eq!((found.reason.as_str(), found.runs_eagerly), ("Call to `print`", false));
        let eager = read_break(
            "Graph break in user code at /u/m.py:7\nGraph Break Reason: Failed. Skipping the function and falling back to eager. Graph break encountered:\n\nx\n",
        );
        assert!(eager.runs_eagerly && eager.reason == "x");
    }

    #[test]
    fn a_recompile_names_the_guard_and_the_kind_of_its_value() {
        let text = "0/0: scale == 1.5         # return x  # ork/m.py:118 in step\nUser stack trace:\n  File \"/u/m.py\", line 118, in step\n    return x\n";
        let found = read_recompile(text);
        assert_eq!((found.guard.as_str(), found.site.as_deref()), ("scale == 1.5", Some("/u/m.py:118")));
        assert_eq!(found.guarded_value(), GuardedValue::Scalar);
        assert_eq!(read_recompile(&serde_json::to_string(&[text]).unwrap()), found);
        let size = read_recompile("0/0: tensor 'x' size mismatch at index 0. expected 32, actual 48");
        assert_eq!(size.guarded_value(), GuardedValue::Size);
        let object = read_recompile("0/0: ___check_obj_id(self, 140), type");
        assert_eq!(object.guarded_value(), GuardedValue::Other);
    }
}
