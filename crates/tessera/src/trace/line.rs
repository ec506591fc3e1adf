//! One line of a trace: what it says, or what is wrong with it.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use serde_json::Value;
use tessera_base::{Code, nearest};
use tessera_verify::Call;

use super::{MAX_RANKS, T0021, T0022};

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said<'a> {
    /// `{"rank": 0, "world_size": 4}`; the size may be left out.
    Rank(u32, Option<u32>),
    /// `{"group": "tp0", "ranks": [0, 1]}`.
    Group(Cow<'a, str>, Vec<u32>),
    /// A launch, with the members of its group where the line has them.
    Call(Box<Launch<'a>>),
}

/// A line with an `op`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Launch<'a> {
    pub(super) group: Cow<'a, str>,
    pub(super) ranks: Option<Vec<u32>>,
    pub(super) call: Call,
    pub(super) stream: Cow<'a, str>,
    pub(super) batch: u32,
}

/// Something wrong with a line. Bytes are counted from its start.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) code: &'static Code,
    pub(super) message: String,
    pub(super) bytes: (usize, usize),
    pub(super) hint: Option<String>,
}

/// Reads a line without its end.
///
/// # Errors
/// T0021, T0022: everything wrong with it.
pub(super) fn read(line: &[u8]) -> Result<Said<'_>, Vec<Fault>> {
    match serde_json::from_slice::<Fields<'_>>(line) {
        Ok(fields) => said(fields, line),
        Err(e) => Err(explain(line, &e)),
    }
}

/// Stream of a call that names none.
const STREAM: &str = "0";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    rank: Option<u32>,
    world_size: Option<u32>,
    #[serde(borrow)]
    group: Option<Text<'a>>,
    ranks: Option<Vec<u32>>,
    #[serde(borrow)]
    op: Option<Text<'a>>,
    #[serde(borrow)]
    dtype: Option<Text<'a>>,
    count: Option<u64>,
    shape: Option<Vec<u64>>,
    #[serde(borrow)]
    reduction: Option<Text<'a>>,
    #[serde(borrow)]
    stream: Option<Text<'a>>,
    root: Option<u32>,
    peer: Option<u32>,
    peers: Option<Vec<u32>>,
    send_counts: Option<Vec<u64>>,
    recv_counts: Option<Vec<u64>>,
    #[serde(borrow)]
    graph: Option<Text<'a>>,
    batch: Option<u32>,
}

/// What a key holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Text,
    Rank,
    Ranks,
    Number,
    Numbers,
    Batch,
}

/// Every key, in the order of the guide.
const KEYS: [(&str, Holds); 17] = [
    ("rank", Holds::Rank),
    ("world_size", Holds::Number),
    ("group", Holds::Text),
    ("ranks", Holds::Ranks),
    ("op", Holds::Text),
    ("dtype", Holds::Text),
    ("count", Holds::Number),
    ("shape", Holds::Numbers),
    ("reduction", Holds::Text),
    ("stream", Holds::Text),
    ("root", Holds::Rank),
    ("peer", Holds::Rank),
    ("peers", Holds::Ranks),
    ("send_counts", Holds::Numbers),
    ("recv_counts", Holds::Numbers),
    ("graph", Holds::Text),
    ("batch", Holds::Batch),
];

