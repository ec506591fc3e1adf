//! Typed access to the fields of a config table. [`ConfigReader`] collects a diagnostic for every
//! unknown, missing or mistyped key.

use std::collections::BTreeMap;

pub use crate::codes::T0004;
use crate::codes::{T0001, T0002, T0003};
use crate::{Diagnostic, Diagnostics, closest_name};
use serde_json::Value;

/// Reads the keys of one JSON or TOML table by type, and reports unknown, missing and invalid keys
/// as diagnostics.
#[derive(Debug)]
pub struct ConfigReader<'a> {
    file: &'a str,
    path: String,
    map: BTreeMap<String, Value>,
    known: Vec<&'static str>,
    /// Problems found so far.
    pub diagnostics: Diagnostics,
}

impl<'a> ConfigReader<'a> {
    /// Creates a reader for a JSON object, or for a TOML table converted to one. `file` and `path`
    /// name the table in diagnostics. A value that is not an object is reported as T0004 and read
    /// as an empty table.
    #[must_use]
    pub fn new(file: &'a str, path: &str, value: Value) -> ConfigReader<'a> {
        let mut diagnostics = Vec::new();
        let map = match value {
            Value::Object(m) => m.into_iter().collect(),
            other => {
                let what = if path.is_empty() { "the file" } else { path };
                diagnostics.push(
                    Diagnostic::error(&T0004, format!("{what} must be a table"))
                        .with_label(file, truncate_value(&other)),
                );
                BTreeMap::new()
            }
        };
        ConfigReader { file, path: path.to_string(), map, known: Vec::new(), diagnostics }
    }

    /// Returns the key qualified with the path of its table, as diagnostics show it.
    #[must_use]
    pub fn qualified_key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    /// Accepts keys that Tessera does not need, and drops their values.
    pub fn ignore_keys(&mut self, keys: &[&'static str]) {
        for k in keys {
            self.known.push(k);
            self.map.remove(*k);
        }
    }

    /// Removes the raw value of a key and returns it. The key counts as known from then on.
    pub fn take_value(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.map.remove(key)
    }

    fn report_invalid(&mut self, key: &str, found: &Value, want: &str) {
        let key = self.qualified_key(key);
        self.diagnostics.push(
            Diagnostic::error(&T0004, format!("`{key}` must be {want}"))
                .with_label(self.file, format!("found {}", truncate_value(found))),
        );
    }

    fn report_missing(&mut self, key: &str) {
        let key = self.qualified_key(key);
        self.diagnostics.push(
            Diagnostic::error(&T0003, format!("`{key}` is missing")).with_label(self.file, "not found"),
        );
    }

    /// Reads a value with `convert`. A value that it does not accept is reported, and so is an
    /// absent key without a default; the result is then `fallback`.
    fn read_as<T>(
        &mut self,
        key: &'static str,
        default: Option<T>,
        fallback: T,
        want: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> T {
        match (self.take_value(key), default) {
            (Some(v), _) => convert(&v).unwrap_or_else(|| {
                self.report_invalid(key, &v, want);
                fallback
            }),
            (None, Some(d)) => d,
            (None, None) => {
                self.report_missing(key);
                fallback
            }
        }
    }

    /// Reads an integer from 1 to 2^32 − 1; returns 1 after reporting a problem.
    pub fn read_count(&mut self, key: &'static str, default: Option<u64>) -> u64 {
        self.read_as(key, default, 1, "an integer from 1 to 2^32 - 1", |v| {
            v.as_u64().filter(|n| (1..1 << 32).contains(n))
        })
    }

    /// Reads an integer from 0 to 2^32 − 1; returns 1 after reporting a problem.
    pub fn read_count_or_zero(&mut self, key: &'static str, default: u64) -> u64 {
        self.read_as(key, Some(default), 1, "an integer from 0 to 2^32 - 1", |v| {
            v.as_u64().filter(|n| *n < 1 << 32)
        })
    }

    /// Reads an integer from 0 to 2^32 − 1, or `None` if the key is absent; returns `None` after
    /// reporting a problem.
    pub fn read_optional_count_or_zero(&mut self, key: &'static str) -> Option<u64> {
        self.read_as(key, Some(None), None, "an integer from 0 to 2^32 - 1", |v| {
            v.as_u64().filter(|n| *n < 1 << 32).map(Some)
        })
    }

    /// Reads a finite number; returns 1.0 after reporting a problem.
    pub fn read_number(&mut self, key: &'static str, default: Option<f64>) -> f64 {
        self.read_as(key, default, 1.0, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    /// Reads an optional boolean; a value of another type is reported and replaced by `default`.
    pub fn read_flag(&mut self, key: &'static str, default: bool) -> bool {
        self.read_as(key, Some(default), default, "true or false", Value::as_bool)
    }

    /// Reads a list of numbers; returns `default` if the key is absent or its value is invalid,
    /// which is reported.
    pub fn read_numbers(&mut self, key: &'static str, default: &[f64]) -> Vec<f64> {
        let numbers = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect();
        self.read_as(key, Some(default.to_vec()), default.to_vec(), "a list of numbers", numbers)
    }

    /// Reads a table whose keys are names and whose values are lists of numbers; returns an empty one if the key is absent
    /// or its value is invalid, which is reported.
    pub fn read_named_numbers(&mut self, key: &'static str) -> BTreeMap<String, Vec<f64>> {
        let numbers = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
        let named = |v: &Value| {
            v.as_object()?.iter().map(|(name, v)| Some((name.clone(), numbers(v)?))).collect::<Option<_>>()
        };
        self.read_as(key, Some(BTreeMap::new()), BTreeMap::new(), "a table of lists of numbers", named)
    }

    /// Reads a list of booleans; returns `default` if the key is absent or its value is invalid, which
    /// is reported.
    pub fn read_flags(&mut self, key: &'static str, default: &[bool]) -> Vec<bool> {
        let flags = |v: &Value| v.as_array()?.iter().map(Value::as_bool).collect();
        self.read_as(key, Some(default.to_vec()), default.to_vec(), "a list of true or false", flags)
    }

    /// Reads a string; returns an empty string after reporting a problem.
    pub fn read_text(&mut self, key: &'static str, default: Option<&str>) -> String {
        let text = |v: &Value| v.as_str().map(String::from);
        self.read_as(key, default.map(String::from), String::new(), "text", text)
    }

    /// Reads a string that must be one of `choices`.
    pub fn read_choice(
        &mut self,
        key: &'static str,
        choices: &[&'static str],
        default: &'static str,
    ) -> &'static str {
        let choice = |v: &Value| choices.iter().copied().find(|c| Some(*c) == v.as_str());
        self.read_as(key, Some(default), default, &crate::format_choices(choices), choice)
    }

    /// Reads a string that must be the name of one of `values`.
    pub fn read_named<T: Copy>(
        &mut self,
        key: &'static str,
        values: &[T],
        name: fn(T) -> &'static str,
        default: T,
    ) -> T {
        let names: Vec<&'static str> = values.iter().map(|v| name(*v)).collect();
        let chosen = self.read_choice(key, &names, name(default));
        values.iter().copied().find(|v| name(*v) == chosen).unwrap_or(default)
    }

    /// Returns a reader for a nested table; the table is empty if the key is absent.
    pub fn read_table(&mut self, key: &'static str) -> ConfigReader<'a> {
        let value = self.take_value(key).unwrap_or(Value::Object(serde_json::Map::new()));
        ConfigReader::new(self.file, &self.qualified_key(key), value)
    }

    /// Returns readers for the tables in a list, or in a table with arbitrary keys, each with its
    /// index or key. Empty if the key is absent.
    pub fn read_tables(&mut self, key: &'static str) -> Vec<(String, ConfigReader<'a>)> {
        let entries: Vec<(String, Value)> = match self.take_value(key) {
            None => Vec::new(),
            Some(Value::Object(map)) => map.into_iter().collect(),
            Some(Value::Array(list)) => {
                list.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()
            }
            Some(v) => {
                self.report_invalid(key, &v, "a list of tables");
                Vec::new()
            }
        };
        let path = self.qualified_key(key);
        entries
            .into_iter()
            .map(|(name, value)| {
                let fields = ConfigReader::new(self.file, &format!("{path}.{name}"), value);
                (name, fields)
            })
            .collect()
    }

    /// Returns a reader for a nested table if the key is present.
    pub fn read_optional_table(&mut self, key: &'static str) -> Option<ConfigReader<'a>> {
        let value = self.take_value(key)?;
        Some(ConfigReader::new(self.file, &self.qualified_key(key), value))
    }

    /// Ends reading and returns all diagnostics. Every key that was not read is reported as
    /// unknown.
    #[must_use]
    pub fn finish(mut self) -> Diagnostics {
        for key in self.map.keys() {
            let full = self.qualified_key(key);
            let hint = match closest_name(key, self.known.iter().copied()) {
                Some(n) => format!("did you mean `{}`?", self.qualified_key(n)),
                None => format!("known keys: {}", self.known.join(", ")),
            };
            self.diagnostics.push(
                Diagnostic::error(&T0002, format!("unknown key `{full}`"))
                    .with_label(self.file, "not a key of this file")
                    .with_hint(hint),
            );
        }
        self.diagnostics
    }
}

fn truncate_value(v: &Value) -> String {
    let s = v.to_string();
    if s.chars().count() > 60 { format!("{}…", s.chars().take(60).collect::<String>()) } else { s }
}

/// Formats text as a TOML string, including the quotes.
#[must_use]
pub fn quote_toml(text: &str) -> String {
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

/// Parses JSON text.
///
/// # Errors
/// T0001 with the parser's position.
pub fn parse_json(file: &str, text: &str) -> Result<Value, Diagnostics> {
    serde_json::from_str(text)
        .map_err(|e| vec![Diagnostic::error(&T0001, format!("not valid JSON: {e}")).with_label(file, "here")])
}

/// Parses TOML text into a JSON value.
///
/// # Errors
/// T0001 with the parser's position.
pub fn parse_toml(file: &str, text: &str) -> Result<Value, Diagnostics> {
    let refuse = |e: String| {
        vec![Diagnostic::error(&T0001, format!("not valid TOML: {}", e.trim())).with_label(file, "here")]
    };
    let table: toml::Table = toml::from_str(text).map_err(|e| refuse(e.to_string()))?;
    serde_json::to_value(table).map_err(|e| refuse(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_toml_round_trips() {
        for text in ["plain", "a \"quote\" and a \\", "two\nlines\u{1}", "µs, 80 %"] {
            let file = format!("key = {}", quote_toml(text));
            let mut fields = ConfigReader::new("f", "", parse_toml("f", &file).unwrap());
            assert_eq!(fields.read_text("key", None), text);
        }
    }

    #[test]
    fn nested_tables_report_their_path() {
        let value = parse_toml("f", "list = [{ a = 1 }, { b = 2 }]\n[names.x]\na = 3\n").unwrap();
        let mut fields = ConfigReader::new("f", "", value);
        let mut found = Vec::new();
        let mut seen = Vec::new();
        for (name, mut table) in fields.read_tables("list").into_iter().chain(fields.read_tables("names")) {
            seen.push((name, table.read_number("a", Some(0.0))));
            found.extend(table.finish());
        }
        assert_eq!(seen, [("0".into(), 1.0), ("1".into(), 0.0), ("x".into(), 3.0)]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].message, "unknown key `list.1.b`");
        assert!(fields.read_optional_table("absent").is_none() && fields.finish().is_empty());
    }
}
