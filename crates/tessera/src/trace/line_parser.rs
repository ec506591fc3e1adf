//! Parses one line of a trace, or explains why it is invalid.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use serde_json::Value;
use tessera_base::{Code, closest_name};
use tessera_verify::ObservedCall;

use super::{MAX_RANKS, T0021, T0022};

/// The content of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TraceEntry<'a> {
    /// `{"rank": 0, "world_size": 4}`; the world size is optional.
    Rank(u32, Option<u32>),
    /// `{"group": "tp0", "ranks": [0, 1]}`.
    Group(Cow<'a, str>, Vec<u32>),
    /// A launch, with the members of its group if the line lists them.
    Launch(Box<TraceLaunch<'a>>),
}

/// A line with an `op`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TraceLaunch<'a> {
    pub(super) group: Cow<'a, str>,
    pub(super) ranks: Option<Vec<u32>>,
    pub(super) call: ObservedCall,
    pub(super) stream: Cow<'a, str>,
    pub(super) batch: u32,
}

/// An error in a line. `bytes` is a byte range from the start of the line.
#[derive(Debug)]
pub(super) struct LineFault {
    pub(super) code: &'static Code,
    pub(super) message: String,
    pub(super) bytes: (usize, usize),
    pub(super) hint: Option<String>,
}

/// Parses a line without its line break.
///
/// # Errors
/// All errors of the line, with code T0021 or T0022.
pub(super) fn parse_line(line: &[u8]) -> Result<TraceEntry<'_>, Vec<LineFault>> {
    match serde_json::from_slice::<LineFields<'_>>(line) {
        Ok(fields) => interpret_fields(fields, line),
        Err(e) => Err(explain_failure(line, &e)),
    }
}

/// Stream of a launch that names none.
const DEFAULT_STREAM: &str = "0";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LineFields<'a> {
    rank: Option<u32>,
    world_size: Option<u32>,
    #[serde(borrow)]
    group: Option<CowText<'a>>,
    ranks: Option<Vec<u32>>,
    #[serde(borrow)]
    op: Option<CowText<'a>>,
    #[serde(borrow)]
    dtype: Option<CowText<'a>>,
    count: Option<u64>,
    shape: Option<Vec<u64>>,
    #[serde(borrow)]
    reduction: Option<CowText<'a>>,
    #[serde(borrow)]
    stream: Option<CowText<'a>>,
    root: Option<u32>,
    peer: Option<u32>,
    peers: Option<Vec<u32>>,
    send_counts: Option<Vec<u64>>,
    recv_counts: Option<Vec<u64>>,
    #[serde(borrow)]
    graph: Option<CowText<'a>>,
    batch: Option<u32>,
}

/// The type of a key's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyType {
    Text,
    Rank,
    Ranks,
    Number,
    Numbers,
    Batch,
}

/// Every key, in the order of the guide.
const KEYS: [(&str, KeyType); 17] = [
    ("rank", KeyType::Rank),
    ("world_size", KeyType::Number),
    ("group", KeyType::Text),
    ("ranks", KeyType::Ranks),
    ("op", KeyType::Text),
    ("dtype", KeyType::Text),
    ("count", KeyType::Number),
    ("shape", KeyType::Numbers),
    ("reduction", KeyType::Text),
    ("stream", KeyType::Text),
    ("root", KeyType::Rank),
    ("peer", KeyType::Rank),
    ("peers", KeyType::Ranks),
    ("send_counts", KeyType::Numbers),
    ("recv_counts", KeyType::Numbers),
    ("graph", KeyType::Text),
    ("batch", KeyType::Batch),
];

