//! Explains why a line cannot be deserialized.

use serde_json::Value;
use tessera_base::closest_name;

use super::{KEYS, KeyType, LineFault, key_range};
use crate::codes::{T0021, T0022};
use crate::trace::MAX_RANKS;

/// Returns every fault of a line that cannot be deserialized.
pub(super) fn explain_failure(line: &[u8], e: &serde_json::Error) -> Vec<LineFault> {
    let whole = (0, line.len());
    let bad = |message: String, bytes| LineFault { code: &T0021, message, bytes, hint: None };
    let text = match std::str::from_utf8(line) {
        Ok(text) => text,
        Err(e) => {
            let at = e.valid_up_to();
            return vec![bad(format!("byte {at} of the line is not UTF-8"), (at, at + 1))];
        }
    };
    let map = match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(map)) => map,
        Ok(other) => {
            return vec![bad(format!("the line is {}, not an object", describe_value(&other)), whole)];
        }
        Err(e) => {
            let at = e.column().saturating_sub(1).min(line.len().saturating_sub(1));
            let mut fault = bad(format!("not JSON: {}", error_reason(&e)), (at, line.len()));
            fault.hint = e
                .is_eof()
                .then(|| "the line is truncated: if the job was killed while writing, remove it".to_string());
            return vec![fault];
        }
    };
    let mut faults = Vec::new();
    for (key, value) in &map {
        let fault = |message: String, hint: Option<String>| LineFault {
            code: &T0022,
            message,
            bytes: key_range(line, key),
            hint,
        };
        match KEYS.iter().find(|k| k.0 == key) {
            None => {
                let near = closest_name(key, KEYS.iter().map(|k| k.0));
                let hint = near.map_or_else(
                    || "docs/guides/trace-import.md lists the keys".to_string(),
                    |n| format!("did you mean `{n}`?"),
                );
                faults.push(fault(format!("unknown key `{}`", truncate_text(key)), Some(hint)));
            }
            Some((_, holds)) if !holds.accepts_value(value) => {
                let message =
                    format!("{key} is {}; it must be {}", describe_value(value), holds.describe_type());
                faults.push(fault(message, None));
            }
            Some(_) => {}
        }
    }
    if faults.is_empty() {
        // The map keeps only one of two equal keys, so serde's own message reports the duplicate.
        faults.push(bad(error_reason(e), whole));
    }
    faults
}

/// Returns the message without the position, since a line is parsed on its own.
fn error_reason(e: &serde_json::Error) -> String {
    let words = e.to_string();
    words.rsplit_once(" at line ").map_or(words.clone(), |(w, _)| w.to_string())
}

impl KeyType {
    fn accepts_value(self, v: &Value) -> bool {
        let rank = |v: &Value| v.as_u64().is_some_and(|n| n < u64::from(MAX_RANKS));
        v.is_null()
            || match self {
                KeyType::Text => v.is_string(),
                KeyType::Rank => rank(v),
                KeyType::Ranks => v.as_array().is_some_and(|a| a.iter().all(rank)),
                KeyType::Number => v.is_u64(),
                KeyType::Numbers => v.as_array().is_some_and(|a| a.iter().all(Value::is_u64)),
                KeyType::Batch => v.as_u64().is_some_and(|n| n <= u64::from(u32::MAX)),
            }
    }

    fn describe_type(self) -> String {
        match self {
            KeyType::Text => "a string in quotes".to_string(),
            KeyType::Rank => format!("a rank from 0 to {}", MAX_RANKS - 1),
            KeyType::Ranks => format!("a list of ranks from 0 to {}", MAX_RANKS - 1),
            KeyType::Number => "a whole number from 0 to 2^64 - 1".to_string(),
            KeyType::Numbers => "a list of whole numbers from 0 to 2^64 - 1".to_string(),
            KeyType::Batch => format!("a whole number from 1 to {}", u32::MAX),
        }
    }
}

fn describe_value(v: &Value) -> String {
    match v {
        Value::Object(_) => "an object".to_string(),
        Value::Array(a) if a.len() > 8 => format!("a list of {}", a.len()),
        other => truncate_text(&other.to_string()),
    }
}

fn truncate_text(s: &str) -> String {
    const SHOWN: usize = 60;
    match s.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &s[..end]),
        None => s.to_string(),
    }
}