fn said<'a>(f: Fields<'a>, line: &[u8]) -> Result<Said<'a>, Vec<Fault>> {
    // Asked for only where a line is not a whole launch.
    let partly = f.rank.is_some() || f.world_size.is_some() || f.group.is_none() || f.op.is_none();
    let given = if partly { f.given() } else { Vec::new() };
    let fault = |key: &str, message: String, hint: &str| {
        let hint = (!hint.is_empty()).then(|| hint.to_string());
        Fault { code: &T0022, message, bytes: find(line, key), hint }
    };
    if let Some(rank) = f.rank {
        if let Some(other) = given.iter().find(|k| !matches!(**k, "rank" | "world_size")) {
            let hint =
                "rank stands alone, or with world_size, on the first line: {\"rank\": 0, \"world_size\": 4}";
            return Err(vec![fault("rank", format!("rank beside {other}"), hint)]);
        }
        if let Some(size) = f.world_size.filter(|n| *n <= rank || *n > MAX_RANKS) {
            let message = format!("rank {rank} of a world of {size}");
            return Err(vec![fault("world_size", message, "ranks are numbered from 0")]);
        }
        return Ok(Said::Rank(rank, f.world_size));
    }
    if f.world_size.is_some() {
        let hint = "it stands beside rank, on the first line: {\"rank\": 0, \"world_size\": 4}";
        return Err(vec![fault("world_size", "world_size without rank".to_string(), hint)]);
    }
    let Some(group) = f.group else {
        let message = if given.is_empty() { "the line says nothing" } else { "no group" };
        let hint = "a call has op and group, a declaration group and ranks";
        return Err(vec![fault("", message.to_string(), hint)]);
    };
    let mut faults = Vec::new();
    let mut want = |bad: bool, key: &str, message: String, hint: &str| {
        if bad {
            faults.push(fault(key, message, hint));
        }
    };
    if let Some(ranks) = &f.ranks {
        let out_of_order = ranks.windows(2).find(|w| w[0] >= w[1]);
        let hint = "list each member once, ascending; the counts of an exchange are in this order";
        want(ranks.is_empty(), "ranks", format!("group {} has no ranks", group.0), hint);
        if let Some(w) = out_of_order {
            want(true, "ranks", format!("ranks of group {}: {} stands before {}", group.0, w[0], w[1]), hint);
        }
        let large = ranks.iter().find(|r| **r >= MAX_RANKS);
        want(large.is_some(), "ranks", out_of_range("ranks", large), "");
    }
    let Some(op) = f.op else {
        let stray = given.iter().find(|k| !matches!(**k, "group" | "ranks"));
        want(stray.is_some(), stray.unwrap_or(&""), format!("{} without op", stray.unwrap_or(&"")), "");
        want(f.ranks.is_none(), "group", "a group without ranks, or a call without op".to_string(), "");
        return if faults.is_empty() {
            Ok(Said::Group(group.0, f.ranks.unwrap_or_default()))
        } else {
            Err(faults)
        };
    };
    want(op.0.is_empty(), "op", "op is empty".to_string(), "");
    for (key, rank) in [("root", f.root), ("peer", f.peer)] {
        want(rank.is_some_and(|r| r >= MAX_RANKS), key, out_of_range(key, rank.as_ref()), "");
    }
    let peer = match f.peers.as_deref() {
        None => f.peer,
        Some([one]) => {
            want(f.peer.is_some_and(|p| p != *one), "peers", format!("peers names {one}, peer another"), "");
            want(*one >= MAX_RANKS, "peers", out_of_range("peers", Some(one)), "");
            Some(*one)
        }
        Some(many) => {
            let hint =
                "a send or receive has one peer; write grouped ones on lines of their own, with one batch";
            want(true, "peers", format!("peers names {} ranks", many.len()), hint);
            None
        }
    };
    want(f.batch == Some(0), "batch", "batch is 0".to_string(), "number batches from 1");
    let per_peer = match (f.send_counts, f.recv_counts) {
        (Some(s), Some(r)) => Some((s, r)),
        (None, None) => None,
        (Some(_), None) => {
            want(true, "send_counts", "send_counts without recv_counts".to_string(), "");
            None
        }
        (None, Some(_)) => {
            want(true, "recv_counts", "recv_counts without send_counts".to_string(), "");
            None
        }
    };
    let product = |dims: &[u64]| dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let sum = |counts: &[u64]| counts.iter().try_fold(0u64, |n, c| n.checked_add(*c));
    // What it hands in, from whatever tells.
    let count = match (f.count, &f.shape, &per_peer) {
        (Some(n), _, _) => n,
        (None, Some(dims), _) => product(dims).unwrap_or_else(|| {
            want(true, "shape", "shape has more than 2^64 - 1 elements".to_string(), "");
            0
        }),
        (None, None, Some((sent, _))) => sum(sent).unwrap_or_else(|| {
            want(true, "send_counts", "send_counts add up to more than 2^64 - 1".to_string(), "");
            0
        }),
        (None, None, None) => {
            let hint = "give count, shape, or send_counts and recv_counts";
            want(op.0 != "barrier", "op", format!("{} without count", op.0), hint);
            0
        }
    };
    want(f.dtype.is_none() && op.0 != "barrier", "op", format!("{} without dtype", op.0), "");
    if !faults.is_empty() {
        return Err(faults);
    }
    let owned = |t: Option<Text<'_>>| t.map(|t| t.0.into_owned());
    Ok(Said::Call(Box::new(Launch {
        group: group.0,
        ranks: f.ranks,
        call: Call {
            op: op.0.into_owned(),
            dtype: owned(f.dtype).unwrap_or_default(),
            count,
            shape: f.shape.unwrap_or_default(),
            reduction: owned(f.reduction),
            root: f.root,
            peer,
            per_peer,
            graph: owned(f.graph),
        },
        stream: f.stream.map_or(Cow::Borrowed(STREAM), |t| t.0),
        batch: f.batch.unwrap_or(0),
    })))
}