fn interpret_fields<'a>(f: LineFields<'a>, line: &[u8]) -> Result<TraceEntry<'a>, Vec<LineFault>> {
    // The list of keys is needed only if the line is not a complete launch.
    let is_incomplete = f.rank.is_some() || f.world_size.is_some() || f.group.is_none() || f.op.is_none();
    let keys = if is_incomplete { f.present_keys() } else { Vec::new() };
    let fault = |key: &str, message: String, hint: &str| {
        let hint = (!hint.is_empty()).then(|| hint.to_string());
        LineFault { code: &T0022, message, bytes: key_range(line, key), hint }
    };
    if let Some(rank) = f.rank {
        if let Some(other) = keys.iter().find(|k| !matches!(**k, "rank" | "world_size")) {
            let hint = "a line with rank has no other keys except world_size, and is the first: {\"rank\": 0, \"world_size\": 4}";
            return Err(vec![fault("rank", format!("rank beside {other}"), hint)]);
        }
        if let Some(size) = f.world_size.filter(|n| *n <= rank || *n > MAX_RANKS) {
            let message = format!("rank {rank} in a world of {size}");
            return Err(vec![fault("world_size", message, "ranks are numbered from 0")]);
        }
        return Ok(TraceEntry::Rank(rank, f.world_size));
    }
    if f.world_size.is_some() {
        let hint = "world_size belongs beside rank on the first line: {\"rank\": 0, \"world_size\": 4}";
        return Err(vec![fault("world_size", "world_size without rank".to_string(), hint)]);
    }
    let Some(group) = f.group else {
        let message = if keys.is_empty() { "the line is empty" } else { "no group" };
        let hint = "a launch has op and group, a declaration has group and ranks";
        return Err(vec![fault("", message.to_string(), hint)]);
    };
    let mut faults = Vec::new();
    let mut report_if = |bad: bool, key: &str, message: String, hint: &str| {
        if bad {
            faults.push(fault(key, message, hint));
        }
    };
    if let Some(ranks) = &f.ranks {
        let out_of_order = ranks.windows(2).find(|w| w[0] >= w[1]);
        let hint = "list each member once, ascending; per-peer counts are in this order";
        report_if(ranks.is_empty(), "ranks", format!("group {} has no ranks", group.0), hint);
        if let Some(w) = out_of_order {
            report_if(
                true,
                "ranks",
                format!("ranks of group {}: {} comes before {}", group.0, w[0], w[1]),
                hint,
            );
        }
        let large = ranks.iter().find(|r| **r >= MAX_RANKS);
        report_if(large.is_some(), "ranks", out_of_range_message("ranks", large), "");
    }
    let Some(op) = f.op else {
        let stray = keys.iter().find(|k| !matches!(**k, "group" | "ranks"));
        report_if(stray.is_some(), stray.unwrap_or(&""), format!("{} without op", stray.unwrap_or(&"")), "");
        report_if(
            f.ranks.is_none(),
            "group",
            "a group without ranks, or a launch without op".to_string(),
            "",
        );
        return if faults.is_empty() {
            Ok(TraceEntry::Group(group.0, f.ranks.unwrap_or_default()))
        } else {
            Err(faults)
        };
    };
    report_if(op.0.is_empty(), "op", "op is empty".to_string(), "");
    for (key, rank) in [("root", f.root), ("peer", f.peer)] {
        report_if(rank.is_some_and(|r| r >= MAX_RANKS), key, out_of_range_message(key, rank.as_ref()), "");
    }
    let peer = match f.peers.as_deref() {
        None => f.peer,
        Some([one]) => {
            report_if(
                f.peer.is_some_and(|p| p != *one),
                "peers",
                format!("peers names {one}, but peer names another"),
                "",
            );
            report_if(*one >= MAX_RANKS, "peers", out_of_range_message("peers", Some(one)), "");
            Some(*one)
        }
        Some(many) => {
            let hint = "a send or receive has one peer; write grouped transfers on separate lines with the same batch number";
            report_if(true, "peers", format!("peers names {} ranks", many.len()), hint);
            None
        }
    };
    report_if(f.batch == Some(0), "batch", "batch is 0".to_string(), "number batches from 1");
    let per_peer = match (f.send_counts, f.recv_counts) {
        (Some(s), Some(r)) => Some((s, r)),
        (None, None) => None,
        (Some(_), None) => {
            report_if(true, "send_counts", "send_counts without recv_counts".to_string(), "");
            None
        }
        (None, Some(_)) => {
            report_if(true, "recv_counts", "recv_counts without send_counts".to_string(), "");
            None
        }
    };
    let multiply = |dims: &[u64]| dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let sum = |counts: &[u64]| counts.iter().try_fold(0u64, |n, c| n.checked_add(*c));
    // Number of elements that the rank contributes: count, or else what shape multiplies to, or else
    // the sum of send_counts.
    let count = match (f.count, &f.shape, &per_peer) {
        (Some(n), _, _) => n,
        (None, Some(dims), _) => multiply(dims).unwrap_or_else(|| {
            report_if(true, "shape", "shape has more than 2^64 - 1 elements".to_string(), "");
            0
        }),
        (None, None, Some((sent, _))) => sum(sent).unwrap_or_else(|| {
            report_if(true, "send_counts", "send_counts add up to more than 2^64 - 1".to_string(), "");
            0
        }),
        (None, None, None) => {
            let hint = "give count, shape, or send_counts and recv_counts";
            report_if(op.0 != "barrier", "op", format!("{} without count", op.0), hint);
            0
        }
    };
    report_if(f.dtype.is_none() && op.0 != "barrier", "op", format!("{} without dtype", op.0), "");
    if !faults.is_empty() {
        return Err(faults);
    }
    let to_owned = |t: Option<CowText<'_>>| t.map(|t| t.0.into_owned());
    Ok(TraceEntry::Launch(Box::new(TraceLaunch {
        group: group.0,
        ranks: f.ranks,
        call: ObservedCall {
            op: op.0.into_owned(),
            dtype: to_owned(f.dtype).unwrap_or_default(),
            count,
            shape: f.shape.unwrap_or_default(),
            reduction: to_owned(f.reduction),
            root: f.root,
            peer,
            per_peer,
            graph: to_owned(f.graph),
        },
        stream: f.stream.map_or(Cow::Borrowed(DEFAULT_STREAM), |t| t.0),
        batch: f.batch.unwrap_or(0),
    })))
}

