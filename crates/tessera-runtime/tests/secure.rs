//! Tests of peer authentication over loopback: strangers must not get in.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tessera_runtime::driver::secure::{
    AuthenticatedPeer, Claim, ConnectionPurpose, Credentials, HELLO_BYTES, Refusal, RefusalKind, Secret,
    TlsConfig, accept_peer, connect_peer, read_exact, write_all,
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

type Both = (Result<AuthenticatedPeer, Refusal>, Result<AuthenticatedPeer, Refusal>);

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
    for refusal in [both.0.unwrap_err(), both.1.unwrap_err()] {
        let d = refusal.to_diagnostic();
        assert_eq!(d.code.id, "T0756");
        // Neither side may learn what was wrong with the other side's proof.
        let said = format!("{} {:?} {:?}", d.message, d.labels, d.hint);
        for word in ["mac", "tag", "decrypt", "hash", "expired", "UnknownIssuer", "signature", "nonce"] {
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
        let refusal = accept_peer(b, &credentials, &claim(0, 1, 2), until).unwrap_err();
        assert_eq!((refusal.kind, refusal.to_diagnostic().code.id), (RefusalKind::Late, "T0756"));
        assert!((200..2000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    }
}

/// Bytes that the connector sends in a handshake without certificates: its hello, Noise message 1
/// (a public key and a tag), and the tag of an empty record.
const CONNECTOR_BYTES: usize = HELLO_BYTES + 48 + 16;
/// Bytes that the acceptor sends: Noise message 2 with its hello, and the tag of an empty record.
const ACCEPTOR_BYTES: usize = 48 + HELLO_BYTES + 16;

/// Forwards bytes from `a` to `b` until one end closes, and returns the bytes before `change`,
/// which gets each byte with its position, or ends the connection.
fn pump_bytes(mut a: TcpStream, mut b: TcpStream, change: &dyn Fn(usize, u8) -> Option<u8>) -> Vec<u8> {
    let (mut said, mut some) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = a.read(&mut some) {
        let at = said.len();
        said.extend(&some[..n]);
        let sent: Vec<u8> =
            some[..n].iter().enumerate().map_while(|(i, byte)| change(at + i, *byte)).collect();
        if b.write_all(&sent).is_err() || sent.len() < n {
            break;
        }
    }
    let _ = b.shutdown(std::net::Shutdown::Both);
    let _ = a.shutdown(std::net::Shutdown::Both);
    said
}

type Change<'a> = &'a (dyn Fn(usize, u8) -> Option<u8> + Sync);

/// Runs a handshake through a relay that may change the bytes of each direction. Also returns what
/// the connector and the acceptor sent.
fn handshake_relayed(forth: Change<'_>, back: Change<'_>) -> (Both, [Vec<u8>; 2]) {
    let credentials = Credentials::Secret(secret(1));
    let ((a, b), (c, d)) = (sockets(), sockets());
    std::thread::scope(|s| {
        let (b2, c2) = (b.try_clone().unwrap(), c.try_clone().unwrap());
        let forth = s.spawn(move || pump_bytes(b, c, forth));
        let back = s.spawn(move || pump_bytes(c2, b2, back));
        let there = s.spawn(|| accept_peer(d, &credentials, &claim(0, 1, 2), test_deadline()));
        let here = connect_peer(a, &credentials, &claim(1, 0, 3), test_deadline());
        let there = there.join().unwrap();
        // Both ends are kept until here, so that the relay only ends what it changed.
        let outcome = match (here, there) {
            (Ok(mut a), Ok(mut b)) => {
                write_all(&mut *a.stream, b"a line that only the peer may read", test_deadline()).unwrap();
                read_exact(&mut *b.stream, &mut [0; 34], test_deadline()).unwrap();
                (Ok(a), Ok(b))
            }
            both => both,
        };
        let (here, there) = outcome;
        let (here, there) = (here.map(|p| p.claim), there.map(|p| p.claim));
        let said = [forth.join().unwrap(), back.join().unwrap()];
        let peer = |claim| AuthenticatedPeer { claim, stream: Box::new(sockets().0) };
        ((here.map(peer), there.map(peer)), said)
    })
}

fn unchanged(_: usize, byte: u8) -> Option<u8> {
    Some(byte)
}

#[test]
fn the_network_carries_flights_of_fixed_size_and_no_readable_content() {
    let (both, [forth, back]) = handshake_relayed(&unchanged, &unchanged);
    assert!(both.0.is_ok() && both.1.is_ok(), "{both:?}");
    assert_eq!(back.len(), ACCEPTOR_BYTES);
    assert_eq!(forth.len(), CONNECTOR_BYTES + 2 + 34 + 16);
    assert!(!forth.windows(4).any(|w| w == b"line"), "the content is readable");
    let [again, _] = handshake_relayed(&unchanged, &unchanged).1;
    assert_eq!(forth[..HELLO_BYTES], again[..HELLO_BYTES]);
    assert!(forth[HELLO_BYTES..] != again[HELLO_BYTES..], "two sessions have the same keys");
}

#[test]
fn every_changed_byte_of_a_handshake_is_detected() {
    for at in 0..CONNECTOR_BYTES {
        let flip = move |i: usize, byte: u8| Some(if i == at { byte ^ 0x10 } else { byte });
        let ((here, there), _) = handshake_relayed(&flip, &unchanged);
        assert!(here.is_err() && there.is_err(), "byte {at} of the connector: {here:?} {there:?}");
        assert_eq!(there.unwrap_err().kind, RefusalKind::Invalid, "byte {at}");
    }
    for at in 0..ACCEPTOR_BYTES {
        let flip = move |i: usize, byte: u8| Some(if i == at { byte ^ 0x10 } else { byte });
        let ((here, there), _) = handshake_relayed(&unchanged, &flip);
        assert_eq!(here.unwrap_err().kind, RefusalKind::Invalid, "byte {at} of the acceptor");
        // The last flight only reports to the connector what the acceptor decided.
        assert_eq!(there.is_err(), at < ACCEPTOR_BYTES - 16, "byte {at} of the acceptor");
    }
}

#[test]
fn a_truncated_handshake_is_refused() {
    for at in [0, 1, HELLO_BYTES - 1, HELLO_BYTES, HELLO_BYTES + 47, HELLO_BYTES + 48, CONNECTOR_BYTES - 1] {
        let cut = move |i: usize, byte: u8| (i < at).then_some(byte);
        let ((here, there), _) = handshake_relayed(&cut, &unchanged);
        assert_eq!(there.unwrap_err().kind, RefusalKind::Closed, "cut at {at}");
        assert_eq!(here.unwrap_err().kind, RefusalKind::Closed, "cut at {at}");
    }
}

#[test]
fn a_peer_of_the_older_unencrypted_version_is_refused() {
    let credentials = Credentials::Secret(secret(1));
    let (_, [said, _]) = handshake_relayed(&unchanged, &unchanged);
    let mut older = said[..HELLO_BYTES].to_vec();
    older[8] = 1;
    older.extend([0; 64]);
    let (mut a, b) = sockets();
    a.write_all(&older).unwrap();
    let refusal = accept_peer(b, &credentials, &claim(0, 1, 2), test_deadline()).unwrap_err();
    assert_eq!((refusal.kind, refusal.peer_claim), (RefusalKind::Invalid, None));
}

#[test]
fn a_replayed_handshake_is_rejected() {
    let credentials = Credentials::Secret(secret(1));
    let (both, [connector, acceptor]) = handshake_relayed(&unchanged, &unchanged);
    assert!(both.0.is_ok() && both.1.is_ok());
    let (mut a, b) = sockets();
    a.write_all(&connector).unwrap();
    // Message 1 of Noise has no contribution of the acceptor, so only flight 3 shows the replay.
    let refusal = accept_peer(b, &credentials, &claim(0, 1, 2), test_deadline()).unwrap_err();
    assert_eq!((refusal.kind, refusal.peer_claim), (RefusalKind::Invalid, Some(claim(1, 0, 3))));
    let (a, mut b) = sockets();
    b.write_all(&acceptor).unwrap();
    let refusal = connect_peer(a, &credentials, &claim(1, 0, 3), test_deadline()).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Invalid);
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
    let refusal = connect_peer(a, &credentials, &claim(1, 0, 2), test_deadline()).unwrap_err();
    assert_eq!((refusal.kind, refusal.to_diagnostic().code.id), (RefusalKind::Invalid, "T0756"));
    echo.join().unwrap();
}
