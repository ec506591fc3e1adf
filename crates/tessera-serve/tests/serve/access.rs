//! Who may use a server.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tessera_serve::{Access, ServeOptions};

use crate::client::{read_answer, request};
use crate::{TestServer, test_options};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

pub(crate) fn foreign_sites_and_missing_tokens_are_refused() {
    let access = Access { token: Some(TOKEN.into()), ..Access::default() };
    let server = TestServer::start(ServeOptions { access, ..test_options() });
    let address = server.at.address;
    let get = |path: &str, headers: &[&str]| request(address, "GET", path, headers, "");
    for path in ["/", "/socket", "/api/v1/status", "/metrics", "/api/v1/snapshot.png"] {
        let answer = get(path, &[]);
        assert_eq!((answer.status, answer.json()["code"].as_str()), (403, Some("T1602")), "{path}");
        assert!(!answer.text().contains(TOKEN));
    }
    assert_eq!(get("/healthz", &[]).status, 200);
    let bearer = format!("authorization: Bearer {TOKEN}");
    assert_eq!(get("/api/v1/status", &[&bearer]).status, 200);
    let page = get(&format!("/?token={TOKEN}"), &[]);
    assert_eq!(page.status, 200);
    assert!(
        page.headers
            .contains(&format!("set-cookie: tessera_token={TOKEN}; path=/; httponly; samesite=strict"))
    );
    assert!(page.headers.contains("content-security-policy: default-src 'self'"), "{}", page.headers);
    assert_eq!(get("/page.js", &[&format!("cookie: tessera_token={TOKEN}")]).status, 200);
    for foreign in ["origin: https://evil.example", "origin: null", "host: evil.example"] {
        assert_eq!(get("/api/v1/status", &[&bearer, foreign]).status, 403, "{foreign}");
    }
    let own = format!("origin: http://{address}");
    assert_eq!(get("/api/v1/status", &[&bearer, &own]).status, 200);
}

pub(crate) fn a_server_with_certificates_speaks_tls() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_string()]).unwrap();
    let (chain, key) = (dir.path().join("chain.pem"), dir.path().join("key.pem"));
    std::fs::write(&chain, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = Some((chain.clone(), key));
    let server = TestServer::start(ServeOptions { tls, ..test_options() });
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(server.at.address).unwrap());
    let port = server.at.address.port();
    write!(stream, "GET /api/v1/status HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n\r\n")
        .unwrap();
    let answer = read_answer(&mut stream);
    assert_eq!((answer.status, answer.json()["stream"]["model"].as_str()), (200, Some("demo")));
    let missing = ServeOptions { tls: Some((chain.clone(), chain)), ..test_options() };
    let stop = tessera::StopHandle::default();
    let refused = tessera_serve::serve(crate::demo_stream("tp=1"), missing, &stop, &mut |_| {}).unwrap_err();
    assert_eq!(refused[0].code.id, "T1609");
}
