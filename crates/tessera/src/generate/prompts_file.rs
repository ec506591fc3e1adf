//! Reads a file of prompts: a JSON object per line, with a text or its ids, and what kind of text it is.

use std::path::Path;

use serde::Deserialize;
use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T0095;
use crate::files::read_text;

/// A prompt as a user gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenPrompt {
    /// What the prompt says.
    pub source: PromptSource,
    /// What kind of text the user says it is, such as code, chat or French. Calls read prompts of one kind only.
    pub kind: Option<String>,
}

/// A text, or the ids of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptSource {
    /// A text, which a tokenizer turns into ids.
    Text(String),
    /// Ids, at least one in a file.
    Ids(Vec<u32>),
}

/// Reads the prompts of a file in their order. Empty lines have none.
///
/// # Errors
/// T0095 for a file that cannot be read or has no prompt, and for every line that is wrong.
pub fn read_prompts_file(path: &Path) -> Result<Vec<GivenPrompt>, Diagnostics> {
    let text = read_text(path, &T0095).map_err(|d| vec![d])?;
    let (mut prompts, mut wrong) = (Vec::new(), Diagnostics::new());
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match parse_line(line) {
            Ok(prompt) => prompts.push(prompt),
            Err(reason) => {
                let message = format!("line {} of {} is no prompt: {reason}", i + 1, path.display());
                wrong.push(Diagnostic::error(&T0095, message).with_hint(EXAMPLE));
            }
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    if prompts.is_empty() {
        let message = format!("{} has no prompts: every line is empty", path.display());
        return Err(vec![Diagnostic::error(&T0095, message).with_hint(EXAMPLE)]);
    }
    Ok(prompts)
}

const EXAMPLE: &str =
    r#"write lines such as {"prompt": "The sea is", "kind": "prose"} or {"prompt_ids": [17, 4, 99]}"#;

/// The object of a line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptLine {
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    kind: Option<String>,
}

fn parse_line(line: &str) -> Result<GivenPrompt, String> {
    // Serde would take a list for the fields in their order.
    if !line.trim_start().starts_with('{') {
        return Err("it is not a JSON object".to_string());
    }
    let PromptLine { prompt, prompt_ids, kind } = serde_json::from_str(line).map_err(|e| {
        let text = e.to_string();
        // The parser sees one line, so its line number is not that of the file.
        let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason);
        format!("column {}: {reason}", e.column())
    })?;
    let source = match (prompt, prompt_ids) {
        (Some(_), Some(_)) => return Err("it has both `prompt` and `prompt_ids`".to_string()),
        (None, None) => return Err("it has neither `prompt` nor `prompt_ids`".to_string()),
        (Some(text), None) => PromptSource::Text(text),
        (None, Some(ids)) if ids.is_empty() => return Err("its `prompt_ids` are empty".to_string()),
        (None, Some(ids)) => PromptSource::Ids(ids),
    };
    if kind.as_ref().is_some_and(|kind| kind.trim().is_empty()) {
        return Err("its `kind` is empty".to_string());
    }
    Ok(GivenPrompt { source, kind })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<GivenPrompt>, Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompts.jsonl");
        std::fs::write(&path, text).unwrap();
        read_prompts_file(&path).map_err(|ds| {
            assert!(ds.iter().all(|d| d.code == &T0095), "{ds:?}");
            ds.into_iter().map(|d| d.message).collect()
        })
    }

    #[test]
    fn a_line_holds_a_text_or_ids_and_may_name_a_kind() {
        let text = |text: &str| PromptSource::Text(text.to_string());
        let expected = [
            (text("fn main() {\n"), Some("code")),
            (PromptSource::Ids(vec![17, 4]), None),
            (text("Der Würfel"), Some("German prose")),
        ];
        let expected = expected.map(|(source, kind)| GivenPrompt { source, kind: kind.map(str::to_string) });
        let file = "{\"prompt\": \"fn main() {\\n\", \"kind\": \"code\"}\n\n  {\"prompt_ids\": [17, 4]}\r\n\
                    {\"kind\": \"German prose\", \"prompt\": \"Der Würfel\"}";
        assert_eq!(read(file).unwrap(), expected);
    }

    #[test]
    fn every_wrong_line_is_named_with_its_reason() {
        let cases = [
            ("{\"prompt\": \"a\"", "EOF while parsing"),
            ("[\"a\", null, \"b\"]", "not a JSON object"),
            ("{\"prompt\": \"a\", \"type\": \"b\"}", "unknown field `type`"),
            ("{\"prompt\": \"a\", \"prompt\": \"b\"}", "duplicate field `prompt`"),
            ("{\"kind\": \"code\"}", "neither `prompt` nor `prompt_ids`"),
            ("{\"prompt\": \"a\", \"prompt_ids\": [1]}", "both `prompt` and `prompt_ids`"),
            ("{\"prompt_ids\": []}", "`prompt_ids` are empty"),
            ("{\"prompt_ids\": [1, -2]}", "column 21: invalid value: integer `-2`"),
            ("{\"prompt\": \"a\", \"kind\": \" \"}", "`kind` is empty"),
            ("{\"prompt\": 7}", "invalid type: integer `7`"),
        ];
        // A line that is right stands before each.
        let file: String = cases.map(|(line, _)| format!("{{\"prompt\": \"x\"}}\n{line}\n")).concat();
        let found = read(&file).unwrap_err();
        assert_eq!(found.len(), cases.len(), "{found:#?}");
        for (i, (message, (_, reason))) in found.iter().zip(cases).enumerate() {
            assert!(message.starts_with(&format!("line {} of ", 2 * i + 2)), "{message}");
            assert!(message.contains(reason) && !message.contains("at line 1"), "{message}");
        }
    }

    #[test]
    fn a_file_without_prompts_is_refused() {
        for file in ["", "\n  \n"] {
            assert!(read(file).unwrap_err()[0].contains("has no prompts"));
        }
        let absent = read_prompts_file(Path::new("absent.jsonl")).unwrap_err();
        assert_eq!((absent.len(), absent[0].code), (1, &T0095));
        assert!(absent[0].message.starts_with("absent.jsonl cannot be read"), "{}", absent[0].message);
    }
}
