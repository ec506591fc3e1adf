//! Reads typed fields out of a config table and collects what is wrong: unknown, missing, or of another kind.

use std::collections::BTreeMap;

use crate::{Code, Diagnostic, Diagnostics, nearest};
use serde_json::Value;

/// Text is not JSON or TOML.
pub static T0001: Code = Code {
    id: "T0001",
    title: "config file cannot be read",
    page: "The file is not valid JSON (config.json) or TOML (stream.toml). The message gives the parser's position.",
};
/// Unknown key.
pub static T0002: Code = Code {
    id: "T0002",
    title: "unknown config key",
    page: "Keys that Tessera does not know are refused rather than ignored: a misspelt `windw_frames` that is \
silently dropped runs a different model from the one that was asked for. The message names the nearest known key.",
};
/// Missing key.
pub static T0003: Code = Code {
    id: "T0003",
    title: "config key missing",
    page: "The key has no safe default: guessing it would run a different model. Add the key to the \
file and table that the message names; the model's own release says which value it was trained with.",
};
/// Wrong kind or range.
pub static T0004: Code = Code {
    id: "T0004",
    title: "config value is of the wrong kind",
    page: "The key is known but its value is not of the kind it must be, for instance text where a whole number is \
expected, or a number out of range. The message shows what was found.",
};

/// The fields of one table.
#[derive(Debug)]
pub struct Fields<'a> {
    file: &'a str,
    path: String,
    map: BTreeMap<String, Value>,
    known: Vec<&'static str>,
    /// What was found wrong so far.
    pub diagnostics: Diagnostics,
}