impl Fields<'_> {
    /// Keys that the line has.
    fn given(&self) -> Vec<&'static str> {
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

/// Why a line does not have the fields of a trace.
fn explain(line: &[u8], e: &serde_json::Error) -> Vec<Fault> {
    let whole = (0, line.len());
    let bad = |message: String, bytes| Fault { code: &T0021, message, bytes, hint: None };
    let text = match std::str::from_utf8(line) {
        Ok(text) => text,
        Err(e) => {
            let at = e.valid_up_to();
            return vec![bad(format!("byte {at} of the line is not UTF-8"), (at, at + 1))];
        }
    };
    let map = match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(map)) => map,
        Ok(other) => return vec![bad(format!("the line is {}, not an object", shown(&other)), whole)],
        Err(e) => {
            let at = e.column().saturating_sub(1).min(line.len().saturating_sub(1));
            let mut fault = bad(format!("not JSON: {}", reason(&e)), (at, line.len()));
            fault.hint = e.is_eof().then(|| {
                "a line that was cut off: if the job was killed while writing, remove it".to_string()
            });
            return vec![fault];
        }
    };
    let mut faults = Vec::new();
    for (key, value) in &map {
        let fault = |message: String, hint: Option<String>| Fault {
            code: &T0022,
            message,
            bytes: find(line, key),
            hint,
        };
        match KEYS.iter().find(|k| k.0 == key) {
            None => {
                let near = nearest(key, KEYS.iter().map(|k| k.0));
                let hint = near.map_or_else(
                    || "the keys are listed in docs/guides/trace-door.md".to_string(),
                    |n| format!("did you mean `{n}`?"),
                );
                faults.push(fault(format!("unknown key `{}`", clip(key)), Some(hint)));
            }
            Some((_, holds)) if !holds.fits(value) => {
                let message = format!("{key} is {}; it must be {}", shown(value), holds.words());
                faults.push(fault(message, None));
            }
            Some(_) => {}
        }
    }
    if faults.is_empty() {
        // A key that stands twice is gone from the map.
        faults.push(bad(reason(e), whole));
    }
    faults
}

/// Without the position, which is that of the line.
fn reason(e: &serde_json::Error) -> String {
    let words = e.to_string();
    words.rsplit_once(" at line ").map_or(words.clone(), |(w, _)| w.to_string())
}

impl Holds {
    fn fits(self, v: &Value) -> bool {
        let rank = |v: &Value| v.as_u64().is_some_and(|n| n < u64::from(MAX_RANKS));
        v.is_null()
            || match self {
                Holds::Text => v.is_string(),
                Holds::Rank => rank(v),
                Holds::Ranks => v.as_array().is_some_and(|a| a.iter().all(rank)),
                Holds::Number => v.is_u64(),
                Holds::Numbers => v.as_array().is_some_and(|a| a.iter().all(Value::is_u64)),
                Holds::Batch => v.as_u64().is_some_and(|n| n <= u64::from(u32::MAX)),
            }
    }

    fn words(self) -> String {
        match self {
            Holds::Text => "a text in quotes".to_string(),
            Holds::Rank => format!("a rank from 0 to {}", MAX_RANKS - 1),
            Holds::Ranks => format!("a list of ranks from 0 to {}", MAX_RANKS - 1),
            Holds::Number => "a whole number from 0 to 2^64 - 1".to_string(),
            Holds::Numbers => "a list of whole numbers from 0 to 2^64 - 1".to_string(),
            Holds::Batch => format!("a whole number from 1 to {}", u32::MAX),
        }
    }
}

