//! Tests of peer authentication over loopback: strangers must not get in.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tessera_base::Diagnostic;
use tessera_runtime::driver::secure::{
    AuthenticatedPeer, Claim, ConnectionPurpose, Credentials, HELLO_BYTES, Secret, TlsConfig, accept_peer,
    connect_peer, read_exact, write_all,
};

fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 40]).unwrap()
}

fn test_deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn claim(rank: u32, to: u32, world: u32) -> Claim {
    Claim {
        purpose: ConnectionPurpose::Join,
        rank,
        expected_peer: to,
        world_size: world,
        communicator: 0,
        session: 0,
    }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

type Both = (Result<AuthenticatedPeer, Diagnostic>, Result<AuthenticatedPeer, Diagnostic>);

/// Runs a handshake and returns the results of the connecting and the accepting side.
fn handshake_both(connects: &Credentials, accepts: &Credentials) -> Both {
    let (a, b) = sockets();
    std::thread::scope(|s| {
        let there = s.spawn(|| accept_peer(b, accepts, &claim(0, 1, 2), test_deadline()));
        let here = connect_peer(a, connects, &claim(1, 0, 3), test_deadline());
        (here, there.join().unwrap())
    })
}

fn assert_streams_work(both: Both) {
    let (mut a, mut b) = (both.0.unwrap(), both.1.unwrap());
    assert_eq!((a.claim, b.claim), (claim(0, 1, 2), claim(1, 0, 3)));
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i >> 5) as u8).collect();
    std::thread::scope(|s| {
        s.spawn(|| write_all(&mut *a.stream, &data, test_deadline()).unwrap());
        let mut got = vec![0; data.len()];
        read_exact(&mut *b.stream, &mut got, test_deadline()).unwrap();
        assert!(got == data);
        write_all(&mut *b.stream, b"heard", test_deadline()).unwrap();
    });
    let mut got = [0; 5];
    read_exact(&mut *a.stream, &mut got, test_deadline()).unwrap();
    assert_eq!(&got, b"heard");
    drop(b);
    assert!(a.stream.read(&mut got).map_or(true, |n| n == 0));
}

fn assert_both_refused(both: Both) {
    for d in [both.0.unwrap_err(), both.1.unwrap_err()] {
        assert_eq!(d.code.id, "T0756");
        // Neither side may learn what was wrong with the other side's proof.
        let said = format!("{} {:?} {:?}", d.message, d.labels, d.hint);
        for word in ["mac", "hash", "expired", "UnknownIssuer", "signature", "nonce"] {
            assert!(!said.contains(word), "{said}");
        }
    }
}

#[test]
fn the_same_secret_authenticates_and_another_does_not() {
    let [a, b] = [1, 2].map(|s| Credentials::Secret(secret(s)));
    assert_streams_work(handshake_both(&a, &a));
    assert_both_refused(handshake_both(&a, &b));
    assert_eq!(Secret::new(&[1; 31]).unwrap_err().code.id, "T0756");
    assert!(!format!("{a:?}").contains('1'));
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn issue_certificate(&self, last_year: i32, trusted: &Authority) -> TlsConfig {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["rank".to_string()]).unwrap();
        params.not_after = date_time_ymd(last_year, 1, 1);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        TlsConfig::new(
            certificate.pem().as_bytes(),
            key.serialize_pem().as_bytes(),
            trusted.0.pem().as_bytes(),
        )
        .unwrap()
    }
}

#[test]
fn certificates_of_the_same_authority_authenticate_and_others_do_not() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let plain = |tls: &TlsConfig| Credentials::Tls(tls.clone(), None);
    let [a, b] = [0, 1].map(|_| ours.issue_certificate(2100, &ours));
    assert_streams_work(handshake_both(&plain(&a), &plain(&b)));
    let with = |tls: &TlsConfig, s| Credentials::Tls(tls.clone(), Some(secret(s)));
    assert_streams_work(handshake_both(&with(&a, 1), &with(&b, 1)));
    assert_both_refused(handshake_both(&with(&a, 1), &with(&b, 2)));
    assert_both_refused(handshake_both(&with(&a, 1), &plain(&b)));
    for stranger in [
        theirs.issue_certificate(2100, &ours),
        theirs.issue_certificate(2100, &theirs),
        ours.issue_certificate(2001, &ours),
    ] {
        assert_both_refused(handshake_both(&plain(&stranger), &plain(&b)));
        assert_both_refused(handshake_both(&plain(&a), &plain(&stranger)));
    }
    let bare = Credentials::Secret(secret(1));
    assert_both_refused(handshake_both(&bare, &with(&b, 1)));
    assert_both_refused(handshake_both(&with(&a, 1), &bare));
    let d = TlsConfig::new(b"", b"", b"").unwrap_err();
    assert!(d.message.contains("the certificate cannot be used: it holds no certificate"), "{}", d.message);
}

#[test]
fn a_silent_peer_times_out() {
    for credentials in [
        Credentials::Secret(secret(1)),
        Credentials::Tls(Authority::new().issue_certificate(2100, &Authority::new()), None),
    ] {
        let (_silent, b) = sockets();
        let begun = Instant::now();
        let until = begun + Duration::from_millis(200);
        let d = accept_peer(b, &credentials, &claim(0, 1, 2), until).unwrap_err();
        assert_eq!(d.code.id, "T0756");
        assert!((200..2000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    }
}

/// Forwards bytes in both directions until one end closes, and returns the bytes that `from` sent.
fn relay_bytes(from: TcpStream, to: TcpStream) -> Vec<u8> {
    let pump = |mut a: TcpStream, mut b: TcpStream| {
        let (mut said, mut some) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = a.read(&mut some) {
            said.extend(&some[..n]);
            if b.write_all(&some[..n]).is_err() {
                break;
            }
        }
        let _ = b.shutdown(std::net::Shutdown::Write);
        said
    };
    std::thread::scope(|s| {
        let (back, forth) = (to.try_clone().unwrap(), from.try_clone().unwrap());
        s.spawn(move || pump(back, forth));
        pump(from, to)
    })
}

#[test]
fn a_replayed_handshake_is_rejected() {
    let credentials = Credentials::Secret(secret(1));
    let ((a, b), (c, d)) = (sockets(), sockets());
    let said = std::thread::scope(|s| {
        let said = s.spawn(|| relay_bytes(b, c));
        let there = s.spawn(|| accept_peer(d, &credentials, &claim(0, 1, 2), test_deadline()));
        let here = connect_peer(a, &credentials, &claim(1, 0, 2), test_deadline()).unwrap();
        drop((here, there.join().unwrap().unwrap()));
        said.join().unwrap()
    });
    assert_eq!(said.len(), HELLO_BYTES + 32);
    let (mut a, b) = sockets();
    a.write_all(&said).unwrap();
    assert_eq!(accept_peer(b, &credentials, &claim(0, 1, 2), test_deadline()).unwrap_err().code.id, "T0756");
}

#[test]
fn a_reflected_handshake_is_rejected() {
    let credentials = Credentials::Secret(secret(1));
    let (a, mut b) = sockets();
    let echo = std::thread::spawn(move || {
        let mut some = [0; 4096];
        while let Ok(n @ 1..) = b.read(&mut some) {
            b.write_all(&some[..n]).unwrap();
        }
    });
    assert_eq!(connect_peer(a, &credentials, &claim(1, 0, 2), test_deadline()).unwrap_err().code.id, "T0756");
    echo.join().unwrap();
}
