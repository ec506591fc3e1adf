//! Spans as OTLP writes them in JSON: ids in hex, numbers of 64 bits as text.

use serde_json::{Value, json};

use crate::hex::to_hex;

/// `SPAN_KIND_INTERNAL` of OTLP.
const INTERNAL_KIND: u32 = 1;
/// `STATUS_CODE_ERROR` of OTLP.
const ERROR_STATUS: u32 = 2;

/// Trace and span, which others name as parent or link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpanContext {
    trace: [u8; 16],
    span: [u8; 8],
}

/// Something that took time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Span {
    pub(crate) context: SpanContext,
    /// `None` for the first span of a trace.
    pub(crate) parent: Option<SpanContext>,
    pub(crate) name: String,
    /// Nanoseconds since 1970.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) attributes: Attributes,
    pub(crate) events: Vec<SpanEvent>,
    /// Spans of other traces that caused this one, or that it caused.
    pub(crate) links: Vec<SpanContext>,
    /// What went wrong.
    pub(crate) error: Option<String>,
}

/// Something that happened at an instant.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SpanEvent {
    pub(crate) name: &'static str,
    /// Nanoseconds since 1970.
    pub(crate) at_ns: u64,
    pub(crate) attributes: Attributes,
}

/// Names and values.
pub(crate) type Attributes = Vec<(&'static str, AttributeValue)>;

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AttributeValue {
    Text(String),
    /// Protocol Buffers have no unsigned value here.
    Number(i64),
    Flag(bool),
}

impl SpanContext {
    /// Begins a trace.
    pub(crate) fn new_trace() -> SpanContext {
        SpanContext { trace: random_bytes(), span: random_bytes() }
    }

    /// Creates another span of the trace.
    pub(crate) fn new_span(self) -> SpanContext {
        SpanContext { span: random_bytes(), ..self }
    }
}

/// Returns the body of a request with spans of one resource.
pub(crate) fn to_request(resource: &Attributes, spans: &[Span]) -> Vec<u8> {
    let request = json!({ "resourceSpans": [{
        "resource": { "attributes": to_attributes(resource) },
        "scopeSpans": [{
            "scope": { "name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION") },
            "spans": spans.iter().map(to_span).collect::<Vec<_>>(),
        }],
    }] });
    // The value contains no map with keys that are not text.
    serde_json::to_vec(&request).unwrap_or_default()
}

fn to_span(span: &Span) -> Value {
    let events = span.events.iter().map(|event| {
        json!({
            "timeUnixNano": event.at_ns.to_string(),
            "name": event.name,
            "attributes": to_attributes(&event.attributes),
        })
    });
    let links =
        span.links.iter().map(|link| json!({ "traceId": to_hex(&link.trace), "spanId": to_hex(&link.span) }));
    let status = span.error.as_ref().map(|what| json!({ "code": ERROR_STATUS, "message": what }));
    json!({
        "traceId": to_hex(&span.context.trace),
        "spanId": to_hex(&span.context.span),
        "parentSpanId": span.parent.map(|parent| to_hex(&parent.span)).unwrap_or_default(),
        "name": span.name,
        "kind": INTERNAL_KIND,
        "startTimeUnixNano": span.start_ns.to_string(),
        "endTimeUnixNano": span.end_ns.to_string(),
        "attributes": to_attributes(&span.attributes),
        "events": events.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "status": status.unwrap_or_else(|| json!({})),
    })
}

fn to_attributes(attributes: &Attributes) -> Vec<Value> {
    let value = |value: &AttributeValue| match value {
        AttributeValue::Text(text) => json!({ "stringValue": text }),
        AttributeValue::Number(number) => json!({ "intValue": number.to_string() }),
        AttributeValue::Flag(flag) => json!({ "boolValue": flag }),
    };
    attributes.iter().map(|(key, v)| json!({ "key": key, "value": value(v) })).collect()
}

/// Returns random bytes, of which at least one is not 0: an id of zeros is none.
fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without a source of random bytes two spans may get one id, which a viewer shows and nothing depends on.
    let _ = getrandom::fill(&mut bytes);
    bytes[N - 1] |= u8::from(bytes.iter().all(|byte| *byte == 0));
    bytes
}

impl From<&str> for AttributeValue {
    fn from(text: &str) -> AttributeValue {
        AttributeValue::Text(text.to_string())
    }
}

impl From<u64> for AttributeValue {
    fn from(number: u64) -> AttributeValue {
        AttributeValue::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<u32> for AttributeValue {
    fn from(number: u32) -> AttributeValue {
        AttributeValue::Number(number.into())
    }
}

impl From<bool> for AttributeValue {
    fn from(flag: bool) -> AttributeValue {
        AttributeValue::Flag(flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_the_json_of_the_protocol() {
        let parent = SpanContext { trace: [0xab; 16], span: [1; 8] };
        let context = SpanContext { span: [2; 8], ..parent };
        let event = SpanEvent { name: "alarm", at_ns: 7, attributes: vec![("code", "T0750".into())] };
        let span = Span {
            context,
            parent: Some(parent),
            name: "denoise.1".into(),
            start_ns: 1_700_000_000_000_000_001,
            end_ns: 1_700_000_000_000_000_002,
            attributes: vec![("tessera.rank", 3_u32.into()), ("tessera.cut", true.into())],
            events: vec![event],
            links: vec![parent],
            error: Some("it failed".into()),
        };
        let body = to_request(&vec![("service.name", "s".into())], &[span]);
        let expected = json!({ "resourceSpans": [{
            "resource": { "attributes": [{ "key": "service.name", "value": { "stringValue": "s" } }] },
            "scopeSpans": [{
                "scope": { "name": "tessera-serve", "version": env!("CARGO_PKG_VERSION") },
                "spans": [{
                    "traceId": "ab".repeat(16),
                    "spanId": "02".repeat(8),
                    "parentSpanId": "01".repeat(8),
                    "name": "denoise.1",
                    "kind": 1,
                    "startTimeUnixNano": "1700000000000000001",
                    "endTimeUnixNano": "1700000000000000002",
                    "attributes": [
                        { "key": "tessera.rank", "value": { "intValue": "3" } },
                        { "key": "tessera.cut", "value": { "boolValue": true } },
                    ],
                    "events": [{
                        "timeUnixNano": "7",
                        "name": "alarm",
                        "attributes": [{ "key": "code", "value": { "stringValue": "T0750" } }],
                    }],
                    "links": [{ "traceId": "ab".repeat(16), "spanId": "01".repeat(8) }],
                    "status": { "code": 2, "message": "it failed" },
                }],
            }],
        }] });
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
    }

    #[test]
    fn no_two_spans_have_one_id() {
        let first = SpanContext::new_trace();
        let (second, other) = (first.new_span(), SpanContext::new_trace());
        assert_eq!(first.trace, second.trace);
        assert!(first.trace != other.trace && first.span != second.span && first.span != other.span);
    }
}
