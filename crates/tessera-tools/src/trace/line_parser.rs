//! Parses one line of a trace, or explains why it is invalid.

mod explain;
mod interpret;

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use tessera_base::Code;
use tessera_verify::ObservedCall;

use explain::explain_failure;
use interpret::interpret_fields;

/// A valid line of a trace: the rank of the file, a group declaration, or a launch.
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

/// Every key that a line may have, with the type of its value.
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
    use super::interpret::DEFAULT_STREAM;
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