impl LineFields<'_> {
    /// Returns the keys that the line has.
    fn present_keys(&self) -> Vec<&'static str> {
        let here = [
            self.rank.is_some(),
            self.world_size.is_some(),
            self.group.is_some(),
            self.ranks.is_some(),
            self.op.is_some(),
            self.dtype.is_some(),
            self.count.is_some(),
            self.shape.is_some(),
            self.reduction.is_some(),
            self.stream.is_some(),
            self.root.is_some(),
            self.peer.is_some(),
            self.peers.is_some(),
            self.send_counts.is_some(),
            self.recv_counts.is_some(),
            self.graph.is_some(),
            self.batch.is_some(),
        ];
        KEYS.iter().zip(here).filter_map(|(k, here)| here.then_some(k.0)).collect()
    }
}

/// Explains why a line cannot be deserialized.
fn explain_failure(line: &[u8], e: &serde_json::Error) -> Vec<LineFault> {
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

fn out_of_range_message(key: &str, rank: Option<&u32>) -> String {
    format!("{key} names rank {}; the maximum is {}", rank.unwrap_or(&0), MAX_RANKS - 1)
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

/// Returns the byte range of a key in a line, or of the whole line if the key is not found.
pub(super) fn key_range(line: &[u8], key: &str) -> (usize, usize) {
    let quoted = format!("\"{key}\"");
    let found = line.windows(quoted.len()).position(|w| w == quoted.as_bytes());
    found.map_or((0, line.len()), |at| (at, at + quoted.len()))
}

/// A string of the line, borrowed unless it contains escapes.
#[derive(Debug)]
struct CowText<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for CowText<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<CowText<'a>, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = CowText<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, s: &'de str) -> Result<CowText<'de>, E> {
                Ok(CowText(Cow::Borrowed(s)))
            }
            fn visit_str<E>(self, s: &str) -> Result<CowText<'de>, E> {
                Ok(CowText(Cow::Owned(s.to_string())))
            }
        }
        d.deserialize_str(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_faults(line: &str) -> Vec<String> {
        parse_line(line.as_bytes())
            .unwrap_err()
            .into_iter()
            .map(|f| format!("{} {}", f.code.id, f.message))
            .collect()
    }

    fn parse_launch(line: &str) -> TraceLaunch<'_> {
        match parse_line(line.as_bytes()).unwrap() {
            TraceEntry::Launch(l) => *l,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn counts_come_from_count_shape_or_per_peer_counts() {
        let call = |more: &str| {
            let line = format!("{{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f32\",{more}}}");
            parse_launch(&line).call.count
        };
        assert_eq!(call("\"count\":7,\"shape\":[2,2]"), 7);
        assert_eq!(call("\"shape\":[3,5]"), 15);
        assert_eq!(call("\"shape\":[]"), 1);
        assert_eq!(call("\"send_counts\":[1,2],\"recv_counts\":[0,9]"), 3);
        assert_eq!(parse_launch("{\"group\":\"g\",\"op\":\"barrier\"}").call.dtype, "");
        let l = parse_launch(
            "{\"group\":\"a\\u0062\",\"op\":\"send\",\"dtype\":\"f32\",\"count\":1,\"peers\":[3],\"stream\":null}",
        );
        assert_eq!((&*l.group, l.call.peer, &*l.stream), ("ab", Some(3), DEFAULT_STREAM));
    }

    #[test]
    fn all_faults_of_a_line_are_reported() {
        let f = parse_faults("{\"grp\":\"a\",\"op\":7,\"count\":-1,\"ranks\":[0,70000]}");
        assert_eq!(f.len(), 4, "{f:#?}");
        assert!(f.iter().all(|f| f.starts_with("T0022")));
        let f = parse_line(b"{\"gruop\":\"a\"}").unwrap_err();
        assert_eq!((f[0].bytes, f[0].hint.as_deref()), ((1, 8), Some("did you mean `group`?")));
        for (line, words) in [
            ("[1]", "T0021 the line is [1], not an object"),
            ("{\"op\":", "T0021 not JSON: EOF"),
            ("{\"group\":\"a\",\"group\":\"b\",\"ranks\":[0]}", "T0021 duplicate field `group`"),
            ("{}", "T0022 the line is empty"),
            ("{\"op\":\"x\"}", "T0022 no group"),
            ("{\"rank\":0,\"op\":\"x\"}", "T0022 rank beside op"),
            ("{\"group\":\"g\",\"count\":1}", "T0022 count without op"),
            ("{\"group\":\"g\"}", "T0022 a group without ranks"),
            ("{\"group\":\"g\",\"ranks\":[]}", "T0022 group g has no ranks"),
            ("{\"group\":\"g\",\"ranks\":[1,0]}", "T0022 ranks of group g: 1 comes before 0"),
            ("{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\"}", "T0022 x without count"),
            ("{\"group\":\"g\",\"op\":\"x\",\"count\":1}", "T0022 x without dtype"),
            (
                "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"count\":1,\"peers\":[1,2]}",
                "T0022 peers names 2 ranks",
            ),
            ("{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"count\":1,\"batch\":0}", "T0022 batch is 0"),
            (
                "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"send_counts\":[1]}",
                "T0022 send_counts without",
            ),
            (
                "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"shape\":[4294967296,4294967296]}",
                "T0022 shape has",
            ),
            ("{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"count\":1.5}", "T0022 count is 1.5"),
            (
                "{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f\",\"count\":18446744073709551616}",
                "T0022 count is 1.8",
            ),
        ] {
            let f = parse_faults(line);
            assert!(f[0].starts_with(words), "{line}: {f:?}");
        }
        assert_eq!(
            parse_line(b"{\"op\":\"\xff\"}").unwrap_err()[0].message,
            "byte 7 of the line is not UTF-8"
        );
    }
}
