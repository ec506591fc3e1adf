//! The address of a collector, and one request to it.

use std::net::IpAddr;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode, Uri, header};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tessera_base::Diagnostic;
use tokio::net::TcpStream;

use crate::codes::T1612;

/// Path of traces behind the address of a collector.
const TRACES_PATH: &str = "/v1/traces";
/// Most bytes of an answer that are read.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// The address of a collector, reached over HTTP without TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorEndpoint {
    host: String,
    port: u16,
    path: String,
}

/// How a collector answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It took the spans except for so many.
    Taken { rejected: u64 },
    /// It takes none now, and may take them later.
    Busy(String),
    /// It will never take these.
    Refused(String),
}

impl CollectorEndpoint {
    /// Reads an address such as `http://collector:4318`, behind which traces have the path `/v1/traces`.
    ///
    /// # Errors
    /// T1612 for an address that is not one, or that needs TLS or a secret.
    pub fn from_address(address: &str) -> Result<CollectorEndpoint, Diagnostic> {
        let endpoint = CollectorEndpoint::from_traces_address(address)?;
        Ok(CollectorEndpoint {
            path: format!("{}{TRACES_PATH}", endpoint.path.trim_end_matches('/')),
            ..endpoint
        })
    }

    /// Reads the whole address of traces, such as `http://collector:4318/v1/traces`.
    ///
    /// # Errors
    /// As [`CollectorEndpoint::from_address`].
    pub fn from_traces_address(address: &str) -> Result<CollectorEndpoint, Diagnostic> {
        let refuse = |what: &str, hint: &str| {
            Err(Diagnostic::error(&T1612, format!("{address:?} {what}")).with_hint(hint))
        };
        let example = "write http://HOST:4318";
        let Ok(uri) = address.parse::<Uri>() else {
            return refuse("is no address of a collector", example);
        };
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                let hint =
                    "send to a collector on this host or in this cluster, which encrypts what it sends on";
                return refuse("needs TLS, which this server does not speak to collectors", hint);
            }
            _ => return refuse("is no address of a collector", example),
        }
        let Some(authority) = uri.authority() else {
            return refuse("is no address of a collector", example);
        };
        if authority.as_str().contains('@') || uri.query().is_some() {
            return refuse("has a user or a query; a collector gets neither", example);
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_string();
        Ok(CollectorEndpoint { host, port: authority.port_u16().unwrap_or(80), path: uri.path().to_string() })
    }

    /// Returns the host and port as a header or a message names them.
    pub(crate) fn authority(&self) -> String {
        match self.host.parse() {
            Ok(IpAddr::V6(address)) => format!("[{address}]:{}", self.port),
            _ => format!("{}:{}", self.host, self.port),
        }
    }

    /// Sends a request with spans, on a connection of its own: one per second costs nothing, and no connection can be stale.
    pub(crate) async fn post(&self, body: Vec<u8>) -> Answer {
        let busy = |e: &dyn std::fmt::Display| Answer::Busy(e.to_string());
        let stream = match TcpStream::connect((self.host.as_str(), self.port)).await {
            Ok(stream) => stream,
            Err(e) => return busy(&e),
        };
        let (mut sender, connection) = match handshake(TokioIo::new(stream)).await {
            Ok(both) => both,
            Err(e) => return busy(&e),
        };
        let request = Request::builder()
            .method(Method::POST)
            .uri(&self.path)
            .header(header::HOST, self.authority())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Body::from(body));
        let request = match request {
            Ok(request) => request,
            Err(e) => return Answer::Refused(e.to_string()),
        };
        // The connection makes progress only while it is polled, and ends when the sender is dropped.
        let answered = async move {
            let response = sender.send_request(request).await.map_err(|e| busy(&e))?;
            let status = response.status();
            let body = to_bytes(Body::new(response.into_body()), MAX_ANSWER_BYTES).await;
            Ok((status, body.unwrap_or_default()))
        };
        let (answered, _) = tokio::join!(answered, connection);
        match answered {
            Ok((status, body)) => read_answer(status, &body),
            Err(answer) => answer,
        }
    }
}

fn read_answer(status: StatusCode, body: &[u8]) -> Answer {
    match status {
        _ if status.is_success() => Answer::Taken { rejected: count_rejected(body) },
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Answer::Busy(format!("it answers {status}")),
        _ => Answer::Refused(format!("it answers {status}")),
    }
}

/// Returns how many spans of a request the collector rejected.
fn count_rejected(body: &[u8]) -> u64 {
    #[derive(Deserialize, Default)]
    #[serde(default, rename_all = "camelCase")]
    struct Response {
        partial_success: PartialSuccess,
    }
    #[derive(Deserialize, Default)]
    #[serde(default, rename_all = "camelCase")]
    struct PartialSuccess {
        rejected_spans: serde_json::Value,
    }
    // JSON of Protocol Buffers writes a number of 64 bits as text, and readers take both. An answer without a body is usual.
    let response: Response = serde_json::from_slice(body).unwrap_or_default();
    let rejected = response.partial_success.rejected_spans;
    rejected.as_u64().or_else(|| rejected.as_str()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_host_port_and_path() {
        let at = |address: &str| CollectorEndpoint::from_address(address).map(|e| (e.authority(), e.path));
        let is = |authority: &str, path: &str| Ok((authority.to_string(), path.to_string()));
        assert_eq!(at("http://collector:4318"), is("collector:4318", "/v1/traces"));
        assert_eq!(at("http://collector:4318/"), is("collector:4318", "/v1/traces"));
        assert_eq!(at("http://10.0.0.7/tenant/a/"), is("10.0.0.7:80", "/tenant/a/v1/traces"));
        assert_eq!(at("http://[::1]:4318"), is("[::1]:4318", "/v1/traces"));
        let whole = CollectorEndpoint::from_traces_address("http://collector:4318/in").unwrap();
        assert_eq!(whole.path, "/in");
        for wrong in
            ["", "collector:4318", "https://a", "ftp://a", "http://u:p@a", "http://a/?x=1", "http://"]
        {
            assert_eq!(at(wrong).unwrap_err().code.id, "T1612", "{wrong}");
        }
    }

    #[test]
    fn an_answer_states_whether_to_send_again() {
        let taken = |rejected| Answer::Taken { rejected };
        assert_eq!(read_answer(StatusCode::OK, b""), taken(0));
        assert_eq!(read_answer(StatusCode::OK, b"{}"), taken(0));
        assert_eq!(read_answer(StatusCode::OK, br#"{"partialSuccess":{"rejectedSpans":"3"}}"#), taken(3));
        assert_eq!(read_answer(StatusCode::ACCEPTED, br#"{"partialSuccess":{"rejectedSpans":4}}"#), taken(4));
        assert!(matches!(read_answer(StatusCode::SERVICE_UNAVAILABLE, b""), Answer::Busy(_)));
        assert!(matches!(read_answer(StatusCode::BAD_REQUEST, b""), Answer::Refused(_)));
        assert!(matches!(read_answer(StatusCode::NOT_FOUND, b""), Answer::Refused(_)));
    }
}