fn out_of_range(key: &str, rank: Option<&u32>) -> String {
    format!("{key} names rank {}; the last rank that can be is {}", rank.unwrap_or(&0), MAX_RANKS - 1)
}

fn shown(v: &Value) -> String {
    match v {
        Value::Object(_) => "an object".to_string(),
        Value::Array(a) if a.len() > 8 => format!("a list of {}", a.len()),
        other => clip(&other.to_string()),
    }
}

fn clip(s: &str) -> String {
    const SHOWN: usize = 60;
    match s.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &s[..end]),
        None => s.to_string(),
    }
}

/// Where a key stands in a line; the whole line where it cannot be found.
pub(super) fn find(line: &[u8], key: &str) -> (usize, usize) {
    let quoted = format!("\"{key}\"");
    let found = line.windows(quoted.len()).position(|w| w == quoted.as_bytes());
    found.map_or((0, line.len()), |at| (at, at + quoted.len()))
}

/// A string of the line, borrowed where nothing in it is escaped.
#[derive(Debug)]
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Text<'a>, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }
            fn visit_borrowed_str<E>(self, s: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(s)))
            }
            fn visit_str<E>(self, s: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(s.to_string())))
            }
        }
        d.deserialize_str(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(line: &str) -> Vec<String> {
        read(line.as_bytes())
            .unwrap_err()
            .into_iter()
            .map(|f| format!("{} {}", f.code.id, f.message))
            .collect()
    }

    fn launch(line: &str) -> Launch<'_> {
        match read(line.as_bytes()).unwrap() {
            Said::Call(l) => *l,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn counts_come_from_what_tells() {
        let call = |more: &str| {
            let line = format!("{{\"group\":\"g\",\"op\":\"x\",\"dtype\":\"f32\",{more}}}");
            launch(&line).call.count
        };
        assert_eq!(call("\"count\":7,\"shape\":[2,2]"), 7);
        assert_eq!(call("\"shape\":[3,5]"), 15);
        assert_eq!(call("\"shape\":[]"), 1);
        assert_eq!(call("\"send_counts\":[1,2],\"recv_counts\":[0,9]"), 3);
        assert_eq!(launch("{\"group\":\"g\",\"op\":\"barrier\"}").call.dtype, "");
        let l = launch(
            "{\"group\":\"a\\u0062\",\"op\":\"send\",\"dtype\":\"f32\",\"count\":1,\"peers\":[3],\"stream\":null}",
        );
        assert_eq!((&*l.group, l.call.peer, &*l.stream), ("ab", Some(3), STREAM));
    }

    #[test]
    fn everything_wrong_with_a_line_is_told() {
        let f = faults("{\"grp\":\"a\",\"op\":7,\"count\":-1,\"ranks\":[0,70000]}");
        assert_eq!(f.len(), 4, "{f:#?}");
        assert!(f.iter().all(|f| f.starts_with("T0022")));
        let f = read(b"{\"gruop\":\"a\"}").unwrap_err();
        assert_eq!((f[0].bytes, f[0].hint.as_deref()), ((1, 8), Some("did you mean `group`?")));
        for (line, words) in [
            ("[1]", "T0021 the line is [1], not an object"),
            ("{\"op\":", "T0021 not JSON: EOF"),
            ("{\"group\":\"a\",\"group\":\"b\",\"ranks\":[0]}", "T0021 duplicate field `group`"),
            ("{}", "T0022 the line says nothing"),
            ("{\"op\":\"x\"}", "T0022 no group"),
            ("{\"rank\":0,\"op\":\"x\"}", "T0022 rank beside op"),
            ("{\"group\":\"g\",\"count\":1}", "T0022 count without op"),
            ("{\"group\":\"g\"}", "T0022 a group without ranks"),
            ("{\"group\":\"g\",\"ranks\":[]}", "T0022 group g has no ranks"),
            ("{\"group\":\"g\",\"ranks\":[1,0]}", "T0022 ranks of group g: 1 stands before 0"),
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
            let f = faults(line);
            assert!(f[0].starts_with(words), "{line}: {f:?}");
        }
        assert_eq!(read(b"{\"op\":\"\xff\"}").unwrap_err()[0].message, "byte 7 of the line is not UTF-8");
    }
}