impl<'a> Fields<'a> {
    /// Fields of a JSON object or of a TOML table turned into one.
    #[must_use]
    pub fn new(file: &'a str, path: &str, value: Value) -> Fields<'a> {
        let mut diagnostics = Vec::new();
        let map = match value {
            Value::Object(m) => m.into_iter().collect(),
            other => {
                let what = if path.is_empty() { "the file" } else { path };
                diagnostics.push(
                    Diagnostic::error(&T0004, format!("{what} must be a table")).at(file, show(&other)),
                );
                BTreeMap::new()
            }
        };
        Fields { file, path: path.to_string(), map, known: Vec::new(), diagnostics }
    }

    /// A key with the tables around it, as diagnostics name it.
    #[must_use]
    pub fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    /// Accepts keys that carry nothing Tessera needs.
    pub fn ignore(&mut self, keys: &[&'static str]) {
        for k in keys {
            self.known.push(k);
            self.map.remove(*k);
        }
    }

    /// The raw value of a key.
    pub fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.map.remove(key)
    }

    fn wrong(&mut self, key: &str, found: &Value, want: &str) {
        let key = self.full(key);
        self.diagnostics.push(
            Diagnostic::error(&T0004, format!("`{key}` must be {want}"))
                .at(self.file, format!("found {}", show(found))),
        );
    }

    fn missing(&mut self, key: &str) {
        let key = self.full(key);
        self.diagnostics
            .push(Diagnostic::error(&T0003, format!("`{key}` is missing")).at(self.file, "not found"));
    }

    /// A whole number ≥ 1.
    pub fn count(&mut self, key: &'static str, default: Option<u64>) -> u64 {
        match (self.take(key), default) {
            (Some(v), _) => match v.as_u64().filter(|n| (1..1 << 32).contains(n)) {
                Some(n) => n,
                None => {
                    self.wrong(key, &v, "a whole number from 1 to 2^32");
                    1
                }
            },
            (None, Some(d)) => d,
            (None, None) => {
                self.missing(key);
                1
            }
        }
    }

    /// A finite number.
    pub fn number(&mut self, key: &'static str, default: Option<f64>) -> f64 {
        match (self.take(key), default) {
            (Some(v), _) => match v.as_f64().filter(|x| x.is_finite()) {
                Some(x) => x,
                None => {
                    self.wrong(key, &v, "a number");
                    1.0
                }
            },
            (None, Some(d)) => d,
            (None, None) => {
                self.missing(key);
                1.0
            }
        }
    }

    /// A flag.
    pub fn flag(&mut self, key: &'static str, default: bool) -> bool {
        match self.take(key) {
            None => default,
            Some(Value::Bool(b)) => b,
            Some(v) => {
                self.wrong(key, &v, "true or false");
                default
            }
        }
    }

    /// A list of numbers.
    pub fn numbers(&mut self, key: &'static str, default: &[f64]) -> Vec<f64> {
        match self.take(key) {
            None => default.to_vec(),
            Some(v) => {
                match v.as_array().and_then(|a| a.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>()) {
                    Some(list) => list,
                    None => {
                        self.wrong(key, &v, "a list of numbers");
                        default.to_vec()
                    }
                }
            }
        }
    }

    /// Any text.
    pub fn text(&mut self, key: &'static str, default: Option<&str>) -> String {
        match (self.take(key), default) {
            (Some(Value::String(s)), _) => s,
            (Some(v), _) => {
                self.wrong(key, &v, "text");
                String::new()
            }
            (None, Some(d)) => d.to_string(),
            (None, None) => {
                self.missing(key);
                String::new()
            }
        }
    }

    /// One of a few words.
    pub fn word(
        &mut self,
        key: &'static str,
        choices: &[&'static str],
        default: &'static str,
    ) -> &'static str {
        match self.take(key) {
            None => default,
            Some(v) => match v.as_str().and_then(|s| choices.iter().find(|c| **c == s)) {
                Some(c) => c,
                None => {
                    self.wrong(key, &v, &crate::choices(choices));
                    default
                }
            },
        }
    }

    /// A table inside this one; empty if absent.
    pub fn table(&mut self, key: &'static str) -> Fields<'a> {
        let value = self.take(key).unwrap_or(Value::Object(serde_json::Map::new()));
        Fields::new(self.file, &self.full(key), value)
    }

    /// The tables inside a list or a table of free names, each with its name or position; empty if absent.
    pub fn each(&mut self, key: &'static str) -> Vec<(String, Fields<'a>)> {
        let entries: Vec<(String, Value)> = match self.take(key) {
            None => Vec::new(),
            Some(Value::Object(map)) => map.into_iter().collect(),
            Some(Value::Array(list)) => {
                list.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()
            }
            Some(v) => {
                self.wrong(key, &v, "a list of tables");
                Vec::new()
            }
        };
        let path = self.full(key);
        entries
            .into_iter()
            .map(|(name, value)| {
                let fields = Fields::new(self.file, &format!("{path}.{name}"), value);
                (name, fields)
            })
            .collect()
    }

    /// A table inside this one, if it is there.
    pub fn table_if(&mut self, key: &'static str) -> Option<Fields<'a>> {
        let value = self.take(key)?;
        Some(Fields::new(self.file, &self.full(key), value))
    }

    /// Ends reading: what is left is unknown.
    #[must_use]
    pub fn finish(mut self) -> Diagnostics {
        for key in self.map.keys() {
            let full = self.full(key);
            let mut d = Diagnostic::error(&T0002, format!("unknown key `{full}`"))
                .at(self.file, "not a key of this file");
            d = match nearest(key, self.known.iter().copied()) {
                Some(n) => d.hint(format!("did you mean `{}`?", self.full(n))),
                None => d.hint(format!("known keys: {}", self.known.join(", "))),
            };
            self.diagnostics.push(d);
        }
        self.diagnostics
    }
}

fn show(v: &Value) -> String {
    let s = v.to_string();
    if s.chars().count() > 60 { format!("{}…", s.chars().take(60).collect::<String>()) } else { s }
}

/// Text as a TOML string, quotes included.
#[must_use]
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// JSON text as a value.
///
/// # Errors
/// T0001 with the parser's position.
pub fn json(file: &str, text: &str) -> Result<Value, Diagnostics> {
    serde_json::from_str(text)
        .map_err(|e| vec![Diagnostic::error(&T0001, format!("not valid JSON: {e}")).at(file, "here")])
}

/// TOML text as a value.
///
/// # Errors
/// T0001 with the parser's position.
pub fn toml(file: &str, text: &str) -> Result<Value, Diagnostics> {
    let refuse =
        |e: String| vec![Diagnostic::error(&T0001, format!("not valid TOML: {}", e.trim())).at(file, "here")];
    let table: toml::Table = toml::from_str(text).map_err(|e| refuse(e.to_string()))?;
    serde_json::to_value(table).map_err(|e| refuse(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_reads_back() {
        for text in ["plain", "a \"quote\" and a \\", "two\nlines\u{1}", "µs, 80 %"] {
            let file = format!("key = {}", quoted(text));
            let mut fields = Fields::new("f", "", toml("f", &file).unwrap());
            assert_eq!(fields.text("key", None), text);
        }
    }

    #[test]
    fn tables_of_free_names_and_lists_of_tables_name_their_place() {
        let value = toml("f", "list = [{ a = 1 }, { b = 2 }]\n[names.x]\na = 3\n").unwrap();
        let mut fields = Fields::new("f", "", value);
        let mut found = Vec::new();
        let mut seen = Vec::new();
        for (name, mut table) in fields.each("list").into_iter().chain(fields.each("names")) {
            seen.push((name, table.number("a", Some(0.0))));
            found.extend(table.finish());
        }
        assert_eq!(seen, [("0".into(), 1.0), ("1".into(), 0.0), ("x".into(), 3.0)]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].message, "unknown key `list.1.b`");
        assert!(fields.table_if("absent").is_none() && fields.finish().is_empty());
    }
}
