//! Which requests are served: by token, by the host that they name, and by the site whose page sent them.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, Uri, header};
use subtle::ConstantTimeEq;
use tessera_base::Diagnostic;

use crate::codes::T1602;
use crate::options::Access;
use crate::protocol::Refusal;

/// Name of the cookie that carries the token after the page was opened with it.
pub(crate) const TOKEN_COOKIE: &str = "tessera_token";

/// The rules of access of a server.
#[derive(Debug, Clone)]
pub(crate) struct AccessRules {
    access: Access,
    bound: SocketAddr,
    is_tls: bool,
}

impl AccessRules {
    /// Creates the rules of a server that listens on `bound`.
    pub(crate) fn new(access: Access, bound: SocketAddr, is_tls: bool) -> AccessRules {
        AccessRules { access, bound, is_tls }
    }

    /// Checks a request.
    ///
    /// # Errors
    /// T1602, with what is wrong and without the token.
    pub(crate) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let refuse = |message: String, hint: &str| {
            Err(Refusal::from_diagnostic(&Diagnostic::error(&T1602, message).with_hint(hint)))
        };
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let host = text(header::HOST);
        if !self.is_own_host(host) {
            let hint = "open the address that the server printed, or start it with --host NAME";
            return refuse(format!("host {host:?} is no address of this server"), hint);
        }
        if headers.contains_key(header::ORIGIN) && !self.is_allowed_origin(text(header::ORIGIN), host) {
            let hint = "open the page of the server itself, or start it with --origin SITE";
            return refuse(format!("a page of {:?} may not use this server", text(header::ORIGIN)), hint);
        }
        match &self.access.token {
            None => Ok(()),
            Some(token) if given_tokens(uri, headers).any(|given| is_equal(given, token)) => Ok(()),
            Some(_) => refuse(
                "the token is missing or wrong".to_string(),
                "add ?token=TOKEN to the address, or the header Authorization: Bearer TOKEN",
            ),
        }
    }

    /// Returns whether a `Host` names this server. A foreign name that a page of another site resolves to this machine
    /// does not.
    fn is_own_host(&self, host: &str) -> bool {
        let name = host.rsplit_once(':').map_or(host, |(name, port)| {
            let is_port = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
            if is_port { name } else { host }
        });
        if self.access.hosts.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            return true;
        }
        let address: Option<IpAddr> = name.trim_start_matches('[').trim_end_matches(']').parse().ok();
        match address {
            // A page of another site has a name of its own, not an address.
            Some(address) => !self.bound.ip().is_loopback() || address.is_loopback(),
            None => name.eq_ignore_ascii_case("localhost"),
        }
    }

    fn is_allowed_origin(&self, origin: &str, host: &str) -> bool {
        let scheme = if self.is_tls { "https" } else { "http" };
        origin.eq_ignore_ascii_case(&format!("{scheme}://{host}"))
            || self.access.origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin))
    }
}

/// Returns the tokens that a request states: in its header, its address and its cookie.
fn given_tokens<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> impl Iterator<Item = &'a str> {
    let text = |name| headers.get(name).and_then(|value: &axum::http::HeaderValue| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    let query = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.strip_prefix("token="));
    let cookies = text(header::COOKIE).unwrap_or_default().split(';').filter_map(|cookie| {
        let (name, value) = cookie.trim().split_once('=')?;
        (name == TOKEN_COOKIE).then_some(value)
    });
    bearer.into_iter().chain(query).chain(cookies)
}

/// Compares in a time that does not depend on where the texts differ.
fn is_equal(given: &str, token: &str) -> bool {
    given.as_bytes().ct_eq(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn is_served(rules: &AccessRules, path: &str, headers: &[(&str, &str)]) -> bool {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(axum::http::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        rules.check(&path.parse().unwrap(), &map).is_ok()
    }

    fn rules(bound: [u8; 4], token: Option<&str>) -> AccessRules {
        let access = Access {
            token: token.map(str::to_string),
            hosts: vec!["video.example".into()],
            origins: vec!["https://watch.example".into()],
        };
        AccessRules::new(access, SocketAddr::from((bound, 7860)), false)
    }

    #[test]
    fn foreign_names_and_foreign_sites_are_refused() {
        let local = rules([127, 0, 0, 1], None);
        for host in ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "video.example", "LOCALHOST"] {
            assert!(is_served(&local, "/", &[("host", host)]), "{host}");
        }
        for host in ["evil.example:7860", "10.0.0.8:7860", "", "localhost.evil.example"] {
            assert!(!is_served(&local, "/", &[("host", host)]), "{host}");
        }
        let from = |origin| is_served(&local, "/", &[("host", "localhost:7860"), ("origin", origin)]);
        assert!(from("http://localhost:7860") && from("https://watch.example"));
        assert!(
            !from("https://localhost:7860") && !from("http://evil.example") && !from("null") && !from("")
        );
    }

    #[test]
    fn a_token_may_stand_in_three_places() {
        let open = rules([0, 0, 0, 0], Some(TOKEN));
        let host = ("host", "10.1.2.3:7860");
        let bearer = format!("Bearer {TOKEN}");
        assert!(is_served(&open, "/", &[host, ("authorization", &bearer)]));
        assert!(is_served(&open, &format!("/?a=b&token={TOKEN}"), &[host]));
        assert!(is_served(&open, "/", &[host, ("cookie", &format!("a=b; {TOKEN_COOKIE}={TOKEN}"))]));
        for wrong in ["", "Bearer", "Bearer 0123456789abcdee", "Bearer 0123456789abcdef0"] {
            assert!(!is_served(&open, "/?token=", &[host, ("authorization", wrong)]), "{wrong}");
        }
    }
}
